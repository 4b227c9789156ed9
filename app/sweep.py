"""Sweeps: one-way tornado over every input, two-way grids, what-ifs, and the three classic analyses by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError
from tunecast.sweep_result import Sweep, Told, chosen_metric, reported
from tunecast.sweeping import Ask, Point, point
from tunecast.tornado import tornado
from tunecast.what_if import what_if

if TYPE_CHECKING:
    from tunecast.model.run import Run

ANALYSES = ("tornado", "what-if", "size-steps", "efficiency-steps", "disk-load")
CLASSIC_STEPS = (100, 300, 1000, 3000, 10000)
CLASSIC_MFU = (0.2, 0.3, 0.4, 0.5, 0.6)
CLASSIC_DISK_MB_PER_S = (200, 500, 1000, 2000, 5000)
CLASSIC_LOAD_EFFICIENCY = (0.2, 0.4, 0.6, 0.8, 1.0)
AMOUNTS = ("tokens", "num_samples", "num_train_epochs", "max_steps", "dataset")
MOST_SIZES = 6
FEWEST_SIZES = 3
"""Sizes that make a family; with fewer all models of the architecture serve."""


def sweep(
    model: str,
    *,
    gpu: str,
    analysis: str | None = None,
    over: Sequence[str] = (),
    metric: str | None = None,
    told: Told | None = None,
    **options: Any,
) -> Sweep:
    """Vary a forecast on one GPU: by name (`analysis`) or over one or two inputs (``over=["max_length=512,1024"]``).

    Options are those of `estimate`. Raises InputError for what cannot be swept, with what can.
    """
    from tunecast.model.num_gpus import AUTO
    from tunecast.swept_inputs import parse_over

    if options.get("num_gpus") == AUTO:
        raise InputError(
            "A sweep keeps the number of GPUs, but --num-gpus is auto; type the number that tunecast estimate finds, "
            "or --over num_gpus=1,2,4,8."
        )
    ask = Ask(model=model, gpu=gpu, options=options)
    if analysis is not None and over:
        raise InputError("--analysis and --over exclude each other; keep one of them.")
    if len(over) > 2:
        raise InputError(f"{len(over)} inputs were given with --over, but a grid has two at most; leave some out.")
    if over:
        dimensions = tuple((name, tuple(values)) for name, values in map(parse_over, over))
        return _grid(ask, dimensions, metric, told)
    chosen = analysis or "tornado"
    if chosen not in ANALYSES:
        raise InputError(f"--analysis {chosen} is none of {', '.join(ANALYSES)}; use one of them, or --over NAME=A,B.")
    return _named(chosen, ask, metric, told)


def _named(name: str, ask: Ask, metric: str | None, told: Told | None) -> Sweep:
    if name == "tornado":
        return tornado(ask, metric, told)
    if name == "what-if":
        return what_if(ask, metric, told)
    steps = ("max_steps", CLASSIC_STEPS)
    if name == "size-steps":
        return _grid(_without_amount(name, ask), (("model", sizes(ask.model)), steps), metric, told)
    if name == "efficiency-steps":
        return _grid(_without_amount(name, ask), (("mfu", CLASSIC_MFU), steps), metric, told)
    rates = (("disk_mb_per_s", CLASSIC_DISK_MB_PER_S), ("load_efficiency", CLASSIC_LOAD_EFFICIENCY))
    return _grid(_with_amount(ask), rates, metric or "load", told)


def _without_amount(name: str, ask: Ask) -> Ask:
    """The steps are what is swept: an amount beside them is refused, and the length of samples says nothing alone."""
    typed = [option for option in AMOUNTS if ask.options.get(option) is not None]
    if typed:
        flags = ", ".join("--" + option.replace("_", "-") for option in typed)
        raise InputError(
            f"--analysis {name} goes over numbers of steps, and {flags} says how many; leave {flags} out, or name "
            "your own with --over max_steps=100,1000."
        )
    kept = {option: value for option, value in ask.options.items() if option not in (*AMOUNTS, "mean_tokens")}
    return Ask(model=ask.model, gpu=ask.gpu, options=kept)


def _with_amount(ask: Ask) -> Ask:
    """Phases exist only in a run of some length; one step is enough to see the load."""
    given = any(ask.options.get(name) is not None for name in ("tokens", "num_samples", "max_steps", "dataset"))
    return ask if given else Ask(model=ask.model, gpu=ask.gpu, options={**ask.options, "max_steps": 1})


def sizes(model: str) -> tuple[str, ...]:
    """Catalog models of the same family, smallest first: at most six, this one and the extremes among them.

    Models with this one's vocabulary are its family where there are enough of them, else all of its architecture.
    """
    from tunecast.catalogs.models import find_model, load_models

    own = find_model(model)
    alike = [row for row in load_models().values() if row.architecture_class == own.architecture_class]
    siblings = [row for row in alike if row.vocab_size == own.vocab_size]
    by_size: dict[int, str] = {}
    for row in sorted(siblings, key=lambda row: row.total_params):
        by_size.setdefault(round(math.log2(row.total_params)), row.hf_id)
    if len(by_size) < FEWEST_SIZES:
        for row in sorted(alike, key=lambda row: row.total_params):
            by_size.setdefault(round(math.log2(row.total_params)), row.hf_id)
    by_size[round(math.log2(own.total_params))] = own.hf_id
    params = {row.hf_id: row.total_params for row in alike}
    return _thinned([by_size[key] for key in sorted(by_size)], params, own.hf_id)


def _thinned(names: list[str], params: Mapping[str, int], own: str) -> tuple[str, ...]:
    """At most six names: of those in between, one after the other whose neighbours are nearest is left out."""
    while len(names) > MOST_SIZES:
        inner = [i for i in range(1, len(names) - 1) if names[i] != own]
        nearest = min(inner, key=lambda i: params[names[i + 1]] / params[names[i - 1]])
        names = names[:nearest] + names[nearest + 1 :]
    return tuple(names)


def _other_model(ask: Ask) -> Callable[[Point], bool]:
    """Sorts the points of the model that was asked for to the front: they head the table of a grid over models."""
    return lambda at: not str(at.settings.get("model", ask.model)).lower().endswith(ask.model.lower())


def _grid(ask: Ask, dimensions: Sequence[tuple[str, Sequence[Any]]], metric: str | None, told: Told | None) -> Sweep:
    names = [name for name, _ in dimensions]
    if len(set(names)) < len(names):
        raise InputError(f"--over {names[0]} was given twice; a grid needs two different inputs.")
    combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*(v for _, v in dimensions))]
    points = tuple(reported(told, len(combinations), (point(ask, settings) for settings in combinations)))
    base = next((at.forecast for at in sorted(points, key=_other_model(ask)) if at.forecast is not None), None)
    if base is None:
        raise InputError(f"No combination can be forecast: {points[0].why_not}")
    refused = [at for at in points if at.forecast is None]
    return Sweep(
        kind="grid",
        metric_name=chosen_metric(metric, base),
        base=base,
        dimensions=tuple((name, tuple(values)) for name, values in dimensions),
        points=points,
        notes=tuple(
            dict.fromkeys(
                [
                    *(f"not forecast: {at.why_not}" for at in refused),
                    *followed(names, points),
                    *other_software(names, points),
                    *other_shardings(names, points),
                ]
            )
        ),
    )


def other_software(names: Sequence[str], points: Sequence[Point]) -> tuple[str, ...]:
    """A note where runs that nobody gave a stack are of several."""
    usual, others = _parted(points, lambda run: run.stack)
    if "stack" in names or not others:
        return ()
    told = "; ".join(f"{stack} runs {where}" for stack, where in others.items())
    return (f"not all of these are the same software: {told}, and {usual} the rest; --stack N compares one",)


def other_shardings(names: Sequence[str], points: Sequence[Point]) -> tuple[str, ...]:
    """A note where runs that nobody gave a sharding have several."""
    several = [at for at in points if at.forecast is not None and at.forecast.run.num_gpus > 1]
    if not several or "sharding" in names:
        return ()
    usual, others = _parted(several, lambda run: run.sharding)
    if not others:
        return ()
    told = "; ".join(f"{sharding} with {where}" for sharding, where in others.items())
    return (f"--sharding was not given: {told}, and {usual} with the rest; --sharding {usual} compares one",)


def _parted(points: Sequence[Point], of: Callable[[Run], str]) -> tuple[str, dict[str, str]]:
    """(what most runs have, with which settings the others have what)."""
    found: dict[str, list[str]] = {}
    for at in points:
        if at.forecast is not None:
            where = " ".join(f"{name} {value}" for name, value in at.settings.items())
            found.setdefault(of(at.forecast.run), []).append(where)
    usual, *others = sorted(found, key=lambda each: -len(found[each]))
    return usual, {each: ", ".join(found[each]) for each in others}


def followed(names: Sequence[str], points: Sequence[Point]) -> tuple[str, ...]:
    """A note where checkpointing changes with what is swept, though nobody gave it."""
    known = [(at.settings, at.forecast.run.gradient_checkpointing) for at in points if at.forecast is not None]
    if "gradient_checkpointing" in names or len({on for _, on in known}) < 2:
        return ()
    by_name = {name: {on: {s[name]: None for s, own in known if own is on} for on in (True, False)} for name in names}
    parted = [(name, sides) for name, sides in by_name.items() if not sides[True].keys() & sides[False].keys()]
    if not parted:
        return ("gradient_checkpointing was not given and is on in some of these runs, off in others",)
    name, sides = parted[0]
    on, off = (", ".join(map(str, sides[side])) for side in (True, False))
    return (f"gradient_checkpointing was not given: it is on with {name} {on} and off with {name} {off}",)
