"""Training data in several files: shards as the ``datasets`` library and the Hub name them, ``NAME-00000-of-00004``."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from tunecast.catalogs.errors import InputError

_SHARD = re.compile(r"(?P<set>.+)-(?P<number>\d{5})-of-(?P<all>\d{5})(-[0-9a-f]+)?")
_ABOUT_DATA = ("dataset_info.json", "state.json", "dataset_dict.json")
"""What ``datasets`` writes beside the data."""


def shards_in(folder: Path, endings: Collection[str]) -> list[Path]:
    """Files of the one set that a folder holds, in order; a file alone is a set of one.

    Raises InputError for a folder with no data, with several sets, or without some of a set's shards.
    """
    files = sorted(each for each in folder.iterdir() if each.suffix.lower() in endings and each.name not in _ABOUT_DATA)
    sets = {_set_of(file): file for file in reversed(files)}
    if not sets:
        below = sorted(each.parent for each in folder.glob("*/*") if each.suffix.lower() in endings)
        instead = f"give for example {below[-1]}" if below else f"give a file ({', '.join(endings)})"
        raise InputError(f"--dataset {folder} is a folder without data; {instead}.")
    if len(sets) > 1:
        raise InputError(
            f"--dataset {folder} is a folder of several sets of data; give one of them, for example {files[0]}, and "
            "shards in a folder of their own."
        )
    wanted = shard_count(files[0])
    if len(files) != wanted:
        raise InputError(f"--dataset {folder} holds {len(files)} of the {wanted} shards of its data; fetch the others.")
    return files


def shard_count(file: Path) -> int:
    """How many shards the set of a file has, by its name."""
    found = _SHARD.fullmatch(file.stem)
    return int(found["all"]) if found else 1


def _set_of(file: Path) -> tuple[str, int, str]:
    found = _SHARD.fullmatch(file.stem)
    return (found["set"] if found else file.stem), shard_count(file), file.suffix.lower()
