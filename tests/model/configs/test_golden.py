"""One file per format, in the shape of that project's own examples: everything that is read from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunecast.model.amount import resolve_amount
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options, read_config
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import RUN_FIELDS, Resolved, resolve_run
from tunecast.model.resolve_litgpt import of_stack

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
GOLDEN: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "axolotl.yml": (
        "axolotl",
        "meta-llama/Llama-3.1-8B",
        {
            "rows_packed": True,
            "padding_free": True,
            "method": "qlora",
            "lora_r": 32,
            "lora_dropout": 0.05,
            "lora_target_modules": "linear-modules",
            "dtype": "bf16",
            "precision": "bf16-autocast",
            "max_length": 4096,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "gradient_checkpointing": True,
            "attn_implementation": "sdpa",
            "optim": "adamw_torch_fused",
            "num_train_epochs": 3,
            "tokens": 18_750_000,
            "held_out": 0.02,
        },
        {
            "bnb_4bit_quant_type": "nf4",
            "double_quant": True,
            "reentrant": True,
            "loss_type": "nll",
            "stack": "hf-peft",
            "long_samples": "dropped",
        },
    ),
    "llama-factory.yaml": (
        "llama-factory",
        "Qwen/Qwen2.5-7B-Instruct",
        {
            "method": "lora",
            "lora_r": 8,
            "lora_target_modules": "linear-modules",
            "dtype": "bf16",
            "precision": "bf16-autocast",
            "max_length": 2048,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "num_train_epochs": 3.0,
        },
        {
            "rows_packed": False,
            "pad_to_multiple_of": 8,
            "lora_dropout": 0.0,
            "gradient_checkpointing": True,
            "reentrant": True,
            "attn_implementation": "sdpa",
            "optim": "adamw_torch_fused",
            "loss_type": "nll",
            "stack": "hf-peft",
        },
    ),
    "trl.yaml": (
        "trl",
        "Qwen/Qwen2.5-0.5B",
        {
            "rows_packed": True,
            "padding_free": True,
            "method": "lora",
            "lora_r": 32,
            "lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
            "dtype": "bf16",
            "max_length": 2048,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "num_train_epochs": 1,
            "loss_type": "chunked_nll",
        },
        {
            "lora_dropout": 0.05,
            "precision": "bf16-autocast",
            "gradient_checkpointing": True,
            "reentrant": False,
            "attn_implementation": "sdpa",
            "optim": "adamw_torch_fused",
            "stack": "hf-peft",
        },
    ),
    "torchtune.yaml": (
        "torchtune",
        "meta-llama/Llama-3.1-8B",
        {
            "rows_packed": False,
            "method": "qlora",
            "bnb_4bit_quant_type": "nf4",
            "double_quant": True,
            "lora_r": 8,
            "lora_dropout": 0.0,
            "lora_target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            "dtype": "bf16",
            "precision": "bf16",
            "adapter_dtype": "bf16",
            "max_length": 2048,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 16,
            "gradient_checkpointing": True,
            "optim": "adamw_torch_fused",
            "loss_type": "linear_ce",
            "num_train_epochs": 2,
            "stack": "torchtune",
        },
        {"attn_implementation": "sdpa"},
    ),
    "litgpt.yaml": (
        "litgpt",
        "meta-llama/Meta-Llama-3.1-8B",
        {
            "method": "lora",
            "lora_r": 32,
            "lora_dropout": 0.05,
            "lora_target_modules": ("q_proj", "v_proj"),
            "dtype": "bf16",
            "precision": "bf16",
            "adapter_dtype": "bf16",
            "max_length": 512,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "num_gpus": 1,
            "optim": "adamw_torch",
            "num_train_epochs": 2,
            "held_out": 0.05,
        },
        {
            "rows_packed": False,
            "gradient_checkpointing": False,
            "attn_implementation": "sdpa",
            "loss_type": "nll",
            "stack": "litgpt",
        },
    ),
}
"""By file: format, model, what the file states, what its framework adds."""


def resolved(run_file: RunFile, **typed: Any) -> Resolved:
    merged = merge_options(run_file, typed)
    options = {name: value for name, value in merged.options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    architecture = of_stack(load_architecture(run_file.model_name), options)
    return resolve_run(architecture, options, option_origins=merged.origins)


@pytest.mark.parametrize("name", GOLDEN)
def test_everything_in_the_file_is_read(name: str) -> None:
    form, model, stated, added = GOLDEN[name]
    run_file = read_config(EXAMPLES / name)
    assert (run_file.format, run_file.model_name) == (form, model)
    assert run_file.options == stated | added
    assert set(run_file.their_fields) == set(stated)
    assert run_file.stack == (stated | added)["stack"]


@pytest.mark.parametrize("name", GOLDEN)
def test_origins_tell_the_file_from_the_framework(name: str) -> None:
    _, _, stated, added = GOLDEN[name]
    expected = dict.fromkeys(stated, "file") | dict.fromkeys(added, "stack-default")
    assert read_config(EXAMPLES / name).origins == expected


@pytest.mark.parametrize("name", GOLDEN)
def test_every_option_is_one_that_the_estimate_takes(name: str) -> None:
    known = {*RUN_FIELDS, *RUN_OPTIONS_ELSEWHERE, "offload", "allow_long_context"}
    assert set(read_config(EXAMPLES / name).options) <= known


@pytest.mark.parametrize("name", [name for name in GOLDEN if GOLDEN[name][0] in ("axolotl", "llama-factory", "trl")])
def test_the_file_resolves_to_a_run_that_says_where_each_field_is_from(name: str) -> None:
    form, _, stated, added = GOLDEN[name]
    result = resolved(read_config(EXAMPLES / name))
    assert result.run.lora_r == stated["lora_r"]
    assert result.run.max_length == stated["max_length"]
    assert result.run.stack == "hf-peft", form
    for field, origin in result.origins.items():
        if field in stated:
            assert origin == "file"
        if field in added:
            assert origin == "stack-default"


def test_the_litgpt_file_resolves_by_its_own_stack_and_may_be_forecast_by_another() -> None:
    run_file = read_config(EXAMPLES / "litgpt.yaml")
    own = resolved(run_file)
    assert (own.run.stack, own.run.lora_target_modules) == ("litgpt", ("query", "value"))
    assert own.origins["lora_target_modules"] == "file"
    assert (own.run.gradient_checkpointing, own.origins["gradient_checkpointing"]) == (False, "stack-default")
    other = resolved(run_file, stack="hf-peft").run
    assert (other.stack, other.lora_target_modules) == ("hf-peft", ("q_proj", "v_proj"))


def test_ignored_fields_are_listed_and_empty_ones_are_not() -> None:
    ignored = read_config(EXAMPLES / "axolotl.yml").ignored
    assert {"learning_rate", "datasets", "special_tokens.pad_token", "evals_per_epoch", "lora_alpha"} <= set(ignored)
    assert ignored.count("datasets") == 1
    assert not {"wandb_project", "lora_model_dir", "fp16", "deepspeed", "base_model", "sequence_len"} & set(ignored)


def test_a_bundled_run_has_an_amount_from_the_tokens_axolotl_wrote_down() -> None:
    run_file = read_config(EXAMPLES / "axolotl.yml")
    amount = resolve_amount(resolved(run_file).run, merge_options(run_file, {}).options)
    assert amount is not None
    # axolotl/utils/trainer.py, packed mode: (floor(0.99 * tokens / efficiency / length // batch) - 1) * epochs
    axolotl_says = (int(0.99 * 18_000_000 / 0.96 / 4096 // 8) - 1) * 3
    assert amount.steps == pytest.approx(axolotl_says, rel=0.015)


def test_accelerate_beside_a_trl_file() -> None:
    run_file = read_config(EXAMPLES / "trl.yaml", accelerate=EXAMPLES / "accelerate.yaml")
    assert run_file.options["num_gpus"] == 4
    assert run_file.options["sharding"] == "fsdp"
    assert run_file.options["gradient_checkpointing"] is True
    assert run_file.their_fields["num_gpus"] == "accelerate: num_processes"
    assert "accelerate: machine_rank" in run_file.ignored
    run = resolved(run_file).run
    assert (run.num_gpus, run.sharding, run.adapter_dtype) == (4, "fsdp", "bf16")


def test_deepspeed_beside_a_llama_factory_file() -> None:
    run_file = read_config(EXAMPLES / "llama-factory.yaml", deepspeed=EXAMPLES / "deepspeed.json")
    assert run_file.options["sharding"] == "zero2"
    assert run_file.their_fields["sharding"] == "deepspeed: zero_optimization.stage"
    assert run_file.options["per_device_train_batch_size"] == 1
    assert any("DeepSpeed trains in pure bf16" in note for note in run_file.notes)
    run = resolved(run_file, num_gpus=2).run
    assert (run.sharding, run.precision, run.num_gpus) == ("zero2", "bf16", 2)
