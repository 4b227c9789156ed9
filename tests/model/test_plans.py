"""Plans of a job: the batch they keep, how they split it, and what is left untried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.engine_memory import memory_of
from tunecast.model.plans import Job, best_plans, global_batch, gpu_counts, lines, plans_that_may_fit, refused_spreads
from tunecast.model.resolve import resolve_run
from tunecast.model.target import resolve_targets
from tunecast.model.units import GIB


def job(architecture: Architecture, *, batch: int, counts: tuple[int, ...] = (1, 2), method: str = "lora") -> Job:
    return Job(
        architecture=architecture,
        options={"max_length": 512},
        option_origins={},
        methods=(method,),
        counts=counts,
        batch=global_batch({}, counts, batch),
    )


(CARD,) = resolve_targets(["a100-sxm4-80gb"], {})


def test_counts_double_up_to_the_most() -> None:
    assert gpu_counts(8) == (1, 2, 4, 8)
    assert gpu_counts(6) == (1, 2, 4)
    with pytest.raises(InputError, match="max-gpus"):
        gpu_counts(0)


def test_the_batch_is_the_product_of_what_was_given_else_a_sample_per_gpu() -> None:
    assert global_batch({}, (1, 2, 4, 8)).samples == 8
    assert global_batch({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, (1, 2)).samples == 16
    assert global_batch({"num_gpus": 4, "gradient_accumulation_steps": 2}, (1, 2)).samples == 8
    assert global_batch({"per_device_train_batch_size": 2}, (1,), 24).samples == 24


def test_a_sharded_job_of_an_unknown_number_of_gpus_has_no_global_batch() -> None:
    asked = {"per_device_train_batch_size": 2, "sharding": "zero3"}
    with pytest.raises(InputError, match="nothing says how many GPUs it has"):
        global_batch(asked, (1, 2))
    assert global_batch({**asked, "num_gpus": 8}, (1, 2)).samples == 16
    assert global_batch(asked, (1, 2), 64).samples == 64
    assert global_batch({"sharding": "zero3"}, (1, 2, 4)).samples == 4


def test_every_split_of_the_batch_is_a_plan_when_memory_is_no_limit(make: Callable[..., Architecture]) -> None:
    plans = plans_that_may_fit(job(make("qwen2.5-0.5b"), batch=6), CARD, roomiest_bytes=1e15)
    runs = [plan.run for plan in plans]
    assert all(run.per_device_train_batch_size * run.gradient_accumulation_steps * run.num_gpus == 6 for run in runs)
    alone = {(r.per_device_train_batch_size, r.gradient_checkpointing) for r in runs if r.num_gpus == 1}
    assert alone == {(size, on) for size in (1, 2, 3, 6) for on in (True, False)}
    assert {r.sharding for r in runs if r.num_gpus == 2} == {"ddp", "zero1", "zero2", "fsdp", "zero3"}


def test_what_is_left_untried_would_not_have_fitted(make: Callable[..., Architecture]) -> None:
    architecture = make("qwen2.5-7b")
    roomiest = 40 * GIB
    asked = job(architecture, batch=16, counts=(1,))
    kept = {
        (plan.run.gradient_checkpointing, plan.run.per_device_train_batch_size)
        for plan in plans_that_may_fit(asked, CARD, roomiest_bytes=roomiest)
    }
    for checkpointing in (True, False):
        for size in (1, 2, 4, 8, 16):
            options = {"method": "lora", "max_length": 512, "gradient_checkpointing": checkpointing}
            options |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": 16 // size}
            needed = memory_of(architecture, [resolve_run(architecture, options).run], "cuda").allocated_bytes[0]
            assert ((checkpointing, size) in kept) == (needed <= roomiest)


def test_the_simplest_layout_is_kept_unless_another_is_clearly_faster(make: Callable[..., Architecture]) -> None:
    plans = plans_that_may_fit(job(make("qwen2.5-0.5b"), batch=2), CARD, roomiest_bytes=1e15)
    several = [row for row, plan in enumerate(plans) if plan.run.num_gpus == 2]
    seconds = np.full(len(plans), 10.0)
    allowed = np.ones(len(plans), dtype=bool)
    by_sharding = {plans[row].run.sharding: row for row in several}
    seconds[by_sharding["zero2"]] = 9.95
    assert plans[best_plans(plans, seconds, allowed)["lora", 2]].run.sharding == "ddp"
    seconds[by_sharding["fsdp"]] = 5.0
    assert plans[best_plans(plans, seconds, allowed)["lora", 2]].run.sharding == "fsdp"
    allowed[[row for row in several if plans[row].run.sharding == "fsdp"]] = False
    assert plans[best_plans(plans, seconds, allowed)["lora", 2]].run.sharding == "ddp"


def test_spreads_that_resolving_refuses_are_told_and_others_are_not(make: Callable[..., Architecture]) -> None:
    small = make("qwen2.5-0.5b")
    options = {"max_length": 512, "sharding": "zero3", "quant_method": "bnb-8bit"}
    asked = replace(job(small, batch=4), options=options, methods=("qlora",))
    (told,) = refused_spreads(asked)
    assert "qlora" in told
    assert "ZeRO-3 of a bnb-8bit base" in told
    assert not refused_spreads(job(small, batch=4, method="qlora"))
    assert not refused_spreads(job(small, batch=4, method="qlora", counts=(1,)))


def test_the_plan_that_accumulates_nothing_is_tried_though_smaller_micro_batches_do_not_fit() -> None:
    """70B over 64 GPUs by FSDP: between two micro-batches whole gradients of 70B parameters are held, with one of two
    samples none."""
    asked = {"max_length": 4096, "max_steps": 1, "sharding": "fsdp"}
    (target,) = resolve_targets(["h100-sxm5-80gb"], {})
    job = Job(
        architecture=load_architecture("meta-llama/Llama-3.1-70B"),
        options=asked,
        option_origins={},
        methods=("full",),
        counts=(64,),
        batch=global_batch(asked, (64,), 128),
    )
    runs = [plan.run for plan in plans_that_may_fit(job, target, roomiest_bytes=79e9)]
    assert {(run.per_device_train_batch_size, run.gradient_accumulation_steps) for run in runs} == {(2, 1)}


def test_plans_over_several_machines_copy_shards_too_and_all_try_zero3() -> None:
    def tried(count: int, **options: Any) -> set[str]:
        return {line.sharding for line in lines(options, ("full",), (count,), 16)}

    assert tried(8) == {"ddp", "zero1", "zero2", "fsdp", "zero3"}
    assert tried(16) == {"ddp", "zero1", "zero2", "fsdp", "hsdp", "zero3"}
    assert tried(16, sharding="fsdp") == {"fsdp"}
    assert "hsdp" not in tried(16, gpus_per_node=16)
