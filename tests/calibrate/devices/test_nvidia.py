"""NvidiaDevice on synthetic machines, healthy and broken, from opening to the last trial."""

from __future__ import annotations

import dataclasses
import getpass
import socket
from types import SimpleNamespace

import pytest
import torch as real_torch

from tunecast.calibrate.devices import nvidia
from tunecast.calibrate.devices.nvidia import list_cuda_devices, open_nvidia
from tunecast.calibrate.devices.nvidia_device import NvidiaDevice
from tunecast.calibrate.devices.nvml import NvmlPackageError
from tunecast.calibrate.devices.open import default_device_name
from tunecast.calibrate.devices.protocol import Device, TrialResult, TrialSpec
from tunecast.calibrate.devices.settle import SettleRule
from tunecast.catalogs.errors import DeviceError, InputError, NotSupportedError

GIB = 1024**3
MIB = 1024**2
GEMM = TrialSpec(bench="gemm", params={"m": 64, "n": 64, "k": 64, "dtype": "bf16", "layout": "nt"}, repeats=3, warmup=1)
TRANSFER = TrialSpec(bench="transfer", params={"bytes": MIB, "pinned": True, "direction": "h2d"}, repeats=1, warmup=0)


def kernel_runner(fake, seconds=1e-3):
    """Measures one kernel that takes this long."""

    def run(spec, backend) -> TrialResult:
        backend.reset_peak_memory()
        warmup_s, samples_s = backend.timed(
            lambda: fake.timeline.issue(seconds), repeats=spec.repeats, warmup=spec.warmup
        )
        return TrialResult(outcome="ok", samples_s=samples_s, warmup_s=warmup_s, memory=backend.memory())

    return run


def failing(error):
    def run(_spec, _backend):
        raise error

    return run


# -- opening ---------------------------------------------------------------------------------------------------


def test_a_device_satisfies_the_protocol(machine, opened):
    device: Device = opened(machine("healthy"))
    assert device.id == "cuda:0"
    for name in ("hardware", "software", "sensors", "supports", "run", "settle", "close"):
        assert callable(getattr(device, name))


def test_hardware_of_a_healthy_card(machine, opened):
    hardware = opened(machine("healthy")).hardware()
    assert hardware.gpu == "a100-sxm4-80gb"
    assert hardware.name == "NVIDIA A100-SXM4-80GB"
    assert hardware.memory_bytes == 85_097_971_712
    assert (hardware.multiprocessors, hardware.compute_capability) == (108, "8.0")
    assert (hardware.driver, hardware.cuda) == ("580.95.05", "13.0")
    assert (hardware.power_limit_w, hardware.default_power_limit_w) == (400.0, 400.0)
    assert (hardware.pcie_gen_max, hardware.pcie_width_max, hardware.nvlink_links) == (4, 16, 12)
    assert (hardware.ecc, hardware.mig, hardware.mig_profile) == (True, False, None)


def test_records_carry_neither_host_nor_user_nor_uuid(machine, opened):
    device = opened(machine("healthy"))
    hardware = dataclasses.asdict(device.hardware())
    values = [*hardware.values(), *hardware["host"].values(), *device.software().values()]
    texts = [value for value in values if isinstance(value, str)]
    for secret in (socket.gethostname(), getpass.getuser()):
        assert secret not in texts
    assert not any("11111111-2222" in text or "/home/" in text for text in texts)


def test_software_has_the_versions_that_move_a_result(machine, opened):
    software = opened(machine("healthy")).software()
    assert (software["torch"], software["cuda"]) == ("2.11.0+cu130", "13.0")
    assert (software["driver"], software["cuda_driver"]) == ("580.95.05", "13.0")
    assert {"python", "transformers", "peft", "bitsandbytes", "accelerate", "nvidia-ml-py"} <= set(software)


def test_cuda_order_and_nvml_order_may_differ(machine, opened):
    device = opened(machine("two_boards"), "cuda:0")
    assert device.sensors().power_w == 70.0  # the second board in NVML's order
    assert opened(machine("two_boards"), "cuda:1").sensors().power_w == 50.0


def test_card_is_found_by_pci_address_where_torch_tells_no_uuid(machine, opened):
    assert opened(machine("pci_only")).sensors().power_w == 312.5


def test_unknown_card_has_no_catalog_id(machine, opened):
    fake = machine("healthy")
    fake.scenario.boards[0].name = "NVIDIA Z9000"
    hardware = opened(fake).hardware()
    assert (hardware.gpu, hardware.name) == (None, "NVIDIA Z9000")


def test_no_driver_is_said_in_torchs_words(machine):
    fake = machine("no_driver")
    with pytest.raises(DeviceError, match=r"cuda:0 was asked for.*Found no NVIDIA driver"):
        open_nvidia("cuda:0", torch=fake.torch, pynvml=fake.pynvml)


def test_no_library_is_said_in_nvmls_words_when_torch_is_silent(machine):
    fake = machine("no_library")
    with pytest.raises(DeviceError, match=r"LibraryNotFound.*--gpus all"):
        open_nvidia("cuda:0", torch=fake.torch, pynvml=fake.pynvml)


def test_cuda_that_fails_without_a_reason_points_to_nvidia_smi(machine):
    fake = machine("healthy")
    fake.scenario.cuda_order = ()
    with pytest.raises(DeviceError, match="nvidia-smi"):
        open_nvidia("cuda:0", torch=fake.torch, pynvml=fake.pynvml)
    assert fake.calls[-1] == "nvmlShutdown"


def test_torch_without_cuda_is_named_with_its_version():
    with pytest.raises(DeviceError, match=r"This torch has no CUDA: 2\.13\.0\+cpu"):
        open_nvidia("cuda:0", torch=SimpleNamespace(version=SimpleNamespace(cuda=None), __version__="2.13.0+cpu"))


def test_torch_for_amd_is_refused():
    rocm = SimpleNamespace(version=SimpleNamespace(cuda=None, hip="6.4"), __version__="2.13.0+rocm6.4")
    with pytest.raises(NotSupportedError, match="AMD"):
        open_nvidia("cuda:0", torch=rocm)


def test_missing_torch_names_the_extra(monkeypatch):
    def refuse(name):
        raise ImportError(name)

    missing = SimpleNamespace(import_module=refuse, util=SimpleNamespace(find_spec=lambda _name: None))
    monkeypatch.setattr(nvidia, "importlib", missing)
    with pytest.raises(DeviceError, match=r"tunecast\[calibrate\]"):
        open_nvidia("cuda:0")
    assert list_cuda_devices() == []


def test_wrong_pynvml_package_is_an_error_with_a_command(machine):
    with pytest.raises(NvmlPackageError, match="pip uninstall -y pynvml nvidia-ml-py3"):
        open_nvidia("cuda:0", torch=machine("healthy").torch, pynvml=SimpleNamespace(NVMLError=Exception))


def test_index_out_of_range_says_what_there_is(machine, monkeypatch):
    fake = machine("two_boards")
    with pytest.raises(DeviceError, match=r"cuda:2 was asked for, but torch sees only cuda:0, cuda:1\.$"):
        open_nvidia("cuda:2", torch=fake.torch, pynvml=fake.pynvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES=1,0"):
        open_nvidia("cuda:7", torch=fake.torch, pynvml=fake.pynvml)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cpu", ""])
def test_malformed_device_names_are_input_errors(name):
    with pytest.raises(InputError, match="cuda:0"):
        open_nvidia(name)


def test_list_does_not_touch_cuda_where_there_is_none(machine):
    fake = machine("no_driver")
    assert list_cuda_devices(fake.torch) == []
    assert fake.torch.cuda.initialized is False
    assert list_cuda_devices(real_torch) == [] or real_torch.version.cuda


def test_list_names_each_device(machine):
    devices = list_cuda_devices(machine("two_boards").torch)
    assert [(device.id, device.name) for device in devices] == [
        ("cuda:0", "NVIDIA A100-SXM4-80GB"),
        ("cuda:1", "NVIDIA A100-SXM4-80GB"),
    ]
    assert devices[0].memory_bytes == 85_097_971_712
    assert isinstance(list_cuda_devices(), list)


def test_a_gpu_that_torch_cannot_use_is_never_left_for_the_processor(machine, monkeypatch):
    """A driver older than torch's CUDA, or a torch built without it: a user who rented a GPU wants neither."""
    fake, healthy = machine("no_driver"), machine("healthy")
    told = nvidia.unusable_gpu(fake.torch, healthy.pynvml)
    assert told.startswith("This machine has a GPU (NVIDIA A100-SXM4-80GB), but torch 2.11.0+cu130 cannot use it: ")
    assert "Found no NVIDIA driver" in told
    assert "--force-reinstall torch --index-url https://download.pytorch.org/whl/cu128" in told
    plain = SimpleNamespace(__version__="2.13.0+cpu", version=SimpleNamespace(cuda=None, hip=None))
    assert "(2.13.0+cpu) is built without CUDA" in nvidia.unusable_gpu(plain, healthy.pynvml)
    monkeypatch.setattr(nvidia, "list_cuda_devices", list)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert nvidia.unusable_gpu(fake.torch, healthy.pynvml) is None, "hidden on purpose"
    monkeypatch.setattr(nvidia, "unusable_gpu", lambda: told)
    with pytest.raises(DeviceError, match="--device cpu measures the processor in its place"):
        default_device_name()


def test_without_a_gpu_or_its_driver_the_processor_is_the_default(machine, monkeypatch):
    none_there = nvidia.unusable_gpu(machine("no_driver").torch, machine("no_library").pynvml)
    assert none_there is None
    monkeypatch.setattr(nvidia, "list_cuda_devices", list)
    monkeypatch.setattr(nvidia, "unusable_gpu", lambda: none_there)
    assert default_device_name() == "cpu"


def test_a_card_too_old_for_this_torch_is_said_before_anything_runs(machine):
    fake = machine("healthy")
    too_new, too_old = ["sm_100", "sm_120a", "sm_90"], ["sm_70", "sm_75", "compute_90"]
    for built, wheels in ((too_new, "cu126"), (too_old, "cu128")):
        fake.torch.cuda.get_arch_list = lambda built=built: built
        with pytest.raises(DeviceError, match=rf"of compute capability 8\.0, .* has kernels for {built[0]}.*{wheels}"):
            open_nvidia("cuda:0", torch=fake.torch, pynvml=fake.pynvml)
    for built in (["sm_75", "sm_80"], ["sm_70", "compute_75"], []):
        fake.torch.cuda.get_arch_list = lambda built=built: built
        open_nvidia("cuda:0", torch=fake.torch, pynvml=fake.pynvml, torch_device="cpu").close()


def test_a_context_that_cannot_start_is_one_sentence(machine):
    fake = machine("healthy")

    def refuse(_index):
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    fake.torch.cuda.set_device = fake.torch.cuda.get_device_properties = refuse
    with pytest.raises(DeviceError, match=r"cuda:0 cannot be opened \(CUDA error: out of memory\): `nvidia-smi`"):
        open_nvidia("cuda:0", torch=fake.torch, pynvml=fake.pynvml)
    with pytest.raises(DeviceError, match="cuda:0 cannot be opened"):
        list_cuda_devices(fake.torch)


@pytest.mark.parametrize("package", ["peft", "bitsandbytes.nn"])
def test_a_package_that_every_step_needs_ends_the_calibration(machine, opened, package):
    device = opened(machine("healthy"), runner=failing(ModuleNotFoundError("No module", name=package)))
    with pytest.raises(ModuleNotFoundError):
        device.run(GEMM)
    other = opened(machine("healthy"), runner=failing(ModuleNotFoundError("No module", name="causal_conv1d")))
    assert other.run(GEMM).outcome == "error"


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_torch_may_write_the_uuid_with_or_without_prefix(prefix):
    address = nvidia.card_address(SimpleNamespace(uuid=f"{prefix}11111111-2222"), 0)
    assert address.uuids == ("MIG-11111111-2222", "GPU-11111111-2222")
    assert address.pci_bus_id is None


# -- measuring -------------------------------------------------------------------------------------------------


def test_a_trial_has_samples_memory_and_sensors_on_both_sides(machine, opened):
    fake = machine("healthy")
    result = opened(fake, runner=kernel_runner(fake)).run(GEMM)
    assert result.outcome == "ok"
    assert result.samples_s == pytest.approx([1e-3] * 3, rel=0.01)
    assert len(result.warmup_s) == 1
    assert result.memory.process_bytes == 500 * MIB
    for sensors in (result.sensors_before, result.sensors_after):
        assert sensors is not None
        assert sensors.power_w == 312.5
        assert sensors.other_processes == 0
    assert result.extra["clocks_disagree"] is False


def test_facts_of_one_trial_do_not_leak_into_the_next(machine, opened):
    fake = machine("healthy")
    device = opened(fake, runner=lambda _spec, backend: TrialResult(outcome="ok", extra=dict(backend.extra)))
    device.backend.extra["cold_proved"] = True
    assert device.run(GEMM).extra == {}


def test_a_transfer_is_watched_on_the_pcie_counters(machine, opened):
    fake = machine("healthy")
    result = opened(fake, runner=kernel_runner(fake)).run(TRANSFER)
    assert result.extra["pcie_rx_peak_bytes_per_s"] == pytest.approx(21e9)
    assert result.extra["pcie_tx_peak_bytes_per_s"] == pytest.approx(4e6)
    assert (result.extra["pcie_gen_peak"], result.extra["pcie_width_peak"]) == (3, 8)


def test_pcie_counters_that_are_unsupported_are_null_not_zero(machine, opened):
    fake = machine("unsupported_sensors")
    extra = opened(fake, runner=kernel_runner(fake)).run(TRANSFER).extra
    assert (extra["pcie_rx_peak_bytes_per_s"], extra["pcie_gen_peak"]) == (None, None)


def test_a_card_without_sensors_is_measured_all_the_same(machine, opened):
    fake = machine("unsupported_sensors")
    device = opened(fake, runner=kernel_runner(fake))
    result = device.run(GEMM)
    assert result.outcome == "ok"
    assert result.samples_s == pytest.approx([1e-3] * 3, rel=0.01)
    assert result.memory.process_bytes is None
    assert device.flags() == ()
    assert device.hardware().power_limit_w is None


def test_without_nvml_the_card_is_measured_and_flagged(machine, opened):
    fake = machine("sandbox_without_nvml")
    device = opened(fake, runner=kernel_runner(fake), rule=SettleRule(size=8))
    result = device.run(TRANSFER)
    assert result.outcome == "ok"
    assert result.sensors_after is not None
    assert result.sensors_after.power_w is None
    assert result.extra["pcie_rx_peak_bytes_per_s"] is None
    assert device.flags() == ("no_nvml",)
    assert device.hardware().gpu == "a100-sxm4-80gb"
    assert (device.hardware().driver, device.software()["driver"]) == (None, None)
    assert device.settle(30.0) is True  # by its pace alone


def test_out_of_memory_is_an_outcome_and_the_next_trial_runs(machine, opened):
    fake = machine("healthy")
    held = []

    def too_much(_spec, backend):
        fake.torch.cuda.allocate(60 * GIB)
        held.append(1)
        try:
            fake.torch.cuda.allocate(60 * GIB)
        finally:
            fake.torch.cuda.free(60 * GIB)

    device = opened(fake, runner=too_much)
    result = device.run(GEMM)
    assert held
    assert result.outcome == "oom"
    assert "Tried to allocate 60.00 GiB" in result.message
    assert result.sensors_after is not None
    assert fake.torch.cuda.reserved_bytes == 0  # the cache went back to the card
    device._runner = kernel_runner(fake)
    assert device.run(GEMM).outcome == "ok"


def test_memory_of_a_failed_trial_is_freed_before_the_next(machine, opened):
    import weakref

    class Tensor:
        pass

    alive = []

    def hold_and_fail(_spec, _backend):
        tensor = Tensor()
        tensor.graph = tensor  # autograd leaves cycles behind, too
        alive.append(weakref.ref(tensor))
        raise real_torch.cuda.OutOfMemoryError("CUDA out of memory")

    opened(machine("healthy"), runner=hold_and_fail).run(GEMM)
    assert alive[0]() is None


def test_an_outcome_that_the_bench_caught_itself_is_cleaned_up_too(machine, opened):
    fake = machine("healthy")
    device = opened(fake, runner=lambda _spec, _backend: TrialResult(outcome="oom", message="caught inside"))
    emptied = fake.torch.cuda.emptied
    assert device.run(GEMM).message == "caught inside"
    assert fake.torch.cuda.emptied == emptied + 1


@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), ImportError("no bitsandbytes"), KeyError("x")])
def test_other_failures_are_recorded_with_type_and_message(machine, opened, error):
    result = opened(machine("healthy"), runner=failing(error)).run(GEMM)
    assert result.outcome == "error"
    assert result.message.startswith(type(error).__name__)


def test_our_own_errors_are_not_hidden_in_an_outcome(machine, opened):
    with pytest.raises(InputError, match="rank"):
        opened(machine("healthy"), runner=failing(InputError("rank 0"))).run(GEMM)


def test_a_card_lost_in_the_middle_of_a_trial_is_a_device_error(machine, opened):
    fake = machine("healthy")

    def lose(_spec, backend):
        backend.timed(lambda: fake.timeline.issue(1e-3), repeats=2, warmup=0)
        fake.lose()
        backend.synchronize()

    device = opened(fake, runner=lose)
    with pytest.raises(DeviceError, match=r"cuda:0 stopped working during gemm.*unspecified launch failure"):
        device.run(GEMM)
    device.close()  # works on a lost card


def test_a_card_lost_unnoticed_shows_in_the_sensors_after(machine, opened):
    fake = machine("healthy")

    def lose_quietly(_spec, _backend):
        fake.lose()
        return TrialResult(outcome="ok")

    with pytest.raises(DeviceError, match="GpuIsLost"):
        opened(fake, runner=lose_quietly).run(TRANSFER)


def test_events_that_contradict_the_clock_flag_the_record(machine, opened):
    fake = machine("events_run_slow")
    device = opened(fake, runner=kernel_runner(fake, 10e-3))
    assert device.run(GEMM).extra["clocks_disagree"] is True
    assert device.flags() == ("clocks_disagree",)


@pytest.mark.parametrize(
    ("bench", "params"),
    [
        ("gemm", {"m": 32, "n": 32, "k": 32, "dtype": "bf16", "layout": "nt"}),
        ("memory", {"op": "copy", "bytes": 64 * 1024, "dtype": "bf16"}),
        ("launch", {"kernels": 20}),
        ("sync", {}),
        ("transfer", {"bytes": MIB, "pinned": False, "direction": "h2d"}),
        ("loss", {"tokens": 4, "vocab": 64, "dtype": "bf16"}),
    ],
)
def test_the_shared_benchmarks_run_through_the_cuda_backend(machine, opened, bench, params):
    fake = machine("healthy", real_time=True)
    fake.scenario.boards[0].l2_bytes = MIB // 4
    result = opened(fake).run(TrialSpec(bench=bench, params=params, repeats=3, warmup=1))
    assert (result.outcome, result.message) == ("ok", "")
    assert (len(result.samples_s), len(result.warmup_s)) == (3, 1)
    assert all(seconds > 0 for seconds in result.samples_s)
    assert result.sensors_after is not None


def test_a_bench_that_does_not_exist_is_unsupported(machine, opened):
    result = opened(machine("healthy")).run(TrialSpec(bench="astrology", params={}, repeats=1, warmup=0))
    assert result.outcome == "unsupported"


# -- flags and whose memory ------------------------------------------------------------------------------------


def test_a_throttled_card_is_measured_and_flagged(machine, opened):
    fake = machine("throttled")
    device = opened(fake, runner=kernel_runner(fake))
    result = device.run(GEMM)
    assert result.sensors_after is not None
    assert result.sensors_after.throttle_reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert device.flags() == ("power_capped", "power_limit_lowered", "throttled")


def test_a_shared_card_is_measured_and_flagged(machine, opened):
    fake = machine("shared")
    device = opened(fake, runner=kernel_runner(fake))
    result = device.run(GEMM)
    assert result.sensors_before is not None
    assert result.sensors_before.other_processes == 1
    assert result.sensors_before.memory_used_bytes == 9 * GIB + 500 * MIB
    assert result.memory.process_bytes == 500 * MIB  # not the neighbour's
    assert device.flags() == ("shared_gpu",)


def test_process_numbers_of_a_container_are_told_apart(machine, opened):
    fake = machine("container")
    device = opened(fake, runner=kernel_runner(fake))
    fake.torch.cuda.allocate(GIB)
    result = device.run(GEMM)
    assert result.sensors_after is not None
    assert result.sensors_after.other_processes == 1
    assert result.memory.process_bytes == GIB + 500 * MIB


@pytest.mark.parametrize("scenario", ["container_hides_processes", "bytes_hidden"])
def test_where_entries_are_hidden_the_growth_of_the_card_is_our_memory(machine, opened, scenario):
    fake = machine(scenario)
    device = opened(fake, runner=kernel_runner(fake))
    fake.torch.cuda.allocate(GIB)
    if scenario == "bytes_hidden":
        fake.used_bytes = lambda _board: fake.own_bytes()
    assert device.run(GEMM).memory.process_bytes == GIB + 500 * MIB
    expected = {"container_hides_processes": None, "bytes_hidden": 0}[scenario]
    assert device.sensors().other_processes == expected


def test_without_a_reading_from_before_hidden_memory_is_unknown(machine, opened):
    fake = machine("container_hides_processes")
    fake.torch.cuda.set_device(0)  # this process already had a context: no clean reading is possible
    assert opened(fake, runner=kernel_runner(fake)).run(GEMM).memory.process_bytes is None


@pytest.mark.parametrize("scenario", ["mig", "mig_old_cuda"])
def test_a_mig_instance_is_no_catalog_card_and_flagged(machine, opened, scenario, monkeypatch, synthetic):
    fake = machine(scenario)
    if scenario == "mig_old_cuda":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"MIG-{synthetic.MIG_UUID}")
    device = opened(fake, runner=kernel_runner(fake))
    hardware = device.hardware()
    assert (hardware.gpu, hardware.mig, hardware.mig_profile) == (None, True, "3g.40gb")
    assert hardware.memory_bytes == 40_192 * MIB
    assert device.flags() == ("mig",)
    assert device.run(GEMM).memory.process_bytes == 500 * MIB


def test_visible_devices_that_are_no_mig_instances_are_left_alone(machine, opened, monkeypatch):
    fake = machine("healthy")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert opened(fake).hardware().gpu == "a100-sxm4-80gb"


# -- what the card can run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "turing", "ampere"),
    [
        ({"dtype": "fp16"}, True, True),
        ({"dtype": "bf16"}, False, True),
        ({"dtype": "fp8"}, False, False),
        ({"run": {"dtype": "fp16", "precision": "bf16-autocast"}}, False, True),
        ({"run": {"dtype": "fp16", "precision": "fp16-autocast", "adapter_dtype": "fp32"}}, True, True),
        ({}, True, True),
    ],
)
def test_dtypes_need_hardware(machine, opened, params, turing, ampere):
    spec = TrialSpec(bench="step", params=params, repeats=1, warmup=0)
    fake = machine("healthy")
    assert opened(fake).supports(spec) is ampere
    fake.scenario.boards[0].capability = (7, 5)
    assert opened(fake).supports(spec) is turing


@pytest.mark.parametrize(("scenario", "enough"), [("healthy", False), ("two_boards", True)])
def test_collectives_need_enough_cards(machine, opened, scenario, enough):
    spec = TrialSpec(bench="collective", params={"op": "all_reduce", "world_size": 2}, repeats=1, warmup=0)
    device: NvidiaDevice = opened(machine(scenario))
    assert device.supports(spec) is (enough and real_torch.distributed.is_available())


@pytest.mark.parametrize(("scenario", "peers"), [("healthy", 1), ("two_boards", 2)])
def test_peers_are_the_gpus_of_the_same_kind(machine, opened, scenario, peers):
    fake = machine(scenario)
    device: NvidiaDevice = opened(fake)
    assert device.peers() == peers
    fake.scenario.boards = [
        dataclasses.replace(board, name=f"Card {i}") for i, board in enumerate(fake.scenario.boards)
    ]
    assert device.peers() == 1
