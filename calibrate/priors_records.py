"""Records of calibrations as rows of the priors: their whole steps, each one run on the card. Those that the card
bounds say what it reaches, the others what issuing costs.

Microbenchmarks stay with their own card (`--record`): what a product alone reaches is not what it reaches in a step.
Runs that ``tunecast measure`` wrote are no calibrations and are never read here: they judge forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tunecast.calibrate.fit_memory import beyond_replay, context_bytes
from tunecast.calibrate.fit_trials import median_seconds, trial_id, usable
from tunecast.calibrate.flags import flags_of
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.record import read_record
from tunecast.calibrate.stats import MAD_TO_SD, median
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.catalogs.gpus import Gpu, load_gpus
from tunecast.model.factors import FactorSet
from tunecast.model.factors_io import factors_from_dict
from tunecast.model.inventory import step_operations
from tunecast.model.phase_table import phase_table
from tunecast.model.sdpa import runs_cudnn
from tunecast.model.time import run_clocks, scalars
from tunecast.model.versions import in_range
from tunecast.model.workspaces import workspace_bytes

UNFIT_FLAGS = ("throttled", "shared_gpu", "shared_cpu", "unstable", "clock_not_settled", "mig")
"""Flags of a record that speaks of the day it was made, or of a part of a card, more than of the card."""
SOURCE = "tunecast"
"""All records are measured in the same way: one source, however many there are."""
SAME_SESSION = 0.2
"""Correlation of what steps of one session that wait for their host are off by; assumed. Two records of one kind of
machine, an H200's and an H100's, put the cost of a 4-bit weight at 7.3 and 4.6 launches, each sure within a tenth: 56
steps of a session say little more than five."""
WAITING_LOG_SD = 0.12
"""What such a step misses where the record's fit had too few to leave any out: as in an H100's, the noisier of two."""
CUDNN_FIRST = {"torch": ">=2.11", "cuda": ">=13"}
"""Versions with which ``sdpa`` asks cuDNN first (`tunecast.model.sdpa`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRuns:
    """One record, as what the priors read of it."""

    name: str
    """Of its file, without the suffix: how the ids of its runs begin."""
    runs: tuple[PublishedRun, ...]
    """Its whole steps, by the number of their trial."""
    waiting: frozenset[str]
    """Ids of those that wait for the host."""
    waiting_log_sd: float
    """Noise of such a step for the priors: what the record's own fit without its like misses, as many times as steps of
    one session say the same again (`SAME_SESSION`)."""
    contexts_bytes: tuple[float, ...]
    """The process beyond its allocator's reserve, step by step."""
    replays: tuple[tuple[float, float], ...] = ()
    """Reserved beyond a replay of the step and beyond its tensors, in shares of what it adds, step by step."""


def record_runs(record: Mapping[str, Any], name: str, gpu: Gpu) -> RecordRuns:
    """The whole steps of a record, taken as measured on this card.

    A step that its host bounds, as most of few layers are, tells nothing of the card, but the pace of one machine and
    by how much launches of one kind cost more than another's; which do is said by the record's own fit.
    """
    steps = usable(record["trials"], "step")
    factors = factors_from_dict(record["fitted"])
    runs = [_step_run(trial, record, name, gpu) for trial in steps]
    contexts = [found for trial in steps for found in context_bytes(trial["memory"])]
    waiting = [(run, trial) for run, trial in zip(runs, steps, strict=True) if not _waits_for_device(trial, factors)]
    left_out = record["fitted"].get("residuals", {}).get("steps", {})
    missed = [abs(left_out[trial_id(trial)]) for _, trial in waiting if trial_id(trial) in left_out]
    one_log_sd = MAD_TO_SD * median(missed) if missed else WAITING_LOG_SD
    own = workspace_bytes(gpu.compute_capability)
    return RecordRuns(
        name=name,
        runs=tuple(runs),
        waiting=frozenset(run.id for run, _ in waiting),
        waiting_log_sd=one_log_sd * math.sqrt(1.0 + SAME_SESSION * max(len(waiting) - 1, 0)),
        contexts_bytes=tuple(contexts),
        replays=tuple(pair for trial in steps for pair in beyond_replay(trial, own)),
    )


def host_of(facts: Mapping[str, Any], otherwise: str) -> str:
    """The kind of machine: two rented from one pool are one sample of how fast hosts issue; `otherwise` where a record
    says nothing of it."""
    known = [str(facts[name]) for name in ("cpu", "cores", "ram_bytes") if facts.get(name) is not None]
    return ", ".join(known) or otherwise


def _waits_for_device(trial: Mapping[str, Any], factors: FactorSet) -> bool:
    """Whether the device works on a step for as long as the host issues it, or longer."""
    architecture = architecture_from_dict(dict(trial["params"]["architecture"]))
    run = run_from_dict(dict(trial["params"]["run"]))
    table = phase_table(step_operations(architecture, run), factors, run=run)
    clocks = run_clocks(table, scalars(factors), synchronous=factors.synchronous)
    return clocks.device_s >= clocks.host_s


def _step_run(trial: Mapping[str, Any], record: Mapping[str, Any], name: str, gpu: Gpu) -> PublishedRun:
    architecture = architecture_from_dict(dict(trial["params"]["architecture"]))
    run = run_from_dict(dict(trial["params"]["run"]))
    run = replace(run, sdpa_cudnn=asks_cudnn_first(record["software"]) and runs_cudnn(architecture, run, gpu))
    return PublishedRun(
        id=f"{name}#{trial['id']}",
        source=SOURCE,
        stack=run.stack,
        gpu=gpu.id,
        architecture=architecture,
        run=run,
        tokens_per_s=run.tokens_per_step / median_seconds(trial),
        peak_bytes=None,
        counter="",
        host=host_of(record["hardware"]["host"], name),
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
    unfit = [flag for flag in flags_of(record) if flag in UNFIT_FLAGS]
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
