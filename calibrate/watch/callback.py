"""`TunecastCallback`: a Trainer callback over `Watcher` that can never break or slow the training it watches."""

from __future__ import annotations

import atexit
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tunecast.calibrate.fitted_records import as_list
from tunecast.calibrate.watch.clock import StepClock
from tunecast.calibrate.watch.stops import kind_of
from tunecast.calibrate.watch.watcher import Watcher, line
from tunecast.catalogs.errors import InputError, TunecastError


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
            self.broken = str(error) if isinstance(error, TunecastError) else f"{type(error).__name__}: {error}"
            self.stop_listening()
            self.say(f"tunecast stopped watching ({self.broken}); the training goes on.")

    return guarded


class TrainingWatch:
    """The events of a Trainer, told to a `Watcher`; does not import transformers.

    `records` are calibration records, or records of watched runs, to forecast from, `out` the folder for the record of
    this run (None writes none), `every_steps` asks for a line that often beside the first one and the last.
    """

    def __init__(
        self,
        *,
        records: str | Path | Iterable[str | Path] = (),
        usd_per_gpu_hour: float | None = None,
        out: str | Path | None = "tunecast-records",
        every_steps: int | None = None,
        tell: Callable[[str], None] = to_stderr,
    ) -> None:
        known = isinstance(usd_per_gpu_hour, float | int) and 0 <= usd_per_gpu_hour < math.inf
        if usd_per_gpu_hour is not None and not known:
            raise InputError(f"usd_per_gpu_hour is {usd_per_gpu_hour!r}; give dollars per hour of one GPU, 0 or more.")
        if every_steps is not None and not (isinstance(every_steps, int) and every_steps >= 1):
            raise InputError(f"every_steps is {every_steps!r}; give a whole number of 1 or more, or leave it out.")
        if out is not None and not isinstance(out, (str, Path)):
            raise InputError(f"out is {out!r}; give the folder for the record of the run, or None for no record.")
        self.records = [Path(path) for path in as_list(records)]
        self.usd_per_gpu_hour = usd_per_gpu_hour
        self.out = None if out is None else Path(out)
        self.every_steps = every_steps
        self.tell = tell
        self.watcher: Watcher | None = None
        self.written: Path | None = None
        """The record of the run: as of the last save while it runs, the whole once it is over."""
        self.broken: str | None = None
        """Why watching ended early."""
        self._hook: Any = None
        self._told_first = False
        self._over = True

    @contained
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the job; only the first process of a job that spans several does."""
        del control
        if not state.is_world_process_zero:
            return
        self._leave_unfinished()
        self._told_first, self._over, self.written = False, False, None
        self._try_folder()
        model = kwargs["model"]
        self.watcher = start_watching(self, args, state, model, kwargs)
        self._hook = model.register_forward_pre_hook(uncompiled(self._saw), with_kwargs=True)
        atexit.register(self._leave_unfinished)

    def _try_folder(self) -> None:
        """A folder that cannot be written is told before the hours of training, not after."""
        try:
            if self.out is not None:
                self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.say(f"tunecast: {self.out} cannot be written ({error.strerror}), so this run leaves no record.")
            self.out = None

    @contained
    def _leave_unfinished(self) -> None:
        """A training that was interrupted: its record holds what was measured until then."""
        self.stop_listening()
        atexit.unregister(self._leave_unfinished)
        if self.watcher is not None and not self._over:
            self._over = True
            self.watcher.clock.break_off()
            self._write(interrupted=True)
            self.watcher.device.close()
            if self.written is not None:
                self.say(f"tunecast: record of the interrupted run in {self.written}")

    @contained
    def _saw(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward pass that trains: the batch's shape. Of the first ones the mask is read too,
        as the model does; nothing else is read from the device."""
        import torch

        if self.watcher is None or not module.training or not torch.is_grad_enabled():
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and getattr(ids, "ndim", 0) == 2:
            rows, length = ids.shape
            self.watcher.saw_batch(samples_in(kwargs, self.watcher) or rows, rows * length)
            mask = kwargs.get("attention_mask")
            if self.watcher.reads_mask and mask is not None and mask.ndim == 2:
                self.watcher.saw_mask(has_padding=not bool(mask.all()))

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
        measured = self.watcher.step_ends(state.global_step, followed_by=kind_of(control))
        if control.should_training_stop or state.global_step >= state.max_steps:
            return  # the line at the end says it all
        due = self.every_steps is not None and state.global_step % self.every_steps == 0
        if due or (measured and not self._told_first):
            self._tell_line()

    @contained
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An epoch is over, after its last step; an evaluation or a save may follow."""
        del args, state, kwargs
        if self.watcher is not None and (kind := kind_of(control)):
            self.watcher.stops_for(kind)

    def _tell_line(self, *, over: bool = False) -> None:
        assert self.watcher is not None
        text = line(self.watcher, over=over)
        if text is not None:
            if self.watcher.why_no_forecast and not self._told_first:
                self.say(f"tunecast: no forecast for this job, measured figures follow: {self.watcher.why_no_forecast}")
            self._told_first = True
            self.say(text)

    def say(self, text: str) -> None:
        """Tell; where `tell` itself fails, stderr is told, from then on."""
        try:
            self.tell(text)
        except Exception as error:  # Whatever a function of the user's raises, the training goes on.
            self.tell = to_stderr
            to_stderr(f"tunecast: its tell function failed ({type(error).__name__}: {error}); lines go to stderr.")
            to_stderr(text)

    @contained
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint was written: the record so far too, for a machine that is taken away."""
        del args, state, control, kwargs
        if self.watcher is not None:
            self._write(interrupted=True)

    @contained
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how it went and write the record."""
        del args, state, control, kwargs
        self.stop_listening()
        if self.watcher is None:
            return
        self._over = True
        atexit.unregister(self._leave_unfinished)
        self.watcher.clock.finish()
        self.watcher.settle_lengths()
        if not self.watcher.clock.windows:
            self.say(f"tunecast: {self.watcher.clock.steps_seen} steps are too few to be timed; there is no record.")
        self._tell_line(over=True)
        self._write(interrupted=False)
        if self.written is not None:
            self.say(f"tunecast: record of this run in {self.written}; type: tunecast validate {self.written}")
        self.watcher.device.close()

    def _write(self, *, interrupted: bool) -> None:
        """The record as it stands, in place of an earlier one of the same run."""
        if self.out is None or self.watcher is None or not self.watcher.clock.windows:
            return
        earlier, self.written = self.written, write(self.watcher, self.out, interrupted=interrupted)
        if earlier is not None and earlier != self.written:
            earlier.unlink(missing_ok=True)

    def stop_listening(self) -> None:
        """Take the hook off the model."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def start_watching(watch: TrainingWatch, args: Any, state: Any, model: Any, parts: Mapping[str, Any]) -> Watcher:
    """A watcher of this job; one that has no forecast says why. `parts` are what the Trainer hands to its callbacks."""
    from tunecast.calibrate.watch.device import watched_device
    from tunecast.calibrate.watch.reading import not_data_parallel, read_job
    from tunecast.calibrate.watch.stops import planned_stops, steps_per_epoch

    device = watched_device(args.device)
    calibrations, observations = usable_records(watch)
    watcher = Watcher(
        device=device,
        clock=StepClock(synchronize=device.synchronize),
        max_steps=int(state.max_steps),
        records=calibrations,
        observations=observations,
        usd_per_gpu_hour=watch.usd_per_gpu_hour,
        num_gpus=int(args.world_size),
        data_parallel=int(args.world_size) // not_data_parallel(args),
    )
    try:
        watcher.job = read_job(args, model, parts.get("optimizer"))
    except TunecastError as error:
        watcher.why_no_forecast = str(error)
    except Exception as error:  # A job that reads unlike any we know is still measured; why is told and recorded.
        watcher.why_no_forecast = f"the job could not be read ({type(error).__name__}: {error})"
    try:
        watcher.stops = planned_stops(args, state, steps_per_epoch(args, parts.get("train_dataloader")))
    except Exception as error:  # A data loader or state of an unknown kind costs the time left its stops, not the job.
        why = f"{type(error).__name__}: {error}"
        watch.say(f"tunecast: evaluations and saves ahead could not be read ({why}); times left are without them.")
    return watcher


def uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook as `torch.compile` leaves it alone: it counts, and a count that changes would be compiled anew."""
    import torch

    left_alone: Callable[..., None] = torch.compiler.disable(hook)
    return left_alone


def samples_in(kwargs: Mapping[str, Any], watcher: Watcher) -> int | None:
    """Samples laid end to end in one row, each attending to itself alone: where flash kernels are told their bounds.

    Other attention runs over the whole row under a mask, so that the row counts as one sample.
    """
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is None or watcher.job is None or "flash" not in watcher.job.options["attn_implementation"]:
        return None
    return len(bounds) - 1


def usable_records(watch: TrainingWatch) -> tuple[dict[str, Any], Any]:
    """Calibrations and watched runs to forecast from; records that cannot be used are told, and none is."""
    from tunecast.calibrate.fitted_records import fitted_records
    from tunecast.calibrate.watch.observations import split_records

    try:
        paths, observations = split_records(watch.records)
        return fitted_records(paths), observations
    except TunecastError as error:
        watch.say(f"tunecast: {error} This job is forecast without records.")
        return {}, {}


def write(watcher: Watcher, folder: Path, *, interrupted: bool) -> Path:
    """The record of the run in `folder`."""
    from tunecast.calibrate.environment import package_version
    from tunecast.calibrate.record import utc_now
    from tunecast.calibrate.watch.record import write_run_record

    return write_run_record(
        watcher.record(created_at=utc_now(), tunecast=package_version("tunecast"), interrupted=interrupted), folder
    )


@functools.cache
def callback_class() -> type:
    """`TunecastCallback`, made when first asked for, because its other parent is transformers' own class."""
    from transformers import TrainerCallback

    return type("TunecastCallback", (TrainingWatch, TrainerCallback), {"__doc__": TrainingWatch.__doc__})


def __getattr__(name: str) -> Any:
    if name == "TunecastCallback":
        return callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
