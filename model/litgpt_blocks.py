"""A layer of LitGPT: norms, rotary embedding in fp32, fused attention and feed-forward blocks.

Source: litgpt ``model.py`` of 0.5.13 and of 0.4.13 (``Block``, ``CausalSelfAttention``, ``apply_rope``, ``LLaMAMLP``).
"""

from __future__ import annotations

from tunecast.model import attention_eager as eager
from tunecast.model import primitives as ops
from tunecast.model import primitives_gpt as gpt
from tunecast.model import primitives_heavy as heavy
from tunecast.model import primitives_routing as routing
from tunecast.model.architecture import Attention, Layer
from tunecast.model.context import Step, Tables
from tunecast.model.litgpt import KIND as KIND
from tunecast.model.litgpt import PRESENT, has_stable_embedding, stable_embedding
from tunecast.model.litgpt_linears import linear_map, qkv_map
from tunecast.model.norms import norm
from tunecast.model.operation import Kind
from tunecast.model.tape import Tensor

WAVE_DTYPE = "fp32"
"""Of cos and sin, which ``GPT.max_seq_length`` makes anew outside the precision's context."""


def block(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Attention and feed-forward block, one after the other or side by side."""
    tape, hidden = step.tape, step.architecture.hidden_size
    entry = norm(step, layer.norm, f"{where}.norm_1", x, hidden)
    mixed = attention(step, f"{where}.attn", layer, entry, tables)
    if layer.norm_order == "both":
        mixed = norm(step, layer.norm, f"{where}.post_attention_norm", mixed, hidden)
    below = norm(step, layer.norm, f"{where}.norm_2", x, hidden) if layer.parallel == "norms" else entry
    summed = ops.add(tape, mixed, x, name="residual")
    tape.hold(below)
    if layer.parallel == "none":
        below = norm(step, layer.norm, f"{where}.norm_2", summed, hidden)
    fed = feed_forward(step, f"{where}.mlp", layer, below)
    if layer.norm_order == "both":
        fed = norm(step, layer.norm, f"{where}.post_mlp_norm", fed, hidden)
    out = ops.add(tape, fed, summed, name="residual")
    tape.hold(x, mixed, below, fed)
    return out


def embedded(step: Step, ids: Tensor) -> Tensor:
    """Rows of the table; of a quantized base's table, which takes gradients, normalised."""
    architecture, tape, hidden = step.architecture, step.tape, step.architecture.hidden_size
    table = step.weight("embed_tokens", architecture.embedding_params)
    if not has_stable_embedding(architecture, step.run):
        return heavy.embedding(tape, table, ids, hidden)
    leaves = [Tensor(elements, step.run.dtype, None, leaf=name) for name, elements in stable_embedding(architecture)]
    for leaf in leaves:
        tape.grads.setdefault(str(leaf.leaf), Tensor(leaf.elements, leaf.dtype, None))  # of steps before
    table, weight, bias = leaves
    return gpt.layer_norm(tape, heavy.embedding(tape, table, ids, hidden), weight, bias, name="embedding_norm")


def rotary_tables(step: Step) -> Tables:
    """cos and sin as buffers: nothing is computed in the step."""
    attention_shape = step.architecture.groups[0].layer.attention
    elements = step.run.max_length * (attention_shape.rotary_dim or attention_shape.head_dim)
    waves = Tensor(elements, WAVE_DTYPE, None), Tensor(elements, WAVE_DTYPE, None)
    return Tables(waves=(waves,))


def attention(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """One map, heads, rotary embedding, keys and values for every head, fused attention, projection."""
    shape, tape = layer.attention, step.tape
    whole = qkv_map(step, where, shape, x)
    q, k, v = heads_of(step, shape, whole)
    if shape.qk_norm:
        names = f"{where}.norm_q", f"{where}.norm_k"
        q, k = (norm(step, layer.norm, name, heads, shape.head_dim) for name, heads in zip(names, (q, k), strict=True))
    turned = [rotated(step, shape, heads, tables.waves[0]) for heads in (q, k)]
    q, k = (with_rest(step, shape, heads, part) for heads, part in zip((q, k), turned, strict=True))
    groups = shape.num_heads // shape.num_kv_heads
    if groups > 1 and shape.qkv_split == "slices":
        k, v = (ops.repeat_heads(tape, heads, groups) for heads in (k, v))
    size = heavy.AttentionShape(
        batch=step.run.per_device_train_batch_size,
        heads=shape.num_heads,
        kv_heads=shape.num_heads,
        length=step.run.max_length,
        head_dim=shape.head_dim,
        masked=shape.window is not None,
    )
    mask = None if shape.window is None else window_mask(step, q.dtype)
    if shape.softcap:
        mixed = capped_attention(step, (q, k, v), mask, size)
    else:
        mixed = heavy.flash_attention(tape, q, k, v, size, on_gpu=step.platform == "cuda", bias=mask)
    mixed = ops.copy(tape, mixed, name="head_layout")
    out = linear_map(step, where, shape.linears[-1], mixed)
    tape.hold(whole, q, k, v, *turned, mixed)
    return out


def capped_attention(
    step: Step, heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, size: heavy.AttentionShape
) -> Tensor:
    """Scores capped by a tanh, which no fused kernel has: plain products, an additive mask, a softmax in fp32."""
    tape, (q, k, v) = step.tape, heads
    count, length, dim = size.batch * size.heads, size.length, size.head_dim
    scores = eager.batched_product(tape, "scores", q, k, (count, length, length, dim), b_transposed=True)
    scaled = eager.capped(tape, ops.scale(tape, scores, name="scores_scale"))
    tape.hold(scores)
    mask = causal_mask(step, q.dtype) if mask is None else mask
    masked = ops.elementwise(tape, "scores_mask", (scaled, mask), scaled.elements, scaled.dtype)
    masked = tape.record(masked, (scaled,), lambda grad: (grad,))
    wide = routing.softmax(tape, masked, name="softmax", dtype="fp32")
    weights = ops.cast(tape, wide, q.dtype, name="softmax_cast")
    tape.hold(masked)
    mixed = eager.batched_product(tape, "values", weights, v, (count, length, dim, length), b_transposed=False)
    tape.hold(weights, mask)
    return mixed


def causal_mask(step: Step, dtype: str) -> Tensor:
    """Zeros, and above the diagonal minus infinity or the dtype's smallest number."""
    tape, pairs = step.tape, step.run.max_length**2
    ones = ops.elementwise(tape, "mask.ones", (), pairs, dtype)
    part = ops.elementwise(tape, "mask.triangle", (ones,), pairs, dtype)
    hidden = ops.elementwise(tape, "mask.bool", (part,), pairs, "bool")
    tape.kernel("mask.fill", Kind.MEMORY, (part, hidden), (part,))
    return part


def window_mask(step: Step, dtype: str) -> Tensor:
    """The mask of a sliding window, made anew in every layer however short the samples are: attention runs over all
    pairs. Today it is written row by row, a kernel each."""
    tape, length = step.tape, step.run.max_length
    pairs = length * length

    mask = causal_mask(step, dtype)
    if step.architecture.code != PRESENT:
        tape.kernel("mask.add", Kind.MEMORY, (mask, causal_mask(step, dtype)), (mask,))
        return mask
    window = ops.elementwise(tape, "mask.full", (), pairs, dtype)
    tape.kernel("mask.row", Kind.MEMORY, (), (window,), n_bytes=window.bytes / 2.0, launches=length)
    tape.hold(mask)
    return window


def heads_of(step: Step, shape: Attention, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one map's output."""
    tape, rows = step.tape, step.tokens * shape.head_dim
    sizes = tuple(rows * heads for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
    if shape.qkv_split == "slices":
        q, k, v = gpt.split(tape, whole, sizes, name="qkv_split")
        return by_head(step, q), by_head(step, k), by_head(step, v)
    q, k, v = gpt.split(tape, ops.relayout(tape, whole, name="head_layout"), sizes, name="qkv_split")
    groups = shape.num_heads // shape.num_kv_heads
    if groups == 1:
        return q, k, v
    if shape.num_kv_heads == 1:
        return q, seen_by_all(step, k, groups), seen_by_all(step, v, groups)
    k, v = (ops.repeat_heads(tape, heads, groups) for heads in (k, v))
    return ops.copy(tape, q, name="head_layout"), k, v


def by_head(step: Step, heads: Tensor) -> Tensor:
    """Seen by head: free forward, a copy of the gradient backward."""
    return ops.relayout(step.tape, heads, name="head_layout")


def seen_by_all(step: Step, single: Tensor, times: int) -> Tensor:
    """One head of keys or values as every query head's, in the same memory; the gradient is summed back."""
    tape = step.tape
    out = Tensor(times * single.elements, single.dtype, single.storage, is_view=True)
    return tape.record(
        out, (single,), lambda grad: (ops.elementwise(tape, "repeat_heads", (grad,), single.elements, grad.dtype),)
    )


def rotated(step: Step, shape: Attention, heads: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """``apply_rope`` of the leading part of every head: x cos + rotate_half(x) sin in fp32, converted back."""
    tape, x, (cos, sin) = step.tape, heads, waves
    if shape.rotary_dim is not None:
        x = ops.part(tape, heads, heads.elements * shape.rotary_dim // shape.head_dim, name="rotary_part")
    half = ops.rotate_half(tape, x, name="rotary")
    straight = ops.multiply(tape, x, cos, name="rotary")
    turned = ops.add(tape, straight, ops.multiply(tape, half, sin, name="rotary"), name="rotary")
    tape.hold(half)
    return ops.cast(tape, turned, heads.dtype, name="rotary")


def with_rest(step: Step, shape: Attention, heads: Tensor, turned: Tensor) -> Tensor:
    """The rotated part joined with the rest of every head, even an empty one."""
    del shape
    rest = ops.part(step.tape, heads, heads.elements - turned.elements, name="rotary_part")
    return gpt.concatenated(step.tape, turned, rest, name="rotary_part")


def feed_forward(step: Step, where: str, layer: Layer, x: Tensor) -> Tensor:
    """proj(act(fc_1(x)) fc_2(x)), or proj(act(fc(x)))."""
    tape, mlp = step.tape, layer.mlp
    made = [linear_map(step, where, linear, x) for linear in mlp.linears[:-1]]
    inner = ops.activation(tape, made[0], name=mlp.activation)
    if mlp.gated:
        inner = ops.multiply(tape, inner, made[1], name="gated")
    out = linear_map(step, where, mlp.linears[-1], inner)
    tape.hold(inner, *(made if mlp.gated else ()))
    return out
