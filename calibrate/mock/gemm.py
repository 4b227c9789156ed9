"""Matrix products: the library picks a tile, the result is cut into blocks, blocks run in waves over the SMs."""

from __future__ import annotations

import math

from tunecast.calibrate.mock.card import Card
from tunecast.calibrate.mock.physics import Physics, Tile, generator
from tunecast.calibrate.mock.roughness import rough
from tunecast.calibrate.mock.work import Work
from tunecast.model.units import DTYPE_BYTES


def gemm_work(
    card: Card, physics: Physics, m: int, n: int, k: int, dtype: str, layout: str, *, products: int = 1
) -> Work:
    """The kernel that the library picks for an m x k by k x n product, or so many of them at once, as `Work`.

    The library ranks its kernels by an estimate that is a few percent off, always in the same way for
    the same shape, so the picked kernel is not always the fastest.
    """
    guess = generator("pick", physics.root, m, n, k, dtype, layout)
    best: tuple[float, Work] | None = None
    for tile in physics.gemm.tiles:
        for split in _splits(card, physics, tile, m, n, k) if products == 1 else (1,):
            work = tile_work(card, physics, tile, split, (m, n, k), dtype, layout, products=products)
            seen = (max(work.core_s, work.dram_s) + work.fixed_s) * math.exp(
                physics.gemm.misjudgement * float(guess.standard_normal())
            )
            if best is None or seen < best[0]:
                best = (seen, work)
    if best is None:
        raise ValueError(f"no tile for a {m} x {n} x {k} product")
    return rough(best[1], physics, m, n, k, dtype, layout)


def _splits(card: Card, physics: Physics, tile: Tile, m: int, n: int, k: int) -> list[int]:
    """Ways to cut the k loop: only when the result alone leaves SMs idle and each piece still has a loop."""
    blocks = math.ceil(m / tile.bm) * math.ceil(n / tile.bn)
    if blocks >= card.sm_count:
        return [1]
    return [s for s in physics.gemm.split_k if s == 1 or k // s >= 4 * tile.bk]


def tile_work(
    card: Card,
    physics: Physics,
    tile: Tile,
    split: int,
    shape: tuple[int, int, int],
    dtype: str,
    layout: str,
    *,
    products: int = 1,
) -> Work:
    """Cost of the product, or of several in one kernel, with one tile and one split of the k loop."""
    m, n, k = shape
    blocks = products * math.ceil(m / tile.bm) * math.ceil(n / tile.bn)
    clocks = _block_clocks(card, physics, tile, split, shape, dtype, layout)
    compute_clk = _waves_clk(card, physics, tile, blocks * split, *clocks)
    cache_clk = _cache_clk(card, physics, tile, blocks, k, dtype)
    traffic = products * dram_bytes(card, tile, shape, dtype) + _reduction_bytes(m, n, split)
    return Work(
        core_s=max(compute_clk, cache_clk) / card.clock_hz,
        dram_s=traffic / memory_rate(card, physics),
        fixed_s=physics.memory.latency_s * (1 if split == 1 else 2),
        tensor_s=2.0 * products * m * n * k / (card.flops_per_sm_clk(dtype) * card.sm_count * card.clock_hz),
        kernels=1 if split == 1 else 2,
    )


def memory_rate(card: Card, physics: Physics) -> float:
    """Bytes per second that products get of the card's memory."""
    return card.bandwidth_bytes_per_s * physics.memory.bandwidth_frac


def _block_clocks(
    card: Card, physics: Physics, tile: Tile, split: int, shape: tuple[int, int, int], dtype: str, layout: str
) -> tuple[float, float]:
    """Clocks of one block: (that keep the tensor cores busy, that only wait: prologue and store).

    The block always computes bm x bn x ceil(k): padding of ragged shapes is paid in full.
    """
    g = physics.gemm
    rate = card.flops_per_sm_clk(dtype) * g.ceiling * tile.rate * g.layout_rate.get(layout, 1.0) * _aligned(shape)
    loops = math.ceil(shape[2] / split / tile.bk)
    main = loops * 2.0 * tile.bm * tile.bn * tile.bk / rate
    wait = g.prologue_clk + tile.bm * tile.bn * DTYPE_BYTES.get(dtype, 2) / g.store_bytes_per_clk
    return main, wait


def _aligned(shape: tuple[int, int, int]) -> float:
    """Rows that are no multiple of 16 bytes cannot use the widest loads."""
    return 1.0 if shape[1] % 8 == 0 and shape[2] % 8 == 0 else 0.7


def _waves_clk(card: Card, physics: Physics, tile: Tile, blocks: int, main: float, wait: float) -> float:
    """Clocks of all blocks: full waves of sm_count x resident blocks, then what is left.

    Resident blocks share the tensor cores of their SM, so a wave takes `resident` main loops; their
    waits overlap.
    """
    full, rest = divmod(blocks, card.sm_count * tile.resident)
    wave = tile.resident * main + wait
    if not physics.gemm.wave_quantisation:
        return blocks / (card.sm_count * tile.resident) * wave
    last = math.ceil(rest / card.sm_count) * main + wait if rest else 0.0
    return full * wave + last


def _cache_clk(card: Card, physics: Physics, tile: Tile, blocks: int, k: int, dtype: str) -> float:
    """Clocks to feed every block its strips of both operands out of the last-level cache."""
    bytes_in = blocks * (tile.bm + tile.bn) * k * DTYPE_BYTES.get(dtype, 2)
    return bytes_in / (min(blocks, card.sm_count) * physics.memory.l2_bytes_per_sm_clk)


def dram_bytes(card: Card, tile: Tile, shape: tuple[int, int, int], dtype: str) -> float:
    """Bytes from and to DRAM.

    Blocks that run at once form a nearly square patch of the result and share its strips; a strip is
    read again for every patch unless the cache still holds it.
    """
    m, n, k = shape
    size = DTYPE_BYTES.get(dtype, 2)
    a, b, c = m * k * size, k * n * size, m * n * size
    if a + b <= 0.7 * card.l2_bytes:
        return float(a + b + c)
    at_once = card.sm_count * tile.resident
    rows, cols = math.ceil(m / tile.bm), math.ceil(n / tile.bn)
    patch_rows = min(rows, max(1, round(math.sqrt(at_once * tile.bn / tile.bm))))
    patch_cols = min(cols, max(1, at_once // patch_rows))
    again_a, again_b = math.ceil(cols / patch_cols), math.ceil(rows / patch_rows)
    if b / max(cols, 1) * patch_cols <= 0.5 * card.l2_bytes:
        again_b = 1
    return float(a * again_a + b * again_b + c)


def _reduction_bytes(m: int, n: int, split: int) -> float:
    """Partial sums in fp32 that a split product writes and a second kernel reads."""
    return 0.0 if split == 1 else 2.0 * split * m * n * DTYPE_BYTES["fp32"]
