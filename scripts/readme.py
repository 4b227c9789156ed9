"""Refresh the outputs that README.md and the pages under docs/ show, so that they are what the commands really print.

A block under ``<!-- output of: tunecast ARGUMENTS -->`` (optionally ``; first N lines``) is replaced by the
command and its output at 100 columns; the table between ``<!-- figures -->`` and ``<!-- end of figures -->`` is
made from the files under ``results/``. ``tests/app/test_readme.py`` and ``test_docs.py`` compare. Run: scripts/readme
(`scripts/cases` first: it writes the pages of docs/cases, outputs included.)
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent.parent / "README.md"
DOCS = README.parent / "docs"
BLOCK = re.compile(
    r"(?P<mark><!-- output of: (?P<command>tunecast [^;\n]*?)(?:; first (?P<lines>\d+) lines)? -->\n)"
    r"```\n(?P<body>.*?)```\n",
    re.DOTALL,
)


FIXED = {"SOURCE_DATE_EPOCH": "1795132800", "TUNECAST_CACHE_DIR": os.devnull}
"""Outputs of 2026-11-20 with the prices that ship: the age of a price must not change them from day to day."""

FIGURES = re.compile(r"<!-- figures -->\n.*?<!-- end of figures -->\n", re.DOTALL)
CARDS = tuple(Path("results/validation") / folder / "gpu.json" for folder in ("gpu-h100", "gpu", "gpu-h200-2"))
CPU = Path("results/validation/cpu/cpu.json")
MOCK_FORECASTS = Path("results/validation/mock/forecasts.json")
MOCK_DIVERSE = Path("results/validation/mock/diverse.json")
MOCK_PRIORS = Path("results/validation/mock/without_calibration.json")
MOCK_COVERAGE = Path("results/validation/mock/coverage.json")
TIME = Path("results/validation/time.json")
MEMORY = Path("results/validation/memory.json")
UNSEEN = Path("results/validation/unseen.json")


def percent(value: float) -> str:
    """A fraction as people read it."""
    return f"{value:.1%}"


def loaded(path: Path) -> Any:
    """One file of results, None where it does not exist."""
    full = README.parent / path
    return json.loads(full.read_text(encoding="utf-8")) if full.exists() else None


def measured_row(what: str, content: Any, page: Path, of: str = "") -> list[str]:
    """Errors of forecasts of measured runs; `of` begins the names of a part of them."""
    s = content["summary"]
    errors = [percent(s[f"{of}{name}"]) for name in ("median_abs_error", "worst_abs_error", "inside_80_interval")]
    return [what, str(s[f"{of}runs"]), *errors, f"[{page.parent.name}]({page.parent}/README.md)"]


def measured_again(content: Any) -> str:
    """How far the same measurement is from itself."""
    s = content["summary"]
    return f"the same measured again: {percent(s['noise_floor_median'])}, worst {percent(s['noise_floor_worst'])}"


def card_figures(content: Any, page: Path) -> list[str]:
    """Forecast against measurement on a real GPU."""
    when = datetime.strptime(content["record"].split("_")[1], "%Y%m%dT%H%M%SZ").strftime("%Y-%m-%d %H:%M")
    what = f"step time on an {content['card']}, calibrated {when} ({measured_again(content)})"
    return measured_row(what, content, page)


def steady_figures(content: Any, page: Path) -> list[str]:
    """Of the same runs, those whose steps and repetitions scatter little."""
    return measured_row("of these, runs whose steps scatter by 2% at most", content, page, of="steady_")


def cpu_figures(content: Any) -> list[str]:
    """Forecast against measurement on a real processor."""
    return measured_row(f"step time on a real CPU ({measured_again(content)})", content, CPU)


def mock_figures(content: Any) -> list[str]:
    """Whole models forecast from shallow calibrations of simulated cards."""
    s = content["summary"]
    errors = [percent(s[name]) for name in ("median_abs_error", "worst_abs_error", "coverage")]
    return [
        "step time of deep models on simulated GPUs, calibrated at 4 layers or fewer",
        str(s["rows"]),
        *errors,
        f"[mock]({MOCK_FORECASTS.with_suffix('.md')})",
    ]


def diverse_row(what: str, content: Any, page: Path) -> list[str]:
    """Diverse runs on simulated cards whose physics no prior has seen."""
    s = content["summary"]
    errors = [percent(s[name]) for name in ("median_abs_error", "worst_abs_error", "coverage")]
    return [what, str(s["rows"]), *errors, f"[mock]({page.with_suffix('.md')})"]


def diverse_figures(content: Any) -> list[str]:
    """After a quick calibration."""
    return diverse_row("27 unlike runs, 0.5B to 72B, on 8 simulated GPUs, calibrated", content, MOCK_DIVERSE)


def uncalibrated_figures(content: Any) -> list[str]:
    """By priors alone."""
    return diverse_row("the same on 24 simulated GPUs, by priors alone", content, MOCK_PRIORS)


def coverage_figures(content: Any) -> list[str]:
    """Unseen shapes on simulated cards of many seeds."""
    s = content["summary"]["all"]
    errors = [percent(s["median_abs_error"]), "–", percent(s["coverage"])]
    return [
        "rate of shapes never calibrated, on simulated GPUs",
        str(s["shapes"]),
        *errors,
        f"[mock]({MOCK_COVERAGE.with_suffix('.md')})",
    ]


def published_row(what: str, summary: Any, errors: list[float], page: Path) -> list[str]:
    """One line of the table from a validation against published runs."""
    shares = [summary["median_abs_error"], max(map(abs, errors)), summary["coverage"]]
    return [what, str(summary["n"]), *map(percent, shares), f"[{page.stem}]({page.with_suffix('.md')})"]


def source_figures(content: Any) -> list[str]:
    """Published runs, each forecast by priors refitted without its source."""
    errors = [row["error"] for row in content["rows"]]
    return published_row("published runs, by priors without their source", content["summary"], errors, TIME)


def gpu_figures(content: Any) -> list[str]:
    """The same by priors that have not seen the run's GPU."""
    errors = [row["gpu_left_out"]["error"] for row in content["rows"]]
    return published_row("the same, by priors without runs on its GPU", content["gpu_left_out"], errors, TIME)


def generation_figures(content: Any) -> list[str]:
    """The same by priors that have seen no card of its generation."""
    errors = [row["generation_left_out"]["error"] for row in content["rows"]]
    summary = content["generation_left_out"]
    return published_row("the same, by priors without any GPU of its generation", summary, errors, TIME)


def unseen_figures(content: Any) -> list[str]:
    """Runs of sources that no prior was fitted to."""
    errors = [row["error"] for row in content["rows"]]
    return published_row("runs from sources that no prior was fitted to", content["summary"], errors, UNSEEN)


def unseen_memory_figures(content: Any) -> list[str]:
    """Their peak memory."""
    errors = [row["error"] for row in content["memory"]["rows"]]
    return published_row("their peak memory, most on several GPUs", content["memory"]["summary"], errors, UNSEEN)


def memory_figures(content: Any) -> list[str]:
    """Peak memory of published runs."""
    errors = [row["error"] for row in content["rows"]]
    return published_row("peak memory of published runs", content["summary"], errors, MEMORY)


def figures() -> str:
    """The validation table, one row per kind of evidence that exists."""
    makers = (
        *((page, partial(maker, page=page)) for page in CARDS for maker in (card_figures, steady_figures)),
        (CPU, cpu_figures),
        (MOCK_FORECASTS, mock_figures),
        (MOCK_DIVERSE, diverse_figures),
        (MOCK_PRIORS, uncalibrated_figures),
        (MOCK_COVERAGE, coverage_figures),
        (TIME, source_figures),
        (TIME, gpu_figures),
        (TIME, generation_figures),
        (MEMORY, memory_figures),
        (UNSEEN, unseen_figures),
        (UNSEEN, unseen_memory_figures),
    )
    rows = [make(content) for path, make in makers if (content := loaded(path)) is not None]
    head = ["forecast of", "runs", "median error", "worst", "inside 80%", "every run"]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def output_of(command: str, lines: int | None) -> str:
    """What a terminal would show: the command, then its output without trailing blanks; RuntimeError if it failed."""
    arguments = [sys.executable, "-m", *shlex.split(command)]
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"} | FIXED
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{command} failed: {done.stderr.strip()}")
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    shown = printed if lines is None else [*printed[:lines], "..."]
    return "\n".join([f"$ {command}", *shown]) + "\n"


def refreshed(text: str) -> str:
    """A page with every marked output run again."""

    def replaced(match: re.Match[str]) -> str:
        lines = match["lines"]
        return f"{match['mark']}```\n{output_of(match['command'], int(lines) if lines else None)}```\n"

    return FIGURES.sub(lambda _: f"<!-- figures -->\n{figures()}<!-- end of figures -->\n", BLOCK.sub(replaced, text))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    for page in (README, *sorted(DOCS.rglob("*.md"))):
        page.write_text(refreshed(page.read_text(encoding="utf-8")), encoding="utf-8")
