#!/usr/bin/env python3
"""Evidence for the callback on this CPU: forecast, live and final figures of real trainings, and what watching costs.

Usage: python scripts/callback_evidence.py RECORD [--pairs N] [--page-only]        on a quiet machine

Trains two models with random weights through transformers' own Trainer, watched, each in a process of its own
(2 minutes), and sets the forecast made at the start beside the figures after the first timed window and those at the
end. What watching costs is measured twice: the seconds that these trainings spent inside the callback's own functions,
and the same training in pairs with and without the callback, in alternating order (a minute a pair). Writes into
results/validation/callback/; --page-only makes the page again from the files there.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from stopwatch import Stopwatch

import tunecast
from tunecast.calibrate.trace.hf import hf_config
from tunecast.calibrate.watch.clock import T90
from tunecast.calibrate.watch.record import read_run_record
from tunecast.run_validation import validate_run

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "results" / "validation" / "callback"
JOBS = (
    ("HuggingFaceTB/SmolLM2-135M", {"length": 256, "batch": 2, "steps": 40, "rank": 16}),
    ("Qwen/Qwen2.5-0.5B", {"length": 192, "batch": 1, "steps": 40, "rank": 8}),
)
PAIRS = 6
PAIR_STEPS = 25
IN_EVERY_STEP = ("on_step_begin", "_saw", "on_step_end")
ONCE = ("on_train_begin", "on_train_end")
"""The callback's functions, by how often the Trainer calls them."""


def model_of(name: str, rank: int) -> Any:
    """Random weights in bf16 with adapters on all linear layers."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(tunecast.load_architecture(name)))
    model = model.to(torch.bfloat16)
    model.config._name_or_path = name
    adapters = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters)


def train(name: str, steps: int, shape: dict[str, int], callbacks: list[Any]) -> float:
    """One training through the Trainer; seconds after its warm-up."""
    model, watch = model_of(name, shape["rank"]), Stopwatch()
    ids = torch.randint(0, model.config.vocab_size, (shape["length"],))
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=shape["batch"], bf16=True, use_cpu=True,
            gradient_checkpointing=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=10,
        )  # fmt: skip
        data = [{"input_ids": ids, "labels": ids}] * (steps * shape["batch"])
        transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[*callbacks, watch]).train()
    return watch.seconds


def metered(watch: Any) -> dict[str, list[float]]:
    """Put a meter around each of the callback's functions: the seconds of every call, by name."""
    spent: dict[str, list[float]] = {name: [] for name in (*IN_EVERY_STEP, *ONCE)}

    def around(own: Callable[..., None], name: str) -> Callable[..., None]:
        @functools.wraps(own)
        def called(*args: Any, **kwargs: Any) -> None:
            begun_s = time.perf_counter()
            own(*args, **kwargs)
            spent[name].append(time.perf_counter() - begun_s)

        return called

    for name in spent:
        setattr(watch, name, around(getattr(watch, name), name))
    return spent


def watched(name: str, shape: dict[str, int], record: Path, out: Path = OUT) -> dict[str, Any]:
    """One watched training; its record stays. What the callback itself took, told as seconds."""
    watch = tunecast.TunecastCallback(records=[record], out=out, tell=print)
    spent = metered(watch)
    train(name, shape["steps"], shape, [watch])
    assert watch.broken is None, watch.broken
    first = [spent[part].pop(0) for part in IN_EVERY_STEP]
    step_s = watch.watcher.clock.step_time_s().value
    own_s = sum(sum(spent[part]) for part in IN_EVERY_STEP) / (shape["steps"] - 1)
    once_s = sum(first) + sum(sum(spent[part]) for part in ONCE)
    return {"model": name, "step_s": step_s, "own_s": own_s, "share": own_s / step_s, "once_s": once_s}


def own_process(task: Callable[..., Any], *args: Any) -> Any:
    """A call in a fresh process, whose peak of memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(task, *args).result()


def live_step_s(path: Path) -> float:
    """Seconds of a step as they stood after the first timed window."""
    first = read_run_record(path)["windows"][0]
    return float(first["seconds"] / first["steps"])


def overhead(pairs: int, record: Path) -> dict[str, Any]:
    """Log-ratio of seconds with and without the callback over pairs in alternating order, with its 80% interval."""
    name, shape = JOBS[0]
    ratios = []
    for pair in range(pairs):
        seconds: dict[bool, float] = {}
        for with_callback in (True, False) if pair % 2 else (False, True):
            own = tunecast.TunecastCallback(records=[record], out=None, tell=lambda _: None)
            seconds[with_callback] = train(name, PAIR_STEPS, shape, [own] if with_callback else [])
        ratios.append(math.log(seconds[True] / seconds[False]))
    half = T90[len(ratios) - 2] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    mean = statistics.mean(ratios)
    return {"pairs": pairs, "steps": PAIR_STEPS, "overhead": mean, "low": mean - half, "high": mean + half}


def job_part(path: Path) -> list[str]:
    """One training on the page."""
    record, found = read_run_record(path), validate_run(path).as_dict()
    run = record["run"]
    shape = f"{run['per_device_train_batch_size']} x {run['max_length']} tokens"
    text = [f"## {record['forecast']['model']}, LoRA r={run['lora_r']}, {shape}\n"]
    text += ["| quantity | forecast | 80% interval | after the first window | at the end | error | inside |"]
    text += ["|---|---|---|---|---|---|---|"]
    for q in found["quantities"]:
        told, live = q["forecast"], f"{live_step_s(path):.4g}" if q["name"] == "optimizer step" else "–"
        cells = [f"{q['name']}, {q['unit']}", "–", "–", live, f"{q['measured']:.4g}", "–", "–"]
        if told is not None:
            cells[1:3] = [f"{told['value']:.4g}", f"{told['low']:.4g} to {told['high']:.4g}"]
            cells[5:] = [f"{q['error']:+.1%}", "yes" if q["inside"] else "no"]
        text.append(f"| {' | '.join(cells)} |")
    notes = "".join(f"- {note}\n" for note in found["notes"])
    return [*text, f"\n{notes}\nRecord: [{path.name}]({path.name})\n"]


def own_part(own: list[dict[str, Any]]) -> list[str]:
    """What the callback itself took, measured inside it."""
    text = [
        "| training | a step | the callback in a step | share | at begin, first step and end |",
        "|---|---|---|---|---|",
    ]
    for job in own:
        text.append(
            f"| {job['model']} | {job['step_s']:.3f} s | {job['own_s'] * 1e3:.3f} ms | {job['share']:.4%} "
            f"| {job['once_s']:.2f} s |"
        )
    about = (
        "Time spent inside the callback's own functions, a clock around each (the forecast is made in the first step, "
        "the record written at the end; on a GPU waiting for the device at the ends of a window would join):\n"
    )
    return [about, *text, ""]


def pairs_part(cost: dict[str, Any]) -> str:
    """What pairs with and without the callback say."""
    return (
        f"{cost['pairs']} pairs of {cost['steps']} steps with and without the callback, in alternating order: "
        f"{cost['overhead']:+.2%} of the time (80% interval {cost['low']:+.2%} to {cost['high']:+.2%}). "
        "The aim is below 0.5%; where the interval is wider than that, the machine's own drift hides it.\n"
    )


def markdown(costs: dict[str, Any]) -> str:
    """The page."""
    about = (
        "Made by `scripts/callback_evidence.py`; do not edit. Real trainings by transformers' Trainer on this CPU, "
        "each in a process of its own, random weights, forecast from the calibration record before the first step "
        "was timed.\n"
    )
    parts = [part for path in sorted(OUT.glob("cpu_run_*.json")) for part in job_part(path)]
    if costs:
        parts += ["## What watching costs\n", *own_part(costs["own"])]
        parts += [pairs_part(costs["paired"])] if "paired" in costs else []
    return "\n".join(["# A running job, watched\n", about, *parts])


def main() -> None:
    """Train, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="calibration record of this CPU")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs for the overhead; 0 leaves it out")
    parser.add_argument("--page-only", action="store_true", help="make the page from the records that are there")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    OUT.mkdir(parents=True, exist_ok=True)
    kept = OUT / "overhead.json"
    if not asked.page_only:
        for old in OUT.glob("*.json"):
            old.unlink()
        costs: dict[str, Any] = {"own": [own_process(watched, name, shape, asked.record) for name, shape in JOBS]}
        kept.write_text(json.dumps(costs, indent=2, sort_keys=True) + "\n")
        (OUT / "README.md").write_text(markdown(costs))
        if asked.pairs > 1:
            costs["paired"] = overhead(asked.pairs, asked.record)
            kept.write_text(json.dumps(costs, indent=2, sort_keys=True) + "\n")
    page = markdown(json.loads(kept.read_text()) if kept.exists() else {})
    (OUT / "README.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
