"""Models whose published weights are in few bits already: what that says of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError

NAMES = {"bnb-4bit": "bnb-4bit", "gptq-int8": "gptq-8bit", "gptq": "gptq-4bit"}
"""What the names of quantized copies contain, and the ``--quant-method`` that it is."""


def storage_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Run options that a config's ``quantization_config`` stands for; none where there is none, or of another kind."""
    stored = config.get("quantization_config")
    if not isinstance(stored, dict):
        return {}
    method, bits = stored.get("quant_method"), stored.get("bits")
    if method == "gptq" and bits in (4, 8):
        return {
            "method": "qlora",
            "quant_method": f"gptq-{bits}bit",
            "gptq_group_size": int(stored.get("group_size", -1)),
        }
    if method == "bitsandbytes" and stored.get("load_in_8bit"):
        return {"method": "qlora", "quant_method": "bnb-8bit"}
    if method == "bitsandbytes" and stored.get("load_in_4bit"):
        return {
            "method": "qlora",
            "quant_method": "bnb-4bit",
            "bnb_4bit_quant_type": str(stored.get("bnb_4bit_quant_type", "fp4")),
            "double_quant": bool(stored.get("bnb_4bit_use_double_quant", False)),
        }
    return {}


def with_storage(options: Mapping[str, Any], stored: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The options with those of a stored base; raises InputError where they say otherwise."""
    for option, value in stored.items():
        asked = options.get(option)
        if asked is not None and asked != value:
            flag, how = option.replace("_", "-"), stored["quant_method"]
            raise InputError(
                f"--{flag} is {asked}, but the config {name} holds its weights in {how} ({option} {value}); leave "
                f"--{flag} out, or give the unquantized model's config."
            )
    return {**options, **stored}


def stored_by_name(name: str) -> dict[str, Any]:
    """The same of a quantized copy that the catalog counts as its base, of which the name alone tells: bitsandbytes'
    copies are made in NF4 with double quantization (Unsloth's, whose ``-bnb-4bit`` the name is)."""
    how = stored_in(name)
    if how != "bnb-4bit":
        return {} if how is None else {"method": "qlora", "quant_method": how}
    return {"method": "qlora", "quant_method": "bnb-4bit", "bnb_4bit_quant_type": "nf4", "double_quant": True}


def by_its_name(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(options of the quantized copy that a name is of, notes) where nothing that was typed says another method."""
    stored = stored_by_name(name)
    typed = [option for option in stored if options.get(option) not in (None, stored[option])]
    if not stored or typed or options.get("method") is not None:
        return {}, ()
    how = stored["quant_method"]
    note = f"{name} holds its weights in {how}: taken as --method qlora of it; --method lora is of unquantized weights."
    return stored, (note,)


def published_as(name: str, stored: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """How the copy of this name holds its weights, by its config (`stored`) or, of one that the catalog counts as its
    base, by its name, where the run is of that storage: for what is downloaded and read."""
    from tunecast.model.question import STORED_AS

    how = stored.get("quant_method") or stored_in(name)
    asked = str(options.get("quant_method"))
    if how is None and asked.startswith("gptq"):  # nobody quantizes to it while loading: such a copy is downloaded
        how = asked
    return {STORED_AS: how} if how is not None and is_run_on(how, options) else {}


def stored_in(name: str) -> str | None:
    """The storage that a quantized copy's name says; None of one that is no copy of a catalog model."""
    from tunecast.catalogs.models import find_quantized

    named = next((method for part, method in NAMES.items() if part in name.lower()), None)
    return None if find_quantized(name) is None else named


def is_run_on(stored: str, options: Mapping[str, Any]) -> bool:
    """Whether options ask for a base in this storage."""
    return options.get("method") == "qlora" and (options.get("quant_method") or "bnb-4bit") == stored


def file_with_storage(
    options: Mapping[str, Any], stored: Mapping[str, Any], typed: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(a training file's options with those of a stored base, notes): transformers loads such a base as it is stored,
    whatever the file says of quantizing (``AutoHfQuantizer.merge_quantization_configs``); typed words still count."""
    if options.get("method") == "full" or not stored or typed.get("method") is not None:
        return dict(options), ()
    changed = [field for field in stored if options.get(field) != stored[field] and typed.get(field) is None]
    note = f"{name} holds its weights in {stored['quant_method']}: the file's lora is read as qlora of that base."
    return {**options, **{field: stored[field] for field in changed}}, (note,) if "method" in changed else ()


def alias_notes(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """As what the catalog counts another model, and of a quantized copy that the run has another storage."""
    from tunecast.catalogs.models import find_quantized, shape_of

    row = find_quantized(name)
    if row is None:
        same = shape_of(name)
        return () if same is None else (f"{name} is counted as {same.hf_id}, whose shape it has",)
    stored = stored_in(name)
    method, how = options.get("method") or "lora", options.get("quant_method") or "bnb-4bit"
    if stored is None or is_run_on(stored, options):
        return ()
    asked = f"--method {method}" + (f" with --quant-method {how}" if method == "qlora" else " on unquantized weights")
    typed = "--method qlora" + ("" if stored == "bnb-4bit" else f" --quant-method {stored}")
    note = (
        f"{name} holds the weights of {row.hf_id} in {stored}, but this forecast is of {asked}; type {typed} for a run "
        "on that copy."
    )
    return (note,)
