"""Casts from 16 bits to 32 on NVIDIA's cards, on a device whose record has not measured them.

PyTorch's kernel for a cast takes element by element where no other is written for it: its multiprocessors, not the
memory, then set the pace. From 32 bits to 16 there is one since 2.6 (pytorch pull request 137053), from 16 to 32 since
September 2026 (195542). What both have measured of the old kernel is the same pace: fp32 to fp16 on an H100 PCIe, 805
MB in 552 us, and bf16 to fp32 on an A100, 403 MB in 362 us, are 7.3 bytes a clock and multiprocessor at the clock that
the card boosts to. PEFT casts every adapted input so where adapters are in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.model.factors import Curve
from tunecast.model.operation import UPCAST, Kind
from tunecast.model.units import MEGA
from tunecast.model.versions import version_key

UPCASTS = f"{Kind.MEMORY}-{UPCAST}"
"""The curve's name."""
BYTES_PER_CLOCK = 7.3
"""Read and written, of one multiprocessor."""
LOG_SD = 0.15
"""Assumed: both figures agree within 1%, of two generations."""
VECTORISED_SINCE = (2, 15)
"""PyTorch's version: the first that was branched off after September 2026 (pytorch pull request 196028)."""


def upcast_bytes_per_s(hardware: Mapping[str, Any], software: Mapping[str, Any]) -> float | None:
    """The pace of such casts on the card of a record; None where another kernel runs, or nobody knows which."""
    torch = software.get("torch")
    clock_mhz, processors = hardware.get("max_sm_clock_mhz"), hardware.get("multiprocessors")
    if not str(hardware.get("device")).startswith("cuda") or not torch or not clock_mhz or not processors:
        return None
    if version_key(torch) >= VECTORISED_SINCE:
        return None
    return BYTES_PER_CLOCK * float(processors) * float(clock_mhz) * MEGA


def upcast_curve(memory: Curve | None, pace_bytes_per_s: float | None) -> dict[str, Curve]:
    """The curve of these casts beside that of all memory, by its name; none where they are as fast."""
    if memory is None or pace_bytes_per_s is None or "bytes_per_s" not in memory.params:
        return {}
    if pace_bytes_per_s >= memory.params["bytes_per_s"]:
        return {}
    return {UPCASTS: memory.at_rate("bytes_per_s", pace_bytes_per_s, log_sd=LOG_SD, origin="published")}
