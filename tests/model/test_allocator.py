"""The caching allocator on paper: its rules by hand, and any order of requests against a plain list of intervals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunecast.model.allocator import CachingAllocator
from tunecast.model.units import MIB


def allocator_of(*sizes: float) -> tuple[CachingAllocator, list[int]]:
    """Some requests in MiB, and where they are."""
    allocator = CachingAllocator()
    return allocator, [allocator.allocate(int(size * MIB)) for size in sizes]


@pytest.mark.parametrize(
    ("sizes_mib", "allocated_mib", "reserved_mib"),
    [
        ((1 / MIB,), 512 / MIB, 2),  # one byte: 512, from a small segment
        ((1, 1), 2, 2),
        ((1, 1, 512 / MIB), 2 + 512 / MIB, 4),
        ((1 + 512 / MIB,), 1 + 512 / MIB, 20),  # just too large for the small pool
        ((5, 5, 5, 5), 20, 20),
        ((5, 5, 5, 5, 5), 25, 40),
        ((9.5, 9.5), 20, 20),  # the rest of the second, 1 MiB, is too small to split off: it counts as allocated
        ((10,), 10, 10),
        ((12.5,), 12.5, 14),
        ((11.5,), 12, 12),  # half a MiB stays with it
        ((1, 5), 6, 22),  # pools do not mix
    ],
)
def test_segments_and_blocks_by_hand(sizes_mib: tuple[float, ...], allocated_mib: float, reserved_mib: float) -> None:
    allocator, _ = allocator_of(*sizes_mib)
    assert allocator.allocated_bytes == allocated_mib * MIB
    assert allocator.reserved_bytes == reserved_mib * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator, (wide, _, narrow, _) = allocator_of(40, 12, 30, 12)
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.allocate(25 * MIB) == narrow
    assert allocator.allocate(5 * MIB) == narrow + 25 * MIB  # what was split off
    assert allocator.allocate(5 * MIB) == wide
    assert allocator.reserved_bytes == (40 + 12 + 30 + 12) * MIB


def test_a_tensor_that_stays_in_a_wide_block_keeps_it_from_the_next_wide_one() -> None:
    """A dequantized weight of 32 MiB comes and goes; a checkpoint of 12 takes its place: the next weight is new."""
    allocator, (weight,) = allocator_of(32)
    allocator.free(weight)
    allocator.allocate(12 * MIB)
    allocator.allocate(32 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (44 * MIB, 64 * MIB)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_are_one_block_again(order: tuple[int, ...]) -> None:
    allocator, (whole,) = allocator_of(60)
    allocator.free(whole)
    parts = [allocator.allocate(20 * MIB) for _ in range(3)]
    for part in order:
        allocator.free(parts[part])
    assert allocator.allocate(60 * MIB) == whole
    assert allocator.reserved_bytes == 60 * MIB


def test_an_emptied_cache_keeps_segments_that_something_is_in() -> None:
    allocator, (first, second, third) = allocator_of(0.5, 5, 32)
    allocator.allocate(5 * MIB)
    for address in (first, second, third):
        allocator.free(address)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (5 * MIB, 20 * MIB)
    assert allocator.allocate(10 * MIB) == second + 10 * MIB, (
        "the free end of the segment is larger than what it began with"
    )


class PlainAllocator:
    """The same rules over a list of segments, each a list of [bytes, taken], searched from end to end."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int]]]] = []

    def allocate(self, n_bytes: int) -> list[int]:
        size = -(-n_bytes // 512) * 512
        large = size > MIB
        fitting = [
            (block[0], row, place)
            for row, (own, blocks) in enumerate(self.segments)
            for place, block in enumerate(blocks)
            if own is large and not block[1] and block[0] >= size
        ]
        if not fitting:
            fresh = 2 * MIB if not large else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((large, [[fresh, 0]]))
            fitting = [(fresh, len(self.segments) - 1, 0)]
        found, row, place = min(fitting)
        blocks = self.segments[row][1]
        if (found - size > MIB) if large else (found - size >= 512):
            blocks[place][0] = size
            blocks.insert(place + 1, [found - size, 0])
        blocks[place][1] = 1
        return blocks[place]

    def free(self, block: list[int]) -> None:
        block[1] = 0
        for _, blocks in self.segments:
            place = 1
            while place < len(blocks):
                if not blocks[place - 1][1] and not blocks[place][1]:
                    kept, gone = blocks[place - 1], blocks.pop(place)
                    kept[0] += gone[0]
                else:
                    place += 1

    @property
    def reserved_bytes(self) -> int:
        return sum(block[0] for _, blocks in self.segments for block in blocks)

    @property
    def allocated_bytes(self) -> int:
        return sum(block[0] for _, blocks in self.segments for block in blocks if block[1])


SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(1, 40).map(lambda mib: mib * MIB))


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.tuples(SIZES, st.integers(0, 99)), max_size=120))
def test_any_order_reserves_what_a_plain_list_of_intervals_does(requests: list[tuple[int, int]]) -> None:
    """Of every request a number says whether it is made (twice in three) or an earlier one is freed."""
    fast, plain = CachingAllocator(), PlainAllocator()
    alive: list[tuple[int, list[int]]] = []
    for size, choice in requests:
        if choice % 3 or not alive:
            alive.append((fast.allocate(size), plain.allocate(size)))
        else:
            address, block = alive.pop(choice % len(alive))
            fast.free(address)
            plain.free(block)
        assert (fast.allocated_bytes, fast.reserved_bytes) == (plain.allocated_bytes, plain.reserved_bytes)
