"""Software stacks as data: the defaults each one gives to a run, and the values tunecast knows.

A name that exists in the world but that no formula here covers yet is listed as unbuilt, so that
it is refused by name instead of being taken for something else.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.model.loss_chunks import CHUNKED_NLL, KEPT_CHUNKS
from tunecast.model.optimizer_bnb import BITSANDBYTES
from tunecast.model.optimizer_torchao import TORCHAO
from tunecast.model.unsloth_rules import UNSLOTH_LOSSES

METHODS = ("lora", "qlora", "full")
DTYPES = ("bf16", "fp16", "fp32")
DTYPE_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
PRECISIONS = ("bf16-autocast", "fp16-autocast", "bf16", "fp16", "fp32")
QUANT_TYPES = ("nf4", "fp4")
QUANT_METHODS = ("bnb-4bit", "bnb-8bit", "gptq-4bit", "gptq-8bit")
PLAIN = "hf-peft"
"""The stack of who names none."""
HF_CODES = ("5", "4.49", "4.46", "4.45")
HF_CODES_SAID = "5, 4.49 (4.49 and later below 5), 4.46 (4.46 to 4.48) or 4.45 (4.45 and before)"
"""The versions of transformers that each stands for."""

FLASH_2, FLASH_3 = "flash_attention_2", "flash_attention_3"
FLASH_ATTENTION = (FLASH_2, FLASH_3)
"""Implementations of the flash-attn packages, which transformers calls by the same code."""

HUB_KERNELS = {
    "kernels-community/flash-attn": FLASH_2,
    "kernels-community/flash-attn2": FLASH_2,
    "kernels-community/flash-attn3": FLASH_3,
    "kernels-community/vllm-flash-attn3": FLASH_3,
    "kernels-community/flash-attn4": "flash_attention_4",
}
"""Kernels that transformers gets from the hub, and the package whose they are (``FLASH_ATTN_KERNEL_FALLBACK`` of its
modeling_flash_attention_utils.py)."""
BUILT = {
    "optimizer": ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", *BITSANDBYTES, *TORCHAO),
    "attention": ("sdpa", "eager", *FLASH_ATTENTION),
    "loss": ("nll", CHUNKED_NLL, *KEPT_CHUNKS, "liger", "cut_cross_entropy", *UNSLOTH_LOSSES),
    "quantization": ("bnb-4bit", "bnb-8bit", "gptq-4bit", "gptq-8bit"),
    "sharding": ("none", "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "hsdp"),
}
"""Values the formulas cover, by what they choose."""

UNBUILT = {
    "optimizer": (
        "adagrad", "adalomo", "adamw_anyprecision", "adamw_apex_fused",
        "adamw_torch_npu_fused", "adamw_torch_xla", "ademamix",
        "ademamix_8bit", "apollo_adamw", "apollo_adamw_layerwise", "galore_adafactor", "galore_adafactor_layerwise",
        "galore_adamw", "galore_adamw_8bit", "galore_adamw_8bit_layerwise", "galore_adamw_layerwise", "grokadamw",
        "lomo", "muon", "paged_ademamix_32bit",
        "paged_ademamix_8bit", "rmsprop", "rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit", "schedule_free_adamw",
        "schedule_free_radam", "schedule_free_sgd", "stable_adamw",
    ),
    "attention": ("flash_attention_4", "flex_attention", "xformers"),
    "loss": ("dft",),
    "quantization": ("aqlm", "awq", "eetq", "hqq"),
    "sharding": (),
}  # fmt: skip
"""Values that exist in Transformers, TRL or accelerate but not here yet."""


@cache
def load_stacks() -> dict[str, dict[str, Any]]:
    """The shipped stacks by name."""
    text = files("tunecast.model").joinpath("data", "stacks.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    stacks: dict[str, dict[str, Any]] = facts["stacks"]
    for name, stack in stacks.items():
        if "like" in stack:
            stack = stacks[name] = {**stacks[stack["like"]], **stack}
        if stack["built"] and not stack.get("own_attention"):
            stack["packages"] = {**stack.get("packages", {}), **facts["packages_of_all"]}
    return stacks


def stack_defaults(name: str, method: str) -> dict[str, Any]:
    """Field values that today's version of a stack gives a run of `method` when the user says nothing."""
    stack = built_stack(name)
    if method not in stack["defaults"]:
        has = " or ".join(one for one in stack["defaults"] if one != "all")
        raise NotSupportedError(
            f"--method {method} with --stack {name} ({stack['title']}) is not built; use --method {has}."
        )
    return {**stack["defaults"]["all"], **stack["defaults"][method]}


def only_of_stack(name: str) -> dict[str, list[Any]]:
    """Values that a stack's code, or what is built of it, has for fields of a run: all that are not in it are free."""
    return dict(built_stack(name).get("only", {}))


def code_of(name: str) -> str:
    """Whose code a stack trains with where it has formulas alone, as in ``LitGPT's``; empty: transformers' and PEFT's
    or torchtune's, which runs as theirs."""
    return str(built_stack(name).get("own_code", ""))


def ignores_padding(name: str) -> bool:
    """Whether a stack's attention is not told which tokens are padding, and so runs as without."""
    return bool(built_stack(name).get("ignores_padding"))


def keeps_samples_apart(name: Any) -> bool:
    """Whether a stack chooses among attention kernels by itself that are told where samples begin."""
    return bool(load_stacks().get(str(name), {}).get("flat_rows"))


def shardings_of(name: Any, *, staged: bool = False) -> tuple[str, ...]:
    """Shardings by which a stack spreads data parallelism where none is asked for, the least first; empty: any.
    `staged`: beside stages of a pipeline."""
    stack = load_stacks().get(str(name), {})
    return tuple(stack.get("spreads_of_stages" if staged and "spreads_of_stages" in stack else "spreads", ()))


def splits_layers(name: Any) -> bool:
    """Whether a stack is one that people take to split layers with, over more GPUs than share their data."""
    return bool(load_stacks().get(str(name), {}).get("splits_layers"))


def splits_rows(name: Any) -> bool:
    """Whether rows may be split over GPUs (context parallelism): some stacks have none."""
    return not load_stacks().get(str(name), {}).get("whole_rows")


def ours(name: str) -> tuple[str, ...]:
    """Fields for which a stack leaves the user without a default, or with one that nobody trains with (no checkpoints,
    fp32, rank 8 on two modules, fp4): what stands for them here is tunecast's choice, an assumption."""
    return tuple(built_stack(name).get("ours", ()))


def ours_without_version(name: str) -> tuple[str, ...]:
    """Fields whose default is that of a version: tunecast's choice where none is named."""
    return tuple(built_stack(name).get("ours_without_version", ()))


def built_stack(name: str) -> dict[str, Any]:
    """What is recorded of a stack; an unknown or unbuilt one is refused by name."""
    stacks = load_stacks()
    if name not in stacks:
        built = ", ".join(one for one in stacks if stacks[one]["built"] and one != PLAIN)
        raise UnknownNameError("stack", name, stacks, hint=f"--stack takes {PLAIN} (the plain one), {built}.")
    stack = stacks[name]
    if not stack["built"]:
        raise NotSupportedError(f"The stack {name} ({stack['title']}) is known but not built yet; use --stack hf-peft.")
    return stack


def built_choice(what: str, option: str, value: str) -> str:
    """`value` if formulas cover it; an unbuilt or unknown one is refused with what to type instead."""
    if value in BUILT[what]:
        return value
    built = ", ".join(BUILT[what])
    if value in UNBUILT[what]:
        raise NotSupportedError(f"The {what} {value!r} is known but not built yet; --{option} takes {built}.")
    raise UnknownNameError(what, value, BUILT[what], hint=f"--{option} takes {built}.")


def attention_named(word: Any) -> Any:
    """An attention by the name of its package, where `word` is that of the same kernels on the hub, with or without a
    revision (``kernels-community/flash-attn2@v1``)."""
    return HUB_KERNELS.get(str(word).partition("@")[0].partition(":")[0], word)


def one_of(option: str, value: str, choices: tuple[str, ...]) -> str:
    """`value` if it is one of a closed list of words."""
    if value not in choices:
        raise InputError(f"--{option} is {value!r}, but it must be one of {', '.join(choices)}.")
    return value
