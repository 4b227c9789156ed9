"""Fake tensors in place of weights, 4-bit ones included, so that a 70B step needs no memory."""

from __future__ import annotations

import functools
import math
from typing import Any

from tunecast.calibrate.trace import experts_4bit, int8
from tunecast.model.run import Run

QUANT_BLOCK = 64
"""Weights per absmax (bitsandbytes ``Params4bit`` default blocksize)."""
NESTED_BLOCK = 256
"""Absmax values per second-level absmax (bitsandbytes ``quantize_4bit``, compress_statistics)."""


def make_fake(model: Any, run: Run) -> None:
    """Replace every meta parameter and buffer by a fake CPU one; tied ones stay tied.

    Call inside a FakeTensorMode.
    """
    replaced: dict[int, Any] = {}
    for module in list(model.modules()):
        if run.base_quantization == "bnb-8bit" and int8.is_8bit(module):
            int8.pack(module)
        elif run.bnb_4bit_quant_type is not None and _is_4bit(module):
            _pack(module, run)
        elif run.quantize_moe_experts:
            experts_4bit.pack(module, run)
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None and tensor.device.type == "meta":
                    if id(tensor) not in replaced:
                        replaced[id(tensor)] = _fake_like(tensor)
                    store[name] = replaced[id(tensor)]


def _fake_like(tensor: Any) -> Any:
    import torch

    fake: Any = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _is_4bit(module: Any) -> bool:
    import bitsandbytes as bnb

    return isinstance(module, bnb.nn.Linear4bit)


@functools.cache
def _packed_class() -> type:
    import bitsandbytes as bnb

    class PackedLinear4bit(bnb.nn.Linear4bit):  # type: ignore[misc]
        """Linear4bit whose weight is a plain fake tensor: Params4bit refuses fake ones.

        The forward is bitsandbytes' own, less the CPU inference packing.
        """

        def forward(self, x: Any) -> Any:
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            result = bnb.matmul_4bit(x.to(self.compute_dtype), self.weight, bias=bias, quant_state=self.packed_state)
            return result.to(x.dtype)

    return PackedLinear4bit


def empty_state(shape: Any, dtype: Any, run: Run) -> Any:
    """Statistics of a 4-bit weight of this shape that is restored in `dtype`, empty."""
    import torch
    from bitsandbytes.functional import QuantState

    blocks = -(-math.prod(shape) // QUANT_BLOCK)
    nested = (
        QuantState(
            absmax=torch.empty(-(-blocks // NESTED_BLOCK)),
            code=torch.empty(256),
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
        if run.double_quant
        else None
    )
    return QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8 if run.double_quant else torch.float32),
        shape=torch.Size(shape),
        code=torch.empty(16),
        blocksize=QUANT_BLOCK,
        quant_type=run.bnb_4bit_quant_type,
        dtype=dtype,
        offset=torch.empty(()) if run.double_quant else None,
        state2=nested,
    )


def packed_weight(elements: int) -> Any:
    """Two weights per byte, empty."""
    import torch

    return torch.nn.Parameter(torch.empty((elements + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)


def _pack(module: Any, run: Run) -> None:
    """The tensors that bitsandbytes holds for one quantized weight, empty."""
    module.packed_state = empty_state((module.out_features, module.in_features), module.compute_dtype, run)
    module._parameters["weight"] = packed_weight(module.in_features * module.out_features)
    module.__class__ = _packed_class()


def packed(module: Any) -> list[tuple[Any, Any]]:
    """A module's packed weights with their statistics."""
    state = getattr(module, "packed_state", None)
    return getattr(module, "packed_stacks", []) if state is None else [(module.weight, state)]


def quantized_tensors(model: Any) -> list[Any]:
    """Packed weights and their statistics; second-level code maps are one shared tensor in bitsandbytes."""
    tensors: list[Any] = []
    shared_code: list[Any] = []
    for module in model.modules():
        tensors += getattr(module, "int8_tensors", ())
        for weight, state in packed(module):
            tensors += [weight, state.absmax, state.code]
            if state.nested:
                tensors += [state.state2.absmax, state.offset]
                shared_code = [state.state2.code]
    return tensors + shared_code
