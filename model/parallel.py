"""One GPU's part of a model that several GPUs split: its shapes, its run, and what it exchanges with the others.

Ranks are laid out with tensor parallelism innermost, then context, then data, then pipeline parallelism (Megatron's
and torchtitan's order), so that a group whose members are `stride` ranks apart has gpus_per_node / stride of them on
a machine.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053) and Korthikanti et al. 2022 (arXiv 2205.05198) for what is split;
Narayanan et al. 2021 (arXiv 2104.04473) for 1F1B and interleaving; Liu et al. 2023 (Ring Attention, arXiv
2310.01889) and Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv 2309.14509) for context parallelism.
Asynchronous tensor parallelism exchanges beside the products (PyTorch's ``_micro_pipeline_tp``).
Left out: that its products are smaller, expert parallelism, FP8 communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tunecast.model.architecture import Architecture, Attention, Layer, LayerGroup, Linear, Mlp
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.primitives import attention_flops
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


def stage_groups(groups: Iterable[LayerGroup], start: int, stop: int) -> tuple[LayerGroup, ...]:
    """Layers `start` to `stop`, equal neighbours together."""
    found, at = [], 0
    for group in groups:
        count = min(stop, at + group.count) - max(start, at)
        if count > 0:
            found.append(replace(group, count=count))
        at += group.count
    return tuple(found)


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


def attention_ratio(architecture: Architecture, run: Run) -> float:
    """Attention of one GPU's share of a long sequence, over that of a sequence as short as its own tokens.

    Shares are balanced (zigzag), so each does 1 / cp of the causal whole.
    """
    whole = alone = 0.0
    for group in architecture.groups:
        block = group.layer.attention
        shape = (1, block.num_heads)
        whole += group.count * attention_flops(*shape, run.max_length, block.head_dim, block.window) / run.cp
        alone += group.count * attention_flops(*shape, run.max_length // run.cp, block.head_dim, block.window)
    return whole / alone


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
            launches=operation.launches * (run.cp if run.cp_kind == "ring" else 1),
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


def kv_heads_passed(block: Attention, run: Run) -> int:
    """Key-value heads that a GPU has of its tokens when it passes them on.

    Ulysses gives every GPU whole heads: with fewer than GPUs each is repeated until there is one for all, as
    DeepSpeed's and Hugging Face's Ulysses attention do (ALST, arXiv 2506.13996).
    """
    own = max(1, block.num_kv_heads // run.tp)
    return own if run.cp_kind == "ring" or own % run.cp == 0 else run.cp


def passed_width(block: Attention, run: Run) -> int:
    """Values of a token that a GPU passes on: keys and values of a ring, of Ulysses queries and outputs too."""
    kv_width = 2 * kv_heads_passed(block, run) * block.head_dim
    return kv_width if run.cp_kind == "ring" else kv_width + 2 * block.num_heads // run.tp * block.head_dim


def context_operations(architecture: Architecture, run: Run, stage: int) -> list[Operation]:
    """Keys and values around a ring beside the attention, or heads exchanged for tokens before and after it.

    Ring: cp - 1 passes of a GPU's keys and values forward, of them and their gradients backward. Ulysses: queries,
    keys and values, repeated where there are fewer of their heads than GPUs, and outputs, each way once. A
    recomputation repeats the forward.
    """
    dtype, micro = run.compute_dtype, run.gradient_accumulation_steps
    tokens = run.tokens_per_micro_batch // run.cp
    phases = [(Phase.FORWARD, 1), (Phase.BACKWARD, 2 if run.cp_kind == "ring" else 1)]
    if run.gradient_checkpointing or run.recompute_attention:
        phases.append((Phase.RECOMPUTE, 1))
    found = []
    for group in stage_groups(architecture.groups, *stage_range(architecture.num_layers, run.pp, stage)):
        block = group.layer.attention
        ring = run.cp_kind == "ring"
        width = passed_width(block, run)
        each = Operation(
            name="cp.send" if ring else "cp.all_to_all",
            kind=Kind.COMMUNICATION,
            phase=Phase.FORWARD,
            dtype=dtype,
            bytes=float(tokens * width * DTYPE_BYTES[dtype]),
            group=run.cp,
            group_per_node=members_per_node(run, run.cp, run.tp),
            senders=rings_on_node(run) if ring else 0,
            blocking=not ring,
        )
        times = group.count * micro * ((run.cp - 1) if ring else 1)
        found += [replace(each, phase=phase, count=times * repeats) for phase, repeats in phases]
    return found
