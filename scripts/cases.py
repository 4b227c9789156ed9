"""Write docs/cases from the templates of scripts/known_cases, with tunecast's own figures and outputs.

``{{name}}`` in a template is what ``figures()`` of the case's module says; blocks under ``<!-- output of: ... -->`` are
run like those of README.md. Usage: scripts/cases [a|b|c|d|e|index ...]
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import textwrap
from pathlib import Path

import readme

TEMPLATES = Path(__file__).resolve().parent / "known_cases"
PAGES = readme.DOCS / "cases"
WIDTH = 120
PLACE = re.compile(r"\{\{(\w+)\}\}")


def names() -> list[str]:
    """Every page by its name."""
    return sorted(path.stem for path in TEMPLATES.glob("*.md"))


def figures(name: str) -> dict[str, str]:
    """What the case's module computes; the index needs nothing."""
    if not (TEMPLATES / f"case_{name}.py").exists():
        return {}
    found: dict[str, str] = importlib.import_module(f"known_cases.case_{name}").figures()
    return found


def filled(template: str, values: dict[str, str]) -> str:
    """The template with its places filled; an unknown or an unused name is an error."""
    wanted = set(PLACE.findall(template))
    if wanted != set(values):
        raise KeyError(f"places and figures differ: {sorted(wanted ^ set(values))}")
    paragraphs = (
        wrapped(PLACE.sub(lambda match: values[match[1]], paragraph)) if PLACE.search(paragraph) else paragraph
        for paragraph in template.split("\n\n")
    )
    return "\n\n".join(paragraphs)


def wrapped(paragraph: str) -> str:
    """Prose at the width of the other pages; tables, lists, commands and comments as they are."""
    if paragraph.lstrip()[0] in "|-<`#$":
        return paragraph
    return textwrap.fill(" ".join(paragraph.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def page(name: str) -> str:
    """One finished page."""
    template = (TEMPLATES / f"{name}.md").read_text(encoding="utf-8")
    return readme.refreshed(filled(template, figures(name)).rstrip("\n") + "\n")


if __name__ == "__main__":
    asked = sys.argv[1:] or names()
    if unknown := sorted(set(asked) - set(names())):
        sys.exit(f"no such page: {', '.join(unknown)}; there are {', '.join(names())}")
    os.environ.update(readme.FIXED)
    PAGES.mkdir(parents=True, exist_ok=True)
    for one in asked:
        (PAGES / f"{one}.md").write_text(page(one), encoding="utf-8")
        print(f"docs/cases/{one}.md")
