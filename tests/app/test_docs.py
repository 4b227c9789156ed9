"""Pages under docs/ show what the commands print, and the pages of the cases are what their templates say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CASES = ("a", "b", "c", "d", "e")
NUMBER = re.compile(r"[-+]?\$?\d[\d,.]*(e[-+]?\d+)?[TBM%×]?")
UNIT = re.compile(r"\b(ms|s|min|h|d)\b")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    return script("readme")


def structure(output: str) -> list[str]:
    """Lines without figures, units, rules and widths, so that a refit of the priors does not make a page old."""
    lines = (re.sub(r"\s+", " ", UNIT.sub("", NUMBER.sub("", line))).strip() for line in output.splitlines())
    return [line for line in lines if line and not set(line) <= set("─ –")]


def blocks(readme: ModuleType, page: Path) -> list[re.Match[str]]:
    return list(readme.BLOCK.finditer(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("case", ["d", "e"])
def test_a_shown_output_is_what_the_command_prints(readme: ModuleType, case: str) -> None:
    """One command of two pages: the same lines in the same words; parts of a step may trade places after a refit."""
    block = blocks(readme, ROOT / "docs" / "cases" / f"{case}.md")[0]
    now = readme.output_of(block["command"], None)
    assert sorted(structure(block["body"])) == sorted(structure(now)), "an old output: run scripts/cases"


@pytest.mark.parametrize("case", CASES)
def test_every_case_shows_a_real_command(readme: ModuleType, case: str) -> None:
    shown = blocks(readme, ROOT / "docs" / "cases" / f"{case}.md")
    assert shown
    for block in shown:
        first, *rest = block["body"].splitlines()
        assert first == f"$ {block['command']}"
        assert len(rest) > 5
        assert max(map(len, rest)) <= 100


def test_pages_come_from_their_templates() -> None:
    """Every paragraph of a template without a place or an output is on its page, in order."""
    for template in sorted((ROOT / "scripts" / "known_cases").glob("*.md")):
        page = iter((ROOT / "docs" / "cases" / template.name).read_text(encoding="utf-8").strip().split("\n\n"))
        paragraphs = template.read_text(encoding="utf-8").strip().split("\n\n")
        plain = [paragraph for paragraph in paragraphs if not re.search(r"\{\{|<!-- output of", paragraph)]
        assert len(plain) > 3
        assert [paragraph for paragraph in plain if paragraph not in page] == [], f"run scripts/cases {template.stem}"
    assert not [page for page in PAGES if "{{" in page.read_text(encoding="utf-8")]


def test_a_place_without_a_figure_is_an_error(readme: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setitem(sys.modules, "readme", readme)
    cases = script("cases")
    assert cases.filled("{{x}} GiB", {"x": "3"}) == "3 GiB"
    assert cases.filled("a\n\n{{x}}\nb\n\n- {{x}}\n  c\n", {"x": "3"}) == "a\n\n3 b\n\n- 3\n  c\n"
    with pytest.raises(KeyError, match="y"):
        cases.filled("{{x}} {{y}}", {"x": "3"})
    with pytest.raises(KeyError, match="z"):
        cases.filled("{{x}}", {"x": "3", "z": "4"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\((?!https?:)([^)#][^)]*)\)", page.read_text())]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text() + (ROOT / "docs" / "cases" / "index.md").read_text()
    assert [page.name for page in PAGES if page.name not in ("README.md",) and page.name not in index] == []
