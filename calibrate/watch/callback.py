"""`TunecastCallback`: a Trainer callback over `Watcher` that can never break or slow the training it watches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tunecast.calibrate.watch.clock import StepClock
from tunecast.calibrate.watch.watcher import Watcher, line


def to_stderr(text: str) -> None:
    """Print beside a progress bar without breaking it, if the Trainer shows one."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        print(text, file=sys.stderr)
    else:
        tqdm.tqdm.write(text, file=sys.stderr)


def contained(event: Callable[..., None]) -> Callable[..., None]:
    """Whatever goes wrong in here is told once and ends the watching, never the training."""

    @functools.wraps(event)
    def guarded(self: TrainingWatch, *args: Any, **kwargs: Any) -> None:
        if self.broken is not None:
            return
        try:
            event(self, *args, **kwargs)
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"
            self.stop_listening()
            self.tell(f"tunecast stopped watching ({self.broken}); the training goes on.")

    return guarded


class TrainingWatch:
    """The events of a Trainer, told to a `Watcher`; does not import transformers.

    `records` are calibration records to forecast from, `out` the folder for the record of this run (None writes
    none), `every_steps` asks for a line that often beside the first one and the last.
    """

    def __init__(
        self,
        *,
        records: Iterable[str | Path] = (),
        usd_per_gpu_hour: float | None = None,
        out: str | Path | None = "tunecast-records",
        every_steps: int | None = None,
        tell: Callable[[str], None] = to_stderr,
    ) -> None:
        self.records = [Path(path) for path in records]
        self.usd_per_gpu_hour = usd_per_gpu_hour
        self.out = None if out is None else Path(out)
        self.every_steps = every_steps
        self.tell = tell
        self.watcher: Watcher | None = None
        self.written: Path | None = None
        """The record of the run, once it is over."""
        self.broken: str | None = None
        """Why watching ended early."""
        self._hook: Any = None
        self._told_first = False

    @contained
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the job; only the first process of a job that spans several does."""
        del control
        if not state.is_world_process_zero:
            return
        model = kwargs["model"]
        self.watcher = start_watching(self, args, state, model)
        self._hook = model.register_forward_pre_hook(self._saw, with_kwargs=True)

    def _saw(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward pass: the batch's shape. Reads nothing from the device."""
        if self.broken is not None or self.watcher is None or not module.training:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and getattr(ids, "ndim", 0) == 2:
            self.watcher.saw_batch(ids.shape)

    @contained
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer step begins."""
        del args, state, control, kwargs
        if self.watcher is not None:
            self.watcher.clock.step_begins()

    @contained
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimizer step is over; an evaluation or a save that follows is not part of the next."""
        del args, kwargs
        if self.watcher is None:
            return
        aside = bool(control.should_evaluate or control.should_save)
        measured = self.watcher.step_ends(state.global_step, aside_follows=aside)
        due = self.every_steps is not None and state.global_step % self.every_steps == 0
        if due or (measured and not self._told_first):
            self._tell_line()

    def _tell_line(self, *, over: bool = False) -> None:
        assert self.watcher is not None
        text = line(self.watcher, over=over)
        if text is not None:
            if self.watcher.why_no_forecast and not self._told_first:
                self.tell(f"tunecast: no forecast for this job, it is measured only: {self.watcher.why_no_forecast}")
            self._told_first = True
            self.tell(text)

    @contained
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how it went and write the record."""
        del args, state, control, kwargs
        self.stop_listening()
        if self.watcher is None:
            return
        self.watcher.clock.finish()
        self._tell_line(over=True)
        if self.out is not None and self.watcher.clock.windows:
            self.written = write(self.watcher, self.out)
            self.tell(f"tunecast: record of this run in {self.written}; type: tunecast validate {self.written}")
        self.watcher.device.close()

    def stop_listening(self) -> None:
        """Take the hook off the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def start_watching(watch: TrainingWatch, args: Any, state: Any, model: Any) -> Watcher:
    """A watcher of this job; one that has no forecast says why."""
    from tunecast.calibrate.fitted_records import fitted_records
    from tunecast.calibrate.watch.device import watched_device
    from tunecast.calibrate.watch.reading import read_job
    from tunecast.catalogs.errors import TunecastError

    device = watched_device(args.device)
    watcher = Watcher(
        device=device,
        clock=StepClock(synchronize=device.synchronize),
        max_steps=int(state.max_steps),
        records=fitted_records(watch.records),
        usd_per_gpu_hour=watch.usd_per_gpu_hour,
        num_gpus=int(args.world_size),
    )
    try:
        watcher.job = read_job(args, model)
    except TunecastError as error:
        watcher.why_no_forecast = str(error)
    return watcher


def write(watcher: Watcher, folder: Path) -> Path:
    """The record of the run in `folder`."""
    from tunecast.calibrate.environment import package_version
    from tunecast.calibrate.record import utc_now
    from tunecast.calibrate.watch.record import write_run_record

    return write_run_record(watcher.record(created_at=utc_now(), tunecast=package_version("tunecast")), folder)


@functools.cache
def callback_class() -> type:
    """`TunecastCallback`, made when first asked for, because its other parent is transformers' own class."""
    from transformers import TrainerCallback

    return type("TunecastCallback", (TrainingWatch, TrainerCallback), {"__doc__": TrainingWatch.__doc__})


def __getattr__(name: str) -> Any:
    if name == "TunecastCallback":
        return callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
