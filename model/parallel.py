"""One GPU's part of a model that several GPUs split: its shapes, its run, and what it exchanges with the others.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053) and Korthikanti et al. 2022 (arXiv 2205.05198) for what is split;
Narayanan et al. 2021 (arXiv 2104.04473) for 1F1B and interleaving.
Asynchronous tensor parallelism exchanges beside the products (PyTorch's ``_micro_pipeline_tp``).
Left out: that its products are smaller, expert parallelism, FP8 communication.
"""

from __future__ import annotations

from dataclasses import replace

from tunecast.model.architecture import Architecture, Attention, Layer, Linear, Mlp
from tunecast.model.context_parallel import attention_ratio, context_operations, is_ring
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.rank_layout import ends_per_node, stage_groups, stage_on_node
from tunecast.model.resolve_parallel import FSDP
from tunecast.model.run import Run
from tunecast.model.stages import FIRST_STAGE, stage_range
from tunecast.model.stages import stages_counted as stages_counted
from tunecast.model.trained import gradient_dtype
from tunecast.model.units import DTYPE_BYTES

ENDS = 2
"""Maps of a block whose queries, keys and values are one."""
BETWEEN_COPIES = ("all_reduce", "reduce_scatter", "all_gather")
"""Collectives of data parallelism; those of a split have ``tp.`` and the like before them."""
LOSS_BYTES_PER_TOKEN = 3 * 4
"""Of a loss over a split vocabulary: the maximum, the sum of exponentials and the label's logit, in fp32."""


def is_split(run: Run) -> bool:
    """Whether a GPU holds only a part of every copy of the model, by layers, shapes or tokens."""
    return run.tp > 1 or run.pp > 1 or run.cp > 1


def split_linear(linear: Linear, tp: int, *, by_rows: bool) -> Linear:
    """A GPU's part of a map: of its inputs (its last map in a block), or of its outputs."""
    if by_rows:
        return replace(linear, in_features=linear.in_features // tp)
    return replace(linear, out_features=linear.out_features // tp)


def split_attention(block: Attention, tp: int) -> Attention:
    """A GPU's heads; key-value heads that are fewer than GPUs are copied."""
    kv_heads = max(1, block.num_kv_heads // tp)
    kv_parts = block.num_kv_heads // kv_heads
    if len(block.linears) == ENDS:
        both, out = block.linears
        width = (block.num_heads // tp + 2 * kv_heads) * block.head_dim
        linears: tuple[Linear, ...] = (replace(both, out_features=width), split_linear(out, tp, by_rows=True))
        return replace(block, linears=linears, num_heads=block.num_heads // tp, num_kv_heads=kv_heads)
    q, k, v, out = block.linears
    linears = (
        split_linear(q, tp, by_rows=False),
        split_linear(k, kv_parts, by_rows=False),
        split_linear(v, kv_parts, by_rows=False),
        split_linear(out, tp, by_rows=True),
    )
    return replace(block, linears=linears, num_heads=block.num_heads // tp, num_kv_heads=kv_heads)


def split_mlp(block: Mlp, tp: int) -> Mlp:
    """A GPU's part of the inner width."""
    *entering, leaving = block.linears
    linears = (
        *(split_linear(linear, tp, by_rows=False) for linear in entering),
        split_linear(leaving, tp, by_rows=True),
    )
    return replace(block, linears=linears, intermediate_size=block.intermediate_size // tp)


def split_layer(layer: Layer, tp: int) -> Layer:
    """A GPU's part of a layer; norms are whole."""
    return replace(layer, attention=split_attention(layer.attention, tp), mlp=split_mlp(layer.mlp, tp))


def local_architecture(architecture: Architecture, run: Run, stage: int) -> Architecture:
    """The shapes on one GPU of a pipeline stage. A tied table is held by the first stage and by the last."""
    groups = architecture.groups
    if run.pp > 1:
        groups = stage_groups(groups, *stage_range(architecture.num_layers, run.pp, stage))
    if run.tp > 1:
        groups = tuple(replace(group, layer=split_layer(group.layer, run.tp)) for group in groups)
    return replace(
        architecture,
        groups=groups,
        vocab_size=-(-architecture.vocab_size // run.tp),
        tie_word_embeddings=architecture.tie_word_embeddings and run.pp == 1,
        has_entry=stage == FIRST_STAGE,
        has_exit=stage == run.pp - 1,
    )


def local_run(run: Run) -> Run:
    """The run as one GPU sees it: its tokens, and the GPUs with which it shares out data and states.

    Its machine then has as many GPUs of that group as fit beside their tensor-parallel partners. PyTorch's pipeline
    schedules tell FSDP to keep weights after each backward but the last (torch 2.13
    ``distributed/pipelining/stage.py``: ``set_reshard_after_backward(False)``).
    """
    return replace(
        run,
        weights_stay=run.pp > 1
        and run.gradient_accumulation_steps > 1
        and run.sharding in FSDP
        and run.fsdp_version == 2,
        max_length=run.max_length // run.cp,
        num_gpus=run.dp * run.cp,
        sharding=run.sharding if run.dp * run.cp > 1 else "none",
        gpus_per_node=max(1, run.gpus_per_node // run.tp),
        dp_shard_size=run.dp_shard_size * run.cp,
        pp=1,
        pp_interleave=1,
        cp=1,
    )


def placed(operation: Operation, architecture: Architecture, run: Run) -> Operation:
    """A kernel of the local tape as it really runs: collectives with their group, attention over the whole sequence.

    Stages after the first reduce their last gradients while those before them still work, and gather their first
    parameters before there is anything to do; the first's waits are left out.
    """
    if operation.kind is Kind.COMMUNICATION and operation.name.startswith("tp."):
        beside = hides_behind_weights(operation, run)
        return replace(operation, group=run.tp, group_per_node=run.tp, blocking=not beside)
    if operation.name in BETWEEN_COPIES and operation.phase is not Phase.OPTIMIZER and run.pp > 1:
        return replace(operation, blocking=False)
    if operation.kind is Kind.ATTENTION and run.cp > 1:
        ratio = attention_ratio(architecture, run)
        batch, heads, kv_heads, q_len, kv_len, head_dim = operation.shape
        return replace(
            operation,
            flops=operation.flops * ratio,
            shape=(batch, heads, kv_heads, q_len, kv_len * run.cp, head_dim),
            launches=operation.launches * (run.cp if is_ring(run) else 1),
        )
    return operation


def hides_behind_weights(operation: Operation, run: Run) -> bool:
    """Whether an exchange of the backward is of gradients of a layer's input, which Megatron sums over GPUs beside the
    product that makes the gradients of its weights, where these train.

    Source: Megatron-Core ``tensor_parallel/layers.py``, ``LinearWithGradAccumulationAndAsyncCommunication.backward``.
    """
    sums = operation.name in ("tp.reduce_scatter", "tp.all_reduce") and operation.phase is Phase.BACKWARD
    return sums and run.method == "full" and run.sharding not in (*FSDP, "zero2", "zero3")


def beside_products(operation: Operation, run: Run) -> list[Operation]:
    """Exchanges of asynchronous tensor parallelism: half of them beside the product that they feed or come from.

    A feed-forward product takes several times as long as its exchange, which hides behind it; an attention block's is
    about as long or shorter, and its exchange is taken as waited for. A block has as many exchanges as the other.
    """
    if not (run.async_tp and operation.kind is Kind.COMMUNICATION and operation.name.startswith("tp.")):
        return [operation]
    half = replace(operation, count=operation.count / 2)
    return [half, replace(half, blocking=False)]


def exchange_operations(architecture: Architecture, run: Run, stage: int) -> list[Operation]:
    """What one GPU sends in a step because of the split, beyond what its tape shows."""
    found = []
    if run.tp > 1 and stage == run.pp - 1:
        found.append(loss_operation(run))
    if run.pp > 1:
        found += stage_operations(architecture, run, stage)
        found += tied_operations(architecture, run, stage)
    if run.cp > 1:
        found += context_operations(architecture, run, stage)
    return found


def loss_operation(run: Run) -> Operation:
    """Cross-entropy over a split vocabulary: a few numbers per token."""
    tokens = run.tokens_per_micro_batch // run.cp
    return Operation(
        name="tp.all_reduce",
        kind=Kind.COMMUNICATION,
        phase=Phase.FORWARD,
        dtype="fp32",
        bytes=float(tokens * LOSS_BYTES_PER_TOKEN),
        count=run.gradient_accumulation_steps,
        group=run.tp,
        group_per_node=run.tp,
        blocking=True,
    )


def stage_operations(architecture: Architecture, run: Run, stage: int) -> list[Operation]:
    """Activations to the next stage and their gradients back, for every chunk of layers and micro-batch.

    A stage at an end sends one way less, unless stages are interleaved, where the last one feeds the first. Interleaved
    stages send beside their work (Megatron-LM ``megatron/training/arguments.py``: ``overlap_p2p_comm`` is on with
    virtual stages, and off without).
    """
    dtype = run.compute_dtype
    tokens = run.tokens_per_micro_batch // run.cp // (run.tp if run.sequence_parallel else 1)
    send = Operation(
        name="pp.send",
        kind=Kind.COMMUNICATION,
        phase=Phase.FORWARD,
        dtype=dtype,
        bytes=float(tokens * architecture.hidden_size * DTYPE_BYTES[dtype]),
        count=run.gradient_accumulation_steps * run.pp_interleave,
        group=2,
        group_per_node=ends_per_node(run),
        senders=stage_on_node(run),
        blocking=run.pp_interleave == 1,
    )
    ahead = [send] if stage < run.pp - 1 or run.pp_interleave > 1 else []
    back = [replace(send, phase=Phase.BACKWARD)] if stage > FIRST_STAGE or run.pp_interleave > 1 else []
    return ahead + back


def tied_operations(architecture: Architecture, run: Run, stage: int) -> list[Operation]:
    """The gradient of a tied table, summed over the first stage and the last after the last micro-batch.

    Source: Megatron-LM ``megatron/core/distributed/finalize_model_grads.py`` (``_allreduce_word_embedding_grads``).
    """
    ends = (FIRST_STAGE, run.pp - 1)
    if not architecture.tie_word_embeddings or run.has_adapters or stage not in ends:
        return []
    values = -(-architecture.vocab_size // run.tp) * architecture.hidden_size
    return [
        Operation(
            name="pp.all_reduce",
            kind=Kind.COMMUNICATION,
            phase=Phase.BACKWARD,
            dtype=gradient_dtype(run),
            bytes=float(values * DTYPE_BYTES[gradient_dtype(run)]),
            group=len(ends),
            group_per_node=ends_per_node(run),
            senders=stage_on_node(run),
            once=True,
        )
    ]
