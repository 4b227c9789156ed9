"""Options that change nothing say so, and origins name everything that a part was made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.cli.program import program

MODEL = "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"p2p": False, "num_gpus": 8}, "--no-p2p changes nothing: GPUs of h100-sxm5-80gb are joined by nvlink"),
        ({"p2p": False}, "--no-p2p changes nothing: there is one GPU"),
        ({"nvlink": True, "num_gpus": 2}, "--nvlink changes nothing: GPUs of h100-sxm5-80gb are joined by nvlink"),
        ({"nvlink": False, "num_gpus": 2}, "--no-nvlink changes nothing: GPUs of h100-sxm5-80gb are joined by nvlink"),
        ({"nvlink": True}, "--nvlink changes nothing: there is one GPU"),
        ({"serial_fraction": 0.1}, "--serial-fraction changes nothing: there is one GPU"),
        ({"sequence_parallel": True, "num_gpus": 8}, "--sequence-parallel changes nothing: there is no --tp"),
        ({"sequence_parallel": False}, "--no-sequence-parallel changes nothing: there is no --tp"),
        ({"cp_kind": "ulysses", "num_gpus": 8}, "--cp-kind ulysses changes nothing: there is no --cp"),
        ({"fsdp_version": 1}, "--fsdp-version 1 changes nothing: there is one GPU"),
        ({"sync_each_micro_batch": True}, "--sync-each-micro-batch changes nothing: there is one GPU"),
        (
            {"sync_each_micro_batch": True, "num_gpus": 2, "tp": 2},
            "--sync-each-micro-batch changes nothing: data parallelism has one GPU",
        ),
        (
            {"sync_each_micro_batch": True, "num_gpus": 2, "sharding": "ddp"},
            "--sync-each-micro-batch changes nothing: a step has one micro-batch",
        ),
        (
            {
                "sync_each_micro_batch": True,
                "num_gpus": 2,
                "sharding": "zero2",
                "gradient_accumulation_steps": 2,
            },
            "--sync-each-micro-batch changes nothing: zero2 reduces gradients of every micro-batch",
        ),
        (
            {"dataloader_num_workers": 4, "tokens": 10**6},
            "--dataloader-num-workers changes nothing: without --streaming data are tokenized before training",
        ),
        ({"seed": 4, "tokens": 10**6}, "--seed 4 changes nothing: only interruptions are drawn, with --spot"),
        ({"internode_gbps": 400, "num_gpus": 8}, "--internode-gbps changes nothing: one machine of 8 GPUs is enough"),
        ({"gpus_per_node": 4}, "--gpus-per-node 4 changes nothing: there is one GPU"),
        ({"compile_loss": True}, "--compile-loss changes nothing: without --torch-compile nothing is compiled"),
        ({"gptq_group_size": 64}, "--gptq-group-size 64 changes nothing: no base in GPTQ's 4 bits"),
        ({"gptq_kernel": "torch"}, "--gptq-kernel torch changes nothing: no base in GPTQ's 4 bits"),
        (
            {"reentrant": True, "gradient_checkpointing": False},
            "--reentrant changes nothing: there are no checkpoints",
        ),
    ],
)
def test_what_changes_nothing_is_told(options: dict[str, object], told: str) -> None:
    (found,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", **options)
    kept = ("num_gpus", "tp", "sharding", "gradient_accumulation_steps", "tokens", "gradient_checkpointing")
    shared = {name: options[name] for name in kept if name in options}
    (plain,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", **shared)
    assert told in found.notes
    assert (found.step_time_s, found.memory) == (plain.step_time_s, plain.memory)
    assert not any("changes nothing" in note for note in plain.notes)


def test_phases_of_a_run_of_unknown_length_are_told() -> None:
    """A price is one of any length."""
    around = {"eval_samples": 100, "save_steps": 5, "merge": True}
    (found,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", **around, spot=True)
    told = "--eval-samples, --save-steps, --merge change nothing without an amount of data: add --tokens 10M or"
    assert [note for note in found.notes if note.startswith(told)]
    (counted,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", **around, spot=True, tokens=10**6)
    assert not any("change nothing" in note for note in counted.notes)


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": False, "tp": 2},
        {"cp_kind": "ulysses", "cp": 2},
        {"fsdp_version": 1, "sharding": "fsdp"},
        {"sync_each_micro_batch": True, "sharding": "ddp", "gradient_accumulation_steps": 2},
    ],
)
def test_options_of_a_layout_that_has_their_part_are_not(options: dict[str, object]) -> None:
    (found,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", num_gpus=2, **options)
    assert not any("changes nothing" in note for note in found.notes)


def test_a_training_file_may_state_what_other_layouts_need(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(
        f"base_model: {MODEL}\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nsequence_len: 512\n"
        "micro_batch_size: 1\nfsdp_version: 1\nfsdp_config: {offload_params: false}\n"
    )
    by_file, typed = (
        tunecast.estimate(str(path), gpu="h100-sxm5-80gb", num_gpus=1, **more)[0] for more in ({}, {"fsdp_version": 1})
    )
    assert not any("--fsdp-version" in note for note in by_file.notes)
    assert "--fsdp-version 1 changes nothing: there is one GPU" in typed.notes


@pytest.mark.parametrize("num_gpus", [1, "auto", 2])
def test_what_a_file_shards_over_several_is_told_of_one(num_gpus: int | str, tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(
        f"base_model: {MODEL}\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nsequence_len: 512\n"
        "micro_batch_size: 1\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
    )
    (found,) = tunecast.estimate(str(path), gpu="h100-sxm5-80gb", num_gpus=num_gpus)
    (plain,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", num_gpus=1)
    told = [note for note in (*found.notes, *plain.notes) if note.startswith("fsdp of the file shards nothing on one")]
    assert len(told) == (num_gpus != 2)


def test_what_a_file_says_of_deepspeed_is_no_option_that_was_typed(tmp_path: Path) -> None:
    zero = {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5000000}}
    (tmp_path / "ds.json").write_text(json.dumps({**zero, "bf16": {"enabled": "auto"}}))
    path = tmp_path / "axolotl.yaml"
    path.write_text(
        f"base_model: {MODEL}\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nsequence_len: 512\n"
        "micro_batch_size: 1\ndeepspeed: ds.json\n"
    )
    typed = {"overlap_comm": True, "reduce_bucket_size": 5000000}
    by_file, by_hand = (
        tunecast.estimate(str(path), gpu="h100-sxm5-80gb", num_gpus=1, **more)[0].notes for more in ({}, typed)
    )
    assert any(note.startswith("zero2 of the file shards nothing") for note in by_file)
    flags = ("--overlap-comm says", "--reduce-bucket-size says")
    assert [any(note.startswith(flag) for note in by_file) for flag in flags] == [False, False]
    assert [any(note.startswith(flag) for note in by_hand) for flag in flags] == [True, True]


def test_the_number_that_is_found_has_the_notes_of_one_that_is_typed() -> None:
    asked = {"gpu": "h100-sxm5-80gb", "method": "lora", "max_length": 4096, "precision": "bf16-autocast"}
    (typed,) = tunecast.estimate("meta-llama/Llama-3.1-8B", num_gpus=1, **asked)
    (found,) = tunecast.estimate("meta-llama/Llama-3.1-8B", num_gpus="auto", **asked)
    assert any("adapters' casts, scalings and sums" in note for note in typed.notes)
    extra = [note for note in found.notes if note not in typed.notes]
    enough = "the fewest that the job can have, where it fits with a probability of 90%"
    assert extra == [f"--num-gpus auto: 1 GPU, {enough}"]
    assert not set(typed.notes) - set(found.notes)


def test_no_classic_estimate_stands_beside_a_given_speed() -> None:
    asked = {"gpu": "h100-sxm5-80gb", "num_gpus": 2, "serial_fraction": 0.1}
    (found,) = tunecast.estimate(MODEL, achieved_tflops=100, **asked)
    assert "--serial-fraction changes nothing: --achieved-tflops is the speed of all GPUs" in found.notes


@pytest.mark.parametrize("amount", [{"tokens": "10M", "packing": True}, {"max_steps": 100, "packing": True}])
def test_a_mean_length_that_packing_ignores_is_told(amount: dict[str, object]) -> None:
    (found,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", mean_tokens=300, **amount)
    (plain,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", **amount)
    assert found.total_time_h == plain.total_time_h
    assert [note for note in found.notes if note not in plain.notes] == [
        "--mean-tokens changes nothing: packed samples fill rows, and tokens are counted without it"
    ]


@pytest.mark.parametrize("amount", [{"tokens": "10M"}, {"max_steps": 100}, {"num_samples": 1000}])
def test_a_mean_length_that_counts_is_not(amount: dict[str, object]) -> None:
    (found,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", mean_tokens=300, **amount)
    assert not any("changes nothing" in note for note in found.notes)


def test_peer_access_matters_over_pcie() -> None:
    (found,) = tunecast.estimate(MODEL, gpu="l40s-48gb", num_gpus=8, p2p=False)
    assert not any("changes nothing" in note for note in found.notes)


def test_peer_access_does_not_matter_over_a_bridge() -> None:
    (found,) = tunecast.estimate(MODEL, gpu="rtx-3090-24gb", num_gpus=2, nvlink=True, p2p=True)
    assert "--p2p changes nothing: NVLink bridges join the cards" in found.notes


def test_only_the_option_that_was_given_is_named() -> None:
    with pytest.raises(InputError, match=r"^--mean-tokens needs an amount"):
        tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", mean_tokens=500, packing=True)
    with pytest.raises(InputError, match=r"^--num-train-epochs and --mean-tokens need an amount"):
        tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", mean_tokens=500, num_train_epochs=2, packing=True)


def test_a_part_has_the_origin_of_its_rate_and_of_its_correction() -> None:
    """Products run at the datasheet's rate times what published runs reach of it; --json names both factors."""
    from tunecast.explain import explain

    (told,) = tunecast.estimate(MODEL, gpu="h100-sxm5-80gb", method="lora")
    (gemm,) = [term for term in explain(MODEL, gpu="h100-sxm5-80gb", method="lora") if term.name == "gemm"]
    assert told.origins["scale.gemm"] in gemm.origin
    assert all(told.origins[name] in gemm.origin for name in told.origins if name.startswith("curve.gemm"))


@pytest.mark.parametrize("rows", [(), ("--packing",), ("--no-packing",), ("--padding-free", "--packing",
                                   "--attn-implementation", "flash_attention_2")])  # fmt: skip
@pytest.mark.parametrize("command", ["estimate", "recommend", "report", "sweep"])
def test_a_mean_length_beside_a_file_of_samples_is_refused(command: str, rows: tuple[str, ...], tmp_path: Path) -> None:
    """Both say how long samples are."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "some words"}\n')
    more = {"sweep": ("--over", "max_length=512,1024"), "report": ("--out", str(tmp_path / "x.html"))}
    asked = [MODEL, "--gpu", "l40s", "--dataset", str(path), "--mean-tokens", "100", *rows]
    done = CliRunner().invoke(program, [command, *asked, *more.get(command, ())])
    assert done.exit_code == 2
    assert done.stderr.startswith("tunecast: ")
    assert done.stderr.endswith("--dataset and --mean-tokens both say how long samples are; keep one of them.\n")
