"""Cells of one row that mean something together: a base that no cell names, what another column says too."""

from __future__ import annotations

from typing import Any

import pytest
from table_rows import one, reason

from tunecast.calibrate.validate import judge, read_entries
from tunecast.calibrate.validate_folds import shipped
from tunecast.model.priors import load_priors

ALONE = {
    "id": "blog-1", "model": "Llama 3.1 8B", "gpu": "H100 80GB SXM", "method": "LoRA", "quant": "none",
    "compute_dtype": "bf16", "seq_len": "8k", "packed": "sample packing", "micro_batch": "1", "grad_accum": "4",
    "gpus": "1", "parallelism": "single", "grad_checkpointing": "on", "attention_impl": "FlashAttention-2",
    "compile": "no", "framework": "transformers 4.50", "optimizer": "AdamW fused", "source_date": "2025-08",
    "rank": "16", "lora_targets": "all linear", "tokens_per_s": "1200",
}  # fmt: skip
FULL = {**ALONE, "method": "full fine-tune", "rank": "", "lora_targets": ""}
QLORA = {**ALONE, "method": "QLoRA", "quant": "NF4"}
TORCHTUNE = {**QLORA, "framework": "torchtune 0.5", "attention_impl": "sdpa"}
PAIR = {"gpu": "2x H100 80GB SXM", "gpus": "2", "parallelism": "DDP"}
"""Cells of two GPUs."""


@pytest.mark.parametrize(
    "method",
    [
        "LoRA", "LoRA 16bit", "bf16 LoRA", "LoRA SFT", "SFT + LoRA", "PEFT LoRA", "LoRA r=16", "LoRA finetuning",
        "DoRA", "rsLoRA", "LoRA-16", "LoRA (all linear)", "LoRA single device", "LoRA continued pre-training",
    ],
)  # fmt: skip
def test_a_lora_base_of_which_nothing_is_said_is_unquantized_with_a_note(method: str) -> None:
    found, stated = one({**ALONE, "method": method, "quant": ""}), one({**ALONE, "method": method})
    assert found.run == stated.run
    assert found.run.base_quantization is None
    assert [note for note in found.reading_notes if note not in stated.reading_notes] == [
        f"quant is not stated: method {method!r} alone quantizes no base."
    ]
    assert "quant" in stated.stated
    assert "quant" not in found.stated


@pytest.mark.parametrize("quant", ["", "not stated", "?", "-"])
@pytest.mark.parametrize(
    "method",
    ["full FT", "FFT", "SFT", "SFT (full)", "full (bf16)", "full 16-bit", "pretrain", "pretraining",
     "continued pretraining", "full param", "full_finetune_single_device"],
)  # fmt: skip
def test_full_training_has_no_quantized_base_whatever_its_cell_leaves_out(method: str, quant: str) -> None:
    assert one({**FULL, "method": method, "quant": quant}).run == one(FULL).run


@pytest.mark.parametrize(
    ("method", "base"),
    [
        ("QLoRA (nf4)", "bnb-4bit"), ("QLoRA 4-bit", "bnb-4bit"), ("LoRA 4-bit", "bnb-4bit"),
        ("8-bit LoRA", "bnb-8bit"), ("QLoRA (8-bit)", "bnb-8bit"), ("QLoRA w/ double quant", "bnb-4bit"),
    ],
)  # fmt: skip
def test_a_method_that_says_bits_says_the_base(method: str, base: str) -> None:
    found = one({**ALONE, "method": method, "quant": ""})
    assert (found.run.method, found.run.base_quantization) == ("qlora", base)
    assert not any("quant is" in note for note in found.reading_notes)


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"quant": "not stated"}, "a base of LoRA may be quantized; write none, nf4 or 8-bit"),
        ({"quant": "", "framework": "Unsloth 2025.6"}, "Unsloth loads 4 bits unless load_in_4bit=False"),
        ({"quant": "", "framework": "alpaca-lora"}, "alpaca-lora loads 8 bits"),
        ({"quant": "", "method": "full fine-tune (8-bit)"}, "all weights are trained, and lie in 8 bits"),
        ({"quant": "nf4", "method": "LoRA 16-bit"}, "quant 'nf4' contradicts method 'LoRA 16-bit'"),
        ({"quant": "8-bit", "method": "QLoRA 4-bit"}, "quant '8-bit' contradicts method 'QLoRA 4-bit'"),
        ({"quant": "yes"}, "quant 'yes': whether the base has 4 bits or 8 is not stated; write nf4 or 8-bit"),
        ({**FULL, "quant": "yes"}, "quant 'yes' contradicts method 'full fine-tune'"),
        ({"method": "QLoRA w/ double quant", "quant": "nf4, no double quant"}, "contradict each other"),
    ],
)  # fmt: skip
def test_a_base_that_cannot_be_told_says_what_to_write(cells: dict[str, str], told: str) -> None:
    assert told in reason({**ALONE, **cells})


@pytest.mark.parametrize("framework", ["Unsloth 2025.6", "AutoTrain", "H2O LLM Studio"])
def test_software_that_quantizes_by_default_does_not_where_a_cell_says_so(framework: str) -> None:
    cells = {**ALONE, "framework": framework}
    assert "write none, nf4 or 8-bit" in reason({**cells, "quant": ""})
    assert one({**cells, "quant": "", "method": "LoRA 16bit"}).run == one(cells).run


@pytest.mark.parametrize("quant", ["--", "0", "NA", "\u2717", "not used", "without", "n/a"])
def test_every_word_for_none_says_that_the_base_is_unquantized(quant: str) -> None:
    assert one({**ALONE, "quant": quant}).run == one(ALONE).run
    assert "contradicts method 'QLoRA'" in reason({**QLORA, "quant": quant})


@pytest.mark.parametrize("quant", ["yes", "\u2713", "true"])
def test_yes_beside_qlora_is_four_bits(quant: str) -> None:
    assert one({**QLORA, "quant": quant}).run == one({**QLORA, "quant": "4-bit"}).run


@pytest.mark.parametrize("quant", ["nf4 (torchao)", "torchao NF4", "NF4Tensor"])
def test_torchaos_nf4_is_torchtunes_base_and_nobody_elses(quant: str) -> None:
    assert one({**TORCHTUNE, "quant": quant}).run == one({**TORCHTUNE, "quant": "nf4"}).run
    told = f"quant {quant!r}: this is built for torchtune alone, and framework is 'transformers 4.50'"
    assert reason({**QLORA, "quant": quant}) == told
    assert "torchao" in reason({**TORCHTUNE, "quant": "torchao int4"})


@pytest.mark.parametrize("text", ["sdpa or flex", "sdpa / flex", "sdpa_or_flex"])
def test_sdpa_or_flex_is_what_torchtune_calls_its_attention(text: str) -> None:
    assert one({**TORCHTUNE, "attention_impl": text}).run == one(TORCHTUNE).run
    assert "built for torchtune alone" in reason({**QLORA, "attention_impl": text})


def test_attention_of_amds_software_runs_on_amds_cards() -> None:
    cells = {**ALONE, "attention_impl": "CK flash attention"}
    assert one({**cells, "gpu": "MI300X", "tokens_per_s": ""}).run.attn_implementation == "flash_attention_2"
    assert "it is of AMD's software, and h100-sxm5-80gb is no AMD card" in reason(cells)


def test_liger_beside_an_attention_is_liger_beside_its_trainer() -> None:
    named = one({**FULL, "framework": "axolotl 0.10 + Liger Kernel"})
    beside = one({**FULL, "framework": "axolotl 0.10", "attention_impl": "flash-attn 2 + Liger"})
    assert beside.run == named.run
    assert beside.run.loss_type == "liger"


def test_the_dtype_of_a_quantized_bases_products_is_said_beside_its_bits() -> None:
    fp16 = {**QLORA, "compute_dtype": "fp16"}
    assert one({**fp16, "quant": "4bit nf4 fp16 compute"}).run.bnb_4bit_compute_dtype == "fp16"
    assert one({**ALONE, "quant": "none (bf16 compute)"}).run == one(ALONE).run


@pytest.mark.parametrize(
    ("cells", "dtypes"),
    [
        ({"optimizer": "AdamW, fp32 master"}, ("fp32", "bf16-autocast")),
        ({"optimizer": "AdamW (fp32 master weights)", "compute_dtype": "bf16 mixed"}, ("fp32", "bf16-autocast")),
        ({"optimizer": "AdamW"}, ("bf16", "bf16")),
    ],
)
def test_master_weights_of_the_optimizer_are_mixed_precision(cells: dict[str, str], dtypes: tuple[str, str]) -> None:
    run = one({**FULL, "framework": "own PyTorch script", **cells}).run
    assert (run.dtype, run.precision) == dtypes


def test_master_weights_beside_weights_in_16_bits_contradict() -> None:
    told = reason({**FULL, "optimizer": "AdamW, fp32 master", "compute_dtype": "pure bf16"})
    assert told.startswith(
        "optimizer 'AdamW, fp32 master' keeps master weights in fp32, which compute_dtype 'pure bf16'"
    )


def test_states_in_16_bits_are_those_of_weights_that_are_trained_in_16_bits() -> None:
    """torch.optim.AdamW makes its states in the dtype of what it updates (torch.zeros_like)."""
    pure = {**FULL, "framework": "own PyTorch script", "compute_dtype": "bf16 weights"}
    assert one({**pure, "optimizer": "AdamW fused (bf16 states)"}).run == one({**pure, "optimizer": "AdamW fused"}).run
    for beside in ({"compute_dtype": "bf16 mixed precision"}, {"compute_dtype": "fp32"}):
        assert "beside others they are not built" in reason({**pure, **beside, "optimizer": "AdamW (bf16 states)"})


def test_the_benchmark_of_another_compiler_may_run_without_it() -> None:
    """lightning-thunder's benchmark_litgpt.py: LitGPT's models; torch's cross_entropy makes the loss of all logits."""
    script = "benchmark_litgpt.py of lightning-thunder with --compile inductor"
    row = {**FULL, "framework": script, "compute_dtype": "bf16 weights", "attention_impl": "sdpa"}
    assert one(row).run.loss_type == "nll"
    assert "a compiler of its own" in reason({**row, "framework": script.replace("inductor", "thunder")})
    shards = {"gpus": "8", "parallelism": "FSDP (--distributed_mode=fsdp --shard_mode zero2)"}
    assert one({**row, **shards}).run.sharding == "fsdp-grad-op"


def test_a_method_may_say_where_it_runs_and_what_it_adapts() -> None:
    both = {**ALONE, **PAIR}
    assert one({**both, "method": "lora_finetune_distributed"}).run == one(both).run
    assert "contradicts the number of GPUs, 1" in reason({**ALONE, "method": "LoRA distributed"})
    assert "contradicts the number of GPUs, 2" in reason({**both, "method": "LoRA single device"})
    linear = {**ALONE, "method": "LoRA (all linear)"}
    assert one({**linear, "lora_targets": ""}).run == one({**linear, "lora_targets": "q,k,v,o,gate,up,down"}).run
    assert "lora_targets 'q_proj' contradict each other" in reason({**linear, "lora_targets": "q_proj"})
    named = {**QLORA, "method": "QLoRA + unsloth"}
    assert one({**named, "framework": "Unsloth 2025.6"}).stack == "unsloth"
    assert "names unsloth, and framework is 'transformers 4.50': write it there" in reason(named)


FILLS = ("fixed length", "padded to max length", "constant length", "padded to 8192", "samples fill 8192", "concat")


@pytest.mark.parametrize("packed", FILLS)
def test_samples_that_fill_their_length_are_counted_in_tokens_padding_too(packed: str) -> None:
    cells = {**ALONE, "packed": packed, "tokens_per_s": ""}
    assert one({**cells, "samples_per_s": "0.5"}).tokens_per_s == 4096.0
    assert one({**cells, "step_time_s": "16"}).tokens_per_s == 4 * 8192 / 16
    found = one({**cells, "samples_per_s": "0.15", "tokens_per_s": "1200"})
    assert (found.tokens_per_s, found.why_no_speed) == (1200.0, "")
    assert "contradict each other" in reason({**cells, "samples_per_s": "0.5", "tokens_per_s": "1200"})


@pytest.mark.parametrize(
    ("packed", "framework", "filled"),
    [
        ("padded to max length", "transformers 4.50", True),
        ("no, but every sample padded to the fixed length", "HF Trainer + DeepSpeed launcher", True),
        ("padded to 8192", "LLaMA-Factory 0.9.3", True),
        ("fixed length", "transformers 4.50", False),
        ("random tokens padded to max length", "transformers 4.50", False),
        ("padded to max length", "HF Trainer (optimum-benchmark)", False),
        ("padded to max length", "torchtune 0.5", False),
    ],
)
def test_samples_padded_to_the_length_bring_a_mask_where_the_model_is_told(
    packed: str, framework: str, filled: bool
) -> None:
    """A sample alone in its micro-batch too; drawn tokens have none to mask, and torchtune hands on no mask."""
    run = one({**ALONE, "packed": packed, "framework": framework, "attention_impl": "sdpa"}).run
    assert (run.has_padding, run.pad_to_multiple_of) == ((True, 8192) if filled else (False, 1))


@pytest.mark.parametrize("packed", ["yes", "packed", "packing", "neat_packing"])
def test_samples_of_packed_rows_may_be_documents_and_the_row_says_what_to_write(packed: str) -> None:
    found = one({**ALONE, "packed": packed, "tokens_per_s": "", "samples_per_s": "0.5"})
    assert found.tokens_per_s is None
    assert f"samples_per_s '0.5' with packed {packed!r} may count documents; write tokens_per_s" in found.why_no_speed
    assert not one({**ALONE, "packed": packed, "tokens_per_s": "", "peak_mem_gib": "40"}).why_no_speed


def test_validate_says_why_samples_are_no_speed() -> None:
    (entry,) = read_entries([{**ALONE, "tokens_per_s": "", "samples_per_s": "0.5"}])
    priors = load_priors()
    judged = judge(entry, lambda _: priors)
    assert judged.speed is None
    assert str(judged.reason).startswith("speed: samples_per_s '0.5' with packed 'sample packing' may count documents")


@pytest.mark.parametrize(
    ("framework", "label", "versions"),
    [
        ("Ray Train + transformers 4.44", "hf-peft", "transformers >=4.41,<4.46"),
        ("SageMaker ..., transformers 4.44", "hf-peft", "transformers >=4.41,<4.46"),
        ("\U0001f917 Transformers 4.44", "hf-peft", "transformers >=4.41,<4.46"),
        ("Kaggle, transformers 4.44", "hf-peft", "transformers >=4.41,<4.46"),
        ("torchrun + transformers 4.44 (RunPod)", "hf-peft", "transformers >=4.41,<4.46"),
        ("NeMo (MLPerf Training v5.0)", "megatron", ""),
        ("Databricks / MosaicML (Composer)", "llm-foundry", ""),
        ("DeepSpeed-Chat step 1 SFT", "deepspeed-chat", "transformers >=4.54,<5.0"),
        ("PEFT method comparison, transformers 4.52", "hf-peft", "transformers >=4.49,<4.54"),
        ("axolotl @ main", "axolotl", "axolotl >=0.10"),
        ("torchtune main @ 30b8519", "torchtune", "torchtune >=0.4"),
        ("torchtune 30b8519", "torchtune", "torchtune >=0.4"),
        ("torchtune@v0.3.1", "torchtune", "torchtune >=0.3,<0.4"),
        ("qlora.py", "qlora-repo", "transformers >=4.54,<5.0"),
    ],
)
def test_hosts_launchers_and_commits_say_nothing_of_what_ran(framework: str, label: str, versions: str) -> None:
    found = one({**ALONE, "framework": framework, "attention_impl": "sdpa"})
    assert found.stack == label
    assert not versions or found.run.stack_version.startswith(versions)


@pytest.mark.parametrize(
    ("framework", "told"),
    [
        ("Ray Train", "framework 'Ray Train' names no training software"),
        ("DeepSpeed-Chat step 3", "framework 'DeepSpeed-Chat step 3': 'step 3' is not in the vocabulary"),
        (
            "Unsloth 2024.6",
            "framework 'Unsloth 2024.6': defaults of unsloth 2024.6 are not recorded, the oldest are of",
        ),
    ],
)
def test_a_framework_that_is_not_read_is_named(framework: str, told: str) -> None:
    assert reason({**ALONE, "framework": framework}).startswith(told)


def test_a_loop_without_the_trainer_has_no_flag_of_mixed_precision() -> None:
    """PEFT's own comparison runs bf16 weights without autocast (use_amp is false in its defaults)."""
    loop = one({**ALONE, "framework": "PEFT method comparison, transformers 4.52"}).run
    trainer = one({**ALONE, "framework": "transformers 4.52"}).run
    assert (loop.precision, trainer.precision) == ("bf16", "bf16-autocast")


@pytest.mark.parametrize(
    ("cells", "field", "value"),
    [
        ({"compile": "1"}, "torch_compile", True), ({"compile": "0"}, "torch_compile", False),
        ({"compile": "without"}, "torch_compile", False), ({"compile": "w/o"}, "torch_compile", False),
        ({"grad_checkpointing": "w/o"}, "gradient_checkpointing", False),
        ({"grad_checkpointing": "used"}, "gradient_checkpointing", True),
        ({"kind": "-"}, "method", "full"), ({"kind": "n/a"}, "method", "full"), ({"confidence": "-"}, "method", "full"),
        ({"confidence": "--"}, "method", "full"), ({"parallelism": "--"}, "sharding", "none"),
    ],
)  # fmt: skip
def test_words_for_yes_no_and_nothing_are_the_same_in_every_column(
    cells: dict[str, str], field: str, value: Any
) -> None:
    assert getattr(one({**FULL, **cells}).run, field) == value


@pytest.mark.parametrize("confidence", ["?", "unknown", "none", "maybe", "low"])
def test_a_doubtful_confidence_is_not_used(confidence: str) -> None:
    assert "confidence" in reason({**FULL, "confidence": confidence})


@pytest.mark.parametrize(
    ("text", "counter"),
    [
        ("memory reserved", "reserved"), ("cuda reserved max", "reserved"), ("peak memory allocated", "allocated"),
        ("GPU memory (allocated)", "allocated"), ("nvidia-smi reserved", "nvidia-smi reserved"),
        ("not reserved", "not reserved"), ("reserved or allocated", "reserved or allocated"),
    ],
)  # fmt: skip
def test_a_counter_may_have_other_words_about_memory_beside_it(text: str, counter: str) -> None:
    assert one({**FULL, "reserved_or_allocated": text, "peak_mem_gib": "40"}).counter == counter


@pytest.mark.parametrize(
    ("cells", "base"),
    [
        ({"compute_dtype": "bf16 (nf4 base)", "quant": ""}, "bnb-4bit"),
        ({"compute_dtype": "bf16, 8-bit base", "quant": ""}, "bnb-8bit"),
        ({"compute_dtype": "bf16, 4-bit base", "quant": "nf4"}, "bnb-4bit"),
        ({"compute_dtype": "bf16, quantized base", "quant": "nf4"}, "bnb-4bit"),
        ({"framework": "TRL 0.18 QLoRA notebook", "quant": "nf4"}, "bnb-4bit"),
        ({"framework": "TRL 0.18 LoRA notebook", "quant": "nf4"}, "bnb-4bit"),
        ({"framework": "TRL 0.18 LoRA notebook"}, None),
    ],
)
def test_bits_of_a_base_are_read_from_the_cell_that_has_them(cells: dict[str, str], base: str | None) -> None:
    assert one({**ALONE, **cells}).run.base_quantization == base


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"compute_dtype": "bf16, 4-bit base"}, "quant 'none' contradicts compute_dtype 'bf16, 4-bit base'"),
        ({"compute_dtype": "bf16, 8-bit base", "quant": "nf4"}, "quant 'nf4' contradicts compute_dtype"),
        ({"compute_dtype": "bf16 (nf4 base)", "method": "8-bit LoRA"}, "contradict each other"),
        ({"compute_dtype": "bf16, quantized base", "quant": ""}, "write none, nf4 or 8-bit in quant"),
        ({"framework": "TRL 0.18 QLoRA notebook", "quant": ""}, "names qlora, which method 'LoRA' and quant ''"),
        ({"framework": "TRL 0.18 QLoRA notebook"}, "names qlora, which method 'LoRA' and quant 'none'"),
        ({"framework": "TRL 0.18 full"}, "names full, which method 'LoRA'"),
        ({"method": "LoRA fp16"}, "method 'LoRA fp16' names fp16, which compute_dtype 'bf16' is not"),
        ({"framework": "trl 2025"}, "2025 is no version of trl"),
        ({"framework": "TRL 18"}, "18 is no version of trl"),
        ({"framework": "TRL 0.18, TRL 0.9"}, "two versions of TRL, 0.18 and 0.9"),
        ({"framework": "TRL 0.18, transformers 45"}, "45 is no version of transformers"),
    ],
)
def test_what_two_cells_say_differently_is_refused(cells: dict[str, str], why: str) -> None:
    assert why in reason({**ALONE, **cells})


@pytest.mark.parametrize("version", ["0.5", "0.6.1"])
def test_a_refused_version_names_the_series_that_later_ones_are_of(version: str) -> None:
    """torchtune's defaults changed last with 0.4; 0.5 and 0.6 came after it."""
    assert "series 0.x" in reason({**ALONE, "framework": "torchtune 99.0"})
    assert one({**ALONE, "framework": f"torchtune {version}"})


def test_a_format_that_the_method_names_is_that_of_compute_dtype() -> None:
    assert one({**ALONE, "method": "LoRA fp16", "compute_dtype": "fp16"}).run.precision == "fp16-autocast"
    assert one({**FULL, "method": "full bf16", "compute_dtype": "bf16 mixed"}).run.precision == "bf16-autocast"
    assert "names fp16" in reason({**FULL, "method": "full fp16"})
    assert "'bf16' and 'fp16'" in reason({**ALONE, "method": "bf16 (fp16) LoRA"})


def test_versions_are_those_of_the_package_and_dates_none() -> None:
    assert one({**ALONE, "framework": "TRL 0.18, TRL 0.18"}).run == one({**ALONE, "framework": "TRL 0.18"}).run
    dated = {**ALONE, "framework": "TRL 0.18 (2025-06-01)"}
    assert one(dated).run == one({**ALONE, "framework": "TRL 0.18"}).run


def test_litgpts_flash_attention_is_that_of_torchs_sdpa() -> None:
    """LitGPT's model calls ``scaled_dot_product_attention`` and nothing else."""
    cells = {**ALONE, "framework": "LitGPT", "compute_dtype": "bf16-true"}
    flash, sdpa = (one({**cells, "attention_impl": text}) for text in ("FlashAttention-2", "sdpa"))
    assert flash.run == sdpa.run
    assert any("LitGPT calls torch's sdpa" in note for note in flash.reading_notes)
    assert "attention_impl" in reason({**cells, "attention_impl": "FlashAttention-3"})


def test_shards_on_a_card_without_bf16_are_gathered_in_fp16() -> None:
    """Where no column says numbers, as ``fp16 mixed`` of the same row: fp32 shards; DDP of that card is read so too."""
    old = {
        **FULL,
        "gpu": "8x V100 32GB",
        "gpus": "8",
        "attention_impl": "sdpa",
        "framework": "TRL",
        "tokens_per_s": "",
        "seq_len": "2k",
    }
    fp16 = one({**old, "parallelism": "FSDP", "compute_dtype": "fp16 mixed"})
    unsaid = {name: text for name, text in old.items() if name != "compute_dtype"}
    own = one({**unsaid, "parallelism": "FSDP"})
    assert own.run == fp16.run
    assert (own.run.dtype, own.run.precision, own.run.master_dtype) == ("fp16", "fp16-autocast", "fp32")
    assert one({**unsaid, "parallelism": "DDP"}).run.precision == "fp16-autocast"


def test_a_number_of_modules_is_all_of_them_where_the_model_has_as_many() -> None:
    """Llama has seven kinds of linear maps, Phi-3 four: its maps into attention and the feed-forward are joined."""
    assert one({**ALONE, "lora_targets": "7 modules"}).run == one({**ALONE, "lora_targets": "all linear"}).run
    assert "has 4 kinds of modules; write which 7" in reason(
        {**ALONE, "lora_targets": "7 modules", "model": "Phi-3-mini"}
    )
    named = one({**ALONE, "lora_targets": "qproj, vproj"}).run
    assert named == one({**ALONE, "lora_targets": "(q|v)_proj"}).run
    assert named.lora_target_modules == ("q_proj", "v_proj")


def test_torchs_own_zero_1_casts_no_weights() -> None:
    """ZeroRedundancyOptimizer shards the states of weights as they are: in fp32 under autocast, where DeepSpeed's are
    in 16 bits beside a copy; states of 16-bit weights have 16 bits."""
    own = {
        **FULL,
        "gpu": "8x H100 80GB SXM",
        "gpus": "8",
        "framework": "PyTorch",
        "parallelism": "ZeroRedundancyOptimizer",
    }
    run = one({**own, "compute_dtype": "bf16 autocast"}).run
    assert (run.sharding, run.dtype, run.precision) == ("zero1", "fp32", "bf16-autocast")
    assert one({**own, "compute_dtype": "bf16 autocast", "parallelism": "ZeRO-1"}).run.dtype == "bf16"
    assert "shards states in 16 bits, which is not built" in reason({**own, "compute_dtype": "bf16-true"})


@pytest.mark.parametrize("counter", ["nvtop", "gpustat", "NVML", "DCGM", "nvidia-smi", "process"])
def test_what_reads_the_cards_memory_reads_that_of_the_process(counter: str) -> None:
    """All of them take NVML's figure."""
    row = {**ALONE, "reserved_or_allocated": counter, "peak_mem_gib": "40"}
    known = {**row, "reserved_or_allocated": "process"}
    assert judge(read_entries([row])[0], shipped).memory == judge(read_entries([known])[0], shipped).memory
    assert judge(read_entries([row])[0], shipped).memory is not None
