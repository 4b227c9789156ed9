"""results/validation/time.md and memory.md from the JSON beside them; nothing is computed from runs here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tunecast.calibrate.validate_summary import spread_words

WORST = 20
ENOUGH_ROWS = 10
SHOWN_IDS = 8
TIME_TARGETS = {"median": 0.12, "p90": 0.35, "coverage": (0.72, 0.88), "rows": 390}
Row = Mapping[str, Any]


def percent(value: float | None, *, signed: bool = False) -> str:
    """A share with one decimal; unknown is a dash."""
    return "–" if value is None else f"{value:+.1%}" if signed else f"{value:.1%}"


def digits(value: float | None) -> str:
    """Three significant digits or whole numbers."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table with a blank line after it."""
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines), ""]


def met(reached: float | None, holds: bool) -> str:
    """A verdict on a target."""
    return "not scored" if reached is None else "met" if holds else "**missed**"


def stats_cells(stats: Row) -> list[str]:
    """n, median, 90th percentile, bias, coverage, half-width."""
    errors = [percent(stats["median_abs_error"]), percent(stats["p90_abs_error"]), percent(stats["bias"], signed=True)]
    return [str(stats["n"]), *errors, percent(stats["coverage"]), percent(stats["median_half_width"])]


def headline(rows: str, stats: Row) -> str:
    """How far `rows` (how many, in words) are off, to which side, and how many the interval holds."""
    bias = percent(stats["bias"], signed=True)
    return (
        f"**{rows}, median error {percent(stats['median_abs_error'])}; median of the sources' medians "
        f"{percent(stats['median_of_sources'])}.** 90% of rows are within {percent(stats['p90_abs_error'])}, "
        f"bias {bias}, {percent(stats['coverage'])} inside the 80% interval, {percent(stats['below'])} below and "
        f"{percent(stats['above'])} above it (median half-width {percent(stats['median_half_width'])})."
    )


STATS_HEAD = ["rows", "median error", "90th percentile", "bias", "inside 80%", "median half-width"]


def time_page(content: Row) -> str:
    """The page of forecast speed against published runs."""
    s, rows = content["summary"], content["rows"]
    lines = [
        "# Forecast speed against published runs",
        "",
        (
            "Made by `scripts/validate-published`; do not edit. Error is predicted / measured - 1 of tokens/s of the "
            "whole job. Every row is forecast by priors refitted without its own source: efficiencies, device, "
            "stack and sharding effects and the widths of the intervals."
        ),
        "",
        headline(f"{s['n']} rows", s),
        "",
        shipped_width(content["as_shipped"]),
        "",
        "## Against the targets",
        "",
        *time_targets(content),
        *rivals(content),
        "## By group",
        "",
        *group_tables(content["groups"]),
        "## Each GPU left out",
        "",
        "The same rows, forecast by priors that have not seen a run on this GPU, by its id in the catalog.",
        "",
        *table(["left out", *STATS_HEAD], left_out_rows(content, "gpu_left_out")),
        "## Each generation of GPUs left out",
        "",
        "By priors that have not seen a run on any card of the same compute capability (H100, H200 and H800 are one).",
        "",
        *table(["GPU", *STATS_HEAD], left_out_rows(content, "generation_left_out")),
        *auxiliary_section(content["auxiliary"]),
        f"## The worst {min(WORST, len(rows))} rows",
        "",
        *worst(rows, time_line),
        "## Every row",
        "",
        *table(
            ["row", "GPU", "run", "measured", "forecast", "80% interval", "error", "inside", "GPU left out"],
            (time_row(row) for row in sorted(rows, key=lambda r: r["id"])),
        ),
        *skipped_section(content["skipped"]),
    ]
    return "\n".join(lines)


def shipped_width(s: Row) -> str:
    """What the intervals hold that a user gets."""
    return (
        "These widths are what sources left out need. The model's structure and its words were made with these sources "
        "in view, though, so that they err less than others will ([unseen sources](unseen.md)): the priors that ship "
        "are never narrower than the spreads that the fit finds between sources. With that width "
        f"{percent(s['coverage'])} of these rows are inside (median half-width {percent(s['median_half_width'])}). All "
        "other shares and widths on this page, those of GPUs and generations left out too, are by the width of "
        "left-out sources; auxiliary rows are forecast by the priors that ship."
    )


def auxiliary_section(content: Row) -> list[str]:
    """Rows for checks alone: nothing is fitted to them, and no figure above counts them."""
    s = content["summary"]
    named = "; ".join(f"{name}: {text}" for name, text in content["sources"].items())
    head = ["row", "GPU", "run", "measured", "forecast", "80% interval", "error", "inside"]
    return [
        "## Auxiliary rows, a check",
        "",
        (
            "Rows whose collectors say that they are for ratios between rows, since a competitor published them or a "
            "step had to be inferred. Nothing is fitted to them and no figure above counts them; by the priors that "
            f"ship {s['n']} have a median error of {percent(s['median_abs_error'])}, {percent(s['coverage'])} inside. "
            f"{named}. What a step of UL's is had to be inferred, and its LoRA is slower than its full training of the "
            "same model, which nothing on its page explains. SU is Unsloth as its competitor measured it, in nominal "
            "tokens."
        ),
        "",
        *group_tables(content["groups"]),
        *table(head, ([row["id"], row["gpu"], run_text(row), *figures(row)] for row in content["rows"])),
    ]


def time_targets(content: Row) -> list[str]:
    """What was promised, what is reached."""
    s, t = content["summary"], TIME_TARGETS
    low, high = t["coverage"]
    large = content["large"]
    coverage, width, median = s["coverage"], s["median_half_width"], s["median_abs_error"]
    wide = content["as_shipped"]
    rows = [
        [f"at least {t['rows']} rows scored", str(s["n"]), met(s["n"], s["n"] >= t["rows"]), ""],
        [f"median error at most {t['median']:.0%}", percent(median), met(median, (median or 0) <= t["median"]), ""],
        [
            f"90th percentile at most {t['p90']:.0%}",
            percent(s["p90_abs_error"]),
            met(s["p90_abs_error"], (s["p90_abs_error"] or 0) <= t["p90"]),
            "",
        ],
        [
            f"inside the 80% interval: {low:.0%} to {high:.0%}",
            percent(coverage),
            met(coverage, low <= (coverage or 0) <= high),
            percent(wide["coverage"]),
        ],
        [
            "median half-width at most twice the median error",
            f"{percent(width)} against {percent(median)}",
            met(width, (width or 0) <= 2 * (median or 0)),
            percent(wide["median_half_width"]),
        ],
        *coverage_targets(content["groups"]["source"], content["rows"]),
        ["models of 60B and more", f"{large['n']} rows, median {percent(large['median_abs_error'])}", "no target", ""],
    ]
    return table(["target", "reached", "", "by the width that ships"], rows)


def shipped(rows: Sequence[Row]) -> tuple[str, str]:
    """(share inside, median half-width) of these rows with the width that a user gets."""
    told = [row["as_shipped"] for row in rows]
    inside = statistics.mean(bool(own["inside"]) for own in told)
    return percent(inside), percent(statistics.median(own["half_width"] for own in told))


def coverage_targets(sources: Mapping[str, Row], rows: Sequence[Row]) -> list[list[str]]:
    """Sources with enough rows must cover between 60 and 95%, by intervals not wider than their errors ask for."""
    found = []
    for name, stats in sources.items():
        if stats["n"] < ENOUGH_ROWS:
            continue
        own, half_width = shipped([row for row in rows if row["source"] == name])
        inside, width, median = stats["coverage"], stats["median_half_width"], stats["median_abs_error"]
        reached = f"{percent(inside)} of {stats['n']}"
        found.append([f"{name}: 60% to 95% inside the interval", reached, met(inside, 0.60 <= inside <= 0.95), own])
        wide = f"{percent(width)} against {percent(median)}"
        enough = met(width, width <= 2 * median)
        found.append([f"{name}: half-width at most twice the median error", wide, enough, half_width])
    return found


def rivals(content: Row) -> list[str]:
    """The same rows by other estimators, per source."""
    version = content["ftuneai"]
    mfu = content["classic_mfu"]
    note = (
        f"ftuneai {version}, given the exact model shape and all of its own options (`scripts/rival_ftuneai.py`)."
        if version
        else "The rival `ftuneai` has not been run here."
    )
    lines = [
        "## Beside others, on the same rows",
        "",
        (
            f"Median absolute error. Classic: 6N FLOPs per token at MFU {mfu}. {note} Neither is fitted to these rows; "
            "tunecast is fitted to the other sources."
        ),
        "",
    ]
    kinds = ["error", "classic", "ftuneai"]
    sources = sorted({row["source"] for row in content["rows"]})
    body = []
    for name in [*sources, "all"]:
        mine = [row for row in content["rows"] if name in (row["source"], "all")]
        found = [median_error(mine, kind) for kind in kinds]
        answered = [row for row in mine if row["ftuneai"] is not None]
        ours = median_error(answered, "error")
        pairs = [(found[0], found[1]), (ours, found[2])]
        wins = [own <= other for own, other in pairs if own is not None and other is not None]
        best = "" if not wins else "yes" if all(wins) else "**no**"
        there = [str(len(answered)), *map(percent, (ours, found[2]))]
        body.append([name, str(len(mine)), *map(percent, found[:2]), *there, best])
    head = ["source", "rows", "tunecast", "classic 6ND", "rows ftuneai answers", "tunecast there", "ftuneai"]
    lines += table([*head, "tunecast closest"], body)
    lost = [line[0] for line in body if line[-1] == "**no**"]
    if lost:
        lines += [f"Not closest on {', '.join(lost)}: see the explanation of these rows below.", ""]
    return lines


def median_error(rows: Sequence[Row], kind: str) -> float | None:
    """Median absolute error of one estimator over the rows it answers."""
    errors = [row["error"] if kind == "error" else row[kind]["error"] for row in rows if row[kind] is not None]
    return statistics.median(map(abs, errors)) if errors else None


def group_tables(groups: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """One table per grouping."""
    lines: list[str] = []
    for kind, found in groups.items():
        lines += table([kind, *STATS_HEAD], ([name, *stats_cells(stats)] for name, stats in ordered(found)))
    return lines


def ordered(found: Mapping[str, Row]) -> list[tuple[str, Row]]:
    """Largest group first."""
    return sorted(found.items(), key=lambda pair: (-pair[1]["n"], pair[0]))


def left_out_rows(content: Row, kind: str) -> list[list[str]]:
    """Rows forecast by priors without their kind of GPU, by GPU and overall."""
    by_gpu = ordered(content[f"{kind}_by_gpu"])
    return [[name, *stats_cells(stats)] for name, stats in [*by_gpu, ("all", content[kind])]]


def run_text(row: Row) -> str:
    """A run in a few words."""
    spread = spread_words(row["sharding"], row.get("degrees", ()))
    gpus = f", {row['num_gpus']} x {spread}" if row["num_gpus"] > 1 else ""
    return f"{row['model'].split('/')[-1]} {row['method']} {row['batch']} x {row['length']}{gpus}"


def figures(row: Row) -> list[str]:
    """measured, forecast, interval, error, inside."""
    interval = f"{digits(row['low'])} to {digits(row['high'])}"
    inside = "yes" if row["inside"] else "no"
    return [digits(row["measured"]), digits(row["value"]), interval, percent(row["error"], signed=True), inside]


def time_row(row: Row) -> list[str]:
    """One line of the table of all rows."""
    return [row["id"], row["gpu"], run_text(row), *figures(row), percent(row["gpu_left_out"]["error"], signed=True)]


def worst(rows: Sequence[Row], line: Callable[[Row], str]) -> list[str]:
    """The rows furthest off, one by one."""
    chosen = sorted(rows, key=lambda row: -abs(row["error"]))[:WORST]
    return [*(f"{rank}. {line(row)}" for rank, row in enumerate(chosen, start=1)), ""]


def time_line(row: Row) -> str:
    """One explained row."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in row["shares"].items())
    made_of = f"The forecast is {shares}, bound by {row['bound_by']}."
    return (
        f"**{row['id']}** {percent(row['error'], signed=True)}: {run_text(row)} on {row['gpu']}. {made_of} {why(row)}"
    )


def why(row: Row) -> str:
    """The committed explanation, or that there is none."""
    return row["why"] or "Not explained yet."


def skipped_section(skipped: Mapping[str, Sequence[str]]) -> list[str]:
    """Reasons, counts and some ids."""
    total = sum(len(ids) for ids in skipped.values())
    rows = [[reason, str(len(ids)), short(ids)] for reason, ids in skipped.items()]
    return [f"## {total} rows not scored", "", *table(["reason", "rows", "which"], rows)]


def short(ids: Sequence[str]) -> str:
    """The first ids."""
    rest = f" and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return ", ".join(ids[:SHOWN_IDS]) + rest
