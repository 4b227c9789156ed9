"""Rows of a table whose samples lie end to end without padding, and of which the mean length is stated (`flat_rows`).

No token is padding: tokens/s and samples/s say the same, and either is compared. Attention has the pairs of each
sample, by lengths as a forecast with ``--padding-free --no-packing --mean-tokens`` takes them; the largest of
`flat_rows.MICRO_BATCHES` decides memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.calibrate.cell_grammar import facts_of
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.run_table import SkipRowError
from tunecast.model.documents import ends_of, flat_by_stack
from tunecast.model.flat_rows import lengths_of_mean, unevenness_of
from tunecast.model.resolve_attention import check_apart
from tunecast.model.rows import lays_flat
from tunecast.model.run import Run

FIELDS = ("stack", "attn_implementation", "fused_kernels", "cp")
"""Run fields that decide whether attention ends where a sample does."""


def options_of(mean: float, run: Run) -> dict[str, Any]:
    """Options of an estimate that lays samples of this mean length end to end."""
    return {"mean_tokens": mean, "packing": False, "padding_free": True, "max_length": run.max_length}


def flat_run(found: PublishedRun, mean: float) -> Run:
    """The run with its samples end to end. Raises InputError where its attention would not keep them apart, and
    NotSupportedError where that is not built."""
    run = found.run
    check_apart(found.architecture, {name: getattr(run, name) for name in FIELDS})
    return replace(run, samples_unevenness=round(unevenness_of(lengths_of_mean(mean, run.max_length)), 4))


def flat_by_default(row: Mapping[str, str], found: PublishedRun, mean: float) -> bool:
    """Whether the row's software lays samples end to end unless told otherwise, and its cell says no more than that
    they are not packed."""
    try:
        told = facts_of("packed", row.get("packed", ""))
    except SkipRowError:  # words of padding
        return False
    if told not in (None, {"packing": False}):
        return False
    run = found.run
    said = {"stack": run.stack, "stack_version": run.stack_version, "mean_tokens": mean, "packing": False}
    added, _ = flat_by_stack(found.architecture, said)
    return lays_flat({**said, **added, "attn_implementation": run.attn_implementation})


def unevenness_ends(timed: Run, run: Run, mean: float) -> tuple[Run, Run]:
    """The timed run with samples all alike, and with samples as unlike as is assumed possible of those that are cut at
    the row's own length (`run`)."""
    ends = ends_of(timed, options_of(max(mean, 1.0), run))  # rounded, a mean of 1 may fall below it
    assert ends is not None, "only the mean of these samples is known"
    return ends
