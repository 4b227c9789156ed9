"""Data that come slower than the GPU works: rows tokenized while training.

Usually data are tokenized before training (phase ``prepare``) and a loader only copies them. With ``--streaming`` every
row is tokenized when its turn comes: by the loader's workers beside the training, which then waits for

    tokens of its own rows / (rate of one process x workers)

where that is longer than the step; or, without workers (Trainer's default), by the process that also issues kernels, so
that both are done one after the other. Every GPU has a loader of its own. Padding is not tokenized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.model.factors import Factor
from tunecast.model.resolve import whole_number
from tunecast.model.rows import Rows
from tunecast.model.run import Run
from tunecast.model.time import StepTime
from tunecast.model.value import Z80, Value

RATE = "tokenize_tokens_per_s"


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

    def least_s(tokens_per_s: float) -> float:
        data_s = tokens / (tokens_per_s * max(workers, 1))
        return data_s if workers else data_s + timing.host_s

    plain = timing.step_time_s
    step = Value(
        value=max(plain.value, least_s(rate.value)),
        low=max(plain.low, least_s(rate.high)),
        high=max(plain.high, least_s(rate.low)),
    )
    label = "given" if rate.origin == "cli" else rate.origin
    note = (
        f"rows are tokenized while training, {tokens:,.0f} tokens a step on each GPU's host by {beside}, at "
        f"{rate.value:,.0f} tokens/s each ({label}; --phase-rate {RATE}=X)"
    )
    slowest = "data" if workers or least_s(rate.value) > 2.0 * timing.host_s else "host"
    return _slowed(timing, step, slowest), (note,)


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
        log_sd=max(math.log(step.high / step.low) / 2.0 / Z80, timing.log_sd),
    )
