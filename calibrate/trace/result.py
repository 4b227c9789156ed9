"""What a trace gives: the kernel stream and the memory timeline of one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunecast.calibrate.trace.ledger import Peak
from tunecast.model.operation import Kind, Operation, Phase

MOMENTS = ("load", "forward", "loss", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the step: the moment, and the layer that works (None outside layers)."""

    moment: str
    layer: int | None = None
    tail: bool = False
    """Outside layers: past them (forward: final norm; loss: its backward, when autocast's copies are gone;
    backward: the embedding's gradient)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One trained parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Allocated bytes of the second step (optimizer state exists), rounded as the CUDA allocator does."""

    at_rest_bytes: int
    """Weights, adapters, optimizer state and the batch, between steps."""
    loaded_bytes: int
    """Weights and adapters before the first step: no optimizer state yet."""
    peak_bytes: int
    peak_moment: str
    """``load``, ``forward``, ``loss``, ``backward`` or ``optimizer``."""
    moments: dict[str, int]
    """Peak of every moment."""
    parts: dict[str, int]
    """The peak by what it is made of (`ledger.PARTS`); they sum to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one optimizer step does, from the real code."""

    stream: tuple[Operation, ...]
    """Kernels in issue order, each with count 1; names in `kernels.SYNCHRONISATIONS` make the host wait."""
    memory: MemoryTimeline
    trainable_params: int
    total_params: int
    trained: tuple[TensorSpec, ...] = ()
    peaks: dict[Place, Peak] = field(default_factory=dict)
    """Peak of every place, finer than `memory.moments`."""
    rest_parts: dict[str, int] = field(default_factory=dict)
    """`memory.at_rest_bytes` by part."""

    def flops(self, phase: Phase, kind: Kind | None = None) -> float:
        """FLOPs of one phase as kernels execute them, of one kind or of all."""
        return sum(op.flops for op in self.stream if op.phase is phase and kind in (None, op.kind))


def timeline(peaks: dict[Place, Peak], rest_parts: dict[str, int], loaded_bytes: int) -> MemoryTimeline:
    """Moments and the overall peak from the peaks of all places."""
    moments = {m: max((peak.bytes for place, peak in peaks.items() if place.moment == m), default=0) for m in MOMENTS}
    moments["load"] = sum(rest_parts.values())
    place, peak = max(peaks.items(), key=lambda item: item[1].bytes)
    return MemoryTimeline(
        at_rest_bytes=sum(rest_parts.values()),
        loaded_bytes=loaded_bytes,
        peak_bytes=peak.bytes,
        peak_moment=place.moment,
        moments=moments,
        parts=dict(peak.parts),
    )
