"""Words of the parallelism column as a layout: degrees, sharding and offloading, for the row's number of GPUs.

What is not stated of the degrees is data parallelism: GPUs over tensor x pipeline x context. A bare "tensor parallel"
is over all GPUs that nothing else takes. Data parallelism is replicated (``ddp``) unless the cell names a sharding or
a distributed optimizer (Megatron's shards the states: ``zero1``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tunecast.calibrate.cell_grammar import facts_of
from tunecast.calibrate.run_table import SkipRowError

DEGREES = ("tp", "pp", "cp", "dp", "ulysses", "ring", "gpus", "nodes", "per_node", "pp_interleave")
PASSED_ON = ("sequence_parallel", "async_tp", "pp_interleave", "fsdp_version", "cp_kind")


def layout_of(text: str, gpus: int) -> dict[str, Any] | None:
    """Run options of a parallelism cell; None where it states nothing."""
    said = facts_of("parallelism", text)
    if said is None:
        return None
    facts = _merged(text, said)
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
    options["sharding"] = sharding = _sharding(text, facts, gpus // (degrees["tp"] * degrees["pp"]))
    offload = _offload(text, facts, sharding)
    options |= {"offload": offload} if offload else {}
    if gpus == 1:
        options.pop("fsdp_version", None)
    if facts.get("nodes", 1) > 1:
        options["gpus_per_node"] = _per_node(text, facts, gpus)
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
    for kind in ("ulysses", "ring"):
        degree = facts.pop(kind, None)
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
        raise SkipRowError(f"parallelism {text!r} does not say how {copies} copies share the work")
    if fsdp and named not in (None, "ddp"):
        raise SkipRowError(f"parallelism {text!r} contradicts itself: {fsdp} and {named}")
    found = fsdp or named
    if facts.get("distributed_optimizer") and found in (None, "ddp"):
        found = "zero1"
    if copies == 1:
        return "none"
    return str(found or "ddp")


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
