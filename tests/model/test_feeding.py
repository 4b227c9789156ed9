"""Tokenizing while training: the step waits where the text comes slower than the GPU works."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.feeding import later
from tunecast.model.forecast import Forecast
from tunecast.model.question import Question
from tunecast.model.target import resolve_targets
from tunecast.model.value import exact, lognormal
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


def test_a_trainer_that_reads_its_loss_fetches_when_the_device_is_done() -> None:
    """transformers' Trainer leaves its device at most an optimizer step to do while 65,536 tokens at 100,000 a second
    are made; torchtune's recipe reads no loss on the way, and makes them while its device works for longer."""
    data_s, large = 8 * TOKENS / 1e5, {"method": "full", "per_device_train_batch_size": 64}
    plain, slow = ask(**large), ask(rate=1e5, streaming=True, **large)
    waits = slow.step_time_s.value - plain.step_time_s.value
    assert data_s - 1.5 * plain.time_parts_s["optimizer"] < waits < data_s
    other = {"stack": "torchtune", **large}
    plain, slow = ask(**other), ask(rate=1e5, streaming=True, **other)
    assert plain.step_time_s.value > data_s
    assert slow.step_time_s.value == plain.step_time_s.value


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


def width(found: Forecast) -> float:
    return found.step_time_s.high - found.step_time_s.low


def test_less_known_is_never_a_narrower_interval() -> None:
    """Made on the way at no cost, the step keeps its interval; at an assumed rate it is as wide as at it given."""
    alone = {"max_length": 2048, "per_device_train_batch_size": 1}
    plain, free = ask(**alone), ask(rate=1e9, streaming=True, **alone)
    assert width(free) == pytest.approx(width(plain), rel=0.02)
    for workers in (0, 1):
        shared = {"streaming": True, "dataloader_num_workers": workers}
        given, assumed = ask(rate=1e6, **shared, **alone), ask(**shared, **alone)
        assert assumed.step_time_s.value == given.step_time_s.value
        assert assumed.step_time_s.low <= given.step_time_s.low * 1.0001
        assert assumed.step_time_s.high >= given.step_time_s.high * 0.9999
        assert width(assumed) >= 0.999 * width(plain)
    known, unsure = (later(lognormal(1.0, 0.3), 0.0, data) for data in (exact(1.0), lognormal(1.0, 0.6)))
    assert unsure.high - unsure.low > 1.5 * (known.high - known.low)


def test_a_host_that_tokenizes_and_issues_keeps_the_spread_of_issuing() -> None:
    """2,048 tokens at 20,000 a second are 102.4 ms, to which the host-bound step's own 80% interval is added."""
    alone = {"max_length": 2048, "per_device_train_batch_size": 1}
    plain, slow = (ask(**alone), ask(rate=20_000.0, streaming=True, **alone))
    assert plain.bound_by == "host"
    for end in ("low", "value", "high"):
        expected = getattr(plain.step_time_s, end) + 0.1024
        assert getattr(slow.step_time_s, end) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("host_s", "data_s"), [(0.0, 1.2), (0.9, 0.3), (0.2, 0.05)])
def test_quantiles_of_the_later_clock_are_those_of_random_draws(host_s: float, data_s: float) -> None:
    """A million seeded pairs of log-normal errors: 0.3 on the step and on what the host issues, 0.6 on the data."""
    step, data = lognormal(1.0, 0.3), lognormal(data_s, 0.6)
    random = np.random.default_rng(7)
    own, other = np.exp(0.3 * random.standard_normal(10**6)), data_s * np.exp(0.6 * random.standard_normal(10**6))
    drawn = np.maximum(own, own * host_s + other)
    found = later(step, host_s, data)
    assert found.low <= np.quantile(drawn, 0.1) * 1.01
    assert found.high == pytest.approx(np.quantile(drawn, 0.9), rel=0.01)
    if host_s == 0.0:
        assert found.low == pytest.approx(np.quantile(drawn, 0.1), rel=0.01)
