"""What cells beside parallelism say of how several GPUs share a model is what parallelism says."""

from __future__ import annotations

import pytest

from tunecast.calibrate.published import read_runs
from tunecast.model.loading import loads_whole

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


@pytest.mark.parametrize("text", ["", "not stated", "unknown"])
def test_one_gpu_has_nothing_to_state_of_parallelism(text: str) -> None:
    """In a table whose other rows ran on several; an empty cell of theirs is refused as before."""
    assert outcome(parallelism=text, gpus="1", gpu="H100 80GB SXM", tokens_per_s="3000") == "none"
    assert outcome(parallelism=text, gpus="", gpu="1x H100 80GB SXM", tokens_per_s="3000") == "none"
    assert outcome(parallelism=text) == "parallelism is not stated: write DDP, FSDP, a ZeRO stage or degrees"


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


PAIR = {"gpus": "2", "parallelism": "FSDP", "tokens_per_s": "3000"}


@pytest.mark.parametrize(
    "cells",
    [
        {"gpu": "RTX 3090 (NVLink)"},
        {"gpu": "2x RTX 3090 with NVLink bridge"},
        {"gpu": "A100 PCIe 80GB", "parallelism": "FSDP over NVLink"},
        {"gpu": "RTX A6000", "parallelism": "DDP, NVLink bridge"},
    ],
)
def test_a_word_on_nvlink_is_one_on_bridges_of_cards_that_have_them(cells: dict[str, str]) -> None:
    (read,), _ = read_runs([{**ROW, **PAIR, **cells}])
    said = next(column for column in ("parallelism", "gpu") if "NVLink" in cells.get(column, ""))
    assert read.network == {"nvlink": True}
    assert f"{said} {cells[said]!r}: bridges join the cards." in read.reading_notes


@pytest.mark.parametrize(
    "cells",
    [
        {"gpu": "RTX 3090"},
        {"gpu": "RTX 3090 (NVLink)", "gpus": "1", "parallelism": "none", "tokens_per_s": "300"},
        {"gpu": "H100 80GB SXM (NVLink)"},
        {"gpu": "H100 80GB SXM", "parallelism": "FSDP over NVLink"},
    ],
)
def test_without_a_word_with_one_gpu_or_with_nvlink_of_its_own_nothing_is_said_of_bridges(
    cells: dict[str, str],
) -> None:
    (read,), _ = read_runs([{**ROW, **PAIR, **cells}])
    assert read.network == {}
    assert not any("bridge" in note for note in read.reading_notes)


def test_nvlink_of_more_cards_than_a_bridge_joins_is_told_and_pcie_beside_it_contradicts_it() -> None:
    (read,), _ = read_runs([{**ROW, **PAIR, "gpu": "RTX 3090 (NVLink)", "gpus": "4"}])
    assert "gpu 'RTX 3090 (NVLink)': a bridge joins 2 cards, PCIe the rest." in read.reading_notes
    told = outcome(**{**PAIR, "gpu": "RTX 3090 (NVLink)", "parallelism": "FSDP over PCIe"})
    assert told == "gpu 'RTX 3090 (NVLink)' and parallelism 'FSDP over PCIe' contradict each other"


def test_a_card_without_nvlink_has_no_bridge_and_parallelism_beside_it_agrees() -> None:
    (read,), _ = read_runs([{**ROW, **PAIR, "gpu": "RTX 3090 (no NVLink)"}])
    assert read.network == {"nvlink": False}
    told = outcome(**{**PAIR, "gpu": "RTX 3090 (no NVLink)", "parallelism": "FSDP over NVLink"})
    assert told == "gpu 'RTX 3090 (no NVLink)' and parallelism 'FSDP over NVLink' contradict each other"


@pytest.mark.parametrize(
    ("framework", "whole"), [("torchtune ~0.3", False), ("TRL 1.16", True), ("own PyTorch FSDP loop", False)]
)
def test_only_the_trainers_code_loads_a_quantized_base_on_every_gpu(framework: str, whole: bool) -> None:
    """torchtune's table has 405B by QLoRA on eight A100 of 80 GB, which hold a share of it alone."""
    cells = {"method": "qlora", "quant": "nf4", "rank": "16", "lora_targets": "all-linear", "parallelism": "FSDP"}
    (found,), _ = read_runs([{**ROW, **cells, "framework": framework, "source_date": "2026-09-01"}])
    assert loads_whole(found.run) is whole
