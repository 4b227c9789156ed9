"""An input of its own for every layer, made of tokens before the first, and what a layer makes of it.

Source: transformers 5 ``modeling_gemma4.py``: ``Gemma4TextModel.get_per_layer_inputs`` and
``project_per_layer_inputs``, the end of ``Gemma4TextDecoderLayer.forward``.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model.architecture import Layer
from tunecast.model.context import Step
from tunecast.model.linears import linear_map
from tunecast.model.norms import norm
from tunecast.model.shapes import INPUT_NORM, INPUT_TABLE, LayerInputs
from tunecast.model.tape import Tensor

NAME = "layer_inputs"
"""Of their kernels."""


def scaled_rows(step: Step, rows: Tensor) -> Tensor:
    """Rows of a table times a number that its module holds, which is cast first where PEFT's preparation of a 4-bit
    model has raised the table to fp32 and left the number as it was."""
    if step.run.upcast_non_quantized:
        ops.elementwise(step.tape, "embedding_scale", (Tensor(1, "bf16", None),), 1, rows.dtype)
    return ops.scale(step.tape, rows, name="embedding_scale")


def inputs_of_layers(step: Step, inputs: LayerInputs, ids: Tensor, embedded: Tensor) -> Tensor:
    """Inputs of all layers side by side: rows of the second table plus the normalised map of embedded tokens."""
    architecture, tape = step.architecture, step.tape
    table = step.weight(INPUT_TABLE, inputs.table_params)
    rows = scaled_rows(step, heavy.embedding(tape, table, ids, inputs.joined_width))
    mapped = ops.scale(tape, linear_map(step, "inputs", architecture.root_linears[0], embedded), name=NAME)
    normed = norm(step, architecture.norm, INPUT_NORM, mapped, inputs.width)
    made = ops.scale(tape, ops.add(tape, normed, rows, name=NAME), name=NAME)
    tape.hold(rows, normed)
    return made


def input_of_layer(step: Step, inputs: Tensor | None) -> Tensor | None:
    """One layer's part, seen in the memory of all: its gradient is written into zeros as wide as all of them."""
    if inputs is None or step.architecture.layer_inputs is None:
        return None
    return ops.part(step.tape, inputs, step.tokens * step.architecture.layer_inputs.width, name=NAME)


def with_own_input(step: Step, where: str, layer: Layer, x: Tensor, own: Tensor) -> Tensor:
    """x plus the normalised map of what a gate of x lets through of the layer's own input."""
    tape, (to_gate, back) = step.tape, layer.own_input
    gate = ops.activation(tape, linear_map(step, where, to_gate, x), name=layer.mlp.activation)
    gated = ops.multiply(tape, gate, own, name=NAME)
    mapped = linear_map(step, where, back, gated)
    normed = norm(step, layer.norm, f"{where}.post_per_layer_input_norm", mapped, step.architecture.hidden_size)
    return ops.add(tape, x, normed, name="residual")
