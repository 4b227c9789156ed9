"""Evaluations and checkpoints that a job still has before it, and what they take by those that it had."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tunecast.calibrate.words import listed
from tunecast.model.value import Value

EVALUATION, SAVE, BOTH = "evaluation", "save", "evaluation and save"
"""What a job stops its steps for."""
Plan = Sequence[tuple[int, str]]
"""The step after which each stop comes, in order, and its kind."""


def kind_of(control: Any) -> str:
    """What a ``TrainerControl`` asks for; empty for neither."""
    if control.should_evaluate and control.should_save:
        return BOTH
    return EVALUATION if control.should_evaluate else SAVE if control.should_save else ""


def planned_stops(args: Any, state: Any, steps_per_epoch: int | None) -> Plan:
    """The stops of a training that begins, as transformers' own ``DefaultFlowCallback`` asks for them.

    `args` is a ``TrainingArguments``, `state` its ``TrainerState``; without `steps_per_epoch` those at the ends of
    epochs are not known. A callback of the user's that asks for others is not foreseen.
    """
    from transformers.trainer_callback import DefaultFlowCallback, TrainerControl

    flow, seen, last = DefaultFlowCallback(), copy.copy(state), int(state.max_steps)
    found: list[tuple[int, str]] = []
    due = {last}
    for every in (state.eval_steps, state.save_steps):
        due |= set(range(int(every), last + 1, int(every))) if every and every >= 1 else set()
    for step in sorted(due):
        seen.global_step = step
        seen.epoch = step / steps_per_epoch if steps_per_epoch else None
        control = TrainerControl()
        flow.on_step_end(args, seen, control)
        found.append((step, kind_of(control)))
    for epoch in range(1, math.ceil(last / steps_per_epoch) + 1 if steps_per_epoch else 0):
        seen.global_step, seen.epoch, control = min(epoch * (steps_per_epoch or 0), last), epoch, TrainerControl()
        flow.on_epoch_end(args, seen, control)
        found.append((seen.global_step, kind_of(control)))
    return sorted(((step, kind) for step, kind in found if kind), key=lambda stop: stop[0])


def steps_per_epoch(args: Any, dataloader: Any) -> int | None:
    """Optimizer steps of an epoch; None where the data have no length."""
    try:
        return max(math.ceil(len(dataloader) / int(args.gradient_accumulation_steps)), 1)
    except TypeError:
        return None


def expected(ahead: Counter[str], seen: Sequence[tuple[str, float]]) -> tuple[Value, Counter[str]]:
    """(seconds of the stops ahead, those of a kind that was not seen yet, which are not in them).

    Each as the mean of its kind, from the shortest to the longest that was seen.
    """
    low = point = high = 0.0
    unseen: Counter[str] = Counter()
    for kind, count in ahead.items():
        own = [seconds for other, seconds in seen if other == kind]
        if not own:
            unseen[kind] = count
            continue
        low, point, high = low + count * min(own), point + count * sum(own) / len(own), high + count * max(own)
    return Value(value=point, low=low, high=high), unseen


ONE = {EVALUATION: "evaluation", SAVE: "save", BOTH: "evaluation with a save"}
MANY = {EVALUATION: "evaluations", SAVE: "saves", BOTH: "evaluations with saves"}


def unseen_words(unseen: Counter[str]) -> str:
    """What a time left is without; empty where nothing is missing."""
    told = [f"{count} {ONE[kind] if count == 1 else MANY[kind]}" for kind, count in unseen.items() if count > 0]
    return f" without {listed(told)}, not seen yet" if told else ""
