"""Replayed allocations against what a real card reserved, and by their parts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.model import replay
from tunecast.model.allocator import CachingAllocator
from tunecast.model.architecture import Architecture
from tunecast.model.fits import memory_view
from tunecast.model.memory import memory_timeline
from tunecast.model.memory_static import static_parts
from tunecast.model.optimizer import optimizer_state_bytes
from tunecast.model.priors import load_priors, prior_factors
from tunecast.model.replay import is_replayed, load, replayed_bytes, resting_made, state_blocks, update
from tunecast.model.run import Run
from tunecast.model.tape_parts import allocated_bytes
from tunecast.model.target import resolve_targets
from tunecast.model.trained import Trained, trained_dtype, trained_tensors
from tunecast.model.units import MIB
from tunecast.model.workspaces import workspace_bytes

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]
RECORD = Path(__file__).parents[2] / "results" / "records" / "h200-sxm5-141gb_20261127T132621Z_5ead83e7.json"


def measured_steps() -> list[dict[str, Any]]:
    trials = json.loads(RECORD.read_text(encoding="utf-8"))["trials"]
    return [trial for trial in trials if trial["bench"] == "step" and trial["outcome"] == "ok"]


def test_replays_are_what_a_card_reserved() -> None:
    """Fifty-five steps of one to four layers on an H200: most to the segment, all but one within 1% of the process."""
    errors = []
    for trial in measured_steps():
        run = run_from_dict(dict(trial["params"]["run"]))
        found = replayed_bytes(
            architecture_from_dict(dict(trial["params"]["architecture"])), run, "cuda", workspace_bytes("9.0")
        )
        assert found is not None
        errors.append(abs(found - trial["memory"]["reserved_bytes"]) / trial["memory"]["process_bytes"])
    assert len(errors) == 55
    assert statistics.median(errors) < 0.0005
    assert sorted(errors)[-2] < 0.01
    assert max(errors) < 0.10


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b"])
def test_a_replay_holds_what_the_timeline_allocates_and_more(make: Make, run_of: RunOf, name: str, method: str) -> None:
    architecture = make(name)
    run = run_of(architecture, method=method, max_length=1024)
    found, timeline = replayed_bytes(architecture, run, "cuda"), memory_timeline(architecture, run)
    assert found is not None
    assert timeline.allocated_bytes <= found < 2 * timeline.allocated_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"method": "lora"},
        {"method": "qlora", "lora_target_modules": "q_proj,v_proj"},
        {"method": "lora", "use_dora": True},
        {"method": "lora", "lora_bias": True},
        {"method": "lora", "modules_to_save": "embed_tokens,lm_head"},
        {"method": "full"},
    ],
)
def test_what_is_loaded_is_the_resting_state(make: Make, run_of: RunOf, options: dict[str, Any]) -> None:
    """The list of tensors leaves out rotary tables, labels and the like, less than a thousandth."""
    architecture = make("qwen2.5-0.5b")
    run, allocator = run_of(architecture, **options), CachingAllocator()
    listed = sum(allocated_bytes(n) for made in resting_made(architecture, run) for n, stays in made if stays)
    at_rest = sum(static_parts(architecture, run).values()) - optimizer_state_bytes(architecture, run)
    assert listed == pytest.approx(at_rest, rel=1e-3)
    assert load(allocator, architecture, run)
    assert allocator.allocated_bytes == pytest.approx(at_rest, rel=1e-2)


@pytest.mark.parametrize(
    "optim", ["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_32bit", "sgd"]
)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_states_are_the_optimizers(make: Make, run_of: RunOf, optim: str, method: str) -> None:
    architecture = make("qwen2.5-0.5b")
    run = run_of(architecture, method=method, optim=optim)
    blocks = [state_blocks(each, optim, trained_dtype(run)) for each in trained_tensors(architecture, run)]
    total = sum(allocated_bytes(n_bytes) for own in blocks for n_bytes in own)
    assert total == pytest.approx(optimizer_state_bytes(architecture, run), rel=1e-3, abs=4096)


def test_the_first_update_takes_what_the_activations_left_and_the_next_step_needs_more() -> None:
    """By hand: a weight of 20 MiB (bf16, 10 Mi elements) leaves two moments of as much in a freed 64 MiB, so that 64
    more are needed; the roots of the update come and go in between."""
    allocator, tensor = CachingAllocator(), Trained(elements=10 * MIB, is_matrix=True)
    allocator.free(allocator.allocate(64 * MIB))
    update(allocator, [tensor], "adamw_torch", "bf16", is_first=True)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (40 * MIB, 64 * MIB)
    allocator.free(allocator.allocate(64 * MIB))
    update(allocator, [tensor], "adamw_torch", "bf16", is_first=False)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (40 * MIB, 128 * MIB)


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_more_steps_reserve_no_more(make: Make, run_of: RunOf, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    architecture = make("qwen3-0.6b")
    run = run_of(architecture, method=method, gradient_accumulation_steps=2)
    two = replay._replayed.__wrapped__(architecture, run, 0)
    monkeypatch.setattr(replay, "STEPS", 4)
    four = replay._replayed.__wrapped__(architecture, run, 0)
    assert two is not None
    assert four is not None
    assert 0 <= four - two <= 4 * MIB


def test_further_micro_batches_are_those_before(make: Make, run_of: RunOf) -> None:
    architecture = make("qwen2.5-0.5b")
    two, nine = (
        replayed_bytes(architecture, run_of(architecture, gradient_accumulation_steps=n), "cuda") for n in (2, 9)
    )
    assert two == nine


@pytest.mark.parametrize(
    "changes",
    [
        {"num_gpus": 2, "sharding": "fsdp"},
        {"offload": "optimizer"},
        {"activation_offloading": True},
        {"torch_compile": True},
        {"optimizer_in_backward": True},
        {"optim": "adafactor"},
        {"stack": "unsloth"},
        {"stack": "axolotl"},
        {"stack": "torchtune"},
        {"stack": "litgpt"},
        {"fused_kernels": ("rms_norm", "rope", "cross_entropy")},
        {"loss_type": "liger"},
        {"loss_type": "cut_cross_entropy"},
    ],
)
def test_what_is_not_known_in_order_is_not_replayed(make: Make, run_of: RunOf, changes: dict[str, Any]) -> None:
    architecture = make("qwen2.5-0.5b")
    run = run_of(architecture)
    assert is_replayed(architecture, run, "cuda")
    assert not is_replayed(architecture, run, "cpu")
    assert replayed_bytes(architecture, replace(run, **changes), "cuda") is None


def test_a_list_that_misses_much_of_the_resting_state_is_not_replayed(
    make: Make, run_of: RunOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = make("qwen2.5-0.5b")
    monkeypatch.setattr(replay, "resting_made", lambda *_: iter([[(100 * MIB, True)]]))
    assert replay._replayed.__wrapped__(architecture, run_of(architecture), 0) is None


def test_bytes_beyond_what_a_device_addresses_are_not_replayed(make: Make, run_of: RunOf) -> None:
    architecture = make("qwen2.5-0.5b")
    run = run_of(architecture, max_length=100_000_000, per_device_train_batch_size=64, gradient_checkpointing=False)
    assert replay.replayed_bytes(architecture, run, "cuda") is None


def test_a_forecast_by_priors_reserves_what_a_card_reserved() -> None:
    """The H200's steps as a card without a record would have them forecast; its own median is among the priors, the
    bounds are other sources'."""
    (target,) = resolve_targets(["h200-sxm5-141gb"], {})
    assert target.gpu is not None
    errors, inside = [], []
    for trial in measured_steps():
        architecture = architecture_from_dict(dict(trial["params"]["architecture"]))
        run = run_from_dict(dict(trial["params"]["run"]))
        found = memory_view(architecture, run, target, prior_factors(target.gpu, run)).reserved_bytes
        assert found is not None
        measured = trial["memory"]["reserved_bytes"]
        errors.append(abs(found.value / measured - 1.0))
        inside.append(found.low <= measured <= found.high)
    assert statistics.median(errors) < 0.002
    assert sorted(errors)[-2] < 0.02
    assert sum(inside) >= 54


def test_priors_replay_one_gpu_and_take_the_share_of_several(make: Make, run_of: RunOf) -> None:
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    assert target.gpu is not None
    architecture, terms = make("llama-3.1-8b"), load_priors()["memory_overhead_bytes"]
    one, two = (run_of(architecture, **options) for options in ({}, {"num_gpus": 2, "sharding": "ddp"}))
    own = workspace_bytes(target.compute_capability)
    views = [memory_view(architecture, run, target, prior_factors(target.gpu, run)) for run in (one, two)]
    timelines = [memory_timeline(architecture, run, workspace_bytes=own) for run in (one, two)]
    steps = [timeline.allocated_bytes - timeline.at_rest_bytes for timeline in timelines]
    replayed = replayed_bytes(architecture, one, "cuda", own)
    assert replayed is not None
    expected = [replayed + terms["replayed_frac"] * steps[0],
                timelines[1].allocated_bytes + terms["fragmentation_frac"] * steps[1]]  # fmt: skip
    assert [view.reserved_bytes.value for view in views if view.reserved_bytes] == pytest.approx(expected)
