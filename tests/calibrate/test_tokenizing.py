"""Bytes per token of a file, counted with a tokenizer whose tokens are words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunecast.asking import with_tokenizer
from tunecast.catalogs.errors import InputError

tokenizers = pytest.importorskip("tokenizers")


def write_tokenizer(path: Path) -> Path:
    """A token for every word between blanks; unknown words are one too."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(path))
    return path


def write_data(folder: Path) -> str:
    """24 bytes of text (é has two, a line between the two texts), 5 words."""
    path = folder / "data.jsonl"
    samples = [{"prompt": "one two", "answer": "three"}, {"text": "four ééé"}, {"text": ""}]
    path.write_text("\n".join(json.dumps(sample) for sample in samples), encoding="utf-8")
    return str(path)


def test_bytes_per_token_is_counted(tmp_path: Path) -> None:
    from tunecast.calibrate.tokenizing import bytes_per_token

    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    assert bytes_per_token(write_data(tmp_path), tokenizer) == pytest.approx(24 / 5)


def test_the_tokenizer_beside_a_local_config_counts(tmp_path: Path) -> None:
    data = write_data(tmp_path)
    assert with_tokenizer(str(tmp_path / "config.json"), {"dataset": data}) == {"dataset": data}
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for model in (tmp_path, tmp_path / "config.json"):
        assert with_tokenizer(str(model), {"dataset": data})["bytes_per_token"] == pytest.approx(4.8)


def test_token_ids_leave_nothing_to_count(tmp_path: Path) -> None:
    data, tokenizer = tmp_path / "ids.jsonl", write_tokenizer(tmp_path / "tokenizer.json")
    data.write_text('{"input_ids": [1, 2, 3]}\n', encoding="utf-8")
    with pytest.raises(InputError, match="nothing is left to tokenize; leave --tokenizer out"):
        with_tokenizer("x", {"dataset": str(data), "tokenizer": str(tokenizer)})
    assert with_tokenizer(str(tmp_path), {"dataset": str(data)}) == {"dataset": str(data)}


def test_what_cannot_count_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}", encoding="utf-8")
    for tokenizer, words in ((str(broken), "cannot be read"), (str(tmp_path / "none.json"), "is no file")):
        with pytest.raises(InputError, match=words):
            with_tokenizer("gpt2", {"dataset": write_data(tmp_path), "tokenizer": tokenizer})
    with pytest.raises(InputError, match="add --dataset FILE"):
        with_tokenizer("gpt2", {"tokenizer": str(broken)})
