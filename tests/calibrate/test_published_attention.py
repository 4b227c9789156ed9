"""FlashAttention-2's rates against published ones of cards whose tensor cores are slower than an A100's.

None of these rates went into a belief or a fit: what an A100 reaches did, and the counts of operations.
"""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.calibrate.priors_problem import beliefs
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.curves import columns, seconds
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.priors import datasheet_factors
from tunecast.model.product_share import attention_gain

A5000, TI_5070, RTX_5090 = "rtx-a5000-24gb", "rtx-5070-ti-16gb", "rtx-5090-32gb"
PUBLISHED = [
    # flash_attn, not causal, forward 169.28 and backward 124.57: apache/tvm, tl_doc/flash_perf.md
    ("rtx-4090-24gb", 2048, 128, 7 / (2 / 169.28 + 5 / 124.57)),
    # the same, causal
    ("rtx-4090-24gb", 2048, 128, 7 / (2 / 151.19 + 5 / 99.23)),
    # flash_attn's own benchmark, forward and backward, not causal: gpu-mode/ring-attention issue 10
    (A5000, 8192, 64, 78.64),
    # 51.43 ms forward, 131.34 ms backward, not causal: Dao-AILab/flash-attention issue 1981. It does not tell heads:
    # 16 would be half of the datasheet's peak and 64 twice of it
    (TI_5070, 16384, 128, 14 * 32 * 16384**2 * 128 / (51.43e-3 + 131.34e-3) / 1e12),
    # flash-attn forward alone, 400 W of 575: gau-nernst/learn-cuda, 07_attention
    (RTX_5090, 8192, 128, 190.58),
]


def forecast(gpu: str, length: int, head_dim: int, believed: dict[str, Any]) -> float:
    """TFLOP/s of the card's attention curve, at the share of the peak that FlashAttention-2 states for an A100."""
    flops = 1e15
    shape = (1, 32, 32, length, length, head_dim)
    work = Operation(name="attention", kind=Kind.ATTENTION, phase=Phase.FORWARD, dtype="bf16", shape=shape, flops=flops)
    curve = datasheet_factors(load_gpus()[gpu], believed).curves["attention.bf16.forward"]
    share = float(believed["efficiency"]["attention"]["value"])
    return float(share * flops / seconds(curve, columns([work])).seconds[0] / 1e12)


@pytest.mark.parametrize(("gpu", "length", "head_dim", "published"), PUBLISHED)
def test_forecast_rates_are_near_published_ones(gpu: str, length: int, head_dim: int, published: float) -> None:
    """Within a fifth each, and nearer than with the share of the peak that an A100 reaches."""
    alike = {name: belief for name, belief in beliefs().items() if name != "attention_outside_products"}
    found, before = (forecast(gpu, length, head_dim, believed) for believed in (beliefs(), alike))
    assert found == pytest.approx(published, rel=0.2)
    assert abs(found - published) < abs(before - published)


def test_gains_by_hand() -> None:
    """Clocks of a score: 2 / 16 + 6 / 64 of an A100's processor beside 1,792 / 2,048 of products, a quarter; elsewhere
    2 / 16 + 6 / 128 beside 1,792 / 1,024, and beside 1,792 / 512 where GeForces have half the rate."""
    whole, half = (0.171875 / (1792 / rate) for rate in (1024, 512))
    for gpu in ("a10-24gb", "l40s-48gb", A5000, "rtx-pro-6000-blackwell-ws-96gb"):
        assert attention_gain(load_gpus()[gpu], "bf16", beliefs()) == pytest.approx(1.25 / (1 + whole))
    for gpu in ("rtx-3090-24gb", "rtx-4090-24gb", RTX_5090):
        assert attention_gain(load_gpus()[gpu], "bf16", beliefs()) == pytest.approx(1.25 / (1 + half))


@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "a30-24gb", "t4-16gb", "v100-sxm2-16gb", "h100-sxm5-80gb",
                                 "h20-96gb", "b200-sxm-180gb", "mi300x-192gb"])  # fmt: skip
def test_cards_like_an_a100_with_other_kernels_or_figures_of_their_own_have_none(gpu: str) -> None:
    for dtype in ("bf16", "fp16"):
        assert attention_gain(load_gpus()[gpu], dtype, beliefs()) == 1.0


def test_other_dtypes_and_older_priors_have_none() -> None:
    """FlashAttention-2 takes 16-bit numbers alone."""
    gpu, older = load_gpus()["rtx-4090-24gb"], dict(beliefs())
    assert {attention_gain(gpu, dtype, beliefs()) for dtype in ("fp32", "fp8", "int8")} == {1.0}
    del older["attention_outside_products"]
    assert attention_gain(gpu, "bf16", older) == 1.0
