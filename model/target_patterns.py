"""Adapter targets as a regular expression, which PEFT matches with the whole path of every module.

Source: peft 0.21 ``tuners/tuners_utils.py`` (``check_target_module_exists``): ``re.fullmatch`` where ``target_modules``
is a text; names in a list are compared as they are. Paths are those of transformers 5, which a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture, Layer, Linear
from tunecast.model.resolve_experts import ROUTER, renamed_targets

SIGNS = frozenset("\\^$*+?()[]{}|")
"""Signs that make a text a pattern; the dot, which names have too, is none."""
DECODERS = {
    "gpt2": ("transformer.h", "attn", "mlp"),
    "gptj": ("transformer.h", "attn", "mlp"),
    "falcon": ("transformer.h", "self_attention", "mlp"),
    "bloom": ("transformer.h", "self_attention", "mlp"),
    "gpt_neox": ("gpt_neox.layers", "attention", "mlp"),
    "lfm2": ("model.layers", "self_attn", "feed_forward"),
}
"""Where layers are, and what their attention and the rest are called, where it is not as `PLAIN` has it."""
PLAIN = ("model.layers", "self_attn", "mlp")
NO_PATHS = ("opt", "mpt", "qwen", "chatglm", "llm_foundry_mpt", "megatron_gpt")
"""Families of other code, or without a block of their own for the maps after attention."""
SEEING = ("model.language_model.layers", "language_model.model.layers", "model.text_model.layers")
"""Where layers are in models that see: of transformers 5, before it, and SmolVLM's."""
OTHER_PARTS = re.compile(r"vis(ion|ual)|audio|tower|projector|connector|merger|aligner|encoder", re.IGNORECASE)
"""Words for what such a model has beside its language model."""
NOT_THERE = re.compile(r"\(\?<?!(?:[^()]|\([^()]*\))*\)")
"""What a pattern says must not be there, before or after."""
GATE = "shared_expert_gate"


def is_pattern(asked: object) -> bool:
    """Whether targets are a regular expression and no names."""
    return isinstance(asked, str) and bool(SIGNS & set(asked))


def pattern_note(found: Sequence[str]) -> str:
    """What a pattern was taken to mean."""
    return (
        f"The regular expression of targets means {', '.join(found)} in every layer here; PEFT matches it with the "
        "paths that modules have in the model as it is loaded."
    )


def places(architecture: Architecture, decoder: str) -> Iterator[tuple[str, str]]:
    """Names and whole paths of the linear maps of all layers; with an empty name, paths of the blocks they are in."""
    _, *names = modules(architecture)
    for here, layer in layers(architecture, decoder):
        yield "", here
        experts = layer.mlp.experts
        if experts is not None and experts.stacked:
            yield "", f"{here}.experts" if experts.linear_router else f"{here}.{names[1]}.experts"
        for block, linears in blocks(layer, *names).items():
            inside = f"{here}.{block}" if block else here
            yield "", inside
            yield from ((linear.name, f"{inside}.{linear.name}") for linear in linears)


def modules(architecture: Architecture) -> tuple[str, str, str]:
    """Where its layers are, and what their attention and the rest are called."""
    return DECODERS.get(architecture.model_type, PLAIN)


def layers(architecture: Architecture, decoder: str) -> Iterator[tuple[str, Layer]]:
    """Every layer with its path."""
    every = (group.layer for group in architecture.groups for _ in range(group.count))
    return ((f"{decoder}.{number}", layer) for number, layer in enumerate(every))


def blocks(layer: Layer, attention: str, mlp: str) -> dict[str, list[Linear]]:
    """The linear maps of a layer by the path of the module that they are in."""
    mixer = "linear_attn" if layer.attention.delta else "conv" if layer.attention.convolution else attention
    found: dict[str, list[Linear]] = {mixer: [*layer.attention.linears]}
    experts = layer.mlp.experts
    shared = f"{mlp}.shared_experts"
    if any(linear.name == GATE for linear in layer.mlp.linears):
        shared = f"{mlp}.shared_expert"
    for linear in layer.mlp.linears:
        block = mlp if experts is None or experts.linear_router or linear.name == GATE else shared
        if experts is not None and experts.linear_router and linear.name == "proj":
            block = "router"
        found.setdefault(block, []).append(linear)
    found.setdefault("", []).extend(layer.own_input)
    return found


def matched_targets(architecture: Architecture, pattern: str) -> list[str]:
    """The names of the maps that a pattern means in every place where the model has them.

    Of models whose experts PEFT knows by the names that they had, one place is enough: it turns such a pattern into
    names, experts' among them (``utils/transformers_weight_conversion.py``, ``_resolve_string_target_modules``).

    Raises InputError for a pattern that is none or finds nothing, NotSupportedError for one that means some of the
    layers or places of a map only, or a part that is no language model.
    """
    asked = f"--lora-target-modules is a regular expression ({pattern})"
    try:
        whole = re.compile(pattern)
    except re.error as error:
        raise InputError(f"{asked} that Python cannot read: {error}.") from error
    instead = "name the modules, for example q_proj,v_proj, or all-linear"
    known = modules(architecture)[0]
    unknown = architecture.model_type in NO_PATHS or any(_is_unknown(group.layer) for group in architecture.groups)
    if unknown or OTHER_PARTS.search(NOT_THERE.sub("", pattern)):
        what = "whose modules' paths are not known here" if unknown else "and names parts beside the language model"
        raise NotSupportedError(f"{asked} {'for ' + architecture.name + ', ' if unknown else ''}{what}; {instead}.")
    for decoder in (known, *(SEEING if known == PLAIN[0] else ())):
        found = _matches(architecture, whole, decoder)
        if found.get(True):
            break
    if "" in found.get(True, ()):
        raise InputError(f"{asked} that also matches blocks of layers, on which PEFT has no adapters; {instead}.")
    some = sorted(found.get(True, set()) & found.get(False, set()))
    if some and not renamed_targets(architecture):
        raise NotSupportedError(
            f"{asked} that matches {', '.join(some)} in some places only: adapters on some of the layers are not "
            f"built; {instead}."
        )
    if not found.get(True):
        raise InputError(
            f"{asked} that matches no linear map of {architecture.name}: it has to match whole paths, as "
            f"{_example(architecture)}; {instead}."
        )
    return sorted(found[True])


def _is_unknown(layer: Layer) -> bool:
    experts = layer.mlp.experts
    return experts is not None and not experts.stacked


def _matches(architecture: Architecture, whole: re.Pattern[str], decoder: str) -> dict[bool, set[str]]:
    """Names whose places match, and names of which some do not."""
    found: dict[bool, set[str]] = {}
    every = (*places(architecture, decoder), *_experts(architecture, decoder), *_outside(architecture, decoder))
    for name, path in every:
        is_there = bool(whole.fullmatch(path))
        if name or is_there:
            found.setdefault(is_there, set()).add(name)
    return found


def _experts(architecture: Architecture, decoder: str) -> Iterator[tuple[str, str]]:
    """Router and maps of experts where transformers 4 had them, for models of which PEFT knows them by these names."""
    old = renamed_targets(architecture)
    for here, layer in layers(architecture, decoder):
        if layer.mlp.experts is not None:
            inside = f"{here}.mlp"
            yield from ((name, f"{inside}.{name if old[name] == ROUTER else f'experts.{name}'}") for name in old)


def _outside(architecture: Architecture, decoder: str) -> Iterator[tuple[str, str]]:
    """The table of tokens, maps outside the layers, and the head."""
    model = decoder.rpartition(".")[0]
    for name in (architecture.embedding_module, *(linear.name for linear in architecture.root_linears)):
        yield name, f"{model}.{name}"
    yield architecture.head_module, architecture.head_module


def _example(architecture: Architecture) -> str:
    """The path of one of its maps."""
    return next(path for name, path in places(architecture, modules(architecture)[0]) if name)
