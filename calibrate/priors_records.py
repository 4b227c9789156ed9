"""Records of calibrations as rows of the priors: the whole steps that the card bounds, each one run on it.

Microbenchmarks stay with their own card (`--record`): what a product alone reaches is not what it reaches in a step.
Runs that ``tunecast measure`` wrote are no calibrations and are never read here: they judge forecasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tunecast.calibrate.fit_memory import context_bytes
from tunecast.calibrate.fit_trials import median_seconds, usable
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.record import read_record
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.catalogs.gpus import Gpu, load_gpus
from tunecast.model.factors import FactorSet
from tunecast.model.factors_io import factors_from_dict
from tunecast.model.inventory import step_operations
from tunecast.model.phase_table import phase_table
from tunecast.model.sdpa import runs_cudnn
from tunecast.model.time import run_clocks, scalars
from tunecast.model.versions import in_range

UNFIT_FLAGS = ("throttled", "shared_gpu", "shared_cpu", "unstable", "clock_not_settled", "mig")
"""Flags of a record that speaks of the day it was made, or of a part of a card, more than of the card."""
CUDNN_FIRST = {"torch": ">=2.11", "cuda": ">=13"}
"""Versions with which ``sdpa`` asks cuDNN first (`tunecast.model.sdpa`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRuns:
    """One record, as what the priors read of it."""

    name: str
    """Of its file, without the suffix: the source of its runs."""
    runs: tuple[PublishedRun, ...]
    """Its whole steps that the card bounds, by the number of their trial."""
    contexts_bytes: tuple[float, ...]
    """The process beyond its allocator's reserve, step by step."""


def record_runs(record: Mapping[str, Any], name: str, gpu: Gpu) -> RecordRuns:
    """The whole steps of a record that the card bounds, taken as measured on this card.

    A step that its host bounds, as most of few layers are, tells the pace of one machine and nothing of the card; which
    do is said by the record's own fit.
    """
    steps = usable(record["trials"], "step")
    factors = factors_from_dict(record["fitted"])
    runs = [_step_run(trial, record["software"], name, gpu) for trial in steps if _waits_for_device(trial, factors)]
    contexts = [found for trial in steps for found in context_bytes(trial["memory"])]
    return RecordRuns(name=name, runs=tuple(runs), contexts_bytes=tuple(contexts))


def _waits_for_device(trial: Mapping[str, Any], factors: FactorSet) -> bool:
    """Whether the device works on a step for as long as the host issues it, or longer."""
    architecture = architecture_from_dict(dict(trial["params"]["architecture"]))
    run = run_from_dict(dict(trial["params"]["run"]))
    table = phase_table(step_operations(architecture, run), factors, run=run)
    clocks = run_clocks(table, scalars(factors), synchronous=factors.synchronous)
    return clocks.device_s >= clocks.host_s


def _step_run(trial: Mapping[str, Any], software: Mapping[str, str | None], name: str, gpu: Gpu) -> PublishedRun:
    architecture = architecture_from_dict(dict(trial["params"]["architecture"]))
    run = run_from_dict(dict(trial["params"]["run"]))
    run = replace(run, sdpa_cudnn=asks_cudnn_first(software) and runs_cudnn(architecture, run, gpu))
    return PublishedRun(
        id=f"{name}#{trial['id']}",
        source=name,
        stack=run.stack,
        gpu=gpu.id,
        architecture=architecture,
        run=run,
        tokens_per_s=run.tokens_per_step / median_seconds(trial),
        peak_bytes=None,
        counter="",
    )


def asks_cudnn_first(software: Mapping[str, str | None]) -> bool:
    """Whether the packages of a record are of those whose ``sdpa`` asks cuDNN first; a CPU build is not."""
    stated = ((software.get(package), versions) for package, versions in CUDNN_FIRST.items())
    return all(version is not None and in_range(version, versions) for version, versions in stated)


def why_not(record: Mapping[str, Any]) -> str:
    """Why a record says nothing of cards in general; empty where it does."""
    hardware = record["hardware"]
    if hardware["device"] == "cpu":
        return "a CPU, which shares no operation's rate with a GPU"
    if str(hardware["device"]).startswith("mock:"):
        return "a mock, which measures nothing"
    if hardware["gpu"] not in load_gpus():
        return f"{hardware['name']} is in no catalog"
    unfit = [flag for flag in record["flags"] if flag in UNFIT_FLAGS]
    if unfit:
        return f"flagged {', '.join(unfit)}"
    if not usable(record["trials"], "step"):
        return "no whole step was measured"
    return "" if record["fitted"] else "not fitted: type tunecast fit and its path"


def read_records(paths: Iterable[Path]) -> tuple[tuple[RecordRuns, ...], dict[str, str]]:
    """Records that the priors read, and by file name why the others are not read.

    Raises InputError for a file that is no record, or a damaged one.
    """
    found: list[RecordRuns] = []
    reasons: dict[str, str] = {}
    for path in sorted(paths):
        record = read_record(path)
        reason = why_not(record)
        if reason:
            reasons[path.name] = reason
        else:
            found.append(record_runs(record, path.stem, load_gpus()[record["hardware"]["gpu"]]))
    return tuple(found), reasons


@cache
def shipped_records() -> tuple[tuple[RecordRuns, ...], dict[str, str]]:
    """`read_records` of ``results/records``."""
    folder = resources.files("tunecast.results").joinpath("records")
    with resources.as_file(folder) as at:
        return read_records(at.glob("*.json"))
