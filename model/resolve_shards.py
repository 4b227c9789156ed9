"""Over how many GPUs FSDP shards a model, where it copies the shards over the others (hybrid sharding)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.read_numbers import whole_number
from tunecast.model.stacks import only_of_stack

if TYPE_CHECKING:
    from tunecast.model.resolve_parallel import Fields

SHARDED_SO = ("fsdp", "hsdp")
"""Shardings that ``--dp-shard-size`` is about."""
WHOLE_MACHINE = 0
"""``Run.dp_shard_size`` of shards over the GPUs of a machine."""


def take_shards(fields: Fields, copies: int) -> None:
    """``dp_shard_size``, as accelerate's and axolotl's of that name and torchtitan's ``data_parallel_shard_degree``:
    FSDP over fewer GPUs than the `copies` of data and context parallelism is hybrid, over all of them plain."""
    values = fields.values
    given = fields.take("dp_shard_size", None, "stack-default")
    values["dp_shard_size"] = WHOLE_MACHINE
    if given is not None:
        size = whole_number("dp_shard_size", given)
        check_size(values, size, copies)
        values["sharding"] = "hsdp" if size * values["cp"] < copies else "fsdp"
        check_stack_shards(values, size)
        whole = size * values["cp"] in (copies, machine_gpus(values))
        values["dp_shard_size"] = WHOLE_MACHINE if whole else size
    if values["sharding"] == "hsdp":
        check_groups(values, copies)


def machine_gpus(values: Mapping[str, Any]) -> int:
    """GPUs of a machine that data and context parallelism run over."""
    return int(values["gpus_per_node"]) // int(values["tp"])


def check_size(values: Mapping[str, Any], size: int, copies: int) -> None:
    """Raises InputError for a size that FSDP does not shard over."""
    sharding, inner = values["sharding"], size * values["cp"]
    if sharding not in SHARDED_SO:
        raise InputError(
            f"--dp-shard-size {size} says over how many GPUs FSDP shards, but --sharding is {sharding}; use --sharding "
            f"fsdp{'' if copies > 1 else ' and more --num-gpus'}, or leave it out."
        )
    if copies % inner:
        beside = f" x --cp {values['cp']}" if values["cp"] > 1 else ""
        raise InputError(
            f"--dp-shard-size {size}{beside} takes groups of {inner} GPUs, which do not divide the {copies} of data "
            f"parallelism (--num-gpus {values['num_gpus']}); use a divisor."
        )
    if inner == 1:
        raise InputError("--dp-shard-size 1 shards nothing; use --sharding ddp.")


def check_stack_shards(values: Mapping[str, Any], size: int) -> None:
    """Raises NotSupportedError for a stack that has no such sharding."""
    allowed = only_of_stack(values["stack"]).get("sharding")
    if allowed is not None and values["sharding"] not in allowed:
        raise NotSupportedError(
            f"--dp-shard-size {size} (--sharding {values['sharding']}) is not built for --stack {values['stack']}, "
            f"whose --sharding takes {' or '.join(allowed)}."
        )


def check_groups(values: Mapping[str, Any], copies: int) -> None:
    """Groups are equal, two at least, and fill machines evenly, or machines them."""
    machine = machine_gpus(values)
    group = values["dp_shard_size"] * values["cp"] or machine
    if copies <= group:
        raise InputError(
            f"--sharding hsdp shards inside machines of {values['gpus_per_node']} GPUs and copies them, but --num-gpus "
            f"{values['num_gpus']} does not fill two; type --dp-shard-size for smaller groups, or --sharding fsdp."
        )
    if group < 2:
        raise InputError(
            "--sharding hsdp shards inside machines, each of which has 1 GPU of data parallelism here: there is "
            "nothing to shard; type --dp-shard-size, or --sharding fsdp."
        )
    if copies % group:
        raise InputError(
            f"--sharding hsdp copies whole machines of {values['gpus_per_node']} GPUs, but {copies} GPUs of data "
            f"parallelism do not divide into groups of {group}; use --sharding fsdp, --dp-shard-size, or change "
            "--gpus-per-node."
        )
    if machine % group and group % machine:
        raise NotSupportedError(
            f"Groups of {group} GPUs that fill machines of {machine} unevenly are not built; choose --dp-shard-size so "
            "that one divides the other."
        )
