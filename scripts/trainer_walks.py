#!/usr/bin/env python3
"""How long transformers' Trainer keeps the host beside issuing a step, on this CPU: what `trainer_loop.py` counts.

    python scripts/trainer_walks.py [--out results/validation/trainer-walks.json]

Models of many narrow layers, LoRA on all maps: the time of a step is Python's alone. Bare steps, the Trainer and bare
steps again, in one process on one model; what the Trainer's step takes more is told for each module, once per step and
once per micro-step (two numbers of micro-steps tell both apart). Beside each, before it and after it, the walks of a
calibration's ``modules`` trial over the same model: how many times as long the Trainer takes is `IN_THE_TRAINER` of
`tunecast.model.trainer_loop`. All of it in several rounds, since the pace of a shared machine changes; by the clock of
the process, so that others count little. Minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import peft
import torch
import transformers
from evidence import ROOT
from stopwatch import WARMUP_STEPS, Stopwatch

from tunecast.calibrate.bench.module_walks import WALKS, walk_over
from tunecast.calibrate.record import write_text
from tunecast.model.trainer_loop import PER_MICRO_STEP, PER_STEP

SCHEMA = "tunecast.trainer_walks/1"
LAYERS = (24, 32)
MICRO_STEPS = (1, 4)
TIMED_STEPS = 20
TIMED_TRIALS = 25
ROUNDS = 3
TOKENS, VOCABULARY, WIDTH = 8, 256, 64
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def narrow_model(layers: int) -> Any:
    """Qwen 2 of so many narrow layers with adapters on all maps."""
    config = transformers.Qwen2Config(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=TARGETS)).train()


def bare_step_s(model: Any, ids: torch.Tensor, micro_steps: int) -> float:
    """Mean seconds of a step without the Trainer, clipping included."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step() -> None:
        for _ in range(micro_steps):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=ids[None], labels=ids[None]).loss / micro_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARMUP_STEPS):
        step()
    begun = time.process_time()
    for _ in range(TIMED_STEPS):
        step()
    return (time.process_time() - begun) / TIMED_STEPS


def trainer_step_s(model: Any, ids: torch.Tensor, micro_steps: int) -> float:
    """Mean seconds of a step of the Trainer."""
    watch = Stopwatch(clock=time.process_time)
    data = [{"input_ids": ids, "labels": ids}] * (WARMUP_STEPS + TIMED_STEPS + 1) * micro_steps
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, max_steps=WARMUP_STEPS + TIMED_STEPS, bf16=True, per_device_train_batch_size=1,
            gradient_accumulation_steps=micro_steps, optim="adamw_torch", use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[watch])
        trainer.train()
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return watch.step_s()


def walk_s(model: Any) -> float:
    """Seconds of one walk over the modules as a calibration takes it."""
    taken = []
    for _ in range(TIMED_TRIALS):
        begun = time.process_time()
        walk_over(model)
        taken.append(time.process_time() - begun)
    return median(taken) / WALKS


def more_s(layers: int, micro_steps: int) -> dict[str, Any]:
    """One model: what the Trainer's step takes beyond the mean of bare ones before and after it."""
    model, ids = narrow_model(layers), torch.randint(0, VOCABULARY, (TOKENS,))
    walk_before_s, before_s = walk_s(model), bare_step_s(model, ids, micro_steps)
    by_trainer_s = trainer_step_s(model, ids, micro_steps)
    after_s, walk_after_s = bare_step_s(model, ids, micro_steps), walk_s(model)
    return {
        "layers": layers, "modules": sum(1 for _ in model.modules()), "micro_steps": micro_steps, "before_s": before_s,
        "trainer_s": by_trainer_s, "after_s": after_s, "more_s": by_trainer_s - (before_s + after_s) / 2.0,
        "walk_s": (walk_before_s + walk_after_s) / 2.0,
    }  # fmt: skip


def per_module(found: list[dict[str, Any]], layers: int) -> dict[str, float]:
    """Seconds for each module in a micro-step, and in a step beside those: medians over the rounds."""
    more_by = {
        n: median(f["more_s"] for f in found if (f["layers"], f["micro_steps"]) == (layers, n)) for n in MICRO_STEPS
    }
    modules = next(f["modules"] for f in found if f["layers"] == layers)
    each_s = (more_by[MICRO_STEPS[1]] - more_by[MICRO_STEPS[0]]) / (MICRO_STEPS[1] - MICRO_STEPS[0])
    once_s = more_by[MICRO_STEPS[0]] - MICRO_STEPS[0] * each_s
    return {"per_micro_step_s": each_s / modules, "per_step_s": once_s / modules}


def over_trial(found: dict[str, Any]) -> float:
    """How many times as long the Trainer takes for what it adds as its walks take by themselves."""
    walks = PER_MICRO_STEP * found["micro_steps"] + PER_STEP
    return float(found["more_s"] / (walks * found["walk_s"]))


def main() -> None:
    """All models; the file and a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "validation" / "trainer-walks.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    jobs = [(layers, micro_steps) for layers in LAYERS for micro_steps in MICRO_STEPS]
    found = [more_s(*job) for _ in range(ROUNDS) for job in jobs]
    each = {str(layers): per_module(found, layers) for layers in LAYERS}
    low, middle, high = (float(x) for x in np.quantile([over_trial(f) for f in found], [0.1, 0.5, 0.9]))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    content = {"schema": SCHEMA, "runs": found, "by_layers": each, "software": versions,
               "over_trial": {"low": low, "value": middle, "high": high}}  # fmt: skip
    write_text(asked.out, json.dumps(content, indent=1, sort_keys=True) + "\n")
    for layers, costs in each.items():
        step_us, micro_us = costs["per_step_s"] * 1e6, costs["per_micro_step_s"] * 1e6
        print(f"{layers} layers: {micro_us:.1f} us for a module in a micro-step, {step_us:.1f} us more in a step")
    print(f"{middle:.2f} ({low:.2f} to {high:.2f}) times what the walks of a calibration take")


if __name__ == "__main__":
    main()
