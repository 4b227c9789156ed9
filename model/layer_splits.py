"""Ways to split the layers of one copy of a model over GPUs, for a search where nobody said how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_parallel import GPUS_PER_NODE
from tunecast.model.stacks import splits_layers, splits_rows
from tunecast.model.stages import stage_layers

INNER = ("tp", "pp", "cp")
"""Splits of one copy of the model over GPUs."""
LAYERS = ("tp", "pp")
"""Those of its layers: the others are copies to data parallelism."""
STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Pipeline stages that are tried, up to those of Llama 3.1 405B (arXiv 2407.21783, table 4)."""
MOST_CHUNKS = 6
"""Chunks of a stage's layers that are tried where stages are interleaved: NVIDIA's own runs of 70B have 5, more of them
send more often."""
LONG_ROW = 16384
"""Tokens of a row from which on parts of it on several GPUs are tried: of shorter ones parts are small products."""

Split = Mapping[str, int]
"""Options that split layers or rows, with their sizes."""
NO_SPLIT: Split = MappingProxyType({})


def gpus_per_copy(options: Mapping[str, Any], *names: str) -> int:
    """GPUs that hold one copy of the model together: the product of the splits asked for."""
    return math.prod(whole_number(name, options.get(name) or 1) for name in names)


def of_a_machine(options: Mapping[str, Any]) -> int:
    """GPUs of a machine, as asked for or assumed."""
    return whole_number("gpus_per_node", options.get("gpus_per_node") or GPUS_PER_NODE)


def splits_tried(options: Mapping[str, Any]) -> Iterator[Split]:
    """What may be added to the options, the fewest GPUs per copy first: nothing where a split is asked for, or where
    the stack shards by data parallelism alone.

    Tensor parallelism is of a machine's GPUs at most. Of splits over as many GPUs those with more of it come first:
    takeaway 1 of Narayanan et al. 2021 (arXiv 2104.04473, section 3), as Megatron-LM's own runs are laid out.
    """
    if not splits_layers(options.get("stack")) or any(options.get(name) is not None for name in INNER):
        yield NO_SPLIT
        return
    machine = of_a_machine(options)
    tensor = [1 << power for power in range(machine.bit_length()) if machine % (1 << power) == 0]
    for tp, pp in sorted(product(tensor, STAGES), key=lambda split: (split[0] * split[1], split[1])):
        yield {name: size for name, size in (("tp", tp), ("pp", pp)) if size > 1}


def ways_tried(options: Mapping[str, Any], layers: int) -> Iterator[Split]:
    """What a search over plans may add to the options for a model of so many layers, the simplest first: splits of the
    layers, each without and with interleaved stages, of whole rows and of long ones in parts."""
    for parts, split in product(parts_tried(options), splits_tried(options)):
        way = {**split, **({"cp": parts} if parts > 1 else {})}
        yield way
        chunks = most_chunks(layers, split.get("pp", 1))
        if chunks > 1 and options.get("pp_interleave") is None:
            yield {**way, "pp_interleave": chunks}


def parts_tried(options: Mapping[str, Any]) -> Iterator[int]:
    """Parts of a row: all of it, and of a long one as many as divide a machine's GPUs, unless any split is asked for or
    the stack has no context parallelism."""
    yield 1
    length = whole_number("max_length", options.get("max_length") or 1)
    asked = any(options.get(name) is not None for name in INNER)
    if asked or length < LONG_ROW or not splits_rows(options.get("stack")):
        return
    machine = of_a_machine(options)
    yield from (n for n in range(2, machine + 1) if machine % n == 0 and length % (2 * n) == 0)


def most_chunks(layers: int, stages: int) -> int:
    """Chunks of equally many layers that every stage can have, up to `MOST_CHUNKS`; 1 where stages are not alike."""
    if stages == 1 or layers % stages:
        return 1
    own = stage_layers(layers, stages)[1]
    return max(n for n in range(1, MOST_CHUNKS + 1) if own % n == 0)


def split_words(split: Split) -> str:
    """A split as it is typed; empty for none."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in split.items())
