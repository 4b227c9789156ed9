"""What each way of spreading a job over GPUs shards, what it keeps whole for a while, and what it sends.

========  =======  =========  ===============  ===========================================================
sharding  weights  gradients  optimizer state  collectives of one step
========  =======  =========  ===============  ===========================================================
none      whole    whole      whole            none
ddp       whole    whole      whole            all-reduce of the gradients, the last bucket waited for
zero1     whole    whole      1/N              all-reduce of the gradients, all-gather of new parameters
zero2     whole    1/N        1/N              the same, reduced at every micro-batch
zero3     1/N      1/N        1/N              all-gather of a layer's weights before forward and backward,
                                               reduce-scatter of its gradients at every micro-batch
fsdp      1/N      1/N        1/N              the same; with accumulation, gradients stay whole and are
                                               reduced once (accelerate's ``no_sync``), unless the trainer
                                               reduces every micro-batch (`Run.sync_each_micro_batch`)
========  =======  =========  ===============  ===========================================================

``fsdp-grad-op`` (SHARD_GRAD_OP, ``reshard_after_forward=False``) is fsdp whose weights stay whole from their forward
to their backward, so that they are gathered once. ``hsdp`` (HYBRID_SHARD) is fsdp inside a machine, or inside groups
of ``dp_shard_size`` GPUs, with copies whose gradients are reduced across.

Of a 4-bit base only the packed weights are parameters, so only they are sharded: absmax and code tables stay
whole on every GPU.

Sources: ZeRO (Rajbhandari et al. 2020, section 5), PyTorch FSDP2 ``fully_shard`` (torch 2.13, run by the tests too),
DeepSpeed ``zero_optimization`` defaults. What is sent, and what of it hides behind nothing: `collectives`; what
DeepSpeed holds besides: `zero_memory`. Left out: FSDP1's padding and fp32 copies, quantized collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tunecast.model.architecture import Architecture, Layer, layer_kinds
from tunecast.model.memory_static import layer_packed_bytes, layer_weight_bytes, root_weight_bytes
from tunecast.model.resolve_parallel import FSDP as FSDP
from tunecast.model.resolve_parallel import ZERO as ZERO
from tunecast.model.run import Run
from tunecast.model.sharding_root import by_accelerate, gathered_root, splits_root, trained_root
from tunecast.model.tape_peaks import is_early, layers_before
from tunecast.model.trained import (
    Trained,
    adapter_tensors,
    base_tensors,
    gradient_dtype,
    root_tensors,
    trained_dtype,
    trained_tensors,
    whole_bytes,
)
from tunecast.model.units import DTYPE_BYTES

GATHERED_LAYERS = 2
"""Layers whole at once while one runs: its parameters, and the flat buffer it came from or the next one arrives in."""
COPIED_LAYERS = 3
"""Forward, for the moment in which a layer is copied out: its buffer, its parameters, and the buffer of the layer
before, which FSDP2 keeps until the copy is done (``FSDPParamGroup.wait_for_unshard``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Which parts one GPU holds only a share of."""

    weights: bool = False
    gradients: bool = False
    optimizer_state: bool = False


SHARDS = {
    "none": Shards(),
    "ddp": Shards(),
    "zero1": Shards(optimizer_state=True),
    "zero2": Shards(gradients=True, optimizer_state=True),
    "zero3": Shards(weights=True, gradients=True, optimizer_state=True),
    "fsdp": Shards(weights=True, gradients=True, optimizer_state=True),
    "fsdp-grad-op": Shards(weights=True, gradients=True, optimizer_state=True),
    "hsdp": Shards(weights=True, gradients=True, optimizer_state=True),
}


def shards_of(run: Run) -> Shards:
    """What the run shards; gradients of FSDP stay whole while micro-batches accumulate without a reduction."""
    shards = SHARDS[run.sharding]
    if run.sharding in FSDP and run.gradient_accumulation_steps > 1 and not run.sync_each_micro_batch:
        return Shards(weights=True, optimizer_state=True)
    return shards


def holds_whole(run: Run) -> bool:
    """Whether FSDP holds whole gradients until the last micro-batch is reduced."""
    return run.sharding in FSDP and not shards_of(run).gradients


def keeps_weights(run: Run) -> bool:
    """Whether FSDP leaves weights whole between micro-batches, and gathers each unit once in a step: a pipeline's does,
    and FSDP1 that shards nothing after the forward, while it reduces nothing (torch ``_should_free_in_backward``)."""
    grad_op = run.sharding == "fsdp-grad-op" and run.fsdp_version == 1
    return run.weights_stay or (grad_op and holds_whole(run))


def sums_wide(run: Run) -> bool:
    """Whether whole gradients of several micro-batches are held and added up in the dtype they are reduced in.

    FSDP2 does (``FSDPParam.to_accumulated_grad_if_needed``); FSDP1 adds in the gradients' own.
    """
    return holds_whole(run) and run.fsdp_version == 2 and reduction_share(run) > 1


def shard_gpus(run: Run) -> int:
    """GPUs among which a sharded part is dealt out: all, or under hybrid sharding those of a machine or of a group."""
    if run.sharding != "hsdp":
        return run.num_gpus
    return run.dp_shard_size or run.gpus_per_node


def on_one_machine(run: Run, gpus: int) -> float:
    """Members of a group of consecutive GPUs that share a machine; where the group fills its machines unevenly, in the
    mean: a ring leaves each of them once."""
    return gpus / -(-gpus // run.gpus_per_node) if gpus > run.gpus_per_node else gpus


def share(n_bytes: int, num_gpus: int) -> int:
    """One GPU's share of a sharded buffer, padded up."""
    return -(-n_bytes // num_gpus)


def one_layer_bytes(layer: Layer, hidden_size: int, run: Run) -> int:
    """Weights and adapters of a layer, as they are gathered."""
    adapters = layer_trained_bytes(adapter_tensors(layer, run), run) * run.has_adapters
    return layer_weight_bytes(layer, hidden_size, run) + layer_packed_bytes(layer, run) + adapters


def layer_bytes(architecture: Architecture, run: Run) -> int:
    """Weights and adapters of the largest layer."""
    return max(one_layer_bytes(group.layer, architecture.hidden_size, run) for group in layer_kinds(architecture))


def root_trained_bytes(architecture: Architecture, run: Run) -> int:
    """What trains outside the layers: beside adapters, copies of the table of tokens and the head, adapters on them."""
    return trained_root(architecture, run).whole


def head_gradient_bytes(architecture: Architecture, run: Run) -> int:
    """Gradients of the head, which come first and wait for the others of its group."""
    if not run.has_adapters:
        return DTYPE_BYTES[run.dtype] * architecture.embedding_params
    return layer_trained_bytes(root_tensors(architecture, run)[1], run)


def root_group_bytes(architecture: Architecture, run: Run) -> int:
    """Everything outside the layers, as it is gathered."""
    return gathered_root(architecture, run).whole


def layer_trained_bytes(tensors: list[Trained], run: Run) -> int:
    """Bytes of trained tensors, in the dtype their gradients have."""
    return whole_bytes(tensors, gradient_dtype(run))


def layer_gradient_bytes(layer: Layer, hidden_size: int, run: Run) -> int:
    """Gradients that a layer makes."""
    return layer_trained_bytes(
        adapter_tensors(layer, run) if run.has_adapters else base_tensors(layer, hidden_size), run
    )


@lru_cache(maxsize=256)
def largest_layer_gradient_bytes(architecture: Architecture, run: Run) -> int:
    """Gradients of the layer that makes most."""
    return max(layer_gradient_bytes(group.layer, architecture.hidden_size, run) for group in layer_kinds(architecture))


def by_size(architecture: Architecture, run: Run, bytes_of: Callable[[Layer, int, Run], int]) -> list[tuple[int, int]]:
    """Sizes of layers in bytes, each with how many layers have it."""
    sizes: Counter[int] = Counter()
    for group in layer_kinds(architecture):
        sizes[bytes_of(group.layer, architecture.hidden_size, run)] += group.count
    return list(sizes.items())


@lru_cache(maxsize=256)
def gradient_bytes(architecture: Architecture, run: Run) -> int:
    """All gradients of the job, whole."""
    return layer_trained_bytes(trained_tensors(architecture, run), run)


def bucket_bytes(architecture: Architecture, run: Run) -> int:
    """Buffers in which gradients are reduced: DDP copies all of them; those of ZeRO are in `zero_memory`, Megatron's
    distributed optimizer is taken to fill one of DeepSpeed's size."""
    whole = gradient_bytes(architecture, run)
    if run.sharding == "ddp":
        return whole
    if run.sharding == "zero1":
        return min(whole, run.reduce_bucket_size * DTYPE_BYTES[gradient_dtype(run)])
    return 0


@lru_cache(maxsize=4096)
def communication_bytes(architecture: Architecture, run: Run, moment: str, position: str = "outside") -> int:
    """Memory that exists only because of sharding, at one place of the step; DeepSpeed's is in `zero_memory`.

    `position` names the layer as `tape_peaks.layer_position` does.
    """
    alone = run.num_gpus == 1
    if alone and run.offload != "all":
        return 0
    if run.sharding == "zero1" and moment in ("load", "forward", "optimizer"):
        return 0  # made when a backward begins, let go before the update
    if not alone and not SHARDS[run.sharding].weights:
        return bucket_bytes(architecture, run)
    if moment in ("load", "optimizer"):
        return 0
    if alone:
        return streamed_bytes(architecture, run, moment)
    if keeps_weights(run):
        return staying_bytes(architecture, run, moment, position)
    if run.sharding == "fsdp-grad-op":
        return grad_op_bytes(architecture, run, moment, position)
    if run.fsdp_version == 1:
        return fsdp1_bytes(architecture, run, moment, position)
    return fsdp_bytes(architecture, run, moment, position)


def fsdp1_bytes(architecture: Architecture, run: Run, moment: str, position: str) -> int:
    """FSDP1 as accelerate starts it, without prefetch: the root, and while a layer runs, its one flat buffer.

    A layer is gathered into the buffer its parameters are views of, and freed as soon as it ends, the last one too.
    """
    root, layer = root_group_bytes(architecture, run), layer_bytes(architecture, run)
    if moment == "loss" or (moment == "forward" and position == "outside"):
        return root
    if moment == "forward":
        return root + layer
    if position == "outside":
        return root_reduction_bytes(architecture, run, root)
    return root + layer + layer_reduction_bytes(architecture, run)


def streamed_bytes(architecture: Architecture, run: Run, moment: str) -> int:
    """Parameters that come from the host: embedding and head whole while layers run, two layers whole, one layer's
    gradients on their way back."""
    whole = root_weight_bytes(architecture, run)
    if moment in ("forward", "backward"):
        whole += GATHERED_LAYERS * layer_bytes(architecture, run)
    if moment == "backward":
        whole += largest_layer_gradient_bytes(architecture, run)
    return whole


def fsdp_bytes(architecture: Architecture, run: Run, moment: str, position: str) -> int:
    """FSDP2, as its allocations were recorded in two processes.

    What is outside the layers is one group, whole from the first forward to the end of the backward, or two
    (`sharding_root`). The last layer's buffer lives through the loss: kept by the forward, then fetched anew by the
    backward. Temporaries inside a layer are taken to coincide with the copy of the forward, which is brief.
    """
    if splits_root(architecture, run):
        return split_root_bytes(architecture, run, moment, position)
    root, layer = root_group_bytes(architecture, run), layer_bytes(architecture, run)
    if moment == "loss" or (moment == "forward" and position == "outside"):
        return root + layer
    if moment == "forward":
        return root + COPIED_LAYERS * layer
    if position == "outside":
        return root_reduction_bytes(architecture, run, root)
    gathered = layer if position == "first" else GATHERED_LAYERS * layer
    return root + gathered + layer_reduction_bytes(architecture, run)


def spared_at_loss(architecture: Architecture, run: Run) -> int:
    """Bytes by which accelerate's FSDP2 holds less than `communication_bytes` says where logits are most: the buffer of
    the unit before goes with the forward, the last layer is fetched when the head's backward begins, and between them
    the backward of the log-softmax has one more copy of logits, in 16 bits."""
    if run.num_gpus == 1 or not by_accelerate(run) or keeps_weights(run) or run.loss_type != "nll":
        return 0
    kept = gathered_root(architecture, run).exit
    if run.sharding != "fsdp-grad-op" or not kept:
        kept = max(kept, layer_bytes(architecture, run))
    return min(kept, DTYPE_BYTES["bf16"] * run.tokens_per_micro_batch * architecture.vocab_size)


def split_root_bytes(architecture: Architecture, run: Run, moment: str, position: str) -> int:
    """FSDP2 whose table and head are units like the layers: each in its buffer and copied out while it is used, the
    table once more at the end of the backward, fetched while the first layer runs."""
    root, layer = gathered_root(architecture, run), layer_bytes(architecture, run)
    if moment == "loss":
        return root.exit + max(root.exit, layer)
    if moment == "forward":
        return 2 * max(root.entry, root.exit) if position == "outside" else COPIED_LAYERS * layer
    if position == "outside":
        return root_reduction_bytes(architecture, run, root.entry)
    gathered = layer + root.entry if position == "first" else GATHERED_LAYERS * layer
    running = gathered + layer_reduction_bytes(architecture, run, position)
    if position != "last" or not shards_of(run).gradients:
        return running
    return max(running, layer + unit_reduction_bytes(trained_root(architecture, run).exit, run))


def grad_op_bytes(architecture: Architecture, run: Run, moment: str, position: str) -> int:
    """FSDP2 that keeps weights whole after the forward: all of them at the loss, fewer as the backward proceeds.

    A layer's weights are freed before its gradients are reduced. Every layer is taken to be as large as the largest.
    """
    root, layer = gathered_root(architecture, run), layer_bytes(architecture, run)
    layers = architecture.num_layers * layer
    before = layers_before(position, architecture.num_layers)
    if moment == "backward":
        if position == "outside":
            return root_reduction_bytes(architecture, run, root.entry)
        left = layer if is_early(position) else layers - layer
        left = left if before is None else before * layer
        return root.entry + left + layer_reduction_bytes(architecture, run, position)
    if before is not None:
        return root.entry + (before + COPIED_LAYERS) * layer
    if is_early(position):
        return root.entry + COPIED_LAYERS * layer
    if moment == "forward":
        return root.entry + layers + (COPIED_LAYERS - 1) * layer
    return root.whole + layers + (root.exit or layer)


def staying_bytes(architecture: Architecture, run: Run, moment: str, position: str) -> int:
    """FSDP whose weights stay after every backward but the last: all of them from the first one on."""
    whole = root_group_bytes(architecture, run) + sum(
        group.count * one_layer_bytes(group.layer, architecture.hidden_size, run) for group in layer_kinds(architecture)
    )
    return whole + (layer_reduction_bytes(architecture, run, position) if moment == "backward" else 0)


def reduction_share(run: Run) -> int:
    """Bytes of the buffer that gradients are reduced from (``foreach_reduce``) over those of the gradients."""
    return DTYPE_BYTES[run.reduce_dtype or gradient_dtype(run)] // DTYPE_BYTES[gradient_dtype(run)]


def counted_share(n_bytes: int, run: Run) -> int:
    """One GPU's share of gradients that is among those it keeps, in the dtype that trains: none where they leave for
    the host."""
    return 0 if run.offload == "all" else stored_share(run) * share(n_bytes, shard_gpus(run))


def stored_share(run: Run) -> int:
    """Bytes of a gradient that is kept for the update over those of the one that autograd makes."""
    return DTYPE_BYTES[trained_dtype(run)] // DTYPE_BYTES[gradient_dtype(run)]


def layer_reduction_bytes(architecture: Architecture, run: Run, position: str = "") -> int:
    """Gradients whole while a layer runs backward, beyond the shares that are counted as gradients.

    The head's gradient waits for the embedding's where both are reduced together at the end; of its own unit, it is in
    the buffer while the last layer runs. Of whole gradients those of the layer before have moved to the buffer, and a
    share is new; FSDP1 makes a flat one to add.
    """
    layer = largest_layer_gradient_bytes(architecture, run)
    apart = splits_root(architecture, run)
    head = 0 if apart else head_gradient_bytes(architecture, run)
    before = trained_root(architecture, run).exit if apart and position == "last" else layer
    if not shards_of(run).gradients:
        wide = layer + head if sums_wide(run) else 0
        return layer if run.fsdp_version == 1 else share(layer, shard_gpus(run)) + wide
    return layer + reduction_share(run) * before + head - counted_share(layer + head, run)


def root_reduction_bytes(architecture: Architecture, run: Run, gathered: int) -> int:
    """The first unit at the end of the backward, beyond the shares that are counted as gradients: whole (`gathered`)
    while its gradients come and the first layer's are in their buffer, then let go and reduced from a buffer itself."""
    own, wider = trained_root(architecture, run).entry, reduction_share(run)
    whole = own if shards_of(run).gradients else 0
    coming = gathered + whole - counted_share(whole, run)
    coming += wider * largest_layer_gradient_bytes(architecture, run)
    return max(coming, unit_reduction_bytes(own, run)) if splits_root(architecture, run) else coming


def unit_reduction_bytes(own: int, run: Run) -> int:
    """A unit's gradients and the buffer that they are reduced from, its parameters let go; sums in another dtype than
    what trains come in a buffer of their own. As recorded of the table's unit; a root of several tensors lets its
    gradients go before the sums come."""
    wider = reduction_share(run)
    return (1 + wider) * own + (wider * share(own, shard_gpus(run)) if wider != stored_share(run) else 0)


def first_gather_bytes(architecture: Architecture, run: Run) -> int:
    """FSDP2 when the first layer is copied out: the unit before and this layer each twice, parameters and buffer; of
    accelerate's own unit the parameters are gone."""
    if run.num_gpus == 1 or run.sharding not in FSDP:
        return 0
    entry, layer = gathered_root(architecture, run).entry, layer_bytes(architecture, run)
    alone = splits_root(architecture, run) and run.sharding != "fsdp-grad-op"
    return max(2 * entry, entry + 2 * layer) if alone else 2 * (entry + layer)
