"""Words of the parallelism column as a layout: degrees, sharding and offloading, for the row's number of GPUs.

What is not stated of the degrees is data parallelism: GPUs over tensor x pipeline x context. A bare "tensor parallel"
is over all GPUs that nothing else takes. Beside degrees, data parallelism is replicated (``ddp``) unless the cell names
a sharding or a distributed optimizer (Megatron's shards the states: ``zero1``); a cell that names no way of sharing at
all ("8 GPUs", "single node") is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tunecast.calibrate.cell_grammar import facts_of
from tunecast.calibrate.run_table import SkipRowError
from tunecast.model.resolve_parallel import GPUS_PER_NODE

NAMED = r"(?:tp|pp|cp|dp|ep|vp)"
ZIPPED = re.compile(
    rf"\b(?P<slashed>{NAMED}(?:\s*/\s*{NAMED})+)\s*[=:]?\s*\(?(?P<values>\d+(?:\s*/\s*\d+)+)\)?"
    rf"|\b(?P<listed>{NAMED}(?:\s*,\s*{NAMED})+)\s*[=:]\s*\(?(?P<list>\d+(?:\s*,\s*\d+)+)\)?",
    re.IGNORECASE,
)
"""Names and then their values: TP/PP/CP/DP = 4/2/1/1."""
DEGREES = (
    "tp",
    "pp",
    "cp",
    "dp",
    "ulysses",
    "ring",
    "sp",
    "gpus",
    "nodes",
    "per_node",
    "pp_interleave",
    "dp_shard",
    "dp_replicate",
)
WRITE = "write DDP, FSDP, a ZeRO stage or degrees"
WAYS = ("tp", "pp", "cp", "dp", "rest", "dp_shard", "dp_replicate")
"""Facts that name how GPUs share a model or its data."""
PASSED_ON = (
    "of_method", "sequence_parallel", "async_tp", "pp_interleave", "fsdp_version", "cp_kind", "gradient_checkpointing",
    "of_torch",
)  # fmt: skip


def layout_of(text: str, gpus: int) -> dict[str, Any] | None:
    """Run options of a parallelism cell; None where it states nothing."""
    plain = _zipped(_rest(_apart(text)))
    try:
        said = facts_of("parallelism", plain)
    except SkipRowError as unknown:
        raise SkipRowError(str(unknown).replace(repr(plain), repr(text), 1)) from unknown
    if said is None:
        return None
    facts = _merged(text, said)
    _two_ways(text, facts)
    degrees = _degrees(text, facts, gpus)
    inner = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if gpus % inner:
        raise SkipRowError(f"parallelism {text!r} takes {inner} GPUs per copy, but gpus is {gpus}")
    data = gpus // inner
    stated = facts.get("dp")
    if stated is not None and stated != data:
        raise SkipRowError(f"parallelism {text!r} states {stated} copies, but gpus {gpus} leaves {data}")
    options: dict[str, Any] = {name: value for name, value in degrees.items() if value > 1}
    options |= {name: facts[name] for name in PASSED_ON if name in facts}
    copies = gpus // (degrees["tp"] * degrees["pp"])
    _shards_of_rest(facts, copies)
    _in_machines(text, facts, copies, inner)
    options["sharding"] = sharding = _sharding(text, facts, copies)
    offload = _offload(text, facts, sharding)
    options |= {"offload": offload} if offload else {}
    if sharding in ("none", "ddp"):
        options.pop("fsdp_version", None)
    if facts.get("nodes", 1) > 1 or (facts.get("nodes") == 1 and gpus > GPUS_PER_NODE):
        options["gpus_per_node"] = _per_node(text, facts, gpus)
    if sharding == "hsdp" and facts.get("dp_shard", 1) > 1:
        options |= _groups(text, facts, degrees, int(options.get("gpus_per_node", GPUS_PER_NODE)))
    return options


def _merged(text: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The facts with the spellings of one degree under one name; a degree said twice must be the same."""
    facts: dict[str, Any] = {}
    for name, value in said.items():
        plain = re.sub(r"\d+$", "", name)
        plain = {"vpp": "pp_interleave"}.get(plain, plain)
        if facts.setdefault(plain, value) != value:
            raise SkipRowError(f"parallelism {text!r} contradicts itself: {plain} {facts[plain]} and {value}")
    for name in DEGREES:
        if facts.get(name) == 0:
            raise SkipRowError(f"parallelism {text!r}: 0 is no degree")
    kinds = ("ulysses", "ring")
    dealt = next((kind for kind in kinds if kind in facts), str(facts.get("cp_kind", kinds[0])))
    for kind, name in ((dealt, "sp"), *zip(kinds, kinds, strict=True)):
        degree = facts.pop(name, None)
        if degree is None:
            continue
        if facts.setdefault("cp", degree) != degree or facts.setdefault("cp_kind", kind) != kind:
            raise SkipRowError(f"parallelism {text!r} contradicts itself: {kind} {degree} and cp {facts['cp']}")
    return facts


def _degrees(text: str, facts: Mapping[str, Any], gpus: int) -> dict[str, int]:
    if facts.get("gpus", gpus) != gpus:
        raise SkipRowError(f"parallelism {text!r} names {facts['gpus']} GPUs, but gpus is {gpus}")
    degrees = {name: int(facts.get(name, 1)) for name in ("tp", "pp", "cp")}
    rest = str(facts.get("rest", ""))
    if rest and rest not in facts:
        others = degrees["tp"] * degrees["pp"] * degrees["cp"] * int(facts.get("dp", 1))
        if "sharding" in facts or "fsdp" in facts or "kind" in facts:
            raise SkipRowError(f"parallelism {text!r} does not state over how many GPUs {rest} is")
        degrees[rest] = max(gpus // others, 1)
    return degrees


def _sharding(text: str, facts: Mapping[str, Any], copies: int) -> str:
    """How data parallelism spreads the model; a world of one has nothing to spread."""
    fsdp = facts.get("kind", facts.get("fsdp"))
    named = facts.get("sharding")
    if facts.get("alone") and copies > 1:
        raise SkipRowError(f"parallelism {text!r} does not say how {copies} copies share the work: {WRITE}")
    if fsdp and (named not in (None, "ddp") or (facts.get("copies") and fsdp not in ("hsdp", "ddp"))):
        raise SkipRowError(f"parallelism {text!r} contradicts itself: {fsdp} and {named}; {WRITE}, or HSDP")
    if facts.get("stageless") and not (fsdp or str(named).startswith("zero") or facts.get("distributed_optimizer")):
        raise SkipRowError(f"parallelism {text!r} does not say which stage of ZeRO: write ZeRO-1, ZeRO-2 or ZeRO-3")
    found = fsdp or named
    replicas, shards = facts.get("dp_replicate", 1), facts.get("dp_shard", 1)
    if {"dp_replicate", "dp_shard"} & facts.keys():
        if replicas * shards != copies:
            raise SkipRowError(f"parallelism {text!r} states {replicas} x {shards} copies, but {copies} are left")
        found = "ddp" if shards == 1 else "hsdp" if replicas > 1 else found
    if found is None and copies > 1 and not facts.get("distributed_optimizer") and not facts.keys() & set(WAYS):
        raise SkipRowError(f"parallelism {text!r} does not say how {copies} copies share the work: {WRITE}")
    if facts.get("distributed_optimizer") and found in (None, "ddp"):
        found = "zero1"
    if copies == 1:
        return "none"
    return str(found or "ddp")


def _apart(text: str) -> str:
    """Names that a times sign joins as two (``TP4xPP2``), and a degree in brackets as one (``data parallel (8)``)."""
    plain = re.sub(rf"(?<=\d)\s*[x*\u00d7]\s*(?={NAMED}\s*[=:]?\s*\d)", " x ", text, flags=re.IGNORECASE)
    ways = r"\b(?:[tpcd]p|(?:tensor|pipeline|context|data)[ -]parallel(?:ism)?)"
    return re.sub(rf"({ways})\s*\(\s*(\d+)\s*\)", r"\1 \2", plain, flags=re.IGNORECASE)


def _two_ways(text: str, facts: dict[str, Any]) -> None:
    """A mesh of two ways, of which the cell names both: HSDP's, or FSDP beside degrees of a model."""
    named = sum(int(facts.get(way, 1)) > 1 for way in ("tp", "pp", "cp", "dp", "dp_shard", "dp_replicate"))
    sharded = "fsdp" in facts or "sharding" in facts
    if facts.pop("two_ways", False) and facts.get("kind") != "hsdp" and named + sharded < 2:
        raise SkipRowError(f"parallelism {text!r} does not say which two: write HSDP, or FSDP and TP=2")


def _rest(text: str) -> str:
    """torchtitan's -1, all GPUs that remain, in a word; refused of any other degree."""
    plain = re.sub(
        r"((?:dp|data[ _]parallel)[ _]shard(?:[ _]degree)?)\s*[=:\s]\s*-1(?!\d)", r"\1 rest", text, flags=re.I
    )
    odd = re.search(r"[=:]\s*-\s*\d+", plain)
    if odd is not None:
        raise SkipRowError(f"parallelism {text!r}: {odd[0].lstrip('=: ')} is no degree")
    return plain


def _shards_of_rest(facts: dict[str, Any], copies: int) -> None:
    """FSDP beside a number of replicas shards over the GPUs that are left, as torchtitan's default does
    (``data_parallel_shard_degree`` -1, `ParallelDims` of torchtitan/distributed/parallel_dims.py)."""
    rest = facts.pop("shard_rest", False)
    replicas = int(facts.get("dp_replicate", 1))
    sharded = rest or ("dp_replicate" in facts and ("fsdp" in facts or facts.get("kind") in ("fsdp", "hsdp")))
    if sharded and copies % replicas == 0:
        facts.setdefault("dp_shard", copies // replicas)


def _in_machines(text: str, facts: dict[str, Any], copies: int, inner: int) -> None:
    """FSDP inside machines and copies across them are hybrid sharding; of ZeRO's stages and beside degrees that is
    not said, or not built."""
    inside, across = facts.pop("in_machine", False), facts.pop("across_machines", False)
    if not inside or copies == 1 or facts.get("kind") == "hsdp" or facts.get("nodes") == 1:
        return
    fsdp = "fsdp" in facts and facts.get("kind", "fsdp") == "fsdp"
    if fsdp and inner == 1 and (not across or facts.get("sharding") == "ddp"):
        facts["kind"] = "hsdp"
    elif fsdp or "kind" in facts or str(facts.get("sharding", "")).startswith("zero"):
        raise SkipRowError(
            f"parallelism {text!r} does not say what is sharded inside machines alone: write HSDP (FSDP inside "
            "machines, copies across them), FSDP or a ZeRO stage"
        )


def _zipped(text: str) -> str:
    """Names and then their values (``TP/PP/CP/DP = 4/2/1/1``) as each name beside its value."""
    found = ZIPPED.search(text)
    if found is None:
        return text
    names = re.findall(r"[a-z]+", found["slashed"] or found["listed"], re.IGNORECASE)
    values = re.findall(r"\d+", found["values"] or found["list"])
    if len(names) != len(values):
        raise SkipRowError(f"parallelism {text!r} has {len(names)} names and {len(values)} values")
    plain = " ".join(f"{name}{value}" for name, value in zip(names, values, strict=True))
    return f"{text[: found.start()]} {plain} {text[found.end() :]}"


def _groups(text: str, facts: Mapping[str, Any], degrees: Mapping[str, int], per_node: int) -> dict[str, int]:
    """Over how many GPUs a copy is sharded, where they are not those of a machine."""
    shards = int(facts["dp_shard"])
    if shards * degrees["tp"] == per_node:
        return {}
    if degrees["cp"] > 1:
        raise SkipRowError(f"parallelism {text!r} does not say whether groups of {shards} GPUs split sequences too")
    return {"dp_shard_size": shards}


def _offload(text: str, facts: Mapping[str, Any], sharding: str) -> str:
    """What is kept in host memory; an offload without a name is all that the sharding can offload."""
    asked = str(facts.get("offload", ""))
    if asked in ("", "none"):
        return ""
    if asked != "any":
        return asked
    named = facts.get("sharding", sharding)
    if named in ("zero1", "zero2"):
        return "optimizer"
    if named == "zero3" or "fsdp" in facts or "kind" in facts:
        return "all"
    raise SkipRowError(f"parallelism {text!r} does not say what is offloaded")


def _per_node(text: str, facts: Mapping[str, Any], gpus: int) -> int:
    nodes, stated = int(facts["nodes"]), facts.get("per_node")
    if gpus % nodes or (stated is not None and stated * nodes != gpus):
        raise SkipRowError(f"parallelism {text!r} names {nodes} machines, but gpus is {gpus}")
    return gpus // nodes
