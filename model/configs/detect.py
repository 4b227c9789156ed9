"""Which framework a file belongs to, by the keys it has. Doubt is an error, never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.model.configs.source import is_empty

FORMATS = ("axolotl", "llama-factory", "trl", "torchtune", "litgpt")
COMPANIONS = {"accelerate": "--accelerate", "deepspeed": "--deepspeed"}

_AXOLOTL = ("micro_batch_size", "sequence_len", "adapter")
_LLAMA_FACTORY = ("stage", "finetuning_type", "template", "cutoff_len")


_FACTORY_V1 = ("dist_config", "peft_config", "kernel_config", "quant_config", "model_class")
"""Fields of the files in LLaMA-Factory's ``examples/v1``."""
_LITGPT = ("checkpoint_dir", "model_name", "initial_checkpoint_dir")
"""Where ``litgpt finetune`` has its checkpoint, and what ``litgpt pretrain`` has instead."""
_COMPANION_KEYS = {
    "accelerate": ("distributed_type", "num_processes", "compute_environment", "mixed_precision"),
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
}
"""Keys of which every companion file has one, the telling one first."""


def _given(mapping: Mapping[str, Any]) -> set[str]:
    return {str(key) for key, value in mapping.items() if not is_empty(value)}


def _has_component(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_component_" in value or any(_has_component(part) for part in value.values())
    return isinstance(value, list) and any(_has_component(part) for part in value)


def matching_formats(mapping: Mapping[str, Any]) -> tuple[str, ...]:
    """Every format, companions included, whose sign the mapping bears."""
    keys = _given(mapping)
    hugging_face = "model_name_or_path" in keys
    factory = hugging_face and not keys.isdisjoint(_LLAMA_FACTORY)
    signs = {
        "axolotl": "base_model" in keys and not keys.isdisjoint(_AXOLOTL),
        "llama-factory": factory,
        "trl": hugging_face and not factory,
        "torchtune": _has_component(mapping),
        "litgpt": not keys.isdisjoint(_LITGPT) and isinstance(mapping.get("train"), Mapping),
        "accelerate": "distributed_type" in keys,
        "deepspeed": "zero_optimization" in keys,
    }
    return tuple(name for name, there in signs.items() if there)


def refuse_other_kind(mapping: Mapping[str, Any], kind: str, name: str) -> None:
    """A file given as a companion that bears another's sign, or none at all."""
    found, flag = matching_formats(mapping), COMPANIONS[kind]
    if found and kind not in found:
        instead = f"with {COMPANIONS[found[0]]}" if found[0] in COMPANIONS else "as the training file"
        raise InputError(f"The file given with {flag} is one of {found[0]}; give it {instead}.")
    if _given(mapping).isdisjoint(_COMPANION_KEYS[kind]):
        keys = ", ".join(sorted(_given(mapping))[:6]) or "nothing"
        raise InputError(
            f"{name} is no {kind} file (its keys: {keys}); {flag} takes one with {_COMPANION_KEYS[kind][0]}."
        )


def detect_format(mapping: Mapping[str, Any], *, name: str, asked: str | None = None) -> str:
    """The one format of a training file: the one asked for, else the only one whose sign it bears."""
    if asked is not None:
        if asked not in FORMATS:
            raise UnknownNameError("config format", asked, FORMATS, hint=f"It is one of {', '.join(FORMATS)}.")
        return asked
    found = matching_formats(mapping)
    choices = ", ".join(FORMATS)
    if len(found) > 1:
        raise InputError(f"{name} looks like {' and '.join(found)}; say which with --config-format ({choices}).")
    if not found and {"model", "train_dataset"} <= _given(mapping) and not _given(mapping).isdisjoint(_FACTORY_V1):
        raise NotSupportedError(
            f"{name} is a file of LLaMA-Factory's v1 trainer, which is not read yet; give one of today's fields "
            "(model_name_or_path, finetuning_type ...)."
        )
    if not found:
        keys = ", ".join(sorted(_given(mapping))[:6]) or "nothing"
        raise InputError(
            f"{name} bears the sign of no known format (its keys: {keys}); say which with --config-format ({choices})."
        )
    if found[0] in COMPANIONS:
        flag = COMPANIONS[found[0]]
        raise InputError(f"{name} is a file of {found[0]}, which goes with a training file: add it with {flag} {name}.")
    return found[0]
