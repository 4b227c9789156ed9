"""The memory timeline against hand calculation, known figures and properties. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunecast.model.architecture import Architecture
from tunecast.model.memory import MemoryOverheads, memory_timeline
from tunecast.model.memory_static import quantized_bytes
from tunecast.model.replay import replayed_bytes
from tunecast.model.run import Run
from tunecast.model.tape_peaks import PARTS
from tunecast.model.units import GIB
from tunecast.model.value import Value

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]
METHODS = ("lora", "qlora", "full")
SHAPES = st.fixed_dictionaries(
    {
        "max_length": st.sampled_from((64, 256, 1024, 2048)),
        "per_device_train_batch_size": st.integers(1, 6),
        "gradient_accumulation_steps": st.sampled_from((1, 2, 5)),
        "gradient_checkpointing": st.booleans(),
    }
)


def peak(arch: Architecture, run: Run) -> int:
    return memory_timeline(arch, run).allocated_bytes


@pytest.mark.parametrize(
    ("options", "at_rest_gib", "peak_gib", "moment"),
    [
        ({"method": "lora"}, 15.426, 18.894, "loss"),
        ({"method": "qlora"}, 5.780, 9.247, "loss"),
        ({"method": "full", "optim": "adamw_torch"}, 44.87, 74.79, "optimizer"),
    ],
)
def test_8b_at_2048_tokens_as_the_real_code_was_traced(
    make: Make, run_of: RunOf, options: dict[str, str], at_rest_gib: float, peak_gib: float, moment: str
) -> None:
    llama = make("llama-3.1-8b")
    forecast = memory_timeline(llama, run_of(llama, max_length=2048, **options))
    assert forecast.at_rest_bytes / GIB == pytest.approx(at_rest_gib, rel=1e-3)
    assert forecast.allocated_bytes / GIB == pytest.approx(peak_gib, rel=1e-3)
    assert forecast.peak_moment == moment


def test_loss_peak_by_hand(make: Make, run_of: RunOf) -> None:
    """Log-softmax backward: three fp32 tensors of vocabulary width, a bf16 checkpoint per layer, and the final norm."""
    llama, tokens = make("llama-3.1-8b"), 4096
    forecast = memory_timeline(llama, run_of(llama, max_length=tokens))
    beyond_rest = forecast.allocated_bytes - forecast.at_rest_bytes
    logits, checkpoints, fp32_norm = 3 * 4 * tokens * 128256, 32 * 2 * tokens * 4096, 4 * tokens * 4096
    assert forecast.peak_moment == "loss"
    assert beyond_rest == pytest.approx(logits + checkpoints + fp32_norm, rel=2e-3)


def test_full_update_peaks_in_its_square_roots(make: Make, run_of: RunOf) -> None:
    """Weights, gradients, two moments and their square roots: ten bytes per bf16 parameter."""
    llama = make("llama-3.1-8b")
    forecast = memory_timeline(llama, run_of(llama, max_length=512, method="full", optim="adamw_torch"))
    assert forecast.allocated_bytes == pytest.approx(10 * llama.total_params, rel=1e-3)
    assert forecast.parts_bytes["gradients"] == pytest.approx(2 * llama.total_params, rel=1e-3)
    fused = memory_timeline(llama, run_of(llama, max_length=512, method="full", optim="adamw_torch_fused"))
    assert fused.moments["optimizer"] == pytest.approx(8 * llama.total_params, rel=1e-3)


def test_nf4_weight_by_hand(make: Make) -> None:
    linear = make("llama-3.1-8b").groups[0].layer.attention.linears[0]
    packed, blocks, code = 4096 * 4096 // 2, 4096 * 4096 // 64, 512
    assert quantized_bytes(linear.weight_params, double_quant=False) == packed + 4 * blocks + code
    assert quantized_bytes(linear.weight_params, double_quant=True) == packed + blocks + 4 * blocks // 256 + code + 512


def test_small_fp32_base_by_accident_costs_twice(make: Make, run_of: RunOf) -> None:
    qwen = make("qwen2.5-0.5b")
    wide = memory_timeline(qwen, run_of(qwen, max_length=128, dtype="fp32"))
    narrow = memory_timeline(qwen, run_of(qwen, max_length=128))
    assert wide.parts_bytes["weights"] == pytest.approx(2 * narrow.parts_bytes["weights"], rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(method=st.sampled_from(METHODS), options=SHAPES, layers=st.integers(1, 9))
def test_parts_sum_to_the_peak_and_the_peak_is_the_largest_moment(
    make: Make, run_of: RunOf, method: str, options: dict[str, int], layers: int
) -> None:
    qwen = make("qwen2.5-0.5b", layers)
    forecast = memory_timeline(qwen, run_of(qwen, method=method, **options))
    assert sum(forecast.parts_bytes.values()) == forecast.allocated_bytes
    assert set(forecast.parts_bytes) == set(PARTS)
    assert min(forecast.parts_bytes.values()) >= 0
    assert forecast.allocated_bytes == max(forecast.moments.values()) == forecast.moments[forecast.peak_moment]
    assert forecast.at_rest_bytes <= forecast.allocated_bytes


@settings(max_examples=40, deadline=None)
@given(method=st.sampled_from(METHODS), options=SHAPES, layers=st.integers(1, 9), data=st.data())
def test_memory_never_falls_when_the_run_grows(
    make: Make, run_of: RunOf, method: str, options: dict[str, int], layers: int, data: st.DataObject
) -> None:
    grown = data.draw(st.sampled_from(("max_length", "per_device_train_batch_size", "lora_r", "layers")))
    more = dict(options)
    small = make("qwen2.5-0.5b", layers)
    if grown == "layers":
        large = make("qwen2.5-0.5b", layers + data.draw(st.integers(1, 6)))
    else:
        large = small
        if grown == "lora_r":
            if method == "full":
                return
            options, more = {**options, "lora_r": 8}, {**options, "lora_r": 8 + data.draw(st.integers(1, 64))}
        else:
            more[grown] = options[grown] + data.draw(st.integers(1, 64))
    before = peak(small, run_of(small, method=method, **options))
    assert peak(large, run_of(large, method=method, **more)) >= before


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_depth_extension_equals_writing_every_layer(
    make: Make, run_of: RunOf, method: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine layers from a tape of three are what nine layers written out give."""
    import tunecast.model.memory as memory
    from tunecast.model.short_stack import whole_stack

    qwen = make("qwen2.5-0.5b", 9)
    run = run_of(qwen, method=method, max_length=512, gradient_checkpointing=checkpointing)
    extended = memory_timeline(qwen, run)
    memory.spot_peaks.cache_clear()
    monkeypatch.setattr(memory, "short_stack", lambda model, _: whole_stack(model))
    assert memory_timeline(qwen, run).moments == extended.moments
    memory.spot_peaks.cache_clear()


def test_checkpointing_saves_activations(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    on = memory_timeline(llama, run_of(llama, max_length=4096))
    off = memory_timeline(llama, run_of(llama, max_length=4096, gradient_checkpointing=False))
    assert off.parts_bytes["activations"] > 10 * on.parts_bytes["activations"]


def test_overheads_add_reserved_and_process(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    run = run_of(llama)
    plain = memory_timeline(llama, run)
    assert plain.reserved_bytes is None
    assert plain.process_bytes is None
    overheads = MemoryOverheads(
        fragmentation_frac=Value(value=0.1, low=0.0, high=0.3),
        context_bytes=Value(value=500.0, low=400.0, high=600.0),
        origins={"context_bytes": "measured:x"},
    )
    forecast = memory_timeline(llama, run, overheads)
    transient = forecast.allocated_bytes - forecast.at_rest_bytes
    assert forecast.reserved_bytes is not None
    assert forecast.process_bytes is not None
    assert forecast.reserved_bytes.value == pytest.approx(forecast.allocated_bytes + 0.1 * transient)
    assert forecast.process_bytes.low == pytest.approx(forecast.allocated_bytes + 400)
    assert forecast.process_bytes.high == pytest.approx(forecast.allocated_bytes + 0.3 * transient + 600)
    assert forecast.origins == {"context_bytes": "measured:x"}
    assert json.loads(json.dumps(forecast.parts_bytes)) == forecast.parts_bytes


def test_reserved_is_a_replay_where_a_device_follows_it_and_a_share_elsewhere(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    overheads = MemoryOverheads(
        fragmentation_frac=Value(value=0.3, low=0.1, high=0.5),
        context_bytes=Value(value=0.0, low=0.0, high=0.0),
        replayed_frac=Value(value=0.01, low=-9.0, high=0.05),
    )
    run = run_of(llama, method="qlora", max_length=2048)
    alone = memory_timeline(llama, run, overheads, workspace_bytes=1 << 26)
    replayed = replayed_bytes(llama, run, "cuda", 1 << 26)
    transient = alone.allocated_bytes - alone.at_rest_bytes
    assert replayed is not None
    assert alone.reserved_bytes is not None
    assert alone.reserved_bytes.value == pytest.approx(replayed + 0.01 * transient)
    assert alone.reserved_bytes.high == pytest.approx(replayed + 0.05 * transient)
    assert alone.reserved_bytes.low == alone.allocated_bytes, "tensors are in it"
    spread = run_of(llama, method="lora", num_gpus=2, sharding="ddp")
    of_two = memory_timeline(llama, spread, overheads)
    assert of_two.reserved_bytes is not None
    share = 0.3 * (of_two.allocated_bytes - of_two.at_rest_bytes)
    assert of_two.reserved_bytes.value == pytest.approx(of_two.allocated_bytes + share)
