"""torchtune's losses: head and cross-entropy over eight chunks of every sample, each of which keeps its probabilities.

No checkpoint is around a chunk, so that log-probabilities of every token lie in fp32 until the backward reaches them;
what the chunks save is that the logits' copy in fp32, and the gradients, are of one chunk at a time.

``chunked_ce``
    ``CEWithChunkedOutputLoss`` of torchtune 0.3 to 0.6: the model makes the logits of all chunks first, and the recipe
    has them by name until the loss is there (``del logits``).
``linear_ce``
    ``LinearCrossEntropyLoss`` of torchtune after 0.6: head and loss chunk by chunk, so that a chunk's logits go with
    it, and tokens without a label are picked out first.

Sources: torchtune ``modules/loss/ce_chunked_output_loss.py`` of 0.6.1 and ``cross_entropy_loss.py`` after it,
``modules/transformer.py`` (``unembed``, ``chunked_output``), ``recipes/lora_finetune_single_device.py``
(``_loss_step``), ``training/_compile.py`` (``compile_loss``: each chunk's cross-entropy is a graph).
Left out: tokens without a label but the last of each sample.
"""

from __future__ import annotations

from collections.abc import Iterator

from tunecast.model import primitives as ops
from tunecast.model import primitives_gpt as gpt
from tunecast.model import primitives_heavy as heavy
from tunecast.model import primitives_logits as on_logits
from tunecast.model.loss_chunks import BETWEEN_CHUNKS, LINEAR_CE, chunk_lengths
from tunecast.model.losses import Head, gathered, part_of
from tunecast.model.operation import SYNCHRONISATION, Kind
from tunecast.model.run import Run
from tunecast.model.tape import Tape, Tensor


def kept_chunks(
    tape: Tape, x: Tensor, labels: Tensor, head: Head, run: Run, *, hidden: int, vocab: int, joined: bool
) -> Tensor:
    """Mean loss over all tokens but the last of each sample; `joined`: the head multiplies a chunk's samples together,
    which a copy lays out for it."""
    tape.moment = "loss"
    shifted = ops.elementwise(tape, "labels", (labels,), labels.elements, "int64")
    valid = ops.elementwise(tape, "loss.valid", (shifted,), labels.elements, "bool")
    ops.elementwise(tape, "loss.sum", (valid,), 1, "int64")
    losses = linear_losses if run.loss_type == LINEAR_CE else chunked_losses
    total: Tensor | None = None
    for loss in losses(tape, x, shifted, head, run, hidden=hidden, vocab=vocab, joined=joined):
        total = begun(tape, loss) if total is None else added(tape, total, loss)
    assert total is not None
    tape.hold(x, shifted)
    return ops.scale(tape, total, name=BETWEEN_CHUNKS)


def chunked_losses(
    tape: Tape, x: Tensor, shifted: Tensor, head: Head, run: Run, *, hidden: int, vocab: int, joined: bool
) -> Iterator[Tensor]:
    """Losses of chunks of logits that are all made first, and are there until the last loss is."""
    batch = run.per_device_train_batch_size
    rows = [batch * length for length in chunk_lengths(run)]
    tape.logits_sizes = {n * vocab for n in rows}
    parts = gpt.split(tape, x, tuple(n * hidden for n in rows), name="loss.chunk")
    made = [head(together(tape, part) if joined else part) for part in parts]
    targets = [copied_labels(tape, shifted, n, batch) for n in rows]
    for logits, target in zip(made, targets, strict=True):
        yield chunk_loss(tape, logits, target, vocab)
    tape.hold(*made)


def linear_losses(
    tape: Tape, x: Tensor, shifted: Tensor, head: Head, run: Run, *, hidden: int, vocab: int, joined: bool
) -> Iterator[Tensor]:
    """Losses of chunks that make their logits themselves, of the rows that have a label."""
    del joined
    batch, lengths = run.per_device_train_batch_size, chunk_lengths(run)
    rows = [batch * length for length in lengths]
    parts = [part_of(tape, x, n * hidden, name="loss.chunk", copied=False) for n in rows]
    for part, n in zip(parts, rows, strict=True):
        labelled = max(n - batch, 1) if part is parts[-1] else n
        tape.logits_sizes = {labelled * vocab}
        labels = Tensor(n, "int64", shifted.storage)
        valid = ops.elementwise(tape, "loss.valid", (labels,), n, "bool")
        none = ops.elementwise(tape, "loss.sum", (valid,), 1, "int64")
        none = ops.elementwise(tape, "loss.none", (none,), 1, "bool")
        tape.kernel(SYNCHRONISATION, Kind.MEMORY, (none,), (), n_bytes=2)
        there = Tensor(labelled, "int64", shifted.storage)
        target = ops.elementwise(tape, "loss.gather", (there, *places(tape, valid, labelled)), labelled, "int64")
        chosen = gathered(tape, part, places(tape, valid, labelled), labelled * hidden)
        yield chunk_loss(tape, head(chosen), target, vocab)


def places(tape: Tape, valid: Tensor, labelled: int) -> tuple[Tensor, Tensor]:
    """Sample and place of each labelled row, whose number the host waits for (``nonzero``)."""
    count = ops.elementwise(tape, "loss.sum", (valid,), 1, "int64")
    tape.kernel(SYNCHRONISATION, Kind.MEMORY, (count,), (), n_bytes=16)
    rows = ops.elementwise(tape, "loss.rows", (), labelled, "int64")
    sample, place = (ops.elementwise(tape, "loss.rows", (rows,), labelled, "int64") for _ in range(2))
    return sample, place


def together(tape: Tape, part: Tensor) -> Tensor:
    """Rows of a chunk of several samples below each other: a copy, which a product with a trained weight makes."""
    whole = Tensor(part.elements, part.dtype, part.storage)
    out = ops.elementwise(tape, "loss.chunk", (whole,), part.elements, part.dtype)
    return tape.record(out, (part,), lambda grad: (grad,))


def copied_labels(tape: Tape, shifted: Tensor, rows: int, batch: int) -> Tensor:
    """Labels of a chunk: a copy of several samples'; of one a view, which no compiled graph shares with others."""
    if batch > 1:
        return ops.elementwise(tape, "labels", (Tensor(rows, "int64", shifted.storage),), rows, "int64")
    tape.keep(shifted)
    return Tensor(rows, "int64", None)


def chunk_loss(tape: Tape, logits: Tensor, target: Tensor, vocab: int) -> Tensor:
    """Summed cross-entropy of one chunk, over logits in fp32."""
    shape = (target.elements, vocab)
    wide = on_logits.cast_logits(tape, logits, shape)
    loss = heavy.nll_loss(tape, heavy.log_softmax(tape, wide, shape), target, shape)
    tape.hold(logits, wide)
    return loss


def begun(tape: Tape, loss: Tensor) -> Tensor:
    """``0.0 + loss``."""
    out = ops.elementwise(tape, BETWEEN_CHUNKS, (loss,), 1, "fp32")
    return tape.record(out, (loss,), lambda grad: (grad,))


def added(tape: Tape, total: Tensor, loss: Tensor) -> Tensor:
    """``total += loss``, in place; both get the gradient as it is."""
    tape.kernel(BETWEEN_CHUNKS, Kind.MEMORY, (total, loss), (total,))
    out = Tensor(1, "fp32", total.storage)

    def backward(grad: Tensor) -> tuple[Tensor, Tensor]:
        shared = Tensor(1, grad.dtype, grad.storage, is_view=True)
        return (shared, shared)

    return tape.record(out, (total, loss), backward)
