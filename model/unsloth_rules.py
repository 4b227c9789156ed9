"""Pieces of Unsloth's loss: chunks of tokens, or tiles of tokens and vocabulary, by the rules of four ages.

Where the rules come from, and what is known of the card, is in `loss_budget.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunecast.model.units import GIB, MIB

if TYPE_CHECKING:
    from tunecast.model.run import Run

TODAY, SPACIOUS, CAPPED, HALF_FREE = "unsloth", "unsloth-2026.9", "unsloth-2026.7", "unsloth-2025.12"
UNSLOTH_LOSSES = (TODAY, SPACIOUS, CAPPED, HALF_FREE)
"""Loss paths of unsloth_zoo since 2026.10.9, 2026.9.3, 2026.7.1 and 2025.12."""
CARD_FIELDS = ("loss_budget_bytes", "loss_tiles_from")
"""Fields of a run that say what such a loss reads off the card; assumed where no card is known."""
CHUNK_BYTES: dict[str, int | None] = {TODAY: 2 * GIB, SPACIOUS: 4 * GIB, CAPPED: 4 * GIB, HALF_FREE: None}
"""Most that a chunk is given of half the free memory (``_CHUNK_GB``, ``_CE_TARGET_GB_CAP``; none in 2025.12)."""
LOGIT_BYTES = {SPACIOUS: 16, CAPPED: 4, HALF_FREE: 4}
"""Bytes that the rule reckons a logit to take (``_CE_BYTES_PER_LOGIT``; before it, fp32 logits alone)."""
TOGETHER = 4
"""Chunks come in multiples of this, or there is one (``get_chunk_size``)."""
EASE = 1e-9
"""What the rule rounds away."""
LEAST_LOGITS, LEAST_ROWS, MOST_ROWS = 512 * 151936, 512, 4096
"""Logits that a chunk of today's loss has at least, and bounds of its rows (``_MIN_LOGITS``, ``_MAX_ROWS``)."""
SPLIT = 16384
"""Columns of the vocabulary that one program takes, and the unit of tiles (``_SPLIT_COLS``)."""
TILE_BYTES = 256 * MIB
"""Most that a tile of fp32 logits takes (``_BWD_TILE_BYTES``)."""
LARGE_CARD_ROWS, NO_TILES = 4096, -1
"""Fewest rows that a large card takes in tiles (``_flash_min_rows_auto``), and how a run says that none are."""
MOST_CHUNKS = 1024
"""Chunks that are written down; a loss with more has next to no free memory, where nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the rules look at, of one micro-batch."""

    rows: int
    """Tokens the loss takes: all of them, or (today's) those with a label."""
    hidden: int
    vocab: int
    fixed_bytes: int = 0
    """Gradients that no number of chunks makes smaller (`SPACIOUS` leaves room for them)."""
    logit_bytes: int = 4
    """Of a logit in memory (today's)."""


def chunks_of(run: Run, sizes: Sizes) -> int:
    """Chunks of the losses before today's; one where plenty of memory is assumed and nothing bounds it."""
    kind = run.loss_type
    budget = run.loss_budget_bytes or CHUNK_BYTES[kind]
    if budget is None:
        return 1
    if kind == SPACIOUS and 0 < sizes.fixed_bytes < budget:
        budget -= sizes.fixed_bytes
    wanted = sizes.rows * sizes.vocab * LOGIT_BYTES[kind] / budget
    if kind == HALF_FREE:
        found = max(round(wanted / TOGETHER) * TOGETHER, 1)
    else:
        found = 1 if wanted <= 1 + EASE else math.ceil(wanted / TOGETHER - EASE) * TOGETHER
    return min(found, sizes.rows, MOST_CHUNKS)


def chunk_rows(run: Run, sizes: Sizes) -> list[int]:
    """Tokens of every chunk of the losses before today's (``torch.chunk``)."""
    return pieces(sizes.rows, -(-sizes.rows // chunks_of(run, sizes)))


def pieces(whole: int, size: int) -> list[int]:
    """Equal pieces, and a last one of what is left."""
    return [min(size, whole - start) for start in range(0, whole, size)]


def power_below(value: float) -> int:
    """Largest power of two that is not above `value`; 0 below 1."""
    return 1 << (int(value).bit_length() - 1) if value >= 1 else 0


def rows_today(run: Run, sizes: Sizes) -> int:
    """Rows of a chunk of today's loss: rows x width / vocabulary down to a power of two, between the bounds."""
    least = min(max(power_below(LEAST_LOGITS / sizes.vocab), LEAST_ROWS), MOST_ROWS)
    wanted = min(max(power_below(sizes.rows * sizes.hidden / sizes.vocab), least), MOST_ROWS)
    fitting = budget_today(run) // (sizes.vocab * sizes.logit_bytes)
    return max(min(wanted, max(fitting, 2), sizes.rows), 1)


def budget_today(run: Run) -> int:
    """Memory that today's loss gives its logits."""
    most = CHUNK_BYTES[TODAY] or 0
    return min(run.loss_budget_bytes or most, most)


def takes_tiles(run: Run, sizes: Sizes, *, trains_head: bool, half: bool) -> bool:
    """Whether today's loss never has a row of logits whole: a frozen head in 16 bits and enough rows for the card."""
    since = LARGE_CARD_ROWS if run.loss_tiles_from is None else run.loss_tiles_from
    return since != NO_TILES and sizes.rows >= since and half and not trains_head and -(-sizes.vocab // SPLIT) > 2


def tile_of(run: Run, sizes: Sizes) -> tuple[int, int]:
    """Rows and columns of a tile of fp32 logits."""
    budget = min(TILE_BYTES, budget_today(run))
    rows = max(min(MOST_ROWS, sizes.rows, budget // (SPLIT * sizes.logit_bytes)), 1)
    columns = max(budget // (rows * sizes.logit_bytes), SPLIT)
    if run.loss_tiles_from == 0:
        columns = min(columns, SPLIT)
    return rows, min(columns - columns % SPLIT, -(-sizes.vocab // SPLIT) * SPLIT)
