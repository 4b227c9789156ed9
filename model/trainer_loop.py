"""What transformers' Trainer does on the host around every step, beside issuing it.

Its `_run_epoch` and `training_step` go over every module of the model in Python four times: `model.train()` and
`floating_point_ops` (which counts the parameters anew) in each micro-step, the gradients' clipping and
`model.zero_grad()` in each step. And `logging_nan_inf_filter`, on by default, reads the loss after every micro-step, so
that the device has nothing to do meanwhile. PEFT makes ten more modules of every adapted linear map, which makes these
walks long beside adapters: 0.5B parameters with LoRA on all maps are 2,001 modules, fully trained 319.

Measured with the Trainer set between bare steps of the same model (`scripts/gpu_trainer.py`): on an H200 in a machine
whose record says 32 us for a launch, steps of 0.148 s (0.5B, LoRA, no accumulation) and of 0.363 s (8B, QLoRA) took
28 ms more each (results/validation/gpu-h200-2/trainer). That is 3.5 us for a module in a walk, and 2.4 once the lead
that the host loses by reading the loss is taken off: 0.11 and 0.075 launches. On one core of a Xeon, 24 and 32 narrow
layers, one and four micro-steps: 2.4 to 2.8 us (scripts/trainer_walks.py, results/validation/trainer-walks.json).
Gradient accumulation was measured on the CPU alone, full training and several GPUs nowhere. Callbacks, logging and the
collator are not told apart. Left out: two of the walks begin while the card still works on the update, which hides
them where that is long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tunecast.model.curves import Array
from tunecast.model.factors import FactorSet
from tunecast.model.hooks import MUCH, enters_module, is_adapters
from tunecast.model.operation import GROUPED, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.segments import FORWARD, OPTIMIZER_SEGMENT, SEGMENTS
from tunecast.model.value import Z80

WALKS = "walks"
"""The host's column of modules that are walked over."""
WALK_LAUNCHES = 0.09
"""Launches of the forward that a module in a walk costs a card's host: the geometric mean of both jobs on the H200,
assumed of other hosts. One that is slow at launching is slow at this: both are Python."""
WALK_LAUNCHES_OF_A_CPU = 0.8
"""The same where the device is its own host: 2.7 us over the 3.3 us a launch of the CPU's record (results/records)."""
WALK_LOG_SD = 0.3
"""How unsure both are, as a standard deviation of their logarithm: assumed; the two jobs differ by 0.4."""
HOST_WALKS = f"scale.host_{WALKS}"
"""The factor of a record that has measured it: launches of the forward that a module in a walk costs."""
IN_THE_TRAINER = 1.1
"""How many times as long a walk takes within the Trainer as in a calibration's ``modules`` trial, one right after the
other: 1.09 (0.92 to 1.17) on one core of a Xeon (scripts/trainer_walks.py, results/validation/trainer-walks.json)."""
IN_THE_TRAINER_LOG_SD = 0.2
"""How unsure that is of another machine, model or method: assumed."""
PER_MICRO_STEP = 2.0
PER_STEP = 2.0
WALKS_OF_A_STEP = int(PER_MICRO_STEP + PER_STEP)
"""Of one micro-step: what a calibration's ``modules`` trial takes."""
PER_PRODUCT = 13.0 / 7.0
"""Modules of a decoder layer for each of its linear maps: 13 of Llama and Qwen 2 for 7 (transformers 5)."""
PER_ADAPTER_PRODUCT = 5.0
"""Ten modules for the two products of an adapted map (peft 0.18 ``LoraLayer``: its dicts, and what they hold)."""
PER_EXPERT_PRODUCT = 2.5
"""Of transformers below 5, where an expert is five modules and its maps are told as two products."""


def modules_of(operations: Sequence[Operation], counts: Array, run: Run) -> Array:
    """(variants,) modules walked over in an optimizer step if each micro-step did once; `counts` is (operations,
    variants). Told by the products of the forward: a map's adapters by their rank."""
    weights = np.array([_modules_for(operation, run) for operation in operations])
    return np.asarray(weights @ counts)


def _modules_for(operation: Operation, run: Run) -> float:
    if operation.phase is not Phase.FORWARD or not enters_module(operation):
        return 0.0
    if operation.layout.endswith(GROUPED):
        return 1.0 if run.hf_code == "5" else PER_EXPERT_PRODUCT * operation.shape[-1]
    return PER_ADAPTER_PRODUCT if is_adapters(operation, run) else PER_PRODUCT


def walks_of(modules: Array, micro_steps: Array) -> Array:
    """(runs, segments) modules walked over in an optimizer step, from those of all its micro-steps (`modules_of`)."""
    found = np.zeros((len(modules), len(SEGMENTS)))
    found[:, FORWARD] = PER_MICRO_STEP * modules
    found[:, OPTIMIZER_SEGMENT] = PER_STEP * modules / micro_steps
    return found


def reads_loss(meets: Array) -> Array:
    """(..., segments) where the clocks meet, of a loop that reads the loss after every backward."""
    met = meets.copy()
    met[..., FORWARD] = met[..., OPTIMIZER_SEGMENT] = 1.0
    return met


def walk_log_sd(factors: FactorSet) -> float:
    """How unsure the cost of a module in a walk is, as a standard deviation of its logarithm."""
    measured = factors.factors.get(HOST_WALKS)
    return WALK_LOG_SD if measured is None else math.log(measured.high / measured.low) / (2.0 * Z80)


def walk_origin(factors: FactorSet) -> str:
    """Where the cost of a module in a walk comes from."""
    measured = factors.factors.get(HOST_WALKS)
    return "assumed" if measured is None else measured.origin


def walk_origins(run: Run, factors: FactorSet) -> dict[str, str]:
    """The same, of a run that the Trainer drives and where no factor of a record says it by itself."""
    told_already = HOST_WALKS in factors.factors
    return {} if told_already or not run.trainer_loop else {"trainer_launches_per_module": walk_origin(factors)}


def trainer_notes(parts_s: Mapping[str, float], step_s: float, factors: FactorSet) -> tuple[str, ...]:
    """That the Trainer takes much of a step, and what says that another loop runs."""
    own_s = parts_s.get("trainer", 0.0)
    if own_s < MUCH * step_s:
        return ()
    known = "as measured on this host" if HOST_WALKS in factors.factors else "assumed from two jobs on one machine"
    note = (
        f"transformers' Trainer takes {own_s / step_s:.0%} of the step for going over the model's modules in Python, "
        f"{known}; a loop of one's own: --no-trainer-loop"
    )
    return (note,)
