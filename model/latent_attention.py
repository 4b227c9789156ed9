"""Multi-head latent attention: keys, values and perhaps queries out of a narrow latent of each token.

Nothing is absorbed in training: every head's keys and values are written out, and attention runs over them.
Source: transformers 5 ``modeling_deepseek_v2.py`` and ``modeling_deepseek_v3.py`` (``glm4_moe_lite`` has its own);
PyTorch's memory-efficient kernel, which takes values narrower than keys (``sdp_utils.cpp``: the flash kernel does not).
"""

from __future__ import annotations

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model import primitives as ops
from tunecast.model import primitives_gpt as gpt
from tunecast.model import primitives_latent as kernels
from tunecast.model.architecture import Attention, Layer
from tunecast.model.attention_blocks import held_mask, needs_mask, turned_pairs
from tunecast.model.context import Step, Tables
from tunecast.model.linears import linear_map
from tunecast.model.norms import norm
from tunecast.model.primitives_heavy import AttentionShape, flash_attention, mask_bias
from tunecast.model.shapes import Latent
from tunecast.model.stacks import FLASH_3
from tunecast.model.tape import Tensor


def latent_attention_block(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Queries, the latent of keys and values, rotary parts, attention, output projection; raises NotSupportedError for
    another kernel than sdpa's."""
    block, tape, tokens = layer.attention, step.tape, step.tokens
    if step.run.attn_implementation != "sdpa":
        traced = "" if step.run.attn_implementation == FLASH_3 else ", or trace its real code with --exact"
        raise NotSupportedError(
            f"--attn-implementation {step.run.attn_implementation} of latent attention has no formulas; leave it out"
            f"{traced}."
        )
    latent = block.latent
    assert latent is not None
    *to_queries, to_latent, to_heads, to_output = block.linears
    queries = x
    for index, linear in enumerate(to_queries):
        queries = linear_map(step, where, linear, queries)
        if index + 1 < len(to_queries):
            queries = norm(step, layer.norm, f"{where}.q_a_layernorm", queries, linear.out_features)
    by_head = ops.relayout(tape, queries, name="head_layout")
    rows = tokens * block.num_heads
    q_plain, q_part = kernels.split(tape, by_head, (rows * latent.nope_dim, rows * latent.rope_dim), name="q_split")
    compressed = linear_map(step, where, to_latent, x)
    sizes = (tokens * latent.kv_rank, tokens * latent.rope_dim)
    narrow, k_part = kernels.split(tape, compressed, sizes, name="kv_split")
    narrow = norm(step, layer.norm, f"{where}.kv_a_layernorm", narrow, latent.kv_rank)
    q_turned, k_turned = turned(step, latent, q_part, k_part, tables.waves[0])
    q_plain = ops.cast(
        tape, q_plain, q_turned.dtype, name="q_join"
    )  # of two dtypes, autocast's ``cat`` takes the wider
    query = gpt.concatenated(tape, q_plain, q_turned, name="q_join")
    key, value = expanded(step, where, block, linear_map(step, where, to_heads, narrow), k_turned)
    made = query, key, value
    if step.autocast_dtype is not None:
        query, key, value = (ops.cast(tape, each, step.autocast_dtype) for each in made)
    shape = shape_of(step, block)
    bias = None if tables.mask is None else mask_bias(tape, tables.mask, query.dtype, shape)
    held = held_mask(step, tables.mask)
    if latent.is_even:
        mixed = flash_attention(tape, query, key, value, shape, on_gpu=step.platform == "cuda", bias=bias, held=held)
        mixed = ops.copy(tape, mixed, name="head_layout")
    else:
        mixed = kernels.attention(tape, query, key, value, shape, share=latent.value_share, bias=bias, held=held)
    out = linear_map(step, where, to_output, mixed)
    tape.hold(queries, compressed, narrow, q_turned, k_turned, *made, query, key, value, mixed)
    return out


def expanded(step: Step, where: str, block: Attention, heads: Tensor, k_turned: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (a plain part per head beside one rotary part for all) and values."""
    latent, rows = block.latent, step.tokens * block.num_heads
    assert latent is not None
    by_head = ops.relayout(step.tape, heads, name="head_layout")
    sizes = (rows * latent.nope_dim, rows * latent.value_dim)
    k_plain, value = kernels.split(step.tape, by_head, sizes, name="kv_split")
    return kernels.joined_keys(step.tape, k_plain, k_turned, rows * latent.rope_dim, name="k_join"), value


def turned(step: Step, latent: Latent, q: Tensor, k: Tensor, waves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotary parts of queries and keys: as complex numbers in fp32, or as interleaved pairs."""
    tape = step.tape
    if latent.rotary == "interleaved":
        return turned_pairs(step, q, waves), turned_pairs(step, k, waves)
    wide_q, wide_k = (ops.cast(tape, part, "fp32", name="rotary") for part in (q, k))
    made_q = kernels.complex_product(tape, wide_q, waves[0], name="rotary", copied=True)
    q_out = ops.cast(tape, made_q, q.dtype, name="rotary")
    made_k = kernels.complex_product(tape, wide_k, waves[0], name="rotary", copied=False)
    return q_out, ops.cast(tape, made_k, k.dtype, name="rotary")


def shape_of(step: Step, block: Attention) -> AttentionShape:
    """Sizes of the attention call: as many key heads as query heads."""
    return AttentionShape(
        batch=step.run.per_device_train_batch_size,
        heads=block.num_heads,
        kv_heads=block.num_heads,
        length=step.run.max_length,
        head_dim=block.head_dim,
        masked=needs_mask(block, step.run),
        spans=step.run.attention_spans,
    )
