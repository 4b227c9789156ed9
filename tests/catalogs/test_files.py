"""Files appear whole or not at all: what breaks half-way leaves the old ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunecast.catalogs.files import write_all, write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("old", "new: ü"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failure_leaves_the_old_file_and_names_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, "new")
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("bad", ["folder", "none/b.yaml"])
def test_when_one_of_several_cannot_be_written_none_is(tmp_path: Path, bad: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as caught:  # noqa: PT011 - which one is compared below
        write_all({tmp_path / "a.yaml": "a", tmp_path / bad: "b"})
    assert caught.value.filename == str(tmp_path / bad)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
