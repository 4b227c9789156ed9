"""Attention blocks: projections, position embedding, the attention call, output projection.

Source: transformers 5 ``modeling_llama.py`` and its relatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tunecast.model import attention_eager as eager
from tunecast.model import fused, fused_lora
from tunecast.model import primitives as ops
from tunecast.model import primitives_gpt as gpt
from tunecast.model import primitives_heavy as heavy
from tunecast.model import primitives_routing as routing
from tunecast.model.architecture import Attention, Layer, Linear
from tunecast.model.context import Step, Tables
from tunecast.model.linears import linear_map
from tunecast.model.norms import norm
from tunecast.model.operation import SYNCHRONISATION, Kind, Phase
from tunecast.model.run import Run
from tunecast.model.shapes import OWN, TURNED_FIRST
from tunecast.model.stacks import FLASH_3
from tunecast.model.tape import Tensor

UNSLOTH = "unsloth"
OWN_ATTENTIONS = ("bloom", "mpt", "gptj", "falcon")
"""Kinds written in ``attention_own.py``."""


def rotary(step: Step, x: Tensor, waves: tuple[Tensor, Tensor], *, joined: bool = False) -> Tensor:
    """Rotary position embedding in plain PyTorch: x cos + rotate_half(x) sin.

    `joined`: by code that joins the rotated part with the rest, even where the rest is empty.
    """
    if joined:
        x = ops.whole_and_rest(step.tape, x, name="rotary")
    if step.run.fuses("rope"):
        return fused.rotary(step, x, waves)
    cos, sin = waves
    straight = ops.multiply(step.tape, x, cos, name="rotary")
    turned = ops.multiply(step.tape, ops.rotate_half(step.tape, x, name="rotary"), sin, name="rotary")
    turned = ops.add(step.tape, straight, turned, name="rotary")
    return ops.joined(step.tape, turned, name="rotary") if joined else turned


def joins(block: Attention) -> bool:
    """Whether rotated parts of heads are joined with the rest, even an empty one (Phi-3, GLM): heads then lie in
    order."""
    always = block.rotary_joins or (block.fused and block.qkv_split == "slices")
    return block.rotary and (block.rotary_dim is not None or always)


def laid_out_pairs(step: Step, block: Attention, waves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """cos and sin with each number of their first half twice in a row (``repeat_interleave``), a copy of each."""
    if not block.rotary_pairs:
        return waves
    halves = (Tensor(wave.elements // 2, wave.dtype, wave.storage) for wave in waves)
    cos, sin = (ops.elementwise(step.tape, "rotary.repeat", (half,), 2 * half.elements, half.dtype) for half in halves)
    return cos, sin


def rotated_heads(step: Step, block: Attention, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """All of every head rotated, or its leading part, joined again with the rest."""
    if block.rotary_halves:
        return rotated_halves(step, x, waves)
    if block.rotary_dim is None:
        return rotary(step, x, waves, joined=joins(block))
    turned = x.elements * block.rotary_dim // block.head_dim
    leading = ops.part(step.tape, x, turned, name="rotary_part")
    rest = ops.part(step.tape, x, x.elements - turned, name="rotary_part")
    rotated = rotary(step, leading, waves)
    rest = ops.cast(step.tape, rest, rotated.dtype, name="rotary_part")  # of two dtypes, autocast's ``cat`` takes one
    return gpt.concatenated(step.tape, rotated, rest, name="rotary_part")


def turned_pairs(step: Step, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """Every other number of a head and its neighbour rotated into each other, by half of each table (DeepSeek-V3)."""
    halves = tuple(Tensor(wave.elements // 2, wave.dtype, wave.storage) for wave in waves)
    parts = [ops.part(step.tape, x, x.elements // 2, name="rotary") for _ in range(2)]
    return turned_into_each_other(step, parts[0], parts[1], halves)


def rotated_halves(step: Step, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """Both halves of every head rotated into each other (gpt-oss)."""
    first, second = ops.chunks(step.tape, x, 2, name="rotary")
    return turned_into_each_other(step, first, second, waves)


def turned_into_each_other(step: Step, first: Tensor, second: Tensor, waves: tuple[Tensor, ...]) -> Tensor:
    """Joined (a cos - b sin, b cos + a sin)."""
    tape, name, (cos, sin) = step.tape, "rotary", waves
    straight = ops.multiply(tape, first, cos, name=name)
    left = routing.subtract(tape, straight, ops.multiply(tape, second, sin, name=name), name=name)
    straight = ops.multiply(tape, second, cos, name=name)
    right = ops.add(tape, straight, ops.multiply(tape, first, sin, name=name), name=name)
    return gpt.concatenated(tape, left, right, name=name)


def attention_block(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Projections, rotary embedding, fused attention and output projection."""
    block, tape = layer.attention, step.tape
    q, k, v = fused_heads(step, where, block, x) if block.fused else split_heads(step, where, layer, x)
    plain = q, k
    if block.rotary:
        waves = laid_out_pairs(step, block, tables.waves[-1 if block.window is None else 0])
        by_flash = step.architecture.rotary_by_flash and step.run.attn_implementation.startswith("flash")
        if step.architecture.rotary_early or by_flash:
            q, k = (ops.cast(tape, heads, "fp32", name="rotary") for heads in (q, k))
        if by_flash:
            q, k = (fused.flash_rotary(tape, heads, waves) for heads in (q, k))
        else:
            q, k = (rotated_heads(step, block, heads, waves) for heads in (q, k))
        tape.hold(*waves)
    if block.rotary and (step.architecture.rotary_wide or step.architecture.rotary_early):
        q, k = (ops.cast(tape, rotated, step.activation_dtype, name="rotary") for rotated in (q, k))
    if block.q_scaled_by_position:
        q = scaled_by_position(step, q)
    tape.hold(*plain)
    if block.kind == TURNED_FIRST:
        turned = q, k
        q, k = normed_heads(step, where, layer, q, k)
        tape.hold(*turned)
    mask = tables.mask_of(block.window) if needs_mask(block, step.run) else None
    mixed = mixed_heads(step, where, block, q, k, v, mask)
    if joins(block) and step.run.attn_implementation != "eager":
        mixed = ops.copy(tape, mixed, name="head_layout")
    out = projector(step, where, block.linears[-1:], mixed)(block.linears[-1])
    tape.hold(q, k, v, mixed)
    return out


def scaled_by_position(step: Step, q: Tensor) -> Tensor:
    """Queries times 1 + beta log(1 + floor(position / positions of the pretraining)), a number per token that every
    layer makes anew in fp32.

    Source: transformers 5 ``modeling_ministral3.py``, ``get_llama_4_attn_scale``.
    """
    tape, length, name = step.tape, step.run.max_length, "q_scale"
    number = Tensor(length, "int64", None)
    for _ in ("divide", "floor", "shift", "log", "multiply", "shift"):
        number = ops.elementwise(tape, name, (number,), length, "fp32")
    return ops.multiply(tape, q, ops.cast(tape, number, q.dtype, name=name), name=name)


def projector(step: Step, where: str, linears: Sequence[Linear], x: Tensor) -> Callable[[Linear], Tensor]:
    """Maps of one input, each when it is asked for, or all at once where one kernel's function has them."""
    if not fused_lora.covers(step, linears):
        return lambda linear: linear_map(step, where, linear, x)
    made = fused_lora.maps(step, where, linears, x)
    return dict(zip(linears, made, strict=True)).__getitem__


def split_heads(step: Step, where: str, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values from a map each; queries and keys laid out by head, and normalised."""
    block, made = layer.attention, []
    project = projector(step, where, block.linears[:3], x)
    for name, linear in zip(("q_norm", "k_norm"), block.linears, strict=False):
        heads = project(linear)
        if block.q_scaled and name == "q_norm":
            heads = ops.scale(step.tape, heads, name="q_scale")
        if block.qk_norm and not block.qk_norm_by_head:
            made.append(norm(step, layer.norm, f"{where}.{name}", heads, linear.out_features))
            continue
        by_head = laid_out(step, block, heads, keys=name == "k_norm")
        early = block.qk_norm and not (block.qk_norm_late or block.kind == TURNED_FIRST)
        normed = norms_of_heads if block.qk_norm_each else norm
        made.append(normed(step, layer.norm, f"{where}.{name}", by_head, block.head_dim) if early else by_head)
    v = project(block.linears[2])
    q, k = made
    if block.qk_norm_late:
        q, k = normed_heads(step, where, layer, q, k)
    elif block.qk_norm and not block.qk_norm_by_head:
        q, k = (laid_out(step, block, heads) for heads in made)
    return q, k, v


def normed_heads(step: Step, where: str, layer: Layer, *heads: Tensor) -> list[Tensor]:
    """Queries and keys that were laid out by head, each normalised head by head."""
    width = layer.attention.head_dim
    return [
        norm(step, layer.norm, f"{where}.{name}", each, width)
        for name, each in zip(("q_norm", "k_norm"), heads, strict=True)
    ]


def norms_of_heads(step: Step, kind: str, name: str, x: Tensor, head_dim: int) -> Tensor:
    """A norm without a bias for every head, each its own kernel, joined again."""
    del kind
    rows = step.tokens * head_dim
    heads = gpt.split(step.tape, x, (rows,) * (x.elements // rows), name="qk_norm")
    made = [norm(step, "layernorm-plain", f"{name}.{i}", head, head_dim) for i, head in enumerate(heads)]
    return gpt.joined_all(step.tape, made, name="qk_norm")


def laid_out(step: Step, block: Attention, heads: Tensor, *, keys: bool = False) -> Tensor:
    """Queries or `keys` seen by head: free forward; backward a copy of the gradient, unless nothing changes it. Eager
    products change it too: that of queries, and of keys where they are repeated for their queries; else keys' comes
    turned as it is needed, but where a map of their own takes several samples of them as one."""
    single = heads.elements == step.tokens * block.head_dim or step.run.fuses("rope")
    eager = step.run.attn_implementation == "eager"
    as_needed = keys and (block.fused or step.run.per_device_train_batch_size == 1)
    repeated = eager and block.num_heads > block.num_kv_heads
    turned = block.rotary or repeated or (eager and not block.qk_norm and not as_needed)
    return ops.relayout(step.tape, heads, name="head_layout") if turned and not single else heads


def fused_heads(step: Step, where: str, block: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as slices of one map's output."""
    whole = linear_map(step, where, block.linears[0], x)
    if block.qkv_split != "slices":
        return chunked_heads(step, block, whole)
    widths = (block.num_heads, block.num_kv_heads, block.num_kv_heads)
    rows = step.tokens * block.head_dim
    q, k, v = (ops.part(step.tape, whole, rows * heads, name="qkv_split") for heads in widths)
    return laid_out(step, block, q), laid_out(step, block, k, keys=True), v


def chunked_heads(step: Step, block: Attention, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slices whose gradients are joined at once: of every head, or of the whole width."""
    tape, rows = step.tape, step.tokens * block.head_dim
    if block.qkv_split == "by-head":
        whole = ops.relayout(tape, whole, name="head_layout")
    sizes = tuple(rows * heads for heads in (block.num_heads, block.num_kv_heads, block.num_kv_heads))
    q, k, v = gpt.split(tape, whole, sizes, name="qkv_split")
    if block.qkv_split == "by-head":
        return q, k, v
    return laid_out(step, block, q), laid_out(step, block, k, keys=True), v


def needs_mask(block: Attention, run: Run) -> bool:
    """Whether transformers passes an explicit mask: always to eager; to sdpa for a window that is reached, and where
    some tokens are padding.

    Families with attention of their own always make one, but for flash kernels.
    """
    if block.kind in OWN_ATTENTIONS:
        return not run.flash
    if run.attn_implementation == "eager":
        return True
    if run.attn_implementation != "sdpa" or takes_windows(run):
        return False
    told = run.has_padding and "attention" not in run.fused_kernels
    return told or reaches_window(block, run)


def reaches_window(block: Attention, run: Run) -> bool:
    """Whether samples are as long as the window: a shorter one sees everything before it anyway."""
    return block.window is not None and run.max_length >= block.window


def takes_windows(run: Run) -> bool:
    """Whether the attention kernel is told of a window: FlashAttention-2, which Unsloth calls by itself where it can
    (``unsloth/models/mistral.py``)."""
    return run.flash or (run.stack == UNSLOTH and run.attn_implementation == "sdpa")


def mixed_heads(
    step: Step, where: str, block: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    """The attention call. With an explicit mask, key and value heads are repeated and no tile is skipped; heads too
    wide for flash kernels are repeated too (transformers 5 ``use_gqa_in_sdpa``)."""
    tape, groups = step.tape, block.num_heads // block.num_kv_heads
    if mask is not None and step.run.attn_implementation == "eager":
        return eager_heads(step, where, block, q, k, v, mask)
    repeated = repeats_heads(step, block, mask)
    if repeated and groups > 1:
        k, v = heads_for_all_queries(step, block, k, v)
    given = k, v
    if repeated and block.num_kv_heads == 1 < groups and step.autocast_dtype is not None:
        k, v = (eager.seen_apart(tape, heads, groups, step.autocast_dtype) for heads in given)
    if step.autocast_dtype is not None:
        q, k, v = (ops.cast(tape, tensor, step.autocast_dtype) for tensor in (q, k, v))
    shape = heavy.AttentionShape(
        batch=step.run.per_device_train_batch_size,
        heads=block.num_heads,
        kv_heads=block.num_heads if repeated else block.num_kv_heads,
        length=step.run.max_length,
        head_dim=block.head_dim,
        masked=mask is not None,
        window=block.window if takes_windows(step.run) else None,
        spans=step.run.attention_spans,
        hopper=step.run.attn_implementation == FLASH_3,
    )
    if step.run.flash and step.run.stack != UNSLOTH:
        look_for_packing(step)
    bias = None if mask is None else heavy.mask_bias(tape, mask, q.dtype, shape)
    out = heavy.flash_attention(
        tape,
        q,
        k,
        v,
        shape,
        on_gpu=step.platform == "cuda",
        bias=bias,
        remade=step.run.recompute_attention,
        held=held_mask(step, mask),
    )
    tape.hold(q, k, v, *given)
    return out


def repeats_heads(step: Step, block: Attention, mask: Tensor | None) -> bool:
    """Whether key and value heads come to the attention call once for every query head, where they are fewer."""
    return mask is not None or (block.head_dim > heavy.WIDEST_FLASH and step.run.attn_implementation == "sdpa")


def heads_for_all_queries(step: Step, block: Attention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for every query head. Rotated keys are laid out by head already, and so are values that
    several layers attend to."""
    tape, groups, single = step.tape, block.num_heads // block.num_kv_heads, block.num_kv_heads == 1
    if not single:
        k = k if block.rotary else ops.relayout(tape, k, name="head_layout")
        v = v if block.keys != OWN else ops.relayout(tape, v, name="head_layout")
    return ops.repeat_heads(tape, k, groups, single=single), ops.repeat_heads(tape, v, groups, single=single)


def values_for_all(step: Step, block: Attention, v: Tensor, mask: Tensor | None) -> Tensor:
    """Values that several layers attend to: their gradients' sum is laid out once, not in each layer's call."""
    fewer = repeats_heads(step, block, mask) and block.num_kv_heads < block.num_heads
    if block.num_kv_heads > 1 and (fewer or step.run.attn_implementation == "eager"):
        return ops.relayout(step.tape, v, name="head_layout")
    return v


def held_mask(step: Step, mask: Tensor | None) -> tuple[Tensor, ...]:
    """The mask where it is still there in a layer's backward: as an argument of the checkpoint."""
    return () if mask is None or step.tape.phase is not Phase.RECOMPUTE else (mask,)


def look_for_packing(step: Step) -> None:
    """A value that every layer reads, for one sample without padding only: whether its positions restart.

    Code that does not look for packing before it makes a mask hands no positions on either (Qwen2-VL's are of three
    kinds), but for OPT, which counts them. Source: transformers ``_is_packed_sequence``; Unsloth calls FlashAttention's
    own function (``run_attention`` of ``unsloth/utils/attention_dispatch.py``).
    """
    architecture = step.architecture
    hands_on = architecture.finds_packing or architecture.position_rows
    if step.run.per_device_train_batch_size > 1 or step.run.has_padding or not hands_on:
        return
    tape, length = step.tape, step.run.max_length
    places = Tensor(length, "int64", None)
    steps = ops.elementwise(tape, "packing.arange", (), length, "int64")
    first = ops.elementwise(tape, "packing.min", (places,), 1, "int64")
    steps = ops.elementwise(tape, "packing.add", (steps, first), length, "int64")
    apart = ops.elementwise(tape, "packing.sub", (steps, places), length, "int64")
    apart = ops.elementwise(tape, "packing.abs", (apart,), length, "int64")
    summed = ops.elementwise(tape, "packing.sum", (apart,), 1, "int64")
    found = ops.elementwise(tape, "packing.bool", (summed,), 1, "bool")
    if step.platform == "cuda":
        tape.kernel(SYNCHRONISATION, Kind.MEMORY, (found,), (), n_bytes=2)


def eager_heads(step: Step, where: str, block: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The attention call as plain matrix products."""
    shape = heavy.AttentionShape(
        batch=step.run.per_device_train_batch_size,
        heads=block.num_heads,
        kv_heads=block.num_kv_heads,
        length=step.run.max_length,
        head_dim=block.head_dim,
        masked=True,
    )
    variant = eager.Variant(
        autocast_dtype=step.autocast_dtype,
        softmax_wide=block.softmax_wide,
        dropout=step.architecture.attention_dropout,
        softcap=block.softcap,
        sinks=step.weight(f"{where}.sinks", block.num_heads) if block.sinks else None,
        by_head=block.rotary_halves or joins(block),
        holds_mask=bool(held_mask(step, mask)),
        values_laid_out=block.keys != OWN or (block.fused and block.qkv_split == "by-head"),
    )
    out, weights = eager.attention(step.tape, q, k, v, mask, shape, variant)
    step.weights.append(weights)
    return out
