"""Kernels that move bytes which no kernel just before them has touched, by name: no cache still holds what they read.

Sums of gradients read those of the micro-batch before, casts of weights what the update wrote, and copies for other
GPUs what a message has brought or takes away.
"""

from __future__ import annotations

from tunecast.model.sharding_copies import copies_for_others
from tunecast.model.tape import LEAF_SUM

COLD = "cold"
"""The curve that they follow, behind ``memory-``; where a device has none, that of the others."""
CASTS = ("weight_cast", "adapter_cast")
"""What `primitives.autocast_weight` calls casts of weights."""


def is_cold(name: str) -> bool:
    """Whether a kernel of this name is one of them."""
    return name == LEAF_SUM or name in CASTS or copies_for_others(name)
