"""Microbenchmarks of a mock: each trial turned into work for the simulator, or into host and link time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tunecast.calibrate.mock.attention import SLOWER, Heads, attention_work, slowed
from tunecast.calibrate.mock.bandwidth import access_class, dequant_work, memory_work
from tunecast.calibrate.mock.gemm import gemm_work
from tunecast.calibrate.mock.host import bare_seconds
from tunecast.calibrate.mock.kernels import collective_seconds, pcie_bytes_per_s
from tunecast.calibrate.mock.power import LASTING_S, Operating
from tunecast.calibrate.mock.simulator import Simulator, compile_stream
from tunecast.calibrate.mock.step import modules_of
from tunecast.calibrate.mock.work import Work, together
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.units import DTYPE_BYTES

Params = dict[str, Any]

ROTATED_COPIES = 64
"""Copies of small buffers that the real benchmarks rotate at most (`bench/timing.py`)."""
INNER_LOOPS = 8
"""Calls between two synchronisations of a benchmark that is a short stream: the host runs ahead."""
SAMPLES, SAMPLE_S = 6, 2e-3
"""Samples of a microbenchmark, warm-up included, and what each lasts at least (`plan_tables`, `bench/timing.py`)."""

WALKS_AROUND = 4
"""Walks over all modules that a ``modules`` trial takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What one repetition really takes, before noise, and what the card does meanwhile."""

    seconds: float
    operating: Operating | None = None
    """None when only the host or a link works."""
    device_bytes: float = 0.0
    """Device memory the trial holds: it is out of memory beyond what the card has."""
    extra: dict[str, Any] | None = None


def truth_of(simulator: Simulator, bench: str, params: Params, hotness: float) -> Truth:
    """True duration of one microbenchmark."""
    return BENCHES[bench](simulator, params, hotness)


def _kernel(
    simulator: Simulator,
    work: Work,
    kind: Kind,
    hotness: float,
    device_bytes: float,
    least_s: float = SAMPLES * SAMPLE_S,
) -> Truth:
    issue = bare_seconds(simulator.physics.host, kind)
    outcome = simulator.kernel(work, hotness, issue, least_s=least_s, calls=SAMPLES)
    return Truth(seconds=outcome.seconds, operating=outcome.operating, device_bytes=device_bytes)


def _product(simulator: Simulator, p: Params) -> tuple[Work, float]:
    """Work of a plain product, and bytes of its matrices."""
    m, n, k = p["m"], p["n"], p["k"]
    work = gemm_work(simulator.card, simulator.physics, m, n, k, p["dtype"], p["layout"])
    return work, DTYPE_BYTES[p["dtype"]] * (m * k + k * n + m * n)


def _gemm(simulator: Simulator, p: Params, hotness: float) -> Truth:
    work, held_bytes = _product(simulator, p)
    return _kernel(simulator, work, Kind.GEMM, hotness, held_bytes)


def _lasting(simulator: Simulator, p: Params, hotness: float) -> Truth:
    """A product for so long that power settles the clock."""
    work, held_bytes = _product(simulator, p)
    return _kernel(simulator, work, Kind.GEMM, hotness, held_bytes, least_s=LASTING_S)


def _grouped(simulator: Simulator, p: Params, hotness: float) -> Truth:
    """One kernel for all experts' products."""
    experts, rows, n, k, layout = p["experts"], p["rows"], p["n"], p["k"], p["layout"]
    shape = {"nt": (rows, n, k), "nn": (rows, k, n), "tn": (n, k, rows)}[layout]
    work = gemm_work(simulator.card, simulator.physics, *shape, p["dtype"], layout, products=experts)
    size = DTYPE_BYTES[p["dtype"]]
    return _kernel(simulator, work, Kind.GEMM, hotness, size * experts * (rows * k + k * n + rows * n))


def _memory(simulator: Simulator, p: Params, hotness: float) -> Truth:
    """Buffers in rotation miss the last-level cache unless all of them fit in it; a read is a reduction."""
    kind = "reduction" if p["op"] == "read" else "elementwise"
    hits = 1.0 if ROTATED_COPIES * p["bytes"] <= 0.7 * simulator.card.l2_bytes else 0.0
    work = memory_work(simulator.card, simulator.physics, p["bytes"], kind, hits=hits)
    return _kernel(simulator, work, Kind.MEMORY, hotness, p["bytes"])


WALKS = {
    "softmax": (("aten._softmax", 1),),
    "softmax_backward": (("aten.mul", 1), ("aten._softmax_backward_data", 1)),
    "join": (("aten.cat", 1),),
    "cut": (("aten.slice_backward", 2),),
    "heads": (("aten.clone", 1),),
    "upcast": (("aten._to_copy", 1),),
}
"""Kernels of each walk, and how often each is launched."""


def _walk(simulator: Simulator, p: Params, hotness: float) -> Truth:
    """Its kernels one after the other, past the cache; of a softmax's backward each reads two tensors, writes one, and
    a cast writes twice what it reads."""
    inner = p["rows"] * p["width"] * p.get("heads", 1)
    whole = inner + p["rows"] * p.get("more", 0)
    elements = {"softmax_backward": 3 * inner, "cut": whole + 2 * inner, "upcast": 3 * inner}.get(p["op"], 2 * whole)
    size = DTYPE_BYTES[p["dtype"]]
    works = [
        memory_work(simulator.card, simulator.physics, elements * size, access_class(name, p["op"]), launches, hits=0.0)
        for name, launches in WALKS[p["op"]]
    ]
    return _kernel(simulator, together(*works), Kind.MEMORY, hotness, 4.0 * whole * size)


def _dequant(simulator: Simulator, p: Params, hotness: float) -> Truth:
    elements = p["rows"] * p["cols"]
    work = dequant_work(simulator.card, simulator.physics, elements, bool(p["double_quant"]))
    return _kernel(simulator, work, Kind.DEQUANT, hotness, 2.6 * elements)


def _matmul_4bit(simulator: Simulator, p: Params, hotness: float) -> Truth:
    """Dequantization of the weight, then the product with it: nt forward, nn for the input gradient."""
    m, n, k = p["m"], p["n"], p["k"]
    backward = p["pass"] == "backward"
    shape, layout = ((m, k, n), "nn") if backward else ((m, n, k), "nt")
    first = dequant_work(simulator.card, simulator.physics, n * k, bool(p["double_quant"]))
    second = gemm_work(simulator.card, simulator.physics, *shape, p["dtype"], layout)
    unpack = _kernel(simulator, first, Kind.DEQUANT, hotness, 2.6 * n * k)
    multiply = _kernel(simulator, second, Kind.GEMM, hotness, 2.0 * (m * k + m * n))
    return Truth(
        seconds=unpack.seconds + multiply.seconds,
        operating=multiply.operating,
        device_bytes=unpack.device_bytes + multiply.device_bytes,
    )


def _attention(simulator: Simulator, p: Params, hotness: float) -> Truth:
    heads = Heads(
        batch=p["batch"],
        heads=p["heads"],
        kv_heads=p["kv_heads"],
        q_len=p["length"],
        kv_len=p["length"],
        head_dim=p["head_dim"],
        causal=not p.get("masked"),
    )
    backward = p["pass"] == "backward"
    other = p.get("kernel", "")
    work = attention_work(simulator.card, simulator.physics, heads, p["dtype"], backward, flash=bool(other))
    if other in SLOWER:
        work = slowed(work, simulator.physics, backward)
    tokens = p["batch"] * p["length"] * p["head_dim"] * (2 * p["heads"] + 2 * p["kv_heads"])
    return _kernel(simulator, work, Kind.ATTENTION, hotness, tokens * DTYPE_BYTES[p["dtype"]] * (2 if backward else 1))


LOSS_KERNELS = (
    ("aten._to_copy", Phase.FORWARD, 6.0),
    ("aten._log_softmax", Phase.FORWARD, 8.0),
    ("aten.nll_loss_forward", Phase.FORWARD, 0.0),
    ("aten.nll_loss_backward", Phase.BACKWARD, 4.0),
    ("aten._log_softmax_backward_data", Phase.BACKWARD, 12.0),
    ("aten._to_copy", Phase.BACKWARD, 6.0),
)
"""Kernels of an eager cross-entropy on 16-bit logits and the bytes each moves per logit."""


def _loss(simulator: Simulator, p: Params, hotness: float) -> Truth:
    logits = p["tokens"] * p["vocab"]
    stream = [
        Operation(name=name, kind=Kind.LOSS, phase=phase, dtype="fp32", bytes=logits * each + 16.0 * p["tokens"])
        for name, phase, each in LOSS_KERNELS
    ]
    return _pipelined(simulator, stream, hotness, 14.0 * logits)


def _pipelined(simulator: Simulator, stream: list[Operation], hotness: float, device_bytes: float) -> Truth:
    """Mean of a short stream called `INNER_LOOPS` times before the host waits."""
    outcome = simulator.step(compile_stream(stream * INNER_LOOPS), hotness)
    return Truth(seconds=outcome.seconds / INNER_LOOPS, operating=outcome.operating, device_bytes=device_bytes)


FOREACH_ADAMW_BYTES = (8.0, 12.0, 8.0, 16.0, 8.0, 8.0, 8.0, 16.0)
"""Bytes per fp32 element of each pass of foreach AdamW: decay, first moment, second moment (two), square root,
bias correction, epsilon, update."""
FUSED_ADAMW_BYTES = 28.0
"""The same of one fused pass: the gradient read, the weight and two fp32 moments read and written."""
EIGHT_BIT_ADAMW_BYTES = 16.0
"""The same where the two moments have a byte each."""
PER_LAUNCH_TENSORS, PER_LAUNCH_ELEMENTS = 48, 320 * 65536
"""What one multi-tensor launch takes (PyTorch MultiTensorApply.cuh, lists of three)."""


def _optimizer(simulator: Simulator, p: Params, hotness: float) -> Truth:
    elements, tensors, optim = p["elements"], p["tensors"], p["optim"]
    launches = max(math.ceil(tensors / PER_LAUNCH_TENSORS), math.ceil(elements / PER_LAUNCH_ELEMENTS))
    if "8bit" in optim or optim.startswith("paged"):
        passes: tuple[float, ...] = (EIGHT_BIT_ADAMW_BYTES / tensors,) * tensors
        launches = 1
    else:
        passes = (FUSED_ADAMW_BYTES,) if "fused" in optim else FOREACH_ADAMW_BYTES
    stream = [
        Operation(
            name="aten._foreach_", kind=Kind.OPTIMIZER, phase=Phase.OPTIMIZER, bytes=each * elements, launches=launches
        )
        for each in passes
    ]
    return _pipelined(simulator, stream, hotness, 24.0 * elements)


def _launch(simulator: Simulator, p: Params, hotness: float) -> Truth:
    """The host's clock over issuing all launches through autograd; a full queue makes it wait for the device."""
    host, launch = simulator.physics.host, simulator.physics.launch
    kernels = int(p["kernels"])
    issue = kernels * host.operator_s
    drained = max(issue, kernels * (launch.minimum_s + launch.gap_s)) + host.sync_s
    waited = max(0, kernels - launch.queue) * (launch.minimum_s + launch.gap_s)
    return Truth(seconds=max(issue, waited), extra={"synchronised_s": drained})


def _sync(simulator: Simulator, p: Params, hotness: float) -> Truth:
    """One tiny launch and one synchronisation."""
    host, launch = simulator.physics.host, simulator.physics.launch
    return Truth(seconds=bare_seconds(host, Kind.MEMORY) + launch.minimum_s + host.sync_s)


def _modules(simulator: Simulator, p: Params, hotness: float) -> Truth:
    """Python goes past every module of the real model, as often as the real benchmark does."""
    modules = modules_of(p)
    return Truth(seconds=WALKS_AROUND * modules * simulator.physics.host.walk_s, extra={"modules": modules})


def _transfer(simulator: Simulator, p: Params, hotness: float) -> Truth:
    host = simulator.physics.host
    rate = pcie_bytes_per_s(simulator.card) * host.pcie_frac * (1.0 if p["pinned"] else host.pageable_frac)
    if p["direction"] == "d2h":
        rate *= 0.97
    return Truth(seconds=host.transfer_latency_s + p["bytes"] / rate, device_bytes=p["bytes"])


def _disk(simulator: Simulator, p: Params, hotness: float) -> Truth:
    host = simulator.physics.host
    cold = bool(p["cold"])
    if p["direction"] == "write":
        rate = host.disk_write_bytes_per_s
    else:
        rate = host.disk_read_bytes_per_s if cold else host.page_cache_bytes_per_s
    return Truth(seconds=200e-6 + p["bytes"] / rate, extra={"cold_proved": cold, "filesystem": "simulated"})


def _load(simulator: Simulator, p: Params, hotness: float) -> Truth:
    """From the page cache through a staging buffer to the device; quantization follows per tensor."""
    host = simulator.physics.host
    pageable = pcie_bytes_per_s(simulator.card) * host.pcie_frac * host.pageable_frac
    seconds = 20e-3 + p["bytes"] / host.page_cache_bytes_per_s + p["bytes"] / pageable
    if p["quantize"]:
        seconds += p["bytes"] / 2 / host.quantize_elements_per_s
    return Truth(seconds=seconds, device_bytes=p["bytes"])


def _checkpoint(simulator: Simulator, p: Params, hotness: float) -> Truth:
    host = simulator.physics.host
    down = p["bytes"] / (pcie_bytes_per_s(simulator.card) * host.pcie_frac * host.pageable_frac)
    return Truth(seconds=15e-3 + down + p["bytes"] / host.disk_write_bytes_per_s)


def _collective(simulator: Simulator, p: Params, hotness: float) -> Truth:
    seconds = collective_seconds(simulator.card, simulator.physics, p["op"], p["bytes"], p["world_size"])
    return Truth(seconds=seconds, device_bytes=p["bytes"])


BENCHES: dict[str, Callable[[Simulator, Params, float], Truth]] = {
    "gemm": _gemm,
    "grouped": _grouped,
    "lasting": _lasting,
    "memory": _memory,
    "walk": _walk,
    "dequant": _dequant,
    "matmul_4bit": _matmul_4bit,
    "attention": _attention,
    "masked": _attention,
    "loss": _loss,
    "optimizer": _optimizer,
    "launch": _launch,
    "sync": _sync,
    "modules": _modules,
    "transfer": _transfer,
    "disk": _disk,
    "load": _load,
    "checkpoint": _checkpoint,
    "collective": _collective,
}
"""Every microbenchmark of the protocol; whole steps are in `step.py`."""
