"""Attention that a family has in some implementations only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture, Attention
from tunecast.model.attention_blocks import needs_mask, reaches_window
from tunecast.model.litgpt import is_litgpt
from tunecast.model.primitives_heavy import WIDEST_FLASH
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_delta import check_apart as check_state_apart
from tunecast.model.resolve_parallel import Fields
from tunecast.model.run import Run
from tunecast.model.stacks import FLASH_ATTENTION, ignores_padding, keeps_samples_apart

EAGER = "eager"


def attention_defaults(fields: Fields, architecture: Architecture, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The stack's defaults, with eager attention where scores are capped or sinks take part: sdpa knows neither."""
    blocks = [group.layer.attention for group in architecture.groups]
    asked = fields.given.get("attn_implementation")
    if is_litgpt(architecture):
        if any(block.softcap for block in blocks):
            fields.notes.append("LitGPT has no fused attention for capped scores: it writes the scores of all pairs.")
        return defaults
    widest = max(block.head_dim for block in blocks)
    if widest > WIDEST_FLASH and asked in (None, *FLASH_ATTENTION):
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


def attention_notes(architecture: Architecture, run: Run) -> tuple[str, ...]:
    """Where another kernel runs than the name of the implementation lets expect."""
    if is_litgpt(architecture):
        return ()
    blocks = [group.layer.attention for group in architecture.groups]
    found: list[str] = []
    if run.attn_implementation == "sdpa":
        if runs_plain_attention(architecture):
            found.append(
                f"Attention of {architecture.model_type} runs as plain products with every score in memory: "
                "transformers has no fused kernel for it."
            )
        else:
            found += _mask_notes(blocks, run)
        found += _width_notes(blocks)
    elif run.flash and run.has_padding:
        found.append(
            f"{run.attn_implementation} takes padding out of every layer's queries, keys and values and puts it back; "
            "forecasts count neither that nor what it saves: they mix all tokens of a row."
        )
    return tuple(found)


def _width_notes(blocks: Sequence[Attention]) -> tuple[str, ...]:
    """Whose speed stands for that of heads which are too wide for flash kernels."""
    widest = max(block.head_dim for block in blocks)
    if widest <= WIDEST_FLASH:
        return ()
    told = (
        f"Heads of {widest} values are too wide for flash kernels: sdpa runs PyTorch's memory-efficient kernel for "
        "them (before pull request 46960 of transformers, July 2026, plain products that keep all scores)."
    )
    return (told,)


def _mask_notes(blocks: Sequence[Attention], run: Run) -> tuple[str, ...]:
    """When sdpa takes an explicit mask: transformers then runs every pair, without flash."""
    masked = [block for block in blocks if needs_mask(block, run)]
    reached = [block.window for block in masked if block.window is not None and reaches_window(block, run)]
    if not masked or not (reached or run.has_padding):
        return ()
    why = f"The sliding window of {min(reached)} tokens makes" if reached else "Padding in micro-batches makes"
    instead = "" if reached else "; packed samples need no mask, nor does flash_attention_2 where a card has it"
    told = (
        f"{why} sdpa take an explicit mask: attention runs over all pairs, on GPUs by PyTorch's memory-efficient "
        f"kernel, or where PyTorch asks cuDNN first perhaps by that{instead}."
    )
    return (told,)


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


def take_padding(fields: Fields, architecture: Architecture, defaults: Mapping[str, Any]) -> None:
    """Whether the model is told which tokens are padding, and what lengths rows are filled to.

    Raises NotSupportedError where a stack tells none, or where tokens of a sample are split over GPUs; InputError where
    rows are filled to more tokens than the model was made for.
    """
    asked = bool(fields.take("padding_mask", False, "stack-default"))
    origin = fields.origins["padding_mask"]
    if asked and ignores_padding(fields.values["stack"]):
        raise NotSupportedError(
            f"--padding-mask was asked for, but --stack {fields.values['stack']} trains without a mask of padding; "
            "leave one of the two out."
        )
    if asked and fields.values["attention_length"] is not None:
        raise InputError(
            "--padding-mask says that samples are padded, --attention-length that documents are packed; leave one out."
        )
    if asked and fields.values["cp"] > 1:
        raise NotSupportedError(
            "Padded samples (--padding-mask, --no-packing) whose tokens --cp splits are not built yet; leave --cp out."
        )
    if fields.values["samples_unevenness"] is not None:
        _check_flat(fields, asked)
        fields.put("padding_mask", False, origin)
        return
    filled = fields.take("pad_to_multiple_of", defaults.get("pad_to_multiple_of", 1), "stack-default")
    multiple = fields.values["pad_to_multiple_of"] = whole_number("pad_to_multiple_of", filled)
    limit, most = architecture.max_position, math.ceil(fields.values["max_length"] / multiple) * multiple
    if "pad_to_multiple_of" in fields.given and limit is not None and most > max(limit, fields.values["max_length"]):
        raise InputError(
            f"--pad-to-multiple-of {multiple} fills rows of {fields.values['max_length']} tokens to {most}, beyond the "
            f"{limit} tokens of {architecture.name}; use a smaller multiple or --max-length."
        )
    alone = fields.values["per_device_train_batch_size"] == multiple == 1  # nothing depends on it
    fields.put("padding_mask", asked, "stack-default" if alone and origin == "assumed" else origin)


def _check_flat(fields: Fields, masked: bool) -> None:
    """Raise InputError where samples laid end to end are said to be padded as well."""
    flag = "--padding-mask" if masked else "--pad-to-multiple-of" if "pad_to_multiple_of" in fields.given else ""
    if flag:
        raise InputError(
            f"{flag} says that samples are padded, but --padding-free with --no-packing lays them end to end without "
            "padding; leave one out."
        )


def take_documents(fields: Fields, architecture: Architecture) -> None:
    """Attention inside the documents of packed rows, by kernels that are told where each begins."""
    length, uneven = (fields.take(name, None, "stack-default") for name in ("attention_length", "samples_unevenness"))
    if length is None and uneven is None:
        return
    values = fields.values
    if length is not None:
        values["attention_length"] = whole_number("attention_length", length)
    if length is not None and values["attention_length"] > values["max_length"]:
        raise InputError(
            f"--attention-length {length} is beyond --max-length {values['max_length']}, the row that documents are "
            "packed into; lower it, or leave it out."
        )
    check_apart(architecture, values)


def check_apart(architecture: Architecture, values: Mapping[str, Any]) -> None:
    """Raise InputError or NotSupportedError for run fields with which attention does not end where a document or a
    sample of a row does, or is not built to."""
    check_state_apart(architecture)
    own = keeps_samples_apart(values["stack"]) and values["attn_implementation"] != "eager"
    fused = "attention" in values["fused_kernels"] or own
    if not values["attn_implementation"].startswith("flash") and not fused:
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
