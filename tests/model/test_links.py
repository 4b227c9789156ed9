"""Collectives over links inside and between machines, by hand and against a step-by-step simulation of rings."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunecast.catalogs.gpus import load_gpus
from tunecast.model.links import (
    Links,
    bubble_frac,
    collective_seconds,
    exchange_seconds,
    hierarchical_seconds,
    links_of,
    ring_seconds,
    send_seconds,
    tree_seconds,
)
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.phase_table import idle_fracs
from tunecast.model.priors import prior_factors
from tunecast.model.run import Run
from tunecast.model.segments import BACKWARD, FORWARD
from tunecast.model.sharding import on_one_machine

SLOW = Links(intra_bytes_per_s=100.0, inter_bytes_per_s=10.0, intra_latency_s=0.0, inter_latency_s=0.0)


def simulated_ring_all_reduce(payload: float, rates: list[float]) -> float:
    """A ring of GPUs that pass chunks round by round; a round ends when its slowest link has sent its chunk."""
    members = len(rates)
    clock, owned = 0.0, np.eye(members, dtype=bool)
    while not owned.all():
        owned = owned | np.roll(owned, 1, axis=0)
        clock += payload / members / min(rates)
    return 2 * clock


@pytest.mark.parametrize("members", [2, 3, 8])
def test_ring_inside_one_machine_is_the_simulated_one(members: int) -> None:
    found = ring_seconds(800.0, "all_reduce", members, 1, SLOW)
    assert float(found) == pytest.approx(simulated_ring_all_reduce(800.0, [100.0] * members))


def test_hierarchy_by_hand() -> None:
    """800 bytes on 2 machines of 4: 2 x 3 x 200 B at 100 B/s inside, 2 x 1 x 100 B at 10 B/s across."""
    assert hierarchical_seconds(800.0, 2.0, 4, 2, SLOW) == pytest.approx(12.0 + 20.0)


def test_the_fastest_algorithm_counts() -> None:
    """One ring enters a machine over all of its four network shares: 2 x 7/8 x 800 B at 40 B/s is 35 s, so 32 s win."""
    assert float(ring_seconds(800.0, "all_reduce", 4, 2, SLOW)) == pytest.approx(32.0)


def test_gathering_across_machines_is_one_ring_whatever_a_hierarchy_would_save() -> None:
    """NCCL has no tree for it: 7/8 of 800 B enter each of 2 machines over four shares of 10 B/s, 17.5 s; a ring of
    machines would send a half of them."""
    assert float(ring_seconds(800.0, "all_gather", 4, 2, SLOW)) == pytest.approx(17.5)
    assert hierarchical_seconds(800.0, 1.0, 4, 2, SLOW) < 17.5
    late = Links(intra_bytes_per_s=1e9, inter_bytes_per_s=1e9, intra_latency_s=1.0, inter_latency_s=100.0)
    assert float(ring_seconds(1.0, "reduce_scatter", 4, 2, late)) == pytest.approx(6 * 1.0 + 100.0)


def test_small_messages_over_many_machines_take_a_tree() -> None:
    links = Links(intra_bytes_per_s=1e9, inter_bytes_per_s=1e9, intra_latency_s=0.0, inter_latency_s=1.0)
    assert float(ring_seconds(1.0, "all_reduce", 1, 64, links)) == pytest.approx(2 * math.log2(64), rel=1e-3)
    assert tree_seconds(1.0, 1, 64, links) < hierarchical_seconds(1.0, 2.0, 1, 64, links)


@given(payload=st.floats(1, 1e9), per_node=st.integers(1, 8), nodes=st.integers(1, 64))
def test_gather_and_scatter_are_halves_of_a_ring_all_reduce(payload: float, per_node: int, nodes: int) -> None:
    gathered = float(ring_seconds(payload, "all_gather", per_node, nodes, SLOW))
    assert gathered == pytest.approx(float(ring_seconds(payload, "reduce_scatter", per_node, nodes, SLOW)))
    assert float(ring_seconds(payload, "all_reduce", per_node, nodes, SLOW)) <= 2 * gathered * (1 + 1e-9)


@given(payload=st.floats(1, 1e9), nodes=st.integers(1, 63))
def test_more_machines_are_never_faster(payload: float, nodes: int) -> None:
    few, many = (float(ring_seconds(payload, "all_gather", 8, n, SLOW)) for n in (nodes, nodes + 1))
    assert many >= few * (1 - 1e-9)


def test_arrays_give_what_numbers_give() -> None:
    payload, nodes = np.array([10.0, 1e6, 1e9]), np.array([1, 2, 16])
    together = ring_seconds(payload, "all_reduce", 8, nodes, SLOW)
    alone = [float(ring_seconds(float(p), "all_reduce", 8, int(n), SLOW)) for p, n in zip(payload, nodes, strict=True)]
    assert np.asarray(together) == pytest.approx(alone)


def test_exchange_sends_far_parts_over_the_network() -> None:
    """Of 800 bytes a GPU keeps 1/8, sends 3/8 to neighbours at 100 B/s and 4/8 away at 10 B/s."""
    assert float(exchange_seconds(800.0, 4, 2, SLOW)) == pytest.approx(40.0)
    assert float(exchange_seconds(800.0, 8, 1, SLOW)) == pytest.approx(7.0)


def test_a_send_takes_the_link_it_crosses() -> None:
    assert float(send_seconds(100.0, 1, SLOW)) == pytest.approx(1.0)
    assert float(send_seconds(100.0, 2, SLOW)) == pytest.approx(10.0)


def test_an_operation_without_a_group_is_over_one_machine() -> None:
    operation = Operation(name="all_gather", kind=Kind.COMMUNICATION, phase=Phase.FORWARD, bytes=400.0)
    assert collective_seconds(operation, SLOW, 4) == pytest.approx(3.0)


def simulated_1f1b(stages: int, micro_batches: int, last: float = 1.0) -> float:
    """Idle over working time of the last stage, event by event; a backward takes as long as a forward, and on the last
    stage either takes `last` times as long as on the others."""
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    queues = []
    for stage in range(stages):
        warm = min(stages - stage - 1, micro_batches)
        order = [("f", m) for m in range(warm)]
        for m in range(micro_batches - warm):
            order += [("f", warm + m), ("b", m)]
        queues.append(order + [("b", m) for m in range(micro_batches - warm, micro_batches)])
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            kind, m = queue[0]
            before = ("f", stage - 1, m) if kind == "f" else ("b", stage + 1, m)
            at_end = stage == 0 if kind == "f" else stage == stages - 1
            needed = ("f", stage, m) if kind == "b" and at_end else before
            if not (kind == "f" and at_end) and needed not in done:
                continue
            start = max(free[stage], done.get(needed, 0.0))
            done[(kind, stage, m)] = free[stage] = start + (last if stage == stages - 1 else 1.0)
            queue.pop(0)
    return max(free) / (2.0 * micro_batches * last) - 1.0


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 8), (8, 32)])
def test_bubble_is_that_of_the_simulated_schedule(stages: int, micro_batches: int) -> None:
    assert bubble_frac(stages, micro_batches, 1) == pytest.approx(simulated_1f1b(stages, micro_batches))


@pytest.mark.parametrize("head", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("micro_batches", [8, 32])
def test_a_stage_with_the_head_waits_for_stages_without_it(micro_batches: int, head: float) -> None:
    """The last of eight stages, whose head is `head` times its layers."""
    layers = Operation(name="mlp", kind=Kind.GEMM, phase=Phase.FORWARD, flops=1.0)
    own = [replace(layers, phase=phase, count=micro_batches) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    every = [*own, *(replace(each, name="lm_head", flops=head) for each in own)]
    run = replace(run_of_stages(8), gradient_accumulation_steps=micro_batches)
    forward, backward = (idle_fracs(every, run)[segment] for segment in (FORWARD, BACKWARD))
    idle = forward * micro_batches + backward * micro_batches * (1.0 + head)  # of working times 1 and 1 + head
    found = idle / (2.0 * micro_batches * (1.0 + head))
    assert found == pytest.approx(simulated_1f1b(8, micro_batches, last=1.0 + head))


def run_of_stages(stages: int) -> Run:
    return Run(method="full", max_length=512, num_gpus=stages, pp=stages)


@pytest.mark.parametrize(("gpus", "machines", "members"), [(12, 2, 6.0), (9, 2, 4.5), (20, 3, 20 / 3), (16, 2, 8.0)])
def test_machines_that_are_filled_unevenly_are_as_many_as_there_are(gpus: int, machines: int, members: float) -> None:
    """A ring over 8 + 4 GPUs leaves each of two machines once: it is no ring over three machines of 4."""
    run = Run(method="full", max_length=512, num_gpus=gpus, sharding="fsdp")
    assert on_one_machine(run, gpus) == pytest.approx(members)
    links = Links(intra_bytes_per_s=1e12, inter_bytes_per_s=1e9, intra_latency_s=0.0, inter_latency_s=1.0)
    gather = Operation(name="all_gather", kind=Kind.COMMUNICATION, phase=Phase.FORWARD, group=gpus,
                       group_per_node=on_one_machine(run, gpus))  # fmt: skip
    assert collective_seconds(gather, links, gpus) == pytest.approx(machines - 1)


@pytest.mark.parametrize(
    ("gpu", "members", "most_gb_per_s"),
    [
        ("mi300x-192gb", 2, 64), ("mi300x-192gb", 4, 192), ("mi300x-192gb", 8, 448), ("mi355x-288gb", 2, 77),
        ("v100-sxm2-32gb", 2, 50), ("v100-sxm2-32gb", 4, 100), ("v100-sxm2-32gb", 8, 150),
        ("h100-sxm5-80gb", 2, 450), ("a100-sxm4-80gb", 4, 300),
    ],
)  # fmt: skip
def test_cards_that_are_joined_pair_by_pair_have_as_many_links_as_partners(
    gpu: str, members: int, most_gb_per_s: float
) -> None:
    """AMD's platforms: one link of 64 (MI350: 77) GB/s to each of seven others; DGX-1: six of 25, two to a neighbour.
    Behind a switch every group has them all."""
    run = Run(method="full", num_gpus=8, sharding="zero2")
    factors = prior_factors(load_gpus()[gpu], run)
    links = links_of(factors, run, across=False)
    payload = 1e12
    operation = Operation(
        name="all_gather", kind=Kind.COMMUNICATION, phase=Phase.BACKWARD, bytes=payload, group=members,
        group_per_node=members,
    )  # fmt: skip
    rate = payload * (members - 1) / members / collective_seconds(operation, links, 8)
    reached = factors.factors["link_bytes_per_s"].value / (load_gpus()[gpu].nvlink_bytes_per_s / 2)
    assert rate / reached / 1e9 == pytest.approx(most_gb_per_s, rel=0.01)
