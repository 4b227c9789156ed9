"""Data that come slower than the GPU works: rows tokenized while training.

Usually data are tokenized before training (phase ``prepare``) and a loader only copies them. With ``--streaming`` every
row is tokenized when its turn comes: by the loader's workers beside the training, which then waits for

    tokens of its own rows / (rate of one process x workers)

where that is longer than the step; or, without workers (Trainer's default), by the process that also issues kernels, so
that both are done one after the other. transformers' Trainer looks at the loss of every micro-batch before it fetches
the next (``logging_nan_inf_filter``), so that its device has no work meanwhile but an optimizer step that is under way.
Every GPU has a loader of its own. Padding is not tokenized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from tunecast.model.factors import Factor
from tunecast.model.operation import Phase
from tunecast.model.read_numbers import whole_number
from tunecast.model.row_lengths import Rows
from tunecast.model.run import Run
from tunecast.model.time import StepTime
from tunecast.model.value import INTERVAL_LEVEL, Z80, Value

if TYPE_CHECKING:
    from tunecast.model.curves import Array

RATE = "tokenize_tokens_per_s"
STRATA = 400
"""Equally likely values of each draw whose pairs give an interval."""


def text_tokens(run: Run, rows: Rows | None) -> float:
    """Tokens that one GPU's loader makes for an optimizer step; the GPUs of one copy share its rows."""
    share = 1.0 if rows is None else 1.0 - rows.padding_frac
    return run.tokens_per_micro_batch * run.gradient_accumulation_steps * share


def workers_of(options: Mapping[str, Any]) -> int:
    """The loader's worker processes; Trainer starts none unless told."""
    workers = options.get("dataloader_num_workers")
    return 0 if workers is None else whole_number("dataloader_num_workers", workers, at_least=0)


def fed(
    timing: StepTime, run: Run, rows: Rows | None, options: Mapping[str, Any], rate: Factor
) -> tuple[StepTime, tuple[str, ...]]:
    """The step time with what it waits for data, and a note; unchanged unless rows are tokenized on the way."""
    workers = workers_of(options)
    if not options.get("streaming"):
        return timing, ()
    tokens, beside = text_tokens(run, rows), f"{workers} workers" if workers else "the process that trains"
    data_s = Value(value=1.0 / rate.value, low=1.0 / rate.high, high=1.0 / rate.low).scaled(tokens / max(workers, 1))
    host_s = 0.0 if workers else _before_fetching(timing, run)
    step = later(timing.step_time_s, host_s, data_s)
    label = "given" if rate.origin == "cli" else rate.origin
    note = (
        f"rows are tokenized while training, {tokens:,.0f} tokens a step on each GPU's host by {beside}, at "
        f"{rate.value:,.0f} tokens/s each ({label}; --phase-rate {RATE}=X)"
    )
    slowest = "data" if workers or data_s.value > host_s else timing.bound_by if run.trainer_loop else "host"
    return _slowed(timing, step, slowest), (note,)


def _before_fetching(timing: StepTime, run: Run) -> float:
    """Seconds of a step in which its process fetches no row: while it issues, or until it has seen the last loss."""
    seen_s = timing.step_time_s.value - timing.phases_s.get(str(Phase.OPTIMIZER), 0.0)
    return max(timing.host_s, seen_s) if run.trainer_loop else timing.host_s


def later(step: Value, host_s: float, data_s: Value) -> Value:
    """The later of a step and of a host that issues for `host_s` and also makes the data, with its 80% interval.

    A sum's lower quantile rises with the spread of a skewed part; the interval is never narrower than at the part's
    median known.
    """
    own, tail = _draws(step)[:, None] / step.value, (1.0 - INTERVAL_LEVEL) / 2.0
    known, unsure = (
        np.quantile(np.maximum(own * step.value, own * host_s + data), (tail, 1.0 - tail), method="hazen")
        for data in (np.array([[data_s.value]]), _draws(data_s)[None, :])
    )
    value = max(step.value, host_s + data_s.value)
    return Value(value=value, low=min(float(known[0]), float(unsure[0]), value), high=max(float(unsure[1]), value))


def _draws(value: Value) -> Array:
    """Equally likely values: log-normal below and above the median, each side by its end of the 80% interval."""
    z = _normal_strata()
    down, up = math.log(value.value / value.low) / Z80, math.log(value.high / value.value) / Z80
    return np.asarray(value.value * np.exp(np.where(z < 0.0, down, up) * z))


@cache
def _normal_strata() -> Array:
    """Standard-normal values in the middle of equally likely parts."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / STRATA) for i in range(STRATA)])


def _slowed(timing: StepTime, step: Value, slowest: str) -> StepTime:
    """The step with its wait for data; `slowest` is what bounds it where it waits."""
    waited_s = step.value - timing.step_time_s.value
    waits = {"data": waited_s} if waited_s > 0.0 else {}
    return replace(
        timing,
        step_time_s=step,
        parts_s={**timing.parts_s, **waits},
        phases_s={**timing.phases_s, **waits},
        bound_by=slowest if waits else timing.bound_by,
        log_sd=math.log(step.high / step.low) / 2.0 / Z80,
    )
