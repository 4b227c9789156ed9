"""A step whose layers and loss are compiled: chains of memory-bound kernels become one kernel each.

Written over a finished tape. Every layer is one graph, and so is the loss (torchtune and torchtitan compile layer by
layer; Transformers' ``torch_compile`` finds the same chains in one larger graph). In each graph:

* what the forward keeps for the backward is the smallest set of tensors from which memory-bound kernels alone can make
  the rest again: a minimum cut, as in torch ``_functorch/partitioners.py``. What is made again runs in the backward;
* memory-bound kernels between two products or attentions that depend on each other are one kernel: what comes from
  outside is read once, what nobody outside reads is never written (inductor's fusion of pointwise operators with
  reductions over rows, ``torch/_inductor/scheduler.py``). A chain waits for the first product that needs it.

Products and attention stay the library kernels they were. Left out: templates that fuse into a product, CUDA graphs,
the guards that Python checks before a graph, compilation itself (a phase of the run), and the partitioner's penalties
for tensors that are used far apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby

from tunecast.model.loss_chunks import BETWEEN_CHUNKS, EAGER_UPCAST, SUMMED_IN_LOOP
from tunecast.model.min_cut import INFINITE, minimum_cut
from tunecast.model.operation import SYNCHRONISATION, Kind, Phase
from tunecast.model.seen_logits import PREFIX as SEEN
from tunecast.model.tape import LEAF_SUM, Event, Storage, Tape, widest

FUSABLE = (Kind.MEMORY, Kind.LOSS)
"""Kinds that inductor writes kernels for."""
ADDED = (LEAF_SUM, "grad_accumulate")
"""Gradients added to stored ones."""
APART = (*ADDED, "dropout", "to_host", "to_device", SYNCHRONISATION, BETWEEN_CHUNKS, EAGER_UPCAST, SUMMED_IN_LOOP)
"""Memory-bound kernels that are not in a graph, or not made twice."""
ROW_STATISTICS = 8
"""A result at least so many times smaller than what it was made of is a reduction, which is kept, not made again."""
COLUMN_SUM_READS, COLUMN_SUM_KERNELS = 2, 2
"""A norm weight's gradient is summed over tokens: a kernel that reads gradient and input again, and a last sum."""
Scope = tuple[int | str, int, bool]
"""Layer (or the loss), micro-batch, and whether it is the backward."""


def scope_of(event: Event, *, loss: bool = True) -> Scope | None:
    """The graph an event belongs to; None outside all."""
    where = event.layer if event.layer is not None else ("loss" if loss and event.moment == "loss" else None)
    return None if where is None else (where, event.micro_batch, event.phase is not Phase.FORWARD)


def is_fusable(event: Event) -> bool:
    """Whether inductor writes this kernel."""
    return event.kind in FUSABLE and event.name not in APART and not event.name.startswith(("tp.", SEEN))


def copied(event: Event, swap: Callable[[Storage], Storage]) -> Event:
    """The same kernel on other tensors."""
    again = Event(event.name, event.kind, tuple(swap(s) for s in event.reads), tuple(swap(s) for s in event.writes))
    for name in (
        "phase",
        "moment",
        "layer",
        "micro_batch",
        "dtype",
        "flops",
        "bytes",
        "launches",
        "shape",
        "layout",
        "times",
    ):
        setattr(again, name, getattr(event, name))
    return again


def made_by(forward: Iterable[Event]) -> dict[Storage, Event]:
    """The kernel that first writes each storage."""
    makers: dict[Storage, Event] = {}
    for event in forward:
        for storage in event.writes:
            makers.setdefault(storage, event)
    return makers


def written_again(forward: Iterable[Event]) -> set[Storage]:
    """What a later kernel writes into: its first maker alone does not give it."""
    made: set[Storage] = set()
    found: set[Storage] = set()
    for event in forward:
        found |= made & set(event.writes)
        made |= set(event.writes)
    return found


def can_be_made_again(storage: Storage, maker: Event | None) -> bool:
    """Whether memory-bound kernels make it, and it is no reduction."""
    if maker is None or not is_fusable(maker):
        return False
    return storage.bytes * ROW_STATISTICS > max((s.bytes for s in maker.reads), default=0)


def read_by_library(events: Iterable[Event]) -> set[Storage]:
    """What products and attentions read: it has to be written for them, so nothing is saved by making it again."""
    return {s for event in events if event.kind is not None and not is_fusable(event) for s in event.reads}


def kept_tensors(forward: Sequence[Event], backward: Sequence[Event], needed: set[Storage]) -> set[Storage]:
    """The smallest set, in bytes, from which all that the backward needs can be made again.

    What only fused kernels read counts twice, since keeping it is what writes it (`partitioners.py`,
    ``get_node_weight``, ``is_materialized_backwards``).
    """
    makers, whole = made_by(forward), read_by_library(backward) | written_again(forward)
    written = read_by_library(forward) | {s for s, maker in makers.items() if not is_fusable(maker)} | outside(forward)
    edges: list[tuple[object, object, int]] = []
    for storage in {s for event in forward for s in (*event.reads, *event.writes)}:
        edges.append(((storage, "in"), (storage, "out"), storage.bytes * (1 if storage in written else 2)))
        maker = makers.get(storage)
        if maker is None or storage in whole or not can_be_made_again(storage, maker):
            edges.append(("source", (storage, "in"), INFINITE))
        else:
            edges += [((read, "out"), (storage, "in"), INFINITE) for read in maker.reads]
        if storage in needed:
            edges.append(((storage, "out"), "sink", INFINITE))
    reached = minimum_cut(edges, "source", "sink")
    return {s for s in needed | set(makers) | outside(forward) if (s, "in") in reached and (s, "out") not in reached}


def outside(events: Iterable[Event]) -> set[Storage]:
    """What kernels read before any of them writes it."""
    written: set[Storage] = set()
    found: set[Storage] = set()
    for event in events:
        found.update(s for s in event.reads if s not in written)
        written.update(event.writes)
    return found


def with_remade(forward: Sequence[Event], backward: list[Event]) -> list[Event]:
    """The backward's kernels, what the forward did not keep made again before its first use."""
    made = {s for event in forward for s in event.writes}
    fresh = {s for event in backward for s in event.writes if s not in made}
    needed = {s for event in backward for s in event.reads if s not in fresh and (s in made or s in outside(forward))}
    if not needed & made:
        return backward
    kept, makers = kept_tensors(forward, backward, needed), made_by(forward)
    again: dict[Storage, Storage] = {}
    result: list[Event] = []

    order = {id(event): place for place, event in enumerate(forward)}

    def remake(like: Event) -> None:
        """Play what `like` reads and nobody kept again, in the forward's order."""
        found: dict[int, Event] = {}
        waiting = list(like.reads)
        while waiting:
            storage = waiting.pop()
            maker = makers.get(storage)
            if storage in again or storage in kept or maker is None or order[id(maker)] in found:
                continue
            found[order[id(maker)]] = maker
            waiting.extend(maker.reads)
        for _, maker in sorted(found.items()):
            again.update({s: Storage(s.bytes, s.part) for s in maker.writes})
            event = copied(maker, lambda s: again.get(s, s))
            event.phase, event.moment = like.phase, like.moment
            result.append(event)

    for event in backward:
        remake(event)
        result.append(copied(event, lambda s: again.get(s, s)))
    return result


class _Fusion:
    """One graph's kernels while chains are joined."""

    def __init__(self, readers: dict[Storage, set[int]], leaves: set[Storage]) -> None:
        self.readers, self.leaves = readers, leaves
        self.waiting: list[Event] = []
        self.events: list[Event] = []
        self.place = 0
        """Of the next event."""
        self.joined: set[int] = set()
        """Ids of events that went into a chain before their turn."""
        self.late: list[Event] = []
        self.done: list[Event] = []

    def run(self, events: Iterable[Event]) -> list[Event]:
        """All kernels of the graph, gradients added to stored ones at its end."""
        self.events = [event for event in events if event.kind is not None]
        while self.place < len(self.events):
            event = self.events[self.place]
            self.place += 1
            if id(event) not in self.joined:
                self.take(event)
        self.flush(self.waiting)
        return [*self.done, *self.late]

    def ahead(self) -> list[Event]:
        """Events whose turn comes later."""
        return [event for event in self.events[self.place :] if id(event) not in self.joined]

    def take(self, event: Event) -> None:
        """The next kernel in order."""
        if event.name in ADDED:
            self.late.append(event)
        elif is_fusable(event):
            self.waiting.append(event)
        else:
            self.flush(self._chosen(event) if event.layer is not None else self.waiting)
            self.done.append(event)

    def flush(self, chosen: list[Event]) -> None:
        """Join some of the kernels that wait, each chain into one."""
        ids = {id(event) for event in chosen}
        self.waiting = [event for event in self.waiting if id(event) not in ids]
        self.joined |= ids
        self.done += [self._joined(chain) for chain in connected(chosen)]

    def _chosen(self, reader: Event) -> list[Event]:
        """Kernels that make what a product reads, those that loop over the same, and later ones over what these write,
        but for what reads the product's own result."""
        wanted = set(reader.reads)
        chosen: set[int] = set()
        shared: set[Storage] = set()
        made: set[Storage] = set()
        while True:
            more = [e for e in reversed(self.waiting) if wanted & set(e.writes) or shared & set(e.reads)]
            more = [event for event in more if id(event) not in chosen]
            if not more and chosen:
                more = [event for event in self._ready(chosen, set(reader.writes)) if made & set(event.reads)]
            if not more:
                return [event for event in (*self.waiting, *self.ahead()) if id(event) in chosen]
            for event in more:
                chosen.add(id(event))
                wanted, made = wanted | set(event.reads), made | set(event.writes)
                shared = shared | set(event.writes) | full_size_reads(event)

    def _ready(self, chosen: set[int], missing: set[Storage]) -> list[Event]:
        """Later kernels that only read what is there, not what is `missing`, and write what nobody has touched."""
        touched = {s for event in (*self.waiting, *self.done) for s in (*event.reads, *event.writes)}
        found = []
        for event in self.ahead():
            if id(event) in chosen:
                continue
            fresh = not touched & set(event.writes)
            if is_fusable(event) and fresh and not missing & set(event.reads) and event.name not in ADDED:
                found.append(event)
            missing |= set(event.writes)
            touched |= {*event.reads, *event.writes}
        return found

    def _joined(self, chain: list[Event]) -> Event:
        inside = {id(event) for event in chain}
        reads = tuple(dict.fromkeys(s for s in outside_in_order(chain)))
        written = dict.fromkeys(s for event in chain for s in event.writes)
        kept = (s for s in written if s in reads or s in self.leaves or self.readers.get(s, set()) - inside)
        joined = Event(chain[-1].name, chain[-1].kind, reads, tuple(kept))
        last = chain[-1]
        for name in ("phase", "moment", "layer", "micro_batch"):
            setattr(joined, name, getattr(last, name))
        loss = [event for event in chain if event.kind is Kind.LOSS]
        joined.kind, joined.shape = (Kind.LOSS, loss[-1].shape) if loss else (Kind.MEMORY, last.shape)
        joined.dtype = widest([event.dtype for event in chain])
        sums = self._column_sums(joined)
        moved = sum(s.bytes for s in (*joined.reads, *joined.writes)) + sum(parameter_bytes(e) for e in chain)
        moved += sums * COLUMN_SUM_READS * max((s.bytes for s in joined.reads), default=0)
        joined.bytes = min(moved, sum(event.bytes for event in chain))
        joined.launches = 1 + sums * COLUMN_SUM_KERNELS
        return joined

    def _column_sums(self, joined: Event) -> int:
        """Gradients of vectors that a chain makes."""
        largest = max((s.bytes for s in joined.reads), default=0)
        return sum(s in self.leaves and s.bytes * ROW_STATISTICS <= largest for s in joined.writes)


def full_size_reads(event: Event) -> set[Storage]:
    """What a kernel reads that is as large as what it writes: another kernel over it has the same loop."""
    size = max((s.bytes for s in event.writes), default=0)
    return {s for s in event.reads if s.bytes >= size}


def outside_in_order(chain: Sequence[Event]) -> Iterator[Storage]:
    """What a chain reads that it has not written."""
    written: set[Storage] = set()
    for event in chain:
        yield from (s for s in event.reads if s not in written)
        written.update(event.writes)


def parameter_bytes(event: Event) -> float:
    """Bytes of a kernel that belong to no storage of the tape: parameters."""
    return max(0.0, event.bytes - sum(s.bytes for s in (*event.reads, *event.writes)))


def connected(events: Sequence[Event]) -> list[list[Event]]:
    """Events by chain: two are in one when one reads what the other wrote, or both loop over the same tensor."""
    chains: list[tuple[set[Storage], list[Event]]] = []
    for event in events:
        touched = set(event.reads) | set(event.writes)
        mine, others = [c for c in chains if c[0] & touched], [c for c in chains if not c[0] & touched]
        written = (set(event.writes) | full_size_reads(event)).union(*(c[0] for c in mine))
        order = [e for c in mine for e in c[1]]
        chains = [*others, (written, [e for e in events if e in order or e is event])]
    return [chain for _, chain in chains]


def compile_tape(tape: Tape, *, loss: bool = True) -> None:
    """Replace the tape's events by those of compiled layers, and of a compiled `loss`."""
    scopes = [(scope, list(group)) for scope, group in groupby(tape.events, key=partial(scope_of, loss=loss))]
    forwards: dict[tuple[int | str, int], list[Event]] = {}
    parts: list[tuple[Scope | None, list[Event]]] = []
    for scope, events in scopes:
        if scope is None:
            parts.append((None, events))
            continue
        real = [event for event in events if event.kind is not None]
        where = scope[:2]
        if scope[2]:
            recomputed = any(event.phase is Phase.RECOMPUTE for event in real)
            real = real if recomputed else with_remade(forwards.get(where, []), real)
        else:
            forwards[where] = real
        parts.append((scope, real))
    readers: dict[Storage, set[int]] = {}
    for _, events in parts:
        for event in events:
            for storage in event.reads:
                readers.setdefault(storage, set()).add(id(event))
    leaves = {tensor.storage for tensor in tape.grads.values() if tensor.storage is not None}
    tape.events = [event for scope, events in parts for event in fused(scope, events, readers, leaves)]


def fused(
    scope: Scope | None, events: list[Event], readers: dict[Storage, set[int]], leaves: set[Storage]
) -> list[Event]:
    """The kernels of one graph, or of what is outside all as they were."""
    if scope is None:
        return events
    return _Fusion(readers, leaves).run(events)
