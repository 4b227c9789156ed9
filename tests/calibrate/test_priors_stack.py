"""Rows timed as arrays against the clocks of one forecast at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tunecast.calibrate.priors_fit import Row, predicted_log_s, timed_rows
from tunecast.calibrate.priors_stack import log_seconds
from tunecast.calibrate.published import read_runs, read_table

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"
SOME = ("FM-001", "FM-028", "FM-066", "QW-001", "QW-040", "VL-006")
EFFICIENCY = {"gemm": 0.8, "attention": 0.5, "memory": 0.7, "dequant": 0.4, "link": 0.6}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return timed_rows(read_runs(row for row in read_table(TABLE) if row["id"] in SOME)[0])


def test_rows_as_arrays_take_as_long_as_one_by_one(rows: list[Row]) -> None:
    assert len({row.table.micro_steps for row in rows}) > 1
    together = log_seconds([row.table for row in rows])(EFFICIENCY, 0.4, 1e-5)
    alone = [predicted_log_s(row, EFFICIENCY, 0.4, 1e-5) for row in rows]
    assert together == pytest.approx(np.array(alone), abs=1e-9)
