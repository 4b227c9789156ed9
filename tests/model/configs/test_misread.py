"""Fields of training files that once changed nothing here although they change the run: each read, or refused by name.

The frameworks' sources are those of axolotl 0.19.0, LLaMA-Factory 0.9.5, trl 1.16.0, torchtune 0.6.1, litgpt 0.5.13 and
accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.adapter_targets import target_modules
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options
from tunecast.model.memory import memory_timeline
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run

Read = Callable[..., RunFile]
LIGER = "plugins: [axolotl.integrations.liger.LigerPlugin]\n"


def resolved(run_file: RunFile, name: str = "meta-llama/Llama-3.1-8B", **typed: Any) -> Run:
    options = merge_options(run_file, typed).options
    own = {field: value for field, value in options.items() if field not in RUN_OPTIONS_ELSEWHERE}
    return resolve_run(load_architecture(name), own).run


@pytest.mark.parametrize(
    ("form", "lines", "named"),
    [
        (
            "axolotl",
            "load_in_8bit: true\nquantize_moe_experts: true",
            "quantize_moe_experts: True asks for experts stored in 8 bits",
        ),
        ("axolotl", "peft: {backend: torchao, weight_dtype: int4}", "peft.weight_dtype: int4"),
        ("axolotl", "gkd_trainer: true", "gkd_trainer"),
        ("axolotl", "kd_trainer: true", "kd_trainer"),
        ("axolotl", "deepcompile: true", "deepcompile"),
        ("axolotl", "use_dft: true", "use_dft"),
        ("axolotl", "plugins: [axolotl.integrations.kd.KDPlugin]", "KDPlugin asks for axolotl's kd"),
        ("axolotl", "plugins: [axolotl.integrations.spectrum.SpectrumPlugin]", "SpectrumPlugin"),
        ("axolotl", "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]", "DiffusionPlugin"),
        ("trl", "center_rewards_coefficient: 0.01", "center_rewards_coefficient"),
        ("trl", "lmbda: 0.5", "lmbda"),
        ("trl", "scale_rewards: group", "scale_rewards"),
        ("trl", "undesirable_weight: 1.0", "undesirable_weight"),
        ("trl", "sync_ref_model: true", "sync_ref_model"),
        ("llama-factory", "do_predict: true", "do_predict: True asks for a run without training"),
        ("llama-factory", "do_eval: true\ndo_train: false", "do_eval"),
        ("llama-factory", "fp8: true", "take it out and type --fp8 torchao, or te"),
        ("axolotl", "fp8: true", "take it out and type --fp8 torchao, or te"),
        ("torchtune", "enable_fp8_training: true", "take it out and type --fp8 torchao"),
        (
            "torchtune",  # apart in its models/phi3/_component_builders.py
            "model._component_: torchtune.models.phi3.lora_phi3_mini",
            "lora_phi3_mini asks for adapters on torchtune's own maps of Phi",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(read: Read, form: str, lines: str, named: str) -> None:
    with pytest.raises(NotSupportedError) as refusal:
        read(form, lines)
    assert named in str(refusal.value)


@pytest.mark.parametrize("plugin", ["axolotl.integrations.lm_eval.LMEvalPlugin", "mine.Plugin"])
def test_plugins_that_train_nothing_and_those_of_others_are_left_alone(read: Read, plugin: str) -> None:
    assert read("axolotl", f"plugins: [{plugin}]").options["loss_type"] == "nll"


def test_training_with_evaluation_is_training(read: Read) -> None:
    trained = read("llama-factory", "do_train: true\ndo_eval: true")
    assert trained.options["method"] == "lora"
    notes = [" ".join(found.notes) for found in (trained, read("llama-factory", "do_train:"))]
    assert ["do_train: true" in told for told in notes] == [False, True]


@pytest.mark.parametrize("version", [None, "1.10", "0.24"])
@pytest.mark.parametrize("loss", ["sigmoid", "apo_zero", "grpo", "kto", "banana"])
def test_a_loss_of_another_trainer_is_no_supervised_fine_tuning(read: Read, loss: str, version: str | None) -> None:
    """``SFTTrainer.__init__``: "Supported values are 'nll' and 'dft'"."""
    with pytest.raises(NotSupportedError, match=f"loss_type: {loss} asks for the loss of another trainer"):
        read("trl", f"loss_type: {loss}", framework_version=version)


@pytest.mark.parametrize(
    ("form", "lines", "gpus"),
    [
        ("llama-factory", "ray_num_workers: 4", 4),
        ("axolotl", "use_ray: true\nray_num_workers: 4", 4),
        ("axolotl", "use_ray: true", 1),
        ("axolotl", "ray_num_workers: 4", None),
    ],
)
def test_rays_workers_have_a_gpu_each(read: Read, form: str, lines: str, gpus: int | None) -> None:
    """``_ray_training_function`` of LLaMA-Factory's train/tuner.py; ``ScalingConfig`` of axolotl's cli/train.py."""
    assert read(form, lines).options.get("num_gpus") == gpus


def test_torchtune_quantizes_the_base_of_a_lora_builder(read: Read, minimal: Callable[..., Any]) -> None:
    """``quantize_base`` of llama3_1/_component_builders.py: FrozenNF4Linear, as ``qlora_llama3_1_8b`` sets it."""
    model = {**minimal("torchtune")["model"], "quantize_base": True}
    options = read("torchtune", f"model: {model}").options
    assert (options["method"], options["bnb_4bit_quant_type"]) == ("qlora", "nf4")
    plain = {**model, "quantize_base": False}
    assert read("torchtune", f"model: {plain}").options["method"] == "lora"


def tune(read: Read, component: str, folder: str) -> str:
    """The model that a torchtune file with this builder and folder is read as."""
    lines = f"model: {{_component_: torchtune.models.{component}}}\ncheckpointer: {{checkpoint_dir: /tmp/{folder}/}}\n"
    return str(read("torchtune", lines).model_name)


@pytest.mark.parametrize(
    ("component", "folder", "model"),
    [
        ("qwen2_5.qwen2_5_7b_instruct", "Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen2_5.qwen2_5_1_5b_base", "epoch_3", "Qwen/Qwen2.5-1.5B"),
        ("qwen3.qwen3_4b_base", "Qwen3-4B-Base", "Qwen/Qwen3-4B-Base"),
        ("gemma.gemma_2b", "gemma-2b", "google/gemma-2b"),
        ("code_llama2.code_llama2_7b", "CodeLlama-7b-hf", "codellama/CodeLlama-7b-hf"),
        ("llama3_1.llama3_1_8b", "DeepSeek-R1-Distill-Llama-8B", "meta-llama/Llama-3.1-8B"),
        ("llama3_1.llama3_1", "Llama-3.1-8B", "Llama-3.1-8B"),
        ("falcon3.falcon3_7b", "Falcon3-7B-Base", "Falcon3-7B-Base"),
    ],
)
def test_a_torchtune_builder_names_the_model_that_its_folder_holds(
    read: Read, component: str, folder: str, model: str
) -> None:
    """Builders of torchtune/models/*/_model_builders.py; a tune of the same shape may lie in the folder."""
    assert tune(read, component, folder) == model


@pytest.mark.parametrize(
    ("component", "folder"),
    [
        ("qwen2_5.qwen2_5_7b_instruct", "Meta-Llama-3.1-8B-Instruct"),
        ("qwen2_5.qwen2_5_9b_of_tomorrow", "Meta-Llama-3.1-8B-Instruct"),
        ("llama3_1.llama3_1_70b", "Llama-3.1-8B"),
        ("falcon3.falcon3_7b", "Qwen2.5-7B"),
    ],
)
def test_a_torchtune_builder_beside_another_models_folder_is_refused(read: Read, component: str, folder: str) -> None:
    with pytest.raises(InputError, match=rf"{component}, but checkpointer.checkpoint_dir is {folder}, another model"):
        tune(read, component, folder)


def test_a_torchtune_builder_of_scores_is_refused(read: Read) -> None:
    with pytest.raises(NotSupportedError, match="mistral_reward_7b asks for a model that gives scores"):
        tune(read, "mistral.lora_mistral_reward_7b", "Mistral-7B-v0.1")


@pytest.mark.parametrize(
    ("word", "sharding"),
    [("FULL_SHARD", "fsdp"), ("SHARD_GRAD_OP", "fsdp-grad-op"), ("NO_SHARD", "ddp"), ("HYBRID_SHARD", "hsdp")],
)
def test_fsdp_1_takes_its_strategy_in_reshard_after_forward(read: Read, word: str, sharding: str) -> None:
    """``FullyShardedDataParallelPlugin.__post_init__``: a name or number where ``fsdp_version`` is 1."""
    config = {"fsdp_version": 1, "fsdp_reshard_after_forward": word}
    companion = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": config}
    assert read("trl", accelerate=companion).options["sharding"] == sharding


@pytest.mark.parametrize(("reshard", "sharding"), [(True, "fsdp"), ("false", "fsdp-grad-op"), (False, "fsdp-grad-op")])
def test_fsdp_2_keeps_weights_gathered_where_it_does_not_reshard(read: Read, reshard: Any, sharding: str) -> None:
    config = {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard}
    companion = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": config}
    assert read("trl", accelerate=companion).options["sharding"] == sharding
    tune = read("torchtune", f"fsdp_reshard_after_forward: {str(reshard).lower()}", num_gpus=8)
    assert tune.options["sharding"] == sharding


FULL = "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\n"


@pytest.mark.parametrize(
    ("lines", "on", "every"),
    [
        ("enable_activation_checkpointing: false\nac_mode: selective\nac_option: 2", True, 2),
        ("ac_mode: selective\nac_option: 1", True, None),
        ("ac_mode: full", True, None),
        ("enable_activation_checkpointing: true\nac_mode: selective\nac_option: 2", False, None),
        ("enable_activation_checkpointing: true", True, None),
    ],
)
def test_torchtune_checkpoints_some_layers(read: Read, lines: str, on: bool, every: int | None) -> None:
    """``full_finetune_distributed.py``: ``ac_mode`` counts only where the older switch is off; with both, nothing."""
    options = read("torchtune", FULL + lines).options
    assert (options["gradient_checkpointing"], options.get("checkpoint_every")) == (on, every)


def test_torchtune_knows_no_checkpoints_of_operations(read: Read) -> None:
    """``checkpoint_wrapper`` of training/activations.py: ``int(ac_style)``."""
    with pytest.raises(InputError, match="ac_option is 'op', but it must be a number"):
        read("torchtune", FULL + "ac_mode: selective\nac_option: op")
    assert read("torchtune", "ac_mode: full").options["gradient_checkpointing"] is False


@pytest.mark.parametrize(
    ("lines", "flat"),
    [
        ("batch_flattening: true\nattn_implementation: flash_attention_2", True),
        ("batch_flattening: auto\nattn_implementation: flash_attention_2", True),
        ("batch_flattening: auto\nattn_implementation: sdpa", False),
        ("batch_flattening: auto\nattn_implementation: flash_attention_2\nmicro_batch_size: 1", False),
    ],
)
def test_batch_flattening_lays_samples_end_to_end(read: Read, lines: str, flat: bool) -> None:
    """``check_batch_flattening_fa``: auto where attention can and a micro-batch has more than one sample."""
    found = read("axolotl", lines)
    assert any("without padding" in note for note in found.notes) == flat
    assert "batch_flattening" not in found.ignored


@pytest.mark.parametrize(
    ("lines", "stack", "kernels"),
    [
        ("liger_rope: true\nlora_mlp_kernel:", "axolotl", ("rope", "lora")),
        ("liger_rms_norm: true\nlora_mlp_kernel: true", "axolotl", ("rms_norm", "lora")),
        ("liger_rope: true\nlora_mlp_kernel: false", "liger", ("rope",)),
        ("liger_cross_entropy: true\nadapter:\nlora_r:\nlora_target_linear:", "liger", ("cross_entropy",)),
    ],
)
def test_ligers_kernels_and_axolotls_own_run_together(
    read: Read, lines: str, stack: str, kernels: tuple[str, ...]
) -> None:
    """Nothing of ``check_auto_enable_lora_kernels`` or ``_apply_lora_kernel_patch`` asks for Liger."""
    run = resolved(read("axolotl", LIGER + lines))
    assert (run.stack, set(run.fused_kernels)) == (stack, set(kernels))


FOUR_BIT_EXPERTS = """base_model: Qwen/Qwen3-30B-A3B
adapter: qlora
load_in_4bit: true
quantize_moe_experts: true
lora_target_linear:
lora_target_modules: [q_proj, v_proj]
"""


def test_axolotls_experts_are_in_4_bits(read: Read) -> None:
    """``replace_parameter_4bit`` in monkeypatch/moe_quant.py, with double quantization unless a field says otherwise
    that no file can have; linear maps have it by themselves."""
    run = resolved(read("axolotl", FOUR_BIT_EXPERTS), "Qwen/Qwen3-30B-A3B")
    assert (run.quantize_moe_experts, run.double_quant, run.bnb_4bit_quant_type) == (True, True, "nf4")
    off = FOUR_BIT_EXPERTS.replace("experts: true", "experts: false")
    assert not resolved(read("axolotl", off), "Qwen/Qwen3-30B-A3B").quantize_moe_experts


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("lora_target_linear: true", "lora_target_linear: true, which axolotl refuses; name lora_target_modules"),
        ("adapter:\nlora_r:\nload_in_4bit:", "without 4 or 8 bits, which axolotl refuses"),
        ("bnb_config_kwargs: {bnb_4bit_use_double_quant: false}", "experts with double quantization beside maps"),
    ],
)
def test_what_axolotls_experts_do_not_go_with(read: Read, lines: str, said: str) -> None:
    """``check_quantize_moe_experts`` in schemas/config.py; the last trains with two kinds of statistics."""
    with pytest.raises((InputError, NotSupportedError), match=said):
        read("axolotl", FOUR_BIT_EXPERTS + lines)


def zero(more: dict[str, Any], **inside: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **inside}, **more}


@pytest.mark.parametrize(
    ("companion", "named"),
    [
        (zero({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}), "bf16_master_weights_and_grads"),
        (zero({"bf16": {"enabled": True, "bf16_optimizer_states": True}}), "bf16_optimizer_states"),
        (zero({"data_types": {"grad_accum_dtype": "fp32"}}), "grad_accum_dtype: fp32"),
        (zero({}, mics_shard_size=4), "mics_shard_size: 4"),
        (zero({}, offload_optimizer={"device": "cpu", "ratio": 0.3}), "offload_optimizer.ratio: 0.3"),
        (zero({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}), "torch_autocast.enabled"),
    ],
)
def test_what_deepspeed_changes_is_refused_by_name(read: Read, companion: dict[str, Any], named: str) -> None:
    """Defaults of DeepSpeed's ``runtime/zero/config.py`` and ``offload_config.py`` change nothing and pass."""
    with pytest.raises(NotSupportedError) as refusal:
        read("trl", deepspeed=companion)
    assert named in str(refusal.value)
    harmless = zero({}, mics_shard_size=-1, offload_optimizer={"device": "cpu", "ratio": 1.0})
    assert read("trl", deepspeed=harmless).options["sharding"] == "zero2"


def test_the_whole_batch_of_deepspeed_agrees_with_its_factors(read: Read) -> None:
    """``_batch_assertion`` of DeepSpeed's runtime/config.py: micro-batch x accumulation x world size."""
    lines, companion = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 2", zero({"train_batch_size": 256})
    with pytest.raises(
        InputError, match="train_batch_size is 256, but micro-batch 2 x accumulation 2 x 8 GPUs makes 32"
    ):
        read("trl", lines, deepspeed=companion, num_gpus=8)
    assert read("trl", lines, deepspeed=companion, num_gpus=64).options["sharding"] == "zero2"
    assert read("trl", lines, deepspeed=companion).options["sharding"] == "zero2"
    with pytest.raises(InputError, match="micro-batch 3 x accumulation 2 makes 6"):
        read("trl", lines + "\nper_device_train_batch_size: 3", deepspeed=companion)


def test_machines_in_files_say_how_many_gpus_each_has(read: Read) -> None:
    """accelerate ``commands/launch.py``: num_processes / num_machines; LitGPT: devices of each of ``num_nodes``."""
    companion = {"distributed_type": "MULTI_GPU", "num_processes": 8, "num_machines": 4}
    assert read("trl", accelerate=companion).options["gpus_per_node"] == 2
    assert "gpus_per_node" not in read("trl", accelerate=companion | {"num_machines": 1}).options
    options = read("litgpt", "devices: 4\nnum_nodes: 2").options
    assert (options["num_gpus"], options["gpus_per_node"]) == (8, 4)


def test_sequence_parallelism_of_accelerate_is_ulysses(read: Read) -> None:
    """``parallelism_config.py``: DeepSpeed's ALST is the one backend of ``sp_size``."""
    config = {"parallelism_config_sp_size": 2, "parallelism_config_dp_shard_size": 2}
    companion = {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 3}}
    options = read("trl", accelerate=companion | {"parallelism_config": config}).options
    assert (options["cp"], options["cp_kind"]) == (2, "ulysses")
    ring = companion | {"parallelism_config": {"parallelism_config_cp_size": 2}}
    assert "cp_kind" not in read("trl", accelerate=ring).options


@pytest.mark.parametrize("stack", ["trl", "llama-factory"])
def test_the_stacks_own_fp32_weights_are_shards_under_fsdp(stack: str) -> None:
    """The command line's ``--stack trl --method full --sharding fsdp`` is the run of the file; typed dtypes count."""
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    options = {"stack": stack, "method": "full", "num_gpus": 8}
    run = resolve_run(llama, {**options, "sharding": "fsdp"}).run
    assert (run.dtype, run.master_dtype) == ("bf16", "fp32")
    alone = resolve_run(llama, {**options, "sharding": "ddp"}).run
    assert (alone.dtype, alone.master_dtype) == ("fp32", None)
    typed = resolve_run(llama, {**options, "sharding": "fsdp", "dtype": "fp32"}).run
    assert (typed.dtype, typed.master_dtype) == ("fp32", None)


def test_ffd_was_the_name_of_a_packing_strategy(read: Read) -> None:
    """trl 0.18.2 sft_config.py; later versions call it bfd and refuse the old name."""
    old = read("trl", "packing: true\npacking_strategy: ffd", framework_version="0.18")
    assert old.options["padding_free"] is True
    with pytest.raises(InputError, match="packing_strategy is 'ffd'"):
        read("trl", "packing: true\npacking_strategy: ffd")


PATTERN = "'model.layers.[\\d]+.(mlp|self_attn).(up|down|gate|q|v)_proj'"


@pytest.mark.parametrize(
    ("form", "lines"),
    [
        ("axolotl", f"lora_target_linear:\nlora_target_modules: {PATTERN}"),
        ("trl", f"use_peft: true\nlora_target_modules: {PATTERN}"),
        ("trl", f"use_peft: true\nlora_target_modules: [{PATTERN}]"),
    ],
)
def test_a_text_of_targets_is_a_regular_expression(read: Read, form: str, lines: str) -> None:
    """PEFT matches a string of targets as a pattern (``tuners/tuners_utils.py``, ``check_target_module_exists``); TRL
    hands a list of one on as a string (``ModelConfig.__post_init__``)."""
    found = resolved(read(form, lines)).lora_target_modules
    assert set(found) == {"q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("form", "lines"),
    [
        ("axolotl", f"lora_target_linear:\nlora_target_modules: [{PATTERN}]"),
        ("axolotl", f"lora_target_linear: true\nlora_target_modules: {PATTERN}"),
        ("llama-factory", "lora_target: '.*_proj'"),
        ("trl", "use_peft: true\nlora_target_modules: ['.*q_proj', v_proj]"),
    ],
)
def test_a_regular_expression_in_a_list_of_targets_is_refused(read: Read, form: str, lines: str) -> None:
    """Names in a list are compared as they are, so that PEFT finds none of them."""
    with pytest.raises(InputError, match=r"has a regular expression .* name the modules"):
        read(form, lines)


@pytest.mark.parametrize(
    ("form", "lines"),
    [
        ("axolotl", "lora_target_linear:\nlora_target_modules: q_proj"),
        ("axolotl", "lora_target_linear:\nlora_target_modules: q_proj,v_proj"),
        ("trl", "use_peft: true\nlora_target_modules: [q_proj]"),
    ],
)
def test_a_text_of_targets_that_is_no_list_finds_no_module(read: Read, form: str, lines: str) -> None:
    """PEFT raises "Target modules q_proj not found in the base model": no whole path is that."""
    with pytest.raises(InputError, match=r"finds no module by; write a list of names, \[q_proj, v_proj\]"):
        read(form, lines)


def test_trls_files_have_the_token_metrics_of_their_version(read: Read) -> None:
    """trl 0.16 to 1.14 ``compute_loss``, of full logits; tiles have them inside."""
    found = {v: read("trl", framework_version=v).options.get("token_metrics") for v in ("0.17", "0.21", "0.24", "1.2")}
    assert found == {"0.17": "accuracy", "0.21": "accuracy", "0.24": "entropy", "1.2": "entropy"}
    assert read("trl", "loss_type: nll", framework_version="1.10").options["token_metrics"] == "entropy"
    for lines, version in (("use_liger_kernel: true", "0.24"), ("", "1.10"), ("", None)):
        assert "token_metrics" not in read("trl", lines, framework_version=version).options


def test_a_file_that_prepares_images_says_that_they_are_not_counted(read: Read) -> None:
    found = read("axolotl", "processor_type: AutoProcessor")
    assert any("processor_type: AutoProcessor prepares images" in note for note in found.notes)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("block_size: 1024", "write max_length: N with packing: true"),
        ("use_lora: true", "write use_peft: true"),
        ("use_flash_attn: true", "write attn_implementation: flash_attention_2"),
    ],
)
def test_files_of_other_scripts_with_trls_sign_are_refused_by_name(read: Read, lines: str, named: str) -> None:
    """``block_size`` is of transformers' run_clm.py, ``use_lora`` of open-instruct's finetune.py."""
    with pytest.raises(NotSupportedError) as refusal:
        read("trl", lines)
    assert named in str(refusal.value)
    assert read("trl", "use_lora: false").options["method"] == "lora"


@pytest.mark.parametrize(
    ("form", "field"),
    [("axolotl", "lora_modules_to_save"), ("trl", "lora_modules_to_save"), ("llama-factory", "additional_target")],
)
@pytest.mark.parametrize("value", ["true", "[1]"])
def test_modules_to_save_are_names(read: Read, form: str, field: str, value: str) -> None:
    with pytest.raises(InputError, match=f"{field} is .*, but it names modules"):
        read(form, f"{field}: {value}")


@pytest.mark.parametrize("value", [".inf", ".nan", "'inf'", "1" + "0" * 400])
def test_a_number_is_finite(read: Read, value: str) -> None:
    with pytest.raises(InputError, match=r"total_num_tokens is .*, but it must be a number"):
        read("axolotl", f"total_num_tokens: {value}")


PACKED = {"axolotl": "sample_packing: true", "llama-factory": "packing: true", "trl": "packing: true"}


@pytest.mark.parametrize(
    ("form", "lines"),
    [
        ("axolotl", "group_by_length: true"),
        ("llama-factory", "group_by_length: true"),
        ("trl", "train_sampling_strategy: group_by_length"),
    ],
)
def test_samples_grouped_by_length_are_padded_less(read: Read, form: str, lines: str) -> None:
    found = read(form, lines)
    assert found.options["rows_grouped"] is True
    assert not [field for field in found.ignored if "group" in field or "sampling" in field]
    assert "rows_grouped" not in read(form).options
    assert "rows_grouped" not in read(form, f"{lines}\n{PACKED[form]}").options


def test_balanced_micro_batches_are_an_upper_bound(read: Read) -> None:
    found = read("trl", "train_sampling_strategy: batch_rebalance")
    assert any("batch_rebalance deals samples so that the GPUs wait less" in note for note in found.notes)


def test_axolotl_leaves_out_what_is_longer_than_a_row(read: Read) -> None:
    """``excess_length_strategy`` is drop where the file is silent (``utils/data/utils.py``)."""
    assert read("axolotl").options["long_samples"] == "dropped"
    cut = read("axolotl", "excess_length_strategy: truncate")
    assert "long_samples" not in cut.options
    assert "excess_length_strategy" not in cut.ignored


def test_zero_of_one_process_shares_with_nobody(read: Read) -> None:
    """accelerate's own example ``zero3_offload_config_accelerate.yaml`` with one process: 16 bits, states in host
    memory, and no sharding; more GPUs on the command line bring it back."""
    deepspeed = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    companion = {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": deepspeed}
    found = read("trl", "use_peft: false", accelerate=companion)
    run = resolved(found)
    assert (run.sharding, run.num_gpus, run.offload, run.dtype) == ("none", 1, "all", "bf16")
    assert resolved(found, num_gpus=8).sharding == "zero3"


@pytest.mark.parametrize(
    ("form", "lines"), [("axolotl", "lora_target_linear: true"), ("llama-factory", "lora_target: all")]
)
def test_all_linear_maps_of_a_framework_are_modules_not_parts_of_stacked_experts(
    read: Read, form: str, lines: str
) -> None:
    """axolotl's ``find_all_linear_names`` and LLaMA-Factory's ``find_all_linear_modules`` look for ``nn.Linear``, which
    transformers 5's experts are not; PEFT's ``all-linear`` means those too."""
    mixtral, llama = (load_architecture(name) for name in ("mistralai/Mixtral-8x7B-v0.1", "meta-llama/Llama-3.1-8B"))
    asked = read(form, lines).options["lora_target_modules"]
    assert target_modules(mixtral, asked) == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert target_modules(llama, asked) == target_modules(llama, "all-linear")
    assert len(target_modules(mixtral, "all-linear")) > 4
    with pytest.raises(NotSupportedError, match="dense and shared"):
        target_modules(load_architecture("deepseek-ai/DeepSeek-V2-Lite"), asked)


def test_torchtune_compiles_and_updates_in_the_backward(read: Read) -> None:
    found = read("torchtune", "compile: true\noptimizer_in_bwd: true").options
    assert (found["torch_compile"], found["optimizer_in_backward"]) == (True, True)
    assert "torch_compile" not in read("torchtune", "compile: false").options


@pytest.mark.parametrize(("model", "attention"), [("google/gemma-2-9b", "eager"), ("meta-llama/Llama-3.1-8B", "sdpa")])
def test_attention_that_no_file_names_is_what_the_family_has(read: Read, model: str, attention: str) -> None:
    """``Gemma2PreTrainedModel._supports_sdpa`` is False: transformers takes eager attention where none is asked for."""
    merged = merge_options(read("trl", "attn_implementation:"), {}).options
    options = {name: value for name, value in merged.items() if name not in RUN_OPTIONS_ELSEWHERE}
    assert resolve_run(load_architecture(model), options).run.attn_implementation == attention


@pytest.mark.parametrize(
    ("loss", "kind"), [("CEWithChunkedOutputLoss", "chunked_ce"), ("LinearCrossEntropyLoss", "linear_ce")]
)
def test_torchtunes_chunks_keep_their_probabilities(read: Read, loss: str, kind: str) -> None:
    """No checkpoint is around them (``ce_chunked_output_loss.py``): at least 4 bytes of log-softmax for every logit."""
    found = read("torchtune", f"loss: {{_component_: torchtune.modules.loss.{loss}}}")
    options = {name: value for name, value in found.options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    run = resolve_run(llama, options).run
    assert run.loss_type == kind
    logits = memory_timeline(llama, run).parts_bytes["logits"]
    assert logits >= 4 * run.tokens_per_micro_batch * llama.vocab_size
    assert any("8 chunks" in note for note in read("torchtune", "loss: {num_output_chunks: 16}").notes)


def test_torchtunes_chunks_with_a_head_of_their_own_are_one_piece(read: Read) -> None:
    """An adapter on the head, or a vocabulary over several GPUs: the logits are counted whole, which is told."""
    lines = "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], lora_rank: 8"
    for more in (f"{lines}, apply_lora_to_output: true}}", f"{lines}}}\ntensor_parallel_dim: 2"):
        found = read("torchtune", more)
        assert found.options["loss_type"] == "nll"
        assert any("counted as one piece" in note for note in found.notes)
        typed = merge_options(found, {"loss_type": "chunked_ce"})
        assert not any("counted as one piece" in note for note in typed.notes)


def test_trls_null_length_is_told(read: Read) -> None:
    """``SFTConfig.max_length`` of None cuts nothing; a field that a file leaves out is 1,024."""
    told = [note for note in read("trl", "max_length: null").notes if "cuts no sample" in note]
    assert len(told) == 1
    assert "--max-length" in told[0]
    assert not any("cuts no sample" in note for note in read("trl", "max_length: 512").notes)


@pytest.mark.parametrize(
    ("form", "lines"), [("trl", "tf32: true"), ("trl", "bf16: false\ndtype: float32\ntf32: false")]
)
def test_tf32_changes_nothing_where_no_product_is_in_fp32_or_it_is_off(read: Read, form: str, lines: str) -> None:
    assert "tf32" in read(form, lines).ignored


@pytest.mark.parametrize(
    ("form", "lines"),
    [("trl", "bf16: false\ndtype: float32\ntf32: true"), ("axolotl", "bf16: false\nfp16: false\ntf32: true")],
)
def test_tf32_that_decides_products_is_refused_unless_typed_otherwise(read: Read, form: str, lines: str) -> None:
    with pytest.raises(NotSupportedError, match="Products in TF32"):
        merge_options(read(form, lines), {})
    assert merge_options(read(form, lines), {"precision": "bf16-autocast"}).options["precision"] == "bf16-autocast"


@pytest.mark.parametrize(("word", "told"), [('"no"', False), ("no", False), ("steps", True)])
def test_an_evaluation_that_is_switched_off_is_not_left_out(read: Read, word: str, told: bool) -> None:
    assert ("eval_strategy" in read("trl", f"eval_strategy: {word}").ignored) is told


@pytest.mark.parametrize(
    ("names", "asked", "trained"), [("mine", "5k", 200), ("mine,yours", "5k", 400), ("mine,yours", "300", "300")]
)
def test_no_more_samples_are_trained_than_the_file_keeps(read: Read, names: str, asked: str, trained: Any) -> None:
    found = merge_options(read("llama-factory", f"dataset: {names}\nmax_samples: 200"), {"num_samples": asked})
    assert found.options["num_samples"] == trained
    assert any("is cut to" in note for note in found.notes) is (trained != asked)


def test_no_more_tokens_are_trained_than_of_the_samples_that_the_file_keeps(read: Read) -> None:
    file = read("llama-factory", "dataset: mine,yours\nmax_samples: 200")
    assert merge_options(file, {"tokens": "100M", "mean_tokens": 300.0}).options["tokens"] == 400 * 300
    assert merge_options(file, {"tokens": "100k", "mean_tokens": 300.0}).options["tokens"] == "100k"


def test_llama_factorys_peft_adapts_no_stacked_experts(read: Read) -> None:
    """LLaMA-Factory 0.9.5 asks for PEFT below 0.18.2, which has no ``transformers_weight_conversion.py``: of
    ``lora_target: all`` it finds the modules alone, and by the names of the experts' maps nothing."""
    moe = "model_name_or_path: Qwen/Qwen3-30B-A3B\n"
    everything = resolved(read("llama-factory", moe + "lora_target: all"), "Qwen/Qwen3-30B-A3B")
    assert everything.lora_target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    named = read("llama-factory", moe + "lora_target: q_proj,up_proj,down_proj")
    with pytest.raises(NotSupportedError, match=r"up_proj, down_proj are maps of .* experts.* name q_proj, k_proj"):
        resolved(named, "Qwen/Qwen3-30B-A3B")
    dense = resolved(read("llama-factory", "lora_target: q_proj,up_proj,down_proj"))
    assert dense.lora_target_modules == ("q_proj", "up_proj", "down_proj")


def test_trls_older_name_of_liger(read: Read) -> None:
    assert read("trl", "use_liger: true").stack == "liger"
    with pytest.raises(InputError, match="keep one of them"):
        read("trl", "use_liger: true\nuse_liger_kernel: false")


def test_axolotls_degrees_say_how_many_gpus_there_are(read: Read) -> None:
    """``_get_parallel_config_kwargs`` of axolotl 0.19 refuses other numbers where both are given."""
    sizes = "fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}\ndp_shard_size: 4\n"
    assert read("axolotl", sizes + "dp_replicate_size: 2\ntensor_parallel_size: 2").options["num_gpus"] == 16
    assert "num_gpus" not in read("axolotl", sizes).options  # replicas are what is left
    assert read("axolotl", "dp_replicate_size: 4").options["num_gpus"] == 4


@pytest.mark.parametrize("form", ["trl", "llama-factory", "axolotl"])
def test_micro_batches_that_are_dropped_are_told(read: Read, form: str) -> None:
    told = [note for note in read(form, "dataloader_drop_last: true").notes if note.startswith("dataloader_drop_last")]
    assert len(told) == 1
    assert not any(note.startswith("dataloader_drop_last") for note in read(form).notes)


def test_ligers_kernels_can_be_left_out_one_by_one(read: Read) -> None:
    """``liger_kernel_config`` goes on to Liger's own function (transformers ``integrations/liger.py``)."""

    def kernels(config: str) -> tuple[str, ...]:
        return resolved(read("trl", f"use_liger_kernel: true\nliger_kernel_config: {config}")).fused_kernels

    everything = resolved(read("trl", "use_liger_kernel: true")).fused_kernels
    assert kernels("{rms_norm: true}") == kernels("{}") == everything
    assert set(everything) - set(kernels("{rope: false}")) == {"rope"}
    assert kernels("{rms_norm: false, swiglu: false, rope: false}") == ()
    with pytest.raises(NotSupportedError, match="another cross-entropy"):
        read("trl", "use_liger_kernel: true\nliger_kernel_config: {cross_entropy: true}", framework_version="1.10")


def test_dora_beside_axolotls_own_kernels_says_what_to_type(read: Read) -> None:
    lines = "lora_mlp_kernel:\npeft_use_dora: true"
    with pytest.raises(NotSupportedError, match="type --fused-kernels none"):
        resolved(read("axolotl", lines))
    assert resolved(read("axolotl", lines), fused_kernels="none").use_dora


def test_axolotls_kernels_find_blocks_by_the_names_of_their_maps(read: Read) -> None:
    """``find_self_attn_in_layer`` and ``find_mlp_in_layer`` of its monkeypatch/lora_kernels.py: Phi has ``dense``."""
    lines = "lora_mlp_kernel:\nbase_model: "
    phi = resolved(read("axolotl", lines + "microsoft/phi-2"), "microsoft/phi-2")
    assert (phi.stack, phi.fused_kernels) == ("axolotl", ())
    assert resolved(read("axolotl", lines + "meta-llama/Llama-3.1-8B")).fused_kernels == ("lora",)
