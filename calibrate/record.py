"""One record is one file: what was measured, on what, with what, every raw sample included.

Named ``<gpu-id>_<utc>_<hash8>.json``; sorted keys and a trailing newline, so that it diffs and can be
sent as a pull request.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.files import write_whole

SCHEMA_FAMILY = "tunecast.record/"
SCHEMA_VERSION = 1
SCHEMA = f"{SCHEMA_FAMILY}{SCHEMA_VERSION}"
PARTIAL_SUFFIX = ".partial.jsonl"
"""Of a calibration that is not finished (`partial.py`)."""
HASH_CHARACTERS = 8
OWN_NAME = re.compile(rf".+_\d{{8}}T\d{{6}}Z_(?P<hash>[0-9a-f]{{{HASH_CHARACTERS}}})\.json")
"""Names that `record_name` gives, and `watch.record` to what was watched."""


class _Strict(BaseModel):
    """A part of a record: unknown fields are errors, not noise."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ProtocolPart(_Strict):
    """Which procedure measured: trials of different versions do not compare."""

    version: int
    mode: str
    resumed_trials: int = 0
    """Trials that were measured before the calibration was interrupted, and kept."""


class MemoryPart(_Strict):
    """`protocol.MemoryReading` in a file."""

    allocated_bytes: int | None
    reserved_bytes: int | None
    process_bytes: int | None
    at_rest_bytes: int | None


class SensorsPart(_Strict):
    """`protocol.Sensors` in a file; null where the device does not report."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    utilization_frac: float | None
    throttle_reasons: list[str] | None
    pcie_gen: int | None
    pcie_width: int | None
    pcie_rx_bytes_per_s: float | None
    pcie_tx_bytes_per_s: float | None
    energy_j: float | None
    other_processes: int | None
    memory_used_bytes: int | None


Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


Sampled = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
"""Seconds of something that ran, by which a rate is divided."""


class TrialPart(_Strict):
    """One trial with its raw samples; warm-up apart, never dropped."""

    id: int
    bench: str
    params: dict[str, Any]
    repeats: int
    warmup: int
    outcome: Literal["ok", "oom", "unsupported", "error"]
    message: str
    samples_s: list[Sampled]
    warmup_s: list[Seconds]
    memory: MemoryPart
    sensors_before: SensorsPart | None
    sensors_after: SensorsPart | None
    extra: dict[str, Any]


def is_trial(value: Any) -> bool:
    """Whether a line of unfinished work holds a whole trial, which has no number yet."""
    if not isinstance(value, Mapping):
        return False
    try:
        TrialPart.model_validate_json(json.dumps({**value, "id": 0}))
    except ValidationError:
        return False
    return True


class HardwarePart(_Strict):
    """`protocol.Hardware` in a file."""

    device: str
    gpu: str | None
    name: str
    memory_bytes: int | None
    multiprocessors: int | None
    compute_capability: str | None
    driver: str | None
    cuda: str | None
    power_limit_w: float | None
    default_power_limit_w: float | None
    max_sm_clock_mhz: float | None
    max_memory_clock_mhz: float | None
    ecc: bool | None
    mig: bool | None
    mig_profile: str | None
    pcie_gen_max: int | None
    pcie_width_max: int | None
    nvlink_links: int | None
    container: bool | None
    host: dict[str, Any]


class RecordFile(_Strict):
    """The whole file."""

    schema_name: str = Field(alias="schema")
    schema_version: int
    tunecast: str | None
    created_at: str
    duration_s: float
    protocol: ProtocolPart
    hardware: HardwarePart
    software: dict[str, str | None]
    trials: list[TrialPart] = Field(min_length=1)
    flags: list[str]
    fitted: dict[str, Any] | None


def read_record(path: Path) -> dict[str, Any]:
    """The validated content of a record file. Raises InputError: unreadable, foreign, newer or damaged."""
    data = _read_json(Path(path))
    _check_schema(data, Path(path))
    try:
        RecordFile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{path} is a {SCHEMA} record, but {where} in it is damaged ({first['msg']}); calibrate again."
        ) from error
    check_unchanged(data, Path(path))
    return data


def check_unchanged(record: Mapping[str, Any], path: Path) -> None:
    """Raise InputError where a file still has its record's name, whose end no longer belongs to what it holds.

    Another name is the user's own and promises nothing.
    """
    named = OWN_NAME.fullmatch(path.name)
    found = measured_hash(record)
    if named and named["hash"] != found:
        raise InputError(
            f"{path} holds other measurements than those it was named for (its name ends in {named['hash']}, its "
            f"content gives {found}); fetch the file again, or rename it if the change is yours."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"The record {path} cannot be read ({error.strerror or error}); give the path of a file that "
            "`tunecast calibrate` wrote."
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        if path.name.endswith(PARTIAL_SUFFIX):
            raise InputError(
                f"{path} is a calibration that is not finished: the same `tunecast calibrate` command goes on from "
                "there and writes the record."
            ) from error
        raise InputError(
            f"{path} is not a record: it is not JSON; give a file that `tunecast calibrate` wrote."
        ) from error
    if not isinstance(data, dict) or not str(data.get("schema", "")).startswith(SCHEMA_FAMILY):
        raise InputError(
            f"{path} is JSON but not a tunecast record (its schema is "
            f"{data.get('schema') if isinstance(data, dict) else None!r}); give a file that `tunecast calibrate` wrote."
        )
    return data


def _check_schema(data: Mapping[str, Any], path: Path) -> None:
    version = str(data["schema"]).removeprefix(SCHEMA_FAMILY)
    if not version.isdigit() or int(version) < 1:
        raise InputError(
            f"{path} has the unknown schema {data['schema']!r}, and this tunecast reads {SCHEMA}; give a file that "
            "`tunecast calibrate` wrote."
        )
    newest = max(int(version), data["schema_version"] if isinstance(data.get("schema_version"), int) else 0)
    if newest > SCHEMA_VERSION:
        raise InputError(
            f"{path} was written by a newer tunecast (schema version {newest}, this one reads up to {SCHEMA}); "
            "type: pip install --upgrade tunecast"
        )


def serialise(record: Mapping[str, Any]) -> str:
    """The text of a record file: sorted keys, two spaces, one newline at the end."""
    return json.dumps(record, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def measured_hash(record: Mapping[str, Any]) -> str:
    """First characters of the SHA-256 of what was measured: adding the fit does not change it."""
    measured = {key: value for key, value in record.items() if key != "fitted"}
    return hashlib.sha256(serialise(measured).encode()).hexdigest()[:HASH_CHARACTERS]


def file_slug(device: str) -> str:
    """A device's name as part of a file name: ``mock:l4#7`` gives ``mock-l4-7``."""
    return re.sub(r"[^a-z0-9.]+", "-", device.lower()).strip("-.") or "device"


def device_slug(hardware: Mapping[str, Any]) -> str:
    """The catalog id where there is one, else the vendor's name."""
    return file_slug(str(hardware["gpu"] or hardware["name"]))


def record_name(record: Mapping[str, Any]) -> str:
    """``<gpu-id>_<utc>_<hash8>.json``."""
    moment = str(record["created_at"]).replace("-", "").replace(":", "")
    return f"{device_slug(record['hardware'])}_{moment}_{measured_hash(record)}.json"


def utc_now() -> str:
    """This moment as ``YYYY-MM-DDTHH:MM:SSZ``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_record(record: Mapping[str, Any], out_dir: Path) -> Path:
    """Write a record under its own name into `out_dir`; the file appears whole or not at all."""
    path = Path(out_dir) / record_name(record)
    write_text(path, serialise(record))
    return path


def add_fitted(path: Path, fitted: Mapping[str, Any]) -> None:
    """Put the `fitted` section into a record file, replacing an older one; its name stays."""
    record = read_record(path)
    write_text(Path(path), serialise({**record, "fitted": dict(fitted)}))


def write_text(path: Path, text: str) -> None:
    """The text of a record as a file; raises InputError where that cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(
            f"The record cannot be written to {path.parent} ({error.strerror or error}); "
            "choose another folder with --out."
        ) from error
