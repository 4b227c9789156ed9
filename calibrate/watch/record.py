"""What watching a job left behind: ``tunecast.run/1``, one file per job, with the forecast that it was held against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunecast.calibrate.record import (
    HardwarePart,
    Seconds,
    SensorsPart,
    check_unchanged,
    file_slug,
    measured_hash,
    serialise,
    write_text,
)
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.catalogs.errors import InputError
from tunecast.model.run import Run
from tunecast.model.value import Value

RUN_SCHEMA = "tunecast.run/1"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class WindowPart(_Strict):
    """Some consecutive steps, timed as a whole."""

    steps: int = Field(gt=0)
    seconds: float = Field(gt=0)
    tokens: int = Field(ge=0)


class RunFile(_Strict):
    """The whole file."""

    schema_name: Literal["tunecast.run/1"] = Field(alias="schema")
    tunecast: str | None
    created_at: str
    hardware: HardwarePart
    software: dict[str, str | None]
    architecture: dict[str, Any] | None
    """Null when the model's code has no formulas."""
    run: dict[str, Any] | None
    """The resolved run at the mean length that was seen; null without a forecast."""
    longest_run: dict[str, Any] | None
    """The same at the greatest length: the peak of memory belongs to it."""
    steps: int = Field(ge=0)
    """Steps that were run, warm-up included."""
    max_steps: int = Field(ge=0)
    windows: list[WindowPart]
    aside_s: Seconds
    """Seconds of evaluations and saves between the windows."""
    asides: int = Field(ge=0)
    wall_s: Seconds
    """From the first step to the last."""
    memory: dict[str, int | None]
    sensors: list[SensorsPart]
    flags: list[str]
    forecast: dict[str, Any] | None
    """``tunecast.forecast/1`` by what was known when the job began, of samples as long as they turned out to be."""
    why_no_forecast: str | None
    usd_per_h: float | None


def run_record_name(record: dict[str, Any]) -> str:
    """``<gpu-id>_run_<utc>_<hash8>.json``."""
    moment = str(record["created_at"]).replace("-", "").replace(":", "")
    slug = file_slug(str(record["hardware"]["gpu"] or record["hardware"]["name"]))
    return f"{slug}_run_{moment}_{measured_hash(record)}.json"


def write_run_record(record: dict[str, Any], folder: Path) -> Path:
    """Write the record into `folder`, made if need be; the file appears whole or not at all."""
    RunFile.model_validate_json(json.dumps(record))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / run_record_name(record)
    write_text(path, serialise(record))
    return path


def is_run_record(data: Any) -> bool:
    """Whether parsed JSON is one of ours."""
    return isinstance(data, dict) and data.get("schema") == RUN_SCHEMA


def read_run_record(path: Path) -> dict[str, Any]:
    """The validated content; raises InputError with what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        RunFile.model_validate_json(json.dumps(data))
    except OSError as error:
        raise InputError(
            f"The record {path} cannot be read ({error.strerror or error}); give the path of a file that "
            "tunecast.TunecastCallback wrote."
        ) from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not JSON; give a file that tunecast.TunecastCallback wrote.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{path} is not a whole {RUN_SCHEMA} record ({where}: {first['msg']}); give a file that "
            "tunecast.TunecastCallback wrote."
        ) from error
    record: dict[str, Any] = data
    check_unchanged(record, path)
    _check_parts(record, path)
    return record


def _check_parts(record: dict[str, Any], path: Path) -> None:
    """Raises InputError where a run, an architecture or a forecast within lacks what is read of it later."""
    for name in ("run", "longest_run", "architecture", "forecast"):
        part = record[name]
        try:
            if part is not None and name == "architecture":
                architecture_from_dict(part)
            elif part is not None and name == "forecast":
                memory = (part["memory"].get(f"{view}_bytes") for view in ("allocated", "reserved", "process"))
                _ = [Value(**told) for told in (part["step_time_s"], *memory) if told is not None]
            elif part is not None:
                run_from_dict(part)
                _ = part["method"], part["max_length"]
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} is not a whole {RUN_SCHEMA} record ({name}: {error}); give a file that "
                "tunecast.TunecastCallback wrote."
            ) from error


def driven_run(record: dict[str, Any]) -> Run:
    """The run that a file holds: the Trainer's, which older files do not say."""
    return run_from_dict({"trainer_loop": True} | record["run"])
