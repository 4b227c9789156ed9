"""Robust statistics of repeated timings. No torch, no scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAD_TO_SD = 1.4826
"""Median absolute deviation to standard deviation of a normal law (1 / its 75% quantile)."""
UNSTABLE_SPREAD_FRAC = 0.05
"""Robust deviation of the samples over their median beyond which a trial is called unstable: quiet GPUs show
below 1%, quiet virtual CPUs 1 to 3%."""
UNSTABLE_DRIFT_FRAC = 0.05
"""Change over the trial, by the Theil-Sen slope, beyond which it is called unstable."""
FEWEST_FOR_STABILITY = 4
"""Samples below which spread and drift say nothing."""


def median(samples: Sequence[float]) -> float:
    """Middle value; raises ValueError when there is none."""
    if not samples:
        raise ValueError("median of no samples")
    return float(np.median(np.asarray(samples, dtype=float)))


def mad(samples: Sequence[float]) -> float:
    """Median absolute deviation from the median, in the unit of the samples."""
    middle = median(samples)
    return median([abs(sample - middle) for sample in samples])


def spread_frac(samples: Sequence[float]) -> float:
    """Robust relative standard deviation: 1.4826 x MAD / median."""
    return MAD_TO_SD * mad(samples) / median(samples)


def median_interval(samples: Sequence[float], coverage: float = 0.8) -> tuple[float, float]:
    """Interval of the *median* itself, distribution-free: order statistics by the binomial law.

    Holds at least `coverage` of the time; with few samples it is the whole range.
    """
    ordered = sorted(samples)
    n = len(ordered)
    if not ordered:
        raise ValueError("interval of no samples")
    below = [math.comb(n, i) / 2**n for i in range(n + 1)]
    rank = 0
    while rank + 1 <= (n - 1) // 2 and 1 - 2 * sum(below[: rank + 2]) >= coverage:
        rank += 1
    return float(ordered[rank]), float(ordered[n - 1 - rank])


def drift_frac(samples: Sequence[float]) -> float:
    """Change from first to last sample over the median: Theil-Sen slope (median of pairwise slopes) x length."""
    slopes = [(samples[j] - samples[i]) / (j - i) for i in range(len(samples)) for j in range(i + 1, len(samples))]
    return median(slopes) * (len(samples) - 1) / median(samples) if slopes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """Whether a trial's samples can be trusted, with the numbers that say so."""

    spread_frac: float
    drift_frac: float

    @property
    def unstable(self) -> bool:
        """Scattered or drifting beyond the thresholds."""
        return self.spread_frac > UNSTABLE_SPREAD_FRAC or abs(self.drift_frac) > UNSTABLE_DRIFT_FRAC


def stability(samples: Sequence[float]) -> Stability:
    """Spread and drift of the samples; with fewer than four, nothing is claimed."""
    if len(samples) < FEWEST_FOR_STABILITY:
        return Stability(spread_frac=0.0, drift_frac=0.0)
    return Stability(spread_frac=spread_frac(samples), drift_frac=drift_frac(samples))
