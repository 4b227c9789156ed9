"""A step on paper: tensors with sizes, kernels with bytes and FLOPs, and the backward pass.

A `Tape` runs a model description forward without any data. Every primitive of `primitives.py`
records the kernels it would launch and, where a gradient is needed, a node that records the kernels
of its backward. Which kernels run, which tensors stay alive for the backward, what checkpointing
recomputes and where its recomputation stops all follow from the same rules that autograd has:

* an operation keeps an input for its backward only if some gradient needs it;
* nodes run backwards in reverse order of their creation;
* gradients that meet are added into the first one, or into new memory if others see that one.

A storage is alive from the event that writes it to the last event that reads it, so the memory
curve of the step is a sum over events. What Python's local variables keep alive longer is said with
`Tape.hold`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tunecast.model.handed_on import HandedOn
from tunecast.model.operation import Kind, Phase
from tunecast.model.tape_parts import Backward as Backward
from tunecast.model.tape_parts import Event as Event
from tunecast.model.tape_parts import Grads as Grads
from tunecast.model.tape_parts import Node as Node
from tunecast.model.tape_parts import Storage as Storage
from tunecast.model.tape_parts import Tensor as Tensor
from tunecast.model.tape_parts import allocated_bytes as allocated_bytes
from tunecast.model.tape_parts import storages as storages
from tunecast.model.tape_parts import widest as widest
from tunecast.model.units import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITTEN_TURNS = 4
"""Turns that are written of a loop of so many or more."""
LEAF_SUM = "leaf_sum"
"""Kernel that adds a parameter's gradient to that of the micro-batches before."""


class Tape:
    """Records one training step in order."""

    def __init__(self, platform: str = "cuda") -> None:
        self.platform = platform
        self.events: list[Event] = []
        self.grads: dict[str, Tensor] = {}
        self.shared_leaves: dict[str, int] = {}
        """Uses of a parameter in a forward pass, where more than one: its gradients meet before they are stored."""
        self.narrow_leaves: dict[str, tuple[str, str]] = {}
        """Parameter and dtype behind a 16-bit copy that all its uses share: gradients meet in 16 bits, then widen."""
        self.grad_enabled = True
        self.phase = Phase.FORWARD
        self.moment = "forward"
        self.layer: int | None = None
        self.micro_batch = 0
        self.times = 1
        """Equal turns of a loop for which the one that is being written stands (`turns`)."""
        self.part = "activations"
        """What new storages are for, as the memory ledger names it."""
        self.logits_sizes: set[int] = set()
        """Elements of tokens x vocabulary tensors: storages of these sizes are logits."""
        self._nodes: list[Node] = []
        self._meeting: dict[str, tuple[Tensor, int]] = {}
        self._last_save = 0
        self.handed_on = HandedOn()
        self.first_run = False
        """Whether a non-reentrant checkpoint runs its function for the first time, under autograd."""
        self.entry: Tensor | None = None
        """The detached input of the reentrant checkpoint that runs again: a leaf to autocast."""
        self._held: list[Tensor] = []
        """What something outside autograd keeps until the end of the backward."""
        self._held_in_layer: list[Tensor] = []
        """The same until the end of the backward of the layer that is recomputed."""

    # -- recording -----------------------------------------------------------------------------

    def empty(self, elements: int, dtype: str, *, part: str | None = None) -> Tensor:
        """A new tensor, not yet written."""
        n_bytes = allocated_bytes(elements * DTYPE_BYTES[dtype])
        is_logits = elements in self.logits_sizes and self.moment == "loss"
        return Tensor(elements, dtype, Storage(n_bytes, part or ("logits" if is_logits else self.part), self.times))

    def kernel(
        self,
        name: str,
        kind: Kind,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        *,
        flops: float = 0.0,
        shape: tuple[int, ...] = (),
        layout: str = "",
        dtype: str | None = None,
        n_bytes: float | None = None,
        launches: float = 1.0,
    ) -> None:
        """Record a kernel; it moves what it reads and writes unless `n_bytes` says otherwise."""
        if n_bytes is None or dtype is None:
            moved, found = 0, ""
            for tensor in (*reads, *writes):
                own = tensor.dtype
                moved += tensor.elements * DTYPE_BYTES[own]
                found = own if found in ("", own) else widest((found, own))
            n_bytes = moved if n_bytes is None else n_bytes
            dtype = dtype or found
        self.events.append(
            Event(
                name, kind, storages(reads), storages(writes), dtype, n_bytes, flops, shape, layout, launches,
                self.phase, self.moment, self.layer, self.micro_batch, self.times,
            )
        )  # fmt: skip

    def hold(self, *tensors: Tensor) -> None:
        """Say that these tensors are still referenced here (a local variable of the real code)."""
        kept = storages(tensors)
        if kept:
            self.events.append(self.held(kept))

    def held(self, kept: tuple[Storage, ...]) -> Event:
        """That these storages are still referenced where the step is now."""
        return Event(
            "hold", None, kept, (), phase=self.phase, moment=self.moment, layer=self.layer, micro_batch=self.micro_batch
        )

    def first_micro_batch(self) -> Tape:
        """The tape up to where the second micro-batch begins; gradients are stored by then and stay where they are."""
        first = Tape(self.platform)
        first.events = [event for event in self.events if event.micro_batch == 0]
        first.grads = dict(self.grads)
        return first

    def mark_saved(self) -> None:
        """Remember that the backward needs something that exists by now (early stop reads it)."""
        self._last_save = len(self.events)

    def keep(self, tensor: Tensor) -> None:
        """Say that autograd's graph holds a tensor outside what it saves: to the end of the backward."""
        self._held.append(tensor)

    def keep_in_layer(self, tensor: Tensor) -> None:
        """Say the same of the graph of a recomputed layer: to the end of that layer's backward."""
        self._held_in_layer.append(tensor)

    def record(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        backward: Backward,
        *,
        saves: Sequence[Tensor] = (),
        trains: bool = False,
    ) -> Tensor:
        """Attach a backward node to `output` if gradients are on and some input needs one, or it `trains` inside.

        `saves` are the tensors it keeps; they are released when the node has run.
        """
        if self.would_grad(*inputs) or (trains and self.grad_enabled):
            moment = "loss" if self.moment == "loss" else "backward"
            for storage in storages(saves):
                storage.keep_each()
            output.node = Node(
                tuple(inputs), backward, saves=tuple(saves), layer=self.layer, moment=moment, times=self.times
            )
            self._nodes.append(output.node)
        return output

    def would_grad(self, *tensors: Tensor) -> bool:
        """Whether an operation on these tensors gets a backward node."""
        return self.grad_enabled and any(tensor.needs_grad for tensor in tensors)

    # -- backward ------------------------------------------------------------------------------

    def backward(self, output: Tensor, grad: Tensor) -> None:
        """Run the whole backward from `output`; parameter gradients end up in `grads`."""
        assert output.node is not None
        nodes, self._nodes = self._nodes, []
        self._run_nodes(nodes, {id(output.node): grad}, [])
        self.moment = "backward"
        self.hold(*self._held)
        self._held = []

    def _run_nodes(
        self, nodes: list[Node], pending: dict[int, Tensor], recomputed: list[Event], *, unpacked: bool = False
    ) -> None:
        """Run `nodes` in reverse, playing `recomputed` before the first one that needs a saved tensor.

        Gradients get their inputs' dtypes while the incoming one and the saved tensors are still there
        (``Engine::call_function``), but for saved ones that a hook `unpacked`: those the node alone held.
        """
        outer = self.layer, self.moment, self.times
        for node in reversed(nodes):
            grad = pending.pop(id(node), None)
            if grad is None:
                continue
            self.layer, self.moment, self.times = node.layer, node.moment, node.times
            if recomputed and node.saves:
                self.events.extend(recomputed)
                recomputed = []
            grads = node.backward(grad)
            own = () if node.outlives_grad else (grad,)
            if unpacked:
                self.hold(*node.saves)
            grads = [self._in_dtype(given, tensor.dtype) for tensor, given in zip(node.inputs, grads, strict=True)]
            self.hold(*own, *(() if unpacked else node.saves))
            for tensor, given in zip(node.inputs, grads, strict=True):
                if given is not None:
                    self._deliver(tensor, given, pending)
        self.layer, self.moment, self.times = outer

    def lives_until(self, x: Tensor) -> Tensor:
        """``x`` as it is: what checkpoints have handed on lives until its gradient comes."""

        def backward(grad: Tensor) -> Grads:
            self.hold(*self.handed_on.let_go())
            return (grad,)

        return self.record(Tensor(x.elements, x.dtype, x.storage), (x,), backward)

    def _in_dtype(self, given: Tensor | None, dtype: str) -> Tensor | None:
        """A gradient in its input's dtype."""
        return given if given is None or given.dtype == dtype else self.convert(given, dtype)

    def _deliver(self, tensor: Tensor, given: Tensor, pending: dict[int, Tensor]) -> None:
        """Hand a gradient to the node or leaf behind `tensor`."""
        if tensor.leaf in self.handed_on.gradients:
            arrived = self.handed_on.gradients[tensor.leaf]
            self.handed_on.gradients[tensor.leaf] = given if arrived is None else self._summed(arrived, given)
        elif tensor.leaf in self.shared_leaves:
            self._meet(tensor.leaf, given)
        elif tensor.leaf is not None:
            self._accumulate(tensor.leaf, given)
        else:
            key = id(tensor.node)
            pending[key] = self._summed(pending[key], given) if key in pending else given

    def _summed(self, first: Tensor, second: Tensor) -> Tensor:
        """The sum of two gradients of one tensor: in the first one's memory unless that is shared."""
        if not first.is_view:
            self.kernel("grad_add", Kind.MEMORY, (first, second), (first,))
            return first
        total = self.empty(first.elements, first.dtype)
        self.kernel("grad_add", Kind.MEMORY, (first, second), (total,))
        return total

    def _meet(self, leaf: str, given: Tensor) -> None:
        """Hold the sum of a shared parameter's gradients until the last one comes."""
        waiting, met = self._meeting.pop(leaf, (None, 0))
        total = given if waiting is None else self._summed(waiting, given)
        if met + 1 < self.shared_leaves[leaf]:
            self._meeting[leaf] = total, met + 1
            return
        if leaf in self.narrow_leaves:
            wide, dtype = self.narrow_leaves[leaf]
            self._meet(wide, self.convert(total, dtype))
            return
        self._accumulate(leaf, total)

    def _accumulate(self, leaf: str, given: Tensor) -> None:
        """The first gradient of a leaf is kept as it is; later ones are added in place."""
        existing = self.grads.get(leaf)
        if existing is None:
            if given.storage is not None:
                given.storage.part = "gradients"
            self.grads[leaf] = given
            return
        self.kernel(LEAF_SUM, Kind.MEMORY, (existing, given), (existing,))

    def convert(self, tensor: Tensor, dtype: str) -> Tensor:
        """A copy in another dtype, outside autograd."""
        out = self.empty(tensor.elements, dtype)
        self.kernel("cast", Kind.MEMORY, (tensor,), (out,))
        return out

    # -- loops ---------------------------------------------------------------------------------

    def turns(self, count: int) -> Iterator[int]:
        """Index of each turn that is written of a loop of `count` turns, all equal but the ends.

        Where there are more, the second one stands for all but three: the first, whose state is new, and the last two.
        The backward begins with those: one makes gradients of what the loop reads, the next adds to them while all that
        the forward kept is still there, so that the peak of all others is below theirs. What a turn that stands for
        several keeps for its backward counts as often, what it makes on the way once.
        """
        written = range(count) if count <= WRITTEN_TURNS else (0, 1, count - 2, count - 1)
        for index in written:
            self.times = count - WRITTEN_TURNS + 1 if count > WRITTEN_TURNS and index == 1 else 1
            yield index
        self.times = 1

    # -- checkpointing -------------------------------------------------------------------------

    def checkpoint(
        self,
        function: Callable[..., Tensor],
        x: Tensor,
        *others: Tensor,
        reentrant: bool,
        held: bool = False,
        offloaded: bool = False,
        trains: bool = False,
        beside: Callable[[], Tensor | None] = lambda: None,
        handed: Callable[[], Sequence[Tensor]] = tuple,
    ) -> Tensor:
        """Run `function` keeping only its input, and `others` if it has more, and run it again for its backward.

        Non-reentrant recomputation ends once everything that the backward needs exists; the
        reentrant kind repeats all of it. With `held`, the input and its gradient live to the end of the whole
        backward. With `offloaded`, the input is kept in host memory: copied out before the layer, back before its
        recomputation. `beside` gives what the function has just returned beside its result: the reentrant kind gets
        zeros as the gradient of that, and holds all gradients it starts from. `handed` gives what it has just made for
        later checkpoints, of which these make gradients. Left out: random-state bookkeeping.
        """
        if offloaded:
            self.kernel("to_host", Kind.MEMORY, (x,), (), n_bytes=2 * x.bytes)
        kept, self.grad_enabled, self.first_run = self.grad_enabled, False, not reentrant
        made = function(x, *others)
        given_on = self.handed_on.begin(handed(), reentrant=reentrant)
        other = beside() if reentrant else None
        self.grad_enabled, self.first_run = kept, False

        def backward(grad: Tensor) -> Grads:
            zeros = None if other is None else self._zeros(other)
            entry, *entries = (Node((), lambda _: (), saves=(), layer=None, moment="") for _ in (x, *others))
            copied, back = self._from_host(x) if offloaded else ([], x)
            inner = Tensor(x.elements, x.dtype, back.storage, node=entry if x.needs_grad or not trains else None)
            beside_it = [
                Tensor(each.elements, each.dtype, each.storage, node=node if each.needs_grad else None)
                for each, node in zip(others, entries, strict=True)
            ]
            outer_nodes, self._nodes = self._nodes, []
            outer_held, self._held_in_layer = self._held_in_layer, []
            outer_entry, self.entry = self.entry, inner if reentrant else None
            recomputed, output = self._recompute(function, inner, *beside_it, stop_early=not reentrant)
            self.entry = outer_entry
            recomputed = copied + recomputed
            if reentrant:
                self.events.extend(recomputed)
                recomputed = []
            nodes, self._nodes = self._nodes, outer_nodes
            if held or reentrant:
                grad = Tensor(grad.elements, grad.dtype, grad.storage, is_view=True)
            self.hold(*given_on)
            pending = {id(output.node): grad, **self.handed_on.take_back(given_on, handed())}
            again = None if zeros is None else beside()
            if zeros is not None and again is not None:
                pending[id(again.node)] = zeros
            self._run_nodes(nodes, pending, recomputed, unpacked=not reentrant)
            if reentrant:
                held_here = (*self._held_in_layer, *(each for each in (zeros, again) if each is not None))
                self.hold(output, inner, *held_here)
            self._held_in_layer = outer_held
            given = pending.pop(id(entry), None)
            if held:
                self._held += [kept for kept in (x, given) if kept is not None]
            return (given, *(pending.pop(id(node), None) for node in entries))

        output = self.record(made, (x, *others), backward, saves=() if offloaded else (x, *others), trains=trains)
        if output.node is not None:
            output.node.outlives_grad = not reentrant
        return output

    def _zeros(self, like: Tensor) -> Tensor:
        """A gradient of zeros for what nothing after used (``materialize_grads`` of an autograd function)."""
        out = self.empty(like.elements, like.dtype)
        self.kernel("checkpoint_zeros", Kind.MEMORY, (), (out,))
        out.is_view = True
        return out

    def _from_host(self, x: Tensor) -> tuple[list[Event], Tensor]:
        """The events of copying a tensor back to the device, and the copy."""
        outer_events, self.events = self.events, []
        back = self.empty(x.elements, x.dtype)
        self.kernel("to_device", Kind.MEMORY, (), (back,), n_bytes=2 * x.bytes)
        events, self.events = self.events, outer_events
        return events, back

    def _recompute(
        self, function: Callable[..., Tensor], *inner: Tensor, stop_early: bool
    ) -> tuple[list[Event], Tensor]:
        """The events of running `function` again, with its nodes left on the tape."""
        outer_events, self.events, self._last_save = self.events, [], 0
        with self.in_phase(Phase.RECOMPUTE):
            output = function(*inner)
        events, cut = self.events[: self._last_save], self.events[self._last_save :]
        self.events = outer_events
        if not stop_early:
            return events + cut, output
        return [*events, self.held(tuple(storage for event in cut for storage in event.reads))], output

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Record what follows under `phase`."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before
