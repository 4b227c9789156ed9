"""`recommend` with settings that bind others: what lives in the host, attention recomputed alone, unknown times."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from tunecast import estimate, recommend
from tunecast.cli.program import program
from tunecast.recommendation import Recommendation

MODEL = "Qwen/Qwen2.5-0.5B"
SHARDS_OF: dict[str, tuple[str, ...]] = {"optimizer": ("zero1", "zero2", "zero3"), "all": ("fsdp", "zero3")}
"""What DeepSpeed (``offload_optimizer``, ``offload_param``) and FSDP (``CPUOffloadPolicy``) document."""
runner = CliRunner()


def ask(**changes: Any) -> Recommendation:
    job = {"method": "full", "max_length": 512, "tokens": "10M", "gpu": "l40s-48gb", "max_gpus": 2}
    return recommend(MODEL, **{**job, "usd_per_gpu_hour": 1.0, **changes})


@pytest.mark.parametrize("offload", SHARDS_OF)
def test_what_is_offloaded_is_ranked_with_the_time_and_room_of_an_estimate(offload: str) -> None:
    found = ask(offload=offload)
    assert found.front
    for picked in found.front:
        plan = picked.candidate.plan.run
        assert plan.num_gpus == 1 or plan.sharding in SHARDS_OF[offload]
        (told,) = estimate(
            MODEL, gpu="l40s-48gb", method="full", max_length=512, tokens="10M", usd_per_gpu_hour=1.0, offload=offload,
            num_gpus=plan.num_gpus, sharding=plan.sharding, gradient_checkpointing=plan.gradient_checkpointing,
            per_device_train_batch_size=plan.per_device_train_batch_size,
            gradient_accumulation_steps=plan.gradient_accumulation_steps,
        )  # fmt: skip
        assert told.total_time_h is not None
        assert told.cost_usd is not None
        assert picked.candidate.time_h == pytest.approx(told.total_time_h.value, rel=1e-6)
        assert picked.candidate.usd == pytest.approx(told.cost_usd.value, rel=1e-6)
        assert picked.candidate.fit_probability == pytest.approx(told.fit_probability, abs=1e-6)


def test_more_in_the_host_is_slower_and_smaller() -> None:
    """Both cross PCIe more and hold less: what offloading is for, whatever the figures."""
    (plain,), (moved,) = (
        estimate(MODEL, gpu="l40s-48gb", method="full", offload=offload, gradient_checkpointing=True)
        for offload in ("none", "optimizer")
    )
    assert moved.step_time_s.value > plain.step_time_s.value
    assert moved.memory.allocated_bytes.value < plain.memory.allocated_bytes.value


@pytest.mark.parametrize("offload", SHARDS_OF)
def test_two_gpus_that_offload_without_a_sharding_get_one_that_can(offload: str) -> None:
    (told,) = estimate(MODEL, gpu="l40s-48gb", method="full", offload=offload, num_gpus=2)
    assert told.run.sharding in SHARDS_OF[offload]
    assert any(note.startswith("--sharding not given") for note in told.notes)


def test_cards_on_which_nothing_that_offloads_fits_are_left_out_and_not_refused() -> None:
    """Two cards of 16 GB hold 34B weights in no way, and V100s have plans of their own (no bf16).

    Two L40S are nearly full, with memory that was never compared with such code: half a chance is enough here.
    """
    found = recommend(
        "codellama/CodeLlama-34b-hf", method="full", tokens="10M", offload="optimizer", max_gpus=2,
        gpu=["l40s-48gb", "v100-pcie-16gb"], usd_per_gpu_hour=1.0, min_fit_confidence=0.5,
    )  # fmt: skip
    assert {picked.candidate.target.id for picked in found.front} == {"l40s-48gb"}
    assert [rejected.reason for rejected in found.rejected] == ["does not fit"]


def test_a_time_that_nobody_knows_is_the_reason_told() -> None:
    """Two machines share each sequence, and nobody says how they are joined."""
    asked = ["recommend", MODEL, "--method", "lora", "--max-length", "512", "--tokens", "10M", "--gpu", "rtx-4090",
             "--cp", "2", "--gpus-per-node", "1", "--max-gpus", "2", "--usd-per-gpu-hour", "1"]  # fmt: skip
    done = runner.invoke(program, asked)
    said = " ".join(done.output.split())
    assert done.exit_code == 3
    assert "time unknown" in said
    assert "--internode-gbps 400" in said
    assert "fit not sure" not in said
    assert runner.invoke(program, [*asked, "--internode-gbps", "400"]).exit_code == 0


def test_attention_recomputed_alone_is_named_in_the_table() -> None:
    asked = ["recommend", MODEL, "--method", "lora", "--max-length", "512", "--tokens", "10M", "--gpu", "l40s",
             "--max-gpus", "2", "--recompute-attention"]  # fmt: skip
    done = runner.invoke(program, asked, env={"COLUMNS": "100"})
    assert done.exit_code == 0
    assert "checkpointing of attention alone" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_attention_recomputed_alone_keeps_whole_layers_out_of_the_plans() -> None:
    found = ask(recompute_attention=True, method="lora")
    assert found.front
    for picked in found.front:
        assert picked.candidate.plan.run.recompute_attention
        assert not picked.candidate.plan.run.gradient_checkpointing


def test_a_stack_that_checkpoints_nothing_by_itself_is_named_and_not_a_flag_that_nobody_typed() -> None:
    """LitGPT's ``setup`` turns activation checkpointing on for FSDP alone."""
    asked = ["estimate", "meta-llama/Llama-3.2-1B", "--gpu", "l4", "--method", "lora", "--stack", "litgpt"]
    done = runner.invoke(program, [*asked, "--checkpoint-every", "2"])
    said = " ".join(done.output.split())
    assert done.exit_code == 2
    assert "--stack litgpt checkpoints no layer by itself; add --gradient-checkpointing" in said
    assert "--no-gradient-checkpointing" not in said


def test_no_offer_is_picked_whose_machine_lacks_the_host_memory() -> None:
    """8 billion parameters at 16 bytes each go to the host: 120 GiB."""
    found = recommend(
        "meta-llama/Llama-3.1-8B", method="full", tokens="5M", max_length=2048, offload="optimizer", max_gpus=1
    )
    rooms = [picked.candidate.price.offer["ram_gib"] for picked in found.front]
    assert rooms
    assert all(room is None or room >= 120 for room in rooms)
    told = estimate(
        "meta-llama/Llama-3.1-8B", method="full", tokens="5M", max_length=2048, offload="optimizer", gpu="l40s"
    )[0]
    assert told.offer is not None
    assert told.offer["ram_gib"] is None or told.offer["ram_gib"] >= 120


def test_evaluations_take_as_long_as_in_the_forecast_of_the_plan() -> None:
    """A forward is a share of a step's time, which on a bandwidth-bound card is another than its share of FLOPs."""
    asked = {"method": "lora", "max_length": 1024, "num_samples": 8000, "eval_samples": 4000, "eval_steps": 100}
    found = recommend("meta-llama/Llama-3.1-70B", gpu="l40s", global_batch=16, **asked)
    assert found.cheapest is not None
    plan = found.cheapest.forecast
    own = {
        "num_gpus": plan.run.num_gpus,
        "sharding": plan.run.sharding,
        "per_device_train_batch_size": plan.run.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.run.gradient_accumulation_steps,
        "gradient_checkpointing": plan.run.gradient_checkpointing,
    }
    (alone,) = estimate("meta-llama/Llama-3.1-70B", gpu="l40s", **asked, **own)
    assert plan.phases_h["evaluate"] == pytest.approx(alone.phases_h["evaluate"], rel=1e-3)
    assert plan.cost_usd is not None
    less = 0.98 * plan.cost_usd.value
    within = recommend("meta-llama/Llama-3.1-70B", gpu="l40s", global_batch=16, budget=less, **asked)
    assert not within.front


def test_a_plan_that_rather_fails_is_no_advice_beside_one_that_fits() -> None:
    asked = {"method": "lora", "max_length": 2048, "tokens": "10M", "global_batch": 8, "gpu": "rtx-a6000-48gb"}
    found = recommend("meta-llama/Llama-3.1-8B", **asked)
    assert found.cheapest is not None
    assert not [each for each in found.relaxations if each.limit == "--min-fit-confidence"]
    unsure = recommend("meta-llama/Llama-3.1-8B", min_fit_confidence=0.2, **asked).cheapest
    assert unsure is not None
    assert unsure.candidate.usd < found.cheapest.candidate.usd, "there is a cheaper one"
    assert unsure.candidate.fit_probability is not None
    assert unsure.candidate.fit_probability < 0.5, "which rather fails"


@pytest.mark.parametrize("card", ["rtx-4090-24gb", "a100-sxm4-40gb"])
def test_what_less_confidence_would_allow_it_does_allow(card: str) -> None:
    asked = {"method": "qlora", "max_length": 2048, "tokens": "10M", "global_batch": 16, "max_gpus": 4, "gpu": card}
    found = recommend("meta-llama/Llama-3.1-8B", **asked)
    (told,) = [each for each in found.relaxations if each.limit == "--min-fit-confidence"]
    needed = float(told.needed.rstrip("%")) / 100.0
    relaxed = recommend("meta-llama/Llama-3.1-8B", min_fit_confidence=needed, **asked)
    assert relaxed.cheapest is not None
    assert found.cheapest is not None
    assert relaxed.cheapest.candidate.usd < found.cheapest.candidate.usd
    kept = recommend("meta-llama/Llama-3.1-8B", min_fit_confidence=needed + 0.02, **asked)
    assert kept.cheapest is not None
    assert kept.cheapest.candidate.usd == found.cheapest.candidate.usd


def test_a_base_that_no_card_can_load_says_who_loads_it_elsewhere() -> None:
    asked: dict[str, Any] = {"method": "qlora", "tokens": "10M", "gpu": "rtx-4090-24gb"}
    alone = recommend("meta-llama/Llama-3.1-70B", **asked)
    assert not alone.front
    (note,) = [note for note in alone.notes if "however many GPUs share it" in note]
    assert "--stack axolotl" in note
    axolotl = recommend("meta-llama/Llama-3.1-70B", stack="axolotl", **asked)
    assert axolotl.front
    assert not any("however many GPUs share it" in note for note in axolotl.notes)
    small = recommend("meta-llama/Llama-3.1-8B", method="qlora", tokens="10M", gpu=["t4", "rtx-3070-8gb"])
    assert not any("however many GPUs share it" in note for note in small.notes)
