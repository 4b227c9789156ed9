"""`scripts/gpu_evidence.py` on mocks and scripted devices: cut off, resumed, out of memory, judged."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripted_device import ScriptedDevice, fine, with_hardware
from shared_traces import SOURCE

import tunecast
from tunecast.calibrate import rehearsal
from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec
from tunecast.model.architectures import load_architecture
from tunecast.model.resolve import resolve_run

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MOCK = "mock:a10-24gb#11"
"""Whose record another file fits too."""
SMALL, AGAIN, TOO_LARGE = "qwen2.5-0.5b-lora-512", "qwen2.5-0.5b-lora-512-again", "qwen2.5-14b-lora-2048"
SMALL_OPTIONS: dict[str, Any] = {"method": "lora", "lora_r": 16, "max_length": 512, "gradient_checkpointing": False}
BLOCKED = "import sys\nsys.modules['scipy'] = None\nsys.modules['pandas'] = None\n"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The modules of the script, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        names = ("evidence", "gpu_worker", "gpu_judge", "gpu_page", "gpu_evidence")
        yield {name: importlib.import_module(name) for name in names}


def heads(page: str) -> list[str]:
    """Of the table of runs."""
    (line,) = [line for line in page.splitlines() if line.startswith("| run | options |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def card(answer: Any = fine) -> ScriptedDevice:
    """A scripted L40S, so that there is a forecast by priors."""
    return ScriptedDevice(answer, hardware=with_hardware(device="cuda:0", gpu="l40s-48gb", compute_capability="8.9"))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def written(folder: Path) -> dict[str, str]:
    """Outcome of every run that has a file."""
    return {path.stem: read(path)["outcome"] for path in folder.glob("*.json")}


class Clock:
    """Seconds that pass only while a trial runs."""

    def __init__(self, run_s: float) -> None:
        self.now_s, self.run_s = 0.0, run_s

    def __call__(self) -> float:
        return self.now_s

    def answer(self, spec: TrialSpec) -> TrialResult:
        self.now_s += self.run_s
        return fine(spec)


# The list


def test_the_list_covers_what_is_asked_of_a_real_card(scripts: dict[str, ModuleType]) -> None:
    evidence = scripts["evidence"]
    listed = [run for run in evidence.GPU_RUNS if not run.name.endswith(evidence.AGAIN)]
    runs = []
    for one in listed:
        architecture = load_architecture(one.model)
        runs.append((architecture, resolve_run(architecture, evidence.options_of(one.options), gpu_has_bf16=True).run))
    assert len(runs) >= 12
    assert {run.method for _, run in runs} == {"lora", "qlora", "full"}
    lengths, batches = [run.max_length for _, run in runs], [run.per_device_train_batch_size for _, run in runs]
    assert (min(lengths), max(lengths), min(batches), max(batches)) == (512, 16384, 1, 16)
    assert {run.gradient_checkpointing for _, run in runs} == {True, False}
    billions = sorted(architecture.total_params / 1e9 for architecture, _ in runs)
    assert billions[0] < 0.6
    assert [b for b in billions if 30 < b < 35]
    assert [a.name for a, run in runs if a.total_params > 65e9 and run.method == "qlora"]
    assert min(architecture.num_layers for architecture, _ in runs) > 4, "a calibration's own steps have at most four"
    names = [run.name for run in evidence.GPU_RUNS]
    assert len(names) == len(set(names))


def test_typed_options_are_read_as_the_command_line_reads_them(scripts: dict[str, ModuleType]) -> None:
    read_options = scripts["evidence"].options_of
    found = read_options("--method lora --lora-r 16 --no-gradient-checkpointing --lora-target-modules q_proj,v_proj")
    assert found == {
        "method": "lora", "lora_r": 16, "gradient_checkpointing": False, "lora_target_modules": "q_proj,v_proj",
    }  # fmt: skip
    assert read_options("--gradient-checkpointing --max-length 512") == {
        "gradient_checkpointing": True,
        "max_length": 512,
    }


# The worker, on a scripted card


def test_time_up_leaves_whole_records_and_the_rest_is_measured_later(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    worker, runs = scripts["gpu_worker"], scripts["evidence"].GPU_RUNS[:4]
    out = tmp_path / "runs"
    out.mkdir()
    clock = Clock(run_s=100.0)
    first = card(clock.answer)
    assert worker.measure_all(first, runs, out, 250.0, clock) == worker.LEFT_CODE
    assert list(written(out).values()) == ["ok", "ok"]
    assert {run.name for run in runs[:2]} == set(written(out))
    before = {path.name: path.read_bytes() for path in out.glob("*.json")}
    second = card(clock.answer)
    assert worker.measure_all(second, runs, out, 10_000.0, clock) == 0
    assert len(first.asked) == len(second.asked) == 2
    assert not set(first.asked) & set(second.asked)
    assert {name: (out / name).read_bytes() for name in before} == before
    assert len(written(out)) == 4
    assert not (tmp_path / worker.RUNNING).exists()


def test_out_of_memory_is_written_and_the_next_run_is_measured(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    worker, runs = scripts["gpu_worker"], scripts["evidence"].GPU_RUNS[:2]
    out = tmp_path / "runs"
    out.mkdir()

    def answer(spec: TrialSpec) -> TrialResult:
        full = spec.params["run"]["method"] == "full"
        return fine(spec) if full else TrialResult(outcome="oom", message="CUDA out of memory.")

    assert worker.measure_all(card(answer), runs, out, 10_000.0, lambda: 0.0) == 0
    assert written(out) == {runs[0].name: "oom", runs[1].name: "ok"}
    assert read(out / f"{runs[0].name}.json")["message"] == "CUDA out of memory."


def test_a_failed_run_is_written_and_asks_for_a_fresh_process(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    worker, runs = scripts["gpu_worker"], scripts["evidence"].GPU_RUNS[:2]
    out = tmp_path / "runs"
    out.mkdir()
    broken = card(lambda spec: TrialResult(outcome="error", message="RuntimeError: no kernel"))
    assert worker.measure_all(broken, runs, out, 10_000.0, lambda: 0.0) == worker.AGAIN_CODE
    assert written(out) == {runs[0].name: "failed"}
    assert "no kernel" in read(out / f"{runs[0].name}.json")["message"]


@pytest.mark.parametrize("task", ["calibrate", "measure"])
def test_what_no_run_survives_is_said_before_anything_is_written(
    scripts: dict[str, ModuleType],
    tmp_path: Path,
    task: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker, run = scripts["gpu_worker"], scripts["evidence"].GPU_RUNS[0]
    (tmp_path / "runs").mkdir()

    def answer(spec: TrialSpec) -> TrialResult:
        quantized = spec.params["run"]["method"] == "qlora"
        return TrialResult(outcome="error", message="ImportError: no\nlibrary") if quantized else fine(spec)

    broken = card(answer)
    monkeypatch.setattr("tunecast.api.opened", lambda _name: contextlib.nullcontext(broken))
    monkeypatch.setattr(sys, "argv", ["x", task, "--out", str(tmp_path), "--device", "cuda:0", "--runs", run.name])
    assert worker.main() == 2
    said = capsys.readouterr().err
    assert "tiny qlora step" in said
    assert "ImportError: no library" in said
    assert len(broken.asked) == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_machine_on_which_tiny_steps_run_is_measured(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, run = scripts["gpu_worker"], scripts["evidence"].GPU_RUNS[0]
    (tmp_path / "runs").mkdir()
    works = card()
    monkeypatch.setattr("tunecast.api.opened", lambda _name: contextlib.nullcontext(works))
    monkeypatch.setattr(sys, "argv", ["x", "measure", "--out", str(tmp_path), "--device", "cuda:0", "--runs", run.name])
    assert worker.main() == 0
    assert written(tmp_path / "runs") == {run.name: "ok"}
    assert len(works.asked) == len(rehearsal.REHEARSED) + 1
    assert worker.main() == 0, "nothing is left, so nothing is rehearsed"
    assert len(works.asked) == len(rehearsal.REHEARSED) + 1


# The parent, over processes that do what they should not


def test_a_run_that_kills_its_process_is_written_as_failed(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, runs = scripts["gpu_evidence"], scripts["evidence"].GPU_RUNS[:1]
    (tmp_path / "runs").mkdir()
    running = tmp_path / scripts["gpu_worker"].RUNNING
    dies = (
        "import os, pathlib, sys\n"
        f"if pathlib.Path({str(tmp_path / 'runs' / (runs[0].name + '.json'))!r}).exists(): sys.exit(0)\n"
        f'pathlib.Path({str(running)!r}).write_text(\'{{"name": "{runs[0].name}", "until": 1e12}}\')\n'
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(parent, "worker_command", lambda *_: [sys.executable, "-c", dies])
    assert parent.measure(tmp_path, "cuda:0", runs, time.time() + 60) == 0
    assert written(tmp_path / "runs") == {runs[0].name: "failed"}
    assert "signal 9" in read(tmp_path / "runs" / f"{runs[0].name}.json")["message"]
    assert not running.exists()


def test_a_hung_run_and_the_end_of_time_end_the_process(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    supervised = scripts["gpu_evidence"].Supervised
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    running = tmp_path / "running.json"
    assert supervised(time.time() + 0.5).run(sleeps, running) == 3
    running.write_text(json.dumps({"name": "x", "until": time.time() - 1}), encoding="utf-8")
    assert supervised(time.time() + 60).run(sleeps, running) == 124


# Bad input


def test_bad_input_is_one_sentence(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = scripts["gpu_evidence"]
    out = str(tmp_path / "out")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "runs").mkdir()
    cases = [
        (["run", "--out", out, "--device", MOCK, "--runs", "nothing"], "no run 'nothing'"),
        (["run", "--out", out, "--device", MOCK, "--minutes", "0"], "--minutes is 0"),
        (["run", "--out", str(tmp_path / "file"), "--device", MOCK], "cannot be written"),
        (["judge", str(tmp_path)], "must hold one calibration record, but holds none"),
    ]
    for arguments, says in cases:
        assert parent.main(arguments) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    absent = {"peft", "bitsandbytes"}
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    assert parent.main(["run", "--out", out, "--device", MOCK]) == 2
    assert "pip install peft bitsandbytes" in capsys.readouterr().err


def test_an_unknown_mock_ends_with_bad_input(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    arguments = ["run", "--out", str(tmp_path), "--device", "mock:nothing", "--only", "measure"]
    assert scripts["gpu_evidence"].main(arguments) == 2
    assert not written(tmp_path / "runs")


# The whole path on a simulated card, without scipy and pandas in the first part


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measured in two calls: two runs, one of which does not fit, then the calibration and the rest."""
    place = tmp_path_factory.mktemp("evidence")
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "sitecustomize.py").write_text(BLOCKED + SOURCE, encoding="utf-8")
    path = os.pathsep.join([str(blocked), *filter(None, [os.environ.get("PYTHONPATH")])])

    def call(*more: str) -> str:
        command = [
            sys.executable,
            str(SCRIPTS / "gpu_evidence.py"),
            "run",
            "--out",
            str(place),
            "--device",
            MOCK,
            *more,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    said = call("--only", "measure", "--runs", f"{SMALL},{TOO_LARGE}")
    assert f"{SMALL}: " in said
    assert f"{TOO_LARGE}: oom" in said
    before = (place / "runs" / f"{SMALL}.json").stat().st_mtime_ns
    said = call("--quick", "--runs", f"{SMALL},{TOO_LARGE},{AGAIN}", "--minutes", "30")
    assert f"{SMALL}: " not in said
    assert f"{AGAIN}: " in said
    assert (place / "runs" / f"{SMALL}.json").stat().st_mtime_ns == before
    return place


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_an_outcome(folder: Path) -> None:
    assert written(folder / "runs") == {SMALL: "ok", AGAIN: "ok", TOO_LARGE: "oom"}
    (record,) = folder.glob("*.json")
    assert read(record)["fitted"] is None


@pytest.mark.slow
def test_the_page_has_the_figures_of_records_and_forecasts(
    folder: Path, scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, records = tmp_path / "page" / "README.md", tmp_path / "records"
    arguments = ["judge", str(folder), "--page", str(page), "--records", str(records)]
    assert scripts["gpu_evidence"].main(arguments) == 3, "one run is fewer than twelve"
    (fitted,) = records.glob("*.json")
    measured = read(folder / "runs" / f"{SMALL}.json")["measured"]
    step_s = statistics.median(measured["step_times_s"])
    told, by_priors = (
        tunecast.estimate("Qwen/Qwen2.5-0.5B", gpu=MOCK, records=records, trainer_loop=False, **SMALL_OPTIONS)[0]
        for records in ([fitted], [])
    )
    assert told.memory.process_bytes is not None
    errors = {
        "step": told.step_time_s.value / step_s - 1,
        "priors": by_priors.step_time_s.value / step_s - 1,
        "allocated": told.memory.allocated_bytes.value / measured["allocated_bytes"] - 1,
        "process": told.memory.process_bytes.value / measured["process_bytes"] - 1,
    }
    text = page.read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {SMALL} (steady) |")]
    cells = dict(zip(heads(text), [cell.strip() for cell in line.strip("|").split("|")], strict=True))
    assert cells["measured s"] == f"{step_s:.4g}"
    again = read(folder / "runs" / f"{AGAIN}.json")["measured"]["step_time_s"]["value"]
    assert cells["again s"] == f"{again:.4g}"
    assert [cells["error"], cells["by priors"]] == [f"{errors[name]:+.1%}" for name in ("step", "priors")]
    assert cells["allocated GiB"] == f"{measured['allocated_bytes'] / 2**30:.2f}"
    assert [cells["error of allocated"], cells["error of process"]] == [
        f"{errors[name]:+.1%}" for name in ("allocated", "process")
    ]
    assert "step time of steady runs, worst" in text
    assert f"| step time, worst | {abs(errors['step']):.1%} | {abs(errors['priors']):.1%} | 12% |" in text
    assert "| runs compared | 1 | 1 | 12 or more | no |" in text
    assert f"| {TOO_LARGE} | oom | no |" in text
    kept = read(page.parent / "gpu.json")
    assert kept["rows"][0]["error"] == pytest.approx(errors["step"])
    assert kept["met"]["runs"] is False
    assert read(page.parent / "runs" / f"{TOO_LARGE}.json")["outcome"] == "oom"
    assert "runs compared" in capsys.readouterr().out


@pytest.mark.slow
def test_what_cannot_be_judged_is_refused(
    folder: Path, scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = scripts["gpu_evidence"].main
    there = ["--page", str(tmp_path / "p" / "README.md"), "--records", str(tmp_path / "r")]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    other = read(copy / "runs" / f"{SMALL}.json")
    other["measured"]["gpu"] = "l40s-48gb"
    (copy / "runs" / f"{SMALL}.json").write_text(json.dumps(other), encoding="utf-8")
    assert main(["judge", str(copy), *there]) == 2
    assert "was measured on l40s-48gb" in capsys.readouterr().err
    (copy / "runs" / f"{SMALL}.json").write_text("{", encoding="utf-8")
    assert main(["judge", str(copy), *there]) == 2
    assert "is no record of a held-out run" in capsys.readouterr().err
    shutil.rmtree(copy / "runs")
    assert main(["judge", str(copy), *there]) == 2
    assert "holds no measured run" in capsys.readouterr().err
    (record,) = copy.glob("*.json")
    shutil.copy(record, copy / "second.json")
    assert main(["judge", str(copy), *there]) == 2
    assert "must hold one calibration record" in capsys.readouterr().err


def test_only_runs_whose_steps_and_repetitions_scatter_little_are_steady(scripts: dict[str, ModuleType]) -> None:
    def measured(step_s: float, spread: float = 0.001) -> dict[str, Any]:
        return {"measured": {"step_time_s": {"value": step_s}, "spread_frac": spread}}

    judge = scripts["gpu_judge"]
    assert judge.is_steady([measured(1.0), measured(1.015), measured(0.996)])
    assert not judge.is_steady([measured(1.0), measured(1.03)])
    assert not judge.is_steady([measured(1.0), measured(1.0, spread=0.04)])
    rows = [
        {"steady": True, "error": -0.02, "inside_interval": True},
        {"steady": True, "error": 0.06, "inside_interval": False},
        {"steady": False, "error": 0.5, "inside_interval": False},
    ]
    assert judge.steady_figures(rows) == {
        "steady_runs": 2, "steady_median_abs_error": pytest.approx(0.04), "steady_worst_abs_error": 0.06,
        "steady_inside_80_interval": 0.5,
    }  # fmt: skip
    assert judge.steady_figures(rows[2:]) == {"steady_runs": 0}


def test_repetitions_in_folders_of_their_own_are_found(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    judge = scripts["gpu_judge"]

    def write(folder: str, name: str, outcome: str = "ok") -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        content = {"schema": judge.SCHEMA, "name": name, "outcome": outcome, "from": folder}
        (tmp_path / folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")

    write("runs", SMALL)
    write("runs", AGAIN)
    write("runs-2", SMALL)
    write("runs-3", SMALL, "oom")
    write("runs-3", TOO_LARGE)
    found = judge.read_repeats(tmp_path, judge.read_runs(tmp_path))
    assert [one["from"] for one in found[SMALL]] == ["runs", "runs-2"]
    assert [one["from"] for one in found[TOO_LARGE]] == ["runs-3"]
