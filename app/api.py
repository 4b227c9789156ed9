"""The Python functions behind the command line: same options, same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunecast.calibrate.devices.protocol import Device
    from tunecast.forecasts import Forecasts
    from tunecast.model.factors import FactorSet
    from tunecast.model.forecast import Forecast
    from tunecast.model.step_source import StepSource

Progress = Callable[[int, int, str, float | None], None]
"""Told trials done, trials in all, what runs now, and seconds left (None before the first)."""
DEFAULT_OUT = Path("tunecast-records")


def estimate(
    model: str | Path,
    *,
    gpu: str | Iterable[str] = "all",
    records: Iterable[str | Path] = (),
    usd_per_gpu_hour: float | None = None,
    prices: str | Path | Iterable[str | Path] = (),
    achieved_tflops: float | None = None,
    max_batch: bool = False,
    max_length_that_fits: bool = False,
    exact: bool = False,
    share_host: bool = False,
    deadline: str | float | None = None,
    told: Callable[[str], None] | None = None,
    **options: Any,
) -> Forecasts:
    """Forecast a run on each GPU, in the order given; a list that notebooks show as a table (``.to_frame()``).
    Of several GPUs those that cannot be answered are left out, with their reason in the notes.

    `model` is a catalog model, the path of a ``config.json``, or a training file (``.yaml`` of axolotl,
    LLaMA-Factory, TRL, torchtune or litgpt). `options` are the run, its parallelism,
    its amount and what is around it (phases, billing, interruptions), named as on the command line with
    underscores (``method="qlora"``, ``tokens="10M"``).
    `prices` are CSV files of your own, which count before the catalog's (columns as in
    ``tunecast catalog prices --json``).
    `max_batch` and `max_length_that_fits` take the largest micro-batch or sequence that fits each GPU.
    `share_host` lets the one record given say what its machine and software are for GPUs that have no record.
    `num_gpus="auto"` takes the fewest GPUs that fit and, with a `deadline` (``"24h"``, ``"3d"`` or hours), are in time.
    `exact` traces the real transformers, PEFT and bitsandbytes code of this run on fake tensors instead of using
    formulas, which also serves families without formulas; `told` hears what is traced next. It needs the extra
    ``calibrate``. A hub id that is not in the catalog is looked up on the hub (its config.json only).
    Raises InputError for what cannot be used, with what to type instead.
    """
    from tunecast.asking import asked_question
    from tunecast.forecasts import Forecasts, shown
    from tunecast.model.bounds import check_switch
    from tunecast.search import searched_dimension, searched_forecasts

    for name, switch in {"exact": exact, "share_host": share_host}.items():
        check_switch(name, switch)
    dimension = searched_dimension(options, max_batch=max_batch, max_length_that_fits=max_length_that_fits)
    question, targets, notes = asked_question(
        model,
        gpu=gpu,
        records=records,
        usd_per_gpu_hour=usd_per_gpu_hour,
        prices=prices,
        achieved_tflops=achieved_tflops,
        source=traced(told) if exact else None,
        share_host=share_host,
        **options,
    )
    found = searched_forecasts(question, targets, dimension, deadline=deadline)
    return Forecasts(shown(replace(forecast, notes=(*forecast.notes, *notes))) for forecast in found)


def traced(told: Callable[[str], None] | None = None) -> StepSource:
    """The real code as the source of operations and memory; refused where it is not installed."""
    from tunecast.calibrate.exact_source import TracedSteps, check_installed

    check_installed()
    return TracedSteps() if told is None else TracedSteps(told=told)


def measure(
    model: str | Path, *, device: str | None = None, steps: int = 5, ignore_memory: bool = False, **options: Any
) -> Forecast:
    """Run and time real optimizer steps of a run (random weights); the answer has a forecast's shape.

    `device` is ``cuda:N``, ``cpu`` or ``mock:<gpu>``; without it the first GPU, else the CPU. Raises
    OutOfMemoryError when the run does not fit.
    """
    from tunecast.asked import read_asked
    from tunecast.catalogs.errors import InputError
    from tunecast.measurement import measure_on
    from tunecast.model.read_numbers import plain_numbers

    asked = read_asked(str(model), plain_numbers(options))
    if not isinstance(steps, int) or isinstance(steps, bool):
        raise InputError(f"steps is {steps!r}; give a whole number of optimizer steps.")
    with opened(device, ignore_memory=ignore_memory) as found:
        return measure_on(found, asked, steps)


def calibrate_device(
    device: str | None = None,
    *,
    mode: str = "quick",
    out: str | Path = DEFAULT_OUT,
    fresh: bool = False,
    fit: bool = True,
    num_gpus: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Measure a device, ``quick`` or ``full``, and write one record into the folder `out`; its path.

    Collectives run between `num_gpus` GPUs of the machine: by default all of the same card, 1 leaves them out.
    """
    from tunecast.calibrate.runner import calibrate

    with opened(device) as found:
        return calibrate(
            found, mode=mode, out_dir=Path(out), fresh=fresh, fit=fit, num_gpus=num_gpus, progress=progress
        )


@contextmanager
def opened(name: str | None, *, ignore_memory: bool = False) -> Iterator[Device]:
    """A device by name, closed at the end."""
    from tunecast.calibrate.devices.open import default_device_name, open_device
    from tunecast.catalogs.errors import InputError

    if name is not None and not isinstance(name, str):
        raise InputError(f'device is {name!r}, but it is a name: "cuda:0", "cpu" or "mock:<gpu-id>".')
    device = open_device(default_device_name() if name is None else name, ignore_memory=ignore_memory)
    try:
        yield device
    finally:
        device.close()


def fit(record: str | Path) -> FactorSet:
    """Fit the factors of a record and write them into its file; needs scipy.

    Raises InputError where `record` is no path or no record.
    """
    from tunecast.calibrate.fit import fit_record
    from tunecast.calibrate.record import add_fitted, read_record
    from tunecast.catalogs.errors import InputError
    from tunecast.model.factors_io import factors_from_dict

    if not isinstance(record, str | Path):
        raise InputError(f"record is {record!r}, but it is the path of a calibration's file.")
    path = Path(record)
    fitted = fit_record(read_record(path))
    add_fitted(path, fitted)
    return factors_from_dict(fitted, name=str(path), record=path.name)
