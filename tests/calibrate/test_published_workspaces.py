"""Published runs hold what PyTorch keeps for matrix products: the bytes that they have beyond their tensors."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import read_entries
from tunecast.model.memory import memory_timeline
from tunecast.model.units import MIB
from tunecast.model.workspaces import workspace_bytes

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"
SOURCE = "FM"
"""States allocated memory to a hundredth of a GiB or better, of full, LoRA and QLoRA runs on one A100."""


@pytest.fixture(scope="module")
def alone() -> list[PublishedRun]:
    runs = [entry.run for entry in read_entries(read_table(TABLE))]
    return [
        run
        for run in runs
        if run is not None and run.source == SOURCE and run.counter == "allocated" and run.run.num_gpus == 1
    ]


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_an_a100_holds_two_workspaces_beyond_its_tensors(alone: list[PublishedRun], method: str) -> None:
    runs = [run for run in alone if run.run.method == method and run.peak_bytes is not None]
    assert len(runs) >= 10
    assert {run.gpu for run in runs} == {"a100-sxm4-80gb"}
    beyond = [run.peak_bytes - memory_timeline(run.architecture, run.run).allocated_bytes for run in runs]
    assert statistics.median(beyond) == pytest.approx(workspace_bytes("8.0"), abs=2 * MIB)


@pytest.mark.parametrize(
    ("capability", "mib"),
    [
        ("9.0", 64),
        ("8.0", 16.25),
        ("7.5", 16.25),
        ("10.0", 64),
        ("12.0", 64),
        ("gfx942", 256),
        ("gfx90a", 64),
        (None, 0),
    ],
)
def test_workspaces_are_pytorchs(capability: str | None, mib: float) -> None:
    """`CublasHandlePool.cpp`: 8.125 MiB a thread, 32 on Hopper and Blackwell; ROCm 32, 128 on MI300 and later."""
    assert workspace_bytes(capability) == mib * MIB
