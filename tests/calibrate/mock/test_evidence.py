"""The script behind results/validation/mock/coverage.md, on one of its sixty simulated cards."""

from __future__ import annotations

import importlib
import statistics
from collections import Counter
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def test_rates_of_shapes_that_were_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar of the page itself is on all sixty; of one, most shapes lie within twice the 80% interval."""
    monkeypatch.syspath_prepend(SCRIPTS)
    evidence = importlib.import_module("mock_evidence")
    rows = evidence.coverage_rows(evidence.GPUS[1], 1, "tiles")
    assert Counter(row.kind for row in rows) == {str(kind): n for kind, n in evidence.UNSEEN_PER_KIND.items()}
    assert statistics.median(abs(row.log_error) for row in rows) < 0.06
    within = [abs(row.log_error) <= 2 * evidence.Z80 * row.log_sd for row in rows]
    assert statistics.mean(within) > 0.8
