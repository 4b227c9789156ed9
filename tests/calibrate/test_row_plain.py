"""Cells that count for all GPUs, or show a product with its parts: read where the row agrees, refused where not."""

from __future__ import annotations

import pytest
from table_rows import one, reason

ROW = {
    "id": "a-1", "model": "meta-llama/Llama-3.1-8B", "method": "lora", "seq_len": "2048", "micro_batch": "2",
    "grad_accum": "4", "gpus": "8", "gpu_canonical_id": "a100-sxm4-80gb", "parallelism": "ddp", "packed": "yes",
}  # fmt: skip


@pytest.mark.parametrize("text", ["16 (2 per GPU)", "16 (2/GPU)", "16 total, 2 per device", "16 = 2 samples per GPU"])
def test_a_batch_of_all_with_that_of_one_is_that_of_one(text: str) -> None:
    assert one({**ROW, "micro_batch": text}).run.per_device_train_batch_size == 2
    assert "is not 2 on each of 4 GPUs: write one number" in reason({**ROW, "micro_batch": text, "gpus": "4"})


@pytest.mark.parametrize("text", ["64 (2x4x8)", "64 (= 2 x 4 x 8)", "2 \u00d7 4 \u00d7 8 = 64", "64 = 2*4*8"])
def test_a_product_with_its_parts_is_the_product(text: str) -> None:
    found = one({**ROW, "global_batch": text, "grad_accum": ""})
    assert found.run.gradient_accumulation_steps == 4


def test_a_product_that_its_parts_do_not_make_contradicts_itself() -> None:
    assert "global_batch '64 (2x4x4)' contradicts itself: the product is 32" in reason(
        {**ROW, "global_batch": "64 (2x4x4)"}
    )
    assert "is not micro_batch x grad_accum" in reason({**ROW, "global_batch": "32 (2x4x4)"})
    unstated = {name: text for name, text in ROW.items() if name != "grad_accum"}
    assert "'101' is no multiple of micro_batch x data-parallel GPUs" in reason({**unstated, "global_batch": "101"})


@pytest.mark.parametrize(
    "text", ["40k (8 GPUs)", "40k tokens/s (8 GPUs)", "40,000 tok/s on 8 GPUs", "~40k across 8 cards"]
)
def test_a_speed_with_the_rows_number_of_gpus_is_that_of_all(text: str) -> None:
    assert one({**ROW, "tokens_per_s": text}).tokens_per_s == 40e3
    assert "is of 8 GPUs, but gpus is 4" in reason({**ROW, "tokens_per_s": text, "gpus": "4"})


@pytest.mark.parametrize("text", ["2.5 per GPU", "2.5 samples/s per GPU", "2.5 seq/s/GPU"])
def test_samples_of_one_gpu_are_those_of_all_by_their_number(text: str) -> None:
    found = one({**ROW, "samples_per_s": text, "packed": "samples fill seq_len"})
    assert found.tokens_per_s == pytest.approx(2.5 * 8 * 2048)


@pytest.mark.parametrize("text", ["8 GPU-hours", "8 GPU hours", "~8 A100 GPU-hours", "8 gpuh", "0.008k GPU-h"])
def test_hours_of_all_gpus_are_shared_by_them(text: str) -> None:
    found = one({**ROW, "total_time_h": text, "total_tokens_or_steps": "72M tokens"})
    assert found.tokens_per_s == pytest.approx(72e6 / 3600)


def test_a_length_of_packed_samples_says_that_they_are_packed() -> None:
    said = one({**ROW, "packed": "", "seq_len": "2048 (packed)", "step_time_s": "4"})
    assert said.tokens_per_s == pytest.approx(2 * 4 * 8 * 2048 / 4)
    assert said.run == one({**ROW, "step_time_s": "4"}).run
    for text in ("no", "padded to max length"):
        told = reason({**ROW, "packed": text, "seq_len": "2048 packed"})
        assert told == f"seq_len '2048 packed' and packed {text!r} contradict each other"


def test_a_speed_of_the_rows_card_is_that_of_one_gpu() -> None:
    assert one({**ROW, "tokens_per_s_per_gpu": "2k tokens/s/A100"}).tokens_per_s == 16e3
    assert "tokens_per_s_per_gpu '2k tokens/s/H100'" in reason({**ROW, "tokens_per_s_per_gpu": "2k tokens/s/H100"})
