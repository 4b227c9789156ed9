"""The callback in a job of two processes (gloo, on the CPU), and in one that is resumed from a checkpoint."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LENGTH, same_samples, tiny_llama
from typer.testing import CliRunner

import tunecast
from tunecast.calibrate.watch.clock import StepClock
from tunecast.calibrate.watch.record import read_run_record
from tunecast.cli.program import program

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

WORKER = Path(__file__).resolve().parents[2] / "fixtures" / "watched_worker.py"
PROCESSES = 2
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process of the job said."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    folder = tmp_path_factory.mktemp("spread")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # Into files: a pipe that nobody reads yet would stop its process when it is full, and with it the other one.
    said = [(folder / f"out{rank}", folder / f"err{rank}") for rank in range(PROCESSES)]
    with ExitStack() as files:
        started = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(folder)],
                stdout=files.enter_context(out.open("w")),
                stderr=files.enter_context(err.open("w")),
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, (out, err) in enumerate(said)
        ]
    try:
        for process in started:
            process.wait(timeout=TIMEOUT_S)
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, err) in zip(started, said, strict=True):
        assert process.returncode == 0, err.read_text()[-2000:]
    return [json.loads(out.read_text().splitlines()[-1]) for out, _ in said]


@pytest.mark.slow
def test_only_the_first_process_tells_and_writes(processes: list[dict[str, Any]]) -> None:
    first, second = processes
    assert first["broken"] is None
    assert second == {"lines": [], "written": None, "broken": None, "tokens": second["tokens"]}
    assert len(list(Path(first["written"]).parent.iterdir())) == 1
    assert any("/step" in line for line in first["lines"])


@pytest.mark.slow
def test_tokens_are_those_of_all_processes_counted_once(processes: list[dict[str, Any]]) -> None:
    record = read_run_record(Path(processes[0]["written"]))
    a_step = sum(process["tokens"] for process in processes) // record["steps"]
    assert all(window["tokens"] == a_step * window["steps"] for window in record["windows"])
    assert record["usd_per_h"] == pytest.approx(PROCESSES * 1.0)
    assert (record["run"]["num_gpus"], record["run"]["sharding"]) == (PROCESSES, "ddp")


def trainer_of(folder: Path, *callbacks: Any, **more: Any) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=12, per_device_train_batch_size=2, bf16=True, use_cpu=True,
        report_to=[], save_strategy="steps", save_steps=6, disable_tqdm=True, **more,
    )  # fmt: skip
    return transformers.Trainer(
        model=tiny_llama(), args=args, train_dataset=same_samples(40), callbacks=list(callbacks)
    )


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunecast.calibrate.watch.callback.StepClock", lambda **k: StepClock(**k, window_s=0.0))


@pytest.mark.usefixtures("short_windows")
def test_a_resumed_job_is_measured_over_its_own_steps(tmp_path: Path) -> None:
    trainer_of(tmp_path).train()
    lines: list[str] = []
    watch = tunecast.TunecastCallback(out=tmp_path / "records", tell=lines.append)
    trainer = trainer_of(tmp_path, watch)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
    assert watch.broken is None
    assert trainer.state.global_step == 12
    record = read_run_record(watch.written)
    assert (record["steps"], record["max_steps"]) == (6, 12)
    assert sum(window["steps"] for window in record["windows"]) == 6 - 3
    assert all(window["tokens"] == 2 * LENGTH * window["steps"] for window in record["windows"])
    assert "step 12/12" in lines[-2]
    done = CliRunner().invoke(program, ["validate", str(watch.written), "--json"])
    assert done.exit_code == 0, done.output
    assert "training" not in {row["name"] for row in json.loads(done.stdout)["quantities"]}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_trainers_own_state_is_validated_by_the_command(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.train()
    trainer.save_state()
    state = tmp_path / "out" / "trainer_state.json"
    asked = ["validate", str(state), "--config", "HuggingFaceTB/SmolLM2-135M", "--gpu", "l40s", "--json"]
    done = CliRunner().invoke(program, asked)
    assert done.exit_code == 0, done.output
    found = {row["name"]: row["measured"] for row in json.loads(done.stdout)["quantities"]}
    runtime_s = next(e["train_runtime"] for e in trainer.state.log_history if "train_runtime" in e)
    assert found["optimizer step"] == pytest.approx(runtime_s / 12)
    early = CliRunner().invoke(program, ["validate", str(tmp_path / "out" / "checkpoint-6" / "trainer_state.json"),
                                         "--config", "HuggingFaceTB/SmolLM2-135M", "--gpu", "l40s"])  # fmt: skip
    assert early.exit_code == 2
    assert "no train_runtime" in " ".join(early.output.split())
