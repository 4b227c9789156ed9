"""What linear attention has formulas for: transformers' own PyTorch code, and the kernels of packages that it takes,
whole on one GPU or sharded by parameters."""

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


def has_linear_attention(architecture: Architecture) -> bool:
    """Whether some layers have a state in place of scores."""
    return any(group.layer.attention.delta is not None for group in architecture.groups)


def canonical_name(kernels: str) -> str:
    """The name of a package's kernels, however its package is written."""
    return OTHER_NAMES.get(kernels.lower(), kernels.lower())


def check_delta(fields: Fields, architecture: Architecture) -> None:
    """Refuse by name what linear attention is not built with, and say whose code is forecast."""
    if not has_linear_attention(architecture):
        return
    values, name = fields.values, architecture.name
    if values["stack"] not in STACKS:
        whose = "The training file's" if fields.origins["stack"] == "file" else "--stack"
        raise NotSupportedError(
            f"{whose} {values['stack']} with the linear attention of {name} is not built, as it runs code of its own; "
            f"use --stack {', '.join(STACKS[:-1])} or {STACKS[-1]}."
        )
    if values.get("attention_length") is not None:
        raise InputError(
            f"transformers keeps packed documents apart in the linear attention of {name} with {PACKAGES} only, which "
            "is not built for them; type --no-padding-free, or leave --attention-length out."
        )
    if FLA in values["fused_kernels"] and values["precision"] == "fp32":
        raise InputError(
            f"Kernels of {PACKAGES} take 16-bit numbers, but --precision is fp32; type --fused-kernels none, or "
            "--precision bf16-autocast."
        )
    for flag, instead in unbuilt(values).items():
        raise NotSupportedError(f"{flag} with the linear attention of {name} is not built; {instead}.")
    if FLA not in values["fused_kernels"]:
        fields.notes.append(SLOWER.format(name=name))


def unbuilt(values: Mapping[str, Any]) -> dict[str, str]:
    """Options of a run that no trace proves linear attention with, and what to type instead."""
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
