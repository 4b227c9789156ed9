"""Gemma 4 E2B and E4B, whose layers have inputs of their own and share keys and values, against their traced real code.

Sizes are small; two windows in turn and two that make keys and values for four others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ci_share import some_for_ci

import tunecast
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.catalogs.models import load_models
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.flops import model_flops_per_step
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Phase
from tunecast.model.resolve import resolve_run
from tunecast.model.short_stack import short_stack
from tunecast.model.trained import trainable_params

WINDOW, WHOLE = "sliding_attention", "full_attention"
BASE: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "global_head_dim": 512, "vocab_size": 8000,
    "vocab_size_per_layer_input": 6000, "max_position_embeddings": 8192, "sliding_window": 128,
    "layer_types": [WINDOW, WHOLE] * 3, "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}  # fmt: skip
NAMED = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora, nothing checkpointed": {"gradient_checkpointing": False},
    "lora on attention": {"lora_target_modules": "q_proj,v_proj"},
    "lora on attention, nothing checkpointed": {
        "lora_target_modules": "q_proj,v_proj", "gradient_checkpointing": False,
    },
    "lora on the map outside of layers": {
        "lora_target_modules": "per_layer_model_projection", "gradient_checkpointing": False,
    },
    "lora with bias and dropout": {"lora_bias": True, "lora_dropout": 0.1},
    "lora on tables and head": {"lora_target_modules": "all-linear,embed_tokens,lm_head"},
    "the table of tokens trained whole": {"modules_to_save": "embed_tokens", "gradient_accumulation_steps": 2},
    "lora, fp32 base": {"dtype": "fp32"},
    "lora, fp16": {"dtype": "fp16", "precision": "fp16-autocast"},
    "lora, eager, two samples": {"attn_implementation": "eager", "per_device_train_batch_size": 2},
    "lora with padding": {"padding_mask": True, "per_device_train_batch_size": 2},
    "lora, shorter than the window": {"max_length": 64, "per_device_train_batch_size": 2},
    "lora, the first layers checkpointed": {"checkpoint_first": 3},
    "lora, checkpoints in host memory": {"activation_offloading": True},
    "trl": {"stack": "trl", "method": "qlora"},
    "qlora": {"method": "qlora"},
    "qlora, all else raised to fp32": {"method": "qlora", "upcast_non_quantized": True},
    "qlora, nothing checkpointed": {"method": "qlora", "gradient_checkpointing": False},
    "qlora on attention": {"method": "qlora", "lora_target_modules": "q_proj,v_proj", "double_quant": False},
    "full": {"method": "full", "gradient_accumulation_steps": 3},
    "full, nothing checkpointed": {"method": "full", "gradient_checkpointing": False},
    "full, 8-bit moments": {"method": "full", "optim": "adamw_bnb_8bit"},
    "full, fp32": {"method": "full", "precision": "fp32", "dtype": "fp32"},
    "full, eager, two samples": {
        "method": "full", "attn_implementation": "eager", "gradient_checkpointing": False,
        "per_device_train_batch_size": 2,
    },
}  # fmt: skip


def small(**changes: Any) -> Architecture:
    return architecture_from_config({**BASE, **changes}, "gemma-4")


@pytest.mark.parametrize("method", some_for_ci(METHODS, 5))
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], method: str) -> None:
    same_as_traced(small(), **{"max_length": 256, **METHODS[method]})


ONE_HEAD: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"method": "full"},
    "lora, fp32 base, two samples": {"dtype": "fp32", "per_device_train_batch_size": 2},
    "lora, eager, two samples": {"attn_implementation": "eager", "per_device_train_batch_size": 2},
}


@pytest.mark.parametrize("method", some_for_ci(ONE_HEAD))
def test_one_head_of_keys_is_the_traced_one(same_as_traced: Callable[..., None], method: str) -> None:
    """E2B has one: it is seen once for every query head in the same memory, until a cast or a copy sees it apart."""
    same_as_traced(small(num_key_value_heads=1), **{"max_length": 256, **ONE_HEAD[method]})


VARIANTS: dict[str, dict[str, Any]] = {
    "keys of their own": {"num_kv_shared_layers": 0},
    "the last layer alone reuses keys": {"num_kv_shared_layers": 1},
    "blocks of one width": {"use_double_wide_mlp": False},
    "narrow heads": {"global_head_dim": 64},
    "as many heads of keys": {"num_key_value_heads": 8},
    "values that are the keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
    "untied, scores not capped": {"tie_word_embeddings": False, "final_logit_softcapping": None},
    "experts": {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 256},
}


@pytest.mark.parametrize("changes", some_for_ci(VARIANTS.values(), 3), ids=VARIANTS)
def test_variants_are_the_traced_ones(same_as_traced: Callable[..., None], changes: dict[str, Any]) -> None:
    same_as_traced(small(**changes), max_length=256)


DEEP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "four windows to one without": ({"num_hidden_layers": 30, "layer_types": ([WINDOW] * 4 + [WHOLE]) * 6,
                                     "num_kv_shared_layers": 20}, {}),
    "in turn, the last with a window outside of the repetition": (
        {"num_hidden_layers": 16, "layer_types": [WINDOW, WHOLE] * 8, "num_kv_shared_layers": 11},
        {"method": "full", "gradient_checkpointing": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "options"), some_for_ci(DEEP.values(), first=1), ids=DEEP)
def test_a_deep_model_is_the_traced_one(
    same_as_traced: Callable[..., None], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    """Few of its layers are written: inputs stay as wide as all layers, and gradients of keys and values meet once."""
    deep = small(**changes)
    stack = short_stack(deep, resolve_run(deep, options).run)
    assert stack.architecture.num_layers < deep.num_layers
    assert stack.times > 1
    same_as_traced(deep, max_length=256, **options)


def test_reentrant_checkpoints_are_the_traced_ones() -> None:
    """Their recomputation counts as backward in the trace. Keys and values that they make have no graph, which is
    told."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    from tunecast.calibrate.trace.tracer import trace_step

    resolved = resolve_run(small(), {"reentrant": True, "max_length": 256})
    assert any("share without a graph" in note for note in resolved.notes)
    trace = trace_step(small(), resolved.run)
    counted = []
    for operations in (step_operations(small(), resolved.run), trace.stream):
        found: Counter[tuple[Phase, str]] = Counter()
        for op in operations:
            phase = Phase.BACKWARD if op.phase is Phase.RECOMPUTE else op.phase
            found[phase, f"{op.kind.value} launches"] += op.total_launches
            found[phase, f"{op.kind.value} bytes"] += op.total_bytes
            found[phase, f"{op.kind.value} flops"] += op.total_flops
        counted.append(dict(found))
    assert counted[0] == pytest.approx(counted[1], rel=1e-4)
    forecast = memory_timeline(small(), resolved.run)
    assert forecast.at_rest_bytes == trace.memory.at_rest_bytes
    assert forecast.moments == pytest.approx(trace.memory.moments, rel=1e-3)


PUBLISHED = {
    "google/gemma-4-E2B": (4_628_569_344, 205, 24_158_208, 5_123_178_051),
    "google/gemma-4-E4B": (7_463_013_376, 258, 34_881_536, 7_996_156_490),
}
"""Quoted in public repositories, of the -it forms: parameters of the text part (of E4B: counted on the meta device),
maps and parameters of adapters of rank 16 on attention and feed-forward, and numbers in the hub's files."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameters_are_those_that_others_counted(model: str) -> None:
    row, (text, maps, adapters, stored) = load_models()[model], PUBLISHED[model]
    architecture = load_architecture(f"{model}-it")
    assert architecture.total_params == text == row.total_params - (row.vision_params or 0)
    run = resolve_run(architecture, {"lora_r": 16, "lora_target_modules": NAMED}).run
    targets = run.lora_target_modules
    assert maps == sum(g.count * sum(each.name in targets for each in g.layer.linears) for g in architecture.groups)
    assert trainable_params(architecture, run) == adapters
    scales = architecture.num_layers  # a number for each layer's output
    assert row.total_params + unused_params(architecture) + scales == stored


def unused_params(architecture: Architecture) -> int:
    """Maps and norms of keys and values that files hold for the layers that reuse others'."""
    makers = {
        g.layer.attention.window: g.layer.attention for g in architecture.groups if g.layer.attention.keys == "stored"
    }
    return sum(
        g.count * (sum(each.params for each in maker.linears[1:-1]) + maker.head_dim)
        for g in architecture.groups
        if g.layer.attention.reuses_keys
        for maker in (makers[g.layer.attention.window],)
    )


def test_required_flops_are_those_of_every_map_that_tokens_go_through() -> None:
    """Full fine-tuning: six for each weight that multiplies, the head as a table once more, and attention."""
    arch = small()
    run = resolve_run(arch, {"method": "full", "max_length": 64}).run
    weights = sum(g.count * sum(each.weight_params for each in g.layer.linears) for g in arch.groups)
    weights += 512 * 6 * 64 + arch.embedding_params
    heads = sum(g.count * g.layer.attention.num_heads * g.layer.attention.head_dim for g in arch.groups)
    assert model_flops_per_step(arch, run) == pytest.approx(64 * 6 * weights + 3 * 4 * heads * 64**2 / 2)


UNBUILT: dict[str, tuple[dict[str, Any], str]] = {
    "stack": ({"stack": "unsloth"}, "--stack unsloth with the inputs that layers have of their own and the shared"),
    "sharding": ({"num_gpus": 2, "sharding": "fsdp"}, "--sharding fsdp with .* is not built; use one GPU, or --sh"),
    "zero": ({"num_gpus": 2, "sharding": "zero2"}, "--sharding zero2 with"),
    "pipeline": ({"num_gpus": 2, "pp": 2}, "--pp 2 with"),
    "fused kernels": ({"fused_kernels": "rms_norm"}, "--fused-kernels rms_norm .* not built for the inputs"),
    "compiled": ({"torch_compile": True}, "--torch-compile with"),
    "8 bits": ({"method": "qlora", "quant_method": "bnb-8bit"}, "--quant-method bnb-8bit with"),
    "adafactor": ({"method": "full", "optim": "adafactor"}, "--optim adafactor with"),
    "some checkpoints": ({"checkpoint_every": 2}, "--checkpoint-every 2 with"),
    "offloaded reentrant ones": ({"reentrant": True, "activation_offloading": True}, "--reentrant --activation-offl"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "told"), UNBUILT.values(), ids=UNBUILT)
def test_what_no_trace_proves_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(NotSupportedError, match=told):
        resolve_run(small(), {"max_length": 64, **options})


@pytest.mark.parametrize("stack", ["trl", "axolotl", "llama-factory", "ms-swift"])
def test_kernels_that_only_a_stack_brings_are_left_out(stack: str) -> None:
    assert resolve_run(small(), {"max_length": 64, "stack": stack}).run.fused_kernels == ()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "all layers reuse": ({"num_kv_shared_layers": 6}, "of each kind of layer_types one before them"),
    "a kind that nobody makes": ({"num_kv_shared_layers": 5}, "of each kind of layer_types one before them"),
    "without inputs": ({"hidden_size_per_layer_input": 0}, "on which transformers' Gemma4TextModel fails"),
    "a width as a word": ({"hidden_size_per_layer_input": "wide"}, "hidden_size_per_layer_input='wide', but it must"),
    "shared as a switch": ({"num_kv_shared_layers": False}, "num_kv_shared_layers=False, but it must be"),
    "no table": ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input=0, but it must be"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "told"), BAD.values(), ids=BAD)
def test_a_wrong_config_is_one_sentence(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        small(**changes)


def test_tables_stay_as_they_are_under_4_bits() -> None:
    resolved = resolve_run(load_architecture("google/gemma-4-E2B"), {"method": "qlora"})
    assert any("2.8B of the 4.6B parameters of google/gemma-4-E2B are tables of tokens" in n for n in resolved.notes)
    assert not any("tables of tokens" in n for n in resolve_run(small(), {}).notes)


def test_a_silent_config_has_what_its_class_says() -> None:
    fields = ("hidden_size_per_layer_input", "num_kv_shared_layers", "vocab_size_per_layer_input")
    silent = architecture_from_config({name: value for name, value in BASE.items() if name not in fields}, "gemma-4")
    assert silent.layer_inputs is not None
    assert (silent.layer_inputs.width, silent.layer_inputs.vocab_size) == (256, 262144)
    assert not any(group.layer.attention.reuses_keys for group in silent.groups)


def test_what_makes_inputs_is_not_trained_whole() -> None:
    with pytest.raises(
        NotSupportedError, match="--lora-target-modules embed_tokens_per_layer, of what makes the inputs"
    ):
        resolve_run(small(), {"lora_target_modules": "q_proj,embed_tokens_per_layer"})
    for name in ("embed_tokens_per_layer", "per_layer_model_projection"):
        with pytest.raises(NotSupportedError, match=f"--modules-to-save {name}, of what makes the inputs"):
            resolve_run(small(), {"modules_to_save": name})


def test_a_few_layers_do_not_stand_for_all_in_the_trace() -> None:
    """The second table is as wide as there are layers, and the last of them reuse keys: every layer is traced."""
    pytest.importorskip("transformers")
    from tunecast.calibrate.exact import real_architecture
    from tunecast.calibrate.trace.depth import find_pattern
    from tunecast.calibrate.trace.hf import kinds_of_layers

    config = {**BASE, "num_hidden_layers": 24, "layer_types": [WINDOW, WHOLE] * 12, "num_kv_shared_layers": 20}
    for architecture in (architecture_from_config(config, "x"), real_architecture(config, "x")):
        run = resolve_run(architecture, {"max_length": 64}).run
        assert find_pattern(kinds_of_layers(architecture, run)) is None


def test_a_record_holds_it() -> None:
    from tunecast.calibrate.trace.spec import architecture_from_dict, architecture_to_dict

    stored = json.loads(json.dumps(architecture_to_dict(small())))
    assert architecture_from_dict(stored) == small()


def test_a_search_takes_it() -> None:
    found = tunecast.recommend(
        "google/gemma-4-E2B-it", gpu=["h100-sxm5-80gb"], tokens="1M", max_length=1024, max_gpus=2
    )
    assert found.cheapest is not None
    assert found.cheapest.forecast.run.sharding in ("none", "ddp")


def test_gradients_meet_on_every_gpu_of_ddp() -> None:
    alone, two = (
        resolve_run(small(), {"max_length": 64, **more}).run for more in ({}, {"num_gpus": 2, "sharding": "ddp"})
    )
    assert replace(two, num_gpus=1, sharding="none") == replace(alone, num_gpus=1, sharding="none")
    ours, theirs = (memory_timeline(small(), run) for run in (alone, two))
    assert theirs.allocated_bytes >= ours.allocated_bytes
    sent = [op for op in step_operations(small(), two) if op.kind is Kind.COMMUNICATION]
    assert sum(op.total_bytes for op in sent) == 4 * trainable_params(small(), two), "adapters' gradients in fp32, once"
