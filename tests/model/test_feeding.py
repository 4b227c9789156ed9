"""Tokenizing while training: the step waits where the text comes slower than the GPU works."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.forecast import Forecast
from tunecast.model.question import Question
from tunecast.model.target import resolve_targets
from tunecast.model.whole_run_options import split_whole_run

TOKENS = 8 * 1024
PLAIN: dict[str, Any] = {"method": "lora", "max_length": 1024, "per_device_train_batch_size": 8}


def ask(rate: float | None = None, **options: Any) -> Forecast:
    around = split_whole_run({} if rate is None else {"phase_rate": [f"tokenize_tokens_per_s={rate}"]})[0]
    question = Question(architecture=load_architecture("Qwen/Qwen2.5-0.5B"), options=PLAIN | options, whole_run=around)
    return forecast(question, resolve_targets(["h100-sxm5-80gb"], {})[0])


def test_data_tokenized_before_keep_no_gpu_waiting() -> None:
    assert ask(rate=1.0).step_time_s == ask().step_time_s


def test_a_slow_tokenizer_bounds_the_step() -> None:
    """8,192 tokens at 1,000 tokens/s in each of two workers: 4.096 s whatever the GPU does."""
    found = ask(rate=1000.0, streaming=True, dataloader_num_workers=2)
    assert found.bound_by == "data"
    assert found.step_time_s.value == pytest.approx(TOKENS / 2000)
    assert found.time_parts_s["data"] == pytest.approx(TOKENS / 2000 - ask().step_time_s.value)
    assert sum(found.time_parts_s.values()) == pytest.approx(found.step_time_s.value, rel=1e-6)
    assert found.tokens_per_s.value == pytest.approx(2000)
    assert found.step_time_s.low <= found.step_time_s.value <= found.step_time_s.high


def test_the_process_that_issues_kernels_does_one_after_the_other() -> None:
    alone, beside = (ask(rate=1000.0, streaming=True, dataloader_num_workers=n) for n in (0, 1))
    assert beside.step_time_s.value == pytest.approx(TOKENS / 1000)
    assert alone.step_time_s.value > beside.step_time_s.value
    assert alone.bound_by == "data"
    small = {"max_length": 128, "per_device_train_batch_size": 1, "streaming": True}
    assert ask(**small).bound_by == "host", "128 tokens at the assumed million a second: launches take far longer"


def test_enough_workers_hide_it_and_the_assumed_rate_is_told() -> None:
    found = ask(streaming=True, dataloader_num_workers=64)
    assert found.bound_by != "data"
    assert found.step_time_s.value == ask().step_time_s.value
    assert any("1,000,000 tokens/s each (assumed" in note for note in found.notes)


def test_padding_is_not_tokenized() -> None:
    """Rows padded from 256 to 1,024 tokens: a quarter of the text."""
    shared: dict[str, Any] = {"streaming": True, "dataloader_num_workers": 1, "num_samples": 100}
    full = ask(rate=100.0, **shared, mean_tokens=1024, packing=False)
    padded = ask(rate=100.0, **shared, mean_tokens=256, packing=False)
    assert padded.step_time_s.value == pytest.approx(full.step_time_s.value / 4)


def test_a_bad_number_of_workers_is_refused() -> None:
    with pytest.raises(InputError, match="--dataloader-num-workers is -1"):
        ask(streaming=True, dataloader_num_workers=-1)
