"""By how much a run's work is slower than the mean card's, as published runs and records say: its card, generation,
software stack, sharding, attention kernel, and what nobody knows of a new source.

A card, stack or sharding that the runs contain has its own effect; any other has none, and the spread of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunecast.catalogs.gpus import Gpu, training_dtype
from tunecast.model.memory_codes import effects_stack
from tunecast.model.product_share import FP32, fp32_over_usual, own_over_usual, shares_of
from tunecast.model.run import Run

WORK = ("gemm", "attention", "memory", "dequant")
"""Kinds of work of the device."""
DEVICE_KINDS, GENERATION_KINDS = ("gemm", "attention", "dequant"), WORK
"""Bytes moved by generation alone: what cards of one chip reach of their bandwidth is much the same, and a card with
rows must not be slower for them than its siblings without (an A100 on PCIe, an A800)."""
STACK_KINDS = ("gemm", "attention", "memory")
SOURCE_KINDS = (*WORK, "link")
"""Kinds of work whose rates differ from card to card, generation to generation, stack to stack and source to source."""
PRODUCTS = ("gemm", "attention")
"""Kinds of work that a lower clock slows: memory has a clock of its own."""
NO_VENDOR = "no run on any {} card either"
DEQUANT_KERNEL = "dequant_kernel"
"""The group of effects of the kernels that unpack weights: a library's, whatever stack calls it."""
INT8_BASE = "bnb-8bit"
"""Storage of LLM.int8."""
CLOCK = "clock"
"""The group of effects of cards whose power holds their clock down."""
AROUND_LAYERS = {"fsdp": "fsdp", "hsdp": "fsdp", "fsdp-grad-op": "fsdp", "zero2": "zero2", "zero3": "zero3"}
"""Shardings that hang code of their own on every layer's parameters (FSDP's units, DeepSpeed's hooks of gradients and
of modules), which may slow all of its work, and whose code that is.

Copies of the model (DDP), a shared update (ZeRO-1), split maps and stages leave a layer's kernels as they are: what
they exchange is timed by itself. Rows of these are as fast as their card, stack and source, so that one more copy of a
model never speeds up the others.
"""
LAYERS_AS_THEY_ARE = ("none", "zero1")
"""Shardings of the rows that leave them so."""
ATTENTION_KERNEL = "attention_kernel"
"""The group of effects of attention kernels other than those of today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A log of time by which some kinds of work are slower, all alike."""

    value: float
    name: str | None
    """``group:name`` in the priors' covariance; None for one that no row has."""
    moves: tuple[str, ...] = WORK
    """The kinds of work that it slows."""
    log_sd: float = 0.0
    """Spread of one that no row has."""
    scaled: bool = False
    """Whether the priors' width goes for this spread too: what rows left out with their source mostly do not share."""
    notes: tuple[str, ...] = ()


def device_effect(gpu: Gpu, priors: Mapping[str, Any]) -> Effect:
    """By how much this card is slower than the mean one; one that no row has: what is known of it, and its spread."""
    known = priors["device_effects"].get(gpu.id)
    if known is not None:
        return Effect(value=known["value"], name=f"device:{gpu.id}")
    beliefs, spread = priors["beliefs"], float(priors["spreads"]["device"])
    note = f"no published run on {gpu.id} is among the priors: datasheet rates, wider interval"
    if training_dtype(gpu) != "bf16" and gpu.id not in beliefs["held_clock"]["values"]:
        spread = math.hypot(spread, float(beliefs["held_clock"]["log_sd"]))
    vendor = beliefs["vendor_effects"].get(gpu.vendor)
    if vendor is None:
        return Effect(value=0.0, name=None, log_sd=spread, notes=(note,))
    spread = math.hypot(spread, float(vendor["log_sd"]))
    if shares_of(gpu, beliefs):
        return Effect(value=0.0, name=None, log_sd=spread, notes=(note, NO_VENDOR.format(gpu.vendor.upper())))
    slowed = f"{NO_VENDOR.format(gpu.vendor.upper())}: slowed by the ratio of achieved matrix products"
    return Effect(value=vendor["value"], name=None, log_sd=spread, notes=(note, slowed))


def product_effects(gpu: Gpu, priors: Mapping[str, Any], run: Run | None = None) -> tuple[Effect, ...]:
    """What is not known of the products of a card without published runs, in the run's dtype or in 16 bits."""
    beliefs = priors["beliefs"]
    if gpu.id in priors["device_effects"] or gpu.id in beliefs["held_clock"]["values"]:
        return ()
    share = fp32_over_usual if run is not None and run.compute_dtype == FP32 else own_over_usual
    log_sd = share(gpu, beliefs).log_sd
    return (Effect(value=0.0, name=None, moves=PRODUCTS, log_sd=log_sd),) if log_sd else ()


def clock_effects(gpu: Gpu, priors: Mapping[str, Any]) -> tuple[Effect, ...]:
    """By how much products are slower on a card that is known not to hold its clock, as its rows or others say."""
    belief = priors["beliefs"]["held_clock"]
    clock = belief["values"].get(gpu.id)
    if clock is None:
        return ()
    if (known := priors["effects_by_kind"][CLOCK].get(gpu.id)) is not None:
        return (Effect(value=known["value"], name=f"{CLOCK}:{gpu.id}", moves=PRODUCTS),)
    return (Effect(value=-math.log(clock), name=None, moves=PRODUCTS, log_sd=float(belief["log_sd"])),)


def attention_effects(kernel: str, priors: Mapping[str, Any]) -> tuple[Effect, ...]:
    """By how much attention is slower by another kernel than FlashAttention-2: as the rows that ran it say, else as is
    believed, with that belief's doubt; an empty name is none."""
    if not kernel:
        return ()
    if (known := priors["effects_by_kind"][ATTENTION_KERNEL].get(kernel)) is not None:
        return (Effect(value=known["value"], name=f"{ATTENTION_KERNEL}:{kernel}", moves=("attention",)),)
    belief = priors["beliefs"]["attention_kernels"]
    slower = -math.log(belief["values"][kernel])
    return (Effect(value=slower, name=None, moves=("attention",), log_sd=float(belief["log_sd"])),)


def kind_effects(group: str, name: str, priors: Mapping[str, Any]) -> tuple[Effect, ...]:
    """By how much each kind of work is slower on this card or generation; unknown ones have their spreads."""
    kinds = GENERATION_KINDS if group == "generation" else DEVICE_KINDS
    return tuple(effect_of(f"{group}.{kind}", name, priors, (kind,)) for kind in kinds)


def run_effects(run: Run | None, priors: Mapping[str, Any]) -> tuple[Effect, ...]:
    """By how much the software stack and the sharding slow the device; unknown ones do not, and widen the interval."""
    if run is None:
        return ()
    sharding = sharding_effects(run.sharding, priors) if run.num_gpus > 1 else ()
    unpacked = (_dequant_effect(run, priors),) if run.base_quantization else ()
    eight = run.base_quantization == INT8_BASE
    slow = priors["beliefs"]["int8_products"]
    outliers = Effect(value=-math.log(slow["value"]), name=None, moves=("gemm",), log_sd=float(slow["log_sd"]))
    code = effects_stack(run.stack, priors)
    stack = tuple(effect_of(f"stack.{kind}", code, priors, (kind,), scaled=True) for kind in STACK_KINDS)
    return (*stack, *unpacked, *((outliers,) if eight else ()), *sharding)


def known_sharding(sharding: str, priors: Mapping[str, Any]) -> str | None:
    """The sharding whose rows a forecast goes by: that of its code; None where there is none."""
    code = AROUND_LAYERS.get(sharding)
    return code if code in priors["sharding_effects"] else None


def sharding_effects(sharding: str, priors: Mapping[str, Any]) -> tuple[Effect, ...]:
    """By how much the sharding slows all work; one that another's code runs is as slow as that one, give or take what
    shardings differ by, and so is one without rows."""
    apart = Effect(value=0.0, name=None, log_sd=float(priors["spreads"]["sharding"]))
    code = AROUND_LAYERS.get(sharding)
    if code is None:
        return () if sharding in LAYERS_AS_THEY_ARE else (apart,)
    own = effect_of("sharding", code, priors, WORK)
    return (own,) if sharding == code or own.name is None else (own, apart)


def dequant_kernel(run: Run, stack: str) -> str:
    """Whose kernel unpacks the weights: bitsandbytes' of today or of transformers 4.46's time, torchao's, GPTQ's."""
    if run.base_quantization != "bnb-4bit":
        return str(run.base_quantization)
    old = run.hf_code in ("4.45", "4.46")
    return "torchao-nf4" if stack == "torchtune" else "bnb-4bit before 0.48" if old else "bnb-4bit"


def _dequant_effect(run: Run, priors: Mapping[str, Any]) -> Effect:
    """By how much that kernel is slower, as rows say, else as is believed of it."""
    name = dequant_kernel(run, run.stack)
    found = effect_of(DEQUANT_KERNEL, name, priors, ("dequant",), scaled=True)
    believed = priors["beliefs"]["dequant_kernels"]["values"].get(name)
    return found if found.name is not None or believed is None else replace(found, value=-math.log(believed))


def source_effects(priors: Mapping[str, Any]) -> tuple[Effect, ...]:
    """What nobody knows of a new run beside its stack: each kind of work may be slower by its own spread, and all of
    them by as much as sources left out of the fit were slower than forecast."""
    sds = {kind: float(priors["spreads"][f"source.{kind}"]) for kind in SOURCE_KINDS}
    own = (Effect(value=0.0, name=None, moves=(kind,), log_sd=sd, scaled=True) for kind, sd in sds.items())
    return (Effect(value=float(priors["source_effect"]["value"]), name=None), *own)


def effect_of(
    group: str, name: str, priors: Mapping[str, Any], moves: tuple[str, ...], *, scaled: bool = False
) -> Effect:
    stored = priors["effects_by_kind"].get(group) or priors.get(f"{group}_effects", {})
    known = stored.get(name)
    if known is None:
        return Effect(value=0.0, name=None, moves=moves, log_sd=float(priors["spreads"][group]), scaled=scaled)
    return Effect(value=known["value"], name=f"{group}:{name}", moves=moves)
