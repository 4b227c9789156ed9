"""Unsloth's output head and cross-entropy in one: the gradients are made in the forward pass, piece by piece.

Of 2025.12 to 2026.10.8 (unsloth_zoo ``fused_losses/cross_entropy_loss.py``): chunks of tokens, each one compiled graph
of a product, one kernel over the logits and the gradient's products. Inductor gives the gradient the logits' own
memory, so that a chunk has one 16-bit tensor of vocabulary width (seen in the code it makes of the same operations).
Of 2026.10.9 (``fused_losses/fused_linear.py``): tokens without a label are left out, logits come in fp32 into one
buffer, their gradient is written over them in 16 bits, and its product is an fp32 one. With a frozen head and enough
rows they are made in tiles, the gradient of a row summed up over the vocabulary as flash attention does it.
The backward hands the gradients on, times a number. Left out: labels that are masked, smoothed or shared, the extra
product of a vocabulary that is no multiple of 8, cards before Volta, that sums of a tiled row are scaled where a later
tile has its largest logit, and that releases before May 2026 hand gradients on as they are.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.context import Step
from tunecast.model.fused_losses import Head, zeros
from tunecast.model.linears import operands
from tunecast.model.loss_chunks import SUMMED_IN_LOOP
from tunecast.model.operation import SYNCHRONISATION, Kind
from tunecast.model.tape import Grads, Tape, Tensor
from tunecast.model.units import DTYPE_BYTES, SIXTEEN_BITS
from tunecast.model.unsloth_rules import (
    SPLIT,
    TODAY,
    Sizes,
    chunk_rows,
    pieces,
    rows_today,
    takes_tiles,
    tile_of,
)

CHUNKED_LAUNCHES = 5
"""Small kernels on labels, their number and the loss before the first chunk (``UnslothFusedLoss.forward``)."""
TODAY_LAUNCHES = 33
"""The same around today's loss: labels, checks, what has one, divisor, scale (``_ce_checked``, ``_ce_impl``)."""
ENDING_LAUNCHES = 6
"""Kernels that turn the rows' losses into the mean, in fp64 (``_ce_impl``)."""


def labelled(step: Step, head: Head) -> int:
    """Tokens with a label: all but the last one of each sample."""
    return max(head.rows - step.run.per_device_train_batch_size, 1)


def logits_sizes(step: Step, head: Head) -> set[int]:
    """Elements of the tensors that hold logits."""
    if step.run.loss_type == TODAY:
        wide = today_sizes(step, head)
        rows, columns = tile_of(step.run, wide) if in_tiles(step, head) else (rows_today(step.run, wide), padded(head))
        return {rows * columns}
    return {rows * head.vocab for rows in chunk_rows(step.run, chunked_sizes(step, head))}


def padded(head: Head) -> int:
    """Columns of a row of logits in memory."""
    return -(-head.vocab // 8) * 8


def trained(step: Step, head: Head) -> Tensor | None:
    """The head's weight where it is trained."""
    weight = step.weight(head.name, head.hidden * head.vocab)
    return weight if weight.needs_grad else None


def product_dtype(step: Step) -> str:
    """The dtype the head multiplies in."""
    return step.autocast_dtype or step.run.dtype


def chunked_sizes(step: Step, head: Head) -> Sizes:
    """What the rules before today's look at."""
    weight = trained(step, head)
    hidden = Tensor(head.rows * head.hidden, step.stream_dtype, None).bytes
    fixed = hidden + (0 if weight is None else 2 * weight.bytes)
    return Sizes(rows=head.rows, hidden=head.hidden, vocab=head.vocab, fixed_bytes=fixed)


def today_sizes(step: Step, head: Head) -> Sizes:
    """What today's rule looks at."""
    return Sizes(rows=labelled(step, head), hidden=head.hidden, vocab=head.vocab)


def in_tiles(step: Step, head: Head) -> bool:
    """Whether today's loss makes its logits in tiles."""
    frozen, half = trained(step, head) is None, product_dtype(step) in SIXTEEN_BITS
    return takes_tiles(step.run, today_sizes(step, head), trains_head=not frozen, half=half)


def small_kernels(tape: Tape, name: str, rows: Tensor, launches: int, *, made: tuple[Tensor, ...] = ()) -> None:
    """Kernels over one number per token; from here on there is the memory of what is `made`, not yet written."""
    tape.kernel(name, Kind.MEMORY, (rows,), made, n_bytes=2 * launches * rows.bytes, launches=launches, dtype="int64")


def handed_on(step: Step, loss: Tensor, x: Tensor, weight: Tensor, to_x: Tensor, to_weight: Tensor | None) -> Tensor:
    """The loss, whose backward multiplies the gradients by a number into new memory."""
    tape = step.tape

    def backward(grad: Tensor) -> Grads:
        tape.kernel("loss.factor", Kind.MEMORY, (grad,), (), launches=3)
        given = [
            None if each is None else ops.elementwise(tape, "loss.scale", (each, grad), each.elements, each.dtype)
            for each in (to_x, to_weight)
        ]
        return tuple(given)

    kept = (to_x,) if to_weight is None else (to_x, to_weight)
    return tape.record(loss, (x, weight), backward, saves=kept)


def chunked(step: Step, x: Tensor, weight: Tensor, target: Tensor, head: Head) -> Tensor:
    """The losses before today's: a graph per chunk, with one 16-bit tensor of vocabulary width."""
    tape, (k, n) = step.tape, (head.hidden, head.vocab)
    cast_x, cast_weight = operands(step, x, weight)
    to_x = tape.empty(x.elements, x.dtype)
    to_weight = zeros(tape, weight.elements, weight.dtype) if weight.needs_grad else None
    small_kernels(tape, "loss.labels", target, CHUNKED_LAUNCHES, made=(to_x,))
    loss = ops.elementwise(tape, "loss.zero", (), 1, "fp32")
    for m in chunk_rows(step.run, chunked_sizes(step, head)):
        part = Tensor(m * k, cast_x.dtype, cast_x.storage)
        logits = ops.gemm(tape, "lm_head", (part, cast_weight), (m, n, k), "nt")
        rows = tape.empty(m, "fp32")
        tape.kernel("cross_entropy", Kind.LOSS, (logits,), (logits, rows), shape=(m, n), n_bytes=3 * logits.bytes)
        tape.kernel("loss.sum", Kind.MEMORY, (rows, loss), (loss,))
        given = ops.gemm(tape, "lm_head", (logits, cast_weight), (m, k, n), "nn")
        if to_weight is not None:
            made = ops.gemm(tape, "lm_head", (logits, part), (n, k, m), "tn")
            tape.kernel(SUMMED_IN_LOOP, Kind.MEMORY, (to_weight, made), (to_weight,))
        tape.kernel("loss.place", Kind.MEMORY, (given,), (to_x,), n_bytes=2 * given.bytes)
    return handed_on(step, loss, x, weight, to_x, to_weight)


def today(step: Step, x: Tensor, weight: Tensor, target: Tensor, head: Head) -> Tensor:
    """The loss of 2026.10.9, over tokens with a label: chunks of rows, or tiles where the head is frozen."""
    tape = step.tape
    by_row = tape.empty(labelled(step, head), "fp32")
    cast_weight = ops.autocast_weight(tape, weight, step.autocast_dtype, step.cache)
    small_kernels(tape, "loss.labels", target, TODAY_LAUNCHES, made=(by_row,))
    tape.kernel(SYNCHRONISATION, Kind.MEMORY, (target,), (), n_bytes=16)
    to_x = zeros(tape, x.elements, x.dtype)
    to_weight = zeros(tape, weight.elements, weight.dtype) if weight.needs_grad else None
    if in_tiles(step, head):
        tiles(step, x, cast_weight, to_x, by_row, head)
    else:
        chunks(step, x, cast_weight, (to_x, to_weight), by_row, head)
    small_kernels(tape, "loss.mean", by_row, ENDING_LAUNCHES)
    loss = ops.elementwise(tape, "loss.mean", (by_row,), 1, "fp32")
    return handed_on(step, loss, x, weight, to_x, to_weight)


def chosen_rows(step: Step, x: Tensor, elements: int) -> Tensor:
    """Labelled rows of the hidden state, copied and in the product's dtype."""
    tape = step.tape
    out = tape.empty(elements, x.dtype)
    tape.kernel("loss.gather", Kind.MEMORY, (x,), (out,), n_bytes=2 * out.bytes)
    return ops.cast(tape, out, product_dtype(step))


def chunks(step: Step, x: Tensor, weight: Tensor, to: tuple[Tensor, Tensor | None], by_row: Tensor, head: Head) -> None:
    """Chunks over one fp32 buffer, whose numbers' first halves take the gradient.

    A chunk's rows and their gradient are named until the next one's are there.
    """
    tape, (to_x, to_weight), (k, n) = step.tape, to, (head.hidden, head.vocab)
    sizes, dtype = today_sizes(step, head), product_dtype(step)
    size = rows_today(step.run, sizes)
    buffer, last_part, last_given = tape.empty(size * padded(head), "fp32"), x, x
    for m in pieces(sizes.rows, size):
        part, logits = chosen_rows(step, x, m * k), Tensor(m * n, "fp32", buffer.storage)
        tape.hold(last_part)
        narrow = Tensor(m * n, dtype, buffer.storage)
        head_product(tape, (part, weight), logits, (m, n, k), "nt", dtype)
        tape.kernel("cross_entropy", Kind.LOSS, (logits,), (by_row,), shape=(m, n), n_bytes=logits.bytes, launches=2)
        moved = logits.bytes + narrow.bytes
        tape.kernel("cross_entropy", Kind.LOSS, (logits, by_row), (narrow,), shape=(m, n), n_bytes=moved)
        given = tape.empty(m * k, "fp32")
        head_product(tape, (narrow, weight), given, (m, k, n), "nn", dtype)
        tape.hold(last_given)
        if to_weight is None and dtype in SIXTEEN_BITS:
            tape.kernel("loss.scale", Kind.MEMORY, (given,), (given,))
        made = ops.elementwise(tape, "loss.cast", (given,), given.elements, to_x.dtype)
        tape.kernel("loss.place", Kind.MEMORY, (made,), (to_x,), n_bytes=2 * made.bytes)
        if to_weight is not None:
            head_product(tape, (narrow, part, to_weight), to_weight, (n, k, m), "tn", dtype)
        last_part, last_given = part, given
    tape.hold(buffer, last_part, last_given)


def head_product(
    tape: Tape, reads: tuple[Tensor, ...], out: Tensor, shape: tuple[int, int, int], layout: str, dtype: str
) -> None:
    """A product into memory that is there already."""
    m, n, k = shape
    flops = ops.gemm_flops(m, n, k)
    tape.kernel("lm_head", Kind.GEMM, reads, (out,), flops=flops, shape=shape, layout=layout, dtype=dtype)


def tiles(step: Step, x: Tensor, weight: Tensor, to_x: Tensor, by_row: Tensor, head: Head) -> None:
    """Tiles of fp32 logits: per tile a product, statistics, probabilities in 16 bits and their product, added up."""
    tape, k, dtype = step.tape, head.hidden, product_dtype(step)
    sizes = today_sizes(step, head)
    rows, columns = tile_of(step.run, sizes)
    buffer, total = tape.empty(rows * columns, "fp32"), tape.empty(rows * k, "fp32")
    splits, before = -(-head.vocab // SPLIT), (x,)
    for m in pieces(sizes.rows, rows):
        part, partial = chosen_rows(step, x, m * k), tape.empty(8 * splits * m, "fp32")
        tape.hold(*before)
        before = (part,)
        summed = Tensor(m * k, "fp32", total.storage)
        tape.kernel("loss.zeros", Kind.MEMORY, (), (summed,), launches=2)
        for n in pieces(head.vocab, columns):
            logits, narrow = Tensor(m * n, "fp32", buffer.storage), Tensor(m * n, dtype, buffer.storage)
            piece = Tensor(k * n, weight.dtype, weight.storage)
            head_product(tape, (part, piece), logits, (m, n, k), "nt", dtype)
            tape.kernel("cross_entropy", Kind.LOSS, (logits,), (partial,), shape=(m, n), n_bytes=logits.bytes)
            moved = logits.bytes + narrow.bytes
            tape.kernel("cross_entropy", Kind.LOSS, (logits, partial), (narrow,), shape=(m, n), n_bytes=moved)
            head_product(tape, (narrow, piece, summed), summed, (m, k, n), "nn", dtype)
        tape.kernel("loss.sum", Kind.MEMORY, (partial,), (by_row,))
        moved = summed.bytes + part.bytes + m * k * DTYPE_BYTES[to_x.dtype]
        tape.kernel("loss.place", Kind.MEMORY, (summed, by_row), (to_x,), n_bytes=moved)
    tape.hold(buffer, total)
