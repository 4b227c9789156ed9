"""Modules trained whole beside adapters, and what families call their table of tokens and their head."""

from __future__ import annotations

from typing import Any

import pytest
from ci_share import some_for_ci

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.families import FAMILIES
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind
from tunecast.model.resolve import resolve_run
from tunecast.model.run_work import trained_and_state
from tunecast.model.trained import trainable_params

VOCAB, HIDDEN = 8192, 512
BASE: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA = {"model_type": "llama", **BASE, "intermediate_size": 1536}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 1536},
    "llama tied": {"intermediate_size": 1536, "tie_word_embeddings": True},
    "gemma": {"intermediate_size": 1536, "head_dim": 64, "num_key_value_heads": 4},
    "gpt_neox": {"intermediate_size": 2048},
    "gpt_neox tied": {"intermediate_size": 2048, "tie_word_embeddings": True},
    "gpt2": {},
    "gpt2 untied": {"tie_word_embeddings": False},
    "gptj": {"rotary_dim": 32},
    "bloom": {},
    "bloom untied": {"tie_word_embeddings": False},
    "falcon": {},
    "falcon untied": {"tie_word_embeddings": False},
    "opt": {"ffn_dim": 2048, "word_embed_proj_dim": HIDDEN},
    "opt untied": {"ffn_dim": 2048, "word_embed_proj_dim": HIDDEN, "tie_word_embeddings": False},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "table": {"modules_to_save": 0},
    "head": {"modules_to_save": 1, "gradient_checkpointing": False},
    "both": {"modules_to_save": 2, "optim": "adamw_torch_fused"},
    "both in fp32": {"modules_to_save": 2, "modules_to_save_dtype": "fp32", "gradient_accumulation_steps": 2},
    "adapters on both": {"targets": 2},
}
CASES = [(name, options) for name in CONFIGS for options in ("both", "adapters on both")]
CASES += [("llama", "table"), ("llama tied", "head"), ("llama", "both in fp32"), ("gptj", "head"), ("gpt2", "table")]
CASES += [("llama tied", "both in fp32"), ("gemma", "both in fp32")]


def some(names: tuple[str, str], which: int) -> str:
    return ",".join(names if which == 2 else names[which : which + 1])


@pytest.mark.parametrize(("name", "chosen"), some_for_ci(CASES, 3))
def test_as_traced(name: str, chosen: str) -> None:
    """PEFT trains what the real model calls so: parameters, kernels of the head's width and the update, and memory."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    from tunecast.calibrate.trace.tracer import trace_step

    fields = {"model_type": name.split()[0], **BASE, **CONFIGS[name]}
    arch = architecture_from_config(fields, name)
    roots = (arch.embedding_module, arch.head_module)
    options = {"max_length": 512, "per_device_train_batch_size": 2, "lora_r": 8, **OPTIONS[chosen]}
    targets = arch.groups[0].layer.linears[0].name
    if "targets" in options:
        targets = f"{targets},{some(roots, options.pop('targets'))}"
    else:
        options["modules_to_save"] = some(roots, options["modules_to_save"])
    run = resolve_run(arch, {**options, "lora_target_modules": targets}).run
    trace = trace_step(arch, run)
    assert trainable_params(arch, run) == trace.trainable_params
    forecast = memory_timeline(arch, run)
    assert forecast.at_rest_bytes == trace.memory.at_rest_bytes
    assert forecast.allocated_bytes == pytest.approx(trace.memory.peak_bytes, rel=1e-3)
    for kind in (Kind.LOSS, Kind.OPTIMIZER, Kind.GEMM):
        found, expected = (
            [
                sum(getattr(op, what) for op in ops if op.kind is kind)
                for what in ("total_bytes", "total_flops", "count")
            ]
            for ops in (step_operations(arch, run), trace.stream)
        )
        assert found[1] == pytest.approx(expected[1], rel=1e-9), kind
        assert found == pytest.approx(expected, rel=1e-4), kind


@pytest.mark.parametrize("model_type", [name for name, family in FAMILIES.items() if family.in_transformers])
def test_names_are_the_real_models(model_type: str) -> None:
    for module in ("torch", "transformers"):
        pytest.importorskip(module)
    import torch
    import transformers

    from tunecast.calibrate.trace.seeing import language_model

    config = transformers.AutoConfig.for_model(model_type)
    config.num_hidden_layers = 1
    if model_type in (
        "ministral",
        "hunyuan_v1_dense",
    ):  # their classes need one
        config.head_dim = config.hidden_size // config.num_attention_heads
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with torch.device("meta"):
        model = language_model(config, tied=False)
    called = {id(module): name.rsplit(".", 1)[-1] for name, module in model.named_modules()}
    family = FAMILIES[model_type]
    real = called[id(model.get_input_embeddings())], called[id(model.get_output_embeddings())]
    assert (family.embedding_module, family.head_module) == real


def test_a_copy_is_as_wide_as_its_base_unless_told_otherwise() -> None:
    """PEFT raises adapters to fp32, not modules trained whole; LLaMA-Factory raises both, TRL stores both in bf16."""
    arch = architecture_from_config(LLAMA, "small")
    asked = {"modules_to_save": "lm_head", "lora_target_modules": "q_proj"}
    told = [
        ({}, "bf16"), ({"dtype": "fp32"}, "fp32"), ({"modules_to_save_dtype": "fp32"}, "fp32"),
        ({"stack": "llama-factory"}, "fp32"), ({"stack": "trl", "method": "qlora", "loss_type": "nll"}, "bf16"),
        ({"method": "qlora", "upcast_non_quantized": True}, "fp32"),
    ]  # fmt: skip
    for options, dtype in told:
        assert resolve_run(arch, {**asked, **options}).run.saved_dtype == dtype, options
    card = resolve_run(arch, asked, gpu_has_bf16=False)
    assert card.run.saved_dtype == "fp32"
    assert any("gradient scaler" in note for note in card.notes)


def test_bytes_by_hand() -> None:
    """A head in bf16 beside fp32 adapters: 2 bytes in the file, 4 of AdamW's two moments; 4 and 8 for an adapter."""
    arch = architecture_from_config(LLAMA, "small")
    plain, saved = (
        trained_and_state(arch, resolve_run(arch, {"lora_target_modules": "q_proj", **more}).run)
        for more in ({}, {"modules_to_save": "lm_head"})
    )
    assert saved[0] - plain[0] == 2 * VOCAB * HIDDEN
    assert saved[1] - plain[1] == pytest.approx(4 * VOCAB * HIDDEN, abs=512)


WIDE_TABLE = {"modules_to_save": "embed_in", "modules_to_save_dtype": "fp32"}
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("EleutherAI/pythia-1b", {"modules_to_save": "embed_tokens"}, UnknownNameError, "embed_in and lm_head"),
    ("openai-community/gpt2", {"modules_to_save": "embed_in"}, UnknownNameError, "wte and lm_head"),
    ("EleutherAI/pythia-1b", {"modules_to_save": "dense"}, NotSupportedError, "inside the layers"),
    ("EleutherAI/pythia-1b", {"modules_to_save_dtype": "fp32"}, InputError, "needs --modules-to-save"),
    ("EleutherAI/pythia-1b", {**WIDE_TABLE, "precision": "bf16"}, InputError, "multiplies no fp32 by bf16"),
    ("EleutherAI/pythia-1b", {**WIDE_TABLE, "num_gpus": 2, "sharding": "zero2"}, InputError, "casts all parameters"),
]


@pytest.mark.parametrize(("model", "options", "error", "words"), REFUSED)
def test_a_name_that_the_model_lacks_is_refused_with_what_it_has(
    model: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        resolve_run(load_architecture(model), options)


def test_unsloth_trains_targets_outside_the_layers_whole_and_keeps_their_originals_on_disk() -> None:
    """One bf16 copy of each takes the place of the original: 2 bytes a parameter for all bases, as without them."""
    arch = architecture_from_config(LLAMA, "small")
    asked = {"stack": "unsloth", "optim": "sgd", "lora_target_modules": "q_proj,v_proj"}
    plain = resolve_run(arch, asked).run
    told = resolve_run(arch, {**asked, "lora_target_modules": "q_proj,v_proj,lm_head,embed_tokens"})
    assert told.run.modules_to_save == ("embed_tokens", "lm_head")
    assert told.run.lora_target_modules == plain.lora_target_modules
    assert any("Unsloth puts no adapter on embed_tokens and lm_head" in note for note in told.notes)
    assert trainable_params(arch, told.run) - trainable_params(arch, plain) == 2 * VOCAB * HIDDEN
    rest = [memory_timeline(arch, run).at_rest_bytes for run in (plain, told.run)]
    assert rest[0] == rest[1]
    kept = resolve_run(arch, {**asked, "modules_to_save": "lm_head", "activation_offloading": False}).run
    assert memory_timeline(arch, kept).at_rest_bytes - rest[0] == 2 * VOCAB * HIDDEN
    with pytest.raises(InputError, match="no adapter is left"):
        resolve_run(arch, {**asked, "lora_target_modules": "lm_head"})


def test_transformers_4_called_the_head_of_gpt_neox_otherwise() -> None:
    run = resolve_run(load_architecture("EleutherAI/pythia-1b"), {"modules_to_save": "embed_out"}).run
    assert run.modules_to_save == ("lm_head",)
