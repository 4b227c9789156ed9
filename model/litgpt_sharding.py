"""LitGPT's FSDP 1 with adapters: a gradient for every weight of a layer, frozen or not.

``FullyShardedDataParallel`` makes one flat parameter of a block, which needs a gradient because its adapters do; the
frozen weights are views of it, and the backward of the split writes zeros for them. While micro-batches accumulate
under ``no_sync`` these flat gradients stay whole. Embedding, final norm and head have no adapter, so no gradient.
Source: torch ``distributed/fsdp/_flat_param.py`` (``_use_unsharded_views``), ``_runtime_utils.py``
(``_accumulate_sharded_grad``, ``_should_free_in_backward``); litgpt ``finetune/lora.py`` before 0.5.11. Since
then ``fully_shard`` shards tensor by tensor.
"""

from __future__ import annotations

from tunecast.model.architecture import Architecture, layer_kinds
from tunecast.model.litgpt import FIRST, is_litgpt
from tunecast.model.run import Run
from tunecast.model.sharding import layer_bytes, one_layer_bytes, shards_of, share
from tunecast.model.tape_peaks import layers_before

FLAT_BUFFERS = 3
"""Of a layer's size while it runs backward, beyond the layer itself: the layer fetched ahead (``BACKWARD_PRE``), its
new flat gradient, and the zeros it is joined from."""
POSITIONS_LEFT = {"last": 1, "second last": 2}
"""Layers that have run backward by the end of one so far from the end of the stack."""


def fetches_ahead(architecture: Architecture, run: Run) -> bool:
    """Whether FSDP 1 gathers the next layer of the backward before the present one is done, as it does by default."""
    return is_litgpt(architecture) and run.num_gpus > 1 and run.sharding == "fsdp" and run.fsdp_version == 1


def has_flat_gradients(architecture: Architecture, run: Run) -> bool:
    """Whether adapters sit in flat parameters of FSDP 1."""
    return fetches_ahead(architecture, run) and run.has_adapters


def layers_behind(architecture: Architecture, moment: str, position: str) -> int:
    """Layers whose gradients of this micro-batch exist."""
    if moment == "optimizer" or (moment == "backward" and position in ("outside", "first")):
        return architecture.num_layers
    if moment != "backward":
        return 0
    before = layers_before(position, architecture.num_layers)
    if before is not None:
        return architecture.num_layers - before
    return POSITIONS_LEFT.get(position, architecture.num_layers - 1)


def flat_bytes(architecture: Architecture, run: Run, moment: str, position: str) -> tuple[int, int]:
    """(gradients, communication) of one GPU that flat parameters add at one place of the step.

    Gradients of the micro-batches before are there all the time, unless each is reduced or, in the oldest code, the
    longest sample is the first.
    """
    inside = moment == "backward" and position != "outside"
    if not has_flat_gradients(architecture, run):
        return 0, layer_bytes(architecture, run) if inside and fetches_ahead(architecture, run) else 0
    layers = architecture.num_layers
    whole = sum(
        group.count * one_layer_bytes(group.layer, architecture.hidden_size, run) for group in layer_kinds(architecture)
    )
    behind = layers_behind(architecture, moment, position)
    accumulates = not shards_of(run).gradients
    if accumulates and architecture.code != FIRST and moment != "load":
        behind = layers
    kept = whole * behind // layers
    if not accumulates:
        kept = share(kept, run.num_gpus)
    return kept, FLAT_BUFFERS * layer_bytes(architecture, run) * inside
