#!/usr/bin/env python3
"""Compare memory, FLOPs, launches and bytes with the traced real code over the grid of `tunecast.calibrate.trace.grid`.

Usage: scripts/memory-grid [--fresh] [--limit N]

Writes results/validation/memory-grid.json and .md. Rows go to memory-grid.partial.jsonl as they are made, so
that an interrupted run goes on where it stopped; the file is removed at the end. The exit code is 1 when a
case fails or a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "results" / "validation"
PARTIAL = OUT / "memory-grid.partial.jsonl"
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
WORST_ROWS = 10
BARS = {
    "allocated": {"median": 0.01, "p95": 0.03, "worst": 0.05},
    "flops": {"median": 0.005, "p95": 0.005, "worst": 0.005},
}
"""Largest errors allowed, relative."""
TITLES = {
    "allocated": "peak allocated",
    "at_rest": "allocated at rest",
    "moment": "worst moment of the step",
    "flops": "FLOPs of the step",
    "phase_flops": "FLOPs, worst phase",
    "phase_launches": "launches, worst phase",
    "phase_bytes": "bytes moved, worst phase",
}

Row = dict[str, Any]


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def summary_of(rows: list[Row], error: str) -> dict[str, float]:
    """Median, 95th percentile and worst absolute error."""
    sizes = [abs(row["errors"][error]) for row in rows]
    return {"median": percentile(sizes, 0.5), "p95": percentile(sizes, 0.95), "worst": max(sizes)}


def summarise(rows: list[Row]) -> Row:
    """Errors over all rows and by model type."""
    kinds = sorted({row["model_type"] for row in rows})
    return {
        "cases": len(rows),
        "models": len({row["model"] for row in rows}),
        "all": {error: summary_of(rows, error) for error in TITLES},
        "allocated_by_model_type": {
            kind: {"cases": len(of_kind), **summary_of(of_kind, "allocated")}
            for kind in kinds
            if (of_kind := [row for row in rows if row["model_type"] == kind])
        },
        "peak_moment_agrees": sum(row["traced_peak_moment"] == row["computed_peak_moment"] for row in rows),
    }


def missed_bars(summary: Row) -> list[str]:
    """The bars of `BARS` that the errors exceed."""
    return [
        f"{error} {statistic} {summary['all'][error][statistic]:.4f} > {bar}"
        for error, bars in BARS.items()
        for statistic, bar in bars.items()
        if summary["all"][error][statistic] > bar
    ]


def percent(error: float) -> str:
    """An error as text."""
    return f"{100 * error:.4f}%"


def table(header: tuple[str, ...], lines: Iterable[tuple[Any, ...]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(map(str, line))} |" for line in (header, ("---",) * len(header), *lines)]


def page(summary: Row, rows: list[Row], software: dict[str, str]) -> str:
    """The generated page."""
    columns = ("median", "p95", "worst")
    worst = sorted(rows, key=lambda row: -abs(row["errors"]["allocated"]))[:WORST_ROWS]
    kinds = summary["allocated_by_model_type"].items()
    lines = [
        "# Memory and FLOPs against the traced code",
        "",
        "Made by `scripts/memory-grid`; do not edit. One optimizer step of transformers, PEFT and bitsandbytes on",
        f"fake tensors ({', '.join(f'{name} {v}' for name, v in software.items())}) against the formulas:",
        f"{summary['cases']} cases over {summary['models']} models. Real widths; 2 layers, every fourth case the whole",
        "depth (up to 32 layers). FLOPs are counted as kernels execute them: causal flash attention halves its mask.",
        "",
        *table(
            ("relative error", *columns),
            [(title, *(percent(summary["all"][error][c]) for c in columns)) for error, title in TITLES.items()],
        ),
        "",
        f"The peak falls into the same moment of the step in {summary['peak_moment_agrees']} of {summary['cases']}.",
        "",
        "## Peak allocated by model type",
        "",
        *table(
            ("model_type", "cases", *columns),
            [(kind, found["cases"], *(percent(found[c]) for c in columns)) for kind, found in kinds],
        ),
        "",
        "## Worst rows by peak allocated",
        "",
        *table(
            ("error", "GiB traced", "moment", "case"),
            [
                (percent(r["errors"]["allocated"]), f"{r['traced_peak_bytes'] / 1024**3:.2f}", r["traced_peak_moment"],
                 r["case"])
                for r in worst
            ],
        ),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def done_rows(fresh: bool) -> dict[str, Row]:
    """Rows of an interrupted run, by case."""
    if fresh or not PARTIAL.exists():
        return {}
    rows = [json.loads(line) for line in PARTIAL.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {row["case"]: row for row in rows}


def run_cases(done: dict[str, Row], limit: int | None, failures: list[str], refused: list[str]) -> list[Row]:
    """All rows, those already made included; cases that fail or are refused by name go into the lists."""
    from tunecast.calibrate.trace.grid import comparison, grid_models, model_cases

    planned = [(case, arch) for arch in grid_models().values() for case in model_cases(arch)][:limit]
    rows = []
    with PARTIAL.open("a", encoding="utf-8") as partial:
        for number, (case, architecture) in enumerate(planned, 1):
            row = done.get(case.name) or attempt(comparison, case, architecture, failures, refused)
            if row is None:
                continue
            rows.append(row)
            if case.name not in done:
                partial.write(json.dumps(row) + "\n")
                partial.flush()
            print(f"{number}/{len(planned)} {row['errors']['allocated']:+.2e} {case.name}", file=sys.stderr)
    return rows


def attempt(
    compare: Callable[..., Row], case: Any, architecture: Any, failures: list[str], refused: list[str]
) -> Row | None:
    """A row, or None with the reason in a list: one broken case must not hide the others."""
    from tunecast.catalogs.errors import NotSupportedError

    try:
        return compare(case, architecture)
    except NotSupportedError as error:
        refused.append(f"{case.name}: {error}")
        return None
    except Exception as error:
        failures.append(f"{case.name}: {type(error).__name__}: {error}")
        print(f"failed: {failures[-1]}", file=sys.stderr)
        return None


def main() -> int:
    """Run, write, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fresh", action="store_true", help="forget an interrupted run")
    parser.add_argument("--limit", type=int, help="only the first N cases; nothing is written")
    asked = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if asked.fresh:
        PARTIAL.unlink(missing_ok=True)
    warnings.simplefilter("ignore")
    failures: list[str] = []
    refused: list[str] = []
    rows = run_cases(done_rows(asked.fresh), asked.limit, failures, refused)
    summary, software = summarise(rows), {name: version(name) for name in PACKAGES}
    missed = [*missed_bars(summary), *failures]
    if asked.limit is None:
        found = {"schema": "tunecast.memory-grid/1", "software": software, "summary": summary}
        found |= {"failures": failures, "refused": refused}
        text = json.dumps(found, indent=1)[:-2] + ',\n "rows": [\n  '
        text += ",\n  ".join(json.dumps(row) for row in rows) + "\n ]\n}\n"
        (OUT / "memory-grid.json").write_text(text, encoding="utf-8")
        (OUT / "memory-grid.md").write_text(page(summary, rows, software), encoding="utf-8")
        PARTIAL.unlink(missing_ok=True)
    print(json.dumps(summary["all"], indent=1))
    print("\n".join(f"missed: {bar}" for bar in missed) or "every bar is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
