"""The layers of a decoder as sequences of operators, in the order the Hugging Face code runs them.

Everything is read from the architecture's typed blocks and the run: there is no code per family. A kind of
attention or feed-forward block is one function in `ATTENTIONS` or `MLPS`.
Sources: transformers 5 ``modeling_llama.py`` (and relatives), ``loss_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from tunecast.model import experts_gemma, litgpt_blocks
from tunecast.model import primitives as ops
from tunecast.model.architecture import Layer
from tunecast.model.attention_blocks import attention_block
from tunecast.model.attention_convolved import convolved_block
from tunecast.model.attention_gemma import KIND as GEMMA
from tunecast.model.attention_gemma import gemma_attention
from tunecast.model.attention_own import bloom_attention, falcon_attention, gptj_attention, mpt_attention
from tunecast.model.attention_qwen import delta_attention, gated_attention
from tunecast.model.context import Step, Tables
from tunecast.model.experts import experts_block, gated_shared_block
from tunecast.model.experts_modules import KIND, expert_modules_block
from tunecast.model.inputs_of_layers import with_own_input
from tunecast.model.latent_attention import latent_attention_block
from tunecast.model.litgpt import is_litgpt
from tunecast.model.mlp_blocks import mlp_block
from tunecast.model.norms import norm
from tunecast.model.operation import Phase
from tunecast.model.parallel_blocks import enter_block, leave_block
from tunecast.model.shapes import BEHIND_GATE, BESIDE, CONVOLVED, DELTA, DELTA_JOINED, GATED, STORED, TURNED_FIRST
from tunecast.model.tape import Tensor

AttentionWriter = Callable[[Step, str, Layer, Tensor, Tables], Tensor]
MlpWriter = Callable[[Step, str, Layer, Tensor], Tensor]

ATTENTIONS: dict[str, AttentionWriter] = {
    "heads": attention_block,
    TURNED_FIRST: attention_block,
    "latent": latent_attention_block,
    "bloom": bloom_attention,
    "mpt": mpt_attention,
    "gptj": gptj_attention,
    "falcon": falcon_attention,
    GEMMA: gemma_attention,
    GATED: gated_attention,
    CONVOLVED: convolved_block,
    DELTA: delta_attention,
    DELTA_JOINED: delta_attention,
}
"""By ``Attention.kind``: (step, where, layer, input, tables) to the output of the block."""
MLPS: dict[str, MlpWriter] = {
    "dense": mlp_block,
    "experts": experts_block,
    BEHIND_GATE: gated_shared_block,
    KIND: expert_modules_block,
}
"""By ``Mlp.kind``: (step, where, layer, input) to the output of the block."""


def residual_block(
    step: Step, layer: Layer, x: Tensor, names: tuple[str, str], block: Callable[[Tensor], Tensor], kept: list[Tensor],
    *, rebound: bool = False,
) -> Tensor:  # fmt: skip
    """A block with the norms before and after it that its family has, added to the residual stream.

    `kept` takes what the real code still has by name; `rebound` says that the block's input is not among it while
    the block runs.
    """
    tape, hidden, (before, after) = step.tape, step.architecture.hidden_size, names
    entry = x if layer.norm_order == "post" else norm(step, layer.norm, before, x, hidden)
    made = leave_block(step, block(enter_block(step, entry)))
    if not rebound:
        tape.hold(entry)
    if layer.norm_order != "pre":
        made = norm(step, layer.norm, after, made, hidden)
    if layer.residual_scaled:
        made = ops.scale(tape, made, name="residual_scale")
    made = ops.dropout(tape, made, layer.dropout)
    if layer.residual_first:
        kept += (entry, made)
    return ops.add(tape, x, made, name="residual")


def decoder_layer(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables, own: Tensor | None = None) -> Tensor:
    """Attention and MLP, each with its norms and added to the residual stream; then what the layer makes of its `own`
    input."""
    if layer.attention.kind == litgpt_blocks.KIND:
        return litgpt_blocks.block(step, where, layer, x, tables)
    if layer.parallel != "none":
        return parallel_layer(step, where, layer, x, tables)
    attend = ATTENTIONS[layer.attention.kind]
    kept: list[Tensor] = []
    if step.tape.phase is not Phase.FORWARD:
        step.returned.clear()
    at, below = f"{where}.attn", f"{where}.mlp"
    names = f"{where}.input_layernorm", f"{where}.post_attention_layernorm"
    mixed = residual_block(step, layer, x, names, lambda entry: attend(step, at, layer, entry, tables), kept)
    names = f"{where}.pre_feedforward_layernorm", f"{where}.post_feedforward_layernorm"
    inline = layer.mlp.activation == "relu"  # OPT's feed-forward is no module: its layer reuses one variable

    def fed(entry: Tensor) -> Tensor:
        if layer.mlp.kind == BESIDE:
            return experts_gemma.beside_experts(step, below, layer, entry, mixed)
        return MLPS[layer.mlp.kind](step, below, layer, entry)

    out = residual_block(step, layer, mixed, names, fed, kept, rebound=inline)
    if own is not None:
        out = with_own_input(step, where, layer, out, own)
    if layer.output_scaled:
        out = ops.scaled_in_place(step.tape, out, name="layer_scale")
    step.tape.hold(x, *kept, *step.returned, *step.weights)
    step.weights.clear()
    del step.returned[:-1]
    return out


def parallel_layer(step: Step, where: str, layer: Layer, x: Tensor, tables: Tables) -> Tensor:
    """Attention and MLP of the same input, both added to it: x + attention(norm(x)) + mlp(norm(x))."""
    attend, feed = ATTENTIONS[layer.attention.kind], MLPS[layer.mlp.kind]
    if step.tape.phase is not Phase.FORWARD:
        step.returned.clear()

    def normed(name: str) -> Tensor:
        return norm(step, layer.norm, f"{where}.{name}", x, step.architecture.hidden_size)

    to_attention = to_mlp = normed("input_layernorm")
    if layer.parallel == "norms-first":
        to_mlp = normed("post_attention_layernorm")
    mixed = attend(step, f"{where}.attn", layer, to_attention, tables)
    mixed = ops.dropout(step.tape, mixed, layer.dropout)
    if layer.parallel == "norms":
        to_mlp = normed("post_attention_layernorm")
    fed = ops.dropout(step.tape, feed(step, f"{where}.mlp", layer, to_mlp), layer.dropout)
    first, last = (x, fed) if layer.residual_first else (fed, x)
    out = ops.add(step.tape, ops.add(step.tape, first, mixed, name="residual"), last, name="residual")
    named = () if layer.parallel == "norms" else (to_attention,)
    step.tape.hold(x, to_mlp, mixed, fed, *named, *step.weights, *step.returned)
    step.weights.clear()
    del step.returned[:-1]
    return out


def checkpointed_layer(
    step: Step, where: str, layer: Layer, x: Tensor, tables: Tables, own: Tensor | None = None
) -> Tensor:
    """A decoder layer that keeps its input only, if the run checkpoints; else the layer itself."""
    if not step.run.checkpoints_layer(step.tape.layer or 0):
        return decoder_layer(step, where, layer, x, tables, own)
    block = layer.attention

    def again(entry: Tensor, *own_again: Tensor) -> Tensor:
        outer, step.cache = step.cache, step.cache if step.tape.phase is Phase.FORWARD else {}
        out = decoder_layer(step, where, layer, entry, tables, *own_again)
        step.cache = outer
        return out

    run = step.run
    offloaded = run.activation_offloading and step.platform == "cuda"
    trains = is_litgpt(step.architecture) and run.has_adapters
    held = run.fsdp_version == 1

    def beside() -> Tensor | None:
        return step.returned[-1] if step.returned else None

    def handed() -> tuple[Tensor, ...]:
        return step.stored_keys[block.window] if block.keys == STORED else ()

    return step.tape.checkpoint(
        again,
        x,
        *(() if own is None else (own,)),
        reentrant=run.reentrant,
        held=held,
        offloaded=offloaded,
        trains=trains,
        beside=beside,
        handed=handed,
    )
