"""Linear attention by the kernels of flash-linear-attention and causal-conv1d, which transformers takes if installed.

Each kernel is taken to read and write its tensors once. Inside a chunk of 64 tokens pairs are products and a triangular
system, all on the chip; from chunk to chunk a state goes on, which one kernel writes for every chunk. The backward
makes all again but the systems' inverses; gradients of queries and keys come for every head of values and are summed
up.

Sources: fla-core 0.6 ``ops/gated_delta_rule/{chunk,chunk_fwd,wy_fast}.py``, ``ops/common/{chunk_delta_h,chunk_o}.py``,
``modules/norm/l2norm.py``; causal-conv1d 1.7 ``causal_conv1d_interface.py``, ``cpp_functions.py``. Left out: FlashQLA,
which fla runs instead where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunecast.model import primitives as ops
from tunecast.model.context import Step
from tunecast.model.delta_rule import CHUNK, Chunks, chunks_of
from tunecast.model.operation import CHUNKED, Kind
from tunecast.model.shapes import DeltaNet
from tunecast.model.tape import Grads, Tape, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The kernels of one call, with the elements of what they make."""

    tape: Tape
    chunks: Chunks
    rows: int
    """Tokens of all heads of values."""
    dtype: str

    def made(self, name: str, reads: Sequence[Tensor], *sizes: tuple[int, str], flops: float = 0.0) -> list[Tensor]:
        """New tensors of these sizes, written by one kernel that does so many FLOPs for a token of a head of values."""
        out = [self.tape.empty(elements, dtype) for elements, dtype in sizes]
        self.tape.kernel(name, Kind.MEMORY, reads, out, layout=CHUNKED, flops=flops * self.rows)
        return out

    @property
    def across(self) -> float:
        """FLOPs of a product with the state, for a token of a head of values."""
        return 2.0 * self.chunks.key_dim * self.chunks.value_dim

    @property
    def inside(self) -> float:
        """FLOPs of products inside a chunk, one as wide as a key and one as wide as a value."""
        return 2.0 * CHUNK * (self.chunks.key_dim + self.chunks.value_dim)

    @property
    def keys(self) -> tuple[int, str]:
        """A vector of a key's width for every head of values."""
        return self.rows * self.chunks.key_dim, self.dtype

    @property
    def values(self) -> tuple[int, str]:
        """Of a value's width."""
        return self.rows * self.chunks.value_dim, self.dtype

    @property
    def states(self) -> tuple[int, str]:
        """The state before every chunk."""
        return self.chunks.state * self.chunks.count, self.dtype

    @property
    def numbers(self) -> tuple[int, str]:
        """An fp32 number for every token and head of values."""
        return self.rows, "fp32"

    def transformed(self, key: Tensor, value: Tensor, rate: Tensor, inverse: Tensor, decay: Tensor) -> list[Tensor]:
        """Keys and values after the triangular system."""
        read = (key, value, rate, inverse, decay)
        return self.made("delta.transform", read, self.keys, self.values, flops=self.inside)

    def carried(self, key: Tensor, keys: Tensor, values: Tensor, decay: Tensor) -> list[Tensor]:
        """States before every chunk, and values less what the state knows."""
        read = (key, keys, values, decay)
        return self.made("delta.states", read, self.states, self.values, flops=2.0 * self.across)


def delta_rule_by_kernels(
    step: Step, net: DeltaNet, heads: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor
) -> Tensor:
    """Output of all heads, as `delta_rule` has it. Keeps normed queries and keys, values, decays, rates, inverses."""
    tape, chunks, dtype = step.tape, chunks_of(net, step.run), heads[0].dtype
    rule = Rule(tape=tape, chunks=chunks, rows=chunks.tokens * net.value_heads, dtype=dtype)
    plain = [ops.elementwise(tape, "head_layout", (each,), each.elements, each.dtype) for each in heads]
    value = plain[2]
    (query, query_roots), (key, key_roots) = (
        rule.made("l2norm", (each,), (each.elements, dtype), (chunks.tokens * net.key_heads, "fp32"))
        for each in plain[:2]
    )
    (summed,) = rule.made("delta.decay", (decay,), rule.numbers)
    inverse = ops.elementwise(tape, "delta.zeros", (), rule.rows * CHUNK, dtype)
    system_flops = 2.0 * CHUNK * chunks.key_dim
    tape.kernel(
        "delta.system", Kind.MEMORY, (key, summed, beta), (inverse,), layout=CHUNKED, flops=system_flops * rule.rows
    )
    keys, values = rule.transformed(key, value, beta, inverse, summed)
    states, new_values = rule.carried(key, keys, values, summed)
    read = (query, key, new_values, states, summed)
    (out,) = rule.made("delta.output", read, rule.values, flops=rule.across + rule.inside)
    tape.hold(keys, values, states, new_values)
    tape.hold(*plain, query_roots, key_roots, summed, inverse)
    inputs = (*heads, decay, beta)
    if tape.would_grad(*inputs):
        tape.mark_saved()
    saves = (query, query_roots, key, key_roots, value, summed, beta, inverse)
    return tape.record(out, inputs, _backward(rule, saves, inputs, net.value_heads // net.key_heads), saves=saves)


def _backward(
    rule: Rule, saves: tuple[Tensor, ...], inputs: tuple[Tensor, ...], repeated: int
) -> Callable[[Tensor], Grads]:
    """Gradients of all five inputs, whichever of them need one."""
    query, query_roots, key, key_roots, value, decay, rate, inverse = saves
    tape, chunks = rule.tape, rule.chunks

    def summed_up(x: Tensor) -> Tensor:
        return x if repeated == 1 else ops.elementwise(tape, "delta.sum", (x,), x.elements // repeated, x.dtype)

    def backward(grad: Tensor) -> Grads:
        keys, values = rule.transformed(key, value, rate, inverse, decay)
        states, new_values = rule.carried(key, keys, values, decay)
        (local,) = rule.made("delta.values", (query, key, decay, grad), rule.values, flops=rule.inside)
        to_states, to_values = rule.made(
            "delta.states", (query, key, keys, decay, grad, local), rule.states, rule.values, flops=3.0 * rule.across
        )
        read = (query, key, new_values, decay, states, grad, to_states, to_values)
        made = rule.made(
            "delta.keys", read, rule.keys, rule.keys, rule.keys, rule.numbers,
            flops=3.0 * rule.across + 2.0 * CHUNK * (3 * chunks.key_dim + chunks.value_dim),
        )  # fmt: skip
        to_query, to_key, to_keys, parts = made
        to_query, to_key = summed_up(to_query), summed_up(to_key)
        to_decay = ops.elementwise(tape, "delta.sum", (parts,), *rule.numbers)
        own = rule.made(
            "delta.transform", (key, value, rate, decay, inverse, to_keys, to_values),
            rule.keys, rule.values, (rule.rows, rate.dtype), rule.numbers,
            flops=2.0 * rule.inside + 4.0 * CHUNK**2 + 6.0 * CHUNK * chunks.key_dim,
        )  # fmt: skip
        more, to_value, to_rate, more_decay = own
        more = summed_up(more)
        for total, each in ((to_key, more), (to_decay, more_decay)):
            tape.kernel("delta.sum", Kind.MEMORY, (total, each), (total,))
        (turned,) = rule.made("delta.decay", (to_decay,), rule.numbers)
        tape.hold(keys, values, states, new_values, to_states, to_values, to_keys, more, more_decay, to_decay)
        to_query, to_key = (
            rule.made("l2norm", (normed, roots, each), (each.elements, rule.dtype))[0]
            for normed, roots, each in ((query, query_roots, to_query), (key, key_roots, to_key))
        )
        found = (to_query, to_key, to_value, turned, to_rate)
        return [each if given.needs_grad else None for each, given in zip(found, inputs, strict=True)]

    return backward


def convolved_by_kernel(tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution and its SiLU as one kernel each way, of any dtype. Keeps both operands.

    Backward is one kernel too, into zeros of fp32 for the weight, whether or not that trains.
    """
    out = ops.elementwise(tape, "convolution", (x, weight), x.elements, x.dtype)
    if tape.would_grad(x, weight):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        to_x = tape.empty(x.elements, x.dtype)
        to_weight = ops.elementwise(tape, "convolution", (), weight.elements, "fp32")
        tape.kernel("convolution", Kind.MEMORY, (grad, x, weight), (to_x, to_weight))
        given = ops.cast_gradient(tape, to_weight, weight.dtype, "convolution")
        return to_x if x.needs_grad else None, given if weight.needs_grad else None

    return tape.record(out, (x, weight), backward, saves=(x, weight))
