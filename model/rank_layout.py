"""Which GPUs of a split model are on one machine, and which layers a stage of it has.

Ranks are laid out with tensor parallelism innermost, then context, then data, then pipeline parallelism (Megatron's
and torchtitan's order), so that a group whose members are `stride` ranks apart has gpus_per_node / stride of them on
a machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tunecast.model.architecture import LayerGroup
from tunecast.model.run import Run


def stage_groups(groups: Iterable[LayerGroup], start: int, stop: int) -> tuple[LayerGroup, ...]:
    """Layers `start` to `stop`, equal neighbours together."""
    found, at = [], 0
    for group in groups:
        count = min(stop, at + group.count) - max(start, at)
        if count > 0:
            found.append(replace(group, count=count))
        at += group.count
    return tuple(found)


def members_per_node(run: Run, group: int, stride: int) -> int:
    """Members of a group on one machine, whose ranks are `stride` apart."""
    return max(1, min(group, run.gpus_per_node // stride))


def ends_per_node(run: Run) -> int:
    """Of two stages how many are on one machine: where the stages are on several, some neighbours are apart, and a
    pipeline is as fast as its slowest stage."""
    return 2 if run.num_gpus <= run.gpus_per_node else 1


def stage_on_node(run: Run) -> int:
    """GPUs of one stage on one machine: they exchange at once with those of another stage."""
    return min(run.tp * run.cp * run.dp, run.gpus_per_node)


def rings_on_node(run: Run) -> int:
    """GPUs of one machine that pass keys and values to another at once: one of each ring that leaves it."""
    return max(1, min(run.gpus_per_node, run.num_gpus) // members_per_node(run, run.cp, run.tp))
