"""What cells beside parallelism say of how several GPUs share a model is what parallelism says."""

from __future__ import annotations

import pytest

from tunecast.calibrate.published import read_runs

ROW = {
    "id": "a", "model": "Llama 3.1 8B", "gpu": "H100 80GB SXM", "gpus": "8", "method": "full", "quant": "none",
    "compute_dtype": "bf16", "seq_len": "2048", "packed": "yes", "micro_batch": "2", "grad_accum": "1",
    "parallelism": "DDP", "grad_checkpointing": "yes", "attention_impl": "flash2", "framework": "TRL 0.18",
    "optimizer": "AdamW", "tokens_per_s": "30000", "compile": "no",
}  # fmt: skip


def outcome(**cells: str) -> str:
    """The sharding of a row with these cells, or why it is skipped."""
    runs, skipped = read_runs([{**ROW, **cells}])
    return runs[0].run.sharding if runs else skipped[0].reason


@pytest.mark.parametrize("optimizer", ["AdamW (ZeRO-2)", "AdamW + ZeRO-1", "AdamW ZeRO 3", "AdamW (ZeRO)"])
def test_an_optimizer_that_names_another_sharding_is_refused(optimizer: str) -> None:
    assert f"optimizer {optimizer!r} and parallelism 'DDP' contradict each other" in outcome(optimizer=optimizer)


@pytest.mark.parametrize(
    ("framework", "parallelism"),
    [
        ("TRL + DeepSpeed ZeRO-3", "DDP"),
        ("TRL FSDP", "DDP"),
        ("TRL + DeepSpeed ZeRO-3", "ZeRO-2"),
        ("PyTorch DDP", "FSDP"),
        ("TRL + DeepSpeed ZeRO-1", "TP=2, DP=4"),
    ],
)
def test_a_framework_that_names_another_sharding_is_refused(framework: str, parallelism: str) -> None:
    told = outcome(framework=framework, parallelism=parallelism)
    assert f"framework {framework!r} and parallelism {parallelism!r} contradict each other" in told


@pytest.mark.parametrize(
    ("cells", "sharding"),
    [
        ({"optimizer": "AdamW (ZeRO-2)", "parallelism": "ZeRO-2"}, "zero2"),
        ({"optimizer": "AdamW (ZeRO)", "parallelism": "ZeRO-2"}, "zero2"),
        ({"framework": "TRL + DeepSpeed ZeRO-3", "parallelism": "ZeRO-3"}, "zero3"),
        ({"framework": "TRL FSDP", "parallelism": "FSDP (SHARD_GRAD_OP)"}, "fsdp-grad-op"),
        ({"framework": "TRL FSDP", "parallelism": "HSDP", "gpus": "16"}, "hsdp"),
        ({"framework": "TRL + DeepSpeed"}, "ddp"),
        ({"framework": "fsdp_qlora"}, "ddp"),
        ({"framework": "PyTorch DDP"}, "ddp"),
        ({"optimizer": "dist. Adam"}, "zero1"),
        # of one GPU no cell says how several share
        ({"framework": "TRL FSDP", "gpus": "1", "gpu": "H100", "parallelism": "none", "tokens_per_s": "3000"}, "none"),
    ],
)
def test_cells_that_say_the_same_are_read(cells: dict[str, str], sharding: str) -> None:
    assert outcome(**cells) == sharding


@pytest.mark.parametrize(
    ("parallelism", "gpus", "who"),
    [
        ("ZeRO-3", "1", "one GPU"),
        ("zero3", "1", "one GPU"),
        ("FSDP", "1", "one GPU"),
        ("fsdp", "1", "one GPU"),
        ("ZeRO-3 + CPU offload", "1", "one GPU"),
        ("TP=8, ZeRO-1", "8", "one copy of the model"),
    ],
)
def test_a_sharding_over_one_is_none_and_noted(parallelism: str, gpus: str, who: str) -> None:
    cells = {"parallelism": parallelism, "gpus": gpus, "gpu": "H100 80GB SXM", "tokens_per_s": "3000"}
    (found,), _ = read_runs([{**ROW, **cells}])
    assert found.run.sharding == "none"
    assert (found.run.offload != "none") == ("offload" in parallelism)
    (told,) = [note for note in found.reading_notes if note.startswith("parallelism")]
    assert told.startswith(f"parallelism {parallelism!r}: {who} has nobody to shard with")


@pytest.mark.parametrize(("parallelism", "gpus"), [("DDP", "1"), ("single", "1"), ("ZeRO-3", "8"), ("TP=8", "8")])
def test_nothing_is_noted_where_no_sharding_is_lost(parallelism: str, gpus: str) -> None:
    (found,), _ = read_runs([{**ROW, "parallelism": parallelism, "gpus": gpus, "tokens_per_s": "3000"}])
    assert not [note for note in found.reading_notes if note.startswith("parallelism")]


@pytest.mark.parametrize("text", ["single", "none", "single GPU", "no"])
def test_several_gpus_that_share_nothing_are_refused_in_words_of_the_cell(text: str) -> None:
    told = outcome(parallelism=text)
    assert told.startswith(f"parallelism {text!r} does not say how 8")
    assert told.endswith("write DDP, FSDP, a ZeRO stage or degrees")


@pytest.mark.parametrize("text", ["FSDP per node", "FSDP intra-node, DDP", "FSDP within each node, DDP across nodes"])
def test_fsdp_inside_machines_copies_across_them(text: str) -> None:
    assert outcome(gpus="16", parallelism=text) == "hsdp"
    assert outcome(gpus="8 (2 nodes)", parallelism=text) == "hsdp"
    assert outcome(gpus="16", parallelism="FSDP across nodes") == "fsdp"


def test_a_recipe_that_no_cell_says_is_taken_from_the_framework_or_named_where_it_is_not_built() -> None:
    cells = {**ROW, "framework": "Megatron-Bridge", "model": "Llama-3.1-8B"}
    del cells["grad_checkpointing"]
    (read,), _ = read_runs([cells])
    assert read.run.checkpoint_first == 5  # recompute_num_layers of its llama3 8B on H100
    large = {**cells, "parallelism": "fsdp"}
    _, (skipped,) = read_runs([large])
    assert skipped.reason.startswith("Megatron's own FSDP")
