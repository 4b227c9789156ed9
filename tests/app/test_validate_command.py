"""``tunecast validate``: its output for people and programs, and its exit codes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunecast.calibrate.run_table import read_table
from tunecast.cli.program import program
from tunecast.tables import above_bar

HEAD = "id,model,gpu,method,seq_len,micro_batch,tokens_per_s,peak_mem_gib,reserved_or_allocated,confidence\n"
ROWS = (
    "R-1,meta-llama/Llama-3.1-8B,l40s,qlora,2048,1,{speed},9.3,allocated,\n"
    "R-2,meta-llama/Llama-3.1-8B,l40s,qlora,2048,4,,20,rocm-smi,\n"
    "R-3,meta-llama/Llama-3.1-8B,l40s,prefix,2048,4,2300,,,\n"
    "R-4,meta-llama/Llama-3.1-8B,l40s,lora,2048,1,2300,,,low\n"
)
runner = CliRunner()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(HEAD + ROWS.format(speed=1000))
    return path


def forecast_speed() -> float:
    """What estimate says of R-1."""
    arguments = ["estimate", "meta-llama/Llama-3.1-8B", "--gpu", "l40s", "--method", "qlora", "--max-length", "2048"]
    return float(json.loads(runner.invoke(program, [*arguments, "--json"]).output)[0]["tokens_per_s"]["value"])


def test_json_forecasts_as_estimate_does(table: Path) -> None:
    answer = runner.invoke(program, ["validate", str(table), "--json"])
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert set(found) == {"schema", "rows", "summary", "notes"}
    first, second, third, fourth = found["rows"]
    assert first["speed"]["value"] == pytest.approx(forecast_speed())
    assert first["speed"]["error"] == pytest.approx(forecast_speed() / 1000 - 1)
    assert (first["status"], first["reason"]) == ("scored", None)
    assert second["status"] == "skipped"
    assert "no speed is stated" in second["reason"]
    assert "rocm-smi" in second["reason"]
    assert third["reason"] == "method 'prefix' is not in the vocabulary"
    assert fourth["reason"] == "low confidence"
    assert found["summary"]["speed"]["n"] == found["summary"]["memory"]["n"] == 1


def test_the_bar_decides_the_exit_code(tmp_path: Path) -> None:
    """Measured speed exactly a quarter below the forecast: the error is a third."""
    path = tmp_path / "runs.csv"
    path.write_text(HEAD + ROWS.format(speed=forecast_speed() * 0.75))
    assert runner.invoke(program, ["validate", str(path), "--max-median-error", "0.34"]).exit_code == 0
    missed = runner.invoke(program, ["validate", str(path), "--max-median-error", "0.33", "--json"])
    assert missed.exit_code == 3
    assert "median speed error is 33.3%, above 33%" in missed.stderr
    assert json.loads(missed.stdout)["summary"]["speed"]["median_abs_error"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("error", "bar", "told"),
    [
        (1 / 3, 0.33, "33.3%, above 33%"), (0.0004, 0.0001, "0.04%, above 0.01%"),
        (0.12341, 0.1234, "12.341%, above 12.34%"),
        (0.05, 0.0, "5.0%, above 0%"), (0.2, 0.125, "20.0%, above 12.5%"),
    ],
)  # fmt: skip
def test_an_error_above_the_bar_is_told_with_the_decimals_that_it_takes(error: float, bar: float, told: str) -> None:
    assert above_bar(error, bar) == told


def test_a_bar_for_all_rows_is_refused_beside_one(table: Path) -> None:
    answer = runner.invoke(program, ["validate", str(table), "--explain", "R-1", "--max-median-error", "0.1"])
    assert answer.exit_code == 2
    assert len(answer.stderr.strip().splitlines()) == 1
    assert "--max-median-error is a bar for the median of a table's rows" in answer.stderr


@pytest.mark.parametrize(("typed", "code"), [("34%", 0), ("33 %", 3), ("0", 3), ("1", 0), ("100%", 0)])
def test_a_bar_is_a_share_or_percent(tmp_path: Path, typed: str, code: int) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(HEAD + ROWS.format(speed=forecast_speed() * 0.75))
    assert runner.invoke(program, ["validate", str(path), "--max-median-error", typed]).exit_code == code


@pytest.mark.parametrize(
    ("typed", "told"),
    [("20", "write 0.2 or 20%"), ("1.5", "write 0.015 or 1.5%"), ("150%", "write 0.2"), ("-0.1", "write 0.2"),
     ("nan", "write 0.2"), ("inf", "write 0.2"), ("much", "write 0.2"), ("", "write 0.2")],
)  # fmt: skip
def test_a_bar_that_every_run_meets_is_refused(table: Path, typed: str, told: str) -> None:
    answer = runner.invoke(program, ["validate", str(table), f"--max-median-error={typed}"])
    assert answer.exit_code == 2
    assert len(answer.stderr.strip().splitlines()) == 1
    assert f"--max-median-error {typed} is no share between 0 and 1" in answer.stderr
    assert told in answer.stderr


def test_a_table_that_scores_nothing_meets_no_bar(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(HEAD + ROWS.splitlines()[2] + "\n")
    assert runner.invoke(program, ["validate", str(path)]).exit_code == 0
    answer = runner.invoke(program, ["validate", str(path), "--max-median-error", "0.5"])
    assert answer.exit_code == 3
    assert "no row could be scored" in answer.stderr


def test_the_table_names_rows_groups_and_reasons(table: Path) -> None:
    shown = runner.invoke(program, ["validate", str(table)], env={"COLUMNS": "100"}).output
    for text in ("R-1", "l40s-48gb", "1,000", "method qlora", "3 rows not scored", "low confidence", "speed: 1 row,"):
        assert text in shown
    assert "…" not in shown


def test_one_row_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(HEAD + ROWS.splitlines()[2] + "\n")
    assert "1 row not scored" in runner.invoke(program, ["validate", str(path)]).output


def test_a_table_that_refits_nothing_is_silent(table: Path) -> None:
    assert runner.invoke(program, ["validate", str(table)]).stderr == ""


def test_rows_that_the_priors_were_fitted_to_are_told_where_their_errors_stand(tmp_path: Path) -> None:
    """FM-025 is of the fit, the same run measured at another speed is not."""
    published = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"
    (row,) = [row for row in read_table(published) if row["id"] == "FM-025"]
    path = tmp_path / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(row))
        writer.writeheader()
        writer.writerows([row, {**row, "id": "MINE", "tokens_per_s": f"{float(row['tokens_per_s']) * 1.01:.6g}"}])
    answer = runner.invoke(program, ["validate", str(path)], env={"COLUMNS": "100"})
    lines = [line.split() for line in answer.stdout.splitlines() if line]
    assert "speed, tokens/s (1 in sample)" in answer.stdout
    assert {line[0]: line[-1] for line in lines if line[0] in ("FM-025", "MINE")} == {"FM-025": "yes", "MINE": "no"}
    assert "speed: 2 rows (1 in sample)" in answer.stdout
    assert "those of a fit" in answer.stdout
    found = json.loads(runner.invoke(program, ["validate", str(path), "--json"]).stdout)
    assert {row["id"]: row["in_sample"] for row in found["rows"]} == {"FM-025": True, "MINE": False}
    assert found["summary"]["in_sample_rows"] == 1
    assert found["summary"]["verdicts"]["ran"] == {"right": 2, "of": 2}
    assert found["notes"] == []
    told = runner.invoke(program, ["validate", str(path), "--explain", "FM-025"]).stdout
    assert "the priors were fitted to this run" in told


def test_a_whole_time_is_scored_and_told_and_a_speed_in_flops_is_named(tmp_path: Path) -> None:
    """600 steps of 2,048 tokens in half an hour are 683 tokens/s."""
    path = tmp_path / "runs.csv"
    head = "id,model,gpu,method,seq_len,micro_batch,total_time_h,total_tokens_or_steps,tflops_per_gpu,mfu,url\n"
    run = "meta-llama/Llama-3.1-8B,l40s,qlora,2048,1"
    path.write_text(f"{head}W-1,{run},0.5,600 steps,,,x\nW-2,{run},,,90,0.25,x\nW-3,{run},0.5,,90,,x\n")
    answer = runner.invoke(program, ["validate", str(path)], env={"COLUMNS": "100"})
    shown, told = (" ".join(text.split()) for text in (answer.stdout, answer.stderr))
    assert "1 row whose speed is of the whole wall time" in shown
    assert "needs total_tokens_or_steps beside it" in shown
    assert "Columns that are not read: url, tflops_per_gpu and mfu (the speed of 1 row is stated as" in told
    found = json.loads(runner.invoke(program, ["validate", str(path), "--json"]).stdout)
    rows = found["rows"]
    assert "Columns that are not read: url," in found["notes"][0]
    assert [row["whole_time"] for row in rows] == [True, False, False]
    assert rows[0]["speed"]["measured"] == pytest.approx(600 * 2048 / 1800)
    explained = " ".join(runner.invoke(program, ["validate", str(path), "--explain", "W-1"]).stdout.split())
    assert "- tokens/s are of the whole wall time: 1,228,800 tokens in 0.5 h" in explained


def test_explain_says_how_a_row_was_read(table: Path) -> None:
    shown = runner.invoke(program, ["validate", str(table), "--explain", "R-1"], env={"COLUMNS": "100"}).output
    assert "1 x 2048 tokens" in shown
    assert "tokens/s: measured 1,000" in shown
    parts = json.loads(runner.invoke(program, ["validate", str(table), "--explain", "R-1", "--json"]).output)
    step = parts["forecast"]["step_time_s"]["value"]
    assert sum(parts["forecast"]["time_parts_s"].values()) == pytest.approx(step)
    assert parts["run"]["max_length"] == 2048
    skipped = runner.invoke(program, ["validate", str(table), "--explain", "R-4"]).output
    assert "low confidence" in skipped


def paragraph(folder: Path, **cells: str) -> tuple[str, str]:
    """What a row of these cells is read as, and what of it no cell states."""
    row = {
        "id": "E-1", "model": "meta-llama/Llama-3.1-8B", "gpu": "l40s", "method": "DoRA", "rank": "32",
        "lora_targets": "q_proj, v_proj", "quant": "none", "compute_dtype": "bf16", "seq_len": "2048",
        "packed": "yes", "micro_batch": "1", "gpus": "1", "parallelism": "single", "grad_checkpointing": "yes",
        "attention_impl": "eager", "compile": "no", "framework": "TRL 0.27.1", "optimizer": "", "tokens_per_s": "900",
        **cells,
    }  # fmt: skip
    path = folder / "explained.csv"
    path.write_text(",".join(row) + "\n" + ",".join(f'"{cell}"' for cell in row.values()) + "\n")
    shown = runner.invoke(program, ["validate", str(path), "--explain", "E-1"], env={"COLUMNS": "100"}).output
    told = " ".join(shown.partition("Read as: ")[2].partition("\n-")[0].split())
    read, _, silent = told.partition("Stated by no cell")
    return read, silent


def test_what_tunecast_assumes_is_no_default_of_the_software(tmp_path: Path) -> None:
    """``BitsAndBytesConfig`` has no double quantization of its own accord; TRL states its default."""
    cells = {"method": "QLoRA", "quant": "nf4"}
    _, silent = paragraph(tmp_path, **cells, framework="transformers 5.2")
    theirs, _, assumed = silent.partition("assumed: ")
    assert "double quantization" in assumed
    assert "double quantization" not in theirs
    theirs, _, assumed = paragraph(tmp_path, **cells)[1].partition("assumed: ")
    assert "double quantization" in theirs
    assert not assumed


def test_explain_says_every_part_of_the_run_and_which_no_cell_states(tmp_path: Path) -> None:
    read, silent = paragraph(tmp_path)
    stated = ("method lora DoRA", "rank 32", "adapters on q_proj, v_proj", "weights in bf16", "bf16-autocast",
              "attention eager", "not compiled", "checkpointing", "2,048 tokens")  # fmt: skip
    assert all(words in read and words not in silent for words in stated)
    assert all(words in read and words in silent for words in ("optimizer adamw_torch_fused", "loss nll", "reentrant"))
    sharded = {"method": "LoRA", "gpus": "8", "parallelism": "ZeRO-3", "optimizer": "adamw_8bit"}
    read, silent = paragraph(tmp_path, **sharded, grad_checkpointing="")
    assert all(words in read and words not in silent for words in ("sharding zero3", "optimizer adamw_8bit"))
    assert "checkpointing" in silent
    read, silent = paragraph(tmp_path, method="QLoRA", quant="NF4, double quantization", grad_checkpointing="reentrant")
    assert "base in bnb-4bit nf4; with double quantization" in read
    assert "double quantization" not in silent
    assert "reentrant" not in silent


def test_a_version_that_is_stated_is_not_said_to_be_missing(table: Path) -> None:
    head, row = "framework,source_date,model,method,seq_len,micro_batch,gpu,tokens_per_s\n", "lora,2048,1,l40s,900\n"
    table.write_text(f"{head}TRL 0.15,2025-04,meta-llama/Llama-3.1-8B,{row}")
    shown = runner.invoke(program, ["validate", str(table), "--explain", "row-1"], env={"COLUMNS": "200"}).output
    assert "Defaults of trl 0.15 are not recorded" in shown
    assert "No version is stated" not in shown
    assert "The version of transformers, peft and torch is not stated" in shown


def test_the_table_names_the_first_rows_of_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(HEAD + "".join(f"L-{n},meta-llama/Llama-3.1-8B,l40s,lora,8,1,9,,,low\n" for n in range(7)))
    shown = " ".join(runner.invoke(program, ["validate", str(path)], env={"COLUMNS": "100"}).output.split())
    assert "L-0, L-1, L-2, L-3, L-4 and 2 more" in shown
    assert "L-5" not in shown


def test_the_table_says_why_half_of_a_scored_row_is_left_out(tmp_path: Path) -> None:
    """A counter that is no counter leaves the speed; a half that the row does not state needs no words."""
    rows = "R-1,meta-llama/Llama-3.1-8B,l40s,qlora,2048,1,900,9.3,rocm-smi,\n"
    (tmp_path / "runs.csv").write_text(HEAD + rows + rows.replace("R-1", "R-2").replace("9.3,rocm-smi", ","))
    shown = " ".join(runner.invoke(program, ["validate", str(tmp_path / "runs.csv")]).output.split())
    assert "of scored rows left out rows ids" in shown
    assert "memory: the counter is 'rocm-smi'" in shown
    assert "is stated" not in shown


def test_a_peak_that_contradicts_the_reading_is_told(tmp_path: Path) -> None:
    """8B in 4 bits holds 9.3 GiB as read; 30 GiB speak of 16 or 32 bits, 2 GiB of a smaller model."""
    row = "R-{n},meta-llama/Llama-3.1-8B,l40s,qlora,2048,1,900,{peak},not stated,\n"
    peaks = {1: 9.3, 2: 30, 3: 2, 4: 10}
    (tmp_path / "runs.csv").write_text(HEAD + "".join(row.format(n=n, peak=peak) for n, peak in peaks.items()))
    arguments = ["validate", str(tmp_path / "runs.csv")]
    shown = " ".join(runner.invoke(program, arguments).output.split())
    assert "2 rows whose own peak memory says that other settings may have run than were read" in shown
    assert "(--explain ID): R-2, R-3; median speed error" in shown
    above, below = (runner.invoke(program, [*arguments, "--explain", f"R-{n}"]).output for n in (2, 3))
    assert "above the process of this reading" in " ".join(above.split())
    assert "below the tensors of this reading" in " ".join(below.split())


@pytest.mark.parametrize("arguments", [["--explain", "R-9"], []])
def test_bad_input_is_one_sentence(table: Path, arguments: list[str]) -> None:
    path = table if arguments else table.with_name("absent.csv")
    answer = runner.invoke(program, ["validate", str(path), *arguments])
    assert answer.exit_code == 2
    assert len(answer.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "option", "told"),
    [
        ("runs.csv", ["--record", "r.json"], "--record is about a single run"),
        ("runs.csv", ["--gpu", "h100"], "--gpu is about a single run"),
        ("runs.csv", ["--config", "c.yaml"], "--config is about a single run"),
        ("run.json", ["--explain", "R-1"], "--explain names a row of a table"),
        ("runs.csv", [], "No such file or directory; give a CSV file"),
    ],
)
def test_options_of_the_other_kind_of_file_are_refused(name: str, option: list[str], told: str) -> None:
    answer = runner.invoke(program, ["validate", name, *option])
    assert answer.exit_code != 0
    assert told in str(answer.exception) + answer.output


def test_figures_do_not_depend_on_the_number_of_processors(table: Path) -> None:
    """The refits' sums run in one thread: numpy is not loaded before that is said, and what a user says stays."""
    code = (
        "import os, sys\n"
        "from tunecast.cli.program import program\n"
        "assert 'numpy' not in sys.modules\n"
        f"program(['validate', {str(table)!r}, '--json'], standalone_mode=False)\n"
        "print(os.environ['OMP_NUM_THREADS'], file=sys.stderr)\n"
    )
    plain = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    for more, threads in (({}, "1"), ({"OMP_NUM_THREADS": "2"}, "2")):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={**plain, **more}, capture_output=True, text=True, check=True)
        assert done.stderr.split()[-1] == threads
