"""Matrix products with the operands' casts of autocast."""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.context import Step
from tunecast.model.tape import Tensor


def operands(step: Step, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The operands of a linear map, cast when autocast is on, the weight first."""
    dtype = step.autocast_dtype
    if dtype is None:
        return x, weight
    cast_weight = ops.autocast_weight(step.tape, weight, dtype, step.cache)
    return ops.cast(step.tape, x, dtype), cast_weight


def product(step: Step, name: str, x: Tensor, weight: Tensor, *, k: int, n: int, bias: Tensor | None = None) -> Tensor:
    """A linear map, its operands cast when autocast is on, last argument first."""
    dtype = step.autocast_dtype
    if dtype is None:
        return ops.matmul(step.tape, name, x, weight, k=k, n=n, bias=bias)
    cast_bias = None if bias is None else ops.autocast_weight(step.tape, bias, dtype, step.cache)
    cast_weight = ops.autocast_weight(step.tape, weight, dtype, step.cache)
    cast_x = ops.cast(step.tape, x, dtype)
    return ops.matmul(step.tape, name, cast_x, cast_weight, k=k, n=n, bias=cast_bias)
