"""Adapters on stacked experts: what PEFT makes of module names that transformers 5 no longer has.

Source: peft 0.21 ``utils/transformers_weight_conversion.py``: names of experts and router are turned into
``target_parameters``, wherever they occur in the model, and ``all-linear`` means them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.attention_blocks import UNSLOTH
from tunecast.model.resolve_parallel import FSDP
from tunecast.model.shapes import FUSED_PARAMETER
from tunecast.model.units import DTYPE_BYTES, gib

ROUTER, UP, DOWN = "gate.weight", f"experts.{FUSED_PARAMETER}", "experts.down_proj"
RENAMED: dict[str, dict[str, str]] = {
    "mixtral": {"gate": ROUTER, "w1": UP, "w3": UP, "w2": DOWN},
    "qwen2_moe": {"gate": ROUTER, "gate_proj": UP, "up_proj": UP, "down_proj": DOWN},
}
"""Module names of transformers 4 and the parameters of transformers 5 (``_MOE_TARGET_MODULE_MAPPING``)."""

OF_AXOLOTL = ("axolotl", "hf-peft", "liger")
"""Stacks that axolotl's files are read as, by the kernels that they ask for."""
STACKED_NOTE = "Experts run as grouped products over tokens sorted by expert; balanced routing is assumed."
MODULES_NOTE = (
    "Experts run one after the other, three linear maps each, as before transformers 5; balanced routing is assumed."
)
"""How experts run, as parameters of a stack and as modules of their own (`experts_modules`)."""

STACKED_NAMES = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "router")
"""What training files call the maps of experts and the router."""


def has_stacks(architecture: Architecture) -> bool:
    """Whether layers keep their experts in one tensor each, and not as modules (`experts_modules`)."""
    blocks = (group.layer.mlp.experts for group in architecture.groups)
    return any(experts is not None and experts.stacked for experts in blocks)


def renamed_targets(architecture: Architecture) -> dict[str, str]:
    """Names that PEFT takes for parameters of this model's experts."""
    for group in architecture.groups:
        if group.layer.mlp.experts is not None:
            return RENAMED.get(group.layer.mlp.experts.peft_names, {})
    return {}


def stacked_targets(architecture: Architecture, names: list[str]) -> list[str]:
    """Targets with the experts' names turned into their parameters'."""
    renamed = renamed_targets(architecture)
    refuse_unbuilt(architecture, names, renamed)
    both = {old for old, new in renamed.items() if new == UP}
    if 0 < len(both & set(names)) < len(both):
        raise InputError(
            f"--lora-target-modules names {', '.join(sorted(both & set(names)))} without "
            f"{', '.join(sorted(both - set(names)))}, but transformers 5 keeps both in one parameter and PEFT refuses "
            "one alone; name both or neither."
        )
    return list(dict.fromkeys(renamed.get(name, name) for name in names))


def refuse_unbuilt(architecture: Architecture, names: list[str], renamed: Mapping[str, str]) -> None:
    """Stacked experts of families for which PEFT's adapters on them are not built here are refused by name."""
    experts = any(group.layer.mlp.experts is not None for group in architecture.groups)
    own = {linear.name for group in architecture.groups for linear in group.layer.linears}
    unbuilt = [name for name in names if name.rsplit(".", 1)[-1] in STACKED_NAMES and name not in own]
    if experts and not renamed and unbuilt:
        known = ", ".join(dict.fromkeys(linear.name for group in architecture.groups for linear in group.layer.linears))
        raise NotSupportedError(
            f"Adapters on the experts of {architecture.name} ({', '.join(unbuilt)}) are not built; "
            f"--lora-target-modules takes {known}."
        )


def on_parameters(targets: Sequence[str]) -> list[str]:
    """Those of the targets that are parameters of a stack, which have dotted names, and no modules."""
    return [name for name in targets if "." in name]


def check_stacked(targets: tuple[str, ...], given: Mapping[str, Any]) -> None:
    """Refuse what PEFT refuses for adapters on parameters."""
    stacked = on_parameters(targets)
    for option in ("lora_dropout", "use_dora", "lora_bias"):
        if stacked and given.get(option):
            out = "add --lora-dropout 0" if option == "lora_dropout" else "leave it out"
            raise InputError(
                f"--{option.replace('_', '-')} is asked for, by you or by the stack, but PEFT has none for stacked "
                f"experts ({', '.join(stacked)}); {out}, or name attention alone in --lora-target-modules."
            )


def check_unsloths_experts(architecture: Architecture, values: Mapping[str, Any]) -> None:
    """Raise NotSupportedError for stacked experts over a 4-bit base under today's Unsloth.

    It keeps them in 4 bits by code of its own (``GptOssExpertsBnb4bit`` of unsloth_zoo/temporary_patches/gpt_oss.py;
    others since 2026.6, unslothai/unsloth issue 4032), where transformers leaves them in 16.
    """
    if values["stack"] != UNSLOTH or not has_stacks(architecture) or values["bnb_4bit_quant_type"] is None:
        return
    raise NotSupportedError(
        f"--stack {UNSLOTH} keeps the experts of {architecture.name} in 4 bits by code of its own, which is not built; "
        "use --method lora, or --stack hf-peft, which keeps them in 16 bits."
    )


def check_experts_4bit(architecture: Architecture, values: Mapping[str, Any]) -> None:
    """Refuse 4 bits for experts where there are none in stacks, and beside what does not train over them.

    PEFT 0.21 leaves what it registers for adapters on such a stack in place (``ParamWrapper._remove_parametrizations``
    looks for ``_LoraParameterProxy`` alone). ZeRO-3 and FSDP 1 join parameters of one dtype, but the packed bytes of a
    stack have no storage of another (``replace_parameter_4bit`` has no ``quant_storage``).
    """
    if not values["quantize_moe_experts"]:
        return
    if values["stack"] not in OF_AXOLOTL:
        raise InputError(
            f"--quantize-moe-experts is of axolotl, but --stack is {values['stack']}; use --stack "
            f"{' or '.join(OF_AXOLOTL)}, or leave it out."
        )
    if not has_stacks(architecture):
        raise InputError(
            f"--quantize-moe-experts packs stacks of experts, but {architecture.name} is run without any (before "
            "transformers 5 experts are linear maps, which are in 4 bits anyway); leave it out."
        )
    adapted = [name for name in values["lora_target_modules"] if name in (UP, DOWN)]
    if adapted:
        raise NotSupportedError(
            f"--quantize-moe-experts with adapters on the experts ({', '.join(adapted)}) is not built; name attention "
            "alone in --lora-target-modules."
        )
    if values["sharding"] == "zero3" or (values["sharding"] in FSDP and values["fsdp_version"] == 1):
        raise InputError(
            f"--quantize-moe-experts packs experts into bytes, but DeepSpeed's zero3 and FSDP 1 (--sharding "
            f"{values['sharding']}) join weights of one dtype; use --sharding fsdp --fsdp-version 2, or ddp."
        )


def expert_notes(architecture: Architecture, values: Mapping[str, Any]) -> list[str]:
    """What a user of a mixture of experts may not expect."""
    routed = [(group.layer.mlp.experts, group.count) for group in architecture.groups if group.layer.mlp.experts]
    if not routed:
        return []
    if not has_stacks(architecture):
        return [MODULES_NOTE]
    notes = [STACKED_NOTE]
    stacked_bytes = DTYPE_BYTES[values["dtype"]] * sum(count * experts.maps_params for experts, count in routed)
    if architecture.model_type == "gpt_oss":
        notes.append(f"Experts stored as MXFP4 are turned into {values['dtype']} to train (Mxfp4Config dequantize).")
    if values["quantize_moe_experts"]:
        notes.append(
            "Stacked experts are in 4 bits (bitsandbytes' replace_parameter_4bit, by axolotl's quantize_moe_experts): "
            "every pass restores all experts of a layer, routed to or not."
        )
    elif values["method"] == "qlora":
        notes.append(
            f"{gib(stacked_bytes):.1f} GiB of stacked experts stay in {values['dtype']}: transformers 5 quantizes "
            "linear maps only."
        )
    if any(name in values["lora_target_modules"] for name in (UP, DOWN)):
        notes.append(
            "PEFT 0.21 adapts the experts themselves (all-linear and the names of their maps mean them): every "
            "pass writes all experts' weights anew with their adapters added; --lora-target-modules with attention "
            "alone avoids that."
        )
    return notes
