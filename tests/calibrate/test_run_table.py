"""Tables that people keep themselves: spreadsheets' habits are read, wrong cells skip their row by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunecast.calibrate.published import read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.catalogs.errors import InputError

GOOD = {
    "id": "a-1", "model": "meta-llama/Llama-3.1-8B", "method": "lora", "seq_len": "2048", "micro_batch": "2",
    "grad_accum": "4", "gpus": "2", "gpu_canonical_id": "a100-sxm4-80gb", "parallelism": "zero2",
}  # fmt: skip
TOKENS_PER_STEP = 2048 * 2 * 4 * 2


def only(**cells: str) -> tuple[float | None, str]:
    """Tokens/s that a row with these cells states, or why it is skipped."""
    runs, skipped = read_runs([{**GOOD, **cells}])
    return (runs[0].tokens_per_s, "") if runs else (None, skipped[0].reason)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"tokens_per_s": "nan"}, "tokens_per_s 'nan' is not a number above 0"),
        ({"tokens_per_s": "inf"}, "tokens_per_s 'inf' is not a number above 0"),
        ({"tokens_per_s": "8,18"}, "tokens_per_s '8,18' is not a number above 0"),
        ({"step_time_s": "3,600"}, "step_time_s '3,600' is not a number above 0"),
        ({"peak_mem_gib": "40 GB"}, "peak_mem_gib '40 GB'"),
        ({"micro_batch": "2x8"}, "micro_batch '2x8'"),
        ({"seq_len": "10k"}, "seq_len '10k'"),
        ({"micro_batch": "4k"}, "micro_batch '4k'"),
        ({"gpus": "~2"}, "gpus '~2'"),
        ({"tokens_per_s": "-5"}, "tokens_per_s '-5'"),
        ({"peak_mem_gib": "nan"}, "peak_mem_gib 'nan'"),
        ({"micro_batch": "1.5"}, "micro_batch '1.5' is not a whole number"),
        ({"seq_len": "abc"}, "seq_len 'abc' is not a number above 0"),
        ({"seq_len": "0"}, "seq_len '0'"),
        ({"seq_len": ""}, "seq_len is not stated"),
        ({"gpus": "two"}, "gpus 'two'"),
        ({"rank": "zzz"}, "rank 'zzz'"),
        ({"confidence": "zzz"}, "confidence 'zzz' is none of high, medium, low"),
        ({"compute_dtype": ""}, "compute_dtype is not stated"),
        ({"global_batch": "7"}, "grad_accum x data-parallel GPUs = 16"),
        ({"tokens_per_s": "9000", "step_time_s": "36"}, "contradict each other"),
        ({"tokens_per_s": "1e8"}, "MFU of"),
    ],
)
def test_a_wrong_cell_skips_its_row_and_is_named(cells: dict[str, str], reason: str) -> None:
    assert reason in only(**cells)[1]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"tokens_per_s": "9000", "global_batch": "16"}, 9000.0),
        ({"tokens_per_s_per_gpu": "4500"}, 9000.0),
        ({"step_time_s": "4"}, TOKENS_PER_STEP / 4),
        ({"step_time_s": "4", "packed": "yes"}, TOKENS_PER_STEP / 4),
        ({"tokens_per_s": "9000", "step_time_s": "3.6"}, 9000.0),
        ({"peak_mem_gib": "40"}, None),
        ({"tokens_per_s": "8,182"}, 8182.0),
        ({"tokens_per_s": "~9,000.5 tokens/s"}, 9000.5),
        ({"tokens_per_s": "9.1k tok/s"}, 9100.0),
        ({"tokens_per_s_per_gpu": "4 500"}, 9000.0),
        ({"step_time_s": "4 s"}, TOKENS_PER_STEP / 4),
        ({"step_time_s": "4", "seq_len": "2k", "gpus": "2 GPUs", "tokens_per_s": "n/a"}, TOKENS_PER_STEP / 4),
        ({"step_time_s": "4", "seq_len": "2,048 tokens"}, TOKENS_PER_STEP / 4),
        ({"tokens_per_s": "-", "peak_mem_gib": "40 GiB"}, None),
    ],
)
def test_any_statement_of_the_speed_is_read(cells: dict[str, str], expected: float | None) -> None:
    speed, reason = only(**cells)
    assert not reason
    assert speed == expected


def test_values_of_our_own_options_need_no_vocabulary() -> None:
    cells = {
        "lora_targets": "all-linear", "optimizer": "paged_adamw_8bit", "attention_impl": "flash_attention_2",
        "compute_dtype": "bf16-autocast", "parallelism": "ddp",
    }  # fmt: skip
    (found,), _ = read_runs([{**GOOD, **cells}])
    run = found.run
    assert (run.optim, run.attn_implementation, run.precision, run.sharding) == (
        "paged_adamw_8bit", "flash_attention_2", "bf16-autocast", "ddp",
    )  # fmt: skip
    assert len(run.lora_target_modules) == 7


def written(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    file = folder / "runs.csv"
    file.write_text(text, encoding=encoding)
    return file


def test_a_spreadsheets_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    file = written(tmp_path, "model,method,seq_len,micro_batch\nx,lora,8,1\n", "utf-8-sig")
    assert read_table(file) == [{"id": "row-1", "model": "x", "method": "lora", "seq_len": "8", "micro_batch": "1"}]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("model,method,seq_len,micro_batch\n", "no rows"),
        ("model,method,seq_len\nx,lora,8\n", "lacks the column 'micro_batch'"),
        ("model;method;seq_len;micro_batch\nx;lora;8;1\n", "separates its columns by semicolons; save it with commas"),
        ("model\tmethod\tseq_len\tmicro_batch\nx\tlora\t8\t1\n", "separates its columns by tabs"),
        ("model\nx\n", "lacks the column 'method'"),
        ("id,model,method,seq_len,micro_batch\na,x,lora,8,1\na,x,lora,16,1\n", "the id 'a' in more than one row"),
    ],
)
def test_a_table_that_cannot_be_one_is_told_in_a_sentence(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        read_table(written(tmp_path, text))
