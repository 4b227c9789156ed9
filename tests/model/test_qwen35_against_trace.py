"""Qwen3.5 against the traced stream of its real code: kernels, FLOPs, memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from ci_share import some_for_ci

import tunecast
from tunecast.catalogs.errors import InputError, NotSupportedError, UnbuiltFamilyError
from tunecast.catalogs.models import load_models
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.flops import attention_flops_per_sample
from tunecast.model.hooks import visits_of
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.resolve import resolve_run
from tunecast.model.short_stack import short_stack
from tunecast.model.step import write_step

THOROUGH = pytest.mark.thorough
BASE: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8000,
    "max_position_embeddings": 8192, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64,
}  # fmt: skip
PER_KEY = {"linear_num_value_heads": 4}
"""As many heads of values as of keys."""
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"max_length": 512},
    "lora, a chunk filled up, two samples": {"max_length": 100, "per_device_train_batch_size": 2},
    "lora, less than a chunk": {"max_length": 40},
    "lora, one whole chunk, two samples": {"max_length": 64, "per_device_train_batch_size": 2},
    "lora on attention": {"lora_target_modules": "q_proj,v_proj", "max_length": 320},
    "lora on linear attention": {"lora_target_modules": "in_proj_qkv,in_proj_b,out_proj", "max_length": 256},
    "lora, nothing checkpointed": {"max_length": 700, "gradient_checkpointing": False},
    "lora with padding": {"padding_mask": True, "max_length": 200, "per_device_train_batch_size": 2},
    "full with padding, nothing checkpointed": {
        "method": "full", "padding_mask": True, "max_length": 130, "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
    },
    "lora, eager": {"attn_implementation": "eager", "max_length": 256},
    "lora, fp16": {"dtype": "fp16", "precision": "fp16-autocast", "max_length": 256},
    "lora, micro-batches": {"max_length": 128, "gradient_accumulation_steps": 3},
    "lora, chunks of the loss": {"max_length": 200, "loss_type": "chunked_nll"},
    "dora": {"max_length": 200, "use_dora": True},
    "qlora": {"method": "qlora", "max_length": 300},
    "qlora, two samples": {"method": "qlora", "max_length": 130, "per_device_train_batch_size": 2},
    "qlora, the rest in fp32": {
        "method": "qlora", "max_length": 96, "upcast_non_quantized": True, "per_device_train_batch_size": 2,
    },
    "8 bits": {"method": "qlora", "quant_method": "bnb-8bit", "max_length": 200, "per_device_train_batch_size": 2},
    "full": {"method": "full", "max_length": 512},
    "full, eager, two samples, nothing checkpointed": {
        "method": "full", "gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_length": 200,
        "attn_implementation": "eager",
    },
    "full, fp32": {"method": "full", "max_length": 96, "precision": "fp32", "dtype": "fp32"},
}  # fmt: skip
IN_FP32 = {"dtype": "fp32", "precision": "fp32"}


def small(**changes: Any) -> Architecture:
    return architecture_from_config({**BASE, **changes}, "qwen-3.5")


IN_CI = (
    "lora with padding", "qlora, two samples", "full, fp32",
    "full, eager, two samples, nothing checkpointed",
)  # fmt: skip


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.thorough) for name in METHODS]
)
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], method: str) -> None:
    same_as_traced(small(), **METHODS[method])


@pytest.mark.parametrize(
    ("length", "samples"), [(40, 2), pytest.param(128, 1, marks=THOROUGH), pytest.param(200, 2, marks=THOROUGH)]
)
def test_heads_of_keys_for_each_of_values(same_as_traced: Callable[..., None], length: int, samples: int) -> None:
    same_as_traced(small(**PER_KEY), max_length=length, per_device_train_batch_size=samples)


@pytest.mark.parametrize(
    ("length", "samples"), [(64, 2), *(pytest.param(*case, marks=THOROUGH) for case in ((64, 1), (128, 1), (128, 2)))]
)
@pytest.mark.parametrize("heads", [{}, PER_KEY], ids=["repeated", "one for one"])
def test_chunks_in_fp32_without_padding_are_copied_by_products(
    same_as_traced: Callable[..., None], heads: dict[str, int], length: int, samples: int
) -> None:
    """Neither a cast nor padding lays them out by head."""
    asked = {**IN_FP32, "max_length": length, "per_device_train_batch_size": samples}
    same_as_traced(small(**heads), **asked)
    same_as_traced(small(**heads), **asked, method="full", gradient_checkpointing=False)


VARIANTS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "one key-value head per query head, wide keys": {"num_key_value_heads": 8, "linear_key_head_dim": 64},
    "other angles": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
                                         "mrope_section": [6, 5, 5]}},
    "heads of 128": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "a wider convolution": {"linear_conv_kernel_dim": 6},
    "layers in another order": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    },
    "linear attention alone": {"layer_types": ["linear_attention"] * 4},
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(given, id=told, marks=[] if place % 3 == 0 else THOROUGH)
        for place, (told, given) in enumerate(VARIANTS.items())
    ],
)
def test_variants_are_the_traced_ones(same_as_traced: Callable[..., None], changes: dict[str, Any]) -> None:
    same_as_traced(small(**changes), max_length=200)


@pytest.mark.parametrize(
    ("chunks", "checkpointing"),
    [pytest.param(chunks, chunks % 2 == 1, marks=[] if chunks in (1, 5, 6) else THOROUGH) for chunks in range(1, 8)],
)
def test_any_number_of_chunks(same_as_traced: Callable[..., None], chunks: int, checkpointing: bool) -> None:
    """Of more than four, one turn is written for all in the middle."""
    deep = small(num_hidden_layers=2, layer_types=["linear_attention"] * 2)
    same_as_traced(
        deep, max_length=64 * chunks, gradient_checkpointing=checkpointing, lora_target_modules="in_proj_qkv"
    )


@pytest.mark.parametrize("options", some_for_ci([{"gradient_checkpointing": False}, {"checkpoint_every": 2}]))
def test_a_deep_model_is_the_traced_one(same_as_traced: Callable[..., None], options: dict[str, Any]) -> None:
    """Three layers of linear attention for each of attention: written as a few layers of each."""
    same_as_traced(small(num_hidden_layers=24), max_length=384, **options)


@THOROUGH
def test_first_layers_without_adapters_pass_no_gradients(same_as_traced: Callable[..., None]) -> None:
    options = {"gradient_checkpointing": False, "lora_target_modules": "q_proj,v_proj", "max_length": 128}
    same_as_traced(small(num_hidden_layers=24), **options)
    same_as_traced(small(num_hidden_layers=9, **PER_KEY), gradient_checkpointing=False, max_length=128,
                   per_device_train_batch_size=2)  # fmt: skip


EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
FULL = "full, eager, two samples, nothing checkpointed"


@pytest.mark.parametrize(
    "method",
    ["lora", *(pytest.param(name, marks=THOROUGH) for name in ("lora on attention", "lora, fp16", "dora")), FULL],
)
def test_the_step_with_experts_is_the_traced_step(same_as_traced: Callable[..., None], method: str) -> None:
    """All linear maps are adapted, those of the shared expert and its gate among them; PEFT leaves the others alone."""
    same_as_traced(small(**EXPERTS), **METHODS[method])


@THOROUGH
def test_a_deep_model_with_experts_is_the_traced_one(same_as_traced: Callable[..., None]) -> None:
    same_as_traced(
        small(**EXPERTS, num_hidden_layers=24), max_length=128, lora_target_modules="shared_expert_gate,q_proj"
    )


def test_experts_have_sizes_of_their_own() -> None:
    silent = {key: value for key, value in EXPERTS.items() if key == "model_type"}
    mlp = small(**silent).groups[0].layer.mlp
    assert mlp.experts is not None
    assert (mlp.experts.count, mlp.experts.per_token, mlp.experts.intermediate_size) == (256, 8, 512)
    assert [linear.out_features for linear in mlp.linears] == [512, 512, 512, 1]
    targets = resolve_run(small(**EXPERTS), {"lora_target_modules": "all-linear"}).run.lora_target_modules
    assert not [name for name in targets if "experts" in name]
    with pytest.raises(NotSupportedError, match=r"Adapters on the experts of qwen-3\.5"):
        resolve_run(small(**EXPERTS), {"lora_target_modules": "gate_up_proj"})


def test_a_long_row_takes_no_more_events_than_a_short_one() -> None:
    deep = small(max_position_embeddings=1 << 18)
    events = []
    for length in (64 * 8, 64 * 2048):
        run = resolve_run(deep, {"max_length": length}).run
        tape = write_step(short_stack(deep, run).architecture, run, "cuda")
        events.append(len(tape.events))
    assert events[0] == events[1]


def test_traffic_grows_with_the_square_of_the_chunks() -> None:
    """Every turn of the loop's backward makes gradients of all chunks."""
    run = [resolve_run(small(), {"max_length": 64 * n}).run for n in (32, 64, 128)]
    moved = [sum(op.total_bytes for op in step_operations(small(), each)) for each in run]
    assert moved[2] - 2 * moved[1] > 1.9 * (moved[1] - 2 * moved[0]) > 0
    memory = [memory_timeline(small(), each) for each in run]
    more = [m.moments["backward"] - m.at_rest_bytes for m in memory]
    assert more[1] == pytest.approx(2 * more[0], rel=0.02)


SIZES = ["0.8B", "2B", "4B", "9B", "27B", "35B-A3B"]


@pytest.mark.parametrize("size", SIZES)
def test_parameters_equal_the_catalog(size: str) -> None:
    """Counted from the real classes on the meta device, vision tower included."""
    row = load_models()[f"Qwen/Qwen3.5-{size}"]
    architecture = load_architecture(row.hf_id)
    assert architecture.total_params == row.total_params - (row.vision_params or 0)
    assert architecture.active_params == row.active_params - (row.vision_params or 0)
    assert [group.count for group in architecture.groups] == [3, 1] * (row.num_layers // 4)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_equal_the_real_classes(size: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tunecast.catalogs.configs import config_from_row

    config = config_from_row(load_models()[f"Qwen/Qwen3.5-{size}"])
    with torch.device("meta"):
        fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        kind = "Qwen3_5Moe" if "num_experts" in config else "Qwen3_5"
        real, of_config = (getattr(transformers, f"{kind}{part}") for part in ("ForCausalLM", "TextConfig"))
        model = real(of_config(**fields))
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    architecture = architecture_from_config(config, "qwen")
    hidden = architecture.hidden_size
    assert layers == [g.layer.params(hidden) for g in architecture.groups for _ in range(g.count)]
    assert sum(p.numel() for p in model.parameters()) == architecture.total_params


def test_the_text_of_a_model_that_sees_is_the_same() -> None:
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": BASE}
    assert architecture_from_config(json.loads(json.dumps(whole)), "qwen-3.5").groups == small().groups


def test_layers_of_a_silent_config() -> None:
    assert [group.count for group in small(num_hidden_layers=10).groups] == [3, 1, 3, 1, 2]
    every_second = small(full_attention_interval=2).groups
    assert [group.layer.attention.kind for group in every_second] == ["delta", "gated"] * 2


def test_required_work_of_linear_attention_grows_with_the_length_alone() -> None:
    linear = small().groups[0].layer.attention
    once, twice = (attention_flops_per_sample(linear, length) for length in (1024, 2048))
    assert twice == 2 * once
    assert once == 3 * 1024 * 8 * 3 * 2 * 32 * 64  # passes, tokens, heads, products with a state of 32 x 64


@pytest.mark.parametrize("changes", [{}, EXPERTS])
def test_a_record_keeps_its_shape(changes: dict[str, Any]) -> None:
    """Steps in records say what was run as JSON."""
    from tunecast.calibrate.trace.spec import architecture_from_dict, architecture_to_dict

    architecture = small(**changes)
    assert architecture_from_dict(json.loads(json.dumps(architecture_to_dict(architecture)))) == architecture


UNBUILT: dict[str, tuple[dict[str, Any], str]] = {
    "tensor parallelism": ({"num_gpus": 2, "tp": 2}, "Tensor parallelism is built for plain heads"),
    "pipelines": ({"num_gpus": 2, "pp": 2}, "--pp 2 with the linear attention of qwen-3.5"),
    "split sequences": ({"num_gpus": 2, "cp": 2}, "--cp 2 with the linear attention"),
    "compilation": ({"torch_compile": True}, "--torch-compile with the linear attention"),
    "attention alone again": (
        {"recompute_attention": True, "gradient_checkpointing": False}, "--recompute-attention with the linear",
    ),
    "kept operations": ({"checkpoint_keeps_ops": True}, "--checkpoint-keeps-ops with the linear attention"),
    "8-bit products": ({"fp8": "te"}, "--fp8 te with the linear attention"),
    "gptq": ({"method": "qlora", "quant_method": "gptq-4bit"}, "--quant-method gptq-4bit with the linear attention"),
    "adafactor": ({"method": "full", "optim": "adafactor"}, "--optim adafactor with the linear attention"),
    "fused norms": ({"fused_kernels": "rms_norm"}, "qwen-3.5 has linear attention, for which that is not built"),
    "unsloth": ({"stack": "unsloth"}, "--stack unsloth with the linear attention of qwen-3.5"),
    "liger": ({"stack": "liger"}, "--stack liger with the linear attention of qwen-3.5"),
    "torchtune": ({"stack": "torchtune"}, "--stack torchtune with the linear attention of qwen-3.5"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "told"), UNBUILT.values(), ids=UNBUILT)
def test_what_is_not_built_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(NotSupportedError, match=told):
        resolve_run(small(), options)


def test_documents_are_kept_apart_by_a_package_alone() -> None:
    """As ``use_kernel_func_from_hub_with_fallback`` raises."""
    options = {"attention_length": 64, "attn_implementation": "flash_attention_2", "max_length": 256}
    with pytest.raises(InputError, match=r"with flash-linear-attention \(fla\) only"):
        resolve_run(small(), options)


def test_a_note_says_whose_code_is_forecast() -> None:
    notes = resolve_run(small(), {}).notes
    assert any("transformers' PyTorch code, a loop over chunks of 64 tokens" in note for note in notes)


def test_a_convolution_takes_no_adapter() -> None:
    assert "conv1d" not in resolve_run(small(), {"lora_target_modules": "all-linear"}).run.lora_target_modules
    with pytest.raises(InputError, match="'conv1d'"):
        resolve_run(small(), {"lora_target_modules": "conv1d"})


def test_it_shards_and_is_searched() -> None:
    found = tunecast.recommend(
        "Qwen/Qwen3.5-27B", gpu=["h200-sxm-141gb", "h100-sxm5-80gb"], tokens="1M", max_length=512, max_gpus=2
    )
    assert found.cheapest is not None
    (sharded,) = tunecast.estimate("Qwen/Qwen3.5-27B", gpu="h100-sxm5-80gb", num_gpus=2, sharding="fsdp",
                                   max_length=512)  # fmt: skip
    (alone,) = tunecast.estimate("Qwen/Qwen3.5-27B", gpu="h100-sxm5-80gb", max_length=512)
    assert sharded.memory.allocated_bytes.value < 0.8 * alone.memory.allocated_bytes.value


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layers of other kinds": ({"layer_types": ["sliding_attention"] * 4}, "list of linear_attention and full_att"),
    "layers as a word": ({"layer_types": "full_attention"}, "list of linear_attention and full_attention"),
    "too few layers": ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
    "value heads that do not divide": ({"linear_num_value_heads": 6}, "linear_num_key_heads do not divide"),
    "no heads": ({"linear_num_key_heads": 0}, "linear_num_key_heads=0, but it must be a positive whole number"),
    "angles as a word": ({"rope_parameters": {"mrope_section": "11"}}, "it must be three whole numbers"),
    "two angles": ({"rope_parameters": {"mrope_section": [11, 11]}}, "it must be three whole numbers"),
}


@pytest.mark.parametrize(("changes", "told"), BAD.values(), ids=BAD)
def test_a_wrong_config_is_one_sentence(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        small(**changes)


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"attention_dropout": 0.1}])
def test_switches_without_formulas_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnbuiltFamilyError, match=f"qwen-3.5 has {next(iter(changes))}="):
        small(**changes)


def test_products_of_chunks_enter_no_module() -> None:
    """ZeRO-3 runs Python at every module with weights: as many at any length, and none for products of heads."""
    import numpy as np

    def visits(length: int, **options: Any) -> float:
        run = resolve_run(small(), {"max_length": length, "method": "full", **options}).run
        operations = step_operations(small(), run)
        return float(visits_of(operations, np.array([[each.count] for each in operations])).sum())

    assert visits(128) == visits(1024) == visits(128, attn_implementation="eager")
