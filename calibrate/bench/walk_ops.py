"""Benchmarks of kernels that do not walk straight through memory: softmaxes of rows, rows joined and cut, heads moved.

They are what attention as plain products does between these; fused attention has none of the first. Casts from 16 bits
to 32 do walk straight, but not at a copy's pace everywhere (`upcasts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunecast.calibrate.bench.tensors import normal
from tunecast.calibrate.bench.timing import Prepared, copies_to_rotate
from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.trace.hf import torch_dtype
from tunecast.catalogs.errors import InputError
from tunecast.model.operation import UPCAST
from tunecast.model.units import DTYPE_BYTES

Call = Callable[[], object]


def prepare_walk(params: dict[str, Any], backend: Backend) -> Prepared:
    """One kernel over ``rows`` of ``width`` numbers, as PyTorch runs it where transformers calls it."""
    operation = params["op"]
    if operation not in CALLS:
        raise InputError(f"Walk {operation!r} was asked for, but only {', '.join(CALLS)} exist; use one of these.")
    columns = params["width"] * params.get("heads", 1) + params.get("more", 0)
    copies = copies_to_rotate(2 * params["rows"] * columns * DTYPE_BYTES[params["dtype"]], backend)
    return Prepared(calls=[CALLS[operation](params, backend) for _ in range(copies)])


def _softmax(p: dict[str, Any], backend: Backend) -> Call:
    import torch

    scores = normal(backend, p["rows"], p["width"], dtype=p["dtype"])
    return lambda: torch.softmax(scores, -1)


def _softmax_backward(p: dict[str, Any], backend: Backend) -> Call:
    """Gradient times result, and the kernel proper: both are one operator (PyTorch ``SoftMax.cu``)."""
    import torch

    gradient = normal(backend, p["rows"], p["width"], dtype=p["dtype"])
    weights = torch.softmax(gradient, -1)
    return lambda: torch.ops.aten._softmax_backward_data(gradient, weights, -1, torch_dtype(p["dtype"]))


def _join(p: dict[str, Any], backend: Backend) -> Call:
    import torch

    parts = [normal(backend, p["rows"], columns, dtype=p["dtype"]) for columns in (p["width"], p["more"])]
    return lambda: torch.cat(parts, -1)


def _cut(p: dict[str, Any], backend: Backend) -> Call:
    """The gradient of a leading part of every row: zeros of the whole, and a copy into them."""
    import torch

    gradient = normal(backend, p["rows"], p["width"], dtype=p["dtype"])
    whole = (p["rows"], p["width"] + p["more"])
    return lambda: torch.ops.aten.slice_backward(gradient, whole, 1, 0, p["width"], 1)


def _heads(p: dict[str, Any], backend: Backend) -> Call:
    """What a projection leaves, copied so that heads come before positions."""
    flat = normal(backend, p["rows"], p["heads"], p["width"], dtype=p["dtype"])
    return lambda: flat.transpose(0, 1).contiguous()


def _upcast(p: dict[str, Any], backend: Backend) -> Call:
    """As PEFT casts an adapter's input (``_cast_input_dtype``)."""
    import torch

    activations = normal(backend, p["rows"], p["width"], dtype=p["dtype"])
    return lambda: activations.to(torch.float32)


CALLS: dict[str, Callable[[dict[str, Any], Backend], Call]] = {
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
    "join": _join,
    "cut": _cut,
    "heads": _heads,
    UPCAST: _upcast,
}
