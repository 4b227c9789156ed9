"""Loss paths beside the full logits: the head and its cross-entropy over a few tokens at a time.

``chunked_nll`` is TRL's (``sft_trainer.py``, pull requests 5575, 5676 and 6314): labels are shifted, tokens with
a label gathered, and each chunk of 256 is a checkpoint of its own, so that its logits live once in the forward
and again in the backward. Since TRL 1.13 a chunk's product runs in the activations' dtype and its logits are
then cast; 1.7 to 1.12 copied the whole head to fp32 for every chunk, which is not counted here.
Left out: tokens without a label, which TRL skips.
"""

from __future__ import annotations

from collections.abc import Callable

from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model import primitives_logits as on_logits
from tunecast.model.loss_chunks import CHUNK_TOKENS
from tunecast.model.operation import SYNCHRONISATION, Kind
from tunecast.model.tape import Grads, Tape, Tensor

CHUNKED_NOTE = (
    "chunked_nll is TRL's of 1.13 and later with every token labelled; 1.7 to 1.12 also copy the output head to fp32 "
    "for each chunk, and tokens without a label cost no head."
)
"""What to know about TRL's ``chunked_nll``; other frameworks' chunks are their own."""

FULL_NOTE = (
    "TRL since 1.15 makes tiles of the logits whatever loss_type says, and this run holds them whole: leave "
    "--loss-type out, or name the version that it is of (--stack-version 1.14)."
)
"""Of ``nll`` asked for beside today's TRL."""

Head = Callable[[Tensor], Tensor]
"""The output head: rows of the hidden state to rows of logits."""


def part_of(tape: Tape, x: Tensor, elements: int, *, name: str, copied: bool) -> Tensor:
    """Some rows of `x`: a view or a copy, whose gradient is written into zeros of the full size."""
    if copied:
        source = Tensor(elements, x.dtype, x.storage)
        out = ops.elementwise(tape, name, (source,), elements, x.dtype)
    else:
        out = Tensor(elements, x.dtype, x.storage, is_view=True)

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(x.elements, grad.dtype)
        tape.kernel(name, Kind.MEMORY, (grad,), (full,), n_bytes=2 * grad.bytes + full.bytes, launches=2)
        return (full,)

    return tape.record(out, (x,), backward)


def gathered(tape: Tape, x: Tensor, rows: tuple[Tensor, ...], elements: int) -> Tensor:
    """Rows picked by index; the gradient is added into zeros (two kernels)."""
    out = ops.elementwise(tape, "loss.gather", (x, *rows), elements, x.dtype)

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(x.elements, grad.dtype)
        tape.kernel("loss.zeros", Kind.MEMORY, (), (full,))
        tape.kernel("loss.scatter", Kind.MEMORY, (full, *rows, grad), (full,))
        return (full,)

    return tape.record(out, (x,), backward, saves=rows)


def statistics(tape: Tape, wide: Tensor, log_probs: Tensor, target: Tensor, shape: tuple[int, int]) -> None:
    """Tokens guessed right and the entropy, which TRL logs: no gradient flows through them."""
    tokens = shape[0]

    guess = on_logits.loss_kernel(tape, "loss.argmax", (wide,), "int64", shape, elements=tokens)
    same = ops.elementwise(tape, "loss.equal", (guess, target), tokens, "bool")
    count = ops.elementwise(tape, "loss.sum", (same,), 1, "int64")
    ops.elementwise(tape, "loss.cast", (count,), 1, "fp32")
    probs = on_logits.loss_kernel(tape, "loss.exp", (log_probs,), "fp32", shape)
    if tape.would_grad(log_probs):
        tape.mark_saved()
    weighed = on_logits.loss_kernel(tape, "loss.weigh", (probs, log_probs), "fp32", shape)
    by_token = on_logits.loss_kernel(tape, "loss.sum", (weighed,), "fp32", shape, elements=tokens)
    total = ops.elementwise(tape, "loss.sum", (by_token,), 1, "fp32")
    ops.elementwise(tape, "loss.negative", (total,), 1, "fp32")


def chunk_loss(tape: Tape, head: Head, target: Tensor, rows: Tensor, *, vocab: int) -> Tensor:
    """Summed loss of one chunk: logits, cast to fp32, log-softmax, the targets' terms, statistics."""
    tokens = target.elements
    shape = (tokens, vocab)
    tape.logits_sizes = {tokens * vocab}
    logits = head(rows)
    wide = on_logits.cast_logits(tape, logits, shape)
    log_probs = heavy.log_softmax(tape, wide, shape)
    loss = heavy.nll_loss(tape, log_probs, target, shape)
    statistics(tape, wide, log_probs, target, shape)
    tape.hold(wide, log_probs)
    return loss


def chunked_nll(tape: Tape, x: Tensor, labels: Tensor, head: Head, *, batch: int, hidden: int, vocab: int) -> Tensor:
    """Mean loss over all tokens but the last of each sample, in checkpointed chunks."""
    tape.moment = "loss"
    tokens = labels.elements - batch
    kept = part_of(tape, x, tokens * hidden, name="loss.shift", copied=batch > 1)
    shifted = Tensor(tokens, "int64", None)
    if batch > 1:
        shifted = ops.elementwise(tape, "loss.shift", (shifted,), tokens, "int64")
    valid = ops.elementwise(tape, "loss.valid", (shifted,), tokens, "bool")
    count = ops.elementwise(tape, "loss.sum", (valid,), 1, "int64")
    tape.kernel(SYNCHRONISATION, Kind.MEMORY, (count,), (), n_bytes=16)
    rows = ops.elementwise(tape, "loss.rows", (), tokens, "int64")
    chosen = gathered(tape, kept, (rows,), tokens * hidden)
    targets = ops.elementwise(tape, "loss.gather", (shifted, rows), tokens, "int64")
    total = ops.elementwise(tape, "loss.zero", (), 1, "fp32")
    for start in range(0, tokens, CHUNK_TOKENS):
        size = min(CHUNK_TOKENS, tokens - start)
        target = Tensor(size, "int64", targets.storage)
        part = part_of(tape, chosen, size * hidden, name="loss.chunk", copied=False)

        def one(entry: Tensor, target: Tensor = target) -> Tensor:
            return chunk_loss(tape, head, target, entry, vocab=vocab)

        loss = tape.checkpoint(one, part, reentrant=False)
        total = ops.add(tape, total, loss, name="loss.add")
    tape.hold(x, chosen, targets, rows)
    return ops.scale(tape, total, name="loss.mean")
