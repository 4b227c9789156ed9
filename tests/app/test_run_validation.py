"""``tunecast validate`` of one job: a record of the callback made with a scripted clock, and a Trainer's own state."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tunecast
from tunecast.calibrate.devices.protocol import Hardware, MemoryReading, Sensors
from tunecast.calibrate.watch.clock import StepClock
from tunecast.calibrate.watch.reading import Job
from tunecast.calibrate.watch.record import write_run_record
from tunecast.calibrate.watch.watcher import Watcher, line
from tunecast.cli.program import program
from tunecast.model.architectures import load_architecture
from tunecast.model.resolve import resolve_run
from tunecast.model.units import GIB
from tunecast.run_validation import options_of_run

MODEL = "meta-llama/Llama-3.2-1B"
OPTIONS = {"method": "lora", "per_device_train_batch_size": 2}
STEP_S = 0.5
runner = CliRunner()


class FakeCard:
    """A card that answers what a scripted L40S would."""

    throttle: tuple[str, ...] = ()

    def hardware(self) -> Hardware:
        return Hardware(device="cuda:0", gpu="l40s-48gb", name="NVIDIA L40S", memory_bytes=44 * GIB)

    def memory(self) -> MemoryReading:
        return MemoryReading(allocated_bytes=10 * GIB, reserved_bytes=11 * GIB, process_bytes=12 * GIB)

    def sensors(self) -> Sensors:
        return Sensors(throttle_reasons=self.throttle)

    def software(self) -> dict[str, str | None]:
        return {"torch": "2.13.0"}

    def synchronize(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is held."""


class ScriptedTime:
    """Seconds that pass when told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def watched(
    *,
    steps: int = 23,
    of: int = 23,
    lengths: tuple[int, ...] = (512,),
    throttle: tuple[str, ...] = (),
    saves_s: float = 0.0,
) -> Watcher:
    """A job of steps of half a second each."""
    time, card = ScriptedTime(), FakeCard()
    card.throttle = throttle
    watcher = Watcher(
        device=card,  # type: ignore[arg-type]
        clock=StepClock(synchronize=card.synchronize, now=time),
        max_steps=of,
        job=Job(architecture=load_architecture(MODEL), options=OPTIONS),
        usd_per_gpu_hour=3.6,
    )
    for step in range(1, steps + 1):
        watcher.clock.step_begins()
        for length in lengths:
            watcher.saw_batch(2, 2 * length)
        time.now_s += STEP_S
        saves = saves_s > 0.0 and step in (10, of)
        watcher.step_ends(step, followed_by="save" if saves else "")
        time.now_s += saves_s * saves
    watcher.clock.finish()
    return watcher


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return write_run_record(watched().record(created_at="2026-01-02T03:04:05Z", tunecast="0"), tmp_path)


def quantities(path: Path, *more: str) -> dict[str, dict[str, Any]]:
    done = runner.invoke(program, ["validate", str(path), "--json", *more])
    assert done.exit_code == 0, done.output
    return {row["name"]: row for row in json.loads(done.stdout)["quantities"]}


def test_measured_and_forecast_stand_side_by_side(record: Path) -> None:
    told = tunecast.estimate(MODEL, gpu="l40s", max_length=512, max_steps=23, usd_per_gpu_hour=3.6, **OPTIONS)[0]
    found = quantities(record)
    assert found["optimizer step"]["measured"] == pytest.approx(STEP_S)
    assert found["optimizer step"]["forecast"] == pytest.approx(told.step_time_s.as_dict())
    assert found["optimizer step"]["error"] == pytest.approx(told.step_time_s.value / STEP_S - 1)
    assert found["speed"]["measured"] == pytest.approx(2 * 512 / STEP_S)
    assert found["memory allocated"]["measured"] == pytest.approx(10.0)
    assert found["memory process"]["measured"] == pytest.approx(12.0)
    assert found["training"]["measured"] == pytest.approx(23 * STEP_S / 3600)
    assert found["cost of the training"]["measured"] == pytest.approx(23 * STEP_S / 3600 * 3.6)


def test_evaluations_and_saves_are_no_part_of_the_training_that_is_compared(tmp_path: Path) -> None:
    """The forecast is of steps alone."""
    saved = watched(saves_s=60.0).record(created_at="2026-01-02T03:04:05Z", tunecast="0")
    assert (saved["asides"], saved["aside_s"], saved["wall_s"]) == (2, 120.0, 23 * STEP_S + 120.0)
    found = quantities(write_run_record(saved, tmp_path))
    assert found["training"]["measured"] == pytest.approx(23 * STEP_S / 3600)


def test_a_job_that_was_stopped_has_no_whole_training(tmp_path: Path) -> None:
    path = write_run_record(watched(steps=10, of=23).record(created_at="2026-01-02T03:04:05Z", tunecast="0"), tmp_path)
    assert "training" not in quantities(path)


def test_memory_is_not_compared_where_samples_differ_in_length(tmp_path: Path) -> None:
    mixed = watched(lengths=(256, 512)).record(created_at="2026-01-02T03:04:05Z", tunecast="0")
    assert (mixed["run"]["max_length"], mixed["longest_run"]["max_length"]) == (384, 512)
    found = quantities(write_run_record(mixed, tmp_path))
    assert found["memory allocated"]["forecast"] is None
    assert found["optimizer step"]["forecast"] is not None


def test_the_line_tells_where_the_job_stands() -> None:
    text = line(watched(steps=13, of=23, throttle=("sw_power_cap",)))
    assert text is not None
    assert "step 13/23" in text
    assert "2,048 tokens/s" in text
    assert "5.00 s (5.00 s to 5.00 s) left" in text  # 10 steps of half a second, and no two windows differ
    assert "$0.0065 of $0.011 at $3.60/h" in text  # 13 and 23 steps of half a second at 0.1 cents a second
    assert "power_capped" in text


def test_the_bar_decides_the_exit_code(record: Path) -> None:
    error = abs(quantities(record)["optimizer step"]["error"])
    assert runner.invoke(program, ["validate", str(record), "--max-median-error", str(error * 1.01)]).exit_code == 0
    assert runner.invoke(program, ["validate", str(record), "--max-median-error", str(error * 0.99)]).exit_code == 3


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "trainer_state.json"
    history = [{"loss": 2.0, "step": 10}, {"train_runtime": 60.0, "step": 120}]
    path.write_text(json.dumps({"global_step": 120, "max_steps": 120, "log_history": history}))
    return path


def test_a_trainer_state_is_compared_with_what_it_ran(state: Path) -> None:
    found = quantities(state, "--config", MODEL, "--gpu", "l40s")
    told = tunecast.estimate(MODEL, gpu="l40s")[0]
    assert found["optimizer step"]["measured"] == pytest.approx(0.5)
    assert found["training"]["forecast"]["value"] == pytest.approx(told.step_time_s.value * 120 / 3600)


OWN = {"per_device_train_batch_size": 4, "max_length": 512, "max_steps": 120}


@pytest.mark.parametrize(
    ("state_says", "says"),
    [
        ({"train_batch_size": 4, "max_steps": 120}, None),
        ({"train_batch_size": 2}, "train_batch_size is 2, but per_device_train_batch_size of the config is 4"),
        ({"max_steps": 60}, "max_steps is 60, but 120 in the config"),
        # 6 x 1.24e9 parameters x 4 x 512 tokens x 120 steps = 1.83e15, with rows as long as max_length
        ({"total_flos": 1.0e15}, None),
        ({"total_flos": 9.8e9}, "total_flos is 9.8e+09, but the model and rows of the config make 1.82e+15 at most"),
        ({"num_tokens": 120 * 4 * 500}, None),
        ({"num_tokens": 120 * 4 * 2000}, "a step had 8,000 tokens, but the config's have 2,048 at most"),
    ],
)
def test_a_state_that_is_not_the_configs_is_refused(
    tmp_path: Path, state: Path, state_says: dict[str, Any], says: str | None
) -> None:
    config = tmp_path / "trl.yaml"
    fields = {"model_name_or_path": MODEL, "use_peft": True, "dtype": "bfloat16", **OWN}
    config.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    content = json.loads(state.read_text()) | state_says
    tokens = content.pop("num_tokens", None)
    content["log_history"][0] |= {} if tokens is None else {"num_tokens": tokens, "step": 120}
    state.write_text(json.dumps(content))
    done = runner.invoke(program, ["validate", str(state), "--config", str(config), "--gpu", "l40s"])
    assert done.exit_code == (0 if says is None else 2)
    assert says is None or says in " ".join(done.output.split())


def test_a_model_alone_beside_another_batch_is_noted(state: Path) -> None:
    state.write_text(json.dumps(json.loads(state.read_text()) | {"train_batch_size": 4}))
    done = runner.invoke(program, ["validate", str(state), "--config", MODEL, "--gpu", "l40s"])
    assert done.exit_code == 0
    assert "compares unlike runs: train_batch_size is 4" in " ".join(done.output.split())


def test_the_run_that_a_state_is_compared_with_is_told(state: Path) -> None:
    """A model alone: what its forecast is of was never said, so that all of it is assumed. Its rows of 1,024 tokens
    are not those of a run whose ``total_flos`` are of 400 a step, or of 1,000."""
    params = 973_146_112  # of Llama 3.2 1B, without the table of tokens
    for tokens, noted in ((400, True), (1000, False)):
        flos = 6.0 * params * tokens * 120
        state.write_text(json.dumps(json.loads(state.read_text()) | {"total_flos": flos}))
        done = runner.invoke(program, ["validate", str(state), "--config", MODEL, "--gpu", "l40s"])
        said = " ".join(done.output.split())
        assert "1 x 1024 tokens" in said
        assert "Assumed: method lora, lora_r 16" in said
        assert ("total_flos makes" in said) is noted


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        (None, ["--config", MODEL], "--gpu NAME"),
        (None, ["--gpu", "l40s"], "--config FILE_OR_MODEL"),
        ({"log_history": [], "global_step": 3}, ["--config", MODEL, "--gpu", "l40s"], "has no train_runtime"),
        ({"schema": "something/9"}, [], "neither a record"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    state: Path, content: dict[str, Any] | None, more: list[str], says: str
) -> None:
    if content is not None:
        state.write_text(json.dumps(content))
    done = runner.invoke(program, ["validate", str(state), *more])
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"log_history": [{"train_runtime": runtime_s}]}, "train_runtime is")
        for runtime_s in (0, -60.0, float("nan"), float("inf"), "60", None, True)
    ]
    + [({"global_step": steps}, "global_step is") for steps in (0, -3, 1.5, "120", None, True)]
    + [({"log_history": history}, "log_history is no list of entries") for history in (None, {}, ["train_runtime"])],
)
def test_a_damaged_state_is_refused(state: Path, damage: dict[str, Any], says: str) -> None:
    state.write_text(json.dumps(json.loads(state.read_text()) | damage))
    done = runner.invoke(program, ["validate", str(state), "--config", MODEL, "--gpu", "l40s"])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize("cards", [["l40s", "h100-sxm5-80gb"], ["all"]])
def test_a_state_is_of_one_kind_of_gpu(state: Path, cards: list[str]) -> None:
    named = [word for card in cards for word in ("--gpu", card)]
    done = runner.invoke(program, ["validate", str(state), "--config", MODEL, *named])
    assert done.exit_code == 2
    assert "one" in done.output
    assert not done.stdout


def test_a_watched_run_moves_later_forecasts_of_its_card_towards_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half again as slow as forecast, as a card may be."""
    asked: dict[str, Any] = {**OPTIONS, "max_length": 512, "gpu": "l40s"}
    before = tunecast.estimate(MODEL, **asked)[0]
    step_s = 1.5 * before.step_time_s.value
    monkeypatch.setattr(sys.modules[__name__], "STEP_S", step_s)
    record = write_run_record(watched().record(created_at="2026-01-02T03:04:05Z", tunecast="0"), tmp_path)
    after = tunecast.estimate(MODEL, records=[record], **asked)[0]
    assert abs(after.step_time_s.value - step_s) < 0.3 * abs(before.step_time_s.value - step_s)
    relative = [(one.step_time_s.high / one.step_time_s.low) for one in (before, after)]
    assert relative[1] < relative[0]
    assert any("watched run" in note and record.name in note for note in after.notes)
    other = {**asked, "method": "qlora", "max_length": 1024}
    moved = [tunecast.estimate(MODEL, records=records, **other)[0].step_time_s.value for records in ([record], [])]
    same = after.step_time_s.value / before.step_time_s.value
    assert moved[0] / moved[1] == pytest.approx(same, rel=0.05)


def test_a_watched_run_of_a_card_not_asked_for_is_refused(record: Path) -> None:
    done = runner.invoke(program, ["estimate", MODEL, "--gpu", "rtx-4090", "--record", str(record)])
    assert done.exit_code == 2
    assert "add --gpu l40s-48gb" in " ".join(done.output.split())


@pytest.mark.parametrize(
    "options",
    [
        {"method": "full"},
        {"method": "full", "stack": "torchtune", "num_gpus": 8, "sharding": "fsdp"},
        {"method": "qlora", "modules_to_save": "lm_head,embed_tokens", "lora_dropout": 0.05},
        {"method": "lora", "use_dora": True, "lora_target_modules": "q_proj,v_proj", "precision": "bf16"},
        {"method": "lora", "stack": "unsloth", "fused_kernels": "rope,swiglu"},
    ],
)
def test_a_recorded_run_gives_options_that_resolve_to_it(options: dict[str, Any]) -> None:
    """Also where its method or stack refuses some fields, such as a rank of a full fine-tune."""
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, options, gpu_has_bf16=True).run
    assert resolve_run(architecture, options_of_run(architecture, run), gpu_has_bf16=True).run == run
