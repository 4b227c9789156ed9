"""MFU and HFU where products of several dtypes share a step."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast import estimate
from tunecast.catalogs.errors import ImpossibleError
from tunecast.model.architectures import load_architecture
from tunecast.model.flops import executed_by_dtype
from tunecast.model.on_device import job_factors, resolve_for
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.step_source import model_flops_of
from tunecast.model.target import resolve_targets
from tunecast.model.timing import step_timing, utilizations

LLAMA = load_architecture("meta-llama/Llama-3.1-8B")
TOKENS = 1024


def run_of(**options: Any) -> Run:
    given = {"method": "lora", "max_length": TOKENS, "per_device_train_batch_size": 1, **options}
    return resolve_run(LLAMA, given).run


def int8_run(**options: Any) -> Run:
    return run_of(method="qlora", quant_method="bnb-8bit", **options)


@pytest.mark.parametrize("targets", ["all-linear", "down_proj"])
def test_no_more_is_required_than_is_run(targets: str) -> None:
    """Phi-3's products of one row, not checkpointed: the first layer's input needs no gradient."""
    asked = {"method": "lora", "max_length": 512, "gradient_checkpointing": False, "lora_target_modules": targets}
    (found,) = estimate("microsoft/Phi-3-mini-4k-instruct", gpu="h100-sxm5-80gb", **asked)
    assert found.mfu is not None
    assert found.hfu is not None
    assert found.model_flops_per_step <= found.executed_flops_per_step
    assert 0.0 < found.mfu <= found.hfu


def test_every_product_counts_against_the_peak_of_its_own_dtype() -> None:
    """RTX 3090 (GA102 whitepaper, dense): 71 TFLOP/s of bf16, 284 of int8."""
    (target,) = resolve_targets(["rtx-3090-24gb"], {})
    executed = {"bf16": 71e12, "int8": 284e12}
    mfu, hfu = utilizations(142e12, executed, 4.0, int8_run(), target)
    assert hfu == pytest.approx((1.0 + 1.0) / 4)
    assert mfu == pytest.approx(142 / (71 + 284) * hfu)


def test_no_utilisation_passes_one_whatever_dtypes_mix() -> None:
    """71 TFLOP of bf16 and 71 of int8 take an RTX 3090 at least 1 + 1/4 s; 142 required of 142 executed as long."""
    (target,) = resolve_targets(["rtx-3090-24gb"], {})
    run, executed = int8_run(), {"bf16": 71e12, "int8": 71e12}
    assert utilizations(142e12, executed, 1.25, run, target) == pytest.approx((1.0, 1.0))
    with pytest.raises(ImpossibleError, match=r"FU of rtx-3090-24gb.*above 1:"):
        utilizations(142e12, executed, 1.2, run, target)
    with pytest.raises(ImpossibleError, match=r"MFU of rtx-3090-24gb.*above 1:"):
        utilizations(300e12, {"int8": 1e12}, 1.0, run, target)
    with pytest.raises(ImpossibleError, match=r"MFU of rtx-3090-24gb.*above 1:"):
        utilizations(142e12, {"bf16": 71e12}, 1.3, run, target)


@pytest.mark.parametrize("passes", [1, 2])
def test_llm_int8_multiplies_forward_in_int8_and_backward_in_16_bits(passes: int) -> None:
    """bitsandbytes ``MatMul8bitLt``: int8 forward and recomputation, the backward by a 16-bit copy of the weight."""
    run = int8_run(gradient_checkpointing=passes == 2)
    counted = executed_by_dtype(LLAMA, run)
    maps = sum(linear.weight_params for group in LLAMA.groups for linear in group.layer.linears * group.count)
    assert counted["int8"] == pytest.approx(passes * 2.0 * maps * TOKENS, rel=1e-9)
    assert counted["bf16"] > 2.0 * (maps + LLAMA.vocab_size * LLAMA.hidden_size) * TOKENS


def test_what_depends_on_data_is_said_not_to_be_counted() -> None:
    options = {"method": "qlora", "max_length": TOKENS}
    told, silent = (
        [note for note in resolve_run(LLAMA, {**options, "quant_method": kind}).notes if "outliers" in note]
        for kind in ("bnb-8bit", "bnb-4bit")
    )
    assert (len(told), len(silent)) == (1, 0)


def test_fp8_leaves_attention_and_the_head_in_16_bits() -> None:
    run = run_of(method="full", fp8="te", gradient_checkpointing=False)
    counted = executed_by_dtype(LLAMA, run)
    maps = sum(linear.weight_params for group in LLAMA.groups for linear in group.layer.linears * group.count)
    assert counted["fp8"] == pytest.approx(6.0 * maps * TOKENS, rel=1e-9)
    assert counted["bf16"] > 6.0 * LLAMA.vocab_size * LLAMA.hidden_size * TOKENS


def test_gpus_of_a_job_share_the_flops() -> None:
    one, eight = run_of(), run_of(num_gpus=8, sharding="ddp")
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    alone = utilizations(1e14, executed_by_dtype(LLAMA, one), 1.0, one, target)
    together = utilizations(8e14, executed_by_dtype(LLAMA, eight), 1.0, eight, target)
    assert together == pytest.approx(alone)


def test_a_given_speed_is_held_against_the_peaks_of_what_multiplies() -> None:
    """60 TFLOP/s of required work is above what bf16 could do with all recomputed, not what int8 can."""
    (target,) = resolve_targets(["rtx-3090-24gb"], {})
    options = {"method": "qlora", "quant_method": "bnb-8bit", "max_length": TOKENS}
    question = Question(architecture=LLAMA, options=options, achieved_tflops=60)
    run = int8_run()
    executed = sum(executed_by_dtype(LLAMA, run).values())
    required = model_flops_of(LLAMA, run)
    assert executed / required * 60 > 71
    resolved = resolve_for(question, target)
    found = step_timing(question, resolved, target, job_factors(target, LLAMA, resolved.run, options))
    assert found.step_time_s.value == pytest.approx(model_flops_of(LLAMA, resolved.run) / 60e12)
