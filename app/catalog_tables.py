"""``tunecast catalog``: the shipped facts as rows for programs and as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunecast.tables import DASH, count, dash, digits, keep_whole, plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Rows = list[dict[str, Any]]
KINDS = ("gpus", "models", "prices")


def catalog_rows(what: str) -> Rows:
    """Every row of the GPUs or models, under the column names of the data files."""
    from tunecast.catalogs import tables
    from tunecast.catalogs.errors import UnknownNameError

    if what not in KINDS:
        raise UnknownNameError("catalog", what, KINDS, hint=f"There are {', '.join(KINDS)}.")
    return tables.gpu_rows() if what == "gpus" else tables.model_rows()


def catalog_table(what: str, rows: Rows) -> list[RenderableType]:
    """The columns that people choose by, and where the rest is."""
    table = {"gpus": gpu_table, "models": model_table}[what](rows)
    sources = f"Every column, with source and date: tunecast catalog {what} --json"
    return [table, sources]


def _over(value: float | None, unit: float = 1.0) -> str:
    return DASH if value is None else digits(value / unit)


def gpu_table(rows: Rows) -> Table:
    """GPUs: what fits and how fast, all peaks dense."""
    numbers = ("GiB", "GB/s", "bf16", "fp16", "W")
    title = f"{len(rows)} GPUs: usable memory, bandwidth, dense peaks in TFLOP/s with fp32 accumulation, board power"
    table = plain_table("GPU", *numbers, "link", title=title, right=numbers)
    for row in rows:
        table.add_row(
            row["canonical_id"],
            _over(row["usable_gib"]),
            _over(row["memory_bandwidth_gbs"]),
            _over(row["bf16_fp32acc_tflops"]),
            _over(row["fp16_fp32acc_tflops"]),
            _over(row["tdp_w"]),
            dash(row["link_kind"]),
        )
    return keep_whole(table)


def is_built(hf_id: str) -> bool:
    """Whether the formulas cover this model's architecture yet."""
    from tunecast.catalogs.errors import InputError
    from tunecast.catalogs.models import load_models
    from tunecast.model.architectures import architecture_from_row

    try:
        architecture_from_row(load_models()[hf_id])
    except InputError:
        return False
    return True


def model_table(rows: Rows) -> Table:
    """Models: size, shape, and whether a forecast covers them."""
    numbers = ("params", "layers", "length")
    title = f"{len(rows)} models; {DASH} under forecast: not built yet"
    table = plain_table("model", *numbers, "forecast", title=title, right=numbers)
    for row in rows:
        table.add_row(
            row["hf_id"],
            count(row["total_params"]),
            dash(row["num_layers"]),
            dash(row["max_position"]),
            "yes" if is_built(row["hf_id"]) else DASH,
        )
    return keep_whole(table)
