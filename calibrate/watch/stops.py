"""Evaluations and checkpoints that a job still has before it, and what they take by those that it had."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunecast.model.value import Value, exact

EVALUATION, SAVE, BOTH = "evaluation", "save", "evaluation and save"
"""What a job stops its steps for."""


def kind_of(*, evaluates: bool, saves: bool) -> str:
    """Which of the three this is; empty for neither."""
    return BOTH if evaluates and saves else EVALUATION if evaluates else SAVE if saves else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Every how many steps a job stops; None: never."""

    evaluates_every: int | None = None
    saves_every: int | None = None
    saves_at_end: bool = False

    def ahead(self, step: int, last: int) -> dict[str, int]:
        """How many stops of each kind come after step `step` and no later than after step `last`."""

        def due(every: int | None) -> int:
            return last // every - step // every if every and last > step else 0

        both = due(math.lcm(self.evaluates_every, self.saves_every)) if self.evaluates_every and self.saves_every else 0
        alone = {EVALUATION: due(self.evaluates_every) - both, SAVE: due(self.saves_every) - both}
        if self.saves_at_end and self.saves_every and last % self.saves_every and last > step:
            with_it = bool(self.evaluates_every) and last % (self.evaluates_every or 1) == 0
            alone[EVALUATION] -= with_it
            both += with_it
            alone[SAVE] += not with_it
        return {kind: count for kind, count in {**alone, BOTH: both}.items() if count}


def planned_stops(args: Any, state: Any) -> Stops:
    """From a ``TrainingArguments`` and the ``TrainerState`` of a training that begins."""
    epochs = math.ceil(float(args.num_train_epochs)) if args.max_steps <= 0 else None

    def every(strategy: Any, steps: Any) -> int | None:
        name = str(getattr(strategy, "value", strategy))
        if name == "epoch" and epochs:
            return max(round(int(state.max_steps) / epochs), 1)
        return int(steps) if name == "steps" and steps and steps >= 1 else None

    return Stops(
        evaluates_every=every(args.eval_strategy, state.eval_steps),
        saves_every=every(args.save_strategy, state.save_steps),
        saves_at_end=str(getattr(args.save_strategy, "value", args.save_strategy)) == "steps",
    )


def expected(ahead: dict[str, int], seen: Sequence[tuple[str, float]]) -> tuple[Value, dict[str, int]]:
    """(seconds of the stops ahead, those of a kind that was not seen yet, which are not in them).

    Each as the mean of its kind, from the shortest to the longest that was seen.
    """
    low = point = high = 0.0
    unseen = {}
    for kind, count in ahead.items():
        own = [seconds for other, seconds in seen if other == kind]
        if not own:
            unseen[kind] = count
            continue
        low, point, high = low + count * min(own), point + count * sum(own) / len(own), high + count * max(own)
    return (Value(value=point, low=low, high=high) if point else exact(0.0)), unseen


def unseen_words(unseen: dict[str, int]) -> str:
    """What a time left is without; empty where nothing is missing."""
    total = sum(unseen.values())
    if not total:
        return ""
    kinds = {EVALUATION: "evaluations", SAVE: "saves", BOTH: "evaluations with saves"}
    if total == 1:
        (kind,) = unseen
        return f" without 1 {kind}, not seen yet"
    return " without " + " and ".join(f"{count} {kinds[kind]}" for kind, count in unseen.items()) + ", not seen yet"
