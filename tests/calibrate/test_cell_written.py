"""Cells of tables that commas do not separate: a point may group thousands, and messages quote the cell as written."""

from __future__ import annotations

from pathlib import Path

import pytest
from table_rows import one

from tunecast.calibrate.cell_written import Cell, comma_cell, part_of, read_as
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import Entry, read_entries

ROW = {
    "model": "meta-llama/Llama-3.1-8B", "method": "lora", "rank": "16", "lora_targets": "all-linear", "quant": "none",
    "compute_dtype": "bf16", "seq_len": "4096", "packed": "samples fill seq_len", "micro_batch": "2", "gpus": "1",
    "gpu": "H100 SXM", "framework": "TRL", "reserved_or_allocated": "allocated",
}  # fmt: skip
UNPACKED = {"packed": "no", "samples_per_s": "5"}


def of_table(folder: Path, sign: str, **cells: str) -> Entry:
    """The row as it is read from a table whose columns this sign separates."""
    row = {**ROW, **cells}
    (folder / "runs.csv").write_text("\n".join(sign.join(line) for line in (row, row.values())))
    (entry,) = read_entries(read_table(folder / "runs.csv"))
    return entry


@pytest.mark.parametrize("sign", [";", "\t"])
@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({**UNPACKED, "mean_tokens": "1.024"}, "mean_tokens '1.024' may be 1.024 or 1024: write it without a point"),
        ({**UNPACKED, "packed": "no, mean length 1.024"}, "mean_tokens '1.024' may be 1.024 or 1024: write it without"),
        ({"internode_gbps": "3.200"}, "internode_gbps '3.200' may be 3.200 or 3200: write it without a point"),
        ({"internode_gbps": "3.200 Gbit/s"}, "internode_gbps '3.200 Gbit/s' may be 3.200 or 3200: write it without"),
        ({"tokens_per_s": "7,200"}, "tokens_per_s '7,200' may be 7.2 or 7200"),
        ({"step_time_s": "0,05"}, "step_time_s '0,05': 163840 tokens/s on 1 x h100-sxm5-80gb would be an MFU of"),
        ({"samples_per_s": "99,5 per GPU"}, "samples_per_s '99,5 per GPU': 407552 tokens/s"),
        ({"samples_per_s": "0,0051/s"}, "samples_per_s '0,0051/s' would be an MFU of"),
    ],
)
def test_what_may_be_two_numbers_is_refused_with_the_cell_as_written(
    tmp_path: Path, sign: str, cells: dict[str, str], why: str
) -> None:
    entry = of_table(tmp_path, sign, **cells)
    assert entry.run is None
    assert entry.reason.startswith(why)


@pytest.mark.parametrize(
    ("sign", "cells"),
    [
        (";", {**UNPACKED, "mean_tokens": "1,024"}),
        (";", {**UNPACKED, "mean_tokens": "1024"}),
        (";", {**UNPACKED, "mean_tokens": "537.204"}),
        (",", {**UNPACKED, "mean_tokens": "537.204"}),
        (";", {"tokens_per_s": "7200", "internode_gbps": "3,2 Tbps"}),
        (";", {"tokens_per_s": "7200", "internode_gbps": "3200"}),
        (",", {"tokens_per_s": "7200", "internode_gbps": "3.200"}),
    ],
)
def test_what_can_be_one_number_alone_is_read(tmp_path: Path, sign: str, cells: dict[str, str]) -> None:
    """537,204 tokens are more than the length at which samples are cut."""
    entry = of_table(tmp_path, sign, **cells)
    assert entry.run is not None, entry.reason
    assert entry.run.tokens_per_s is not None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("32.256 MiB", "peak_mem_gib '32.256 MiB' may be 32.256 or 32256: write it without a point"),
        ("32.256 MiB per GPU", "peak_mem_gib '32.256 MiB per GPU' may be 32.256 or 32256: write it without a point"),
        ("32,256 MiB", ""),
        ("32256 MiB", ""),
        ("31,5", ""),
        ("31.500", ""),
    ],
)
def test_a_peak_in_mib_with_a_point_is_refused_where_it_may_group(tmp_path: Path, text: str, why: str) -> None:
    entry = of_table(tmp_path, ";", tokens_per_s="7200", peak_mem_gib=text)
    assert entry.run is not None
    assert entry.run.why_no_memory == why
    assert entry.run.peak_bytes == (None if why else 31.5 * 2**30)


def test_a_cell_is_quoted_as_the_table_has_it() -> None:
    cell = comma_cell("tokens_per_s", "7,2")
    assert (cell, f"{cell}", f"{cell!r}") == ("7.2", "7.2", "'7,2'")
    other = read_as("14.4", cell)
    assert (f"{other!r}", other.commas) == ("'7,2'", True)
    assert f"{read_as('14.4', '7.2')!r}" == "'7.2'"
    assert isinstance(part_of(cell, "7"), Cell)
    assert not isinstance(part_of("7.2", "7"), Cell)


@pytest.mark.parametrize(("text", "number"), [("5.1/s", "5.1"), ("5.1 / sec", "5.1"), ("~5.1", "5.1")])
def test_the_unit_of_a_slow_speed_is_not_told_twice(text: str, number: str) -> None:
    row = {"id": "x", **ROW, "tokens_per_s": text}
    (entry,) = read_entries([row])
    assert entry.reason.endswith(f"may be {number} thousand tokens: write the unit, {number}k or {number} tokens/s")
    assert one({**row, "tokens_per_s": f"{number} tokens/s"}).tokens_per_s == float(number)


@pytest.mark.parametrize("text", ["0.001/s", "0.001 /s"])
def test_slow_samples_are_told_in_their_unit(text: str) -> None:
    (entry,) = read_entries([{"id": "x", **ROW, "samples_per_s": text}])
    assert entry.reason.endswith("may be 0.001 thousand samples: write the unit, 0.001 samples/s")
