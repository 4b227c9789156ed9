"""Whole rows as other people write them: what runs they become, by the defaults of the software that they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from table_rows import one, reason

from tunecast.calibrate.named_things import gpu_called, model_called
from tunecast.calibrate.published import read_runs
from tunecast.calibrate.run_table import SkipRowError
from tunecast.catalogs.errors import TunecastError
from tunecast.model.priors import load_priors

FULL = {
    "id": "blog-1", "model": "Llama 3.1 8B", "gpu": "8xH100 80GB SXM", "method": "full fine-tune", "quant": "none",
    "compute_dtype": "bf16", "seq_len": "8k", "packed": "sample packing", "micro_batch": "1", "grad_accum": "4",
    "gpus": "8", "parallelism": "ZeRO-3", "grad_checkpointing": "on", "attention_impl": "FlashAttention-2",
    "compile": "no", "framework": "Axolotl 0.10", "optimizer": "AdamW fused", "source_date": "2025-08",
    "rank": "", "lora_targets": "", "tokens_per_s": "~1,200",
}  # fmt: skip
LORA = {**FULL, "method": "LoRA", "rank": "r=16", "lora_targets": "all linear", "parallelism": "DDP"}
ALONE = {"gpu": "H100 80GB SXM", "gpus": "1", "parallelism": "single"}
QLORA = {**LORA, "method": "QLoRA", "quant": "NF4", "gpus": "1", "gpu": "RTX 4090", "parallelism": "single GPU"}
GPTQ = {**QLORA, "framework": "HF Trainer + PEFT", "quant": "gptq-int4", "compute_dtype": "fp16 mixed"}
SMALL = {
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256
}  # fmt: skip
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("cells", "label", "expected"),
    [
        # accelerate puts no autocast around DeepSpeed's engine, which casts the model to 16 bits
        (FULL, "axolotl", {"sharding": "zero3", "dtype": "bf16", "precision": "bf16", "max_length": 8192}),
        # accelerate's FSDP is version 1 unless asked, and keeps trained shards in fp32 under mixed precision
        (
            {**FULL, "parallelism": "FSDP", "compute_dtype": "bf16 mixed"},
            "axolotl",
            {"fsdp_version": 1, "master_dtype": "fp32", "dtype": "bf16", "precision": "bf16-autocast"},
        ),
        # the Trainer of transformers 5 shards by version 2
        ({**LORA, "parallelism": "FSDP", "framework": "transformers 5.1"}, "hf-peft", {"fsdp_version": 2}),
        ({**LORA, "parallelism": "FSDP", "framework": "transformers 4.50"}, "hf-peft", {"fsdp_version": 1}),
        # LLaMA-Factory raises trained parameters to fp32 unless pure_bf16
        (
            {**FULL, "framework": "LLaMA-Factory", "parallelism": "DDP"},
            "llama-factory",
            {"dtype": "fp32", "precision": "bf16-autocast", "reentrant": True, "hf_code": "4.49"},
        ),
        # textbook mixed precision of an own loop: fp32 weights under autocast
        (
            {**FULL, "framework": "own PyTorch script", "parallelism": "DDP", "compute_dtype": "bf16 autocast"},
            "pytorch",
            {"dtype": "fp32", "precision": "bf16-autocast", "sharding": "ddp"},
        ),
        # DLRover wraps fp32 weights in FSDP without MixedPrecision, and puts autocast around the forward: no accelerate
        (
            {**FULL, "framework": "ATorch", "parallelism": "FSDP", "compute_dtype": "bf16 amp (fp32 weights)"},
            "atorch",
            {"dtype": "fp32", "precision": "bf16-autocast", "master_dtype": None, "fsdp_version": 1},
        ),
        # nanoGPT runs under autocast whatever its dtype; Lightning calls that bf16, and the other bf16-true
        (
            {**FULL, "framework": "nanoGPT", "parallelism": "DDP", "model": "GPT-2 XL", "seq_len": "1k"},
            "nanogpt",
            {"dtype": "fp32", "precision": "bf16-autocast"},
        ),
        (
            {**FULL, "framework": "PyTorch Lightning", "parallelism": "DDP", "compute_dtype": "bf16-true"},
            "lightning",
            {"dtype": "bf16", "precision": "bf16"},
        ),
        # AutoGPTQ's CUDA layers, which transformers took before GPTQModel, unpack by torch's operators in training
        (
            {**GPTQ, "source_date": "2024-03"},
            "hf-peft",
            {"quant_method": "gptq-4bit", "gptq_kernel": "torch"},
        ),
        (
            {**GPTQ, "source_date": "2026-03"},
            "hf-peft",
            {"quant_method": "gptq-4bit", "gptq_kernel": "triton"},
        ),
        # Unsloth: its own kernels and offloaded checkpoints, cut cross-entropy until December 2025
        (
            {**QLORA, "framework": "Unsloth 2025.6", "grad_checkpointing": "unsloth", "optimizer": "adamw_8bit"},
            "unsloth",
            {
                "fused_kernels": ("rms_norm", "rope", "swiglu", "lora"), "loss_type": "cut_cross_entropy",
                "activation_offloading": True, "optim": "adamw_8bit", "bnb_4bit_quant_type": "nf4", "hf_code": "4.49",
            },
        ),
        # an AdamW that the table names is not replaced by the notebooks' 8-bit one, nor a checkpointing that is off
        (
            {**QLORA, "framework": "Unsloth", "grad_checkpointing": "no", "optimizer": "AdamW"},
            "unsloth",
            {"optim": "adamw_torch", "gradient_checkpointing": False, "activation_offloading": False},
        ),
        # TRL's command line adapts q_proj and v_proj
        ({**LORA, "framework": "TRL 1.0", "lora_targets": ""}, "trl", {"lora_target_modules": ("q_proj", "v_proj")}),
        ({**LORA, "framework": "TRL + Liger Kernel"}, "trl", {"loss_type": "liger", "lora_dropout": 0.05}),
        # Megatron: joined maps, Transformer Engine, states over data parallelism only where that is said
        (
            {**LORA, "framework": "NeMo 25.02", "parallelism": "TP2 DP4", "attention_impl": "TE"},
            "megatron",
            {
                "sharding": "ddp", "tp": 2, "sequence_parallel": True, "adapter_dtype": "bf16",
                "lora_target_modules": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
                "fused_kernels": ("rms_norm", "rope", "swiglu", "cross_entropy", "attention"),
            },
        ),
        ({**FULL, "framework": "Megatron-LM", "parallelism": "TP=2, PP=2"}, "megatron", {"sharding": "ddp", "pp": 2}),
        (
            {**FULL, "framework": "Megatron-LM", "parallelism": "TP2/PP2", "optimizer": "distributed AdamW"},
            "megatron",
            {"sharding": "zero1", "optim": "adamw_torch_fused", "precision": "bf16"},
        ),
        (
            {**FULL, "framework": "NeMo 25.02", "parallelism": "TP8", "grad_checkpointing": "selective"},
            "megatron",
            {"recompute_attention": True, "gradient_checkpointing": False},
        ),
        (
            {**FULL, "framework": "torchtitan", "parallelism": "FSDP2", "grad_checkpointing": "selective (op)"},
            "torchtitan",
            {"master_dtype": "fp32", "checkpoint_keeps_ops": True, "fsdp_version": 2},
        ),
        (
            {**LORA, "framework": "litgpt 0.5.11", "gpus": "1", "gpu": "A100 80GB", "parallelism": "single",
             "attention_impl": "sdpa", "lora_targets": "q, v", "optimizer": "AdamW", "compute_dtype": "bf16-true"},
            "litgpt",
            {"stack": "litgpt", "lora_target_modules": ("query", "value"), "adapter_dtype": "bf16"},
        ),
        # PEFT before 0.12 made adapters in the dtype of the base; transformers then recomputed reentrantly
        (
            {**LORA, "framework": "transformers 4.44, peft 0.11", "attention_impl": "SDPA"},
            "hf-peft",
            {"adapter_dtype": "bf16", "reentrant": True, "hf_code": "4.45"},
        ),
        ({**LORA, "method": "LoRA", "quant": "8-bit", **ALONE}, "axolotl",
         {"method": "qlora", "quant_method": "bnb-8bit"}),
        ({**LORA, "lora_targets": "attention only", "model": "Phi-3 mini", "seq_len": "4k"}, "axolotl",
         {"lora_target_modules": ("qkv_proj", "o_proj")}),
        ({**LORA, "lora_targets": "q,k,v", "model": "Phi-3 mini", "seq_len": "4k"}, "axolotl",
         {"lora_target_modules": ("qkv_proj",)}),
        ({**LORA, "method": "LoRA (8-bit, r=64)", "rank": "", "quant": "8-bit", **ALONE}, "axolotl",
         {"method": "qlora", "quant_method": "bnb-8bit", "lora_r": 64}),
        ({**FULL, "parallelism": "ZeRO-3 + CPU offload", "optimizer": "CPU Adam"}, "axolotl", {"offload": "all"}),
        ({**LORA, "lora_targets": "attention + mlp"}, "axolotl", {"lora_target_modules": LINEAR}),
        ({**LORA, "lora_targets": "all linear (q,k,v,o,gate,up,down)"}, "axolotl", {"lora_target_modules": LINEAR}),
        ({**QLORA, "gpus": "2", "parallelism": "FSDP-QLoRA"}, "axolotl", {"sharding": "fsdp", "method": "qlora"}),
        ({**FULL, "gpus": "16 (2 nodes)", "gpu": "H100", "parallelism": "HSDP (shard 8, replicate 2)"}, "axolotl",
         {"sharding": "hsdp", "gpus_per_node": 8}),
        ({**LORA, "lora_targets": "PEFT default"}, "axolotl", {"lora_target_modules": ("q_proj", "v_proj")}),
    ],
)  # fmt: skip
def test_a_row_becomes_the_run_that_its_software_makes(
    cells: dict[str, str], label: str, expected: dict[str, object]
) -> None:
    found = one(cells)
    assert found.stack == label
    assert {name: getattr(found.run, name) for name in expected} == expected
    assert found.tokens_per_s == 1200.0


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({**FULL, "framework": "MaxText"}, "JAX is not PyTorch"),
        ({**FULL, "framework": "Optimum Habana"}, "Gaudi accelerators are not built"),
        ({**FULL, "framework": "PaddleNLP"}, "PaddlePaddle is not PyTorch"),
        ({**FULL, "framework": "CUDA 12.4, flash-attn 2.7"}, "names no training software"),
        ({**FULL, "framework": "zorblax 2.0"}, "framework 'zorblax 2.0' is not in the vocabulary"),
        ({**FULL, "framework": "Axolotl with zorblax"}, "framework 'Axolotl with zorblax': 'zorblax' is not"),
        ({**QLORA, "framework": "unsloth", "source_date": "2024-02"}, "of unsloth of 2024-02 are not recorded"),
        (
            {**FULL, "framework": "NeMo 25.02", "parallelism": "TP8", "grad_checkpointing": "selective (layernorm)"},
            "grad_checkpointing 'selective (layernorm)': what its selective checkpoints keep",
        ),
        ({**QLORA, "framework": "PEFT", "lora_targets": ""}, "lora_targets is not stated"),
        ({**QLORA, "framework": "PEFT", "grad_checkpointing": "not stated"}, "does not state whether it checkpoints"),
        ({**QLORA, "framework": "HF Trainer", "source_date": "2023-05", "attention_impl": ""}, "the attention kernel"),
        ({**QLORA, "quant": "none"}, "quant 'none' contradicts method 'QLoRA'"),
        ({**FULL, "packed": "no (mean 8192 tokens a sample)", "micro_batch": "2"}, "only where micro_batch is 1"),
        ({**FULL, "packed": "packed to 4096"}, "seq_len '8k' and packed 'packed to 4096' contradict each other"),
        ({**FULL, "attention_impl": "FA3", "gpu": "8x A100 80GB"}, "written for Hopper, which a100-sxm4-80gb is not"),
        ({**FULL, "gpu": "A100"}, "gpu 'A100' does not say which of"),
        ({**FULL, "gpu": ""}, "gpu is not stated"),
        ({**FULL, "model": "Zorblax 9B"}, "Unknown model 'Zorblax 9B'"),
        ({**LORA, "lora_targets": "zorblax"}, "zorblax"),
        ({**LORA, "lora_targets": "q_proj, v_proj (all linear)"}, "which are not all linear maps, and all of them"),
        ({**LORA, "method": "LoRA r=64"}, "rank 'r=16' contradicts method 'LoRA r=64'"),
        ({**LORA, "method": "LoRA (8-bit)"}, "quant 'none' contradicts method 'LoRA (8-bit)'"),
        ({**FULL, "optimizer": "CPU Adam"}, "but parallelism 'ZeRO-3' does not offload it: write the offload"),
        ({**FULL, "method": "full fine-tune (4-bit)", "quant": "4-bit"}, "all weights are trained, and lie in 4 bits"),
        (
            {**FULL, "grad_checkpointing": "selective"},
            "grad_checkpointing 'selective': what its selective checkpoints keep is not stated",
        ),
        ({**LORA, "method": "r=16, 4-bit"}, "method 'r=16, 4-bit' names no method"),
        ({**LORA, "rank": "many"}, "rank 'many'"),
        ({**FULL, "parallelism": "single GPU"}, "does not say how 8 copies share the work"),
        ({**FULL, "parallelism": "8 GPUs"}, "does not say how 8 copies share the work"),
        ({**LORA, "parallelism": "FSDP + QLoRA"}, "parallelism 'FSDP + QLoRA' contradicts method 'LoRA'"),
    ],
)  # fmt: skip
def test_a_row_that_would_need_a_guess_is_skipped_by_name(cells: dict[str, str], told: str) -> None:
    assert told in reason(cells)


def test_what_a_stacks_code_says_for_an_empty_cell_is_said() -> None:
    empty = {"grad_checkpointing": "", "rank": "", "lora_targets": "library default"}
    found = one({**QLORA, "framework": "Unsloth 2026.1", **empty})
    assert (found.run.lora_r, found.run.lora_target_modules, found.run.activation_offloading) == (16, LINEAR, True)
    assert [note.split()[0] for note in found.reading_notes] == ["grad_checkpointing", "lora_targets", "rank"]
    assert all("default of unsloth" in note for note in found.reading_notes)


def test_what_nemos_recipes_leave_out_is_read_from_them() -> None:
    """recipes/llama3_8b.py checkpoints nothing and shards the optimizer's states; Megatron-Core's fp8 scales with delay
    by default, and a pack of SQuAD keeps its samples apart. AutoModel runs Hugging Face's code."""
    empty = {"grad_checkpointing": "", "attention_impl": "", "optimizer": "", "parallelism": "TP=1, PP=1, CP=2, DP=4"}
    nemo = {**FULL, **empty, "framework": "NeMo 24.09 / Megatron-Core", "model": "meta-llama/Llama-3.1-8B"}
    run = one(nemo).run
    assert (run.gradient_checkpointing, run.sharding, run.cp, run.fp8) == (False, "zero1", 2, None)
    assert "attention" in run.fused_kernels
    assert one({**nemo, "compute_dtype": "fp8"}).run.fp8 == "megatron"
    packed = {**nemo, "parallelism": "TP=1, PP=1, CP=1, DP=8", "notes": "SQuAD packed to 8192"}
    assert one(packed).run.attention_length == 220
    assert "does not state whether it checkpoints" in reason({**nemo, "model": "mistralai/Mistral-7B-v0.1"})
    assert "does not state whether it checkpoints" in reason({**nemo, "framework": "Megatron-LM"})
    assert "does not state whether it checkpoints" in reason({**nemo, "framework": "NeMo AutoModel"})


def test_a_device_map_on_one_gpu_is_no_pipeline_and_keeps_the_batch() -> None:
    """Accelerate puts all layers on the one card; over several, a step's time counts micro-batches in a row."""
    alone = {**LORA, **ALONE, "parallelism": "device_map=auto", "grad_accum": "16"}
    assert (one(alone).run.pp, one(alone).run.gradient_accumulation_steps) == (1, 16)
    timed = {**LORA, "gpu": "A100 80GB SXM", "gpus": "4", "parallelism": "device_map=auto", "grad_accum": "16"}
    assert "one after the other" in reason({**timed, "tokens_per_s": "", "step_time_s": "22"})


@pytest.mark.parametrize("text", ["--bf16", "bf16=True", "bf16: true"])
def test_a_trainers_flag_is_one_however_it_is_written(text: str) -> None:
    """TrainingArguments.bf16 is autocast over the weights as they are."""
    run = one({**FULL, "framework": "HF Trainer", "parallelism": "DDP", "compute_dtype": text}).run
    assert (run.dtype, run.precision) == ("fp32", "bf16-autocast")


def test_fp4_is_bitsandbytes_default_without_double_quantization() -> None:
    """``BitsAndBytesConfig(load_in_4bit=True)`` has both; NF4 is asked for, by most with the other one (QLoRA)."""
    found = one({**QLORA, "quant": "fp4"})
    assert (found.run.bnb_4bit_quant_type, found.run.double_quant) == ("fp4", False)
    assert any("fp4 without a word" in note for note in found.reading_notes)
    told = one({**QLORA, "quant": "bnb fp4 double quant"})
    assert (told.run.double_quant, any("fp4 without" in note for note in told.reading_notes)) == (True, False)


def test_an_authors_own_loop_is_taken_for_the_usual_one() -> None:
    """``outputs = model(...)`` stays until the next; PEFT's guide prepares a 4-bit base, everything else in fp32."""
    own = {"framework": "own loop, transformers 5.8.1, peft 0.19.1, bitsandbytes 0.49.2"}
    found = one({**QLORA, **own, "compute_dtype": "bf16 autocast"})
    assert (found.run.keeps_outputs, found.run.upcast_non_quantized, found.run.trainer_loop) == (True, True, False)
    assert (found.run.dtype, found.run.precision) == ("fp32", "bf16-autocast")
    assert any("its authors is taken to hold the model's output" in note for note in found.reading_notes)
    pure = one({**QLORA, **own, "compute_dtype": "bf16 weights and compute", "attention_impl": "sdpa"}).run
    assert (pure.precision, pure.four_bit_dtype, pure.upcast_non_quantized) == ("fp32", "bf16", True)
    adapters = one({**LORA, **own}).run
    assert (adapters.keeps_outputs, adapters.upcast_non_quantized) == (True, False)
    driven = one({**QLORA, "framework": "HF Trainer, transformers 5.8.1, peft 0.19.1, bitsandbytes 0.49.2"}).run
    assert (driven.keeps_outputs, driven.upcast_non_quantized) == (False, False)


def test_cells_that_can_only_mean_one_thing_may_be_empty() -> None:
    """A base that no method quantizes, QLoRA's NF4, a job of one GPU; eight GPUs share in many ways."""
    assert one({**LORA, "quant": ""}).run == one(LORA).run
    alone = {**LORA, **ALONE, "global_batch": ""}
    assert one({**alone, "parallelism": ""}).run == one(alone).run
    base = one({**QLORA, "quant": ""})
    assert base.run == one(QLORA).run
    assert base.run.bnb_4bit_quant_type == "nf4"
    assert "quant is not stated: NF4 is taken for method 'QLoRA', as its authors have it." in base.reading_notes
    assert "parallelism is not stated" in reason({**FULL, "parallelism": ""})


def test_a_stack_that_nobody_states_has_the_spread_of_all() -> None:
    found = one({**FULL, "framework": "not stated", "parallelism": "FSDP"})
    assert found.stack == "unknown"
    assert "framework is not stated" in found.reading_notes[0]
    labels = [effects for group, effects in load_priors()["effects_by_kind"].items() if group.startswith("stack")]
    assert labels
    assert all(found.stack not in effects for effects in labels)


def test_defaults_are_those_of_the_tables_date_unless_a_version_is_stated() -> None:
    runs = {date: one({**LORA, "framework": "TRL", "source_date": date}) for date in ("2025-04", "2025-07", "")}
    old = "torch >=1.0,<2.11"
    then = [f"trl >=0.16,<0.19, {old}", f"trl >=0.19,<0.22, {old}", "trl >=1.15, torch >=2.11"]
    assert [runs[date].run.stack_version for date in runs] == then
    assert [bool(runs[date].reading_notes) for date in runs] == [True, True, False]
    stated = one({**LORA, "framework": "TRL (0.27.1)", "source_date": "2025-04"})
    assert (stated.run.stack_version, stated.reading_notes) == (f"trl >=0.27,<0.28, {old}", ())


@pytest.mark.parametrize("date", ["June 2024", "06/2024", "15.06.2024", "20240615", "Q2 2024"])
def test_a_date_in_any_form_chooses_the_versions_of_its_month(date: str) -> None:
    found, then = (one({**LORA, "framework": "TRL", "source_date": day}) for day in (date, "2024-06"))
    assert found.run == then.run
    assert found.run.stack_version != one({**LORA, "framework": "TRL", "source_date": "2024"}).run.stack_version
    assert found.reading_notes[-1].split(" by ")[-1].startswith("2024-06")


def test_what_was_installed_beside_a_stated_version_is_as_old_as_it_is() -> None:
    """transformers 4.50 without a date came before 4.54 of July 2025, and so before PyTorch 2.11 of March 2026."""
    undated = {**LORA, "source_date": ""}
    old, new = (one({**undated, "framework": f"transformers {v}"}).run.stack_version for v in ("4.50", "5.2"))
    assert "torch >=1.0,<2.11" in old
    assert "torch >=2.11" in new


@pytest.mark.parametrize("date", ["2025-13-01", "2025-13", "2025-02-31", "2024-01 to 2024-13"])
def test_a_date_that_no_calendar_has_skips_the_row(date: str) -> None:
    assert reason({**LORA, "source_date": date}) == f"source_date '{date}' is no day of the calendar"


@pytest.mark.parametrize("column", ["model", "gpu_canonical_id"])
def test_a_name_that_no_catalog_has_names_its_column(column: str) -> None:
    told = reason({**LORA, "gpu": "", column: "foo/bar"} if column != "model" else {**LORA, column: "foo/bar"})
    assert told.startswith(column)
    assert "'foo/bar'" in told


def test_a_card_without_its_form_factor_is_the_board_of_machines_with_a_note() -> None:
    found = one({**FULL, "gpu": "8 x H100"})
    assert found.gpu == "h100-sxm5-80gb"
    assert found.reading_notes == ("gpu '8 x H100' does not state its form factor: h100-sxm5-80gb is taken.",)
    assert not one(FULL).reading_notes
    assert one({**FULL, "gpu_canonical_id": "H100"}).gpu == one({**FULL, "gpu_canonical_id": "h100-sxm5-80gb"}).gpu


def test_a_column_that_a_table_lacks_is_the_default_of_its_software() -> None:
    """torchtune's recipes update in one kernel, and adapt two maps of attention and those of the MLP at rank 8."""
    cells = {**LORA, "framework": "torchtune", **ALONE, "compute_dtype": "bf16"}
    run = one({name: cells[name] for name in cells if name not in ("optimizer", "rank", "lora_targets")}).run
    assert (run.optim, run.lora_r, "k_proj" in run.lora_target_modules) == ("adamw_torch_fused", 8, False)
    assert run.loss_type == one({**cells, "framework": "torchtune 0.6"}).run.loss_type == "chunked_ce"


@pytest.mark.parametrize(
    ("text", "counter"),
    [
        ("allocated", "allocated"), ("Allocated", "allocated"), ("max_memory_allocated", "allocated"),
        ("torch.cuda.max_memory_reserved()", "reserved"), ("peak reserved", "reserved"), ("", "not stated"),
        ("nvidia-smi", "nvidia-smi"), ("not reserved", "not reserved"),
    ],
)  # fmt: skip
def test_memory_counters_by_the_names_that_people_give_them(text: str, counter: str) -> None:
    assert one({**FULL, "reserved_or_allocated": text, "peak_mem_gib": "40", "confidence": "High"}).counter == counter


@pytest.mark.parametrize(("text", "gpus"), [("8xH100", 8), ("H100 x 4", 4), ("2 A100 80GB", 2), ("RTX 4090", 1)])
def test_a_table_without_a_column_of_gpus_counts_those_of_the_text(text: str, gpus: int) -> None:
    cells = {name: value for name, value in LORA.items() if name != "gpus"}
    cells |= {"gpu": text, "parallelism": "DDP" if gpus > 1 else "single", "tokens_per_s": ""}
    assert one(cells).run.num_gpus == gpus
    assert "gpus is not stated" in reason({**cells, "gpu": "L4", "gpus": "", "parallelism": "DDP"})


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        ("8xH100", "h100-sxm5-80gb"), ("8x H100 80GB", "h100-sxm5-80gb"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("A100 80GB", "a100-sxm4-80gb"), ("A100 (80 GB)", "a100-sxm4-80gb"), ("8 x A100 80GB SXM", "a100-sxm4-80gb"),
        ("A100 80GB PCIe", "a100-pcie-80gb"), ("H100 NVL", "h100-nvl-94gb"), ("4x RTX 4090", "rtx-4090-24gb"),
        ("RTX 4090 24GB", "rtx-4090-24gb"), ("4090", "rtx-4090-24gb"), ("RTX5090-32GB", "rtx-5090-32gb"),
        ("Tesla T4", "t4-16gb"), ("V100 32GB", "v100-sxm2-32gb"), ("H200-SXM-141GB", "h200-sxm5-141gb"),
        ("DGX H100", "h100-sxm5-80gb"), ("L40S x 4", "l40s-48gb"), ("NVIDIA GeForce RTX 3090 (24GB)", "rtx-3090-24gb"),
        ("RTX 3080 12GB", "rtx-3080-12gb"), ("A10G", "a10g-24gb"), ("1x MI300X", "mi300x-192gb"),
        ("T4 (Colab)", "t4-16gb"), ("NVIDIA A10G (g5.xlarge)", "a10g-24gb"),
        ("AWS p4d.24xlarge, A100 40GB", "a100-sxm4-40gb"),
        ("GCP a2-highgpu-1g A100 40GB", "a100-sxm4-40gb"), ("RTX 4090 (RunPod)", "rtx-4090-24gb"),
    ],
)  # fmt: skip
def test_cards_by_the_names_that_people_give_them(text: str, gpu: str) -> None:
    assert gpu_called(text)[0] == gpu


@pytest.mark.parametrize("text", ["A100", "V100", "RTX PRO 6000", "RTX-PRO-6000-96GB", "RTX 3080", "RTX 4090 48GB"])
def test_a_card_that_is_several_or_none_is_not_chosen(text: str) -> None:
    with pytest.raises((SkipRowError, TunecastError), match=r"does not say which of|Unknown GPU"):
        gpu_called(text)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Llama 3.1 8B", "meta-llama/Llama-3.1-8B"), ("LLaMA-2 7B", "meta-llama/Llama-2-7b-hf"),
        ("Llama 2 70B chat", "meta-llama/Llama-2-70b-hf"), ("Mistral 7B", "mistralai/Mistral-7B-v0.1"),
        ("Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"), ("Qwen 2.5 7B", "Qwen/Qwen2.5-7B"),
        ("Phi-3 mini", "microsoft/Phi-3-mini-4k-instruct"), ("Gemma 2 9B", "google/gemma-2-9b"),
        ("Gemma-2-9b-it", "google/gemma-2-9b"), ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "meta-llama/Llama-3.1-8B"),
        ("Meta-Llama-3-8B (architecture)", "meta-llama/Meta-Llama-3-8B"),
        ("Mixtral 8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("Code Llama 34B", "codellama/CodeLlama-34b-hf"), ("TinyLlama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        ("Mistral Nemo 12B", "mistralai/Mistral-Nemo-Base-2407"), ("GPT-NeoX 20B", "EleutherAI/gpt-neox-20b"),
        ("Phi-1.5", "microsoft/phi-1_5"), ("GPT-J", "EleutherAI/gpt-j-6b"), ("Vicuna-7B", "meta-llama/Llama-2-7b-hf"),
        ("Phi-3 Mini 3.8B", "microsoft/Phi-3-mini-4k-instruct"), ("Phi-2 2.7B", "microsoft/phi-2"),
        ("gpt3-5b", "nvidia/nemo-gpt3-5b"), ("Llama-2-70B (MLPerf LoRA)", "meta-llama/Llama-2-70b-hf"),
        ("OLMo 2 7B", "allenai/OLMo-2-1124-7B"), ("Llama 3 8B (instruct)", "meta-llama/Meta-Llama-3-8B"),
    ],
)  # fmt: skip
def test_models_by_the_names_that_people_give_them(text: str, model: str) -> None:
    assert model_called(text).name == model


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Phi-3 Mini 7B", "Unknown model"), ("Phi-2 3.8B", "Unknown model"), ("Llama-4 Scout", "not built yet"),
        # ALiBi, no biases and another vocabulary than llm-foundry's shapes of that name
        ("mosaicml/mpt-7b", "Unknown model"), ("mosaicml/mpt-30b", "Unknown model"), ("GPT-3 13B", "Unknown model"),
    ],
)  # fmt: skip
def test_a_model_of_another_shape_is_not_chosen(text: str, told: str) -> None:
    with pytest.raises(TunecastError, match=told):
        model_called(text)


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("zorblax-base", "zorblax"),
        ("zorblax 8B", "zorblax"),
        ("zorblax (instruct)", "zorblax"),
        ("zorblax shape (3 layers)", "zorblax"),
    ],
)
def test_a_model_is_no_folder_that_is_called_as_a_part_of_its_name(
    text: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TunecastError, match="Unknown model"):
        model_called(text)
    for named in (folder, f"./{folder}", str(tmp_path / folder)):
        assert model_called(named).num_layers == SMALL["num_hidden_layers"]


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"source_date": "2024-03-01"}, "FlashAttention-3 came on 2024-07-11"),
        ({"framework": "transformers 4.30, peft", "source_date": "2026-01-01"}, "transformers has it since 4.34"),
    ],
)
def test_flash_attention_3_is_not_read_before_it_was_there(cells: dict[str, str], told: str) -> None:
    assert told in reason({**FULL, "attention_impl": "FlashAttention-3", "gpu": "8x H100 SXM", **cells})


def test_flash_attention_3_is_read_on_the_only_cards_it_is_written_for() -> None:
    found = one({**FULL, "attention_impl": "FlashAttention-3", "gpu": "8x H100 SXM"})
    assert (found.attention_kernel, found.run.attn_implementation) == ("", "flash_attention_3")


@pytest.mark.parametrize(
    ("cells", "named"),
    [
        ({"gpu": "8xH100 80GB SXM", "gpus": "16"}, ("8xH100 80GB SXM", "16")),
        ({"gpu": "H100 80GB SXM (4 GPUs)", "gpus": "8"}, ("(4 GPUs)", "'8'")),
    ],
)
def test_a_number_of_cards_that_contradicts_the_column_is_refused(
    cells: dict[str, str], named: tuple[str, ...]
) -> None:
    told = reason({**FULL, **cells})
    assert all(text in told for text in (*named, "contradict"))


@pytest.mark.parametrize(
    "cells",
    [
        {"gpu": "8xH100 80GB SXM"},
        {"gpu": "8xH100 80GB SXM", "gpus": "16", "parallelism": "ZeRO-3, 2 nodes"},
        {"gpu": "3090 Ti", "gpus": "1", "parallelism": "single"},
    ],
)
def test_a_number_of_machines_or_in_a_cards_name_contradicts_nothing(cells: dict[str, str]) -> None:
    assert one({**LORA, **cells}).run.num_gpus == int({**LORA, **cells}["gpus"])


@pytest.mark.parametrize("framework", ["TRL", "TRL 0.15", "transformers 4.44", "axolotl", "LLaMA-Factory", "ms-swift"])
@pytest.mark.parametrize("date", ["2024-09", "2025-04", "2026-08"])
def test_bf16_beside_adapters_is_the_trainers_flag_at_every_date(framework: str, date: str) -> None:
    """TrainingArguments.bf16 runs forward and backward under autocast, whatever release it is."""
    run = one({**LORA, **ALONE, "framework": framework, "source_date": date}).run
    assert (run.dtype, run.precision) == ("bf16", "bf16-autocast")


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ("linear_qkv", ("qkv_proj",)),
        ("q_proj, k_proj, v_proj", ("qkv_proj",)),
        ("attention_qkv, mlp_fc2", ("qkv_proj", "down_proj")),
        ("linear_qkv, linear_proj, linear_fc1, linear_fc2", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("all linear", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ],
)
@pytest.mark.parametrize("framework", ["NeMo 24.12", "Megatron-Bridge 0.2"])
def test_adapters_of_megatron_stand_on_its_joined_maps(framework: str, targets: str, modules: tuple[str, ...]) -> None:
    run = one({**LORA, **ALONE, "framework": framework, "lora_targets": targets}).run
    assert run.lora_target_modules == modules


@pytest.mark.parametrize("targets", ["q_proj,v_proj", "q,v", "k_proj", "o_proj and gate_proj"])
def test_a_part_of_a_joined_map_is_refused_by_its_column(targets: str) -> None:
    """It has no adapter of its own in Megatron: a run without adapters would be forecast in its place."""
    _, (skipped,) = read_runs([{**LORA, **ALONE, "framework": "NeMo 24.12", "lora_targets": targets}])
    assert skipped.reason.startswith("lora_targets")
    assert "one map" in skipped.reason


BNB_4, GPTQ_4, GPTQ_8 = "bnb-4bit", "gptq-4bit", "gptq-8bit"


@pytest.mark.parametrize(
    ("model", "quant", "base"),
    [
        ("unsloth/llama-3-8b-bnb-4bit", "4-bit", BNB_4),
        ("unsloth/llama-3-8b-bnb-4bit", "NF4", BNB_4),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit", "load_in_4bit", BNB_4),
        ("TheBloke/Llama-2-7B-GPTQ", "gptq 4-bit", GPTQ_4),
        ("TheBloke/Llama-2-7B-GPTQ", "4-bit", GPTQ_4),
        ("Llama-2-7b-hf-GPTQ-Int8", "8bit", GPTQ_8),
        ("Llama 3 8B 4bit", "gptq int4", GPTQ_4),
        ("Llama 3 8B 4bit", "4-bit", BNB_4),
    ],
)
def test_a_model_s_name_says_how_its_weights_are_stored(model: str, quant: str, base: str) -> None:
    cells = {**QLORA, "framework": "TRL", "compute_dtype": "fp16", "model": model, "quant": quant}
    assert one(cells).run.base_quantization == base


@pytest.mark.parametrize("method", ["LoRA", "QLoRA", "LoRA 4-bit"])
@pytest.mark.parametrize("quant", ["", None])
def test_a_model_s_name_stands_in_for_the_quant_cell(method: str, quant: str | None) -> None:
    cells = {**LORA, **ALONE, "framework": "TRL", "model": "unsloth/llama-3-8b-bnb-4bit", "method": method}
    cells = {**cells, "quant": quant} if quant is not None else {k: v for k, v in cells.items() if k != "quant"}
    assert (one(cells).run.method, one(cells).run.base_quantization) == ("qlora", BNB_4)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"model": "unsloth/llama-3-8b-bnb-4bit", "quant": "none"}, "quant 'none' contradicts model"),
        ({"model": "unsloth/llama-3-8b-bnb-4bit", "quant": "8-bit"}, "quant '8-bit' contradicts model"),
        ({"model": "TheBloke/Llama-2-7B-GPTQ", "quant": "NF4"}, "quant 'NF4' contradicts model"),
        ({"model": "unsloth/llama-3-8b-bnb-4bit", "quant": "4-bit", "method": "full"}, "method 'full' trains all"),
    ],
)
def test_a_model_s_name_and_another_cell_contradict_each_other(cells: dict[str, str], reason: str) -> None:
    _, (skipped,) = read_runs([{**LORA, **ALONE, "framework": "TRL", **cells}])
    assert skipped.reason.startswith(reason)


def test_interleaved_stages_take_their_micro_batches_from_the_global_batch() -> None:
    """By hand: 64 GPUs over 4 x 8 leave 2 copies; 256 sequences of one each are 128 micro-batches."""
    cells = {**FULL, "framework": "Megatron-Bridge 0.2", "grad_accum": "", "micro_batch": "1", "gpus": "64"}
    cells |= {"gpu": "H100 80GB SXM", "parallelism": "TP4/PP8/VP2", "grad_checkpointing": "no", "global_batch": "256"}
    cells |= {"tokens_per_s": "500,000"}
    assert one(cells).run.gradient_accumulation_steps == 128
    _, (skipped,) = read_runs([{**cells, "global_batch": ""}])
    assert "--gradient-accumulation-steps is 1; use at least 8" in skipped.reason


@pytest.mark.parametrize("stage", ["1", "2", "3"])
@pytest.mark.parametrize("text", ["DeepSpeed ZeRO-{}", "DeepSpeed ZeRO {}", "DeepSpeed: ZeRO-{}", "DeepSpeed, ZeRO-{}"])
def test_deepspeed_before_a_stage_leaves_it_its_number(text: str, stage: str) -> None:
    assert one({**FULL, "parallelism": text.format(stage)}).run.sharding == f"zero{stage}"


def test_deepspeed_s_offload_is_read_behind_its_stage() -> None:
    run = one({**FULL, "parallelism": "DeepSpeed ZeRO-3 + CPU offload"}).run
    assert (run.sharding, run.offload) == ("zero3", "all")


@pytest.mark.parametrize(
    ("gpu", "gpus", "per_node"),
    [("g5.12xlarge", "8", 4), ("DGX Spark", "4", 1), ("8x DGX Spark", "8", 1), ("DGX H100", "16", 8)],
)
def test_a_machine_that_is_named_has_its_own_number_of_cards(gpu: str, gpus: str, per_node: int) -> None:
    cells = {**FULL, "gpu": gpu, "gpus": gpus, "parallelism": "FSDP"}
    assert one(cells).run.gpus_per_node == per_node


def test_machines_first_or_cards_first_is_refused_beside_their_product_too() -> None:
    assert "may be 8 machines of 2 or 2 of 8" in reason({**FULL, "gpu": "H100 SXM", "gpus": "16 (8x2)"})


def test_bf16_on_a_card_without_it_is_refused() -> None:
    told = reason({**QLORA, "gpu": "T4", "framework": "TRL", "attention_impl": "sdpa"})
    assert told.startswith("compute_dtype 'bf16': t4-16gb has no bf16")


@pytest.mark.parametrize(
    ("word", "is_on"), [("enable", True), ("enabled", True), ("disable", False), ("disabled", False)]
)
def test_switches_are_read_in_the_imperative_too(word: str, is_on: bool) -> None:
    run = one({**FULL, "grad_checkpointing": word, "compile": word, "framework": "torchtune 0.5"}).run
    assert (run.gradient_checkpointing, run.torch_compile) == (is_on, is_on)


@pytest.mark.parametrize(("framework", "adds_in"), [("Megatron-LM", "fp32"), ("NeMo 25.02", None)])
def test_peaks_of_megatron_are_of_its_own_buffers(framework: str, adds_in: str | None) -> None:
    found = one({**FULL, "framework": framework, "parallelism": "TP2", "peak_mem_gib": "61.5"})
    assert found.peak_bytes is not None
    assert (found.run.stack, found.run.reduce_dtype) == ("megatron", adds_in)


@pytest.mark.parametrize("text", ["bf16 (FSDP2 mixed precision)", "bf16 (FSDP2 mixed precision, fp32 weights)"])
def test_fp32_weights_under_torchtitans_mixed_precision_are_its_fp32_shards(text: str) -> None:
    run = one({**FULL, "framework": "torchtitan", "parallelism": "FSDP2", "compute_dtype": text}).run
    assert (run.master_dtype, run.dtype, run.precision) == ("fp32", "bf16", "bf16-autocast")


def test_kernels_named_beside_a_stack_are_added_to_its_own() -> None:
    """Liger fuses norms, rotations and SwiGLU; a page that names one of them again takes none away."""
    run = one({**FULL, "framework": "transformers 4.50 + Liger, fused RoPE", "parallelism": "DDP"}).run
    assert set(run.fused_kernels) == {"rms_norm", "rope", "swiglu"}
