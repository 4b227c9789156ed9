"""Factors of a GPU that nobody has calibrated: datasheet rates times published efficiencies.

The efficiencies are data (``results/priors.json``), fitted by one committed command from published runs; none stands in
code. A GPU that the runs contain has its own device effect, a software stack and a sharding theirs; any other has none.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.gpus import Gpu
from tunecast.model.cached_copies import SCALE_CACHED, cache_log_sd, cache_params
from tunecast.model.chunked import chunked_curves
from tunecast.model.cold_kernels import COLD
from tunecast.model.exposed import SHARES
from tunecast.model.factors import HOST_RATIOS, HOST_S_PER_LAUNCH, Curve, Factor, FactorSet, with_doubt
from tunecast.model.joined import STACKS
from tunecast.model.memory_codes import code_notes, context_notes, memory_overheads_of
from tunecast.model.operation import FLASH, NATIVE
from tunecast.model.prior_effects import (
    Effect,
    attention_effects,
    clock_effects,
    dequant_kernel,
    device_effect,
    kind_effects,
    product_effects,
    run_effects,
    source_effects,
)
from tunecast.model.product_share import (
    FP32,
    attention_gain,
    attention_share,
    fp32_over_usual,
    own_over_usual,
    usual_shares,
)
from tunecast.model.run import Run
from tunecast.model.sdpa import as_sdpa, between_kernels, has_cudnn_attention, other_curves
from tunecast.model.units import GIGA
from tunecast.model.unpacking import unpacking_gain
from tunecast.model.value import Z80

if TYPE_CHECKING:
    from tunecast.model.curves import Array

PRIORS_SCHEMA = "tunecast.priors/1"
WAVE_TILES = {"bf16": (128, 128), "fp16": (128, 128), "fp32": (128, 32), "fp8": (128, 128), "int8": (128, 128)}
"""Output tile that a partial wave is counted in; cuBLAS's fp32 kernels for thin results are ``sgemm_128x32``."""
WORK_PARAMS = ("scale.gemm", "scale.attention", "scale.memory", "scale.loss", "scale.optimizer", "scale.dequant")
HOOKS = "scale.host_hooks"
UNITS = "scale.host_units"
VISITS = (HOOKS, UNITS)
"""What a visit costs the host: of a module by ZeRO-3's hooks, of an adapter that is a unit of FSDP."""
HOST_PRIORS = tuple(f"host_{name}" for name in HOST_RATIOS)
"""What issuing costs beside a launch of the forward, in such launches, by name of the fitted parameter: of code more
than of machines. In intervals is the spread of the host's pace alone (0.4 in logs), beside which their own doubt is
small (0.1 to 0.2, of entering a layer more)."""
ISSUING = (*(name.removeprefix("scale.") for name in VISITS), *HOST_PRIORS)
"""These and visits: what the host pays for beside launches."""
FITTED_AS = {
    **{name: name.removeprefix("scale.") for name in WORK_PARAMS},
    "scale.loss": "memory",
    "scale.optimizer": "memory",
    "scale.link": "link",
    **{name: name for name in SHARES},
    HOST_S_PER_LAUNCH: HOST_S_PER_LAUNCH,
    HOOKS: "host_hooks",
    UNITS: "host_units",
}
"""Names of factors of a step, and of the fitted parameters that they follow."""
STEP_PARAMS = tuple(FITTED_AS)
CUDNN_NOTE = "sdpa runs cuDNN's attention here (PyTorch 2.11 for CUDA 13, or later); else: --stack-version torch=2.10"
TRANSFORMER_ENGINE_NOTE = (
    "Transformer Engine's attention is taken as cuDNN's here; else: --attn-implementation flash_attention_2"
)
LIMIT_POWER = 16.0
"""How sharply slowdowns bend onto the datasheet's limit: 4% above it where they would meet it."""
PCIE_BYTES_PER_S_PER_LANE = {3: 0.985 * GIGA, 4: 1.969 * GIGA, 5: 3.938 * GIGA}
"""One direction, after 128b/130b encoding (PCI-SIG base specifications 3.0 to 5.0)."""


@functools.cache
def load_priors() -> dict[str, Any]:
    """The shipped priors."""
    text = resources.files("tunecast.results").joinpath("priors.json").read_text(encoding="utf-8")
    priors: dict[str, Any] = json.loads(text)
    return priors


def datasheet_factors(gpu: Gpu, beliefs: Mapping[str, Any], run: Run | None = None) -> FactorSet:
    """Curves at the datasheet's own rates (every efficiency 1), with `beliefs` for floors and waves.

    Waiting for links of as many GPUs as rows have is in the spread that they leave; of more, the assumed latency has
    its own. With a `run`, ``attention``, what ``sdpa`` runs, is the card's own kernels' where its PyTorch has them, and
    weights are unpacked by its software's kernel.
    """
    floor_s = float(beliefs["kernel_floor_s"]["value"])
    moved = {"bytes_per_s": gpu.bandwidth_bytes_per_s, "t0_s": floor_s}
    kernel = dequant_kernel(run, run.stack) if run is not None and run.base_quantization else ""
    unpacked = {**moved, "bytes_per_s": gpu.bandwidth_bytes_per_s * unpacking_gain(gpu, beliefs, kernel)}
    curves = {"memory": _curve("bandwidth", moved), "dequant": _curve("bandwidth", unpacked)}
    in_16_bits, usual = own_over_usual(gpu, beliefs), usual_shares(gpu, beliefs)
    for dtype in WAVE_TILES:
        peak = gpu.peaks.get(dtype)
        if peak is None:
            continue
        own = math.exp((fp32_over_usual(gpu, beliefs) if dtype == FP32 else in_16_bits).log)
        # One clock and one power limit hold products and attention.
        attending = own * (1.0 if dtype == FP32 else attention_share(gpu, beliefs))
        gemm = {
            "flops_per_s": peak * float(usual.get(dtype, usual["bf16"])) * own,
            "bytes_per_s": gpu.bandwidth_bytes_per_s,
            "t0_s": floor_s,
            **_partial_wave(gpu, dtype, beliefs),
        }
        curves[f"gemm.{dtype}"] = _curve("gemm", gemm)
        fused = {"head_step": float(beliefs["head_step"]["value"]), "length0": float(beliefs["length0"]["value"])}
        rate = peak * attention_gain(gpu, dtype, beliefs)
        attention = {"flops_per_s": rate * attending, "t0_s": floor_s, **fused}
        curves[f"attention.{dtype}.forward"] = _curve("attention", attention)
        native = _curve("attention", {"flops_per_s": rate, "t0_s": floor_s, **fused})
        curves |= {f"attention-{FLASH}.{dtype}.forward": curves[f"attention.{dtype}.forward"]}
        curves |= other_curves(curves, dtype, beliefs, gpu)
        curves |= {f"attention-{NATIVE}.{dtype}.forward": native}
    curves |= chunked_curves(curves["memory"], beliefs, gpu, run)
    if in_cache := cache_params(gpu, beliefs):
        curves |= dict.fromkeys(("loss", "optimizer", f"memory-{COLD}"), curves["memory"])
        curves["memory"] = _curve("bandwidth", moved | in_cache)
    link = link_bytes_per_s(gpu)
    factors = {} if link is None else {"link_bytes_per_s": exact_factor(link, "B/s", "datasheet")}
    factors["link_latency_s"] = latency(beliefs, run, "nvlink" if joined_by_nvlink(gpu) else "pcie")
    factors["link_start_s"] = latency(beliefs, run, "start")
    if _runs_own_kernels(gpu, run):
        curves |= {**between_kernels(curves), **as_sdpa(curves, NATIVE)}
    return FactorSet(gpu=gpu.id, curves=curves, factors=factors, step_log_sd=0.0)


def latency(beliefs: Mapping[str, Any], run: Run | None, what: str) -> Factor:
    """Seconds of a hop over NVLink, PCIe or a network, or of a collective's start, as NCCL's own table has them."""
    belief = beliefs["link_latency_s"]
    spread = interval(float(belief["values"][what]), float(belief["log_sd"]) * unseen_share(run, belief))
    return Factor(**spread, unit="s", origin="assumed")


def unseen_share(run: Run | None, latency: Mapping[str, Any]) -> float:
    """Share of the doubt about a link's latency: none up to as many GPUs as published runs have, all of it from twice
    as many on, in between with the logarithm of their number."""
    seen = latency.get("seen_gpus", math.inf)
    return 0.0 if run is None or run.num_gpus <= seen else min(math.log2(run.num_gpus / seen), 1.0)


def _runs_own_kernels(gpu: Gpu, run: Run | None) -> bool:
    """Whether ``sdpa`` of this run takes cuDNN's attention on this card."""
    return run is not None and run.sdpa_cudnn and has_cudnn_attention(gpu)


def _partial_wave(gpu: Gpu, dtype: str, beliefs: Mapping[str, Any]) -> dict[str, float]:
    """What a product loses to its last wave of tiles, and how deep the parts are that a library splits k into."""
    m, n = WAVE_TILES[dtype]
    processors = float(gpu.sm_count or 0)
    return {
        "area": float(beliefs["partial_wave"]["value"]) * processors * m * n,
        "processors": processors,
        "wave_tile_m": float(m),
        "wave_tile_n": float(n),
        "split_depth": float(beliefs["split_depth"]["value"]),
    }


def _curve(form: str, params: dict[str, float]) -> Curve:
    return Curve(form=form, params=params, log_sd=0.0, origin="datasheet")


def exact_factor(value: float, unit: str, origin: str) -> Factor:
    """A factor without an interval."""
    return Factor(value=value, low=value, high=value, unit=unit, origin=origin)


def link_bytes_per_s(gpu: Gpu) -> float | None:
    """One direction of the fastest link between two cards of a machine: NVLink, else PCIe; None if unknown."""
    return gpu.nvlink_bytes_per_s / 2 if joined_by_nvlink(gpu) else pcie_bytes_per_s(gpu)


def joined_by_nvlink(gpu: Gpu) -> bool:
    """Whether the cards of a machine have it, or another vendor's like; bridges are rarely mounted."""
    return gpu.nvlink_bytes_per_s > 0 and gpu.link_kind != "nvlink-bridge"


def pcie_bytes_per_s(gpu: Gpu) -> float | None:
    """One direction of a card's PCIe lanes by its datasheet; None if unknown."""
    per_lane = PCIE_BYTES_PER_S_PER_LANE.get(gpu.pcie_gen or 0)
    return None if per_lane is None or gpu.pcie_lanes is None else per_lane * gpu.pcie_lanes


def prior_factors(
    gpu: Gpu, run: Run | None = None, priors: Mapping[str, Any] | None = None, *, attention_kernel: str = ""
) -> FactorSet:
    """Factors of a GPU without a calibration, every one with its origin.

    `run` brings the effects of its software stack and of its sharding, `attention_kernel` that of another kernel than
    FlashAttention-2 (``attention_kernels`` of the beliefs); without them there are none.
    """
    priors = load_priors() if priors is None else priors
    base = datasheet_factors(gpu, priors["beliefs"], run)
    own = (device := device_effect(gpu, priors), *clock_effects(gpu, priors), *product_effects(gpu, priors, run))
    generation = kind_effects("generation", gpu.generation, priors)
    known = (*own, *kind_effects("device", gpu.id, priors), *generation, *run_effects(run, priors))
    effects = (*known, *attention_effects(attention_kernel, priors), *source_effects(priors))
    factors = dict(base.factors)
    for kind, efficiency in priors["efficiency"].items():
        if kind != "link":
            factors[f"scale.{kind}"] = _slowdown(efficiency, sum(e.value for e in effects if kind in e.moves))
    factors["scale.memory"] = _limited(factors["scale.memory"])
    factors |= dict.fromkeys(("scale.loss", "scale.optimizer"), factors["scale.memory"])
    if "link_bytes_per_s" in factors:
        factors["link_bytes_per_s"] = _scaled_link(factors["link_bytes_per_s"], priors["efficiency"]["link"])
    for name in (HOST_S_PER_LAUNCH, *(f"scale.{own}" for own in ISSUING), *SHARES):
        stored = priors[name.removeprefix("scale.")]
        factors[name] = Factor(**{k: stored[k] for k in ("value", "low", "high", "unit", "origin")})
    told = CUDNN_NOTE if run is None or run.stack not in STACKS else TRANSFORMER_ENGINE_NOTE
    width, cudnn = float(priors["width"]), (told,) if _runs_own_kernels(gpu, run) else ()
    found = FactorSet(
        gpu=gpu.id,
        curves=base.curves,
        factors=factors,
        step_log_sd=float(priors["step_log_sd"]["new"]),
        memory_overhead_bytes=memory_overheads_of(run, priors, gpu),
        step_params=STEP_PARAMS,
        step_covariance=step_covariance(priors, effects, width),
        notes=(*device.notes, *cudnn, *code_notes(run, priors), *context_notes(gpu)),
    )
    return _with_cache(found, cache_log_sd(gpu, priors["beliefs"]))


def _with_cache(factors: FactorSet, log_sd: float) -> FactorSet:
    """The factors with what is not known of kernels in the cache, where that is any faster."""
    if log_sd == 0.0:
        return factors
    doubt = Factor(**interval(1.0, log_sd), unit="1", origin="assumed")
    return with_doubt(replace(factors, factors={**factors.factors, SCALE_CACHED: doubt}), SCALE_CACHED, log_sd**2)


@functools.cache
def params_of_kinds(moves: tuple[str, ...]) -> Array:
    """(`STEP_PARAMS`,) 1 where a factor is a slowdown of one of these kinds of work."""
    import numpy as np

    return np.array([float(name.startswith("scale.") and FITTED_AS[name] in moves) for name in STEP_PARAMS])


def step_covariance(
    priors: Mapping[str, Any], effects: Sequence[Effect], width: float
) -> tuple[tuple[float, ...], ...]:
    """Covariance of the logs of `STEP_PARAMS`: what the rows leave open of efficiencies and of these effects together,
    by the priors' `width`.

    Effects that no row has, and the host of a new source, are independent of the rest. Those of a card, a sharding and
    a host keep their own spread, since the priors' width comes from rows whose effects others share.
    """
    import numpy as np

    named = (effect.name for effect in effects if effect.name is not None)
    names = list(dict.fromkeys((*map(FITTED_AS.__getitem__, STEP_PARAMS), *named)))
    places, values = [priors["covariance"]["names"].index(name) for name in names], priors["covariance"]["values"]
    rows = np.array([[values[row][column] for column in places] for row in places])
    slopes = np.zeros((len(STEP_PARAMS), len(names)))
    for place, param in enumerate(STEP_PARAMS):
        slows = param.startswith("scale.") and param not in VISITS
        slopes[place, names.index(FITTED_AS[param])] = -1.0 if slows else 1.0
    for effect in effects:
        if effect.name is not None:
            slopes[:, names.index(effect.name)] += params_of_kinds(effect.moves)
    found = slopes @ rows @ slopes.T * width**2
    for effect in effects:
        if effect.name is None:
            moved = params_of_kinds(effect.moves)
            found += np.outer(moved, moved) * (effect.log_sd * (width if effect.scaled else 1.0)) ** 2
    found[STEP_PARAMS.index(HOST_S_PER_LAUNCH), STEP_PARAMS.index(HOST_S_PER_LAUNCH)] += (
        float(priors["spreads"]["host"]) ** 2
    )
    return tuple(tuple(float(value) for value in row) for row in found)


def _slowdown(efficiency: Mapping[str, Any], effect: float) -> Factor:
    """1 / efficiency, times the effects (logs of time)."""
    slow = math.exp(effect)
    return Factor(
        value=slow / efficiency["value"],
        low=slow / efficiency["high"],
        high=slow / efficiency["low"],
        unit="seconds per datasheet second",
        origin=str(efficiency["origin"]),
    )


def no_faster(slowdown: Array) -> Array:
    """Slowdowns of moved bytes over the datasheet's seconds, bent so that none is below 1: what rows say beyond that is
    fewer bytes than were counted. A rate of nine tenths is left as it is within a hundredth."""
    import numpy as np

    from tunecast.model.curves import bend

    return bend(slowdown, np.ones_like(slowdown), power=LIMIT_POWER)


def _limited(slowdown: Factor) -> Factor:
    """The same of a factor and its bounds."""
    import numpy as np

    value, low, high = no_faster(np.array([slowdown.value, slowdown.low, slowdown.high])).tolist()
    return replace(slowdown, value=value, low=low, high=high)


def _scaled_link(link: Factor, efficiency: Mapping[str, Any]) -> Factor:
    return Factor(
        value=link.value * efficiency["value"],
        low=link.value * efficiency["low"],
        high=link.value * efficiency["high"],
        unit=link.unit,
        origin=str(efficiency["origin"]),
    )


def interval(value: float, log_sd: float) -> dict[str, float]:
    """Value with its 80% log-normal interval, as stored."""
    spread = math.exp(Z80 * log_sd)
    return {"value": value, "low": value / spread, "high": value * spread}
