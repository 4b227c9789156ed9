"""``tunecast validate``: its output for people and programs, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunecast.cli.program import program

HEAD = "id,model,gpu,method,seq_len,micro_batch,tokens_per_s,peak_mem_gib,reserved_or_allocated,confidence\n"
ROWS = (
    "R-1,meta-llama/Llama-3.1-8B,l40s,qlora,2048,1,{speed},9.3,allocated,\n"
    "R-2,meta-llama/Llama-3.1-8B,l40s,qlora,2048,4,,20,nvidia-smi,\n"
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
    assert set(found) == {"schema", "rows", "summary"}
    first, second, third, fourth = found["rows"]
    assert first["speed"]["value"] == pytest.approx(forecast_speed())
    assert first["speed"]["error"] == pytest.approx(forecast_speed() / 1000 - 1)
    assert (first["status"], first["reason"]) == ("scored", None)
    assert second["status"] == "skipped"
    assert "no speed is stated" in second["reason"]
    assert "nvidia-smi" in second["reason"]
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
    assert "median speed error is 33.3%, above 33.0%" in missed.stderr
    assert json.loads(missed.stdout)["summary"]["speed"]["median_abs_error"] == pytest.approx(1 / 3)


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


@pytest.mark.parametrize("arguments", [["--explain", "R-9"], []])
def test_bad_input_is_one_sentence(table: Path, arguments: list[str]) -> None:
    path = table if arguments else table.with_name("absent.csv")
    answer = runner.invoke(program, ["validate", str(path), *arguments])
    assert answer.exit_code == 2
    assert len(answer.stderr.strip().splitlines()) == 1
