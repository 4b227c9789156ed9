"""Refusals offer what is then taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import tunecast
from tunecast.calibrate.watch.record import read_run_record
from tunecast.catalogs.errors import InputError

MODEL = "meta-llama/Llama-3.2-3B"
CARD = "h100-sxm5-80gb"


def refusal(**options: Any) -> str:
    with pytest.raises(InputError) as caught:
        tunecast.estimate(MODEL, gpu=CARD, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cp", "length", "said"),
    [  # 65,536 / 24 is 2,730.7; of the divisors of 12 GPUs, 4 is the largest whose double divides 2^16
        (12, 65536, "type --max-length 65520, or --cp 4."),
        (3, 4, "type --max-length 6."),  # shorter than its parts; 3 GPUs have no other degree
    ],
)
def test_a_sequence_that_does_not_deal_out(cp: int, length: int, said: str) -> None:
    told = refusal(num_gpus=cp, cp=cp, sharding="fsdp", max_length=length)
    assert told.endswith(said)
    typed = [(name.replace("-", "_"), int(value)) for name, value in re.findall(r"--(max-length|cp) (\d+)", said)]
    for name, value in typed:
        assert tunecast.estimate(
            MODEL, gpu=CARD, **{"num_gpus": cp, "cp": cp, "sharding": "fsdp", "max_length": length, name: value}
        )


@pytest.mark.parametrize("model", ["google/gemma-2-9b", MODEL])
def test_the_attention_of_split_sequences_is_one_that_the_family_has(model: str) -> None:
    asked: dict[str, Any] = {"gpu": CARD, "num_gpus": 2, "cp": 2, "sharding": "fsdp"}
    with pytest.raises(InputError, match="Context parallelism") as caught:
        tunecast.estimate(model, attn_implementation="eager", **asked)
    kernel = re.search(r"use --attn-implementation (\w+)\.$", str(caught.value))
    assert kernel is not None
    assert tunecast.estimate(model, attn_implementation=kernel[1], **asked)


@pytest.mark.parametrize("kernel", [None, "eager", "flash_attention_2", "sdpa"])
def test_a_family_whose_sequences_no_kernel_splits_names_none(kernel: str | None) -> None:
    with pytest.raises(InputError) as caught:
        tunecast.estimate("openai/gpt-oss-20b", gpu=CARD, num_gpus=2, cp=2, sharding="fsdp", attn_implementation=kernel)
    told = str(caught.value)
    assert "--attn-implementation sdpa." not in told
    assert kernel not in (None, "eager") or told.startswith("Context parallelism of gpt_oss is not built")


@pytest.mark.parametrize("slip", ["paged_adamw32", "adamw_8bits", "paged_ademamix"])
def test_only_optimizers_that_are_built_are_offered(slip: str) -> None:
    told = refusal(optim=slip)
    offered = re.search(r"Did you mean ([^?]+)\?", told)
    assert "ademamix" not in told.replace(slip, "")
    for name in offered[1].split(", ") if offered else ():
        assert tunecast.estimate(MODEL, gpu=CARD, optim=name)


def test_the_slip_of_a_paged_optimizer() -> None:
    assert "Did you mean paged_adamw_32bit" in refusal(optim="paged_adamw32")


def test_an_age_of_the_code_says_its_versions() -> None:
    told = refusal(hf_code="4.55")
    assert "'4.55'" in told
    assert "4.49 (4.49 and later below 5)" in told


@pytest.mark.parametrize(
    ("per_node", "said"),
    [(3, "3 machines of 3 GPUs, the last with 2 in use, joined"), (4, "2 machines of 4 GPUs, joined")],
)
def test_machines_that_are_not_full(per_node: int, said: str) -> None:
    (found,) = tunecast.estimate(MODEL, gpu=CARD, num_gpus=8, gpus_per_node=per_node, sharding="fsdp")
    assert any(note.startswith(said) for note in found.notes)


def test_options_of_another_storage_say_what_to_leave_out() -> None:
    told = refusal(method="qlora", quant_method="bnb-8bit", double_quant=True)
    assert "--double-quant belongs to --quant-method bnb-4bit, but --quant-method is bnb-8bit" in told
    assert told.endswith("; leave one of them out.")


def test_only_a_mock_ignores_its_memory() -> None:
    with pytest.raises(InputError, match=r"--ignore-memory .* only a mock .*; leave it out, or type --device mock:"):
        tunecast.measure(MODEL, device="cpu", ignore_memory=True)


def test_a_watched_run_that_is_not_there_says_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read .*; give the path of a file that tunecast\.TunecastCallback"):
        read_run_record(tmp_path / "nowhere.json")
