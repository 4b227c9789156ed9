"""CudaBackend on a device with a clock of its own: times, memory views, and which errors mean what."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tunecast.calibrate.devices.cuda_backend import CudaBackend, holds_context

MIB = 1024**2
GIB = 1024**3


def backend_of(fake, process_bytes=lambda: None) -> CudaBackend:
    fake.torch.cuda.set_device(0)
    return CudaBackend(fake.torch, 0, process_bytes=process_bytes, torch_device="cpu", clock=fake.timeline)


# -- time ------------------------------------------------------------------------------------------------------


def test_samples_are_what_a_call_costs_on_a_busy_device(machine):
    fake = machine("healthy")
    warmup_s, samples_s = backend_of(fake).timed(lambda: fake.timeline.issue(2e-3), repeats=5, warmup=2)
    assert len(warmup_s) == 2
    assert samples_s[1:] == pytest.approx([2e-3] * 4, rel=1e-9)
    assert samples_s[0] == pytest.approx(2e-3 + 5e-6, rel=1e-6)  # the first call also waits for its own launch


def test_a_host_bound_call_costs_what_the_host_takes(machine):
    fake = machine("healthy")
    _, samples_s = backend_of(fake).timed(lambda: fake.timeline.issue(1e-6, launch_s=50e-6), repeats=4, warmup=0)
    assert samples_s == pytest.approx([51e-6, 50e-6, 50e-6, 50e-6], rel=1e-6)


def test_a_host_bound_call_of_a_fed_device_costs_what_the_device_takes(machine):
    fake = machine("healthy")
    backend = backend_of(fake)

    def sample():
        for _ in range(20):
            fake.timeline.issue(10e-6, launch_s=60e-6)

    _, samples_s = backend.timed(sample, repeats=5, warmup=1, fed=True)
    assert samples_s == pytest.approx([200e-6] * 5, rel=1e-6)
    assert backend.extra["lead_s"] > 20 * 60e-6
    _, plain_s = backend.timed(sample, repeats=5, warmup=1)
    assert plain_s[1:] == pytest.approx([1200e-6] * 4, rel=0.02)


def test_a_device_bound_call_is_timed_back_to_back_fed_or_not(machine):
    """Waiting between calls would let a card that is held back by its power limit recover."""
    fake = machine("healthy")
    backend = backend_of(fake)
    _, samples_s = backend.timed(lambda: fake.timeline.issue(2e-3), repeats=5, warmup=2, fed=True)
    assert samples_s[1:] == pytest.approx([2e-3] * 4, rel=1e-9)
    assert "lead_s" not in backend.extra
    assert backend.extra["wall_s"] == pytest.approx(5 * 2e-3, rel=0.01)


def test_events_agree_with_the_wall_clock_and_the_record_says_how_well(machine):
    fake = machine("healthy")
    backend = backend_of(fake)
    backend.timed(lambda: fake.timeline.issue(10e-3), repeats=10, warmup=1)
    assert backend.extra["wall_s"] == pytest.approx(0.1, rel=1e-3)
    assert 0.0 <= backend.extra["events_vs_wall_frac"] < 0.001
    assert backend.extra["clocks_disagree"] is False


def test_events_that_contradict_the_wall_clock_are_named(machine):
    fake = machine("events_run_slow")
    backend = backend_of(fake)
    backend.timed(lambda: fake.timeline.issue(10e-3), repeats=10, warmup=0)
    assert backend.extra["events_vs_wall_frac"] == pytest.approx(0.5, abs=0.01)
    assert backend.extra["clocks_disagree"] is True
    fake.scenario.event_skew = 1.0
    backend.timed(lambda: fake.timeline.issue(10e-3), repeats=10, warmup=0)
    assert backend.extra["clocks_disagree"] is True  # one bad timing marks the whole trial


def test_a_few_microseconds_of_latency_are_no_disagreement(machine):
    fake = machine("healthy")
    backend = backend_of(fake)
    backend.timed(lambda: fake.timeline.issue(1e-6), repeats=1, warmup=0)
    assert backend.extra["events_vs_wall_frac"] > 0.05
    assert backend.extra["clocks_disagree"] is False


def test_no_repeats_give_no_samples_and_no_verdict(machine):
    fake = machine("healthy")
    backend = backend_of(fake)
    assert backend.timed(lambda: None, repeats=0, warmup=0) == ((), ())
    assert backend.extra == {}


def test_synchronize_waits_for_the_device(machine):
    fake = machine("healthy")
    backend = backend_of(fake)
    before_s = fake.timeline()
    fake.timeline.issue(1.0)
    assert fake.timeline() - before_s < 0.01
    backend.synchronize()
    assert fake.timeline() - before_s >= 1.0


def test_out_of_memory_passes_through_a_timing(machine):
    fake = machine("healthy")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        backend_of(fake).timed(lambda: fake.torch.cuda.allocate(200 * GIB), repeats=3, warmup=1)


# -- memory ----------------------------------------------------------------------------------------------------


def test_peaks_are_since_the_reset_and_process_adds_what_the_allocator_does_not_hold(machine):
    fake = machine("healthy")
    cuda = fake.torch.cuda
    backend = backend_of(fake, process_bytes=fake.own_bytes)
    cuda.allocate(9 * GIB)
    cuda.free(9 * GIB)
    backend.empty_cache()
    backend.reset_peak_memory()
    cuda.allocate(2 * GIB)
    cuda.allocate(1 * GIB)
    cuda.free(1 * GIB)
    reading = backend.memory()
    assert reading.allocated_bytes == 3 * GIB
    assert reading.reserved_bytes == 3 * GIB
    assert reading.process_bytes == 3 * GIB + 500 * MIB
    assert backend.extra["context_bytes"] == 500 * MIB
    assert backend.extra["alloc_retries"] == 0


def test_process_peak_counts_memory_given_back_before_the_reading(machine):
    fake = machine("healthy")
    cuda = fake.torch.cuda
    backend = backend_of(fake, process_bytes=fake.own_bytes)
    backend.reset_peak_memory()
    cuda.allocate(4 * GIB)
    cuda.free(4 * GIB)
    backend.empty_cache()
    assert fake.own_bytes() == 500 * MIB  # all that NVML would still show
    assert backend.memory().process_bytes == 4 * GIB + 500 * MIB


def test_unknown_process_memory_is_none(machine):
    fake = machine("healthy")
    backend = backend_of(fake)
    assert backend.memory().process_bytes is None
    assert "context_bytes" not in backend.extra


def test_allocator_retries_of_this_trial_are_recorded(machine):
    fake = machine("healthy")
    backend = backend_of(fake)
    fake.torch.cuda.retries = 3
    backend.reset_peak_memory()
    fake.torch.cuda.retries = 5
    backend.memory()
    assert backend.extra["alloc_retries"] == 2


def test_last_level_cache_is_known_or_none(machine):
    fake = machine("healthy")
    assert backend_of(fake).l2_bytes == 40 * MIB
    fake.torch.cuda.get_device_properties = lambda _index: SimpleNamespace(name="no such property in this torch")
    assert backend_of(fake).l2_bytes is None


# -- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_oom"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_out_of_memory(machine, error, is_oom):
    assert backend_of(machine("healthy")).is_oom(error) is is_oom


def test_torch_without_its_newer_name_for_out_of_memory(machine):
    fake = machine("healthy")
    fake.torch.OutOfMemoryError = None
    assert backend_of(fake).is_oom(torch.cuda.OutOfMemoryError("CUDA out of memory"))


def test_a_dead_context_shows_at_the_next_synchronisation(machine):
    fake = machine("healthy")
    backend = backend_of(fake)
    assert backend.context_is_dead() is False
    fake.lose()
    assert backend.context_is_dead() is True


def test_holding_a_context_is_known_without_making_one(machine):
    fake = machine("healthy")
    assert not holds_context(fake.torch, 0)
    fake.torch.cuda.get_device_properties(0)  # initialises torch.cuda, makes no context
    assert not holds_context(fake.torch, 0)
    fake.torch.cuda.set_device(0)
    assert holds_context(fake.torch, 0)


def test_without_torchs_private_question_allocated_memory_is_the_sign(machine):
    fake = machine("healthy")
    fake.torch._C = SimpleNamespace()
    fake.torch.cuda.set_device(0)
    assert not holds_context(fake.torch, 0)
    fake.torch.cuda.allocate(1)
    assert holds_context(fake.torch, 0)
