"""Case D: what pretraining costs and how long it takes."""

from __future__ import annotations

from known_cases.asking import Figures, markdown_table, told
from tunecast.catalogs.gpus import find_gpu
from tunecast.model.forecast import Forecast
from tunecast.model.units import TERA

MODEL = "meta-llama/Llama-3.1-405B"
TOKENS = "15.6T"
H100 = "h100-sxm5-80gb"
GPUS = 16000
USD_PER_GPU_HOUR = 2.0
CARDS = (H100, "a100-sxm4-80gb", "rtx-a6000-48gb", "v100-sxm2-32gb")
PUBLISHED_LAYOUT = {
    "num_gpus": 16128, "tp": 8, "pp": 18, "pp_interleave": 7, "sharding": "zero1", "max_length": 8192,
    "gradient_accumulation_steps": 18, "gradient_checkpointing": False,
}  # fmt: skip
"""Near "The Llama 3 Herd of Models" (arXiv 2407.21783), table 4: 18 even stages, so that 126 layers divide."""


def at(tflops: float, gpu: str = H100) -> Forecast:
    """The case at so many achieved TFLOP/s for each GPU."""
    return told(
        MODEL, gpu, method="full", num_gpus=GPUS, sharding="fsdp", tokens=TOKENS, achieved_tflops=tflops,
        usd_per_gpu_hour=USD_PER_GPU_HOUR, train_only=True, internode_gbps=400.0,
    )  # fmt: skip


def by_hand(tflops: float) -> float:
    """Days: 6 x parameters x tokens / (GPUs x achieved FLOP/s), with the rounded 405 billion."""
    return 6 * 405e9 * 15.6e12 / (GPUS * tflops * 1e12) / 86400


def speeds() -> str:
    """Days and money at both ends of the document's range."""
    rows = []
    for tflops in (380.0, 400.0):
        found = at(tflops)
        totals, cost = found.totals, found.cost_usd
        assert totals is not None
        assert cost is not None
        rows.append(
            [f"{tflops:.0f}", f"{found.mfu:.1%}", f"{by_hand(tflops):.1f}", f"{totals.days:.1f}",
             f"{totals.days / 70 - 1:+.1%}", f"{cost.value / 1e6:.1f}", f"{cost.value / 52e6 - 1:+.1%}"]
        )  # fmt: skip
    head = ["TFLOP/s of each H100", "MFU", "days by hand", "days", "to 70 days", "million USD", "to 52 million"]
    return markdown_table(head, rows)


def cards() -> str:
    """The same work on the other cards that the document names, at the same share of their peaks."""
    share = 380.0 / (find_gpu(H100).peaks["bf16"] / TERA)
    rows = []
    for gpu in CARDS:
        peaks = find_gpu(gpu).peaks
        peak = (peaks.get("bf16") or peaks["fp16"]) / TERA
        totals = at(share * peak, gpu).totals
        assert totals is not None
        rows.append(
            [gpu, f"{peak:.0f}", f"{share * peak:.0f}", f"{totals.days:,.0f}", f"{totals.gpu_hours / 1e6:,.1f}"]
        )
    return markdown_table(["GPU", "peak TFLOP/s", "38% of it", "days on 16,000", "million GPU-hours"], rows)


def from_operations() -> Figures:
    """The published layout without any given speed."""
    found = told(MODEL, H100, method="full", tokens=TOKENS, **PUBLISHED_LAYOUT)
    assert found.totals is not None
    reached = found.model_flops_per_step / found.step_time_s.value / found.run.num_gpus / TERA
    return {
        "operations_tflops": f"{reached:.0f}",
        "operations_days": f"{found.totals.days:.0f}",
        "operations_low": f"{found.totals.days * found.step_time_s.low / found.step_time_s.value:.0f}",
        "operations_high": f"{found.totals.days * found.step_time_s.high / found.step_time_s.value:.0f}",
        "operations_flops": f"{found.totals.model_flops:.2e}",
        "classic_flops": f"{found.totals.classic_flops:.2e}",
    }


def figures() -> Figures:
    """Everything that the page states."""
    return {"speeds": speeds(), "cards": cards(), **from_operations()}
