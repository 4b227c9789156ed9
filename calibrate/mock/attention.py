"""Flash attention: blocks of query rows walk over blocks of keys and skip what the causal mask hides."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tunecast.calibrate.mock.card import Card
from tunecast.calibrate.mock.physics import AttentionPhysics, Physics, generator
from tunecast.calibrate.mock.roughness import rough
from tunecast.calibrate.mock.work import Work, together
from tunecast.model.operation import CHOSEN, EFFICIENT, MASKED
from tunecast.model.units import DTYPE_BYTES, SIXTEEN_BITS

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Products of query block by key block: scores and values; backward recomputes scores and has four gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Shape of one fused attention call."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool = True


CUDNN_HEADS = {"9.0": 256, "10.0": 128, "10.3": 128}
"""Largest heads that PyTorch gives to cuDNN, by the compute capabilities where it asks it first."""


def runs_cudnn(card: Card, heads: Heads, dtype: str, flash: bool) -> bool:
    """Whether a mock's attention is the card's own kernel: ``sdpa`` of PyTorch since 2.11, not FlashAttention-2."""
    widest = CUDNN_HEADS.get(card.compute_capability, 0)
    return not flash and heads.head_dim <= widest and dtype in SIXTEEN_BITS


def attention_work(
    card: Card, physics: Physics, heads: Heads, dtype: str, backward: bool, *, flash: bool = False
) -> Work:
    """Forward, or backward with its two helper kernels (row sums of dO x O before, cast of dq after); by
    FlashAttention-2 if `flash`, else by what ``sdpa`` runs.
    """
    bandwidth = card.bandwidth_bytes_per_s * physics.memory.bandwidth_frac
    products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
    attention = physics.attention
    if runs_cudnn(card, heads, dtype, flash):
        attention = replace(attention, legacy_rate=attention.tuned_rate)
    main = Work(
        core_s=_core_clk(card, attention, heads, dtype, backward) / card.clock_hz,
        dram_s=_tensor_bytes(heads, dtype) * (2.0 if backward else 1.0) / bandwidth,
        fixed_s=physics.memory.latency_s,
        tensor_s=_flops(heads, products) / (card.flops_per_sm_clk(dtype) * card.sm_count * card.clock_hz),
    )
    main = rough(main, physics, heads, dtype, backward, flash and runs_cudnn(card, heads, dtype, False))
    if not backward:
        return main
    query = heads.batch * heads.heads * heads.q_len * heads.head_dim
    helpers = Work(dram_s=query * (2 * 2 + 4 + 2) / bandwidth, fixed_s=2 * physics.memory.latency_s, kernels=2)
    return together(main, helpers)


EFFICIENT_SLOWER, EFFICIENT_SPREAD = {"forward": 1.9, "backward": 4.2}, 0.3
"""Time of the memory-efficient kernels over FlashAttention-2's, and its spread over mocks in logarithms."""


SLOWER = (EFFICIENT, MASKED, CHOSEN)
"""Layouts of attention by such kernels."""


def slowed(work: Work, physics: Physics, backward: bool) -> Work:
    """The same attention by the memory-efficient kernel, whose bytes are what they were."""
    own = float(generator("efficient", physics.root).standard_normal())
    slower = EFFICIENT_SLOWER["backward" if backward else "forward"] * math.exp(EFFICIENT_SPREAD * own)
    return replace(work, core_s=slower * work.core_s)


def _flops(heads: Heads, products: int) -> float:
    half = 0.5 if heads.causal else 1.0
    pairs = heads.batch * heads.heads * heads.q_len * heads.kv_len
    return 2.0 * products * pairs * heads.head_dim * half


def _tensor_bytes(heads: Heads, dtype: str) -> float:
    query = heads.heads * heads.q_len
    keys = heads.kv_heads * heads.kv_len
    return 2.0 * heads.batch * (query + keys) * heads.head_dim * DTYPE_BYTES.get(dtype, 2)


def _block_kv(attention: AttentionPhysics, head_dim: int) -> tuple[int, float]:
    """Key block and rate of the kernel compiled for the next head size up, padding included."""
    compiled = min((d for d in attention.block_kv if d >= head_dim), default=max(attention.block_kv))
    return attention.block_kv[compiled], attention.rate[compiled] * min(1.0, head_dim / compiled)


def _pair_clk(card: Card, attention: AttentionPhysics, heads: Heads, dtype: str, backward: bool) -> float:
    """Clocks of one query block against one key block: products, and the softmax that they do not hide."""
    block_kv, rate = _block_kv(attention, heads.head_dim)
    scores = attention.block_q * block_kv
    products = BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS
    rate *= attention.legacy_rate * (attention.backward_rate if backward else 1.0)
    tensor = 2.0 * products * scores * heads.head_dim / (card.flops_per_sm_clk(dtype) * rate)
    softmax = scores / attention.exp_per_clk
    return tensor + (1.0 - attention.exp_hidden) * softmax


def _core_clk(card: Card, attention: AttentionPhysics, heads: Heads, dtype: str, backward: bool) -> float:
    """Clocks until the last block ends.

    Blocks differ in length under the causal mask. The scheduler balances them except at the end, where
    on average half of the longest block is left over.
    """
    block_kv, _ = _block_kv(attention, heads.head_dim)
    blocks_q = math.ceil(heads.q_len / attention.block_q)
    longest = math.ceil(heads.kv_len / block_kv)
    if heads.causal:
        lengths = [min(longest, math.ceil((i + 1) * attention.block_q / block_kv)) for i in range(blocks_q)]
    else:
        lengths = [longest] * blocks_q
    pair = _pair_clk(card, attention, heads, dtype, backward)
    grid = heads.batch * heads.heads
    total = grid * (sum(lengths) * pair + blocks_q * attention.setup_clk)
    end = longest * pair + attention.setup_clk
    parallel = min(card.sm_count, grid * blocks_q)
    return max(total / parallel + 0.5 * end * (1.0 - 1.0 / max(1, grid * blocks_q)), end)
