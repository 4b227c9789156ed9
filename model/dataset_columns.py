"""Rows of training data in a columnar file: Parquet, or Arrow as the ``datasets`` library keeps it.

pyarrow reads them, which comes with that library; nothing else here needs it. Batches are read from the beginning until
enough bytes are there; how many rows the whole file has, it says itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunecast.catalogs.errors import InputError

BATCH_ROWS = 100
"""Rows of Parquet read at once: few, since a row may hold a picture."""
PARQUET, ARROW = ".parquet", ".arrow"


def first_rows(file: Path, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """(rows from the beginning until they hold `most_bytes`, rows of the whole file).

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
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(" ".join(str(error).split())) from error


def _from_parquet(file: Path, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as table:
        return _until(table.iter_batches(batch_size=BATCH_ROWS), most_bytes), table.metadata.num_rows


def _from_arrow(file: Path, most_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """A stream of batches, as ``datasets`` writes, or Arrow's file format; mapped, so that counting reads no rows."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            batches = list(pyarrow.ipc.open_stream(source))
        except pyarrow.ArrowInvalid:
            opened = pyarrow.ipc.open_file(source)
            batches = [opened.get_batch(index) for index in range(opened.num_record_batches)]
        return _until(iter(batches), most_bytes), sum(batch.num_rows for batch in batches)


def _until(batches: Iterator[Any], most_bytes: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    read_bytes = 0
    for batch in batches:
        rows += batch.to_pylist()
        read_bytes += batch.nbytes
        if read_bytes >= most_bytes:
            break
    return rows
