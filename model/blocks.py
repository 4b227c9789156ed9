"""The layers of a decoder as sequences of operators, in the order the Hugging Face code runs them.

Everything is read from the architecture's typed blocks and the run: there is no code per family. A kind of
attention or feed-forward block is one function in `ATTENTIONS` or `MLPS`.
Sources: transformers 5 ``modeling_llama.py`` (and relatives), ``loss_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from tunecast.model import losses
from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model.architecture import Layer
from tunecast.model.attention_blocks import attention_block
from tunecast.model.context import Step, Tables
from tunecast.model.linears import product
from tunecast.model.mlp_blocks import mlp_block
from tunecast.model.norms import norm
from tunecast.model.operation import Phase
from tunecast.model.tape import Tensor

AttentionWriter = Callable[[Step, str, Layer, Tensor, Tables], Tensor]
MlpWriter = Callable[[Step, str, Layer, Tensor], Tensor]

ATTENTIONS: dict[str, AttentionWriter] = {"heads": attention_block}
"""By ``Attention.kind``: (step, where, layer, input, tables) to the output of the block."""
MLPS: dict[str, MlpWriter] = {"dense": mlp_block}
"""By ``Mlp.kind``: (step, where, layer, input) to the output of the block."""


def residual_block(
    step: Step, layer: Layer, x: Tensor, names: tuple[str, str], block: Callable[[Tensor], Tensor]
) -> Tensor:
    """A block with the norms before and after it that its family has, added to the residual stream."""
    tape, hidden, (before, after) = step.tape, step.architecture.hidden_size, names
    entry = x if layer.norm_order == "post" else norm(step, layer.norm, before, x, hidden)
    made = block(entry)
    tape.hold(entry)
    if layer.norm_order != "pre":
        made = norm(step, layer.norm, after, made, hidden)
    if layer.residual_scaled:
        made = ops.scale(tape, made, name="residual_scale")
    return ops.add(tape, x, made, name="residual")


def decoder_layer(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Attention and MLP, each with its norms and added to the residual stream."""
    attend, feed = ATTENTIONS[layer.attention.kind], MLPS[layer.mlp.kind]
    names = f"{where}.input_layernorm", f"{where}.post_attention_layernorm"
    mixed = residual_block(step, layer, x, names, lambda entry: attend(step, where, layer, entry, tables))
    names = f"{where}.pre_feedforward_layernorm", f"{where}.post_feedforward_layernorm"
    out = residual_block(step, layer, mixed, names, lambda entry: feed(step, where, layer, entry))
    step.tape.hold(x)
    return out


def checkpointed_layer(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """A decoder layer that keeps its input only, if the run checkpoints; else the layer itself."""
    if not step.run.gradient_checkpointing:
        return decoder_layer(step, where, layer, x, tables)

    def again(entry: Tensor) -> Tensor:
        outer, step.cache = step.cache, step.cache if step.tape.phase is Phase.FORWARD else {}
        out = decoder_layer(step, where, layer, entry, tables)
        step.cache = outer
        return out

    return step.tape.checkpoint(again, x, reentrant=step.run.reentrant)


def shaped_logits(step: Step, logits: Tensor, shape: tuple[int, int]) -> Tensor:
    """Logits divided by a number (Granite), or capped: divided, tanh, multiplied (Gemma 2)."""
    kind, made = step.architecture.logits, logits
    if kind == "scaled":
        return ops.scale_logits(step.tape, logits, shape)
    if kind == "capped":
        made = ops.scale_logits(step.tape, logits, shape)
        made = ops.scale_logits(step.tape, ops.tanh_logits(step.tape, made, shape), shape)
    return made


def chunked_head_and_loss(step: Step, x: Tensor, labels: Tensor) -> Tensor:
    """Output head and cross-entropy over chunks of tokens."""
    vocab, hidden = step.architecture.vocab_size, step.architecture.hidden_size
    name = "embed_tokens" if step.architecture.tie_word_embeddings else "lm_head"

    def head(rows: Tensor) -> Tensor:
        outer, step.cache = step.cache, step.cache if step.tape.phase is Phase.FORWARD else {}
        made = product(step, "lm_head", rows, step.weight(name, vocab * hidden), k=hidden, n=vocab)
        step.cache = outer
        return made

    batch = step.run.per_device_train_batch_size
    return losses.chunked_nll(step.tape, x, labels, head, batch=batch, hidden=hidden, vocab=vocab)


def head_and_loss(step: Step, x: Tensor, labels: Tensor) -> Tensor:
    """Output head, logits in fp32, shifted labels, cross-entropy over the whole vocabulary."""
    if step.run.loss_type == "chunked_nll":
        return chunked_head_and_loss(step, x, labels)
    tape, vocab, hidden = step.tape, step.architecture.vocab_size, step.architecture.hidden_size
    tape.moment, tape.logits_elements = "loss", step.tokens * vocab
    name = "embed_tokens" if step.architecture.tie_word_embeddings else "lm_head"
    logits = product(step, "lm_head", x, step.weight(name, vocab * hidden), k=hidden, n=vocab)
    shape = (step.tokens, vocab)
    logits = shaped_logits(step, logits, shape)
    wide = ops.cast_logits(tape, logits, shape)
    padded = ops.elementwise(tape, "labels", (labels,), step.tokens + step.run.per_device_train_batch_size, "int64")
    target = padded
    if step.run.per_device_train_batch_size > 1:
        shifted = Tensor(step.tokens, "int64", padded.storage)
        target = ops.elementwise(tape, "labels", (shifted,), step.tokens, "int64")
    loss = heavy.nll_loss(tape, heavy.log_softmax(tape, wide, shape), target, shape)
    tape.hold(x, logits, wide, padded)
    return loss
