"""What a card's matrix products reach of its dense peak, and how sure that is: published, or expected by its power.

Products of 16-bit numbers are published for some cards (``tflops_by_gpu`` of the beliefs). What they reach differs
most by the power that a card may draw: 72 W feed 121 TFLOP/s of an L4 to less than half, 350 W all 71 of an RTX 3090.
For an NVIDIA card without a figure, `expected` reads its share off those with one, by watts per TFLOP/s and by compute
capability. Products in fp32 do without tensor cores, and what they reach of their own peak is told in the same way by
figures of their own (``fp32_tflops_by_gpu``): two thirds on cards of compute capability 8.6 and 8.9, nearly all on an
A100.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from tunecast.catalogs.gpus import Gpu, load_gpus, training_dtype
from tunecast.model.units import SIXTEEN_BITS, TERA

FP32 = "fp32"
FIGURES = {"": "tflops_by_gpu", FP32: "fp32_tflops_by_gpu"}
"""Where the beliefs keep TFLOP/s of products: in 16 bits, and in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Log of a card's products over its peak, with the standard deviation of what is not known of it."""

    log: float
    log_sd: float


def attention_share(gpu: Gpu, beliefs: Mapping[str, Any]) -> float:
    """Rate of FlashAttention-2 as a share of what it reaches elsewhere: less where products have instructions that
    it does not use (compute capability 9.0 and 10.x, Hopper and Blackwell of data centres)."""
    return float(beliefs["attention_on_newer"]["values"].get(gpu.major, 1.0))


def attention_gain(gpu: Gpu, dtype: str, beliefs: Mapping[str, Any]) -> float:
    """By how much fused attention in 16 bits comes closer to this card's products than it does on an A100.

    A score takes its products' time and, outside the tensor cores, that of exponentials and of plain arithmetic. All
    processors are about as fast at those, but not at products: an A100's do 2,048 FLOPs a clock, an RTX A5000's 1,024
    and a GeForce's 512, so that they wait less for the rest. 1 where that is not known of a card, where it has a figure
    of its own (`attention_share`), and by priors that are older than this belief.
    """
    belief = beliefs.get("attention_outside_products")
    outside = None if belief is None or dtype not in SIXTEEN_BITS else _outside_over_products(gpu, belief)
    if belief is None or outside is None:
        return 1.0
    usual = _outside_over_products(load_gpus()[belief["reference"]], belief)
    return 1.0 if usual is None else (1.0 + usual) / (1.0 + outside)


def _outside_over_products(gpu: Gpu, belief: Mapping[str, Any]) -> float | None:
    """Clocks of a score's work outside the tensor cores over those of its products; None where not known."""
    lanes = belief["arithmetic_per_clock"].get(gpu.compute_capability)
    if lanes is None or gpu.flops_per_sm_clock_fp16 is None:
        return None
    exponentials = float(belief["exponentials"]) / float(belief["exponentials_per_clock"])
    outside = exponentials + float(belief["arithmetic"]) / float(lanes)
    return outside * gpu.flops_per_sm_clock_fp16 / float(belief["product_flops"])


def usual_shares(gpu: Gpu, beliefs: Mapping[str, Any]) -> Mapping[str, float]:
    """By dtype, ``bf16`` for the others: what products of this compute capability reach of their peak."""
    known: Mapping[str, Mapping[str, float]] = beliefs["matmul_reached"]["values"]
    return known.get(gpu.major, known["8"])


def own_over_usual(gpu: Gpu, beliefs: Mapping[str, Any]) -> Share:
    """Log of what this card's products reach of their peak over what those of its compute capability do, above 0 where
    it runs faster than the clock of its peak; and what is not known of it.

    Products one after the other are published, else as its power lets expect (`expected`), else the usual. A card whose
    power holds them back is held back less between other work: `held_in_a_mix` of it, anywhere between none and all (an
    even distribution); of what `expected` leaves open no more reaches training than of the shortfall itself.
    """
    own = shares_of(gpu, beliefs)
    found = Share(log=math.log(median(own)), log_sd=0.0) if own else expected(gpu, beliefs)
    if found is None:
        return Share(log=0.0, log_sd=float(beliefs["power_share"]["log_sd_without_power"]))
    alone = found.log - math.log(float(usual_shares(gpu, beliefs)["bf16"]))
    short = max(-alone, 0.0) if gpu.vendor == "nvidia" else 0.0
    reaches = float(beliefs["held_in_a_mix"]["value"]) if short else 1.0
    return Share(log=reaches * alone, log_sd=math.hypot(short / math.sqrt(12.0), reaches * found.log_sd))


def fp32_over_usual(gpu: Gpu, beliefs: Mapping[str, Any]) -> Share:
    """Log of what this card's fp32 products reach of their peak over what 16-bit ones of its compute capability do of
    theirs; as in 16 bits where no figure tells of fp32 (other makers, a card with a clock of its own).

    Hardly anything runs between products that take so long: they are as slow as alone.
    """
    own = shares_of(gpu, beliefs, FP32)
    found = Share(log=math.log(median(own)), log_sd=0.0) if own else expected(gpu, beliefs, FP32)
    if found is None:
        return own_over_usual(gpu, beliefs)
    return Share(log=found.log - math.log(float(usual_shares(gpu, beliefs)["bf16"])), log_sd=found.log_sd)


def peak_of(gpu: Gpu, dtype: str) -> float:
    """FLOP/s of the products that the figures are of: fp32, else 16 bits."""
    return gpu.peaks[dtype or training_dtype(gpu)]


def shares_of(gpu: Gpu, beliefs: Mapping[str, Any], dtype: str = "") -> list[float]:
    """Every published figure of this card's large products over their dense peak, in 16 bits or in `FP32`."""
    figures = beliefs["matmul_reached"].get(FIGURES[dtype], {}).get(gpu.id, ())
    return [figure * TERA / peak_of(gpu, dtype) for figure in figures]


def all_shares(beliefs: Mapping[str, Any], dtype: str = "") -> dict[str, list[float]]:
    """`shares_of` every card that has some."""
    catalog = load_gpus()
    return {
        name: shares_of(catalog[name], beliefs, dtype) for name in beliefs["matmul_reached"].get(FIGURES[dtype], {})
    }


def watts_per_tflops(gpu: Gpu, dtype: str = "") -> float | None:
    """Board power over the dense 16-bit peak, or that in `FP32`; None where a datasheet tells no power."""
    return gpu.tdp_w / (peak_of(gpu, dtype) / TERA) if gpu.tdp_w else None


def expected(gpu: Gpu, beliefs: Mapping[str, Any], dtype: str = "") -> Share | None:
    """What its power lets expect of a card without a published figure; None where nothing is known to tell.

    log share = constant + slope x log(watts per TFLOP/s) + effect of the compute capability + noise, all normal
    (a Bayesian regression over the NVIDIA cards with figures; spreads in the beliefs' ``power_share``). A capability
    without figures is taken as the published one of its major version, else as a new one. Never above the peak. A
    card that is known not to hold its clock has a belief of its own instead (``held_clock``).
    """
    import numpy as np

    watts, held = watts_per_tflops(gpu, dtype), beliefs.get("held_clock", {}).get("values", {})
    belief = beliefs.get("power_share")
    if gpu.vendor != "nvidia" or watts is None or belief is None or gpu.id in held:
        return None
    catalog = load_gpus()
    known = [(catalog[name], median(own)) for name, own in all_shares(beliefs, dtype).items()]
    seen = [(card, share) for card, share in known if card.vendor == "nvidia" and card.tdp_w]
    if not seen:
        return None
    x = np.log([watts_per_tflops(card, dtype) or 1.0 for card, _ in seen])
    y = np.log([share for _, share in seen])
    alike = [card.compute_capability for card, _ in seen]
    own = capability_among(gpu.compute_capability, alike)
    between, noise, wide = (float(belief[name]) ** 2 for name in ("between_log_sd", "noise_log_sd", "line_sd"))
    same = np.array([[float(a == b) for b in alike] for a in alike])
    gram = wide * (1.0 + np.outer(x, x)) + between * same + noise * np.eye(len(x))
    at = math.log(watts)
    cross = wide * (1.0 + at * x) + between * np.array([float(own == a) for a in alike])
    solved = np.linalg.solve(gram, np.column_stack([y, cross]))
    variance = wide * (1.0 + at * at) + between + noise - float(cross @ solved[:, 1])
    return Share(log=min(float(cross @ solved[:, 0]), 0.0), log_sd=math.sqrt(variance))


def capability_among(capability: str, known: list[str]) -> str:
    """This compute capability, or where it has no figures the nearest below it, else any, of its major version."""
    if capability in known:
        return capability
    major = sorted({other for other in known if other.split(".")[0] == capability.split(".")[0]})
    below = [other for other in major if float(other) <= float(capability)]
    return (below or major or [capability])[-1]
