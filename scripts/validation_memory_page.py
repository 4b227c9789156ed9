"""The page of forecast memory against published runs, from what `validate_published` computes."""

from __future__ import annotations

from collections.abc import Sequence

from validation_pages import (
    WORST,
    Row,
    digits,
    figures,
    group_tables,
    headline,
    median_error,
    met,
    percent,
    run_text,
    skipped_section,
    table,
    why,
    worst,
)

MEMORY_TARGETS = {"median": 0.06, "ran": 0.97, "stated": 0.85}


def memory_page(content: Row) -> str:
    """The page of forecast memory against published runs."""
    s, rows = content["summary"], content["rows"]
    lines = [
        "# Forecast memory against published runs",
        "",
        (
            "Made by `scripts/validate-published`; do not edit. Error is predicted / measured - 1 of the peak of one "
            "GPU: allocated against allocated, reserved against reserved. Tensors follow from the run alone; what the "
            "allocator adds and the widths of the intervals are fitted without the row's own source, but for the least "
            "width of code that was never compared, which earlier errors of TI and TT set (docs/intervals.md)."
        ),
        "",
        headline(f"{s['n']} rows", s),
        "",
        (
            "How exact the tensors themselves are is measured against the real code, not here: see the other pages of "
            "this folder."
        ),
        "",
        "## Against the targets",
        "",
        *memory_targets(content),
        *memory_rival(content),
        "## By group",
        "",
        *group_tables(content["groups"]),
        "## Does it fit?",
        "",
        *fit_section(content),
        f"## The worst {min(WORST, len(rows))} rows",
        "",
        *worst(rows, memory_line),
        "## Every row",
        "",
        *table(
            ["row", "GPU", "run", "counter", "measured GiB", "forecast", "80% interval", "error", "inside"],
            (
                [row["id"], row["gpu"], run_text(row), row["counter"], *figures(row)]
                for row in sorted(rows, key=lambda r: r["id"])
            ),
        ),
        *listed_section(content["listed"]),
        *skipped_section(content["skipped"]),
    ]
    return "\n".join(lines)


def memory_targets(content: Row) -> list[str]:
    """What was promised, what is reached."""
    median = content["summary"]["median_abs_error"]
    rows = [
        [
            f"median error at most {MEMORY_TARGETS['median']:.0%}",
            percent(median),
            met(median, (median or 0) <= MEMORY_TARGETS["median"]),
        ]
    ]
    for kind, text in (("ran", "runs that ran, called fits or tight"), ("stated", "stated out of memory, tight or no")):
        good, of = content["verdicts"][kind]
        share = good / of if of else None
        bar = MEMORY_TARGETS[kind]
        rows.append([f"{text}: at least {bar:.0%}", f"{good} of {of}", met(share, (share or 0) >= bar)])
    good, of = content["verdicts"]["presumed"]
    rows.append(["presumed out of memory, tight or no", f"{good} of {of}", "no target"])
    return table(["target", "reached", ""], rows)


def memory_rival(content: Row) -> list[str]:
    """The same rows by the rival, which gives one figure whatever the counter."""
    if not content["ftuneai"]:
        return []
    rows = []
    for name in [*sorted({row["source"] for row in content["rows"]}), "all"]:
        mine = [row for row in content["rows"] if name in (row["source"], "all")]
        found = [median_error(mine, kind) for kind in ("error", "ftuneai")]
        rows.append([name, str(len(mine)), *map(percent, found)])
    head = f"ftuneai {content['ftuneai']} gives one figure, whatever the counter. Median absolute error:"
    return [
        "## Beside another estimator",
        "",
        head,
        "",
        *table(["source", "rows", "tunecast", "ftuneai"], rows),
    ]


def fit_section(content: Row) -> list[str]:
    """Rows called wrong, and runs that ran out of memory."""
    wrong = content["called_wrong"]
    lines = [f"Runs that ran and are called `no`: {len(wrong)}."]
    lines += ["", *(f"- {row['id']}: {run_text(row)} on {row['gpu']}: {why(row)}" for row in wrong)]
    tests = [
        [row["id"], run_text(row), row["gpu"], row["out_of_memory"], row["verdict"] or "–"]
        for row in content["out_of_memory"]
    ]
    head = ["row", "run", "GPU", "out of memory", "forecast"]
    return [*lines, "", *(table(head, tests) if tests else ["No row that ran out of memory can be read yet.", ""])]


def memory_line(row: Row) -> str:
    """One explained row."""
    figure = f"{digits(row['value'])} against {digits(row['measured'])} GiB {row['counter']}"
    return (
        f"**{row['id']}** {percent(row['error'], signed=True)}: {run_text(row)} on {row['gpu']}, {figure}. {why(row)}"
    )


def listed_section(listed: Sequence[Row]) -> list[str]:
    """Rows whose counter is not one of ours: shown, never scored."""
    if not listed:
        return []
    rows = [
        [
            row["id"],
            run_text(row),
            row["counter"],
            digits(row["stated_gib"]),
            digits(row["allocated_gib"]),
            digits(row["reserved_gib"]),
        ]
        for row in listed
    ]
    head = ["row", "run", "counter", "stated GiB", "forecast allocated", "forecast reserved"]
    return ["## Listed, never scored: another counter, or none stated", "", *table(head, rows)]
