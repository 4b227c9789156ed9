"""Options to runs: defaults with their origin, and every refusal in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.resolve import RUN_FIELDS, resolve_run
from tunecast.model.resolve_shared_dtypes import NARROW
from tunecast.model.stacks import BUILT, UNBUILT, attention_named, load_stacks

Make = Callable[..., Architecture]
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def llama(make: Make) -> Architecture:
    return make("llama-3.1-8b")


def test_default_stack_is_plain_hugging_face(llama: Architecture) -> None:
    run = resolve_run(llama, {}).run
    assert (run.method, run.stack, run.dtype, run.precision) == ("lora", "hf-peft", "bf16", "bf16-autocast")
    assert (run.adapter_dtype, run.loss_type, run.attn_implementation) == ("fp32", "nll", "sdpa")
    assert (run.gradient_checkpointing, run.reentrant, run.optim) == (True, False, "adamw_torch")
    assert run.lora_target_modules == ALL_LINEAR, "all-linear leaves lm_head out, as PEFT does"


def test_methods_differ_as_the_design_says(llama: Architecture) -> None:
    qlora = resolve_run(llama, {"method": "qlora"}).run
    assert (qlora.bnb_4bit_quant_type, qlora.double_quant, qlora.precision) == ("nf4", True, "bf16-autocast")
    full = resolve_run(llama, {"method": "full"}).run
    assert (full.precision, full.dtype, full.lora_r, full.lora_target_modules) == ("bf16", "bf16", 0, ())


def test_every_field_has_an_origin(llama: Architecture) -> None:
    options = {"max_length": 2048, "lora_r": 8, "optim": None}
    resolved = resolve_run(llama, options, option_origins={"lora_r": "file"})
    assert set(resolved.origins) == set(RUN_FIELDS)
    assert resolved.origins["max_length"] == "cli"
    assert resolved.origins["lora_r"] == "file"
    assert resolved.origins["optim"] == "stack-default"
    assert resolved.origins["per_device_train_batch_size"] == "assumed"


def test_targets_are_taken_in_forward_order(llama: Architecture) -> None:
    assert resolve_run(llama, {"lora_target_modules": "v_proj, q_proj"}).run.lora_target_modules == ("q_proj", "v_proj")
    assert resolve_run(llama, {"lora_target_modules": ["down_proj"]}).run.lora_target_modules == ("down_proj",)


def test_dtype_aliases(llama: Architecture) -> None:
    assert resolve_run(llama, {"dtype": "bfloat16"}).run.dtype == "bf16"
    assert resolve_run(llama, {"dtype": "float32"}).run.dtype == "fp32"


def test_a_card_without_bf16_uses_fp16_and_says_so(llama: Architecture) -> None:
    lora = resolve_run(llama, {}, gpu_has_bf16=False)
    assert (lora.run.dtype, lora.run.precision) == ("fp16", "fp16-autocast")
    assert len(lora.notes) == 1
    assert "fp16" in lora.notes[0]
    full = resolve_run(llama, {"method": "full"}, gpu_has_bf16=False)
    assert (full.run.dtype, full.run.precision) == ("fp32", "fp16-autocast")
    assert resolve_run(llama, {"dtype": "fp32", "precision": "fp32"}, gpu_has_bf16=False).notes == ()


@pytest.mark.parametrize(
    ("options", "dtypes", "told"),
    [
        ({}, ("bf16", "fp32"), "accelerate raises"),
        ({"adapter_dtype": "bf16"}, ("bf16", "fp32"), "accelerate raises"),
        ({"adapter_dtype": "fp32"}, ("bf16", "fp32"), "accelerate raises"),
        ({"method": "qlora"}, ("bf16", "fp32"), "accelerate raises"),
        ({"method": "qlora", "adapter_dtype": "bf16"}, ("bf16", None), None),
        ({"precision": "bf16"}, ("bf16", None), "stored as bf16"),
        ({"master_dtype": "none"}, ("bf16", None), "stored as bf16"),
        ({"fsdp_version": 1}, ("fp32", None), None),
        ({"stack": "torchtune"}, ("bf16", None), None),
    ],
)
def test_adapters_under_fsdp(
    llama: Architecture, options: dict[str, Any], dtypes: tuple[str, str | None], told: str | None
) -> None:
    """What is gathered of them, and what their shards keep: accelerate raises all that trains under mixed precision,
    but for a 4-bit base (``fsdp2_prepare_model``), which `test_real_sharding` runs."""
    resolved = resolve_run(llama, {"num_gpus": 2, "sharding": "fsdp", **options})
    assert (resolved.run.adapter_dtype, resolved.run.master_dtype) == dtypes
    found = [note for note in resolved.notes if "FSDP" in note]
    assert found == [] if told is None else told in found[0]


def test_a_paged_optimizer_says_what_is_not_counted(llama: Architecture) -> None:
    (note,) = resolve_run(llama, {"optim": "paged_adamw_8bit"}).notes
    assert "managed memory" in note


def test_pefts_preparation_leaves_everything_but_the_4_bit_weights_in_fp32(llama: Architecture) -> None:
    resolved = resolve_run(llama, {"method": "qlora", "upcast_non_quantized": True})
    assert (resolved.run.dtype, resolved.run.precision, resolved.origins["dtype"]) == ("fp32", "bf16-autocast", "cli")
    assert not resolve_run(llama, {"method": "qlora"}).run.upcast_non_quantized


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "qlora", "lora_r": 0}, "--lora-r is 0"),
        ({"lora_r": -4}, "--lora-r is -4"),
        ({"lora_r": 2.5}, "whole number"),
        ({"method": "full", "bnb_4bit_quant_type": "nf4"}, "--method qlora"),
        ({"method": "lora", "double_quant": True}, "--method qlora"),
        ({"method": "full", "lora_r": 8}, "--method is full"),
        ({"method": "dora"}, "lora, qlora, full"),
        ({"max_length": 131073}, "--allow-long-context"),
        ({"max_length": 0}, "--max-length is 0"),
        ({"per_device_train_batch_size": -1}, "--per-device-train-batch-size is -1"),
        ({"gradient_accumulation_steps": 0}, "--gradient-accumulation-steps is 0"),
        ({"num_gpus": 0}, "--num-gpus is 0"),
        ({"lora_target_modules": "q_prj"}, "Did you mean q_proj"),
        ({"lora_target_modules": ""}, "names nothing"),
        ({"lora_target_modules": "q_proj,all-linear"}, "alone"),
        ({"lora_dropout": 1.0}, "--lora-dropout is 1.0"),
        ({"optim": "adamw_trch"}, "Did you mean adamw_torch"),
        ({"loss_type": "mse"}, "--loss-type takes nll"),
        ({"attn_implementation": "flash_attention_2", "precision": "fp32"}, "16-bit"),
        ({"upcast_non_quantized": True}, "--method qlora"),
        ({"upcast_non_quantized": True, "method": "qlora", "precision": "bf16"}, "--precision bf16-autocast"),
        ({"attn_implementation": "flashy"}, "--attn-implementation takes sdpa"),
        ({"dtype": "int3"}, "--dtype is 'int3'"),
        ({"precision": "bf17"}, "--precision is 'bf17'"),
        ({"stack": "hf-peff"}, "Did you mean hf-peft"),
        ({"sharding": "fsdp"}, "--num-gpus 2"),
        ({"num_gpus": 4, "sharding": "none"}, "needs a sharding"),
        ({"num_gpus": 4, "sharding": "zero4"}, "Did you mean zero"),
        (
            {"num_gpus": 2, "sharding": "zero3", "method": "qlora", "quant_method": "bnb-8bit"},
            "ZeRO-3 of a bnb-8bit base",
        ),
        ({"num_gpus": 2, "sharding": "fsdp", "precision": "bf16", "adapter_dtype": "fp32"}, "FSDP"),
        ({"max_lenght": 512}, "Did you mean max_length"),
    ],
)
def test_bad_input_is_one_sentence(llama: Architecture, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_run(llama, options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_without_autocast_weights_are_what_the_arithmetic_is_asked_to_be(llama: Architecture) -> None:
    for precision in ("fp32", "fp16", "bf16"):
        assert resolve_run(llama, {"precision": precision}).run.dtype == precision
        assert resolve_run(llama, {"precision": precision, "stack": "trl"}).run.dtype == precision
    for dtype, precision in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("fp16", "bf16")):
        with pytest.raises(InputError, match=f"type --precision {dtype}, or --dtype {precision}"):
            resolve_run(llama, {"precision": precision, "dtype": dtype})
    alone = resolve_run(llama, {"dtype": "fp32", "method": "full", "stack": "torchtune"})
    assert (alone.run.precision, alone.origins["precision"]) == ("fp32", "cli")
    assert resolve_run(llama, {"precision": "fp16-autocast"}).run.dtype == "bf16"


def test_a_frozen_base_in_fp32_is_told_with_what_it_costs(llama: Architecture) -> None:
    """8.03e9 parameters of 4 bytes instead of 2 are 8.03e9 x 2 / 2**30 = 15.0 GiB."""
    (note,) = [note for note in resolve_run(llama, {"dtype": "fp32"}).notes if "frozen base" in note]
    assert "15.0 GiB more than bf16" in note
    assert "--dtype bf16" in note
    for options in ({"dtype": "bf16"}, {"dtype": "fp32", "method": "full"}, {"dtype": "fp32", "precision": "fp32"}):
        assert not any("frozen base" in note for note in resolve_run(llama, options).notes)


def test_every_optimizer_of_the_trainer_is_built_or_named() -> None:
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    assert {name.value for name in names} <= {*BUILT["optimizer"], *UNBUILT["optimizer"]}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"optim": "galore_adamw_8bit_layerwise"}, "galore_adamw_8bit_layerwise"),
        ({"stack": "xtuner"}, "xtuner"),
        ({"offload": "nvme"}, "--offload nvme"),
        ({"num_gpus": 24, "sharding": "fsdp", "dp_shard_size": 12}, "unevenly"),
        ({"optim": "galore_adamw"}, "galore_adamw"),
        ({"attn_implementation": "flex_attention"}, "flex_attention"),
    ],
)
def test_what_is_not_built_is_refused_by_name(llama: Architecture, options: dict[str, Any], name: str) -> None:
    with pytest.raises(NotSupportedError, match=name):
        resolve_run(llama, options)


def test_kernels_of_the_hub_are_those_of_their_package(llama: Architecture) -> None:
    """As transformers itself takes them: what is not installed comes from the hub."""
    theirs = pytest.importorskip("transformers.modeling_flash_attention_utils")

    for package, kernel in theirs.FLASH_ATTN_KERNEL_FALLBACK.items():
        assert attention_named(kernel) == package
    asked = {"attn_implementation": "kernels-community/flash-attn2"}
    assert resolve_run(llama, asked).run.attn_implementation == "flash_attention_2"
    with pytest.raises(NotSupportedError, match="flash_attention_4"):
        resolve_run(llama, {"attn_implementation": "kernels-community/flash-attn4"})


def test_weights_published_in_fp32_are_told_where_16_bits_are_taken() -> None:
    """``PreTrainedModel.from_pretrained`` of transformers 5 has dtype="auto", which loads them as they are."""
    gpt2, said = load_architecture("openai-community/gpt2-xl"), "are published in fp32"
    assert any(said in note for note in resolve_run(gpt2, {"method": "full"}).notes)
    for more in ({"dtype": "bf16"}, {"dtype": "fp32"}):
        assert not any(said in note for note in resolve_run(gpt2, {"method": "full", **more}).notes), more
    llama = load_architecture("meta-llama/Llama-3.2-1B")
    assert not any(said in note for note in resolve_run(llama, {"method": "full"}).notes)


def test_allowed_long_context_passes(make: Make) -> None:
    short = make("llama-2-13b")
    with pytest.raises(InputError, match="4096"):
        resolve_run(short, {"max_length": 8192})
    assert resolve_run(short, {"max_length": 8192, "allow_long_context": True}).run.max_length == 8192


def test_a_reached_sliding_window_is_noted(make: Make) -> None:
    mistral = make("mistral-7b-v0.1")
    assert resolve_run(mistral, {"max_length": 4095}).notes == ()
    (note,) = resolve_run(mistral, {"max_length": 4096}).notes
    assert "4096" in note


def test_unbuilt_and_built_values_are_apart() -> None:
    for what, built in BUILT.items():
        assert not set(built) & set(UNBUILT[what]), what
    assert [name for name, stack in load_stacks().items() if stack["built"]] == [
        "hf-peft",
        "trl",
        "unsloth",
        "liger",
        "axolotl",
        "llama-factory",
        "torchtune",
        "litgpt",
        "megatron",
        "nemo",
        "ms-swift",
        "torchtitan",
    ]


def test_a_stack_is_defaults_and_kernels(llama: Architecture) -> None:
    run = resolve_run(llama, {"stack": "liger"}).run
    assert (run.loss_type, run.fused_kernels) == ("liger", ("rms_norm", "rope", "swiglu"))
    run = resolve_run(llama, {"stack": "axolotl", "method": "qlora"}).run
    assert (run.fused_kernels, run.upcast_non_quantized, run.gradient_checkpointing) == (("lora",), False, False)
    full = resolve_run(llama, {"stack": "axolotl", "method": "full"})
    assert full.run.fused_kernels == ()
    assert any("fused lora kernel is left out" in note for note in full.notes)


def test_unknown_names_are_their_own_error(llama: Architecture) -> None:
    with pytest.raises(UnknownNameError):
        resolve_run(llama, {"stack": "nothing-like-it"})


def test_what_is_our_choice_and_no_librarys_default_is_called_assumed(llama: Architecture) -> None:
    """``TrainingArguments`` and ``LoraConfig`` themselves: no checkpoints, fp32, rank 8 on two modules, fp4."""
    ours = ("gradient_checkpointing", "precision", "lora_r", "lora_target_modules", "double_quant")
    plain = resolve_run(llama, {"method": "qlora"}).origins
    assert {plain[name] for name in ours} == {"assumed"}
    assert resolve_run(llama, {"method": "qlora", "lora_r": 16}).origins["lora_r"] == "cli"
    trl = resolve_run(llama, {"method": "qlora", "stack": "trl"}).origins
    assert {trl[name] for name in ours} == {"stack-default"}


def test_what_a_run_has_not_is_not_called_assumed(llama: Architecture) -> None:
    """A plain LoRA base and an int8 one have no 4-bit type, a full fine-tune has no adapters either."""
    four_bit, adapters = {"bnb_4bit_quant_type", "double_quant"}, {"lora_r", "lora_target_modules"}

    def assumed(**options: Any) -> set[str]:
        return {name for name, origin in resolve_run(llama, options).origins.items() if origin == "assumed"}

    assert four_bit | adapters <= assumed(method="qlora")
    for base in ({"method": "lora"}, {"method": "qlora", "quant_method": "bnb-8bit"}):
        assert adapters <= assumed(**base)
        assert not four_bit & assumed(**base)
    assert not (four_bit | adapters) & assumed(method="full")


@pytest.mark.parametrize("stack", ["hf-peft", "trl", "axolotl", "llama-factory"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize(("has_bf16", "half"), [(True, "bf16"), (False, "fp16")])
def test_deepspeed_casts_the_whole_module_whatever_the_stack_loads(
    llama: Architecture, stack: str, method: str, has_bf16: bool, half: str
) -> None:
    options = {"method": method, "stack": stack, "num_gpus": 2, "sharding": "zero2"}
    found = resolve_run(llama, options, gpu_has_bf16=has_bf16)
    run = found.run
    assert (run.dtype, run.precision) == (half, half)
    assert run.adapter_dtype == (half if run.has_adapters else "fp32")
    assert not run.upcast_non_quantized
    assert any(f"DeepSpeed trains in pure {half}" in note for note in found.notes)


def test_dtypes_that_are_typed_and_megatrons_optimizer_are_not_deepspeeds(llama: Architecture) -> None:
    spread = {"method": "lora", "num_gpus": 4, "sharding": "zero1"}
    typed = resolve_run(llama, {**spread, "precision": "bf16-autocast"})
    assert (typed.run.precision, typed.run.adapter_dtype) == ("bf16-autocast", "fp32")
    assert any("cast of the whole model to 16 bits is left out" in note for note in typed.notes)
    assert resolve_run(llama, {**spread, "tp": 2, "dtype": "bf16"}).run.precision == "bf16-autocast"
    assert resolve_run(llama, {**spread, "sharding": "ddp", "stack": "trl"}).run.dtype == "fp32"


def test_a_gptq_base_is_not_cast_and_the_note_names_its_kernels(llama: Architecture) -> None:
    notes = resolve_run(
        llama, {"method": "qlora", "quant_method": "gptq-4bit", "num_gpus": 4, "sharding": "zero2"}
    ).notes
    told = [note for note in notes if "DeepSpeed" in note]
    assert len(told) == 1
    assert "GPTQ" in told[0]
    assert "--precision" not in told[0]


@pytest.mark.parametrize(
    "typed", [{"dtype": "bf16"}, {"precision": "bf16"}, {"dtype": "bfloat16", "precision": "bf16"}]
)
@pytest.mark.parametrize("stack", ["hf-peft", "trl"])
def test_typing_what_deepspeed_does_anyway_changes_nothing(
    llama: Architecture, stack: str, typed: dict[str, str]
) -> None:
    spread = {"method": "lora", "num_gpus": 4, "sharding": "zero2", "stack": stack}
    assert resolve_run(llama, {**spread, **typed}).run == resolve_run(llama, spread).run


def test_a_card_without_bf16_says_so_where_bf16_was_typed(llama: Architecture) -> None:
    spread = {"method": "full", "num_gpus": 4, "sharding": "zero2", "precision": "bf16"}
    found = resolve_run(llama, spread, gpu_has_bf16=False)
    assert (found.run.dtype, found.run.precision) == ("fp16", "fp16")
    assert any("no bf16" in note for note in found.notes)


@pytest.mark.parametrize(("method", "typed"), [("lora", "dtype"), ("full", "precision"), ("qlora", "precision")])
def test_what_a_card_without_bf16_changes_was_not_asked_for(llama: Architecture, method: str, typed: str) -> None:
    asked = {"method": method, "dtype": "bf16", "precision": "bf16-autocast"}
    told, silent = (resolve_run(llama, options, gpu_has_bf16=False).origins for options in (asked, {"method": method}))
    assert told[typed] == silent[typed] == "card"
    assert resolve_run(llama, asked).origins[typed] == "cli"
    assert told["method"] == "cli"


@pytest.mark.parametrize("more", [{}, {"dtype": "bf16", "precision": "bf16-autocast"}])
def test_eight_bits_on_a_card_without_bf16_are_not_told_to_type_bf16(llama: Architecture, more: dict[str, str]) -> None:
    with pytest.raises(NotSupportedError, match="this device has neither; choose a Hopper, Ada or Blackwell card"):
        resolve_run(llama, {"method": "lora", "fp8": "te", **more}, gpu_has_bf16=False)


def test_one_gpu_that_offloads_is_deepspeeds_too(llama: Architecture) -> None:
    found = resolve_run(llama, {"method": "full", "stack": "trl", "offload": "optimizer"})
    assert (found.run.dtype, found.run.precision) == ("bf16", "bf16")
    assert any("host memory" in note for note in found.notes)


def test_a_whole_model_in_16_bits_throughout_is_told_where_nobody_said_so() -> None:
    """Accelerate raises what FSDP trains to fp32 under mixed precision; torchtune does not use it."""
    options: dict[str, Any] = {"method": "full", "num_gpus": 4, "sharding": "fsdp"}
    architecture = load_architecture("Qwen/Qwen3-8B")
    assert NARROW in resolve_run(architecture, options).notes
    for said in ({"precision": "bf16"}, {"precision": "bf16-autocast"}, {"stack": "torchtune"}, {"sharding": "zero3"}):
        assert NARROW not in resolve_run(architecture, {**options, **said}).notes, said
