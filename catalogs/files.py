"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

MODE = 0o644
"""Of a new file: readable by all, as an editor leaves it."""


def write_whole(path: Path, text: str) -> None:
    """Write a file beside `path`, then rename it: a crash or a full disk leaves no half of a file, and the old one."""
    write_all({path: text})


def write_all(texts: Mapping[Path, str]) -> None:
    """Write several files: when one cannot be written, none is. Raises OSError that names the one."""
    drafts: dict[Path, Path] = {}
    current = None
    try:
        for current, text in texts.items():
            drafts[current] = _draft(current, text)
        for current, draft in drafts.items():
            os.replace(draft, current)
    except OSError as error:
        if error.errno is not None:
            raise type(error)(error.errno, error.strerror, str(current)) from error
        raise
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def _draft(path: Path, text: str) -> Path:
    """The text in a file beside `path`, on the disk."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, MODE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)
