"""``tunecast validate`` for people: rows, groups, what was skipped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tunecast.calibrate.validate import Compared, Judged
from tunecast.calibrate.validate_summary import (
    GROUPS,
    Stats,
    by_group,
    degrees_of,
    ids_by_reason,
    median_of_sources,
    memories,
    speeds,
    spread_words,
    stats_of,
    verdict_shares,
)
from tunecast.model.units import gib
from tunecast.model.value import Value
from tunecast.tables import DASH, digits, gib_text, keep_whole, plain_table, seconds
from tunecast.validation_reading import read_as

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tunecast.validation import Validation

VERDICTS = {
    "ran": "runs that ran are called fits or tight",
    "stated": "runs stated to be out of memory are called tight or no",
    "presumed": "runs presumed out of memory are called tight or no",
}
IDS_SHOWN = 5
"""Rows named beside a reason."""
Pick = Callable[[Iterable[Judged]], list[Compared]]


def report(result: Validation) -> list[RenderableType]:
    """Everything the command prints."""
    judged = result.judged
    parts: list[RenderableType] = []
    for title, pick, scale in (("speed, tokens/s", speeds, 1.0), ("memory, GiB", memories, gib(1))):
        if pick(judged):
            parts += [row_table(judged, pick, title, scale), group_table(judged, pick, title)]
    skipped = [skipped_table(judged)] if ids_by_reason(judged) else []
    halves = [halves_table(found)] if (found := half_reasons(judged)) else []
    heads = [headline(judged, what) for what in ("speed", "memory")]
    sample = sample_lines(judged, result.left_out_rows)
    told = [*verdict_lines(judged), *doubt_lines(judged), *whole_time_lines(judged)]
    return [*parts, *told, *halves, *skipped, *heads, *sample]


def sample_lines(judged: Sequence[Judged], left_out_rows: int) -> list[str]:
    """Which errors are those of a fit, and which runs were kept from the fit that forecast them."""
    seen = sum(item.in_sample for item in judged)
    if left_out_rows:
        kept = f"the {left_out_rows} runs that the priors were fitted to are forecast with their own source left out"
        return [f"{kept}, with intervals as wide as such sources need; a new run's are wider"]
    if seen:
        fit = "their errors are those of a fit, not of a forecast"
        return [f"in sample: the priors were fitted to {rows_words(seen)}; {fit}"]
    return []


def in_sample_words(judged: Sequence[Judged], pick: Pick) -> str:
    """How many of the rows compared are of the fit, behind their number."""
    scored = [item for item in judged if pick([item])]
    seen = sum(item.in_sample for item in scored)
    return f" ({'all' if seen == len(scored) else seen} in sample)" if seen else ""


def percent(value: float | None, *, signed: bool = False) -> str:
    """A share with one decimal; unknown is a dash."""
    return DASH if value is None else f"{value:+.1%}" if signed else f"{value:.1%}"


def row_table(judged: Sequence[Judged], pick: Pick, title: str, scale: float) -> Table:
    """One line per scored row."""
    numbers = ("measured", "predicted", "80% interval", "error")
    label = in_sample_words(judged, pick)
    fit = ("in sample",) if label else ()
    table = plain_table("id", "GPU", *numbers, "inside", *fit, title=f"{title}{label}", right=numbers)
    for item in judged:
        for compared in pick([item]):
            predicted = compared.predicted.scaled(scale)
            values = (compared.measured * scale, predicted.value)
            gpu = item.entry.run.gpu if item.entry.run else DASH
            table.add_row(
                item.entry.id,
                gpu,
                *map(digits, values),
                f"{digits(predicted.low)}–{digits(predicted.high)}",
                percent(compared.error, signed=True),
                "yes" if compared.inside else "no",
                *(("yes" if item.in_sample else "no",) if fit else ()),
            )
    return keep_whole(table)


def group_table(judged: Sequence[Judged], pick: Pick, title: str) -> Table:
    """Statistics by source, GPU, method, parallelism and size."""
    numbers = ("rows", "median", "90%", "bias", "inside", "± median")
    heading = f"{title}: absolute errors{in_sample_words(judged, pick)}"
    table = plain_table("group", *numbers, title=heading, right=numbers)
    for kind, key in GROUPS.items():
        for name, stats in by_group(judged, key, pick).items():
            table.add_row(f"{kind} {name}", *stats_cells(stats))
    table.add_row("all", *stats_cells(stats_of(pick(judged))))
    return keep_whole(table)


def stats_cells(stats: Stats) -> list[str]:
    """n, median, 90th percentile, bias, coverage and median half-width."""
    return [
        str(stats.n),
        percent(stats.median_abs_error),
        percent(stats.p90_abs_error),
        percent(stats.bias, signed=True),
        percent(stats.coverage),
        percent(stats.median_half_width),
    ]


def verdict_lines(judged: Sequence[Judged]) -> list[str]:
    """How often the verdict was right, for the kinds of rows that the table has."""
    shares = verdict_shares(judged)
    return [f"{good} of {of} {VERDICTS[kind]}" for kind, (good, of) in shares.items() if of]


def skipped_table(judged: Sequence[Judged]) -> Table:
    """Why rows were skipped, and which."""
    skipped = ids_by_reason(judged)
    title = f"{rows_words(sum(map(len, skipped.values())))} not scored"
    table = plain_table("skipped", "rows", "ids", title=title, right=("rows",))
    for reason, ids in skipped.items():
        table.add_row(reason, str(len(ids)), some_of(ids))
    return keep_whole(table)


def doubt_lines(judged: Sequence[Judged]) -> list[str]:
    """Rows whose own peak memory contradicts how they were read, and how far off their speeds are beside others'."""
    doubtful = [item for item in judged if item.doubt]
    if not doubtful:
        return []
    own = stats_of(speeds(doubtful)).median_abs_error
    rest = stats_of(speeds(item for item in judged if not item.doubt)).median_abs_error
    known = own is not None and rest is not None
    beside = f"; median speed error {percent(own)}, of the others {percent(rest)}" if known else ""
    told = f"{rows_words(len(doubtful))} whose own peak memory says that other settings may have run than were read"
    return [f"{told} (--explain ID): {some_of([item.entry.id for item in doubtful])}{beside}"]


def whole_time_lines(judged: Sequence[Judged]) -> list[str]:
    """Rows whose measured speed has more in it than steps."""
    ids = [item.entry.id for item in judged if item.whole_time]
    told = "whose speed is of the whole wall time (total_time_h), with evaluations, loading and saving in it"
    return [f"{rows_words(len(ids))} {told}: {some_of(ids)}"] if ids else []


def half_reasons(judged: Sequence[Judged]) -> dict[str, list[str]]:
    """Why the speed or the memory of a row is not scored though the other is and the row states it; most first."""
    found: dict[str, list[str]] = {}
    for item in judged:
        for what, why in (("speed", item.why_no_speed), ("memory", item.why_no_memory)) if item.scored else ():
            if why and not why.endswith("is stated"):
                found.setdefault(f"{what}: {why}", []).append(item.entry.id)
    return dict(sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[0])))


def halves_table(reasons: Mapping[str, Sequence[str]]) -> Table:
    """Half-scored rows: what of them is left out, and why."""
    table = plain_table("of scored rows left out", "rows", "ids", right=("rows",))
    for reason, ids in reasons.items():
        table.add_row(reason, str(len(ids)), some_of(ids))
    return keep_whole(table)


def some_of(ids: Sequence[str]) -> str:
    """The first ids, and how many more there are."""
    rest = len(ids) - IDS_SHOWN
    return ", ".join(ids[:IDS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def rows_words(number: int) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} row{'' if number == 1 else 's'}"


def headline(judged: Sequence[Judged], what: str) -> str:
    """One line: the figures that decide."""
    pick = speeds if what == "speed" else memories
    stats = stats_of(pick(judged))
    if not stats.n:
        return f"{what}: no row is scored{_why_none(judged, what)}"
    return (
        f"{what}: {rows_words(stats.n)}{in_sample_words(judged, pick)}, median error "
        f"{percent(stats.median_abs_error)}, 90% within {percent(stats.p90_abs_error)}, bias "
        f"{percent(stats.bias, signed=True)}, inside the 80% interval "
        f"{percent(stats.coverage)}; median of the sources' medians {percent(median_of_sources(judged, pick))}"
    )


def _why_none(judged: Sequence[Judged], what: str) -> str:
    """What keeps most rows that are forecast from being scored in this half."""
    whys = [item.why_no_speed if what == "speed" else item.why_no_memory for item in judged]
    reasons = Counter(why for why in whys if why)
    if not reasons:
        return ""
    reason, count = reasons.most_common(1)[0]
    return f" ({rows_words(count)}: {reason})"


def explanation(item: Judged) -> list[RenderableType]:
    """How one row was read, what the forecast is made of, and how far off it is."""
    lines: list[RenderableType] = [f"{item.entry.id}: {'scored' if item.scored else 'skipped'}"]
    fitted = "in sample: the priors were fitted to this run" if item.in_sample else ""
    lines += [text for text in (item.reason, item.doubt, fitted) if text]
    run, prediction = item.entry.run, item.prediction
    if run is None or prediction is None:
        return lines
    r = run.run
    spread = spread_words(r.sharding, degrees_of(r))
    adapters = f", r={r.lora_r} on {', '.join(r.lora_target_modules)}" if r.has_adapters else ""
    lines += [
        (
            f"{run.architecture.name} on {r.num_gpus} x {run.gpu} ({spread}), {r.method}{adapters}, "
            f"{r.per_device_train_batch_size} x {r.max_length} tokens x {r.gradient_accumulation_steps}, "
            f"{r.precision}, checkpointing {'on' if r.gradient_checkpointing else 'off'}, {r.optim}, stack {run.stack}"
        ),
        read_as(run),
        *(f"- {note}" for note in (*run.reading_notes, item.whole_time) if note),
        *(_compared_line("tokens/s", item.speed, 1.0)),
        *(_compared_line(f"GiB ({run.counter})", item.memory, gib(1))),
        (
            f"step {seconds(prediction.step.step_time_s.value)}, bound by {prediction.step.bound_by}; "
            f"memory verdict {prediction.verdict or DASH}"
        ),
        parts_table(prediction.step.parts_s, prediction.memory.parts_bytes),
    ]
    return lines


def _compared_line(what: str, compared: Compared | None, scale: float) -> list[str]:
    if compared is None:
        return []
    value: Value = compared.predicted.scaled(scale)
    return [
        (
            f"{what}: measured {digits(compared.measured * scale)}, forecast {digits(value.value)} "
            f"({digits(value.low)}–{digits(value.high)}), error {percent(compared.error, signed=True)}"
        )
    ]


def parts_table(parts_s: dict[str, float], parts_bytes: dict[str, float]) -> Table:
    """What the step time and the allocated memory are made of."""
    table = plain_table("part", "step time", "allocated GiB", right=("step time", "allocated GiB"))
    for name, value in sorted(parts_s.items(), key=lambda pair: -pair[1]):
        if value > 0:
            table.add_row(name, seconds(value), "")
    for name, n_bytes in sorted(parts_bytes.items(), key=lambda pair: -pair[1]):
        if n_bytes > 0:
            table.add_row(name, "", gib_text(n_bytes))
    return keep_whole(table)
