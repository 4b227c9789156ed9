"""Peaks of memory that no training of the row's model has: another unit's numbers."""

from __future__ import annotations

import pytest
from table_rows import one

from tunecast.calibrate.row_peak import LEAST_OF_WEIGHTS, least_weights_bytes
from tunecast.calibrate.validate import judge, read_entries
from tunecast.calibrate.validate_folds import shipped
from tunecast.model.units import GIB

ROW = {
    "id": "x-1", "model": "Llama 3.1 8B", "method": "lora", "quant": "none", "compute_dtype": "bf16",
    "seq_len": "2048", "micro_batch": "1", "gpu": "L40S", "gpus": "1", "parallelism": "", "tokens_per_s": "2000",
    "reserved_or_allocated": "allocated",
}  # fmt: skip
SEVERAL = {"gpus": "4", "tokens_per_s": "8000"}
WEIGHTS_GIB = 8_030_261_248 * 2 / 2**30


@pytest.mark.parametrize(
    ("cells", "one_in"),
    [
        ({}, 1),
        ({**SEVERAL, "parallelism": "ddp"}, 1),
        ({**SEVERAL, "parallelism": "ZeRO-2"}, 1),
        ({**SEVERAL, "parallelism": "FSDP"}, 4),
        ({**SEVERAL, "parallelism": "ZeRO-3"}, 4),
        ({**SEVERAL, "parallelism": "TP=2, DP=2"}, 2),
    ],
)
def test_the_least_is_a_quarter_of_the_weights_on_one_gpu(cells: dict[str, str], one_in: int) -> None:
    """8,030,261,248 parameters in bf16."""
    run = one({**ROW, **cells})
    least_gib = least_weights_bytes(run.architecture, run.run) / GIB
    assert least_gib == pytest.approx(LEAST_OF_WEIGHTS * WEIGHTS_GIB / one_in, rel=1e-3)


@pytest.mark.parametrize("parallelism", ["ZeRO-3 + CPU offload", "FSDP + CPU offload"])
def test_weights_in_host_memory_have_no_least(parallelism: str) -> None:
    run = one({**ROW, **SEVERAL, "parallelism": parallelism, "peak_mem_gib": "0.9"})
    assert least_weights_bytes(run.architecture, run.run) == 0
    assert run.peak_bytes == 0.9 * GIB


@pytest.mark.parametrize(
    ("text", "cells"),
    [("0.0315", {}), ("32.256 MiB", {}), ("3.5", {}), ("0.8", {**SEVERAL, "parallelism": "FSDP"})],
)
def test_a_peak_far_below_the_weights_is_not_compared(text: str, cells: dict[str, str]) -> None:
    entry = read_entries([{**ROW, **cells, "peak_mem_gib": text}])[0]
    judged = judge(entry, shipped)
    weights = f"{WEIGHTS_GIB / (4 if cells else 1):.1f}"
    assert judged.memory is None
    assert judged.why_no_memory == (
        f"peak_mem_gib {text!r} is less than a quarter of what the weights alone take ({weights} GiB): check its unit"
    )
    assert judged.speed is not None


@pytest.mark.parametrize(("text", "quant"), [("5", "none"), ("18", "none"), ("1.5", "nf4"), ("5120 MiB", "none")])
def test_a_peak_that_other_settings_may_have_is_read(text: str, quant: str) -> None:
    assert one({**ROW, "quant": quant, "peak_mem_gib": text}).peak_bytes is not None


@pytest.mark.parametrize("cells", [{}, {"gpus": "2", "parallelism": "ddp"}])
@pytest.mark.parametrize(
    ("text", "mib"), [("23000", True), ("47104", True), ("60", False), ("230000", False), ("23000 GiB", False)]
)
def test_a_peak_that_may_be_mib_says_so(text: str, mib: bool, cells: dict[str, str]) -> None:
    """48 GB are the card's: 230,000 MiB are on no card of its kind, and 60 MiB hold no model."""
    entry = read_entries([{**ROW, **cells, "peak_mem_gib": text}])[0]
    told = entry.reason if entry.run is None else entry.run.why_no_memory
    above = f"peak_mem_gib {text!r} is above the 48 GB of l40s-48gb"
    other = ": it ran on another card, or on several" if not cells else ""
    assert told == above + (f", and may be MiB: write {text} MiB" if mib else other)
