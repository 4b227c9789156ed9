"""``--max-batch``, ``--max-length-that-fits``, and what is proposed when nothing fits."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.cli.program import program

MODEL = "meta-llama/Llama-3.1-8B"
runner = CliRunner()


@pytest.mark.parametrize(
    ("flag", "name"),
    [("--max-batch", "per_device_train_batch_size"), ("--max-length-that-fits", "max_length")],
)
def test_each_gpu_gets_its_own_largest(flag: str, name: str) -> None:
    given = [] if name == "max_length" else ["--max-length", "1024"]
    gpus = ["--gpu", "l40s-48gb", "--gpu", "a100-sxm4-80gb"]
    shown = runner.invoke(program, ["estimate", MODEL, "--method", "lora", flag, *given, *gpus, "--json"])
    assert shown.exit_code == 0
    small, large = json.loads(shown.stdout)
    assert small["run"][name]["value"] < large["run"][name]["value"]
    for forecast in (small, large):
        assert forecast["verdict"] == "fits"
        assert any("is the largest that fits" in note for note in forecast["notes"])


def test_a_searched_option_cannot_be_given_too() -> None:
    with pytest.raises(InputError, match="--max-batch looks for --per-device-train-batch-size itself"):
        tunecast.estimate(MODEL, gpu="l40s-48gb", max_batch=True, per_device_train_batch_size=2)
    with pytest.raises(InputError, match="exclude each other"):
        tunecast.estimate(MODEL, gpu="l40s-48gb", max_batch=True, max_length_that_fits=True)


def test_suggestions_only_where_nothing_fits() -> None:
    none = tunecast.estimate(MODEL, method="full", gpu=["rtx-4090-24gb", "rtx-a6000-48gb"])
    assert not any("would make it fit" in note for note in none[0].notes)
    assert any("--method qlora would make it fit on rtx-a6000-48gb" in note for note in none[1].notes)
    some = tunecast.estimate(MODEL, method="full", gpu=["l40s-48gb", "h200-sxm-141gb"])
    assert some[1].fits
    assert not any("would make it fit" in note for forecast in some for note in forecast.notes)
