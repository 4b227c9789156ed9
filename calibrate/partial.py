"""Unfinished work: ``<gpu-id>.partial.jsonl``, one line of identity, then one line per finished trial."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunecast.calibrate.record import is_trial
from tunecast.catalogs.errors import DeviceError, InputError
from tunecast.catalogs.files import write_whole

PARTIAL_SCHEMA = "tunecast.partial/1"


class Partial:
    """Trials finished so far, on disk after every one of them, so that nothing is measured twice."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """`identity` is what must match for the trials to be usable: device, protocol, mode, versions."""
        self.path = path
        self.identity = dict(identity)
        self.trials: dict[str, dict[str, Any]] = {}
        """By the trial's key."""

    def resume(self) -> bool:
        """Take over the trials of an interrupted calibration; False when there is none of the same identity."""
        lines = self._lines()
        if not lines or lines[0] != self._header():
            return False
        self.trials = {
            line["key"]: line["trial"] for line in lines[1:] if "key" in line and is_trial(line.get("trial"))
        }
        return bool(self.trials)

    def start(self) -> None:
        """Write what is known so far afresh; later trials are appended. Raises InputError where that fails."""
        try:
            write_whole(self.path, self._text())
        except OSError as error:
            raise unwritable(self.path.parent, error) from error

    def add(self, key: str, trial: dict[str, Any]) -> None:
        """Keep one finished trial, on disk before the next one starts."""
        self.trials[key] = trial
        try:
            if not self.path.exists():  # another calibration of this card into this folder has ended
                write_whole(self.path, self._text())
                return
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line({"key": key, "trial": trial}))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DeviceError(
                f"What was measured cannot be kept in {self.path} ({error.strerror or error}): make room there, and "
                "the same command goes on from the trials before."
            ) from error

    def remove(self) -> None:
        """The record is written; the partial file goes."""
        self.path.unlink(missing_ok=True)

    def _text(self) -> str:
        """The whole file of what is known."""
        kept = [{"key": key, "trial": trial} for key, trial in self.trials.items()]
        return "".join(_line(entry) for entry in (self._header(), *kept))

    def _header(self) -> dict[str, Any]:
        return {"schema": PARTIAL_SCHEMA, **self.identity}

    def _lines(self) -> list[dict[str, Any]]:
        """Whole lines of the file; a last line cut short by a crash is left out."""
        if not self.path.is_file():
            return []
        found = []
        for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(text)
            except json.JSONDecodeError:
                break
            if not isinstance(entry, dict):
                break
            found.append(entry)
        return found


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, sort_keys=True, allow_nan=False) + "\n"


def unwritable(folder: Path, error: OSError) -> InputError:
    """The refusal of an output folder."""
    return InputError(
        f"Records cannot be written to {folder} ({error.strerror or error}); choose another folder with --out."
    )


def prepare_folder(folder: Path) -> Path:
    """Make the output folder and prove that a file can be written there, before anything is measured."""
    probe = folder / f".tunecast-probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder
