"""Samples of a micro-batch laid end to end: one row without padding, whose samples attention keeps apart.

TRL's ``padding_free`` without packing, axolotl's ``batch_flattening`` (``DataCollatorWithFlattening`` of transformers):
a micro-batch of B samples has the sum S of their lengths, not B times the longest. Copies of the model that meet wait
for the largest of their sums. Lengths are independent draws from the data's, so that the distribution of S is theirs
convolved with itself B times, on `BINS` steps of the longest.

Attention has the pairs of each sample, in the mean B E[l^2] / 2. A row of S tokens is timed as one of equal documents
whose length grows with S,

    span = S u / (u + B - 1),   u = E[l^2] / E[l]^2

with which both the mean over S and a micro-batch of one sample (span S) are right, and with exponential lengths every S
(they are Dirichlet given their sum).

Memory is that of the largest sum of an epoch of n micro-batches, in the median: the quantile 0.5^(1/n) of the sums.
Samples in the order of their lengths (``--group-by-length``) make micro-batches of samples nearly alike, of which
those of the copies that meet follow each other: they wait for the first of theirs (`grouped_rows`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from tunecast.model.curves import Array
from tunecast.model.dataset import Dataset
from tunecast.model.factors import Factor
from tunecast.model.grouped_rows import group_size, length_in, mean_lengths
from tunecast.model.row_lengths import LIKELY, Rows, waited_for, whole
from tunecast.model.run import Run
from tunecast.model.sample_lengths import POINTS, equal_parts, lengths_at

BINS = 512
"""Steps that the longest sample is counted in."""
MOST_SUMMED = 1024
"""Samples of a micro-batch whose sum is convolved; that of more scatters less, by 2% or so, and is taken to scatter as
much."""
MOST_UNEVEN = 4.0
"""Mean of squares over the squared mean, at the high end of what is assumed of lengths: that of a log-normal of log
deviation 1.18; conversations are rarely more uneven."""
HOW = "samples of a micro-batch end to end, without padding"
MICRO_BATCHES = 10_000
"""Micro-batches of a run of which nothing says how many there are, an assumption: the largest of so many decides
memory."""


@lru_cache(maxsize=64)
def _chances(lengths: tuple[float, ...], cut: int, batch: int) -> Array:
    """(BINS x batch + 1,) chances of each sum of `batch` draws from equally likely lengths, in steps of cut / BINS; a
    length between two steps goes to both so that the mean stays."""
    places = np.asarray(lengths, dtype=float) * (BINS / cut)
    below = np.minimum(places.astype(int), BINS - 1)
    up = places - below
    one = np.bincount(below, 1.0 - up, BINS + 1) + np.bincount(below + 1, up, BINS + 1)
    size = BINS * batch + 1
    found = np.fft.irfft(np.fft.rfft(one / len(places), size) ** batch, size)
    found = np.maximum(found, 0.0)
    return np.asarray(found / found.sum())


def flat_lengths(lengths: tuple[float, ...], cut: int, batch: int, copies: int, parts: int) -> Array:
    """(parts,) means of equally likely parts of the tokens per sample of the largest of `copies` micro-batches, each of
    `batch` draws from equally likely lengths up to `cut`; the smallest first."""
    summed = min(batch, MOST_SUMMED)
    chances = _chances(lengths, cut, summed)
    per_sample: Array = np.arange(len(chances), dtype=np.float64) * (cut / BINS / summed)
    so_far = np.concatenate([[0.0], np.minimum(np.cumsum(chances), 1.0)])
    so_far[-1] = 1.0
    return equal_parts(per_sample, np.asarray(so_far**copies, dtype=np.float64), parts)


def largest(lengths: tuple[float, ...], cut: int, batch: int, micro_batches: float) -> float:
    """Tokens per sample of the largest of so many micro-batches, in the median: their sums' quantile 0.5^(1/n)."""
    summed = min(batch, MOST_SUMMED)
    so_far = np.cumsum(_chances(lengths, cut, summed))
    place = int(np.searchsorted(so_far, 0.5 ** (1.0 / max(micro_batches, 1.0))))
    return min(place, BINS * summed) * cut / BINS / summed


def unevenness_of(lengths: tuple[float, ...]) -> float:
    """Mean of squares over the squared mean."""
    each = np.asarray(lengths, dtype=float)
    return float((each**2).mean() / each.mean() ** 2)


def lengths_of_mean(mean: float, cut: int) -> tuple[float, ...]:
    """Equally likely lengths of which only the mean is known (`sample_lengths`); the mean itself is kept."""
    if mean >= cut:
        return (float(cut),)
    found = lengths_at((np.arange(POINTS) + 0.5) / POINTS, mean, cut)
    return tuple(np.minimum(found * (mean / found.mean()), cut))


@lru_cache(maxsize=64)
def _thinned(found: Dataset, size_bytes: float, most: int) -> tuple[float, ...]:
    """At most `POINTS` equally likely lengths with the mean of a file's, `most` tokens of so many bytes at most."""
    each = np.sort(np.asarray(found.lengths(size_bytes, most), dtype=float))
    if len(each) <= POINTS:
        return tuple(each)
    return tuple(equal_parts(each, np.arange(len(each) + 1) / len(each), POINTS))


def sorted_lengths(lengths: tuple[float, ...], batch: int, copies: int, group: int) -> Array:
    """`flat_lengths` of samples that are sorted by length, so many together."""
    each = np.sort(np.asarray(lengths, dtype=float))
    return mean_lengths(batch, copies, group, length_in(each), LIKELY)


def _rows(
    run: Run, lengths: tuple[float, ...], dense: tuple[float, ...], micro_batches: float, group: int | None
) -> Rows:
    """Rows by equally likely lengths, of samples that are sorted, `group` together, or as they come; `dense` are the
    same at the low end of the bytes that a token has."""
    batch = run.per_device_train_batch_size
    together = batch if group is None else 1
    cut, densest = (max(math.ceil(max(each)), 1) for each in (lengths, dense))  # no sample is longer
    if group is None:
        own, of_all = (flat_lengths(lengths, cut, batch, copies, LIKELY) for copies in (1, run.dp))
        waited = waited_for(own, of_all, run)
    else:  # the first copy has the longest in every micro-step
        own, waited = (sorted_lengths(lengths, batch, copies, group) for copies in (1, run.dp))
    many, order = run.dp > 1, "" if group is None else f", in the order of their lengths within {group}"
    return Rows(
        length=whole(waited.mean()),
        own_length=whole(own.mean()),
        mean_tokens=sum(lengths) / len(lengths),
        samples=None,
        how=HOW + order + (f", {run.dp} copies of the model waiting for the largest" if many else ""),
        lengths=tuple(whole(length) for length in waited),
        peak=max(min(math.ceil(largest(dense, densest, together, micro_batches)), densest), whole(own.mean())),
        micro_batches=max(round(micro_batches), 1),
    )


@lru_cache(maxsize=256)
def flat_of_mean(run: Run, mean: float, samples: float | None, *, grouped: bool) -> Rows:
    """Rows of samples of which only the mean length is known, and how many there are, or not."""
    lengths = lengths_of_mean(mean, run.max_length)
    batches = MICRO_BATCHES if samples is None else samples / run.per_device_train_batch_size
    rows = _rows(run, lengths, lengths, batches, group_size(run, samples) if grouped else None)
    uneven = unevenness_of(lengths)
    if run.dp == 1 or uneven == 1.0:
        return rows
    longest = whole(min(mean + (rows.length - mean) * math.sqrt((MOST_UNEVEN - 1.0) / (uneven - 1.0)), run.max_length))
    ends = f"the interval of the whole run, not that of a step, goes from {whole(mean)}, all alike, to {longest}"
    return replace(rows, how=f"{rows.how}; {ends}", shortest=whole(mean), longest=max(longest, rows.length))


@lru_cache(maxsize=256)
def flat_of_file(found: Dataset, per_token: Factor, run: Run, *, grouped: bool) -> Rows:
    """Rows of a file's samples."""
    most = run.max_length
    samples = found.pieces(per_token.value, most)
    if samples < 1:
        raise found.none_left(most)
    lengths, dense = (_thinned(found, size, most) for size in (per_token.value, per_token.low))
    group = group_size(run, samples) if grouped else None
    rows = _rows(run, lengths, dense or lengths, samples / run.per_device_train_batch_size, group)
    ends = [found.tokens(size, most) / samples for size in (per_token.low, per_token.value, per_token.high)]
    known = per_token.low == per_token.high
    longer = rows.length / rows.mean_tokens
    return replace(
        rows,
        samples=samples,
        shortest=None if known else whole(min(ends) * longer),
        longest=None if known else whole(max(ends) * longer),
    )
