"""Explicit attention masks: which pairs of tokens see each other, written once per forward pass.

Source: transformers 5 ``masking_utils`` (``sdpa_mask``, ``eager_mask``, ``_ignore_causal_mask_sdpa``). For sdpa, whose
kernels know what causal means, none is written unless a window is reached or a micro-batch has padding.
"""

from __future__ import annotations

from dataclasses import replace

from tunecast.model import primitives as ops
from tunecast.model.architecture import Architecture, Attention
from tunecast.model.attention_blocks import OWN_ATTENTIONS, needs_mask, reaches_window
from tunecast.model.context import Step
from tunecast.model.operation import SYNCHRONISATION, Kind
from tunecast.model.tape import Tensor

Masks = tuple[Tensor | None, Tensor | None]


def masked_blocks(architecture: Architecture) -> list[Attention]:
    """The attention that masks are made for: that of the layers, and of what the code makes a mask for anyway."""
    blocks = [group.layer.attention for group in architecture.groups]
    return [*blocks, *(replace(blocks[0], window=window) for window in architecture.masks)]


def attention_masks(step: Step) -> Masks:
    """The explicit masks of the layers that need one: of booleans for sdpa, of numbers to add for eager.

    Where layers with and without a window alternate and both need one, each kind has a mask of its own, the full one
    first.
    """
    run, blocks = step.run, masked_blocks(step.architecture)
    if run.has_padding and any(block.delta or block.convolution for block in blocks):
        looks_for_padding(step)
    if run.flash and run.has_padding:
        for _ in {block.window for block in blocks}:
            seen_by_flash(step)
    needing = [block for block in blocks if needs_mask(block, run)]
    if not needing:
        return None, None
    if blocks[0].kind in OWN_ATTENTIONS:
        return None, own_mask(step, blocks[0].kind)
    made = []
    for sliding in sorted({block.window is not None for block in needing}):
        reached = sliding and any(reaches_window(block, run) for block in needing)
        if run.has_padding:
            told_of_padding(step, reads=run.attn_implementation == "sdpa" and not reached)
        eager = run.attn_implementation == "eager"
        made.append(additive_mask(step, sliding=sliding) if eager else allowed_pairs(step, sliding=sliding))
    return (made[0], made[-1]) if len(made) > 1 else (None, made[-1])


def allowed_pairs(step: Step, *, sliding: bool) -> Tensor:
    """Booleans: one for all samples, or where some tokens are padding one for each."""
    allowed = sliding_mask(step) if sliding else causal_mask(step)
    return without_padding(step, allowed) if step.run.has_padding else allowed


def told_of_padding(step: Step, *, reads: bool) -> None:
    """The mask of the tokens as booleans; for sdpa the host asks twice whether it is all ones (``fast_all``)."""
    tape, tokens = step.tape, step.tokens
    told = ops.elementwise(tape, "padding.cast", (Tensor(tokens, "int64", None),), tokens, "bool")
    for _ in range(2 if reads else 0):
        summed = ops.elementwise(tape, "padding.sum", (told,), 1, "int64")
        every = ops.elementwise(tape, "padding.compare", (summed,), 1, "bool")
        if step.platform == "cuda":
            tape.kernel(SYNCHRONISATION, Kind.MEMORY, (every,), (), n_bytes=2)


def looks_for_padding(step: Step) -> None:
    """Whether linear attention or a convolution needs to be told of padding: the host asks once whether the mask is all
    ones (``_update_linear_attn_mask``)."""
    tape, told = step.tape, Tensor(step.tokens, "int64", None)
    ones = ops.elementwise(tape, "padding.compare", (told,), step.tokens, "bool")
    every = ops.elementwise(tape, "padding.all", (ones,), 1, "bool")
    if step.platform == "cuda":
        tape.kernel(SYNCHRONISATION, Kind.MEMORY, (every,), (), n_bytes=2)


def seen_by_flash(step: Step) -> None:
    """The mask of the tokens as booleans, and whether it is all ones, which the host asks (``flash_attention_mask``).

    Left out: what each layer takes out and puts back where it is not.
    """
    tape, tokens = step.tape, step.tokens
    told = ops.elementwise(tape, "padding.cast", (Tensor(tokens, "int64", None),), tokens, "bool")
    every = ops.elementwise(tape, "padding.all", (told,), 1, "bool")
    if step.platform == "cuda":
        tape.kernel(SYNCHRONISATION, Kind.MEMORY, (every,), (), n_bytes=2)


def zeroed_padding(step: Step, x: Tensor) -> Tensor:
    """The input of linear attention or of a convolution, zeros where tokens are padding; as it is where none are
    (``apply_mask_to_padding_states``)."""
    if not step.run.has_padding:
        return x
    tape, told = step.tape, Tensor(step.tokens, "int64", None)

    def masked(values: Tensor) -> Tensor:
        return ops.elementwise(tape, "padding.multiply", (values, told), values.elements, values.dtype)

    return tape.record(masked(x), (x,), lambda grad: (masked(grad),))


def without_padding(step: Step, allowed: Tensor) -> Tensor:
    """Pairs of every sample whose second token is none of padding (``padding_mask_function``)."""
    tape, samples, length = step.tape, step.run.per_device_train_batch_size, step.run.max_length
    one = ops.elementwise(tape, "mask.ones", (), 1, "bool")
    allowed = ops.elementwise(tape, "mask.and", (one, allowed), length * length, "bool")
    told = Tensor(samples * length, "bool", None)
    places = (Tensor(samples, "int64", None), Tensor(length, "int64", None))
    real = ops.elementwise(tape, "mask.index", (told, *places), samples * length, "bool")
    return ops.elementwise(tape, "mask.and", (allowed, real), samples * length * length, "bool")


def sliding_mask(step: Step) -> Tensor:
    """Pairs within a sliding window, one byte each (index vectors, two comparisons, two conjunctions)."""
    tape, length = step.tape, step.run.max_length
    for size in (step.run.per_device_train_batch_size, 1):
        ops.elementwise(tape, "mask.arange", (), size, "int64")
    rows, columns = shifted_positions(step), shifted_positions(step)
    allowed = ops.elementwise(tape, "mask.ones", (), 1, "bool")
    oldest = ops.elementwise(tape, "mask.shift", (rows,), length, "int64")
    recent = ops.elementwise(tape, "mask.compare", (columns, oldest), length * length, "bool")
    recent = ops.elementwise(tape, "mask.and", (allowed, recent), length * length, "bool")
    causal = ops.elementwise(tape, "mask.compare", (columns, rows), length * length, "bool")
    return ops.elementwise(tape, "mask.and", (recent, causal), length * length, "bool")


def causal_mask(step: Step) -> Tensor:
    """Pairs of which the second token is not later, one byte each."""
    tape, length = step.tape, step.run.max_length
    for size in (step.run.per_device_train_batch_size, 1):
        ops.elementwise(tape, "mask.arange", (), size, "int64")
    rows, columns = shifted_positions(step), shifted_positions(step)
    return ops.elementwise(tape, "mask.compare", (columns, rows), length * length, "bool")


def shifted_positions(step: Step) -> Tensor:
    """Positions plus an offset: two small kernels."""
    tape, length = step.tape, step.run.max_length
    places = ops.elementwise(tape, "mask.arange", (), length, "int64")
    return ops.elementwise(tape, "mask.shift", (places,), length, "int64")


def additive_mask(step: Step, *, sliding: bool) -> Tensor:
    """Zeros and minus infinities for every sample and pair."""
    tape, dtype = step.tape, step.stream_dtype
    allowed = allowed_pairs(step, sliding=sliding)
    scalars = [ops.elementwise(tape, "mask.scalar", (), 1, dtype) for _ in range(2)]
    pairs = step.run.per_device_train_batch_size * step.run.max_length**2
    return ops.elementwise(tape, "mask.where", (allowed, *scalars), pairs, dtype)


def own_mask(step: Step, kind: str) -> Tensor:
    """The mask of families with attention of their own: booleans (Falcon), numbers (BLOOM), both (MPT)."""
    if step.run.has_padding:
        told_of_padding(step, reads=False)
    if kind == "falcon":
        return allowed_pairs(step, sliding=False)
    mask = additive_mask(step, sliding=False)
    return ops.cast(step.tape, mask, "bool", name="mask.cast") if kind == "mpt" else mask
