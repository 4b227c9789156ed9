"""Command line over file: what the user types wins, and takes with it what no longer fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunecast.model.configs.run_file import RunFile

AMOUNTS = ("tokens", "num_samples", "max_steps", "dataset")
_ADAPTER = (
    "lora_r", "lora_target_modules", "lora_dropout", "adapter_dtype", "use_dora", "use_rslora", "modules_to_save",
    "modules_to_save_dtype",
)  # fmt: skip
_QUANTIZED = ("quant_method", "bnb_4bit_quant_type", "double_quant")
_KEPT = {"lora": _ADAPTER, "qlora": (*_ADAPTER, *_QUANTIZED), "full": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Options for one forecast, where each came from, and what to tell the user."""

    options: dict[str, Any]
    origins: dict[str, str]
    """By option: ``cli``, ``file`` or ``stack-default`` (the framework's default)."""
    notes: tuple[str, ...]


def merge_options(run_file: RunFile, typed: Mapping[str, Any]) -> Merged:
    """The file's options under those that were typed (None counts as not typed).

    A typed amount replaces the file's; a typed method drops the adapter and quantization fields that the method
    does not have; epochs without any amount are dropped, since they say nothing alone.
    """
    given = {name: value for name, value in typed.items() if value is not None}
    if given.get("allow_long_context") is False:  # a switch that can only be typed on
        del given["allow_long_context"]
    options = dict(run_file.options)
    notes = list(run_file.notes)
    _drop_replaced(options, given)
    notes += _drop_unfit(options, given, run_file)
    origins = {name: run_file.origins[name] for name in options}
    options |= given
    origins |= dict.fromkeys(given, "cli")
    if not any(options.get(name) is not None for name in AMOUNTS) and "num_train_epochs" not in given:
        epochs = options.pop("num_train_epochs", None)
        origins.pop("num_train_epochs", None)
        if epochs is not None:
            notes.append(
                f"The file says {epochs:g} epochs but no file says how many samples: give --num-samples with "
                "--mean-tokens, or --tokens, for totals."
            )
    return Merged(options=options, origins=origins, notes=tuple(notes))


def _drop_replaced(options: dict[str, Any], given: Mapping[str, Any]) -> None:
    if any(name in given for name in AMOUNTS):
        for name in AMOUNTS:
            options.pop(name, None)
    if given.get("num_gpus") == 1 or given.get("sharding") == "fsdp":
        for name in ("sharding",) if given.get("num_gpus") == 1 else ("adapter_dtype",):
            options.pop(name, None)


def _drop_unfit(options: dict[str, Any], given: Mapping[str, Any], run_file: RunFile) -> list[str]:
    method, old = given.get("method"), run_file.options.get("method")
    if method is None or method == old or method not in _KEPT:
        return []
    for name in (*_ADAPTER, *_QUANTIZED):
        if name not in _KEPT[method]:
            options.pop(name, None)
    return [f"--method {method} replaces the file's {old}: its adapter and quantization fields go where unfit."]
