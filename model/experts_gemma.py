"""Experts of Gemma 4: a dense block and routed experts beside each other, each between norms of its own.

The router is a linear map, which adapters and 4-bit quantization reach, over normalised input.
Source: transformers 5 ``modeling_gemma4.py``, ``Gemma4TextDecoderLayer`` and ``Gemma4TextRouter``.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model import primitives_routing as routing
from tunecast.model.architecture import Layer
from tunecast.model.context import Step
from tunecast.model.experts import routed
from tunecast.model.linears import linear_map
from tunecast.model.mlp_blocks import dense_block
from tunecast.model.norms import norm, plain_norm
from tunecast.model.routers import Routes, divided
from tunecast.model.shapes import Experts
from tunecast.model.tape import Tensor

ROUTER = "proj"
"""Name of the router's linear map, the last of the block."""


def beside_experts(step: Step, where: str, layer: Layer, entry: Tensor, residual: Tensor) -> Tensor:
    """What the dense block makes of its normalised input, and the experts of the residual stream, added."""
    experts, hidden = layer.mlp.experts, step.architecture.hidden_size
    assert experts is not None
    dense = dense_block(step, where, layer, entry, layer.mlp.linears[:-1])
    first = norm(step, layer.norm, f"{where}.post_norm_1", dense, hidden)
    step.tape.hold(dense)
    routes = routes_of(step, where, layer, experts, residual)
    second = norm(step, layer.norm, f"{where}.pre_norm_2", residual, hidden)
    made = routed(step, where, experts, second, routes)
    step.tape.hold(second)
    normed = norm(step, layer.norm, f"{where}.post_norm_2", made, hidden)
    step.tape.hold(made)
    out = ops.add(step.tape, first, normed, name="experts.add")
    step.tape.hold(first, normed, routes.weights, routes.places, *routes.held)
    return out


def routes_of(step: Step, where: str, layer: Layer, experts: Experts, x: Tensor) -> Routes:
    """Softmax in fp32 over the scores of normalised, scaled input; the largest chosen, divided by their sum, and each
    multiplied by a number of its expert."""
    tape, hidden = step.tape, experts.hidden_size
    normed = plain_norm(step, x, hidden)
    scale = step.weight(f"{where}.router.scale", hidden)
    entry = ops.scale(tape, ops.multiply(tape, normed, scale, name="router.scale"), name="router.scale")
    tape.hold(normed)
    scores = linear_map(step, where, layer.mlp.linears[-1], entry)
    probabilities = routing.softmax(tape, scores, name="router.softmax", dtype="fp32")
    values, places = routing.top_k(tape, probabilities, step.tokens * experts.per_token)
    values = divided(step, values)
    by_expert = step.weight(f"{where}.router.per_expert_scale", experts.count)
    factors = routing.index(tape, by_expert, places, places.elements, name="router.gather")
    weights = ops.multiply(tape, values, factors, name="router.scale")
    tape.hold(entry, scores)
    return Routes(weights=weights, places=places, held=(probabilities,))
