"""Published measurements of single kernels and of the host, and the same on mocks of the same card.

They are what the ranges of `ranges.py` are judged by; whole training runs are not among them, so that
nothing here knows the errors of a forecast.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tunecast.calibrate.mock.attention import Heads, attention_work
from tunecast.calibrate.mock.bandwidth import access_class, dequant_work, memory_work
from tunecast.calibrate.mock.device import MockDevice, open_mock
from tunecast.calibrate.mock.gemm import gemm_work
from tunecast.calibrate.mock.host import bare_seconds, layer_seconds
from tunecast.calibrate.mock.work import Work
from tunecast.model.operation import Kind, Operation
from tunecast.model.units import GIGA, TERA
from tunecast.model.units import MICROSECOND_S as US


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One published figure: what ran on which card."""

    kind: str
    gpu: str
    params: dict[str, Any]
    published: float
    unit: str
    source: str
    """Key of `ranges.Evidence.sources`."""


@cache
def kernels() -> tuple[Kernel, ...]:
    """The committed file, read once."""
    raw = json.loads((files("tunecast.calibrate") / "data" / "mock_kernels.json").read_text(encoding="utf-8"))
    return tuple(Kernel(**entry) for entry in raw["kernels"])


def on_mock(kernel: Kernel, seed: int, layer: tuple[Operation, ...]) -> float:
    """The kernel's figure on one mock, in its own unit; `layer` is the traced forward of a decoder layer."""
    device = open_mock(f"mock:{kernel.gpu}#{seed}")
    p = kernel.params
    if kernel.kind == "product":
        return _product_flops(p) / _seconds(device, _product(device, p), Kind.GEMM) / TERA
    if kernel.kind == "attention":
        return _attention_flops(p) / _seconds(device, _attention(device, p), Kind.ATTENTION) / TERA
    if kernel.kind == "memory":
        access = access_class(p["name"], p.get("layout", ""))
        work = memory_work(device.card, device.physics, p["bytes"], access, hits=0.0)
        return float(p["bytes"] / _seconds(device, work, Kind.MEMORY) / GIGA)
    if kernel.kind == "dequantization":
        work = dequant_work(device.card, device.physics, p["elements"], p.get("double_quant", False))
        return _seconds(device, work, Kind.DEQUANT) / US
    return _host_seconds(device, p["what"], layer) / US


def _seconds(device: MockDevice, work: Work, kind: Kind) -> float:
    """One execution in a loop on the hot card, as the published loops were."""
    return device.simulator.kernel(work, 1.0, bare_seconds(device.physics.host, kind)).seconds


def _product(device: MockDevice, p: dict[str, Any]) -> Work:
    return gemm_work(device.card, device.physics, p["m"], p["n"], p["k"], p["dtype"], "nn")


def _product_flops(p: dict[str, Any]) -> float:
    return 2.0 * float(p["m"]) * float(p["n"]) * float(p["k"])


CUDNN = "cudnn"
"""Kernel of attention figures that are not FlashAttention-2's."""


def _heads(p: dict[str, Any]) -> Heads:
    return Heads(
        batch=p["batch"],
        heads=p["heads"],
        kv_heads=p["heads"],
        q_len=p["length"],
        kv_len=p["length"],
        head_dim=p["head_dim"],
        causal=p["causal"],
    )


def _attention(device: MockDevice, p: dict[str, Any]) -> Work:
    flash = p.get("kernel") != CUDNN
    return attention_work(device.card, device.physics, _heads(p), "bf16", p["backward"], flash=flash)


def _attention_flops(p: dict[str, Any]) -> float:
    """FLOPs as the published benchmarks count them: backward 2.5 times forward, half under a causal mask."""
    full = 4.0 * float(p["batch"]) * float(p["heads"]) * float(p["length"]) ** 2 * float(p["head_dim"])
    return full * (2.5 if p["backward"] else 1.0) * (0.5 if p["causal"] else 1.0)


BARE = {
    "product": (Kind.GEMM,),
    "addition": (Kind.MEMORY,),
    "attention": (Kind.ATTENTION,),
    "4-bit weight with its scales": (Kind.DEQUANT, Kind.MEMORY, Kind.MEMORY),
}
"""Calls timed by themselves, as the operators they issue."""


def _host_seconds(device: MockDevice, what: str, layer: tuple[Operation, ...]) -> float:
    host = device.physics.host
    if what in BARE:
        return sum(bare_seconds(host, kind) for kind in BARE[what])
    if what == "synchronisation":
        return host.sync_s
    if what == "checkpointed region":
        return host.checkpoint_s
    return layer_seconds(device.physics, layer) / sum(op.launches * op.count for op in layer)
