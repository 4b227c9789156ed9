"""Headings of a table of runs: none that states a setting is passed over in silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunecast.calibrate.run_columns import KEPT, OPTIONS, READ, belongs_into, by_column, check_columns, meant_by, unread
from tunecast.calibrate.run_table import read_table
from tunecast.catalogs.errors import InputError

ROOT = Path(__file__).parents[2]
NEEDED = "model,method,seq_len,micro_batch"


def table(tmp_path: Path, heading: str) -> Path:
    path = tmp_path / "runs.csv"
    cells = ["Llama 3.1 8B", "lora", "2048", "1", *("x" for _ in heading.split(",")[4:])]
    path.write_text(f"{heading}\n{','.join(cells)}\n", encoding="utf-8")
    return path


def test_every_column_of_the_published_table_is_known() -> None:
    heading = (ROOT / "results/published/published-runs.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert unread(heading) == []
    assert set(KEPT) < set(heading)
    assert set(READ) - set(heading) == {"internode_gbps", "mean_tokens", "status"}


def test_no_known_column_is_another_word_for_one() -> None:
    assert {name: meant_by(name) for name in (*READ, *KEPT) if meant_by(name) not in (None, name)} == {}


@pytest.mark.parametrize(
    ("heading", "column"),
    [
        ("Activation Checkpointing", "grad_checkpointing"),
        ("quantization", "quant"),
        ("precision", "compute_dtype"),
        ("tok_per_s", "tokens_per_s"),
        ("tokens/s", "tokens_per_s"),
        ("Tokens/sec/GPU", "tokens_per_s_per_gpu"),
        ("peak VRAM (GB)", "peak_mem_gib"),
        ("lora_rank", "rank"),
        ("optimiser", "optimizer"),
        ("# GPUs", "gpus"),
        ("n_gpu", "gpus"),
        ("gas", "grad_accum"),
        ("accum_steps", "grad_accum"),
        ("micro_steps", "grad_accum"),
        ("gradient_checkpoint", "grad_checkpointing"),
        ("checkpointing", "grad_checkpointing"),
        ("devices", "gpus"),
        ("tok_s", "tokens_per_s"),
        ("train_tokens_per_second", "tokens_per_s"),
        ("tokens_per_sec_per_device", "tokens_per_s_per_gpu"),
        ("train_samples_per_second", "samples_per_s"),
        ("samples_per_second", "samples_per_s"),
        ("step_time", "step_time_s"),
        ("iter_time", "step_time_s"),
        ("time_per_step_s", "step_time_s"),
        ("sec_per_step", "step_time_s"),
        ("s_it", "step_time_s"),
        ("avg_step_time (s)", "step_time_s"),
        ("gpu_mem", "peak_mem_gib"),
    ],
)
def test_another_word_for_a_column_is_refused_by_both_names(tmp_path: Path, heading: str, column: str) -> None:
    told = f"has the column {heading.lower()!r}, which is not read; if it is {column}, call it so, else drop it."
    with pytest.raises(InputError, match=re.escape(told)):
        read_table(table(tmp_path, f"{NEEDED},{heading}"))


def test_options_of_the_trainer_and_of_this_command_line_are_columns(tmp_path: Path) -> None:
    """Each says just what its column says; where a table has that column too, it is asked which of them is meant."""
    own = {column: option for option, column in OPTIONS.items()}
    assert set(own) <= set(READ)
    heading = "model,method," + ",".join(sorted(own.values()))
    (row,) = read_table(table(tmp_path, heading))
    assert set(own) <= set(row)
    assert not set(own.values()) & set(row)
    assert by_column(["seq_len", "max_length"]) == ["seq_len", "max_length"]
    assert by_column(["max_seq_length", "max_length"]) == ["max_seq_length", "max_length"]


def test_a_needed_column_under_another_name_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'batch_size', which is not read; if it is micro_batch"):
        read_table(table(tmp_path, "model,method,seq_len,batch_size"))


@pytest.mark.parametrize(
    ("heading", "column", "cell"),
    [
        ("flash_attn", "attention_impl", "FlashAttention-2"), ("use_flash_attention", "attention_impl", "FlashAttent"),
        ("fp16", "compute_dtype", "fp16-mixed"), ("bf16", "compute_dtype", "bf16-mixed"),
        ("total_time_s", "total_time_h", "5400 s"), ("total_runtime_min", "total_time_h", "90 min"),
        ("ms_per_step", "step_time_s", "1500 ms"), ("it/s", "step_time_s", "seconds of one step"),
        ("steps_per_second", "step_time_s", "seconds of one step"), ("it_s", "step_time_s", "seconds of one step"),
        ("train_runtime", "total_time_h", "5400 s"), ("wall_time_s", "total_time_h", "5400 s"),
        ("training_hours", "total_time_h", "1.5 h"),
        ("max_memory_allocated", "peak_mem_gib", "24576 MiB, and allocated"),
        ("memory_allocated", "peak_mem_gib", "24576 MiB, and allocated"),
        ("peak_memory_mb", "peak_mem_gib", "24576 MiB"),
    ],
)  # fmt: skip
def test_a_heading_in_another_form_is_refused_with_a_cell(tmp_path: Path, heading: str, column: str, cell: str) -> None:
    told = rf"the column '{heading}', which is not read: what it says belongs into {column}; a cell there says .*{cell}"
    with pytest.raises(InputError, match=told):
        read_table(table(tmp_path, f"{NEEDED},{heading}"))
    assert read_table(table(tmp_path, f"{NEEDED},{column},{heading}"))[0][heading] == "x"


@pytest.mark.parametrize(
    ("heading", "column", "cell"),
    [
        ("nodes", "gpus", r"16 \(2 nodes\)"), ("gpus_per_node", "gpus", r"16 \(2 nodes\)"),
        ("load_in_8bit", "quant", "8-bit"), ("load_in_4bit", "quant", "NF4"), ("4bit", "quant", "4-bit"),
        ("bits", "quant", "4-bit, 8-bit"), ("double_quant", "quant", "double quantization"),
        ("zero_stage", "parallelism", "ZeRO-1"), ("fsdp", "parallelism", "FSDP"), ("deepspeed", "parallelism", "ZeRO"),
        ("offload", "parallelism", "CPU offload"), ("cpu_offload", "parallelism", "CPU offload"),
        ("tp", "parallelism", "TP=4"), ("pp", "parallelism", "PP=2"), ("cp", "parallelism", "CP=2"),
        ("dp", "parallelism", "DP=2"), ("vpp", "parallelism", "VPP=2"),
        ("tensor_model_parallel_size", "parallelism", "TP=4"), ("use_dora", "method", "DoRA"),
        ("finetuning_type", "method", "LoRA or QLoRA"),
        ("liger", "framework", "Liger"), ("use_liger_kernel", "framework", "Liger"),
        ("activation_offloading", "grad_checkpointing", "activation offloading"),
        ("padding_free", "packed", "padding-free"), ("neat_packing", "packed", "neat_packing"),
        ("group_by_length", "packed", "no, group_by_length"),
        ("modules_to_save", "lora_targets", "not read from a table"),
    ],
)  # fmt: skip
def test_a_setting_that_would_be_lost_is_refused_beside_its_column_too(
    tmp_path: Path, heading: str, column: str, cell: str
) -> None:
    for headings in (heading, f"{column},{heading}" if column not in NEEDED else heading):
        with pytest.raises(InputError, match=f"belongs into {column}; a cell there says .*{cell}"):
            read_table(table(tmp_path, f"{NEEDED},{headings}"))


@pytest.mark.parametrize("heading", ["tokens_per_s,tokens_per_s", "Quant,quant", "comment,comment"])
def test_a_heading_that_is_there_twice_is_refused(tmp_path: Path, heading: str) -> None:
    with pytest.raises(InputError, match="twice; drop one"):
        read_table(table(tmp_path, f"{NEEDED},{heading}"))


def test_no_column_is_a_setting_of_another() -> None:
    assert {name: belongs_into(name) for name in (*READ, *KEPT) if belongs_into(name)[0]} == {}


@pytest.mark.parametrize("heading", ["url", "author", "loss", "comment", "speed_of_last_year", "lora_alpha", "seed"])
def test_other_columns_are_passed_over(tmp_path: Path, heading: str) -> None:
    path = table(tmp_path, f"{NEEDED},{heading}")
    assert unread(list(read_table(path)[0])) == [heading]


def test_a_second_word_beside_the_column_itself_does_no_harm(tmp_path: Path) -> None:
    assert read_table(table(tmp_path, f"{NEEDED},gpus,num_gpus"))[0]["num_gpus"] == "x"


def test_all_headings_that_are_not_read_are_told_at_once() -> None:
    headings = ["model", "gpu", "batch size", "checkpointing", "tok/s"]
    with pytest.raises(InputError) as told:
        check_columns(Path("runs.csv"), headings)
    said = str(told.value)
    assert "'batch size' (micro_batch), 'checkpointing' (grad_checkpointing), 'tok/s' (tokens_per_s)" in said
