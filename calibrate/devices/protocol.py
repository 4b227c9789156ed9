"""The one narrow seam between tunecast and hardware, with units in names.

A `Device` runs a `TrialSpec` and answers with a `TrialResult`. Three implementations: NVIDIA
(torch.cuda and NVML), CPU (real), mock (simulated). Everything above this seam (plan, resume,
statistics, fit) is the same for all three. Out of memory is an outcome, not an exception.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """One thing to measure. `bench` and `params` say exactly what; both go into the record.

    Benches and their params:

    ==============  ==========================================================================
    ``gemm``        m, n, k, dtype, layout (nt | nn | tn)
    ``lasting``     as of ``gemm``: products for seconds on end, at the clock that the power limit leaves
    ``memory``      op (copy | read | write | add), bytes (moved in all, read + written), dtype
    ``walk``        op (softmax | softmax_backward | join | cut | heads | upcast), rows, width, dtype; join and cut also
                    more (columns beside the width), heads also heads
    ``dequant``     elements, quant_type, double_quant, dtype, rows, cols
    ``matmul_4bit`` m, n, k, quant_type, double_quant, dtype, pass (forward | backward)
    ``attention``   batch, heads, kv_heads, length, head_dim, dtype, pass (forward | backward)
    ``loss``        tokens, vocab, dtype  (cross-entropy forward and backward, full logits)
    ``optimizer``   elements, tensors, optim
    ``launch``      kernels (tiny kernels issued in a row: host seconds per launch)
    ``sync``        (none: cost of one synchronisation)
    ``modules``     architecture, run (as of ``step``): four walks over the modules of a model, as transformers'
                    Trainer takes around a step
    ``transfer``    bytes, pinned (bool), direction (h2d | d2h)
    ``disk``        bytes, cold (bool), direction (read | write)
    ``load``        bytes, quantize (bool): a safetensors shard all the way to the device
    ``checkpoint``  bytes: save of an adapter checkpoint
    ``collective``  op, bytes, world_size
    ``step``        architecture (fields as in `trace/spec.py`), run (fields of model.run.Run),
                    steps: whole optimizer steps of the real transformers + PEFT + bitsandbytes code
    ==============  ==========================================================================
    """

    bench: str
    params: dict[str, Any]
    repeats: int
    warmup: int

    @property
    def key(self) -> str:
        """Stable identity of the trial inside one protocol version."""
        inner = ",".join(f"{k}={self.params[k]}" for k in sorted(self.params))
        return f"{self.bench}({inner})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The memory views of one trial, in bytes; None where the device has no such view."""

    allocated_bytes: int | None = None
    """Peak of tensors alive (torch.cuda.max_memory_allocated)."""
    reserved_bytes: int | None = None
    """Peak held by the allocator."""
    process_bytes: int | None = None
    """Peak of the process on the device, context included (what nvidia-smi shows); RSS on a CPU."""
    at_rest_bytes: int | None = None
    """Allocated before the first step: weights and adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensors:
    """One reading of the device's sensors. None means the device does not report it, never 0."""

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilization_frac: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    energy_j: float | None = None
    """Cumulative energy counter."""
    other_processes: int | None = None
    """Other compute processes on the device; None when they cannot be listed."""
    memory_used_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What one trial gave. Raw samples are kept, warm-up apart; statistics are computed on reading."""

    outcome: str
    """``ok``, ``oom``, ``unsupported`` or ``error``."""
    samples_s: tuple[float, ...] = ()
    """Seconds of each counted repetition (for ``step``: one optimizer step each)."""
    warmup_s: tuple[float, ...] = ()
    message: str = ""
    memory: MemoryReading = field(default_factory=MemoryReading)
    sensors_before: Sensors | None = None
    sensors_after: Sensors | None = None
    """Of a step on a GPU while its warm-up kept the card busy: afterwards the card is idle."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Bench-specific facts, for example ``cold_proved`` of a disk trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the device is. None where unknown."""

    device: str
    """``cuda:0``, ``cpu`` or ``mock:<id>#<seed>``."""
    gpu: str | None
    """Catalog id, ``cpu``, ``mock:<id>#<seed>``, or None for a card in no catalog."""
    name: str
    """As the vendor's library spells it."""
    memory_bytes: int | None
    """What torch can see (total_memory); on a CPU the available RAM."""
    multiprocessors: int | None = None
    compute_capability: str | None = None
    driver: str | None = None
    cuda: str | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    ecc: bool | None = None
    mig: bool | None = None
    mig_profile: str | None = None
    pcie_gen_max: int | None = None
    pcie_width_max: int | None = None
    nvlink_links: int | None = None
    container: bool | None = None
    host: dict[str, Any] = field(default_factory=dict)
    """CPU model, cores, RAM bytes: facts of the machine, never its name or user."""


class Device(Protocol):
    """A thing that can be measured."""

    id: str

    def hardware(self) -> Hardware:
        """Facts of the device; raises DeviceError when it is gone."""
        ...

    def software(self) -> dict[str, str | None]:
        """Versions that move the result (python, torch, transformers, ...); None when absent."""
        ...

    def sensors(self) -> Sensors:
        """One reading; never raises for an unsupported sensor."""
        ...

    def supports(self, spec: TrialSpec) -> bool:
        """Whether this device can run the trial at all (a CPU has no host-to-device transfer)."""
        ...

    def run(self, spec: TrialSpec) -> TrialResult:
        """Measure; out of memory and unsupported are outcomes. Raises DeviceError when the device is lost."""
        ...

    def settle(self, max_seconds: float) -> bool:
        """Warm up until clocks settle; False when they had not after `max_seconds`."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
