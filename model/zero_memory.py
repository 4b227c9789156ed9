"""What DeepSpeed holds on one GPU: fp32 copies, buckets of a fixed size, gradients by its own rules, gathered weights.

As DeepSpeed 0.19.8 allocates in two processes (``scripts/deepspeed_peaks.py``, ``runtime/zero/stage_1_and_2.py``,
``stage3.py``, ``partitioned_param_coordinator.py``):

=====  =======================================================  ===================================================
stage  gradients                                                buffers
=====  =======================================================  ===================================================
1      whole, until the last micro-batch reduces them           a bucket, from the first gradient to the reduction
2      shares: one that adds up micro-batches, and from the     a bucket in the backward, and its flat copy while it
       first full bucket on one of this micro-batch             is reduced
3      a share, always                                          a bucket, always; its flat copy while it is reduced;
                                                                as many whole weights as may be live
=====  =======================================================  ===================================================

A bucket has its full size however little trains (``reduce_bucket_size``). Left out: other sizes of ZeRO-3's gathers
(``stage3_*``).
"""

from __future__ import annotations

from functools import lru_cache

from tunecast.model.architecture import Architecture, Layer, layer_kinds
from tunecast.model.collectives import is_megatrons
from tunecast.model.megatron import has_fp32_copies
from tunecast.model.optimizer import ADAM_STATES
from tunecast.model.parallel_offload import parameter_bytes
from tunecast.model.resolve_parallel import ZERO
from tunecast.model.run import Run
from tunecast.model.sharding import gradient_bytes, shard_gpus, share
from tunecast.model.tape_peaks import Parts
from tunecast.model.trained import (
    base_tensors,
    by_dtype,
    gradient_dtype,
    trained_dtype,
    trained_tensors,
    whole_bytes,
)
from tunecast.model.units import DTYPE_BYTES

SUB_GROUP_ELEMENTS = 1_000_000_000
"""Elements that ZeRO-3 updates at a time (``sub_group_size`` of DeepSpeed's zero/config.py)."""
LIVE_ELEMENTS = 1_000_000_000
"""Weights that ZeRO-3 gathers ahead, and keeps for a use to come (``max_live_parameters``, ``max_reuse_distance``)."""
PREFETCH_ELEMENTS = 50_000_000
"""Weights that one gather ahead fetches into one buffer, to be copied out of it (``prefetch_bucket_size``)."""
PERSISTENT_ELEMENTS = 100_000
"""Tensors up to this size that ZeRO-3 keeps whole (``param_persistence_threshold``)."""
FULL_STATES = ("adamw_torch", "adamw_torch_fused")
"""Optimizers whose moments have the dtype of what they update."""
TO_AND_FRO = ("forward", "loss", "backward")


def is_deepspeeds(architecture: Architecture, run: Run) -> bool:
    """Whether DeepSpeed shards this run's states, not Megatron's distributed optimizer."""
    return run.sharding in ZERO and not is_megatrons(architecture, run)


def zero_master_bytes(architecture: Architecture, run: Run) -> int:
    """What DeepSpeed and Megatron add to 16-bit training, before it is shared out: an fp32 copy, and fp32 moments.

    With 2 bytes of weights and 2 of gradients these make the paper's 16 bytes per parameter (arXiv 1910.02054,
    section 3.1). Nothing for parameters that are fp32 already.
    """
    if run.sharding not in ZERO and not has_fp32_copies(run):
        return 0
    moments = ADAM_STATES if run.optim in FULL_STATES else 0
    added = 0
    for dtype, tensors in by_dtype(trained_tensors(architecture, run), trained_dtype(run)):
        wider = DTYPE_BYTES["fp32"] - DTYPE_BYTES[dtype]
        elements = sum(tensor.elements for tensor in tensors)
        added += elements * (DTYPE_BYTES["fp32"] + moments * wider) * (wider > 0)
    return added


def zero_update_bytes(architecture: Architecture, run: Run, scratch: int) -> tuple[int, int] | None:
    """One GPU's gradients and temporaries while DeepSpeed updates fp32 copies; None where it does not.

    `scratch` are the optimizer's temporaries for all that trains, in its own dtype. A share is flattened and cast to
    fp32 before it is let go (``stage_1_and_2.py``, ``step``; 8 bytes per element of the share): at once by ZeRO-1 and
    -2, one sub-group after another, of 1e9 elements, by ZeRO-3, beside the share that it keeps (``stage3.py``,
    ``_prepare_sub_group``).
    """
    own, wide = DTYPE_BYTES[trained_dtype(run)], DTYPE_BYTES["fp32"]
    if run.sharding not in ZERO or own == wide or has_fp32_copies(run):
        return None
    whole = sum(tensor.elements for tensor in trained_tensors(architecture, run))
    elements = share(whole, shard_gpus(run))
    temporaries = scratch * wide / own / max(whole, 1)
    if run.sharding == "zero3":
        group = min(elements, SUB_GROUP_ELEMENTS)
        return own * elements + wide * group, int(max(temporaries, own) * group)
    return wide * elements, int(max(temporaries, 2 * own) * elements)


def one_bucket_bytes(run: Run) -> int:
    """A bucket of gradients."""
    return run.reduce_bucket_size * DTYPE_BYTES[gradient_dtype(run)]


def buckets_bytes(run: Run) -> int:
    """All buckets: ZeRO-1 and -2 fill two by turns beside work (``overlap_comm``)."""
    return (1 + (run.overlap_comm and run.sharding != "zero3")) * one_bucket_bytes(run)


def is_flushed_early(architecture: Architecture, run: Run) -> bool:
    """Whether the gradients fill more than one bucket, so that some are reduced while the backward goes on."""
    return gradient_bytes(architecture, run) > one_bucket_bytes(run)


def flat_copy_bytes(architecture: Architecture, run: Run) -> int:
    """The copy from which a bucket is reduced. ZeRO-1 and -2 make it of one that several GPUs update; of two GPUs the
    one that updates the rest of such a bucket has nothing else yet."""
    if run.num_gpus == 1 or (run.sharding != "zero3" and run.num_gpus == 2 and is_flushed_early(architecture, run)):
        return 0
    return min(gradient_bytes(architecture, run), one_bucket_bytes(run))


def stored_elements(layer: Layer, hidden_size: int, run: Run) -> list[int]:
    """Elements of every tensor of a layer as they are stored: a 4-bit weight is one of numbers of the run's dtype, each
    of which holds two a byte (``bnb_4bit_quant_storage``, which transformers asks of ZeRO-3)."""
    sizes = [tensor.elements for tensor in base_tensors(layer, hidden_size)]
    if run.base_quantization is None:
        return sizes
    held = 2 * DTYPE_BYTES[run.dtype]
    for linear in layer.linears:
        sizes.remove(linear.weight_params)
        sizes.append(-(-linear.weight_params // held))
    return sizes


@lru_cache(maxsize=256)
def persistent_bytes(architecture: Architecture, run: Run) -> int:
    """Small tensors that ZeRO-3 holds whole beside their shares: norms, biases, adapters of a low rank."""
    sizes = [tensor.elements for tensor in architecture.root_tensors]
    for group in layer_kinds(architecture):
        sizes += stored_elements(group.layer, architecture.hidden_size, run) * group.count
    found = DTYPE_BYTES[run.dtype] * sum(size for size in sizes if size <= PERSISTENT_ELEMENTS)
    if not run.has_adapters:
        return found
    adapters = [tensor for tensor in trained_tensors(architecture, run) if tensor.elements <= PERSISTENT_ELEMENTS]
    return found + whole_bytes(adapters, gradient_dtype(run))


@lru_cache(maxsize=4096)
def gathered_bytes(architecture: Architecture, run: Run, moment: str) -> int:
    """Whole weights of ZeRO-3: gathered ahead until as many are live as may be, one tensor more, and the buffer that
    the last came in; of a smaller model all, in the forward beside that buffer. Of 2.7B parameters in two processes
    DeepSpeed held 3% more in the forward and 5% in the backward."""
    size, hidden = DTYPE_BYTES[run.dtype], architecture.hidden_size
    largest = max(size for group in layer_kinds(architecture) for size in stored_elements(group.layer, hidden, run))
    whole = parameter_bytes(architecture, run) - persistent_bytes(architecture, run)
    buffer = min(whole, size * PREFETCH_ELEMENTS) if moment == "forward" else 0
    return min(whole + buffer, size * (LIVE_ELEMENTS + PREFETCH_ELEMENTS + largest))


def table_elements(architecture: Architecture) -> int:
    """The largest tensor outside the layers: the table of tokens, or the head."""
    return max(tensor.elements for tensor in architecture.root_tensors)


@lru_cache(maxsize=256)
def gathered_at_table_bytes(architecture: Architecture, run: Run) -> int:
    """Whole weights of ZeRO-3 where the forward begins and the backward ends: the table of tokens, and as many of the
    layers' as may be live (DeepSpeed's rules, followed module by module for models of 1B to 70B)."""
    size = DTYPE_BYTES[run.dtype]
    whole = parameter_bytes(architecture, run) - persistent_bytes(architecture, run)
    return min(whole, size * (LIVE_ELEMENTS + table_elements(architecture)))


def zero_parts(architecture: Architecture, run: Run, held: Parts, moment: str) -> Parts:
    """What is alive at one place of the step, with the gradients and buffers that DeepSpeed has there."""
    parts = dict(held)
    own = 0 if run.offload != "none" else share(gradient_bytes(architecture, run), shard_gpus(run))
    later, early = run.gradient_accumulation_steps > 1, is_flushed_early(architecture, run)
    if run.sharding == "zero3":
        parts["communication"] += buckets_bytes(run) + persistent_bytes(architecture, run)
        parts["gradients"] = parts["gradients"] if moment == "optimizer" else own
        if moment in TO_AND_FRO:
            parts["communication"] += gathered_bytes(architecture, run, moment)
    elif moment == "backward" or (run.sharding == "zero1" and later and moment in TO_AND_FRO):
        parts["communication"] += buckets_bytes(run)
    if moment == "backward" and run.sharding != "zero1":
        parts["communication"] += flat_copy_bytes(architecture, run) if early else 0
        parts["gradients"] = own * (later + early) if run.sharding == "zero2" else own
    return parts


def zero_end_places(architecture: Architecture, run: Run, at_rest: Parts) -> list[tuple[str, Parts]]:
    """The end of the last backward, where the rest is reduced, and where ZeRO-3 has the table of tokens whole;
    `at_rest` is what is alive between steps."""
    whole = gradient_bytes(architecture, run)
    own = 0 if run.offload != "none" else share(whole, shard_gpus(run))
    later, early = run.gradient_accumulation_steps > 1, is_flushed_early(architecture, run)
    flat = flat_copy_bytes(architecture, run)

    def place(moment: str, gradients: int, buffers: int) -> tuple[str, Parts]:
        return moment, {**at_rest, "gradients": gradients, "communication": at_rest["communication"] + buffers}

    if run.sharding == "zero1":
        return [place("backward", whole, buckets_bytes(run) + (own - one_bucket_bytes(run)) * early)]
    if run.sharding == "zero2":
        return [place("backward", own * (later + early), buckets_bytes(run) + (flat if early else max(flat, own)))]
    gathered = gathered_at_table_bytes(architecture, run)
    gradient = 0 if run.has_adapters else DTYPE_BYTES[run.dtype] * table_elements(architecture)
    ends = [("forward", gathered), ("backward", gathered + gradient), ("backward", flat)]
    return [place(moment, own, buffers) for moment, buffers in ends]
