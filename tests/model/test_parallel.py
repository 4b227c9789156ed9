"""Models split over GPUs by shapes, layers and tokens: nothing is lost, and what is sent is what the papers say."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tunecast
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.context_parallel import kv_heads_passed, passed_width
from tunecast.model.estimate import forecast
from tunecast.model.flops import executed_flops_per_step, model_flops_per_step
from tunecast.model.inventory import part_operations, step_operations
from tunecast.model.joined import joined
from tunecast.model.links import Links, collective_seconds
from tunecast.model.memory import memory_timeline, stage_parts
from tunecast.model.on_device import job_factors
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.parallel import local_architecture, stages_counted
from tunecast.model.parallel_memory import kept_bytes, micro_batches_in_flight
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.step_source import StepInventory, operations_of
from tunecast.model.target import resolve_targets
from tunecast.model.time import step_time

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]
FULL = {"method": "full", "max_length": 2048}
COPIES = (
    "megatron.scale",
    "shard.sum",
    "zero.keep",
    "zero.to_bucket",
    "zero.from_bucket",
    "zero.divide",
    "zero.flatten",
)


def collectives(arch: Architecture, run: Run, stage: int | None = None) -> list[Operation]:
    operations = step_operations(arch, run) if stage is None else part_operations(arch, run, stage)
    return [op for op in operations if op.kind is Kind.COMMUNICATION]


@settings(max_examples=15, deadline=None)
@given(
    tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 2, 4)),
    cp=st.sampled_from((1, 2)),
    method=st.sampled_from(("full", "lora")),
    checkpointing=st.booleans(),
)
def test_all_gpus_together_do_the_work_of_one(
    make: Make, run_of: RunOf, tp: int, pp: int, cp: int, method: str, checkpointing: bool
) -> None:
    """Executed FLOPs per required FLOP do not depend on the layout, adapters copied to every GPU aside."""
    llama = make("llama-3.1-8b", 8)
    options = {"method": method, "max_length": 2048, "gradient_checkpointing": checkpointing}
    alone, split = run_of(llama, **options), run_of(llama, num_gpus=tp * pp * cp, tp=tp, pp=pp, cp=cp, **options)
    ratio = [executed_flops_per_step(llama, run) / model_flops_per_step(llama, run) for run in (alone, split)]
    assert ratio[1] == pytest.approx(ratio[0], rel=1e-6 if method == "full" else 0.02)


@pytest.mark.parametrize("name", ["nvidia/nemo-gpt3-5b", "openai-community/gpt2", "Qwen/Qwen3-0.6B"])
@pytest.mark.parametrize("layout", [{"pp": 4}, {"tp": 2, "pp": 2}, {"tp": 4}])
def test_so_they_do_with_learned_positions_and_a_tied_table(run_of: RunOf, name: str, layout: dict[str, int]) -> None:
    """Every stage but the first takes its input as it comes."""
    if "tp" in layout and "gpt2" in name:
        pytest.skip("tensor parallelism of GPT-2 is refused")
    architecture, gpus = load_architecture(name), math.prod(layout.values())
    options = {"method": "full", "max_length": 1024, "gradient_checkpointing": False}
    alone, split = run_of(architecture, **options), run_of(architecture, num_gpus=gpus, **layout, **options)
    ratio = [
        executed_flops_per_step(architecture, run) / model_flops_per_step(architecture, run) for run in (alone, split)
    ]
    assert ratio[1] == pytest.approx(ratio[0], rel=1e-6)


def test_parts_of_the_weights_are_the_whole(make: Make, run_of: RunOf) -> None:
    """Norms are copied to every tensor-parallel GPU, nothing else is."""
    llama = make("llama-3.1-8b")
    run = run_of(llama, num_gpus=16, tp=4, pp=4, **FULL)
    held = sum(
        run.tp * count * local_architecture(llama, run, stage).total_params
        for stage, count in stages_counted(llama, run)
    )
    norms = (2 * llama.num_layers + 1) * llama.hidden_size
    assert held - llama.total_params == (run.tp - 1) * norms


def test_parts_of_a_gpt_3_are_the_whole_and_its_table_twice(run_of: RunOf) -> None:
    """By hand: a tensor-parallel GPU copies norms, positions, and what is added after a sum (biases of both maps that
    leave a block); the table of tokens, tied to the head, is held by the first stage and by the last."""
    gpt = load_architecture("nvidia/nemo-gpt3-20b")
    run = run_of(gpt, method="full", max_length=2048, num_gpus=16, tp=4, pp=4)
    held = sum(
        run.tp * count * local_architecture(gpt, run, stage).total_params for stage, count in stages_counted(gpt, run)
    )
    hidden, layers = 6144, 44
    copied = layers * (2 * 2 * hidden + 2 * hidden) + 2 * hidden + 2048 * hidden
    assert held - gpt.total_params == (run.tp - 1) * copied + 50304 * hidden


def test_the_stages_with_a_tied_table_add_up_its_gradients(run_of: RunOf) -> None:
    """Once a step, over two GPUs, a quarter of the table in the dtype of the gradients; none with one stage."""
    gpt = load_architecture("nvidia/nemo-gpt3-20b")
    run = run_of(gpt, num_gpus=16, tp=4, pp=4, gradient_accumulation_steps=8, **FULL)
    sums = {stage: [op for op in collectives(gpt, run, stage) if op.name == "pp.all_reduce"] for stage in range(4)}
    assert [len(found) for found in sums.values()] == [1, 0, 0, 1]
    (total,) = sums[3]
    assert (total.bytes, total.count, total.group, total.group_per_node) == (50304 / 4 * 6144 * 2, 1, 2, 1)
    assert total.senders == 4
    near = run_of(gpt, num_gpus=8, tp=2, pp=4, **FULL)
    assert {op.group_per_node for op in collectives(gpt, near, 3) if op.name.startswith("pp.")} == {2}
    alone = run_of(gpt, num_gpus=4, tp=4, **FULL)
    assert not [op for op in collectives(gpt, alone) if op.name == "pp.all_reduce"]


def test_learned_positions_are_added_before_tokens_are_split(run_of: RunOf) -> None:
    """The embedding is summed whole, every GPU keeps its tokens, and their gradients are gathered once more."""
    gpt = load_architecture("nvidia/nemo-gpt3-5b")
    run = run_of(gpt, num_gpus=4, tp=4, gradient_checkpointing=False, **FULL)
    assert run.sequence_parallel
    counted = Counter({op.name: 0.0 for op in collectives(gpt, run)})
    for op in collectives(gpt, run):
        if op.name.startswith("tp.") and op.bytes > 1e6:
            counted[op.name] += op.count
    blocks = 2 * gpt.num_layers
    assert counted["tp.all_reduce"] == 1
    assert counted["tp.all_gather"] == 2 * blocks + 1 + 1  # and before the head; back into the whole embedding
    assert counted["tp.reduce_scatter"] == 2 * blocks + 1


def test_few_key_value_heads_are_copied(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    here = local_architecture(llama, run_of(llama, num_gpus=16, tp=16, gpus_per_node=16, **FULL), 0)
    attention = here.groups[0].layer.attention
    assert (attention.num_heads, attention.num_kv_heads) == (2, 1)
    assert [linear.out_features for linear in attention.linears] == [256, 128, 128, 4096]


@pytest.mark.parametrize("tokens_split", [False, True])
def test_tensor_parallel_sends_what_megatron_sends(make: Make, run_of: RunOf, tokens_split: bool) -> None:
    """Two all-reduces of b s h forward and two backward per layer, one less where the recomputation stops early;
    with sequence parallelism each is a reduce-scatter and an all-gather, the same bytes (arXiv 2205.05198, 4.2.2).
    """
    llama = make("llama-3.1-8b")
    run = run_of(llama, num_gpus=4, tp=4, sequence_parallel=tokens_split, **FULL)
    whole = 2048 * 4096 * 2
    names = ("tp.all_gather", "tp.reduce_scatter") if tokens_split else ("tp.all_reduce",)
    for phase, expected in ((Phase.FORWARD, 65), (Phase.RECOMPUTE, 32), (Phase.BACKWARD, 65)):
        sent = Counter()
        for op in collectives(llama, run):
            if op.phase is phase and op.bytes == whole:
                sent[op.name] += op.count
        assert set(sent) == set(names)
        assert sent[names[-1]] == expected, "per layer two, and the embedding's or the head's"
    assert all((op.group, op.group_per_node) == (4, 4) for op in collectives(llama, run))
    beside = [op for op in collectives(llama, run) if not op.blocking]
    assert {(op.name, op.phase) for op in beside} == {(names[-1], Phase.BACKWARD)}, "beside gradients of weights"
    adapters = run_of(llama, num_gpus=4, tp=4, sequence_parallel=tokens_split, **{**FULL, "method": "lora"})
    assert all(op.blocking for op in collectives(llama, adapters)), "which train no weights that they could hide behind"


def test_micro_batches_in_flight_share_8_bit_copies_of_weights(make: Make, run_of: RunOf) -> None:
    """What each keeps grows with its tokens alone."""
    llama = make("llama-3.1-8b")
    kept = [
        kept_bytes(
            llama, run_of(llama, method="full", max_length=n, fp8="megatron", gradient_checkpointing=False), "cuda"
        )
        for n in (512, 1024, 2048)
    ]
    assert kept[2] - kept[1] == pytest.approx(2 * (kept[1] - kept[0]), rel=0.01)
    assert kept[0] == pytest.approx(kept[1] / 2, rel=0.01)


def test_asynchronous_tensor_parallelism_sends_the_same_beside_the_work(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    both = [run_of(llama, num_gpus=4, tp=4, torch_compile=True, async_tp=on, **FULL) for on in (False, True)]
    sent = []
    for run in both:
        counts: Counter[tuple[str, bool]] = Counter()
        for op in collectives(llama, run):
            counts[op.name, op.blocking] += op.count
        sent.append(counts)
    gathers, sums = "tp.all_gather", "tp.reduce_scatter"
    assert sent[1][gathers, True] == sent[1][gathers, False] == sent[0][gathers, True] / 2 > 0
    assert sent[1][sums, True] == sent[0][sums, True] / 2 > 0
    assert sent[1][sums, False] == sent[0][sums, False] + sent[0][sums, True] / 2
    with pytest.raises(InputError, match="--torch-compile"):
        run_of(llama, num_gpus=4, tp=4, async_tp=True, **FULL)


def test_sequence_parallelism_divides_checkpoints(make: Make, run_of: RunOf) -> None:
    """What a micro-batch keeps with full recomputation, 2 s b h bytes per layer, divides by t (arXiv 2205.05198)."""
    deep, shallow = make("llama-3.1-8b", 32), make("llama-3.1-8b", 16)
    whole = 16 * 2 * 2048 * 4096
    for tokens_split, parts in ((False, 1), (True, 4)):
        run = run_of(deep, num_gpus=4, tp=4, sequence_parallel=tokens_split, **FULL)
        kept = [kept_bytes(local_architecture(llama, run, 0), run, "cuda") for llama in (deep, shallow)]
        assert kept[0] - kept[1] == whole // parts


@pytest.mark.parametrize(("sharding", "keeps_own"), [("zero1", True), ("ddp", True), ("fsdp", False)])
def test_megatron_keeps_its_own_tokens_of_a_blocks_input(
    make: Make, run_of: RunOf, sharding: str, keeps_own: bool
) -> None:
    """Two block inputs of a layer, 2 s b h bytes each as PyTorch keeps them gathered; of Megatron a t-th part
    (arXiv 2205.05198, section 4.2.2)."""
    deep, shallow = make("llama-3.1-8b", 32), make("llama-3.1-8b", 16)
    options = {**FULL, "num_gpus": 8, "tp": 4, "gradient_checkpointing": False}
    run, eager = (run_of(deep, **options, sharding=name) for name in (sharding, "fsdp"))
    kept = [
        kept_bytes(local_architecture(deep, each, 0), each, "cuda")
        - kept_bytes(local_architecture(shallow, each, 0), each, "cuda")
        for each in (eager, run)
    ]
    gathered = 16 * 2 * (2 * 2048 * 4096)
    assert kept[0] - kept[1] == (gathered - gathered // 4 if keeps_own else 0)


def test_a_pipeline_sends_activations_and_their_gradients(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    run = run_of(llama, num_gpus=32, pp=4, tp=8, gradient_accumulation_steps=16, **FULL)
    size = 2048 * 4096 * 2 / 8
    for stage, ways in ((0, {Phase.FORWARD}), (1, {Phase.FORWARD, Phase.BACKWARD}), (3, {Phase.BACKWARD})):
        sends = [op for op in collectives(llama, run, stage) if op.name == "pp.send"]
        assert {op.phase for op in sends} == ways
        assert {(op.bytes, op.count, op.group_per_node) for op in sends} == {(size, 16, 1)}, "to another machine"
        assert all(op.blocking for op in sends)


def test_interleaved_stages_send_more_often_and_beside_their_work(make: Make, run_of: RunOf) -> None:
    """Megatron's overlap_p2p_comm: every chunk of layers sends both ways, on every stage."""
    llama = make("llama-3.1-8b")
    run = run_of(llama, num_gpus=32, pp=4, tp=8, pp_interleave=2, gradient_accumulation_steps=16, **FULL)
    for stage in range(4):
        sends = [op for op in collectives(llama, run, stage) if op.name == "pp.send"]
        assert {(op.phase, op.count, op.blocking) for op in sends} == {
            (Phase.FORWARD, 32, False),
            (Phase.BACKWARD, 32, False),
        }


@pytest.mark.parametrize("stages", [4, 16])
def test_only_the_gpus_of_a_stage_share_the_network_between_stages(make: Make, run_of: RunOf, stages: int) -> None:
    """By hand: 16 gradients of 8,192 x 4,096 bf16 activations leave each of them over its part of 10 Gbit/s."""
    llama = make("llama-3.1-8b")
    layout = {"num_gpus": 16, "pp": stages, "gradient_accumulation_steps": 16}
    run = run_of(llama, method="full", max_length=8192, **layout)
    links = Links(intra_bytes_per_s=400e9, inter_bytes_per_s=10e9 / 8 / 8, gpus_per_host=8)
    sends = [op for op in collectives(llama, run, stages - 1) if op.name == "pp.send"]
    found = sum(collective_seconds(op, links, 16) * op.count for op in sends)
    assert found == pytest.approx(16 * 8192 * 4096 * 2 * (16 / stages) / (10e9 / 8))


@pytest.mark.parametrize(("tp", "cp", "per_node", "rings"), [(1, 16, 8, 1), (2, 8, 8, 2), (1, 8, 4, 1), (4, 4, 8, 4)])
def test_a_ring_leaves_a_machine_over_the_network_of_its_rings(
    make: Make, run_of: RunOf, tp: int, cp: int, per_node: int, rings: int
) -> None:
    """One GPU of every ring on a machine sends to the next machine: by hand, over 100 Gbit/s that they share, and no
    faster than one GPU's own PCIe lanes."""
    llama = joined(make("llama-3.1-8b"))
    layout = {"num_gpus": 16, "tp": tp, "cp": cp, "gpus_per_node": per_node, "stack": "megatron", "sharding": "zero1"}
    run = run_of(llama, method="full", max_length=32768, **layout)
    (send, *_) = [op for op in collectives(llama, run) if op.name == "cp.send"]
    assert send.bytes == 32768 / cp * 2 * 8 / tp * 128 * 2
    assert send.group > send.group_per_node
    for port_gbps in (400, 25):
        links = Links(
            intra_bytes_per_s=400e9,
            inter_bytes_per_s=100e9 / 8 / per_node,
            gpus_per_host=per_node,
            port_bytes_per_s=port_gbps * 1e9 / 8,
        )
        rate = min(100e9 / 8 / rings, max(port_gbps * 1e9 / 8, 100e9 / 8 / per_node))
        assert collective_seconds(send, links, 16) == pytest.approx(send.bytes / rate)


def test_over_a_slow_network_a_middle_stage_decides(make: Make, run_of: RunOf) -> None:
    """Stages without virtual ones: the last has the head and sends back, a middle one sends on and back. By hand, each
    send of 4,096 tokens of 8,192 bf16 values leaves a machine of 8 over 10 Gbit/s, its share of 67 MB."""
    llama = load_architecture("meta-llama/Llama-3.1-70B")
    (card,) = resolve_targets(["h100-sxm5-80gb"], {})
    asked = {"method": "full", "num_gpus": 32, "tp": 8, "pp": 4, "max_length": 4096, "gradient_accumulation_steps": 8}

    def step_s(gbps: float) -> float:
        options = {**asked, "internode_gbps": gbps}
        return forecast(Question(architecture=llama, options=options), card).step_time_s.value

    def alone_s(gbps: float, stage: int) -> float:
        run = run_of(llama, **asked)
        factors = job_factors(card, llama, run, {"internode_gbps": gbps})
        return step_time(part_operations(llama, run, stage), factors, run=run).step_time_s.value

    for gbps, slowest in ((10, 1), (3200, 3)):
        by_stage = [alone_s(gbps, stage) for stage in range(4)]
        assert max(range(4), key=by_stage.__getitem__) in ({1, 2} if slowest == 1 else {3})
        assert step_s(gbps) == pytest.approx(max(by_stage))
    sent_s = 4096 * 8192 * 2 / (10e9 / 8)
    assert alone_s(10, 1) - alone_s(3200, 1) > 0.8 * 2 * 8 * sent_s / 1.3


def scheduled_in_flight(stages: int, micro_batches: int, stage: int) -> int:
    """Most forwards ahead of backwards on a stage, from the order of 1F1B itself."""
    warm = min(stages - stage - 1, micro_batches)
    order = [1] * warm + [1, -1] * (micro_batches - warm) + [-1] * warm
    held, most = 0, 0
    for change in order:
        held += change
        most = max(most, held)
    return most


@given(stages=st.sampled_from((2, 4, 8)), micro_batches=st.integers(1, 32), data=st.data())
def test_micro_batches_in_flight_are_those_of_the_schedule(
    run_of: RunOf, make: Make, stages: int, micro_batches: int, data: st.DataObject
) -> None:
    llama, stage = make("llama-3.1-8b"), data.draw(st.integers(0, stages - 1))
    run = run_of(llama, num_gpus=stages, pp=stages, gradient_accumulation_steps=micro_batches, **FULL)
    assert micro_batches_in_flight(run, stage) == scheduled_in_flight(stages, micro_batches, stage)


def test_interleaving_holds_more_by_the_papers_factor(make: Make, run_of: RunOf) -> None:
    """The first stage holds 1 + (p - 1) / (p v) times the plain schedule's activations (arXiv 2205.05198, 4.2.3)."""
    llama = make("llama-3.1-8b")
    run = run_of(llama, num_gpus=4, pp=4, pp_interleave=2, gradient_accumulation_steps=16, **FULL)
    assert micro_batches_in_flight(run, 0) == pytest.approx(4 * (1 + 3 / 8))


def test_the_first_stage_keeps_more_and_the_last_has_the_logits(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-70b")
    options = {**FULL, "gradient_checkpointing": False, "gradient_accumulation_steps": 16}
    run = run_of(llama, num_gpus=64, pp=8, tp=8, **options)
    peaks = {}
    for stage in (0, 1, 7):
        places = stage_parts(llama, run, stage, "cuda")
        peaks[stage] = {part: max(parts[part] for _, parts in places) for part in ("activations", "logits")}
    assert peaks[0]["logits"] == peaks[1]["logits"] == 0
    assert peaks[7]["logits"] > 0
    assert peaks[0]["activations"] / peaks[7]["activations"] == pytest.approx(8, rel=0.15)
    assert memory_timeline(llama, run).parts_bytes["activations"] == pytest.approx(peaks[0]["activations"], rel=0.05)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_context_parallelism_divides_tokens_and_balances_attention(make: Make, run_of: RunOf, kind: str) -> None:
    llama = make("llama-3.1-8b")
    options = {"method": "full", "max_length": 32768}
    alone = run_of(llama, **options)
    split = run_of(llama, num_gpus=8, cp=8, cp_kind=kind, sharding="fsdp", **options)

    def attention(run: Run) -> float:
        return sum(op.total_flops for op in step_operations(llama, run) if op.kind is Kind.ATTENTION)

    assert attention(split) == pytest.approx(attention(alone) / 8)
    kv, q = 2 * 8 * 128 * 2 * 4096, 2 * 32 * 128 * 2 * 4096
    sent = {op.phase: op.total_bytes for op in collectives(llama, split) if op.name.startswith("cp.")}
    expected = 8 * kv if kind == "ring" else q + kv  # a gather's payload is the whole
    assert sent[Phase.FORWARD] == pytest.approx(32 * expected)


@pytest.mark.parametrize(("cp", "passed"), [(4, 8), (8, 8), (16, 16), (32, 32)])
def test_ulysses_repeats_key_value_heads_until_every_gpu_has_one(
    make: Make, run_of: RunOf, cp: int, passed: int
) -> None:
    """Counted from the tensors: each GPU's tokens of 32 queries' and outputs' heads and of the heads repeated."""
    llama = make("llama-3.1-8b")
    options = {"method": "full", "max_length": 65536, "sharding": "fsdp", "cp_kind": "ulysses"}
    run = run_of(llama, num_gpus=cp, cp=cp, gradient_checkpointing=True, **options)
    assert all(kv_heads_passed(group.layer.attention, run) == passed for group in llama.groups)
    tokens = np.empty((65536 // cp, 2 * 32 + 2 * passed, 128), dtype=np.float16)
    sent = {op.phase: op.total_bytes for op in collectives(llama, run) if op.name == "cp.all_to_all"}
    assert sent[Phase.FORWARD] == sent[Phase.RECOMPUTE] == 32 * tokens.nbytes
    assert passed_width(llama.groups[0].layer.attention, run) * (65536 // cp) * 2 == tokens.nbytes
    if passed > 8:
        with pytest.raises(NotSupportedError, match="repeats the 8 key-value heads"):
            run_of(llama, num_gpus=cp, cp=cp, gradient_checkpointing=False, **options)


def test_sharding_runs_over_the_gpus_that_share_the_shapes(make: Make, run_of: RunOf) -> None:
    """16 GPUs as tp 2 x pp 2 x cp 2 x dp 2: states are dealt out to the four that hold the same shapes."""
    llama = make("llama-3.1-8b")
    run = run_of(llama, num_gpus=16, tp=2, pp=2, cp=2, sharding="fsdp", **FULL)
    gathers = [op for op in collectives(llama, run) if op.name == "all_gather"]
    assert {(op.group, op.group_per_node) for op in gathers} == {(4, 4)}
    spread = run_of(llama, num_gpus=64, tp=8, sharding="fsdp", **FULL)
    assert {op.group_per_node for op in collectives(llama, spread) if op.name == "all_gather"} == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpus": 8, "tp": 3}, r"--tp 3 x --pp 1 x --cp 1 takes 3 GPUs.*multiple of 3"),
        ({"num_gpus": 16, "tp": 16}, r"--tp 16 must divide the 8 GPUs"),
        ({"num_gpus": 20, "pp": 20}, r"--pp 20 .*32 layers"),
        ({"num_gpus": 8, "pp_interleave": 2}, r"--pp-interleave 2 needs --pp"),
        ({"num_gpus": 64, "cp": 64, "cp_kind": "ulysses"}, r"32 heads and 8 key-value heads.*--cp-kind ring"),
        ({"num_gpus": 12, "cp": 12, "cp_kind": "ulysses", "max_length": 2400}, r"for --tp 1 x --cp 12; use --cp-kind"),
        ({"num_gpus": 4, "tp": 4, "sharding": "fsdp"}, r"lower --tp or --pp, or leave --sharding out"),
        ({"num_gpus": 8, "pp": 4, "sharding": "zero2"}, r"--sharding zero2 reduces"),
        ({"num_gpus": 4, "cp": 4, "max_length": 1001}, r"--cp 4 deals out"),
        ({"num_gpus": 8, "pp": 4, "pp_interleave": 2, "gradient_accumulation_steps": 3}, r"steps is 3; use at least 4"),
    ],
)
def test_layouts_that_exclude_themselves_are_told_in_one_sentence(
    make: Make, run_of: RunOf, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run_of(make("llama-3.1-8b"), method="full", **options)


def test_what_is_not_built_is_refused_by_name(make: Make, run_of: RunOf) -> None:
    with pytest.raises(NotSupportedError, match="quantized base"):
        run_of(make("llama-3.1-8b"), method="qlora", num_gpus=2, tp=2)
    with pytest.raises(NotSupportedError, match="projections apart or joined head by head"):
        run_of(load_architecture("microsoft/Phi-3-mini-4k-instruct"), method="full", num_gpus=2, tp=2)
    with pytest.raises(NotSupportedError, match="projections apart or joined head by head"):
        run_of(load_architecture("openai-community/gpt2"), method="full", num_gpus=2, tp=2)


def test_the_traced_code_knows_no_layers_split_over_gpus(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b", 4)

    def traced(*_: object) -> StepInventory:
        raise AssertionError("nothing is traced for a run that is refused")

    for options in ({"tp": 2}, {"sharding": "zero3", "offload": "optimizer"}):
        run = run_of(llama, num_gpus=2, **FULL, **options)
        with pytest.raises(NotSupportedError, match="leave --exact out"):
            operations_of(llama, run, source=traced)


def test_layers_split_beside_sharded_gradients_are_deepspeeds() -> None:
    """Megatron's optimizer shards no gradients: ZeRO-2's are cut, kept and added up as without a split, at more cost
    than ZeRO-1's."""
    arch = load_architecture("meta-llama/Llama-3.1-8B")
    asked = {"method": "full", "num_gpus": 8, "tp": 2, "gradient_accumulation_steps": 4}
    first, second = (resolve_run(arch, {**asked, "sharding": name}).run for name in ("zero1", "zero2"))
    copies = {name: total(arch, run) for name, run in (("zero1", first), ("zero2", second))}
    assert copies["zero1"].keys() & {"megatron.scale", "shard.sum"} == {"megatron.scale"}
    assert copies["zero2"].keys() & {"megatron.scale", "shard.sum", "zero.keep"} == {"shard.sum", "zero.keep"}
    assert sum(copies["zero2"].values()) > sum(copies["zero1"].values())


def total(architecture: Architecture, run: Run) -> Counter[str]:
    """Bytes of the copies of one step, by name."""
    found = Counter[str]()
    for each in step_operations(architecture, run):
        if each.name in COPIES:
            found[each.name] += round(each.total_bytes)
    return found


def test_doubt_about_links_grows_from_as_many_gpus_as_were_seen() -> None:
    """A fast end that falls where GPUs are added would be a step of the doubt, not of the machine."""
    (card,), qwen = resolve_targets(["a10g-24gb"], {}), load_architecture("Qwen/Qwen2.5-0.5B")
    asked = {"sharding": "fsdp", "method": "full", "max_length": 512, "internode_gbps": 400.0}
    widths, fast = [], []
    for gpus in (128, 136, 160, 192, 256):
        step = forecast(Question(architecture=qwen, options={**asked, "num_gpus": gpus}), card).step_time_s
        widths.append(step.high / step.low)
        fast.append(step.low)
    assert widths == sorted(widths)
    assert min(later / earlier for earlier, later in itertools.pairwise(fast)) > 0.95


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"sharding": "fsdp", "pp": 2}, "--stack torchtitan counts its own"),
        ({"sharding": "fsdp", "pp": 2, "stack": "torchtitan"}, ""),
        ({"sharding": "zero3", "tp": 2}, "not with ZeRO-3"),
        ({"sharding": "zero2", "tp": 2}, ""),
    ],
)
def test_layouts_that_no_software_has_as_asked_are_told(layout: dict[str, Any], told: str) -> None:
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    notes = resolve_run(llama, {"method": "full", "num_gpus": 8, **layout}).notes
    found = [note for note in notes if "torchtitan" in note or "AutoTP" in note]
    assert [told in note for note in found] == ([True] if told else [])


def test_tensor_parallelism_of_litgpt_is_refused_by_its_name() -> None:
    asked: dict[str, Any] = {"method": "full", "num_gpus": 8, "sharding": "fsdp", "tp": 2, "stack": "litgpt"}
    with pytest.raises(NotSupportedError, match="Tensor parallelism of --stack litgpt is not built"):
        tunecast.estimate("meta-llama/Llama-3.1-8B", gpu="h100-sxm5-80gb", **asked)


def test_experts_are_not_split_by_tensor_parallelism() -> None:
    mixtral = load_architecture("mistralai/Mixtral-8x7B-v0.1")
    with pytest.raises(NotSupportedError, match=r"Tensor parallelism of experts, as .* is not built"):
        resolve_run(mixtral, {"method": "full", "num_gpus": 8, "tp": 2, "sharding": "fsdp"})
