"""In which dtypes a job is stored that DeepSpeed casts or FSDP shards: what follows from how it is spread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.joined import STACKS
from tunecast.model.resolve_parallel import FSDP, ZERO, Fields
from tunecast.model.stacks import DTYPE_ALIASES, load_stacks
from tunecast.model.units import SIXTEEN_BITS

UNCAST = (
    "DeepSpeed's cast of the whole model to 16 bits is left out, because --dtype or --precision says otherwise; "
    "without them it is counted."
)
GPTQ_UNCAST = (
    "DeepSpeed's cast of the whole model to 16 bits is left out: the kernels of a GPTQ base have a dtype of their own."
)


def casts_all(fields: Fields) -> bool:
    """Whether DeepSpeed runs the job, which casts the whole module to 16 bits and runs it without autocast.

    Source: DeepSpeed ``runtime/engine.py`` (``_configure_distributed_model``: ``self.module.bfloat16()``) where
    ``bf16.enabled``, which the Trainer and accelerate fill in with their own ``bf16``.
    """
    given = fields.given
    if fields.values["stack"] in STACKS:
        return False  # Megatron's distributed optimizer
    if fields.values["num_gpus"] == 1:
        return given.get("offload") not in (None, "none")
    split = any(given.get(name) not in (None, 1) for name in ("tp", "pp"))
    return given.get("sharding") in (("zero2", "zero3") if split else ZERO)  # Megatron shards states beside splits


def zero_defaults(fields: Fields, defaults: dict[str, Any]) -> dict[str, Any]:
    """Under DeepSpeed what a stack loads or raises to fp32, adapters too, is 16 bits wide.

    A 16-bit dtype or precision that is given is that of all; any other is taken as it stands, and so is a GPTQ base,
    each with a note.
    """
    given = fields.given
    if not casts_all(fields):
        return defaults
    if str(given.get("quant_method")).startswith("gptq"):
        fields.notes.append(GPTQ_UNCAST)
        return defaults
    usual = str(defaults.get("precision", "")).removesuffix("-autocast")
    asked = given.get("precision") or given.get("dtype") or usual
    dtype = DTYPE_ALIASES.get(asked, asked)
    if dtype not in SIXTEEN_BITS:
        fields.notes.append(UNCAST)
        return defaults
    return {**defaults, "dtype": dtype, "precision": dtype, "adapter_dtype": dtype, "upcast_non_quantized": False}


def settle_zero(fields: Fields, *, gpu_has_bf16: bool) -> None:
    """fp16 in place of DeepSpeed's bf16 where a card has none of it, and what its cast means, in a note."""
    values = fields.values
    asked = str(values["precision"])
    if not gpu_has_bf16:
        for name in ("precision", "dtype", "adapter_dtype", "bnb_4bit_compute_dtype"):
            values[name] = "fp16" if values.get(name) == "bf16" else values.get(name)
    where = "in host memory" if fields.given.get("offload") not in (None, "none") else "spread over the GPUs"
    what = f"an fp32 copy and fp32 optimizer states of what is trained, {where}"
    if values["precision"] != asked:
        fields.notes.append(f"This GPU has no bf16: DeepSpeed trains in pure fp16, with {what}.")
    elif "precision" not in fields.given:
        fields.notes.append(f"DeepSpeed trains in pure {asked}, with {what}.")


def raises_trained(values: Mapping[str, Any]) -> bool:
    """Whether accelerate raises what trains to fp32 before FSDP shards it, which is then gathered in 16 bits: under
    mixed precision, with the versions of FSDP that a stack leaves to it (stacks.json, ``fsdp_raises``).

    Source: accelerate 1.15 ``utils/fsdp_utils.py`` (``fsdp2_prepare_model``), ``accelerator.py`` (``prepare_model``).
    """
    mixed = values["num_gpus"] > 1 and values["sharding"] in FSDP and values["precision"].endswith("-autocast")
    return mixed and values["fsdp_version"] in load_stacks()[values["stack"]].get("fsdp_raises", ())


NARROW = (
    "Weights, gradients and the optimizer's moments of the shards are all in bf16, which is assumed; bf16: true of a "
    "Trainer raises them to fp32, twice the memory: --precision bf16-autocast."
)


def note_narrow(fields: Fields) -> None:
    """Tell of a whole model in bf16 throughout, where nobody said so and accelerate would raise it with autocast."""
    values = fields.values
    narrow = values["method"] == "full" and values["precision"] == "bf16" == values["dtype"]
    if narrow and "precision" not in fields.given and raises_trained({**values, "precision": "bf16-autocast"}):
        fields.notes.append(NARROW)


def raises_adapters(fields: Fields) -> bool:
    """Whether FSDP 2 keeps adapters in fp32 beside a base in 16 bits; not those in 16 bits beside a 4-bit base, which
    are left alone (``model_has_params4bit``)."""
    values = fields.values
    half = values["precision"].removesuffix("-autocast")
    alone = values["bnb_4bit_quant_type"] is not None and "adapter_dtype" in fields.given
    narrow = alone and DTYPE_ALIASES.get(fields.given["adapter_dtype"], fields.given["adapter_dtype"]) != "fp32"
    known = "master_dtype" in fields.given or values["fsdp_version"] == 1 or values["method"] == "full"
    return not known and raises_trained(values) and values["dtype"] == half and not narrow


def share_dtype(fields: Fields) -> None:
    """Adapters as FSDP 2 gathers them: in 16 bits where accelerate keeps them in fp32 shards; else in the base's dtype,
    since one group has one (PEFT: ``autocast_adapter_dtype=False``).

    Under FSDP 1 the Trainer wraps every adapter by itself (PEFT ``fsdp_auto_wrap_policy``), so that it keeps its own.
    """
    if fields.values["sharding"] not in FSDP or fields.values["method"] == "full":
        return
    base = fields.values["dtype"]
    if raises_adapters(fields):
        fields.put("adapter_dtype", base, "stack-default")
        return
    if fields.values["adapter_dtype"] == base or fields.values["fsdp_version"] == 1:
        return
    if "adapter_dtype" in fields.given:
        raise InputError(
            f"FSDP shards one dtype per layer, but --adapter-dtype is {fields.values['adapter_dtype']} and the base "
            f"is {base}; leave --adapter-dtype out or choose --sharding zero3."
        )
    fields.put("adapter_dtype", base, "stack-default")
    fields.notes.append(f"Under FSDP the adapters are stored as {base}, like the base they share a shard with.")
