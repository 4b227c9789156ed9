"""Numbers beyond sense are one sentence with a bound and exit code 2, never a traceback and never a long wait."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from ci_share import some_for_ci
from typer.testing import CliRunner

from tunecast import estimate
from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.cli.program import program
from tunecast.swept_inputs import NUMBER, SPECIAL, WHOLE, sweepable

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


INPUTS = {name: kind for name, kind in sweepable().items() if name not in SPECIAL}
NOT_MEANT = ("x", "0", "-1", "1.5", "on", "nan", float("nan"), float("inf"), -1, 1.5, [])


@pytest.mark.parametrize("name", some_for_ci(INPUTS, 3))
def test_options_in_python_are_used_or_refused_in_a_sentence(name: str) -> None:
    """Whatever value any option of `estimate` has: an error of ours or an answer, never a traceback."""
    around: tuple[dict[str, Any], ...] = ({"tokens": "1M"}, {"num_gpus": 16, "sharding": "fsdp"})
    for value, given in zip(NOT_MEANT, itertools.cycle(around), strict=False):  # text and number in both
        with contextlib.suppress(TunecastError):
            assert estimate("Qwen/Qwen2.5-0.5B", gpu="l40s", **{**given, name: value})


@pytest.mark.parametrize("name", [name for name, kind in INPUTS.items() if kind in (WHOLE, NUMBER)])
def test_words_for_numbers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """In a run that reads them: of a file of data, in so many steps, over an adapter of GPTQ, or else of many cards."""
    data = tmp_path / "one.jsonl"
    data.write_text('{"text": "one"}\n', encoding="utf-8")
    reading: dict[str, dict[str, Any]] = {
        "max_steps": {},
        "bytes_per_token": {"dataset": str(data)},
        "host_update_gb_per_s": {"num_gpus": 16, "sharding": "zero3", "offload": "all"},
        "gptq_group_size": {"method": "qlora", "quant_method": "gptq-4bit"},
    }
    around = reading.get(name, {"tokens": "1M", "num_gpus": 16, "sharding": "fsdp"})
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} "):
        estimate("Qwen/Qwen2.5-0.5B", gpu="l40s", **{**around, name: "x"})


def test_a_mean_of_documents_that_is_no_number_is_refused() -> None:
    around = {"padding_free": True, "attn_implementation": "flash_attention_2", "num_samples": 5}
    with pytest.raises(
        InputError, match=r"^--mean-tokens is 'x', but a sample has at least 1; type for example 500\.$"
    ):
        estimate("Qwen/Qwen2.5-0.5B", gpu="l40s", mean_tokens="x", **around)
