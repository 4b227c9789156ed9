"""A folder of shards of training data, as the Hub and the ``datasets`` library name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model import dataset
from tunecast.model.amount import resolve_amount
from tunecast.model.dataset import read_dataset, sample_texts
from tunecast.model.run import Run

SHARDS = {1: 40, 2: 120, 3: 80}
"""Samples of each shard."""
LENGTHS = {1: 5, 2: 20, 3: 50}
"""Letters of each shard's samples."""


def write(folder: Path, name: str, samples: int, text: str = "as long as all") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(f'{{"text": "{text}"}}\n' for _ in range(samples)), encoding="utf-8")
    return path


def shards(folder: Path, tail: str = "") -> list[Path]:
    return [
        write(folder, f"train-{number - 1:05d}-of-00003{tail}.jsonl", samples, "x" * LENGTHS[number])
        for number, samples in SHARDS.items()
    ]


@pytest.mark.parametrize("tail", ["", "-0123456789abcdef"])
def test_shards_hold_what_one_file_of_all_holds(tail: str, tmp_path: Path) -> None:
    files = shards(tmp_path / "data", tail)
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(file.read_text(encoding="utf-8") for file in files), encoding="utf-8")
    found, one = read_dataset(tmp_path / "data"), read_dataset(whole)
    assert (found.samples, found.sizes_bytes, found.whole) == (one.samples, one.sizes_bytes, True)
    amount = resolve_amount(Run(method="lora", max_length=64), {"dataset": str(tmp_path / "data")})
    assert amount is not None
    assert amount.how.startswith("240 samples (3 shards; fields text) of 7 tokens")


def test_of_large_shards_as_much_of_each_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "READ_BYTES", 2000)
    monkeypatch.setattr(dataset, "LEAST_READ_BYTES", 1000)
    shards(tmp_path / "data")
    found = read_dataset(tmp_path / "data")
    assert not found.whole
    assert found.samples == pytest.approx(240, rel=0.05)
    assert sum(found.sizes_bytes) / len(found.sizes_bytes) == pytest.approx(28.3, rel=0.1)


def test_a_tokenizer_counts_samples_of_every_shard(tmp_path: Path) -> None:
    shards(tmp_path / "data")
    assert {len(text) for text in sample_texts(tmp_path / "data", 24)} == set(LENGTHS.values())


def test_a_shard_alone_is_told_from_its_set(tmp_path: Path) -> None:
    _, second, _ = shards(tmp_path / "data")
    amount = resolve_amount(Run(method="lora", max_length=64), {"dataset": str(second)})
    assert amount is not None
    assert amount.how.startswith("120 samples (1 shard of 3, the others not counted; fields text) of 5 tokens")


def test_of_the_parts_of_a_data_set_the_first_is_trained_on(tmp_path: Path) -> None:
    shards(tmp_path / "data")
    write(tmp_path / "data", "test-00000-of-00001.jsonl", 3)
    write(tmp_path / "data", "LICENSE.txt", 1)
    write(tmp_path / "data", "dataset_infos.json", 1)
    amount = resolve_amount(Run(method="lora", max_length=64), {"dataset": str(tmp_path / "data")})
    assert amount is not None
    assert amount.how.startswith("240 samples (3 shards, not test; fields text)")
    for part in ("dev", "train"):
        write(tmp_path / "here" / part, "x.jsonl", 2)
    with pytest.raises(InputError, match=r"without data; give for example .*here.train\."):
        read_dataset(tmp_path / "here")


def test_a_folder_of_one_file_is_that_file(tmp_path: Path) -> None:
    file = write(tmp_path / "data", "mine.jsonl", 7)
    (tmp_path / "data" / "README.md").write_text("about", encoding="utf-8")
    found, one = read_dataset(tmp_path / "data"), read_dataset(file)
    assert (found.samples, found.sizes_bytes, found.shards) == (one.samples, one.sizes_bytes, "")


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    first, second, _ = shards(tmp_path / "data")
    other = write(tmp_path / "data", "more.jsonl", 3)
    with pytest.raises(InputError, match=r"several sets of data \(more, train\); give one of their files"):
        read_dataset(tmp_path / "data")
    other.unlink()
    second.write_text('{"text": ', encoding="utf-8")
    with pytest.raises(InputError, match=r"train-00001-of-00003\.jsonl is damaged \(line 1: "):
        read_dataset(tmp_path / "data")
    first.unlink()
    with pytest.raises(InputError, match="holds 2 of the 3 shards of its data, not 00000; fetch the others"):
        read_dataset(tmp_path / "data")
    write(tmp_path / "data", "train-00002-of-00003-ab12.jsonl", 3)
    with pytest.raises(InputError, match="holds a set of data twice; put one copy"):
        read_dataset(tmp_path / "data")
    (tmp_path / "data" / "train-00002-of-00003-ab12.jsonl").unlink()
    first.symlink_to(tmp_path / "evicted.jsonl")
    with pytest.raises(InputError, match=r"holds train-00000-of-00003\.jsonl, which is no file"):
        read_dataset(tmp_path / "data")
    first.unlink()
    (tmp_path / "data" / "train-00000-of-00003.jsonl.gz").write_bytes(b"")
    with pytest.raises(InputError, match=r"holds train-00000-of-00003\.jsonl\.gz, and packed files are not read"):
        read_dataset(tmp_path / "data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty is a folder without data; give a file \(\.jsonl, "):
        read_dataset(tmp_path / "empty")
    with pytest.raises(InputError, match=r"tatsu-lab/alpaca is no file; .* \(a data set of the Hub is fetched first"):
        read_dataset("tatsu-lab/alpaca")


@pytest.mark.parametrize(
    "names", [("0000", "0001"), ("part-00000", "part-00001"), ("part-00000-a1-c000", "part-00001-a1-c000")]
)
def test_numbered_files_are_shards_too(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        write(tmp_path / "data", f"{name}.jsonl", 5)
    write(tmp_path / "data", "cache-0123.jsonl", 7)
    write(tmp_path / "data", "tokenizer.json", 7)
    assert read_dataset(tmp_path / "data").samples == 10


def test_a_line_longer_than_what_is_read_of_a_shard_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "READ_BYTES", 300)
    monkeypatch.setattr(dataset, "LEAST_READ_BYTES", 100)
    for number, length in enumerate((30, 500)):
        write(tmp_path / "data", f"train-{number:05d}-of-00002.jsonl", 2, "x" * length)
    found = read_dataset(tmp_path / "data")
    assert found.samples == 4
    assert found.tokens(1.0, 10_000) == pytest.approx(1060, rel=0.01)
