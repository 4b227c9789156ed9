"""What the host issues, in columns that cost it differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tunecast.model.curves import Array, Columns, columns
from tunecast.model.factors import HOST_S_PER_LAUNCH
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.optimizer_torchao import CALLS, COMPILED, FOUND
from tunecast.model.trainer_loop import WALK_LAUNCHES, WALK_LAUNCHES_OF_A_CPU, WALKS, reads_loss, walks_of

HOST_COLUMNS = (
    "forward",
    "recompute",
    "backward",
    "optimizer",
    "dequant",
    "hooks",
    "calls",
    "layers",
    "walks",
    "units",
)
"""Launches whose host cost may differ: by phase, those of 4-bit dequantization, which go through more Python, and
visits of modules by ZeRO-3's hooks (`hooks.py`); calls of the optimizer, which go over lists of tensors;
layers that Python enters, forward or to recompute them, told by their attention; modules that the Trainer walks over
while nothing is issued (`trainer_loop.py`); and visits of adapters that are units of FSDP, which let the device run dry
(`hooks.py`).
``host_s_per_launch`` is that of forward, ``scale.host_<name>`` the ratio of another to it."""
SCORES = "scores"
"""Name of attention's first product where no fused kernel runs."""
WALKED = HOST_COLUMNS.index(WALKS)
UNITS = HOST_COLUMNS.index("units")
UNMEASURED_RATIO = {"calls": 0.0, "layers": 0.0, "walks": WALK_LAUNCHES, "units": 0.0}
"""Ratios of host costs that are not 1 where nobody has measured them: launches then stand for calls."""


def host_column(operation: Operation) -> str:
    """The column of `HOST_COLUMNS` that an operation's launches belong to."""
    return "dequant" if operation.kind is Kind.DEQUANT else str(operation.phase)


def host_issues(operations: Sequence[Operation], cols: Columns) -> Array:
    """(operations, host columns): what the host issues for one execution of each."""
    issued = np.zeros((len(operations), len(HOST_COLUMNS)))
    for row, operation in enumerate(operations):
        issued[row, HOST_COLUMNS.index(host_column(operation))] = cols.launches[row]
        issued[row, HOST_COLUMNS.index("calls")] = calls_of(operation)
        issued[row, HOST_COLUMNS.index("layers")] = float(enters_layer(operation))
    return issued


ONE_TENSOR = "adafactor."
"""How the name of an operator begins that updates one tensor, by formula and traced."""


def calls_of(operation: Operation) -> float:
    """Calls of the optimizer that go over lists in Python, or cost the host as much."""
    if operation.name == FOUND:
        return float(CALLS)
    return float(goes_over_lists(operation) and operation.launches > 0.0)


def goes_over_lists(operation: Operation) -> bool:
    """Whether it is a call of the optimizer for which Python goes over its tensors, and no operator on one of them, of
    which Adafactor has two dozen per tensor and torchao's update up to five."""
    return operation.kind is Kind.OPTIMIZER and not operation.name.startswith((ONE_TENSOR, COMPILED))


def enters_layer(operation: Operation) -> bool:
    """Whether it is the attention, fused or by its product of scores, of a layer that Python runs."""
    return attends(operation) and operation.phase in (Phase.FORWARD, Phase.RECOMPUTE)


def attends(operation: Operation) -> bool:
    """Whether it is attention, fused or by its product of scores."""
    return operation.kind is Kind.ATTENTION or (operation.kind is Kind.GEMM and operation.name == SCORES)


def with_trainer(
    launches: Array, meets: Array, modules: Array, micro_steps: Array, driven: Array
) -> tuple[Array, Array]:
    """(runs, segments, host columns) launches of an optimizer step and (runs, segments) where the clocks meet, with
    what the Trainer adds to the runs that it drives (`driven`, by run): its walks over `modules`, and the loss that it
    reads."""
    walked = launches.copy()
    walked[:, :, WALKED] += driven[:, None] * walks_of(modules, micro_steps)
    return walked, np.where(driven[:, None], reads_loss(meets), meets)


def host_seconds(values: Mapping[str, float], *, synchronous: bool = False) -> Array:
    """(host columns,) seconds that the host takes for one of each; `synchronous` where the device is its own host."""
    unmeasured = UNMEASURED_RATIO | ({"walks": WALK_LAUNCHES_OF_A_CPU} if synchronous else {})
    ratios = [values.get(f"scale.host_{name}", unmeasured.get(name, 1.0)) for name in HOST_COLUMNS]
    return values.get(HOST_S_PER_LAUNCH, 0.0) * np.array(ratios)


def host_launches(operations: Sequence[Operation], values: Mapping[str, float]) -> float:
    """Launches of the forward that issuing all of these costs the host; visits by hooks are not among them."""
    counts = np.array([operation.count for operation in operations], dtype=float)
    each = host_seconds({**values, HOST_S_PER_LAUNCH: 1.0})
    return float(counts @ host_issues(operations, columns(operations)) @ each)
