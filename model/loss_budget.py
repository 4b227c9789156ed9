"""Into how many pieces Unsloth cuts its loss: by the tokens, the vocabulary and the memory that is free on the card.

Sources: unsloth_zoo, whose rule has had four ages. 2025.12 (``fused_losses/cross_entropy_loss.py`` of 2025.12.1 to
2026.6.7): four bytes a logit into half of the free memory, rounded to multiples of four chunks, so that all but the
largest losses are one. 2026.7 (the same file of 2026.7.1 to 2026.9.2): into at most 4 GiB, rounded up. 2026.9 (of
2026.9.3 to 2026.10.8): sixteen bytes a logit, beside the gradients. Today (``fused_losses/fused_linear.py`` of
2026.10.9): rows as in Liger between two bounds, or tiles of rows and vocabulary. Free memory is read once, at the first
loss of a process; here it is the card's usable memory less what then rests on it. Left out of that: the CUDA context,
what the allocator caches, and what the first forward pass keeps, which is little while checkpoints go to the host.
"""

from __future__ import annotations

from dataclasses import replace

from tunecast.model.architecture import Architecture
from tunecast.model.memory import local_parts
from tunecast.model.memory_static import static_parts
from tunecast.model.resolve import Resolved
from tunecast.model.run import Run
from tunecast.model.tape_peaks import PARTS
from tunecast.model.target import Target
from tunecast.model.units import GIB
from tunecast.model.unsloth_rules import CARD_FIELDS, CHUNK_BYTES, LARGE_CARD_ROWS, NO_TILES, UNSLOTH_LOSSES

SMALL_CARD_BYTES = 24.5 * GIB
"""Cards up to this size always take tiles (``_SMALL_CARD_BYTES``)."""
TILING_SINCE = 8
"""Major compute capability from which tiles are taken at all (``_flash_ce_ok``)."""


def free_bytes(architecture: Architecture, run: Run, target: Target) -> int | None:
    """Memory of one GPU that is free when the first loss begins, before there is optimizer state; None: unknown."""
    if target.usable_bytes is None:
        return None
    static = {**dict.fromkeys(PARTS, 0), **static_parts(architecture, run, platform=target.platform)}
    _, resting = local_parts(architecture, run, whole=[(("load", "outside", False), static)])[0]
    return int(target.usable_bytes) - sum(resting.values()) + resting["optimizer_state"]


def tiles_from(target: Target) -> int:
    """Fewest labelled tokens that today's loss takes in tiles on this card."""
    major = "" if target.gpu is None else target.gpu.major
    if not major.isdigit() or int(major) < TILING_SINCE:
        return NO_TILES
    small = target.usable_bytes is not None and target.usable_bytes <= SMALL_CARD_BYTES
    return 0 if small else LARGE_CARD_ROWS


def on_card(resolved: Resolved, architecture: Architecture, target: Target) -> Resolved:
    """The run with what Unsloth's loss reads off the card; any other run as it is.

    Where nothing is free the run does not fit, and is counted as if there were plenty.
    """
    run = resolved.run
    if run.loss_type not in UNSLOTH_LOSSES:
        return resolved
    free = free_bytes(architecture, run, target)
    half = None if free is None or free <= 0 else free // 2
    most = CHUNK_BYTES[run.loss_type]
    budget = half if half is None or most is None else min(half, most)
    known = replace(run, loss_budget_bytes=budget, loss_tiles_from=tiles_from(target))
    return replace(resolved, run=known, origins={**resolved.origins, **dict.fromkeys(CARD_FIELDS, "stack-default")})
