"""Linux's page cache: put a file out of it, and look whether it is out."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from pathlib import Path

SCRATCH_VARIABLE = "TUNECAST_SCRATCH_DIR"
"""Environment variable that says where disk trials write; the temporary folder otherwise."""
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
"""Filesystems without a disk behind them."""


def scratch_root() -> Path:
    """Folder for disk trials: the user's choice, else the temporary folder, else one on a disk if that is in memory."""
    chosen = os.environ.get(SCRATCH_VARIABLE)
    if chosen:
        return Path(chosen)
    usual, on_disk = Path(tempfile.gettempdir()), Path("/var/tmp")
    in_memory = filesystem_of(usual) in MEMORY_FILESYSTEMS
    return on_disk if in_memory and os.access(on_disk, os.W_OK) else usual


def filesystem_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Type of the filesystem that holds `path`; None where the kernel does not tell."""
    if not mounts.is_file():
        return None
    resolved = path.resolve()
    best: tuple[int, str | None] = (-1, None)
    for line in mounts.read_text().splitlines():
        _, mounted_on, kind, *_ = line.split()
        if resolved.is_relative_to(mounted_on) and len(mounted_on) >= best[0]:
            best = (len(mounted_on), kind)
    return best[1]


def drop_from_cache(path: Path) -> None:
    """Ask the kernel to forget the file's pages (they are clean: the file was synced)."""
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_frac(path: Path) -> float | None:
    """Share of a file's pages that are in the page cache; None where it cannot be told.

    By mincore(2) over a mapping that nobody touches: it reads nothing. A read that shall not wait (``RWF_NOWAIT``)
    would start readahead, and the next look find what it fetched.
    """
    size = path.stat().st_size
    look = getattr(ctypes.CDLL(None), "mincore", None) if sys.platform == "linux" else None
    if look is None or not size:
        return None
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        failed = look(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first  # else the mapping cannot be closed
    return None if failed else sum(page & 1 for page in pages) / len(pages)
