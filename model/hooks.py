"""Python that shards run on the host whenever what they hold together is entered or left.

ZeRO-3
------
``DeepSpeedZeRoOffload._register_deepspeed_module`` puts hooks before and after the forward and the backward of every
module; they fetch and release its weights. With small micro-batches their time is the step's. Counted in visits, one
for each matrix product of a forward, of a recomputation, and once more of the backward. Left out: norms' visits, the
gradients' own hooks, and parameters below ``stage3_param_persistence_threshold``, which are never let go.

Adapters under FSDP 1
---------------------
transformers' Trainer makes every module with a trained weight and no children a unit of its own (``trainer.py``
``update_fsdp_plugin_peft``, PEFT ``fsdp_auto_wrap_policy``): both matrices of each adapted map. Before a unit is
gathered the host waits until the device is through with the unit before the last (torch ``_FreeEventQueue``; accelerate
leaves ``limit_all_gathers`` on), so it is never further ahead than two of them: what it needs for two visits and for
the launches between two maps beyond the device's work there (`adapter_gaps`), the device stands still for. One visit in
the forward, one to recompute, one in the backward; and a layer's weights are then asked for when the backward of the
layer after it has all but ended (`exposed`). Under ``fsdp-grad-op`` nothing is let go that the host would wait for, and
visits are host time like launches. FSDP 2 keeps adapters in their layer's unit (the Trainer sets no policy there), and
fms-acceleration's fused adapters are left out of FSDP (``lora_adapters_switch_ddp_from_fsdp``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tunecast.model.curves import Array
from tunecast.model.operation import GROUPED, Kind, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.segments import BACKWARD, FORWARD, HEAD_PRODUCT, SEGMENTS

TRACED = "aten."
"""How names of traced operations begin."""
MUCH = 0.05
"""Share of a step from which a note tells of it."""


def has_hooks(run: Run) -> bool:
    """Whether weights come and go module by module, by Python."""
    return run.sharding == "zero3"


def wraps_adapters(run: Run) -> bool:
    """Whether each matrix of an adapter is a unit of FSDP."""
    sharded = run.num_gpus > 1 and run.sharding in ("fsdp", "fsdp-grad-op", "hsdp")
    return sharded and run.fsdp_version == 1 and run.trainer_loop and run.has_adapters and not run.fuses("lora")


def waits_for_units(run: Run) -> bool:
    """Whether the host waits for the device before it gathers each: not where what is gathered stays whole."""
    return wraps_adapters(run) and run.sharding != "fsdp-grad-op"


def visits_of(
    operations: Sequence[Operation], counts: Array, visits: Callable[[Operation], bool] | None = None
) -> Array:
    """(variants, segments) visits of modules in an optimizer step, all or those of some products; `counts` is
    (operations, variants)."""
    found = np.zeros((counts.shape[1], len(SEGMENTS)))
    for operation, executed in zip(operations, counts, strict=True):
        if not (visits or enters_module)(operation):
            continue
        if operation.phase is Phase.FORWARD:
            found[:, FORWARD] += executed
            found[:, BACKWARD] += executed
        elif operation.phase is Phase.RECOMPUTE:
            found[:, BACKWARD] += executed
    return found


def adapter_visits_of(operations: Sequence[Operation], counts: Array, run: Run) -> Array:
    """The same of adapters' matrices."""
    return visits_of(operations, counts, lambda operation: is_adapters(operation, run))


def is_adapters(operation: Operation, run: Run) -> bool:
    """Whether a product is that of an adapter: by its name, or in a traced stream, whose names are torch's, by its
    rank; in a weight's gradient (``tn``) rows are of it too."""
    if not enters_module(operation):
        return False
    if not operation.name.startswith(TRACED):
        return ".lora_" in operation.name
    sizes = operation.shape if operation.layout.startswith("tn") else operation.shape[1:]
    return run.method != "full" and run.lora_r in sizes


def enters_module(operation: Operation) -> bool:
    """Whether a product is that of a module with weights: one by one, all experts' in one kernel, or the output head's
    of all samples; not those of heads and chunks (eager and linear attention), which are stacks of products too."""
    of_pairs = len(operation.shape) > len("mnk") and operation.name != HEAD_PRODUCT
    return operation.kind is Kind.GEMM and (not of_pairs or operation.layout.endswith(GROUPED))


def unit_notes(parts_s: Mapping[str, float], step_s: float) -> tuple[str, ...]:
    """That adapters as units of FSDP take much of a step, and what spares it."""
    own_s = parts_s.get("units", 0.0)
    if own_s < MUCH * step_s:
        return ()
    note = (
        f"FSDP 1 gathers every matrix of an adapter by itself, {own_s / step_s:.0%} of the step; FSDP 2 does not: "
        "--fsdp-version 2"
    )
    return (note,)
