"""What sharding keeps on each GPU and what it sends, by hand and as properties."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.collectives import communication_operations
from tunecast.model.inventory import step_operations
from tunecast.model.joined import joined
from tunecast.model.memory import memory_timeline, moment_parts
from tunecast.model.operation import Kind, Operation
from tunecast.model.run import Run
from tunecast.model.sharding import SHARDS
from tunecast.model.zero_memory import zero_master_bytes

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]
SHARDED = ("zero1", "zero2", "zero3", "fsdp")


def sent(arch: Architecture, run: Run, name: str) -> float:
    return sum(op.total_bytes for op in collectives(arch, run) if op.name == name)


def collectives(arch: Architecture, run: Run) -> list[Operation]:
    return [op for op in step_operations(arch, run) if op.kind is Kind.COMMUNICATION]


def test_one_gpu_sends_nothing(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b", 8)
    assert collectives(llama, run_of(llama)) == []
    assert memory_timeline(llama, run_of(llama)).parts_bytes["communication"] == 0


def test_ddp_reduces_every_gradient_once_in_buckets(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    run = run_of(llama, num_gpus=4, sharding="ddp", gradient_accumulation_steps=8)
    assert sent(llama, run, "all_reduce") == pytest.approx(41_943_040 * 4), "fp32 adapters, once per step"
    largest_adapter = 16 * 14_336 * 4
    assert all(op.bytes < 25 * 2**20 + largest_adapter for op in collectives(llama, run)), "a bucket ends above 25 MiB"
    assert [op.count for op in collectives(llama, run) if op.blocking] == [1], "the last is waited for, once per step"


@pytest.mark.parametrize("accumulation", [1, 4])
def test_zero_sends_gradients_out_and_parameters_back(make: Make, run_of: RunOf, accumulation: int) -> None:
    llama = make("llama-3.1-8b")
    whole = 2 * llama.total_params
    options = {"method": "full", "num_gpus": 8, "gradient_accumulation_steps": accumulation}
    zero1, zero2 = run_of(llama, sharding="zero1", **options), run_of(llama, sharding="zero2", **options)
    assert sent(llama, zero1, "all_reduce") == pytest.approx(whole)
    assert sent(llama, zero2, "all_reduce") == pytest.approx(accumulation * whole)
    assert sent(llama, zero1, "all_gather") == sent(llama, zero2, "all_gather") == pytest.approx(whole)
    assert all(op.blocking for op in collectives(llama, zero2)), "DeepSpeed's overlap_comm is off by default"


def test_with_overlap_comm_zero_waits_for_one_bucket_and_the_new_parameters(make: Make, run_of: RunOf) -> None:
    """Llama 3.1's table has 525 million elements, above DeepSpeed's bucket of 500 million: it goes by itself, last."""
    llama = make("llama-3.1-8b")
    run = run_of(llama, method="full", num_gpus=8, sharding="zero2", overlap_comm=True)
    found = collectives(llama, run)
    (waited,) = [op for op in found if op.blocking and op.name == "all_reduce"]
    assert waited.total_bytes == pytest.approx(2 * llama.embedding_params)
    assert sent(llama, run, "all_reduce") == pytest.approx(2 * llama.total_params)
    assert all(op.bytes <= 10**9 for op in found if not op.blocking and op.count > 1)


def test_megatrons_distributed_optimizer_scatters_and_gathers_beside_work(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    run = run_of(llama, method="full", num_gpus=8, sharding="zero1")
    found = communication_operations(joined(llama), run)
    assert {op.name for op in found} == {"reduce_scatter", "all_gather"}
    waited = [op for op in found if op.blocking]
    assert {op.name: op.total_bytes for op in waited} == pytest.approx(
        {"reduce_scatter": 2 * llama.embedding_params, "all_gather": 2 * llama.embedding_params}, rel=0.01
    )
    for name in ("reduce_scatter", "all_gather"):
        assert sum(op.total_bytes for op in found if op.name == name) == pytest.approx(2 * llama.total_params)


@pytest.mark.parametrize("sharding", ["zero3", "fsdp"])
def test_sharded_weights_are_gathered_twice_per_micro_batch(make: Make, run_of: RunOf, sharding: str) -> None:
    """accelerate gathers the table again for its gradient, and keeps the head; ZeRO-3 is taken to keep both."""
    llama = make("llama-3.1-8b")
    run = run_of(llama, method="full", num_gpus=8, sharding=sharding, gradient_accumulation_steps=3)
    table = 2 * llama.embedding_params
    layers = 2 * llama.total_params - 2 * table
    again = table if sharding == "fsdp" else 0
    assert sent(llama, run, "all_gather") == pytest.approx(3 * (2 * layers + 2 * table + again), rel=1e-3)
    reductions = 3 if sharding == "zero3" else 1
    assert sent(llama, run, "reduce_scatter") == pytest.approx(reductions * 2 * llama.total_params, rel=1e-3)


def test_units_outside_the_layers_are_those_of_each_framework(make: Make, run_of: RunOf) -> None:
    """torchtune's root goes after the loss and comes again; accelerate's tied unit stays (`test_real_sharding` runs
    both)."""
    untied, tied = make("llama-3.1-8b"), load_architecture("meta-llama/Llama-3.2-1B")
    options = {"method": "full", "num_gpus": 8, "sharding": "fsdp"}
    torchtune = {"stack": "torchtune", "loss_type": "nll"}
    table = 2 * untied.embedding_params
    layers = 2 * untied.total_params - 2 * table
    assert sent(untied, run_of(untied, **options, **torchtune), "all_gather") == pytest.approx(
        2 * layers + 4 * table, rel=1e-3
    )
    one_unit = 2 * tied.embedding_params
    layers = 2 * tied.total_params - one_unit
    assert sent(tied, run_of(tied, **options), "all_gather") == pytest.approx(2 * layers + one_unit, rel=1e-3)


def test_each_sharding_divides_what_it_says(make: Make, run_of: RunOf) -> None:
    """At rest a bf16 full fine-tune holds 2 bytes of weights and 4 of optimizer state per parameter."""
    llama = make("llama-3.1-8b")
    at_rest = {}
    for sharding in ("ddp", *SHARDED):
        run = run_of(llama, method="full", num_gpus=4, sharding=sharding, max_length=512)
        forecast = memory_timeline(llama, run)
        buckets = 2 * llama.total_params if sharding == "ddp" else 0  # DDP copies every gradient
        at_rest[sharding] = (forecast.at_rest_bytes - buckets) / llama.total_params
    assert at_rest["ddp"] == pytest.approx(6, rel=1e-2)
    assert at_rest["zero1"] == at_rest["zero2"] == pytest.approx(2 + 12 / 4, rel=1e-2), "DeepSpeed: 12 bytes shared out"
    kept = 2 / 4 + 1e9 / llama.total_params  # a share of gradients, and a bucket
    assert at_rest["zero3"] == pytest.approx((2 + 12) / 4 + kept, rel=1e-2)
    assert at_rest["fsdp"] == pytest.approx(6 / 4, rel=1e-2)


def test_fsdp_keeps_gradients_whole_while_accumulating(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    options = {"method": "full", "num_gpus": 8, "sharding": "fsdp", "max_length": 512}
    once = memory_timeline(llama, run_of(llama, **options))
    accumulating = memory_timeline(llama, run_of(llama, gradient_accumulation_steps=4, **options))
    assert accumulating.moments["forward"] - once.moments["forward"] == pytest.approx(2 * llama.total_params, rel=1e-2)
    assert accumulating.moments["optimizer"] == once.moments["optimizer"], "only shares are left"


@settings(max_examples=30, deadline=None)
@given(
    method=st.sampled_from(("lora", "full")),
    sharding=st.sampled_from(SHARDED),
    num_gpus=st.integers(4, 64),
    length=st.sampled_from((128, 1024)),
)
def test_sharding_never_exceeds_one_gpu(
    make: Make, run_of: RunOf, method: str, sharding: str, num_gpus: int, length: int
) -> None:
    llama = make("llama-3.1-8b")
    options = {"method": method, "max_length": length, "adapter_dtype": "bf16" if method == "lora" else None}
    alone = memory_timeline(llama, run_of(llama, **options)).allocated_bytes
    run = run_of(llama, num_gpus=num_gpus, sharding=sharding, **options)
    buffers = 0 if sharding == "fsdp" else memory_timeline(llama, run).parts_bytes["communication"]
    added = zero_master_bytes(llama, run) // num_gpus + buffers
    assert memory_timeline(llama, run).allocated_bytes <= alone + added, "DeepSpeed adds fp32 copies and a bucket"


@settings(max_examples=20, deadline=None)
@given(sharding=st.sampled_from(SHARDED), num_gpus=st.integers(2, 32))
def test_more_gpus_never_need_more_memory_each(make: Make, run_of: RunOf, sharding: str, num_gpus: int) -> None:
    llama = make("llama-3.1-8b")
    few = memory_timeline(llama, run_of(llama, method="full", num_gpus=num_gpus, sharding=sharding))
    many = memory_timeline(llama, run_of(llama, method="full", num_gpus=num_gpus + 1, sharding=sharding))
    assert many.allocated_bytes <= few.allocated_bytes


PAPER = [("zero1", 4 + 12 / 64), ("zero2", 2 + 14 / 64), ("zero3", 16 / 64)]


@pytest.mark.parametrize(("sharding", "per_param"), PAPER)
def test_zero_holds_what_its_paper_says(make: Make, run_of: RunOf, sharding: str, per_param: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 31.4, 16.6 and 1.9 GB for 7.5B parameters on 64 GPUs, 120 GB without."""
    llama = make("llama-2-13b")
    run = run_of(llama, method="full", num_gpus=64, sharding=sharding, max_length=128, optim="adamw_torch_fused")
    made = max(
        (parts for moment, parts in moment_parts(llama, run) if moment == "backward"), key=itemgetter("gradients")
    )
    states = sum(made[part] for part in ("weights", "gradients", "optimizer_state"))
    assert states / llama.total_params == pytest.approx(per_param, rel=5e-3)
    assert 7.5 * per_param == pytest.approx({"zero1": 31.4, "zero2": 16.6, "zero3": 1.9}[sharding], rel=0.02)


def test_every_sharding_has_a_row() -> None:
    assert set(SHARDS) == {"none", "ddp", *SHARDED, "fsdp-grad-op", "hsdp"}


def test_grad_op_gathers_once_and_holds_all_weights_at_the_loss(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    options = {"method": "full", "num_gpus": 8, "max_length": 512}
    full, grad_op = (run_of(llama, sharding=sharding, **options) for sharding in ("fsdp", "fsdp-grad-op"))
    assert sent(llama, grad_op, "all_gather") == pytest.approx(2 * llama.total_params, rel=1e-3)
    assert sent(llama, full, "all_gather") > 1.8 * sent(llama, grad_op, "all_gather")
    at_loss = [memory_timeline(llama, run).moments["loss"] for run in (full, grad_op)]
    layers_and_table = 2 * (llama.total_params - llama.embedding_params)
    assert at_loss[1] - at_loss[0] == pytest.approx(layers_and_table, rel=1e-2)


def test_hybrid_sharding_is_one_machines_memory_and_reduces_across(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    one = run_of(llama, method="full", num_gpus=8, sharding="fsdp")
    four = run_of(llama, method="full", num_gpus=32, sharding="hsdp")
    assert memory_timeline(llama, four).allocated_bytes == memory_timeline(llama, one).allocated_bytes
    assert sent(llama, four, "all_reduce") == pytest.approx(2 * llama.total_params / 8, rel=1e-3)
    groups = {(op.name, op.group, op.group_per_node) for op in collectives(llama, four)}
    assert groups == {("all_gather", 8, 8), ("reduce_scatter", 8, 8), ("all_reduce", 4, 1)}


@pytest.mark.parametrize(
    ("shards", "per_node", "across"),
    [(4, 8, (4, 2)), (2, 8, (8, 4)), (8, 4, (2, 1)), (4, 16, (4, 4))],
)
def test_groups_of_any_size_hold_their_share_and_reduce_across(
    make: Make, run_of: RunOf, shards: int, per_node: int, across: tuple[int, int]
) -> None:
    """Sixteen GPUs: as much memory as a job of one group takes, and each GPU's share summed over the groups."""
    llama = make("llama-3.1-8b", 4)
    alone = run_of(llama, method="full", num_gpus=shards, sharding="fsdp", gpus_per_node=per_node)
    grouped = run_of(llama, method="full", num_gpus=16, dp_shard_size=shards, gpus_per_node=per_node)
    assert grouped.sharding == "hsdp"
    assert memory_timeline(llama, grouped).allocated_bytes == memory_timeline(llama, alone).allocated_bytes
    assert sent(llama, grouped, "all_reduce") == pytest.approx(2 * llama.total_params / shards, rel=1e-3)
    groups = {(op.name, op.group, op.group_per_node) for op in collectives(llama, grouped)}
    inside = min(shards, per_node)
    assert groups == {
        ("all_gather", shards, inside),
        ("reduce_scatter", shards, inside),
        ("all_reduce", *across),
    }


def test_a_group_that_is_a_machine_or_the_job_is_said_as_before(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b", 4)
    job = {"method": "full", "num_gpus": 16}
    assert run_of(llama, dp_shard_size=8, **job) == run_of(llama, sharding="hsdp", **job)
    assert run_of(llama, dp_shard_size=16, **job) == run_of(llama, sharding="fsdp", **job)
    assert run_of(llama, dp_shard_size=16, sharding="hsdp", **job) == run_of(llama, sharding="fsdp", **job)
    split = run_of(llama, dp_shard_size=4, tp=2, **job)
    assert split == run_of(llama, sharding="hsdp", tp=2, **job), "eight GPUs with both"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": 16, "dp_shard_size": 3}, r"groups of 3 GPUs, which do not divide the 16 .* use a divisor\."),
        ({"num_gpus": 16, "dp_shard_size": 4, "cp": 8}, r"4 x --cp 8 takes groups of 32 GPUs"),
        ({"num_gpus": 16, "dp_shard_size": 1}, r"--dp-shard-size 1 shards nothing; use --sharding ddp\."),
        ({"num_gpus": 16, "dp_shard_size": 4, "sharding": "zero3"}, r"--sharding is zero3; use --sharding fsdp"),
        ({"num_gpus": 16, "dp_shard_size": 4, "sharding": "fsdp-grad-op"}, r"--sharding is fsdp-grad-op"),
        ({"dp_shard_size": 4}, r"--sharding is none; use --sharding fsdp and more --num-gpus"),
        ({"num_gpus": 24, "dp_shard_size": 12}, r"Groups of 12 GPUs that fill machines of 8 unevenly"),
        ({"num_gpus": 8, "sharding": "hsdp"}, r"does not fill two; type --dp-shard-size for smaller groups"),
        ({"num_gpus": 16, "dp_shard_size": 0}, r"dp-shard-size"),
        ({"num_gpus": 16, "dp_shard_size": 4, "stack": "nemo"}, r"--dp-shard-size 4 .* not built for --stack nemo"),
    ],
)
def test_groups_that_cannot_be_are_told_in_one_sentence(
    make: Make, run_of: RunOf, options: dict[str, int | str], words: str
) -> None:
    llama = make("llama-3.1-8b", 4)
    with pytest.raises((InputError, NotSupportedError), match=words):
        run_of(joined(llama) if "stack" in options else llama, method="full", **options)


def test_a_trainer_without_no_sync_holds_shares_of_gradients(make: Make, run_of: RunOf) -> None:
    """VectorInstitute's trainer calls backward under accumulation without ``no_sync``: reduced every time."""
    llama = make("llama-3.1-8b")
    options = {"method": "full", "num_gpus": 2, "sharding": "fsdp", "gradient_accumulation_steps": 4}
    lazy, eager = run_of(llama, **options), run_of(llama, sync_each_micro_batch=True, **options)
    later = [memory_timeline(llama, run).moments["forward"] for run in (lazy, eager)]
    assert later[0] - later[1] == pytest.approx(llama.total_params, rel=1e-2), "half of 2 bytes each"
    assert sent(llama, eager, "reduce_scatter") == pytest.approx(4 * sent(llama, lazy, "reduce_scatter"))
    assert all(op.once for op in collectives(llama, lazy) if op.name == "reduce_scatter")


def test_a_group_over_machines_knows_its_share_of_each(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b", 4)
    for per_node, expected in ((8, 8), (4, 4), (16, 16)):
        run = run_of(llama, method="full", num_gpus=48, sharding="fsdp", gpus_per_node=per_node)
        assert {(op.group, op.group_per_node) for op in collectives(llama, run)} == {(48, expected)}


@pytest.mark.parametrize(("name", "version"), [("fsdp1", 1), ("fsdp2", 2)])
def test_fsdp_may_be_called_with_its_version(make: Make, run_of: RunOf, name: str, version: int) -> None:
    llama = make("llama-3.1-8b", 4)
    asked = {"method": "full", "num_gpus": 8}
    named, told = run_of(llama, sharding=name, **asked), run_of(llama, sharding="fsdp", fsdp_version=version, **asked)
    assert named == told
    assert (named.sharding, named.fsdp_version) == ("fsdp", version)
