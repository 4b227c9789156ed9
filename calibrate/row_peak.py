"""The peak memory of a row: in GiB, on its card, above what the weights alone take."""

from __future__ import annotations

import re

from tunecast.calibrate.cell_numbers import why_none
from tunecast.calibrate.cell_written import two_readings
from tunecast.calibrate.run_table import Row, SkipRowError, number
from tunecast.catalogs.gpus import Gpu
from tunecast.model.architecture import Architecture
from tunecast.model.memory_static import static_parts
from tunecast.model.run import Run
from tunecast.model.sharding import SHARDS, shard_gpus
from tunecast.model.units import GIB

COLUMN = "peak_mem_gib"
MIB_A_GIB = 1024.0
ANOTHER_CARD = 1.1
"""Peak over a card's memory from which it was not that card: less may be a unit, or rounded."""
LEAST_OF_WEIGHTS = 0.25
"""Share of the weights on one GPU, dealt out evenly, below which no peak is one of training the model: 16 bits read in
place of 4 take four times as much."""


def peak_memory(row: Row, gpu: Gpu, architecture: Architecture, run: Run) -> tuple[float | None, str]:
    """Peak memory in GiB, and why a stated one cannot be read: the row's speed can be compared all the same, unless one
    card alone would have held more than it has, which skips the row."""
    text = row.get(COLUMN, "")
    bare = re.sub(r"\s*(?:/|per) ?(?:gpu|device|card)$", "", text, flags=re.IGNORECASE)
    if re.search(r"\d\s*[GM]B?$", bare, re.IGNORECASE):
        return None, f"{COLUMN} {text!r} may count powers of 1,000 or of 1,024: write GiB or MiB"
    either = two_readings(COLUMN, text)
    if either:
        return None, f"{COLUMN} {text!r} {either}"
    plain = re.sub(r"\s*MiB$", "", bare, flags=re.IGNORECASE)
    plain = plain if plain == bare else re.sub(r"(?<=\d),(?=\d{3}\b)", "", plain)
    try:
        found = number({**row, COLUMN: plain}, COLUMN)
    except SkipRowError:
        return None, f"{COLUMN} {text!r} {why_none(COLUMN, plain)}"
    peak_gib = found / MIB_A_GIB if found is not None and plain != bare else found
    least_gib = least_weights_bytes(architecture, run) / GIB
    if peak_gib is None or least_gib <= peak_gib <= gpu.memory_marketing_gb:
        return peak_gib, ""
    if peak_gib < least_gib:
        return None, (
            f"{COLUMN} {text!r} is less than a quarter of what the weights alone take "
            f"({least_gib / LEAST_OF_WEIGHTS:.1f} GiB): check its unit"
        )
    above = f"{COLUMN} {text!r} is above the {gpu.memory_marketing_gb:g} GB of {gpu.id}"
    bare_number = plain == text and re.fullmatch(r"\d+(?:\.\d+)?", plain) is not None
    if bare_number and least_gib <= peak_gib / MIB_A_GIB <= gpu.memory_marketing_gb:
        return None, f"{above}, and may be MiB: write {plain} MiB"
    if run.num_gpus == 1 and peak_gib > ANOTHER_CARD * gpu.memory_marketing_gb:
        raise SkipRowError(f"{above}: it ran on another card, or on several")
    return None, above


def least_weights_bytes(architecture: Architecture, run: Run) -> float:
    """A quarter of what one GPU holds of the base's weights, as stored and dealt out evenly, bytes; 0 where they may be
    in host memory. Left out is all that a step adds to them."""
    if run.offload != "none":
        return 0.0
    parts = static_parts(architecture, run)
    split = run.tp * run.pp * (shard_gpus(run) if run.num_gpus > 1 and SHARDS[run.sharding].weights else 1)
    return LEAST_OF_WEIGHTS * (parts["weights"] + parts["quantized"]) / min(split, run.num_gpus)
