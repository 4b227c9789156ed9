"""Token mixers of Qwen3.5: linear attention by the gated delta rule, and attention whose output is gated.

Source: transformers 5 ``modeling_qwen3_5.py``, ``Qwen3_5GatedDeltaNet`` and ``Qwen3_5Attention``; of Qwen3-Next
``modeling_qwen3_next.py``, ``Qwen3NextGatedDeltaNet.fix_query_key_value_ordering``.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model import primitives_delta as kernels
from tunecast.model import primitives_gpt as gpt
from tunecast.model import primitives_routing as routing
from tunecast.model.architecture import Attention, Layer, Linear
from tunecast.model.attention_blocks import laid_out, mixed_heads, needs_mask, rotated_heads
from tunecast.model.context import Step, Tables
from tunecast.model.delta_kernels import convolved_by_kernel, delta_rule_by_kernels
from tunecast.model.delta_rule import chunks_of, delta_rule
from tunecast.model.fused import CONVOLUTION, FLA
from tunecast.model.linears import linear_map
from tunecast.model.masks import zeroed_padding
from tunecast.model.norms import norm
from tunecast.model.shapes import DELTA_JOINED, DeltaNet
from tunecast.model.tape import Grads, Tensor


def gated_attention(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Queries and their gate, keys and values; norms of heads; fused attention; the gate; the output projection."""
    block, tape = layer.attention, step.tape
    to_queries, to_keys, to_values, to_output = block.linears
    query, gate = ops.chunks(tape, linear_map(step, where, to_queries, x), 2, name="gate_split")
    gate = ops.copy(tape, gate, name="gate_split")
    query = norm(step, layer.norm, f"{where}.q_norm", query, block.head_dim)
    key = laid_out(step, block, linear_map(step, where, to_keys, x))
    key = norm(step, layer.norm, f"{where}.k_norm", key, block.head_dim)
    value = linear_map(step, where, to_values, x)
    plain = query, key
    query, key = (rotated_heads(step, block, heads, tables.waves[0]) for heads in (query, key))
    tape.hold(*plain)
    mask = tables.mask_of(block.window) if needs_mask(block, step.run) else None
    mixed = mixed_heads(step, where, block, query, key, value, mask)
    if step.run.attn_implementation != "eager":
        mixed = ops.copy(tape, mixed, name="head_layout")
    gated = ops.multiply(tape, mixed, routing.unary(tape, gate, name="gate"), name="gate")
    out = linear_map(step, where, to_output, gated)
    tape.hold(query, key, value, gate, gated)
    return out


def delta_attention(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Queries, keys and values through a causal convolution; decay and rate of every token; the gated delta rule; a
    norm of each head, gated; the output projection."""
    del tables
    block, tape = layer.attention, step.tape
    net = block.delta
    assert net is not None
    x = zeroed_padding(step, x)
    by_kernels = step.run.fuses(FLA)
    entries = joined_entries if block.kind == DELTA_JOINED else separate_entries
    whole, gate, rate_input, decay_input = entries(step, where, block, x)
    mixed = convolved(step, where, block, whole)
    keys, values = (step.tokens * width for width in (net.keys_width, net.values_width))
    query, key, value = gpt.split(tape, mixed, (keys, keys, values), name="qkv_split")
    if not by_kernels:
        query, key, value = by_head(step, net, query, key, value)
    rate = routing.unary(tape, rate_input, name="rate")
    decay = decay_of(step, where, block, decay_input)
    rule = delta_rule_by_kernels if by_kernels else delta_rule
    made = rule(step, net, (query, key, value), decay, rate)
    normed = gated_norm(step, f"{where}.norm", made, gate, net.value_dim)
    out = linear_map(step, where, block.linears[-1], normed)
    tape.hold(mixed, gate, rate_input, decay_input, rate, decay, normed)
    return out


def separate_entries(step: Step, where: str, block: Attention, x: Tensor) -> tuple[Tensor, ...]:
    """What the convolution takes, the gate, and of rate and decay what makes them, from a map each."""
    to_heads, to_gate, to_rate, to_decay, _ = block.linears
    whole = (linear_map if step.run.fuses(CONVOLUTION) else turned_map)(step, where, to_heads, x)
    gate = linear_map(step, where, to_gate, x)
    rate = (linear_map if step.run.fuses(FLA) else turned_map)(step, where, to_rate, x)
    return whole, gate, rate, linear_map(step, where, to_decay, x)


def joined_entries(step: Step, where: str, block: Attention, x: Tensor) -> tuple[Tensor, ...]:
    """The same from two maps, whose outputs have all of a key's head side by side: its query, key, values and gates are
    copied out, and queries, keys and values joined again."""
    net, tape, tokens = block.delta, step.tape, step.tokens
    assert net is not None
    to_heads, to_both, _ = block.linears
    heads, both = (linear_map(step, where, linear, x) for linear in (to_heads, to_both))
    keys, values = tokens * net.keys_width, tokens * net.values_width
    query, key, value, gate = gpt.split(tape, heads, (keys, keys, values, values), name="qkv_split")
    rate, decay = gpt.split(tape, both, (tokens * net.value_heads,) * 2, name="rate_split")
    query, key, value = (ops.copy(tape, each, name="head_layout") for each in (query, key, value))
    if net.key_heads < net.value_heads:
        gate, rate, decay = (ops.copy(tape, each, name="head_layout") for each in (gate, rate, decay))
    whole = gpt.joined_all(tape, [query, key, value], name="qkv_join")
    return whole, gate, rate, decay


def by_head(step: Step, net: DeltaNet, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values seen by head: gradients are copied back into the order of tokens.

    Those of repeated heads are there when they are summed up. Those of a single chunk's keys and values come out of
    the triangular systems, column by column, which is that order.
    """
    single, repeated = chunks_of(net, step.run).count == 1, net.key_heads < net.value_heads
    views = (repeated, repeated or single, single)
    return [
        each if seen else ops.relayout(step.tape, each, name="head_layout")
        for each, seen in zip((query, key, value), views, strict=True)
    ]


def turned_map(step: Step, where: str, linear: Linear, x: Tensor) -> Tensor:
    """A map whose gradient comes by channel: of several samples every product with it copies it first, but for that of
    a 4-bit base."""
    tape, run, out = step.tape, step.run, linear_map(step, where, linear, x)
    of_base = run.base_quantization != "bnb-4bit" and (x.needs_grad or not run.has_adapters)
    copies, dtype = of_base + (linear.name in run.lora_target_modules), step.activation_dtype

    def backward(grad: Tensor) -> Grads:
        seen = Tensor(grad.elements, dtype, grad.storage)
        made = [ops.elementwise(tape, "token_layout", (seen,), seen.elements, dtype) for _ in range(copies)]
        return (made[-1] if grad.dtype == dtype else grad,)

    if run.per_device_train_batch_size == 1 or not copies:
        return out
    return tape.record(Tensor(out.elements, out.dtype, out.storage), (out,), backward)


def convolved(step: Step, where: str, block: Attention, x: Tensor) -> Tensor:
    """The causal convolution over all channels, of which what padding added is cut off, and its activation."""
    net, tape = block.delta, step.tape
    assert net is not None
    weight = step.weight(f"{where}.conv1d", net.convolution_params)
    if step.run.fuses(CONVOLUTION):
        return convolved_by_kernel(tape, x, weight)
    dtype = x.dtype
    given = ops.cast(tape, x, weight.dtype, name="convolution_cast")
    operands = [ops.cast(tape, each, step.autocast_dtype or each.dtype) for each in (given, weight)]
    samples = step.run.per_device_train_batch_size
    elements = net.channels * (step.tokens + samples * (net.kernel - 1))
    made = kernels.causal_convolution(tape, operands[0], operands[1], elements)
    cut = ops.part(tape, made, x.elements, name="convolution")
    out = ops.activation(tape, cut, name="silu")
    tape.hold(x, given)
    return ops.cast(tape, out, dtype, name="convolution_cast")


def decay_of(step: Step, where: str, block: Attention, x: Tensor) -> Tensor:
    """Logarithm of the decay of every head: -exp(A) softplus(x + bias), in fp32."""
    net, tape, name = block.delta, step.tape, "decay"
    assert net is not None
    logarithm = ops.cast(tape, step.weight(f"{where}.A_log", net.value_heads), "fp32", name=name)
    factor = ops.scale(tape, routing.unary(tape, logarithm, name=name), name=name)
    bias = step.weight(f"{where}.dt_bias", net.value_heads)
    wide = ops.cast(tape, x, "fp32", name=name)
    shifted = gpt.add_to_each(tape, wide, bias, name=name)
    return ops.multiply(tape, ops.activation(tape, shifted, name=name), factor, name=name)


def gated_norm(step: Step, name: str, x: Tensor, gate: Tensor, width: int) -> Tensor:
    """A norm of every head, scaled in the input's dtype, times SiLU of the gate in fp32 (``Qwen3_5RMSNormGated``)."""
    tape = step.tape
    normed = norm(step, "rmsnorm", name, x, width)
    weight = ops.activation(tape, ops.cast(tape, gate, "fp32", name="gate"), name="gate")
    return ops.cast(tape, ops.multiply(tape, normed, weight, name="gate"), x.dtype, name="gate")
