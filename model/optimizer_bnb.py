"""bitsandbytes' optimizers: what their state takes, and what one update moves.

Sources: bitsandbytes 0.50 ``optim/optimizer.py`` (``init_state``, ``get_state_buffer``, ``step``) and
``kOptimizer32bit``, ``kOptimizerStatic8bit..Blockwise``; transformers' ``create_optimizer``, which keeps
embeddings in 32 bits, as stacks without its Trainer do not (`trained.OWN_LOOPS`). Every tensor is updated by one kernel
with no temporaries, after which the host waits for the device.

A *paged* state lives in CUDA managed memory: it is in neither the allocated nor the reserved memory of
PyTorch. It takes room on the GPU only while some is free, so nothing of it is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunecast.model.tape import allocated_bytes

STATE_BLOCK = 256
"""Elements that share one fp32 statistic (``init_state``)."""
SMALLEST_8BIT = 4096
"""Tensors below this keep fp32 state (``min_8bit_size``)."""
SMALLEST_PAGED = 100_000
"""Tensors below this are not paged (``get_state_buffer``)."""
CODE_BYTES = 256 * 4
"""One table of 8-bit values, shared by all tensors; one per moment (``fill_qmap``)."""
STATE_BYTES = 4
"""fp32 state, whatever the parameter's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BnbOptimizer:
    """One of bitsandbytes' optimizers."""

    moments: int
    """State tensors per parameter: 2 for AdamW, 1 for Lion."""
    bits: int
    paged: bool = False


BITSANDBYTES = {
    "adamw_8bit": BnbOptimizer(moments=2, bits=8),
    "adamw_bnb_8bit": BnbOptimizer(moments=2, bits=8),
    "paged_adamw_8bit": BnbOptimizer(moments=2, bits=8, paged=True),
    "paged_adamw_32bit": BnbOptimizer(moments=2, bits=32, paged=True),
    "lion_8bit": BnbOptimizer(moments=1, bits=8),
    "lion_32bit": BnbOptimizer(moments=1, bits=32),
    "paged_lion_8bit": BnbOptimizer(moments=1, bits=8, paged=True),
    "paged_lion_32bit": BnbOptimizer(moments=1, bits=32, paged=True),
}
"""By the name Transformers gives them."""


def is_8bit(kind: BnbOptimizer, elements: int, *, is_embedding: bool) -> bool:
    """Whether the state of a tensor is quantized: large ones are, embeddings are not."""
    return kind.bits == 8 and elements >= SMALLEST_8BIT and not is_embedding


def statistics_bytes(elements: int) -> int:
    """The fp32 maxima of one quantized moment."""
    return 4 * -(-elements // STATE_BLOCK)


def tensor_state_bytes(kind: BnbOptimizer, elements: int, *, is_embedding: bool, can_page: bool) -> int:
    """Allocated state of one tensor: one byte per element and moment and a maximum per 256, or fp32."""
    quantized = is_8bit(kind, elements, is_embedding=is_embedding)
    outside = can_page and kind.paged and elements >= SMALLEST_PAGED
    moment = 0 if outside else elements * (1 if quantized else STATE_BYTES)
    statistics = statistics_bytes(elements) if quantized else 0
    return kind.moments * (allocated_bytes(moment) + allocated_bytes(statistics))


def tensor_update_bytes(kind: BnbOptimizer, elements: int, parameter_bytes: int, *, is_embedding: bool) -> int:
    """Moved by one update: the gradient read, the parameter and every moment read and written."""
    if not is_8bit(kind, elements, is_embedding=is_embedding):
        return 3 * parameter_bytes + 2 * kind.moments * STATE_BYTES * elements
    moment = 2 * (elements + statistics_bytes(elements)) + CODE_BYTES
    return 3 * parameter_bytes + kind.moments * moment
