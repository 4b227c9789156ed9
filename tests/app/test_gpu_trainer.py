"""The Trainer beside our own steps on a rented card: what is rehearsed here is what counts and what is left out."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """`scripts/gpu_trainer.py` as a module, its neighbours importable."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("gpu_trainer_script", SCRIPTS / "gpu_trainer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPTS))


def test_its_jobs_are_runs_of_the_evidence(script: ModuleType) -> None:
    names = {run.name for run in (*script.CPU_RUNS, *script.GPU_RUNS)}
    assert names >= {*script.CPU_JOBS, *script.GPU_JOBS}


def test_steps_before_the_clock_starts_do_not_count(script: ModuleType) -> None:
    """Nine steps, the first three of ten seconds each: the mean of the other six, and two waits for the device."""
    now, waits = [0.0], []
    watch = script.Stopwatch(lambda: waits.append(1), clock=lambda: now[0])
    for step in range(1, 10):
        now[0] += 10.0 if step <= script.WARMUP_STEPS else 0.5 + 0.1 * (step % 2)
        watch.on_step_end(None, SimpleNamespace(global_step=step, max_steps=9), None)
    assert watch.step_s() == pytest.approx(0.55)
    assert len(waits) == 2


@pytest.mark.parametrize(("seconds", "counted"), [(0.5, 8), (7.0, 4)])
def test_own_steps_fill_the_time_and_are_never_too_few(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: float, counted: int
) -> None:
    """On a device that runs behind its host by all that was issued: the wait at the end belongs to the steps."""
    now, issued, waits = [0.0], [0], []
    monkeypatch.setattr(script.time, "perf_counter", lambda: now[0])

    def wait() -> None:
        now[0] += seconds * issued[0]
        issued[0] = 0
        waits.append(1)

    training = SimpleNamespace(step=lambda: issued.__setitem__(0, issued[0] + 1))
    assert script.own_step_s(training, wait, 4.0) == pytest.approx(seconds)
    assert now[0] == pytest.approx(seconds * (2 + counted))
    assert len(waits) == 3


def test_a_job_that_has_a_file_is_left_out_and_none_is_started_too_late(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = script.CPU_JOBS
    (tmp_path / f"{first}.json").write_text("{}")
    asked = []
    found = {"trainer_step_s": 1.0, "before_s": 1.0, "after_s": 1.0}
    monkeypatch.setattr(script, "paced", lambda job, *_: asked.append(job.name) or found)
    monkeypatch.setattr(sys, "argv", ["gpu_trainer.py", "--out", str(tmp_path), "--device", "cpu", "--minutes", "0.1"])
    assert script.main() == 3
    assert asked == []
    monkeypatch.setattr(sys, "argv", ["gpu_trainer.py", "--out", str(tmp_path), "--device", "cpu"])
    assert script.main() == 0
    assert asked == [second]
    assert json.loads((tmp_path / f"{second}.json").read_text()) == found
