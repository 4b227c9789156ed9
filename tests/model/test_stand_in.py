"""What a record did not measure in one dtype follows what it measured in another, by the ratio of the priors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import load_architecture
from tunecast.model.factors import Curve, FactorSet
from tunecast.model.priors import load_priors, prior_factors
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.stand_in import with_stand_ins

GPU = load_gpus()["rtx-3090-24gb"]
PRIOR = prior_factors(GPU)
BELIEFS = load_priors()["beliefs"]
RATES = {"gemm.bf16": 50e12, "attention.bf16.forward": 30e12, "attention.bf16.backward": 20e12}
RECORD = FactorSet(
    gpu=GPU.id,
    curves={
        name: Curve(form="gemm" if name.startswith("gemm") else "attention", log_sd=0.03, origin="measured:x",
                    params={"flops_per_s": rate, "t0_s": 3e-6, "gp_sd": 0.04}, residuals=((1.0, 1.0, 1.0, 0.0, 0.2),))
        for name, rate in RATES.items()
    },
    factors={},
    step_log_sd=0.02,
)  # fmt: skip


def run_of(**options: str) -> Run:
    return resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), options).run


def test_rates_of_the_other_dtypes_keep_the_ratio_of_the_priors() -> None:
    found = with_stand_ins(RECORD, PRIOR, None, BELIEFS).curves
    prior = {name: PRIOR.curves[name].params["flops_per_s"] for name in ("gemm.int8", "gemm.fp16", "gemm.bf16")}
    for name in ("gemm.int8", "gemm.fp16"):
        assert found[name].params["flops_per_s"] == pytest.approx(50e12 * prior[name] / prior["gemm.bf16"])
        assert found[name].params["t0_s"] == 3e-6
        assert (found[name].origin, found[name].residuals) == ("assumed", ())
    wide, wider = BELIEFS["unmeasured_dtype"]["log_sd"], BELIEFS["int8_products"]["log_sd"]
    assert found["gemm.fp16"].log_sd == pytest.approx(math.hypot(0.03, wide))
    assert found["gemm.int8"].log_sd == pytest.approx(math.hypot(0.03, wide, wider))
    backward, forward = (found[f"attention.fp16.{way}"].params["flops_per_s"] for way in ("backward", "forward"))
    assert backward / forward == pytest.approx(20 / 30)


def test_what_was_measured_stays_and_dtypes_without_a_peak_stay_unknown() -> None:
    measured = replace(RECORD.curves["gemm.bf16"], params={"flops_per_s": 7e12})
    record = replace(RECORD, curves={**RECORD.curves, "gemm.fp16": measured})
    found = with_stand_ins(record, PRIOR, None, BELIEFS).curves
    assert found["gemm.fp16"] == measured
    assert found["gemm.bf16"] == RECORD.curves["gemm.bf16"]
    assert "gemm.fp8" not in found  # an RTX 3090 has none


def test_a_run_that_uses_one_says_so_and_another_does_not() -> None:
    half, eight, usual = (
        with_stand_ins(RECORD, PRIOR, run_of(**options), BELIEFS).notes
        for options in (
            {"method": "lora", "precision": "fp16-autocast"},
            {"method": "qlora", "quant_method": "bnb-8bit"},
            {"method": "lora"},
        )
    )
    assert usual == ()
    assert any("gemm in fp16" in note and "bf16" in note for note in half)
    assert any("gemm in int8" in note and "attention" not in note for note in eight)
