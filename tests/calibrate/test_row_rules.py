"""What one page's code is known to do fills the silent cells of its own rows: never a cell that says otherwise, and no
row of somebody else that happens to share a word with it."""

from __future__ import annotations

from typing import Any

import pytest
from table_rows import one, reason

ROW = {
    "id": "blog-1", "source": "a blog", "source_date": "2025-03-10", "kind": "pretrain",
    "model": "meta-llama/Llama-2-70b-hf", "method": "full", "rank": "", "lora_targets": "", "quant": "none",
    "compute_dtype": "bf16", "seq_len": "4096", "packed": "yes", "micro_batch": "1", "grad_accum": "8", "gpus": "64",
    "gpu": "H100 80GB SXM", "parallelism": "TP4 PP4", "grad_checkpointing": "no", "attention_impl": "", "compile": "no",
    "framework": "NeMo 24.07", "optimizer": "", "tokens_per_s": "400",
}  # fmt: skip
BRIDGE = {**ROW, "framework": "Megatron-Bridge 25.09", "model": "meta-llama/Llama-3.1-70B"}
LORA = {**ROW, "method": "LoRA", "kind": "finetune", "gpus": "8", "parallelism": "tp2/pp4"}
ALONE = {
    **ROW, "model": "meta-llama/Llama-3.1-8B", "gpus": "1", "parallelism": "single", "optimizer": "adamw_torch",
    "attention_impl": "sdpa",
}  # fmt: skip
SWIFT = {**ALONE, "framework": "ms-swift 3.8", "kind": "sft", "attention_impl": "flash_attn", "seq_len": "16384"}
TITAN = {**ALONE, "framework": "torchtitan", "gpus": "8"}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        # a degree that the cell states is the run's; one that no cell states is what the page's scripts set
        ({**ROW, "parallelism": "TP4 PP4 VP4"}, {"pp_interleave": 4}),
        (ROW, {"pp_interleave": 20}),
        ({**ROW, "parallelism": "TP4"}, {"pp_interleave": 1}),
        ({**BRIDGE, "parallelism": "tp4/pp4/vp2"}, {"pp_interleave": 2}),
        ({**BRIDGE, "model": "Qwen/Qwen2.5-32B", "parallelism": "tp4/pp4"}, {"pp_interleave": 1}),
        # NeMo's LoRA recipes turn sequence parallelism off, however the cells are spelled, but no cell that has it on
        (LORA, {"sequence_parallel": False, "async_tp": False}),
        ({**LORA, "parallelism": "TP2 PP4", "framework": "NVIDIA NeMo 24.07"}, {"sequence_parallel": False}),
        ({**LORA, "parallelism": "tp2+sp/pp4"}, {"sequence_parallel": True, "async_tp": False}),
        # samples of 220 tokens are those of a packed SQuAD
        ({**BRIDGE, "kind": "finetune"}, {"attention_length": 220}),
        ({**BRIDGE, "kind": "finetune", "packed": "no packing, samples fill seq_len"}, {"attention_length": None}),
        # attention keeps packed samples apart, whose length no cell says; other attention and other rows do not
        (SWIFT, {"attention_length": 8192}),
        ({**SWIFT, "attention_impl": "sdpa"}, {"attention_length": None}),
        ({**SWIFT, "packed": "no packing, samples fill seq_len"}, {"attention_length": None}),
        ({**SWIFT, "kind": "pretrain"}, {"attention_length": None}),
        ({**SWIFT, "framework": "axolotl 0.9", "packed": "yes, neat_packing"}, {"attention_length": 8192}),
        # torchtitan shards its copies, and keeps and reduces nothing in shards where there are none
        ({**TITAN, "parallelism": "TP2, DP4"}, {"sharding": "fsdp", "reduce_dtype": "fp32"}),
        ({**TITAN, "parallelism": "TP8"}, {"sharding": "none", "reduce_dtype": None, "dtype": "bf16"}),
        ({**TITAN, "parallelism": "DDP"}, {"sharding": "ddp", "reduce_dtype": None}),
        (
            {**TITAN, "grad_checkpointing": "selective AC every 2nd layer", "parallelism": "FSDP"},
            {"checkpoint_every": 2},
        ),
    ],
)
def test_a_rule_gives_way_to_what_a_cell_states(cells: dict[str, str], expected: dict[str, Any]) -> None:
    run = one(cells).run
    assert {name: getattr(run, name) for name in expected} == expected


@pytest.mark.parametrize(
    "cells",
    [
        {"id": "UN-01", "framework": "Unsloth 2025.3", "attention_impl": ""},
        {"id": "TM-1", "framework": "torchtune 0.6"},
        {"framework": "LitGPT", "model": "microsoft/Phi-3-mini-4k-instruct", "peak_mem_gib": "60"},
    ],
)
def test_a_row_is_not_thrown_away_for_what_another_page_leaves_out(cells: dict[str, str]) -> None:
    assert one({**ALONE, **cells}).tokens_per_s == 400.0


def test_documents_of_a_split_row_are_refused() -> None:
    told = reason({**SWIFT, "gpus": "4", "parallelism": "ZeRO-3 + Ulysses sequence parallel 4"})
    assert told.startswith("attention inside documents of packed rows is not built with context parallelism")


def test_what_a_rule_fills_is_told_with_its_source() -> None:
    notes = " ".join(one(LORA).reading_notes)
    assert "rank is not stated: '32' is taken (NeMo-Framework-Launcher conf/peft/llama/squad.yaml" in notes
    assert "pp_interleave is not stated: 20 is taken" in " ".join(one(ROW).reading_notes)


def test_a_network_that_the_row_states_is_the_runs() -> None:
    stated = {**TITAN, "parallelism": "FSDP", "gpus": "16"}
    assert one(stated).internode_gbps == 3200.0
    assert one({**stated, "internode_gbps": "400"}).internode_gbps == 400.0


def test_a_rank_beside_full_training_is_a_contradiction() -> None:
    assert reason({**ALONE, "rank": "16"}) == "rank '16' is of adapters, but method 'full' trains all weights"


@pytest.mark.parametrize(
    ("cell", "offloaded"),
    [("use_gradient_checkpointing=True", False), ("HF gradient checkpointing", False), ("unsloth", True)],
)
def test_unsloth_keeps_checkpoints_in_host_memory_by_its_own_kind_alone(cell: str, offloaded: bool) -> None:
    """``use_gradient_checkpointing="unsloth"`` in unsloth/models/_utils.py; True is transformers' own."""
    row = {**ALONE, "method": "lora", "rank": "16", "lora_targets": "all-linear", "attention_impl": ""}
    run = one({**row, "framework": "Unsloth 2025.3", "grad_checkpointing": cell}).run
    assert (run.gradient_checkpointing, run.activation_offloading) == (True, offloaded)


def test_flash_attention_on_a_card_older_than_ampere_is_refused() -> None:
    told = reason({**ALONE, "gpu": "T4", "attention_impl": "flash_attention_2", "compute_dtype": "fp16",
                   "framework": "transformers 4.49"})  # fmt: skip
    assert told.startswith("attention_impl 'flash_attention_2': FlashAttention-2 needs Ampere")


@pytest.mark.parametrize(
    ("cell", "sharding", "offload"),
    [
        ("ZeRO-3 bf16", "zero3", "none"),
        ("FSDP mixed precision bf16", "fsdp", "none"),
        ("zero3_bf16_cpuoffload_all", "zero3", "all"),
        ("ZeRO-3, offload_param + offload_optimizer to cpu", "zero3", "all"),
        ("ZeRO-3 with offload_optimizer=cpu", "zero3", "optimizer"),
        ("ZeRO-3 (offload optimizer: cpu, offload param: none)", "zero3", "optimizer"),
        ("ZeRO-3 Offload (optimizer states on CPU, params on GPU)", "zero3", "optimizer"),
        ("ZeRO-3, CPU offload for optimizer states only", "zero3", "optimizer"),
        ("FSDP offload_params: true", "fsdp", "all"),
        ("FSDP offload_params: false", "fsdp", "none"),
        ("8-way FSDP", "fsdp", "none"),
        ("FSDP FULL_SHARD, BACKWARD_PRE, transformer auto wrap", "fsdp", "none"),
    ],
)
def test_sharding_and_offload_as_people_write_them(cell: str, sharding: str, offload: str) -> None:
    run = one({**ALONE, "gpus": "8", "framework": "TRL 0.20", "parallelism": cell}).run
    assert (run.sharding, run.offload) == (sharding, offload)


@pytest.mark.parametrize(("cell", "pp"), [("tp_size 2, pp_size 4", 4), ("2-way tensor, 4-way pipeline", 4)])
def test_degrees_as_people_write_them(cell: str, pp: int) -> None:
    run = one({**ROW, "gpus": "8", "parallelism": cell}).run
    assert (run.tp, run.pp) == (2, pp)


def test_checkpointing_named_beside_the_sharding_contradicts_a_cell_that_denies_it() -> None:
    row = {**ALONE, "gpus": "8", "framework": "TRL 0.20", "parallelism": "FSDP + activation checkpointing"}
    assert one({**row, "grad_checkpointing": "yes"}).run.gradient_checkpointing
    assert "contradict each other" in reason(row)


@pytest.mark.parametrize(
    ("cell", "counter"),
    [
        ("peak_memory_alloc", "allocated"),
        ("memory/max_reserved(GiB)", "reserved"),
        ("allocated/reserved", "allocated/reserved"),
        ("memory/max_reserved(%)", "memory/max_reserved(%)"),
    ],
)
def test_a_counter_is_one_counter_in_bytes(cell: str, counter: str) -> None:
    assert one({**ALONE, "peak_mem_gib": "60", "reserved_or_allocated": cell}).counter == counter


@pytest.mark.parametrize("cell", ["TRL 0.15 w/ Liger", "axolotl-ai-cloud/axolotl v0.7", "NVIDIA Megatron-Bridge 25.09"])
def test_software_as_people_write_it(cell: str) -> None:
    assert one({**ALONE, "framework": cell, "optimizer": "AdamW, betas 0.9/0.95"}).tokens_per_s


@pytest.mark.parametrize(
    ("cells", "speed"),
    [
        ({"tokens_per_s": "300 (avg)"}, 300.0),
        ({"tokens_per_s": "", "step_time_s": "1.5 min"}, 8 * 4096 / 90.0),
        ({"tokens_per_s": "", "tokens_per_s_per_gpu": "300 TGS"}, 300.0),
    ],
)
def test_speeds_as_people_write_them(cells: dict[str, str], speed: float) -> None:
    assert one({**ALONE, "framework": "TRL 0.20", **cells}).tokens_per_s == pytest.approx(speed)
