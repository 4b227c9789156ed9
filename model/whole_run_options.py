"""What the user says about everything around training: phases, machines, billing, interruptions.

The names are those of the command line with underscores; `read_whole_run` turns them into one
`WholeRunOptions`, and `split_whole_run` takes them out of a larger set of options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tunecast.catalogs.errors import InputError, UnknownNameError
from tunecast.model.bounds import LEAST_MINUTES, MOST_MINUTES, MOST_OTHER, MOST_RATE, at_most, check_switch
from tunecast.model.gguf import BASES
from tunecast.model.read_numbers import as_number, is_count, number_that
from tunecast.model.units import GIGA

PHASES = (
    "start",
    "setup",
    "download",
    "prepare",
    "load",
    "compile",
    "train",
    "evaluate",
    "checkpoints",
    "save",
    "merge",
    "export",
    "upload",
    "interruptions",
)
"""Every phase of a run, in order; ``interruptions`` is what cuts and restarts add."""
FIXED_PHASES = ("train", "interruptions")
"""Phases whose length is the forecast itself, not the user's to set."""
MACHINE_PHASES = {
    "prepare": ("prepare",),
    "evaluate": ("evaluate",),
    "merge": ("merge",),
    "export": ("export",),
    "deploy": ("merge", "export", "upload"),
}
"""What may run on another machine, and the phases it stands for."""
AUTO = "auto"
SMALLEST = 1e-9
"""Least rate that can be given: any number above 0."""
EXPORTS = ("fp16", "bf16", *BASES)
"""Formats of an exported file; the quantized ones are llama.cpp's Q8_0, Q6_K, Q5_K_M and Q4_K_M (`gguf`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRunOptions:
    """Everything around training, as asked; None where the user said nothing."""

    train_only: bool = False
    from_scratch: bool = False
    """Weights are drawn at random on the GPUs: nothing is downloaded or loaded."""
    phase_min: Mapping[str, float] = field(default_factory=dict)
    """Minutes of a phase, in place of what its rate gives; 0 leaves it out."""
    phase_rate: Mapping[str, float] = field(default_factory=dict)
    """Rates by their names in ``phase_rates.json``."""
    phase_machine: Mapping[str, float] = field(default_factory=dict)
    """USD per hour of another machine, by phase."""
    data_location: tuple[str, float] | None = None
    """Where the data lie, and the MB/s from there."""
    dataset_gb: float | None = None
    prepare: bool = False
    eval_samples: float | None = None
    eval_steps: int | None = None
    save_steps: int | None = None
    save_total_limit: int | None = None
    """Checkpoints kept on the disk; None: all, as transformers' Trainer does."""
    merge: bool = False
    export: str | None = None
    upload: bool = False
    trials: int = 1
    early_stopping_fraction: float = 1.0
    """Mean share of its steps that a trial runs which is not the best."""
    repeats: int = 1
    owned: bool = False
    electricity_usd_per_kwh: float | None = None
    gpu_power_w: float | None = None
    pue: float | None = None
    storage_usd_per_gb_month: float | None = None
    egress_usd_per_gb: float | None = None
    keep_days: float = 0.0
    """Days for which the disk is kept after the run."""
    billing_granularity_s: float | None = None
    billing_minimum_s: float | None = None
    spot: bool = False
    interruption_rate_per_month: float | None = None
    checkpoint_interval_min: float | str | None = None
    """Minutes, ``auto`` or ``none``."""
    restart_min: float | None = None
    seed: int = 0

    @property
    def starts(self) -> int:
        """How often training begins: once per trial and repeat."""
        return self.trials * self.repeats


WHOLE_RUN_NAMES = tuple(f.name for f in fields(WholeRunOptions))
OF_PRICES = ("owned", "spot")
"""What says which price there is, of a run of any length."""


def given_names(options: WholeRunOptions) -> list[str]:
    """The options that are not as they are where nobody says anything."""
    silent = WholeRunOptions()
    return [name for name in WHOLE_RUN_NAMES if getattr(options, name) != getattr(silent, name)]


def split_whole_run(options: Mapping[str, Any]) -> tuple[WholeRunOptions, dict[str, Any]]:
    """The whole-run options among `options`, and the rest."""
    mine = {name: value for name, value in options.items() if name in WHOLE_RUN_NAMES}
    return read_whole_run(mine), {name: value for name, value in options.items() if name not in mine}


def read_whole_run(given: Mapping[str, Any]) -> WholeRunOptions:
    """Check and read whole-run options; raises InputError for what cannot be."""
    values = {name: READERS[name](name, value) for name, value in given.items() if value is not None}
    options = WholeRunOptions(**values)
    _check(options)
    return options


def flag(name: str) -> str:
    """An option as it is typed."""
    return "--" + name.replace("_", "-")


def _at_least(least: float, example: str, *, open_end: bool = False) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        def holds(number: float) -> bool:
            return number > least or (number == least and not open_end)

        limit = f"above {least:g}" if open_end else f"{least:g} or more"
        return at_most(flag(name), number_that(flag(name), value, holds, limit, example), MOST_OTHER)

    return read


def _count(name: str, value: Any) -> int:
    return int(at_most(flag(name), number_that(flag(name), value, is_count, "a whole number above 0", "4"), GIGA))


def _seed(name: str, value: Any) -> int:
    def holds(number: float) -> bool:
        return number.is_integer() and number >= 0.0

    return int(number_that(flag(name), value, holds, "a whole number of 0 or more", "7"))


def _share(name: str, value: Any) -> float:
    return number_that(flag(name), value, lambda share: 0.0 < share <= 1.0, "a share above 0 and up to 1", "0.3")


def _samples(name: str, value: Any) -> float:
    from tunecast.model.amount import parse_count

    return parse_count(value, name=flag(name))


def _flag(name: str, value: Any) -> bool:
    check_switch(name, value)
    return bool(value)


def pairs(
    name: str, given: Any, known: Iterable[str], *, least: float, example: str, most: float = MOST_OTHER
) -> dict[str, float]:
    """``NAME=X``, repeated, or a mapping; raises InputError for an unknown name or a number out of bounds."""
    if isinstance(given, Mapping):
        items = list(given.items())
    else:
        texts = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"{flag(name)} is {given!r}, which is no NAME=X; type for example {flag(name)} {example}.")
        items = [text.partition("=")[::2] for text in texts]
    found: dict[str, float] = {}
    for key, value in items:
        if key not in known:
            raise UnknownNameError(f"name in {flag(name)}", str(key), known, hint=f"There are {', '.join(known)}.")
        found[key] = at_most(f"{flag(name)} {key}", _pair_value(name, key, value, least, example), most)
    return found


def _pair_value(name: str, key: str, value: Any, least: float, example: str) -> float:
    number = as_number(value)
    if number is None or number < least:
        limit = "above 0" if least == SMALLEST else f"{least:g} or more"
        raise InputError(f"{flag(name)} {key}={value} has no number {limit}; type for example {example}.")
    return number


def _phase_min(name: str, given: Any) -> dict[str, float]:
    known = tuple(phase for phase in PHASES if phase not in FIXED_PHASES)
    return pairs(name, given, known, least=0.0, example="setup=5", most=MOST_MINUTES)


def _phase_rate(name: str, given: Any) -> dict[str, float]:
    from tunecast.model.phase_rates import rate_names

    return pairs(name, given, rate_names(), least=SMALLEST, example="network_mb_per_s=500", most=MOST_RATE)


def _phase_machine(name: str, given: Any) -> dict[str, float]:
    return pairs(name, given, tuple(MACHINE_PHASES), least=0.0, example="prepare=0.20")


def _data_location(name: str, given: Any) -> tuple[str, float]:
    place, rate = given if isinstance(given, tuple) else str(given).partition("=")[::2]
    if not str(place).strip():
        raise InputError(f"{flag(name)} {given} names no place; type for example s3=200.")
    number = _pair_value(name, str(place), rate, SMALLEST, "s3=200")
    return str(place), at_most(f"{flag(name)} {place}", number, MOST_RATE)


def _export(name: str, value: Any) -> str:
    if str(value) not in EXPORTS:
        raise UnknownNameError("export format", str(value), EXPORTS, hint=f"There are {', '.join(EXPORTS)}.")
    return str(value)


def _interval(name: str, value: Any) -> float | str:
    if value in (AUTO, "none"):
        return str(value)
    number = as_number(value)
    if number is None or number < LEAST_MINUTES:
        least = f"minutes of at least {LEAST_MINUTES:g}"
        raise InputError(f"{flag(name)} is {value!r}, which is not {least}, auto or none; type for example 30.")
    return at_most(flag(name), number, MOST_MINUTES)


def _monthly(name: str, value: Any) -> float:
    from tunecast.model.interruptions import checked_share

    return checked_share(flag(name), value)


READERS: dict[str, Callable[[str, Any], Any]] = {
    "train_only": _flag,
    "from_scratch": _flag,
    "phase_min": _phase_min,
    "phase_rate": _phase_rate,
    "phase_machine": _phase_machine,
    "data_location": _data_location,
    "dataset_gb": _at_least(0.0, "50", open_end=True),
    "prepare": _flag,
    "eval_samples": _samples,
    "eval_steps": _count,
    "save_steps": _count,
    "save_total_limit": _count,
    "merge": _flag,
    "export": _export,
    "upload": _flag,
    "trials": _count,
    "early_stopping_fraction": _share,
    "repeats": _count,
    "owned": _flag,
    "electricity_usd_per_kwh": _at_least(0.0, "0.30"),
    "gpu_power_w": _at_least(0.0, "300", open_end=True),
    "pue": _at_least(1.0, "1.2"),
    "storage_usd_per_gb_month": _at_least(0.0, "0.10"),
    "egress_usd_per_gb": _at_least(0.0, "0.09"),
    "keep_days": _at_least(0.0, "30"),
    "billing_granularity_s": _at_least(0.0, "60"),
    "billing_minimum_s": _at_least(0.0, "60"),
    "spot": _flag,
    "interruption_rate_per_month": _monthly,
    "checkpoint_interval_min": _interval,
    "restart_min": _at_least(0.0, "10"),
    "seed": _seed,
}


def _check(options: WholeRunOptions) -> None:
    """Options that need or exclude each other."""
    if options.owned and options.electricity_usd_per_kwh is None:
        raise InputError("--owned has no rent, only electricity: add --electricity-usd-per-kwh, for example 0.30.")
    energy = [n for n in ("electricity_usd_per_kwh", "gpu_power_w", "pue") if getattr(options, n) is not None]
    if energy and not options.owned:
        raise InputError(f"{flag(energy[0])} is for GPUs of your own; a rented one includes its power: add --owned.")
    if options.owned and options.spot:
        raise InputError("--owned and --spot exclude each other: nobody takes your own machine away.")
    billing = [n for n in ("billing_granularity_s", "billing_minimum_s") if getattr(options, n) is not None]
    if billing and options.owned:
        raise InputError(f"{flag(billing[0])} is about rented machines, --owned about your own; leave one of them out.")
    if options.spot and options.train_only and options.restart_min is None:
        raise InputError("--train-only leaves out the start-up that a restart repeats: add --restart-min 10, say.")
    _check_train_only(options)
    _check_machines(options)
    if options.eval_steps is not None and options.eval_samples is None:
        raise InputError("--eval-steps needs to know how much is evaluated; add for example --eval-samples 500.")
    if options.early_stopping_fraction < 1.0 and options.trials == 1:
        raise InputError("--early-stopping-fraction stops trials early, but there is one; add for example --trials 20.")
    for name in ("interruption_rate_per_month", "checkpoint_interval_min", "restart_min"):
        if getattr(options, name) is not None and not options.spot:
            raise InputError(f"{flag(name)} is about interruptible machines; add --spot.")


def _check_train_only(options: WholeRunOptions) -> None:
    """What would add a phase says nothing about the training alone."""
    phases = ("prepare", "dataset_gb", "data_location", "eval_samples", "save_steps", "merge", "export", "upload")
    asked = [name for name in (*phases, "phase_min", "phase_machine") if getattr(options, name)]
    if options.train_only and asked:
        raise InputError(
            f"--train-only counts the training alone, so {flag(asked[0])} would change nothing; leave one of them out."
        )


def _check_machines(options: WholeRunOptions) -> None:
    """Another machine needs something to do: a price that changes nothing would look like an answer."""
    exported = options.export is not None
    counted = {
        "prepare": options.prepare or options.dataset_gb is not None or options.data_location is not None,
        "evaluate": options.eval_samples is not None,
        "merge": options.merge or exported,
        "export": exported,
        "deploy": options.merge or exported or options.upload,
    }
    ask = {"evaluate": "--eval-samples 500", "export": "--export q4", "deploy": "--merge, --export or --upload"}
    for name in options.phase_machine:
        by_hand = any(options.phase_min.get(phase) for phase in MACHINE_PHASES[name])
        if not (counted[name] or by_hand):
            raise InputError(
                f"--phase-machine {name} has nothing to do, as this run counts no such phase: "
                f"add {ask.get(name, f'--{name}')}."
            )
