"""Bytes of a model's published weights, which are downloaded and read: as its files hold them, in 16 bits or fewer."""

from __future__ import annotations

from functools import lru_cache

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.models import find_model
from tunecast.model.architecture import Architecture
from tunecast.model.run import Run
from tunecast.model.stacks import PLAIN
from tunecast.model.units import SIXTEEN_BITS

PUBLISHED_BYTES_PER_PARAM = 2
"""Checkpoints are published in 16 bits unless their name or catalog row says otherwise."""
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Of a value in 4 bits: a byte for each block of 64, whose scale in fp32 256 blocks share (double quantization)."""
GPTQ_BYTES = 2.5 / 128
"""Beside each value's bits: a scale in fp16 and a zero in 4 bits for each group of 128, the usual size."""
FP8_BYTES = 1 + 4 / 128**2
"""A scale in fp32 for each tile of 128 x 128 (DeepSeek-V3's ``weight_block_size``)."""
MXFP4_BYTES = 1 / 2 + 1 / 32
"""A scale of 8 bits for each block of 32 (OCP Microscaling Formats 1.0, section 5.2)."""
BYTES_PER_VALUE = {
    "bnb-4bit": NF4_BYTES,
    "bnb-8bit": 1.0,
    "gptq-4bit": 1 / 2 + GPTQ_BYTES,
    "gptq-8bit": 1 + GPTQ_BYTES,
    "fp8": FP8_BYTES,
    "mxfp4+bf16": MXFP4_BYTES,
}
"""By how linear maps are stored, bytes of each of their values; all else is in 16 bits."""
EXPERTS_ALONE = ("mxfp4+bf16",)
"""Of which attention's maps stay in 16 bits too (gpt-oss)."""


@lru_cache(maxsize=256)
def published_bytes(architecture: Architecture, stored_as: str | None = None) -> float:
    """Bytes of the published weights: those of a copy that is `stored_as` few bits, else the catalog's figure, else by
    the dtype that the catalog says, else 16 bits per parameter."""
    try:
        row = None if stored_as is not None else find_model(architecture.name)
    except InputError:
        row = None
    if row is not None and row.download_bytes:
        return float(row.download_bytes)
    how = stored_as or (row.checkpoint_dtype if row is not None else "")
    whole = float(PUBLISHED_BYTES_PER_PARAM * architecture.total_params)
    if how not in BYTES_PER_VALUE:
        return whole
    narrow = stored_values(architecture, experts_alone=how in EXPERTS_ALONE)
    return whole - (PUBLISHED_BYTES_PER_PARAM - BYTES_PER_VALUE[how]) * narrow


def wide_checkpoint_notes(architecture: Architecture, run: Run, *, typed: bool) -> tuple[str, ...]:
    """A note where weights that are published in fp32 are taken in 16 bits though nobody asked for it: transformers 5
    loads them as they are (``dtype="auto"`` of its ``from_pretrained``)."""
    if typed or run.stack != PLAIN or run.dtype not in SIXTEEN_BITS:
        return ()
    try:
        row = find_model(architecture.name)
    except InputError:
        return ()
    if row.checkpoint_dtype != "fp32":
        return ()
    told = (
        f"the weights of {row.hf_id} are published in fp32, and transformers 5 loads them so where its code names no "
        f"dtype; {run.dtype} is counted: --dtype fp32 counts them as they are"
    )
    return (told,)


def stored_values(architecture: Architecture, *, experts_alone: bool) -> int:
    """Weights of linear maps but the head, stacked experts among them; of experts alone."""
    found = 0 if experts_alone else sum(linear.weight_params for linear in architecture.root_linears)
    for group in architecture.groups:
        experts = group.layer.mlp.experts
        stacked = experts.maps_params if experts is not None and experts.stacked else 0
        maps = () if experts_alone else group.layer.linears
        found += group.count * (sum(linear.weight_params for linear in maps) + stacked)
    return found
