"""`MockDevice`: the `Device` protocol answered by a simulation."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tunecast.calibrate.devices.protocol import Hardware, MemoryReading, Sensors, TrialResult, TrialSpec
from tunecast.calibrate.mock.benches import BENCHES, Truth, truth_of
from tunecast.calibrate.mock.card import Card, card_of
from tunecast.calibrate.mock.draw import draw_physics
from tunecast.calibrate.mock.gemm import gemm_work
from tunecast.calibrate.mock.noise import repetitions, warmups
from tunecast.calibrate.mock.physics import Physics
from tunecast.calibrate.mock.power import Operating, temperature_c, warmed
from tunecast.calibrate.mock.simulator import Outcome, Simulator, Stream, compile_stream
from tunecast.calibrate.mock.step import memory_reading, step_key, traced_step
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import find_gpu
from tunecast.model.operation import Operation
from tunecast.model.units import gib

SETTLED = 0.95
"""Share of the way from cold to hot at which the clock no longer moves by more than a step of 15 MHz."""

_NAME = re.compile(r"(?P<gpu>[^#@]+)(?:#(?P<seed>[^@]*))?(?:@(?P<variant>.*))?", re.DOTALL)


def open_mock(name: str, *, ignore_memory: bool = False) -> MockDevice:
    """The mock called ``mock:<gpu-id>[#seed][@variant]``; seed 0 when none is given.

    Raises UnknownNameError for a GPU or variant that does not exist, InputError for a seed that is no
    whole number.
    """
    match = _NAME.fullmatch(name.removeprefix("mock:"))
    if match is None:
        raise InputError(f"Mock {name!r} is not of the form mock:<gpu-id>[#seed][@variant]; try mock:a100-sxm4-80gb.")
    seed = match["seed"] if match["seed"] is not None else "0"
    if not re.fullmatch(r"[0-9]{1,9}", seed):
        raise InputError(f"Mock {name!r} has seed {seed!r}; a seed is a whole number such as mock:a100-sxm4-80gb#7.")
    card = card_of(find_gpu(match["gpu"]))
    physics = draw_physics(card, int(seed), match["variant"])
    return MockDevice(card, physics, ignore_memory=ignore_memory)


class MockDevice:
    """A simulated card in a simulated machine. The same name gives the same answers in every process.

    Trials before `settle` run on a card that is still warming, so their order matters as it would on a
    real one; after it every trial depends on its own spec alone.
    """

    def __init__(self, card: Card, physics: Physics, *, ignore_memory: bool = False) -> None:
        self.id = physics.identity
        self.card = card
        self.physics = physics
        self.ignore_memory = ignore_memory
        """Simulate a trial that does not fit as if it did, instead of answering ``oom``."""
        self.simulator = Simulator(card, physics)
        self._hotness = 0.0
        self._settled = False
        self._energy_j = 0.0
        self._last: Operating | None = None
        self._held_bytes = 0

    def simulate(self, stream: Stream | tuple[Operation, ...] | list[Operation]) -> float:
        """True seconds of a kernel stream on the hot card, without noise and whatever its memory."""
        return self.outcome(stream).seconds

    def outcome(self, stream: Stream | tuple[Operation, ...] | list[Operation]) -> Outcome:
        """`simulate` with both clocks, the settled clock and the power."""
        compiled = stream if isinstance(stream, Stream) else compile_stream(stream)
        return self.simulator.step(compiled)

    def true_seconds(self, spec: TrialSpec) -> float:
        """What the trial takes on the hot card, before noise: the truth that a calibration looks for."""
        return self._truth(spec, hotness=1.0)[0].seconds

    def hardware(self) -> Hardware:
        """Facts of the simulated card."""
        card, power = self.card, self.physics.power
        return Hardware(
            device=self.id,
            gpu=self.id,
            name=card.name,
            memory_bytes=card.usable_bytes,
            multiprocessors=card.sm_count,
            compute_capability=card.compute_capability,
            driver="simulated",
            cuda=None,
            power_limit_w=card.tdp_w * power.limit,
            default_power_limit_w=card.tdp_w,
            max_sm_clock_mhz=round(card.boost_clock_mhz * power.headroom),
            mig=False,
            pcie_gen_max=card.pcie_gen,
            pcie_width_max=card.pcie_lanes,
            host={"cpu": "simulated"},
        )

    def software(self) -> dict[str, str | None]:
        """Versions of the code whose steps are traced."""
        from tunecast.calibrate.environment import software_versions

        return software_versions()

    def sensors(self) -> Sensors:
        """What the simulated card shows after its last trial."""
        last, card = self._last, self.card
        temperature = temperature_c(self.physics.power, self._hotness)
        reasons: tuple[str, ...]
        if last is None:
            power_w, clock, reasons = card.tdp_w * self.physics.power.idle, 0.15, ("gpu_idle",)
        else:
            power_w, clock, reasons = last.power_w, last.clock, last.throttle_reasons
        return Sensors(
            sm_clock_mhz=float(round(card.boost_clock_mhz * clock)),
            power_w=round(power_w, 1),
            temperature_c=float(round(temperature)),
            utilization_frac=0.0 if last is None else 1.0,
            throttle_reasons=reasons,
            pcie_gen=card.pcie_gen,
            pcie_width=card.pcie_lanes,
            energy_j=round(self._energy_j, 3),
            other_processes=0,
            memory_used_bytes=self._held_bytes or self.physics.allocator.context_bytes,
        )

    def supports(self, spec: TrialSpec) -> bool:
        """Every microbenchmark, and steps on one GPU."""
        if spec.bench == "step":
            return bool(spec.params["run"].get("num_gpus", 1) == 1)
        return spec.bench in BENCHES

    def run(self, spec: TrialSpec) -> TrialResult:
        """Simulate one trial with noise; out of memory is an outcome, as on a card."""
        if not self.supports(spec):
            return TrialResult(outcome="unsupported", message=f"a mock cannot run {spec.bench}")
        before = self.sensors()
        truth, memory = self._truth(spec, self._hotness)
        refused = self._refusal(memory.process_bytes or 0)
        if refused:
            return TrialResult(outcome="oom", message=refused, sensors_before=before, sensors_after=before)
        key = step_key(spec) if "architecture" in spec.params else spec.key
        warm = warmups(self.physics, key, truth.seconds, spec.warmup)
        samples = repetitions(self.physics, key, truth.seconds, spec.repeats)
        self._worked(truth, sum(warm) + sum(samples), memory)
        return TrialResult(
            outcome="ok",
            samples_s=samples,
            warmup_s=warm,
            memory=memory,
            sensors_before=before,
            sensors_after=self.sensors(),
            extra=_extra(truth, len(samples)),
        )

    def settle(self, max_seconds: float) -> bool:
        """Heat the card with a large product for at most `max_seconds` of simulated time."""
        self._hotness = warmed(self.physics.power, self._hotness, max_seconds)
        self._settled = self._hotness >= SETTLED
        if self._settled:
            self._hotness = 1.0
        product = gemm_work(self.card, self.physics, 8192, 8192, 8192, "fp16", "nt")
        self._last = self.simulator.kernel(product, self._hotness).operating
        return self._settled

    def close(self) -> None:
        """Nothing is held."""

    def _truth(self, spec: TrialSpec, hotness: float) -> tuple[Truth, MemoryReading]:
        if spec.bench != "step":
            truth = truth_of(self.simulator, spec.bench, spec.params, hotness)
            peak = int(truth.device_bytes)
            return truth, memory_reading(self.physics.allocator, peak, peak, None)
        kept = self.physics.allocator.workspace_bytes
        traced = traced_step(spec.params)
        outcome = self.simulator.step(traced.stream, hotness)
        memory = memory_reading(
            self.physics.allocator,
            traced.peak_bytes + kept,
            traced.at_rest_bytes + kept,
            at_rest_bytes=traced.loaded_bytes + kept,
        )
        return Truth(seconds=outcome.seconds, operating=outcome.operating, extra=traced.counts), memory

    def _refusal(self, process_bytes: int) -> str:
        """The allocator's message when the process would exceed the card, else empty."""
        if self.ignore_memory or process_bytes <= self.card.usable_bytes:
            return ""
        return (
            f"CUDA out of memory (simulated): the process needs {gib(process_bytes):.2f} GiB "
            f"of the {gib(self.card.usable_bytes):.2f} GiB of {self.id}"
        )

    def _worked(self, truth: Truth, seconds: float, memory: MemoryReading) -> None:
        """Heat, energy and what the sensors show next."""
        if truth.operating is not None:
            self._last = truth.operating
            self._energy_j += truth.operating.power_w * seconds
            if not self._settled:
                self._hotness = warmed(self.physics.power, self._hotness, seconds)
        self._held_bytes = memory.process_bytes or 0


def _extra(truth: Truth, repeats: int) -> dict[str, Any]:
    """Facts beside the samples; durations in them are listed per repetition, as the real benchmarks do."""
    return {k: [v] * repeats if k.endswith("_s") else v for k, v in (truth.extra or {}).items()}


def with_physics(device: MockDevice, **changes: Any) -> MockDevice:
    """The same card with some of its hidden physics replaced: for experiments about mechanisms."""
    return MockDevice(device.card, replace(device.physics, **changes), ignore_memory=device.ignore_memory)


__all__ = ["MockDevice", "open_mock", "with_physics"]
