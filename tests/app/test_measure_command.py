"""`tunecast measure` on a mock: the shape of a forecast, and running out of memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ci_share import some_for_ci

from tunecast.cli.program import program
from tunecast.measurement import first_line

MODEL = "Qwen/Qwen2.5-0.5B"
SMALL = ("--max-length", "128", "--device", "mock:a100-sxm4-80gb", "--json")


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    with pytest.raises(SystemExit) as end:
        program(["measure", *arguments], prog_name="tunecast")
    captured = capsys.readouterr()
    (answer,) = json.loads(captured.out)
    return int(end.value.code or 0), answer, captured.err


@pytest.mark.slow
def test_steps_are_taken_without_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """And forecast so beside the measurement, which says it of its run."""
    _, answer, _ = measured(capsys, MODEL, *SMALL)
    assert answer["run"]["trainer_loop"] == {"value": False, "origin": "stack-default"}
    with pytest.raises(SystemExit) as end:
        program(["measure", MODEL, *SMALL, "--trainer-loop"], prog_name="tunecast")
    assert end.value.code == 2
    assert "by no Trainer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_measurement_has_the_keys_of_a_forecast_and_its_origin_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tunecast import estimate
    from tunecast.model.forecast_json import forecast_to_dict

    code, answer, err = measured(capsys, MODEL, *SMALL)
    (forecast,) = estimate(MODEL, gpu="a100-sxm4-80gb", max_length=128)
    assert (code, err) == (0, "")
    assert set(answer) == set(forecast_to_dict(forecast))
    assert set(answer["origins"].values()) == {"measured:mock:a100-sxm4-80gb#0"}  # type: ignore[attr-defined]
    assert answer["trainable_params"] == forecast.trainable_params


@pytest.mark.slow
@pytest.mark.parametrize("file", some_for_ci(["axolotl.yml", "llama-factory.yaml", "trl.yaml", "torchtune.yaml"]))
def test_every_kind_of_training_file_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path, file: str) -> None:
    """What a file leaves for plans is no option of a run."""
    text = (Path(__file__).parents[2] / "docs" / "examples" / file).read_text("utf-8")
    path = tmp_path / file
    path.write_text(re.sub(r"meta-llama/Llama-3\.1-8B|Qwen/Qwen2\.5-7B-Instruct", MODEL, text), encoding="utf-8")
    code, answer, _ = measured(capsys, str(path), "--steps", "2", *SMALL)
    assert code == 0
    assert answer["step_time_s"]["value"] > 0  # type: ignore[index]


@pytest.mark.slow
def test_out_of_memory_is_an_answer_with_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--method", "full", "--per-device-train-batch-size", "64", "--max-length", "4096")
    code, answer, err = measured(capsys, MODEL, *arguments, "--device", "mock:t4", "--json")
    assert code == 3
    assert (answer["fits"], answer["verdict"], answer["step_time_s"]) == (False, "no", None)
    assert "does not fit mock:t4-16gb#0" in err


@pytest.mark.slow
def test_a_mock_can_simulate_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--method", "full", "--per-device-train-batch-size", "64", "--max-length", "4096")
    code, answer, _ = measured(capsys, MODEL, *arguments, "--device", "mock:t4", "--ignore-memory", "--json")
    assert (code, answer["fits"]) == (3, False)
    assert answer["step_time_s"]["value"] > 0  # type: ignore[index]


def test_interrupted_measuring_ends_with_130() -> None:
    code = (
        "import sys; sys.argv = ['tunecast', 'measure', 'Qwen/Qwen2.5-0.5B']\n"
        "import tunecast.api\n"
        "def interrupted(*a, **k): raise KeyboardInterrupt\n"
        "tunecast.api.measure = interrupted\n"
        "from tunecast.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tunecast: interrupted\n")


def test_torchs_account_of_its_allocator_is_left_out_of_the_sentence() -> None:
    told = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.19 GiB is "
        "free. Including non-PyTorch memory, this process has 78.05 GiB memory in use. Of the allocated memory 70.1 "
        "GiB is allocated by PyTorch, and 7.2 GiB is reserved by PyTorch but unallocated."
    )
    assert first_line(told).endswith("of which 1.19 GiB is free")
