"""Which GPUs of a machine collectives run on."""

from __future__ import annotations

import pytest

from tunecast.calibrate.devices.protocol import TrialSpec

MIXED = ("GeForce RTX 3090", "GeForce RTX 4090", "GeForce RTX 4090", "GeForce RTX 4090")


@pytest.fixture
def mixed_box(machine, synthetic):
    """One card and three of another kind."""
    fake = machine("healthy")
    fake.scenario.boards = [
        synthetic.Board(uuid=str(i), name=f"NVIDIA {name}", pci=f"00000000:0{i}:00.0") for i, name in enumerate(MIXED)
    ]
    fake.scenario.cuda_order = tuple(range(len(MIXED)))
    return fake


@pytest.mark.parametrize(
    ("asked", "ranks"),
    [
        ("cuda:0", ("cuda:0",)),
        ("cuda:1", ("cuda:1", "cuda:2", "cuda:3")),
        ("cuda:2", ("cuda:2", "cuda:1", "cuda:3")),
    ],
)
def test_collectives_run_on_the_card_that_was_asked_for_and_its_like(mixed_box, opened, asked, ranks):
    device = opened(mixed_box, asked)
    assert device.peers() == len(ranks)
    assert device.backend.ranks(len(ranks)) == ranks
    assert device.backend.ranks(1) == ranks[:1]


@pytest.mark.parametrize(("world_size", "runs"), [(3, True), (4, False)])
def test_cards_of_another_kind_do_not_make_a_collective_possible(mixed_box, opened, world_size, runs):
    spec = TrialSpec(bench="collective", params={"op": "all_reduce", "world_size": world_size}, repeats=1, warmup=0)
    assert opened(mixed_box, "cuda:1").supports(spec) is runs
