"""Seconds of collectives over links inside a machine and between machines. Pure functions of numbers or arrays.

A group of GPUs has ``per_node`` members on each of ``nodes`` machines. For an all-reduce NCCL picks, by size, between a
ring through all of them, one inside and one across (hierarchical), and trees; here the fastest one counts. All-gather
and reduce-scatter have the ring alone (NCCL, src/graph/tuning.cc; PAT is for one GPU per machine).

Sources: NCCL-tests, doc/PERFORMANCE.md (bytes of each collective); NCCL 2.4's double binary trees (Jeaugey, "Massively
scale your deep learning training with NCCL 2.4", 2019); hierarchical rings as in Horovod's hierarchical all-reduce.
Left out: in-network reduction (SHARP, NVLS), congestion above the first switch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.curves import Array
from tunecast.model.factors import FactorSet
from tunecast.model.operation import CONTEXT, Kind, Operation
from tunecast.model.parallel_network import card_of, gpus_in_rack, mesh_shares
from tunecast.model.priors import pcie_bytes_per_s
from tunecast.model.run import Run
from tunecast.model.segments import SEGMENT_OF, SEGMENTS

Number = float | Array
ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Times that a whole buffer goes around a ring."""
HOST_UPDATE = "host.update"
"""Of so many parameters by the host's processors."""
PAGING = "paging.copy"
"""Of paged optimizer state that does not fit on the card."""
OF_HOST = (HOST_UPDATE, PAGING)
"""What waits for the host alone, not for other GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What joins the GPUs of a group: one direction, as one GPU sees it."""

    intra_bytes_per_s: Number
    """Inside a machine."""
    inter_bytes_per_s: Number
    """Between machines: the machine's network over the GPUs that share it."""
    intra_latency_s: Number = 0.0
    """Per hop."""
    inter_latency_s: Number = 0.0
    start_s: Number = 0.0
    """Per collective, before its first hop."""
    pcie_bytes_per_s: Number = np.inf
    """Between a GPU and its host."""
    host_update_bytes_per_s: Number = np.inf
    """Host memory that the update on the processors of one machine moves."""
    gpus_per_host: Number = 1
    """GPUs whose parameters they update."""
    port_bytes_per_s: Number = np.inf
    """The most that one GPU sends out of its machine, over its own PCIe lanes."""
    mesh: tuple[float, ...] = ()
    """By members of a group inside a machine, the share of its links that join them; empty: all, through a switch."""

    def among(self, members: float) -> Links:
        """As a group of so many inside a machine, in the mean, has them."""
        whole = round(members)
        if not 1 < whole < len(self.mesh):
            return self
        return replace(self, intra_bytes_per_s=self.intra_bytes_per_s * self.mesh[whole])


def hierarchical_seconds(payload: Number, rounds: Number, per_node: Number, nodes: Number, links: Links) -> Number:
    """Reduce-scatter inside, ring across over each GPU's slice, all-gather inside: each part in its own time.

    Inside: rounds (m-1) steps of payload/m; across: rounds (k-1) steps of payload/(m k).
    """
    inside = rounds * (per_node - 1) * (payload / per_node / links.intra_bytes_per_s + links.intra_latency_s)
    slice_bytes = payload / per_node / nodes
    across = rounds * (nodes - 1) * (slice_bytes / links.inter_bytes_per_s + links.inter_latency_s)
    return inside + across


def flat_ring_seconds(payload: Number, rounds: Number, per_node: Number, nodes: Number, links: Links) -> Number:
    """One ring through every GPU, entering each machine over all of its network at once: the slowest link decides.

    A part passes every hop of the ring, of which one per machine leaves it.
    """
    members = per_node * nodes
    slowest = np.minimum(links.intra_bytes_per_s, per_node * links.inter_bytes_per_s)
    hops = (members - nodes) * links.intra_latency_s + (nodes - 1) * links.inter_latency_s
    return rounds * ((members - 1) * payload / members / slowest + hops)


def tree_seconds(payload: Number, per_node: Number, nodes: Number, links: Links) -> Number:
    """Double binary tree all-reduce: the payload up and down once, 2 log2(machines) hops and a chain inside each."""
    slowest = np.minimum(links.intra_bytes_per_s, per_node * links.inter_bytes_per_s)
    hops = 2.0 * (np.log2(nodes) * links.inter_latency_s + (per_node - 1) * links.intra_latency_s)
    return 2.0 * payload / slowest + hops


def ring_seconds(payload: Number, name: str, per_node: Number, nodes: Number, links: Links) -> Number:
    """All-reduce, all-gather or reduce-scatter of a whole buffer of `payload` bytes per GPU.

    Across machines NCCL has trees for an all-reduce alone; the other two are one ring through all GPUs.
    """
    rounds = ROUNDS[name]
    inside = hierarchical_seconds(payload, rounds, per_node, nodes, links)
    best = flat_ring_seconds(payload, rounds, per_node, nodes, links)
    if name == "all_reduce":
        best = np.minimum(np.minimum(best, inside), tree_seconds(payload, per_node, nodes, links))
    return np.where(np.asarray(nodes) > 1, best, inside)


def exchange_seconds(payload: Number, per_node: Number, nodes: Number, links: Links) -> Number:
    """All-to-all of `payload` bytes per GPU: every member gets an equal part, near and far ones at the same time."""
    members = per_node * nodes
    near = payload * (per_node - 1) / members / links.intra_bytes_per_s
    far = payload * (members - per_node) / members / links.inter_bytes_per_s
    latency = np.where(np.asarray(nodes) > 1, links.inter_latency_s, links.intra_latency_s)
    return np.maximum(near, far) + (members - 1) * latency


def send_seconds(payload: Number, nodes: Number, links: Links) -> Number:
    """One GPU to the next one of its group."""
    crosses = np.asarray(nodes) > 1
    rate = np.where(crosses, np.minimum(links.inter_bytes_per_s, links.intra_bytes_per_s), links.intra_bytes_per_s)
    return payload / rate + np.where(crosses, links.inter_latency_s, links.intra_latency_s)


def collective_seconds(operation: Operation, links: Links, num_gpus: int) -> float:
    """One execution of a communication operation; without a group it is over all GPUs of one machine."""
    group = operation.group or num_gpus
    per_node = operation.group_per_node or group
    nodes = round(group / per_node)
    if operation.senders:  # the machine's network is theirs alone, as far as each gets at it
        own = links.inter_bytes_per_s * links.gpus_per_host / operation.senders
        most = np.maximum(links.inter_bytes_per_s, links.port_bytes_per_s)
        links = replace(links, inter_bytes_per_s=np.minimum(own, most))
    kind = operation.name.rsplit(".", 1)[-1]
    links = links.among(2 if kind == "send" else per_node)
    if kind == "copy":
        return float(operation.bytes / links.pcie_bytes_per_s)
    if operation.name == HOST_UPDATE:
        return float(operation.bytes * links.gpus_per_host / links.host_update_bytes_per_s)
    if kind == "send":
        return float(links.start_s + send_seconds(operation.bytes, nodes, links))
    if kind == "all_to_all":
        return float(links.start_s + exchange_seconds(operation.bytes, per_node, nodes, links))
    return float(links.start_s + ring_seconds(operation.bytes, kind, per_node, nodes, links))


def crosses_machines(operations: Sequence[Operation]) -> bool:
    """Whether any collective leaves its machine."""
    return any(o.kind is Kind.COMMUNICATION and o.group > o.group_per_node for o in operations)


def links_of(factors: FactorSet, run: Run, *, across: bool) -> Links:
    """The links of a job, from its factors; what is missing is named."""
    link = factors.factors.get("link_bytes_per_s")
    if link is None and run.num_gpus > 1:
        raise InputError(
            f"{run.num_gpus} GPUs communicate, but the factors of {factors.gpu} have no 'link_bytes_per_s': "
            "use --num-gpus 1, or a record measured with more than one GPU."
        )
    network = factors.factors.get("node_bytes_per_s")
    if network is None and across:
        rack = gpus_in_rack(factors.gpu)
        joins_all = run.gpus_per_node < run.num_gpus <= rack
        raise InputError(
            f"{run.num_gpus} GPUs of {factors.gpu} take several machines of {run.gpus_per_node}, but no catalog fact "
            "says how those are joined; give the network of one machine, for example --internode-gbps 400"
            f"{f', or --gpus-per-node {rack}: a rack whose NVLink joins them all' if joins_all else ''}."
        )
    latency = {
        name: found.value if (found := factors.factors.get(name)) else 0.0
        for name in ("link_latency_s", "link_start_s", "node_latency_s")
    }
    sharing = min(run.gpus_per_node, run.num_gpus)
    inside = np.inf if link is None else link.value
    per_gpu = inside if network is None else network.value / sharing
    return Links(
        intra_bytes_per_s=inside,
        inter_bytes_per_s=per_gpu,
        intra_latency_s=latency["link_latency_s"],
        inter_latency_s=latency["node_latency_s"],
        start_s=latency["link_start_s"],
        pcie_bytes_per_s=host_rate(factors, run, "pcie_bytes_per_s"),
        host_update_bytes_per_s=host_rate(factors, run, "host_update_bytes_per_s"),
        gpus_per_host=sharing,
        port_bytes_per_s=port_bytes_per_s(factors.gpu),
        mesh=() if link is None or link.origin.startswith("measured") else mesh_shares(card_of(factors.gpu)),
    )


def port_bytes_per_s(gpu_id: str) -> float:
    """The most that a card sends out of its machine, over its own PCIe lanes; infinite where they are not known."""
    gpu = load_gpus().get(card_of(gpu_id))
    rate = None if gpu is None else pcie_bytes_per_s(gpu)
    return math.inf if rate is None else rate


def host_rate(factors: FactorSet, run: Run, name: str) -> float:
    """A rate of the host, needed only where something lives in it."""
    found = factors.factors.get(name)
    pages = run.paged_bytes > 0 and name == "pcie_bytes_per_s"
    if run.offload == "none" and not pages:
        return math.inf
    if found is None:
        what = f"--optim {run.optim}" if pages else f"--offload {run.offload}"
        raise InputError(
            f"{what} goes over PCIe to the host, but {factors.gpu} has no {name!r} in its factors or the catalog; "
            f"leave {what.split()[0]} out, or choose a GPU whose PCIe generation is known."
        )
    return found.value


def no_seconds() -> Array:
    """(segments,) zeros."""
    return np.zeros(len(SEGMENTS))


WHEN = ("beside", "once", "blocking", "ring")
"""Collectives by what they can hide behind."""


def communication_when(operation: Operation) -> str:
    """``blocking``, ``once`` (last micro-batch, beside its work), ``ring`` (every micro-batch, beside attention alone)
    or ``beside`` (every micro-batch)."""
    if operation.blocking:
        return "blocking"
    return "ring" if operation.name.startswith(CONTEXT) else "once" if operation.once else "beside"


def communication_seconds(
    operations: Sequence[Operation], factors: FactorSet, *, run: Run, when: str | None = None
) -> Array:
    """(segments,) seconds on the link in one optimizer step, of one kind or of all; what hides is in them."""
    wanted = [o for o in operations if o.kind is Kind.COMMUNICATION and when in (None, communication_when(o))]
    if not wanted:
        return no_seconds()
    return seconds_on(links_of(factors, run, across=crosses_machines(wanted)), wanted, run.num_gpus)


def seconds_on(links: Links, collectives: Sequence[Operation], num_gpus: int) -> Array:
    """(segments,) seconds of these collectives on known links in one optimizer step."""
    total = no_seconds()
    for operation in collectives:
        total[SEGMENT_OF[operation.phase]] += collective_seconds(operation, links, num_gpus) * operation.count
    return total


def host_updates(operations: Sequence[Operation]) -> list[Operation]:
    """The updates that the host's processors do, and paged state that comes and goes for one of the GPU's."""
    return [o for o in operations if o.kind is Kind.COMMUNICATION and o.name in OF_HOST]


def bubble_frac(stages: int, micro_batches: int, chunks: int) -> float:
    """Idle over working time of a pipeline stage under 1F1B: (p - 1) / (v m).

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; v chunks per stage when interleaved.
    """
    return (stages - 1) / (chunks * micro_batches)
