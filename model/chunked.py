"""How fast flash-linear-attention's kernels move bytes: as a card's memory does, or as its processors issue their work.

Cards of data centres have much bandwidth for each of their processors: a GB200 is no faster than an H200, which has
three fifths of its bandwidth. The two bounds bend into each other as the root of the sum of their squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.gpus import Gpu
from tunecast.model.factors import Curve, FactorSet
from tunecast.model.fused import FLA
from tunecast.model.operation import CHUNKED, Kind
from tunecast.model.run import Run
from tunecast.model.unpacking import clocks_per_byte

PASSES = ("forward", "backward")


def chunked_curves(
    memory: Curve | None, beliefs: Mapping[str, Any], gpu: Gpu | None, run: Run | None
) -> dict[str, Curve]:
    """Curves of these kernels from that of plain ones that wait for memory on the same card, as far as published
    figures tell, and with their doubt; empty without one, for a run that has no such kernels, and by priors that are
    older than this belief."""
    belief = beliefs.get("delta_kernels")
    if belief is None or memory is None or "bytes_per_s" not in memory.params:
        return {}
    if run is not None and not run.fuses(FLA):
        return {}
    clocks = None if gpu is None else clocks_per_byte(gpu)
    found: dict[str, Curve] = {}
    for name in PASSES:
        share, doubt = float(belief["elsewhere"]), float(belief["log_sd_elsewhere"])
        if clocks is not None:
            share = 1.0 / math.hypot(1.0, float(belief["memory_share"]) / (float(belief[name]) * clocks))
            doubt = float(belief["log_sd"])
        rate = memory.params["bytes_per_s"] * share
        curve = memory.at_rate("bytes_per_s", rate, log_sd=doubt, origin="assumed")
        found[f"{Kind.MEMORY}-{CHUNKED}.{name}"] = curve
    return found


def with_chunked(factors: FactorSet, beliefs: Mapping[str, Any], gpu: Gpu | None, run: Run | None) -> FactorSet:
    """A record's factors with curves of kernels that no calibration measures."""
    made = chunked_curves(factors.curves.get(str(Kind.MEMORY)), beliefs, gpu, run)
    return replace(factors, curves={**made, **factors.curves})


def chunked_notes(run: Run) -> tuple[str, ...]:
    """How well the speed of these kernels is known."""
    if not run.fuses(FLA):
        return ()
    told = (
        "kernels of flash-linear-attention (fla) are timed from published figures of five cards (H200, GB200, A800, "
        "RTX 5090 and PRO 6000), which one rule follows within about 10%; few heads of one long sample are slower, and "
        "FlashQLA, which fla runs instead where it is installed, is faster; no calibration measures them yet"
    )
    return (told,)
