"""Casts from 16 bits to 32 at the pace of PyTorch's older kernel: which kernels they are, and on which cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.factors import Curve
from tunecast.model.inventory import step_operations
from tunecast.model.operation import UPCAST, Kind, Operation
from tunecast.model.resolve import resolve_run
from tunecast.model.upcasts import UPCASTS, upcast_bytes_per_s, upcast_curve

MODEL = "meta-llama/Llama-3.1-8B"
H100_PCIE = {"device": "cuda:0", "multiprocessors": 114, "max_sm_clock_mhz": 1755.0}
A100 = {"device": "cuda:0", "multiprocessors": 108, "max_sm_clock_mhz": 1410.0}
OLD = {"torch": "2.14.1+cu130"}


@pytest.mark.parametrize(
    ("hardware", "n_bytes", "measured_s"),
    [
        (H100_PCIE, 6 * 134_217_728, 552.49e-6),  # fp32 to fp16, pytorch pull request 137053, before it
        (A100, 6 * 67_108_864, 362.46e-6),  # bf16 to fp32, pytorch pull request 195542, before it
    ],
)
def test_the_pace_is_that_of_both_published_kernels(hardware: dict[str, Any], n_bytes: int, measured_s: float) -> None:
    pace = upcast_bytes_per_s(hardware, OLD)
    assert pace is not None
    assert n_bytes / pace == pytest.approx(measured_s, rel=0.02)


@pytest.mark.parametrize(
    ("hardware", "software"),
    [
        (A100, {"torch": "2.15.0"}),
        (A100, {"torch": None}),
        ({**A100, "device": "mock:a100-sxm4-80gb#0"}, OLD),
        ({**A100, "device": "cpu"}, OLD),
        ({**A100, "max_sm_clock_mhz": None}, OLD),
        ({**A100, "multiprocessors": None}, OLD),
    ],
)
def test_nothing_is_said_where_another_kernel_runs_or_nobody_knows(
    hardware: dict[str, Any], software: dict[str, Any]
) -> None:
    assert upcast_bytes_per_s(hardware, software) is None


def test_only_cards_that_copy_faster_are_held_up() -> None:
    memory = Curve(
        form="memory", params={"bytes_per_s": 2e12, "t0_s": 1e-6, "gp_scale": 1.0}, log_sd=0.05, origin="measured"
    )
    (slow,) = upcast_curve(memory, 1.5e12).values()
    assert (slow.params, slow.origin) == ({"bytes_per_s": 1.5e12, "t0_s": 1e-6}, "published")
    assert slow.log_sd > memory.log_sd
    assert upcast_curve(memory, 2.5e12) == upcast_curve(memory, None) == upcast_curve(None, 1e12) == {}
    assert list(upcast_curve(memory, 1e12)) == [UPCASTS]


def upcasts(**asked: Any) -> list[Operation]:
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {"max_length": 512, **asked}).run
    return [each for each in step_operations(architecture, run) if each.layout == UPCAST]


def test_adapters_in_fp32_have_every_input_cast_up() -> None:
    """PEFT's ``_cast_input_dtype``: an input of 512 tokens is read in 2 bytes and written in 4, forward and again."""
    found = [each for each in upcasts(method="lora") if each.name.endswith("adapter_input_cast")]
    width = {"q_proj": 4096, "down_proj": 14336}
    assert {each.bytes for each in found} >= {6.0 * 512 * size for size in width.values()}
    assert sum(each.count for each in found) >= 2 * 32 * 7
    assert not [each for each in upcasts(method="lora", adapter_dtype="bf16") if "adapter_input" in each.name]


def test_nothing_is_cast_up_where_all_is_in_16_bits() -> None:
    names = {each.name.split(".")[-1] for each in upcasts(method="full", precision="bf16")}
    assert "adapter_input_cast" not in names


SMALL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "vocab_size": 4096,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("asked", [{"method": "lora"}, {"method": "qlora"}, {"method": "full"}])
def test_the_traced_code_casts_as_many_bytes_up(asked: dict[str, Any]) -> None:
    from tunecast.calibrate.trace.tracer import trace_step

    architecture = architecture_from_config(SMALL, "small")
    run = resolve_run(architecture, {"max_length": 512, **asked}).run

    def cast_up(operations: Iterable[Operation]) -> dict[str, float]:
        found: Counter[str] = Counter()
        for each in operations:
            if each.layout == UPCAST and each.kind is Kind.MEMORY:
                found[each.phase.value] += each.total_bytes
        return dict(found)

    expected = cast_up(trace_step(architecture, run).stream)
    assert set(expected) == {"forward", "recompute", "backward"}
    assert cast_up(step_operations(architecture, run)) == pytest.approx(expected, rel=1e-4)
