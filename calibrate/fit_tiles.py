"""Which output tiles a device's matrix products use, read off the sawtooth of their times.

Libraries choose among a few tiles, and the last partial wave makes time jump; which tiles, no datasheet
tells. They are found greedily: the tile, then the pair, then the triple that best explains the trials.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tunecast.calibrate.fit_curves import FormSpec, fit_params
from tunecast.calibrate.fit_trials import Observation, log_seconds
from tunecast.model.curves import Array, Columns, Params, benched, columns

SIDES = (32, 64, 96, 128, 160, 192, 256)
"""Sides of tiles tried, multiples of a warp's 32; both orders of a pair."""
MOST_TILES = 3
LEAST_GAIN = 0.03
"""A further tile must lower the typical error by this share."""
ROUNDS = 2
"""Tiles and the other parameters are found in turn, so many times."""


def _named(tiles: Sequence[tuple[int, int]]) -> Params:
    named: Params = {}
    for i, (m, n) in enumerate(tiles):
        named |= {f"tile{i}_m": float(m), f"tile{i}_n": float(n)}
    return named


def _score(params: Params, tiles: Sequence[tuple[int, int]], cols: Columns, log_y: Array) -> float:
    """Typical error with these tiles, at the best common rate."""
    left = log_y - np.log(benched("gemm_waves", {**params, **_named(tiles)}, cols))
    return float(np.mean(np.abs(left - np.median(left))))


def _greedy(params: Params, cols: Columns, log_y: Array) -> list[tuple[int, int]]:
    chosen: list[tuple[int, int]] = []
    best = np.inf
    while len(chosen) < MOST_TILES:
        trials = {pair: _score(params, [*chosen, pair], cols, log_y) for pair in itertools.product(SIDES, SIDES)}
        pair = min(trials, key=lambda one: trials[one])
        if trials[pair] > best * (1.0 - LEAST_GAIN):
            break
        best = trials[pair]
        chosen.append(pair)
    return chosen


def learn_tiles(spec: FormSpec, found: Sequence[Observation]) -> Params:
    """Tiles of a ``gemm_waves`` curve as its parameters ``tile0_m``, ``tile0_n``, ..."""
    cols, log_y = columns([o.operation for o in found]), log_seconds(found)
    params: Params = {**spec.start, **spec.fixed, "quantised": 1.0}
    named: Params = {}
    for _ in range(ROUNDS):
        named = _named(_greedy(params, cols, log_y))
        fixed = {**spec.fixed, **named}
        params = fit_params(FormSpec(form=spec.form, start=spec.start, reach=spec.reach, fixed=fixed), cols, log_y)
        params = {name: value for name, value in params.items() if name not in named}
    return named
