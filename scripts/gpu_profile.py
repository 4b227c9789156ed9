#!/usr/bin/env python3
"""Which kernels a few training steps run on a GPU, and what their operators cost the host: for understanding alone.

    python scripts/gpu_profile.py DIR [--device cuda:0]

One JSON per run: seconds of one step and of issuing it, without the profiler; then, of a profiled one, every kernel
with its count and microseconds, and the operators that kept the host longest. Nothing is fitted to these files. The
runs are neither of the calibration nor of those that judge it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from evidence import options_of

from tunecast.api import opened
from tunecast.asked import read_asked
from tunecast.measurement import resolved_on
from tunecast.model.architecture import Architecture

WARMUP_STEPS = 4
MOST_OPERATORS = 60


class Profiled(NamedTuple):
    """A run and how many of its model's layers are taken."""

    name: str
    model: str
    layers: int
    options: str


GPU_RUNS = (
    Profiled("llama8b-8-lora-ck-3072", "meta-llama/Llama-3.1-8B", 8,
             "--method lora --lora-r 16 --max-length 3072 --per-device-train-batch-size 1 --gradient-checkpointing"),
    Profiled("llama8b-8-qlora-ck-1536", "meta-llama/Llama-3.1-8B", 8,
             "--method qlora --lora-r 16 --max-length 1536 --per-device-train-batch-size 1 --gradient-checkpointing"),
    Profiled("llama70b-1-lora-ck-2048", "meta-llama/Llama-3.1-70B", 1,
             "--method lora --lora-r 16 --max-length 2048 --per-device-train-batch-size 1 --gradient-checkpointing"),
    Profiled("llama70b-4-lora-ck-2048", "meta-llama/Llama-3.1-70B", 4,
             "--method lora --lora-r 16 --max-length 2048 --per-device-train-batch-size 1 --gradient-checkpointing"),
    Profiled("llama1b-full-2048x2", "meta-llama/Llama-3.2-1B", 16,
             "--method full --max-length 2048 --per-device-train-batch-size 2 --gradient-checkpointing"),
    Profiled("qwen0.5b-lora-256", "Qwen/Qwen2.5-0.5B", 24,
             "--method lora --lora-r 16 --max-length 256 --per-device-train-batch-size 1 --no-gradient-checkpointing"),
)  # fmt: skip
"""Among them one layer of 8,192 and four: the one of a calibration took longer for each pass than those of a whole 70B
did (docs/method.md, Two clocks)."""
CPU_RUNS = (
    Profiled("smollm2-135m-2-lora-64", "HuggingFaceTB/SmolLM2-135M", 2,
             "--method lora --lora-r 16 --max-length 64 --per-device-train-batch-size 1 --gradient-checkpointing"),
)  # fmt: skip


def cut(architecture: Architecture, layers: int) -> Architecture:
    """The model with so many of its layers, which are all alike."""
    (group,) = architecture.groups
    return replace(architecture, groups=(replace(group, count=layers),))


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Microseconds in which at least one kernel ran."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def tables(events: Iterable[Any]) -> dict[str, Any]:
    """Kernels and operators by name: count and microseconds, longest first."""
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    operators: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    spans = []
    for event in events:
        on_device = str(event.device_type).endswith("CUDA")
        found = (kernels if on_device else operators)[event.name]
        found[0] += 1
        found[1] += event.time_range.elapsed_us() if on_device else event.self_cpu_time_total
        if on_device:
            spans.append((event.time_range.start, event.time_range.end))

    def longest(table: dict[str, list[float]]) -> list[list[Any]]:
        return sorted(([name, *found] for name, found in table.items()), key=lambda row: -row[2])

    span_us = max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0
    return {"busy_us": busy_us(spans), "span_us": span_us, "kernels": longest(kernels),
            "ops": longest(operators)[:MOST_OPERATORS]}  # fmt: skip


def profiled(device: Any, run: Profiled) -> dict[str, Any]:
    """One step timed alone, the next one under the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from tunecast.calibrate.steps import prepare_training

    asked = read_asked(run.model, options_of(run.options))
    training = prepare_training(cut(asked.architecture, run.layers), resolved_on(device, asked).run, device.id)
    for _ in range(WARMUP_STEPS):
        training.step()
    on_card = device.id.startswith("cuda")
    wait: Callable[[], None] = torch.cuda.synchronize if on_card else lambda: None
    wait()
    started = time.perf_counter()
    training.step()
    issued_s = time.perf_counter() - started
    wait()
    wall_s = time.perf_counter() - started
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]) as found:
        training.step()
        wait()
    return {**run._asdict(), "wall_s": wall_s, "issued_s": issued_s, **tables(found.events())}


def main() -> int:
    """Profile each run and write its file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda:0")
    asked = parser.parse_args()
    if asked.device.startswith("mock:"):
        parser.error(f"--device {asked.device} has no kernels to profile; take cuda:0, or cpu.")
    warnings.simplefilter("ignore")
    asked.folder.mkdir(parents=True, exist_ok=True)
    with opened(asked.device) as device:
        for run in CPU_RUNS if device.id == "cpu" else GPU_RUNS:
            found = profiled(device, run)
            (asked.folder / f"{run.name}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
            print(f"{run.name}: {found['wall_s']:.4g} s a step, issued in {found['issued_s']:.4g} s, "
                  f"kernels {found['busy_us'] / 1e6:.4g} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
