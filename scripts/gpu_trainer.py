#!/usr/bin/env python3
"""transformers' own Trainer on a real GPU, watched by the callback, beside the optimizer steps that `measure` times.

    python scripts/gpu_trainer.py --out DIR [--minutes 2] [--device cpu]      on the rented machine

The forecasts are of a training loop's time, and what is calibrated and measured are its optimizer steps. Here both run
in one process on one model: steps, the Trainer, steps again, so that a host whose pace changes weighs on both alike.
Each job's file DIR/<run>.json holds the seconds of them all, and DIR/<run>/ what `TunecastCallback` recorded. Jobs
that have a file are left out; none is started with less than `NEEDED_S` left. Steps follow each other as in `measure`,
without a wait for the device between them. The Trainer makes an optimizer of its own; ours has no state meanwhile.
Exit codes: 0 all jobs are there, 2 bad input, 3 time was up first.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from evidence import CPU_RUNS, GPU_RUNS, HeldOut, options_of
from stopwatch import WARMUP_STEPS, Stopwatch

import tunecast
from tunecast.calibrate.record import write_text
from tunecast.calibrate.steps import Training, prepare_training
from tunecast.catalogs.errors import TunecastError

SCHEMA = "tunecast.trainer_pace/1"
GPU_JOBS = ("qwen2.5-0.5b-lora-512", "llama-3.1-8b-qlora-1024x4", "llama-3.1-8b-lora-2048", "qwen3-0.6b-full-4096x2",
            "llama-3.1-8b-qlora-2048", "llama-3.1-8b-lora-1024-accumulated")  # fmt: skip
CPU_JOBS = ("smollm2-135m-lora-ck", "smollm2-135m-qlora-b2")
STEPS_S = 4.0
"""Our own steps, before the Trainer and after it, fill so long each."""
TRAINER_S = 9.0
"""The Trainer's steps after its first few fill so long."""
LEAST_STEPS = 4
NEEDED_S = 40.0
"""Assumed, only to foresee whether a job ends in time."""


def own_step_s(training: Training, wait: Any, seconds: float) -> float:
    """Mean seconds of optimizer steps that follow each other for about so long, the device waited for at the end."""
    training.step()
    wait()
    begun = time.perf_counter()
    training.step()
    wait()
    steps = max(LEAST_STEPS, math.ceil(seconds / (time.perf_counter() - begun)))
    begun = time.perf_counter()
    for _ in range(steps):
        training.step()
    wait()
    return (time.perf_counter() - begun) / steps


def trainer_step_s(training: Training, steps: int, folder: Path, device: str, wait: Any) -> tuple[float, list[str]]:
    """(mean seconds of a step of the Trainer, what the callback said)."""
    run, said = training.run, []  # type: Any, list[str]
    watch = tunecast.TunecastCallback(out=folder, tell=said.append)
    stopwatch = Stopwatch(wait)
    args = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=steps, bf16=run.autocast and run.compute_dtype == "bf16",
        per_device_train_batch_size=run.per_device_train_batch_size, optim=run.optim, use_cpu=device == "cpu",
        gradient_accumulation_steps=run.gradient_accumulation_steps, report_to=[], save_strategy="no",
        gradient_checkpointing=run.gradient_checkpointing, disable_tqdm=True, logging_steps=10,
        gradient_checkpointing_kwargs={"use_reentrant": run.reentrant},
    )  # fmt: skip
    ids = training.batch["input_ids"][0].cpu()
    samples = (steps + 1) * run.per_device_train_batch_size * run.gradient_accumulation_steps
    data = [{"input_ids": ids, "labels": ids}] * samples
    trainer = transformers.Trainer(model=training.model, args=args, train_dataset=data, callbacks=[watch, stopwatch])
    trainer.train()
    trainer.accelerator.unwrap_model(training.model, keep_fp32_wrapper=False)  # which else stays for our own steps
    return stopwatch.step_s(), said + ([] if watch.broken is None else [watch.broken])


def peak_bytes(device: str) -> int | None:
    """Peak of allocated memory since the last call, on a card."""
    if device == "cpu":
        return None
    peak = int(torch.cuda.max_memory_allocated())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak


def paced(job: HeldOut, out: Path, device: str) -> dict[str, Any]:
    """Our own steps, the Trainer's, and our own again."""
    from tunecast.api import opened
    from tunecast.asked import read_asked
    from tunecast.measurement import resolved_on

    asked = read_asked(job.model, options_of(job.options))
    with opened(device) as opened_device:
        run = resolved_on(opened_device, asked).run
    training = prepare_training(asked.architecture, run, device)
    wait = functools.partial(torch.cuda.synchronize, device) if device != "cpu" else lambda: None
    own_step_s(training, wait, 1.0)
    before_s = own_step_s(training, wait, STEPS_S)
    steps = WARMUP_STEPS + max(LEAST_STEPS, math.ceil(TRAINER_S / before_s))
    training.optimizer.state.clear()
    own_peak = peak_bytes(device)
    step_s, said = trainer_step_s(training, steps, out / job.name, device, wait)
    trainer_peak = peak_bytes(device)
    after_s = own_step_s(training, wait, STEPS_S)
    return {
        "schema": SCHEMA, "name": job.name, "model": job.model, "options": job.options, "before_s": before_s,
        "trainer_step_s": step_s, "trainer_steps": steps - WARMUP_STEPS, "after_s": after_s, "said": said,
        "allocated_bytes": own_peak, "trainer_allocated_bytes": trainer_peak,
    }  # fmt: skip


def main() -> int:
    """All jobs, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--device", default="cuda:0", choices=["cuda:0", "cpu"])
    asked = parser.parse_args()
    if asked.device != "cpu" and torch.cuda.device_count() > 1:
        several = f"{torch.cuda.device_count()} GPUs are visible, over which the Trainer would split each batch"
        print(f"gpu_trainer: {several}; type CUDA_VISIBLE_DEVICES=0 in front.", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    named = {job.name: job for job in (*CPU_RUNS, *GPU_RUNS)}
    ends_at, code = time.time() + asked.minutes * 60, 0
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in CPU_JOBS if asked.device == "cpu" else GPU_JOBS:
        path = asked.out / f"{name}.json"
        if path.exists():
            continue
        if time.time() + NEEDED_S > ends_at:
            code = 3
            continue
        try:
            found = paced(named[name], asked.out, asked.device)
        except TunecastError as error:
            print(f"gpu_trainer: {error}", file=sys.stderr)
            return 2
        write_text(path, json.dumps(found, indent=1, sort_keys=True) + "\n")
        own = f"{found['before_s']:.4g} and {found['after_s']:.4g} s"
        print(f"{name}: Trainer {found['trainer_step_s']:.4g} s, own steps {own}", file=sys.stderr, flush=True)
        peak_bytes(asked.device)
    return code


if __name__ == "__main__":
    sys.exit(main())
