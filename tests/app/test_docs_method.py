"""Every function and file that docs/method.md names exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([a-z_0-9]+)\.([A-Za-z_0-9]+)`", PAGE)))


def test_the_page_names_functions() -> None:
    assert len(NAMES) > 50


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_named_function_exists_and_says_what_it_does(module: str, name: str) -> None:
    found = getattr(import_module(f"tunecast.model.{module}"), name)
    assert found.__doc__


def test_named_files_exist() -> None:
    files = re.findall(r"`((?:calibrate|model|app)/[a-z_/]+\.py)`", PAGE)
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []
