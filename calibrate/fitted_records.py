"""Records with their fitted factors, ready for a forecast."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.factors_io import factor_set_from_record, factors_from_dict, factors_to_dict

Record = dict[str, Any]


Records = str | Path | Iterable[str | Path]
"""One file or folder, or several."""


def as_list(paths: Records) -> list[str | Path]:
    """The paths, of which one may stand alone."""
    found = [paths] if isinstance(paths, str | Path) else list(paths) if isinstance(paths, Iterable) else None
    if found is None or not all(isinstance(path, str | Path) for path in found):
        raise InputError(f"records is {paths!r}; give the path of a record, or several in a list; without any, ().")
    return found


def record_files(paths: Records) -> list[Path]:
    """The files named, and those of every folder named, of a device's calibrations the newest; a folder without any is
    refused."""
    found: list[Path] = []
    for path in map(Path, as_list(paths)):
        inside = newest(sorted(path.glob("*.json"))) if path.is_dir() else [path]
        if not inside:
            raise InputError(f"{path} is a folder without records (*.json); tunecast calibrate --out {path}.")
        found += inside
    return found


def newest(files: Iterable[Path]) -> list[Path]:
    """The files without calibrations of which a newer one of the same device is among them."""
    made: dict[str, tuple[str, Path]] = {}
    others: list[Path] = []
    for path in files:
        device, at = _calibrated(path)
        if device is None:
            others.append(path)
        elif device not in made or made[device][0] < at:
            made[device] = (at, path)
    return sorted([*others, *(path for _, path in made.values())])


def _calibrated(path: Path) -> tuple[str | None, str]:
    """Device and day of a calibration; None of anything else, which its reader will tell about."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return (str(data["hardware"]["gpu"]), str(data["created_at"])) if "trials" in data else (None, "")
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""


def fitted_records(paths: Records, asked: Collection[str] = (), named: Records | None = None) -> dict[str, Record]:
    """Records by the device they were measured on; unfitted ones and two of one device are refused.

    With devices `asked` for, a folder among `named` (what the files are of, themselves if None), which keeps what was
    calibrated at any time, stands for its records of them, or for all where it has none of them.
    """
    found: dict[str, Record] = {}
    names: dict[str, str] = {}
    for path in _asked_for(record_files(paths), asked, as_list(paths if named is None else named)):
        gpu, record = fitted_record(path)
        if gpu in found:
            raise InputError(f"{names[gpu]} and {path} are both records of {gpu}; keep one of them.")
        found[gpu], names[gpu] = record, str(path)
    return found


def _asked_for(files: Sequence[Path], asked: Collection[str], named: Iterable[str | Path]) -> list[Path]:
    """The files without those of a folder that are of devices nobody asked for, unless that leaves none."""
    folders = {path for path in map(Path, named) if path.is_dir()}
    kept = [path for path in files if not asked or path.parent not in folders or _calibrated(path)[0] in {None, *asked}]
    return kept or list(files)


def fitted_record(path: Path) -> tuple[str, Record]:
    """One record with its device's id; every factor it fitted names the file as its origin."""
    from tunecast.calibrate.flags import flags_of
    from tunecast.calibrate.record import read_record  # pydantic is slow to import, and most forecasts have no record.

    record = read_record(path)
    gpu = record["hardware"]["gpu"]
    if gpu is None:
        raise InputError(
            f"{path} was measured on {record['hardware']['name']!r}, which is in no catalog; add it to gpus.csv "
            "(CONTRIBUTING.md), then calibrate again."
        )
    factor_set_from_record(record, name=str(path))
    factors = factors_from_dict(record["fitted"], name=str(path), record=path.name)
    return gpu, record | {"fitted": factors_to_dict(factors), "flags": flags_of(record)}
