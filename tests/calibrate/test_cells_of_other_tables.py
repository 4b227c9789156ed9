"""Cells as tables of other sources have them: optimum-benchmark, torchtitan forks, notebooks and trainers' pages."""

from __future__ import annotations

from typing import Any

import pytest
from table_rows import one, reason

from tunecast.calibrate.named_things import model_called
from tunecast.calibrate.run_table import SkipRowError
from tunecast.calibrate.vocabulary import lookup
from tunecast.catalogs.errors import TunecastError

FULL = {
    "id": "page-1", "model": "Llama 3.1 8B", "gpu": "8xH100 80GB SXM", "method": "full fine-tune", "quant": "none",
    "compute_dtype": "bf16", "seq_len": "8k", "packed": "sample packing", "micro_batch": "1", "grad_accum": "4",
    "gpus": "8", "parallelism": "ZeRO-3", "grad_checkpointing": "on", "attention_impl": "FlashAttention-2",
    "compile": "no", "framework": "Axolotl 0.10", "optimizer": "AdamW fused", "source_date": "2025-08",
    "rank": "", "lora_targets": "", "tokens_per_s": "~1,200",
}  # fmt: skip
LORA = {**FULL, "method": "LoRA", "rank": "r=16", "lora_targets": "all linear"}
ALONE = {"gpu": "H100 80GB SXM", "gpus": "1", "parallelism": "single"}


@pytest.mark.parametrize(
    ("column", "text", "expected"),
    [
        ("compute_dtype", "bf16 weights, bf16 autocast (adapters fp32)",
         {"dtype": "bf16", "precision": "bf16-autocast", "adapter_dtype": "fp32"}),
        ("compute_dtype", "bf16, LoRA weights in bf16", {"dtype": "bf16", "adapter_dtype": "bf16"}),
        ("packed", "n/a: fake data fills seq_len", {"filled": True}),
        ("packed", "n/a: 1024 tokens a sample", {"filled": True, "filled_length": 1024}),
        ("grad_checkpointing", "selective op (default of llama3_8b.toml)", {"checkpoint_keeps_ops": True}),
        ("attention_impl", "sdpa (cuDNN flash kernel, profiled)",
         {"attn_implementation": "sdpa", "fused_kernels": "attention"}),
        ("lora_targets", "all-linear (lm_head and embed_tokens trained in full)",
         {"lora_target_modules": "all-linear", "modules_to_save": "embed_tokens,lm_head"}),
        ("lora_targets", "q_proj, v_proj + lm_head trained",
         {"lora_target_modules": "q_proj,v_proj", "modules_to_save": "lm_head"}),
    ],
)  # fmt: skip
def test_what_a_cell_means(column: str, text: str, expected: dict[str, Any]) -> None:
    found = lookup(column, text)
    assert found is not None
    assert {name: found.get(name) for name in expected} == expected


def test_adapters_in_fp32_leave_a_bare_bf16_the_trainers_flag() -> None:
    row = {**LORA, **ALONE, "framework": "transformers 4.57, PEFT", "compute_dtype": "bf16, adapters in fp32"}
    run = one(row).run
    assert (run.dtype, run.precision, run.adapter_dtype) == ("bf16", "bf16-autocast", "fp32")


@pytest.mark.parametrize(
    ("framework", "label"),
    [
        ("HF Trainer, transformers 4.57, PEFT 0.18, optimum-benchmark, torch 2.9", "hf-peft"),
        ("torchtitan (fork), PyTorch nightly cu130", "torchtitan"),
        ("axolotl 0.10 (after the pull request), torch 2.12", "axolotl"),
        ("Primus / Megatron-LM, ROCm 7.1, PyTorch 2.10 dev", "megatron"),
    ],
)
def test_words_around_a_software_change_nothing(framework: str, label: str) -> None:
    card = {"gpu": "MI300X"} if "ROCm" in framework else {}
    assert one({**FULL, **card, "framework": framework, "parallelism": "FSDP2"}).stack == label


def test_a_trainer_with_one_attention_kernel_runs_it_where_nothing_is_said() -> None:
    row = {**FULL, "framework": "torchtitan", "parallelism": "FSDP2", "attention_impl": ""}
    found = one(row)
    assert found.run.attn_implementation == "sdpa"
    assert any("attention_impl is not stated" in note for note in found.reading_notes)
    assert "attention_impl" in reason({**row, "framework": "own PyTorch script"})


def test_a_shape_by_the_name_of_its_model_is_that_model_where_all_that_is_said_agrees() -> None:
    llama = model_called("meta-llama/Meta-Llama-3-8B")
    for name in (
        "Llama-3-8B shape (32 layers, dim 4096, vocab 128256)",
        "Llama 3 8B architecture",
        "Llama-3-8B shape (FFN 14336)",
    ):
        assert model_called(name) == llama
    with pytest.raises(TunecastError):
        model_called("Llama-3-8B shape (32 layers, wider)")
    assert model_called("TinyLlama/TinyLlama-1.1B").num_layers == 22


def test_a_name_with_its_dimensions_or_with_the_model_whose_shape_it_has() -> None:
    """granite-7b-base is Llama-2-7B's config; TinyLlama's dimensions are those of its own."""
    assert model_called("TinyLlama/TinyLlama-1.1B (22 layers, 4 KV heads)") == model_called("TinyLlama/TinyLlama-1.1B")
    llama = model_called("meta-llama/Llama-2-7b-hf")
    assert model_called("ibm-granite/granite-7b-base (Llama-2-7B shape)") == llama
    for wrong in ("meta-llama/Llama-2-7b-hf (33 layers)", "gpt2 (Llama-2-7B shape)"):
        with pytest.raises(SkipRowError, match="has another shape"):
            model_called(wrong)
    with pytest.raises(TunecastError, match="Unknown model"):
        model_called("zorblax-7b (zorblax shape)")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Llama-3.1-Nemotron-70B", "meta-llama/Llama-3.1-70B"),
        ("GPT-2 124M", "openai-community/gpt2"),
        ("GPT-2 (124M)", "openai-community/gpt2"),
        ("GPT-2 1.5B", "openai-community/gpt2-xl"),
        ("LLaMA 1 7B", "huggyllama/llama-7b"),
        ("LLaMA-1 65B", "huggyllama/llama-65b"),
        ("llama-3-8b (8.03B)", "meta-llama/Meta-Llama-3-8B"),
        ("Qwen2.5-0.5B (494M)", "Qwen/Qwen2.5-0.5B"),
        ("Phi-3-mini-128k-instruct", "microsoft/Phi-3.5-mini-instruct"),
    ],
)
def test_everyday_names_are_of_the_models_that_they_mean(name: str, model: str) -> None:
    assert model_called(name).groups == model_called(model).groups
    assert model_called(name).total_params == model_called(model).total_params


@pytest.mark.parametrize("name", ["llama-3-8b (70B)", "GPT-2 (345B)", "mosaicml/mpt-7b"])
def test_a_size_that_the_model_lacks_or_another_shape_is_no_name_of_it(name: str) -> None:
    """MosaicML's published 7B has ALiBi and no biases; the shape of that name in the catalog has neither."""
    with pytest.raises(TunecastError):
        model_called(name)


def test_a_family_with_all_its_dimensions_is_a_model_of_them() -> None:
    """Llama 3 8B in words is Llama 3 8B, and nanotron's table gives its 1B model 1.11 billion parameters."""
    llama, words = model_called("meta-llama/Meta-Llama-3-8B"), "32 layers, dim 4096, FFN 14336, 32 heads, 8 KV heads"
    told = model_called(f"Llama-like shape ({words}, vocab 128256)")
    assert told.groups == llama.groups
    assert told.total_params == llama.total_params
    assert told.tie_word_embeddings is llama.tie_word_embeddings is False
    small = "Llama shape 1B (24 layers, hidden 2048, FFN 4096, 32 heads, vocab 50257, tied embeddings)"
    assert model_called(small).total_params == pytest.approx(1.11e9, rel=0.01)
    other = model_called("Llama-3-like 13B shape (40 layers, dim 5120, 40 heads, 8 KV heads, FFN 17920, vocab 128256)")
    assert other.total_params == pytest.approx(14.84e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Llama-3-8B shape (16 layers)", r"not the shape of meta-llama/Meta-Llama-3-8B: .* \(hidden N, FFN N, N heads"),
        ("Llama-shape (32 layers)", r"names no size: write all of its dimensions"),
        (
            "Llama shape 13B (24 layers, hidden 2048, FFN 4096, 32 heads, vocab 50257)",
            r"contradicts itself: .* have 1\.\d+ billion parameters",
        ),
        ("Llama shape (24 layers, 12 layers, hidden 2048)", r"says two things of num_hidden_layers"),
        ("gpt2 shape (16 layers)", r"not the shape of openai-community/gpt2: give its config.json"),
    ],
)
def test_a_shape_with_too_little_said_names_what_is_missing(name: str, told: str) -> None:
    with pytest.raises(SkipRowError, match=told):
        model_called(name)
