"""Checkpoints that also keep what is dear to make again: attention's results and every other product's.

Written over a finished tape: of a layer's recomputation those kernels are taken out, and the backward reads what the
forward made. Source: torchtitan ``parallelisms/parallelize_llama.py`` with ``selective_ac_option = "op"``
(``_save_list``: products, of which every second is made again, and fused attention). torchao's 8-bit tensors are
multiplied by the same operator, and counted with the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunecast.model.operation import Kind, Phase
from tunecast.model.tape import Event, Storage, Tape

KEEP_EVERY = 2
"""Of so many products in a row the first is kept."""
DEAR = (Kind.GEMM, Kind.ATTENTION)
Place = tuple[int, int]
"""Layer and micro-batch."""


def kept_kernels(dear: Sequence[Event]) -> list[bool]:
    """Of a layer's products and attentions, in order, those whose results are kept."""
    kept, products = [], 0
    for event in dear:
        is_product = event.kind is Kind.GEMM
        kept.append(not is_product or products % KEEP_EVERY == 0)
        products += is_product
    return kept


def keep_operations(tape: Tape) -> None:
    """Take the kept kernels out of every recomputation, which has its forward's products and attentions in their order;
    of casts between them it may have more or fewer (weights that autocast keeps)."""
    forwards: dict[Place, list[Event]] = {}
    at: dict[Place, int] = {}
    swap: dict[Storage, Storage] = {}
    found: list[Event] = []
    for event in tape.events:
        place = None if event.layer is None or event.kind not in DEAR else (event.layer, event.micro_batch)
        if place is not None and event.phase is Phase.FORWARD:
            forwards.setdefault(place, []).append(event)
        elif place is not None and event.phase is Phase.RECOMPUTE:
            twin = at.get(place, 0)
            at[place] = twin + 1
            if kept_kernels(forwards[place])[twin]:
                swap.update(zip(event.writes, forwards[place][twin].writes, strict=True))
                continue
        event.reads = tuple(swap.get(s, s) for s in event.reads)
        event.writes = tuple(swap.get(s, s) for s in event.writes)
        found.append(event)
    tape.events = found
