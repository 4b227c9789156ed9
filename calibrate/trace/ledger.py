"""The memory ledger: every storage that appears adds its bytes, every one that dies takes them back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

ALLOCATION_BYTES = 512
"""Granularity of torch's CUDA caching allocator (``kMinBlockSize`` in CUDACachingAllocator)."""

PARTS = (
    "weights",
    "quantized",
    "adapters",
    "gradients",
    "optimizer_state",
    "activations",
    "logits",
    "scratch",
)
"""What a storage is for. ``activations`` include checkpoints and activation gradients, ``logits``
everything of vocabulary width, ``scratch`` dequantized weights and temporaries of kernels and optimizer."""


def rounded_bytes(n_bytes: int) -> int:
    """Bytes that the allocator hands out for `n_bytes`."""
    return -(-n_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The largest sum alive during one stretch of the step, and what it was made of."""

    bytes: int
    parts: dict[str, int]
    entered: int = 0
    """Storages that had been entered by then."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    bytes: int
    part: str
    number: int
    """How many had been entered with it."""


@dataclass(slots=True)
class Ledger:
    """Bytes alive by part, with the peak of every place (a key that the caller sets)."""

    alive: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    total_bytes: int = 0
    peaks: dict[Any, Peak] = field(default_factory=dict)
    place: Any = "load"
    entered: int = 0
    """Storages entered so far."""
    _entries: dict[int, _Entry] = field(default_factory=dict)

    def add(self, tensor: Any, part: str) -> None:
        """Enter the tensor's storage if it is new; views and known storages change nothing."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        n_bytes = rounded_bytes(storage.nbytes())
        if key in self._entries or not n_bytes:
            return
        self.entered += 1
        self._entries[key] = _Entry(bytes=n_bytes, part=part, number=self.entered)
        self.alive[part] += n_bytes
        self.total_bytes += n_bytes
        weakref.finalize(storage, self._drop, key).atexit = False
        self._note_peak()

    def retag(self, tensor: Any, part: str) -> None:
        """Move a known storage to another part (a gradient, an optimizer state), which it is from its birth on."""
        entry = self._entries.get(tensor.untyped_storage()._cdata)
        if entry is None:
            self.add(tensor, part)
            return
        alive_then = (peak.parts for peak in self.peaks.values() if peak.entered >= entry.number)
        for parts in (self.alive, *alive_then):
            parts[entry.part] -= entry.bytes
            parts[part] += entry.bytes
        entry.part = part

    def forget(self, tensor: Any) -> None:
        """Take out a storage that the device's allocator does not hold."""
        key = tensor.untyped_storage()._cdata
        if key in self._entries:
            self._drop(key)

    def ignore(self, tensor: Any) -> None:
        """A storage that is not in the device's memory, nor any view of it."""
        storage = tensor.untyped_storage()
        self._entries[storage._cdata] = _Entry(bytes=0, part="scratch", number=self.entered)
        weakref.finalize(storage, self._drop, storage._cdata).atexit = False

    def borrow(self, n_bytes: int, part: str) -> None:
        """A scratch buffer that lives inside one kernel call: it can make the peak, then it is gone."""
        size = rounded_bytes(n_bytes)
        self.alive[part] += size
        self.total_bytes += size
        self._note_peak()
        self.alive[part] -= size
        self.total_bytes -= size

    def move_to(self, place: Any) -> None:
        """Enter another place of the step; what is alive now belongs to its peak."""
        self.place = place
        self._note_peak()

    def _note_peak(self) -> None:
        best = self.peaks.get(self.place)
        if best is None or self.total_bytes > best.bytes:
            self.peaks[self.place] = Peak(bytes=self.total_bytes, parts=dict(self.alive), entered=self.entered)

    def _drop(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.alive[entry.part] -= entry.bytes
        self.total_bytes -= entry.bytes
