"""Records of watched runs among the files given with ``--record``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tunecast.calibrate.fitted_records import Records, record_files
from tunecast.catalogs.errors import InputError
from tunecast.model.observed import Observation, Observations


def split_records(paths: Records) -> tuple[list[Path], Observations]:
    """(calibration records, observations by device): a file is a watched run if its schema says so."""
    calibrations: list[Path] = []
    found: dict[str, list[Observation]] = {}
    for path in record_files(paths):
        if _is_run(path):
            seen = observation(path)
            found.setdefault(seen.gpu, []).append(seen)
        else:
            calibrations.append(path)
    return calibrations, found


def _is_run(path: Path) -> bool:
    """Whether the file is a watched run; what cannot be read is left to the reader of calibrations to refuse."""
    from tunecast.calibrate.watch.record import is_run_record

    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return is_run_record(data)


def observation(path: Path) -> Observation:
    """What a record of a watched run says of its device; raises InputError where it says too little."""
    from tunecast.calibrate.trace.spec import architecture_from_dict
    from tunecast.calibrate.watch.clock import Window, predicted_mean
    from tunecast.calibrate.watch.record import driven_run, read_run_record

    record = read_run_record(path)
    gpu = record["hardware"]["gpu"]
    step = predicted_mean([Window(**window) for window in record["windows"]], ahead=None)
    if gpu is None or step is None or record["architecture"] is None or record["run"] is None:
        missing = "card of the catalog" if gpu is None else "timed step" if step is None else "run that formulas know"
        raise InputError(f"{path} holds no {missing}, so no forecast can learn from it; leave it out.")
    return Observation(
        name=path.name,
        gpu=gpu,
        architecture=architecture_from_dict(record["architecture"]),
        run=driven_run(record),
        step_time_s=step.value,
    )


def refuse_unused(observations: Observations, devices: Iterable[str]) -> None:
    """A watched run on a device that is not asked for changes nothing: refused, as a calibration record is."""
    asked = list(devices)
    for gpu, seen in observations.items():
        if gpu not in asked:
            raise InputError(f"{seen[0].name} was watched on {gpu}, which is not asked for; add --gpu {gpu}.")
