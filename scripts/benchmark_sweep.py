"""Time a screen of a million combinations of run, GPU, batch and parallelism; prints seconds, decides nothing.

Every combination gets its step time, its memory and the probability that it fits, equal to `estimate`'s
(tests/model/test_engine.py). Two processes, one per core: cards with bf16 and their methods are shared out.
With ``--out FILE.md`` the seconds are kept with the machine's facts; run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

TARGET_S = 10.0
"""What a million combinations should take on two quiet cores."""
MODEL = "meta-llama/Llama-3.1-8B"
METHODS = ("lora", "qlora")
LENGTHS = (1024, 4096)
MICRO_BATCHES = (1, 2, 4, 8)
ACCUMULATIONS = tuple(range(1, 33))
SPREADS: tuple[dict[str, Any], ...] = (
    {},
    *({"num_gpus": n, "sharding": s} for n in (2, 4, 8) for s in ("ddp", "zero1", "zero2", "fsdp")),
)
Part = tuple[str, bool, bool]
"""Method, checkpointing, and whether the cards have bf16."""


def run_options(method: str, checkpointing: bool) -> Iterator[dict[str, Any]]:
    """Every run of a part, its accumulation left out."""
    for length, micro_batch, spread in product(LENGTHS, MICRO_BATCHES, SPREADS):
        yield {
            "method": method,
            "gradient_checkpointing": checkpointing,
            "max_length": length,
            "per_device_train_batch_size": micro_batch,
            **spread,
        }


def screen_part(part: Part) -> tuple[int, int]:
    """Combinations of one part, and how many of them fit their card."""
    from tunecast.model.architectures import load_architecture
    from tunecast.model.engine import screen
    from tunecast.model.resolve import resolve_run
    from tunecast.model.target import resolve_targets

    gc.disable()
    method, checkpointing, has_bf16 = part
    architecture = load_architecture(MODEL)
    targets = [target for target in resolve_targets(["all"], {}) if target.has_bf16 is has_bf16]
    runs = []
    for options in run_options(method, checkpointing):
        base = resolve_run(architecture, options, gpu_has_bf16=has_bf16).run
        runs += [replace(base, gradient_accumulation_steps=micro) for micro in ACCUMULATIONS]
    found = screen(architecture, runs, targets)
    return found.step_s.size, int((~found.too_large).sum())


def page(told: str, load: float) -> str:
    """The result as Markdown, with what it ran on and how busy the machine was before."""
    from tunecast.calibrate.environment import host_facts, software_versions

    host, software = host_facts(), software_versions()
    facts = {
        "processor": host.get("cpu"),
        "cores": host.get("cores") or os.cpu_count(),
        "python": software.get("python") or platform.python_version(),
        "numpy": version("numpy"),
        "load average of the minute before": f"{load:.2f}",
        "day": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    lines = [
        "# A million combinations of run, GPU, batch and parallelism",
        "",
        "Made by `scripts/benchmark-sweep --out`.",
    ]
    lines += ["", told, "", *(f"- {name}: {value}" for name, value in facts.items())]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all parts and print how long they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="worker processes")
    parser.add_argument("--out", type=Path, help="a Markdown file for the result")
    arguments = parser.parse_args()
    processes, load = arguments.processes, os.getloadavg()[0]
    # the larger parts first, so that the two processes end together
    parts = [(method, ck, bf16) for bf16 in (True, False) for method in METHODS for ck in (True, False)]
    start_s = time.perf_counter()
    with ProcessPoolExecutor(processes) as pool:
        sizes = list(pool.map(screen_part, parts))
    spent_s = time.perf_counter() - start_s
    count, fitting = (sum(column) for column in zip(*sizes, strict=True))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    told = (
        f"{count:,} combinations ({fitting:,} fit) in {spent_s:.2f} s ({cpu_s:.1f} s of processor time), {processes} "
        f"processes, imports included; the target is {TARGET_S:.0f} s"
    )
    print(told)
    if arguments.out is not None:
        arguments.out.write_text(page(told, load), encoding="utf-8")


if __name__ == "__main__":
    main()
