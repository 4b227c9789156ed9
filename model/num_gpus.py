"""``--num-gpus auto``: the fewest GPUs on which the run very likely fits and, with a deadline, is done in time.

With a stack that splits layers, and nothing said of it, copies of the model over as few of them as fit. Micro-batch and
accumulation per GPU stay as they are, so more GPUs mean a larger global batch and fewer steps for the same data. A
training file is read anew with each number, as if it had been typed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.estimate import forecast
from tunecast.model.file_spread import with_dtypes
from tunecast.model.fits import TIGHT_BELOW, fit_probability, memory_view
from tunecast.model.forecast import Forecast
from tunecast.model.layer_splits import INNER, LAYERS, NO_SPLIT, Split, gpus_per_copy, split_words, splits_tried
from tunecast.model.on_device import resolve_for, target_factors
from tunecast.model.plans import gpu_counts, simplest_of_fastest
from tunecast.model.question import Question
from tunecast.model.rows import held_run
from tunecast.model.target import Target
from tunecast.model.units import HOUR_S, MINUTE_S

AUTO = "auto"
MOST_GPUS = 128
"""Largest job that is tried."""
LEAST_PROBABILITY = TIGHT_BELOW
"""Of fitting; below it the next number is tried."""
HOURS = {"": 1.0, "h": 1.0, "min": 1.0 / 60.0, "m": 1.0 / 60.0, "d": 24.0}


def parse_num_gpus(text: str | int) -> int | str:
    """A whole number above 0, or ``auto``."""
    if text == AUTO:
        return AUTO
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise InputError(f"--num-gpus is {text!r}, which is neither a whole number above 0 nor auto; type 8, say.")
    return count


def parse_hours(text: str | float, *, name: str = "--deadline") -> float:
    """``24h``, ``90min``, ``3d`` or plain hours."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(h|min|m|d|)\s*", str(text))
    hours = float(match[1]) * HOURS[match[2]] if match else 0.0
    if not (math.isfinite(hours) and hours > 0):
        raise InputError(f"{name} is {text!r}, which is no time above 0 in min, h or d; type it as 24h, 90min or 3d.")
    return hours


def is_auto(question: Question) -> bool:
    """Whether the number of GPUs is to be found."""
    return question.options.get("num_gpus") == AUTO


def ways_for(question: Question, target: Target) -> Iterator[tuple[int, Split]]:
    """Numbers of GPUs to try, and splits of the layers where nobody asked for one, each resolved when its turn comes:
    one GPU for a CPU, else whole copies of the model.

    Raises InputError where none is, and what resolving the largest raises where the job can have none.
    """
    if target.platform == "cpu":
        yield 1, {}
        return
    counts = counts_tried(question.options)
    ways = [(count, split) for count in counts for split in splits_tried(question.options) if is_whole(count, split)]
    taken = False
    for way in filter(lambda way: can_be_of(question, way[0], way[1], target), ways):
        taken = True
        yield way
    if not taken:
        resolve_for(with_count(question, counts[-1]), target)


def counts_tried(options: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of GPUs that are whole copies of the model, as the options split it.

    Raises InputError where one copy takes more than are tried.
    """
    inner = gpus_per_copy(options, *INNER)
    if inner > MOST_GPUS:
        splits = " x ".join(f"--{name} {options[name]}" for name in INNER if options.get(name))
        raise InputError(
            f"--num-gpus auto tries up to {MOST_GPUS} GPUs, but {splits} takes {inner} of them per copy of the model; "
            f"type --num-gpus {inner}, or a multiple of it."
        )
    return gpu_counts(MOST_GPUS, inner)


def is_whole(count: int, split: Split) -> bool:
    """Whether so many GPUs are whole copies of a model split so."""
    return count % gpus_per_copy(split, *INNER) == 0


def can_be_of(question: Question, count: int, split: Split, target: Target) -> bool:
    """Whether the job can have so many GPUs, and its layers be split so."""
    try:
        resolve_for(with_count(question, count, split), target)
    except (InputError, NotSupportedError):
        return False
    return True


def with_count(question: Question, count: int, split: Split = NO_SPLIT) -> Question:
    """The question with a number of GPUs, and with its layers split; one copy of the model takes no sharding.

    Raises what the training file has against the number.
    """
    if question.options_on is not None:
        options = dict(question.options_on(count))
    else:
        options = {**question.options, "num_gpus": count}
        if count == gpus_per_copy(split, *INNER) and options.get("sharding") is not None:
            del options["sharding"]
            options = with_dtypes(options, None)
    searched = dict.fromkeys(("num_gpus", *split), "searched")
    return replace(question, options={**options, **split}, option_origins={**question.option_origins, **searched})


def likely_fits(question: Question, target: Target) -> bool | None:
    """Whether the run fits with the wanted probability; None where the card's usable memory is unknown."""
    run = held_run(resolve_for(question, target).run, question.options)
    view = memory_view(question.architecture, run, target, target_factors(target, run), question.source)
    probability = fit_probability(view)
    return None if probability is None else probability >= LEAST_PROBABILITY


def fewest_gpus(question: Question, target: Target, deadline_h: float | None = None) -> tuple[Question, str]:
    """The question with the fewest GPUs of those tried that fit and are in time, and a sentence; else with the most.

    Copies of the model are over as few GPUs as fit, and split as is fastest over so many.
    """
    tried: Question | None = None
    roomy: Question | None = None
    counts: dict[int, None] = {}
    for (count, _), ways in groupby(ways_for(question, target), key=_sizes):
        counts[count] = None
        if roomy is not None and roomy.options["num_gpus"] == count:
            continue  # less of a split fits on as many, and is late
        fitting: list[tuple[Question, Split, bool | None]] = []
        for _, split in ways:
            tried = with_count(question, count, split)
            fits = likely_fits(tried, target)
            if fits is not False:
                fitting.append((tried, split, fits))
        if not fitting:
            continue
        found = None if len(fitting) == 1 and deadline_h is None else [forecast(asked, target) for asked, *_ in fitting]
        best = 0 if found is None else simplest_of_fastest([each.step_time_s.value for each in found])
        roomy, split, fits = fitting[best]
        if found is None or deadline_h is None or not _late(found[best], deadline_h):
            why = _why(list(counts), deadline_h) if fits else "usable memory unknown"
            return roomy, f"--num-gpus auto: {_gpus(count, split)}, {why}{_batch_words(roomy, target)}"
    most = roomy or tried
    assert most is not None, "one number at least is tried, or refused"
    are, do = ("is", "does") if most.options["num_gpus"] == 1 else ("are", "do")
    late_words = None if roomy is None or deadline_h is None else f"{are} not done within {_time(deadline_h)}"
    why = late_words or f"{do} not fit with a probability of {LEAST_PROBABILITY:.0%}"
    split = {name: most.options[name] for name in LAYERS if most.option_origins.get(name) == "searched"}
    return most, f"--num-gpus auto: even {_gpus(most.options['num_gpus'], split)} {why}"


def _batch_words(question: Question, target: Target) -> str:
    """That every copy of the model adds its own samples to a step, where there are several."""
    run = resolve_for(question, target).run
    if run.dp == 1:
        return ""
    samples = run.per_device_train_batch_size * run.gradient_accumulation_steps * run.dp
    return f"; each of {run.dp} data-parallel ranks trains its own samples, so the global batch is {samples}"


def _why(counts: list[int], deadline_h: float | None) -> str:
    """Why it is the last of these numbers."""
    in_time = "" if deadline_h is None else f" and are done within {_time(deadline_h)}"
    enough = f"with a probability of {LEAST_PROBABILITY:.0%}{in_time}"
    if len(counts) == 1:
        return f"the fewest that the job can have, where it fits {enough}"
    return f"the first of {', '.join(map(str, counts))} that fit {enough}"


def _sizes(way: tuple[int, Split]) -> tuple[int, int]:
    count, split = way
    return count, gpus_per_copy(split, *INNER)


def _time(hours: float) -> str:
    return f"{hours:g} h" if hours >= 1.0 else f"{hours * HOUR_S / MINUTE_S:g} min"


def _gpus(count: int, split: Split = NO_SPLIT) -> str:
    return ("1 GPU" if count == 1 else f"{count} GPUs") + (f" with {split_words(split)}" if split else "")


def _late(found: Forecast, deadline_h: float) -> bool:
    if found.total_time_h is None:
        raise InputError("--deadline needs an amount of data; add --tokens 10M, --num-samples 5000 or --max-steps 500.")
    return found.total_time_h.value > deadline_h
