"""What offloading takes off the GPU and what it sends over PCIe, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.catalogs.price_book import book_of
from tunecast.catalogs.prices import load_prices
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.cost import has_room, most_gib_per_gpu
from tunecast.model.estimate import forecast
from tunecast.model.forecast import Forecast
from tunecast.model.forecast_json import forecast_to_dict
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline, moment_parts
from tunecast.model.parallel_offload import host_bytes_per_machine
from tunecast.model.question import Question
from tunecast.model.run import Run
from tunecast.model.target import resolve_targets
from tunecast.model.units import GIB, memory_text

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]
FULL: dict[str, Any] = {"method": "full", "num_gpus": 8, "max_length": 512}


def host(arch: Architecture, run: Run, name: str) -> float:
    return sum(op.total_bytes for op in step_operations(arch, run) if op.name == name)


def test_states_leave_the_gpu(make: Make, run_of: RunOf) -> None:
    """ZeRO-3 at rest holds 16 bytes per parameter over 8 GPUs and a bucket, 2 of them with its states and gradients in
    the host."""
    llama = make("llama-3.1-8b")
    here, there = (
        memory_timeline(llama, run_of(llama, sharding="zero3", offload=offload, **FULL))
        for offload in ("none", "optimizer")
    )
    assert (here.at_rest_bytes - there.at_rest_bytes) / llama.total_params == pytest.approx(14 / 8, rel=1e-2)
    assert (there.at_rest_bytes - 2 * 500_000_000) / llama.total_params == pytest.approx(2 / 8, rel=1e-2)


@pytest.mark.parametrize("sharding", ["zero3", "fsdp"])
def test_with_parameters_in_the_host_only_gathered_layers_are_left(make: Make, run_of: RunOf, sharding: str) -> None:
    llama = make("llama-3.1-8b")
    run = run_of(llama, sharding=sharding, offload="all", **FULL)
    for moment, parts in moment_parts(llama, run):
        assert parts["weights"] == parts["gradients"] == parts["optimizer_state"] == 0, moment
    assert memory_timeline(llama, run).parts_bytes["communication"] > 0


class Passes(TorchDispatchMode):
    """Counts the tensors of so many elements that operators read and write, each once per operator."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.passes = elements, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tree in ((args, kwargs or {}), found):
            whole = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.numel() == self.elements]
            self.passes += len({id(t) for t in whole})
        return found


def test_torch_goes_over_host_memory_operation_by_operation(make: Make, run_of: RunOf) -> None:
    """The passes of torch's own update on a processor; its fused one reads four tensors once and writes three."""
    weight = torch.nn.Parameter(torch.randn(1024))
    weight.grad = torch.randn(1024)
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    optimizer.step()
    with Passes(1024) as counted:
        optimizer.step()
    llama = make("llama-3.1-8b")
    owned = llama.total_params / 8
    run, fused = (
        run_of(llama, sharding="fsdp", offload="all", dtype="bf16", optim=optim, **FULL)
        for optim in ("adamw_torch", "adamw_torch_fused")
    )
    assert host(llama, run, "host.update") == pytest.approx(counted.passes * 2 * owned)
    assert host(llama, fused, "host.update") == pytest.approx(7 * 2 * owned)


@pytest.mark.parametrize("optim", ["sgd", "adamw_bnb_8bit", "paged_adamw_8bit"])
@pytest.mark.parametrize(
    "spread", [{"sharding": "fsdp", "offload": "all"}, {"sharding": "zero2", "offload": "optimizer"}]
)
def test_other_updates_in_host_memory_are_refused(
    make: Make, run_of: RunOf, optim: str, spread: dict[str, str]
) -> None:
    with pytest.raises(NotSupportedError, match=f"--optim {optim} with --offload"):
        run_of(make("llama-3.1-8b"), optim=optim, **spread, **FULL)


def test_what_crosses_pcie_in_a_step(make: Make, run_of: RunOf) -> None:
    """DeepSpeed sends fp32 gradients once, and of several micro-batches 16-bit sums out and back (ZeRO-3 of one too);
    2 bytes of parameter come back."""
    llama = make("llama-3.1-8b")
    owned = llama.total_params / 8
    run = run_of(llama, sharding="zero1", offload="optimizer", gradient_accumulation_steps=4, **FULL)
    assert host(llama, run, "host.copy") == pytest.approx((4 + 2) * owned)
    assert host(llama, run, "host.update") == pytest.approx(42 * owned)  # 8 of scaling, 28 of Adam, 6 of the copy
    eager = run_of(llama, sharding="zero2", offload="optimizer", gradient_accumulation_steps=4, **FULL)
    assert host(llama, eager, "host.copy") == pytest.approx((4 * 2 + 3 * 2 + 4 + 2) * owned)
    parted = run_of(llama, sharding="zero3", offload="optimizer", gradient_accumulation_steps=4, **FULL)
    assert host(llama, parted, "host.copy") == pytest.approx((4 * 2 + 4 * 2 + 4 + 2) * owned)
    everything = run_of(llama, sharding="fsdp", offload="all", gradient_accumulation_steps=4, **FULL)
    assert host(llama, everything, "host.copy") == pytest.approx((2 + 2 * 4 * 2) * owned, rel=1e-3)
    assert host(llama, everything, "host.update") == pytest.approx(20 * 2 * owned)  # in bf16, op by op


def test_packed_weights_and_adapters_cross_too(run_of: RunOf) -> None:
    """70B in 4 bits over two GPUs: half a byte of each linear weight, 2 of each table's, 2 of each adapter's."""
    llama = load_architecture("meta-llama/Llama-2-70b-hf")
    attention, mlp = (8192 + 8192, 8192 + 1024, 8192 + 1024, 8192 + 8192), 3 * (8192 + 28672,)
    linears = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    adapters = 80 * 64 * sum((*attention, *mlp))
    whole = linears / 2 + 2 * (2 * 32000 * 8192) + 2 * adapters
    options = {"method": "qlora", "lora_r": 64, "adapter_dtype": "bf16", "num_gpus": 2, "gpus_per_node": 2}
    run = run_of(llama, **options, sharding="fsdp", offload="all", max_length=512)
    states = 3 * 2 * adapters  # gradients and two moments
    assert host_bytes_per_machine(llama, run) == pytest.approx(whole + states, rel=1e-3)
    copies = 2 * whole / 2 + 2 * adapters / 2  # in for the forward and the backward, gradients out
    assert host(llama, run, "host.copy") == pytest.approx(copies, rel=1e-3)


def test_the_host_holds_16_bytes_per_parameter(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    run = run_of(llama, sharding="zero2", offload="optimizer", **FULL)
    assert host_bytes_per_machine(llama, run) == pytest.approx(16 * llama.total_params, rel=1e-3)
    spread = run_of(llama, sharding="zero2", offload="optimizer", **{**FULL, "num_gpus": 16})
    assert host_bytes_per_machine(llama, spread) == pytest.approx(8 * llama.total_params, rel=1e-3)


def ask(**options: Any) -> Forecast:
    question = Question(
        architecture=load_architecture("meta-llama/Llama-2-7b-hf"),
        options={"method": "full", "max_length": 4096, "num_gpus": 8, **options},
    )
    return forecast(question, resolve_targets(["a100-sxm4-80gb"], {})[0])


def test_the_update_on_the_host_takes_its_rate() -> None:
    """6.74B parameters of 42 bytes at 55 GB/s of one machine are 5.1 s, which nothing hides."""
    with_it, without = (ask(sharding="zero3", offload=offload) for offload in ("optimizer", "none"))
    longer = with_it.step_time_s.value - without.step_time_s.value
    assert longer == pytest.approx(6.74e9 / 1.3e9, rel=0.1)
    assert with_it.origins["host_update_bytes_per_s"] == "assumed"
    assert any("GiB of host memory" in note for note in with_it.notes)
    assert with_it.bound_by == "host"
    assert with_it.time_parts_s["host"] - without.time_parts_s["host"] == pytest.approx(6.74e9 / 1.3e9, rel=0.05)
    assert sum(with_it.time_parts_s.values()) == pytest.approx(with_it.step_time_s.value)
    spread = with_it.step_time_s.high / with_it.step_time_s.value
    assert spread > 1.5 * without.step_time_s.high / without.step_time_s.value, "an assumed rate widens the interval"


def test_one_gpu_trains_what_it_cannot_hold(make: Make, run_of: RunOf) -> None:
    """DeepSpeed on one GPU: 2 bytes of weights per parameter stay with the optimizer away, layers alone with all."""
    llama = make("llama-2-13b")
    options = {"method": "full", "max_length": 512}
    at_rest = [memory_timeline(llama, run_of(llama, offload=offload, **options)) for offload in ("optimizer", "all")]
    assert at_rest[0].at_rest_bytes / llama.total_params == pytest.approx(2, rel=1e-2)
    assert at_rest[1].at_rest_bytes / llama.total_params < 0.01
    whole = 2 * (llama.total_params - 2 * llama.embedding_params) / llama.num_layers
    assert at_rest[1].parts_bytes["communication"] >= 2 * whole
    alone = ask(num_gpus=1, offload="optimizer")
    assert alone.step_time_s.value > 6.74e9 / 1.3e9


def test_what_no_framework_does_is_refused() -> None:
    with pytest.raises(InputError, match=r"--offload all was asked for with --sharding zero2"):
        ask(sharding="zero2", offload="all")
    with pytest.raises(NotSupportedError, match=r"--offload nvme"):
        ask(sharding="zero3", offload="nvme")
    with pytest.raises(InputError, match=r"--offload is 'disk'"):
        ask(sharding="zero3", offload="disk")


def test_one_gpu_that_waits_for_its_host_is_as_unsure_as_the_hosts_rate() -> None:
    """6.74 billion parameters at 0.4 to 2.6 billion a second, all else as it is: 80% ends at least that far apart.

    The interval is symmetric in the logarithm, so it is compared by the ratio of its ends.
    """
    found = ask(offload="all", num_gpus=1, sharding="none", max_length=2048)
    slow_s, mean_s, fast_s = (6.738e9 / rate for rate in (0.4e9, 1.3e9, 2.6e9))
    else_s = found.step_time_s.value - mean_s
    assert found.step_time_s.high / found.step_time_s.low > (else_s + slow_s) / (else_s + fast_s)
    assert any("assumed, not measured" in note and "host_update_bytes_per_s" in note for note in found.notes)
    plain = ask(num_gpus=1, sharding="none", max_length=2048)
    assert not any("host_update" in note or "link" in note for note in plain.notes)


def test_the_rate_of_the_hosts_update_may_be_given() -> None:
    """Its seconds are bytes over that rate; the interval no longer knows others."""
    told = {"offload": "all", "num_gpus": 1, "sharding": "none", "max_length": 2048}
    slow, fast = (ask(**told, host_update_gb_per_s=rate) for rate in (100, 200))
    assert slow.time_parts_s["host"] == pytest.approx(2 * fast.time_parts_s["host"], rel=0.1)
    assert not any("host_update_bytes_per_s" in note for note in fast.notes)
    assert (
        fast.step_time_s.high / fast.step_time_s.low < 0.7 * ask(**told).step_time_s.high / ask(**told).step_time_s.low
    )
    with pytest.raises(InputError, match="--host-update-gb-per-s is 0"):
        ask(**told, host_update_gb_per_s=0)
    (note,) = [one for one in ask(num_gpus=1, sharding="none", host_update_gb_per_s=9).notes if "host-update" in one]
    assert note == "--host-update-gb-per-s changes nothing: without --offload no host updates anything"


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(4e8, "381 MiB"), (GIB, "1.0 GiB"), (2.5 * GIB, "2.5 GiB"), (1234 * GIB, "1,234 GiB")]
)
def test_small_needs_of_the_host_have_digits(n_bytes: float, text: str) -> None:
    assert memory_text(n_bytes) == text


@pytest.mark.parametrize(
    ("offload", "rooms", "taken", "told"),
    [
        ("optimizer", (64, 256, None), 256, None),
        ("optimizer", (64, None), None, "the offer's host memory is not stated, and --offload puts 120 GiB there"),
        ("optimizer", (64,), None, "no price: no machine on offer has the 120 GiB of host memory that --offload needs"),
        ("none", (64, 256, None), 64, None),
    ],
)
def test_a_machine_too_small_for_what_goes_to_the_host_is_not_taken_or_named(
    offload: str, rooms: tuple[int | None, ...], taken: int | None, told: str | None
) -> None:
    """16 bytes per parameter of 8 billion are 120 GiB; offers dearer by 10 cents each. With no larger one nothing is
    priced, and why is told."""
    (target,) = resolve_targets(["l40s-48gb"], {})
    (plain, *_) = (
        offer
        for offer in load_prices()
        if offer.gpu_id == "l40s-48gb" and offer.gpu_count == 1 and offer.price_type == "on-demand"
    )
    offers = tuple(
        replace(plain, provider=f"host{place}", ram_gib=room, usd_per_gpu_hour=1.0 + place / 10)
        for place, room in enumerate(rooms)
    )
    options = {"method": "full", "max_length": 512, "offload": offload, "tokens": 1e6}
    question = Question(
        architecture=load_architecture("meta-llama/Llama-3.1-8B"), options=options, price_book=book_of(offers)
    )
    found = forecast(question, target)
    assert (found.offer or {}).get("ram_gib") == taken
    assert (found.offer is None) == (rooms == (64,) and offload != "none")
    named = [note for note in found.notes if "the offer's host memory" in note or note.startswith("no price:")]
    assert named == [] if told is None else named[0].startswith(told)
    assert forecast_to_dict(found)["memory"]["host_gib"] == pytest.approx(120 if offload != "none" else 0, abs=1)


def test_offers_that_tell_no_host_memory_have_no_more_than_others_of_theirs() -> None:
    """405 billion parameters take 6.6 TiB: no machine of 8 GPUs has so much, though many say nothing of it."""
    offer = {"provider": "host0", "ram_gib": None, "gpus_paid": 8, "instances": 1}
    most = most_gib_per_gpu("host0")
    assert 200 < most < 1000
    assert has_room(offer, 8 * most * GIB)
    assert not has_room(offer, 8.1 * most * GIB)
    assert most_gib_per_gpu("runpod") < most
    assert has_room({**offer, "provider": "user"}, 1e15)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("micro", [1, 4])
def test_adapters_are_not_trained_faster_for_their_states_in_the_host(sharding: str, micro: int) -> None:
    """The update that leaves the GPU is small, and every gradient goes through kernels of its own on its way."""
    options = {"method": "lora", "num_gpus": 8, "sharding": sharding, "max_length": 512}
    question = Question(
        architecture=load_architecture("Qwen/Qwen2.5-0.5B"), options={**options, "gradient_accumulation_steps": micro}
    )
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    here, there = (
        forecast(replace(question, options={**question.options, "offload": offload}), target)
        for offload in ("none", "optimizer")
    )
    assert there.step_time_s.value > here.step_time_s.value
