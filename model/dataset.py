"""How much text a file of training data holds: samples and bytes, without a tokenizer.

Read are ``.jsonl``, ``.json`` (a list), ``.csv``, ``.txt`` (a sample per line), and with pyarrow ``.parquet``,
``.arrow`` and ``.feather``. Of a large file only its beginning is read, of shards as much of each, and the rest
taken to be alike. Tokens are bytes over an assumed number of bytes per token; of samples that hold ``input_ids``,
as trainers keep prepared data, they are known. Of samples with named fields those are counted that trainers train on
(`FIELDS`), since others often say the same once more.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.dataset_columns import ARROW, FEATHER, PARQUET, TOKEN_IDS, first_rows
from tunecast.model.dataset_shards import Shards, shard_count, shards_in
from tunecast.model.factors import Factor
from tunecast.model.kept_samples import CUT, DROPPED, held_out, long_words, pieces
from tunecast.model.phase_rates import assumed_rates
from tunecast.model.read_numbers import number_above_zero
from tunecast.model.units import KIB, MIB

READ_BYTES = 64 * MIB
"""What is read of a file, or of all shards together, at most."""
LEAST_READ_BYTES = 64 * KIB
"""What is read of each of many shards."""
FIELDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("messages",), ("system", "tools")),
    (("conversations",), ("system", "tools")),
    (("prompt", "completion"), ("system",)),
    (("instruction", "output"), ("input", "system", "history")),
    (("instruction", "response"), ("input", "context", "system")),
    (("question", "answer"), ("context", "system")),
    (("question", "response"), ("system", "system_prompt")),
    (("query", "response"), ("system", "history")),
    (("prompt", "response"), ("system",)),
    (("prompt", "answer"), ("system",)),
    (("input", "output"), ("system",)),
    (("text",), ()),
    (("content",), ()),
)
"""What is trained of a sample, by the fields that it must have, first match first, and those that it may have: TRL's
dataset formats (language modelling, prompt and completion, conversations), LLaMA-Factory's alpaca and sharegpt,
axolotl's instruction formats, and the columns of common public sets. A sample with none of them is trained with all its
text."""
PREFERENCES = ("chosen", "rejected")
NOTHING_TO_TOKENIZE = f"--dataset holds {TOKEN_IDS}, so nothing is left to tokenize; leave --tokenizer out."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """Samples of a file or of shards; itself alone its equal, since `read_dataset` remembers what it counted."""

    name: str
    samples: int
    """In the whole file; scaled where only the beginning was read."""
    sizes_bytes: tuple[int, ...]
    """UTF-8 bytes of text of every sample that was read; of a file of token ids, their number."""
    whole: bool
    """Whether all of the file was read."""
    tokenized: bool = False
    """Whether the file holds token ids."""
    counted: tuple[str, ...] = ()
    """Fields of samples whose text was counted; none where a sample is plain text."""
    left_out: tuple[str, ...] = ()
    """Fields with text that were not."""
    shards: str = ""
    """What is said of a set of several shards, and of data of which only the first samples are taken."""
    long: str = CUT
    """What becomes of samples that are longer than a row (`kept_samples`)."""
    held_out: float = 0.0
    """Share, or above 1 number, of samples that are kept for evaluation."""
    held_rows: bool = False
    """Whether such a number is one of packed rows."""

    @property
    def fields_words(self) -> str:
        """`` (fields instruction, output; not text)``, after what is said of shards; nothing of plain text."""
        others = f"; not {', '.join(self.left_out)}" if self.left_out else ""
        fields = f"fields {', '.join(self.counted)}{others}" if self.counted else ""
        told = "; ".join(filter(None, (self.shards, fields)))
        return f" ({told})" if told else ""

    @property
    def read_words(self) -> str:
        """How many samples were read, where not all were."""
        return "" if self.whole else f", of which the first {len(self.sizes_bytes):,} were read"

    def lengths(self, bytes_per_token: float, max_length: int) -> tuple[int, ...]:
        """Tokens of everything that is trained of the samples that were read: of pieces, where long ones are split."""
        return _lengths(self, bytes_per_token, max_length)

    def pieces(self, bytes_per_token: float, max_length: int) -> float:
        """How many such pieces one epoch trains; samples, where none is split or left out."""
        return self._trained(len(self.lengths(bytes_per_token, max_length)), bytes_per_token, max_length)

    def tokens(self, bytes_per_token: float, max_length: int) -> float:
        """Tokens of one epoch."""
        return self._trained(sum(self.lengths(bytes_per_token, max_length)), bytes_per_token, max_length)

    def none_left(self, max_length: int) -> InputError:
        """What is said where rows of so many tokens leave every sample out."""
        return InputError(
            f"--dataset {self.name} has no sample of {max_length} tokens or fewer, and longer ones are left out; raise "
            "the length of rows."
        )

    def mean_tokens(self, bytes_per_token: float, max_length: int) -> float:
        """Tokens of a mean sample, those apart that are left out."""
        lengths = self.lengths(bytes_per_token, max_length)
        return sum(lengths) / (len(lengths) if self.long == DROPPED else len(self.sizes_bytes))

    def held(self, bytes_per_token: float, max_length: int) -> tuple[int, int]:
        """(samples, pieces or rows that are kept for evaluation, of how many)."""
        lengths = self.lengths(bytes_per_token, max_length)
        each = sum(lengths) / max_length if self.held_rows else len(lengths)
        of = math.ceil(each * self.samples / len(self.sizes_bytes))
        return held_out(self.held_out, of), of

    def _trained(self, read: int, bytes_per_token: float, max_length: int) -> float:
        """What one epoch trains of something of which so much was read."""
        held, of = self.held(bytes_per_token, max_length) if self.held_out else (0, 1)
        return read * self.samples / len(self.sizes_bytes) * (of - held) / max(of, 1)

    def kept_words(self, bytes_per_token: float, max_length: int) -> str:
        """What became of samples that were read and are longer than `max_length`, and what is kept for evaluation."""
        held = self.held(bytes_per_token, max_length)[0] if self.held_out else 0
        kept = f", {held:,} {'rows' if self.held_rows else 'samples'} kept for evaluation" if held else ""
        return long_words(self.longer(bytes_per_token, max_length), max_length, self.long) + kept

    def longer(self, bytes_per_token: float, max_length: int) -> int:
        """How many of the samples that were read are longer than `max_length`."""
        return sum(size / bytes_per_token > max_length for size in self.sizes_bytes)


@lru_cache(maxsize=32)
def _lengths(found: Dataset, bytes_per_token: float, most: int) -> tuple[int, ...]:
    sizes = (math.ceil(size / bytes_per_token) for size in found.sizes_bytes)
    return tuple(piece for size in sizes for piece in pieces(size, most, found.long))


@lru_cache(maxsize=16)
def kept(found: Dataset, long: str, most: int | None, held: float, *, held_rows: bool) -> Dataset:
    """The data as they are trained, the first `most` of them; equal questions get the same object."""
    found = replace(found, long=long, held_out=held, held_rows=held_rows and held > 1)
    if most is None or most >= found.samples:
        return found
    told = ", ".join(filter(None, (found.shards, f"the first {most:,} of {found.samples:,}")))
    whole = found.whole or most <= len(found.sizes_bytes)
    return replace(found, samples=most, sizes_bytes=found.sizes_bytes[:most], whole=whole, shards=told)


def read_dataset(path: str | Path) -> Dataset:
    """Count a file or a folder of shards; raises InputError for one that cannot be read or has no sample."""
    found = _files(path)
    stamps = tuple((file.stat().st_size, file.stat().st_mtime_ns) for file in found.files)
    return _counted(Path(path).name, found, stamps)


def _files(path: str | Path) -> Shards:
    """A file, or the shards in a folder."""
    file = Path(path)
    if file.is_dir():
        return shards_in(file, (*READERS, *COLUMNS))
    if not file.is_file():
        is_hub_id = not file.suffix and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path))
        of_hub = " (a data set of the Hub is fetched first: its files, or a folder of its shards)" if is_hub_id else ""
        raise InputError(f"--dataset {path} is no file; give one of {ENDINGS}{of_hub}, or --num-samples instead.")
    return Shards(files=(file,))


def _shard_words(found: Shards) -> str:
    """What is said of a set of several shards, or of one that was given without the others."""
    several, whole = len(found.files), shard_count(found.files[0])
    told = f"{several} shards" if several > 1 else f"1 shard of {whole}, the others not counted" if whole > 1 else ""
    left_out = f"not {', '.join(found.left_out)}" if found.left_out else ""
    return ", ".join(filter(None, (told, left_out)))


@lru_cache(maxsize=16)
def _counted(name: str, found: Shards, _: tuple[tuple[int, int], ...]) -> Dataset:
    counted = _count(name, *_beginnings(found.files))
    return replace(counted, shards=_shard_words(found))


def _beginnings(files: tuple[Path, ...]) -> tuple[list[Any], float]:
    """(samples at the beginnings of files, which share of each file they are)."""
    found = [_of_one(file, max(READ_BYTES // len(files), min(READ_BYTES, LEAST_READ_BYTES))) for file in files]
    found = [(samples, share) for samples, share in found if samples]
    least = min((share for _, share in found), default=1.0)
    return [sample for samples, share in found for sample in samples[: round(len(samples) * least / share)]], least


class NoSamplesError(Exception):
    """A JSON file with anything but a list."""


def _of_one(file: Path, most_bytes: int) -> tuple[list[Any], float]:
    if file.suffix.lower() not in (*READERS, *COLUMNS):
        raise InputError(
            f"--dataset {file.name} is a {file.suffix or 'file without an ending'}, and only {ENDINGS} are "
            "read; convert it, or give --num-samples and --mean-tokens."
        )
    try:
        return _samples(file, most_bytes)
    except NoSamplesError as error:
        raise InputError(
            f"--dataset {file} holds no list of samples, so it is no data; name the file or folder that has them."
        ) from error
    except (ValueError, csv.Error) as error:
        raise InputError(f"--dataset {file.name} is damaged ({error}); check the file.") from error


def _count(name: str, samples: list[Any], share: float) -> Dataset:
    if any(isinstance(sample, dict) and set(PREFERENCES) <= set(sample) for sample in samples):
        raise InputError(
            f"--dataset {name} has pairs of {' and '.join(PREFERENCES)} answers, and preference training is not "
            "built; keep prompt and one answer as prompt and completion."
        )
    if any(isinstance(sample, dict) and TOKEN_IDS in sample for sample in samples):
        return _of_ids(name, samples, share)
    sizes_bytes, read, every = [], dict[str, None](), dict[str, None]()
    for sample in samples:
        kept = trained(sample)
        sizes_bytes.append(sum(len(part.encode()) for part in texts(kept)))
        if isinstance(sample, dict) and not (sample.keys() <= every.keys() and kept.keys() <= read.keys()):
            every |= dict.fromkeys(field for field in sample if texts(sample[field]))
            read |= dict.fromkeys(field for field in kept if texts(kept[field]))
    sizes = tuple(size for size in sizes_bytes if size > 0)
    if not sizes:
        raise InputError(f"--dataset {name} holds no text; give --num-samples with --mean-tokens.")
    return Dataset(
        name=name,
        samples=round(len(sizes) / share),
        sizes_bytes=sizes,
        whole=share == 1.0,
        counted=tuple(read),
        left_out=tuple(field for field in every if field not in read),
    )


def _of_ids(name: str, samples: list[Any], share: float) -> Dataset:
    """A file of token ids, lists of whole numbers in all samples or none; samples with an empty one are none."""
    sizes = []
    for number, sample in enumerate(samples, start=1):
        has = isinstance(sample, dict) and TOKEN_IDS in sample
        ids = sample[TOKEN_IDS] if has else None
        if not (isinstance(ids, list) and all(type(one) is int for one in ids)):
            what = f"{TOKEN_IDS} that are no list of whole numbers" if has else f"no {TOKEN_IDS}"
            raise InputError(
                f"--dataset {name} holds {TOKEN_IDS}, but sample {number} has {what}; mend it, or keep text alone."
            )
        sizes += [len(ids)] if ids else []
    if not sizes:
        raise InputError(f"--dataset {name} holds empty {TOKEN_IDS} alone; check the file.")
    return Dataset(
        name=name,
        samples=round(len(sizes) / share),
        sizes_bytes=tuple(sizes),
        whole=share == 1.0,
        tokenized=True,
        counted=(TOKEN_IDS,),
    )


def _samples(file: Path, most_bytes: int) -> tuple[list[Any], float]:
    """(samples at the beginning of a file, which share of the file they are)."""
    if file.suffix.lower() in COLUMNS:
        rows, total = first_rows(file, most_bytes)
        return rows, len(rows) / total if total else 1.0
    text, whole = _beginning(file, most_bytes)
    share = 1.0 if whole else len(text.encode()) / file.stat().st_size
    return list(READERS[file.suffix.lower()](text)), share


def _beginning(file: Path, most_bytes: int) -> tuple[str, bool]:
    """(what is read of a file, whether that is all of it); of a large one whole lines, of a list in JSON all."""
    whole = file.stat().st_size <= most_bytes or file.suffix.lower() == ".json"
    with file.open(encoding="utf-8", newline="") as stream:
        if whole:
            return stream.read(), True
        text = stream.read(most_bytes)
        return text.rpartition("\n")[0] or text + stream.readline(), False


def bytes_per_token(options: Mapping[str, Any]) -> Factor:
    """What a tokenizer made of the data, one of token ids, else the assumption."""
    measured = options.get("bytes_per_token")
    if options.get("dataset") is not None and read_dataset(str(options["dataset"])).tokenized:
        if measured is not None:
            raise InputError(NOTHING_TO_TOKENIZE)
        return Factor(value=1.0, low=1.0, high=1.0, unit="B", origin=f"the file's own {TOKEN_IDS}")
    if measured is None:
        return assumed_rates()["text_bytes_per_token"]
    value = number_above_zero("--bytes-per-token", measured, "3.9")
    return Factor(value=value, low=value, high=value, unit="B", origin="measured with the tokenizer")


def sample_texts(path: str | Path, most: int) -> list[str]:
    """Text of the first `most` samples, their parts joined; for a tokenizer to count."""
    read_dataset(path)
    files = _files(path).files
    every = _beginnings(files)[0]
    spread = every[:: max(len(every) // most, 1)] if len(files) > 1 else every
    samples = ("\n".join(texts(trained(sample))) for sample in spread)
    return [sample for sample, _ in zip((sample for sample in samples if sample), range(most), strict=False)]


def trained(sample: Any) -> Any:
    """The sample with those of its fields that are trained; itself where it has no names or none that are known."""
    if not isinstance(sample, dict):
        return sample
    for needed, more in _may_be(tuple(sample)):
        if all(texts(sample[field]) for field in needed):
            return {field: sample[field] for field in (*needed, *more)}
    return sample


@lru_cache(maxsize=256)
def _may_be(fields: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """`FIELDS` that a sample with these may have, without the optional ones that it has not."""
    own = set(fields)
    return tuple(
        (needed, tuple(field for field in more if field in own)) for needed, more in FIELDS if own.issuperset(needed)
    )


def texts(value: Any) -> list[str]:
    """Every text in a JSON value, however deep; keys and numbers are not trained on."""
    if isinstance(value, str):
        return [value] if value else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in texts(part)]


def _jsonl(text: str) -> Iterator[Any]:
    """A JSON value a line; a damaged line is named by its number in the file."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                what = str(getattr(error, "msg", error))
                raise ValueError(f"line {number}: {what}, column {getattr(error, 'colno', 1)}") from error
            yield value


def _json(text: str) -> list[Any]:
    found = json.loads(text)
    if not isinstance(found, list):
        raise NoSamplesError
    return found


def _csv(text: str) -> Iterator[Any]:
    return ({name: cell for name, cell in row.items() if cell} for row in csv.DictReader(text.splitlines(True)))


def _txt(text: str) -> Iterator[Any]:
    return (line for line in text.splitlines() if line.strip())


READERS: dict[str, Callable[[str], Iterable[Any]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".txt": _txt,
}
COLUMNS = (PARQUET, ARROW, FEATHER)
ENDINGS = ", ".join((*READERS, *COLUMNS))
