"""Places where a naive reader is wrong by a factor: one test or more for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.amount import resolve_amount
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run

Read = Callable[..., RunFile]


def run_options(run_file: RunFile, **typed: Any) -> dict[str, Any]:
    merged = merge_options(run_file, typed).options
    return {name: value for name, value in merged.items() if name not in RUN_OPTIONS_ELSEWHERE}


def test_1_trl_holds_the_base_in_fp32_unless_told(read: Read) -> None:
    silent = read("trl", "dtype:")
    assert silent.options["dtype"] == "fp32"
    assert silent.options["precision"] == "bf16-autocast"
    assert silent.origins["dtype"] == "stack-default"
    assert any("add dtype: bfloat16" in note for note in silent.notes)
    told = read("trl", "dtype: bfloat16")
    assert (told.options["dtype"], told.origins["dtype"]) == ("bf16", "file")
    assert read("trl", "dtype:\ntorch_dtype: bfloat16").their_fields["dtype"] == "torch_dtype"


def test_2_trl_rank_without_use_peft_is_a_full_fine_tune(read: Read) -> None:
    run_file = read("trl", "use_peft:\nlora_r: 16\nlora_alpha: 32")
    assert run_file.options["method"] == "full"
    assert not {"lora_r", "lora_target_modules", "lora_dropout"} & set(run_file.options)
    assert any("use_peft is not on" in note and "lora_r, lora_alpha" in note for note in run_file.notes)


@pytest.mark.parametrize(
    ("lines", "version", "loss", "stack"),
    [
        ("", None, "chunked_nll", "hf-peft"),
        ("", "1.10.0.dev0", "chunked_nll", "hf-peft"),
        ("", "1.6.2", "nll", "hf-peft"),
        ("loss_type: nll", None, "chunked_nll", "hf-peft"),
        ("loss_type: nll", "1.14.2", "nll", "hf-peft"),
        ("loss_type: dft", None, "dft", "hf-peft"),
        ("use_liger_kernel: true", None, "chunked_nll", "liger"),
        ("use_liger_kernel: true", "1.14.2", "liger", "liger"),
    ],
)
def test_3_the_loss_path_of_trl_follows_its_version(
    read: Read, lines: str, version: str, loss: str, stack: str
) -> None:
    run_file = read("trl", lines, framework_version=version)
    assert (run_file.options["loss_type"], run_file.stack) == (loss, stack)


@pytest.mark.parametrize(
    ("version", "lines", "expected"),
    [
        ("0.27", "", {"reentrant": True, "loss_type": "nll", "hf_code": "4.49"}),
        ("0.26", "load_in_4bit: true\ndtype:", {"dtype": "fp16", "adapter_dtype": "bf16"}),
        ("0.24", "load_in_4bit: true\ndtype:", {"dtype": "bf16", "adapter_dtype": "fp32"}),
        ("0.21", "", {"gradient_checkpointing": False, "optim": "adamw_torch", "precision": "bf16-autocast"}),
        ("0.17", "dtype:", {"gradient_checkpointing": False, "precision": "fp32", "dtype": "fp32"}),
        ("0.17", "bf16: true", {"precision": "bf16-autocast"}),
        ("1.16", "", {"reentrant": False, "loss_type": "chunked_nll"}),
    ],
)
def test_3_4_9_10_older_trl_differs_in_more_than_its_loss(
    read: Read, version: str, lines: str, expected: dict[str, Any]
) -> None:
    options = read("trl", lines, framework_version=version).options
    assert {name: options.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("version", "length", "age"), [("0.9.4", 2048, None), ("0.9.1", 2048, "4.46"), ("0.9.0", 1024, "4.45")]
)
def test_4_older_llama_factory_cuts_earlier_and_runs_older_code(
    read: Read, version: str, length: int, age: str | None
) -> None:
    options = read("llama-factory", "cutoff_len:\nmax_samples:", framework_version=version).options
    assert (options["max_length"], options.get("hf_code")) == (length, age)


def test_3_trls_default_loss_says_which_versions_it_stands_for(read: Read) -> None:
    resolved = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), run_options(read("trl")))
    assert resolved.run.loss_type == "chunked_nll"
    assert any("1.7 to 1.12" in note for note in resolved.notes)


def test_3_a_loss_path_that_is_not_built_is_refused_by_name_when_the_run_is_resolved() -> None:
    with pytest.raises(NotSupportedError, match="dft"):
        resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), {"loss_type": "dft"})


def test_3_chunked_loss_and_liger_exclude_each_other(read: Read) -> None:
    with pytest.raises(InputError, match="chunked_nll does not go with use_liger_kernel"):
        read("trl", "use_liger_kernel: true\nloss_type: chunked_nll", framework_version="1.14")


@pytest.mark.parametrize(
    ("form", "lines", "loss", "stack"),
    [
        ("llama-factory", "", "nll", "hf-peft"),
        ("llama-factory", "enable_liger_kernel: true", "liger", "liger"),
        ("llama-factory", "use_unsloth: true", None, "unsloth"),
        ("axolotl", "", "nll", "hf-peft"),
        ("axolotl", "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rope: true", "nll", "liger"),
        ("axolotl", "liger_fused_linear_cross_entropy: true", "liger", "hf-peft"),
        ("axolotl", "unsloth_lora_mlp: true", "nll", "unsloth"),
        (
            "axolotl",
            "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]",
            "cut_cross_entropy",
            "hf-peft",
        ),
    ],
)
def test_3_other_frameworks_keep_full_logits_unless_a_kernel_is_asked_for(
    read: Read, form: str, lines: str, loss: str | None, stack: str
) -> None:
    """None: the stack says which (Unsloth's is in the model that it patches)."""
    run_file = read(form, lines)
    assert (run_file.options.get("loss_type"), run_file.stack) == (loss, stack)


@pytest.mark.parametrize(
    ("form", "lines", "on", "reentrant"),
    [
        ("llama-factory", "", True, True),
        ("llama-factory", "use_reentrant_gc: false", True, False),
        ("llama-factory", "disable_gradient_checkpointing: true", False, None),
        ("axolotl", "", False, None),
        ("axolotl", "gradient_checkpointing: true", True, True),
        ("axolotl", "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {use_reentrant: false}", True, False),
        ("trl", "", True, False),
        ("trl", "gradient_checkpointing: false", False, None),
        ("trl", "activation_checkpointing: false", False, None),
        ("trl", "gradient_checkpointing_kwargs: {use_reentrant: true}", True, True),
    ],
)
def test_4_who_checkpoints_and_how(read: Read, form: str, lines: str, on: bool, reentrant: bool | None) -> None:
    options = read(form, lines).options
    assert options["gradient_checkpointing"] is on
    assert options.get("reentrant") is reentrant


def test_4_trl_forces_reentrant_for_adapters_under_zero3(read: Read) -> None:
    zero3 = {"zero_optimization": {"stage": 3}}
    assert read("trl", deepspeed=zero3).options["reentrant"] is True
    assert read("trl", "use_peft: false", deepspeed=zero3).options["reentrant"] is False


@pytest.mark.parametrize(
    ("lines", "stack"),
    [
        ("lora_mlp_kernel:", "axolotl"),
        ("lora_mlp_kernel: true", "axolotl"),
        ("lora_mlp_kernel: false", "hf-peft"),
        ("lora_mlp_kernel:\ntrust_remote_code: true", "hf-peft"),
        ("lora_mlp_kernel:\nfsdp: [full_shard, auto_wrap]", "hf-peft"),
        ("lora_mlp_kernel:\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}", "axolotl"),
        ("adapter:\nlora_mlp_kernel:", "hf-peft"),
    ],
)
def test_5_axolotl_switches_its_lora_kernels_on_by_itself(read: Read, lines: str, stack: str) -> None:
    assert read("axolotl", lines).stack == stack


@pytest.mark.parametrize(
    ("dropout", "version", "stack"),
    [
        ("0.05", "0.16.0", "axolotl"),
        ("0.05", "0.15", "hf-peft"),
        ("0", "0.12", "axolotl"),
        ("", "0.12", "hf-peft"),
        ("0", "0.9", "hf-peft"),
    ],
)
def test_5_older_axolotl_needs_a_dropout_of_zero(read: Read, dropout: str, version: str, stack: str) -> None:
    lines = f"lora_mlp_kernel:\nlora_dropout: {dropout}"
    assert read("axolotl", lines, framework_version=version).stack == stack


def test_5_kernels_that_came_by_themselves_are_told_and_run(read: Read) -> None:
    run_file = read("axolotl", "lora_mlp_kernel:")
    assert run_file.origins["stack"] == "stack-default"
    assert any("fused LoRA kernels on by itself" in note for note in run_file.notes)
    resolved = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), run_options(run_file))
    assert resolved.run.fused_kernels == ("lora",)


def test_6_llama_factory_alpha_is_twice_the_rank(read: Read) -> None:
    assert any("twice the rank, 32" in note for note in read("llama-factory", "lora_rank: 16").notes)
    assert not any("twice the rank" in note for note in read("llama-factory", "lora_alpha: 8").notes)


@pytest.mark.parametrize(
    ("form", "lines"),
    [("axolotl", "sample_packing: true"), ("trl", "packing: true"), ("llama-factory", "neat_packing: true")],
)
def test_7_packed_rows_say_that_attention_is_counted_over_the_whole_row(read: Read, form: str, lines: str) -> None:
    run_file = read(form, lines)
    assert any("as one document" in note for note in run_file.notes)
    assert not any("Rows are not packed" in note for note in run_file.notes)


def test_7_packing_in_llama_factory_fills_rows_and_keeps_documents_together(read: Read) -> None:
    """One token is taken off ``cutoff_len`` and rows are filled to one more (``supervised.py`` of 0.9.3 and 0.9.4)."""
    plain, packed = read("llama-factory", "cutoff_len: 4096"), read("llama-factory", "cutoff_len: 4096\npacking: true")
    assert (plain.options["max_length"], packed.options["max_length"]) == (4096, 4096)
    assert not any("one document each" in note for note in packed.notes)
    pretraining = read("llama-factory", "cutoff_len: 4096\nstage: pt")
    assert pretraining.options["max_length"] == 4096
    assert not any("not packed" in note for note in pretraining.notes)


@pytest.mark.parametrize("form", ["axolotl", "llama-factory", "trl", "torchtune", "litgpt"])
def test_8_unpacked_rows_are_an_upper_bound_and_say_so(read: Read, form: str) -> None:
    assert any("Rows are not packed" in note and "upper bound" in note for note in read(form).notes)


def test_8_rows_padded_to_full_length_are_exact(read: Read) -> None:
    found = read("axolotl", "pad_to_sequence_len: true")
    assert not any("upper bound" in note for note in found.notes)
    run = replace(Run(method="lora"), max_length=8192, per_device_train_batch_size=2)
    amount = resolve_amount(run, {**found.options, "mean_tokens": 500.0, "num_samples": "10k", "num_train_epochs": 1})
    assert amount is not None
    assert amount.steps == 5000, "as many rows as samples, whatever is in them"
    assert any("With --tokens and neither" in note and "a lower bound" in note for note in found.notes)
    assert found.options["rows_padded"] == 64, "the last 64 tokens are filled up too"
    assert found.origins["rows_packed"] == "stack-default"
    assert read("axolotl", "pad_to_sequence_len: true\nsample_packing: false").origins["rows_packed"] == "file"


@pytest.mark.parametrize(
    ("form", "lines", "adapter_dtype"),
    [
        ("trl", "", None),
        ("trl", "load_in_4bit: true", "bf16"),
        ("llama-factory", "", None),
        ("llama-factory", "quantization_bit: 4", None),
        ("llama-factory", "pure_bf16: true", "bf16"),
        ("axolotl", "", None),
        ("axolotl", "adapter: qlora\nload_in_4bit: true", None),
        ("axolotl", "peft_autocast_adapter_dtype: false", "bf16"),
    ],
)
def test_9_adapters_are_fp32_but_for_these(read: Read, form: str, lines: str, adapter_dtype: str | None) -> None:
    """None leaves it to PEFT, which raises adapters to fp32 (``autocast_adapter_dtype``)."""
    run_file = read(form, lines)
    assert run_file.options.get("adapter_dtype") == adapter_dtype
    options = run_options(run_file, loss_type="nll")
    run = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), options).run
    assert run.adapter_dtype == (adapter_dtype or "fp32")


@pytest.mark.parametrize(
    ("form", "lines", "adapter_dtype", "stack"),
    [
        ("trl", "load_in_8bit: true\nloss_type: nll", "bf16", "hf-peft"),
        ("llama-factory", "quantization_bit: 8", "fp32", "hf-peft"),
        ("axolotl", "load_in_8bit: true", "fp32", "hf-peft"),
    ],
)
def test_9_an_8_bit_base_is_bitsandbytes_int8_and_switches_no_kernels_on(
    read: Read, form: str, lines: str, adapter_dtype: str, stack: str
) -> None:
    """TRL casts adapters of any quantized base; axolotl's own LoRA kernels leave 8-bit bases alone."""
    run_file = read(form, lines)
    run = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), run_options(run_file)).run
    assert (run.method, run.quant_method, run.bnb_4bit_quant_type) == ("qlora", "bnb-8bit", None)
    assert (run.adapter_dtype, run_file.stack) == (adapter_dtype, stack)


def test_9_four_and_eight_bits_exclude_each_other(read: Read) -> None:
    with pytest.raises(InputError, match="load_in_4bit and load_in_8bit"):
        read("trl", "load_in_4bit: true\nload_in_8bit: true")


@pytest.mark.parametrize("form", ["trl", "axolotl", "llama-factory"])
def test_both_kinds_of_mixed_precision_are_refused(read: Read, form: str) -> None:
    """As transformers' ``TrainingArguments`` refuses them."""
    with pytest.raises(InputError, match="bf16 and fp16 exclude each other; keep one of them"):
        read(form, "bf16: true\nfp16: true")


@pytest.mark.parametrize(
    ("form", "lines", "dtype"),
    [
        ("axolotl", "adapter: qlora\nload_in_4bit: true", "bf16"),
        ("llama-factory", "quantization_bit: 4", "bf16"),
        ("trl", "load_in_4bit: true", "bf16"),
        ("trl", "load_in_4bit: true\ndtype:", "fp32"),
    ],
)
def test_10_what_a_quantized_base_keeps_its_head_and_embeddings_in(
    read: Read, form: str, lines: str, dtype: str
) -> None:
    assert read(form, lines).options["dtype"] == dtype


def test_10_a_4_bit_base_of_trl_without_dtype_is_told_to_be_restored_in_fp32(read: Read) -> None:
    """``get_quantization_config`` passes ``dtype`` on as ``bnb_4bit_compute_dtype``."""
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    silent, told = (read("trl", f"load_in_4bit: true\ndtype: {word}") for word in ("", "bfloat16"))
    notes = [resolve_run(llama, run_options(file)).notes for file in (silent, told)]
    assert [any("restored in fp32" in note for note in each) for each in notes] == [True, False]


def test_10_llama_factory_trains_fp32_weights_unless_pure(read: Read) -> None:
    full = read("llama-factory", "finetuning_type: full").options
    assert (full["dtype"], full["precision"]) == ("fp32", "bf16-autocast")
    pure = read("llama-factory", "finetuning_type: full\npure_bf16: true").options
    assert (pure["dtype"], pure["precision"]) == ("bf16", "bf16")


def test_11_empty_keys_are_absent(read: Read) -> None:
    run_file = read("axolotl", "lora_model_dir:\nrl:\nfsdp:\nfsdp_config:\ndeepspeed:\nflash_attention:\nmax_steps:\n")
    assert run_file.options == read("axolotl").options
    assert "lora_model_dir" not in run_file.ignored


def test_11_so_are_empty_words_lists_and_mappings(read: Read) -> None:
    run_file = read("axolotl", "fsdp_config: {}\nfsdp: []\ndeepspeed: ''\noptimizer: ''\nbf16: ' '")
    assert run_file.options == read("axolotl").options
    assert run_file.origins["optim"] == "stack-default"


@pytest.mark.parametrize(
    ("lines", "dtype", "precision"),
    [
        ("bf16: auto", "bf16", "bf16-autocast"),
        ("bf16:", "bf16", "bf16-autocast"),
        ("bf16: true", "bf16", "bf16-autocast"),
        ("bf16: false\nfp16: true", "fp16", "fp16-autocast"),
        ("bf16: false\nfp16: false", "fp32", "fp32"),
        ("bfloat16: true", "bf16", "bf16"),
    ],
)
def test_11_bf16_auto_is_a_word(read: Read, lines: str, dtype: str, precision: str) -> None:
    options = read("axolotl", lines).options
    assert (options["dtype"], options["precision"]) == (dtype, precision)


def test_12_tokens_that_axolotl_wrote_down(read: Read) -> None:
    packed = read("axolotl", "sample_packing: true\ntotal_num_tokens: 1000000\nsample_packing_eff_est: 0.8")
    assert packed.options["tokens"] == 1_250_000
    assert packed.their_fields["tokens"] == "total_num_tokens"
    unpacked = read("axolotl", "total_num_tokens: 1000000\nsample_packing_eff_est: 0.8")
    assert unpacked.options["tokens"] == 1_000_000
    assert any("lower bound" in note for note in unpacked.notes)
    steps = read("axolotl", "total_num_tokens: 1000000\nmax_steps: 50").options
    assert (steps["max_steps"], "tokens" in steps) == (50, False)


@pytest.mark.parametrize("form", ["axolotl", "llama-factory", "trl", "torchtune", "litgpt"])
def test_13_a_file_without_an_amount_still_gives_a_forecast(read: Read, form: str) -> None:
    merged = merge_options(read(form), {})
    assert not {"num_train_epochs", "tokens", "max_steps", "num_samples"} & set(merged.options)
    assert any("--num-samples" in note for note in merged.notes)


def test_13_no_gpu_count_is_invented(read: Read) -> None:
    assert all("num_gpus" not in read(form).options for form in ("axolotl", "llama-factory", "trl", "torchtune"))
    assert read("litgpt").options["num_gpus"] == 1


@pytest.mark.parametrize(
    ("form", "line", "named"),
    [
        ("axolotl", "rl: dpo", "rl: dpo"),
        ("axolotl", "adapter: llama-adapter", "adapter: llama-adapter"),
        ("axolotl", "expert_parallel_size: 2", "expert_parallel_size: 2"),
        ("axolotl", "gradient_checkpointing: offload_disk", "gradient_checkpointing: offload_disk"),
        ("axolotl", "activation_offloading: disk", "activation_offloading: disk"),
        ("llama-factory", "stage: dpo", "stage: dpo"),
        ("llama-factory", "stage: kto", "stage: kto"),
        ("llama-factory", "stage: ppo", "stage: ppo"),
        ("llama-factory", "stage: rm", "stage: rm"),
        ("llama-factory", "use_badam: true", "use_badam: True"),
        ("llama-factory", "use_galore: true", "use_galore: True"),
        ("llama-factory", "finetuning_type: oft", "finetuning_type: oft"),
        ("llama-factory", "quantization_bit: 3", "quantization_bit: 3"),
        ("trl", "num_generations: 8", "num_generations: 8"),
        # DPO, GRPO and reward files are files of other trainers; SFTTrainer itself refuses their losses
        ("trl", "loss_type: sigmoid", "loss_type: sigmoid"),
        ("trl", "center_rewards_coefficient: 0.01", "center_rewards_coefficient: 0.01"),
        ("axolotl", "kd_trainer: true", "kd_trainer: True"),
        ("axolotl", "spectrum_top_fraction: 0.25", "spectrum_top_fraction: 0.25"),
        ("axolotl", "peft: {weight_dtype: int4}", "peft.weight_dtype: int4"),
        ("trl", "torch_compile_mode: max-autotune", "torch_compile_mode: max-autotune"),
        ("axolotl", "torch_compile: true\ntorch_compile_backend: eager", "torch_compile_backend: eager"),
        ("llama-factory", "pipeline_model_parallel_size: 4", "pipeline_model_parallel_size: 4 asks for training by"),
        ("litgpt", "optim: {optimizer: galore_adamw_8bit}", "optim.optimizer: galore_adamw_8bit"),
        ("torchtune", "loss: {_component_: torchtune.rlhf.loss.DPOLoss}", "DPOLoss"),
        ("torchtune", "optimizer: {_component_: torchao.optim.CPUOffloadOptimizer}", "CPUOffloadOptimizer"),
        ("litgpt", "quantize: bnb.int8-training", "quantize: bnb.int8-training"),
        ("litgpt", "optimizer: {class_path: galore_torch.GaLoreAdamW}", "GaLoreAdamW"),
    ],
)
def test_14_what_is_not_forecast_is_refused_by_field_and_value(read: Read, form: str, line: str, named: str) -> None:
    with pytest.raises(NotSupportedError) as refusal:
        read(form, line)
    assert str(refusal.value).startswith("config.yaml: ")
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("form", "lines", "option", "value"),
    [
        ("axolotl", "optimizer: galore_adamw", "optim", "galore_adamw"),
        ("trl", "attn_implementation: flash_attention_4", "attn_implementation", "flash_attention_4"),
        ("trl", "optim: apollo_adamw", "optim", "apollo_adamw"),
    ],
)
def test_values_without_formulas_reach_the_resolver_which_refuses_them_by_name(
    read: Read, form: str, lines: str, option: str, value: Any
) -> None:
    run_file = read(form, lines)
    assert run_file.options[option] == value
    typed = {"loss_type": "nll", "stack": "hf-peft", "num_gpus": 8}
    with pytest.raises(NotSupportedError, match=str(value)):
        resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), run_options(run_file, **typed))


@pytest.mark.parametrize(
    ("form", "lines", "option", "value"),
    [
        ("axolotl", "tensor_parallel_size: 2", "tp", 2),
        ("axolotl", "sequence_parallel_degree: 4", "cp", 4),
        ("torchtune", "tensor_parallel_dim: 2", "tp", 2),
        ("axolotl", "optimizer: paged_adamw_32bit", "optim", "paged_adamw_32bit"),
        ("axolotl", "flash_attention: true", "attn_implementation", "flash_attention_2"),
        ("llama-factory", "flash_attn: fa2", "attn_implementation", "flash_attention_2"),
        ("llama-factory", "flash_attn: fa3", "attn_implementation", "flash_attention_3"),
        ("axolotl", "attn_implementation: flash_attention_3", "attn_implementation", "flash_attention_3"),
        ("trl", "attn_implementation: flash_attention_2", "attn_implementation", "flash_attention_2"),
        ("trl", "optim: adamw_bnb_8bit", "optim", "adamw_bnb_8bit"),
        ("trl", "optim: adafactor", "optim", "adafactor"),
        ("trl", "use_peft: true\nuse_dora: true", "use_dora", True),
        ("trl", "activation_offloading: true", "activation_offloading", True),
        ("axolotl", "gradient_checkpointing: unsloth", "activation_offloading", True),
        ("axolotl", "gradient_checkpointing: true\nactivation_offloading: legacy", "reentrant", True),
        ("llama-factory", "use_unsloth_gc: true", "activation_offloading", True),
        ("llama-factory", "additional_target: embed_tokens,lm_head", "modules_to_save", ("embed_tokens", "lm_head")),
    ],
)
def test_values_with_formulas_reach_the_run(read: Read, form: str, lines: str, option: str, value: Any) -> None:
    typed = {"loss_type": "nll", "stack": "hf-peft", "num_gpus": 8}
    resolved = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), run_options(read(form, lines), **typed))
    assert getattr(resolved.run, option) == value


def test_trls_chunks_are_told_of_where_trl_runs(read: Read) -> None:
    """TRL from 1.15 makes tiles."""
    told = "chunked_nll is TRL's of 1.13"

    def notes(form: str, lines: str, version: str | None = None) -> str:
        found = read(form, lines, framework_version=version)
        options = {name: value for name, value in found.options.items() if name not in RUN_OPTIONS_ELSEWHERE}
        resolved = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), options, option_origins=found.origins)
        assert resolved.run.loss_type == "chunked_nll"
        return " ".join((*found.notes, *resolved.notes))

    assert told not in notes("trl", "packing: true")
    assert told in notes("trl", "packing: true", "1.10")


@pytest.mark.parametrize(("dequantize", "reads"), [("true", True), ("false", False)])
def test_weights_stored_in_mxfp4_are_trained_where_they_are_turned_back(
    read: Read, dequantize: str, reads: bool
) -> None:
    """axolotl's example of gpt-oss: the tool's own forecast is of experts in 16 bits."""
    lines = f"model_quantization_config: Mxfp4Config\nmodel_quantization_config_kwargs:\n  dequantize: {dequantize}"
    if reads:
        assert read("axolotl", lines).options["method"] == "lora"
        return
    with pytest.raises(NotSupportedError, match="model_quantization_config: Mxfp4Config asks for another quantization"):
        read("axolotl", lines)
