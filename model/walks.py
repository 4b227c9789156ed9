"""Kernels that move bytes but do not walk straight through memory, on a device whose record has not measured them.

Attention as plain products takes softmaxes of rows of scores, joins a sink's score to them and cuts it off again;
PyTorch does so at about half of what a copy reaches. Calibrations measure both (``walk`` trials); in records that are
older they are that share of plain copies as far as published figures tell, with their doubt. Without a record they are
part of what the priors say of all that moves bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.model.architecture import Architecture
from tunecast.model.factors import FactorSet
from tunecast.model.operation import SOFTMAX, STRIDED, Kind
from tunecast.model.resolve_attention import EAGER, runs_plain_attention
from tunecast.model.run import Run

CURVES = {
    f"{Kind.MEMORY}-{SOFTMAX}.forward": SOFTMAX,
    f"{Kind.MEMORY}-{SOFTMAX}.backward": SOFTMAX,
    f"{Kind.MEMORY}-{STRIDED}": STRIDED,
}
"""What a record may have measured, and the layout of it."""


def with_walks(factors: FactorSet, beliefs: Mapping[str, Any]) -> FactorSet:
    """A record's factors with curves of these kernels: measured, else by published figures; as they are for a
    processor, of which none is published, and by priors that are older than this belief."""
    belief, memory = beliefs.get("walks"), factors.curves.get(str(Kind.MEMORY))
    if belief is None or memory is None or factors.synchronous or "bytes_per_s" not in memory.params:
        return factors
    copied, log_sd = memory.params["bytes_per_s"], float(belief["log_sd"])
    made = {
        name: memory.at_rate("bytes_per_s", copied * float(belief[layout]), log_sd=log_sd, origin="assumed")
        for name, layout in CURVES.items()
    }
    return replace(factors, curves={**made, **factors.curves})


def walk_notes(architecture: Architecture, run: Run, factors: FactorSet) -> tuple[str, ...]:
    """How well softmaxes of scores are known where a run has them, unless a record has measured them."""
    eager = run.attn_implementation == EAGER or runs_plain_attention(architecture)
    curves = (factors.curves.get(name) for name in CURVES)
    if not eager or not any(curve is not None and curve.origin == "assumed" for curve in curves):
        return ()
    told = (
        "softmaxes of attention scores, and scores joined or cut, are timed from a few published figures, about half "
        "of what a copy reaches: the record is older than the trials that measure them; a new calibration has them"
    )
    return (told,)
