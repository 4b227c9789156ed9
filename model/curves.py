"""Seconds of an operation on one device, from a fitted efficiency curve.

A curve is a smooth physical form (few parameters, one per mechanism) plus, optionally, what is left:
a Gaussian process over log-shape that reproduces the shapes that were measured and falls back to the
smooth form, with its spread, for shapes unlike any of them. Tile and wave quantisation makes those
residuals a sawtooth that no smooth form follows, and layers reuse few shapes, so it pays.

Every form answers in seconds of one execution. Parameters that are absent switch their mechanism off,
so that a curve of a single rate (a prior) is valid. ``t0_s`` is the floor that kernels of every kind share,
``own_s`` what one of this kind takes beyond it; ``issue_s`` is no part of the device: it is the host's time per
call in the benchmark, below which no kernel was seen (`benched`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunecast.model.factors import Curve
from tunecast.model.operation import Operation, plain_layout
from tunecast.model.units import DTYPE_BYTES

Array = npt.NDArray[np.float64]
Params = dict[str, float]

LAYOUTS = ("nt", "nn", "tn")
SHAPE_AXES = 6
ROOFLINE_POWER = 4.0
"""Sharpness of the bend between two bounds: (a^p + b^p)^(1/p) is 19% above the larger when they are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Operations as columns, so that a form is evaluated on all of them at once."""

    flops: Array
    bytes: Array
    launches: Array
    shape: Array
    """(operations, 6); absent axes are 0."""
    layout: npt.NDArray[np.int64]
    element_bytes: Array

    def rows(self, index: npt.NDArray[np.int64]) -> Columns:
        """The columns of some of the operations."""
        return Columns(
            flops=self.flops[index],
            bytes=self.bytes[index],
            launches=self.launches[index],
            shape=self.shape[index],
            layout=self.layout[index],
            element_bytes=self.element_bytes[index],
        )


def columns(operations: Sequence[Operation]) -> Columns:
    """Operations, one execution each, as columns."""
    shape = np.zeros((len(operations), SHAPE_AXES))
    for row, operation in enumerate(operations):
        axes = operation.shape[:SHAPE_AXES]
        shape[row, : len(axes)] = axes
    return Columns(
        flops=np.array([o.flops for o in operations], dtype=float),
        bytes=np.array([o.bytes for o in operations], dtype=float),
        launches=np.array([max(o.launches, 0.0) for o in operations], dtype=float),
        shape=shape,
        layout=np.array([layout_index(o.layout) for o in operations], dtype=np.int64),
        element_bytes=np.array([DTYPE_BYTES.get(o.dtype, 2) for o in operations], dtype=float),
    )


def layout_index(layout: str) -> int:
    """Place of a product's layout among `LAYOUTS`, whatever kernel runs it; 0 for all that is no product's."""
    plain = plain_layout(layout)
    return LAYOUTS.index(plain) if plain in LAYOUTS else 0


def bend(*bounds: Array, power: float = ROOFLINE_POWER) -> Array:
    """Smooth maximum of several bounds of a time, the sharper the larger `power`."""
    total = np.zeros_like(bounds[0])
    for bound in bounds:
        total = total + bound**power
    return np.asarray(total ** (1.0 / power))


def bytes_seconds(n_bytes: Array, params: Params) -> Array:
    """Seconds to move bytes: a last-level-cache tier below ``cache_bytes``, memory above, a soft edge between.

    ``bytes_per_s`` alone is one bandwidth. With ``cache_bytes`` and ``cache_bytes_per_s`` the share of
    traffic that goes to memory is a logistic in log(bytes), ``cache_width`` e-folds wide.
    """
    rate = params.get("bytes_per_s")
    if rate is None:
        return np.zeros_like(n_bytes)
    cache = params.get("cache_bytes", 0.0)
    if cache <= 0.0:
        return n_bytes / rate
    edge = np.log(np.maximum(n_bytes, 1.0) / cache) / params.get("cache_width", 1.0)
    outside = 1.0 / (1.0 + np.exp(-np.clip(edge, -40.0, 40.0)))
    return n_bytes * (outside / rate + (1.0 - outside) / params["cache_bytes_per_s"])


def _constant_s(params: Params) -> float:
    """Seconds of a kernel that its size does not change: the floor of all kinds, and its own."""
    return params.get("t0_s", 0.0) + params.get("own_s", 0.0)


def bandwidth(params: Params, cols: Columns) -> Array:
    """Memory-bound kernels: bytes / bandwidth, and a floor of ``t0_s`` for each kernel.

    An operation of several launches is so many kernels of an equal share of its bytes. Those that stay in the cache
    (`share_in_cache`) take ``cached_over_memory`` of the time that they would take from memory.
    """
    kernels = np.maximum(cols.launches, 1.0)
    moved = kernels * bytes_seconds(cols.bytes / kernels, params)
    if CACHED_OVER_MEMORY in params:
        moved = moved * (1.0 - (1.0 - params[CACHED_OVER_MEMORY]) * share_in_cache(params, cols))
    return moved + kernels * params.get("t0_s", 0.0)


L2_BYTES, CACHED_OVER_MEMORY = "l2_bytes", "cached_over_memory"
"""Parameters of curves of moved bytes: the last-level cache, and seconds there over those in memory."""
CACHE_EDGE = 2.0
"""How sharply the cache ends: kernels of twice its bytes find 1 / (1 + 2^2) of it."""


def share_in_cache(params: Params, cols: Columns) -> Array:
    """Share of kernels that only move bytes whose input the kernel before has left in the last-level cache.

    1 / (1 + (bytes of a kernel / ``l2_bytes``)^2): benchmarks rotate their buffers past the cache, steps do not.
    """
    each = cols.bytes / np.maximum(cols.launches, 1.0)
    return np.asarray(1.0 / (1.0 + (each / params[L2_BYTES]) ** CACHE_EDGE))


def gemm(params: Params, cols: Columns) -> Array:
    """Matrix product m,n,k: 2 ((m + tile)(n + tile) + area / splits)(k + k0) / rate, bent onto bytes / bandwidth.

    ``tile`` is the padding of partial tiles, ``area`` the partial last wave of a grid of processors,
    ``k0`` the prologue of each tile; ``nn`` and ``tn`` are the slowdowns of the two other layouts.
    A result of fewer tiles than processors has its k loop split over the idle ones (`splits`), so that a wave is
    shorter by as much. A kernel for a stack of products has the tiles and bytes of all of them and one last wave.
    """
    m, n, k = cols.shape[:, 0], cols.shape[:, 1], cols.shape[:, 2]
    tile, stacked = params.get("tile", 0.0), stacked_of(cols)
    area = stacked * (m + tile) * (n + tile) + params.get("area", 0.0) / splits(params, m, n, k, stacked)
    slow = np.array([1.0, params.get("nn", 1.0), params.get("tn", 1.0)])[cols.layout]
    compute = 2.0 * area * (k + params.get("k0", 0.0)) * slow / params["flops_per_s"]
    return products_of(cols) * (bend(compute, bytes_seconds(product_bytes(cols), params)) + _constant_s(params))


def stacked_of(cols: Columns) -> Array:
    """Products in one kernel of matrix products: one for each expert or head of a stack, or one."""
    return np.maximum(cols.shape[:, 3], 1.0)


def products_of(cols: Columns) -> Array:
    """Kernels of matrix products, each of the operation's shape: its launches, or one."""
    return np.maximum(cols.launches, 1.0)


def product_bytes(cols: Columns) -> Array:
    """Bytes of both inputs and the result of one kernel of matrix products; of a stack also of what it is added to."""
    m, n, k = cols.shape[:, 0], cols.shape[:, 1], cols.shape[:, 2]
    own = stacked_of(cols) * (m * n + n * k + m * k) * cols.element_bytes
    return np.where(cols.shape[:, 3] > 0.0, np.maximum(own, cols.bytes / products_of(cols)), own)


def splits(params: Params, m: Array, n: Array, k: Array, stacked: Array) -> Array:
    """How many thread blocks share the k loop of one ``wave_tile_m`` x ``wave_tile_n`` tile of so many results m x n:
    as many as fit on the ``processors``, each with ``split_depth`` of k at least; 1 without these
    parameters.

    Split-K of the libraries: CUTLASS, media/docs/efficient_gemm.md ("Parallelized Reductions").
    """
    if "split_depth" not in params:
        return np.ones_like(m)
    tiles = stacked * np.ceil(m / params["wave_tile_m"]) * np.ceil(n / params["wave_tile_n"])
    room = np.floor(params["processors"] / tiles)
    return np.maximum(np.minimum(room, np.floor(k / params["split_depth"])), 1.0)


TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
"""Output tiles (m, n) of the usual library kernels, tried both ways round, where a curve names none of its own."""
MAX_TILES = 4


def tiles_of(params: Params) -> list[tuple[float, float]]:
    """Output tiles of a `gemm_waves` curve: its own (``tile0_m``, ``tile0_n``, ...), else the usual ones."""
    own = [(params[f"tile{i}_m"], params[f"tile{i}_n"]) for i in range(MAX_TILES) if f"tile{i}_m" in params]
    return own or sorted({(float(a), float(b)) for pair in TILES for a, b in (pair, pair[::-1])})


def gemm_waves(params: Params, cols: Columns) -> Array:
    """Matrix product on a grid of ``processors``, tile by tile and wave by wave; the best tile is chosen.

    seconds = waves x tile work / processor rate. ``quantised`` in 0..1 says how much of the last,
    partial wave is paid for (0: none, time is smooth); a tile of side T reaches T/(T + half) of the
    rate; ``k0`` is the prologue of a tile. Bytes, layouts and ``t0_s`` as in `gemm`.
    """
    m, n, k, stacked = cols.shape[:, 0], cols.shape[:, 1], cols.shape[:, 2], stacked_of(cols)
    processors, quantised = params["processors"], params.get("quantised", 1.0)
    per_processor = params["flops_per_s"] / processors
    slow = np.array([1.0, params.get("nn", 1.0), params.get("tn", 1.0)])[cols.layout]
    best = np.full(m.shape, np.inf)
    for tile_m, tile_n in tiles_of(params):
        tiles = stacked * np.ceil(m / tile_m) * np.ceil(n / tile_n) / processors
        waves = quantised * np.ceil(tiles) + (1.0 - quantised) * np.maximum(tiles, 1.0)
        side = 2.0 * tile_m * tile_n / (tile_m + tile_n)
        reach = side / (side + params.get("half", 0.0))
        work = 2.0 * tile_m * tile_n * (k + params.get("k0", 0.0))
        best = np.minimum(best, waves * work / (per_processor * reach))
    return products_of(cols) * (bend(best * slow, bytes_seconds(product_bytes(cols), params)) + _constant_s(params))


def attention(params: Params, cols: Columns) -> Array:
    """Fused attention: flops (1 + length0 / kv_len)(1 + head_dim0 / head_dim)(1 + wide beyond 128) / rate + t0.

    ``length0`` is the loss on short sequences (diagonal tiles, few of them), ``head_dim0`` that of small heads,
    ``wide`` that of large ones (fewer rows fit on chip), per 128 values beyond the first; ``work0_flops`` the work
    below which the processors are not all busy; ``head_step`` the sizes that kernels exist for, which heads are padded
    to (`padded_head`).

    With ``processors``, each of which takes one block of queries of one head at a time: blocks differ in length under
    the causal mask, n of them by 1 to n, and a schedule ends when the last has: never before the longest, and at
    most the longest after an even share (Graham 1969); ``tail`` is the part of it that is paid.
    """
    length, head_dim = np.maximum(cols.shape[:, 4], 1.0), np.maximum(cols.shape[:, 5], 1.0)
    short = 1.0 + params.get("length0", 0.0) / length
    small = 1.0 + params.get("head_dim0", 0.0) / head_dim
    large = 1.0 + params.get("wide", 0.0) * np.maximum(head_dim / WIDE_HEAD - 1.0, 0.0)
    padded = padded_head(head_dim, params["head_step"]) / head_dim if "head_step" in params else 1.0
    compute = cols.flops * padded * short * small * large / params["flops_per_s"]
    if params.get("processors"):
        rows = np.maximum(np.ceil(cols.shape[:, 3] / QUERY_BLOCK), 1.0)
        blocks = np.maximum(cols.shape[:, 0] * cols.shape[:, 1] * rows, 1.0)
        longest = compute * params["processors"] / blocks * 2.0 * rows / (rows + 1.0)
        compute = np.maximum(compute + params.get("tail", 0.0) * longest, longest)
    return compute + params.get("work0_flops", 0.0) / params["flops_per_s"] + params.get("t0_s", 0.0)


def padded_head(head_dim: Array, step: float) -> Array:
    """Head size that a fused kernel works with: the next multiple of `step` up to 192, then 256 (FlashAttention-2,
    csrc/flash_attn/flash_api.cpp, ``head_size_rounded``); larger ones as they are."""
    return np.where(head_dim <= MOST_STEPPED, np.ceil(head_dim / step) * step, np.maximum(head_dim, WIDEST_HEAD))


MOST_STEPPED, WIDEST_HEAD = 192.0, 256.0
QUERY_BLOCK = 128
"""Rows of queries that one thread block of a fused attention takes (FlashAttention-2, Dao 2023, section 3.3)."""
WIDE_HEAD = 128.0
"""Head size up to which the kernels keep their block sizes."""


def elements(params: Params, cols: Columns) -> Array:
    """Dequantization of a weight: elements / rate + t0; with ``cache_bytes`` (in elements here) as `bandwidth`."""
    return bytes_seconds(cols.shape[:, 0], params) + _constant_s(params)


FORMS: dict[str, Callable[[Params, Columns], Array]] = {
    "gemm": gemm,
    "gemm_waves": gemm_waves,
    "bandwidth": bandwidth,
    "attention": attention,
    "elements": elements,
}


def benched(form: str, params: Params, cols: Columns) -> Array:
    """Seconds of a call in a benchmark that repeats it back to back: the kernel's, or the host's if that is slower."""
    return np.asarray(np.maximum(FORMS[form](params, cols), params.get("issue_s", 0.0)))


def coordinates(form: str, cols: Columns) -> Array:
    """Log-shape coordinates in which residuals are interpolated; the last one is the layout code. Rows of all products
    of a stack count as one's, which is as much work."""

    def logs(*axes: Array) -> list[Array]:
        return [np.log(np.maximum(axis, 1.0)) for axis in axes]

    shape = cols.shape
    if form.startswith("gemm"):
        axes = logs(shape[:, 0] * stacked_of(cols), shape[:, 1], shape[:, 2])
    elif form == "attention":
        axes = logs(shape[:, 0] * shape[:, 1], shape[:, 4], shape[:, 5])
    elif form == "elements":
        axes = logs(shape[:, 0])
    else:
        axes = logs(cols.bytes / np.maximum(cols.launches, 1.0))
    return np.stack([*axes, cols.layout.astype(float)], axis=1)


def kernel(left: Array, right: Array, *, length: float) -> Array:
    """Correlation exp(-distance / length) of residuals; layouts other than one's own are one `length` further."""
    apart = np.linalg.norm(left[:, None, :-1] - right[None, :, :-1], axis=2)
    other = (left[:, None, -1] != right[None, :, -1]) * length
    return np.asarray(np.exp(-(apart + other) / length))


def unevenness(params: Params, at: Array) -> Array:
    """Relative width of residuals at each point: exp(gp_slope (log of work - gp_centre)); small work scatters more."""
    return np.asarray(np.exp(params.get("gp_slope", 0.0) * (at[:, :-1].sum(axis=1) - params.get("gp_centre", 0.0))))


def residual(curve: Curve, at: Array) -> tuple[Array, Array]:
    """Mean and covariance of log(measured / form) at distinct coordinates `at`, given the curve's stored residuals.

    Gaussian process of standard deviation ``gp_sd``, correlation `kernel` of ``gp_length`` and, at every
    point on its own, ``gp_noise`` (what no neighbour tells: sawtooth and timing noise), all times the
    point's `unevenness`. Without stored residuals: 0, and `log_sd`.
    """
    points = np.array(curve.residuals, dtype=float)
    sd, length = curve.params.get("gp_sd", curve.log_sd), curve.params.get("gp_length", 1.0)
    noise, wide = curve.params.get("gp_noise", 0.0), unevenness(curve.params, at)
    both = wide[:, None] * wide[None, :]
    prior = sd**2 * kernel(at, at, length=length) + noise**2 * np.eye(len(at))
    if points.size == 0 or sd <= 0.0:
        return np.zeros(len(at)), prior * both
    known = points[:, :-1]
    values = points[:, -1] / unevenness(curve.params, known)
    gram = sd**2 * kernel(known, known, length=length) + max(noise, 1e-4) ** 2 * np.eye(len(known))
    cross = sd**2 * kernel(at, known, length=length)
    solved = np.linalg.solve(gram, np.column_stack([values, cross.T]))
    return (cross @ solved[:, 0]) * wide, (prior - cross @ solved[:, 1:]) * both


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds of operations, and how their errors go together."""

    seconds: Array
    """Of one execution of each operation."""
    point: npt.NDArray[np.int64]
    """For each operation, the row of `covariance` that it shares with all operations of the same shape."""
    covariance: Array
    """Of log seconds, between distinct shapes."""

    @property
    def log_sd(self) -> Array:
        """Standard deviation of the log of each operation's seconds."""
        return np.sqrt(np.maximum(np.diag(self.covariance), 0.0))[self.point]

    def sum_variance(self, weight: Array) -> float:
        """Variance of the sum of weight x log error."""
        by_point = np.bincount(self.point, weights=weight, minlength=len(self.covariance))
        return float(by_point @ self.covariance @ by_point)


def seconds(curve: Curve, cols: Columns) -> Timed:
    """Seconds of one execution of each operation on the curve, with their errors."""
    unique, inverse = np.unique(coordinates(curve.form, cols), axis=0, return_inverse=True)
    point = inverse.reshape(-1)
    mean, covariance = residual(curve, unique)
    value = FORMS[curve.form](curve.params, cols) * np.exp(mean[point])
    return Timed(seconds=value, point=point, covariance=covariance)
