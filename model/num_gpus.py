"""``--num-gpus auto``: the fewest GPUs on which the run very likely fits and, with a deadline, is done in time.

Micro-batch and accumulation per GPU stay as they are, so more GPUs mean a larger global batch and fewer steps
for the same data. A training file is read anew with each number, as if it had been typed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.estimate import forecast
from tunecast.model.file_spread import with_dtypes
from tunecast.model.fits import fit_probability, memory_view
from tunecast.model.forecast import Forecast
from tunecast.model.on_device import resolve_for, target_factors
from tunecast.model.plans import INNER, gpus_per_copy
from tunecast.model.question import Question
from tunecast.model.rows import held_run
from tunecast.model.target import Target
from tunecast.model.units import HOUR_S, MINUTE_S

AUTO = "auto"
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sizes that clouds sell machines in, and whole machines of eight."""
LEAST_PROBABILITY = 0.9
"""Of fitting; below it one more doubling is tried."""
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


def counts_for(question: Question, target: Target) -> Iterator[int]:
    """Numbers of GPUs to try, each resolved when its turn comes: one for a CPU, else those that tensor, pipeline and
    context parallelism divide.

    Raises InputError where they divide none, and what resolving the largest raises where the job can have none.
    """
    if target.platform == "cpu":
        yield 1
        return
    inner = gpus_per_copy(question.options, *INNER)
    counts = tuple(count for count in COUNTS if count % inner == 0)
    if not counts:
        splits = " x ".join(f"--{name} {question.options[name]}" for name in INNER if question.options.get(name))
        raise InputError(
            f"--num-gpus auto tries {', '.join(map(str, COUNTS))}, but {splits} takes {inner} GPUs per copy of the "
            f"model, which divides none of them; type --num-gpus {inner}, or a multiple of it."
        )
    taken = 0
    for taken in filter(lambda count: can_be_of(question, count, target), counts):
        yield taken
    if not taken:
        resolve_for(with_count(question, counts[-1]), target)


def can_be_of(question: Question, count: int, target: Target) -> bool:
    """Whether the job can have so many GPUs."""
    try:
        resolve_for(with_count(question, count), target)
    except (InputError, NotSupportedError):
        return False
    return True


def with_count(question: Question, count: int) -> Question:
    """The question with a number of GPUs; one GPU takes no sharding.

    Raises what the training file has against the number.
    """
    if question.options_on is not None:
        options = dict(question.options_on(count))
    else:
        options = {**question.options, "num_gpus": count}
        if count == 1 and options.get("sharding") is not None:
            del options["sharding"]
            options = with_dtypes(options, None)
    return replace(question, options=options, option_origins={**question.option_origins, "num_gpus": "searched"})


def likely_fits(question: Question, target: Target) -> bool | None:
    """Whether the run fits with the wanted probability; None where the card's usable memory is unknown."""
    run = held_run(resolve_for(question, target).run, question.options)
    view = memory_view(question.architecture, run, target, target_factors(target, run), question.source)
    probability = fit_probability(view)
    return None if probability is None else probability >= LEAST_PROBABILITY


def fewest_gpus(question: Question, target: Target, deadline_h: float | None = None) -> tuple[Question, str]:
    """The question with the fewest GPUs that fit and are in time, and a sentence; else the most that are forecast."""
    tried: Question | None = None
    why = f"do not fit with a probability of {LEAST_PROBABILITY:.0%}"
    for count in counts_for(question, target):
        asked = with_count(question, count)
        tried = tried or asked
        try:
            fits = likely_fits(asked, target)
            late = fits is not False and deadline_h is not None and _late(forecast(asked, target), deadline_h)
        except NotSupportedError:
            break
        tried = asked
        if fits is None and not late:
            return asked, f"--num-gpus auto: {_gpus(count)}, usable memory unknown"
        if fits and not late:
            in_time = "" if deadline_h is None else f" and are done within {_time(deadline_h)}"
            return asked, f"--num-gpus auto: {_gpus(count)}, the fewest that fit{in_time}"
        why = f"are not done within {_time(deadline_h)}" if fits and deadline_h is not None else why
    assert tried is not None, "one number at least is tried, or refused"
    most = tried.options["num_gpus"]
    return tried, f"--num-gpus auto: even {_gpus(most)} {why}"


def _time(hours: float) -> str:
    return f"{hours:g} h" if hours >= 1.0 else f"{hours * HOUR_S / MINUTE_S:g} min"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _late(found: Forecast, deadline_h: float) -> bool:
    if found.total_time_h is None:
        raise InputError("--deadline needs an amount of data; add --tokens 10M, --num-samples 5000 or --max-steps 500.")
    return found.total_time_h.value > deadline_h
