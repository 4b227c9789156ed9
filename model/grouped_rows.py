"""Rows of samples that are sorted by length before they are made into micro-batches (``--group-by-length``).

transformers' ``LengthGroupedSampler`` deals samples at random into groups of 50 times those of a step of one process
(of a quarter of the data, where these are fewer), sorts each from the longest sample down and goes through one group
after the other; accelerate's ``BatchSamplerShard`` gives consecutive micro-batches of it to the copies of the model. So
a micro-batch is padded to its first sample, and copies wait for the first of theirs together, whose process is always
the first: sums over the micro-batches of a step even nothing out. Where the samples of a micro-step cross into the next
group, its longest sample is among them.

The i-th shortest of m samples is taken to be as long as the sample at the probability (i - 1/2) / m. Source:
transformers 5.23 ``trainer_pt_utils.get_length_grouped_indices``, run by the tests. Left out: that the longest sample
of all is put first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tunecast.model.curves import Array
from tunecast.model.run import Run
from tunecast.model.sample_lengths import equal_parts

STEPS_A_GROUP = 50
GROUPS = 4
"""At least, before there are fewer steps in each."""
MICRO_STEPS = 4096
"""That are gone through at most, of all the ways in which they meet the ends of groups."""
MOST_PLACES = 1 << 22
"""Samples of the micro-steps that are gone through, where each is looked at."""


def group_size(run: Run, samples: float | None) -> int:
    """Samples that are sorted together, of so many in an epoch; None: of many."""
    step = run.per_device_train_batch_size * run.gradient_accumulation_steps
    if samples is None:
        return STEPS_A_GROUP * step
    return min(step * max(min(int(samples // (GROUPS * step)), STEPS_A_GROUP), 1), max(int(samples), 1))


def first_lengths(width: int, group: int, length_at: Callable[[Array], Array], parts: int) -> Array:
    """(parts,) means of equally likely parts of the lengths of the longest of `width` consecutive samples, the shortest
    first, over the ways in which these meet the ends of groups; `length_at` gives the length at a probability. `width`
    is at most `group`."""
    start = _starts(width, group, MICRO_STEPS)
    rank = np.where(start + width > group, group, group - start)
    return _likely(length_at((rank - 0.5) / group), parts)


def mean_lengths(batch: int, copies: int, group: int, length_at: Callable[[Array], Array], parts: int) -> Array:
    """(parts,) means of equally likely parts of the tokens a sample of the largest of `copies` consecutive
    micro-batches of `batch` samples, as samples laid end to end have them (`flat_rows`); else as `first_lengths`."""
    width = batch * copies
    start = _starts(width, group, min(MICRO_STEPS, max(MOST_PLACES // width, 1)))
    place = (start[:, None] + np.arange(width)) % group
    each = np.asarray(length_at((group - place - 0.5) / group), dtype=float)
    return _likely(each.reshape(len(start), copies, batch).mean(axis=2).max(axis=1), parts)


def length_in(each: Array) -> Callable[[Array], Array]:
    """The length at a probability, of equally likely lengths that are sorted."""
    return lambda at: each[(at * len(each)).astype(int)]


def _starts(width: int, group: int, most: int) -> Array:
    """Where in its group each micro-step of `width` samples begins, until the ends meet again; `most` of them."""
    period = group // math.gcd(width, group)
    return np.asarray(np.arange(min(period, most)) * width % group)


def _likely(lengths: Array, parts: int) -> Array:
    """(parts,) means of equally likely parts of equally likely lengths, the shortest first."""
    found = np.sort(np.asarray(lengths, dtype=float))
    return equal_parts(found, np.arange(len(found) + 1) / len(found), parts)
