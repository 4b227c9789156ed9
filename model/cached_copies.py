"""Kernels that find in the last-level cache what the kernel before them wrote, on cards that nobody has calibrated.

An RTX 4090 moves bytes four times as fast in its 72 MB of cache as in its memory; an A100, an H100 and an H200 gain
nothing, since their memory is nearly as fast (`cached_copies` of the beliefs). Steps of few tokens, whose tensors fit,
are faster for it on cards with a large cache and little bandwidth: GeForce and RTX of the compute capabilities 8.9 and
12.0, L4 and L40S. Kernels that read what was last touched a layer, a micro-step or a message ago find nothing there
(`is_cold`), nor do the update's and those of the logits (curves of their own). Left out: that what a forward keeps for
the backward is cold too, but in the share of bytes that are taken to be found (``hot``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.gpus import Gpu, load_gpus
from tunecast.model.columns import CACHED
from tunecast.model.curves import CACHED_OVER_MEMORY, L2_BYTES
from tunecast.model.units import GIGA

SCALE_CACHED = f"scale.{CACHED}"


def cache_params(gpu: Gpu, beliefs: Mapping[str, Any]) -> dict[str, float]:
    """What a card's curve of moved bytes has to say of its cache; nothing where that is no faster or not known, and by
    priors that are older than this belief."""
    over = None if (belief := beliefs.get("cached_copies")) is None else _cache_over_memory(gpu, belief)
    if belief is None or over is None or gpu.l2_bytes is None:
        return {}
    return {L2_BYTES: float(gpu.l2_bytes), CACHED_OVER_MEMORY: 1.0 - float(belief["hot"]) * (1.0 - over)}


def cache_log_sd(gpu: Gpu, beliefs: Mapping[str, Any]) -> float:
    """Standard deviation of the log of the seconds of such kernels: any share of their bytes from ``hot_least`` to all
    is as likely (an even distribution)."""
    own = cache_params(gpu, beliefs)
    if not own:
        return 0.0
    belief = beliefs["cached_copies"]
    saved = (1.0 - own[CACHED_OVER_MEMORY]) / float(belief["hot"])
    return (1.0 - float(belief["hot_least"])) * saved / math.sqrt(12.0) / own[CACHED_OVER_MEMORY]


def _cache_over_memory(gpu: Gpu, belief: Mapping[str, Any]) -> float | None:
    """Seconds of a byte in the cache over those in memory, of one kernel, which reaches ``memory_reached`` of the
    datasheet's bandwidth there; None where the cache is no faster."""
    own, usual = gpu.processor_hz, load_gpus()[belief["reference"]].processor_hz
    if gpu.compute_capability not in belief["capabilities"] or own is None or usual is None:
        return None
    from_memory = gpu.bandwidth_bytes_per_s * float(belief["memory_reached"])
    over = from_memory / (float(belief["gbytes_per_s"]) * GIGA * own / usual)
    return over if over < 1.0 else None
