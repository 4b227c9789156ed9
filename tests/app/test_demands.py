"""Demands of `estimate` and `recommend` that nothing meets, and where the fields of a chosen plan came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tunecast.cli.program import program

LLAMA = ("meta-llama/Llama-3.1-8B", "--method", "qlora", "--max-length", "1024", "--gpu", "l40s")
runner = CliRunner()


def asked(*words: str) -> Any:
    return runner.invoke(program, list(words))


def test_a_deadline_that_no_number_of_gpus_keeps_is_a_no() -> None:
    done = asked("estimate", *LLAMA, "--tokens", "1B", "--num-gpus", "auto", "--deadline", "1h")
    assert done.exit_code == 3
    assert "No run is done within --deadline 1h: the fastest, 128 x l40s-48gb, takes" in done.stderr
    assert "are not done within 1 h" in " ".join(done.stdout.split())


def test_a_deadline_that_is_kept_is_a_yes() -> None:
    done = asked("estimate", *LLAMA, "--tokens", "1M", "--num-gpus", "auto", "--deadline", "3d")
    assert done.exit_code == 0, done.output


def test_a_card_that_cannot_hold_the_run_keeps_no_deadline() -> None:
    """The smaller card would be done sooner on any number of GPUs, but every copy of the model is too large for it."""
    run = ("Qwen/Qwen2.5-32B", "--method", "qlora", "--max-length", "2048", "--tokens", "20M", "--sharding", "ddp")
    cards = ("--gpu", "a40", "--gpu", "rtx-4090", "--num-gpus", "auto", "--internode-gbps", "400")
    found = {one["gpu"]: one for one in json.loads(asked("estimate", *run, *cards, "--json").stdout)}
    small, large = found["rtx-4090-24gb"], found["a40-48gb"]
    assert (small["fits"], large["fits"]) == (False, True)
    late = asked("estimate", *run, *cards, "--deadline", "1min", "--json")
    took = {one["gpu"]: one["total_time_h"]["value"] for one in json.loads(late.stdout)}
    assert took["rtx-4090-24gb"] < took["a40-48gb"]
    between = (took["rtx-4090-24gb"] + took["a40-48gb"]) / 2.0
    done = asked("estimate", *run, *cards, "--deadline", f"{between:.4f}h")
    assert done.exit_code == 3, done.output
    assert "the fastest, 128 x a40-48gb, takes" in done.stderr


@pytest.mark.parametrize("more", [("--num-gpus", "auto"), ("--max-batch",)])
def test_what_was_searched_says_so(more: tuple[str, ...]) -> None:
    done = asked("estimate", *LLAMA, "--tokens", "1M", "--json", *more)
    (found,) = json.loads(done.stdout)
    name = "num_gpus" if more[0] == "--num-gpus" else "per_device_train_batch_size"
    assert found["run"][name]["origin"] == "searched"
    assert found["run"]["max_length"]["origin"] == "cli"


def test_a_recommended_plan_says_what_was_chosen_and_what_was_asked() -> None:
    done = asked("recommend", *LLAMA, "--tokens", "1M", "--json", "--gradient-checkpointing")
    run = json.loads(done.stdout)["cheapest"]["forecast"]["run"]
    origins = {name: field["origin"] for name, field in run.items()}
    chosen = ("num_gpus", "sharding", "per_device_train_batch_size", "gradient_accumulation_steps")
    assert {origins[name] for name in chosen} == {"searched"}
    assert {origins[name] for name in ("method", "max_length", "gradient_checkpointing")} == {"cli"}


def test_several_methods_are_a_choice_and_none_is_assumed() -> None:
    one = ("recommend", "meta-llama/Llama-3.2-1B", "--gpu", "l40s", "--tokens", "1M", "--json")
    compared = json.loads(asked(*one, "--methods", "lora,qlora").stdout)["cheapest"]["forecast"]["run"]
    assert compared["method"]["origin"] == "searched"
    assert json.loads(asked(*one).stdout)["cheapest"]["forecast"]["run"]["method"]["origin"] == "assumed"


def test_one_listing_taken_several_times_is_told() -> None:
    done = asked("estimate", *LLAMA, "--tokens", "1M", "--num-gpus", "2")
    assert "one-GPU listing times 2" in " ".join(done.stdout.split())


FILES = {
    "litgpt": """\
checkpoint_dir: checkpoints/meta-llama/Llama-3.1-8B
precision: bf16-true
lora_r: 8
lora_query: true
train: {global_batch_size: 32, micro_batch_size: 8, max_seq_length: 4096}
""",
    "torchtune": """\
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], lora_rank: 8}
checkpointer: {checkpoint_dir: /tmp/Meta-Llama-3.1-8B-Instruct/}
tokenizer: {max_seq_len: 4096}
optimizer: {_component_: torch.optim.AdamW}
dtype: bf16
batch_size: 8
enable_activation_checkpointing: true
""",
    "torchtune-split": """\
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
checkpointer: {checkpoint_dir: /tmp/Meta-Llama-3.1-8B-Instruct/}
tokenizer: {max_seq_len: 4096}
optimizer: {_component_: torch.optim.AdamW}
dtype: bf16
enable_activation_checkpointing: true
tensor_parallel_dim: 2
""",
    "trl": """\
model_name_or_path: meta-llama/Llama-3.1-8B
dtype: bfloat16
use_peft: true
max_length: 4096
per_device_train_batch_size: 8
""",
}


@pytest.mark.parametrize("form", FILES)
def test_a_searched_number_of_gpus_is_a_typed_one(form: str, tmp_path: Path) -> None:
    """torchtune shards as soon as there are two, LitGPT recomputes and deals its global batch out."""
    file = tmp_path / "run.yaml"
    file.write_text(FILES[form])
    run = ("estimate", str(file), "--gpu", "a100-sxm4-80gb", "--tokens", "100M", "--json")
    (found,) = json.loads(asked(*run, "--num-gpus", "auto", "--deadline", "3h").stdout)
    count = found["num_gpus"]
    (typed,) = json.loads(asked(*run, "--num-gpus", str(count)).stdout)
    assert count > 1
    assert {name: field["value"] for name, field in found["run"].items()} == {
        name: field["value"] for name, field in typed["run"].items()
    }
