"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tunecast.catalogs.errors import InputError

MODE = 0o644
"""Of a new file: readable by all, as an editor leaves it."""


def refuse_one_file_twice(files: Iterable[tuple[str, Path | None]]) -> None:
    """Raise InputError where two of the files to write, by the option that names each, are one."""
    seen: dict[str, str] = {}
    for option, path in files:
        if path is None:
            continue
        other = seen.setdefault(os.path.realpath(path), option)
        if other != option:
            raise InputError(
                f"{other} and {option} are both {path}, and one would overwrite the other; name two files."
            )


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
