"""Lengths of samples of which only the mean is known, and how long a micro-batch's longest then is.

Of all distributions of a positive length with a given mean the exponential one assumes least (it has the largest
entropy), so it stands in; lengths are cut at ``max_length``. The ends of what is said are samples all alike, whose
micro-batches are as long as the mean, and lengths that are more unlike: exponential ones to the power `STRETCH`.
"""

from __future__ import annotations

import math

import numpy as np

from tunecast.model.curves import Array

POINTS = 4096
"""Of the integral over lengths."""
BISECTIONS = 60
STRETCH = 1.65
"""Power of exponential lengths whose mean square is 4 times the square of their mean, twice that of exponential ones:
as uneven as is assumed elsewhere (`flat_rows.MOST_UNEVEN`)."""
FLATTEST = 1e6
"""Scale over the cut from which practically every sample is cut."""


def scale_of(mean: float, cut: float) -> float:
    """Scale s of the exponential whose lengths, cut at `cut`, have this mean: s (1 - exp(-cut / s)) = mean."""
    low, high = mean, cut * FLATTEST
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if -middle * math.expm1(-cut / middle) < mean else (low, middle)
    return math.sqrt(low * high)


def likely_lengths(batch: int, mean: float, cut: float, multiple: int, parts: int) -> Array:
    """(parts,) means of equally likely parts of the lengths of the longest of `batch` such samples, the shortest first:
    lengths at `POINTS` probabilities, cut and filled up to a `multiple`; their mean is `longest_of`'s."""
    whole = longest_of(batch, mean, cut, multiple)
    if mean >= cut:
        return np.full(parts, whole)
    likely = (np.arange(POINTS) + 0.5) / POINTS
    found = lengths_at(likely ** (1.0 / batch), mean, cut, multiple).reshape(parts, -1).mean(axis=1)
    return np.asarray(found * (whole / found.mean()))


def lengths_at(likely: Array, mean: float, cut: float, multiple: int = 1) -> Array:
    """Lengths of samples at these probabilities, cut and filled up to a `multiple`."""
    exact = -scale_of(mean, cut) * np.log1p(-likely) if mean < cut else np.full(len(likely), float(cut))
    return np.asarray(np.ceil(np.minimum(exact, cut) / multiple) * multiple if multiple > 1 else np.minimum(exact, cut))


def equal_parts(lengths: Array, likely: Array, parts: int) -> Array:
    """(parts,) means of equally likely parts of lengths, the shortest first; `likely` has the probability of one below
    the first, that of one up to the first, and so on."""
    so_far = np.concatenate([[0.0], np.cumsum(lengths * np.diff(likely))])
    return np.asarray(np.diff(np.interp(np.arange(parts + 1) / parts, likely, so_far)) * parts)


def longest_of(batch: int, mean: float, cut: float, multiple: int = 1) -> float:
    """Mean of the longest of `batch` such samples: the integral of 1 - (1 - exp(-x / s))^batch up to the cut, or where
    it is filled to a `multiple` that steps are wide, the last one beyond the cut."""
    if mean >= cut:
        return math.ceil(cut / multiple) * multiple
    if multiple > 1:
        x = np.arange(0.0, cut, multiple)
        wide = np.full(len(x), float(multiple))
    elif batch == 1:
        return mean
    else:
        x = (np.arange(POINTS) + 0.5) * (cut / POINTS)
        wide = np.full(POINTS, cut / POINTS)
    shorter = -np.expm1(-x / scale_of(mean, cut))
    return float(np.sum((1.0 - shorter**batch) * wide))


def stretched_longest(batch: int, mean: float, cut: float, multiple: int = 1) -> float:
    """Mean of the longest of `batch` samples of this mean, cut and filled up, whose lengths are exponential ones to the
    power `STRETCH`."""
    if mean >= cut:
        return math.ceil(cut / multiple) * multiple
    likely = (np.arange(POINTS) + 0.5) / POINTS
    unscaled = (-np.log1p(-likely)) ** STRETCH
    low, high = mean / float(unscaled.max()), cut * FLATTEST
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if np.minimum(middle * unscaled, cut).mean() < mean else (low, middle)
    longest = np.minimum(high * (-np.log1p(-(likely ** (1.0 / batch)))) ** STRETCH, cut)
    return float(np.mean(np.ceil(longest / multiple) * multiple if multiple > 1 else longest))
