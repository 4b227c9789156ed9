"""Which files of this machine what a stranger sends may name: those of one folder alone, or all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def confined_to(folder: Path) -> Iterator[None]:
    """Within the block only files under `folder` are read or asked for, whatever an input names."""
    token = _folder.set(folder.resolve())
    try:
        yield
    finally:
        _folder.reset(token)


def may_read(path: Path) -> bool:
    """Whether a file that an input names may be looked for; links are followed."""
    folder = _folder.get()
    if folder is None:
        return True
    try:
        return path.resolve().is_relative_to(folder)
    except (OSError, ValueError, RuntimeError):  # too long, a NUL in it, links in a circle
        return False


def is_there(path: Path, *, file: bool = False) -> bool:
    """Whether a file (or, unless `file`, a folder) is there and may be read."""
    try:
        return may_read(path) and (path.is_file() if file else path.exists())
    except (OSError, ValueError):  # longer than any name of a file, or a NUL in it
        return False
