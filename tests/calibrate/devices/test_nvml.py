"""NVML: packages that answer to its name, errors, and the card's sensors in physical units."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml as real_pynvml
import pytest

from tunecast.calibrate import environment
from tunecast.calibrate.devices import nvml as nvml_module
from tunecast.calibrate.devices import nvml_card
from tunecast.calibrate.devices.nvml import (
    Nvml,
    NvmlPackageError,
    NvmlUnavailableError,
    check_pynvml,
    import_pynvml,
    package_advice,
    translate,
)
from tunecast.calibrate.devices.nvml_card import (
    CardAddress,
    NvmlCard,
    find_card,
    occupations,
    other_processes,
    own_nvml_pid,
)
from tunecast.calibrate.devices.pcie_watch import PcieWatch
from tunecast.catalogs.errors import DeviceError

GIB = 1024**3
MIB = 1024**2
A100_UUID = "11111111-2222-3333-4444-555555555555"


def card_of(fake: Any, uuid: str = A100_UUID, pci: str | None = None) -> NvmlCard:
    card = find_card(Nvml.start(fake.pynvml), CardAddress(uuid=uuid, pci_bus_id=pci))
    assert card is not None
    return card


def names_in_source(*modules: ModuleType) -> set[str]:
    """Every string in these sources that looks like a function or constant of NVML."""
    strings: set[str] = set()
    for module in modules:
        tree = ast.parse(Path(module.__file__ or "").read_text())
        strings |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {s for s in strings if s.startswith(("nvml", "NVML_")) and s.isidentifier() and "Reason" not in s} - {"nvml"}


def test_every_nvml_name_in_the_source_exists_in_the_real_package():
    names = names_in_source(nvml_module, nvml_card) - {"nvmlDeviceGet"}
    assert len(names) > 25
    assert [name for name in sorted(names) if not hasattr(real_pynvml, name)] == []
    for suffix, _word in nvml_card.THROTTLE_BITS:
        assert hasattr(real_pynvml, f"nvmlClocksEventReason{suffix}")
        assert hasattr(real_pynvml, f"nvmlClocksThrottleReason{suffix}")
    for kind in ("Curr", "Max"):
        assert hasattr(real_pynvml, f"nvmlDeviceGet{kind}PcieLinkGeneration")
        assert hasattr(real_pynvml, f"nvmlDeviceGet{kind}PcieLinkWidth")


def test_value_fields_follow_nvmls_numbers():
    members = {name for name, _type in real_pynvml.c_nvmlValue_t._fields_}
    assert set(nvml_card.VALUE_FIELDS) <= members
    for name, member in (
        ("DOUBLE", "dVal"),
        ("UNSIGNED_INT", "uiVal"),
        ("UNSIGNED_LONG", "ulVal"),
        ("UNSIGNED_LONG_LONG", "ullVal"),
        ("SIGNED_LONG_LONG", "sllVal"),
        ("SIGNED_INT", "siVal"),
    ):
        assert nvml_card.VALUE_FIELDS[getattr(real_pynvml, f"NVML_VALUE_TYPE_{name}")] == member


def test_fatal_errors_are_classes_of_the_real_package():
    for name in nvml_module.REMEDIES:
        assert issubclass(getattr(real_pynvml, f"NVMLError_{name}"), real_pynvml.NVMLError)


# -- packages --------------------------------------------------------------------------------------------------


def test_the_real_package_is_accepted():
    assert import_pynvml() is real_pynvml


def test_without_package_the_install_command_is_given(monkeypatch):
    def refuse(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(nvml_module, "importlib", SimpleNamespace(import_module=refuse))
    with pytest.raises(NvmlPackageError, match="pip install nvidia-ml-py"):
        Nvml.start()


def test_old_fork_is_refused_with_the_repair_command():
    fork = ModuleType("pynvml")
    fork.NVMLError = Exception
    with pytest.raises(NvmlPackageError, match=r"lacks _nvmlGetFunctionPointer.*pip uninstall -y pynvml nvidia-ml-py3"):
        check_pynvml(fork)


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"nvidia-ml-py": "13.0"}, None),
        ({"nvidia-ml-py": "13.0", "pynvml": "13.0.1"}, "pynvml 13.0.1 is deprecated"),
        ({"nvidia-ml-py3": "7.352.0"}, "old fork"),
        ({"nvidia-ml-py": "13.0", "nvidia-ml-py3": "7.352.0"}, "old fork"),
        ({}, "not installed"),
    ],
)
def test_advice_names_which_of_the_three_packages_is_wrong(monkeypatch, installed, expected):
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(environment.metadata, "version", version)
    advice = package_advice()
    assert advice is None if expected is None else expected in (advice or "")
    assert advice is None or "pip " in advice


def test_shim_warning_does_not_reach_the_user(monkeypatch):
    import warnings

    def warn(name: str) -> ModuleType:
        warnings.warn("The pynvml package is deprecated.", FutureWarning, stacklevel=2)
        return real_pynvml

    monkeypatch.setattr(nvml_module, "importlib", SimpleNamespace(import_module=warn))
    assert import_pynvml() is real_pynvml  # warnings are errors in this test run


# -- session and errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scenario", "word"), [("no_driver", "not loaded"), ("no_library", "--gpus all")])
def test_missing_driver_or_library_is_unavailable_with_a_remedy(machine, scenario, word):
    with pytest.raises(NvmlUnavailableError, match=word):
        Nvml.start(machine(scenario).pynvml)


def test_session_is_a_context_and_shuts_down_once(machine):
    fake = machine("healthy")
    with Nvml.start(fake.pynvml) as session:
        assert session.driver_version() == "580.95.05"
        assert session.cuda_driver_version() == "13.0"
    session.close()
    assert fake.calls.count("nvmlShutdown") == 1


def test_shutdown_survives_a_lost_card(machine):
    fake = machine("healthy")
    session = Nvml.start(fake.pynvml)
    fake.lose()
    session.close()
    assert fake.calls[-1] == "nvmlShutdown"


def test_lost_card_raises_from_every_sensor(machine):
    fake = machine("healthy")
    card = card_of(fake)
    fake.lose()
    for read in (card.sm_clock_mhz, card.power_w, card.temperature_c, card.processes, card.sensors):
        with pytest.raises(DeviceError, match=r"GpuIsLost.*Xid"):
            read()


def test_required_call_translates_every_error(machine):
    session = Nvml.start(machine("healthy").pynvml)
    with pytest.raises(DeviceError, match="nvmlDeviceGetHandleByUUID with NotFound"):
        session.required("nvmlDeviceGetHandleByUUID", "GPU-nobody")
    with pytest.raises(DeviceError, match="has no nvmlFromTheFuture"):
        session.required("nvmlFromTheFuture")
    assert session.optional("nvmlFromTheFuture") is None
    assert session.optional("nvmlDeviceGetHandleByUUID", "GPU-nobody") is None


def test_errors_without_a_remedy_keep_nvmls_own_words():
    assert "Insufficient Permissions" in str(translate(real_pynvml.NVMLError_NoPermission(), "a call"))


def test_a_call_with_wrong_arguments_fails_as_on_hardware(machine):
    with pytest.raises(TypeError):
        machine("healthy").pynvml.nvmlDeviceGetName("handle", "too", "many")


# -- finding the card ------------------------------------------------------------------------------------------


def test_what_an_old_drivers_library_lacks_is_a_reading_less(machine):
    """nvidia-ml-py 13 raises an error that is no NVMLError for functions of a later version than the driver's."""
    fake = machine("healthy")

    class MismatchError(Exception):
        pass

    def lacks(_handle):
        raise MismatchError("Unversioned function called and the pyNVML version does not match the NVML lib version")

    fake.pynvml.NVMLLibraryMismatchError = MismatchError
    fake.pynvml.nvmlDeviceGetComputeRunningProcesses = lacks
    with Nvml.start(fake.pynvml) as nvml:
        assert all(found.pids is None for found in occupations(nvml).values())


def test_a_lost_board_does_not_hide_another(machine):
    fake = machine("two_boards")
    uuid_before = fake.pynvml.nvmlDeviceGetUUID

    def uuid_of(handle):
        if handle is fake.scenario.boards[1]:
            raise fake.pynvml.NVMLError_GpuIsLost()
        return uuid_before(handle)

    fake.pynvml.nvmlDeviceGetUUID = uuid_of
    with Nvml.start(fake.pynvml) as nvml:
        assert set(occupations(nvml)) == {f"GPU-{fake.scenario.boards[0].uuid}"}


def test_card_is_found_by_uuid_whatever_its_index(machine):
    fake = machine("two_boards")
    assert card_of(fake, "bbbbbbbb-0000-0000-0000-000000000000").power_w() == 70.0
    assert card_of(fake, "aaaaaaaa-0000-0000-0000-000000000000").power_w() == 50.0


def test_card_is_found_by_pci_address_and_unknown_address_is_none(machine):
    fake = machine("healthy")
    assert card_of(fake, "", "00000000:3B:00.0").uuid == f"GPU-{A100_UUID}"
    session = Nvml.start(fake.pynvml)
    assert find_card(session, CardAddress(uuid="nobody", pci_bus_id="00000000:FF:00.0")) is None
    assert find_card(session, CardAddress(uuid=None, pci_bus_id=None)) is None


def test_mig_instance_has_its_own_memory_and_the_boards_power(machine, synthetic):
    card = card_of(machine("mig"), synthetic.MIG_UUID)
    assert card.is_mig_instance
    assert (card.mig_enabled(), card.mig_profile()) == (True, "3g.40gb")
    assert card.memory_total_bytes() == 40_192 * MIB
    assert card.power_w() == 312.5
    assert card.temperature_c() == 61.0


# -- sensors ---------------------------------------------------------------------------------------------------


def test_healthy_readings_are_in_physical_units(machine):
    card = card_of(machine("healthy"))
    sensors = card.sensors(other_processes=0, with_pcie_throughput=True)
    assert sensors.sm_clock_mhz == 1410.0
    assert sensors.memory_clock_mhz == 1593.0
    assert sensors.power_w == 312.5  # the instantaneous field, not the averaged 300
    assert sensors.temperature_c == 61.0
    assert sensors.utilization_frac == pytest.approx(0.97)
    assert sensors.throttle_reasons == ()
    assert (sensors.pcie_gen, sensors.pcie_width) == (3, 8)
    assert sensors.pcie_rx_bytes_per_s == pytest.approx(21e9)
    assert sensors.pcie_tx_bytes_per_s == pytest.approx(4e6)
    assert sensors.energy_j == 7250.0
    assert sensors.memory_used_bytes == 0  # version 2 leaves the driver's own out
    assert sensors.other_processes == 0


def test_healthy_facts(machine):
    card = card_of(machine("healthy"))
    assert card.name == "NVIDIA A100-SXM4-80GB"
    assert (card.power_limit_w(), card.default_power_limit_w()) == (400.0, 400.0)
    assert (card.max_sm_clock_mhz(), card.max_memory_clock_mhz()) == (1410.0, 1593.0)
    assert card.pcie_link(maximum=True) == (4, 16)
    assert (card.ecc(), card.mig_enabled(), card.mig_profile()) == (True, False, None)
    assert card.nvlink_links() == 12
    assert card.memory_total_bytes() == 81_920 * MIB


def test_pcie_counters_are_read_on_request_only(machine):
    fake = machine("healthy")
    sensors = card_of(fake).sensors()
    assert (sensors.pcie_rx_bytes_per_s, sensors.pcie_tx_bytes_per_s) == (None, None)
    assert "nvmlDeviceGetPcieThroughput" not in fake.calls


def test_a_card_without_sensors_gives_none_everywhere_never_zero(machine):
    card = card_of(machine("unsupported_sensors"))
    sensors = card.sensors(with_pcie_throughput=True)
    assert {getattr(sensors, name) for name in sensors.__slots__} == {None}
    facts = (card.ecc(), card.mig_enabled(), card.nvlink_links(), card.processes(), card.memory_total_bytes())
    assert facts == (None,) * 5
    assert (card.power_limit_w(), card.max_sm_clock_mhz(), card.pcie_link(maximum=True)) == (None, None, (None, None))


@pytest.mark.parametrize("function", ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"])
def test_each_missing_sensor_leaves_the_others(machine, function):
    fake = machine("healthy")
    fake.scenario.unsupported = frozenset({function, "nvmlDeviceGetFieldValues"})
    sensors = card_of(fake).sensors()
    assert (sensors.power_w is None) == (function == "nvmlDeviceGetPowerUsage")
    assert (sensors.energy_j is None) == (function == "nvmlDeviceGetTotalEnergyConsumption")
    assert sensors.sm_clock_mhz == 1410.0


def test_older_library_and_driver_fall_back_to_older_calls(machine):
    fake = machine("old_driver_names")
    fake.scenario.boards[0].throttle_mask = 0x8
    card = card_of(fake)
    sensors = card.sensors()
    assert sensors.throttle_reasons == ("hw_slowdown",)
    assert sensors.power_w == 300.0
    assert sensors.temperature_c == 61.0
    assert sensors.memory_used_bytes == 600 * MIB
    assert card.power_limit_w() == 400.0
    assert "nvmlDeviceGetFieldValues" not in fake.calls


def test_constants_under_their_old_names_still_decode(machine):
    fake = machine("throttled")
    for suffix, _word in nvml_card.THROTTLE_BITS:
        delattr(fake.pynvml, f"nvmlClocksEventReason{suffix}")
    assert card_of(fake).throttle_reasons() == ("sw_power_cap", "hw_thermal_slowdown")


def test_bits_without_any_name_are_left_out(machine):
    fake = machine("throttled")
    for prefix in ("nvmlClocksEventReason", "nvmlClocksThrottleReason"):
        delattr(fake.pynvml, f"{prefix}SwPowerCap")
    assert card_of(fake).throttle_reasons() == ("hw_thermal_slowdown",)


def test_field_of_a_driver_without_it_is_none(machine):
    card = card_of(machine("healthy"))
    assert card.field_value("NVML_FI_DEV_NVLINK_LINK_COUNT") is None
    assert card.field_value("NVML_FI_NO_SUCH_FIELD") is None


def test_texts_may_come_as_bytes(machine):
    fake = machine("healthy")
    fake.pynvml.nvmlDeviceGetName.side_effect = lambda _handle: b"Tesla V100"
    fake.pynvml.nvmlSystemGetDriverVersion.side_effect = lambda: b"470.1"
    assert card_of(fake).name == "Tesla V100"
    assert Nvml.start(fake.pynvml).driver_version() == "470.1"


def test_a_card_lost_under_the_pcie_watch_ends_the_watch_quietly(machine):
    fake = machine("healthy")
    card = card_of(fake)
    fake.lose()
    with PcieWatch(card) as watch:
        watch._thread.join(timeout=10.0)
        assert not watch._thread.is_alive()
    assert set(watch.facts().values()) == {None}


# -- whose processes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "before", "have_context", "expected"),
    [
        (None, frozenset(), True, None),  # not readable
        ({42}, frozenset(), True, 0),  # we are listed under our own number
        ({42, 7}, frozenset({7}), True, 1),
        ({7}, frozenset({7}), False, 1),  # before we hold a context every entry is another's
        ({900, 7}, frozenset({7}), True, 1),  # container: the new one is us
        ({900, 901}, frozenset(), True, None),  # two are new: cannot tell
        ({900, 901, 7}, frozenset({7}), True, 1),  # ...but 7 was there before us
        (set(), frozenset(), True, None),  # we hold a context and are not listed: the list is hidden
        (set(), frozenset(), False, 0),
        ({42, 5}, None, True, 1),  # no reading from before, but we know ourselves
        ({900}, None, True, None),
        ({42}, frozenset({42}), True, 1),  # 42 was there before us: a stranger with our number (container)
    ],
)
def test_other_processes(now, before, have_context, expected):
    assert other_processes(now, before, 42, have_context=have_context) == expected


def test_own_number_in_a_container_is_the_new_one():
    assert own_nvml_pid(frozenset({900, 7}), frozenset({7}), 42) == 900
    assert own_nvml_pid(frozenset({900, 42}), frozenset(), 42) == 42
    assert own_nvml_pid(frozenset({900, 901}), frozenset(), 42) is None
    assert own_nvml_pid(frozenset({900}), None, 42) is None
