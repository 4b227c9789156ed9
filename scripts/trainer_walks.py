#!/usr/bin/env python3
"""How long transformers' Trainer keeps the host beside issuing a step, on this CPU: what `trainer_loop.py` counts.

    python scripts/trainer_walks.py [--out results/validation/trainer-walks.json]

Models of many narrow layers, LoRA on all maps: the time of a step is Python's alone. Bare steps, the Trainer and bare
steps again, in one process on one model; what the Trainer's step takes more is told for each module, once per step and
once per micro-step (two numbers of micro-steps tell both apart). By the clock of the process, so that others on the
machine count little. A minute.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from evidence import ROOT
from stopwatch import WARMUP_STEPS, Stopwatch

from tunecast.calibrate.record import write_text

SCHEMA = "tunecast.trainer_walks/1"
LAYERS = (24, 32)
MICRO_STEPS = (1, 4)
TIMED_STEPS = 20
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


def more_s(layers: int, micro_steps: int) -> dict[str, Any]:
    """One model: what the Trainer's step takes beyond the mean of bare ones before and after it."""
    model, ids = narrow_model(layers), torch.randint(0, VOCABULARY, (TOKENS,))
    before_s = bare_step_s(model, ids, micro_steps)
    by_trainer_s = trainer_step_s(model, ids, micro_steps)
    after_s = bare_step_s(model, ids, micro_steps)
    return {
        "layers": layers, "modules": sum(1 for _ in model.modules()), "micro_steps": micro_steps, "before_s": before_s,
        "trainer_s": by_trainer_s, "after_s": after_s, "more_s": by_trainer_s - (before_s + after_s) / 2.0,
    }  # fmt: skip


def per_module(found: list[dict[str, Any]], layers: int) -> dict[str, float]:
    """Seconds for each module in a micro-step, and in a step beside those."""
    few, many = (next(f for f in found if (f["layers"], f["micro_steps"]) == (layers, n)) for n in MICRO_STEPS)
    each_s = (many["more_s"] - few["more_s"]) / (MICRO_STEPS[1] - MICRO_STEPS[0])
    once_s = few["more_s"] - MICRO_STEPS[0] * each_s
    return {"per_micro_step_s": each_s / few["modules"], "per_step_s": once_s / few["modules"]}


def main() -> None:
    """All models; the file and a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "validation" / "trainer-walks.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    found = [more_s(layers, micro_steps) for layers in LAYERS for micro_steps in MICRO_STEPS]
    each = {str(layers): per_module(found, layers) for layers in LAYERS}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    content = {"schema": SCHEMA, "runs": found, "by_layers": each, "software": versions}
    write_text(asked.out, json.dumps(content, indent=1, sort_keys=True) + "\n")
    for layers, costs in each.items():
        step_us, micro_us = costs["per_step_s"] * 1e6, costs["per_micro_step_s"] * 1e6
        print(f"{layers} layers: {micro_us:.1f} us for a module in a micro-step, {step_us:.1f} us more in a step")


if __name__ == "__main__":
    main()
