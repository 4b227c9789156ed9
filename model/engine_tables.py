"""Seconds of one list of operations on many devices at once: `phase_table` with an axis of devices in front.

Curves of the same form and the same parameters (all datasheet curves are) are evaluated together, by the functions
of `curves.py`, with the parameters as a column; a curve with residuals or a cache tier is evaluated on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunecast.model.adapter_gaps import Gaps, gaps_of
from tunecast.model.columns import share_columns
from tunecast.model.curve_shares import SHARES, cached_frac, shares
from tunecast.model.curves import (
    CACHED_OVER_MEMORY,
    FORMS,
    L2_BYTES,
    Array,
    Columns,
    columns,
    seconds,
)
from tunecast.model.exposed import waits_in_layers
from tunecast.model.factors import Curve, FactorSet
from tunecast.model.hooks import adapter_visits_of, visits_of
from tunecast.model.host import HOST_COLUMNS, host_issues
from tunecast.model.operation import Kind, Operation
from tunecast.model.phase_table import meets_of, rows_by_curve
from tunecast.model.run import Run
from tunecast.model.segments import SEGMENTS, segment_of
from tunecast.model.time import COLUMNS, find_curve
from tunecast.model.trainer_loop import modules_of

SMOOTH = {
    "gemm": {"bytes_per_s", "flops_per_s", "t0_s", "area", "tile", "k0",
             "processors", "wave_tile_m", "wave_tile_n", "split_depth"},
    "attention": {"flops_per_s", "t0_s", "length0", "head_dim0", "wide", "work0_flops", "head_step"},
    "bandwidth": {"bytes_per_s", "t0_s", L2_BYTES, CACHED_OVER_MEMORY},
    "elements": {"bytes_per_s", "t0_s"},
}  # fmt: skip
"""By form: parameters that it takes as arrays, one value for each device."""
CACHED = SHARES.index("cached")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operations added up by segment and column, for several sets of counts at once."""

    device_s: Array
    """(devices, variants, segments, columns), per optimizer step."""
    launches: Array
    """(variants, segments, host columns), per optimizer step."""
    meets: Array
    """(segments,) 1 where the host waits for the device at the start."""
    visits: Array
    """(variants, segments) visits of modules, which cost the host time where ZeRO-3 hangs hooks on them."""
    modules: Array
    """(variants,) modules that the Trainer walks over, in all micro-steps."""
    adapter_visits: Array
    """(variants, segments) visits of adapters' matrices, which cost time where each is a unit of FSDP."""
    waits: bool
    """Whether the host waits for the device several times in every layer of the forward."""
    gap_visits: Array
    """(variants, segments, gaps) per optimizer step, see `adapter_gaps`."""
    gap_launches: Array
    gap_work_s: Array
    """(devices, variants, segments, gaps) per optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Operations of one curve."""

    curve: str
    kind: Kind
    cols: Columns
    times: Array
    """(operations, variants x segments) executions per optimizer step."""
    rows: list[int]
    """Which operations of all they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Operations added up as far as no device is needed; fields as those of `Work`."""

    parts: tuple[_Part, ...]
    launches: Array
    meets: Array
    visits: Array
    modules: Array
    adapter_visits: Array
    waits: bool
    gaps: Gaps


def together(curve: Curve) -> tuple[object, ...] | None:
    """What curves that are evaluated together have in common; None for one that stands alone."""
    if curve.residuals or not curve.params.keys() <= SMOOTH.get(curve.form, set()):
        return None
    return (curve.form, *sorted(curve.params))


def curve_groups(curves: Sequence[Curve]) -> list[list[int]]:
    """Devices whose curves are evaluated together."""
    groups: dict[object, list[int]] = {}
    for device, curve in enumerate(curves):
        groups.setdefault(together(curve) or device, []).append(device)
    return list(groups.values())


def seconds_by_device(curves: Sequence[Curve], cols: Columns) -> tuple[Array, Array]:
    """(devices, operations) seconds of one execution, and (devices, shares, operations) whose they are: `SHARES`."""
    shape = (len(curves), len(cols.flops))
    total, parts = np.empty(shape), np.zeros((len(curves), len(SHARES), shape[1]))
    for devices in curve_groups(curves):
        first = curves[devices[0]]
        if len(devices) == 1:
            form = FORMS[first.form]
            total[devices[0]] = seconds(first, cols).seconds if first.residuals else form(first.params, cols)
            parts[devices[0]] = shares(first, cols)
            continue
        params: dict[str, Any] = {name: np.array([[curves[d].params[name]] for d in devices]) for name in first.params}
        whole = np.broadcast_to(FORMS[first.form](params, cols), (len(devices), shape[1]))
        without = FORMS[first.form]({**params, "t0_s": 0.0}, cols)
        total[devices] = whole
        own = np.divide(without, whole, out=np.ones_like(whole), where=whole > 0.0)
        cached = own * cached_frac(first.form, params, cols)
        parts[devices, 0], parts[devices, CACHED], parts[devices, -1] = own - cached, cached, 1.0 - own
    return total, parts


def add_up(operations: Sequence[Operation], counts: Array, devices: Sequence[FactorSet], run: Run) -> Work:
    """Add up operations executed `counts` (operations, variants) times per optimizer step; collectives are left out."""
    return on_devices(counted(operations, counts, run), devices)


def counted(operations: Sequence[Operation], counts: Array, run: Run) -> Counted:
    """The part of `add_up` that no device changes."""
    variants = counts.shape[1]
    launches = np.zeros((variants, len(SEGMENTS), len(HOST_COLUMNS)))
    parts = []
    for key, rows in rows_by_curve(operations).items():
        group = [operations[row] for row in rows]
        cols = columns(group)
        segment = np.array([segment_of(o) for o in group])
        times = counts[rows][:, :, None] * np.eye(len(SEGMENTS))[segment][:, None, :]
        parts.append(_Part(curve=key, kind=group[0].kind, cols=cols, times=times.reshape(len(rows), -1), rows=rows))
        launches += np.einsum("ovs,oh->vsh", times, host_issues(group, cols))
    return Counted(
        parts=tuple(parts),
        launches=launches,
        meets=meets_of(operations),
        visits=visits_of(operations, counts),
        modules=modules_of(operations, counts, run),
        adapter_visits=adapter_visits_of(operations, counts, run),
        waits=waits_in_layers(operations, counts),
        gaps=gaps_of(operations, counts, run),
    )


def on_devices(found: Counted, devices: Sequence[FactorSet]) -> Work:
    """Its seconds on devices."""
    variants = len(found.launches)
    device_s = np.zeros((len(devices), variants, len(SEGMENTS), len(COLUMNS)))
    each_s = np.zeros((len(devices), 1 + max((max(part.rows) for part in found.parts), default=0)))
    for part in found.parts:
        total, parts = seconds_by_device([find_curve(part.curve, factors) for factors in devices], part.cols)
        each_s[:, part.rows] = total
        for place, column in enumerate(share_columns(part.kind)):
            device_s[..., column] += ((total * parts[:, place]) @ part.times).reshape(len(devices), variants, -1)
    return Work(
        device_s=device_s,
        launches=found.launches,
        meets=found.meets,
        visits=found.visits,
        modules=found.modules,
        adapter_visits=found.adapter_visits,
        waits=found.waits,
        gap_visits=found.gaps.visits_in(),
        gap_launches=found.gaps.launches_in(),
        gap_work_s=found.gaps.work_s(each_s),
    )
