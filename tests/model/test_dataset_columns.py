"""Training data in Parquet and Arrow: counted as the same samples in a file of JSON lines are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model import dataset, dataset_columns
from tunecast.model.dataset import read_dataset, sample_texts

pyarrow = pytest.importorskip("pyarrow")

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "é" * 8}, {"role": "assistant", "content": "yes"}], "source": "a"},
    {"messages": [{"role": "user", "content": "b" * 70}], "source": None},
]
ALPACA = [{"instruction": "i" * (5 + n), "input": None, "output": "o" * 7, "text": "t" * 12} for n in range(250)]
IDS = [{"input_ids": list(range(n)), "attention_mask": [1] * n} for n in (3, 0, 500)]
SETS = {"chats": CHATS, "alpaca": ALPACA, "ids": IDS}


def as_parquet(path: Path, samples: list[dict[str, Any]]) -> Path:
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(samples), path)
    return path


def as_stream(path: Path, samples: list[dict[str, Any]]) -> Path:
    """As the `datasets` library writes its files."""
    table = pyarrow.Table.from_pylist(samples)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


def as_arrow_file(path: Path, samples: list[dict[str, Any]]) -> Path:
    table = pyarrow.Table.from_pylist(samples)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


WRITERS = {"x.parquet": as_parquet, "x.arrow": as_stream, "X.ARROW": as_arrow_file}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("samples", SETS)
def test_columns_hold_what_lines_hold(samples: str, name: str, tmp_path: Path) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text("\n".join(json.dumps(sample) for sample in SETS[samples]), encoding="utf-8")
    path = WRITERS[name](tmp_path / name, SETS[samples])
    expected, found = read_dataset(lines), read_dataset(path)
    assert (found.samples, found.sizes_bytes, found.whole) == (expected.samples, expected.sizes_bytes, True)
    assert (found.tokenized, found.counted, found.left_out) == (
        expected.tokenized,
        expected.counted,
        expected.left_out,
    )
    assert sample_texts(path, 3) == sample_texts(lines, 3)


def test_files_of_the_datasets_library_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ALPACA).save_to_disk(tmp_path / "saved")
    (written,) = (tmp_path / "saved").glob("*.arrow")
    assert read_dataset(written).samples == len(ALPACA)


@pytest.mark.parametrize("name", WRITERS)
def test_of_a_large_file_the_beginning_is_read_and_all_rows_are_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "READ_BYTES", 100)
    found = read_dataset(WRITERS[name](tmp_path / name, ALPACA))
    assert (found.samples, len(found.sizes_bytes), found.whole) == (250, 100, False)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1 no more", b"\x00" * 64])
def test_a_damaged_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"--dataset {name} (is damaged \(.+\); check|holds no text)") as refused:
        read_dataset(tmp_path / name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_table_without_rows_or_text_is_refused(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / name, [{"label": 1}])
    with pytest.raises(InputError, match="holds no text"):
        read_dataset(path)


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_parquet(tmp_path / "x.parquet", CHATS)
    monkeypatch.setattr(dataset_columns, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"x\.parquet is read with the package pyarrow; type: pip install pyarrow, or"):
        read_dataset(path)
