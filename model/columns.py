"""Whose seconds are whose: the columns in which a run's device seconds are added up, each with a correction of its own.

A column is a kind of operation, and three effects that no kind has alone: kernels that find their input in the
cache, the floor of every kernel, and (in the memory's column) products that wait for bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tunecast.model.curve_shares import SHARES
from tunecast.model.curves import Array
from tunecast.model.operation import Kind

FLOOR = "floor"
"""What a kernel takes however little it does; its own column, since benchmarks of tiny kernels see the host too."""
CACHED = "cached"
"""Kernels whose input is still in the last-level cache: a column whose scale multiplies that of memory."""
COLUMNS = (*(str(kind) for kind in Kind if kind is not Kind.COMMUNICATION), CACHED, FLOOR)


def share_columns(kind: Kind) -> list[int]:
    """The column of each of `SHARES` for operations of a kind; the optimizer's tensors were not just written."""
    cached = CACHED if kind is Kind.MEMORY else str(kind)
    named = {"own": str(kind), "memory": str(Kind.MEMORY), "cached": cached, "floor": FLOOR}
    return [COLUMNS.index(named[share]) for share in SHARES]


def scales(values: Mapping[str, float]) -> Array:
    """(columns,) what multiplies each column's seconds; the cached one's is on top of memory's."""
    each = {column: values.get(f"scale.{column}", 1.0) for column in COLUMNS}
    each[CACHED] *= each[str(Kind.MEMORY)]
    return np.array([each[column] for column in COLUMNS])
