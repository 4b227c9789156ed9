"""Forecasts whose micro-batch or length is the largest that fits, and what to change where nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError, NotSupportedError

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast
    from tunecast.model.question import Question
    from tunecast.model.target import Target


def searched_dimension(options: Mapping[str, Any], *, max_batch: bool, max_length_that_fits: bool) -> str | None:
    """The run option that is searched for, if one is; it cannot be given as well, nor both be searched."""
    from tunecast.model.bounds import check_switch

    for name, value in (("max_batch", max_batch), ("max_length_that_fits", max_length_that_fits)):
        check_switch(name, value)
    if max_batch and max_length_that_fits:
        raise InputError("--max-batch and --max-length-that-fits exclude each other: fix one of the two and ask again.")
    asked = {"--max-batch": max_batch, "--max-length-that-fits": max_length_that_fits}
    dimensions = {"--max-batch": "per_device_train_batch_size", "--max-length-that-fits": "max_length"}
    for flag, dimension in dimensions.items():
        if asked[flag]:
            if options.get(dimension) is not None:
                given = dimension.replace("_", "-")
                raise InputError(f"{flag} looks for --{given} itself, but it was given; leave one of them out.")
            return dimension
    return None


def searched_forecasts(
    question: Question, targets: Sequence[Target], dimension: str | None, *, deadline: str | float | None = None
) -> list[Forecast]:
    """One forecast per device with an answer. Where the run fits none, the roomiest says what would make it fit."""
    from tunecast.model.num_gpus import is_auto

    if is_auto(question):
        return forecasts_on_fewest(question, targets, dimension, deadline)
    if deadline is not None:
        raise InputError("--deadline chooses the number of GPUs: add --num-gpus auto.")
    from tunecast.left_out import answered
    from tunecast.model.estimate import forecast
    from tunecast.model.largest import question_that_fits

    def ask(target: Target) -> Forecast:
        if dimension is None:
            return forecast(question, target)
        asked, note = question_that_fits(question, target, dimension)
        found = forecast(asked, target)
        return replace(found, notes=(note, *found.notes))

    found = with_suggestions(question, *answered(targets, ask))
    return with_lighter_adapters(question, targets, found) if dimension is None else found


def with_lighter_adapters(question: Question, targets: Sequence[Target], found: list[Forecast]) -> list[Forecast]:
    """The forecast of one card, with what would make its adapters cheaper; a table of cards does not say so."""
    if len(targets) != 1 or question.source is not None or question.achieved_tflops is not None:
        return found
    from tunecast.model.adapter_traffic import adapter_notes

    return [replace(one, notes=(*one.notes, *adapter_notes(question, targets[0], one))) for one in found]


def forecasts_on_fewest(
    question: Question, targets: Sequence[Target], dimension: str | None, deadline: str | float | None
) -> list[Forecast]:
    """One forecast per device, each on the fewest GPUs that fit and are in time."""
    from tunecast.left_out import answered
    from tunecast.model.estimate import forecast
    from tunecast.model.num_gpus import fewest_gpus, parse_hours

    if dimension is not None:
        raise InputError("--num-gpus auto keeps batch and length; leave out --max-batch and --max-length-that-fits.")
    hours = None if deadline is None else parse_hours(deadline)

    def ask(target: Target) -> Forecast:
        asked, note = fewest_gpus(question, target, hours)
        (answer,) = with_lighter_adapters(asked, targets, [forecast(asked, target)])
        return replace(answer, notes=(note, *answer.notes))

    kept, found = answered(targets, ask)
    return with_notes_where_none_fits(kept, found, lambda target: changes_on_a_machine(question, target))


def changes_on_a_machine(question: Question, target: Target) -> tuple[str, ...]:
    """Notes on what would make a run fit on the GPUs of one machine, where no number of them does as it was asked."""
    from tunecast.model.layer_splits import NO_SPLIT
    from tunecast.model.num_gpus import can_be_of, counts_tried, with_count
    from tunecast.model.parallel_network import gpus_per_machine

    count = gpus_per_machine(question.options)
    tried = target.platform == "cuda" and count in counts_tried(question.options)
    if not tried or not can_be_of(question, count, NO_SPLIT, target):
        return ()
    return tuple(f"{count} GPUs: {note}" for note in told_changes(with_count(question, count), target))


def likely(found: Forecast) -> bool:
    """Whether a run fits more likely than not, or nobody knows."""
    from tunecast.model.fits import LIKELY

    return found.fit_probability is None or found.fit_probability >= LIKELY


NOT_SEARCHED = (
    "what would make it fit is not searched: this run has no formulas, and each change is another trace; type one, for "
    "example --optim paged_adamw_8bit, --method qlora, a lower --per-device-train-batch-size or --max-length"
)


def told_changes(question: Question, target: Target) -> tuple[str, ...]:
    """Notes on changes that would make a run fit; those of a traced run say that formulas found them."""
    from tunecast.model.fitting import suggestions

    if question.source is None:
        return suggestions(question, target)
    try:
        return tuple(f"{note} (by formula, not traced)" for note in suggestions(replace(question, source=None), target))
    except NotSupportedError:
        return (NOT_SEARCHED,)


def with_suggestions(question: Question, targets: Sequence[Target], found: list[Forecast]) -> list[Forecast]:
    """The forecasts, with notes on what would fit if none does.

    Each change would be another trace of the real code, so with ``--exact`` they are tried by the formulas.
    """
    return with_notes_where_none_fits(targets, found, lambda target: told_changes(question, target))


def with_notes_where_none_fits(
    targets: Sequence[Target], found: list[Forecast], notes_for: Callable[[Target], tuple[str, ...]]
) -> list[Forecast]:
    """The forecasts; if none likely fits, that of the device with the most usable memory gets the notes for it."""
    if not found or any(map(likely, found)):
        return found
    roomiest = max(range(len(targets)), key=lambda index: targets[index].usable_bytes or 0.0)
    notes = (*found[roomiest].notes, *notes_for(targets[roomiest]))
    return [replace(f, notes=notes) if index == roomiest else f for index, f in enumerate(found)]
