"""A job that is watched: forecast at the start, measured from the first steps on, both side by side at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunecast.calibrate.watch.clock import StepClock, predicted_mean, settled
from tunecast.calibrate.watch.device import Watched, plain, throttle_flags
from tunecast.calibrate.watch.reading import Job
from tunecast.calibrate.watch.stops import Plan, expected, unseen_words
from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.model.forecast import Forecast
from tunecast.model.observed import Observations
from tunecast.model.units import HOUR_S, gib
from tunecast.model.value import Value, total

MASKS = 4
"""Of micro-batches that are looked at for padding."""
LONGEST_IN_SECONDS = 99.95
"""From here three digits would round to a hundred: minutes are said."""
NO_PROCESSOR = (
    "a CPU is forecast only from a calibration of its own; type tunecast calibrate --device cpu, "
    "and give the file that it writes as records=."
)


@dataclass(slots=True)
class Lengths:
    """Samples and tokens of the micro-batches as the job has them; counted on the host."""

    batches: int = 0
    samples: int = 0
    tokens: int = 0
    largest: int = 0
    """Tokens of the largest micro-batch."""

    def saw(self, samples: int, tokens: int) -> None:
        """One micro-batch."""
        self.batches += 1
        self.samples += samples
        self.tokens += tokens
        self.largest = max(self.largest, tokens)

    @property
    def rows(self) -> int:
        """Samples per micro-batch, rounded: one where packing lays them end to end."""
        return max(round(self.samples / self.batches), 1)

    @property
    def mean(self) -> int:
        """Mean tokens per sample, rounded."""
        return round(self.tokens / self.samples)

    @property
    def longest(self) -> int:
        """Tokens per sample in the largest micro-batch, rounded up."""
        return -(-self.largest // self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a job stands."""

    step: int
    max_steps: int
    step_time_s: Value
    tokens_per_s: float
    left_s: Value
    spent_s: float
    unseen: Counter[str]
    """Evaluations and saves ahead that are not in `left_s`: none of their kind was seen yet."""


@dataclass(slots=True)
class Watcher:
    """One job on one device. Knows nothing of the Trainer that drives it."""

    device: Watched
    clock: StepClock
    max_steps: int
    job: Job | None = None
    why_no_forecast: str | None = None
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    observations: Observations = field(default_factory=dict)
    stops: Plan = ()
    usd_per_gpu_hour: float | None = None
    num_gpus: int = 1
    data_parallel: int = 1
    """Processes that have data of their own."""
    lengths: Lengths = field(default_factory=Lengths)
    padded: bool = False
    """Whether one of the first micro-batches had padding, of which the model was told."""
    masks_read: int = 0
    forecast: Forecast | None = None
    longest: Forecast | None = None
    sensors: list[dict[str, Any]] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    _step_tokens: int = 0
    _last_step: int = 0
    _last_s: float = 0.0

    def saw_batch(self, samples: int, tokens: int) -> None:
        """One micro-batch went through the model; the other processes' ones count as long as this one's."""
        self.lengths.saw(samples, tokens)
        self._step_tokens += tokens * self.data_parallel

    @property
    def reads_mask(self) -> bool:
        """Whether a micro-batch's mask is still worth a look, for which the host waits: a sample alone that is filled
        up to a multiple may have such a length by chance."""
        return not self.padded and self.masks_read < MASKS

    def saw_mask(self, *, has_padding: bool) -> None:
        """The mask of one micro-batch was read."""
        self.padded = has_padding
        self.masks_read += 1

    def step_ends(self, step: int, *, followed_by: str = "") -> bool:
        """An optimizer step is over, and one of `stops` follows, if named; True when there is something new to tell."""
        self._last_step, self._last_s = step, self.clock.now()
        closed = self.clock.step_ends(self._step_tokens, followed_by=followed_by, before_wait=self._look)
        self._step_tokens = 0
        if self.clock.steps_seen == 1:
            self._forecast()
        return closed

    def stops_for(self, kind: str) -> None:
        """The job turns to an evaluation or a save of which no step's end told: at the end of an epoch."""
        self.clock.stops_for(kind, before_wait=self._look)

    def _look(self) -> None:
        """Read the sensors, while the device works: afterwards it would be idle, wait for us, and show nothing."""
        reading = self.device.sensors()
        self.flags |= throttle_flags(reading)
        self.sensors.append(plain(reading))

    def settle_lengths(self) -> None:
        """The forecast of the samples that were really seen, where the first step's were of other lengths.

        It uses no time that was measured: only what the job turned out to be.
        """
        told, seen = self.forecast, self.lengths
        if told is None or not seen.samples:
            return
        longest = told if self.longest is None else self.longest
        as_told = (told.run.max_length, longest.run.max_length, told.run.per_device_train_batch_size)
        if as_told != (seen.mean, seen.longest, seen.rows):
            self._forecast()

    def _forecast(self) -> None:
        """What was to be expected, at the lengths that were seen so far."""
        if self.job is None or not self.lengths.samples:
            return
        try:
            self.forecast = self.forecast_at(self.lengths.mean)
            self.longest = self.forecast_at(self.lengths.longest)
        except TunecastError as error:
            self.why_no_forecast = in_a_job(error)
        except Exception as error:  # A fault of ours must not cost the measurement; it is told and recorded.
            self.why_no_forecast = f"the forecast failed ({type(error).__name__}: {error})"

    def forecast_at(self, length: int) -> Forecast:
        """The forecast of this job with samples of so many tokens; raises TunecastError where there is none."""
        from tunecast.model.estimate import forecast
        from tunecast.model.question import Question
        from tunecast.model.target import resolve_targets

        assert self.job is not None
        gpu = self.device.hardware().gpu
        if gpu is None:
            raise InputError(f"{self.device.hardware().name} is in no catalog; add it to gpus.csv (CONTRIBUTING.md).")
        question = Question(
            architecture=self.job.architecture,
            options={**self.options_at(length), "max_steps": self.max_steps},
            usd_per_gpu_hour=self.usd_per_gpu_hour,
            observations=self.observations,
        )
        own = {name: record for name, record in self.records.items() if name == gpu}
        if gpu == "cpu" and not own:
            raise InputError(NO_PROCESSOR)
        return forecast(question, resolve_targets([gpu], own)[0])

    def options_at(self, length: int) -> dict[str, Any]:
        """The job's options with samples of so many tokens, in micro-batches as they were seen."""
        assert self.job is not None
        seen = {"max_length": length, "per_device_train_batch_size": self.lengths.rows}
        filled = {"pad_to_multiple_of": length} if self.lengths.rows == 1 else {}
        return {**self.job.options, **seen, **({"padding_mask": True, **filled} if self.padded else {})}

    def progress(self) -> Progress | None:
        """Time left, from what was measured; None before the first window."""
        windows = settled(self.clock.windows)
        mean = predicted_mean(windows, ahead=None)
        if mean is None:
            return None
        steps_left = max(self.max_steps - self._last_step, 0)
        a_window = sum(window.steps for window in windows) / len(windows)
        ahead = predicted_mean(windows, ahead=steps_left / a_window)
        assert ahead is not None
        assert self.clock.begun_s is not None
        ahead_of = Counter(kind for step, kind in self.stops if step > self._last_step)
        ahead_of.update([self.clock.begins] if self.clock.begins else [])
        stops, unseen = expected(ahead_of, self.clock.stopped)
        return Progress(
            step=self._last_step,
            max_steps=self.max_steps,
            step_time_s=mean,
            tokens_per_s=sum(w.tokens for w in windows) / sum(w.seconds for w in windows),
            left_s=total([ahead.scaled(steps_left), stops]),
            spent_s=self.clock.now() - self.clock.begun_s,
            unseen=unseen,
        )

    def usd_per_h(self) -> float | None:
        """What the whole job pays per hour: as told, else the catalog's offer of the forecast."""
        if self.usd_per_gpu_hour is not None:
            return self.usd_per_gpu_hour * self.num_gpus
        offer = self.forecast.offer if self.forecast else None
        return None if offer is None else float(offer["usd_per_hour"])

    def mfu(self) -> float | None:
        """Required work over the peak at the measured speed; None without a forecast or a known peak."""
        now, told = self.clock.step_time_s(), self.forecast
        if now is None or told is None or told.mfu is None:
            return None
        return told.mfu * told.step_time_s.value / now.value

    def resolved(self, length: int) -> dict[str, Any] | None:
        """The run with samples of so many tokens, which later forecasts can use where today's failed."""
        from tunecast.calibrate.trace.spec import run_to_dict
        from tunecast.model.resolve import resolve_run

        if self.job is None:
            return None
        try:
            return run_to_dict(resolve_run(self.job.architecture, self.options_at(length)).run)
        except TunecastError:
            return None  # `why_no_forecast` says the same

    def record(self, *, created_at: str, tunecast: str | None, interrupted: bool = False) -> dict[str, Any]:
        """``tunecast.run/1``; of a run that was interrupted, or still goes on, up to its last step."""
        from tunecast.calibrate.trace.spec import architecture_to_dict, run_to_dict
        from tunecast.calibrate.watch.record import RUN_SCHEMA
        from tunecast.model.forecast_json import forecast_to_dict

        self.settle_lengths()
        told, begun, seen = self.forecast, self.clock.begun_s, self.lengths
        until_s = self._last_s if interrupted else self.clock.now()
        memory = self.device.memory()
        return {
            "schema": RUN_SCHEMA,
            "tunecast": tunecast,
            "created_at": created_at,
            "hardware": plain(self.device.hardware()),
            "software": self.device.software(),
            "architecture": None if self.job is None else architecture_to_dict(self.job.architecture),
            "run": run_to_dict(told.run) if told else self.resolved(seen.mean) if seen.samples else None,
            "longest_run": run_to_dict(self.longest.run)
            if self.longest
            else self.resolved(seen.longest)
            if seen.samples
            else None,
            "steps": self.clock.steps_seen,
            "max_steps": self.max_steps,
            "windows": [{"steps": w.steps, "seconds": w.seconds, "tokens": w.tokens} for w in self.clock.windows],
            "aside_s": self.clock.aside_s,
            "asides": self.clock.asides,
            "wall_s": 0.0 if begun is None else until_s - begun,
            "memory": plain(memory),
            "sensors": self.sensors,
            "flags": sorted(self.flags),
            "forecast": None if told is None else forecast_to_dict(told),
            "why_no_forecast": self.why_no_forecast,
            "usd_per_h": self.usd_per_h(),
        }


def in_a_job(error: TunecastError) -> str:
    """Why there is no forecast, for someone whose job runs: it has no options left to choose."""
    from tunecast.model.curve_names import UnmeasuredError

    if not isinstance(error, UnmeasuredError):
        return str(error)
    work, *how = error.curve.split(".")
    measured = sorted({name.split(".")[1] for name in error.known if name.startswith(f"{work}.")})
    only = f" (only in {', '.join(measured)})" if measured else ""
    return (
        f"{work} in {how[0]} was not measured on {error.gpu}{only}."
        if how
        else (f"{work} was not measured on {error.gpu}.")
    )


def line(watcher: Watcher, *, over: bool = False) -> str | None:
    """Measured beside forecast in one line; None before anything was measured."""
    now = watcher.progress()
    if now is None:
        return None
    parts = [
        f"tunecast: step {now.step}/{now.max_steps}",
        f"{shown_s(now.step_time_s.value)}/step{_told_time(watcher)}",
        *([f"{now.tokens_per_s:,.0f} tokens/s"] if now.tokens_per_s else []),
        *_mfu_part(watcher),
        *_memory_part(watcher),
        f"{shown_s(now.spent_s)} in all" if over else f"{_span_s(now.left_s)} left{unseen_words(now.unseen)}",
        *_money_part(watcher, now, over=over),
        *([", ".join(sorted(watcher.flags))] if watcher.flags else []),
    ]
    return " · ".join(parts)


def _told_time(watcher: Watcher) -> str:
    if watcher.forecast is None:
        return ""
    told = watcher.forecast.step_time_s
    return f" (forecast {shown_s(told.value)}, {shown_s(told.low)} to {shown_s(told.high)})"


def _mfu_part(watcher: Watcher) -> list[str]:
    mfu = watcher.mfu()
    return [] if mfu is None else [f"MFU {mfu:.0%}"]


def _memory_part(watcher: Watcher) -> list[str]:
    """The peak that the device has, beside the forecast of the same view."""
    reading = watcher.device.memory()
    views = (
        ("allocated", reading.allocated_bytes, "allocated_bytes"),
        ("process", reading.process_bytes, "process_bytes"),
    )
    for name, measured, key in views:
        if measured is not None:
            told = getattr(watcher.longest.memory, key) if watcher.longest else None
            beside = "" if told is None else f" (forecast {gib(told.value):.2f})"
            return [f"peak {name} {gib(measured):.2f} GiB{beside}"]
    return []


def _money_part(watcher: Watcher, now: Progress, *, over: bool) -> list[str]:
    usd_per_h = watcher.usd_per_h()
    if usd_per_h is None:
        return []
    spent, left = (seconds / HOUR_S * usd_per_h for seconds in (now.spent_s, now.left_s.value))
    return [f"{_usd(spent)} spent" if over else f"{_usd(spent)} of {_usd(spent + left)} at ${usd_per_h:.2f}/h"]


def _usd(amount: float) -> str:
    """Cents, and two digits of what is less than ten of them."""
    return f"${amount:.2f}" if amount >= 0.1 or not amount else f"${amount:.2g}"


def _span_s(value: Value) -> str:
    return f"{shown_s(value.value)} ({shown_s(value.low)} to {shown_s(value.high)})"


def shown_s(seconds: float) -> str:
    """``0.482 s``, ``0.270 s``, ``12.3 s``, ``4 min 10 s``, ``3 h 05 min``."""
    if seconds < LONGEST_IN_SECONDS:
        return f"{seconds:#.3g} s" if seconds else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
