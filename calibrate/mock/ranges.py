"""Ranges of the hidden constants, from published measurements: calibrate/data/mock_physics.json.

The file says for every constant what it is, its range by kind of card, what was measured of it on real
cards and where that was published, or that it is assumed. `results/validation/mock/physics.md` shows it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tunecast.calibrate.mock.card import Card

STATUSES = ("measured", "assumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A constant lies between `low` and `high` on the cards that have the tag `cards`."""

    cards: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of real cards in words, and the keys of what published them."""

    figure: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One hidden constant: what it is, how it is drawn, and what is known of it."""

    name: str
    group: str
    what: str
    unit: str
    was: tuple[float, float] | None
    """Range before published kernels were looked at; None for a constant that is new."""
    ranges: tuple[Range, ...]
    """The first whose tag a card has; the last is for all."""
    status: str
    measured: tuple[Measured, ...]
    note: str

    def of(self, tags: frozenset[str]) -> Range:
        """The range for a card with these tags."""
        return next(r for r in self.ranges if r.cards in tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All constants by name and all sources by key."""

    collected: str
    constants: dict[str, Constant]
    sources: dict[str, str]


@cache
def evidence() -> Evidence:
    """The committed file, read once."""
    raw = json.loads((files("tunecast.calibrate") / "data" / "mock_physics.json").read_text(encoding="utf-8"))
    constants = {name: _constant(name, entry) for name, entry in raw["constants"].items()}
    return Evidence(collected=raw["collected"], constants=constants, sources=raw["sources"])


def _constant(name: str, entry: dict[str, Any]) -> Constant:
    was = entry["was"]
    return Constant(
        name=name,
        group=entry["group"],
        what=entry["what"],
        unit=entry["unit"],
        was=(was[0], was[1]) if was else None,
        ranges=tuple(Range(**r) for r in entry["ranges"]),
        status=entry["status"],
        measured=tuple(Measured(figure=m["figure"], sources=tuple(m["sources"])) for m in entry["measured"]),
        note=entry["note"],
    )


GDDR_CAPABILITIES = ("7.5", "8.6", "8.9", "12.0", "12.1")
SERIES = ("rtx-30", "rtx-40", "rtx-50")
"""GeForce generations; `rtx-4000-ada` and `rtx-5000-ada` are workstation cards."""
FULL_RATE_CLK = 1000.0
"""Dense bf16 FLOPs per SM and clock of a full-rate card of any generation since Volta: 1,024 and more."""


def tags(card: Card) -> frozenset[str]:
    """Kinds of card that ranges are given for, down to the card itself."""
    capability, name = card.compute_capability, card.gpu_id
    found = {"all", name, card.architecture.lower()}
    if capability.startswith("gfx"):
        found |= {"amd", "cdna"}
    else:
        found.add("sm" + capability.replace(".", ""))
        found.add("sm" + capability.split(".")[0])
    if capability not in GDDR_CAPABILITIES:
        found.add("hbm")
    if name.startswith(("rtx", "titan", "quadro")):
        found.add("rtx")
    if "amd" not in found and card.flops_per_sm_clk("bf16") < FULL_RATE_CLK:
        found.add("half-rate")
    if "ada" not in name:
        found |= {series for series in SERIES if name.startswith(series)}
    return frozenset(found)
