"""What communication hides behind where no published run says it: DDP's buckets beside the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.model.factors import Factor, FactorSet
from tunecast.model.run import Run
from tunecast.model.value import lognormal

OVERLAP = "overlap_frac"


def is_unread(run: Run | None) -> bool:
    """Whether no row says what hides behind this run's work: DDP reduces buckets beside the backward, while the rows'
    shardings gather what the next layer waits for."""
    return run is not None and run.num_gpus > 1 and run.sharding == "ddp"


def with_believed_overlap(factors: FactorSet, run: Run | None, priors: Mapping[str, Any]) -> FactorSet:
    """The factors with the overlap that is believed, and its doubt, where no row says it; else as they are."""
    if not is_unread(run) or OVERLAP not in factors.step_params:
        return factors
    belief = priors["beliefs"][OVERLAP]
    log_sd = float(belief["log_sd"])
    share = lognormal(float(belief["value"]), log_sd)
    believed = Factor(
        value=share.value, low=share.low, high=min(share.high, 1.0), unit=belief["unit"], origin="assumed"
    )
    place = factors.step_params.index(OVERLAP)
    rows = [
        [0.0 if place in (row, column) else entry for column, entry in enumerate(entries)]
        for row, entries in enumerate(factors.step_covariance)
    ]
    rows[place][place] = log_sd**2
    return replace(
        factors,
        factors={**factors.factors, OVERLAP: believed},
        step_covariance=tuple(tuple(row) for row in rows),
    )
