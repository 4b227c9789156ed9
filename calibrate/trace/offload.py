"""Checkpoints in host memory, written after the published code of the stacks that keep them there.

Reentrant: Unsloth's ``Unsloth_Offloaded_Gradient_Checkpointer`` (unsloth_zoo ``gradient_checkpointing.py``). Else:
hooks on what autograd saves, as torchtune's and TRL's ``OffloadActivations``, here for the inputs of checkpointed
layers alone (theirs take other saved tensors outside the layers too, which are few).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def to_host(tensor: Any) -> Any:
    """A copy of the tensor in host memory; the copy runs beside other work."""
    return tensor.to("cpu", non_blocking=True)


def to_device(tensor: Any, device: Any) -> Any:
    """The copy back on the device."""
    return tensor.to(device, non_blocking=True)


def offload_checkpoints(model: Any, layers: Any, *, reentrant: bool) -> None:
    """Make the checkpointed layers keep their inputs in host memory."""
    if reentrant:
        function = _offloaded_checkpointer()
        for layer in layers:
            layer._gradient_checkpointing_func = function.apply
        return
    inputs: set[int] = set()
    for layer in layers:
        layer._gradient_checkpointing_func = _noting(layer._gradient_checkpointing_func, inputs)
    model.saved_in_host_memory = lambda: _hooks(inputs)


def _noting(checkpoint: Any, inputs: set[int]) -> Any:
    """The checkpoint function, with the storage of its input remembered while it saves it."""

    def noting(function: Any, hidden: Any, *args: Any) -> Any:
        inputs.add(hidden.untyped_storage()._cdata)
        try:
            return checkpoint(function, hidden, *args)
        finally:
            inputs.clear()

    return noting


@contextlib.contextmanager
def _hooks(inputs: set[int]) -> Iterator[None]:
    import torch

    def pack(tensor: Any) -> Any:
        if tensor.untyped_storage()._cdata not in inputs:
            return tensor, None
        inputs.clear()
        return to_host(tensor), tensor.device

    def unpack(packed: Any) -> Any:
        tensor, device = packed
        return tensor if device is None else to_device(tensor, device)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _offloaded_checkpointer() -> Any:
    import torch

    class OffloadedCheckpointer(torch.autograd.Function):  # type: ignore[misc]
        """Unsloth's, less its fixed device names."""

        @staticmethod
        def forward(ctx: Any, function: Any, hidden: Any, *args: Any) -> Any:
            kind = hidden.device.type
            ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            saved = to_host(hidden)
            with torch.no_grad():
                output = function(hidden, *args)
            ctx.save_for_backward(saved)
            ctx.function, ctx.args, ctx.device = function, args, hidden.device
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (saved,) = ctx.saved_tensors
            hidden = to_device(saved, ctx.device).detach()
            hidden.requires_grad_(True)
            kind, dtype, enabled = ctx.autocast
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                output = ctx.function(hidden, *ctx.args)
            torch.autograd.backward(output, gradient)
            return (None, hidden.grad, *(None for _ in ctx.args))

    return OffloadedCheckpointer
