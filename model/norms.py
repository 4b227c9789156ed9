"""Norms over the last dimension, kernel by kernel.

Source: transformers 5 ``LlamaRMSNorm`` and its relatives.
"""

from __future__ import annotations

from tunecast.model import fused
from tunecast.model import primitives as ops
from tunecast.model import primitives_gpt as gpt
from tunecast.model.architecture import has_bias
from tunecast.model.context import Step
from tunecast.model.tape import Tensor


def norm(step: Step, kind: str, name: str, x: Tensor, width: int) -> Tensor:
    """RMSNorm over the last dimension of `width`, computed in fp32.

    Scaled in the weight's dtype (``rmsnorm``), in fp32 (``rmsnorm-wide``), or in fp32 by one plus the weight
    (``rmsnorm-shifted``); ``rmsnorm-power`` (Gemma 4) is scaled in fp32 too, its root a power.
    """
    if kind == "centred":
        return centred_norm(step, name, x, width)
    if kind.startswith("layernorm"):
        return layer_norm(step, kind, name, x, width)
    if kind.startswith("litgpt"):
        return litgpt_norm(step, kind, name, x, width)
    if kind == "rmsnorm-power" and not step.run.fuses("rms_norm"):
        return power_norm(step, x, width, step.weight(name, width))
    if step.run.fuses("rms_norm"):
        return fused.rms_norm(step, name, x, width)
    tape, rows = step.tape, x.elements // width
    wide = ops.cast(tape, x, "fp32", name="rmsnorm")
    variance = ops.row_mean(tape, ops.square(tape, wide, name="rmsnorm"), rows, name="rmsnorm")
    root = ops.reciprocal_root(tape, ops.shift(tape, variance, name="rmsnorm"), name="rmsnorm")
    normed = ops.multiply(tape, wide, root, name="rmsnorm")
    weight = step.weight(name, width)
    if kind == "rmsnorm":
        narrow = ops.cast(tape, normed, x.dtype, name="rmsnorm")
        out = ops.multiply(tape, narrow, weight, name="rmsnorm")
    else:
        if kind == "rmsnorm-shifted":
            weight = ops.shift(tape, ops.cast(tape, weight, "fp32", name="rmsnorm"), name="rmsnorm")
        out = ops.cast(tape, ops.multiply(tape, normed, weight, name="rmsnorm"), x.dtype, name="rmsnorm")
    tape.hold(normed, variance)
    return out


def power_norm(step: Step, x: Tensor, width: int, weight: Tensor | None) -> Tensor:
    """x times (mean of squares + eps) ** -0.5 in fp32, times a weight where there is one.

    Source: transformers 5 ``Gemma4RMSNorm``.
    """
    tape, rows = step.tape, x.elements // width
    wide = ops.cast(tape, x, "fp32", name="rmsnorm")
    variance = ops.row_mean(tape, ops.square(tape, wide, name="rmsnorm"), rows, name="rmsnorm")
    shifted = ops.shift(tape, variance, name="rmsnorm")
    normed = ops.multiply(tape, wide, ops.power_root(tape, shifted, name="rmsnorm"), name="rmsnorm")
    tape.hold(shifted)
    if weight is not None:
        normed = ops.multiply(tape, normed, ops.cast(tape, weight, "fp32", name="rmsnorm"), name="rmsnorm")
    out = ops.cast(tape, normed, x.dtype, name="rmsnorm")
    tape.hold(x)
    return out


def plain_norm(step: Step, x: Tensor, width: int) -> Tensor:
    """`power_norm` without a weight (Gemma 4's values)."""
    return power_norm(step, x, width, None)


def litgpt_norm(step: Step, kind: str, name: str, x: Tensor, width: int) -> Tensor:
    """LitGPT's ``RMSNorm``: a product for the square; scaled in fp32 (``shifted``: by one plus the weight)."""
    tape, rows = step.tape, x.elements // width
    wide = ops.cast(tape, x, "fp32", name="rmsnorm")
    variance = ops.row_mean(tape, ops.multiply(tape, wide, wide, name="rmsnorm"), rows, name="rmsnorm")
    root = ops.reciprocal_root(tape, ops.shift(tape, variance, name="rmsnorm"), name="rmsnorm")
    normed = ops.multiply(tape, wide, root, name="rmsnorm")
    weight = step.weight(name, width)
    if kind.endswith("shifted"):
        weight = ops.shift(tape, weight, name="rmsnorm")
    weight = ops.cast(tape, weight, "fp32", name="rmsnorm")
    out = ops.cast(tape, ops.multiply(tape, normed, weight, name="rmsnorm"), x.dtype, name="rmsnorm")
    tape.hold(wide, variance, normed)
    return out


def layer_norm(step: Step, kind: str, name: str, x: Tensor, width: int) -> Tensor:
    """``nn.LayerNorm``; CUDA's autocast runs it in fp32, result included (``autocast_mode.h``, AT_FORALL_FP32)."""
    tape, dtype = step.tape, None
    if step.autocast_dtype is not None and step.platform == "cuda":
        dtype = step.autocast_dtype if kind.startswith("layernorm-low") else "fp32"
    affine = [step.weight(name, width)]
    if has_bias(kind):
        affine.append(step.weight(f"{name}.bias", width))
    if dtype is not None:
        x = ops.cast(tape, x, dtype, name="layernorm_cast")
        affine = [ops.cast(tape, tensor, dtype, name="layernorm_cast") for tensor in affine]
    return gpt.layer_norm(tape, x, affine[0], affine[1] if len(affine) > 1 else None, name="layernorm")


def centred_norm(step: Step, name: str, x: Tensor, width: int) -> Tensor:
    """A layer norm without a bias written out in fp32: the mean taken away, scaled by root and weight.

    Source: transformers 5 ``CohereLayerNorm``.
    """
    tape, rows = step.tape, x.elements // width
    wide = ops.cast(tape, x, "fp32", name="layernorm")
    mean = ops.row_mean(tape, wide, rows, name="layernorm")
    spread = ops.square(tape, gpt.less(tape, wide, mean, name="layernorm"), name="layernorm")
    variance = ops.row_mean(tape, spread, rows, name="layernorm")
    apart = gpt.less(tape, wide, mean, name="layernorm")
    root = ops.reciprocal_root(tape, ops.shift(tape, variance, name="layernorm"), name="layernorm")
    normed = ops.multiply(tape, apart, root, name="layernorm")
    weight = ops.cast(tape, step.weight(name, width), "fp32", name="layernorm")
    out = ops.multiply(tape, normed, weight, name="layernorm")
    tape.hold(mean, variance, normed)
    return ops.cast(tape, out, x.dtype, name="layernorm")
