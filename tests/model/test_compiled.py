"""Compiled layers against torch's own partitioner and hand arithmetic; checkpoints that keep operations against theirs.

The partitioner runs on the real transformers layer without compiling anything: AOTAutograd traces forward and
backward, and what it hands from one to the other is what a compiled layer keeps.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from tests.model.conftest import CONFIGS
from tunecast.calibrate.trace.refusals import refuse_unreal
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.min_cut import minimum_cut
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.step import tape_run, write_step
from tunecast.model.tape import LEAF_SUM

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BATCH, LENGTH = 256, 768, 8, 2, 32, 2, 512
SMALL = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_hidden_layers": 3, "vocab_size": 1024, "max_position_embeddings": 4096,
}  # fmt: skip
CHUNKED = [{"loss_type": "liger"}, {"loss_type": "chunked_nll"}, {"stack": "unsloth"}, {"stack": "trl"}]
MIDDLE, TOKENS, WIDTH = 1, BATCH * LENGTH, 2
"""The layer looked at, tokens of a micro-batch, and bytes of a bf16 number."""


def small() -> Architecture:
    """A Llama of three narrow layers."""
    return architecture_from_config(SMALL, name="small")


def resolved(architecture: Architecture, **options: Any) -> Run:
    """A full fine-tune in pure bf16."""
    given = {"method": "full", "max_length": LENGTH, "per_device_train_batch_size": BATCH, **options}
    return resolve_run(architecture, given).run


def operations(**options: Any) -> list[Operation]:
    """Operations of the small model's step."""
    return list(step_operations(small(), resolved(small(), **options)))


def kept_by_formula(run: Run) -> float:
    """Bytes that the middle layer's forward hands to its backward, its input and rotary tables included."""
    events = write_step(small(), tape_run(run), "cuda").events
    mine = [event for event in events if event.layer == MIDDLE and event.kind is not None]
    forward = {s for event in mine if event.phase is Phase.FORWARD for s in (*event.reads, *event.writes)}
    backward = {s for event in mine if event.phase is Phase.BACKWARD for s in event.reads}
    return float(sum(storage.bytes for storage in forward & backward))


def kept_by_torch() -> float:
    """The same by torch's partitioner over the real layer; aliases of one memory and weights counted once and never."""
    torch = pytest.importorskip("torch")
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(**{name: value for name, value in SMALL.items() if name != "model_type"})
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
    x = torch.zeros(BATCH, LENGTH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    waves = LlamaRotaryEmbedding(config)(x, torch.arange(LENGTH)[None])
    found: dict[str, int] = {}

    def forward(graph: Any, _: Any) -> Any:
        return graph.forward

    def backward(graph: Any, _: Any) -> Any:
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and {LENGTH, TOKENS} & set(getattr(value, "shape", ())):
                found[node.name] = value.numel() * value.element_size()
        return graph.forward

    cut = partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=backward, partition_fn=cut, decompositions=select_decomp_table()
    )
    compiled = torch.compile(
        lambda given: layer(given, position_embeddings=waves, attention_mask=None), backend=backend, fullgraph=True
    )
    made = compiled(x)
    (made[0] if isinstance(made, tuple) else made).sum().backward()
    arriving = sum(size for name, size in found.items() if name.startswith("tangents"))
    output_twice = TOKENS * HIDDEN * WIDTH  # attention's result and its transposed view are two names of one memory
    return float(sum(found.values()) - arriving - output_twice)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_keeps_what_torchs_partitioner_keeps() -> None:
    run = resolved(small(), gradient_checkpointing=False, torch_compile=True)
    assert kept_by_formula(run) == kept_by_torch()


def test_the_smallest_cut_is_the_smallest_of_all_cuts() -> None:
    nodes = ["s", "a", "b", "c", "t"]
    edges = [("s", "a", 3), ("s", "b", 5), ("a", "c", 4), ("b", "c", 2), ("b", "t", 2), ("c", "t", 4), ("a", "b", 1)]

    def size(side: set[str]) -> int:
        return sum(capacity for tail, head, capacity in edges if tail in side and head not in side)

    sides = [{"s", *inner} for n in range(4) for inner in itertools.combinations(nodes[1:4], n)]
    found = {str(node) for node in minimum_cut(edges, "s", "t")}
    assert size(found) == min(size(side) for side in sides)


def test_chains_move_what_comes_in_and_goes_out_once() -> None:
    forward = [
        o for o in operations(gradient_checkpointing=False, torch_compile=True)
        if o.kind is Kind.MEMORY and o.phase is Phase.FORWARD and o.count == len(("first", "middle", "last"))
    ]  # fmt: skip
    stream, wide = TOKENS * HIDDEN * WIDTH, TOKENS * INNER * WIDTH
    heads, kv = TOKENS * HEADS * HEAD_DIM * WIDTH, TOKENS * KV_HEADS * HEAD_DIM * WIDTH
    tables, roots, weight = 2 * LENGTH * HEAD_DIM * WIDTH, TOKENS * 4, HIDDEN * WIDTH
    assert sorted((o.bytes, o.launches) for o in forward) == sorted(
        [
            (2.0 * stream + roots + weight, 1.0),  # norm: the stream read, normed and roots written
            (2.0 * heads + tables, 1.0),  # rotary of queries
            (2.0 * kv + tables, 1.0),  # rotary of keys
            (4.0 * stream + roots + weight, 1.0),  # residual and norm: two read, the stream and the normed written
            (3.0 * wide, 1.0),  # silu(gate) * up
            (3.0 * stream, 1.0),  # residual
        ]
    )


@pytest.mark.parametrize("options", [{"gradient_checkpointing": False}, {}, {"method": "lora"}, {"method": "qlora"}])
def test_compiling_changes_no_product_and_saves_bytes_launches_and_memory(options: dict[str, Any]) -> None:
    architecture = architecture_from_config(CONFIGS["llama-3.1-8b"], name="llama-3.1-8b")
    plain, fast = (
        resolve_run(architecture, {"max_length": 2048, "torch_compile": compile, "method": "full", **options}).run
        for compile in (False, True)
    )
    before, after = step_operations(architecture, plain), step_operations(architecture, fast)

    def total(every: tuple[Operation, ...], what: str, *kinds: Kind) -> float:
        return float(sum(getattr(o, what) for o in every if o.kind in kinds))

    for kind in (Kind.GEMM, Kind.ATTENTION):
        assert total(after, "total_flops", kind) == total(before, "total_flops", kind)
    for kind in (Kind.MEMORY, Kind.LOSS):
        assert total(after, "total_bytes", kind) < 0.6 * total(before, "total_bytes", kind)
    assert total(after, "total_launches", Kind.MEMORY) < 0.5 * total(before, "total_launches", Kind.MEMORY)
    assert memory_timeline(architecture, fast).allocated_bytes <= memory_timeline(architecture, plain).allocated_bytes


@pytest.mark.parametrize("options", CHUNKED, ids=str)
def test_compiled_losses_in_chunks_hold_one_chunks_gradient_of_the_head(options: dict[str, Any]) -> None:
    """A table 32 times as wide as the hidden state: Liger cuts its loss into as many chunks, and Unsloth and TRL into
    some. Compiling joins kernels within a chunk; gradients of two of them are never alive together."""
    wide = architecture_from_config({**SMALL, "vocab_size": 32 * HIDDEN}, name="wide")
    plain, compiled = (
        memory_timeline(wide, resolved(wide, torch_compile=on, max_length=4 * LENGTH, **options)).allocated_bytes
        for on in (False, True)
    )
    assert compiled <= 1.1 * plain


def test_later_micro_batches_add_to_gradients_outside_the_graphs() -> None:
    counts = [
        sum(o.count for o in operations(gradient_accumulation_steps=3, torch_compile=on) if o.name == LEAF_SUM)
        for on in (False, True)
    ]
    assert counts[0] == counts[1] > 0


def test_checkpoints_that_keep_operations_make_every_second_product_again() -> None:
    linears = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HIDDEN, INNER, INNER]
    again = [o for o in operations(checkpoint_keeps_ops=True) if o.phase is Phase.RECOMPUTE]
    assert not [o for o in again if o.kind is Kind.ATTENTION]
    products = sum(o.total_flops for o in again if o.kind is Kind.GEMM)
    layers = int(SMALL["num_hidden_layers"])
    assert products == layers * sum(2.0 * TOKENS * HIDDEN * side for side in linears[1::2])
    memory = {
        name: memory_timeline(small(), resolved(small(), **options)).moments["forward"]
        for name, options in (
            ("full", {}), ("ops", {"checkpoint_keeps_ops": True}), ("none", {"gradient_checkpointing": False}),
        )
    }  # fmt: skip
    assert memory["full"] < memory["ops"] < memory["none"]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "paged_adamw_8bit"])
def test_updates_in_the_backward_hold_no_gradients_and_clip_nothing(optim: str) -> None:
    architecture = architecture_from_config(CONFIGS["llama-3.1-8b"], name="llama-3.1-8b")
    given = {"method": "full", "optim": optim, "max_length": 512, "torch_compile": True}
    late, early = (resolve_run(architecture, {**given, "optimizer_in_backward": on}).run for on in (False, True))
    held = memory_timeline(architecture, late).moments["optimizer"] - memory_timeline(architecture, late).at_rest_bytes
    assert held >= 2 * architecture.total_params  # bf16 gradients of all parameters
    largest = 2 * architecture.embedding_params
    timeline = memory_timeline(architecture, early)
    assert timeline.moments["optimizer"] == timeline.at_rest_bytes
    assert timeline.allocated_bytes - timeline.at_rest_bytes < 0.25 * held + 3 * largest
    moved = [
        sum(o.total_bytes for o in step_operations(architecture, run) if o.kind is Kind.OPTIMIZER)
        for run in (late, early)
    ]
    clipped = 3 * 2 * architecture.total_params  # gradients read for their norm, read and written to be scaled
    assert moved[0] - moved[1] == pytest.approx(clipped, rel=0.01)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InputError, match="gradients kept"):
        resolved(small(), optimizer_in_backward=True, gradient_accumulation_steps=2)
    with pytest.raises(InputError, match="no-gradient-checkpointing"):
        resolved(small(), checkpoint_keeps_ops=True, gradient_checkpointing=False)
    with pytest.raises(InputError, match="--no-reentrant"):
        resolved(small(), checkpoint_keeps_ops=True, reentrant=True)
    with pytest.raises(NotSupportedError, match="--no-activation-offloading"):
        resolved(small(), checkpoint_keeps_ops=True, gradient_checkpointing=True, activation_offloading=True)
    for option in ("torch_compile", "checkpoint_keeps_ops", "optimizer_in_backward"):
        with pytest.raises(NotSupportedError, match=option.replace("_", "-")):
            refuse_unreal(resolved(small(), **{option: True}), device="meta")


EXPERTS = [
    {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
]


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("config", EXPERTS, ids=lambda config: str(config["model_type"]))
def test_experts_compile_and_nothing_is_read_before_it_is_made(config: dict[str, Any], method: str) -> None:
    """Routing writes into memory it has just taken, which is no reason to make that memory again for ever."""
    architecture = architecture_from_config({**SMALL, **config}, name="experts")
    given = {"method": method, "max_length": LENGTH, "gradient_checkpointing": False}
    plain, fast = (resolve_run(architecture, {**given, "torch_compile": on}).run for on in (False, True))
    events = [write_step(architecture, tape_run(run), "cuda").events for run in (plain, fast)]
    made = {storage for event in events[0] for storage in event.writes}
    seen: set[Any] = {storage for event in events[0] for storage in event.reads} - made
    for event in events[1]:
        if event.kind is not None:
            assert set(event.reads) <= seen | set(event.writes), event.name
            seen |= set(event.writes)
    before, after = step_operations(architecture, plain), step_operations(architecture, fast)
    for kind in (Kind.GEMM, Kind.ATTENTION):
        products = [sum(o.total_flops for o in every if o.kind is kind) for every in (before, after)]
        assert products[0] == products[1]
    assert memory_timeline(architecture, fast).allocated_bytes <= memory_timeline(architecture, plain).allocated_bytes


BLOOM = {
    "model_type": "bloom", "hidden_size": HIDDEN, "n_head": HEADS, "n_layer": 3, "vocab_size": 1024,
}  # fmt: skip


def test_what_a_product_is_added_to_is_copied_before_it_and_its_scores_read_after_it() -> None:
    """``baddbmm`` stays a library kernel (inductor decomposes none in 16 bits), which begins with a copy."""
    bloom = architecture_from_config(BLOOM, name="bloom")
    events = write_step(bloom, tape_run(resolved(bloom, torch_compile=True)), "cuda").events
    forward = [e for e in events if e.layer == MIDDLE and e.phase is Phase.FORWARD and e.kind is not None]
    (product,) = [e for e in forward if e.kind is Kind.GEMM and e.name == "scores"]
    (scores,) = product.writes
    place = forward.index(product)
    assert any(scores in event.writes for event in forward[:place])
    assert not any(scores in event.reads for event in forward[:place])
    assert any(scores in event.reads for event in forward[place + 1 :])
