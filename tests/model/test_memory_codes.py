"""The interval of memory is narrow where such code was compared with a counter or traced, and wide elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tunecast.catalogs.gpus import find_gpu
from tunecast.model.architectures import load_architecture
from tunecast.model.factors import FactorSet
from tunecast.model.fits import fit_probability, memory_view
from tunecast.model.memory_codes import (
    COMPARED,
    OTHER,
    SHARED,
    code_notes,
    effects_stack,
    memory_code,
    memory_overheads_of,
    with_other_code,
)
from tunecast.model.priors import load_priors, prior_factors
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.target import Target, resolve_targets

LLAMA = load_architecture("meta-llama/Llama-3.1-8B")
GPU = "h100-sxm5-80gb"


def run_of(**options: Any) -> Run:
    return resolve_run(LLAMA, {"method": "lora", "max_length": 1024, **options}).run


def target() -> Target:
    return resolve_targets([GPU], {})[0]


def half_width(run: Run) -> float:
    view = memory_view(LLAMA, run, target(), prior_factors(find_gpu(GPU), run))
    return math.log(view.allocated_bytes.high / view.allocated_bytes.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stack": "trl"},
        {"stack": "llama-factory"},
        {"num_gpus": 8, "sharding": "fsdp"},
        {"num_gpus": 2, "sharding": "ddp"},
        {"num_gpus": 8, "sharding": "zero2"},
        {"num_gpus": 8, "sharding": "zero3"},
    ],
)
def test_code_that_was_compared_is_exact(options: dict[str, Any]) -> None:
    """The grid of traced code and two counters of published runs agree within a percent on one GPU; published peaks on
    several with their forecasts within two or three."""
    run = run_of(**options)
    assert half_width(run) < (0.03 if run.num_gpus > 1 else 0.01)
    assert code_notes(run, load_priors()) == ()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"torch_compile": True}, "hf-peft one GPU compiled"),
        ({"stack": "torchtune"}, "torchtune one GPU"),
        ({"stack": "unsloth", "method": "qlora"}, "unsloth one GPU"),
        ({"num_gpus": 8, "sharding": "zero3", "torch_compile": True}, "hf-peft zero3 compiled"),
        ({"num_gpus": 8, "sharding": "zero3", "offload": "optimizer"}, "hf-peft zero3 offloaded"),
        ({"num_gpus": 8, "sharding": "fsdp", "tp": 2, "method": "full"}, "hf-peft fsdp tp"),
    ],
)
def test_other_code_is_as_unsure_as_what_was_never_compared(options: dict[str, Any], code: str) -> None:
    """Published peaks of two such sources lie 5 to 20% from their forecasts; a note names the code."""
    run, priors = run_of(**options), load_priors()
    assert memory_code(run, priors["beliefs"]["memory_codes"]["same"]) == code
    assert 0.05 < half_width(run) < 0.4
    assert code in code_notes(run, priors)[0]


@pytest.mark.parametrize("options", [{}, {"num_gpus": 4, "sharding": "fsdp"}, {"num_gpus": 4, "sharding": "ddp"}])
def test_several_gpus_have_the_spread_of_runs_on_several(options: dict[str, Any]) -> None:
    """Gathers, buckets and shares of units: published peaks on two and four GPUs lie further from their forecasts."""
    stored = load_priors()["memory_overhead_bytes"]
    own = memory_overheads_of(run_of(**options), load_priors(), find_gpu(GPU))
    assert own[COMPARED] == stored[SHARED if options else COMPARED]
    assert stored[SHARED] > stored[COMPARED]
    assert SHARED not in own


def test_a_context_grows_with_the_threads_that_a_card_holds() -> None:
    """A T4 has 40 multiprocessors of 1,024 threads, an H100 132 of 2,048 (CUDA programming guide)."""
    small, large = (memory_overheads_of(None, load_priors(), find_gpu(name)) for name in ("t4-16gb", GPU))
    for end in ("", "_low", "_high"):
        assert large[f"context{end}"] / small[f"context{end}"] == pytest.approx(132 * 2048 / (40 * 1024))
    assert small["context_low"] < small["context"] < small["context_high"]
    assert not any("thread" in name for name in small)
    assert small["fragmentation_frac"] == large["fragmentation_frac"]


def test_a_card_of_unstated_multiprocessors_has_an_h100s_context() -> None:
    unstated = replace(find_gpu(GPU), sm_count=None)
    assert memory_overheads_of(None, load_priors(), unstated) == memory_overheads_of(None, load_priors(), find_gpu(GPU))


def test_a_stack_that_runs_anothers_code_has_its_effects_on_time() -> None:
    """TRL, axolotl and LLaMA-Factory train transformers' models and PEFT's adapters; ms-swift has rows of its own."""
    priors = load_priors()
    named = {stack: effects_stack(stack, priors) for stack in ("trl", "axolotl", "ms-swift", "unsloth", "hf-peft")}
    assert named == {
        "trl": "hf-peft", "axolotl": "hf-peft", "ms-swift": "ms-swift", "unsloth": "unsloth", "hf-peft": "hf-peft"
    }  # fmt: skip
    plain, by_trl = (prior_factors(find_gpu(GPU), replace(run_of(), stack=stack)) for stack in ("hf-peft", "trl"))
    assert by_trl.factors == plain.factors
    assert by_trl.step_covariance == plain.step_covariance


def test_a_wider_interval_is_a_less_certain_fit() -> None:
    """The same tensors, a little below what the card has: sure of its fit where the code was compared."""
    run = run_of()
    narrow = prior_factors(find_gpu(GPU), run)
    wide = replace(narrow, memory_overhead_bytes={**narrow.memory_overhead_bytes, COMPARED: 0.15})
    process = memory_view(LLAMA, run, target(), narrow).process_bytes
    assert process is not None
    card = replace(target(), usable_bytes=int(1.1 * process.value))
    sure, unsure = (fit_probability(memory_view(LLAMA, run, card, factors)) for factors in (narrow, wide))
    assert sure is not None
    assert unsure is not None
    assert sure > unsure > 0.5


def test_a_record_measured_plain_code_alone() -> None:
    """Its own spread holds for such code; another's tensors it has not seen."""
    own = FactorSet(gpu=GPU, curves={}, factors={}, step_log_sd=0.02, memory_overhead_bytes={COMPARED: 0.001})
    priors = load_priors()
    assert with_other_code(own, run_of(), priors) is own
    other = with_other_code(own, run_of(num_gpus=8, sharding="zero3", torch_compile=True), priors)
    assert other.memory_overhead_bytes[COMPARED] == priors["memory_overhead_bytes"][OTHER]
    assert other.notes
    assert own.memory_overhead_bytes == {COMPARED: 0.001}
