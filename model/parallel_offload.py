"""States, gradients and parameters in host memory: what leaves the GPU, and what that costs over PCIe.

``optimizer``: DeepSpeed's ``offload_optimizer``. Gradients go to the host as they are reduced (how often:
`offloaded_gradients`), the processors scale and update in fp32, and new 16-bit parameters come back. ``all``:
DeepSpeed's ``offload_param`` as well, or FSDP's ``CPUOffloadPolicy``: each GPU's shard of parameters lives in the host
and is copied in before it is gathered, once for the forward and once for the backward of every micro-batch.

Sources: DeepSpeed 0.19.8, recorded in two processes (``tests/fixtures/deepspeed_offload.json``); Ren et al. 2021
(ZeRO-Offload, arXiv 2101.06840, section 4), Rajbhandari et al. 2021 (ZeRO-Infinity, arXiv 2104.07857), PyTorch
``CPUOffloadPolicy``. Left out: delayed parameter updates, NVMe, pageable transfers, a host that is short of memory (its
need is a note).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from tunecast.catalogs.gpus import Gpu
from tunecast.model.architecture import Architecture, layer_kinds
from tunecast.model.factors import Factor, FactorSet
from tunecast.model.links import HOST_UPDATE, PAGING
from tunecast.model.memory_static import root_weight_bytes
from tunecast.model.offloaded_gradients import SENT_BYTES, sent_bytes_per_param
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.priors import load_priors, pcie_bytes_per_s
from tunecast.model.read_numbers import number_above_zero
from tunecast.model.run import Run
from tunecast.model.sharding import ZERO, holds_whole, one_layer_bytes, root_trained_bytes, shard_gpus
from tunecast.model.trained import trained_dtype, trained_tensors
from tunecast.model.units import DTYPE_BYTES, GIGA, memory_text

HOST_RATE = "host_update_gb_per_s"
"""Option that states how many bytes of host memory the update of one machine moves: its memory bandwidth at most."""
OFFLOAD_FACTORS = ("pcie_bytes_per_s", "host_update_bytes_per_s")
DEEPSPEED = (*ZERO, "none")
"""Shardings that keep fp32 masters; on one GPU only DeepSpeed offloads, by the rules of its stages 2 and 3."""
HOST_SCALING_BYTES = 8
"""DeepSpeed's clipping, which reads and writes an fp32 gradient (``unscale_and_clip_grads``)."""
HOST_COPY_BYTES = 6
"""New fp32 weights read, and written in 16 bits."""
REDUCED_AT_ONCE = ("zero2", "zero3", "none")
"""Whose gradients leave after every micro-batch."""
PAGING_WAYS = 2
"""Paged state that does not fit comes in, and goes out again."""
ADAM_FP32_BYTES = 12
"""Master weight and two moments."""
GRADIENT_FP32_BYTES = 4
FUSED_PASSES = 7
"""Reads and writes of a whole tensor in torch's fused AdamW: gradient, weight, two moments, all but the first out."""
SEPARATE_PASSES = 20
"""The same where every operation is one of its own, as on processors unless fused is asked for: torch 2.13
``optim/adam.py`` (``_single_tensor_adam``; ``foreach`` is for accelerators alone), counted by a test."""


@cache
def host_facts() -> dict[str, Any]:
    """The shipped figures of hosts."""
    text = files("tunecast.model").joinpath("data", "hosts.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


def offloaded_parts(run: Run) -> frozenset[str]:
    """Parts of the memory ledger that live in the host."""
    parts = {
        "none": (),
        "optimizer": ("optimizer_state", "scratch"),
        "all": ("optimizer_state", "scratch", "weights", "adapters", "gradients"),
    }[run.offload]
    return frozenset(parts)


def offloaded(parts: Mapping[str, int], run: Run, moment: str) -> dict[str, int]:
    """The parts that stay on the GPU. Gradients of ZeRO-2 and -3 leave with the optimizer, as they are reduced; whole
    ones that FSDP holds until the last micro-batch stay so long (``foreach_reduce`` moves shards alone).

    Scratch is the update's own at its moment only; elsewhere it is dequantized weights, which stay.
    """
    gone = set(offloaded_parts(run))
    if run.offload == "optimizer" and run.sharding in REDUCED_AT_ONCE:
        gone.add("gradients")
    if moment != "optimizer":
        gone.discard("scratch")
    if moment != "optimizer" and holds_whole(run):
        gone.discard("gradients")
    return {part: 0 if part in gone else n for part, n in parts.items()}


def trained_params(architecture: Architecture, run: Run) -> int:
    """Elements that one update changes."""
    return sum(tensor.elements for tensor in trained_tensors(architecture, run))


def parameter_bytes(architecture: Architecture, run: Run) -> int:
    """All parameters, whole: weights, packed ones without their statistics (which are none), adapters."""
    layers = sum(
        group.count * one_layer_bytes(group.layer, architecture.hidden_size, run) for group in layer_kinds(architecture)
    )
    adapted = root_trained_bytes(architecture, run) if run.has_adapters else 0
    return root_weight_bytes(architecture, run) + adapted + layers


def host_bytes_per_machine(architecture: Architecture, run: Run) -> int:
    """Host memory that one machine needs for what is offloaded: fp32 states and gradients, parameters if they are."""
    trained = trained_params(architecture, run)
    fp32 = run.sharding in DEEPSPEED
    per_param = ADAM_FP32_BYTES if fp32 else 2 * DTYPE_BYTES[trained_dtype(run)]
    total = trained * (per_param + (GRADIENT_FP32_BYTES if fp32 else DTYPE_BYTES[trained_dtype(run)]))
    if run.offload == "all":
        total += parameter_bytes(architecture, run)
    return total * min(run.gpus_per_node, run.num_gpus) // shard_gpus(run)


def host_need_bytes(architecture: Architecture, run: Run) -> int:
    """Host memory that one machine needs for what does not stay on its GPUs: what is offloaded, or paged out."""
    if run.offload != "none":
        return host_bytes_per_machine(architecture, run)
    return run.paged_bytes * min(run.gpus_per_node, run.num_gpus)


def update_bytes_per_param(run: Run) -> int:
    """Bytes of host memory that AdamW's update moves per parameter: it reads the gradient, the weight and two moments
    and writes all but the gradient. DeepSpeed's are fp32, gradients are scaled before and a 16-bit copy is made after;
    FSDP's have the trained dtype, and torch goes over them operation by operation unless it is told to fuse
    (`SEPARATE_PASSES`)."""
    if run.sharding in DEEPSPEED:
        return HOST_SCALING_BYTES + GRADIENT_FP32_BYTES + 2 * ADAM_FP32_BYTES + HOST_COPY_BYTES
    return (SEPARATE_PASSES if updates_by_operation(run) else FUSED_PASSES) * DTYPE_BYTES[trained_dtype(run)]


def updates_by_operation(run: Run) -> bool:
    """Whether torch updates offloaded states without fusing its operations."""
    return run.sharding not in DEEPSPEED and run.optim != "adamw_torch_fused"


def host_operation(name: str, phase: Phase, amount: float, *, count: float, blocking: bool = False) -> Operation:
    """`count` copies of so many bytes (``host.copy``), or updates that move so many in the host (`HOST_UPDATE`)."""
    return Operation(
        name=name,
        kind=Kind.COMMUNICATION,
        phase=phase,
        bytes=amount,
        count=count,
        group=1,
        group_per_node=1,
        blocking=blocking,
    )


def host_operations(architecture: Architecture, run: Run) -> list[Operation]:
    """What crosses PCIe in a step on one GPU, and its part of the update on the host.

    Paged state that does not fit (`paging`) comes in and goes out again.
    """
    if run.paged_bytes:
        return [host_operation(PAGING, Phase.OPTIMIZER, run.paged_bytes, count=PAGING_WAYS, blocking=True)]
    if run.offload == "none":
        return []
    members, micro = shard_gpus(run), run.gradient_accumulation_steps
    share, size = trained_params(architecture, run) / members, DTYPE_BYTES[trained_dtype(run)]
    if run.sharding in DEEPSPEED:
        size, out = SENT_BYTES, host_operation("host.copy", Phase.BACKWARD, share * sent_bytes_per_param(run), count=1)
    else:
        out = host_operation("host.copy", Phase.BACKWARD, share * size, count=micro if run.sync_each_micro_batch else 1)
    found = [
        out,
        host_operation(HOST_UPDATE, Phase.OPTIMIZER, share * update_bytes_per_param(run), count=1, blocking=True),
    ]
    if run.offload == "optimizer":
        return [*found, host_operation("host.copy", Phase.OPTIMIZER, share * size, count=1, blocking=True)]
    shard = parameter_bytes(architecture, run) / members
    return [
        *found,
        *(host_operation("host.copy", phase, shard, count=micro) for phase in (Phase.FORWARD, Phase.BACKWARD)),
    ]


def with_host(
    factors: FactorSet,
    architecture: Architecture,
    run: Run,
    gpu: Gpu | None,
    *,
    reached: Mapping[str, float] | None = None,
    options: Mapping[str, Any] | None = None,
) -> FactorSet:
    """The factors with those of the host, where something lives in it; PCIe reaches what the link does (assumed).

    `reached` is that part; None: the shipped priors'. `options` may state the rate of the host's update.
    """
    if gpu is None or (run.offload == "none" and not run.paged_bytes):
        return factors
    added = {}
    rate = pcie_bytes_per_s(gpu)
    if rate is not None and "pcie_bytes_per_s" not in factors.factors:
        reached = load_priors()["efficiency"]["link"] if reached is None else reached
        added["pcie_bytes_per_s"] = Factor(
            value=rate * reached["value"],
            low=rate * reached["low"],
            high=rate * reached["high"],
            unit="B/s",
            origin="assumed",
        )
    if run.offload == "none":
        return replace(factors, factors={**factors.factors, **added})
    known = host_facts()["update_bytes_per_s"]
    added["host_update_bytes_per_s"] = Factor(**{k: known[k] for k in ("value", "low", "high", "unit", "origin")})
    given = (options or {}).get(HOST_RATE)
    if given is not None:
        rate = number_above_zero("--host-update-gb-per-s", given, "100") * GIGA
        added["host_update_bytes_per_s"] = Factor(value=rate, low=rate, high=rate, unit="B/s", origin="given")
    need = memory_text(host_bytes_per_machine(architecture, run))
    note = f"offloaded: each machine needs {need} of host memory for it, and its processors do the update"
    if updates_by_operation(run):
        note += f", in {SEPARATE_PASSES} passes over it ({FUSED_PASSES} with --optim adamw_torch_fused)"
    if given is None:
        note += f", at {known['value'] / GIGA:.0f} GB/s, whatever the machine (--host-update-gb-per-s)"
    return replace(factors, factors={**factors.factors, **added}, notes=(*factors.notes, note))
