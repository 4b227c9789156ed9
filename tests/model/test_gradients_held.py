"""Gradients that a GPU of several holds: whole while micro-batches wait for the last, shares when they are updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.memory import memory_timeline
from tunecast.model.run import Run
from tunecast.model.units import GIB

RunOf = Callable[..., Run]
FULL = {"method": "full", "max_length": 512, "gradient_checkpointing": True}
WAITING = {**FULL, "num_gpus": 8, "sharding": "fsdp", "gradient_accumulation_steps": 4}


@pytest.fixture(scope="module")
def llama() -> Architecture:
    return load_architecture("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_deepspeed_casts_its_share_to_fp32_before_it_updates(llama: Architecture, run_of: RunOf, sharding: str) -> None:
    """Beyond weights and states 8 bytes for each element of a share, as DeepSpeed 0.19.8 held them in two processes:
    the share, flat, and in fp32; then fp32 gradients and AdamW's square roots. Buckets and whole gradients are gone."""
    found = memory_timeline(llama, run_of(llama, **FULL, num_gpus=2, sharding=sharding))
    held = found.moments["optimizer"] - found.at_rest_bytes
    assert held == pytest.approx(8 * llama.total_params / 2, rel=0.001)


def test_zero3_updates_a_billion_elements_at_a_time(llama: Architecture, run_of: RunOf) -> None:
    """Stage 3 casts one sub-group (``sub_group_size`` 1e9); 16-bit gradients of its share are at rest with a bucket."""
    of_two, of_sixteen = (
        memory_timeline(llama, run_of(llama, **FULL, num_gpus=gpus, sharding="zero3")) for gpus in (2, 16)
    )
    share = llama.total_params / 2
    assert of_two.moments["optimizer"] - of_two.at_rest_bytes == pytest.approx(8e9, rel=0.001)
    share = llama.total_params / 16
    assert of_sixteen.moments["optimizer"] - of_sixteen.at_rest_bytes == pytest.approx(8 * share, rel=0.001)


@pytest.mark.parametrize(
    ("options", "bytes_each"),
    [
        ({}, 2),
        ({"reduce_dtype": "fp32"}, 4),
        ({"master_dtype": "fp32"}, 2),
        ({"master_dtype": "fp32", "reduce_dtype": "fp32"}, 4),
        ({"offload": "all"}, 2),
        ({"offload": "all", "reduce_dtype": "fp32"}, 4),
    ],
)
def test_whole_gradients_of_fsdp_have_the_dtype_they_are_added_in(
    llama: Architecture, run_of: RunOf, options: dict[str, Any], bytes_each: int
) -> None:
    """``to_accumulated_grad_if_needed``: the reduction's. fp32 masters and offloading concern shards alone, which are
    what is left at the update."""
    run = run_of(llama, **WAITING, **options)
    found = memory_timeline(llama, run)
    assert found.parts_bytes["gradients"] == pytest.approx(bytes_each * llama.total_params, rel=0.001)
    synced = run_of(llama, **WAITING, **options, sync_each_micro_batch=True)
    assert found.moments["optimizer"] == memory_timeline(llama, synced).moments["optimizer"]


def test_more_gpus_never_need_more_where_all_is_offloaded(llama: Architecture, run_of: RunOf) -> None:
    needed = [
        memory_timeline(llama, run_of(llama, **FULL, sharding="fsdp", offload="all", num_gpus=gpus)).allocated_bytes
        for gpus in (4, 8, 16)
    ]
    assert needed == sorted(needed, reverse=True)


def test_buckets_that_alternate_are_two(llama: Architecture, run_of: RunOf) -> None:
    one, two = (
        memory_timeline(llama, run_of(llama, **FULL, num_gpus=2, sharding="zero2", overlap_comm=overlap))
        for overlap in (False, True)
    )
    assert two.moments["backward"] - one.moments["backward"] == 2 * 500_000_000
    assert two.moments["forward"] == one.moments["forward"]


def test_packed_weights_leave_for_the_host_with_the_others(run_of: RunOf) -> None:
    """FSDP offloads parameters, 4-bit ones too: Answer.AI's 70B on two cards of 24 GB (14.92 GiB reserved)."""
    llama = load_architecture("meta-llama/Llama-2-70b-hf")
    options = {"method": "qlora", "num_gpus": 2, "sharding": "fsdp", "max_length": 2048, "gradient_checkpointing": True}
    options |= {"per_device_train_batch_size": 2, "lora_r": 64, "hf_code": "4.45"}
    here, there = (memory_timeline(llama, run_of(llama, **options, offload=where)) for where in ("none", "all"))
    assert there.parts_bytes["quantized"] < 0.15 * here.parts_bytes["quantized"], "the statistics alone stay"
    assert there.allocated_bytes < 14.92 * GIB
