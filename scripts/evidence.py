"""What the evidence on a CPU and on a GPU share: held-out runs, one row of the comparison, and its figures.

A held-out run is what a user would type: a name, a model, options. Forecast and measurement have one shape
(``tunecast estimate --json`` and ``tunecast measure --json``), so that a row subtracts one from the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "results" / "records"
AGAIN = "-again"
"""End of the name of a run that is measured a second time, for the noise floor."""


class HeldOut(NamedTuple):
    """One run that the calibration has not: its options as typed after ``tunecast measure MODEL``."""

    name: str
    model: str
    options: str


CPU_RUNS: tuple[HeldOut, ...] = (
    HeldOut("smollm2-135m-lora-ck", "HuggingFaceTB/SmolLM2-135M", "--method lora --lora-r 16 --max-length 256"),
    HeldOut(
        "smollm2-135m-qlora-b2",
        "HuggingFaceTB/SmolLM2-135M",
        "--method qlora --lora-r 8 --max-length 320 --per-device-train-batch-size 2 --no-gradient-checkpointing",
    ),
    HeldOut(
        "smollm2-360m-lora-b2",
        "HuggingFaceTB/SmolLM2-360M",
        "--method lora --lora-r 32 --max-length 200 --per-device-train-batch-size 2 --no-gradient-checkpointing",
    ),
    HeldOut("qwen2.5-0.5b-qlora-ck", "Qwen/Qwen2.5-0.5B", "--method qlora --lora-r 16 --max-length 384"),
    HeldOut(
        "qwen2.5-0.5b-lora-qv",
        "Qwen/Qwen2.5-0.5B",
        "--method lora --lora-r 16 --lora-target-modules q_proj,v_proj --max-length 512 --no-gradient-checkpointing",
    ),
    HeldOut(
        "qwen3-0.6b-lora-ga2",
        "Qwen/Qwen3-0.6B",
        "--method lora --lora-r 16 --max-length 160 --gradient-accumulation-steps 2",
    ),
    HeldOut(
        "tinyllama-1.1b-lora-ck", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "--method lora --lora-r 16 --max-length 384"
    ),
    HeldOut(
        "tinyllama-1.1b-qlora",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "--method qlora --lora-r 16 --max-length 320 --no-gradient-checkpointing",
    ),
    HeldOut("llama-3.2-1b-lora-ck", "meta-llama/Llama-3.2-1B", "--method lora --lora-r 16 --max-length 320"),
    HeldOut("llama-3.2-1b-qlora-ck", "meta-llama/Llama-3.2-1B", "--method qlora --lora-r 64 --max-length 192"),
)


def _gpu(name: str, model: str, shape: str, *, checkpoint: bool = True) -> HeldOut:
    """A run on a GPU; `shape` is method, rank (0 for full), length, batch, and further options."""
    method, rank, length, batch, *more = shape.split()
    adapters = "" if method == "full" else f" --lora-r {rank}"
    checkpointing = "--gradient-checkpointing" if checkpoint else "--no-gradient-checkpointing"
    options = f"--method {method}{adapters} --max-length {length} --per-device-train-batch-size {batch} {checkpointing}"
    return HeldOut(name, model, " ".join((options, *more)))


LLAMA_8B, LLAMA_70B, QWEN_32B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen2.5-32B"
QKVO = "--lora-target-modules q_proj,k_proj,v_proj,o_proj"

GPU_RUNS: tuple[HeldOut, ...] = (
    _gpu("qwen2.5-0.5b-lora-512", "Qwen/Qwen2.5-0.5B", "lora 16 512 1", checkpoint=False),
    _gpu("llama-3.2-1b-full-1024x4", "meta-llama/Llama-3.2-1B", "full 0 1024 4"),
    _gpu("llama-3.1-8b-qlora-2048", LLAMA_8B, "qlora 16 2048 1"),
    _gpu("llama-3.1-8b-lora-2048", LLAMA_8B, "lora 16 2048 1"),
    _gpu("llama-3.2-1b-lora-512x16", "meta-llama/Llama-3.2-1B", "lora 32 512 16", checkpoint=False),
    _gpu("qwen2.5-1.5b-qlora-1024x8", "Qwen/Qwen2.5-1.5B", "qlora 8 1024 8", checkpoint=False),
    _gpu("qwen3-0.6b-full-4096x2", "Qwen/Qwen3-0.6B", "full 0 4096 2"),
    _gpu("mistral-7b-lora-4096x4", "mistralai/Mistral-7B-v0.1", f"lora 16 4096 4 {QKVO}"),
    _gpu("llama-3.1-8b-lora-512x8", LLAMA_8B, "lora 64 512 8", checkpoint=False),
    _gpu("llama-3.1-8b-qlora-1024x4", LLAMA_8B, "qlora 16 1024 4", checkpoint=False),
    _gpu("llama-3.1-8b-qlora-8192", LLAMA_8B, "qlora 16 8192 1"),
    _gpu("qwen2.5-14b-lora-2048", "Qwen/Qwen2.5-14B", "lora 16 2048 1"),
    _gpu("qwen2.5-3b-full-1024x2", "Qwen/Qwen2.5-3B", "full 0 1024 2", checkpoint=False),
    _gpu("llama-3.1-8b-lora-16384", LLAMA_8B, "lora 16 16384 1"),
    _gpu(f"llama-3.1-8b-qlora-2048{AGAIN}", LLAMA_8B, "qlora 16 2048 1"),
    _gpu("qwen2.5-32b-qlora-2048", QWEN_32B, "qlora 16 2048 1"),
    _gpu("llama-3.1-70b-qlora-1024", LLAMA_70B, "qlora 16 1024 1"),
    _gpu("qwen2.5-32b-lora-1024x2", QWEN_32B, "lora 16 1024 2"),
    _gpu("qwen3-14b-qlora-4096x2", "Qwen/Qwen3-14B", "qlora 32 4096 2"),
    _gpu("llama-3.1-8b-full-1024x2", LLAMA_8B, "full 0 1024 2"),
    _gpu("llama-3.1-8b-lora-1024-accumulated", LLAMA_8B, "lora 16 1024 2 --gradient-accumulation-steps 4"),
    _gpu("llama-3.1-70b-qlora-4096", LLAMA_70B, "qlora 16 4096 1"),
    _gpu("llama-3.1-70b-qlora-1024x4", LLAMA_70B, "qlora 8 1024 4"),
    _gpu(f"qwen2.5-0.5b-lora-512{AGAIN}", "Qwen/Qwen2.5-0.5B", "lora 16 512 1", checkpoint=False),
    _gpu("llama-3.1-70b-lora-512", LLAMA_70B, "lora 16 512 1"),
)
"""Small and varied first, then 8B at several lengths and batches, 14B, 32B, 70B: the list may be cut off anywhere.
The last one holds 141 GB of weights: on most cards its answer is that it does not fit."""


def runs_for(device: str) -> tuple[HeldOut, ...]:
    """The list for a device: small models on a CPU."""
    return CPU_RUNS if device == "cpu" else GPU_RUNS


def options_of(text: str) -> dict[str, Any]:
    """Typed options as the Python functions take them: ``--lora-r 16 --no-x`` gives ``{"lora_r": 16, "x": False}``."""
    options: dict[str, Any] = {}
    words = text.split()
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        value = words[index + 1] if index + 1 < len(words) else "--"
        name = word.removeprefix("--").replace("-", "_")
        if value.startswith("--"):
            options[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            options[name] = int(value) if value.isdigit() else value
    return options


def view(answer: Any, name: str) -> float | None:
    """One memory view in GiB; None where the device has no such view."""
    found = answer["memory"][name]
    return None if found is None else float(found["value"])


def view_error(real: Any, forecast: Any, name: str) -> float | None:
    """Forecast over measured, less one."""
    measured, guess = view(real, name), view(forecast, name)
    return None if measured is None or guess is None else guess / measured - 1.0


def row(run: HeldOut, real: Any, forecast: Any, again: Sequence[Any] = ()) -> dict[str, Any]:
    """One line of the table; ``noise`` is the largest difference between the same run measured twice."""
    step, guess = real["step_time_s"]["value"], forecast["step_time_s"]
    repeated = [other["step_time_s"]["value"] for other in again]
    return {
        "run": run.name,
        "model": run.model,
        "options": run.options,
        "measured_s": step,
        "forecast_s": guess,
        "error": guess["value"] / step - 1.0,
        "inside_interval": guess["low"] <= step <= guess["high"],
        "measured_again_s": repeated,
        "noise": max((other / step - 1.0 for other in repeated), key=abs, default=None),
        "allocated_gib": view(real, "allocated_gib"),
        "allocated_error": view_error(real, forecast, "allocated_gib"),
        "process_gib": view(real, "process_gib"),
        "process_error": view_error(real, forecast, "process_gib"),
    }


def sizes(rows: list[dict[str, Any]], name: str) -> list[float]:
    """Absolute values of one field, rows without it left out."""
    return [abs(r[name]) for r in rows if r[name] is not None]


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of the whole table; those that no row has are left out."""
    errors = sizes(rows, "error")
    figures = {
        "runs": len(rows),
        "median_abs_error": statistics.median(errors),
        "worst_abs_error": max(errors),
        "bias": statistics.median(r["error"] for r in rows),
        "inside_80_interval": sum(r["inside_interval"] for r in rows) / len(rows),
    }
    named = {
        "noise": ("noise_floor_median", "noise_floor_worst"),
        "allocated_error": ("allocated_median_abs_error", "allocated_worst_abs_error"),
        "process_error": ("process_median_abs_error", "process_worst_abs_error"),
    }
    for field, (middle, worst) in named.items():
        found = sizes(rows, field)
        if found:
            figures |= {middle: statistics.median(found), worst: max(found)}
    return figures
