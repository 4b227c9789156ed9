"""Rows timed as arrays against the clocks of one forecast at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tunecast.calibrate.priors_problem import Row, predicted_log_s, timed_rows
from tunecast.calibrate.priors_stack import MOVED, SETTLED_AFTER, log_seconds
from tunecast.calibrate.published import read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.model.host import HOST_COLUMNS
from tunecast.model.links import SEGMENTS

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"
SOME = ("FM-001", "FM-028", "FM-066", "QW-001", "QW-040", "QW-070", "VL-006", "NB-017")
PARAMS = {"gemm": 0.8, "attention": 0.5, "memory": 0.7, "dequant": 0.4, "link": 0.6}
CLOCKS = {"exposed_frac": 0.4, "exposed_late_frac": 0.8, "host_s_per_launch": 1e-5, "host_hooks": 20.0}
CLOCKS |= {
    "host_units": 25.0,
    "host_recompute": 1.6,
    "host_backward": 0.7,
    "host_dequant": 5.0,
    "host_calls": 2.0,
    "host_layers": 6.0,
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return timed_rows(read_runs(row for row in read_table(TABLE) if row["id"] in SOME)[0])


@pytest.mark.parametrize("host_s_per_launch", [2e-6, 1e-5, 5e-5])
def test_rows_as_arrays_take_as_long_as_one_by_one(rows: list[Row], host_s_per_launch: float) -> None:
    """Those with many micro-steps too, of which only the first few are followed."""
    assert max(row.table.micro_steps for row in rows) > 10 * SETTLED_AFTER
    params = {**PARAMS, **CLOCKS, "host_s_per_launch": host_s_per_launch}
    together = log_seconds([row.table for row in rows])(params)
    alone = [predicted_log_s(row, params) for row in rows]
    assert together == pytest.approx(np.array(alone), abs=1e-6)


def test_a_slower_host_is_felt_by_rows_that_wait_for_it(rows: list[Row]) -> None:
    timed, params = log_seconds([row.table for row in rows]), {**PARAMS, **CLOCKS, "host_s_per_launch": 5e-5}
    slower = np.zeros((len(rows), len(MOVED)))
    slower[:, MOVED.index("host")] = np.log(2.0)
    plain, slow = timed(params), timed(params, slower)
    waits = next(i for i, row in enumerate(rows) if row.run.id == "QW-001")
    works = next(i for i, row in enumerate(rows) if row.run.id == "FM-001")
    assert slow[waits] - plain[waits] == pytest.approx(np.log(2.0), abs=0.02)
    assert 0.0 < slow[works] - plain[works] < 0.03, "what the Trainer keeps the host for, no work hides"
    own = rows[works].table
    bare = replace(own, launches=np.array(own.launches), meets=np.zeros_like(own.meets))
    bare.launches[:, HOST_COLUMNS.index("walks")] = 0.0
    timed = log_seconds([bare])
    assert timed(params, slower[:1]) == pytest.approx(timed(params), abs=1e-9)


@pytest.mark.parametrize("kind", ["gemm", "attention", "memory", "dequant", "link"])
def test_a_slower_kind_of_work_takes_as_long_as_at_a_lower_efficiency(rows: list[Row], kind: str) -> None:
    """Half the efficiency is twice the time of that kind, whichever of the two says so."""
    timed = log_seconds([row.table for row in rows])
    slower = np.zeros((len(rows), len(MOVED)))
    slower[:, MOVED.index(kind)] = np.log(2.0)
    params = {**PARAMS, **CLOCKS}
    assert timed(params, slower) == pytest.approx(timed({**params, kind: params[kind] / 2.0}), abs=1e-9)


def test_zero3_visits_every_product_of_a_layer_in_forward_recompute_and_backward(rows: list[Row]) -> None:
    """Qwen-72B with adapters on c_attn, c_proj, w1 and w2: 80 layers of 5 maps, each with two adapter products."""
    (row,) = (row for row in rows if row.run.id == "QW-070")
    visits = dict(zip(SEGMENTS, row.table.launches[:, HOST_COLUMNS.index("hooks")], strict=True))
    forward, backward, update = visits["forward"], visits["backward"], visits["optimizer"]
    layers, maps = 80, 5
    assert forward == pytest.approx(layers * maps * 3 + 1)
    assert forward < backward <= 2 * forward
    assert update == 0.0
    others = [other for other in rows if other.run.run.sharding != "zero3"]
    assert all(other.table.launches[:, HOST_COLUMNS.index("hooks")].sum() == 0.0 for other in others)
