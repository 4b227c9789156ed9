"""What GPUs that share one long sequence pass to each other: keys and values of a ring, or heads for tokens (Ulysses).

A ring works off one block of keys and values after another while the next one comes, so that what goes around hides
behind attention alone (`room_fracs`), not behind the products. Two codes do it:

Megatron (Transformer Engine, ``AttnFuncWithCPAndKVP2P``; NeMo's ``cp_comm_type`` p2p)
    sends cp - 1 blocks forward, and as many backward with their gradients in the same dtype, each beside a block.
torch (``distributed/tensor/experimental/_context_parallel/_attention.py`` of 2.13; torchtitan, accelerate)
    gathers all blocks at once beside the first one, forward and backward (``_RotateMethod.ALL_GATHER``, its default).
    Gradients go around in fp32 (``convert_to_f32``) and once more than there are others, to come home: the last time
    nothing is left to hide behind.

Sources beside these: Liu et al. 2023 (Ring Attention, arXiv 2310.01889); Jacobs et al. 2023 (DeepSpeed Ulysses, arXiv
2309.14509). Every other software is taken to do as torch does (assumed).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tunecast.model.architecture import Architecture, Attention, LayerGroup
from tunecast.model.curves import Array
from tunecast.model.joined import STACKS as MEGATRON
from tunecast.model.operation import CONTEXT, Kind, Operation, Phase
from tunecast.model.primitives import attention_flops
from tunecast.model.rank_layout import members_per_node, rings_on_node, stage_groups
from tunecast.model.run import Run
from tunecast.model.segments import BACKWARD, FORWARD, SEGMENTS
from tunecast.model.stages import stage_range
from tunecast.model.tape import allocated_bytes
from tunecast.model.units import DTYPE_BYTES

SUM_DTYPE = "fp32"
"""In which torch adds up the gradients of keys and values that go around."""

SURE_RING = 2
"""GPUs of the longest ring of torch's whose published runs are forecast well."""


def is_ring(run: Run) -> bool:
    """Whether keys and values go around, rather than heads for tokens."""
    return run.cp > 1 and run.cp_kind == "ring"


def is_gathered(run: Run) -> bool:
    """Whether a ring has all keys and values after one gather, as torch's."""
    return is_ring(run) and run.stack not in MEGATRON


def ring_notes(run: Run) -> tuple[str, ...]:
    """How well long rings of PyTorch's own code are known."""
    if not is_gathered(run) or run.cp <= SURE_RING:
        return ()
    code = "axolotl's (ring-flash-attn), taken to do as PyTorch's," if run.stack == "axolotl" else "PyTorch's own code"
    note = (
        f"of a ring of {run.cp} GPUs by {code} little is known: the published runs with 4 and 8 (131,072 "
        "and 262,144 tokens) were about 30% slower than forecast, that with 2 as fast (results/validation/time.md, TI)"
    )
    return (note,)


def room_fracs(run: Run) -> Array:
    """(segments,) share of the attention's seconds beside which keys, values and their gradients move.

    Of a block for every GPU, all but the last are worked off while the next one comes; a gather has the first alone,
    and the gradients of the backward again all but one.
    """
    room = np.zeros(len(SEGMENTS))
    if is_ring(run):
        own = 1.0 / run.cp
        room[FORWARD], room[BACKWARD] = own if is_gathered(run) else 1.0 - own, 1.0 - own
    return room


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
    """What goes around a ring beside the attention, or heads exchanged for tokens before and after it.

    Ulysses: queries, keys and values, repeated where there are fewer of their heads than GPUs, and outputs, each way
    once. The recomputation of a layer repeats its forward.
    """
    found: list[Operation] = []
    at, stop = stage_range(architecture.num_layers, run.pp, stage)
    for group in stage_groups(architecture.groups, at, stop):
        ahead, back = _exchanges(group, run)
        again = _exchanges(replace(group, count=_attends_again(run, at, group.count)), run)[0]
        found += [*ahead, *(replace(each, phase=Phase.RECOMPUTE) for each in again if each.count)]
        found += [replace(each, phase=Phase.BACKWARD) for each in back]
        at += group.count
    return found


def _attends_again(run: Run, first: int, layers: int) -> int:
    """Of so many layers from the index `first`, those whose recomputation goes through attention again."""
    if run.recompute_attention:
        return layers
    if run.checkpoint_keeps_ops:
        return 0
    return sum(run.checkpoints_layer(index) for index in range(first, first + layers))


def _exchanges(group: LayerGroup, run: Run) -> tuple[list[Operation], list[Operation]]:
    """Of the forward and of the backward of layers that are alike, all micro-batches."""
    dtype, times = run.compute_dtype, group.count * run.gradient_accumulation_steps
    values = run.tokens_per_micro_batch // run.cp * passed_width(group.layer.attention, run)
    block = Operation(
        name=f"{CONTEXT}send",
        kind=Kind.COMMUNICATION,
        phase=Phase.FORWARD,
        dtype=dtype,
        bytes=float(values * DTYPE_BYTES[dtype]),
        group=run.cp,
        group_per_node=members_per_node(run, run.cp, run.tp),
        senders=rings_on_node(run),
        count=times * (run.cp - 1),
    )
    if not is_ring(run):
        heads = replace(block, name=f"{CONTEXT}all_to_all", senders=0, count=times, blocking=True)
        return [heads], [heads]
    if not is_gathered(run):
        return [block], [replace(block, count=2 * block.count)]
    gather = replace(block, name=f"{CONTEXT}all_gather", bytes=block.bytes * run.cp, senders=0, count=times)
    sums = replace(block, dtype=SUM_DTYPE, bytes=float(values * DTYPE_BYTES[SUM_DTYPE]))
    return [gather], [gather, sums, replace(sums, count=times, blocking=True)]


def exchange_bytes(architecture: Architecture, run: Run) -> int:
    """Buffers of context parallelism while a layer runs: the block that arrives beside the one in use, or all of them
    gathered; or the heads of the whole sequence.

    Left out: torch's fp32 gradients of keys and values in its backward.
    """
    if run.cp == 1:
        return 0
    tokens, blocks = run.tokens_per_micro_batch // run.cp, 1
    if is_ring(run):
        blocks = 1 + (run.cp if is_gathered(run) else 1)
    size = DTYPE_BYTES[run.compute_dtype] * blocks
    return max(
        allocated_bytes(tokens * passed_width(group.layer.attention, run) * size) for group in architecture.groups
    )
