"""How several GPUs share a model, by the cells of a row beside parallelism: what they say is what parallelism says.

An optimizer's or a framework's cell that names a stage of ZeRO, FSDP or DDP says how the GPUs share; beside another
word in the column ``parallelism`` one of the two is wrong, and which one cannot be told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tunecast.calibrate.card_words import lacks_nvlink
from tunecast.calibrate.cell_grammar import folded
from tunecast.calibrate.cell_layout import WRITE
from tunecast.calibrate.run_table import Row, SkipRowError, number
from tunecast.catalogs.gpus import Gpu
from tunecast.model.parallel_network import can_be_bridged, has_bridge, joined_cards
from tunecast.model.run import Run

COLUMNS = ("optimizer", "framework")
NAMES = re.compile(r"\b(fms fsdp|fsdp qlora)\b")
"""Names of software that hold a word for sharding."""
SAYS = (
    (re.compile(r"\bzero (?:dp )?(?:stage )?(?P<stage>[123])\b(?! ?\.)|\bzero(?P<joined>[123])\b"), "zero"),
    (re.compile(r"\bzero\b(?! (?:dp )?(?:stage )?[123]\b)"), "zero"),
    (re.compile(r"\bfsdp ?[12]?\b|\bfully sharded\b"), "fsdp"),
    (re.compile(r"\bhsdp\b"), "hsdp"),
    (re.compile(r"\bddp\b"), "ddp"),
)
"""What is looked for in a folded cell, and the beginning of the shardings that it may be."""
NETWORK = re.compile(
    r"(?i)(\d[\d,.]*) ?(?:Gbps|Gb/s|Gbit/s)(?: RDMA| InfiniBand| Ethernet)? (?:node-node|inter-?node)\b"
)
"""A sentence of the notes on what joins the machines, as MosaicML's tables write it."""

NVLINK, PCIE = re.compile(r"(?i)\bnv-?link"), re.compile(r"(?i)\bpcie\b")


def check_shared(row: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Several GPUs share their work, as all cells of the row say."""
    gpus, sharding = int(options.get("num_gpus", 1)), str(options.get("sharding", ""))
    if gpus == 1:
        return
    inner = int(options.get("tp", 1)) * int(options.get("pp", 1)) * int(options.get("cp", 1))
    stated = row.get("parallelism", "")
    if sharding == "none" and inner < gpus:
        raise SkipRowError(f"parallelism {stated!r} does not say how {gpus} GPUs share the work: {WRITE}")
    for column in COLUMNS:
        named = _named(row.get(column, ""))
        if named and not any(_agrees(word, sharding) for word in named):
            raise SkipRowError(
                f"{column} {row[column]!r} and parallelism {stated!r} contradict each other: {' or '.join(named)}, and "
                f"{sharding}; write into parallelism which it was"
            )


def unshared(row: Mapping[str, str], options: dict[str, Any], notes: list[str]) -> None:
    """A sharding that a row names where the model is there once is none, however it is spelled, and noted."""
    gpus, stated = int(options["num_gpus"]), row.get("parallelism", "")
    if all(word == "ddp" for word in _named(stated)):
        return
    if gpus == 1:
        options["sharding"] = "none"
    if options.get("sharding") == "none":
        who = "one GPU" if gpus == 1 else "one copy of the model"
        notes.append(f"parallelism {stated!r}: {who} has nobody to shard with, so that no sharding is taken.")


def _named(text: str) -> list[str]:
    """The ways of sharing that a cell names: ``zero2``, ``zero``, ``fsdp``."""
    plain = NAMES.sub(" ", folded(text))
    return [
        kind + (found.groupdict().get("stage") or found.groupdict().get("joined") or "")
        for pattern, kind in SAYS
        for found in pattern.finditer(plain)
    ]


def _agrees(word: str, sharding: str) -> bool:
    """Whether a word is one for a sharding: ``fsdp`` is one for hybrid sharding too, ``zero`` for every stage."""
    return (
        sharding == word
        or (word == "zero" and sharding.startswith("zero"))
        or (word == "fsdp" and sharding in ("fsdp-grad-op", "hsdp"))
    )


def network_gbps(row: Row, rules: list[dict[str, Any]]) -> float | None:
    """What one machine sends to others, in Gbit/s: of its column, else of a rule or of a sentence about the cluster."""
    stated = number(row, "internode_gbps")
    of_rule = next((float(rule["internode_gbps"]) for rule in rules if "internode_gbps" in rule), None)
    if stated is not None or of_rule is not None:
        return of_rule if stated is None else stated
    said = {float(found[1].replace(",", "")) for found in map(NETWORK.search, _about_the_cluster(row)) if found}
    return said.pop() if len(said) == 1 else None


def nvlink_said(row: Row, gpu: Gpu, run: Run, notes: list[str]) -> bool | None:
    """Whether the words of a card or of parallelism say that bridges join cards whose NVLink is bridges; None where
    they do not, or where that says nothing."""
    columns = [column for column in ("gpu", "parallelism") if NVLINK.search(row.get(column, ""))]
    if columns and not lacks_nvlink(row.get("gpu", "")) and run.num_gpus > 1 and gpu.nvlink_bytes_per_s == 0:
        notes.append(f"{columns[0]} {row[columns[0]]!r}: {gpu.id} has no NVLink, so that its cards are joined by PCIe.")
    if not columns or run.num_gpus == 1 or not has_bridge(gpu):
        return None
    if lacks_nvlink(row.get("gpu", "")):
        if "parallelism" in columns:
            raise SkipRowError(f"gpu {row['gpu']!r} and parallelism {row['parallelism']!r} contradict each other")
        return False
    if "parallelism" not in columns and PCIE.search(row.get("parallelism", "")):
        raise SkipRowError(f"gpu {row['gpu']!r} and parallelism {row['parallelism']!r} contradict each other")
    joined = joined_cards(gpu)
    told = "bridges join the cards" if can_be_bridged(gpu, run) else f"a bridge joins {joined} cards, PCIe the rest"
    notes.append(f"{columns[0]} {row[columns[0]]!r}: {told}.")
    return True


def _about_the_cluster(row: Row) -> list[str]:
    return [row.get("gpu_variant_notes", ""), row.get("notes", "")]
