"""What linear attention and short convolutions have formulas for: transformers' own PyTorch code, of linear attention
the kernels of packages that it takes too, whole on one GPU or sharded by parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.fused import CONVOLUTION, FLA, LINEAR_KERNELS
from tunecast.model.optimizer_adafactor import NAME as ADAFACTOR
from tunecast.model.resolve_parallel import Fields

STACKS = ("hf-peft", "trl", "axolotl", "llama-factory", "ms-swift")
"""Stacks that run transformers' modelling code as it is."""
PACKAGES = "flash-linear-attention (fla)"
OTHER_NAMES = {
    **dict.fromkeys(("flash-linear-attention", "flash_linear_attention", "fla-core"), FLA),
    "causal_conv1d": CONVOLUTION,
}
SLOWER = (
    "Linear attention of {name} is taken as transformers' PyTorch code, a loop over chunks of 64 tokens that runs "
    f"where {PACKAGES} is not installed; its kernels take far less time, and without checkpoints less memory: "
    f"--fused-kernels {','.join(LINEAR_KERNELS)}."
)
PLAIN_CONVOLUTIONS = (
    "Short convolutions of {name} are taken as PyTorch's own, which transformers runs where the package causal-conv1d "
    "is not installed; its kernel, which has no formulas here, is faster."
)


def has_linear_attention(architecture: Architecture) -> bool:
    """Whether some layers have a state in place of scores."""
    return any(group.layer.attention.delta is not None for group in architecture.groups)


def canonical_name(kernels: str) -> str:
    """The name of a package's kernels, however its package is written."""
    return OTHER_NAMES.get(kernels.lower(), kernels.lower())


def has_convolutions(architecture: Architecture) -> bool:
    """Whether some layers have a short convolution in place of attention."""
    return any(group.layer.attention.convolution is not None for group in architecture.groups)


def check_delta(fields: Fields, architecture: Architecture) -> None:
    """Refuse by name what layers without scores are not built with, and say whose code is forecast."""
    if has_linear_attention(architecture):
        check_unproven(fields, f"the linear attention of {architecture.name}", unbuilt(fields.values))
        check_linear_attention(fields, architecture.name)
    elif has_convolutions(architecture):
        check_unproven(fields, f"the short convolutions of {architecture.name}", unbuilt(fields.values))
        fields.notes.append(PLAIN_CONVOLUTIONS.format(name=architecture.name))


def check_unproven(fields: Fields, whose: str, unproven: Mapping[str, str]) -> None:
    """Raise NotSupportedError where a stack runs code of its own, or an option is `unproven` by any trace (and what to
    type instead)."""
    stack, of_file = fields.values["stack"], fields.origins["stack"] == "file"
    if stack not in STACKS:
        asked = "The training file's" if of_file else "--stack"
        switch = "set use_liger_kernel: false in it, or " if of_file and stack == "liger" else ""
        raise NotSupportedError(
            f"{asked} {stack} with {whose} is not built, as it runs code of its own; {switch}use --stack "
            f"{', '.join(STACKS[:-1])} or {STACKS[-1]}."
        )
    for flag, instead in unproven.items():
        raise NotSupportedError(f"{flag} with {whose} is not built; {instead}.")


def check_apart(architecture: Architecture) -> None:
    """Raise InputError where a state passes from token to token, also where a document of a row ends."""
    if not has_linear_attention(architecture):
        return
    name = architecture.name
    raise InputError(
        f"transformers keeps packed documents apart in the linear attention of {name} with {PACKAGES} only, which "
        "is not built for them; type --no-padding-free, or leave --attention-length out."
    )


def check_linear_attention(fields: Fields, name: str) -> None:
    """What only packages do; raises InputError where they are missing or do not take what they are given."""
    values = fields.values
    if FLA in values["fused_kernels"] and values["precision"] == "fp32":
        raise InputError(
            f"Kernels of {PACKAGES} take 16-bit numbers, but --precision is fp32; type --fused-kernels none, or "
            "--precision bf16-autocast."
        )
    if FLA not in values["fused_kernels"]:
        fields.notes.append(SLOWER.format(name=name))


def unbuilt(values: Mapping[str, Any]) -> dict[str, str]:
    """Options of a run that no trace proves these layers with, and what to type instead."""
    quantized = str(values.get("quant_method") or "")
    asked = {
        f"--pp {values['pp']}": (values["pp"] > 1, "use --pp 1 with --sharding fsdp"),
        f"--cp {values['cp']}": (values["cp"] > 1, "use --cp 1"),
        "--torch-compile": (values["torch_compile"], "leave it out"),
        "--recompute-attention": (values["recompute_attention"], "type --gradient-checkpointing in its place"),
        "--checkpoint-keeps-ops": (values["checkpoint_keeps_ops"], "leave it out"),
        f"--fp8 {values['fp8']}": (values["fp8"] is not None, "leave it out"),
        f"--quant-method {quantized}": (quantized.startswith("gptq"), "use --quant-method bnb-4bit"),
        f"--optim {ADAFACTOR}": (
            values["optim"] == ADAFACTOR and values["method"] == "full", "use --optim adamw_torch"
        ),
    }  # fmt: skip
    return {flag: instead for flag, (found, instead) in asked.items() if found}
