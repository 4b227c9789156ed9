#!/usr/bin/env python3
"""How long transformers' Trainer keeps the host beside issuing a step, on this CPU: what `trainer_loop.py` counts.

    python scripts/trainer_walks.py [--only steps|in-place] [--out results/validation/trainer-walks.json]

Models of many narrow layers, LoRA on all maps: the time of a step is Python's alone. Bare steps, the Trainer and bare
steps again, in one process on one model; what the Trainer's step takes more is told for each module, once per step and
once per micro-step (two numbers of micro-steps tell both apart). By the clock of the process, so that others on the
machine count little. A minute.

``in-place``: the Trainer's own calls of two of the walks, timed where it makes them, over the same calls one after
another as a calibration's ``modules`` trial makes them: `IN_THE_TRAINER` of `tunecast.model.trainer_loop`. Both within
a minute on one model, so that the pace of the machine, which changes, weighs on both. What is not asked for stays in
the file as it is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
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
WALKS_TIMED = 2
"""``train`` and ``num_parameters``."""
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


def trainer_step_s(model: Any, ids: torch.Tensor, micro_steps: int, *callbacks: Any) -> float:
    """Mean seconds of a step of the Trainer."""
    watch = Stopwatch(clock=time.process_time)
    data = [{"input_ids": ids, "labels": ids}] * (WARMUP_STEPS + TIMED_STEPS + 1) * micro_steps
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder, max_steps=WARMUP_STEPS + TIMED_STEPS, bf16=True, per_device_train_batch_size=1,
            gradient_accumulation_steps=micro_steps, optim="adamw_torch", use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, callbacks=[watch, *callbacks])
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


class InPlace(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Seconds of a model's ``train`` and ``num_parameters`` within each step of the Trainer."""

    def __init__(self, model: Any) -> None:
        self.steps_s: list[float] = []
        self._spent_s = 0.0
        for holder, name in ((model, "train"), (model.base_model.model, "num_parameters")):
            setattr(holder, name, self._timed(getattr(holder, name)))

    def _timed(self, real: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            found = real(*args, **kwargs)
            self._spent_s += time.process_time() - begun
            return found

        return called

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start anew."""
        self._spent_s = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what the step's calls took."""
        self.steps_s.append(self._spent_s)


def walk_s(model: Any) -> float:
    """Seconds of one walk, of the same two calls again and again."""
    taken = []
    for _ in range(TIMED_STEPS):
        begun = time.process_time()
        model.train()
        model.num_parameters(exclude_embeddings=True)
        taken.append((time.process_time() - begun) / WALKS_TIMED)
    return median(taken)


def in_place(layers: int) -> dict[str, Any]:
    """One model: seconds for a module in a walk, within the Trainer and one walk after another."""
    model, ids = narrow_model(layers), torch.randint(0, VOCABULARY, (TOKENS,))
    modules, before_s = sum(1 for _ in model.modules()), walk_s(model)
    train, counted = model.train, model.base_model.model.num_parameters
    watch = InPlace(model)
    trainer_step_s(model, ids, 1, watch)
    model.train, model.base_model.model.num_parameters = train, counted
    alone_s, own_s = (before_s + walk_s(model)) / 2.0, median(watch.steps_s[WARMUP_STEPS:]) / WALKS_TIMED
    return {"layers": layers, "modules": modules, "alone_s": alone_s / modules, "in_the_trainer_s": own_s / modules}


def main() -> None:
    """All models; the file and a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "validation" / "trainer-walks.json")
    parser.add_argument("--only", choices=["steps", "in-place"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    content = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    content |= {"schema": SCHEMA, "software": versions}
    if asked.only != "in-place":
        content |= steps_told()
    if asked.only != "steps":
        content |= in_place_told()
    write_text(asked.out, json.dumps(content, indent=1, sort_keys=True) + "\n")


def steps_told() -> dict[str, Any]:
    """What whole steps of the Trainer take more, and a line for each depth."""
    found = [more_s(layers, micro_steps) for layers in LAYERS for micro_steps in MICRO_STEPS]
    each = {str(layers): per_module(found, layers) for layers in LAYERS}
    for layers, costs in each.items():
        step_us, micro_us = costs["per_step_s"] * 1e6, costs["per_micro_step_s"] * 1e6
        print(f"{layers} layers: {micro_us:.1f} us for a module in a micro-step, {step_us:.1f} us more in a step")
    return {"runs": found, "by_layers": each}


def in_place_told() -> dict[str, Any]:
    """Walks within the Trainer beside walks alone, and the ratio of both."""
    found = [in_place(layers) for _ in range(ROUNDS) for layers in LAYERS]
    ratios = sorted(each["in_the_trainer_s"] / each["alone_s"] for each in found)
    middle = median(ratios)
    print(f"a walk in the Trainer takes {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) times one alone")
    return {"in_place": found, "in_place_ratio": {"value": middle, "low": ratios[0], "high": ratios[-1]}}


if __name__ == "__main__":
    main()
