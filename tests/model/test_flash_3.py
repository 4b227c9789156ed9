"""FlashAttention-3: buffers by its C++, speed by its paper, on Hopper alone, and never traced as version 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tunecast
from tunecast.calibrate.exact import exact_trace
from tunecast.calibrate.watch.reading import attention_name
from tunecast.catalogs.errors import InputError, NotSupportedError, TunecastError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import load_architecture
from tunecast.model.curve_names import curve_key, find_curve
from tunecast.model.estimate import forecast
from tunecast.model.flash_3 import scratch_elements
from tunecast.model.forecast import Forecast
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind, Phase
from tunecast.model.priors import load_priors, prior_factors
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.resolve_stacks import of_stack
from tunecast.model.sdpa import with_others
from tunecast.model.target import resolve_targets

LLAMA, HOPPER = "meta-llama/Llama-3.1-8B", "h100-sxm5-80gb"
FLASH_2, FLASH_3 = "flash_attention_2", "flash_attention_3"
LONG = {"max_length": 32768}


def ask(attention: str, gpu: str = HOPPER, **options: Any) -> Forecast:
    question = Question(
        architecture=of_stack(load_architecture(LLAMA), options),
        options={**LONG, "attn_implementation": attention, **options},
    )
    return forecast(question, resolve_targets([gpu], {})[0])


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        # dQ in fp32, row sums and log-sum-exps; dK and dV in fp32 for the 8 heads that 32 share
        ((1, 32, 8, 8192, 128), 32 * 8192 * (128 + 2) + 2 * 8 * 8192 * 128),
        # heads of 80 run as 96 with tiles of 64 queries; every query head has its own keys
        ((2, 32, 32, 1000, 80), 2 * 32 * 1024 * (96 + 2)),
        # tiles of 128 queries and 128 keys for heads of 64
        ((1, 14, 2, 130, 64), 14 * 256 * (64 + 2) + 2 * 2 * 256 * 64),
        # tiles of 64 queries and 80 keys for heads of 256
        ((1, 8, 4, 100, 256), 8 * 128 * (256 + 2) + 2 * 4 * 160 * 256),
    ],
)
def test_buffers_of_the_backward_are_those_of_its_c_plus_plus(shape: tuple[int, ...], elements: int) -> None:
    """``mha_bwd`` of hopper/flash_api.cpp: dq_accum, softmax_d, softmax_lse_log2, dk_accum and dv_accum."""
    assert scratch_elements(*shape) == elements


def test_it_is_as_fast_beside_version_2_as_its_paper_says() -> None:
    """1.5 to 2 times forward and 1.5 to 1.75 backward (arXiv 2407.08608), two of seven parts of the time forward."""
    times = {name: ask(name).time_parts_s["attention"] for name in (FLASH_2, FLASH_3, "sdpa")}
    assert 1.5 < times[FLASH_2] / times[FLASH_3] < 1.82
    # the paper's figures 5 and 6: beside cuDNN's attention on the same card, behind it backward
    assert 0.7 < times["sdpa"] / times[FLASH_3] < 1.3


def test_a_record_scales_its_own_version_2_and_keeps_what_it_has_measured() -> None:
    priors, gpu = load_priors(), load_gpus()[HOPPER]
    own = prior_factors(gpu)
    slow = {
        name: replace(curve, params={**curve.params, "flops_per_s": curve.params["flops_per_s"] / 2})
        for name, curve in own.curves.items()
        if name.startswith("attention-flash.")
    }
    made = with_others(replace(own, curves=slow), priors["beliefs"], None, gpu).curves
    for direction in ("forward", "backward"):
        name = f"attention-hopper.bf16.{direction}"
        assert made[name].params["flops_per_s"] == pytest.approx(own.curves[name].params["flops_per_s"] / 2)
        assert made[name].log_sd >= priors["beliefs"]["flash_3"]["log_sd"]
        measured = replace(own, curves={**slow, name: replace(made[name], origin="measured:it")})
        assert with_others(measured, priors["beliefs"], None, gpu).curves[name].origin == "measured:it"
    ampere = load_gpus()["a100-sxm4-80gb"]
    there = with_others(replace(own, curves=slow), priors["beliefs"], None, ampere).curves
    assert not any("hopper" in name for name in there)


def test_its_passes_follow_curves_of_their_own() -> None:
    llama = load_architecture(LLAMA)
    run = resolve_run(llama, {**LONG, "attn_implementation": FLASH_3}).run
    kernels = [op for op in step_operations(llama, run) if op.kind is Kind.ATTENTION]
    assert {op.phase for op in kernels} == {Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD}
    factors = prior_factors(load_gpus()[HOPPER], run)
    assert {curve_key(op) for op in kernels} <= factors.curves.keys()
    rates = {op.phase: find_curve(curve_key(op), factors).params["flops_per_s"] for op in kernels}
    assert rates[Phase.FORWARD] == rates[Phase.RECOMPUTE] > rates[Phase.BACKWARD]


def test_the_forecast_says_that_no_record_has_measured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("FlashAttention-3 is timed as its paper" in note for note in ask(FLASH_3).notes)
    assert not any("FlashAttention-3" in note for note in ask(FLASH_2).notes)
    doubted = ask(FLASH_3).step_time_s
    monkeypatch.setitem(load_priors()["beliefs"]["flash_3"], "log_sd", 0.0)
    known = ask(FLASH_3).step_time_s
    assert doubted.value == known.value
    assert doubted.high / doubted.low > known.high / known.low


@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "b200-sxm-180gb", "rtx-4090-24gb", "mi300x-192gb"])
def test_other_cards_than_hopper_are_refused_by_name(gpu: str) -> None:
    with pytest.raises(NotSupportedError, match=f"written for Hopper cards and {gpu} is none"):
        ask(FLASH_3, gpu, max_length=512)


def test_a_trace_refuses_it_by_name() -> None:
    """PyTorch's own flash operator, which stands for the kernel in a trace, is version 2."""
    small = load_architecture("Qwen/Qwen3-0.6B")
    run = resolve_run(small, {"attn_implementation": FLASH_3, "max_length": 256}).run
    with pytest.raises(NotSupportedError, match="flash_attention_3 cannot be traced"):
        exact_trace(small, run)


def test_unsloth_has_none_of_its_calls() -> None:
    with pytest.raises(TunecastError, match="flash_attention_3 is not built for --stack unsloth"):
        ask(FLASH_3, stack="unsloth")


def test_a_job_that_runs_kernels_of_the_hub_is_read_as_it_runs() -> None:
    named = {
        "kernels-community/flash-attn3": FLASH_3,
        "kernels-community/vllm-flash-attn3@main": FLASH_3,
        "kernels-community/flash-attn2": FLASH_2,
        "sdpa": "sdpa",
    }
    assert {name: attention_name(name) for name in named} == named


def test_attention_that_megatron_is_told_of_is_not_cudnns() -> None:
    """Transformer Engine chooses cuDNN's where nothing is said (its note says how to get the other)."""
    options = {"stack": "megatron", "method": "full", "max_length": 8192, "num_gpus": 8}
    times = {name: ask(name, **options).time_parts_s["attention"] for name in ("sdpa", FLASH_2, FLASH_3)}
    assert times["sdpa"] < times[FLASH_3] < times[FLASH_2]


@pytest.mark.parametrize("attention", [FLASH_2, FLASH_3])
def test_a_package_that_is_not_there_is_told_in_a_sentence(attention: str) -> None:
    """Measuring builds the real model, which asks for the package."""
    with pytest.raises(InputError, match="transformers cannot run it here"):
        tunecast.measure("Qwen/Qwen3-0.6B", device="cpu", attn_implementation=attention, max_length=64)


def test_torchtune_has_none_of_its_calls_either() -> None:
    with pytest.raises(TunecastError, match="flash_attention_3 is not built for --stack torchtune"):
        ask(FLASH_3, stack="torchtune")
