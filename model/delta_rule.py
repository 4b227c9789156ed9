"""The gated delta rule by chunks of 64 tokens, in plain PyTorch: what runs where flash-linear-attention is not there.

Inside a chunk pairs of tokens are products and a triangular system; from chunk to chunk a state goes on in a loop. In
the backward every turn of that loop makes gradients as large as all chunks, zeros but for its own: traffic grows with
the square of the length. Everything is in fp32 but the products, which autocast runs in 16 bits.
In pure fp32 no cast lays queries and keys out by head, and without padding nothing else does: products then copy them.
Source: transformers 5 ``modeling_qwen3_5.py``, ``torch_chunk_gated_delta_rule``; PyTorch ``LinearAlgebra.cpp``,
``_matmul_impl``, which copies what it cannot see as one stack of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunecast.model import primitives as ops
from tunecast.model import primitives_delta as kernels
from tunecast.model import primitives_gpt as gpt
from tunecast.model import primitives_routing as routing
from tunecast.model.attention_eager import batched_product
from tunecast.model.context import Step
from tunecast.model.run import Run
from tunecast.model.shapes import DeltaNet
from tunecast.model.tape import Tape, Tensor

CHUNK = 64
"""Tokens of a chunk (``chunk_size``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Sizes of one call."""

    heads: int
    """Heads of values of all samples: matrices side by side."""
    count: int
    """Chunks of a sample, the last one filled up."""
    tokens: int
    """Tokens of all samples."""
    key_dim: int
    value_dim: int
    copies_all: bool = False
    """Whether products of pairs in all chunks copy their operands."""
    copies_one: bool = False
    """Whether products of one chunk with the state copy queries and keys."""

    @property
    def positions(self) -> int:
        """Positions of all heads, padding included."""
        return self.heads * self.count * CHUNK

    @property
    def pairs(self) -> int:
        """Pairs of positions inside the chunks of all heads."""
        return self.positions * CHUNK

    @property
    def state(self) -> int:
        """Numbers of all heads' states."""
        return self.heads * self.key_dim * self.value_dim


def chunks_of(net: DeltaNet, run: Run, dtype: str = "") -> Chunks:
    """The sizes of a run's call, for heads of `dtype`.

    Heads that are repeated lie token by token, others, as the convolution writes them, channel by channel.
    """
    samples, length = run.per_device_train_batch_size, run.max_length
    count, as_they_come = -(-length // CHUNK), dtype == "fp32" and length % CHUNK == 0
    copies_one = as_they_come and samples > 1 and net.key_heads < net.value_heads
    return Chunks(
        heads=samples * net.value_heads,
        count=count,
        tokens=samples * length,
        key_dim=net.key_dim,
        value_dim=net.value_dim,
        copies_all=copies_one or (as_they_come and count > 1),
        copies_one=copies_one,
    )


def products(step: Step, name: str, a: Tensor, b: Tensor, sizes: tuple[int, int, int, int], *, turned: bool) -> Tensor:
    """``a @ b`` for `sizes` (matrices, m, n, k), operands in autocast's dtype; `turned`: b is stored n x k."""
    dtype = step.autocast_dtype or a.dtype
    right = ops.cast(step.tape, b, dtype)
    left = ops.cast(step.tape, a, dtype)
    return batched_product(step.tape, name, left, right, sizes, b_transposed=turned)


def operand(tape: Tape, x: Tensor, *, copied: bool) -> Tensor:
    """What a product multiplies: a copy where its matrices do not lie as one stack."""
    return ops.copy(tape, x, name="head_layout") if copied else x


def normalised(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """x over the root of the sum of its squares, of every head (``l2norm``)."""
    name = "l2norm"
    total = routing.row_sum(tape, ops.multiply(tape, x, x, name=name), rows, name=name, wide=False)
    root = ops.reciprocal_root(tape, ops.shift(tape, total, name=name), name=name)
    return ops.multiply(tape, x, root, name=name)


def exponential(tape: Tape, x: Tensor) -> Tensor:
    """One kernel each way. Keeps its result."""
    return routing.unary(tape, x, name="decay")


def delta_rule(step: Step, net: DeltaNet, heads: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor) -> Tensor:
    """Output of all heads from queries, keys and values, the logarithm of the decay and the rate of every token."""
    tape, dtype = step.tape, heads[0].dtype
    chunks = chunks_of(net, step.run, dtype)
    repeated = net.value_heads // net.key_heads
    narrow = [ops.repeat_heads(tape, each, repeated) if repeated > 1 else each for each in heads[:2]]
    wide = [ops.cast(tape, each, "fp32") for each in (*narrow, heads[2], beta, decay)]
    tape.hold(*narrow)
    query, key, value, rate, logarithm = wide
    rows = chunks.tokens * net.value_heads
    query, key = (normalised(tape, each, rows) for each in (query, key))
    query = ops.scale(tape, query, name="q_scale")
    widths = (net.key_dim, net.key_dim, net.value_dim)
    plain = query, key, value
    query, key, value = (
        kernels.padded(tape, each, chunks.positions * width) for each, width in zip(plain, widths, strict=True)
    )
    tape.hold(*plain)
    rate, logarithm = (kernels.padded(tape, each, chunks.positions) for each in (rate, logarithm))
    weighted_values = ops.multiply(tape, value, rate, name="rate")
    weighted_keys = ops.multiply(tape, key, rate, name="rate")
    made = inside_chunks(step, chunks, query, key, weighted_keys, weighted_values, logarithm)
    out = between_chunks(step, chunks, made)
    tape.hold(value, rate, logarithm)
    return ops.copy(tape, out, name="head_layout") if out.dtype == dtype else ops.cast(tape, out, dtype)


def inside_chunks(step: Step, chunks: Chunks, *given: Tensor) -> tuple[Tensor, ...]:
    """What the loop reads, of all chunks: queries, keys, scores, new values, keys for the state, decays of chunks."""
    tape, (*seen, logarithm) = step.tape, given
    query, key, weighted_keys, weighted_values = (
        kernels.reshaped(tape, each, copied=index > 1 and chunks.count > 1) for index, each in enumerate(seen)
    )
    ones = ops.elementwise(tape, "mask.ones", (), CHUNK * CHUNK, "bool")
    mask = ops.elementwise(tape, "mask.triangle", (ones,), CHUNK * CHUNK, "bool")
    summed = kernels.cumulative_sum(tape, logarithm, name="decay")
    pairs = kernels.pairwise_differences(tape, summed, chunks.pairs, name="decay")
    pairs = exponential(tape, gpt.filled(tape, pairs, mask, name="decay"))
    matrices = chunks.heads * chunks.count
    sizes = (matrices, CHUNK, CHUNK, chunks.key_dim)

    def of_pairs(name: str, *sides: Tensor) -> Tensor:
        left, right = (operand(tape, side, copied=chunks.copies_all) for side in sides)
        return weighed(tape, products(step, name, left, right, sizes, turned=True), pairs)

    system = of_pairs("key_products", weighted_keys, key)
    scores = of_pairs("scores", query, key)
    decayed = ops.multiply(tape, weighted_keys, exponential(tape, summed), name="decay")
    new_values = kernels.solved(tape, system, weighted_values, (matrices, CHUNK, chunks.value_dim))
    state_keys = kernels.solved(tape, system, decayed, (matrices, CHUNK, chunks.key_dim))
    return (
        query, key, scores, new_values, state_keys, summed,
        mask, pairs, system, decayed, weighted_keys, weighted_values,
    )  # fmt: skip


def weighed(tape: Tape, product: Tensor, pairs: Tensor) -> Tensor:
    """Products of pairs times what has decayed between them."""
    return ops.multiply(tape, product, pairs, name="decay")


def between_chunks(step: Step, chunks: Chunks, given: tuple[Tensor, ...]) -> Tensor:
    """The loop over chunks, its result in the order of tokens without padding, in fp32."""
    query, key, scores, new_values, state_keys, summed, *kept = given
    tape, count = step.tape, chunks.count
    state = ops.elementwise(tape, "state", (), chunks.state, "fp32")
    mixed = ops.elementwise(tape, "chunks", (), new_values.elements, "fp32")
    query = ops.multiply(tape, query, exponential(tape, summed), name="decay")
    rows = chunks.heads * count
    rest = exponential(tape, kernels.less_from_last(tape, summed, rows, name="decay"))
    key = ops.multiply(tape, key, rest, name="decay")
    decays = exponential(tape, gpt.selected(tape, summed, rows, name="decay"))
    read = (new_values, state_keys, query, scores, decays, key)
    local: tuple[Tensor, ...] = ()
    for _ in tape.turns(count):
        state, mixed, local = one_chunk(step, chunks, state, mixed, read, local)
    out = ops.copy(tape, mixed, name="chunk_layout") if count > 1 else mixed
    tokens = chunks.tokens * chunks.heads // step.run.per_device_train_batch_size * chunks.value_dim
    if tokens != out.elements:
        out = ops.part(tape, out, tokens, name="pad")
    tape.hold(*read, *kept, *local, summed)
    return out


def one_chunk(
    step: Step, chunks: Chunks, state: Tensor, mixed: Tensor, read: tuple[Tensor, ...], local: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """One turn: what the state knows is taken from the new values, scores and state give the output, the state goes on.

    `local` is what the turn before left by name.
    """
    tape, heads, keys, values = step.tape, chunks.heads, chunks.key_dim, chunks.value_dim

    def of_chunk(whole: Tensor) -> Tensor:
        return gpt.selected(tape, whole, whole.elements // chunks.count, name="chunks")

    new_values, state_keys, query, scores, decays, key = read
    own = of_chunk(new_values)
    known = products(step, "state_read", of_chunk(state_keys), state, (heads, CHUNK, values, keys), turned=False)
    fresh = routing.subtract(tape, own, known, name="chunks")
    tape.hold(*local[:1])
    asked = operand(tape, of_chunk(query), copied=chunks.copies_one)
    before = products(step, "state_read", asked, state, (heads, CHUNK, values, keys), turned=False)
    tape.hold(*local[1:])
    inside = products(step, "values", of_chunk(scores), fresh, (heads, CHUNK, values, CHUNK), turned=False)
    mixed = kernels.written(tape, mixed, ops.add(tape, before, inside, name="chunks"), name="chunks")
    kept = ops.multiply(tape, state, of_chunk(decays), name="state")
    told = operand(tape, of_chunk(key), copied=chunks.copies_one)
    added = products(step, "state_write", told, fresh, (heads, keys, values, CHUNK), turned=False)
    new_state = ops.add(tape, kept, added, name="state")
    graph = [each for made in (kept, added) if made.node is not None for each in made.node.saves]
    tape.hold(state, *graph)  # of the last turn, which no backward comes to, until its new state is dropped
    return new_state, mixed, (fresh, before)
