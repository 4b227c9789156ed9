"""Training data in Parquet and Arrow: counted as the same samples in a file of JSON lines are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model import dataset, dataset_columns
from tunecast.model.amount import resolve_amount
from tunecast.model.dataset import read_dataset, sample_texts
from tunecast.model.run import Run

pyarrow = pytest.importorskip("pyarrow")

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "é" * 8}, {"role": "assistant", "content": "yes"}], "source": "a"},
    {"messages": [{"role": "user", "content": "b" * 70}], "source": None},
]
ALPACA = [{"instruction": "i" * (5 + n), "input": None, "output": "o" * 7, "text": "t" * 12} for n in range(250)]
IDS = [{"input_ids": list(range(n)), "attention_mask": [1] * n} for n in (3, 0, 500)]
SETS = {"chats": CHATS, "alpaca": ALPACA, "ids": IDS}


def rows(samples: list[dict[str, Any]]) -> Any:
    return pyarrow.Table.from_pylist(samples)


def as_parquet(path: Path, table: Any) -> Path:
    from pyarrow import parquet

    parquet.write_table(table, path)
    return path


def as_stream(path: Path, table: Any) -> Path:
    """As the `datasets` library writes its files."""
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


def as_arrow_file(path: Path, table: Any) -> Path:
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


WRITERS = {"x.parquet": as_parquet, "x.arrow": as_stream, "X.ARROW": as_arrow_file}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("samples", SETS)
def test_columns_hold_what_lines_hold(samples: str, name: str, tmp_path: Path) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text("\n".join(json.dumps(sample) for sample in SETS[samples]), encoding="utf-8")
    path = WRITERS[name](tmp_path / name, rows(SETS[samples]))
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
    data = datasets.Dataset.from_list(ALPACA)
    data.save_to_disk(tmp_path / "one")
    data.save_to_disk(tmp_path / "four", num_shards=4)
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "splits")
    (written,) = (tmp_path / "one").glob("*.arrow")
    whole = read_dataset(written)
    assert whole.samples == len(ALPACA)
    for name in ("one", "four"):
        found = read_dataset(tmp_path / name)
        assert (found.samples, found.sizes_bytes, found.whole) == (whole.samples, whole.sizes_bytes, True)
    with pytest.raises(InputError, match=r"without data; give for example .*splits.train\.$"):
        read_dataset(tmp_path / "splits")


@pytest.mark.parametrize("name", WRITERS)
def test_of_a_large_file_the_beginning_is_read_and_all_rows_are_known(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "READ_BYTES", 100)
    monkeypatch.setattr(dataset_columns, "BATCH_ROWS", 100)
    found = read_dataset(WRITERS[name](tmp_path / name, rows(ALPACA)))
    assert (found.samples, len(found.sizes_bytes), found.whole) == (250, 100, False)
    for options in ({}, {"packing": True}):
        amount = resolve_amount(Run(method="lora", max_length=64), {"dataset": str(tmp_path / name), **options})
        assert amount is not None
        assert ", of which the first 100 were read," in amount.how


@pytest.mark.parametrize("name", WRITERS)
def test_a_dictionary_of_texts_is_no_more_than_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch of a column that is stored as a dictionary brings the whole of it."""
    monkeypatch.setattr(dataset, "READ_BYTES", 100_000)
    monkeypatch.setattr(dataset_columns, "BATCH_ROWS", 10)
    texts = [f"{number} " * number for number in range(200)]
    columns = {"plain": pyarrow.array(texts), "encoded": pyarrow.array(texts).dictionary_encode()}
    files = {kind: tmp_path / f"{kind}-{name}" for kind in columns}
    whole, found = (
        read_dataset(WRITERS[name](files[kind], pyarrow.table({"text": column}))) for kind, column in columns.items()
    )
    assert whole.whole
    assert (found.sizes_bytes, found.whole) == (whole.sizes_bytes, True)


ODD = {
    "far": pyarrow.array([2**62] * 2, pyarrow.timestamp("us")),
    "long": pyarrow.array([2**62] * 2, pyarrow.duration("s")),
    "nowhere": pyarrow.array([0, 1], pyarrow.timestamp("s", tz="Mars/Olympus")),
    "picture": pyarrow.array([{"bytes": b"PNG", "path": "a.png"}] * 2),
    "sound": pyarrow.array([b"\x00" * 99] * 2),
    "score": pyarrow.array([1.5, None]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_columns_without_text_are_not_read(name: str, tmp_path: Path) -> None:
    table = pyarrow.table({**ODD, "text": ["one", "three"]})
    found = read_dataset(WRITERS[name](tmp_path / name, table))
    assert (found.sizes_bytes, found.counted, found.left_out) == ((3, 5), ("text",), ())


def test_pictures_and_their_paths_are_no_text(tmp_path: Path) -> None:
    as_parquet(tmp_path / "x.parquet", pyarrow.table({"picture": ODD["picture"]}))
    with pytest.raises(InputError, match="holds no text"):
        read_dataset(tmp_path / "x.parquet")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    as_parquet(tmp_path / "x.parquet", table)
    with pytest.raises(InputError, match=r"is damaged \(two columns are named text\)"):
        read_dataset(tmp_path / "x.parquet")


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
@pytest.mark.parametrize("content", [b"", b"PAR1 no more", b"\x00" * 64])
def test_a_damaged_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"--dataset {name} (is damaged \(.+\); check|holds no text)") as refused:
        read_dataset(tmp_path / name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_table_without_rows_or_text_is_refused(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / name, rows([{"label": 1}]))
    with pytest.raises(InputError, match="holds no text"):
        read_dataset(path)


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_parquet(tmp_path / "x.parquet", rows(CHATS))
    monkeypatch.setattr(dataset_columns, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"x\.parquet is read with the package pyarrow; type: pip install pyarrow, or"):
        read_dataset(path)
