"""Headings of a table of runs: none that states a setting is passed over in silence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunecast.calibrate.run_columns import KEPT, READ, meant_by, unread
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
    assert set(READ) - set(heading) == {"internode_gbps"}


def test_no_known_column_is_another_word_for_one() -> None:
    assert {name: meant_by(name) for name in (*READ, *KEPT) if meant_by(name) not in (None, name)} == {}


@pytest.mark.parametrize(
    ("heading", "column"),
    [
        ("gradient_checkpointing", "grad_checkpointing"),
        ("Activation Checkpointing", "grad_checkpointing"),
        ("quantization", "quant"),
        ("num_gpus", "gpus"),
        ("packing", "packed"),
        ("precision", "compute_dtype"),
        ("tok_per_s", "tokens_per_s"),
        ("tokens/s", "tokens_per_s"),
        ("Tokens/sec/GPU", "tokens_per_s_per_gpu"),
        ("peak VRAM (GB)", "peak_mem_gib"),
        ("lora_rank", "rank"),
        ("optimiser", "optimizer"),
    ],
)
def test_another_word_for_a_column_is_refused_by_both_names(tmp_path: Path, heading: str, column: str) -> None:
    told = f"has the column {heading.lower()!r}, which is not read; if it is {column}, call it so, else drop it."
    with pytest.raises(InputError, match=re.escape(told)):
        read_table(table(tmp_path, f"{NEEDED},{heading}"))


def test_a_needed_column_under_another_name_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'batch_size', which is not read; if it is micro_batch"):
        read_table(table(tmp_path, "model,method,seq_len,batch_size"))


@pytest.mark.parametrize("heading", ["url", "author", "loss", "comment", "speed_of_last_year"])
def test_other_columns_are_passed_over(tmp_path: Path, heading: str) -> None:
    path = table(tmp_path, f"{NEEDED},{heading}")
    assert unread(list(read_table(path)[0])) == [heading]


def test_a_second_word_beside_the_column_itself_does_no_harm(tmp_path: Path) -> None:
    assert read_table(table(tmp_path, f"{NEEDED},gpus,num_gpus"))[0]["num_gpus"] == "x"
