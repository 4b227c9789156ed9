"""A folder of shards of training data, as the Hub and the ``datasets`` library name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.amount import resolve_amount
from tunecast.model.dataset import read_dataset, sample_texts
from tunecast.model.run import Run

SHARDS = {1: 40, 2: 120, 3: 80}
"""Samples of each shard."""


def write(folder: Path, name: str, samples: int, text: str = "as long as all") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(f'{{"text": "{text}"}}\n' for _ in range(samples)), encoding="utf-8")
    return path


def shards(folder: Path, tail: str = "") -> list[Path]:
    return [
        write(folder, f"train-{number - 1:05d}-of-00003{tail}.jsonl", samples) for number, samples in SHARDS.items()
    ]


@pytest.mark.parametrize("tail", ["", "-0123456789abcdef"])
def test_shards_hold_the_samples_of_all(tail: str, tmp_path: Path) -> None:
    files = shards(tmp_path / "data", tail)
    found = read_dataset(tmp_path / "data")
    assert (found.samples, len(found.sizes_bytes), found.whole) == (sum(SHARDS.values()), SHARDS[1], False)
    assert sample_texts(tmp_path / "data", 2) == sample_texts(files[0], 2)
    amount = resolve_amount(Run(method="lora", max_length=64), {"dataset": str(tmp_path / "data")})
    assert amount is not None
    assert amount.how.startswith("240 samples (3 shards; fields text), of which the first 40 were read, of 4 tokens")


def test_a_shard_alone_is_told_from_its_set(tmp_path: Path) -> None:
    _, second, _ = shards(tmp_path / "data")
    amount = resolve_amount(Run(method="lora", max_length=64), {"dataset": str(second)})
    assert amount is not None
    assert amount.how.startswith("120 samples (1 shard of 3, the others not counted; fields text) of 4 tokens")


def test_a_folder_of_one_file_is_that_file(tmp_path: Path) -> None:
    file = write(tmp_path / "data", "mine.jsonl", 7)
    (tmp_path / "data" / "README.md").write_text("about", encoding="utf-8")
    (tmp_path / "data" / "dataset_info.json").write_text("{}", encoding="utf-8")
    assert read_dataset(tmp_path / "data") is read_dataset(file)


def test_what_is_no_set_is_refused(tmp_path: Path) -> None:
    first, *_ = shards(tmp_path / "data")
    other = write(tmp_path / "data", "test-00000-of-00001.jsonl", 3)
    with pytest.raises(InputError, match=f"several sets of data; give one of them, for example {other}, and shards"):
        read_dataset(tmp_path / "data")
    other.unlink()
    first.unlink()
    with pytest.raises(InputError, match="holds 2 of the 3 shards of its data; fetch the others"):
        read_dataset(tmp_path / "data")
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(InputError, match=r"empty is a folder without data; give a file \(\.jsonl, "):
        read_dataset(tmp_path / "empty")
    write(tmp_path / "empty" / "train", "x.jsonl", 2)
    with pytest.raises(InputError, match=r"without data; give for example .*empty.train\."):
        read_dataset(tmp_path / "empty")


def test_an_empty_first_shard_is_refused(tmp_path: Path) -> None:
    first, *_ = shards(tmp_path / "data")
    first.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"train-00000-of-00003\.jsonl holds no text"):
        read_dataset(tmp_path / "data")
