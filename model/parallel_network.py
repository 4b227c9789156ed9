"""What joins the machines of a job: the user's figure, or the network of a catalog instance with the same GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import Gpu
from tunecast.catalogs.prices import load_prices
from tunecast.catalogs.rental_facts import BITS_PER_BYTE, node_network_bytes_per_s
from tunecast.model.factors import Factor, FactorSet
from tunecast.model.priors import latency, link_bytes_per_s, load_priors
from tunecast.model.read_numbers import number_above_zero
from tunecast.model.resolve_parallel import GPUS_PER_NODE
from tunecast.model.run import Run
from tunecast.model.units import GIGA

NETWORK_FACTORS = ("node_bytes_per_s", "node_latency_s")
WHOLE_RATE = {"value": 1.0, "low": 1.0, "high": 1.0}
"""All of a link's rate, as the datasheet states it."""


class KnownNetwork(NamedTuple):
    """What machines with a card are joined at, in bytes/s out of one of them, and the catalog instance that says so."""

    bytes_per_s: float
    where: str
    slower_bytes_per_s: float
    """The next slower network of another instance with this card; the same one where every instance has it."""
    slower_where: str


@cache
def catalog_network(gpu_id: str, gpus_per_node: int = GPUS_PER_NODE) -> KnownNetwork | None:
    """The fastest network of the instances with this GPU, else with its sibling, and the next slower one of either.

    A sibling differs in memory only (the name's last part). Machines of fewer GPUs than an instance has are given their
    share of its network, most of which have a network card for each GPU; of more, nothing is known.
    """
    own: dict[float, str] = {}
    either: dict[float, str] = {}
    for offer in load_prices():
        same = offer.gpu_id == gpu_id
        if not same and offer.gpu_id.rpartition("-")[0] != gpu_id.rpartition("-")[0]:
            continue
        whole = node_network_bytes_per_s(offer.provider, offer.offer_sku)
        if whole is None or offer.gpu_count < gpus_per_node:
            continue
        part = "" if gpus_per_node == offer.gpu_count else f"{gpus_per_node}/{offer.gpu_count} of "
        speed = part_of_network(whole, gpus_per_node, offer.gpu_count)
        for known in (own, either) if same else (either,):
            known.setdefault(speed, f"{part}{offer.provider} {offer.offer_sku}")
    if not either:
        return None
    fastest = max(own or either)
    slower = max((speed for speed in either if speed < fastest), default=fastest)
    return KnownNetwork(fastest, (own or either)[fastest], slower, either[slower])


def gpus_per_machine(options: Mapping[str, Any]) -> int:
    """GPUs of the machines that a job with these options is timed on."""
    return options.get("gpus_per_node") or GPUS_PER_NODE


def part_of_network(whole: float, per_node: int, gpus: float) -> float:
    """What `per_node` of a machine's GPUs have of its network: their part of it."""
    return whole * min(1.0, per_node / gpus)


def network_taken(gpu_id: str, options: Mapping[str, Any]) -> float | None:
    """Bytes/s out of one machine that a forecast takes: the user's figure, else the catalog's; None: unknown."""
    given = given_network(options)
    known = catalog_network(gpu_id, gpus_per_machine(options)) if given is None else None
    return given if known is None else known.bytes_per_s


def card_of(device: str) -> str:
    """The catalog's id of a device: of a simulated one (``mock:ID#SEED``) the card that it simulates."""
    return device.removeprefix("mock:").partition("#")[0]


def gpus_in_rack(gpu_id: str) -> int:
    """GPUs of a rack whose machines one NVLink joins; 0 for cards whose NVLink ends at the machine."""
    rack = link_facts()["nvlink_racks"]
    return int(rack["gpus"]) if re.match(rack["pattern"], card_of(gpu_id)) else 0


def machines_in_racks(gpu_id: str, gpus: int, num_gpus: int) -> int:
    """Machines of so many GPUs in the racks that hold a job: whole trays of one NVLink; 0 where none is."""
    rack = gpus_in_rack(gpu_id)
    if not rack or gpus % int(link_facts()["nvlink_racks"]["gpus_per_tray"]):
        return 0
    return -(-num_gpus // rack) * (rack // gpus)


def given_network(options: Mapping[str, Any]) -> float | None:
    """Bytes/s out of one machine, as the user says in Gbit/s."""
    given = options.get("internode_gbps")
    if given is None:
        return None
    return number_above_zero("--internode-gbps", given, "400") * GIGA / BITS_PER_BYTE


@cache
def link_facts() -> dict[str, Any]:
    """The shipped facts about links between cards."""
    text = files("tunecast.model").joinpath("data", "links.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


@cache
def mesh_shares(gpu_id: str) -> tuple[float, ...]:
    """By the members of a group inside a machine, the share of a card's links that join them where cards are joined
    pair by pair; empty where a switch gives every group all of them."""
    found = (mesh for mesh in link_facts()["meshes"] if re.match(mesh["pattern"], gpu_id))
    return next((tuple(map(float, mesh["shares"])) for mesh in found), ())


def has_peer_access(gpu: Gpu, options: Mapping[str, Any]) -> bool:
    """Whether cards read each other's memory over PCIe: as the user says, else unless drivers forbid it."""
    if options.get("p2p") is not None:
        return bool(options["p2p"])
    return re.match(link_facts()["no_p2p"]["pattern"], gpu.id) is None


def has_bridge(gpu: Gpu) -> bool:
    """Whether a card's NVLink is a bridge, which somebody has to mount."""
    return gpu.nvlink_bytes_per_s > 0 and gpu.link_kind == "nvlink-bridge"


def check_bridge(gpu: Gpu | None, run: Run, options: Mapping[str, Any]) -> None:
    """Raise InputError for bridges between cards that have no NVLink."""
    if options.get("nvlink") and run.num_gpus > 1 and gpu is not None and gpu.nvlink_bytes_per_s == 0:
        raise InputError(
            f"--nvlink says that NVLink bridges join the cards, but {gpu.id} has no NVLink; leave --nvlink out."
        )


def without_bridge(options: Mapping[str, Any], gpu: Gpu | None) -> dict[str, Any]:
    """The options of a question that asks many cards, without the bridges that this card cannot have."""
    lacks = gpu is not None and gpu.nvlink_bytes_per_s == 0
    return {name: value for name, value in options.items() if name != "nvlink" or not lacks}


def most_bridged() -> int:
    """The most cards that bridges of any kind join."""
    return int(link_facts()["nvlink_bridges"]["joins_more"]["joins"])


def joined_cards(gpu: Gpu) -> int:
    """Cards that NVLink bridges join: two, or four of the kinds whose bridges do."""
    bridges = link_facts()["nvlink_bridges"]
    return most_bridged() if re.match(bridges["joins_more"]["pattern"], gpu.id) else int(bridges["joins"])


def can_be_bridged(gpu: Gpu | None, run: Run) -> bool:
    """Whether bridges may join all cards of a machine; of a longer ring the slowest hop is PCIe."""
    return gpu is not None and has_bridge(gpu) and 1 < min(run.num_gpus, run.gpus_per_node) <= joined_cards(gpu)


def with_peers(factors: FactorSet, run: Run, gpu: Gpu | None, options: Mapping[str, Any]) -> FactorSet:
    """The link's rate where cards of a machine are joined by PCIe, with peer access or without, or by NVLink bridges as
    the user says, and nobody measured it.

    Boards differ more than NVLink does: by their root ports, by how they are set, and by the lanes of their slots.
    """
    link = factors.factors.get("link_bytes_per_s")
    over_pcie = gpu is not None and (gpu.nvlink_bytes_per_s == 0 or has_bridge(gpu))
    if gpu is None or link is None or run.num_gpus == 1 or not over_pcie or link.origin.startswith("measured"):
        return factors
    rate = link_bytes_per_s(gpu)
    if rate is None:
        return factors
    if options.get("nvlink") and can_be_bridged(gpu, run):
        return _over_bridges(factors, link, gpu, pcie_bytes_per_s=rate)
    peers = has_peer_access(gpu, options)
    frac = link_facts()["over_pcie_frac" if peers else "without_p2p_frac"]
    value, low, high = (rate * float(frac[end]) for end in ("value", "low", "high"))
    slower = replace(link, value=value, low=low, high=high, origin="assumed")
    way = "over PCIe" if peers else "through host memory (--p2p if the driver allows more)"
    note = (
        f"{gpu.id}: cards reach each other {way}, at {slower.value / GIGA:.3g} GB/s "
        f"({slower.low / GIGA:.2g} to {slower.high / GIGA:.2g}, by board and slot)"
        f"{_about_bridges(gpu, run, options)}"
    )
    return replace(factors, factors={**factors.factors, "link_bytes_per_s": slower}, notes=(*factors.notes, note))


def _over_bridges(factors: FactorSet, link: Factor, gpu: Gpu, *, pcie_bytes_per_s: float) -> FactorSet:
    """The link over NVLink bridges: as much of their rate is reached as of NVLink inside machines."""
    times = gpu.nvlink_bytes_per_s / 2 / pcie_bytes_per_s
    faster = link.times(times, origin="assumed")
    note = f"{gpu.id}: NVLink bridges join the cards (--nvlink), at {faster.value / GIGA:.3g} GB/s"
    return replace(factors, factors={**factors.factors, "link_bytes_per_s": faster}, notes=(*factors.notes, note))


def _about_bridges(gpu: Gpu, run: Run, options: Mapping[str, Any]) -> str:
    """Behind the rate of PCIe: the option that says of bridges, or why those that it says of change nothing."""
    if options.get("nvlink") is None and can_be_bridged(gpu, run):
        return "; --nvlink if NVLink bridges join them"
    if options.get("nvlink") and has_bridge(gpu):
        ring = min(run.num_gpus, run.gpus_per_node)
        return f"; NVLink bridges join {joined_cards(gpu)} cards, so a ring of {ring} crosses PCIe all the same"
    return ""


def with_network(
    factors: FactorSet,
    run: Run,
    gpu: Gpu | None,
    options: Mapping[str, Any],
    *,
    reached: Mapping[str, float] | None = None,
) -> FactorSet:
    """The factors with those of links that the job needs: between cards without peer access, between machines.

    Collectives reach the same part of it as of the link inside a machine (assumed), and a hop takes what NCCL's table
    says: no record and no published run has measured them. `reached` is that part; None: the shipped priors'.
    Where nobody says what joins the machines, it may as well be the next slower network of the card's instances.
    """
    factors = with_peers(factors, run, gpu, options)
    if run.num_gpus <= run.gpus_per_node or "node_bytes_per_s" in factors.factors:
        return factors
    speed, where = given_network(options), str(options.get("internode_of", "--internode-gbps"))
    slowest = speed
    if speed is None and gpu is not None and (known := catalog_network(gpu.id, run.gpus_per_node)) is not None:
        speed, where, slowest = known.bytes_per_s, known.where, known.slower_bytes_per_s
        if slowest < speed:
            where += f", perhaps {slowest * BITS_PER_BYTE / GIGA:,.0f} as {known.slower_where}: say --internode-gbps"
    if speed is None or slowest is None:
        return factors
    reached = load_priors()["efficiency"]["link"] if reached is None else reached
    network = Factor(
        value=speed * reached["value"],
        low=min(speed * reached["low"], slowest * reached["value"]),
        high=speed * reached["high"],
        unit="B/s",
        origin="assumed",
    )
    added = {"node_bytes_per_s": network}
    if "link_latency_s" in factors.factors:
        added["node_latency_s"] = latency(load_priors()["beliefs"], run, "network")
    machines, over = run.machines, run.num_gpus % run.gpus_per_node
    partly = f", the last with {over} in use," if over else ","
    note = (
        f"{machines} machines of {run.gpus_per_node} GPUs{partly} joined at "
        f"{speed * BITS_PER_BYTE / GIGA:,.0f} Gbit/s each ({where}); slow machines and congestion are not counted"
    )
    return replace(factors, factors={**factors.factors, **added}, notes=(*factors.notes, note))
