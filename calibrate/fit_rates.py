"""Scalars of a record: host, transfer and link rates, and mfu by method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunecast.calibrate.fit_curves import MEASURED
from tunecast.calibrate.fit_steps import MeasuredStep
from tunecast.calibrate.fit_trials import ATTENTION_PRODUCTS, Trial, median_seconds, usable
from tunecast.catalogs.gpus import Gpu, load_gpus
from tunecast.model.factors import Factor, FactorSet
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.trainer_loop import HOST_WALKS, IN_THE_TRAINER, IN_THE_TRAINER_LOG_SD, WALKS_OF_A_STEP
from tunecast.model.units import MICROSECOND_S
from tunecast.model.value import lognormal

Array = np.ndarray[Any, np.dtype[np.float64]]
SAFE_LAUNCH_S = 5 * MICROSECOND_S
"""Where the ridge starts without a launch trial; whole steps then decide."""


def _factor(samples: Sequence[float], unit: str) -> Factor:
    low, middle, high = (float(x) for x in np.quantile(np.asarray(samples, dtype=float), [0.1, 0.5, 0.9]))
    return Factor(value=middle, low=low, high=high, unit=unit, origin=MEASURED)


def host_start(trials: Sequence[Trial]) -> float:
    """Seconds per launch in the launch benchmark."""
    each = [median_seconds(t) / t["params"]["kernels"] for t in usable(trials, "launch")]
    return float(np.median(each)) if each else SAFE_LAUNCH_S


def modules_passed(trial: Trial) -> int:
    """Modules that one repetition of a ``modules`` trial goes past."""
    return WALKS_OF_A_STEP * int(trial["extra"]["modules"])


def walk_factors(trials: Sequence[Trial], host_s_per_launch: float) -> dict[str, Factor]:
    """What a module costs that transformers' Trainer walks over, in launches of the forward; empty without its trial.

    The walks of a trial follow each other; between steps they take `IN_THE_TRAINER` times as long.
    """
    each = [median_seconds(trial) / modules_passed(trial) for trial in usable(trials, "modules")]
    if not each:
        return {}
    launches = IN_THE_TRAINER * float(np.median(each)) / host_s_per_launch
    return {HOST_WALKS: _spread_factor(launches, IN_THE_TRAINER_LOG_SD, "1")}


RATED_BENCHES = ("memory", "transfer", "disk", "load", "checkpoint")


def _rate_name(trial: Trial) -> str:
    bench, params = trial["bench"], trial["params"]
    if bench == "memory":
        return f"memory.{params['op']}.bytes_per_s"
    if bench == "transfer":
        return f"transfer.{params['direction']}.{'pinned' if params['pinned'] else 'pageable'}.bytes_per_s"
    if bench == "disk":
        return f"disk.{params['direction']}.{'cold' if params['cold'] else 'warm'}.bytes_per_s"
    if bench == "load":
        return f"load.{'quantized' if params['quantize'] else 'plain'}.bytes_per_s"
    return "checkpoint.bytes_per_s"


def rate_factors(trials: Sequence[Trial]) -> dict[str, Factor]:
    """Bytes per second of every kind of transfer, from its largest trial, and the cost of a synchronisation."""
    largest: dict[str, Trial] = {}
    for trial in (t for bench in RATED_BENCHES for t in usable(trials, bench)):
        name = _rate_name(trial)
        if name not in largest or trial["params"]["bytes"] > largest[name]["params"]["bytes"]:
            largest[name] = trial
    out = {
        name: _factor([trial["params"]["bytes"] / s for s in trial["samples_s"]], "B/s")
        for name, trial in largest.items()
    }
    syncs = [s for trial in usable(trials, "sync") for s in trial["samples_s"]]
    return out | ({"sync_s": _factor(syncs, "s")} if syncs else {}) | _link_factors(trials)


def _link_factors(trials: Sequence[Trial]) -> dict[str, Factor]:
    """Ring bandwidth and latency from collectives: seconds = rounds (n-1) (bytes / n / rate + latency).

    Least squares of the relative error over all of them; the intervals hold the scatter of the residuals.
    """
    rows = []
    for trial in usable(trials, "collective"):
        params = trial["params"]
        hops = (2 if "all_reduce" in params["op"] else 1) * (params["world_size"] - 1)
        rows.append((params["bytes"] / params["world_size"], median_seconds(trial) / hops))
    if not rows:
        return {}
    sizes, hop_s = np.array(sorted(rows)).T
    latency_s, seconds_per_byte = _line(sizes, hop_s)
    residuals = np.log(hop_s / (latency_s + seconds_per_byte * sizes))
    log_sd = float(np.sqrt(np.mean(residuals**2)))
    return {
        "link_bytes_per_s": _spread_factor(1.0 / seconds_per_byte, log_sd, "B/s"),
        "link_latency_s": _spread_factor(latency_s, log_sd, "s"),
    }


def _line(sizes: Array, hop_s: Array) -> tuple[float, float]:
    """(latency, seconds per byte) of hop = latency + size x slope, by relative least squares; both positive."""
    design = np.stack([np.ones_like(sizes), sizes], axis=1) / hop_s[:, None]
    latency_s, slope = np.linalg.lstsq(design, np.ones_like(hop_s), rcond=None)[0]
    largest = sizes >= sizes.max() / 2
    slope = float(slope) if slope > 0 else float(np.median(hop_s[largest] / sizes[largest]))
    return (float(latency_s) if latency_s > 0 else float(hop_s.min())), slope


def _spread_factor(value: float, log_sd: float, unit: str) -> Factor:
    found = lognormal(value, log_sd)
    return Factor(value=value, low=found.low, high=found.high, unit=unit, origin=MEASURED)


REQUIRED_BACKWARD_PRODUCTS = 4.0
"""Products that attention's backward needs; flash kernels recompute the scores for a fifth."""


def model_flops(operations: Sequence[Operation]) -> float:
    """Required FLOPs of a step on one GPU: no recomputation, attention's backward without its own recomputation."""
    kept = REQUIRED_BACKWARD_PRODUCTS / ATTENTION_PRODUCTS["backward"]
    total = 0.0
    for operation in operations:
        backward = operation.kind is Kind.ATTENTION and operation.phase is Phase.BACKWARD
        if operation.phase is not Phase.RECOMPUTE:
            total += operation.total_flops * (kept if backward else 1.0)
    return total


def catalog_gpu(gpu: str) -> Gpu | None:
    """Catalog facts of a device; a mock has those of the card it imitates."""
    return load_gpus().get(gpu.removeprefix("mock:").partition("#")[0])


def cache_bytes(gpu: str) -> int:
    """Last-level cache of a device by the catalog; 0 where unknown."""
    found = catalog_gpu(gpu)
    return (found.l2_bytes or 0) if found else 0


def peak_flops_per_s(factors: FactorSet, dtype: str) -> tuple[float, str] | None:
    """(dense peak, where it comes from): the catalog's, else the fitted GEMM ceiling of that dtype."""
    gpu = catalog_gpu(factors.gpu)
    if gpu is not None and dtype in gpu.peaks:
        return gpu.peaks[dtype], "datasheet"
    ceiling = factors.factors.get(f"gemm.{dtype}.flops_per_s")
    return (ceiling.value, MEASURED) if ceiling else None


def mfu_by_method(steps: Sequence[MeasuredStep], factors: FactorSet) -> dict[str, Any]:
    """Model-FLOP utilisation by method: of the largest measured step; ends are the extremes over all its steps."""
    out: dict[str, Any] = {}
    for method in sorted({step.method for step in steps}):
        rows = sorted((s for s in steps if s.method == method), key=lambda s: s.model_flops)
        peak = peak_flops_per_s(factors, rows[-1].dtype)
        if peak is None:
            continue
        each = [step.model_flops / step.seconds / peak[0] for step in rows]
        out[method] = {"value": each[-1], "low": min(each), "high": max(each), "unit": "1", "peak": peak[1]}
    return out
