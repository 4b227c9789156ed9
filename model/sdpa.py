"""Which kernels ``sdpa`` runs: cuDNN's, made for the card, or FlashAttention-2's.

PyTorch tries cuDNN first on compute capabilities 9.0, 10.0 and 10.3 where cuDNN is newer than 9.15
(``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, ``check_prefer_cudnn_attention``), which its wheels for CUDA
13 bring since 2.11 (huggingface/transformers pull request 48163; those for CUDA 12 have an older one), and takes it for
heads of up to 128, on 9.0 256 values (``check_cudnn_tensor_shapes``), in 16 bits. Elsewhere it runs its own copy of
FlashAttention-2, whose kernels use no instruction newer than Ampere's; ``flash_attention_2`` runs those everywhere. A
device's record has measured what its own PyTorch chose; this is about forecasts without one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.gpus import Gpu
from tunecast.model.architecture import Architecture, Attention
from tunecast.model.attention_blocks import needs_mask
from tunecast.model.factors import Curve, FactorSet
from tunecast.model.flash_3 import runs_flash_3
from tunecast.model.litgpt import is_litgpt
from tunecast.model.operation import CHOSEN, EFFICIENT, FLASH, HOPPER, MASKED, NATIVE
from tunecast.model.primitives_heavy import WIDEST_FLASH
from tunecast.model.resolve import Resolved
from tunecast.model.resolve_attention import runs_plain_attention
from tunecast.model.run import Run
from tunecast.model.stacks import FLASH_3
from tunecast.model.target import Target
from tunecast.model.value import Z80

WIDEST = {"9.0": 256, "10.0": 128, "10.3": 128}
"""Largest head that cuDNN takes, by the compute capabilities on which PyTorch asks it first."""


def has_cudnn_attention(gpu: Gpu | None) -> bool:
    """Whether PyTorch asks cuDNN first on this card."""
    return gpu is not None and gpu.vendor == "nvidia" and gpu.compute_capability in WIDEST


def runs_cudnn(architecture: Architecture, run: Run, gpu: Gpu | None) -> bool:
    """Whether attention of this run is cuDNN's on this card, if its PyTorch asks cuDNN first."""
    if gpu is None or not has_cudnn_attention(gpu) or run.attn_implementation != "sdpa" or run.compute_dtype == "fp32":
        return False
    if runs_plain_attention(architecture):
        return False
    widest = max(group.layer.attention.head_dim for group in architecture.groups)
    return widest <= WIDEST[gpu.compute_capability]


def sdpa_on_card(resolved: Resolved, architecture: Architecture, target: Target) -> Resolved:
    """The run with `Run.sdpa_cudnn` as it is on this device."""
    if not resolved.run.sdpa_cudnn or runs_cudnn(architecture, resolved.run, target.gpu):
        return resolved
    return replace(resolved, run=replace(resolved.run, sdpa_cudnn=False))


def as_sdpa(curves: Mapping[str, Curve], layout: str, under: str = "attention") -> dict[str, Curve]:
    """The attention curves of a kernel, by the names of what ``sdpa`` runs, or `under` another; empty where it has
    none."""
    own = f"attention-{layout}."
    return {name.replace(own, f"{under}."): curve for name, curve in curves.items() if own in name}


LEAST_FLASH = 8.0
"""Compute capability from which FlashAttention-2 has kernels (its README: Ampere, Ada or Hopper)."""


def has_flash(gpu: Gpu | None) -> bool:
    """Whether flash kernels run on this card; an NVIDIA card without them runs memory-efficient ones for all."""
    return gpu is None or gpu.vendor != "nvidia" or float(gpu.compute_capability or LEAST_FLASH) >= LEAST_FLASH


def efficient_curves(
    curves: Mapping[str, Curve], dtype: str, beliefs: Mapping[str, Any], gpu: Gpu | None
) -> dict[str, Curve]:
    """Curves of PyTorch's memory-efficient kernels: FlashAttention-2's at a share of its rate, as far as published
    figures tell, and with their doubt. Empty where a device has no curve to start from, or runs no other kernels, and
    by priors that are older than this belief."""
    if not has_flash(gpu):
        return {}
    belief = beliefs.get("attention_efficient")
    found: dict[str, Curve] = {}
    if belief is None:
        return found
    for direction in ("forward", "backward"):
        like = _flash_2(curves, dtype, direction)
        if like is None:
            continue
        for kernel, rates in ((EFFICIENT, belief), (MASKED, belief.get("masked", belief))):
            rate = like.params["flops_per_s"] * float(rates[direction])
            curve = like.at_rate("flops_per_s", rate, log_sd=float(belief["log_sd"]), origin="assumed")
            wide = rates.get(f"{direction}_wide")
            if wide is not None:
                curve = replace(curve, params={**curve.params, "wide": float(wide)})
            found[f"attention-{kernel}.{dtype}.{direction}"] = curve
    return found


def flash_3_curves(
    curves: Mapping[str, Curve], dtype: str, beliefs: Mapping[str, Any], gpu: Gpu | None
) -> dict[str, Curve]:
    """Curves of FlashAttention-3: version 2's at a multiple of its rate, as far as published figures tell and with
    their doubt. Empty on other cards than Hopper, and by priors that are older than this belief."""
    belief = beliefs.get("flash_3")
    found: dict[str, Curve] = {}
    if belief is None or not runs_flash_3(gpu):
        return found
    for direction in ("forward", "backward"):
        like = _flash_2(curves, dtype, direction)
        if like is not None:
            rate = like.params["flops_per_s"] * float(belief[direction])
            made = like.at_rate("flops_per_s", rate, log_sd=float(belief["log_sd"]), origin="assumed")
            found[f"attention-{HOPPER}.{dtype}.{direction}"] = made
    return found


def other_curves(
    curves: Mapping[str, Curve], dtype: str, beliefs: Mapping[str, Any], gpu: Gpu | None
) -> dict[str, Curve]:
    """Curves of kernels that are told from FlashAttention-2's: memory-efficient ones and FlashAttention-3's."""
    return {**efficient_curves(curves, dtype, beliefs, gpu), **flash_3_curves(curves, dtype, beliefs, gpu)}


def between_kernels(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Curves of attention under a mask where PyTorch asks cuDNN first, whose speed under one no figure tells: as likely
    that of the memory-efficient kernels as that of cuDNN's own without, and anything between."""
    found: dict[str, Curve] = {}
    for name, slow in curves.items():
        own = f"attention-{MASKED}."
        fast = curves.get(f"attention-{NATIVE}.{name.removeprefix(own).split('.')[0]}.forward")
        if not name.startswith(own) or fast is None:
            continue
        apart = math.log(fast.params["flops_per_s"] / slow.params["flops_per_s"]) / 2.0
        params = {**slow.params, "flops_per_s": slow.params["flops_per_s"] * math.exp(apart)}
        found[name] = replace(slow, params=params, log_sd=math.hypot(slow.log_sd, apart / Z80))
    return found


def _flash_2(curves: Mapping[str, Curve], dtype: str, direction: str) -> Curve | None:
    """The curve of FlashAttention-2, of the same pass if there is one, else of the forward; None of a device without a
    rate to start from."""
    passes = dict.fromkeys((direction, "forward"))
    names = [f"attention{kernel}.{dtype}.{name}" for name in passes for kernel in (f"-{FLASH}", "")]
    like = next((curves[name] for name in names if name in curves), None)
    return None if like is None or "flops_per_s" not in like.params else like


def with_others(factors: FactorSet, beliefs: Mapping[str, Any], run: Run | None, gpu: Gpu | None = None) -> FactorSet:
    """A record's factors with curves of what takes masks and wide heads: those that it has measured of memory-efficient
    kernels, or of what PyTorch chooses under a mask where this run's asks cuDNN first; else by published figures.

    A processor has one kernel for all, whose curve stands where none is measured under a mask.
    """
    made: dict[str, Curve] = {}
    dtypes = dict.fromkeys(name.split(".")[1] for name in factors.curves if name.startswith("attention"))
    for dtype in () if factors.synchronous else dtypes:
        made |= other_curves(factors.curves, dtype, beliefs, gpu)
    cudnn = run is not None and run.sdpa_cudnn
    chosen = as_sdpa(factors.curves, CHOSEN, f"attention-{MASKED}") if cudnn else {}
    return replace(factors, curves={**made, **factors.curves, **chosen})


def efficient_notes(architecture: Architecture, run: Run, factors: FactorSet) -> tuple[str, ...]:
    """How well the speed of attention is known that no flash kernel takes, unless a record has measured it."""
    kernels = (EFFICIENT, MASKED)
    curves = [factors.curves.get(f"attention-{kernel}.{run.compute_dtype}.forward") for kernel in kernels]
    assumed = any(curve is not None and curve.origin == "assumed" for curve in curves)
    if not assumed or not avoids_flash(architecture, run):
        return ()
    between = (
        ", between memory-efficient kernels and cuDNN's, of which under a mask none is known" if run.sdpa_cudnn else ""
    )
    told = (
        "attention that flash kernels do not take is timed from a few published figures and known to a factor of "
        f"two{between}; a calibration measures it"
    )
    return (told,)


def flash_3_notes(run: Run, factors: FactorSet) -> tuple[str, ...]:
    """What the speed of FlashAttention-3 is taken from, unless a record has measured it."""
    curve = factors.curves.get(f"attention-{HOPPER}.{run.compute_dtype}.forward")
    if run.attn_implementation != FLASH_3 or curve is None or curve.origin != "assumed":
        return ()
    told = (
        "FlashAttention-3 is timed as its paper has it beside FlashAttention-2 on an H100 (1.5 to 2 times as fast "
        "forward, 1.5 to 1.75 backward); no record has measured it"
    )
    return (told,)


def avoids_flash(architecture: Architecture, run: Run) -> bool:
    """Whether ``sdpa`` runs some of the layers without flash kernels: under a mask, with wide or uneven heads."""
    if run.attn_implementation != "sdpa" or is_litgpt(architecture) or runs_plain_attention(architecture):
        return False
    blocks = [group.layer.attention for group in architecture.groups]
    return any(is_uneven(block) or block.head_dim > WIDEST_FLASH or needs_mask(block, run) for block in blocks)


def is_uneven(block: Attention) -> bool:
    """Whether values are narrower than keys, as latent attention may have them."""
    return block.latent is not None and not block.latent.is_even


def with_flash(factors: FactorSet, gpu: Gpu | None, run: Run | None) -> FactorSet:
    """A record's factors with its FlashAttention-2 curves for ``sdpa`` where that runs it on a card that has both.

    By an older PyTorch, or for heads that cuDNN does not take. A record without such curves keeps its own, and says so.
    """
    if run is None or run.sdpa_cudnn or run.attn_implementation != "sdpa" or not has_cudnn_attention(gpu):
        return factors
    flash = as_sdpa(factors.curves, FLASH)
    if flash:
        return replace(factors, curves={**factors.curves, **flash})
    note = "this run's sdpa is FlashAttention-2, which the record has not measured: the sdpa that it has stands for it"
    return replace(factors, notes=(*factors.notes, note))
