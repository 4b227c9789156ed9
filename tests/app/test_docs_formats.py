"""docs/formats.md has a line for every key that is written, and no line for another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from tunecast.calibrate.record import RecordFile
from tunecast.calibrate.watch.record import RunFile
from tunecast.catalogs.price_file import known_columns
from tunecast.cli.program import program
from tunecast.model.priors import HOST_PRIORS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
VALUE = {"value", "low", "high"}
OPEN = {
    "run", "memory.parts_gib", "time_parts_s", "phases_h", "phases[].rates", "cost_parts_usd", "origins", "power",
    "interruptions.percentiles_h", "scaling.amdahl", "hardware.host", "software", "trials[].params",
    "trials[].sensors_before", "trials[].sensors_after", "trials[].extra", "fitted", "architecture", "longest_run",
    "memory", "sensors", "hardware", "forecast", "cheapest", "fastest", "balance", "pareto", "binding", "rejected",
    "dimensions", "base", "rows", "beliefs", "efficiency", "host_s_per_launch", "exposed_frac", "exposed_late_frac",
    "device_effects", "effects_by_kind", "sharding_effects", "step_log_sd", "memory_overhead_bytes",
    "left_out_log_errors", "rows_skipped", "rows_used", "marks", "records_used", "records_skipped", "covariance",
    "spreads", "host_hooks", "host_units",
    *HOST_PRIORS,
    "start_up_s", "source_effect", "width", "least_width", "left_out_width", "memory_codes", "units",
}  # fmt: skip
"""Keys whose inside is described in words."""
LLAMA = ("meta-llama/Llama-3.1-8B", "--method", "qlora", "--max-length", "2048")
SPOT = ("--num-gpus", "2", "--spot", "--interruption-rate-per-month", "0.1")


def documented(heading: str) -> set[str]:
    """First column of the table under a heading."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def leaves(data: Any, opened: set[str], prefix: str = "") -> Iterator[str]:
    """Names of everything in a JSON, down to the keys whose inside the page describes in words."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        first = value[0] if isinstance(value, list) and value else None
        if name in opened or (isinstance(value, Mapping) and set(value) == VALUE):
            yield name
        elif isinstance(value, Mapping) and value:
            yield from leaves(value, opened, f"{name}.")
        elif isinstance(first, Mapping):
            yield from leaves(first, opened, f"{name}[].")
        else:
            yield name


def fields_of(model: type[BaseModel], opened: set[str], prefix: str = "") -> Iterator[str]:
    """The same of a pydantic model."""
    for key, field in model.model_fields.items():
        name = f"{prefix}{field.alias or key}"
        inner = [t for t in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(t, type)]
        model_inside = next((t for t in inner if issubclass(t, BaseModel)), None)
        if model_inside is None or name in opened:
            yield name
        else:
            listed = getattr(field.annotation, "__origin__", None) is list
            yield from fields_of(model_inside, opened, f"{name}[]." if listed else f"{name}.")


def printed(*arguments: str) -> Any:
    result = CliRunner().invoke(program, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("heading", "model", "opened"),
    [
        ("tunecast.record/1", RecordFile, OPEN - {"hardware", "memory"}),
        ("tunecast.run/1", RunFile, OPEN),
    ],
)
def test_files_that_are_read_back(heading: str, model: type[BaseModel], opened: set[str]) -> None:
    assert documented(heading) == set(fields_of(model, opened))


def test_forecast() -> None:
    data = printed("estimate", *LLAMA, "--tokens", "10M", "--gpu", "l40s", "--explain", *SPOT)[0]
    absent = {"energy_kwh", "power"}
    assert documented("tunecast.forecast/1") == set(leaves(data, OPEN - {"memory"})) | absent


def test_recommendation() -> None:
    data = printed("recommend", *LLAMA, "--tokens", "10M", "--gpu", "l40s", "--max-gpus", "1")
    assert documented("tunecast.recommendation/1") == set(leaves(data, OPEN))
    plan = set(data["cheapest"])
    described = re.search(r"a plan: (.*?), and the whole `forecast`", PAGE)
    assert described is not None
    assert set(re.findall(r"`(\w+)`", described[1])) | {"forecast"} == plan


def test_sweep() -> None:
    data = printed("sweep", *LLAMA, "--gpu", "l40s", "--over", "max_length=512,1024")
    assert documented("tunecast.sweep/1") == set(leaves(data, OPEN))
    tornado = printed("sweep", *LLAMA, "--gpu", "l40s")
    described = re.search(r"a tornado's: (.*?); else", PAGE)
    assert described is not None
    assert set(re.findall(r"`(\w+)`", described[1])) == set(tornado["rows"][0])


def test_prices_and_priors() -> None:
    assert documented("Prices CSV") == set(known_columns())
    priors = json.loads((ROOT / "results" / "priors.json").read_text(encoding="utf-8"))
    assert documented("tunecast.priors/1") == set(leaves(priors, OPEN))
