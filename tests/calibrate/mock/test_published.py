"""Mocks behave as published kernels do, and every hidden constant says where its range comes from."""

from __future__ import annotations

import ast
import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tunecast.calibrate.mock.draw as draw_module
from tunecast.calibrate.mock.card import card_of
from tunecast.calibrate.mock.published import kernels
from tunecast.calibrate.mock.ranges import STATUSES, evidence, tags
from tunecast.catalogs.errors import NotSupportedError
from tunecast.catalogs.gpus import load_gpus

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "results" / "validation" / "mock" / "physics.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mock_physics", ROOT / "scripts" / "mock_physics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mock_physics"] = module
    spec.loader.exec_module(module)
    return module


def drawn_names() -> set[str]:
    """Names of all constants that `draw.py` draws, read from its code."""
    calls = (n for n in ast.walk(ast.parse(Path(draw_module.__file__).read_text())) if isinstance(n, ast.Call))
    drawn = (n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "draw")
    return {arg.value for n in drawn for arg in n.args if isinstance(arg, ast.Constant)}


def test_every_drawn_constant_has_a_source_or_is_called_assumed() -> None:
    known = evidence()
    assert drawn_names() == set(known.constants)
    for constant in known.constants.values():
        assert constant.status in STATUSES
        assert bool(constant.measured) == (constant.status == "measured"), constant.name
        assert {key for m in constant.measured for key in m.sources} <= set(known.sources), constant.name


def test_page_shows_every_constant_and_source_of_today(script: ModuleType) -> None:
    """The committed page is made from the committed ranges."""
    shown = PAGE.read_text(encoding="utf-8")
    assert "\n".join(script.constant_lines()) in shown
    for kernel in kernels():
        assert kernel.source in evidence().sources
        assert f"[{kernel.source}]" in shown


def test_every_simulated_card_finds_a_range_of_every_constant() -> None:
    checked = 0
    for gpu in load_gpus().values():
        try:
            card = card_of(gpu)
        except NotSupportedError:
            continue
        checked += 1
        for constant in evidence().constants.values():
            found = constant.of(tags(card))
            assert 0.0 < found.low <= found.high, (gpu.id, constant.name)
    assert checked > 50


BARS = {"product": 0.06, "attention": 0.06, "memory": 0.10}
"""Largest distance of the mocks' median over published from 1; hosts and single figures differ more than that."""


@pytest.mark.parametrize("kind", BARS)
def test_median_mock_is_what_was_published(script: ModuleType, kind: str) -> None:
    rows = script.compared([k for k in kernels() if k.kind == kind], seeds=range(5))
    ratios = [row.ratio for row in rows]
    assert abs(statistics.median(ratios) - 1.0) < BARS[kind]
    assert statistics.median(abs(ratio - 1.0) for ratio in ratios) < 0.12


def test_hosts_are_as_slow_as_measured_ones(script: ModuleType) -> None:
    """A product in a loop takes 3 to 17 us on published machines, a kernel of a decoder layer 12 to 40 us."""
    rows = script.compared([k for k in kernels() if k.kind == "host"])
    assert 0.6 < statistics.median(row.ratio for row in rows) < 1.6
    assert sum(row.inside for row in rows) >= len(rows) - 2
