"""Attention of families that do not call transformers' shared functions: BLOOM, MPT, GPT-J and Falcon.

Sources: transformers 5 ``modeling_bloom.py``, ``modeling_mpt.py``, ``modeling_gptj.py``,
``modeling_falcon.py``; PyTorch's
``_scaled_dot_product_attention_math``, which runs where key heads are neither one per query head nor grouped.
"""

from __future__ import annotations

from dataclasses import replace

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model import attention_eager as eager
from tunecast.model import primitives as ops
from tunecast.model import primitives_gpt as gpt
from tunecast.model import primitives_heavy as heavy
from tunecast.model import primitives_routing as routing
from tunecast.model.architecture import Attention, Layer
from tunecast.model.attention_blocks import mixed_heads, rotary
from tunecast.model.context import Step, Tables
from tunecast.model.linears import linear_map
from tunecast.model.tape import Grads, Tape, Tensor, widest


def sizes_of(step: Step, block: Attention) -> tuple[int, int, int, int]:
    """(matrices, length, length, head size) of the scores."""
    length = step.run.max_length
    return step.run.per_device_train_batch_size * block.num_heads, length, length, block.head_dim


def refuse_flash(step: Step) -> None:
    """These run plain products whatever is asked; transformers refuses flash kernels for them."""
    if step.run.flash:
        raise NotSupportedError(
            f"--attn-implementation {step.run.attn_implementation} was asked for, but transformers has none for "
            f"{step.architecture.model_type}; leave the option out."
        )


def bloom_attention(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Scores on top of ALiBi in one product, an additive mask, a softmax in fp32."""
    refuse_flash(step)
    block, tape, batch = layer.attention, step.tape, step.run.per_device_train_batch_size
    assert tables.alibi is not None
    assert tables.mask is not None
    whole = linear_map(step, where, block.linears[0], x)
    picked = [
        gpt.selected(tape, whole, step.tokens * block.num_heads * block.head_dim, name="qkv_split") for _ in "qkv"
    ]
    q, k, v = (eager.folded(tape, heads, batch) for heads in picked)
    dtype = step.autocast_dtype or q.dtype
    slopes, q, k = (ops.cast(tape, tensor, dtype) for tensor in (tables.alibi, q, k))
    scores = biased_scores(tape, slopes, q, k, sizes_of(step, block))
    masked = ops.elementwise(
        tape, "scores_mask", (scores, tables.mask), scores.elements, widest((scores.dtype, tables.mask.dtype))
    )
    masked = tape.record(masked, (scores,), lambda grad: (grad,))
    mixed = weighted_values(step, block, masked, v, dtype)
    out = linear_map(step, where, block.linears[-1], mixed)
    tape.hold(whole, scores, masked, mixed)
    return out


def biased_scores(tape: Tape, bias: Tensor, q: Tensor, k: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """``baddbmm``: bias + scale q k'. Backward: a product and a scaling for each operand, queries first."""
    count, rows, columns, dim = sizes
    if tape.would_grad(q, k):
        tape.mark_saved()
    out = ops.product_onto(tape, "scores", bias, (q, k), (rows, columns, dim, count), "nt")

    def backward(grad: Tensor) -> Grads:
        made: list[Tensor | None] = []
        for operand, other, shape, layout in (
            (q, k, (rows, dim, columns, count), "nn"),
            (k, q, (dim, columns, rows, count), "tn"),
        ):
            given = None
            if operand.needs_grad:
                given = ops.gradient_gemm(tape, "scores", grad, other, shape, layout)
                given = ops.elementwise(tape, "scores_scale", (given,), given.elements, given.dtype)
            made.append(given)
        return made

    return tape.record(out, (q, k), backward, saves=(q, k))


def weighted_values(
    step: Step, block: Attention, masked: Tensor, v: Tensor, dtype: str, *, keeps_scores: bool = True
) -> Tensor:
    """Softmax in fp32, back to the values' dtype, times values; heads side by side again."""
    tape, batch = step.tape, step.run.per_device_train_batch_size
    count, length, _, dim = sizes_of(step, block)
    weights = routing.softmax(tape, masked, name="softmax", dtype="fp32")
    tape.hold(masked)
    narrow = ops.cast(tape, weights, v.dtype, name="softmax_cast")
    tape.hold(weights, *((masked,) if keeps_scores else ()))
    step.returned.append(narrow)
    operands = ops.cast(tape, narrow, dtype), ops.cast(tape, v, dtype)
    mixed = eager.batched_product(tape, "values", *operands, (count, length, dim, length), b_transposed=False)
    return eager.unfolded(tape, mixed, batch)


def mpt_attention(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Scaled scores plus ALiBi in fp32, masked by filling, a softmax."""
    refuse_flash(step)
    block, tape, batch = layer.attention, step.tape, step.run.per_device_train_batch_size
    assert tables.alibi is not None
    assert tables.mask is not None
    whole = linear_map(step, where, block.linears[0], x)
    width = step.tokens * block.num_heads * block.head_dim
    q, k, v = gpt.split(tape, whole, (width, width, width), name="qkv_split")
    q, k = (ops.relayout(tape, heads, name="head_layout") for heads in (q, k))
    q, k, v = (eager.folded(tape, heads, batch) for heads in (q, k, v))
    dtype = step.autocast_dtype or q.dtype
    operands = ops.cast(tape, q, dtype), ops.cast(tape, k, dtype)
    scores = eager.batched_product(tape, "scores", *operands, sizes_of(step, block), b_transposed=True)
    scores = ops.scale(tape, scores, name="scores_scale")
    slopes = Tensor(block.num_heads * step.run.max_length, tables.alibi.dtype, tables.alibi.storage)
    biased = ops.elementwise(
        tape, "scores_alibi", (scores, slopes), scores.elements, widest((scores.dtype, slopes.dtype))
    )
    biased = tape.record(biased, (scores,), lambda grad: (grad,))
    masked = gpt.filled(tape, biased, tables.mask, name="scores_mask")
    mixed = weighted_values(step, block, masked, v, dtype)
    out = linear_map(step, where, block.linears[-1], mixed)
    tape.hold(whole, masked, mixed)
    return out


def gptj_waves(step: Step, block: Attention, dtype: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sines and cosines gathered anew in every layer from a table of all positions, and what the code holds of it."""
    tape, length, dim = step.tape, step.run.max_length, block.rotary_dim or block.head_dim
    rows = step.architecture.max_position or length
    table = ops.elementwise(tape, "rotary.repeat", (Tensor(rows * dim, "fp32", None),), rows * dim, "fp32")
    index = ops.elementwise(tape, "rotary.repeat", (Tensor(length, "int64", None),), length * dim, "int64")
    both = ops.elementwise(tape, "rotary.gather", (table, index), length * dim, "fp32")
    return ops.cast(tape, both, dtype, name="rotary.cast"), (table, index)


def gptj_rotated(step: Step, block: Attention, x: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """The leading part of every head rotated by sines and cosines repeated for neighbours, joined with the rest.

    Also the rotated part alone, which the code keeps by name.
    """
    tape, dim = step.tape, block.rotary_dim or block.head_dim
    half = Tensor(both.elements // 2, both.dtype, both.storage)
    sin, cos = (ops.elementwise(tape, "rotary.repeat", (half,), both.elements, both.dtype) for _ in range(2))
    turned = x.elements * dim // block.head_dim
    leading = ops.part(tape, x, turned, name="rotary_part")
    rest = ops.part(tape, x, x.elements - turned, name="rotary_part")
    rotated = rotary(step, leading, (cos, sin))
    return gpt.concatenated(tape, rotated, rest, name="rotary_part"), rotated


def gptj_attention(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Queries and keys in fp32, scores divided, an additive mask, a softmax in the scores' dtype."""
    refuse_flash(step)
    block, tape, batch = layer.attention, step.tape, step.run.per_device_train_batch_size
    assert tables.mask is not None
    q, k, v = (linear_map(step, where, linear, x) for linear in block.linears[:3])
    v = ops.relayout(tape, v, name="head_layout")
    both, held = gptj_waves(step, block, k.dtype)
    plain = q, k  # whose parts without rotation the code keeps by name
    (k, *k_turned), (q, *q_turned) = (gptj_rotated(step, block, heads, both) for heads in (k, q))
    wide = [ops.cast(tape, heads, "fp32") for heads in (q, k)]
    dtype = step.autocast_dtype or "fp32"
    rows, columns = (eager.folded(tape, ops.cast(tape, heads, dtype), batch) for heads in wide)
    scores = eager.batched_product(tape, "scores", rows, columns, sizes_of(step, block), b_transposed=True)
    scaled = ops.scale(tape, scores, name="scores_scale")
    masked = ops.elementwise(
        tape, "scores_mask", (scaled, tables.mask), scaled.elements, widest((scaled.dtype, tables.mask.dtype))
    )
    masked = tape.record(masked, (scaled,), lambda grad: (grad,))
    values = eager.folded(tape, v, batch)
    mixed = weighted_values(step, block, masked, values, step.autocast_dtype or v.dtype, keeps_scores=False)
    tape.hold(*wide)
    out = linear_map(step, where, block.linears[-1], mixed)
    tape.hold(q, k, v, mixed, both, *held, *plain, *k_turned, *q_turned)
    return out


def falcon_attention(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """One map for queries and the few key and value heads; these repeated for every query, or one for all.

    As many of them as queries need not be repeated, and queries are then seen by head as they lie.
    """
    block, tape = layer.attention, step.tape
    if step.run.attn_implementation == "eager":
        raise NotSupportedError("Falcon's eager attention has no formulas; use --attn-implementation sdpa.")
    whole = linear_map(step, where, block.linears[0], x)
    rows, repeated, groups = step.tokens * block.head_dim, block.num_kv_heads > 1, block.num_heads // block.num_kv_heads
    q = ops.part(tape, whole, rows * block.num_heads, name="qkv_split")
    k, v = (gpt.gathered(tape, whole, rows * block.num_kv_heads, name="qkv_split") for _ in "kv")
    if repeated and groups > 1:
        q = ops.copy(tape, q, name="head_layout")
        k, v = (ops.repeat_heads(tape, heads, groups) for heads in (k, v))
        block = replace(block, num_kv_heads=block.num_heads)
    plain = q, k
    q, k = rotary(step, q, tables.waves[0]), rotary(step, k, tables.waves[0])
    tape.hold(*plain)
    if repeated or step.run.flash:
        mixed = mixed_heads(step, where, block, q, k, v, tables.mask)
    else:
        mixed = plain_products(step, block, q, k, v, tables.mask)
    out = linear_map(step, where, block.linears[-1], mixed)
    tape.hold(whole, q, k, v, mixed)
    return out


def plain_products(step: Step, block: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention as PyTorch composes it where no fused kernel takes the heads: everything in fp32."""
    tape, batch = step.tape, step.run.per_device_train_batch_size
    assert mask is not None
    count, length, _, dim = sizes_of(step, block)
    if step.autocast_dtype is not None:
        q, k, v = (ops.cast(tape, tensor, step.autocast_dtype) for tensor in (q, k, v))
    dtype = q.dtype
    shape = heavy.AttentionShape(batch=batch, heads=1, kv_heads=1, length=length, head_dim=dim)
    numbers = heavy.mask_bias(tape, mask, dtype, shape)
    q, k, v = wide = [ops.cast(tape, tensor, "fp32") for tensor in (q, k, v)]
    scaled, k = (ops.scale(tape, tensor, name="scores_scale") for tensor in (q, k))
    q = eager.folded(tape, scaled, batch)
    k = ops.repeat_heads(tape, k, block.num_heads, single=batch == 1)
    scores = eager.batched_product(tape, "scores", q, k, (count, length, length, dim), b_transposed=True)
    masked = ops.elementwise(tape, "scores_mask", (scores, numbers), scores.elements, "fp32")
    masked = tape.record(masked, (scores,), lambda grad: (grad,))
    weights = routing.softmax(tape, masked, name="softmax", dtype="fp32")
    tape.hold(masked, scaled, *wide)
    if dtype != weights.dtype:  # returned beside the output, unused
        ops.elementwise(tape, "softmax_cast", (weights,), weights.elements, dtype)
    v = ops.repeat_heads(tape, v, block.num_heads, single=batch == 1)
    mixed = eager.batched_product(tape, "values", weights, v, (count, length, dim, length), b_transposed=False)
    mixed = ops.cast(tape, eager.gradient_folded(tape, mixed, batch), dtype)
    return eager.unfolded(tape, mixed, 1)  # its gradient is copied in fp32 already
