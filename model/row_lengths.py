"""What is known of the length of rows that are samples, and whose rows a step waits for (`rows`, `flat_rows`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tunecast.model.curves import Array
from tunecast.model.run import Run
from tunecast.model.sharding import keeps_weights, shards_of

LIKELY = 8
"""Equally likely lengths that a step is timed at where rows are samples of unlike lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one sample each."""

    length: int
    """Tokens of a mean row, padding included, of the copy of the model that the others wait for."""
    own_length: int
    """Tokens of a mean row of any copy."""
    mean_tokens: float
    """Tokens of a mean sample, cut at ``max_length``."""
    samples: float | None
    """Of one epoch; None where the data do not say."""
    how: str
    lengths: tuple[int, ...]
    """Equally likely lengths of the rows waited for, the shortest first, of which `length` is the mean."""
    shortest: int | None = None
    """Tokens of a mean row at the low end of what is assumed of the data; None: nothing is."""
    longest: int | None = None
    """At the high end."""
    peak: int | None = None
    """Of samples laid end to end: tokens per sample of the largest micro-batch, which decides memory."""
    micro_batches: int | None = None
    """The largest of so many."""

    @property
    def flat(self) -> bool:
        """Whether samples are laid end to end (`flat_rows`)."""
        return self.peak is not None

    @property
    def padding_frac(self) -> float:
        """Share of the tokens of the rows waited for that are padding, or that other copies do not have."""
        return max(1.0 - self.mean_tokens / self.length, 0.0)

    @property
    def own_padding_frac(self) -> float:
        """Share of a copy's own tokens that are padding."""
        return max(1.0 - self.mean_tokens / self.own_length, 0.0)


def whole(length: float) -> int:
    return max(round(float(length)), 1)


def waited_for(own: Array, of_all: Array, run: Run) -> Array:
    """Tokens of the rows that a job waits for, where a copy's own are `own` and the longest of all copies' rows of one
    micro-step `of_all`."""
    return of_all if copies_meet(run) else own + (of_all - own) / math.sqrt(run.gradient_accumulation_steps)


def copies_meet(run: Run) -> bool:
    """Whether copies of the model wait for each other in every micro-step, not once in a step."""
    shards = shards_of(run)
    return (shards.weights and not keeps_weights(run)) or shards.gradients or run.sync_each_micro_batch


def filled(length: float, run: Run) -> int:
    """A row of one sample of so many tokens, filled up."""
    return max(math.ceil(round(length) / run.pad_to_multiple_of), 1) * run.pad_to_multiple_of


def longest_row(run: Run) -> int:
    """Tokens of a row of one sample that was cut at ``max_length``, filled up."""
    return filled(run.max_length, run)
