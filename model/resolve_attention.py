"""Attention that a family has in some implementations only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def runs_plain_attention(architecture: Architecture) -> bool:
    """Whether ``sdpa`` is plain products in transformers' code of this family."""
    block = architecture.groups[0].layer.attention
    return block.kind in ("bloom", "mpt", "gptj") or (block.kind == "falcon" and block.num_kv_heads == 1)


def take_documents(fields: Fields, architecture: Architecture, whole_number: Callable[[str, Any], int]) -> None:
    """Attention inside the documents of packed rows, by kernels that are told where each begins."""
    length = fields.take("attention_length", None, "stack-default")
    if length is None:
        return
    values = fields.values
    values["attention_length"] = whole_number("attention_length", length)
    if values["attention_length"] > values["max_length"]:
        raise InputError(
            f"--attention-length {length} is beyond --max-length {values['max_length']}, the row that documents are "
            "packed into; lower it, or leave it out."
        )
    if not values["attn_implementation"].startswith("flash") and "attention" not in values["fused_kernels"]:
        raise InputError(
            f"--attn-implementation {values['attn_implementation']} masks whole rows, documents apart or not, but "
            "attention inside documents was asked for (--padding-free, --attention-length); "
            "add --attn-implementation flash_attention_2."
        )
    if is_litgpt(architecture) or values["cp"] > 1:
        what = "LitGPT" if is_litgpt(architecture) else "context parallelism"
        raise NotSupportedError(
            f"Attention inside documents (--padding-free, --attention-length) with {what} is not built yet; "
            "type --no-padding-free, and a row counts as one document."
        )
