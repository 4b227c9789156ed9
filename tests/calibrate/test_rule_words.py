"""The same run in other words is the same run; what nobody states is not told as stated; contradictions are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from table_rows import one, reason

from tunecast.validation_reading import read_as

ROW = {
    "id": "own-1", "source_date": "2025-06", "kind": "pretrain", "model": "meta-llama/Meta-Llama-3-70B",
    "method": "full", "rank": "", "lora_targets": "", "quant": "none", "compute_dtype": "bf16", "seq_len": "4096",
    "packed": "yes", "micro_batch": "1", "grad_accum": "8", "gpus": "32", "gpu": "H100 80GB SXM",
    "parallelism": "tp4/pp4/dp2", "grad_checkpointing": "no", "attention_impl": "", "compile": "no",
    "framework": "Megatron-Bridge", "optimizer": "", "tokens_per_s": "20000",
}  # fmt: skip
NEMO = {**ROW, "framework": "NeMo 24.07", "model": "meta-llama/Llama-2-70b-hf"}
PLAIN = {
    **ROW, "model": "meta-llama/Llama-3.1-8B", "gpus": "8", "parallelism": "FSDP", "optimizer": "adamw_torch",
    "attention_impl": "sdpa", "framework": "PyTorch",
}  # fmt: skip
AUTOMODEL = {
    **PLAIN, "framework": "NeMo AutoModel (PyTorch)", "gpus": "1", "parallelism": "single", "method": "LoRA",
    "rank": "16", "lora_targets": "all-linear", "model": "meta-llama/Llama-3.1-8B", "source_date": "2026-04",
}  # fmt: skip
TITAN = {**PLAIN, "framework": "torchtitan", "compute_dtype": "bf16 mixed precision", "gpus": "16"}
FOUNDRY = {**PLAIN, "framework": "LLM Foundry", "attention_impl": "flash_attn"}


@pytest.mark.parametrize(
    ("known", "column", "spellings"),
    [
        (ROW, "parallelism", ["TP=4, PP=4, DP=2", "TP:4 PP:4", "tp 4, pp 4, dp 2", "TP4 PP4 DP2"]),
        (ROW, "seq_len", ["4k", "4,096"]),
        (ROW, "model", ["Llama-3-70B", "Llama 3 70B", "llama3-70b"]),
        (ROW, "framework", ["NeMo Megatron-Bridge", "megatron_bridge", "NVIDIA Megatron Bridge"]),
        (NEMO, "framework", ["NeMo (24.07)", "nemo:24.07", "NeMo-Megatron 24.07", "NVIDIA NeMo Framework 24.07"]),
        (NEMO, "parallelism", ["TP=4, PP=4"]),
        (NEMO, "packed", ["ja"]),
        (PLAIN, "packed", ["ja"]),
        (PLAIN, "grad_checkpointing", ["nein", "keine", "kein"]),
        ({**PLAIN, "grad_checkpointing": "yes"}, "grad_checkpointing", ["ja", "Ja"]),
        (PLAIN, "quant", ["keine", "nein"]),
        (AUTOMODEL, "framework", ["nemo-automodel", "NVIDIA NeMo AutoModel"]),
        (AUTOMODEL, "parallelism", ["single GPU", "none"]),
        (AUTOMODEL, "model", ["Llama 3.1 8B"]),
        (TITAN, "framework", ["pytorch/torchtitan", "torch-titan", "TorchTitan"]),
        (TITAN, "compute_dtype", ["bf16 mixed", "bf16 autocast"]),
        (FOUNDRY, "framework", ["llm-foundry", "LLM-Foundry", "MosaicML LLM Foundry"]),
    ],
)
def test_another_spelling_is_the_same_run(known: dict[str, str], column: str, spellings: list[str]) -> None:
    expected = one(known)
    for text in spellings:
        found = one({**known, column: text})
        assert replace(found, reading_notes=(), stated=expected.stated) == replace(expected, reading_notes=())


def test_rules_do_something_for_these_rows() -> None:
    """Else the test above would compare nothing with nothing."""
    assert one(ROW).run.pp_interleave > 1
    assert one(NEMO).run.async_tp
    assert one(AUTOMODEL).run.fused_kernels
    assert one(TITAN).run.sync_each_micro_batch
    assert one(FOUNDRY).run.fused_kernels == ("cross_entropy",)


@pytest.mark.parametrize(("gpu", "gbps"), [("H100 80GB SXM", 3200.0), ("A10G", None), ("A100 80GB SXM", None)])
def test_a_page_of_one_cluster_says_nothing_of_other_cards(gpu: str, gbps: float | None) -> None:
    found = one({**TITAN, "gpu": gpu, "model": "meta-llama/Llama-3.2-1B"})
    assert found.internode_gbps == gbps
    assert ("Gbit/s between machines" in read_as(found)) == (gbps is not None)


@pytest.mark.parametrize(
    ("cells", "version"),
    [
        ({"framework": "Lightning Fabric"}, 1), ({"source_date": "2023-05"}, 1), ({"source_date": "2025-05"}, 2),
        ({"framework": "Lightning Fabric", "parallelism": "FSDP2"}, 2), ({**TITAN, "source_date": "2024-06"}, 2),
    ],
)  # fmt: skip
def test_fsdp_is_the_version_that_there_was(cells: dict[str, str], version: int) -> None:
    assert one({**PLAIN, **cells}).run.fsdp_version == version


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"compile": "yes?"}, "compile 'yes?' is doubted"), ({"gpu": "H100 SXM?"}, "gpu 'H100 SXM?' is doubted"),
        ({"packed": "yes (?)"}, "packed 'yes (?)' is doubted"), ({"framework": "TRL?"}, "framework 'TRL?' is doubted"),
        ({"method": "SFT", "framework": "Unsloth"}, "write full, LoRA or QLoRA"),
        ({"method": "instruction tuning", "rank": "16"}, "write full, LoRA or QLoRA"),
        (
            {"packed": "padded to max length", "step_time_s": "0.82", "samples_per_s": "600", "tokens_per_s": ""},
            "samples_per_s '600' contradict each other",
        ),
        ({"total_time_h": "0.02", "total_tokens_or_steps": "1098 steps"}, "contradict each other"),
    ],
)  # fmt: skip
def test_what_is_doubted_or_contradicts_is_refused(cells: dict[str, str], says: str) -> None:
    assert says in reason({**PLAIN, **cells})


def test_wall_time_longer_than_training_is_no_contradiction() -> None:
    assert one({**PLAIN, "total_time_h": "8", "total_tokens_or_steps": "1098 steps"}).tokens_per_s == 20000.0


def silent(found: Any) -> str:
    """What a reading says that no cell states."""
    return read_as(found).partition(" Stated by no cell")[2]


def test_a_word_for_what_is_learnt_is_no_statement_of_the_method() -> None:
    found = one({**PLAIN, "method": "SFT"})
    assert found.run.method == "full"
    assert "method full" in silent(found)
    assert any("'SFT' says what is learnt" in note for note in found.reading_notes)
    assert "method" not in silent(one({**PLAIN, "method": "full fine-tuning"}))


def test_tensor_parallel_alone_does_not_state_that_tokens_are_split() -> None:
    found = one({**PLAIN, "parallelism": "TP8"})
    assert found.run.sequence_parallel
    assert "assumed: sequence parallel" in silent(found)
    assert "sequence parallel" not in silent(one({**PLAIN, "parallelism": "TP8 + SP"}))


def test_a_base_that_the_method_names_is_stated() -> None:
    cells = {
        "method": "QLoRA (4-bit NF4)", "rank": "16", "lora_targets": "all-linear", "quant": "nf4", "gpus": "1",
        "parallelism": "single",
    }  # fmt: skip
    assert "base in" not in silent(one({name: text for name, text in {**PLAIN, **cells}.items() if name != "quant"}))


def test_steps_of_a_table_without_packed_are_taken_as_full_and_said_to_be() -> None:
    cells = {**PLAIN, "step_time_s": "15", "tokens_per_s": ""}
    found = one({name: text for name, text in cells.items() if name != "packed"})
    assert found.tokens_per_s == pytest.approx(found.run.tokens_per_step / 15.0)
    assert any(note.startswith("packed is no column") for note in found.reading_notes)
    assert "assumed: every sample taken as 4,096 tokens" in silent(found)


def test_gate_beside_up_and_down_is_no_router() -> None:
    moe = {
        **PLAIN,
        "model": "Qwen/Qwen3-30B-A3B",
        "method": "LoRA",
        "rank": "16",
        "framework": "TRL",
        "source_date": "2025-01",
    }
    short = one({**moe, "lora_targets": "q,k,v,o,gate,up,down"}).run
    long = one({**moe, "lora_targets": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"}).run
    assert set(short.lora_target_modules) == set(long.lora_target_modules)
    assert "gate" in one({**moe, "lora_targets": "q_proj,gate"}).run.lora_target_modules


def test_a_stated_dropout_is_kept_and_one_of_a_recipe_is_told() -> None:
    silent_row, stated = one(AUTOMODEL), one({**AUTOMODEL, "method": "LoRA, dropout=0"})
    assert (silent_row.run.lora_dropout, stated.run.lora_dropout) == (0.1, 0.0)
    assert any(note.startswith("lora_dropout is not stated: 0.1 is taken") for note in silent_row.reading_notes)
