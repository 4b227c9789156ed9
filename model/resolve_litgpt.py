"""Runs by LitGPT's code: which adapters and options there are, and what it does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.model.architecture import Architecture
from tunecast.model.litgpt import FOREIGN, PRESENT, STABLE, STACK, WORDS, as_litgpt, is_litgpt
from tunecast.model.resolve_parallel import Fields
from tunecast.model.stack_versions import changed, chosen_ranges
from tunecast.model.units import DTYPE_BYTES, gib


def of_stack(architecture: Architecture, options: Mapping[str, Any]) -> Architecture:
    """The architecture as the software stack that the run options ask for builds it, of the version they ask for."""
    if options.get("stack") != STACK:
        return architecture
    method, asked = str(options.get("method") or "lora"), options.get("stack_version")
    then = dict(changed(chosen_ranges(STACK, asked), method))
    return as_litgpt(architecture, str(then.get("litgpt_code", PRESENT)))


def adapted_parts(architecture: Architecture) -> tuple[str, ...]:
    """Maps of a layer that adapters may sit on, queries, keys and values by their own names."""
    layer = architecture.groups[0].layer
    parts = [name for name, _ in layer.attention.parts]
    return (*parts, *(linear.name for linear in layer.linears[1:]))


def litgpt_targets(architecture: Architecture, names: list[str]) -> tuple[str, ...]:
    """Targets in forward order; LitGPT's words for them and Hugging Face's names of them are understood."""
    known = (*adapted_parts(architecture), architecture.head_module)
    found: list[str] = []
    for name in names:
        word = FOREIGN.get(name, name)
        if name == "all-linear":
            found += known[:-1]
        elif word not in WORDS and name not in known:
            raise UnknownNameError("target module", name, (*WORDS, *FOREIGN), hint=f"LitGPT adapts {', '.join(WORDS)}.")
        else:
            found += WORDS.get(word, (name,))
    return tuple(name for name in known if name in found)


def check_code(architecture: Architecture, stack: str) -> None:
    """Architecture and stack belong together: raises InputError where a stack's own code was not asked for."""
    if is_litgpt(architecture) == (stack == STACK):
        return
    if stack == STACK:
        raise InputError(f"--stack {STACK} has formulas only, which this command does not use; use --stack hf-peft.")
    raise InputError(f"--stack {stack} was asked for, but {architecture.name} is built by LitGPT's code here.")


def defaults_by_gpus(fields: Fields, architecture: Architecture, defaults: dict[str, Any]) -> dict[str, Any]:
    """LitGPT checkpoints every block on several GPUs and none on one (``parallelize_fn``, ``FSDPStrategy``)."""
    if not is_litgpt(architecture):
        return defaults
    return {**defaults, "gradient_checkpointing": fields.values["num_gpus"] > 1}


def half_precision(fields: Fields, words: str) -> None:
    """fp16 wherever the run has bf16, on a card that has none; `words` are the stack's own for it."""
    names = ("precision", "dtype", "adapter_dtype")
    asked = {name: str(fields.values.get(name) or "") for name in names}
    fields.values |= {name: word.replace("bf16", "fp16") for name, word in asked.items() if word}
    if "bf16" in "".join(asked.values()):
        fields.notes.append(f"This GPU has no bf16: the run uses {words} instead.")


def check_litgpt(fields: Fields, architecture: Architecture) -> None:
    """Refuse what LitGPT has in some runs only, and take what follows from its code."""
    if not is_litgpt(architecture):
        return
    values = fields.values
    if values["torch_compile"] and values["method"] != "full":
        raise NotSupportedError(
            f"--torch-compile with adapters is not built for --stack {STACK}; leave it out, or use --method full."
        )
    flat = architecture.code != PRESENT or values["method"] == "full"
    if flat and values["num_gpus"] > 1 and "fsdp_version" not in fields.given:
        fields.put("fsdp_version", 1, "stack-default")
    if values["num_gpus"] > 1 and values["method"] == "qlora":
        raise InputError("LitGPT does not quantize on several GPUs, but --num-gpus is above 1; use one.")
    if values["method"] == "qlora" and architecture.code in STABLE:
        kept_gib = gib(DTYPE_BYTES[values["dtype"]] * architecture.embedding_params)
        fields.notes.append(
            f"LitGPT replaces the embedding of a quantized base after its optimizer: a gradient of {kept_gib:.1f}"
            " GiB is made in every backward, kept, and never used."
        )
