"""What a training file's run is stored in and sharded over, by how its job is spread: for a command line and for plans
that spread it otherwise than the file.

DeepSpeed casts the whole module, accelerate keeps fp32 in the shards of FSDP, and without either weights are what the
file loads. The file leaves all three in one option (`BY_SPREAD`), and over how many GPUs it shards in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_parallel import FSDP, GPUS_PER_NODE, ZERO
from tunecast.model.run import BY_SPREAD, MESH
from tunecast.model.stacks import DTYPE_ALIASES

OF_ADAPTERS = ("adapter_dtype", "modules_to_save_dtype")
OF_SHARDS = ("master_dtype", "reduce_dtype", "dp_shard_size")
"""Options that FSDP alone has: what its shards keep, what it reduces in, and over how many GPUs it shards."""
BY_FILE = "file"
"""Of `BY_SPREAD`: how the file itself shards."""
DTYPES = ("dtype", "precision", *OF_ADAPTERS, "master_dtype")
"""What a run is stored and computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How a training file lays FSDP's shards and their copies out, beside what splits the model; one of them at least.

    Frameworks refuse a job whose GPUs are not the product of the two, or give what is None all that is left.
    """

    shards: int | None = None
    replicas: int | None = None
    field: str
    """Who says so."""

    def shards_over(self, gpus: int, inner: int) -> int:
        """GPUs of a group of shards beside the `inner` ones that split a copy, in a job of so many."""
        taken = inner * (self.shards or self.replicas or 1)
        if gpus % taken:
            raise self._refusal(gpus, taken, f"a multiple, --num-gpus {max(gpus // taken, 1) * taken}")
        return self.shards or gpus // taken

    def check(self, gpus: int, inner: int, *, sharded: bool) -> None:
        """Raises InputError where what is given is not the whole job: shards and replicas, or replicas of no shards."""
        taken = inner * (self.shards or 1) * (self.replicas or 1)
        if self.replicas and (self.shards or not sharded) and gpus != taken:
            raise self._refusal(gpus, taken, f"--num-gpus {taken}, or lay them out with --sharding or --dp-shard-size")

    def _refusal(self, gpus: int, taken: int, instead: str) -> InputError:
        return InputError(
            f"{self.field} of the file takes {taken} GPUs with what else splits the model, but there are {gpus}; use "
            f"{instead}."
        )


def dtypes_by_spread(
    whole: Mapping[str, Any], masters: Mapping[str, Any], typed: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Dtypes without sharding (`whole`, as the file has them), under DeepSpeed, and under FSDP of adapters and of a
    model trained whole (`masters`: what it changes there); `typed` ones are taken as they stand in each.

    DeepSpeed's cast is left out where another dtype than its own is typed. Where any is, whether FSDP's shards are fp32
    is left to the resolution, unless the file's framework has none.
    """
    precision = str(whole.get("precision", ""))
    half = precision.removesuffix("-autocast")
    said = {DTYPE_ALIASES.get(str(typed[name]), str(typed[name])) for name in ("dtype", "precision") if name in typed}
    casts = precision.endswith("-autocast") and said <= {half}
    cast = {"dtype": half, "precision": half, "adapter_dtype": half} if casts else {}
    uncast = {name: value for name, value in whole.items() if not casts or name != "modules_to_save_dtype"}
    shared = {name: value for name, value in whole.items() if precision == half or name != "adapter_dtype"}
    none = masters.get("master_dtype") == "none"
    kept = {} if {"dtype", "precision", "master_dtype"} & set(typed) and not none else masters
    found = {"whole": dict(whole), "zero": {**uncast, **cast}, "fsdp": shared, "fsdp-full": {**whole, **kept}}
    return {spread: {**dtypes, **typed} for spread, dtypes in found.items()}


def is_offloaded(options: Mapping[str, Any]) -> bool:
    """Whether anything is asked to live in host memory."""
    return options.get("offload") not in (None, "none", False)


def with_dtypes(options: Mapping[str, Any], sharding: str | None) -> dict[str, Any]:
    """The options of a plan with this sharding: in the dtypes that a training file has with it, where one tells them;
    else what shards of a model trained whole keep is the weights' dtype without FSDP, computed with in 16 bits."""
    full, sharded = options.get("method") == "full", sharding in FSDP
    told: Mapping[str, Mapping[str, Any]] | None = options.get(BY_SPREAD)
    if told is None:
        gone: tuple[str, ...] = () if sharded and full else ("master_dtype",) if sharded else OF_SHARDS
        kept = None if sharded or not full else options.get("master_dtype")
        rest = {name: value for name, value in options.items() if name not in gone}
        return rest if kept in (None, "none") else rest | {"dtype": kept, "precision": mixed(options)}
    offloaded = is_offloaded(options) and sharding in (None, "none")
    spread = "fsdp-full" if sharded and full else "fsdp" if sharded else "whole"
    found = told["zero" if sharding in ZERO or offloaded else spread]
    rest = {name: value for name, value in options.items() if name not in DTYPES}
    return rest | {name: value for name, value in found.items() if not (full and name in OF_ADAPTERS)}


def mixed(options: Mapping[str, Any]) -> str:
    """The mixed precision of a run whose weights are fp32 where FSDP shards them, and 16 bits where they are used."""
    half = str(options.get("precision") or options.get("dtype") or "bf16").removesuffix("-autocast")
    return half if half == "fp32" else f"{half}-autocast"


def over_shards(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, `hsdp` where the file shards over fewer GPUs than there are.

    Raises InputError where the shards do not deal out the GPUs, NotSupportedError for copies whose weights stay whole
    to the backward, and for DeepSpeed's one process that trains a whole model (`copies_on_one_gpu`). Source: axolotl
    0.19 ``utils/distributed.py`` (``_get_parallel_config_kwargs``: what is left over replicates), accelerate
    ``parallelism_config.py``.
    """
    if copies_on_one_gpu(options):
        raise NotSupportedError(
            "DeepSpeed on one GPU without offloading keeps an fp32 copy and fp32 states of all weights there, which is "
            "not built yet; use more GPUs, --offload optimizer, or leave DeepSpeed's file out."
        )
    mesh: Mesh | None = options.get(MESH)
    if mesh is not None:
        options = {name: value for name, value in options.items() if name != "dp_shard_size"}
    if mesh is None or options.get("sharding") not in FSDP or options.get("num_gpus") in (None, 1, "auto"):
        return dict(options)
    gpus, machine, inner = job_sizes(options)
    size = mesh.shards_over(gpus, inner)
    group = inner * size
    if gpus == group:
        return {**options, "sharding": "fsdp" if options["sharding"] == "hsdp" else options["sharding"]}
    if group == 1:
        raise InputError(
            f"{mesh.field} of the file gives each of {gpus} GPUs the whole model, with nothing left to shard; take it "
            "out, or use --sharding ddp."
        )
    if options["sharding"] == "fsdp-grad-op":
        raise NotSupportedError(
            f"{mesh.field} of the file shards over {group} of {gpus} GPUs and copies that (hsdp), built for weights "
            "that are sharded again after the forward; set reshard_after_forward: true, or use --sharding fsdp-grad-op."
        )
    return {**options, "sharding": "hsdp"} | ({} if group == machine else {"dp_shard_size": size})


def job_sizes(options: Mapping[str, Any]) -> tuple[int, int, int]:
    """GPUs of the job, of a machine, and of those that split one copy beside FSDP."""
    usual = {"num_gpus": 1, "gpus_per_node": GPUS_PER_NODE, "tp": 1, "cp": 1}
    gpus, machine, tp, cp = (whole_number(name, options.get(name) or least) for name, least in usual.items())
    return gpus, machine, tp * cp


def check_mesh(options: Mapping[str, Any]) -> None:
    """Raises InputError where a file's shards and copies are not the whole of the job that was asked for, as its
    framework does; plans of other sizes have other copies."""
    mesh: Mesh | None = options.get(MESH)
    if mesh is not None and options.get("num_gpus") not in (None, 1, "auto"):
        gpus, _, inner = job_sizes(options)
        mesh.check(gpus, inner, sharded=options.get("sharding") in FSDP)


def file_sharding(options: Mapping[str, Any]) -> str | None:
    """How a training file itself shards; None where it does not, or there is none."""
    found: str | None = options.get(BY_SPREAD, {}).get(BY_FILE, {}).get("sharding")
    return found


def copies_on_one_gpu(options: Mapping[str, Any]) -> bool:
    """Whether a file's DeepSpeed trains a whole model in one process, which keeps an fp32 copy of it on the GPU."""
    return (
        file_sharding(options) in ZERO
        and options.get("num_gpus") == 1
        and options.get("method") == "full"
        and not is_offloaded(options)
    )


def can_shard(options: Mapping[str, Any], num_gpus: int) -> bool:
    """Whether the file's shards can be of a job of so many GPUs."""
    try:
        over_shards({**options, "num_gpus": num_gpus})
    except (InputError, NotSupportedError):
        return False
    return True
