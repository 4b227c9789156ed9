"""Attention that a family has in some implementations only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.litgpt import is_litgpt
from tunecast.model.resolve_parallel import Fields

EAGER = "eager"


def attention_defaults(fields: Fields, architecture: Architecture, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The stack's defaults, with eager attention where scores are capped or sinks take part: sdpa knows neither."""
    blocks = [group.layer.attention for group in architecture.groups]
    asked = fields.given.get("attn_implementation")
    if is_litgpt(architecture):
        if any(block.softcap for block in blocks):
            fields.notes.append("LitGPT has no fused attention for capped scores: it writes the scores of all pairs.")
        return defaults
    if any(block.latent for block in blocks) and asked not in (None, "sdpa"):
        raise NotSupportedError(
            f"--attn-implementation {asked} of {architecture.model_type}'s latent attention has no formulas; "
            "leave it out."
        )
    sinks = any(block.sinks for block in blocks)
    if not sinks and not any(block.softcap for block in blocks):
        return defaults
    if asked == "sdpa":
        raise InputError(
            f"transformers has no sdpa attention for {architecture.model_type}, which --attn-implementation sdpa asks "
            f"for; leave it out, or type {EAGER}."
        )
    if sinks and asked not in (None, EAGER):
        raise NotSupportedError(
            f"--attn-implementation {asked} of {architecture.model_type} runs a kernel with sinks that has no "
            f"formulas; use {EAGER}."
        )
    if asked is None:
        fields.notes.append(
            f"transformers has no sdpa for {architecture.model_type}: eager attention writes the scores of all pairs."
        )
    return {**defaults, "attn_implementation": EAGER}
