"""Numbers beyond sense are one sentence with a bound and exit code 2, never a traceback and never a long wait."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tunecast.cli.program import program

AMOUNT = ("--tokens", "10M")
OFFERS = ("--spot", *AMOUNT)
ABSURD = [
    ("--tokens", "1e300", ()),
    ("--num-samples", "1e300", ()),
    ("--num-train-epochs", "1e300", AMOUNT),
    ("--num-train-epochs", "nan", AMOUNT),
    ("--usd-per-gpu-hour", "1e308", AMOUNT),
    ("--usd-per-gpu-hour", "inf", AMOUNT),
    ("--phase-min", "start=1e308", AMOUNT),
    ("--phase-rate", "network_mb_per_s=1e300", AMOUNT),
    ("--internode-gbps", "1e-300", ("--num-gpus", "16")),
    ("--achieved-tflops", "989", ()),
    ("--achieved-tflops", "nan", ()),
    ("--checkpoint-interval-min", "1e-300", OFFERS),
    ("--per-device-train-batch-size", "100000000000", ()),
    ("--max-length", "1000000000", ("--allow-long-context",)),
    ("--gradient-accumulation-steps", "1000000000000", ()),
    ("--per-device-train-batch-size", "1000000", ("--loss-type", "chunked_nll")),
    ("--keep-days", "1e300", AMOUNT),
    ("--trials", "1000000000000", AMOUNT),
]


@pytest.mark.parametrize(("option", "value", "others"), ABSURD)
def test_absurd_numbers_are_one_sentence(option: str, value: str, others: tuple[str, ...]) -> None:
    arguments = ["estimate", "Qwen/Qwen2.5-0.5B", "--gpu", "h100-sxm5-80gb", option, value, *others]
    found = CliRunner().invoke(program, arguments)
    assert found.exit_code == 2
    (line,) = found.stderr.strip().splitlines()
    assert option.removeprefix("--").partition("-")[0] in line or option in line


def test_what_was_given_as_speed_is_bounded_by_the_peak_with_recomputation() -> None:
    """An H100's 989.4 TFLOP/s over the ratio of executed to required work; a little less passes."""
    arguments = ["estimate", "meta-llama/Llama-3.1-8B", "--gpu", "h100-sxm5-80gb", "--achieved-tflops"]
    refused = CliRunner().invoke(program, [*arguments, "989"])
    assert refused.exit_code == 2
    most = refused.stderr.rpartition("type at most ")[2].strip().rstrip(".")
    assert CliRunner().invoke(program, [*arguments, most]).exit_code == 0
    assert CliRunner().invoke(program, [*arguments, str(float(most) + 0.2)]).exit_code == 2


@pytest.mark.parametrize("batch", [1000, 1_000_000])
def test_a_batch_that_never_fits_is_answered_without_going_through_it(batch: int) -> None:
    """Going through a million micro-batches, or four thousand chunks of a loss, took minutes."""
    arguments = ["estimate", "meta-llama/Llama-3.1-8B", "--gpu", "h100-sxm5-80gb"]
    found = CliRunner().invoke(program, [*arguments, "--per-device-train-batch-size", str(batch)])
    assert found.exit_code == 3
    assert "would make it fit" in " ".join(found.stdout.split())


@pytest.mark.parametrize("option", ["--global-batch", "--max-gpus"])
def test_a_recommendation_names_the_option_that_was_typed(option: str) -> None:
    arguments = ["recommend", "Qwen/Qwen2.5-0.5B", "--tokens", "10M", "--gpu", "h100-sxm5-80gb", option, "100000000000"]
    found = CliRunner().invoke(program, arguments)
    assert found.exit_code == 2
    assert found.stderr.startswith(f"tunecast: {option} is 1e+11, beyond ")
