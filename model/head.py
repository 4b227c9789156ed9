"""The output head and the loss, by the run's loss path.

Sources: transformers ``loss/loss_utils.py`` of 4.49 and later, of 4.46 to 4.48 and the ``forward`` of 4.45; the other
paths in ``losses.py``, ``fused_losses.py`` and ``unsloth_losses.py``.
"""

from __future__ import annotations

from tunecast.model import fused, fused_losses, losses, unsloth_losses
from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model import primitives_logits as on_logits
from tunecast.model.adapters_root import adapted_head
from tunecast.model.context import Step
from tunecast.model.fused_losses import Head
from tunecast.model.kept_chunks import kept_chunks
from tunecast.model.linears import product
from tunecast.model.loss_chunks import CHUNKED_CE, CHUNKED_NLL, EAGER_UPCAST, KEPT_CHUNKS, TORCHTUNE, head_uses
from tunecast.model.operation import Kind, Phase
from tunecast.model.products import product_by_sample
from tunecast.model.seen_logits import sees_logits
from tunecast.model.tape import Grads, Tape, Tensor
from tunecast.model.unsloth_rules import CAPPED, HALF_FREE, SPACIOUS, TODAY, UNSLOTH_LOSSES

FUSED_LOSSES = {
    "liger": fused_losses.liger,
    "cut_cross_entropy": fused_losses.cut,
    TODAY: unsloth_losses.today,
    **dict.fromkeys((SPACIOUS, CAPPED, HALF_FREE), unsloth_losses.chunked),
}
"""Loss paths that take the head's weight instead of logits."""


def head_name(step: Step) -> str:
    """Name of the head's weight: the embedding's where they are tied, unless PEFT trains a copy of either."""
    architecture = step.architecture
    tied = architecture.tie_word_embeddings and not step.run.has_adapters
    return architecture.embedding_module if tied else architecture.head_module


def head_bias(step: Step) -> Tensor | None:
    """The head's bias, trained with its weight."""
    architecture = step.architecture
    if not architecture.head_bias:
        return None
    if architecture.head_module in step.run.modules_to_save:
        return Tensor(architecture.vocab_size, step.run.saved_dtype, None, leaf="head bias")
    return step.weight("head bias", architecture.vocab_size)


def shaped_logits(step: Step, logits: Tensor, shape: tuple[int, int]) -> Tensor:
    """Logits divided by a number (Granite), or capped: divided, tanh, multiplied (Gemma 2)."""
    kind, made = step.architecture.logits, logits
    if kind == "scaled":
        return on_logits.scale_logits(step.tape, logits, shape)
    if kind == "capped":
        made = on_logits.scale_logits(step.tape, logits, shape)
        made = on_logits.scale_logits(step.tape, on_logits.tanh_logits(step.tape, made, shape), shape)
    return made


def shared_weight(step: Step, name: str, elements: int) -> Tensor:
    """The head's weight; of a wider trained one the 16-bit copy that every chunk's graph goes back to.

    A recomputation makes the copy anew, but gradients follow the graph of the first run.
    """
    tape, weight, dtype = step.tape, step.weight(name, elements), step.autocast_dtype
    uses = head_uses(step.run)
    if weight.leaf is None or uses == 1 or dtype is None or weight.dtype != "fp32":
        return weight  # autocast keeps copies of fp32 leaves alone
    alias, tied = f"{name} in {dtype}", name == step.architecture.embedding_module
    tape.shared_leaves |= {alias: uses, name: 1 + tied}
    tape.narrow_leaves[alias] = (name, weight.dtype)
    if alias not in step.cache:
        made = ops.elementwise(tape, "adapter_cast", (weight,), elements, str(dtype))
        step.cache[alias] = Tensor(elements, made.dtype, made.storage, leaf=alias)
    return step.cache[alias]


def chunked_head_and_loss(step: Step, x: Tensor, labels: Tensor) -> Tensor:
    """Output head and cross-entropy over chunks of tokens, of TRL or torchtune.

    Those of ``chunked_ce`` are cut out of every sample: a frozen head multiplies sample by sample, a trained one a copy
    of them below each other; autocast's cast makes that anyway.
    """
    vocab, hidden = step.architecture.vocab_size, step.architecture.hidden_size
    name = head_name(step)

    batch, trained = step.run.per_device_train_batch_size, step.weight(name, vocab * hidden).needs_grad
    apart = step.run.loss_type == CHUNKED_CE and step.autocast_dtype in (None, x.dtype)

    def head(rows: Tensor) -> Tensor:
        outer, step.cache = step.cache, step.cache if step.tape.phase is Phase.FORWARD else {}
        weight = shared_weight(step, name, vocab * hidden)
        if apart and not trained:
            made = product_by_sample(step, "lm_head", rows, weight, batch, k=hidden, n=vocab)
        else:
            made = product(step, "lm_head", rows, weight, k=hidden, n=vocab)
        step.cache = outer
        return made

    if step.run.loss_type in KEPT_CHUNKS:
        joined = apart and trained and batch > 1
        return kept_chunks(step.tape, x, labels, head, step.run, hidden=hidden, vocab=vocab, joined=joined)
    return losses.chunked_nll(step.tape, x, labels, head, batch=batch, hidden=hidden, vocab=vocab)


def fused_head_and_loss(step: Step, x: Tensor, labels: Tensor) -> Tensor:
    """Head and loss in one, over every token; the older code cuts the last token of each sample off first."""
    tape, batch, hidden = step.tape, step.run.per_device_train_batch_size, step.architecture.hidden_size
    tape.moment = "loss"
    rows, kept = step.tokens, x
    if step.run.shifts_logits:
        rows -= batch
        kept = losses.part_of(tape, x, rows * hidden, name="loss.shift", copied=batch > 1)
    target, uncut = targets(step, labels, rows)
    head = Head(name=head_name(step), hidden=hidden, vocab=step.architecture.vocab_size, rows=rows)
    of_unsloth = step.run.loss_type in UNSLOTH_LOSSES
    chunk = {fused_losses.chunk_tokens(head) * head.vocab}
    tape.logits_sizes = unsloth_losses.logits_sizes(step, head) if of_unsloth else chunk
    loss = FUSED_LOSSES[step.run.loss_type](step, kept, step.weight(head.name, hidden * head.vocab), target, head)
    tape.hold(x, kept, target, uncut)
    return loss


def cut_logits(tape: Tape, wide: Tensor, rows: int, vocab: int, *, copied: bool) -> Tensor:
    """Logits without the last token of each sample: copied where samples are several; the gradient into zeros."""
    shape = (rows, vocab)
    if copied:
        out = tape.empty(rows * vocab, wide.dtype)
        tape.kernel("logits_shift", Kind.LOSS, (), (out,), n_bytes=2 * out.bytes, shape=shape)
        tape.hold(wide)
    else:
        out = Tensor(rows * vocab, wide.dtype, wide.storage, is_view=True)

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(wide.elements, grad.dtype)
        moved = full.bytes + 2 * grad.bytes
        tape.kernel("logits_shift", Kind.LOSS, (grad,), (full,), n_bytes=moved, shape=shape, launches=2)
        return (full,)

    return tape.record(out, (wide,), backward)


def targets(step: Step, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Labels moved by one, and what they were cut from: padded first, or (before 4.49) as they are."""
    tape, batch = step.tape, step.run.per_device_train_batch_size
    whole = labels
    if not step.run.shifts_logits:
        whole = ops.elementwise(tape, "labels", (labels,), step.tokens + batch, "int64")
    if batch == 1:
        return whole, whole
    view = Tensor(rows, "int64", whole.storage)
    return ops.elementwise(tape, "labels", (view,), rows, "int64"), whole


def loss_of_logits(step: Step, logits: Tensor, target: Tensor, rows: int) -> Tensor:
    """Cross-entropy over the whole vocabulary, by PyTorch's kernels or one fused one."""
    shape = (rows, step.architecture.vocab_size)
    if step.run.fuses("cross_entropy"):
        return fused.cross_entropy(step.tape, logits, target, shape)
    return heavy.nll_loss(step.tape, heavy.log_softmax(step.tape, logits, shape), target, shape)


def head_and_loss(step: Step, x: Tensor, labels: Tensor) -> Tensor:
    """Output head, logits in fp32, shifted labels, cross-entropy over the whole vocabulary."""
    if step.run.loss_type in (CHUNKED_NLL, *KEPT_CHUNKS):
        return chunked_head_and_loss(step, x, labels)
    if step.run.loss_type in FUSED_LOSSES:
        return fused_head_and_loss(step, x, labels)
    tape, vocab, hidden = step.tape, step.architecture.vocab_size, step.architecture.hidden_size
    batch, rows = step.run.per_device_train_batch_size, step.tokens
    tape.moment, tape.logits_sizes = "loss", {rows * vocab, (rows - batch) * vocab}
    bias = head_bias(step)
    weight = step.weight(head_name(step), vocab * hidden)
    logits = product(step, "lm_head", x, weight, k=hidden, n=vocab, bias=bias)
    logits = adapted_head(step, x, logits, (rows, vocab))
    logits = shaped_logits(step, logits, (rows, vocab))
    name = EAGER_UPCAST if step.run.stack == TORCHTUNE else "logits_cast"
    wide = chosen = on_logits.narrow_logits(tape, logits, "fp32", (rows, vocab), name=name)
    if step.run.shifts_logits:
        rows -= batch
        chosen = cut_logits(tape, wide, rows, vocab, copied=batch > 1)
    if step.run.keeps_outputs:
        tape.keep(wide if step.run.hf_code == "4.45" else logits)
    target, uncut = targets(step, labels, rows)
    loss = loss_of_logits(step, chosen, target, rows)
    tape.hold(x, wide, chosen, uncut, *(() if step.run.hf_code == "4.45" else (logits,)))
    sees_logits(step, wide if step.run.hf_code == "4.45" else logits, labels)
    return loss
