"""How many optimizer steps the rows of some epochs make, and how full they are.

The Trainer of transformers ends every epoch with a step, of fewer micro-batches where no more are left
(``Trainer.set_initial_training_values`` of transformers/trainer.py):

    steps of an epoch = ceil(micro-batches of an epoch / gradient accumulation)
    steps             = ceil(epochs x steps of an epoch)

so that 100 rows in steps of 64 are two steps an epoch, of 64 and of 36 micro-batches, and 20 steps in ten epochs, with
the work of 15.6 full ones. A last micro-batch counts as a full one: of several GPUs every one gets one (accelerate's
``BatchSamplerShard``), and one GPU has less to do than is counted, by less than a micro-batch an epoch. Of other
stacks the epochs are taken as one long one whose last step is full. Left out: the
optimizer's own work in a step of fewer micro-batches, which is as much as in a full one.
"""

from __future__ import annotations

import math

from tunecast.model.run import Run

TRAINERS = ("hf-peft", "trl", "unsloth", "liger", "axolotl", "llama-factory", "ms-swift")
"""Stacks that train with transformers' Trainer or a class of it."""
DIGITS = 6
"""Rows of an epoch are a quotient: a millionth of one is a slip of floating point."""


def rows_per_step(run: Run) -> int:
    """Rows of a full optimizer step of the whole job."""
    return run.per_device_train_batch_size * run.gradient_accumulation_steps * run.dp


def micro_batches(run: Run, rows: float) -> int:
    """Micro-batches of an epoch, on every GPU."""
    return max(math.ceil(math.ceil(round(rows, DIGITS)) / (run.per_device_train_batch_size * run.dp)), 1)


def steps_of_an_epoch(run: Run, rows: float) -> int:
    """Steps that the Trainer makes of an epoch of so many rows."""
    return math.ceil(micro_batches(run, rows) / run.gradient_accumulation_steps)


def steps_of(run: Run, rows: float, epochs: float) -> int:
    """Optimizer steps of some epochs of so many rows each."""
    if run.stack in TRAINERS:
        return math.ceil(epochs * steps_of_an_epoch(run, rows))
    return math.ceil(round(rows * epochs / rows_per_step(run), DIGITS))


def full_frac(run: Run, rows: float, steps: int) -> float:
    """Micro-batches of so many steps over those of as many full ones."""
    if run.stack not in TRAINERS:
        return 1.0
    epochs, left = divmod(steps, steps_of_an_epoch(run, rows))
    micro, full = micro_batches(run, rows), run.gradient_accumulation_steps
    return (epochs * micro + min(left * full, micro)) / (steps * full)
