"""Routers: from a token's hidden state to the experts it goes to and their weights.

Source: transformers 5, ``forward`` of each family's ``TopKRouter``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tunecast.model import primitives as ops
from tunecast.model import primitives_routing as routing
from tunecast.model.adapters_stacked import router_weight
from tunecast.model.context import Step
from tunecast.model.linears import product
from tunecast.model.operation import Kind
from tunecast.model.shapes import Experts
from tunecast.model.tape import Tensor, widest


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Where every token goes."""

    weights: Tensor
    """One number per token and chosen expert."""
    places: Tensor
    """The chosen experts."""
    held: tuple[Tensor, ...]
    """What the router's caller keeps besides."""


def scores(step: Step, where: str, experts: Experts, x: Tensor) -> Tensor:
    """The router's product: one score per token and expert."""
    weight = router_weight(step, where, experts)
    bias = step.weight(f"{where}.router.bias", experts.count) if experts.bias else None
    return product(step, "router", x, weight, k=experts.hidden_size, n=experts.count, bias=bias)


def sums_are_wide(step: Step) -> bool:
    """Whether autocast sums 16-bit numbers into fp32: CUDA's does."""
    return step.autocast_dtype is not None and step.platform == "cuda"


def divided(step: Step, values: Tensor, *, shifted: bool = False) -> Tensor:
    """A token's weights divided by their sum."""
    total = routing.row_sum(step.tape, values, step.tokens, name="router.sum", wide=sums_are_wide(step))
    if shifted:
        total = ops.shift(step.tape, total, name="router.sum")
    copied = step.run.gradient_checkpointing and not step.run.reentrant and not step.tape.grad_enabled
    return routing.divided_in_place(step.tape, values, total, name="router.divide", copied=copied)


def softmax_first(step: Step, where: str, experts: Experts, x: Tensor) -> Routes:
    """Softmax over all experts in fp32, the largest chosen (Qwen3, OLMoE): weights in the scores' dtype."""
    logits = scores(step, where, experts, x)
    values, places = chosen(step, experts, routing.softmax(step.tape, logits, name="router.softmax", dtype="fp32"))
    return Routes(weights=ops.cast(step.tape, values, logits.dtype, name="router.cast"), places=places, held=(logits,))


def chosen(step: Step, experts: Experts, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The largest probabilities of every token, divided by their sum where the family does."""
    values, places = routing.top_k(step.tape, probabilities, step.tokens * experts.per_token)
    if experts.normalised:
        values = divided(step, values)
    step.tape.hold(probabilities)
    return values, places


def softmax_wide(step: Step, where: str, experts: Experts, x: Tensor) -> Routes:
    """The same from scores cast to fp32, weights left in fp32 (Mixtral)."""
    logits = scores(step, where, experts, x)
    wide = ops.cast(step.tape, logits, "fp32", name="router.cast")
    values, places = chosen(step, experts, routing.softmax(step.tape, wide, name="router.softmax"))
    return Routes(weights=values, places=places, held=(logits,))


def softmax_last(step: Step, where: str, experts: Experts, x: Tensor) -> Routes:
    """The largest scores chosen, then a softmax over them: in fp32 (Granite), or in the scores' dtype (gpt-oss)."""
    tape, narrow = step.tape, experts.router == "softmax-last-narrow"
    logits = scores(step, where, experts, x)
    if not narrow:
        logits = ops.cast(tape, logits, "fp32", name="router.cast")
    values, places = routing.top_k(tape, logits, step.tokens * experts.per_token)
    weights = routing.softmax(tape, values, name="router.softmax")
    if not narrow:
        weights = ops.cast(tape, weights, x.dtype, name="router.cast")
    tape.hold(values)
    return Routes(weights=weights, places=places, held=(logits,))


def wide_scores(step: Step, where: str, experts: Experts, x: Tensor) -> Tensor:
    """The router's product asked for in fp32 (DeepSeek), which autocast runs in 16 bits all the same."""
    weight = ops.cast(step.tape, router_weight(step, where, experts), "fp32", name="router.cast")
    wide = ops.cast(step.tape, x, "fp32", name="router.cast")
    return product(step, "router", wide, weight, k=experts.hidden_size, n=experts.count)


def softmax_of_wide(step: Step, where: str, experts: Experts, x: Tensor) -> Routes:
    """Softmax over all experts in fp32, the largest chosen and scaled (DeepSeek-V2)."""
    logits = wide_scores(step, where, experts, x)
    values, places = chosen(step, experts, routing.softmax(step.tape, logits, name="router.softmax", dtype="fp32"))
    return Routes(weights=ops.scale(step.tape, values, name="router.scale"), places=places, held=(logits,))


def sigmoid_in_groups(step: Step, where: str, experts: Experts, x: Tensor) -> Routes:
    """Sigmoids corrected by a bias, the best groups of experts, of them the best experts (DeepSeek-V3)."""
    tape = step.tape
    logits = wide_scores(step, where, experts, x)
    values = routing.unary(tape, logits, name="router.sigmoid")
    corrected = with_buffer(step, experts, values)
    places = chosen_in_groups(step, experts, corrected)
    weights = routing.index(tape, values, places, places.elements, name="router.gather")
    if experts.normalised:
        weights = divided(step, weights, shifted=True)
    tape.hold(values, corrected)
    return Routes(weights=ops.scale(tape, weights, name="router.scale"), places=places, held=(logits,))


def with_buffer(step: Step, experts: Experts, values: Tensor) -> Tensor:
    """Scores plus the numbers that correct them."""
    bias = Tensor(experts.count, "fp32" if experts.wide_buffer else step.run.dtype, None)
    dtype = widest((values.dtype, bias.dtype))
    return ops.elementwise(step.tape, "router.choose", (values, bias), values.elements, dtype)


def sigmoid_alone(step: Step, where: str, experts: Experts, x: Tensor) -> Routes:
    """Sigmoids in fp32 corrected by a bias, the largest chosen, divided by their sum (MiniMax-M2)."""
    tape, count = step.tape, step.tokens * experts.per_token
    logits = scores(step, where, experts, x)
    values = routing.unary(tape, ops.cast(tape, logits, "fp32", name="router.cast"), name="router.sigmoid")
    corrected = with_buffer(step, experts, values)
    best, places = tape.empty(count, corrected.dtype), tape.empty(count, "int64")
    tape.kernel("router.choose", Kind.MEMORY, (corrected,), (best, places))
    weights = divided(step, routing.index(tape, values, places, count, name="router.gather"))
    tape.hold(values, corrected, best)
    return Routes(weights=weights, places=places, held=(logits,))


def chosen_in_groups(step: Step, experts: Experts, scores: Tensor) -> Tensor:
    """The chosen experts: each group's best two added, the best groups kept, all others masked out."""
    tape, groups, name = step.tape, step.tokens * experts.groups, "router.choose"
    dtype = scores.dtype
    best, at = tape.empty(2 * groups, dtype), tape.empty(2 * groups, "int64")
    tape.kernel(name, Kind.MEMORY, (scores,), (best, at))
    dtype = "fp32" if sums_are_wide(step) else dtype
    summed = ops.elementwise(tape, name, (best,), groups, dtype)
    kept = step.tokens * experts.groups_kept
    top, which = tape.empty(kept, dtype), tape.empty(kept, "int64")
    tape.kernel(name, Kind.MEMORY, (summed,), (top, which))
    mask = ops.elementwise(tape, name, (), groups, dtype)
    tape.kernel(name, Kind.MEMORY, (mask, which), (mask,))
    alone = experts.groups == 1  # its mask is seen once per expert, not written out
    wide = mask if alone else ops.elementwise(tape, name, (mask,), scores.elements, dtype)
    flags = ops.elementwise(tape, name, (wide,), scores.elements, "bool")
    flags = ops.elementwise(tape, name, (flags,), scores.elements, "bool")
    masked = ops.elementwise(tape, name, (scores, flags), scores.elements, scores.dtype)
    count = step.tokens * experts.per_token
    values, places = tape.empty(count, scores.dtype), tape.empty(count, "int64")
    tape.kernel(name, Kind.MEMORY, (masked,), (values, places))
    tape.hold(summed, mask, wide, masked, which)
    return places


ROUTERS: dict[str, Callable[[Step, str, Experts, Tensor], Routes]] = {
    "softmax": softmax_first,
    "softmax-wide": softmax_wide,
    "softmax-last": softmax_last,
    "softmax-last-narrow": softmax_last,
    "softmax-wide-input": softmax_of_wide,
    "sigmoid-groups": sigmoid_in_groups,
    "sigmoid": sigmoid_alone,
}
"""By ``Experts.router``."""
