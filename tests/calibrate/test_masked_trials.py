"""Attention under a mask, and of wide heads, in a calibration: what runs, what it measures, what a fit makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunecast.calibrate.devices.protocol import Hardware, TrialSpec
from tunecast.calibrate.fit_trials import attention_operation
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.plan import LATER, calibration_plan
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.curve_names import curve_key
from tunecast.model.curves import Array
from tunecast.model.factors import FactorSet
from tunecast.model.operation import CHOSEN, EFFICIENT, MASKED
from tunecast.model.primitives_heavy import AttentionShape
from tunecast.model.priors import load_priors, prior_factors
from tunecast.model.run import Run
from tunecast.model.sdpa import with_others
from tunecast.model.stand_in import with_stand_ins

CARD = "h100-sxm5-80gb"
MOCK = f"{CARD}#7"


def hardware(mock: str) -> Hardware:
    return open_mock(f"mock:{mock}").hardware()


def kernels_in(plan: tuple[TrialSpec, ...]) -> set[str]:
    return {spec.params["kernel"] for spec in plan if spec.bench == "masked"}


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_every_card_runs_them_and_those_that_may_choose_also_what_they_choose(mode: str) -> None:
    assert kernels_in(calibration_plan(hardware("a100-sxm4-80gb"), mode)) == {EFFICIENT}
    assert kernels_in(calibration_plan(hardware("rtx-4090-24gb"), mode)) == {EFFICIENT}
    assert kernels_in(calibration_plan(hardware(CARD), mode)) == {EFFICIENT, CHOSEN}
    assert "masked" in LATER, "after the device work that every model has"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_trial_attends_as_written_out_by_hand(direction: str, masked: bool) -> None:
    """On this processor, in fp32, the mask being the causal one: softmax of scaled scores over what came before."""
    torch = pytest.importorskip("torch")
    from tunecast.calibrate.bench import math_ops
    from tunecast.calibrate.devices.cpu import CpuDevice

    made: list[Any] = []

    def remembered(backend: Any, *shape: int, dtype: str, requires_grad: bool) -> Any:
        made.append(torch.randn(*shape, requires_grad=requires_grad))
        return made[-1]

    params = {"dtype": "fp32", "masked": masked, "kernel": EFFICIENT, "pass": direction}
    batch, length, heads, head_dim = shape = (2, 12, 3, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_ops, "normal", remembered)
        patch.setattr(torch, "randn_like", torch.ones_like)
        backward = direction == "backward"
        call = math_ops._attention_call((batch, length, heads, heads, head_dim), params, backward, CpuDevice().backend)
    found = call()
    q, k, v = (x.detach().view(*shape).transpose(1, 2).requires_grad_() for x in made)
    scores = (q @ k.transpose(2, 3)) / head_dim**0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    if not backward:
        assert torch.allclose(found, out, atol=1e-5)
        return
    out.sum().backward()
    for ours, theirs in zip(found, (q, k, v), strict=True):
        assert torch.allclose(ours, theirs.grad, atol=1e-5)


@pytest.mark.parametrize("masked", [True, False])
def test_its_work_is_that_of_the_forecast(masked: bool) -> None:
    """All pairs under a mask, half of them without, counted by the same rule as a model's attention."""
    shape = AttentionShape(batch=2, heads=16, kv_heads=16, length=512, head_dim=128, masked=masked)
    params = {"batch": 2, "heads": 16, "kv_heads": 16, "length": 512, "head_dim": 128, "dtype": "bf16"}
    trial = attention_operation({**params, "masked": masked, "kernel": EFFICIENT, "pass": "forward"})
    assert trial.flops == shape.flops
    assert curve_key(trial) == f"attention-{MASKED if masked else EFFICIENT}.bf16.forward"


@pytest.fixture(scope="module")
def factors(calibrated: Callable[..., FactorSet]) -> FactorSet:
    """Curves of attention that a quick calibration of a simulated card gives."""
    return calibrated(MOCK, "memory", "gemm", "attention", "masked")


UNSEEN = [(4, 24, 700, 128), (2, 40, 1500, 128), (8, 16, 384, 64), (1, 16, 3000, 256), (3, 32, 2500, 128)]
LATENT = [(1, 16, 1500, 192), (4, 16, 700, 192), (1, 128, 4096, 192), (2, 32, 1024, 192)]


@pytest.mark.parametrize(
    ("kernel", "masked", "unseen", "median"),
    [(EFFICIENT, True, UNSEEN, 0.08), (CHOSEN, True, UNSEEN, 0.08), (EFFICIENT, False, LATENT, 0.1)],
    ids=["mask", "chosen", "latent"],
)
def test_lengths_never_measured_are_forecast_by_their_own_curve(
    factors: FactorSet,
    log_errors: Callable[..., Array],
    kernel: str,
    masked: bool,
    unseen: list[tuple[int, int, int, int]],
    median: float,
) -> None:
    """Against what the simulated card takes for them; of latent attention four trials set the rate alone."""
    alike = {"dtype": "bf16", "masked": masked, "kernel": kernel}
    trials = [
        {
            **alike,
            "batch": batch,
            "heads": heads,
            "kv_heads": heads,
            "length": length,
            "head_dim": head_dim,
            "pass": way,
        }
        for batch, heads, length, head_dim in unseen
        for way in ("forward", "backward")
    ]
    error = log_errors(factors, MOCK, "masked", trials)
    assert np.median(error) < median
    assert np.max(error) < 0.25


def test_a_run_goes_by_what_its_own_pytorch_chooses(factors: FactorSet) -> None:
    """Where cuDNN is asked first by the curve of that; else, and in records without any, by the kernel's own."""
    beliefs, name = load_priors()["beliefs"], f"attention-{MASKED}.bf16.forward"
    chosen = factors.curves[f"attention-{CHOSEN}.bf16.forward"]
    run = Run(method="lora", sdpa_cudnn=True)
    assert with_others(factors, beliefs, run).curves[name] is chosen
    assert with_others(factors, beliefs, replace(run, sdpa_cudnn=False)).curves[name] is factors.curves[name]
    old = replace(factors, curves={key: curve for key, curve in factors.curves.items() if key.startswith("attention.")})
    assumed = with_others(old, beliefs, run).curves[name]
    assert assumed.log_sd > factors.curves[name].log_sd


def test_a_dtype_that_was_not_measured_follows_the_same_kernel(factors: FactorSet) -> None:
    """fp16 under a mask by what bf16 took under one, not by the flash kernel."""
    gpu = load_gpus()[CARD]
    run = Run(method="lora", precision="fp16-autocast")
    found = with_stand_ins(with_others(factors, load_priors()["beliefs"], run, gpu), prior_factors(gpu, run), run,
                           load_priors()["beliefs"])  # fmt: skip
    name = f"attention-{MASKED}.{{}}.forward"
    measured, made = (found.curves[name.format(dtype)].params["flops_per_s"] for dtype in ("bf16", "fp16"))
    assert made == pytest.approx(measured)
