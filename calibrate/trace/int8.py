"""bitsandbytes' 8-bit layers on fake tensors: the real autograd function over a hand-made int8 weight.

What the GPU's kernels do in Python code of their own (``backends/cuda/ops.py``) is repeated here, since the operators
are opaque to a trace: the search for outliers, whose result depends on data and is taken as none, and the product in
int32, then fp16, then the input's dtype.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock


def replaced_maps(model: Any) -> list[str]:
    """Names of the modules that transformers replaces by bitsandbytes': linear maps, GPT-2's transposed ones too, of no
    class of their own and not the head."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [n for n, m in model.named_modules() if type(m) in (torch.nn.Linear, Conv1D) and m is not head]


def quantize_linears(model: Any) -> None:
    """Replace every linear map but the head by bitsandbytes' 8-bit one, as transformers does (GPT-2's transposed)."""
    import bitsandbytes as bnb
    from transformers.pytorch_utils import Conv1D

    for name in replaced_maps(model):
        old = model.get_submodule(name)
        n_out, n_in = old.weight.shape[::-1] if type(old) is Conv1D else old.weight.shape
        new = bnb.nn.Linear8bitLt(n_in, n_out, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
        new.bias = old.bias
        new.weight.requires_grad_(False)
        model.set_submodule(name, new)
    model.is_loaded_in_8bit = True


def is_8bit(module: Any) -> bool:
    """Whether a module is a bitsandbytes 8-bit layer."""
    import bitsandbytes as bnb

    return isinstance(module, bnb.nn.Linear8bitLt)


@functools.cache
def _packed_class() -> type:
    import bitsandbytes as bnb
    from bitsandbytes.autograd._functions import MatMul8bitLt

    class PackedLinear8bitLt(bnb.nn.Linear8bitLt):  # type: ignore[misc]
        """Linear8bitLt whose weight is a plain fake tensor."""

        def forward(self, x: Any) -> Any:
            with _as_on_cuda():
                return MatMul8bitLt.apply(x, self.weight, None, self.bias, self.state)

    return PackedLinear8bitLt


def pack(module: Any) -> None:
    """The tensors that bitsandbytes holds for one 8-bit weight, empty."""
    import torch

    shape = (module.out_features, module.in_features)
    module._parameters["weight"] = torch.nn.Parameter(torch.empty(shape, dtype=torch.int8), requires_grad=False)
    module.state.CB, module.state.SCB = module.weight, torch.empty(module.out_features)
    module.state.threshold = 0.0
    module.int8_tensors = [module.weight, module.state.SCB]
    module.__class__ = _packed_class()


def _as_on_cuda() -> Any:
    import contextlib

    import bitsandbytes.functional as functional
    import torch

    stack = contextlib.ExitStack()
    product = SimpleNamespace(default=_product)
    stack.enter_context(mock.patch.object(torch.ops.bitsandbytes, "int8_scaled_mm", product))
    stack.enter_context(mock.patch.object(functional, "int8_vectorwise_quant", _quantize))
    return stack


def _quantize(x: Any, threshold: float = 0.0) -> Any:
    import torch

    del threshold
    outliers = x.abs() >= 6.0
    bool(outliers.any())
    return torch.ops.bitsandbytes.int8_vectorwise_quant.default(x, 0.0)


def _product(a: Any, b: Any, rows: Any, columns: Any, *, bias: Any = None, dtype: Any = None) -> Any:
    import torch

    wide = torch.ops.bitsandbytes.int8_linear_matmul.default(a, b)
    half = torch.ops.bitsandbytes.int8_mm_dequant.default(wide, rows, columns, dtype=torch.float16)
    if bias is not None:
        half.add_(bias)
    return half.to(dtype)
