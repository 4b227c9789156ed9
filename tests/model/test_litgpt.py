"""LitGPT as a stack: its shapes, its words for adapters, what it does not have, its sharding by hand arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError, TunecastError, UnknownNameError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.litgpt import BEFORE, FIRST, FLAT, GROUPED, PRESENT, as_litgpt
from tunecast.model.memory import memory_timeline, moment_parts
from tunecast.model.memory_static import quantized_bytes, quantized_head, root_weight_bytes
from tunecast.model.operation import Phase
from tunecast.model.resolve import Resolved, resolve_run
from tunecast.model.resolve_litgpt import of_stack
from tunecast.model.trained import trainable_params

LLAMA = as_litgpt(load_architecture("meta-llama/Llama-2-7b-hf"))
Resolve = Callable[..., Resolved]

PARAMETERS = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_498_482_688,
    "google/gemma-2b": 3_030_460_416,
    "google/gemma-2-2b": 3_204_165_888,
    "microsoft/phi-1_5": 1_418_270_720,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "tiiuae/falcon-7b": 7_217_189_760,
    "stabilityai/stablelm-base-alpha-3b": 3_637_321_728,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "google/gemma-3-1b-pt": 1_301_875_840,
}
"""Parameters of ``litgpt.model.GPT`` on the meta device, litgpt 0.5.13: the head is never tied there."""


def resolved(architecture: Architecture = LLAMA, **options: Any) -> Resolved:
    return resolve_run(architecture, {"stack": "litgpt", **options})


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_its_own_model(name: str) -> None:
    assert as_litgpt(load_architecture(name)).total_params == PARAMETERS[name]


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("query,value", ("query", "value")),
        ("v_proj,q_proj", ("query", "value")),
        ("projection,mlp", ("projection", "fc_1", "fc_2", "proj")),
        ("all-linear", ("query", "key", "value", "projection", "fc_1", "fc_2", "proj")),
        ("key,head", ("key", "lm_head")),
    ],
)
def test_its_words_and_hugging_faces_name_the_same_maps(asked: str, names: tuple[str, ...]) -> None:
    assert resolved(lora_target_modules=asked).run.lora_target_modules == names


def test_an_unknown_target_is_refused_with_its_words() -> None:
    with pytest.raises(UnknownNameError, match="query, key, value, projection, mlp, head"):
        resolved(lora_target_modules="up_projection")


def test_adapters_on_parts_of_one_map_share_their_first_factor() -> None:
    run = resolved(lora_r=8).run
    # lora_A (2 x 8, 4096) and lora_B (2 x 4096, 8) in each of 32 layers
    assert trainable_params(LLAMA, run) == 32 * (2 * 8 * 4096 + 2 * 4096 * 8)


def test_defaults_are_those_of_the_script_on_one_gpu_and_on_several() -> None:
    one, four = resolved().run, resolved(num_gpus=4, sharding="fsdp").run
    assert (one.lora_r, one.lora_dropout, one.precision, one.optim) == (8, 0.05, "bf16", "adamw_torch")
    assert (one.gradient_checkpointing, four.gradient_checkpointing) == (False, True)
    assert (four.fsdp_version, resolved(num_gpus=4, sharding="fsdp", method="full").run.fsdp_version) == (2, 1)
    assert resolved(method="qlora").run.optim == "paged_adamw_32bit"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "--use-dora"),
        ({"loss_type": "liger"}, "--loss-type liger"),
        ({"sharding": "zero3", "num_gpus": 2}, "--sharding zero3"),
        ({"method": "qlora", "num_gpus": 2, "sharding": "fsdp"}, "does not quantize on several GPUs"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TunecastError, match=said):
        resolved(**options)


def test_a_card_without_bf16_takes_its_16_bits() -> None:
    old = resolve_run(LLAMA, {"stack": "litgpt"}, gpu_has_bf16=False)
    assert (old.run.precision, old.run.dtype, old.run.adapter_dtype) == ("fp16", "fp16", "fp16")
    assert any("16-true" in note for note in old.notes)
    mixed = {"stack": "litgpt", "precision": "bf16-autocast", "dtype": "fp32", "adapter_dtype": "fp32"}
    assert resolve_run(LLAMA, mixed, gpu_has_bf16=False).run.precision == "fp16-autocast"


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "bigscience/bloom-7b1", "allenai/OLMo-2-1124-7B"]
)
def test_models_without_formulas_in_its_code_are_refused(name: str) -> None:
    with pytest.raises(NotSupportedError, match="by LitGPT's code was asked for"):
        as_litgpt(load_architecture(name))


def test_stack_and_architecture_belong_together() -> None:
    plain = load_architecture("meta-llama/Llama-2-7b-hf")
    assert of_stack(plain, {"stack": "hf-peft"}) is plain
    assert of_stack(plain, {"stack": "litgpt"}).code == PRESENT
    for version, code in (("0.4.13", BEFORE), ("0.5.3", GROUPED), ("0.5.8", FLAT), ("0.5.12", PRESENT)):
        assert of_stack(plain, {"stack": "litgpt", "stack_version": version}).code == code
    with pytest.raises(InputError, match="has formulas only"):
        resolve_run(plain, {"stack": "litgpt"})
    with pytest.raises(InputError, match="built by LitGPT's code"):
        resolve_run(LLAMA, {"stack": "hf-peft"})


def test_the_head_is_quantized_with_the_rest() -> None:
    run = resolved(method="qlora").run
    head = quantized_head(LLAMA, run)
    assert head is not None
    assert quantized_bytes(head.weight_params, double_quant=False) == 32000 * 4096 // 2 + 512 + 32000 * 4096 // 64 * 4
    assert root_weight_bytes(LLAMA, run) == 2 * 32000 * 4096 + 2 * 4096  # embedding and final norm


def test_a_stable_embedding_keeps_its_gradient_for_good() -> None:
    now, then = (as_litgpt(load_architecture("google/gemma-2b"), code) for code in (PRESENT, BEFORE))
    rests = [memory_timeline(model, resolved(model, method="qlora").run).at_rest_bytes for model in (now, then)]
    table, vectors = 2 * 256000 * 2048, 2 * 2 * 2048
    notes = [" ".join(resolved(model, method="qlora").notes) for model in (now, then)]
    assert ["never used" in told for told in notes] == [True, False]
    assert f"{table / 2**30:.1f} GiB" in notes[0]
    assert rests[0] - rests[1] == table + 2 * vectors  # the norm's weight and bias, and gradients of all three


def test_nothing_is_clipped_and_weights_decay() -> None:
    names = [o.name for o in step_operations(LLAMA, resolved(max_length=64).run) if o.phase is Phase.OPTIMIZER]
    assert names[0] == "adamw.decay"
    assert not any(name.startswith("clip") for name in names)


def test_flat_gradients_of_frozen_weights_under_fsdp_1() -> None:
    """13B on 4 GPUs: a quarter of the weights and every layer's gradient whole, by hand within a percent."""
    model = as_litgpt(load_architecture("meta-llama/Llama-2-13b-hf"), FIRST)
    options = {"num_gpus": 4, "sharding": "fsdp", "gradient_accumulation_steps": 32, "max_length": 1304}
    run = resolved(model, **options).run
    assert run.fsdp_version == 1
    weights, root = 2 * 13_015_864_320, 2 * 2 * 32000 * 5120
    layers = weights - root
    held = weights / 4 + layers + root + 4 * layers / 40
    backward = max(sum(parts.values()) for moment, parts in moment_parts(model, run) if moment == "backward")
    assert backward == pytest.approx(held, rel=0.02)
    reduced = replace(run, sync_each_micro_batch=True)
    assert memory_timeline(model, reduced).allocated_bytes < 0.6 * backward
