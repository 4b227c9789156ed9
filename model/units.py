"""Units, in one place. Quantities carry their unit in their name; these convert at the edges."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3
KILO = 1e3
MEGA = 1e6
GIGA = 1e9
TERA = 1e12
MICROSECOND_S = 1e-6
MILLISECOND_S = 1e-3
HOUR_S = 3600.0
MINUTE_S = 60.0
MONTH_H = 730.0
"""Hours of an average month, by which clouds turn monthly prices into hourly ones."""

DTYPE_BYTES = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "int8": 1,
    "fp8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
"""Storage bytes of one element, by our dtype names."""
SIXTEEN_BITS = ("bf16", "fp16")
"""Floats of half the width, in which models are stored and multiplied."""


def gib(n_bytes: float) -> float:
    """Bytes to GiB (2**30), for display only."""
    return n_bytes / GIB


def memory_text(n_bytes: float) -> str:
    """Memory in a sentence: MiB below one GiB, a digit behind the point below ten."""
    if n_bytes < GIB:
        return f"{n_bytes / MIB:,.0f} MiB"
    return f"{gib(n_bytes):,.{0 if n_bytes >= 10 * GIB else 1}f} GiB"


def short_time(value_s: float) -> str:
    """Three significant digits of seconds, or of milliseconds below one; for sentences."""
    return f"{value_s:.3g} s" if value_s >= 1.0 else f"{value_s / MILLISECOND_S:.3g} ms"
