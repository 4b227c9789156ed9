"""Training data in a folder: one file, or the shards that the ``datasets`` library and the Hub write and name
``NAME-00000-of-00004``."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tunecast.catalogs.errors import InputError

_NUMBERED = re.compile(r"(part|shard|data|train)?[-_]?\d{1,6}([-.].*)?")
"""Shards that do not say how many there are, as Spark and the Hub's own conversion name them."""
_SHARD = re.compile(r"(?P<set>.+)-(?P<number>\d{5})-of-(?P<all>\d{5})(-[0-9a-f]+)?")
_BESIDE = re.compile(
    r"(licen[cs]e|readme|dataset_infos?|state|dataset_dict|metadata|requirements|cache|tokenizer|special_tokens|vocab|config)"
    r"([-_.].*)?", re.IGNORECASE
)  # fmt: skip
"""What lies beside data and is none."""
_PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
TRAINED = "train"
_SPLITS = (TRAINED, "validation", "valid", "val", "dev", "eval", "test")
"""What the parts of a data set are called, of which the first is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The files of one set, in order."""

    files: tuple[Path, ...]
    left_out: tuple[str, ...] = ()
    """Other parts of the data set, which are not trained on."""


def shards_in(folder: Path, endings: Collection[str]) -> Shards:
    """The set that a folder holds; a file alone is a set of one, and of a set's known parts it is ``train``.

    Raises InputError for a folder with no data, with several sets, with packed files, or without some shards.
    """
    files = sorted(each for each in folder.iterdir() if not _BESIDE.fullmatch(each.name))
    packed = [each.name for each in files if each.suffix.lower() in _PACKED]
    if packed:
        raise InputError(f"--dataset {folder} holds {packed[0]}, and packed files are not read; unpack it.")
    sets: dict[str, list[Path]] = {}
    for file in files:
        if file.suffix.lower() in endings:
            sets.setdefault(_set_of(file), []).append(file)
    if not sets:
        raise InputError(f"--dataset {folder} is a folder without data; {_instead(folder, endings)}.")
    if len(sets) > 1 and not (TRAINED in sets and set(sets) <= set(_SPLITS)):
        raise InputError(
            f"--dataset {folder} is a folder of several sets of data ({', '.join(sets)}); give one of their files, or "
            "put one set into a folder of its own."
        )
    name = TRAINED if TRAINED in sets else next(iter(sets))
    _check_complete(folder, sets[name])
    return Shards(files=tuple(sets[name]), left_out=tuple(other for other in sets if other != name))


def shard_count(file: Path) -> int:
    """How many shards the set of a file has, by its name."""
    found = _SHARD.fullmatch(file.stem)
    return int(found["all"]) if found else 1


def _set_of(file: Path) -> str:
    found = _SHARD.fullmatch(file.stem)
    if found:
        return found["set"]
    return TRAINED if _NUMBERED.fullmatch(file.stem) else file.stem


def _check_complete(folder: Path, files: list[Path]) -> None:
    """Raises InputError for shards of which some are missing, there twice, or no files."""
    gone = next((file for file in files if not file.is_file()), None)
    if gone is not None:
        raise InputError(f"--dataset {folder} holds {gone.name}, which is no file; fetch it again.")
    found = [each for file in files if (each := _SHARD.fullmatch(file.stem))]
    numbers, counts = {int(each["number"]) for each in found}, {int(each["all"]) for each in found}
    copies = len(numbers) < len(files) if found else len({file.suffix.lower() for file in files}) > 1
    if copies or len(counts) > 1:
        raise InputError(f"--dataset {folder} holds a set of data twice; put one copy into a folder of its own.")
    missing = sorted(set(range(max(counts, default=0))) - numbers)
    if missing:
        raise InputError(
            f"--dataset {folder} holds {len(files)} of the {max(counts)} shards of its data, not {missing[0]:05d}; "
            "fetch the others."
        )


def _instead(folder: Path, endings: Collection[str]) -> str:
    """What to give instead of a folder whose data lie deeper, those that are trained on first."""
    below = {each.parent for each in folder.glob("*/*") if each.suffix.lower() in endings}
    if not below:
        return f"give a file ({', '.join(endings)})"
    return f"give for example {min(below, key=lambda path: (path.name != TRAINED, path.name))}"
