"""What is typed wins over the file, and takes with it what no longer fits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tunecast.model.amount import resolve_amount
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, looks_like_training_file, merge_options
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run

Read = Callable[..., RunFile]


def test_typed_options_win_and_are_marked(read: Read) -> None:
    merged = merge_options(read("axolotl"), {"lora_r": 64, "max_length": None, "num_samples": "5000"})
    assert (merged.options["lora_r"], merged.origins["lora_r"]) == (64, "cli")
    assert (merged.options["max_length"], merged.origins["max_length"]) == (2048, "file")
    assert merged.origins["loss_type"] == "stack-default"
    assert set(merged.origins) == set(merged.options)


@pytest.mark.parametrize(
    ("form", "tokens", "steps"),
    [  # axolotl takes the smaller of both; the Trainer begins the data again until max_steps are done
        ("axolotl", "40K", 5),
        ("axolotl", "400M", 200),
        ("trl", "40K", 200),
        ("trl", "400M", 200),
    ],
)
def test_max_steps_of_the_file_ends_a_typed_amount(read: Read, form: str, tokens: str, steps: int) -> None:
    rows = {"axolotl": "num_epochs: 1\ngradient_accumulation_steps: 2"}.get(form, "per_device_train_batch_size: 4")
    run_file = read(form, f"max_steps: 200\n{rows}")
    assert merge_options(run_file, {}).options["max_steps"] == 200
    merged = merge_options(run_file, {"tokens": tokens})
    assert "max_steps" not in merged.options
    assert sum("max_steps of the file ends the training after 200 steps" in note for note in merged.notes) == 1
    own = {name: value for name, value in merged.options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    run = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), own).run
    amount = resolve_amount(run, merged.options)
    assert amount is not None
    assert amount.steps == steps
    data = 40_000 if tokens == "40K" else 400_000_000
    if steps == 200:
        assert amount.epochs == pytest.approx(
            merged.options["num_train_epochs"]
            * 200
            / (merged.options["num_train_epochs"] * math.ceil(data / run.tokens_per_step))
        )


def test_typed_steps_replace_the_files_and_a_note_names_them(read: Read) -> None:
    merged = merge_options(read("axolotl", "max_steps: 200\nnum_epochs: 3"), {"max_steps": 50})
    assert merged.options["max_steps"] == 50
    assert "--max-steps replaces max_steps of the file (200)." in merged.notes
    merged = merge_options(read("axolotl", "total_num_tokens: 5000000\nnum_epochs: 3"), {"tokens": "10M"})
    assert merged.options["tokens"] == "10M"
    assert "--tokens replaces total_num_tokens of the file (5,000,000)." in merged.notes


@pytest.mark.parametrize(
    ("lines", "own"),
    [
        ("liger_rms_norm: true\nliger_glu_activation: true\nlora_qkv_kernel: true", "rms_norm,swiglu,lora"),
        ("lora_o_kernel: true", "lora"),
    ],
)
def test_typed_kernels_replace_the_files_and_a_note_names_them(read: Read, lines: str, own: str) -> None:
    merged = merge_options(read("axolotl", lines), {"fused_kernels": "swiglu"})
    assert f"--fused-kernels swiglu replaces those of the file: {own}." in merged.notes
    assert not any("switches its fused LoRA kernels on" in note for note in merged.notes)
    same = merge_options(read("axolotl", lines), {"fused_kernels": own})
    assert not any("--fused-kernels" in note for note in same.notes)


def test_typed_epochs_beside_the_files_steps_are_told_to_do_nothing(read: Read) -> None:
    merged = merge_options(read("axolotl", "max_steps: 200"), {"num_train_epochs": 7})
    assert any("200 steps: --num-train-epochs changes nothing" in note for note in merged.notes)


def test_epochs_of_the_file_hold_for_a_typed_number_of_samples(read: Read) -> None:
    merged = merge_options(read("trl", "num_train_epochs: 2"), {"num_samples": "5000"})
    assert merged.options["num_train_epochs"] == 2
    assert not any("no file says how many samples" in note for note in merged.notes)


def test_typed_epochs_are_never_dropped(read: Read) -> None:
    assert merge_options(read("trl"), {"num_train_epochs": 5}).options["num_train_epochs"] == 5


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize(
    ("form", "lines"),
    [
        ("axolotl", "adapter: qlora\nload_in_4bit: true"),
        ("trl", "loss_type: nll"),
        ("trl", "use_peft: false\nloss_type: nll"),
        ("llama-factory", "quantization_bit: 4"),
    ],
)
def test_a_typed_method_leaves_a_run_that_resolves(read: Read, form: str, lines: str, method: str) -> None:
    merged = merge_options(read(form, lines), {"method": method})
    options = {name: value for name, value in merged.options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    run = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), options, option_origins=merged.origins).run
    assert run.method == method
    assert (run.lora_r > 0) is (method != "full")
    assert (run.bnb_4bit_quant_type is not None) is (method == "qlora")


def test_one_gpu_typed_undoes_the_files_sharding(read: Read) -> None:
    run_file = read("axolotl", "fsdp: [full_shard]")
    assert "sharding" not in merge_options(run_file, {"num_gpus": 1}).options
    assert merge_options(run_file, {"num_gpus": 4}).options["sharding"] == "fsdp"


def test_gpus_typed_change_the_accumulation_of_litgpt(read: Read) -> None:
    lines = "train: {global_batch_size: 64, micro_batch_size: 4, max_seq_length: 512}\ndevices: 4"
    four, eight = read("litgpt", lines).options, read("litgpt", lines, num_gpus=8).options
    # TrainArgs.gradient_accumulation_iters: global // devices // micro
    assert (four["num_gpus"], four["gradient_accumulation_steps"]) == (4, 64 // 4 // 4)
    assert eight["gradient_accumulation_steps"] == 64 // 8 // 4
    assert "num_gpus" not in eight
    assert (four["sharding"], four["gradient_checkpointing"]) == ("fsdp", True)


def test_a_switch_that_was_not_typed_leaves_the_files_alone(read: Read) -> None:
    run_file = read("llama-factory", "rope_scaling: yarn")
    merged = merge_options(run_file, {"allow_long_context": False})
    assert (merged.options["allow_long_context"], merged.origins["allow_long_context"]) == (True, "file")
    assert merge_options(read("trl"), {"allow_long_context": True}).origins["allow_long_context"] == "cli"


@pytest.mark.parametrize(
    ("text", "expected"), [("run.yml", True), ("a/b/RUN.YAML", True), ("config.json", False), ("Qwen/Qwen3-8B", False)]
)
def test_training_files_are_told_from_models_by_name(text: str, expected: bool) -> None:
    assert looks_like_training_file(text) is expected
