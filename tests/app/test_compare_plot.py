"""The picture of `compare`: every share the catalog knows, device by device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunecast.against_catalog import CatalogComparison, Quantity
from tunecast.catalogs.errors import InputError
from tunecast.compare_plot import plot_shares

pytest.importorskip("matplotlib")


def comparison(device: str, **measured: float) -> CatalogComparison:
    known = [
        Quantity(name=name, unit="GB/s", measured=value, catalog=100.0, spread_frac=0.0, verdict="ok")
        for name, value in measured.items()
    ]
    unknown = Quantity(name="launch", unit="us", measured=5.0, catalog=None, spread_frac=0.0, verdict="")
    return CatalogComparison(
        record=f"/somewhere/{device}.json", device=device, quantities=(*known, unknown), flags=(), outcomes={}
    )


def test_every_share_is_drawn_for_every_device(tmp_path: Path) -> None:
    path = plot_shares([comparison("one", copy=91.0, read=83.0), comparison("two", copy=77.0)], tmp_path / "a.svg")
    drawn = path.read_text()
    for words in ("91%, 91.0 GB/s", "83%, 83.0 GB/s", "77%, 77.0 GB/s", "one (one.json)", "two (two.json)"):
        assert words in drawn
    assert "launch" not in drawn
    assert "/somewhere" not in drawn


def test_a_device_without_a_datasheet_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to draw"):
        plot_shares([comparison("cpu")], tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())
