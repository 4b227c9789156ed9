"""Case C: what mixed precision, checkpointing and sharding are said to bring."""

from __future__ import annotations

import itertools
from typing import Any

from known_cases.asking import Figures, change, holds, markdown_table, memory_gib, times, told, verdict
from tunecast.catalogs.gpus import find_gpu
from tunecast.model.exposed import EXPOSED
from tunecast.model.forecast import Forecast
from tunecast.model.units import TERA
from tunecast.sweeping import Ask, forecast_of

LLAMA = "meta-llama/Llama-2-70b-hf"
EIGHT_B = "meta-llama/Llama-3.1-8B"
ONE_B = "meta-llama/Llama-3.2-1B"
H200 = "h200-sxm5-141gb"
A100 = "a100-sxm4-80gb"
PRECISION_CARDS = ("t4-16gb", "v100-sxm2-32gb", "rtx-3090-24gb", A100, "h100-sxm5-80gb")
FP32 = {"precision": "fp32", "dtype": "fp32"}
CHECKPOINTED = tuple(
    (model, method, batch, length)
    for model, method in itertools.product((ONE_B, EIGHT_B), ("full", "lora", "qlora"))
    for batch, length in ((1, 2048), (4, 2048), (16, 2048), (4, 8192))
)
MICRO_BATCHES = (1, 2, 4, 8, 16)
THREE_B = "meta-llama/Llama-3.2-3B"
FSDP_RUNS = ((1, 1024), (1, 1536), (1, 2048), (4, 1024), (8, 1024), (16, 1024))
"""(batch, tokens) of each card."""


def pretraining() -> Figures:
    """Two trillion tokens of Llama 2 70B, by the classic counts and from the operations."""
    totals = told(LLAMA, A100, method="full", tokens="2T", max_length=4096, num_gpus=8, sharding="fsdp").totals
    assert totals is not None
    return {
        "classic": f"{totals.classic_flops:.2e}",
        "recomputed": f"{totals.classic_flops_with_recompute:.2e}",
        "required": f"{totals.model_flops:.2e}",
        "executed": f"{totals.executed_flops:.2e}",
        "tokens_for_1e24": f"{1e24 / totals.classic_flops * 2:.1f}",
    }


def precision() -> str:
    """Speed in 16 bits over speed in fp32, beside the ratios of the peaks."""
    rows = []
    for gpu in PRECISION_CARDS:
        peaks = find_gpu(gpu).peaks
        half = peaks.get("bf16") or peaks["fp16"]
        gains = []
        for method, batch in (("lora", 1), ("full", 4)):
            run = {"method": method, "max_length": 2048, "per_device_train_batch_size": batch}
            mixed, single = told(EIGHT_B, gpu, **run), told(EIGHT_B, gpu, **run, **FP32)
            gains.append(mixed.tokens_per_s.value / single.tokens_per_s.value)
        lora, whole = (memory_gib(told(EIGHT_B, gpu, method="lora", max_length=2048, **more)) for more in ({}, FP32))
        tf32 = peaks.get("tf32")
        rows.append(
            [gpu, f"{half / TERA:.0f} / {peaks['fp32'] / TERA:.1f}", times(half / peaks["fp32"]),
             times(half / tf32) if tf32 else "no TF32", *map(times, gains), f"{whole:.1f} → {lora:.1f}"]
        )  # fmt: skip
    head = ["GPU", "peak TFLOP/s, 16 bits / fp32", "ratio", "over TF32", "LoRA, 1 × 2,048", "full, 4 × 2,048",
            "GiB of that LoRA, fp32 → 16 bits"]  # fmt: skip
    return markdown_table(head, rows)


def with_and_without(model: str, method: str, batch: int, length: int, **more: Any) -> tuple[Forecast, Forecast]:
    """The run that keeps its activations and the one that recomputes them; a chunked loss, lest logits hide both."""
    run = {"method": method, "max_length": length, "per_device_train_batch_size": batch, "loss_type": "chunked_nll"}
    plain = told(model, H200, **run, gradient_checkpointing=False)
    return plain, told(model, H200, **run, gradient_checkpointing=True, **more)


def claim_holds(plain: Forecast, checkpointed: Forecast) -> bool:
    """About 70% less memory, or more, for at most 25% more time."""
    saved = 1 - memory_gib(checkpointed) / memory_gib(plain)
    added = checkpointed.step_time_s.value / plain.step_time_s.value - 1
    return saved >= 0.65 and added <= 0.25


def checkpointing() -> str:
    """Memory saved and time added, over runs."""
    rows = []
    for model, method, batch, length in CHECKPOINTED:
        plain, after = with_and_without(model, method, batch, length)
        rows.append(
            [model.split("/")[1], method, f"{batch} × {length:,}", f"{memory_gib(plain):.0f}",
             verdict(plain), f"{memory_gib(after):.0f}", change(memory_gib(after), memory_gib(plain)),
             change(after.step_time_s.value, plain.step_time_s.value), holds(claim_holds(plain, after))]
        )  # fmt: skip
    head = ["model", "method", "batch × tokens", "GiB without", "fits 141 GB", "GiB with", "memory", "time",
            "the claim holds"]  # fmt: skip
    return markdown_table(head, rows)


def selective() -> str:
    """Every second layer, or attention's and every other product's results kept: less time, less saved."""
    rows = []
    ways: dict[str, dict[str, Any]] = {
        "every layer": {},
        "every second layer": {"checkpoint_every": 2},
        "selective by operation": {"checkpoint_keeps_ops": True},
    }
    for method in ("full", "lora"):
        for name, more in ways.items():
            plain, after = with_and_without(EIGHT_B, method, 4, 2048, **more)
            rows.append(
                [method, name, change(memory_gib(after), memory_gib(plain)),
                 change(after.step_time_s.value, plain.step_time_s.value)]
            )  # fmt: skip
    return markdown_table(["method", "what is checkpointed", "memory", "time"], rows)


def sharded(num_gpus: int, sharding: str | None, batch: int, gpu: str = A100, **more: Any) -> Forecast:
    """A full fine-tuning of 8B on several cards."""
    spread = {"sharding": sharding} if sharding else {}
    run = {"method": "full", "max_length": 1024, "per_device_train_batch_size": batch, **more}
    return told(EIGHT_B, gpu, num_gpus=num_gpus, **spread, **run)


def deepspeed() -> str:
    """Eight cards under ZeRO against one card, and against the same eight under DDP."""
    rows = []
    for batch in MICRO_BATCHES:
        one, ddp, zero = sharded(1, None, batch), sharded(8, "ddp", batch), sharded(8, "zero3", batch)
        speeds = [f.tokens_per_s.value for f in (one, ddp, zero)]
        rows.append(
            [f"{batch} × 1,024", verdict(one), verdict(ddp), verdict(zero),
             times(speeds[1] / speeds[0]), times(speeds[2] / speeds[0]), f"{speeds[2] / speeds[1]:.2f}×"]
        )  # fmt: skip
    head = [
        "batch × tokens",
        "1 card",
        "8, DDP",
        "8, ZeRO-3",
        "DDP over 1",
        "ZeRO-3 over 1",
        "ZeRO-3 over DDP",
    ]
    return markdown_table(head, rows)


def fsdp() -> Figures:
    """FSDP against DDP on the same cards and batch, where DDP fits."""
    rows, gains = [], {}
    for batch, length in FSDP_RUNS:
        run = {"method": "full", "max_length": length, "per_device_train_batch_size": batch, "num_gpus": 8}
        ddp, sharded_run = (told(THREE_B, A100, sharding=sharding, **run) for sharding in ("ddp", "fsdp"))
        gain = sharded_run.tokens_per_s.value / ddp.tokens_per_s.value
        gains[f"{batch} × {length:,} tokens"] = gain
        rows.append(
            [f"{batch} × {length:,}", verdict(ddp), change(gain, 1), holds(within(gain)),
             change(memory_gib(sharded_run), memory_gib(ddp))]
        )  # fmt: skip
    table = markdown_table(["batch × tokens", "DDP fits", "speed", "15 to 20%", "memory"], rows)
    return {"fsdp": table, "fsdp_where": where(gains)}


def within(gain: float) -> bool:
    """Between 15 and 20%, as rounded figures are."""
    return 1.145 <= gain < 1.205


def where(gains: dict[str, float]) -> str:
    """The runs at which the claim is true, or between which it is."""
    held = [name for name, gain in gains.items() if within(gain)]
    if held:
        return f"True at {' and '.join(held)}"
    above = [name for name, gain in gains.items() if gain >= 1.205]
    below = [name for name, gain in gains.items() if gain < 1.145]
    if above and below:
        return f"True somewhere between {above[-1]} (more) and {below[0]} (less)"
    return f"True at none of these (all {'more' if above else 'less'})"


def hidden_communication(gpu: str, num_gpus: int, length: int, **more: Any) -> float:
    """How much faster FSDP is when all of its communication hides behind the computation."""
    run = {"method": "full", "max_length": length, "num_gpus": num_gpus, "sharding": "fsdp", **more}
    ask = Ask(model=EIGHT_B, gpu=gpu, options=run)
    plain = forecast_of(ask, {})
    hidden = forecast_of(ask, {}, {EXPOSED: 0.0})
    return plain.step_time_s.value / hidden.step_time_s.value - 1


def yafsdp() -> str:
    """Its aim, all communication hidden, on links of several speeds."""
    rows = []
    jobs: tuple[tuple[str, str, int, dict[str, float]], ...] = (
        ("8 A100, NVLink", A100, 8, {}),
        ("16 A100, 400 Gbit/s between machines", A100, 16, {"internode_gbps": 400.0}),
        ("16 A100, 100 Gbit/s", A100, 16, {"internode_gbps": 100.0}),
        ("8 L40S, PCIe", "l40s-48gb", 8, {}),
    )
    for name, gpu, count, more in jobs:
        gains = [hidden_communication(gpu, count, length, **more) for length in (1024, 2048, 4096, 8192)]
        cells = [f"{gain:+.0%}" + (" *" if 0.10 <= gain <= 0.25 else "") for gain in gains]
        rows.append([name, *cells])
    return markdown_table(["job", "1,024 tokens per GPU", "2,048", "4,096", "8,192"], rows)


def figures() -> Figures:
    """Everything that the page states."""
    return {
        **pretraining(), "precision": precision(), "checkpointing": checkpointing(), "selective": selective(),
        "deepspeed": deepspeed(), **fsdp(), "yafsdp": yafsdp(),
    }  # fmt: skip
