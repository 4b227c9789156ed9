"""Kernels and numbers that several cells of a row name, and what its card, date and versions had of them."""

from __future__ import annotations

import pytest
from table_rows import reason

from tunecast.calibrate.published import PublishedRun, read_runs

ROW = {
    "id": "a", "model": "Llama 3.1 8B", "gpu": "A100 80GB SXM", "gpus": "1", "method": "lora", "quant": "none",
    "compute_dtype": "bf16", "seq_len": "2048", "packed": "yes", "micro_batch": "1", "grad_accum": "1",
    "parallelism": "single", "grad_checkpointing": "yes", "attention_impl": "",
    "framework": "TRL 0.13, transformers 4.47", "optimizer": "AdamW",
    "lora_targets": "all linear", "rank": "16", "tokens_per_s": "2000", "source_date": "2025-01",
}  # fmt: skip


def read(**cells: str) -> PublishedRun:
    (run,), _ = read_runs([{**ROW, **cells}])
    return run


@pytest.mark.parametrize(
    ("named", "attention"),
    [
        ("", "sdpa"), (" + FlashAttention 2", "flash_attention_2"), (", flash attention", "flash_attention_2"),
        (", Flash-Attention-2", "flash_attention_2"), (" + xformers", "sdpa"),
        (", flash-attn 2.7.4", "sdpa"), (", xformers 0.0.28", "sdpa"),
    ],
)  # fmt: skip
def test_software_names_the_attention_that_no_other_cell_states(named: str, attention: str) -> None:
    """A package with its version is installed, which does not say that it is used."""
    run = read(framework=ROW["framework"] + named)
    assert run.run.attn_implementation == attention
    assert any("attention_impl is not stated: framework" in note for note in run.reading_notes) == bool(
        named and "7.4" not in named and "28" not in named
    )


def test_the_attention_of_a_model_that_is_eager_by_default_is_the_named_one() -> None:
    """Gemma 2 of transformers 4.41 is eager unless told otherwise."""
    assert read(model="google/gemma-2-9b", attention_impl="flash_attention_2").run.attn_implementation != "eager"
    named = read(model="google/gemma-2-9b", framework="transformers 4.47 + FlashAttention 2")
    assert named.run.attn_implementation == "flash_attention_2"


@pytest.mark.parametrize("kernel", ["FlashAttention 2", "xformers"])
def test_software_and_attention_contradict_each_other(kernel: str) -> None:
    told = reason({**ROW, "framework": f"TRL + {kernel}", "attention_impl": "eager"})
    assert told.startswith("attention_impl 'eager' and framework")
    assert "contradict each other" in told
    assert read(framework=f"TRL + {kernel}", attention_impl="sdpa").run.attn_implementation == "sdpa"


@pytest.mark.parametrize("words", ["no flash attention", "no flash attn", "without flash attention"])
def test_without_flash_does_not_say_what_was_done_instead(words: str) -> None:
    assert "does not say what was done instead" in reason({**ROW, "attention_impl": words})


def test_the_default_without_flash_is_the_default() -> None:
    assert read(attention_impl="default (no Flash Attention)").run.attn_implementation == "sdpa"


@pytest.mark.parametrize("card", ["T4", "V100 32GB SXM2", "RTX 2080 Ti 11GB"])
def test_cards_without_bf16_and_without_flash_have_neither(card: str) -> None:
    shared = {"model": "Llama 3.2 1B", "gpu": card, "tokens_per_s": "100"}
    assert "has no bf16, and emulating it is not built" in reason({**ROW, **shared})
    assert read(**shared, compute_dtype="fp16").run.precision == "fp16-autocast"
    flash = {**shared, "compute_dtype": "fp16", "attention_impl": "flash_attention_2"}
    assert "FlashAttention-2 needs Ampere or later" in reason({**ROW, **flash})


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"source_date": "2023-05", "framework": "custom PyTorch loop", "attention_impl": "FlashAttention"},
         "FlashAttention-2 came on 2023-07-17"),
        ({"framework": "transformers 4.35", "attention_impl": "sdpa"}, "transformers has it since 4.36"),
        ({"framework": "transformers 4.33", "attention_impl": "flash_attention_2"}, "transformers has it since 4.34"),
        ({"framework": "TRL on ROCm", "attention_impl": "sdpa"}, "is AMD's, and a100-sxm4-80gb is no AMD card"),
        ({"framework": "TRL (bf16)", "compute_dtype": "fp16"}, "contradict each other"),
        ({"quant": "fp16"}, "quant 'fp16' and compute_dtype 'bf16' contradict each other"),
    ],
)  # fmt: skip
def test_what_a_row_says_and_could_not_have_had(cells: dict[str, str], told: str) -> None:
    assert told in reason({**ROW, **cells})


def test_dynamic_four_bits_are_told() -> None:
    run = read(model="unsloth/Llama-3.1-8B-unsloth-bnb-4bit", method="qlora", quant="4-bit")
    assert any("leave some layers in 16, which are read as 4" in note for note in run.reading_notes)


def test_what_it_could_have_had() -> None:
    old = {"source_date": "2023-08", "framework": "custom PyTorch loop", "attention_impl": "FlashAttention"}
    assert read(**old).run.attn_implementation == "flash_attention_2"
    assert read(framework="transformers 4.36", attention_impl="sdpa").run.attn_implementation == "sdpa"
    assert read(framework="TRL (bf16)").run.precision == "bf16-autocast"


def test_a_base_in_fp32_is_one_in_either_column() -> None:
    of_quant, of_dtype = read(quant="fp32").run, read(compute_dtype="fp32 weights, bf16 autocast").run
    assert of_quant == of_dtype
    assert of_quant.dtype == "fp32"
    assert read(quant="bf16").run == read().run


def test_a_network_that_nobody_states_is_told() -> None:
    shared = {"method": "full", "rank": "", "lora_targets": "", "gpus": "16", "parallelism": "ZeRO-3"}
    (note,) = [note for note in read(**shared).reading_notes if "internode_gbps" in note]
    assert "1,600 Gbit/s are taken" in note
    assert "the interval allows for 400" in note
    for known in ({"internode_gbps": "100"}, {"gpus": "8"}):
        assert not any("internode_gbps" in note for note in read(**{**shared, **known}).reading_notes)


LINEAR = {
    **ROW, "model": "Qwen/Qwen3.5-9B-Base", "method": "full", "framework": "transformers 5.5", "lora_targets": "",
    "rank": "", "source_date": "2026-09",
}  # fmt: skip


@pytest.mark.parametrize(
    ("attention", "software", "kernels"),
    [
        ("sdpa, fla", "", {"fla"}), ("flash_attention_2 + flash-linear-attention 0.5.0", "", {"fla"}),
        ("sdpa (fla, causal-conv1d 1.5)", "", {"fla", "causal-conv1d"}), ("sdpa, no fla", "", set()),
        ("sdpa (PyTorch fallback for Gated DeltaNet)", "", set()), ("sdpa", ", fla 0.5", {"fla"}),
        ("sdpa", " + flash-linear-attention + causal_conv1d", {"fla", "causal-conv1d"}),
    ],
)  # fmt: skip
def test_a_row_says_which_code_ran_its_linear_attention(attention: str, software: str, kernels: set[str]) -> None:
    (run,), _ = read_runs([{**LINEAR, "attention_impl": attention, "framework": LINEAR["framework"] + software}])
    assert set(run.run.fused_kernels) == kernels


def test_a_row_that_does_not_say_which_code_ran_its_linear_attention_is_skipped() -> None:
    """PyTorch's code and the packages' kernels differ by a factor; a table without the column takes the stack's."""
    told = reason({**LINEAR, "attention_impl": "sdpa"})
    assert "does not say whether flash-linear-attention ran" in told
    assert "write fla, or no fla" in told
    both = reason({**LINEAR, "attention_impl": "sdpa, no fla", "framework": "transformers 5.5, fla"})
    assert "contradict each other" in both
    (run,), _ = read_runs([{name: cell for name, cell in LINEAR.items() if name != "attention_impl"}])
    assert run.run.fused_kernels == ()
    (other,), _ = read_runs([{**ROW, "attention_impl": "sdpa, fla"}])
    assert other.run.fused_kernels == (), "a model without linear attention has nothing for fla to run"
