"""Whose seconds an operation's are: its own kind's, its memory's, its cache's, or the floor of every kernel."""

from __future__ import annotations

import numpy as np

from tunecast.model.curves import (
    CACHED_OVER_MEMORY,
    FORMS,
    L2_BYTES,
    ROOFLINE_POWER,
    Array,
    Columns,
    Params,
    bytes_seconds,
    product_bytes,
    products_of,
    share_in_cache,
)
from tunecast.model.factors import Curve

SHARES = ("own", "memory", "cached", "floor")
"""Whose seconds an operation's are: its own kind's; the memory's, where a product is bound by its bytes; the cache's;
and the kernels' floor."""


def shares(curve: Curve, cols: Columns) -> Array:
    """(shares, operations), see `SHARES`; they add up to 1."""
    floor, cached = floor_frac(curve, cols), cached_frac(curve.form, curve.params, cols)
    parts = np.stack([np.zeros_like(floor), memory_frac(curve, cols), cached, floor])
    parts[1:3] *= 1.0 - floor
    parts[0] = 1.0 - parts.sum(axis=0)
    return parts


def memory_frac(curve: Curve, cols: Columns) -> Array:
    """`bytes_frac` where whole steps have told bytes and arithmetic of products apart; else 0.

    A clock that rises or falls with power moves the one and not the other.
    """
    return bytes_frac(curve, cols) if curve.params.get("bytes_apart") else np.zeros(len(cols.flops))


def bytes_frac(curve: Curve, cols: Columns) -> Array:
    """How far matrix products wait for bytes rather than for arithmetic: their share in the bend of both bounds."""
    params = {**curve.params, "t0_s": 0.0, "own_s": 0.0}
    if not curve.form.startswith("gemm"):
        return np.zeros(len(cols.flops))
    moved_s = products_of(cols) * bytes_seconds(product_bytes(cols), params)
    return np.asarray((moved_s / FORMS[curve.form](params, cols)) ** ROOFLINE_POWER)


def cached_frac(form: str, params: Params, cols: Columns) -> Array:
    """Whose seconds, beside the floor, are those of kernels in the cache (`share_in_cache`)."""
    if form != "bandwidth" or not np.all(np.asarray(params.get(L2_BYTES, 0.0)) > 0.0):
        return np.zeros(len(cols.bytes))
    share, over = share_in_cache(params, cols), params.get(CACHED_OVER_MEMORY, 1.0)
    return np.asarray(share * over / (1.0 - (1.0 - over) * share))


def floor_frac(curve: Curve, cols: Columns) -> Array:
    """Share of each operation's seconds that is the kernels' floor ``t0_s``."""
    without = FORMS[curve.form]({**curve.params, "t0_s": 0.0}, cols)
    whole = FORMS[curve.form](curve.params, cols)
    return np.asarray(1.0 - np.divide(without, whole, out=np.ones_like(whole), where=whole > 0.0))
