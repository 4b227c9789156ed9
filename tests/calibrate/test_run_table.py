"""Tables that people keep themselves: spreadsheets' habits are read, wrong cells skip their row by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunecast.calibrate.published import read_runs
from tunecast.calibrate.run_table import SPEED_COLUMNS, read_table
from tunecast.calibrate.validate import judge, read_entries
from tunecast.calibrate.validate_folds import shipped
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
        ({"tokens_per_s": "8,18"}, "tokens_per_s '8,18' has a decimal comma: write 8.18"),
        ({"step_time_s": "3,600"}, "step_time_s '3,600' may be 3.600 or 3600: write it without"),
        ({"model": ""}, "model is not stated"),
        ({"model": "-"}, "model is not stated"),
        ({"kind": "inference"}, "kind 'inference' is none of"),
        ({"kind": "eval"}, "kind 'eval' is none of"),
        ({"kind": "SFT + DPO"}, "kind 'SFT + DPO' is none of"),
        ({"kind": "post-training"}, "kind 'post-training' may be preference tuning or reinforcement learning too"),
        ({"confidence": "low-medium"}, "confidence 'low-medium' is none of high, medium, low"),
        ({"params_b": "70"}, "params_b '70' contradicts model 'meta-llama/Llama-3.1-8B', which has 8.03 billion"),
        ({"params_b": "500M"}, "params_b '500M' contradicts"),
        ({"model": "mistralai/Mixtral-8x7B-v0.1", "params_b": "7"}, "which has 46.70 billion"),
        ({"compute_dtype": "amp"}, "has no meaning of 'amp' alone"),
        ({"grad_checkpointing": "x"}, "may mean yes or no"),
        (
            {"packed": "padding-free", "tokens_per_s": "9000"},
            "packed 'padding-free': samples laid end to end without padding",
        ),
        ({"micro_batch": "2x8"}, "micro_batch '2x8'"),
        ({"seq_len": "10k"}, "seq_len '10k'"),
        ({"micro_batch": "4k"}, "micro_batch '4k'"),
        ({"gpus": "~2"}, "gpus '~2'"),
        ({"tokens_per_s": "-5"}, "tokens_per_s '-5'"),
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
        # samples/s at last, of samples that are said to fill their length
        ({"samples_per_s": "4", "packed": "n/a: samples fill seq_len"}, 8192.0),
        ({"samples_per_s": "4", "packed": "yes"}, None),
        ({"samples_per_s": "4 samples/s", "packed": "samples fill 2048"}, 8192.0),
        ({"samples_per_s": "4", "packed": "samples fill 2048", "tokens_per_s": "9000"}, 9000.0),
        ({"samples_per_s": "4"}, None),
        ({"kind": "Fine-Tuning", "params_b": "8.03B", "tokens_per_s": "9000"}, 9000.0),
        ({"kind": "continued pre-training", "params_b": "8,030,261,248", "tokens_per_s": "9000"}, 9000.0),
        ({"model": "mistralai/Mixtral-8x7B-v0.1", "params_b": "12.9", "tokens_per_s": "900"}, 900.0),
        ({"model": "mistralai/Mixtral-8x7B-v0.1", "params_b": "46.7B", "tokens_per_s": "900"}, 900.0),
    ],
)
def test_any_statement_of_the_speed_is_read(cells: dict[str, str], expected: float | None) -> None:
    speed, reason = only(**cells)
    assert not reason
    assert speed == expected


@pytest.mark.parametrize(
    "kind",
    [
        "CPT", "continual pretraining", "continued pre-training", "instruct", "instruction tuning",
        "instruction-tuning",
        "sft (lora)", "LoRA SFT", "QLoRA fine-tuning", "FT", "post-training (SFT)", "domain adaptation", "SFT", "n/a",
        "full fine-tuning", "supervised fine-tuning", "domain-adaptive pretraining",
    ],
)  # fmt: skip
def test_training_on_a_next_token_has_many_names(kind: str) -> None:
    assert only(kind=kind, tokens_per_s="9000") == (9000.0, "")


@pytest.mark.parametrize("confidence", ["med", "med.", "Medium-high", "medium/high", "high", "HIGH", ""])
def test_a_confidence_of_medium_or_above_may_be_shortened(confidence: str) -> None:
    assert only(confidence=confidence, tokens_per_s="9000") == (9000.0, "")


@pytest.mark.parametrize("notes", ["Variant: baseline. second run", "Variant: Liger. x", "anything at all"])
def test_notes_may_be_anything(notes: str) -> None:
    assert only(notes=notes, tokens_per_s="9000", framework="TRL") == (9000.0, "")


@pytest.mark.parametrize(
    ("text", "gib"),
    [("36.5", 36.5), ("36.5 GiB", 36.5), ("24576 MiB", 24.0), ("24,576 MiB", 24.0),
     ("36.5 GB", None), ("24,576 MB", None), ("nan", None),
     ("lots", None), ("0", None), ("n/a", None)],
)  # fmt: skip
def test_a_memory_that_cannot_be_read_leaves_the_speed(text: str, gib: float | None) -> None:
    (found,), skipped = read_runs([{**GOOD, "tokens_per_s": "9000", "peak_mem_gib": text}])
    assert not skipped
    assert found.tokens_per_s == 9000.0
    assert found.peak_bytes == (None if gib is None else gib * 2**30)
    assert (repr(text) in found.why_no_memory) == (gib is None and text != "n/a")


@pytest.mark.parametrize("text", ["-", "n/a", "none", "1", "single", "No"])
def test_one_gpu_has_no_parallelism_to_name(text: str) -> None:
    (found,), _ = read_runs([{**GOOD, "gpus": "1", "parallelism": text}])
    assert (found.run.num_gpus, found.run.sharding) == (1, "none")


@pytest.mark.parametrize("text", ["16 (alpha 32)", "r16", "r=16", "rank 16", "16/32", "r=16, alpha=32", "16"])
def test_a_rank_is_read_beside_its_alpha(text: str) -> None:
    (found,), _ = read_runs([{**GOOD, "rank": text}])
    assert found.run.lora_r == 16


@pytest.mark.parametrize(
    ("text", "on"), [("\u2713", True), ("\u2714\ufe0f", True), ("\u2717", False), ("0", False), ("1", True)]
)
def test_ticks_and_digits_say_yes_or_no(text: str, on: bool) -> None:
    (found,), _ = read_runs([{**GOOD, "grad_checkpointing": text}])
    assert found.run.gradient_checkpointing is on


@pytest.mark.parametrize("text", ["1", "true", "True", "yes", "\u2713"])
def test_packed_samples_fill_their_length(text: str) -> None:
    assert only(packed=text, step_time_s="4") == (TOKENS_PER_STEP / 4, "")
    assert "packed" in only(packed={"1": "0", "true": "false"}.get(text, "no"), step_time_s="4")[1]


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


def test_a_heading_in_other_letters_is_read_unless_two_columns_would_be_one(tmp_path: Path) -> None:
    file = written(tmp_path, "ID,Model,METHOD,Seq_Len,micro_batch,Notes,notes\na,x,lora,8,1,one,two\n")
    assert read_table(file) == [
        {"id": "a", "model": "x", "method": "lora", "seq_len": "8", "micro_batch": "1", "Notes": "one", "notes": "two"}
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("model,method,seq_len,micro_batch\n", "no rows"),
        ("model,method,seq_len\nx,lora,8\n", "lacks the column 'micro_batch'"),
        ("model|method|seq_len|micro_batch\nx|lora|8|1\n", "separates its columns by bars; save it with commas"),
        ("model;method\tseq_len;micro_batch\nx;lora\t8;1\n", "by semicolons and tabs; save it with commas"),
        ("model;method;seq_len;micro_batch\nx;lora;8;1;2\n", "5 cells under 4 .* a cell that contains a semicolon"),
        ("model\nx\n", "lacks the column 'method'"),
        ("id,model,method,seq_len,micro_batch\na,x,lora,8,1\na,x,lora,16,1\n", "the id 'a' in more than one row"),
        ('model,method,seq_len,micro_batch\nx,"lora,8,1\n', "at its line 2: .* close every quote"),
        ('model,method,seq_len,micro_batch\nx,"lo"ra,8,1\n', "at its line 2: .* close every quote"),
        ("model,method,seq_len,micro_batch\n,,,\n", "no rows"),
        ("sep=;\nmodel;method;seq_len\nx;lora;8\n", "lacks the column 'micro_batch'"),
        ("Llama 3.1 8B,lora,2048,1,yes,yes\n", "first line of .* is a run and no heading; write the columns' names"),
        ("a-1,8B,lora,2048\na-2,8B,lora,2048\n", "first line of .* is a run and no heading"),
    ],
)
def test_a_table_that_cannot_be_one_is_told_in_a_sentence(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        read_table(written(tmp_path, text))


@pytest.mark.parametrize("sign", [";", "\t"])
def test_a_heading_without_commas_may_have_semicolons_or_tabs(tmp_path: Path, sign: str) -> None:
    heading = sign.join(("model", "method", "seq_len", "micro_batch", "lora_targets", "step_time_s", "notes"))
    row = sign.join(("x", "lora", "2048", "1", f'"q{sign}v"', "1,31", "2,5 of it"))
    (read,) = read_table(written(tmp_path, f"{heading}\n{row}\n"))
    assert (read["lora_targets"], read["step_time_s"], read["notes"]) == (f"q{sign}v", "1.31", "2,5 of it")


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=;"])
def test_excels_first_line_says_what_separates_the_columns(tmp_path: Path, first: str) -> None:
    text = f"{first}\r\nmodel;method;seq_len;micro_batch;step_time_s\r\nx;lora;8;1;1,31\r\n"
    (read,) = read_table(written(tmp_path, text, "utf-8-sig"))
    assert read == {
        "id": "row-1", "model": "x", "method": "lora", "seq_len": "8", "micro_batch": "1", "step_time_s": "1.31"
    }  # fmt: skip


@pytest.mark.parametrize("above", ["\r\n", "\n\n", ",,,,\n", "\nsep=,\n\n", "  \n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_empty_lines_above_the_heading_are_none(tmp_path: Path, above: str, encoding: str) -> None:
    table = f"{above}model,method,seq_len,micro_batch\nx,lora,8,1\n"
    assert read_table(written(tmp_path, table, encoding))[0]["model"] == "x"


@pytest.mark.parametrize("text", ["", "\n", "\n\n,,,\n", "sep=,\n\n"])
def test_a_table_of_empty_lines_alone_is_empty(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="is empty; a table of runs needs"):
        read_table(written(tmp_path, text))


def test_a_line_that_cannot_be_read_has_its_number_in_the_file(tmp_path: Path) -> None:
    text = 'model,method,seq_len,micro_batch\n"x" y,lora,8,1\n'
    for above, line in (("", 2), ("\n\n", 4), ("sep=,\n\n", 4)):
        with pytest.raises(InputError, match=f"at its line {line}:"):
            read_table(written(tmp_path, above + text))


def test_semicolons_in_cells_of_a_table_with_commas_separate_nothing(tmp_path: Path) -> None:
    (read,) = read_table(written(tmp_path, 'model,method,seq_len,micro_batch,"a;b"\nx,lora,8,1,"1,31"\n'))
    assert (read["method"], read["a;b"]) == ("lora", "1,31")


def test_a_table_in_another_encoding_is_told_how_to_save_it(tmp_path: Path) -> None:
    file = written(tmp_path, "model,method,seq_len,micro_batch\nK\u00f6nig,lora,8,1\n", "latin-1")
    with pytest.raises(InputError, match="save it as CSV UTF-8"):
        read_table(file)


def test_a_row_of_commas_alone_is_none(tmp_path: Path) -> None:
    (row,) = read_table(written(tmp_path, "model,method,seq_len,micro_batch\nx,lora,8,1\n,,,\n"))
    assert row["model"] == "x"


def test_a_name_longer_than_any_files_is_no_model() -> None:
    (skipped,) = read_runs([{**OWN, "id": "a", "model": "x" * 5000}])[1]
    assert "Unknown model" in skipped.reason


def test_a_row_with_a_comma_too_many_is_refused_by_its_number(tmp_path: Path) -> None:
    """An unquoted ``2,100`` would be read as 2 tokens/s."""
    table = tmp_path / "runs.csv"
    table.write_text(
        "model,method,seq_len,micro_batch,tokens_per_s\nm,lora,1,1,7\nm,lora,1,1,2,100\n", encoding="utf-8"
    )
    with pytest.raises(InputError, match=r"Row 2 .* has 6 cells under 5 headings.*quotes"):
        read_table(table)


OWN = {"model": "Llama 3.1 8B", "method": "lora", "seq_len": "2048", "micro_batch": "2", "gpu": "H100 80GB",
       "tokens_per_s": "7000"}  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"gpu": "RTX 4090", "gpu_canonical_id": "h100-sxm5-80gb"}, "gpu 'RTX 4090' and gpu_canonical_id"),
        ({"params_b": "abc"}, "params_b 'abc' is not a number"),
        ({"params_b": "-8"}, "params_b '-8' is not a number"),
        ({"source_date": "yesterday"}, "source_date 'yesterday' names no year"),
        ({"tokens_per_s": "0.001"}, "check its unit"),
        ({"tokens_per_s": "", "step_time_s": "1500"}, "may be 1500 milliseconds: write the unit, 1500 ms or 1500 s"),
        ({"tokens_per_s": "7"}, "may be 7 thousand tokens: write the unit, 7k or 7 tokens/s"),
        ({"gpu": "A100 PCIe 40GB", "gpu_canonical_id": "a100-sxm4-80gb"}, "contradict each other"),
        ({"gpu": "A100 PCIe", "gpu_canonical_id": "a100-sxm4-80gb"}, "contradict each other"),
        ({"gpu": "A100 40GB", "gpu_canonical_id": "a100-sxm4-80gb"}, "contradict each other"),
        ({"gpu": "a100-pcie-40gb", "gpu_canonical_id": "a100-sxm4-80gb"}, "contradict each other"),
        ({"gpu": "A100X", "gpu_canonical_id": "a100-sxm4-80gb"}, "contradict each other"),
        ({"gpu": "A1000", "gpu_canonical_id": "a100-sxm4-80gb"}, "contradict each other"),
        ({"gpu": "RTX A1000", "gpu_canonical_id": "a100-sxm4-80gb"}, "contradict each other"),
        ({"gpu": "A100-SXM-64GB", "gpu_canonical_id": "a100-sxm4-80gb"}, "contradict each other"),
        ({"gpu": "our PCIe A100s", "gpu_canonical_id": "a100-sxm4-80gb"}, "contradict each other"),
    ],
)
def test_a_cell_that_cannot_be_skips_its_row_by_name(cells: dict[str, str], reason: str) -> None:
    runs, skipped = read_runs([{"id": "x", **OWN, **cells}])
    assert not runs
    assert reason in skipped[0].reason


@pytest.mark.parametrize("text", ["A100", "A100 80GB", "NVIDIA A100-SXM4-80GB", "our A100s", "p4de.24xlarge"])
def test_words_that_leave_a_choice_or_name_no_card_stand_beside_an_id(text: str) -> None:
    (found,), skipped = read_runs([{"id": "x", **OWN, "gpu": text, "gpu_canonical_id": "a100-sxm4-80gb", "gpus": "1"}])
    assert found.gpu == "a100-sxm4-80gb", skipped


@pytest.mark.parametrize(
    ("cells", "speed"),
    [
        ({"tokens_per_s": "", "step_time_s": "1500 s"}, 2.73),
        ({"tokens_per_s": "", "step_time_s": "1,500 ms"}, 2730.67),
        ({"tokens_per_s": "", "step_time_s": "~1500 ms"}, 2730.67),
        ({"tokens_per_s": "2.7", "step_time_s": "1500"}, 2.7),
        ({"tokens_per_s": "", "step_time_s": "90"}, 45.51),
        ({"tokens_per_s": "7 tokens/s"}, 7.0),
    ],
)
def test_a_very_slow_run_is_read_with_its_unit_or_by_two_figures(cells: dict[str, str], speed: float) -> None:
    """90 milliseconds would be above the peak of the card, so that 90 are seconds."""
    (found,), skipped = read_runs([{"id": "x", **OWN, "gpu": "A100 80GB", **cells}])
    assert found.tokens_per_s == pytest.approx(speed, rel=1e-3), skipped


@pytest.mark.parametrize(
    ("cells", "cell"),
    [
        ({"step_time_s": "0.05"}, "step_time_s '0.05': 81920 tokens/s"),
        ({"samples_per_s": "90/s", "packed": "samples fill seq_len"}, "samples_per_s '90/s': 184320 tokens/s"),
        ({"tokens_per_s_per_gpu": "90k"}, "tokens_per_s_per_gpu '90k': 90000 tokens/s"),
        ({"total_time_h": "6 min", "total_tokens_or_steps": "90M tokens"}, "total_time_h '6 min': 250000 tokens/s"),
        ({"total_time_h": "10h", "total_tokens_or_steps": "1 step"}, "total_time_h '10h': 0.113778 tokens/s"),
        ({"tokens_per_s": "90k", "step_time_s": "0.0455"}, "90000 tokens/s"),
    ],
)
def test_a_speed_that_no_card_has_is_told_by_the_cell_that_it_is_from(cells: dict[str, str], cell: str) -> None:
    _, skipped = read_runs([{"id": "x", **OWN, "gpu": "A100 80GB", "gpus": "1", "tokens_per_s": "", **cells}])
    assert skipped[0].reason.startswith(f"{cell} on 1 x a100-sxm4-80gb would be an MFU of")


def test_a_row_without_a_speed_says_which_columns_have_one() -> None:
    (entry,) = read_entries([{"id": "x", **OWN, "gpus": "1", "tokens_per_s": "", "peak_mem_gib": "30"}])
    told = judge(entry, shipped).why_no_speed
    assert told.startswith("no speed is stated: fill ")
    assert [column for column in (*SPEED_COLUMNS, "total_time_h", "total_tokens_or_steps") if column not in told] == []


def test_a_peak_of_several_cards_leaves_the_speed() -> None:
    several = {"id": "x", **OWN, "gpus": "8", "parallelism": "ddp", "peak_mem_gib": "400"}
    (found,), _ = read_runs([{**several, "reserved_or_allocated": "allocated"}])
    assert (found.tokens_per_s, found.peak_bytes) == (7000.0, None)
    assert "above the 80 GB" in found.why_no_memory


@pytest.mark.parametrize(("text", "read"), [("82", True), ("95", False), ("97280 MiB", False)])
def test_a_peak_that_one_card_cannot_hold_is_of_another_card(text: str, read: bool) -> None:
    """A little more may be a unit, or rounded."""
    alone = {"id": "x", **OWN, "gpus": "1", "parallelism": "", "peak_mem_gib": text}
    found, skipped = read_runs([alone])
    assert bool(found) is read
    assert read or "it ran on another card, or on several" in skipped[0].reason


def test_a_global_batch_says_how_many_micro_batches_where_no_cell_does() -> None:
    (found,), _ = read_runs([{"id": "x", **OWN, "gpus": "1", "global_batch": "64"}])
    assert found.run.gradient_accumulation_steps == 32
    assert any("grad_accum is not stated" in note for note in found.reading_notes)
    _, (odd,) = read_runs([{"id": "x", **OWN, "gpus": "1", "global_batch": "63"}])
    assert "global_batch '63'" in odd.reason


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("ok", None), ("completed", None), ("", None), ("crashed", "status 'crashed': runs that ended"),
        ("killed", "status 'killed': runs that ended"), ("so-so", "write ok, OOM or failed"),
    ],
)  # fmt: skip
def test_a_status_says_whether_a_run_ended(status: str, says: str | None) -> None:
    found, skipped = read_runs([{"id": "x", **OWN, "gpus": "1", "status": status}])
    assert bool(found) is (says is None)
    assert says is None or says in skipped[0].reason


@pytest.mark.parametrize("status", ["OOM", "out of memory", "CUDA OOM"])
def test_a_status_may_say_that_memory_ran_out(status: str) -> None:
    (entry,) = read_entries([{"id": "x", **OWN, "gpus": "1", "tokens_per_s": "", "status": status}])
    assert entry.out_of_memory == "stated"
    assert entry.run is not None
    _, (both,) = read_runs([{"id": "x", **OWN, "gpus": "1", "status": status}])
    assert "contradict each other" in both.reason
