"""What no mechanism says of a shape: some meet the memory's banks, the caches or a kernel's code as no other does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tunecast.calibrate.mock.physics import Physics, generator
from tunecast.calibrate.mock.work import Work

DEGREES, WIDEST = 4.0, 3.0
"""Of the draw: Student's tails, none beyond three scales. Some shapes are far off, none is another kernel's."""


def rough(work: Work, physics: Physics, *shape: object) -> Work:
    """The work of a kernel on this shape, longer or shorter by the card's `roughness`, always by as much.

    No shorter than tensor cores at their full rate.
    """
    drawn = float(np.clip(generator("rough", physics.root, *shape).standard_t(DEGREES), -WIDEST, WIDEST))
    factor = math.exp(physics.roughness * drawn)
    return replace(work, core_s=max(work.core_s * factor, work.tensor_s), dram_s=work.dram_s * factor)
