"""Python that DeepSpeed's ZeRO-3 runs on the host whenever a module with weights is entered or left.

``DeepSpeedZeRoOffload._register_deepspeed_module`` puts hooks before and after the forward and the backward of every
module; they fetch and release its weights. With small micro-batches their time is the step's. Counted in visits, one
for each matrix product of a forward, of a recomputation, and once more of the backward. Left out: norms' visits, the
gradients' own hooks, and parameters below ``stage3_param_persistence_threshold``, which are never let go.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunecast.model.curves import Array
from tunecast.model.operation import GROUPED, Kind, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.segments import BACKWARD, FORWARD, SEGMENTS


def has_hooks(run: Run) -> bool:
    """Whether weights come and go module by module, by Python."""
    return run.sharding == "zero3"


def visits_of(operations: Sequence[Operation], counts: Array) -> Array:
    """(variants, segments) visits of modules in an optimizer step; `counts` is (operations, variants)."""
    found = np.zeros((counts.shape[1], len(SEGMENTS)))
    for operation, executed in zip(operations, counts, strict=True):
        if not enters_module(operation):
            continue
        if operation.phase is Phase.FORWARD:
            found[:, FORWARD] += executed
            found[:, BACKWARD] += executed
        elif operation.phase is Phase.RECOMPUTE:
            found[:, BACKWARD] += executed
    return found


def enters_module(operation: Operation) -> bool:
    """Whether a product is that of a module with weights: one by one, or all experts' in one kernel; not those of heads
    and chunks (eager and linear attention), which are stacks of products too."""
    stack = len(operation.shape) > len("mnk")
    return operation.kind is Kind.GEMM and (not stack or operation.layout.endswith(GROUPED))
