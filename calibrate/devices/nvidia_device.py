"""An NVIDIA GPU as a `Device`: torch.cuda runs the trials, NVML watches the card.

How a device is found and opened, with its error messages, is in `nvidia.py`.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from tunecast.calibrate.bench.collectives import close_groups
from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.cuda_backend import CudaBackend, exception_text, holds_context
from tunecast.calibrate.devices.nvml import Nvml
from tunecast.calibrate.devices.nvml_card import NvmlCard, Occupation, other_processes, own_nvml_pid
from tunecast.calibrate.devices.other_work import OtherWork
from tunecast.calibrate.devices.pcie_watch import PcieWatch
from tunecast.calibrate.devices.protocol import Hardware, Sensors, TrialResult, TrialSpec
from tunecast.calibrate.devices.settle import SettleRule, matrix_work, settle
from tunecast.calibrate.environment import MEASURING_PACKAGES, host_facts, in_container, software_versions
from tunecast.calibrate.flags import THROTTLE_FLAGS
from tunecast.catalogs.errors import DeviceError, TunecastError

Runner = Callable[[TrialSpec, Backend], TrialResult]
"""What measures one trial on a backend: `tunecast.calibrate.bench.run_bench`."""

CAPABILITY_NEEDED = {"bf16": (8, 0), "fp8": (8, 9)}
"""First compute capability with the dtype in hardware (NVIDIA CUDA programming guide, tensor core data types)."""


BUSY_FOR_LONG = ("step", "lasting")
"""Benches whose reading is taken while the card works: afterwards it is idle."""


def default_runner(spec: TrialSpec, backend: Backend) -> TrialResult:
    """Run the shared benchmarks; imported only when something is measured."""
    from tunecast.calibrate.bench import run_bench

    return run_bench(spec, backend)


class NvidiaDevice:
    """One CUDA device. Everything that can be absent (NVML, each sensor) is None, never guessed."""

    def __init__(
        self,
        torch: Any,
        index: int,
        *,
        nvml: Nvml | None,
        card: NvmlCard | None,
        before: Occupation | None,
        others: OtherWork | None = None,
        runner: Runner = default_runner,
        torch_device: str | None = None,
        rule: SettleRule | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`before` is who held memory before our process touched CUDA, `others` watches who else computes on the host;
        the last four are for tests."""
        self.id = f"cuda:{index}"
        self._torch = torch
        self._index = index
        self._nvml = nvml
        self._card = card
        self._before = before
        self._others = others
        self._runner = runner
        self._rule = rule or SettleRule()
        self._clock = clock
        self._flags: set[str] = set()
        self._loaded: Sensors | None = None
        """What the sensors showed while the trial now running kept the card busy."""
        self.backend = CudaBackend(
            torch, index, process_bytes=self._process_bytes, torch_device=torch_device, clock=clock
        )
        self._flag_standing_facts()

    def _properties(self) -> Any:
        return self._torch.cuda.get_device_properties(self._index)

    def hardware(self) -> Hardware:
        """Facts of the device; raises DeviceError when it is gone."""
        properties, card = self._properties(), self._card
        plain = Hardware(
            device=self.id,
            gpu=self._catalog_id(),
            name=(card.name if card else None) or properties.name,
            memory_bytes=int(properties.total_memory),
            multiprocessors=int(properties.multi_processor_count),
            compute_capability=f"{properties.major}.{properties.minor}",
            driver=self._nvml.driver_version() if self._nvml else None,
            cuda=self._torch.version.cuda,
            container=in_container(),
            host=host_facts(),
        )
        return replace(plain, **_card_facts(card)) if card else plain

    def _catalog_id(self) -> str | None:
        """Catalog id by name, memory and multiprocessors; a MIG instance is no catalog card."""
        from tunecast.catalogs.gpus import match_device

        if self._card is not None and self._card.is_mig_instance:
            return None
        properties = self._properties()
        for name in (self._card.name if self._card else None, properties.name):
            gpu = (
                match_device(name, int(properties.total_memory), int(properties.multi_processor_count))
                if name
                else None
            )
            if gpu is not None:
                return gpu.id
        return None

    def software(self) -> dict[str, str | None]:
        """Versions that move the result, with the driver's."""
        versions = software_versions()
        versions["torch"] = str(self._torch.__version__)
        versions["cuda"] = self._torch.version.cuda
        versions["driver"] = self._nvml.driver_version() if self._nvml else None
        versions["cuda_driver"] = self._nvml.cuda_driver_version() if self._nvml else None
        return versions

    def sensors(self) -> Sensors:
        """One reading, PCIe counters included (they take 40 ms)."""
        return self._sensors(with_pcie_throughput=True)

    def quick_sensors(self) -> Sensors:
        """One reading without what has to be waited for."""
        return self._sensors()

    def _sensors(self, *, with_pcie_throughput: bool = False) -> Sensors:
        if self._card is None:
            return Sensors()
        reading = self._card.sensors(other_processes=self._other_processes(), with_pcie_throughput=with_pcie_throughput)
        self._flag_reading(reading)
        return reading

    def _other_processes(self) -> int | None:
        assert self._card is not None
        before = self._before.pids if self._before else None
        have_context = holds_context(self._torch, self._index)
        return other_processes(self._card.processes(), before, os.getpid(), have_context=have_context)

    def _process_bytes(self) -> int | None:
        """Bytes our process holds on the card, context included: by its own entry, else by the card's growth."""
        if self._card is None:
            return None
        listed = self._card.processes() or {}
        ours = own_nvml_pid(frozenset(listed), self._before.pids if self._before else None, os.getpid())
        if ours is not None and listed[ours] is not None:
            return listed[ours]
        used_bytes = self._card.memory_used_bytes()
        if used_bytes is None or self._before is None or self._before.used_bytes is None:
            return None
        return max(used_bytes - self._before.used_bytes, 0)

    def _flag_standing_facts(self) -> None:
        if self._card is None:
            self._flags.add("no_nvml")
            return
        if self._card.mig_enabled():
            self._flags.add("mig")
        limit_w, default_w = self._card.power_limit_w(), self._card.default_power_limit_w()
        if limit_w is not None and default_w is not None and limit_w < default_w:
            self._flags.add("power_limit_lowered")

    def _flag_reading(self, reading: Sensors) -> None:
        self._flag_throttling(reading.throttle_reasons)
        if reading.other_processes:
            self._flags.add("shared_gpu")

    def _flag_throttling(self, reasons: tuple[str, ...] | None) -> None:
        self._flags.update(THROTTLE_FLAGS[reason] for reason in reasons or () if reason in THROTTLE_FLAGS)

    def flags(self) -> tuple[str, ...]:
        """What a reader of the record must know, seen so far: ``throttled`` (heat or hardware slowdown),
        ``power_capped``, ``power_limit_lowered``, ``shared_gpu``, ``mig``, ``clock_not_settled``,
        ``clocks_disagree`` (CUDA events against the wall clock), ``no_nvml``, ``shared_cpu`` (the host was busy)."""
        return tuple(sorted({*self._flags, *(self._others.flags() if self._others else ())}))

    def peers(self) -> int:
        """GPUs of this machine that torch sees and that are the same card: a job can run on all of them."""
        return len(self.backend.peers())

    def supports(self, spec: TrialSpec) -> bool:
        """Whether the card has the dtype in hardware and, for collectives, whether there are enough of the kind."""
        if spec.bench == "collective":
            enough = self.peers() >= int(spec.params["world_size"])
            return enough and bool(self._torch.distributed.is_available())
        properties = self._properties()
        capability = (properties.major, properties.minor)
        return all(capability >= CAPABILITY_NEEDED.get(dtype, (0, 0)) for dtype in dtypes_of(spec))

    def run(self, spec: TrialSpec) -> TrialResult:
        """Measure. Out of memory gives ``oom``, another failure ``error``; a lost device raises DeviceError.

        What slows a card, its clocks and its power are those of the moment (NVML), and a card is idle as soon as a
        trial is over. Of a step the reading after it is therefore one of the warm-up. There it is read once the
        host has issued the work and would only wait: a thread beside the counted steps would compete with the host
        that issues them, for Python's lock and the driver's, and steps of small models take as long as the host.
        """
        self.backend.extra.clear()
        self._loaded = None
        self.backend.under_load = self._read_under_load if spec.bench in BUSY_FOR_LONG else None
        others_are_ours = spec.bench == "collective"
        before = None if others_are_ours else self._sensors()
        watch = PcieWatch(self._card) if spec.bench == "transfer" else None
        with watch or nullcontext():
            result = self._measure(spec)
        after = None if others_are_ours else self._sensors()  # also where the card's loss shows
        if self.backend.extra.get("clocks_disagree"):
            self._flags.add("clocks_disagree")
        extra = {**result.extra, **self.backend.extra, **(watch.facts() if watch else {})}
        return replace(result, sensors_before=before, sensors_after=self._loaded or after, extra=extra)

    def _read_under_load(self) -> None:
        self._loaded = self._sensors()

    def _measure(self, spec: TrialSpec) -> TrialResult:
        """The trial itself, with every exception turned into an outcome or a DeviceError."""
        try:
            result = self._runner(spec, self.backend)
        except TunecastError:
            raise
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.split(".")[0] in MEASURING_PACKAGES:
                raise  # every trial would fail alike
            result = TrialResult(outcome="error", message=f"{type(error).__name__}: {exception_text(error)}")
        except Exception as error:  # Whatever the libraries raise is an outcome of the trial and is recorded.
            outcome = "oom" if self.backend.is_oom(error) else "error"
            result = TrialResult(outcome=outcome, message=f"{type(error).__name__}: {exception_text(error)}")
        if result.outcome != "ok":
            self._recover(spec, result)
        return result

    def _recover(self, spec: TrialSpec, result: TrialResult) -> None:
        """Free what the failed trial held; raises DeviceError when the CUDA context did not survive it.

        Called after the exception is gone, because its traceback keeps the trial's tensors alive.
        """
        if self.backend.context_is_dead():
            raise DeviceError(
                f"{self.id} stopped working during {spec.bench} ({result.message}): "
                "look at `nvidia-smi` and `dmesg`, then start again; finished trials are kept."
            )
        gc.collect()
        self.backend.empty_cache()

    def settle(self, max_seconds: float) -> bool:
        """Run a steady matrix product until clock, temperature and pace settle; False and a flag when they do not."""
        try:
            settled = settle(
                matrix_work(self._torch, self.backend, self._steady_dtype(), self._rule.size),
                self.backend,
                self._clock_and_temperature,
                max_seconds,
                rule=self._rule,
                clock=self._clock,
            )
        except RuntimeError as error:
            if not self.backend.is_oom(error):
                raise DeviceError(f"{self.id} failed while warming up: {exception_text(error)}") from error
            settled = False
        self.backend.empty_cache()
        if not settled:
            self._flags.add("clock_not_settled")
        return settled

    def _steady_dtype(self) -> str:
        return "bfloat16" if self._properties().major >= CAPABILITY_NEEDED["bf16"][0] else "float16"

    def _clock_and_temperature(self) -> tuple[float | None, float | None]:
        """Read under load; what slows the card there is flagged."""
        if self._card is None:
            return None, None
        self._flag_throttling(self._card.throttle_reasons())
        return self._card.sm_clock_mhz(), self._card.temperature_c()

    def close(self) -> None:
        """Give memory back, end the NVML session and the processes of collectives; works on a lost device too."""
        close_groups()
        if not self.backend.context_is_dead():
            self.backend.empty_cache()
        if self._nvml is not None:
            self._nvml.close()


def dtypes_of(spec: TrialSpec) -> tuple[str, ...]:
    """Our dtype names that a trial uses, whole steps included (``bf16-autocast`` counts as ``bf16``)."""
    run = spec.params.get("run") or {}
    named = (spec.params.get("dtype"), run.get("dtype"), run.get("precision"), run.get("adapter_dtype"))
    return tuple(str(name).removesuffix("-autocast") for name in named if name)


def _card_facts(card: NvmlCard) -> dict[str, Any]:
    """The fields of `Hardware` that NVML knows."""
    generation, width = card.pcie_link(maximum=True)
    return {
        "power_limit_w": card.power_limit_w(),
        "default_power_limit_w": card.default_power_limit_w(),
        "max_sm_clock_mhz": card.max_sm_clock_mhz(),
        "max_memory_clock_mhz": card.max_memory_clock_mhz(),
        "ecc": card.ecc(),
        "mig": card.mig_enabled(),
        "mig_profile": card.mig_profile(),
        "pcie_gen_max": generation,
        "pcie_width_max": width,
        "nvlink_links": card.nvlink_links(),
    }
