"""The hidden constants of one simulated card and host.

These numbers are not efficiencies of tunecast: they are the truth of an imaginary machine, which a
calibration has to discover. `draw.py` draws them from the ranges in `calibrate/data/mock_physics.json`,
which come from kernels measured on real cards where such are published (`results/validation/mock/physics.md`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One matrix-product kernel of the library: the block of the result that one thread block computes."""

    bm: int
    bn: int
    bk: int
    rate: float
    """Share of the tensor-core rate that the main loop reaches: small blocks reuse less from registers."""
    resident: int
    """Thread blocks of this kernel that fit on one SM at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPhysics:
    """How the simulated BLAS library turns a product into thread blocks."""

    tiles: tuple[Tile, ...]
    ceiling: float
    """Issue efficiency of a perfect main loop (shared-memory conflicts, barriers), at the clock it runs at."""
    prologue_clk: float
    """Clocks to fill the software pipeline before the first product: two or three DRAM latencies."""
    store_bytes_per_clk: float
    """Bytes per clock with which one SM writes its block of the result."""
    layout_rate: dict[str, float]
    """Main-loop rate by layout: both operands along k (nt) is the natural one, tn loses most."""
    misjudgement: float
    """Log sd of the library's own guess of a kernel's time: it does not always pick the fastest."""
    split_k: tuple[int, ...]
    """Ways the library may split the k loop over thread blocks when the result has few blocks."""
    wave_quantisation: bool = True
    """A last wave that fills half of the SMs takes as long as a full one. Off only to test the mechanism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPhysics:
    """A flash-attention kernel: query blocks walk over key blocks."""

    block_q: int
    block_kv: dict[int, int]
    """Key block by head size: larger heads leave less shared memory."""
    rate: dict[int, float]
    """Share of the tensor-core rate in the two products by head size."""
    legacy_rate: float
    """What kernels written for Ampere reach of a newer or another vendor's tensor core; else 1."""
    tuned_rate: float
    """What cuDNN's own kernels reach of it, on cards where PyTorch runs them."""
    exp_per_clk: float
    """Exponentials per clock and SM: 16 on all these architectures."""
    exp_hidden: float
    """Share of the softmax that hides behind the products."""
    backward_rate: float
    """Main-loop rate of the backward kernel against the forward one (atomics on dq)."""
    setup_clk: float
    """Clocks before the first product of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPhysics:
    """DRAM, the last-level cache and the kernels that only move bytes."""

    bandwidth_frac: float
    """Sustained DRAM bandwidth over the catalog figure (refresh, row misses, read-write turns)."""
    latency_s: float
    """DRAM round trip."""
    inflight_bytes_per_block: float
    """Bytes that one thread block keeps in flight: sets the ramp for small tensors."""
    block_bytes: int
    """Bytes one thread block handles."""
    blocks_per_sm: int
    tail: float
    """Share of a partly filled last wave that is lost: DRAM stays busy with fewer blocks."""
    l2_speedup: float
    """Last-level cache over DRAM bandwidth."""
    l2_keep: float
    """Share of the cache that still holds what the kernel before wrote."""
    l2_bytes_per_sm_clk: float
    """Bytes per clock and SM out of the last-level cache into a matrix kernel."""
    class_rate: dict[str, float]
    """Bandwidth by kind of access against a plain copy: elementwise, reduction, softmax, strided, gather, upcast."""
    upcast_bytes_per_clk: float
    """Bytes that one SM reads and writes per clock where it casts 16 bits to 32, element by element."""
    dequant_elements_per_clk: float
    """4-bit values that one SM unpacks per clock: table lookups, which bind cards with much bandwidth per SM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerPhysics:
    """Power and heat decide the clock. Fractions are of the TDP."""

    headroom: float
    """Highest clock over the catalog's: 1.0 on A100, more on Hopper (1,980 over 1,830 MHz) and GeForce."""
    drift_per_c: float
    """Highest clock lost per degree above ambient on cards that boost (15 MHz every few degrees)."""
    idle: float
    active: float
    """An SM array that is busy at all."""
    tensor: float
    """Tensor cores at their full rate at the catalog clock, on top of `active`: energy per FLOP times the peak."""
    dram: float
    """DRAM at its sustained bandwidth."""
    exponent: float
    """Power of the SMs goes with clock to this power (voltage falls with clock)."""
    leakage: float
    """Extra leakage at the hot temperature against a cold card."""
    limit: float
    """Enforced power limit over TDP: 1 unless lowered."""
    ambient_c: float
    hot_c: float
    """Temperature after minutes of load."""
    throttle_c: float
    """Above this temperature the clock is capped."""
    throttle_per_c: float
    """Clock lost per degree above `throttle_c`."""
    tau_s: float
    """Thermal time constant of die and heat spreader."""
    control_s: float
    """Time over which the controller averages power: what is over sooner runs at a higher clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPhysics:
    """What the device needs between and at least for kernels."""

    gap_s: float
    """Between dependent kernels of one stream."""
    minimum_s: float
    """Shortest kernel."""
    queue: int = 1024
    """Launches the driver queues before the host has to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPhysics:
    """Seconds that the host spends issuing work, in eager PyTorch on one core."""

    operator_s: float
    """Dispatch of one elementwise operator from Python with autograd."""
    launch_s: float
    """Driver call of every further kernel of the operator."""
    kind_factor: dict[str, float]
    """Operators of other kinds against an elementwise one: cuBLAS picks a kernel, attention checks its inputs..."""
    phase_factor: dict[str, float]
    """The C++ engine issues backward operators faster; recomputation runs in Python under saved-tensor hooks."""
    module_s: float
    """Python of a module call around one matrix product (PEFT wrapper, hooks, casts)."""
    layer_s: float
    """Python of one layer, each time it is entered."""
    checkpoint_s: float
    """What a checkpointed region costs besides: saved-tensor hooks, random states, nested autograd."""
    walk_s: float
    """Going past one module of a model in Python."""
    sync_s: float
    """One synchronisation."""
    variety: float
    """Log sd of the cost between operators of one kind: some have more arguments to check."""
    jitter: float
    """Log sd between calls of the same operator."""
    pcie_frac: float
    """Pinned transfer rate over the PCIe limit."""
    pageable_frac: float
    """Pageable over pinned rate: a copy through a staging buffer."""
    transfer_latency_s: float
    disk_read_bytes_per_s: float
    """Cold reads from a data-centre NVMe volume."""
    disk_write_bytes_per_s: float
    page_cache_bytes_per_s: float
    quantize_elements_per_s: float
    """NF4 quantization while loading, on the device."""
    network_frac: float
    """Bus bandwidth of a large collective over the link's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPhysics:
    """Simulated caching allocator and context."""

    context_bytes: int
    """CUDA context and loaded kernels."""
    workspace_bytes: int
    """Of the BLAS library, taken from the allocator by the first products and kept."""
    fragmentation: float
    """Share of the step's own peak that is lost to fragments."""
    segment_bytes: int
    """Segments are reserved in multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisePhysics:
    """What differs between two repetitions of the same thing."""

    log_sd: float
    """From run to run."""
    outlier_probability: float
    """Share of repetitions that meet something else on the machine."""
    outlier_max: float
    """Longest stretch of such a repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """Everything that is hidden about one mock."""

    identity: str
    """``mock:<id>#<seed>[@variant]``: keys the noise of its measurements."""
    root: str
    """``mock:<id>#<seed>``: keys what is part of the machine, so that a variant differs in one thing only."""
    gemm: GemmPhysics
    attention: AttentionPhysics
    roughness: float
    """Scale of the log by which a product or attention of one shape differs from what its mechanism says."""
    memory: MemoryPhysics
    power: PowerPhysics
    launch: LaunchPhysics
    host: HostPhysics
    allocator: AllocatorPhysics
    noise: NoisePhysics


def generator(*key: object) -> np.random.Generator:
    """A random generator that follows from its key alone, the same in every process."""
    digest = hashlib.sha256("|".join(map(str, key)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
