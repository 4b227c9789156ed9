"""Rows of training data in a columnar file: Parquet, or Arrow as the ``datasets`` library keeps it.

pyarrow reads them, which comes with that library; nothing else here needs it. Batches of the columns that hold text or
token ids are read from the beginning until enough bytes are there; how many rows the whole file has, it says itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunecast.catalogs.errors import InputError

BATCH_ROWS = 1000
"""Rows of Parquet read at once."""
PARQUET, ARROW, FEATHER = ".parquet", ".arrow", ".feather"
TOKEN_IDS = "input_ids"


def first_rows(file: Path, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """(rows from the beginning until they hold `most_bytes`, rows of the whole file); of their columns those alone that
    hold text or `TOKEN_IDS`.

    Raises InputError without pyarrow, ValueError for a damaged file.
    """
    if find_spec("pyarrow") is None:
        raise InputError(
            f"--dataset {file.name} is read with the package pyarrow; type: pip install pyarrow, or give --num-samples "
            "and --mean-tokens."
        )
    import pyarrow

    try:
        return _from_parquet(file, most_bytes) if file.suffix.lower() == PARQUET else _from_arrow(file, most_bytes)
    except (pyarrow.ArrowException, OSError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def _from_parquet(file: Path, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as table:
        names = _read_columns(table.schema_arrow)
        batches = table.iter_batches(batch_size=BATCH_ROWS, columns=names) if names else ()
        return _until(batches, most_bytes), table.metadata.num_rows


def _from_arrow(file: Path, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """A stream of batches, as ``datasets`` writes, or Arrow's file format; mapped, so that counting reads no rows."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            batches = list(pyarrow.ipc.open_stream(source))
        except pyarrow.ArrowInvalid:
            opened = pyarrow.ipc.open_file(source)
            batches = [opened.get_batch(index) for index in range(opened.num_record_batches)]
        names = _read_columns(batches[0].schema) if batches else []
        pieces = (batch.slice(start, BATCH_ROWS) for batch in batches for start in range(0, len(batch), BATCH_ROWS))
        rows = _until((piece.select(names) for piece in pieces), most_bytes) if names else []
        return rows, sum(len(batch) for batch in batches)


def _read_columns(schema: Any) -> list[str]:
    """Columns with text, however deep, or token ids."""
    twice = [name for name, times in Counter(schema.names).items() if times > 1]
    if twice:
        raise ValueError(f"two columns are named {twice[0]}")
    return [field.name for field in schema if field.name == TOKEN_IDS or _has_text(field.type)]


def _has_text(kind: Any) -> bool:
    """Whether a type holds text; a struct with bytes is a picture or a sound with its path."""
    from pyarrow import types

    if types.is_struct(kind):
        inside = [field.type for field in kind]
        has_bytes = any(types.is_binary(each) or types.is_large_binary(each) for each in inside)
        return not has_bytes and any(_has_text(each) for each in inside)
    if types.is_map(kind):
        return False
    inner = getattr(kind, "value_type", None)
    return _is_text(kind) if inner is None else _has_text(inner)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    views = getattr(types, "is_string_view", lambda _: False)  # since pyarrow 16
    return types.is_string(kind) or types.is_large_string(kind) or views(kind)


def _until(batches: Iterable[Any], most_bytes: int) -> list[dict[str, Any]]:
    """Rows of the first batches that hold so many bytes, dictionaries written out: each batch has the whole of one."""
    import pyarrow

    rows: list[dict[str, Any]] = []
    read_bytes = 0
    for batch in batches:
        columns = [
            column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
            for column in batch.columns
        ]
        plain = pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)
        rows += plain.to_pylist()
        read_bytes += plain.nbytes
        if read_bytes >= most_bytes:
            break
    return rows
