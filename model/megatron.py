"""Megatron-Core's training of 16-bit weights, as Megatron-LM, NeMo and Megatron-Bridge run it.

Layers join projections (`joined`). Gradients of all that a GPU trains are added up in one buffer that is there from
the start, in fp32 unless it is told to reduce them in their own dtype, and collectives work inside it. The optimizer
has fp32 copies and moments of what this GPU updates: of all, or under the distributed optimizer (``zero1``) of a share.
So a parameter takes 18 bytes, or 6 + 12 / d with d data-parallel GPUs.

Sources: Megatron-LM ``megatron/training/theoretical_memory_usage.py`` (18, 6 + 12 / d) and ``arguments.py``
(``--bf16`` adds in fp32); megatron-core 0.16.1 ``distributed/param_and_grad_buffer.py``, ``optimizer/optimizer.py``,
``optimizer/distrib_optimizer.py`` (gradients of 16 bits are widened for the update); NeMo
``nemo/collections/llm/recipes/precision/mixed_precision.py`` (``grad_reduce_in_fp32``). Left out: padding of the
buffer, a precision-aware optimizer, Megatron's own FSDP, the table's gradient on its way into the buffer.
"""

from __future__ import annotations

from tunecast.model.architecture import Architecture
from tunecast.model.joined import STACKS
from tunecast.model.run import Run
from tunecast.model.sharding import reduction_share, shard_gpus, share
from tunecast.model.tape_peaks import Parts
from tunecast.model.trained import gradient_dtype, trained_tensors
from tunecast.model.units import DTYPE_BYTES

MASTER = "fp32"


def has_fp32_copies(run: Run) -> bool:
    """Whether its optimizer updates fp32 copies of narrower weights, and casts them back."""
    return run.stack in STACKS and DTYPE_BYTES[gradient_dtype(run)] < DTYPE_BYTES[MASTER]


def with_buffer(architecture: Architecture, run: Run, held: Parts, moment: str) -> Parts:
    """What is alive at one place of the step, its gradients in the buffer, and widened for the update."""
    elements = sum(tensor.elements for tensor in trained_tensors(architecture, run))
    reduced = DTYPE_BYTES[gradient_dtype(run)] * reduction_share(run)
    parts = {**held, "gradients": reduced * elements}
    if moment == "optimizer" and reduced < DTYPE_BYTES[MASTER]:
        updated = share(elements, shard_gpus(run)) if run.sharding == "zero1" else elements
        parts["scratch"] += DTYPE_BYTES[MASTER] * updated
    return parts
