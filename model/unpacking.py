"""How fast a card unpacks 4-bit weights: as its processors' clocks allow, or as its memory does where that is less.

Unpacking takes so many instructions a value that the cards of data centres, which have much bandwidth for each of their
processors, wait for those (an A100 from one kernel to the next twice as fast), while the others wait for their memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any

from tunecast.catalogs.gpus import Gpu, load_gpus


def unpacking_gain(gpu: Gpu, beliefs: Mapping[str, Any], kernel: str = "") -> float:
    """Rate of unpacking over bandwidth, as a multiple of the reference card's with the same `kernel`.

    Processors of all NVIDIA cards are taken to unpack as many values a clock (assumed). At most what a card's memory
    moves where it waits for that, however slow the kernel: on such a card one of more instructions is no slower. 1 for
    other vendors' cards, where nothing is known to tell, and by priors that are older than this belief.
    """
    belief = beliefs.get("unpacking_clocks")
    own = None if belief is None else clocks_per_byte(gpu)
    usual = None if belief is None else clocks_per_byte(load_gpus()[belief["reference"]])
    if own is None or usual is None:
        return 1.0
    most = float(beliefs["efficiency"]["memory"]["value"]) / float(beliefs["efficiency"]["dequant"]["value"])
    return min(own / usual, most / float(beliefs["dequant_kernels"]["values"].get(kernel, 1.0)))


def clocks_per_byte(gpu: Gpu) -> float | None:
    """Clocks of all processors for each byte that memory moves; of the cards of its major compute capability in the
    median where the card's processors or clock are not known."""
    if gpu.vendor != "nvidia":
        return None
    return _stated(gpu) or _of_major(gpu.major)


@cache
def _of_major(major: str) -> float | None:
    alike = [found for other in load_gpus().values() if other.major == major and (found := _stated(other))]
    return median(alike) if alike else None


def _stated(gpu: Gpu) -> float | None:
    if gpu.vendor != "nvidia" or gpu.processor_hz is None:
        return None
    return gpu.processor_hz / gpu.bandwidth_bytes_per_s
