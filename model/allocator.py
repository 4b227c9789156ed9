"""The rules by which PyTorch's caching allocator takes memory from a GPU and hands it out, on paper.

Tensors come and go in the order of a step; what the allocator holds in the end (``torch.cuda.max_memory_reserved``)
follows from that order, from nothing else. Source: PyTorch 2.x ``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``,
``get_allocation_size``, ``get_free_block``, ``should_split``, ``free_block``) at its defaults: one stream, no
``max_split_size_mb``, no ``expandable_segments``, no ``roundup_power2_divisions``.

Left out: what happens when the card is full (cached segments are given back and the request is tried again).
"""

from __future__ import annotations

from bisect import bisect_left, insort

from tunecast.model.tape_parts import BLOCK_BYTES
from tunecast.model.units import MIB

SMALL_BYTES = 1 * MIB
"""Largest request of the small pool (``kSmallSize``), and what a large block keeps rather than be split."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""``kSmallBuffer``."""
MIDDLE_SEGMENT_BYTES = 20 * MIB
"""``kLargeBuffer``: segments for large requests below `OWN_SEGMENT_BYTES`."""
OWN_SEGMENT_BYTES = 10 * MIB
"""``kMinLargeAlloc``: a request from here on gets a segment of its size."""
SEGMENT_STEP_BYTES = 2 * MIB
"""``kRoundLarge``."""
ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
GAP_BYTES = SEGMENT_STEP_BYTES
"""Between segments here, so that blocks of two never meet. Later segments lie higher."""


class CachingAllocator:
    """Segments of one device, cut into blocks."""

    __slots__ = ("_ends", "_free", "_held", "_segments", "_starts", "_top", "allocated_bytes", "reserved_bytes")

    def __init__(self) -> None:
        self.allocated_bytes = 0
        """In blocks handed out."""
        self.reserved_bytes = 0
        """In segments."""
        self._top = 0
        self._segments: dict[int, int] = {}
        """Bytes by address."""
        self._held: dict[int, int] = {}
        """Bytes of the blocks handed out, by address."""
        self._free: tuple[list[int], list[int]] = ([], [])
        """The free blocks of the small pool and the large one, sorted by size, then address: both in one number, which
        sorts faster than a pair."""
        self._starts: dict[int, int] = {}
        """Bytes of every free block by where it starts."""
        self._ends: dict[int, int] = {}
        """The same by where it ends."""

    def allocate(self, n_bytes: int) -> int:
        """Address of a block for a request: the smallest free one that holds it, the lowest of equal ones, else from a
        new segment. The rest of a block goes back unless it is too small."""
        size = max(-(-n_bytes // BLOCK_BYTES), 1) * BLOCK_BYTES
        large = size > SMALL_BYTES
        pool = self._free[large]
        place = bisect_left(pool, size << ADDRESS_BITS)
        if place < len(pool):
            key = pool.pop(place)
            found, address = key >> ADDRESS_BITS, key & ADDRESS_MASK
            del self._starts[address], self._ends[address + found]
        else:
            found, address = self._new_segment(size)
        rest = found - size
        if rest > SMALL_BYTES or (rest and not large):
            start = address + size
            insort(pool, rest << ADDRESS_BITS | start)
            self._starts[start] = self._ends[start + rest] = rest
        else:
            size = found
        self._held[address] = size
        self.allocated_bytes += size
        return address

    def _new_segment(self, size: int) -> tuple[int, int]:
        """Bytes and address of a new segment; raises OverflowError beyond what an address counts."""
        if size <= SMALL_BYTES:
            found = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            found = MIDDLE_SEGMENT_BYTES
        else:
            found = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        address, self._top = self._top, self._top + found + GAP_BYTES
        if self._top > ADDRESS_MASK:
            raise OverflowError(f"{self._top:,} bytes are beyond the addresses of a device")
        self._segments[address] = found
        self.reserved_bytes += found
        return found, address

    def free(self, address: int) -> None:
        """Take a block back, and join it with free neighbours."""
        size = self._held.pop(address)
        self.allocated_bytes -= size
        pool, starts, ends = self._free[size > SMALL_BYTES], self._starts, self._ends
        after = starts.pop(address + size, 0)
        if after:
            del pool[bisect_left(pool, after << ADDRESS_BITS | address + size)]
            size += after
        before = ends.pop(address, 0)
        if before:
            address -= before
            del pool[bisect_left(pool, before << ADDRESS_BITS | address)]
            size += before
        insort(pool, size << ADDRESS_BITS | address)
        starts[address] = ends[address + size] = size

    def empty_cache(self) -> None:
        """Give every segment back that nothing is in (``torch.cuda.empty_cache``)."""
        for pool in self._free:
            for key in list(pool):
                size, address = key >> ADDRESS_BITS, key & ADDRESS_MASK
                if self._segments.get(address) == size:
                    pool.remove(key)
                    del self._segments[address], self._starts[address], self._ends[address + size]
                    self.reserved_bytes -= size
