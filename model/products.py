"""Matrix products with the operands' casts of autocast."""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.attention_eager import batched_product
from tunecast.model.context import Step
from tunecast.model.tape import Tensor

ENTRY = "the input of a checkpoint"
"""Key of its cast among those of trained weights."""


def operands(step: Step, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The operands of a linear map, cast when autocast is on, the weight first."""
    dtype = step.autocast_dtype
    if dtype is None:
        return x, weight
    cast_weight = ops.autocast_weight(step.tape, weight, dtype, step.cache)
    return cast_input(step, x, dtype), cast_weight


def cast_input(step: Step, x: Tensor, dtype: str) -> Tensor:
    """The input in autocast's dtype: a leaf (embedded tokens that PEFT makes need a gradient) is cast once for all its
    maps, as a trained weight is. So is a layer's input in fp32 that a reentrant checkpoint has detached."""
    if x.leaf is not None:
        return ops.autocast_weight(step.tape, x, dtype, step.cache)
    if x is not step.tape.entry or x.dtype != "fp32" or not x.needs_grad:
        return ops.cast(step.tape, x, dtype)
    if ENTRY not in step.cache:
        step.cache[ENTRY] = ops.cast(step.tape, x, dtype)
    return step.cache[ENTRY]


def product(step: Step, name: str, x: Tensor, weight: Tensor, *, k: int, n: int, bias: Tensor | None = None) -> Tensor:
    """A linear map, its operands cast when autocast is on, last argument first."""
    dtype = step.autocast_dtype
    if dtype is None:
        return ops.matmul(step.tape, name, x, weight, k=k, n=n, bias=bias)
    cast_bias = None if bias is None else ops.autocast_weight(step.tape, bias, dtype, step.cache)
    cast_weight = ops.autocast_weight(step.tape, weight, dtype, step.cache)
    cast_x = cast_input(step, x, dtype)
    return ops.matmul(step.tape, name, cast_x, cast_weight, k=k, n=n, bias=cast_bias)


def product_by_sample(step: Step, name: str, x: Tensor, weight: Tensor, samples: int, *, k: int, n: int) -> Tensor:
    """Rows that are not all below each other in memory times a frozen weight: a kernel for a product of each sample's.

    PyTorch folds samples into rows only where that takes no copy, or where the weight is trained (``should_fold`` of
    ``LinearAlgebra.cpp``); rows that are a part of one sample it does not fold either.
    """
    cast_x, cast_weight = operands(step, x, weight)
    sizes = (samples, x.elements // (k * samples), n, k)
    return batched_product(step.tape, name, cast_x, cast_weight, sizes, b_transposed=True)
