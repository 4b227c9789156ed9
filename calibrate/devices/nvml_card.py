"""One NVIDIA card read through NVML: found by UUID or PCI address, every sensor optional.

NVML ignores CUDA_VISIBLE_DEVICES and counts in PCI order, so a card is never taken by its index. On a MIG
instance the memory and the processes are the instance's own; clocks, power and temperature are the board's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tunecast.calibrate.devices.nvml import Nvml
from tunecast.calibrate.devices.protocol import Sensors
from tunecast.catalogs.errors import DeviceError
from tunecast.model.units import KILO

PERCENT = 100.0

THROTTLE_BITS = (
    ("GpuIdle", "gpu_idle"),
    ("ApplicationsClocksSetting", "applications_clocks_setting"),
    ("SwPowerCap", "sw_power_cap"),
    ("HwSlowdown", "hw_slowdown"),
    ("SyncBoost", "sync_boost"),
    ("SwThermalSlowdown", "sw_thermal_slowdown"),
    ("HwThermalSlowdown", "hw_thermal_slowdown"),
    ("HwPowerBrakeSlowdown", "hw_power_brake_slowdown"),
    ("DisplayClockSetting", "display_clock_setting"),
)
"""Suffix of NVML's constant (``nvmlClocksEventReason...``, formerly ``nvmlClocksThrottleReason...``), our word."""

VALUE_FIELDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of NVML's value union in the order of its NVML_VALUE_TYPE_* numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardAddress:
    """How torch names a card, in the forms that NVML understands."""

    uuid: str | None
    """Without prefix: NVML writes ``GPU-`` or ``MIG-`` before it."""
    pci_bus_id: str | None
    """``00000000:3B:00.0``."""
    visible_mig: str | None = None
    """MIG UUID that CUDA_VISIBLE_DEVICES names, since older CUDA reports the board's UUID for an instance."""

    @property
    def uuids(self) -> tuple[str, ...]:
        """Full UUIDs to try, most specific first."""
        own = (f"MIG-{self.uuid}", f"GPU-{self.uuid}") if self.uuid else ()
        return (*((self.visible_mig,) if self.visible_mig else ()), *own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupation:
    """Who held memory on a card at one moment."""

    used_bytes: int | None
    pids: frozenset[int] | None
    """As NVML numbers processes: in a container these are not our own numbers."""


def find_card(nvml: Nvml, address: CardAddress) -> NvmlCard | None:
    """The card at this address; None when NVML knows no such card."""
    for uuid in address.uuids:
        handle = nvml.optional("nvmlDeviceGetHandleByUUID", uuid)
        if handle is not None:
            return NvmlCard(nvml, handle)
    if address.pci_bus_id:
        handle = nvml.optional("nvmlDeviceGetHandleByPciBusId", address.pci_bus_id)
        if handle is not None:
            return NvmlCard(nvml, handle)
    return None


def occupations(nvml: Nvml) -> dict[str, Occupation]:
    """Occupation of every card and MIG instance by UUID: to be taken before our process touches CUDA.

    A board that is lost has none: it is no reason not to measure another.
    """
    found: dict[str, Occupation] = {}
    for board in nvml.boards():
        with suppress(DeviceError):
            cards = [NvmlCard(nvml, handle) for handle in (board, *nvml.mig_instances(board))]
            found |= {card.uuid: card.occupation() for card in cards if card.uuid}
    return found


class NvmlCard:
    """Reads of one GPU or MIG instance. Every method gives None for what the card does not report."""

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.is_mig_instance = bool(nvml.optional("nvmlDeviceIsMigDeviceHandle", handle))
        parent = nvml.optional("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if self.is_mig_instance else None
        self._board = handle if parent is None else parent
        self.uuid = self._text("nvmlDeviceGetUUID")

    def _text(self, function: str) -> str | None:
        value = self._nvml.optional(function, self._handle)
        return value.decode() if isinstance(value, bytes) else value

    def _of_board(self, function: str, *args: Any) -> Any:
        return self._nvml.optional(function, self._board, *args)

    def _clock(self, function: str, clock: str) -> float | None:
        """A clock in MHz."""
        value = self._of_board(function, self._nvml.constant(clock))
        return None if value is None else float(value)

    def _watts(self, *functions: str) -> float | None:
        """The first of these readings that the card supports; NVML answers in milliwatts."""
        for function in functions:
            value = self._of_board(function)
            if value is not None:
                return float(value) / KILO
        return None

    @property
    def name(self) -> str | None:
        """As NVML spells it; a MIG instance's name ends in its profile."""
        return self._text("nvmlDeviceGetName")

    def memory_used_bytes(self) -> int | None:
        """Bytes in use on the card; without the driver's own reservation where NVML can tell (version 2)."""
        info = self._memory_info()
        return None if info is None else int(info.used)

    def memory_total_bytes(self) -> int | None:
        """Bytes on the card as the driver counts them."""
        info = self._memory_info()
        return None if info is None else int(info.total)

    def _memory_info(self) -> Any:
        version = self._nvml.constant("nvmlMemory_v2")
        info = self._nvml.optional("nvmlDeviceGetMemoryInfo", self._handle, version) if version else None
        return self._nvml.optional("nvmlDeviceGetMemoryInfo", self._handle) if info is None else info

    def sm_clock_mhz(self) -> float | None:
        """SM clock now."""
        return self._clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")

    def memory_clock_mhz(self) -> float | None:
        """Memory clock now."""
        return self._clock("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM")

    def max_sm_clock_mhz(self) -> float | None:
        """Highest SM clock of the card."""
        return self._clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM")

    def max_memory_clock_mhz(self) -> float | None:
        """Highest memory clock of the card."""
        return self._clock("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM")

    def power_w(self) -> float | None:
        """Power now: the instantaneous field where there is one, else the driver's reading.

        Since Ampere (GA100 excepted) the driver's reading is an average over one second.
        """
        instant_mw = self.field_value("NVML_FI_DEV_POWER_INSTANT")
        return instant_mw / KILO if instant_mw is not None else self._watts("nvmlDeviceGetPowerUsage")

    def power_limit_w(self) -> float | None:
        """The power limit in force."""
        return self._watts("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit")

    def default_power_limit_w(self) -> float | None:
        """The power limit the card was sold with."""
        return self._watts("nvmlDeviceGetPowerManagementDefaultLimit")

    def field_value(self, field: str) -> float | None:
        """One entry of NVML's table of fields by the name of its constant, in NVML's own unit."""
        field_id = self._nvml.constant(field)
        if field_id is None:
            return None
        values = self._of_board("nvmlDeviceGetFieldValues", [field_id])
        if not values or values[0].nvmlReturn != 0 or values[0].valueType >= len(VALUE_FIELDS):
            return None
        return float(getattr(values[0].value, VALUE_FIELDS[values[0].valueType]))

    def temperature_c(self) -> float | None:
        """Core temperature."""
        sensor = self._nvml.constant("NVML_TEMPERATURE_GPU")
        value = self._of_board("nvmlDeviceGetTemperatureV", sensor)
        if value is None:
            value = self._of_board("nvmlDeviceGetTemperature", sensor)
        return None if value is None else float(value)

    def utilization_frac(self) -> float | None:
        """Share of the last sampling period in which a kernel was running."""
        rates = self._of_board("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / PERCENT

    def throttle_reasons(self) -> tuple[str, ...] | None:
        """Why the clocks are below their maximum, in words; empty when nothing holds them back."""
        for function in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            mask = self._of_board(function)
            if mask is not None:
                return tuple(word for suffix, word in THROTTLE_BITS if int(mask) & self._throttle_bit(suffix))
        return None

    def _throttle_bit(self, suffix: str) -> int:
        for prefix in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
            bit = self._nvml.constant(prefix + suffix)
            if bit is not None:
                return int(bit)
        return 0

    def pcie_link(self, *, maximum: bool = False) -> tuple[int | None, int | None]:
        """(generation, lanes) of the PCIe link: now, or at most. An idle card lowers its generation."""
        kind = "Max" if maximum else "Curr"
        return (
            self._of_board(f"nvmlDeviceGet{kind}PcieLinkGeneration"),
            self._of_board(f"nvmlDeviceGet{kind}PcieLinkWidth"),
        )

    def pcie_bytes_per_s(self) -> tuple[float | None, float | None]:
        """(received, sent) over the last 20 ms, for which each of the two calls waits. NVML counts in KB/s."""
        counters = ("NVML_PCIE_UTIL_RX_BYTES", "NVML_PCIE_UTIL_TX_BYTES")
        received, sent = (self._of_board("nvmlDeviceGetPcieThroughput", self._nvml.constant(c)) for c in counters)
        return (None if received is None else received * KILO, None if sent is None else sent * KILO)

    def energy_j(self) -> float | None:
        """Energy since the driver was loaded; NVML counts in millijoules."""
        value = self._of_board("nvmlDeviceGetTotalEnergyConsumption")
        return None if value is None else float(value) / KILO

    def ecc(self) -> bool | None:
        """Whether error correction is on."""
        mode = self._of_board("nvmlDeviceGetEccMode")
        return None if mode is None else bool(mode[0])

    def mig_enabled(self) -> bool | None:
        """Whether the board is split into instances; None where the board cannot tell, as consumer cards."""
        mode = self._of_board("nvmlDeviceGetMigMode")
        return True if self.is_mig_instance else None if mode is None else bool(mode[0])

    def mig_profile(self) -> str | None:
        """Profile of this instance, such as ``3g.40gb``."""
        found = re.search(r"\bMIG (\S+)", self.name or "")
        return found.group(1) if found else None

    def nvlink_links(self) -> int | None:
        """Active NVLink links; None on a card without."""
        links = self._nvml.constant("NVML_NVLINK_MAX_LINKS") or 0
        states = [self._of_board("nvmlDeviceGetNvLinkState", link) for link in range(links)]
        known = [state for state in states if state is not None]
        return sum(1 for state in known if state) if known else None

    def processes(self) -> dict[int, int | None] | None:
        """Compute processes on the card: NVML's process number to bytes held (None where hidden)."""
        listed = self._nvml.optional("nvmlDeviceGetComputeRunningProcesses", self._handle)
        return None if listed is None else {process.pid: process.usedGpuMemory for process in listed}

    def occupation(self) -> Occupation:
        """Who holds memory now."""
        listed = self.processes()
        return Occupation(used_bytes=self.memory_used_bytes(), pids=None if listed is None else frozenset(listed))

    def sensors(self, *, other_processes: int | None = None, with_pcie_throughput: bool = False) -> Sensors:
        """One reading of everything. The PCIe counters cost 40 ms, so they are read on request only."""
        generation, width = self.pcie_link()
        received, sent = self.pcie_bytes_per_s() if with_pcie_throughput else (None, None)
        return Sensors(
            sm_clock_mhz=self.sm_clock_mhz(),
            memory_clock_mhz=self.memory_clock_mhz(),
            power_w=self.power_w(),
            temperature_c=self.temperature_c(),
            utilization_frac=self.utilization_frac(),
            throttle_reasons=self.throttle_reasons(),
            pcie_gen=generation,
            pcie_width=width,
            pcie_rx_bytes_per_s=received,
            pcie_tx_bytes_per_s=sent,
            energy_j=self.energy_j(),
            other_processes=other_processes,
            memory_used_bytes=self.memory_used_bytes(),
        )


def other_processes(
    listed: Iterable[int] | None, before: frozenset[int] | None, own_pid: int, *, have_context: bool
) -> int | None:
    """Compute processes that are not ours; None when that cannot be told.

    Our own number is `own_pid`, unless we run in a container, where NVML knows us by another: then the one
    process that was not there before we started is ours. An empty list while we hold a context means that
    the list is hidden from us.
    """
    if listed is None:
        return None
    now = frozenset(listed)
    ours = own_nvml_pid(now, before, own_pid)
    if ours is not None:
        return len(now - {ours})
    if not have_context:
        return len(now)
    known_strangers = now & (before or frozenset())
    return len(known_strangers) or None


def own_nvml_pid(now: frozenset[int], before: frozenset[int] | None, own_pid: int) -> int | None:
    """The number by which NVML knows our process; None when it cannot be told."""
    if before is None:
        return own_pid if own_pid in now else None
    new = now - before
    if own_pid in new:
        return own_pid
    return next(iter(new)) if len(new) == 1 else None
