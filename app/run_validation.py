"""One job that was run, against its forecast: a record of `TunecastCallback`, or a Trainer's ``trainer_state.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError
from tunecast.model.units import HOUR_S, gib
from tunecast.model.value import Value
from tunecast.tables import DASH, above_bar, digits, plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tunecast.calibrate.watch.clock import Window
    from tunecast.model.architecture import Architecture
    from tunecast.model.forecast import Forecast
    from tunecast.model.run import Run

SCHEMA = "tunecast.run-validation/1"
OR_NONE = ("master_dtype", "reduce_dtype")
"""Fields that a stack may set and an option unsets by this word."""
TOLD_ONLY = ("stack_version",)
"""Fields of a run in words: the ranges of versions whose defaults were taken, all of which the run states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One quantity, measured and forecast, in its unit."""

    name: str
    unit: str
    measured: float
    forecast: Value | None

    @property
    def error(self) -> float | None:
        """forecast / measured - 1."""
        return None if self.forecast is None else self.forecast.value / self.measured - 1

    @property
    def inside(self) -> bool | None:
        """Whether the measured value lies in the 80% interval."""
        return None if self.forecast is None else self.forecast.low <= self.measured <= self.forecast.high


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValidation:
    """A job with its forecast."""

    source: str
    gpu: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """``tunecast.run-validation/1``."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "gpu": self.gpu,
            "quantities": [
                {
                    "name": line.name,
                    "unit": line.unit,
                    "measured": line.measured,
                    "forecast": None if line.forecast is None else line.forecast.as_dict(),
                    "error": line.error,
                    "inside": line.inside,
                }
                for line in self.lines
            ],
            "notes": list(self.notes),
        }

    def above(self, bar: float) -> list[str]:
        """A sentence when the step time is further off than `bar`; without a forecast the bar is not met."""
        error = next((line.error for line in self.lines if line.name == "optimizer step"), None)
        if error is None:
            return ["there is no forecast of the step time, so the bar is not met"]
        return [f"the step time is forecast {above_bar(error, bar, '+', ' off')}"] if abs(error) > bar else []


def validate_run(
    path: Path, *, config: str | None = None, gpu: str | None = None, records: Iterable[Path] = ()
) -> RunValidation:
    """Compare; `config` (a training file or model), `gpu` and `records` are for files that hold no forecast."""
    from tunecast.calibrate.watch.record import is_run_record

    data = _parsed(path)
    if is_run_record(data):
        unused = [flag for flag, value in (("--config", config), ("--gpu", gpu)) if value is not None]
        if unused:
            raise InputError(f"{path} says what ran on which card; leave {' and '.join(unused)} out.")
        return of_run_record(path, records=list(records))
    if isinstance(data, dict) and "log_history" in data:
        return of_trainer_state(path, data, config=config, gpu=gpu, records=list(records))
    raise InputError(
        f"{path} is JSON, but neither a record of tunecast.TunecastCallback nor a trainer_state.json; "
        "give one of these, or a .csv table of runs."
    )


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or error}; give the path of a file.") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); give a run record or a trainer_state.json.") from error


def of_run_record(path: Path, *, records: list[Path]) -> RunValidation:
    """The forecast as it stood when the job began; with `records` it is made anew from these."""
    from tunecast.calibrate.watch.clock import Window, predicted_mean, settled
    from tunecast.calibrate.watch.record import read_run_record

    record = read_run_record(path)
    told = forecast_anew(record, records) if records else record["forecast"]
    every = [Window(**window) for window in record["windows"]]
    windows, step = settled(every), predicted_mean(every, ahead=None)
    slow = every[: len(every) - len(windows)]
    lines = [] if step is None else [_step_line(step.value, told)]
    if any(window.tokens for window in windows):
        lines.append(_tokens_line(windows, told))
    lines += _memory_lines(record, told)
    if record["steps"] == record["max_steps"]:
        lines += _whole_lines(record, told)
    return RunValidation(
        source=path.name,
        gpu=record["hardware"]["gpu"] or record["hardware"]["name"],
        lines=tuple(lines),
        notes=(*_slow_notes(slow), *_record_notes(record, told, anew=bool(records))),
    )


def _slow_notes(slow: Sequence[Window]) -> tuple[str, ...]:
    """That the first steps were much slower, and are not counted among the others."""
    if not slow:
        return ()
    steps, seconds = sum(window.steps for window in slow), sum(window.seconds for window in slow)
    what = "start-up, which the step leaves out and the whole training has in it"
    return (f"the first {steps} timed steps took {seconds:.3g} s, far slower than later ones: {what}",)


def forecast_anew(record: dict[str, Any], records: list[Path]) -> dict[str, Any] | None:
    """The JSON of a forecast of the run that a record holds, from `records`; without any, from the priors."""
    from tunecast.calibrate.fitted_records import fitted_records
    from tunecast.calibrate.trace.spec import architecture_from_dict
    from tunecast.calibrate.watch.record import driven_run
    from tunecast.model.estimate import forecast
    from tunecast.model.forecast_json import forecast_to_dict
    from tunecast.model.question import Question
    from tunecast.model.target import device_ids, resolve_targets

    if record["architecture"] is None or record["run"] is None:
        raise InputError(f"The record holds no run to forecast anew ({record['why_no_forecast']}); leave --record out.")
    if record["hardware"]["gpu"] is None:
        raise InputError(f"The record is of {record['hardware']['name']}, which is in no catalog; leave --record out.")
    architecture = architecture_from_dict(record["architecture"])
    options = options_of_run(architecture, driven_run(record)) | {"max_steps": record["max_steps"]}
    gpu = str(record["hardware"]["gpu"])
    calibrations = fitted_records(records, device_ids([gpu]))
    others = ", ".join(other for other in calibrations if other != gpu)
    if others:
        raise InputError(f"The run was on {gpu}, and --record has {others}; give a record of {gpu}.")
    target = resolve_targets([gpu], calibrations)[0]
    return forecast_to_dict(forecast(Question(architecture=architecture, options=options), target))


def options_of_run(architecture: Architecture, run: Run) -> dict[str, Any]:
    """The options that resolve to this run: those of its fields that its method and stack alone would not give."""
    from tunecast.model.resolve import resolve_run
    from tunecast.model.run import BY_CARD

    names = [name for name in run.__slots__ if name not in (*TOLD_ONLY, *BY_CARD)]
    options: dict[str, Any] = {"method": run.method, "stack": run.stack, "max_length": run.max_length,
                               "allow_long_context": True}  # fmt: skip
    while True:
        found = resolve_run(architecture, options, gpu_has_bf16=True).run
        unlike = [name for name in names if name not in options and getattr(found, name) != getattr(run, name)]
        if not unlike:
            return options
        options |= {name: _typed(name, getattr(run, name)) for name in unlike}


def _typed(name: str, value: Any) -> Any:
    """A field's value as an option has it."""
    if value is None and name in OR_NONE:
        return "none"
    return ",".join(value) if isinstance(value, tuple) else value


def _value(told: dict[str, Any] | None, *keys: str, scale: float = 1.0) -> Value | None:
    """A value of a forecast's JSON; None where it is null or there is no forecast."""
    found: Any = told
    for key in keys:
        found = None if found is None else found.get(key)
    return None if found is None else Value(**found).scaled(scale)


def _step_line(measured_s: float, told: dict[str, Any] | None) -> Line:
    return Line(name="optimizer step", unit="s", measured=measured_s, forecast=_value(told, "step_time_s"))


def _tokens_line(windows: list[Any], told: dict[str, Any] | None) -> Line:
    measured = sum(window.tokens for window in windows) / sum(window.seconds for window in windows)
    return Line(name="speed", unit="tokens/s", measured=measured, forecast=_value(told, "tokens_per_s"))


def _memory_lines(record: dict[str, Any], told: dict[str, Any] | None) -> list[Line]:
    """Views that the device has. The forecast is that of the mean length, so it counts only where all are equal."""
    run, longest = record["run"], record["longest_run"]
    same = run is not None and longest is not None and run["max_length"] == longest["max_length"]
    return [
        Line(
            name=f"memory {view}",
            unit="GiB",
            measured=gib(record["memory"][f"{view}_bytes"]),
            forecast=_value(told, "memory", f"{view}_gib") if same else None,
        )
        for view in ("allocated", "reserved", "process")
        if record["memory"].get(f"{view}_bytes") is not None
    ]


def _whole_lines(record: dict[str, Any], told: dict[str, Any] | None) -> list[Line]:
    """The whole training without evaluations and saves: time and, where a price is known, money."""
    hours = (record["wall_s"] - record["aside_s"]) / HOUR_S
    whole = [Line(name="training", unit="h", measured=hours, forecast=_train_hours(record, told))]
    price = record["usd_per_h"]
    if price is not None:
        cost = None if whole[0].forecast is None else whole[0].forecast.scaled(price)
        whole.append(Line(name="cost of the training", unit="$", measured=hours * price, forecast=cost))
    return whole


def _train_hours(record: dict[str, Any], told: dict[str, Any] | None) -> Value | None:
    """Steps times the forecast of one: what the record's clock also saw, without start-up and saves."""
    step = _value(told, "step_time_s")
    return None if step is None else step.scaled(record["max_steps"] / HOUR_S)


def _record_notes(record: dict[str, Any], told: dict[str, Any] | None, *, anew: bool) -> tuple[str, ...]:
    notes = [f"{record['steps']} of {record['max_steps']} steps, {len(record['windows'])} timed windows"]
    if record["asides"]:
        times = "1 step" if record["asides"] == 1 else f"{record['asides']} steps"
        notes.append(
            f"evaluations and saves after {times} took {record['aside_s']:.1f} s, which the training and its cost here "
            "leave out"
        )
    notes += [f"flag: {flag}" for flag in record["flags"]]
    if told is None:
        notes.append(f"no forecast: {record['why_no_forecast'] or 'none was made'}")
    elif anew:
        notes.append("the forecast was made now, from the records given")
    return tuple(notes)


def of_trainer_state(
    path: Path, state: dict[str, Any], *, config: str | None, gpu: str | None, records: list[Path]
) -> RunValidation:
    """A Trainer's own state says how long it took, not what was run: that, and the GPU, must be given."""
    from tunecast.api import estimate
    from tunecast.run_line import run_line
    from tunecast.state_contradictions import shorter_rows

    runtime_s, steps = _runtime(path, state)
    if config is None or gpu is None:
        missing = "--config FILE_OR_MODEL" if config is None else "--gpu NAME"
        raise InputError(f"{path} does not say what was run on what; add {missing}.")
    found = estimate(config, gpu=gpu, records=records)
    if len(found) > 1:
        raise InputError(f"{path} was run on one kind of GPU, and --gpu {gpu} is {len(found)}; name the one.")
    told: Forecast = found[0]
    unlike = _unlike(path, state, told, config)
    lines = (
        Line(name="optimizer step", unit="s", measured=runtime_s / steps, forecast=told.step_time_s),
        Line(name="training", unit="h", measured=runtime_s / HOUR_S, forecast=told.step_time_s.scaled(steps / HOUR_S)),
    )
    notes = [
        f"the forecast is of {run_line(told)}",
        *unlike,
        *([] if unlike else shorter_rows(state, told)),
        "train_runtime holds evaluations and saves too: the step measured here is an upper bound",
        "of a resumed training it holds the last leg alone, and the step measured here is then too short",
    ]
    return RunValidation(source=path.name, gpu=told.gpu, lines=lines, notes=tuple(notes))


def _unlike(path: Path, state: dict[str, Any], told: Forecast, config: str) -> list[str]:
    """A note where the run of a model without options is plainly another; a training file that is is refused."""
    from tunecast.model.configs import looks_like_training_file, read_config
    from tunecast.state_contradictions import contradictions

    is_file = looks_like_training_file(config)
    found = contradictions(state, told, read_config(config) if is_file else None)
    if not found:
        return []
    if is_file:
        raise InputError(f"{path} is not of {config}: {'; '.join(found)}; give the config that it ran.")
    remedy = "a model alone is forecast with default options, so give a training file with those of the run"
    return [f"this compares unlike runs: {'; '.join(found)}; {remedy}"]


def _runtime(path: Path, state: dict[str, Any]) -> tuple[float, int]:
    """Seconds of the training and its steps."""
    history = state["log_history"]
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise InputError(f"{path} is damaged: its log_history is no list of entries; give the file as it was saved.")
    found = [entry["train_runtime"] for entry in history if "train_runtime" in entry]
    if not found:
        raise InputError(
            f"{path} has no train_runtime: checkpoints are written before the training ends; give the "
            "trainer_state.json that trainer.save_state() writes after it."
        )
    runtime_s, steps = found[-1], state.get("global_step")
    if not isinstance(runtime_s, int | float) or isinstance(runtime_s, bool) or not 0.0 < runtime_s < math.inf:
        raise _damaged(path, f"train_runtime is {runtime_s!r}, no time")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps <= 0:
        raise _damaged(path, f"global_step is {steps!r}, no number of steps")
    return float(runtime_s), steps


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} is damaged: its {what} above 0; give the file as the Trainer saved it.")


def run_report(found: RunValidation) -> list[RenderableType]:
    """The comparison as a table."""
    table = plain_table(
        "", "measured", "forecast", "80% interval", "error", "inside",
        right=("measured", "forecast", "80% interval", "error"),
    )  # fmt: skip
    for line in found.lines:
        told = line.forecast
        table.add_row(
            f"{line.name}, {line.unit}",
            digits(line.measured),
            DASH if told is None else digits(told.value),
            DASH if told is None else f"{digits(told.low)}–{digits(told.high)}",
            DASH if line.error is None else f"{line.error:+.1%}",
            DASH if line.inside is None else "yes" if line.inside else "no",
        )
    return [f"{found.source} on {found.gpu}", table, *(f"- {note}" for note in found.notes)]
