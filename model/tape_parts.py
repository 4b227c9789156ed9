"""What a tape is made of: allocations, tensors on them, nodes of the backward, and the events of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tunecast.model.operation import Kind, Phase
from tunecast.model.units import DTYPE_BYTES, SIXTEEN_BITS

BLOCK_BYTES = 512
"""Smallest unit of the CUDA caching allocator (``kMinBlockSize``); every storage is rounded up to it."""


def allocated_bytes(n_bytes: float) -> int:
    """Bytes an allocation of `n_bytes` takes from the allocator."""
    return -(-int(n_bytes) // BLOCK_BYTES) * BLOCK_BYTES


class Storage:
    """One allocation."""

    __slots__ = ("bytes", "part", "times")

    def __init__(self, n_bytes: int, part: str, times: int = 1) -> None:
        self.bytes = n_bytes
        self.part = part
        self.times = times
        """Turns of a loop that make one each, of which the written turn's stands for all once a backward keeps it."""

    def keep_each(self) -> None:
        """Count what every turn of its loop keeps."""
        self.bytes *= self.times
        self.times = 1


class Tensor:
    """A view of a storage with a size, a dtype and, if a gradient is needed, the node that made it."""

    __slots__ = ("dtype", "elements", "is_view", "leaf", "node", "storage")

    def __init__(
        self,
        elements: int,
        dtype: str,
        storage: Storage | None,
        *,
        node: Node | None = None,
        leaf: str | None = None,
        is_view: bool = False,
    ) -> None:
        self.elements = elements
        self.dtype = dtype
        self.storage = storage
        self.node = node
        self.leaf = leaf
        self.is_view = is_view
        """Whether another tensor shares the storage, so that nothing is added into it in place."""

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient flows into this tensor."""
        return self.node is not None or self.leaf is not None

    @property
    def bytes(self) -> int:
        """Bytes of the elements this tensor shows."""
        return self.elements * DTYPE_BYTES[self.dtype]


Grads = Sequence[Tensor | None]
Backward = Callable[[Tensor], Grads]


class Node:
    """Backward of one operation: how gradients of its inputs follow from the gradient of its output."""

    __slots__ = ("backward", "inputs", "layer", "moment", "outlives_grad", "saves", "times")

    def __init__(
        self,
        inputs: tuple[Tensor, ...],
        backward: Backward,
        *,
        saves: tuple[Tensor, ...],
        layer: int | None,
        moment: str,
        times: int = 1,
    ) -> None:
        self.inputs = inputs
        self.backward = backward
        self.saves = saves
        self.layer = layer
        self.moment = moment
        self.times = times
        self.outlives_grad = False
        """Whether its gradient may die while the backward still runs (a checkpoint without a node of its own)."""


class Event:
    """One kernel, or (with `kind` None) a mere use that keeps tensors alive."""

    __slots__ = (
        "bytes", "dtype", "flops", "kind", "launches", "layer", "layout", "micro_batch", "moment", "name", "phase",
        "reads", "shape", "times", "writes",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        kind: Kind | None,
        reads: tuple[Storage, ...],
        writes: tuple[Storage, ...],
        dtype: str = "bf16",
        n_bytes: float = 0.0,
        flops: float = 0.0,
        shape: tuple[int, ...] = (),
        layout: str = "",
        launches: float = 1.0,
        phase: Phase = Phase.FORWARD,
        moment: str = "",
        layer: int | None = None,
        micro_batch: int = 0,
        times: int = 1,
    ) -> None:
        self.name = name
        self.kind = kind
        self.reads = reads
        self.writes = writes
        self.dtype = dtype
        self.bytes = n_bytes
        self.flops = flops
        self.shape = shape
        self.layout = layout
        self.launches = launches
        self.phase = phase
        self.moment = moment
        self.layer = layer
        self.micro_batch = micro_batch
        self.times = times
        """Turns of a loop that it stands for."""


def storages(tensors: Iterable[Tensor]) -> tuple[Storage, ...]:
    """The allocations behind tensors; parameters have none of their own here."""
    return tuple([tensor.storage for tensor in tensors if tensor.storage is not None])


def widest(dtypes: Iterable[str]) -> str:
    """The dtype that arithmetic promotes to: the largest floating one among several, of both kinds of 16 bits fp32."""
    found = set(dtypes)
    return "fp32" if found.issuperset(SIXTEEN_BITS) else max(found, key=_WIDTH.__getitem__)


_WIDTH = {name: (name in {"fp32", *SIXTEEN_BITS}, n_bytes) for name, n_bytes in DTYPE_BYTES.items()}
