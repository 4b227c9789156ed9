"""Experts as modules of their own (transformers before 5): counted by hand, and against published peaks."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.catalogs.errors import NotSupportedError, UnknownNameError
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.experts_modules import in_modules, of_age
from tunecast.model.flops import executed_flops_per_step, model_flops_per_step
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Phase
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.target import resolve_targets
from tunecast.model.trained import trainable_params
from tunecast.model.units import gib

STACKED = load_architecture("mistralai/Mixtral-8x7B-v0.1")
MIXTRAL = in_modules(STACKED)
FMS: dict[str, Any] = {
    "method": "qlora", "max_length": 4096, "hf_code": "4.46", "lora_target_modules": "q_proj,k_proj,v_proj,o_proj",
    "attn_implementation": "flash_attention_2", "reentrant": True, "lora_dropout": 0.1,
}  # fmt: skip


def test_every_expert_is_three_maps_and_nothing_is_lost() -> None:
    layer = MIXTRAL.groups[0].layer
    assert len(layer.mlp.linears) == 1 + 8 * 3
    assert MIXTRAL.total_params == STACKED.total_params == 46_702_792_704


def test_required_work_does_not_depend_on_where_weights_are_kept() -> None:
    run = resolve_run(MIXTRAL, {"max_length": 1024, "hf_code": "4.46", "lora_target_modules": "q_proj"}).run
    assert model_flops_per_step(MIXTRAL, run) == pytest.approx(model_flops_per_step(STACKED, run), rel=1e-12)
    assert executed_flops_per_step(MIXTRAL, run) == pytest.approx(executed_flops_per_step(STACKED, run), rel=1e-3)


def test_adapters_sit_on_every_expert() -> None:
    run = resolve_run(MIXTRAL, {"hf_code": "4.46", "lora_r": 16, "lora_target_modules": "w1,gate"}).run
    assert trainable_params(MIXTRAL, run) == 32 * 16 * (8 * (4096 + 14336) + 4096 + 8)


def test_todays_unsloth_is_not_forecast_with_its_experts_in_16_bits() -> None:
    """It quantizes stacked experts by code of its own; older code has them in modules, which bitsandbytes quantizes."""
    options = {"method": "qlora", "stack": "unsloth"}
    with pytest.raises(NotSupportedError, match="keeps the experts of Qwen/Qwen3-30B-A3B in 4 bits by code of its own"):
        resolve_run(load_architecture("Qwen/Qwen3-30B-A3B"), options)
    resolve_run(load_architecture("Qwen/Qwen3-30B-A3B"), {**options, "method": "lora"})
    resolve_run(load_architecture("Qwen/Qwen3-8B"), options)


def test_four_bits_reach_the_experts() -> None:
    """Half a byte per weight, a byte per 64 of them and an fp32 per 256 of those; stacks keep 84 GiB in 16 bits."""
    run = resolve_run(MIXTRAL, {**FMS, "per_device_train_batch_size": 4}).run
    linears = 46_702_792_704 - 2 * 32_000 * 4096 - 65 * 4096
    quantized = memory_timeline(MIXTRAL, run).parts_bytes["quantized"]
    assert quantized == pytest.approx(linears * (0.5 + 1 / 64 + 4 / (64 * 256)), rel=1e-3)


@pytest.mark.parametrize(("batch", "published_gib"), [(4, 32.1058), (8, 41.2394)])
def test_published_peaks_of_mixtral_in_4_bits(batch: int, published_gib: float) -> None:
    """Source: fms-acceleration ``scripts/benchmarks/refs/a100_80gb.csv`` at 876e2ed, its fused kernels, one A100."""
    fused = {"fused_kernels": "rms_norm,rope,cross_entropy,lora"}
    run = resolve_run(MIXTRAL, {**FMS, **fused, "per_device_train_batch_size": batch}).run
    assert gib(memory_timeline(MIXTRAL, run).allocated_bytes) == pytest.approx(published_gib, rel=0.01)


@pytest.mark.parametrize("tokens", [1, 3])
def test_experts_without_rows_run_no_kernels(tokens: int) -> None:
    """Each token goes to 2 of 8 experts: three maps for each row at hand, none for the others; 4 tokens reach all."""

    def products(length: int) -> int:
        run = resolve_run(MIXTRAL, {**FMS, "max_length": length}).run
        made = [o for o in step_operations(MIXTRAL, run) if o.kind is Kind.GEMM and o.phase is Phase.FORWARD]
        assert all(min(o.shape) > 0 for o in made)
        return round(sum(o.count for o in made))

    assert products(4) - products(tokens) == 32 * 3 * (8 - 2 * tokens)
    asked = Question(architecture=MIXTRAL, options={**FMS, "max_length": tokens})
    (target,) = resolve_targets(["h100-sxm5-80gb"], {})
    assert forecast(asked, target).step_time_s.value > 0.0


def test_the_age_of_the_code_decides() -> None:
    assert of_age(STACKED, {"hf_code": "4.46"}) == MIXTRAL
    assert of_age(STACKED, {}) == of_age(STACKED, {"hf_code": "5"}) == STACKED
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    assert of_age(llama, {"hf_code": "4.46"}) == llama


def test_what_old_code_kept_otherwise_is_refused() -> None:
    config = {
        "model_type": "granitemoe", "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 8, "vocab_size": 8000,
    }  # fmt: skip
    with pytest.raises(NotSupportedError, match="hf-code"):
        in_modules(architecture_from_config(config, "x"))


@pytest.mark.parametrize("asked", ["q_proj,gate_up_proj", "experts.down_proj"])
def test_adapters_on_experts_that_are_not_built_are_refused_by_name(asked: str) -> None:
    gpt_oss = load_architecture("openai/gpt-oss-20b")
    with pytest.raises(NotSupportedError, match=r"Adapters on the experts of openai/gpt-oss-20b \(.*\) are not built"):
        resolve_run(gpt_oss, {"lora_target_modules": asked})
    with pytest.raises(UnknownNameError, match="q_prj"):
        resolve_run(gpt_oss, {"lora_target_modules": "q_prj"})


@pytest.mark.parametrize(("name", "stacked_gib"), [("mistralai/Mixtral-8x7B-v0.1", 84), ("Qwen/Qwen3-30B-A3B", 54)])
def test_notes_on_experts_are_those_of_the_code_that_runs(name: str, stacked_gib: int) -> None:
    """Weights of 3 x 14,336 x 4,096 x 8 in 32 layers, and of 3 x 768 x 2,048 x 128 in 48, take two bytes each in a
    stack; transformers before 5 has a linear map for each, which bitsandbytes stores in 4 bits."""
    stacked = load_architecture(name)
    for options in ({"method": "qlora", "hf_code": "4.49"}, {"method": "qlora"}):
        architecture = of_age(stacked, options)
        resolved = resolve_run(architecture, options)
        parts, notes = memory_timeline(architecture, resolved.run).parts_bytes, " ".join(resolved.notes)
        in_stack = parts["weights"] > stacked_gib * 2**30
        assert in_stack == ("hf_code" not in options)
        assert (f"{stacked_gib}.0 GiB of stacked experts stay in bf16" in notes) == in_stack
        assert ("grouped products" in notes) == in_stack
        assert ("one after the other" in notes) == (not in_stack)
        assert "balanced routing is assumed" in notes
