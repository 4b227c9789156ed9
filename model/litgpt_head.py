"""LitGPT's output head and loss: chunks of 128 tokens of every sample, Lightning's copies in fp32, cross-entropy.

With adapters the head runs chunk by chunk and the chunks' logits are never joined; a full fine-tune takes all logits
at once and chunks the cross-entropy alone. Fabric converts what the model returns to fp32, and the training loop has
these logits by name to the end of the backward.
Sources: litgpt ``finetune/lora.py``, ``finetune/full.py``, ``utils.py`` (``chunked_cross_entropy``); lightning
``fabric/wrappers.py``.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model import primitives_gpt as gpt
from tunecast.model import primitives_heavy as heavy
from tunecast.model import primitives_logits as on_logits
from tunecast.model.architecture import Architecture, Linear
from tunecast.model.context import Step
from tunecast.model.head import shaped_logits
from tunecast.model.litgpt import FIRST, SLICED
from tunecast.model.litgpt_linears import linear_map
from tunecast.model.operation import Kind
from tunecast.model.run import Run
from tunecast.model.tape import Event, Grads, Storage, Tape, Tensor, allocated_bytes, storages
from tunecast.model.units import DTYPE_BYTES

CHUNK_TOKENS = 128
"""``lm_head_chunk_size`` of ``fit`` and ``chunk_size`` of ``chunked_cross_entropy``."""
RETURNED_DTYPE = "fp32"
"""``convert_output`` makes the default dtype outside the precision's context."""


def chunks_of(rows: int) -> list[int]:
    """Sizes of chunks of so many rows."""
    return [min(CHUNK_TOKENS, rows - start) for start in range(0, rows, CHUNK_TOKENS)]


def returned_bytes(architecture: Architecture, run: Run) -> int:
    """The logits in fp32 that the training loop still has by name while the optimizer works."""
    batch, vocab, size = run.per_device_train_batch_size, architecture.vocab_size, DTYPE_BYTES[RETURNED_DTYPE]
    chunks = chunks_of(run.max_length) if run.has_adapters else [run.max_length]
    return sum(allocated_bytes(size * batch * rows * vocab) for rows in chunks)


def logits_of(step: Step, x: Tensor) -> Tensor:
    """The head over some rows, capped where the model caps."""
    architecture = step.architecture
    linear = Linear(
        name=architecture.head_module,
        in_features=architecture.hidden_size,
        out_features=architecture.vocab_size,
        bias=architecture.head_bias,
    )
    made = linear_map(step, "", linear, x)
    if step.run.has_adapters and architecture.code not in SLICED:
        return made  # the chunks of earlier code are not capped
    return shaped_logits(step, made, (made.elements // architecture.vocab_size, architecture.vocab_size))


def head_and_loss(step: Step, x: Tensor, labels: Tensor) -> Tensor:
    """Logits in fp32 and the mean cross-entropy of shifted labels, chunk by chunk."""
    tape, vocab, batch = step.tape, step.architecture.vocab_size, step.run.per_device_train_batch_size
    tape.moment = "loss"
    tape.logits_sizes = {rows * batch * vocab for rows in range(step.run.max_length + 1)}
    tape.logits_sizes |= {rows * vocab for rows in range(CHUNK_TOKENS + 1)}
    losses = chunked_head(step, x) if step.run.has_adapters else whole_head(step, x)
    tokens = step.tokens - batch
    mask = ops.elementwise(tape, "loss.mask", (labels,), tokens, "bool")
    count = ops.elementwise(tape, "loss.count", (mask,), 1, "int64")
    joined = joined_losses(tape, losses)
    total = summed(tape, joined)
    for name in ("loss.one", "loss.count"):
        count = ops.elementwise(tape, name, (count,), 1, "int64")
    return ops.scale(tape, total, name="loss.mean")


def hold_earlier(step: Step, wide: list[Tensor]) -> None:
    """The logits of the micro-batch before die now, when the loop takes their name for the new ones.

    Of the first micro-batch on the tape, those of a step before: as large as its own, alive from the beginning.
    """
    tape = step.tape
    for part in wide:
        tape.keep(part)
    if step.architecture.code == FIRST:
        return
    outliving = {tensor.storage: tensor for tensor in (*wide, *step.outliving) if tensor.storage is not None}
    step.outliving.clear()
    if not step.earlier:
        step.earlier = [Tensor(t.elements, t.dtype, Storage(s.bytes, s.part)) for s, t in outliving.items()]
        begin = Event("begin", None, (), storages(step.earlier))
        begin.moment = "forward"
        tape.events.insert(0, begin)
    tape.hold(*step.earlier)
    step.earlier = list(outliving.values())


def chunked_head(step: Step, x: Tensor) -> list[Tensor]:
    """Losses of each chunk of tokens, the last one shorter by the token without a label."""
    tape, vocab, batch = step.tape, step.architecture.vocab_size, step.run.per_device_train_batch_size
    sizes = chunks_of(step.run.max_length)
    width = batch * step.architecture.hidden_size
    made = [logits_of(step, part) for part in gpt.split(tape, x, tuple(n * width for n in sizes), name="loss.chunk")]
    tape.hold(x)
    wide = [on_logits.cast_logits(tape, part, (part.elements // vocab, vocab)) for part in made]
    tape.hold(*made)
    hold_earlier(step, wide)
    last = cut(tape, wide[-1], batch * (sizes[-1] - 1) * vocab, vocab)
    rows = [flat(tape, part, vocab, batch) for part in (*wide[:-1], last)]
    return [token_losses(tape, part, vocab) for part in rows]


def whole_head(step: Step, x: Tensor) -> list[Tensor]:
    """Losses of each chunk of rows of all samples, of logits made at once."""
    tape, vocab, batch = step.tape, step.architecture.vocab_size, step.run.per_device_train_batch_size
    made = logits_of(step, x)
    tape.hold(x)
    wide = on_logits.cast_logits(tape, made, (step.tokens, vocab))
    tape.hold(made)
    hold_earlier(step, [wide])
    rows = flat(tape, cut(tape, wide, (step.tokens - batch) * vocab, vocab), vocab, batch)
    sizes = tuple(n * vocab for n in chunks_of(step.tokens - batch))
    losses = [token_losses(tape, part, vocab) for part in split_rows(tape, rows, sizes, vocab)]
    tape.hold(rows)
    return losses


def split_rows(tape: Tape, x: Tensor, sizes: tuple[int, ...], vocab: int) -> list[Tensor]:
    """Rows of logits in chunks; their gradients are joined in one kernel."""
    waiting: list[Tensor] = []

    def backward(grad: Tensor) -> Grads:
        waiting.append(grad)
        if len(waiting) < len(sizes):
            return (None,)
        joined = ops.elementwise(tape, "loss.split", tuple(waiting), x.elements, grad.dtype, kind=Kind.LOSS)
        tape.events[-1].shape = (x.elements // vocab, vocab)
        return (joined,)

    return [tape.record(Tensor(size, x.dtype, x.storage, is_view=True), (x,), backward) for size in sizes]


def cut(tape: Tape, wide: Tensor, elements: int, vocab: int) -> Tensor:
    """Logits without the last token of each sample: a view, whose gradient is written into zeros."""
    out = Tensor(elements, wide.dtype, wide.storage, is_view=True)

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(wide.elements, grad.dtype)
        moved, shape = full.bytes + 2 * grad.bytes, (grad.elements // vocab, vocab)
        tape.kernel("logits_shift", Kind.LOSS, (grad,), (full,), n_bytes=moved, shape=shape, launches=2)
        return (full,)

    return tape.record(out, (wide,), backward)


def flat(tape: Tape, x: Tensor, vocab: int, batch: int) -> Tensor:
    """Samples' rows below each other: a copy where a part of several samples was cut out."""
    if batch == 1 or not x.is_view:
        return x
    source = Tensor(x.elements, x.dtype, x.storage)
    out = ops.elementwise(tape, "logits_shift", (source,), x.elements, x.dtype, kind=Kind.LOSS)
    tape.events[-1].shape = (x.elements // vocab, vocab)
    return tape.record(out, (x,), lambda grad: (grad,))


def token_losses(tape: Tape, logits: Tensor, vocab: int) -> Tensor:
    """Cross-entropy of every row (``reduction="none"``)."""
    rows = logits.elements // vocab
    shape, target = (rows, vocab), Tensor(rows, "int64", None)
    probs = heavy.log_softmax(tape, logits, shape)
    out, picked = tape.empty(rows, "fp32"), 4 * rows
    n_bytes = picked + target.bytes + out.bytes + 4
    tape.kernel("nll_loss", Kind.LOSS, (probs,), (out,), shape=shape, n_bytes=n_bytes)

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(probs.elements, probs.dtype)
        moved = full.bytes + picked + target.bytes + 8
        tape.kernel("nll_loss", Kind.LOSS, (grad, probs), (full,), shape=shape, n_bytes=moved, launches=2)
        return (full,)

    return tape.record(out, (probs,), backward, saves=(probs,))


def joined_losses(tape: Tape, losses: list[Tensor]) -> Tensor:
    """``cat``: one kernel; each chunk's gradient is a view."""
    out = ops.elementwise(tape, "loss.join", losses, sum(part.elements for part in losses), "fp32")

    def backward(grad: Tensor) -> Grads:
        return [Tensor(part.elements, grad.dtype, grad.storage, is_view=True) for part in losses]

    return tape.record(out, losses, backward)


def summed(tape: Tape, losses: Tensor) -> Tensor:
    """Their sum; the gradient is one number for all."""
    out = ops.elementwise(tape, "loss.sum", (losses,), 1, "fp32")
    return tape.record(out, (losses,), lambda grad: (Tensor(losses.elements, grad.dtype, grad.storage, is_view=True),))
