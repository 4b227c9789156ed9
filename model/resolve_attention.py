"""Attention that a family has in some implementations only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.litgpt import is_litgpt
from tunecast.model.primitives_heavy import WIDEST_FLASH
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_parallel import Fields
from tunecast.model.run import Run

EAGER = "eager"
TIMED_BY = "timed from a few published figures and known to a factor of two"


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
    widest = max(block.head_dim for block in blocks)
    if widest > WIDEST_FLASH and asked in (None, "flash_attention_2"):
        return _without_flash(architecture, widest, asked, defaults)
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


def _without_flash(
    architecture: Architecture, widest: int, asked: str | None, defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The stack's defaults without kernels that some of the heads are too wide for."""
    if asked is not None:
        raise InputError(
            f"--attn-implementation {asked} was asked for, but its kernels take heads of up to {WIDEST_FLASH} values "
            f"and {architecture.name} has heads of {widest}; leave it out, or type sdpa."
        )
    return {**defaults, "attn_implementation": "sdpa"}


def runs_plain_attention(architecture: Architecture) -> bool:
    """Whether ``sdpa`` is plain products in transformers' code of this family."""
    block = architecture.groups[0].layer.attention
    return block.kind in ("bloom", "mpt", "gptj") or (block.kind == "falcon" and block.num_kv_heads == 1)


def note_attention(fields: Fields, architecture: Architecture) -> None:
    """Say where another kernel runs than ``sdpa`` lets expect."""
    _note_window(fields, architecture)
    _note_plain(fields, architecture)
    _note_wide(fields, architecture)


def _note_plain(fields: Fields, architecture: Architecture) -> None:
    """Say where no fused attention kernel runs although sdpa stands in the run."""
    if fields.values["attn_implementation"] == "sdpa" and runs_plain_attention(architecture):
        fields.notes.append(
            f"Attention of {architecture.model_type} runs as plain products with every score in memory: "
            "transformers has no fused kernel for it."
        )


def _note_wide(fields: Fields, architecture: Architecture) -> None:
    """Say whose speed stands for that of heads which are too wide for flash kernels."""
    widest = max(group.layer.attention.head_dim for group in architecture.groups)
    if widest > WIDEST_FLASH and fields.values["attn_implementation"] == "sdpa" and not is_litgpt(architecture):
        fields.notes.append(
            f"Heads of {widest} values are too wide for flash kernels: sdpa runs PyTorch's memory-efficient kernel "
            f"for them (before pull request 46960 of transformers, July 2026, plain products that keep all scores), "
            f"{TIMED_BY}."
        )


def _note_window(fields: Fields, architecture: Architecture) -> None:
    """Say when a sliding window turns into an explicit mask: transformers then runs every pair, without flash."""
    windows = [group.layer.attention.window for group in architecture.groups]
    reached = [window for window in windows if window is not None and fields.values["max_length"] >= window]
    if reached and fields.values["attn_implementation"] == "sdpa" and fields.values["stack"] != "unsloth":
        fields.notes.append(
            f"The sliding window of {min(reached)} tokens makes sdpa take an explicit mask: attention runs over all "
            f"pairs, by PyTorch's memory-efficient kernel, {TIMED_BY}, or where PyTorch asks cuDNN first by that, of "
            "which none is known: between both."
        )


def take_recomputation(fields: Fields, defaults: Mapping[str, Any]) -> None:
    """What the backward makes again: whole layers, attention alone (Megatron-LM's selective recomputation), or nothing.

    Raises InputError where both are asked for.
    """
    alone = bool(fields.take("recompute_attention", False, "stack-default"))
    whole = bool(
        fields.take("gradient_checkpointing", defaults["gradient_checkpointing"] and not alone, "stack-default")
    )
    fields.take("reentrant", defaults["reentrant"], "stack-default")
    fields.values |= {"recompute_attention": alone, "gradient_checkpointing": whole}
    fields.values["reentrant"] = bool(fields.values["reentrant"])
    if alone and whole:
        raise InputError(
            "--recompute-attention makes attention alone again, --gradient-checkpointing whole layers with it; "
            "leave one of the two out."
        )


def check_recomputation(architecture: Architecture, run: Run) -> None:
    """Attention that is recomputed alone is one fused kernel; raises NotSupportedError for another."""
    latent = any(group.layer.attention.latent for group in architecture.groups)
    plain = run.attn_implementation == EAGER or runs_plain_attention(architecture)
    if run.recompute_attention and (latent or plain or is_litgpt(architecture)):
        what = "latent" if latent else "LitGPT's" if is_litgpt(architecture) else "eager"
        raise NotSupportedError(
            f"--recompute-attention of {what} attention is not built yet; type --gradient-checkpointing in its place."
        )


def take_documents(fields: Fields, architecture: Architecture) -> None:
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
