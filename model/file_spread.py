"""What a training file's run is stored in and sharded over, by how its job is spread: for a command line and for plans
that spread it otherwise than the file.

DeepSpeed casts the whole module, accelerate keeps fp32 in the shards of FSDP, and without either weights are what the
file loads. The file leaves all three in one option (`BY_SPREAD`), and over how many GPUs it shards in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_parallel import FSDP, GPUS_PER_NODE, ZERO
from tunecast.model.run import BY_SPREAD, SHARD_GPUS

OF_ADAPTERS = ("adapter_dtype", "modules_to_save_dtype")
OF_SHARDS = ("master_dtype", "reduce_dtype")
"""Options that FSDP alone has: what its shards keep, and what it reduces in."""
DTYPES = ("dtype", "precision", *OF_ADAPTERS, "master_dtype")
"""What a run is stored and computed in."""


def dtypes_by_spread(whole: Mapping[str, Any], masters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Dtypes without sharding (`whole`, as the file has them), under DeepSpeed, and under FSDP of adapters and of a
    model trained whole (`masters`: what it changes there)."""
    precision = str(whole.get("precision", ""))
    half = precision.removesuffix("-autocast")
    cast = {"dtype": half, "precision": half, "adapter_dtype": half} if precision.endswith("-autocast") else {}
    uncast = {name: value for name, value in whole.items() if not cast or name != "modules_to_save_dtype"}
    shared = {name: value for name, value in whole.items() if not cast or name != "adapter_dtype"}
    return {"whole": dict(whole), "zero": {**uncast, **cast}, "fsdp": shared, "fsdp-full": {**whole, **masters}}


def with_dtypes(options: Mapping[str, Any], sharding: str | None) -> dict[str, Any]:
    """The options of a plan with this sharding: in the dtypes that a training file has with it, where one tells them;
    else what shards of a model trained whole keep is the weights' dtype without FSDP."""
    full, sharded = options.get("method") == "full", sharding in FSDP
    told: Mapping[str, Mapping[str, Any]] | None = options.get(BY_SPREAD)
    if told is None:
        gone: tuple[str, ...] = () if sharded and full else ("master_dtype",) if sharded else OF_SHARDS
        kept = None if sharded or not full else options.get("master_dtype")
        rest = {name: value for name, value in options.items() if name not in gone}
        return rest if kept is None else rest | {"dtype": kept}
    offloaded = options.get("offload") not in (None, "none", False) and sharding in (None, "none")
    spread = "fsdp-full" if sharded and full else "fsdp" if sharded else "whole"
    found = told["zero" if sharding in ZERO or offloaded else spread]
    gone = DTYPES if sharded else (*DTYPES, "reduce_dtype")
    rest = {name: value for name, value in options.items() if name not in gone}
    return rest | {name: value for name, value in found.items() if not (full and name in OF_ADAPTERS)}


def over_shards(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, `hsdp` where the file shards over fewer GPUs than there are, whose copies are machines.

    Raises InputError where the shards do not deal out the GPUs, NotSupportedError where a copy is no machine. Source:
    axolotl 0.19 ``utils/distributed.py`` (``_get_parallel_config_kwargs``: what is left over replicates), accelerate
    ``parallelism_config.py``.
    """
    size, field = options.get(SHARD_GPUS) or (None, "")
    if size is None or options.get("sharding") not in FSDP or options.get("num_gpus") in (None, 1, "auto"):
        return dict(options)
    gpus, machine = (
        whole_number(name, options.get(name) or usual)
        for name, usual in (("num_gpus", 1), ("gpus_per_node", GPUS_PER_NODE))
    )
    inner = size
    for name in ("tp", "cp"):
        inner *= whole_number(name, options.get(name) or 1)
    if gpus % inner:
        raise InputError(
            f"{field} of the file takes {inner} GPUs with what else splits the model, but there are {gpus}; use a "
            f"multiple, --num-gpus {max(gpus // inner, 1) * inner}."
        )
    if gpus == inner:
        return {**options, "sharding": "fsdp" if options["sharding"] == "hsdp" else options["sharding"]}
    if inner != machine:
        raise NotSupportedError(
            f"{field} of the file shards over {inner} of {gpus} GPUs and copies that (hsdp), which is built for whole "
            f"machines only, of {machine} GPUs here; use --sharding fsdp, or --gpus-per-node {inner} if a machine has "
            "so many."
        )
    return {**options, "sharding": "hsdp"}


def can_shard(options: Mapping[str, Any], num_gpus: int) -> bool:
    """Whether the file's shards can be of a job of so many GPUs."""
    try:
        over_shards({**options, "num_gpus": num_gpus})
    except (InputError, NotSupportedError):
        return False
    return True
