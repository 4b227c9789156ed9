"""Which attention ``sdpa`` runs: by card, head and PyTorch, and what forecasts make of it."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from tunecast.calibrate.devices.protocol import Hardware, TrialSpec
from tunecast.calibrate.mock.attention import CUDNN_HEADS
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.plan import calibration_plan
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import load_architecture
from tunecast.model.curve_names import curve_key, find_curve
from tunecast.model.curves import columns, seconds
from tunecast.model.estimate import forecast
from tunecast.model.factors import FactorSet
from tunecast.model.forecast import Forecast
from tunecast.model.inventory import step_operations
from tunecast.model.operation import MASKED as UNDER_A_MASK
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.priors import CUDNN_NOTE, load_priors, prior_factors
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.sdpa import WIDEST, with_flash, with_others
from tunecast.model.target import resolve_targets

LLAMA, GEMMA, DEEPSEEK = "meta-llama/Llama-3.1-8B", "google/gemma-7b", "deepseek-ai/DeepSeek-V2-Lite"


def ask(gpu: str, model: str = LLAMA, **options: Any) -> Forecast:
    question = Question(architecture=load_architecture(model), options={"max_length": 8192, **options})
    return forecast(question, resolve_targets([gpu], {})[0])


@pytest.mark.parametrize(
    ("gpu", "model", "options", "cudnn"),
    [
        ("h100-sxm5-80gb", LLAMA, {}, True),
        ("h200-sxm5-141gb", LLAMA, {"stack": "trl"}, True),
        ("b200-sxm-180gb", LLAMA, {}, True),
        ("h100-sxm5-80gb", GEMMA, {}, True),
        ("b200-sxm-180gb", GEMMA, {}, False),
        ("h100-sxm5-80gb", LLAMA, {"attn_implementation": "flash_attention_2"}, False),
        ("h100-sxm5-80gb", LLAMA, {"attn_implementation": "eager"}, False),
        ("h100-sxm5-80gb", LLAMA, {"precision": "fp32", "dtype": "fp32"}, False),
        ("h100-sxm5-80gb", LLAMA, {"stack_version": "torch=2.10"}, False),
        ("h100-sxm5-80gb", LLAMA, {"stack": "unsloth"}, False),
        ("b300-sxm-288gb", LLAMA, {}, True),
        ("h100-sxm5-80gb", "bigscience/bloom-7b1", {"max_length": 512}, False),
        ("a100-sxm4-80gb", LLAMA, {}, False),
        ("rtx-5090-32gb", LLAMA, {"max_length": 512, "method": "qlora"}, False),
        ("mi300x-192gb", LLAMA, {}, False),
    ],
)
def test_cudnn_runs_where_pytorch_asks_it_first(gpu: str, model: str, options: dict[str, Any], cudnn: bool) -> None:
    """Heads of 256 go to cuDNN on 9.0 only; the cards are those that ``check_prefer_cudnn_attention`` names."""
    found = ask(gpu, model, **options)
    assert found.run.sdpa_cudnn is cudnn
    assert (CUDNN_NOTE in found.notes) is cudnn


@pytest.mark.parametrize(("gpu", "least"), [("h100-sxm5-80gb", 1.4), ("b200-sxm-180gb", 2.5)])
def test_attention_is_faster_by_about_what_is_published(gpu: str, least: float) -> None:
    """1.7 to 2.3 times on Hopper (huggingface/transformers pull request 48163); FlashAttention-2 reaches a sixth of a
    B200's peak, kernels made for it more than half."""
    new, old = ask(gpu), ask(gpu, stack_version="torch=2.10")
    flash = ask(gpu, attn_implementation="flash_attention_2")
    ratio = old.time_parts_s["attention"] / new.time_parts_s["attention"]
    assert least < ratio < 6.0
    assert flash.time_parts_s["attention"] == pytest.approx(old.time_parts_s["attention"])
    assert new.memory.allocated_bytes == old.memory.allocated_bytes


def test_an_a100_is_as_before() -> None:
    new, old = ask("a100-sxm4-80gb"), ask("a100-sxm4-80gb", stack_version="torch=2.10")
    assert new.step_time_s == old.step_time_s


def test_factors_of_a_card_without_it_have_no_such_attention() -> None:
    """Also of a run that no card was looked at for."""
    run = resolve_run(load_architecture(LLAMA), {}).run
    assert run.sdpa_cudnn
    gpu = load_gpus()["a100-sxm4-80gb"]
    with_run, plain = prior_factors(gpu, run), prior_factors(gpu)
    key = "attention.bf16.forward"
    assert with_run.curves[key] == plain.curves[key]


def test_flash_attention_has_a_curve_of_its_own_and_else_that_of_sdpa() -> None:
    architecture = load_architecture(LLAMA)
    run = resolve_run(architecture, {"attn_implementation": "flash_attention_2"}).run
    keys = {curve_key(o) for o in step_operations(architecture, run) if o.kind is Kind.ATTENTION}
    assert keys == {"attention-flash.bf16.forward", "attention-flash.bf16.backward"}
    curves = prior_factors(load_gpus()["a100-sxm4-80gb"]).curves
    only = FactorSet(
        gpu="x", curves={"attention.bf16.forward": curves["attention.bf16.forward"]}, factors={}, step_log_sd=0
    )
    assert find_curve("attention-flash.bf16.backward", only) == curves["attention.bf16.forward"]


def test_a_record_has_both_attentions_and_the_run_says_which() -> None:
    """An older PyTorch, and heads that cuDNN does not take, run FlashAttention-2: of a record without it, its own."""
    gpu, key, flash = load_gpus()["b200-sxm-180gb"], "attention.bf16.forward", "attention-flash.bf16.forward"
    prior = prior_factors(gpu, resolve_run(load_architecture(LLAMA), {}).run)
    assert prior.curves[key] != prior.curves[flash]
    for model, options in ((LLAMA, {"stack_version": "torch=2.10"}), (GEMMA, {})):
        run = ask(gpu.id, model, **options).run
        assert with_flash(prior, gpu, run).curves[key] == prior.curves[flash]
        alone = replace(prior, curves={name: curve for name, curve in prior.curves.items() if "-flash." not in name})
        kept = with_flash(alone, gpu, run)
        assert kept.curves == alone.curves
        assert "has not measured" in kept.notes[-1]
    assert with_flash(prior, gpu, ask(gpu.id).run) is prior
    assert with_flash(prior, load_gpus()["a100-sxm4-80gb"], ask("a100-sxm4-80gb").run) is prior


@pytest.mark.parametrize(
    ("capability", "measured"), [("9.0", True), ("10.0", True), ("10.3", True), ("8.0", False), ("12.0", False)]
)
def test_a_calibration_measures_flash_attention_where_sdpa_may_run_another(capability: str, measured: bool) -> None:
    hardware = Hardware(device="cuda:0", gpu=None, name="x", memory_bytes=80 * 2**30, compute_capability=capability)
    kernels = {spec.params.get("kernel") for spec in calibration_plan(hardware) if spec.bench == "attention"}
    assert kernels == ({None, "flash"} if measured else {None})


def test_mocks_run_it_on_the_same_cards() -> None:
    assert CUDNN_HEADS == WIDEST


@pytest.mark.parametrize(("gpu", "ratio"), [("h100-sxm5-80gb", (1.3, 3.0)), ("a100-sxm4-80gb", (0.97, 1.03))])
def test_a_mock_takes_longer_with_flash_attention_where_it_has_cudnn(gpu: str, ratio: tuple[float, float]) -> None:
    shape = {
        "batch": 2,
        "heads": 32,
        "kv_heads": 8,
        "length": 4096,
        "head_dim": 128,
        "dtype": "bf16",
        "pass": "forward",
    }
    device = open_mock(f"mock:{gpu}#1")
    seconds = []
    for kernel in ({}, {"kernel": "flash"}):
        spec = TrialSpec(bench="attention", params={**shape, **kernel}, repeats=9, warmup=1)
        seconds.append(median(device.run(spec).samples_s))
    low, high = ratio
    assert low < seconds[1] / seconds[0] < high


MASKED = {"max_length": 8192, "lora_target_modules": "q_proj,v_proj"}


@pytest.mark.parametrize("gpu", ["h200-sxm5-141gb", "a100-sxm4-80gb", "rtx-4090-24gb"])
def test_attention_under_a_mask_is_slower_and_less_sure(gpu: str) -> None:
    """A window that is reached: by the memory-efficient kernel, over all pairs; FlashAttention-2 takes windows."""
    sdpa, flash = (
        ask(gpu, "google/gemma-3-27b-pt", **MASKED, attn_implementation=kernel)
        for kernel in ("sdpa", "flash_attention_2")
    )
    assert sdpa.time_parts_s["attention"] > 4 * flash.time_parts_s["attention"]
    assert any("memory-efficient kernel" in note for note in sdpa.notes)
    wide, narrow = (math.log(found.step_time_s.high / found.step_time_s.low) for found in (sdpa, flash))
    assert wide > 1.3 * narrow


def test_under_a_mask_cudnn_may_be_anywhere_between() -> None:
    """Where PyTorch asks cuDNN first: faster than the memory-efficient kernel, and less sure."""
    model = "mistralai/Mistral-7B-v0.1"
    cudnn, older = (
        ask("h100-sxm5-80gb", model, **MASKED, **options) for options in ({}, {"stack_version": "torch=2.10"})
    )
    assert cudnn.time_parts_s["attention"] < 0.7 * older.time_parts_s["attention"]
    sure, less = (math.log(found.step_time_s.high / found.step_time_s.low) for found in (older, cudnn))
    assert less > 0.8 * sure


def test_its_rate_is_what_was_published() -> None:
    """16 heads of 256, 8,192 tokens, a mask, an H200, forward and backward: 72 ms (verl pull request 7131)."""
    factors = prior_factors(load_gpus()["h200-sxm5-141gb"])
    total = 0.0
    for phase, products in ((Phase.FORWARD, 2.0), (Phase.BACKWARD, 5.0)):
        flops = products * 2.0 * 16 * 8192**2 * 256
        operation = Operation(
            name="attention", kind=Kind.ATTENTION, phase=phase, flops=flops, shape=(1, 16, 16, 8192, 8192, 256),
            layout=UNDER_A_MASK,
        )  # fmt: skip
        curve = find_curve(curve_key(operation), factors)
        assert curve.log_sd == pytest.approx(0.5, abs=0.1)
        total += float(seconds(curve, columns([operation])).seconds[0])
    total *= factors.factors["scale.attention"].value
    assert 0.072 / 2 < total < 0.072 * 2


@pytest.mark.parametrize(("head_dim", "forward", "backward"), [(64, 0.56, 0.36), (128, 0.56, 0.36), (256, 0.56, 0.144)])
def test_under_a_mask_the_backward_of_wide_heads_is_slower(head_dim: int, forward: float, backward: float) -> None:
    """Published rates over FlashAttention-2's: of heads of up to 128, and of 256, whose sums leave the registers."""
    factors = prior_factors(load_gpus()["a100-sxm4-80gb"])
    for phase, share in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
        taken = []
        for layout in ("", UNDER_A_MASK):
            operation = Operation(
                name="attention", kind=Kind.ATTENTION, phase=phase, flops=1e15, shape=(1, 16, 16, 8192, 8192, head_dim),
                layout=layout,
            )  # fmt: skip
            curve = find_curve(curve_key(operation), factors)
            taken.append(float(seconds(curve, columns([operation])).seconds[0]))
        assert taken[0] / taken[1] == pytest.approx(share, rel=0.01)


def test_a_record_that_has_not_measured_it_goes_by_its_own_flash_kernel() -> None:
    own = prior_factors(load_gpus()["a100-sxm4-80gb"])
    without = {name: curve for name, curve in own.curves.items() if "-" not in name}
    faster = {
        name: replace(curve, params={**curve.params, "flops_per_s": 2 * curve.params["flops_per_s"]})
        if name.startswith("attention") else curve
        for name, curve in without.items()
    }  # fmt: skip
    made = with_others(replace(own, curves=faster), load_priors()["beliefs"], None)
    for direction in ("forward", "backward"):
        name = f"attention-{UNDER_A_MASK}.bf16.{direction}"
        assert made.curves[name].params["flops_per_s"] == pytest.approx(2 * own.curves[name].params["flops_per_s"])
    assert with_others(replace(own, curves=without), {}, None).curves == without
