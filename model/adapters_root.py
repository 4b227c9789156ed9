"""Adapters on the table of tokens and on the output head, as PEFT's layers run them.

Both bases stay as they are stored: bitsandbytes quantizes neither. Autocast holds for their products alone.
Source: peft 0.21 ``tuners/lora/layer.py`` (``Embedding.forward``, ``Linear.forward``), PyTorch
``accumulate_grad.h`` for the copy of a gradient whose layout is not its parameter's.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model import primitives_logits as on_logits
from tunecast.model.context import Step
from tunecast.model.operation import Kind
from tunecast.model.products import product
from tunecast.model.root_modules import adapts_embedding, adapts_head
from tunecast.model.tape import Grads, Tape, Tensor


def transposed(tape: Tape, factor: Tensor, vocab: int) -> Tensor:
    """The factor seen the other way round; its first gradient is copied into the factor's layout, later ones added."""
    shape, leaf = (factor.elements // vocab, vocab), factor.leaf or ""

    def backward(grad: Tensor) -> Grads:
        before = tape.grads.get(leaf)
        if before is None:
            return (on_logits.loss_kernel(tape, "adapter_layout", (grad,), grad.dtype, shape),)
        tape.kernel("grad_accumulate", Kind.LOSS, (before, grad), (before,), shape=shape, n_bytes=3 * grad.bytes)
        return (None,)

    return tape.record(Tensor(factor.elements, factor.dtype, None, is_view=True), (factor,), backward)


def embedded_adapter(step: Step, ids: Tensor, result: Tensor) -> Tensor:
    """Embedded tokens plus B A of the tokens: rows of the first factor, a product with the second, scaled."""
    architecture, tape, rank = step.architecture, step.tape, step.run.lora_r
    if not adapts_embedding(architecture, step.run):
        return result
    name, hidden, vocab = architecture.embedding_module, architecture.hidden_size, architecture.vocab_size
    down = step.adapter(f"{name}.lora_A", rank * vocab)
    up = step.adapter(f"{name}.lora_B", hidden * rank)
    low = heavy.embedding(tape, transposed(tape, down, vocab), ids, rank)
    delta = product(step, f"{name}.lora_B", low, up, k=rank, n=hidden)
    delta = ops.scale(tape, delta, name="adapter_scale")
    if architecture.embedding_scale == "table":
        delta = ops.scale(tape, delta, name="embedding_scale")
    total = ops.add(tape, result, delta, name="adapter_add")
    made = ops.cast(tape, total, result.dtype)
    tape.hold(low, delta, result)
    return made


def adapted_head(step: Step, x: Tensor, logits: Tensor, shape: tuple[int, int]) -> Tensor:
    """Logits plus scaling B(A(x)), in the logits' dtype; every kernel but A's is as wide as the vocabulary."""
    architecture, tape, run = step.architecture, step.tape, step.run
    if not adapts_head(architecture, run):
        return logits
    name, hidden, vocab = architecture.head_module, architecture.hidden_size, architecture.vocab_size
    entry = ops.cast(tape, x, run.adapter_dtype, name="adapter_input_cast")
    dropped = ops.dropout(tape, entry, run.lora_dropout)
    down = step.adapter(f"{name}.lora_A", run.lora_r * hidden)
    up = step.adapter(f"{name}.lora_B", vocab * run.lora_r)
    low = product(step, f"{name}.lora_A", dropped, down, k=hidden, n=run.lora_r)
    bias = step.adapter(f"{name}.lora_B.bias", vocab) if run.lora_bias else None
    delta = product(step, f"{name}.lora_B", low, up, k=run.lora_r, n=vocab, bias=bias)
    total = on_logits.add_logits(tape, logits, on_logits.scale_logits(tape, delta, shape), shape)
    made = on_logits.narrow_logits(tape, total, logits.dtype, shape)
    tape.hold(entry, logits)
    return made
