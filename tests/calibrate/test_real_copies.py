"""What sharding copies inside a GPU's memory, against two real processes (gloo, CPU) and a record of DeepSpeed's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ci_share import run_here, some_for_ci
from gloo_processes import Held, held_by_each

from tunecast.model.architectures import architecture_from_config
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind, Operation
from tunecast.model.resolve import resolve_run
from tunecast.model.sharded_update import own_update
from tunecast.model.sharding_copies import copy_operations

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048, "max_position_embeddings": 4096,
}  # fmt: skip
COMMON = {"num_gpus": 2, "max_length": 48, "precision": "bf16"}
FULL = {**COMMON, "method": "full"}
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {**FULL, "sharding": "ddp"},
    "ddp-lora": {**COMMON, "method": "lora", "sharding": "ddp", "adapter_dtype": "bf16"},
    "fsdp2": {**FULL, "sharding": "fsdp"},
    "fsdp2-wide": {**FULL, "sharding": "fsdp", "reduce_dtype": "fp32"},
    "fsdp2-lora": {**COMMON, "method": "lora", "sharding": "fsdp"},
    "fsdp2-grad-op": {**FULL, "sharding": "fsdp-grad-op"},
    "fsdp2-master": {**FULL, "sharding": "fsdp", "master_dtype": "fp32", "reduce_dtype": "fp32"},
    "fsdp2-summed": {**FULL, "sharding": "fsdp", "gradient_accumulation_steps": 3},
    "fsdp2-wide-summed": {**FULL, "sharding": "fsdp", "reduce_dtype": "fp32", "gradient_accumulation_steps": 3},
    "fsdp2-sum-of-shards": {
        **FULL, "sharding": "fsdp", "gradient_accumulation_steps": 3, "sync_each_micro_batch": True,
    },
    "fsdp1": {**FULL, "sharding": "fsdp", "fsdp_version": 1},
    "fsdp1-wide": {**FULL, "sharding": "fsdp", "fsdp_version": 1, "reduce_dtype": "fp32"},
    "fsdp1-master": {**FULL, "sharding": "fsdp", "fsdp_version": 1, "master_dtype": "fp32"},
    "fsdp1-summed": {**FULL, "sharding": "fsdp", "fsdp_version": 1, "gradient_accumulation_steps": 3},
    "fsdp1-sum-of-shards": {
        **FULL, "sharding": "fsdp", "fsdp_version": 1, "gradient_accumulation_steps": 3, "sync_each_micro_batch": True,
    },
    "fsdp1-grad-op": {**FULL, "sharding": "fsdp-grad-op", "fsdp_version": 1, "master_dtype": "fp32"},
    "fsdp1-grad-op-summed": {
        **FULL, "sharding": "fsdp-grad-op", "fsdp_version": 1, "master_dtype": "fp32", "gradient_accumulation_steps": 3,
    },
    "ddp-summed": {**FULL, "sharding": "ddp", "gradient_accumulation_steps": 3},
}  # fmt: skip
NAMES = some_for_ci(RUNS, 3)
FOUR: dict[str, dict[str, Any]] = {
    "fsdp1": {**FULL, "num_gpus": 4, "sharding": "fsdp", "fsdp_version": 1},
    "fsdp2": {**FULL, "num_gpus": 4, "sharding": "fsdp"},
    "ddp": {**FULL, "num_gpus": 4, "sharding": "ddp"},
}
NAMES_OF_FOUR = some_for_ci(FOUR, 3, first=1)
ALIGNED = 0.005
"""Our sizes are rounded up to the allocator's blocks, theirs are not."""
RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "deepspeed_copies.json").read_text("utf-8")
)
"""What DeepSpeed did in two processes, by scripts/deepspeed_copies.py."""


def added_up(operations: Iterable[Operation]) -> Counter[str]:
    """Bytes and launches by name."""
    found = Counter[str]()
    for each in operations:
        found[f"{each.name} bytes"] += round(each.total_bytes)
        found[f"{each.name} launches"] += round(each.total_launches)
    return found


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """What each of two processes copied, by run."""
    runs = {name: RUNS[name] for name in run_here(NAMES)}
    return held_by_each("copies_worker.py", tmp_path_factory.mktemp("copies"), 2, CONFIG, runs)


@pytest.fixture(scope="module")
def held_by_four(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """What each of four copied."""
    runs = {name: FOUR[name] for name in run_here(NAMES_OF_FOUR)}
    return held_by_each("copies_worker.py", tmp_path_factory.mktemp("four"), 4, CONFIG, runs)


def compared(held: Held, name: str, options: dict[str, Any]) -> None:
    """Bytes and kernels of every copy are those that each process ran, and none is missing on either side."""
    architecture = architecture_from_config(CONFIG, "copied")
    run = resolve_run(architecture, options).run
    ours = {key: value for key, value in added_up(copy_operations(architecture, run)).items() if value}
    for process in held:
        seen = process[name]
        assert seen.keys() == ours.keys()
        for key in seen:
            assert ours[key] == pytest.approx(seen[key], rel=ALIGNED if key.endswith("bytes") else 0.0), key


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_copies_are_those_of_real_processes(held: Held, name: str) -> None:
    compared(held, name, RUNS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES_OF_FOUR)
def test_copies_are_those_of_four_processes(held_by_four: Held, name: str) -> None:
    compared(held_by_four, name, FOUR[name])


OFFLOADED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "deepspeed_offload.json").read_text("utf-8")
)
"""The same with states in the host, by scripts/deepspeed_offload.py."""
OF_GRADIENTS = {"fp64": ("zero.fp64",), "norm": ("zero.norm",), "widen": ("zero.widen",), "check": ("zero.check",),
                "scalar": ("zero.scalar",), "sum": ("shard.sum",), "bus": ("zero.send",)}  # fmt: skip
"""Our names of what a gradient goes through on its way to the host."""


def offloaded_case(sharding: str, micro: int) -> tuple[Any, Any]:
    """Architecture and run of what was recorded."""
    architecture = architecture_from_config(OFFLOADED["config"], "recorded")
    options = {**FULL, "num_gpus": OFFLOADED["processes"], "gradient_accumulation_steps": micro}
    return architecture, resolve_run(architecture, {**options, "sharding": sharding, "offload": "optimizer"}).run


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("micro", [1, 2])
def test_offloaded_gradients_are_those_of_deepspeed(sharding: str, micro: int) -> None:
    """Kernels within 4%, bytes within 3%: a gradient that two GPUs share counts as a part more, here or there."""
    architecture, run = offloaded_case(sharding, micro)
    ours = added_up(step_operations(architecture, run))
    for process in OFFLOADED["by_process"]:
        seen = process[f"{sharding}, {micro}"]["gradients"]
        seen["scalar launches"] += seen.get("read launches", 0)
        for unit in ("bytes", "launches"):
            seen[f"bus {unit}"] = seen[f"to host {unit}"] + seen.get(f"to gpu {unit}", 0)
        if sharding == "zero1":
            seen |= {"sum launches": ours["shard.sum launches"], "sum bytes": ours["shard.sum bytes"]}  # elsewhere
        for purpose, names in OF_GRADIENTS.items():
            launches, moved = (sum(ours[f"{name} {unit}"] for name in names) for unit in ("launches", "bytes"))
            assert launches == pytest.approx(seen.get(f"{purpose} launches", 0), rel=0.04), purpose
            if purpose not in ("scalar", "bus"):
                assert moved == pytest.approx(seen.get(f"{purpose} bytes", 0), rel=0.03), purpose
        assert "zero.keep launches" not in ours


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("micro", [1, 2])
def test_what_crosses_the_bus_and_what_the_host_moves_are_those_of_deepspeed(sharding: str, micro: int) -> None:
    architecture, run = offloaded_case(sharding, micro)
    ours = added_up(step_operations(architecture, run))
    for process in OFFLOADED["by_process"]:
        parts = process[f"{sharding}, {micro}"]
        crossed = sum(part.get(f"{way} bytes", 0) for part in parts.values() for way in ("to host", "to gpu"))
        assert ours["host.copy bytes"] == pytest.approx(crossed, rel=0.03)
        moved = parts["step"]["in host bytes"]
        if sharding == "zero3":  # which leaves the cast of new weights to the copy to the GPU, made in the host
            moved += 3 * parts["step"]["to gpu bytes"]
        assert ours["host.update bytes"] == pytest.approx(moved, rel=0.03)


PURPOSES = {
    "copy": ("zero.to_bucket", "zero.from_bucket", "zero.keep"),
    "divide": ("zero.divide",),
    "flatten": ("zero.flatten",),
    "sum": ("shard.sum",),
}
"""Our names of what DeepSpeed copies in forward and backward."""
OF_UPDATE = {"fp64": "zero.fp64", "norm": "zero.norm", "flatten": "zero.flatten", "widen": "zero.widen",
             "clip": "zero.clip", "narrow": "master.copy"}  # fmt: skip


def zero_case(sharding: str, **bucket: int) -> tuple[Any, Any]:
    """Architecture and run of what was recorded."""
    architecture = architecture_from_config(RECORD["config"], "recorded")
    options = {**FULL, "num_gpus": RECORD["processes"], "gradient_accumulation_steps": RECORD["micro_batches"]}
    return architecture, resolve_run(architecture, {**options, **bucket, "sharding": sharding}).run


def compared_with_deepspeed(sharding: str, case: str, **bucket: int) -> None:
    """Bytes within 3%, and kernels: tensors that two GPUs share are a part more, here or there."""
    ours = added_up(copy_operations(*zero_case(sharding, **bucket)))
    for process in RECORD["by_process"]:
        seen = process[case]["backward"]
        for purpose in ("copy", "divide", "flatten", *(["sum"] if sharding != "zero1" else [])):
            own = {unit: sum(ours[f"{name} {unit}"] for name in PURPOSES[purpose]) for unit in ("bytes", "launches")}
            assert own["bytes"] == pytest.approx(seen[f"{purpose} bytes"], rel=0.03), purpose
            assert own["launches"] == pytest.approx(seen[f"{purpose} launches"], abs=3), purpose


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_buckets_are_those_of_deepspeed(sharding: str) -> None:
    compared_with_deepspeed(sharding, sharding)


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_a_bucket_of_one_owner_is_not_flattened(sharding: str) -> None:
    """In buckets of a few tensors only the one in the middle has parts of both GPUs."""
    compared_with_deepspeed(sharding, f"{sharding} in small buckets", reduce_bucket_size=1_500_000)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_update_around_fp32_copies_is_that_of_deepspeed(sharding: str) -> None:
    ours = added_up(list(own_update(*zero_case(sharding))))
    for process in RECORD["by_process"]:
        seen = process[sharding]["step"]
        for purpose, name in OF_UPDATE.items():
            if f"{purpose} bytes" in seen:
                assert ours[f"{name} bytes"] == pytest.approx(seen[f"{purpose} bytes"], rel=0.03), purpose
    assert seen.keys() >= {f"{purpose} launches" for purpose in OF_UPDATE if sharding == "zero3" or purpose != "clip"}


def test_deepspeed_on_one_gpu_updates_fp32_copies_too() -> None:
    """A single process has both parts of what two were recorded to do, and nothing to gather."""
    architecture, run = zero_case("zero3")
    alone = replace(run, num_gpus=1)
    of_two, of_one = (sum(op.total_bytes for op in own_update(architecture, each)) for each in (run, alone))
    assert of_one == pytest.approx(2 * of_two, rel=0.01)
    names = {op.name for op in step_operations(architecture, alone)}
    assert names >= {"zero.to_bucket", "shard.sum", "master.copy"}
    assert not any(op.kind is Kind.COMMUNICATION for op in step_operations(architecture, alone))


def test_many_gpus_update_their_shares_in_few_kernels() -> None:
    """A launch takes 320 chunks of 65,536 elements: one GPU's 7B fills hundreds of them, a share of 128 GPUs a few."""
    architecture = architecture_from_config({**CONFIG, "hidden_size": 4096, "intermediate_size": 11008,
                                             "num_hidden_layers": 32, "num_attention_heads": 32}, "large")  # fmt: skip

    def launches(gpus: int) -> float:
        run = resolve_run(architecture, {"method": "full", "num_gpus": gpus, "sharding": "fsdp"}).run
        return sum(op.total_launches for op in own_update(architecture, run) if op.name.startswith("adamw."))

    chunks = 7 * architecture.total_params / 65536 / 320  # of seven multi-tensor operations
    assert launches(2) == pytest.approx(chunks / 2, rel=0.15)
    tensors = 9 * architecture.num_layers + 3
    assert launches(128) <= 7 * (tensors / 30 + 2)
