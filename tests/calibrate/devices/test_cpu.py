"""The CPU as a device: facts, memory, and failures as outcomes."""

import pytest

from tunecast.calibrate.devices import cpu_memory
from tunecast.calibrate.devices.protocol import Sensors, TrialSpec
from tunecast.catalogs.errors import DeviceError, InputError, UnknownNameError
from tunecast.model.units import GIB, KIB, MIB

torch = pytest.importorskip("torch")

from tunecast.calibrate.devices.cpu import CpuBackend, CpuDevice, has_fast_bf16, last_level_cache_bytes  # noqa: E402
from tunecast.calibrate.devices.open import default_device_name, open_device  # noqa: E402


def spec(bench, **params):
    return TrialSpec(bench=bench, params=params, repeats=1, warmup=0)


def test_facts_of_this_machine():
    hardware = CpuDevice().hardware()
    assert (hardware.device, hardware.gpu) == ("cpu", "cpu")
    assert hardware.host["threads"] == torch.get_num_threads()
    assert set(hardware.host) >= {"cores", "fast_bf16", "last_level_cache_bytes", "allocator_keeps_memory"}
    assert hardware.memory_bytes is None or 0 < hardware.memory_bytes < 1 << 50


def test_a_cpu_has_no_card_sensors_and_no_transfers():
    device = CpuDevice()
    assert device.sensors() == Sensors()
    assert not device.supports(spec("transfer", bytes=1, pinned=True, direction="h2d"))
    assert not device.supports(spec("sync"))
    assert device.supports(spec("launch", kernels=5))


def test_a_failure_is_an_outcome():
    result = CpuDevice().run(spec("memory", op="copy", bytes=-64, dtype="fp32"))
    assert result.outcome == "ok"
    result = CpuDevice().run(spec("gemm", m=-1, n=2, k=2, dtype="fp32", layout="nt"))
    assert result.outcome == "error"
    assert "negative" in result.message
    assert "\n" not in result.message


def test_more_than_the_available_memory_is_out_of_memory_not_a_killed_process():
    device = CpuDevice()
    available = device.hardware().memory_bytes
    if available is None:
        pytest.skip("available memory is not told here")
    result = device.run(spec("memory", op="copy", bytes=2 * available + 64 * GIB, dtype="fp32"))
    assert result.outcome == "oom"
    assert device.run(spec("memory", op="copy", bytes=4096, dtype="fp32")).outcome == "ok"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert CpuBackend().is_oom(error) is expected


def test_peak_of_the_resident_set_is_that_of_the_trial():
    """Tensors above 32 MiB are mapped anew whatever the process has freed (glibc's ``M_MMAP_THRESHOLD`` ends there)."""
    backend = CpuBackend()
    big = torch.ones(128 * MIB, dtype=torch.uint8)
    del big
    backend.empty_cache()
    backend.reset_peak_memory()
    start = backend.memory().process_bytes
    if start is None:
        pytest.skip("the kernel does not let this process reset its peak")
    kept = torch.ones(64 * MIB, dtype=torch.uint8)
    grown = backend.memory().process_bytes - start
    assert kept.sum() == 64 * MIB
    assert 56 * MIB <= grown <= 80 * MIB


def test_an_unresettable_peak_is_unknown(monkeypatch):
    monkeypatch.setattr(cpu_memory, "reset_resident_peak", lambda: False)
    backend = CpuBackend()
    backend.reset_peak_memory()
    assert backend.memory().process_bytes is None


def test_timing_is_of_each_call_on_the_given_clock():
    ticks = iter([0.0, 1.0, 1.0, 3.0, 3.0, 6.0])
    assert CpuBackend(clock=lambda: next(ticks)).timed(lambda: None, repeats=2, warmup=1) == ((1.0,), (2.0, 3.0))


def test_cache_and_bf16_from_what_the_kernel_says(tmp_path):
    for index, size in enumerate(("48K", "1024K", "32M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_level_cache_bytes(tmp_path) == 32 * MIB
    assert last_level_cache_bytes(tmp_path / "none") is None
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fpu avx512_bf16 sse\n")
    assert has_fast_bf16(info) is True
    info.write_text("flags\t\t: fpu avx2\n")
    assert has_fast_bf16(info) is False
    assert has_fast_bf16(tmp_path / "none") is None


def test_status_fields(tmp_path):
    status = tmp_path / "status"
    status.write_text("VmPeak:\t  10 kB\nVmHWM:\t  2048 kB\n")
    assert cpu_memory.status_bytes("VmHWM", status) == 2048 * KIB
    assert cpu_memory.status_bytes("VmData", status) is None
    assert cpu_memory.status_bytes("VmHWM", tmp_path / "none") is None


def test_settling_ends_by_its_time():
    assert CpuDevice().settle(0.0) is False


@pytest.mark.parametrize("name", ["gpu", "", "tpu:0", "CPU"])
def test_unknown_devices(name):
    with pytest.raises(InputError, match="cuda:0"):
        open_device(name)


def test_open_by_name():
    assert open_device("cpu").id == "cpu"
    assert open_device("mock:rtx-4090-24gb#7").id == "mock:rtx-4090-24gb#7"
    with pytest.raises(UnknownNameError):
        open_device("mock:no-such-gpu")
    with pytest.raises(InputError, match="only a mock"):
        open_device("cpu", ignore_memory=True)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")
def test_a_gpu_that_is_not_there():
    assert default_device_name() == "cpu"
    with pytest.raises(DeviceError):
        open_device("cuda:0")
