"""The largest micro-batch and the longest sequence that fit.

"Fits" is the verdict of that name (`fits.TIGHT_BELOW`). Memory
never falls when batch or length grow, so the searches are exact; but for Unsloth's losses before 2026.10.9, where one
more token can mean four times the chunks (`unsloth_rules.py`): what they find fits, and more may fit too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.file_spread import with_dtypes
from tunecast.model.fits import LIKELY, TIGHT_BELOW, chance_said, fit_probability, memory_view
from tunecast.model.on_device import resolve_for, target_factors
from tunecast.model.question import Question
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_parallel import length_step
from tunecast.model.rows import held_run, lays_flat
from tunecast.model.run import BY_SPREAD, Run
from tunecast.model.step_source import StepSource
from tunecast.model.target import Target

MOST_SAMPLES = 1 << 14
"""Largest micro-batch that is looked for."""
MOST_TOKENS = 1 << 22
"""Longest sequence that is looked for in models without a limit of their own."""

Options = Mapping[str, Any]


def largest_that(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` for which `holds`, 0 if none; true for all below one that is true.

    Memory that is replayed (`replay`) does not grow evenly: there the answer holds and the next number tried does not.
    """
    low, high = 0, 1
    while high < most and holds(high):
        low, high = high, min(2 * high, most)
    if high == most and holds(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def chance_to_fit(architecture: Architecture, run: Run, target: Target, source: StepSource | None = None) -> float:
    """Probability that this run fits into the usable memory of the device."""
    found = fit_probability(memory_view(architecture, run, target, target_factors(target, run), source))
    if found is None:
        raise InputError(
            f"The usable memory of {target.id} is unknown, so what fits on it cannot be searched; leave "
            "--max-batch and --max-length-that-fits out, or name another card with --gpu."
        )
    return found


def run_fits(
    architecture: Architecture,
    run: Run,
    target: Target,
    source: StepSource | None = None,
    least: float = TIGHT_BELOW,
) -> bool:
    """Whether this run fits into the usable memory of the device with a probability of `least`: not tightly."""
    return chance_to_fit(architecture, run, target, source) >= least


def largest_micro_batch(
    architecture: Architecture,
    run: Run,
    target: Target,
    source: StepSource | None = None,
    held: Callable[[Run], Run] = lambda run: run,
) -> int:
    """Samples per GPU and forward pass that fit, at most `MOST_SAMPLES`; 0 when not even one does. `held` gives the run
    whose memory is that of one with so many."""

    def holds(samples: int) -> bool:
        return run_fits(architecture, held(replace(run, per_device_train_batch_size=samples)), target, source)

    return largest_that(holds, MOST_SAMPLES)


def longest_sequence(
    architecture: Architecture,
    run: Run,
    target: Target,
    most: int | None = None,
    source: StepSource | None = None,
    step: int = 1,
) -> int:
    """Tokens per sample that fit, a multiple of `step` and at most `most` (the model's own limit); 0 when none does."""
    limit = most or architecture.max_position or MOST_TOKENS

    def holds(steps: int) -> bool:
        return run_fits(architecture, replace(run, max_length=steps * step), target, source)

    return step * largest_that(holds, limit // step)


def changed(question: Question, options: Options) -> Question:
    """The question with these options in place of its own; a training file's run in the dtypes that it has with their
    sharding."""
    asked = {**question.options, **options}
    if "sharding" in options and BY_SPREAD in asked:
        asked = with_dtypes(asked, options["sharding"])
    return replace(question, options=asked)


def question_that_fits(question: Question, target: Target, dimension: str) -> tuple[Question, str]:
    """The question with the largest ``per_device_train_batch_size`` or ``max_length`` that fits, and a note.

    Micro-batches are of a data file's longest sample, where rows are of one each; a length is that of one row.
    """
    long, lengths = bool(question.options.get("allow_long_context")), dimension == "max_length"
    if lengths and lays_flat(question.options):
        if whole_number("per_device_train_batch_size", question.options.get("per_device_train_batch_size") or 1) > 1:
            raise NotSupportedError(
                "A search for the longest --max-length of samples that are laid end to end is not built yet: their sum "
                "decides memory; type --max-length N, or --no-padding-free."
            )
        question = changed(question, {"padding_free": False})  # a sample alone is its own row
    step = length_step(question.options) if lengths else 1
    least = shortest_length(question.options, step) if lengths else 1
    smallest = changed(question, {dimension: least})
    run = resolve_for(smallest, target).run
    held = held_run(run, question.options)
    flag = dimension.replace("_", "-")
    if lengths:
        most = MOST_TOKENS if long else None
        found = longest_sequence(question.architecture, run, target, most, question.source, step)
    else:
        found = largest_micro_batch(
            question.architecture, run, target, question.source, lambda run: held_run(run, question.options)
        )
    if found < least:
        chance = chance_to_fit(question.architecture, held, target, question.source)
        words = "does not fit" if chance < LIKELY else f"fits only tightly (probability {chance_said(chance)})"
        return smallest, f"--{flag} {least} {words} on {target.id}" + (" either" if chance < LIKELY else "")
    origins = {**question.option_origins, dimension: "searched"}
    largest = "largest" if step == 1 else f"largest multiple of {step}"
    note = f"--{flag} {found} is the {largest} that fits on {target.id}"
    return replace(changed(question, {dimension: found}), option_origins=origins), note


def shortest_length(options: Options, step: int) -> int:
    """The least multiple of `step` that is no shorter than the documents packed into a row."""
    documents = whole_number("attention_length", options.get("attention_length") or 1)
    return -(-documents // step) * step
