"""Statistics of a validation: overall, by group, and of the verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.validate import Compared, Judged
from tunecast.model.run import Run
from tunecast.model.units import GIGA

VALIDATION_SCHEMA = "tunecast.validation/1"
SIZES = ((5.0, "below 5B"), (20.0, "5B to 20B"), (60.0, "20B to 60B"))
"""Upper ends in billions of parameters."""
LARGEST = "60B and more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Errors of a set of comparisons; everything is None when there are none."""

    n: int
    median_abs_error: float | None = None
    p90_abs_error: float | None = None
    """Linear interpolation between order statistics."""
    bias: float | None = None
    """Mean of predicted / measured - 1."""
    coverage: float | None = None
    """Share of measured values inside the 80% interval."""
    below: float | None = None
    """Share of measured values below the interval's low end."""
    above: float | None = None
    """Share above its high end."""
    median_half_width: float | None = None
    """Half the interval over the forecast."""

    def as_dict(self) -> dict[str, Any]:
        """The fields of ``tunecast.validation/1``."""
        names = ("n", "median_abs_error", "p90_abs_error", "bias", "coverage")
        return {name: getattr(self, name) for name in names}


def stats_of(compared: Iterable[Compared]) -> Stats:
    """The statistics of these comparisons."""
    items = list(compared)
    if not items:
        return Stats(n=0)
    sizes = [abs(item.error) for item in items]
    return Stats(
        n=len(items),
        median_abs_error=statistics.median(sizes),
        p90_abs_error=float(np.quantile(sizes, 0.9)),
        bias=statistics.fmean(item.error for item in items),
        coverage=sum(item.inside for item in items) / len(items),
        below=sum(item.measured < item.predicted.low for item in items) / len(items),
        above=sum(item.measured > item.predicted.high for item in items) / len(items),
        median_half_width=statistics.median(item.half_width for item in items),
    )


def speeds(judged: Iterable[Judged]) -> list[Compared]:
    """The speed comparisons."""
    return [item.speed for item in judged if item.speed is not None]


def memories(judged: Iterable[Judged]) -> list[Compared]:
    """The memory comparisons."""
    return [item.memory for item in judged if item.memory is not None]


def size_class(run: PublishedRun) -> str:
    """The model's size in words."""
    billions = run.architecture.total_params / GIGA
    return next((name for end, name in SIZES if billions < end), LARGEST)


def degrees_of(run: Run) -> list[str]:
    """What splits one copy of the model, and over how many GPUs: ``tp2``, ``pp4``, ``cp4``."""
    return [f"{way}{degree}" for way in ("tp", "pp", "cp") if (degree := getattr(run, way)) > 1]


def spread_words(sharding: str, degrees: Sequence[str]) -> str:
    """How several GPUs share a job: ``ddp``, ``fsdp``, ``fsdp tp2``, ``tp8 pp8``. Beside degrees plain copies of what
    they split go without saying: ``8 x tp2`` is four."""
    kinds = () if degrees and sharding in ("none", "ddp") else (sharding,)
    return " ".join((*kinds, *degrees))


def layout(run: Run) -> str:
    """GPUs and how they share the job: ``16 x fsdp tp2``."""
    return f"{run.num_gpus} x {spread_words(run.sharding, degrees_of(run))}" if run.num_gpus > 1 else "one GPU"


GROUPS: dict[str, Callable[[PublishedRun], str]] = {
    "source": lambda run: run.source,
    "GPU": lambda run: run.gpu,
    "method": lambda run: run.run.method,
    "parallelism": lambda run: layout(run.run),
    "size": size_class,
}


def by_group(
    judged: Sequence[Judged], key: Callable[[PublishedRun], str], pick: Callable[[Iterable[Judged]], list[Compared]]
) -> dict[str, Stats]:
    """Statistics of each value of `key`, largest group first."""
    members: dict[str, list[Judged]] = {}
    for item in judged:
        if item.entry.run is not None and pick([item]):
            members.setdefault(key(item.entry.run), []).append(item)
    ordered = sorted(members.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return {name: stats_of(pick(items)) for name, items in ordered}


def median_of_sources(judged: Sequence[Judged], pick: Callable[[Iterable[Judged]], list[Compared]]) -> float | None:
    """Median over sources of the source's median absolute error: no source counts twice."""
    found = by_group(judged, GROUPS["source"], pick)
    medians = [stats.median_abs_error for stats in found.values() if stats.median_abs_error is not None]
    return statistics.median(medians) if medians else None


def verdict_shares(judged: Iterable[Judged]) -> dict[str, tuple[int, int]]:
    """(right, all) by kind: runs that ran and are called fits or tight; runs that did not, called tight or no."""
    right = {"ran": ("fits", "tight"), "stated": ("tight", "no"), "presumed": ("tight", "no")}
    found = {kind: [0, 0] for kind in right}
    for item in judged:
        if item.prediction is None or item.prediction.verdict is None:
            continue
        kind = item.entry.out_of_memory or "ran"
        if kind == "ran" and not item.entry.measured:
            continue
        found[kind][0] += item.prediction.verdict in right[kind]
        found[kind][1] += 1
    return {kind: (good, of) for kind, (good, of) in found.items()}


def ids_by_reason(judged: Iterable[Judged]) -> dict[str, list[str]]:
    """The rows that each reason took, most frequent first; runs that ran out of memory are counted as such."""
    found: dict[str, list[str]] = {}
    for item in judged:
        if not item.scored:
            found.setdefault(item.skipped or item.reason or "", []).append(item.entry.id)
    return dict(sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[0])))


def validation_to_dict(judged: Sequence[Judged], left_out_rows: int = 0) -> dict[str, Any]:
    """The JSON of ``tunecast validate``: memory in GiB, speed in tokens/s. Of `left_out_rows` the priors have seen
    every one, and were fitted anew without its source."""
    from tunecast.model.units import gib

    return {
        "schema": VALIDATION_SCHEMA,
        "rows": [
            {
                "id": item.entry.id,
                "status": "scored" if item.scored else "skipped",
                "reason": item.reason,
                "in_sample": item.in_sample,
                "whole_time": bool(item.whole_time),
                "speed": _compared(item.speed, 1.0),
                "memory": _compared(item.memory, gib(1)),
            }
            for item in judged
        ],
        "summary": {
            "speed": stats_of(speeds(judged)).as_dict(),
            "memory": stats_of(memories(judged)).as_dict(),
            "verdicts": {kind: {"right": good, "of": of} for kind, (good, of) in verdict_shares(judged).items()},
            "in_sample_rows": sum(item.in_sample for item in judged),
            "left_out_rows": left_out_rows,
        },
    }


def _compared(item: Compared | None, scale: float) -> dict[str, float] | None:
    if item is None:
        return None
    predicted = item.predicted.scaled(scale)
    bounds = {"value": predicted.value, "low": predicted.low, "high": predicted.high}
    return {"measured": item.measured * scale, **bounds, "error": item.error}
