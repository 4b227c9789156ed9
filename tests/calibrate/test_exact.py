"""The real code of every family: exact parameter counts, traced steps, and extension to full depth."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from ci_share import some_for_ci

from tunecast.calibrate.trace.refusals import reason_of
from tunecast.catalogs.configs import config_from_row, config_table
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.catalogs.models import ModelRow, find_model, load_models
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.families import FAMILIES
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run

for module in ("torch", "transformers", "peft", "bitsandbytes"):
    pytest.importorskip(module)

from tunecast.calibrate import exact  # noqa: E402
from tunecast.calibrate.trace.depth import find_pattern  # noqa: E402
from tunecast.calibrate.trace.direct import trace_depth  # noqa: E402
from tunecast.calibrate.trace.hf import kinds_of_layers  # noqa: E402

NOT_CAUSAL = ("BertForMaskedLM", "RobertaForMaskedLM", "ModernBertForMaskedLM")
REMOTE = ("QWenLMHeadModel", "GPTModel", "ChatGLMModel", "ChatGLMForConditionalGeneration", "MPTForCausalLM")
"""Classes whose code comes with the checkpoint."""
ROWS = [row for row in load_models().values() if row.architecture_class in set(config_table()) - set(REMOTE)]
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 2048,
}  # fmt: skip
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1,
    "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "head_dim": 16,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "gemma2": {"head_dim": 64},
    "phi": {"num_key_value_heads": 4},
    "falcon": {"num_key_value_heads": None},
    "gpt2": {"num_key_value_heads": None, "intermediate_size": None},
    "opt": {"ffn_dim": 512, "num_key_value_heads": None},
    "gpt_neox": {"num_key_value_heads": None},
    "gptj": {"num_key_value_heads": None, "rotary_dim": 16, "intermediate_size": None},
    "bloom": {"num_key_value_heads": None, "intermediate_size": None},
    "stablelm": {},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gpt_oss": {**EXPERTS, "head_dim": 64},
    "cohere": {},
    "cohere2": {},
    "starcoder2": {},
    "gemma3n_text": {
        "head_dim": 64,
        "intermediate_size": [512, 512, 256, 256],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 2048,
    },
    "qwen2_5_vl_text": {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
    "qwen3_5_text": {
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "num_hidden_layers": 4,
    },
    "gemma4_text": {
        "head_dim": 64,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 128,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 6,
        "sliding_window": 64,
    },
}


def small(model_type: str, **changes: Any) -> dict[str, Any]:
    fields = {**SMALL, **CONFIGS[model_type], **changes, "model_type": model_type}
    return {key: value for key, value in fields.items() if value is not None}


def run_of(architecture: Any, **options: Any) -> Run:
    return resolve_run(architecture, {"max_length": 128, **options}).run


def test_every_class_of_the_catalog_is_run_by_formula_or_named() -> None:
    classes = {row.architecture_class for row in load_models().values()}
    built = {name for family in FAMILIES.values() for name in family.classes}
    assert classes <= built | set(config_table()) | {*NOT_CAUSAL}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.hf_id)
def test_parameters_of_the_real_code_equal_the_catalog(row: ModelRow) -> None:
    architecture = exact.real_architecture(config_from_row(row), row.hf_id)
    assert architecture.total_params == row.total_params - (row.vision_params or 0)


@pytest.mark.parametrize(
    ("model_type", "method"), some_for_ci(zip(CONFIGS, itertools.cycle(["qlora", "lora", "full"]), strict=False), 3)
)
def test_a_step_of_the_real_code(model_type: str, method: str) -> None:
    architecture = exact.real_architecture(small(model_type), model_type)
    run = run_of(architecture, method=method)
    trace = exact.exact_trace(architecture, run)
    assert sum(trace.memory.parts.values()) == trace.memory.peak_bytes > trace.memory.at_rest_bytes
    trained = trace.trainable_params
    assert architecture.total_params == trace.total_params - (trained if run.has_adapters else 0)
    assert trained == (
        trace.total_params if not run.has_adapters else sum(s.shape[0] * s.shape[1] for s in trace.trained)
    )
    forward = sum(op.flops for op in trace.stream if op.kind is Kind.GEMM and op.phase.value == "forward")
    active = sum(linear.weight_params for group in architecture.groups for linear in group.layer.linears * group.count)
    assert forward >= 2 * 128 * active


PATTERNS: list[tuple[str, dict[str, Any], dict[str, Any], tuple[int, int]]] = [
    ("gpt_neox", {"num_hidden_layers": 8}, {}, (0, 1)),
    ("mixtral", {"num_hidden_layers": 8}, {"method": "qlora"}, (0, 1)),
    ("deepseek_v2", {"num_hidden_layers": 10}, {}, (1, 1)),
    ("gemma2", {"num_hidden_layers": 13, "sliding_window": 64}, {"gradient_checkpointing": False}, (0, 2)),
    ("qwen3_5_text", {"num_hidden_layers": 24}, {}, (0, 4)),
    ("gpt_neox", {"num_hidden_layers": 13}, {"checkpoint_every": 2, "gradient_accumulation_steps": 2}, (0, 2)),
]


@pytest.mark.parametrize(("model_type", "changes", "options", "pattern"), some_for_ci(PATTERNS, 3))
def test_a_deep_model_extends_shallow_traces_to_the_byte(
    model_type: str, changes: dict[str, Any], options: dict[str, Any], pattern: tuple[int, int]
) -> None:
    architecture = exact.real_architecture(small(model_type, **changes), model_type)
    run = run_of(architecture, **options)
    found = find_pattern(kinds_of_layers(architecture, run))
    assert found is not None
    assert (found.start, found.period) == pattern
    whole, extended = trace_depth(architecture, run, architecture.num_layers), exact.exact_trace(architecture, run)
    assert extended.memory.moments == whole.memory.moments
    assert len(extended.stream) == len(whole.stream)
    assert sum(op.flops for op in extended.stream) == sum(op.flops for op in whole.stream)
    assert extended.trained == whole.trained


def test_a_known_family_gives_the_same_through_its_config() -> None:
    config = small_llama()
    by_blocks, by_code = architecture_from_config(config, "x"), exact.real_architecture(config, "x")
    assert by_code.total_params == by_blocks.total_params
    run = run_of(by_blocks)
    assert exact.exact_trace(config, run).memory == exact.exact_trace(by_blocks, run).memory


def small_llama() -> dict[str, Any]:
    return {**SMALL, "model_type": "llama"}


def test_formulas_refuse_what_only_the_real_code_knows() -> None:
    architecture = exact.real_architecture(small("gpt_neox"), "x")
    with pytest.raises(NotSupportedError, match=r"gpt_neox.*tunecast.calibrate.exact"):
        step_operations(architecture, run_of(architecture))


def test_adapters_on_a_router_that_returns_two_tensors_are_refused_as_they_fail() -> None:
    config = {**SMALL, "model_type": "llama4_text", "head_dim": 64, "intermediate_size_mlp": 512, **EXPERTS}
    architecture = exact.real_architecture({**config, "num_experts_per_tok": 1}, "x")
    with pytest.raises(NotSupportedError, match=r"Llama4Router.*--lora-target-modules q_proj"):
        exact.exact_trace(architecture, run_of(architecture))
    trace = exact.exact_trace(architecture, run_of(architecture, lora_target_modules=("q_proj", "v_proj"), lora_r=4))
    assert trace.trainable_params == 2 * 4 * (256 + 256 + 256 + 128)  # two layers; four heads of 64, two for values


def test_a_seeing_model_is_traced_as_its_text_decoder() -> None:
    """The whole of Gemma 3n needs a package for its images, and the decoder does not."""
    text = small("gemma3n_text")
    whole = {"model_type": "gemma3n", "text_config": text, "vision_config": {}, "audio_config": {}}
    assert exact.real_architecture(whole, "x").groups == exact.real_architecture(text, "x").groups


def test_what_the_real_code_refuses_is_one_sentence() -> None:
    """PEFT on a map of Mamba's; layers that are passed over without images."""
    hybrid = {"model_type": "falcon_h1", "mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64, "head_dim": 64}
    architecture = exact.real_architecture({**SMALL, **hybrid}, "falcon")
    with pytest.raises(NotSupportedError, match=r"real code of falcon does not train so: .*'out_proj' is incompatible"):
        exact.exact_trace(architecture, run_of(architecture))
    text = {**SMALL, "model_type": "mllama_text_model", "cross_attention_layers": [1], "pad_token_id": 1}
    vision = {"hidden_size": 64, "num_hidden_layers": 1, "num_global_layers": 1, "intermediate_layers_indices": [0]}
    seeing = {"model_type": "mllama", "text_config": text, "vision_config": {**vision, "attention_heads": 2}}
    architecture = exact.real_architecture(seeing, "seeing")
    with pytest.raises(NotSupportedError, match="attend to images"):
        exact.exact_trace(architecture, run_of(architecture))


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated card is calibrated without ``--exact``'s own check of what is installed."""

    def without(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'peft'", name="peft")

    monkeypatch.setattr("tunecast.calibrate.trace.depth.trace_depth", without)
    architecture = exact.real_architecture(small("gemma3n_text"), "x")
    with pytest.raises(InputError, match=r'peft is not installed; type: pip install "tunecast\[calibrate\]"'):
        exact.exact_trace(architecture, run_of(architecture))


def test_notes_name_linear_attention_that_is_slower_than_with_its_own_kernels() -> None:
    hybrid = exact.real_architecture(small("qwen3_5_text"), "x")
    assert "fla package" in " ".join(exact.exact_notes(hybrid, run_of(hybrid)))
    assert "experts" not in " ".join(exact.exact_notes(hybrid, run_of(hybrid, method="qlora")))  # its convolutions


def test_notes_name_eager_attention_and_experts_that_stay_wide() -> None:
    mixtral = exact.real_architecture(small("mixtral"), "x")
    assert "experts stay in bf16" in " ".join(exact.exact_notes(mixtral, run_of(mixtral, method="qlora")))
    assert exact.exact_notes(mixtral, run_of(mixtral)) == ()
    gemma = exact.real_architecture(small("gemma2"), "x")
    assert "eager" in " ".join(exact.exact_notes(gemma, run_of(gemma)))


def test_latent_attention_without_formulas_is_traced() -> None:
    """Eager: the scores of all pairs go through a softmax of their own, which sdpa's kernel keeps to itself."""
    latent = exact.real_architecture(small("deepseek_v2"), "x")
    traced = exact.exact_trace(latent, run_of(latent, attn_implementation="eager"))
    assert any("softmax" in operation.name for operation in traced.stream)


def test_what_is_no_causal_model_is_one_sentence() -> None:
    with pytest.raises(NotSupportedError, match="BertForMaskedLM"):
        config_from_row(find_model("google-bert/bert-base-uncased"))
    with pytest.raises(NotSupportedError, match=r"here\.json"):
        exact.real_architecture({"model_type": "t5"}, "here.json")
    with pytest.raises(NotSupportedError, match=r"no causal language model from here\.json: .*NoneType"):
        exact.real_architecture({**SMALL, "model_type": "hunyuan_v1_dense", "head_dim": None}, "here.json")


def test_autocast_on_cuda_runs_layer_norms_in_fp32() -> None:
    architecture = exact.real_architecture(small("gpt_neox"), "x")
    run = run_of(architecture)
    assert not run.reentrant
    streams = {p: exact.exact_trace(architecture, run, platform=p).stream for p in ("cuda", "cpu")}
    norms = {p: {op.dtype for op in stream if "native_layer_norm" in op.name} for p, stream in streams.items()}
    assert norms == {"cuda": {"fp32"}, "cpu": {"bf16"}}
    pure = exact.exact_trace(architecture, replace(run, precision="bf16", adapter_dtype="bf16")).stream
    assert {op.dtype for op in pure if op.name == "aten.native_layer_norm"} == {"bf16"}


@pytest.mark.parametrize("name", ["Qwen/Qwen-7B", "llm-foundry/mpt-1b", "THUDM/chatglm3-6b"])
def test_code_that_comes_with_a_checkpoint_is_not_run(name: str) -> None:
    architecture = load_architecture(name)
    with pytest.raises(NotSupportedError, match="transformers does not have it"):
        exact.exact_trace(architecture, run_of(architecture))


def test_layers_of_two_blocks_each_are_refused() -> None:
    """LongCat's config counts blocks, of which each of its layers has two."""
    with pytest.raises(NotSupportedError, match="longcat_flash has no list of its 4 num_hidden_layers"):
        exact.real_architecture({**SMALL, "model_type": "longcat_flash", "num_layers": 2, "num_hidden_layers": 4}, "x")


def test_an_error_that_prints_a_module_is_told_by_its_class() -> None:
    """PEFT prints the whole of a module that it has no adapters for; ours is a sentence."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.ReLU()))
    error = ValueError(f"Target module {module} is not supported. Currently, only\nsome are.")
    assert reason_of(error) == "Target module Sequential is not supported. Currently, only"
    assert reason_of(ValueError()) == "ValueError"
