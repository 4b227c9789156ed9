"""From raw trials to observations: an operation, its median seconds, and how noisy they were.

Statistics are computed here, on reading; the record keeps raw samples only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunecast.calibrate.stats import MAD_TO_SD
from tunecast.model.curves import Array
from tunecast.model.operation import EFFICIENT, MASKED, SOFTMAX, STRIDED, UPCAST, Kind, Operation, Phase, grouped_layout
from tunecast.model.units import DTYPE_BYTES

Trial = Mapping[str, Any]

MIN_LOG_NOISE = 0.002
"""Floor of the noise of one median: timers and rounding; below it two medians are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One microbenchmark trial: what ran and how long it took."""

    trial: str
    """Identity of the trial, see `trial_id`."""
    operation: Operation
    seconds: float
    """Median of the counted repetitions."""
    log_noise: float
    """Standard error of the log of that median."""

    @property
    def group(self) -> str:
        """The weight of a matrix product, whatever the number of tokens; other trials are a group each."""
        if self.operation.kind is not Kind.GEMM:
            return self.trial
        m, n, k = self.operation.shape[:3]
        weight = (m, n) if self.operation.layout.startswith("tn") else (n, k)
        return f"{min(weight)}x{max(weight)}"


def trial_id(trial: Trial) -> str:
    """The trial's number in its record, else its key: bench and sorted params, as `TrialSpec.key`."""
    if "id" in trial:
        return str(trial["id"])
    params = trial["params"]
    return f"{trial['bench']}({','.join(f'{key}={params[key]}' for key in sorted(params))})"


def usable(trials: Iterable[Trial], bench: str) -> list[Trial]:
    """Trials of one bench that ended well and have samples."""
    return [t for t in trials if t["bench"] == bench and t["outcome"] == "ok" and t["samples_s"]]


def median_seconds(trial: Trial) -> float:
    """Median of the counted repetitions."""
    return float(np.median(np.asarray(trial["samples_s"], dtype=float)))


def log_noise(trial: Trial) -> float:
    """Standard error of the log of the median, from the median absolute deviation of the repetitions."""
    samples = np.asarray(trial["samples_s"], dtype=float)
    middle = float(np.median(samples))
    spread = MAD_TO_SD * float(np.median(np.abs(samples - middle))) / middle
    return max(MIN_LOG_NOISE, math.sqrt(math.pi / 2) * spread / math.sqrt(len(samples)))


def gemm_operation(params: Mapping[str, Any]) -> Operation:
    """The matrix product of a ``gemm`` trial."""
    m, n, k, dtype = int(params["m"]), int(params["n"]), int(params["k"]), str(params["dtype"])
    return Operation(
        name="gemm",
        kind=Kind.GEMM,
        phase=Phase.FORWARD,
        dtype=dtype,
        flops=2.0 * m * n * k,
        bytes=float((m * n + n * k + m * k) * DTYPE_BYTES[dtype]),
        shape=(m, n, k),
        layout=str(params["layout"]),
    )


def grouped_operation(params: Mapping[str, Any]) -> Operation:
    """The kernel of a ``grouped`` trial: `experts` products of `rows` each over weights n x k, or (``nn``, ``tn``)
    the gradient of the rows or of the weights."""
    experts, rows, n, k = (int(params[name]) for name in ("experts", "rows", "n", "k"))
    layout, dtype = str(params["layout"]), str(params["dtype"])
    shape = {"nt": (rows, n, k), "nn": (rows, k, n), "tn": (n, k, rows)}[layout]
    return Operation(
        name="grouped",
        kind=Kind.GEMM,
        phase=Phase.FORWARD,
        dtype=dtype,
        flops=2.0 * experts * rows * n * k,
        bytes=float(experts * (rows * n + n * k + rows * k) * DTYPE_BYTES[dtype]),
        shape=(*shape, experts),
        layout=grouped_layout(layout),
    )


def memory_operation(params: Mapping[str, Any]) -> Operation:
    """The kernel of a ``memory`` trial."""
    return Operation(
        name=str(params["op"]), kind=Kind.MEMORY, phase=Phase.FORWARD, bytes=float(params["bytes"]), launches=1.0
    )


def walk_operation(params: Mapping[str, Any]) -> Operation:
    """The kernels of a ``walk`` trial, by what they read and write; `SOFTMAX` backward and a cut are two, and a cast
    writes twice what it reads."""
    op, dtype = str(params["op"]), str(params["dtype"])
    inner = float(params["rows"]) * float(params["width"]) * float(params.get("heads", 1))
    whole = inner + float(params["rows"]) * float(params.get("more", 0))
    moved = {"softmax_backward": 6.0 * inner, "cut": whole + 2.0 * inner, UPCAST: 3.0 * inner}.get(op, 2.0 * whole)
    return Operation(
        name=op,
        kind=Kind.MEMORY,
        phase=Phase.BACKWARD if op == "softmax_backward" else Phase.FORWARD,
        dtype=dtype,
        bytes=moved * DTYPE_BYTES[dtype],
        launches=2.0 if op in ("softmax_backward", "cut") else 1.0,
        layout=SOFTMAX if op.startswith("softmax") else UPCAST if op == UPCAST else STRIDED,
    )


def dequant_operation(params: Mapping[str, Any]) -> Operation:
    """The 4-bit weight of a ``dequant`` trial."""
    return Operation(name="dequant", kind=Kind.DEQUANT, phase=Phase.FORWARD, shape=(int(params["elements"]),))


ATTENTION_PRODUCTS = {"forward": 2.0, "backward": 5.0}
"""Matrix products of a fused attention pass: scores and values; backward recomputes the scores and has four
more (FlashAttention-2, Dao 2023, section 3.1: backward is 2.5 x forward)."""


def attention_flops(batch: int, heads: int, length: int, head_dim: int, direction: str) -> float:
    """Causal fused attention: products x 2 x batch x heads x length^2 x head_dim, half of it (the causal half)."""
    return ATTENTION_PRODUCTS[direction] * batch * heads * length**2 * head_dim


def _layout_of(params: Mapping[str, Any]) -> str:
    """The kernel of a trial, under a mask that of masked attention unless PyTorch chose it."""
    kernel = str(params.get("kernel", ""))
    return MASKED if params.get("masked") and kernel == EFFICIENT else kernel


def attention_operation(params: Mapping[str, Any]) -> Operation:
    """The fused attention of an ``attention`` or a ``masked`` trial."""
    batch, heads, length, head_dim = (int(params[name]) for name in ("batch", "heads", "length", "head_dim"))
    direction = str(params["pass"])
    pairs = 2.0 if params.get("masked") else 1.0  # a mask skips none
    return Operation(
        name="attention",
        kind=Kind.ATTENTION,
        phase=Phase(direction),
        dtype=str(params["dtype"]),
        flops=pairs * attention_flops(batch, heads, length, head_dim, direction),
        shape=(batch, heads, int(params["kv_heads"]), length, length, head_dim),
        layout=_layout_of(params),
    )


LOSS_BYTES_PER_LOGIT = {"bf16": 36, "fp16": 36, "fp32": 24}
"""Upcast 2 + 4, log-softmax 4 + 4, loss gradient 4 (written), log-softmax backward 4 + 4 + 4, downcast 4 + 2:
the full-logit cross-entropy of transformers, forward and backward; in fp32 both casts fall away."""
LOSS_KERNELS = {"bf16": 7.0, "fp16": 7.0, "fp32": 5.0}
"""The same path's kernels: casts, log-softmax, loss, scatter and fill of its gradient, log-softmax backward."""


def loss_operation(params: Mapping[str, Any]) -> Operation:
    """Cross-entropy, forward and backward, of a ``loss`` trial as so many equal kernels."""
    tokens, vocab, dtype = int(params["tokens"]), int(params["vocab"]), str(params["dtype"])
    return Operation(
        name="cross_entropy",
        kind=Kind.LOSS,
        phase=Phase.FORWARD,
        bytes=float(LOSS_BYTES_PER_LOGIT[dtype] * tokens * vocab),
        launches=LOSS_KERNELS[dtype],
        shape=(tokens, vocab),
    )


OPERATION_OF = {
    "loss": loss_operation,
    "gemm": gemm_operation,
    "grouped": grouped_operation,
    "memory": memory_operation,
    "walk": walk_operation,
    "dequant": dequant_operation,
    "attention": attention_operation,
    "masked": attention_operation,
}


def observations(trials: Iterable[Trial], bench: str) -> list[Observation]:
    """All usable trials of a microbenchmark."""
    build = OPERATION_OF[bench]
    return [
        Observation(
            trial=trial_id(trial),
            operation=build(trial["params"]),
            seconds=median_seconds(trial),
            log_noise=log_noise(trial),
        )
        for trial in usable(trials, bench)
    ]


def log_seconds(found: Sequence[Observation]) -> Array:
    """Logarithms of the measured seconds."""
    return np.asarray(np.log([o.seconds for o in found]), dtype=float)
