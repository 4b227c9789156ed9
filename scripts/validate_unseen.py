#!/usr/bin/env python3
"""Forecast published runs that nothing here was fitted to, from sources that the priors have not seen.

    python scripts/validate_unseen.py        writes results/validation/unseen.md and .json

The rows of ``results/published/unseen-runs.csv`` were collected without a forecast of them being looked at, are read as
``tunecast validate`` reads a user's table, and are never fitted: `scripts/fit-priors` reads another file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from validation_pages import STATS_HEAD, digits, headline, percent, skipped_section, stats_cells, table

from tunecast.calibrate.priors_fit import with_width
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import OF_PROCESS, Compared, Judged, judge_all, read_entries
from tunecast.calibrate.validate_folds import shipped
from tunecast.calibrate.validate_summary import (
    GROUPS,
    Stats,
    by_group,
    ids_by_reason,
    layout,
    median_of_sources,
    memories,
    speeds,
    stats_of,
)
from tunecast.model.priors import load_priors
from tunecast.model.units import gib

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "results" / "published" / "unseen-runs.csv"
PAGE = ROOT / "results" / "validation" / "unseen.md"
ABOUT = (
    "Made by `python scripts/validate_unseen.py` from `results/published/unseen-runs.csv`; do not edit. Runs from "
    "sources that no prior was fitted to, collected from public pages without looking at a forecast (2026-11-23 "
    "to 27), and read as `tunecast validate` reads any table: what a cell does not say, or says in unknown words, "
    "skips the row. "
    "Error is predicted / measured - 1 of tokens/s of the whole job, by the priors that ship. No number is fitted to "
    "these rows. They came in ten collections. After the first had been forecast once (19 rows scored: median 10.9%, "
    "53% inside) more of its words, and what NeMo's recipes leave unsaid, were put into the vocabulary, and PCIe was "
    "given what published all-reduces reach of it, with an interval for boards. Of the second not one speed was read "
    "at first; words alone were added for it. LitGPT's compiled blocks and gradient sharding, which rows RA need, were "
    "built later, from its code. ATorch's mixed precision (rows SF) was read from its code after its peaks had been "
    "compared. Of the third not one row was read at first either. Of the fourth, mostly single GPUs, one was read at "
    "first; words were added for the others, and of rows YA the version of transformers that a release note states. "
    "Of the fifth 54 of 103 rows were read at first, with a median error of 16.7% and 39% inside; then the precision "
    "of rows XA, which their source states as weights in fp16 without autocast, was written out, and one more word "
    "(row XB-008) added. Nothing else was changed after it. On 2026-11-25 words of a tester's own tables "
    "were added; row SE-002 is read since. Of the sixth, runs of the models of 2025 and 2026, not one of 61 was read "
    "at first: 41 split experts over GPUs, which is not built; of rows UA that mean lengths of samples alone are those "
    "of rows was added to the words. On 2026-11-27, after all of them had been seen (52.7% inside, median half-width "
    "12.1%), the priors were kept from being narrower than the spreads that their fit finds between training sources "
    "(docs/intervals.md): the value is the fit's, the reason is this page. The seventh collection was made after that, "
    "to judge it: at first 14 of its 87 rows were read, with a median error of 14.1% and 64% inside; then words were "
    "added for it, and peaks of its authors' own loops, 20 to 27% above plain Transformers', have the interval of "
    "other code since. On 2026-11-28 rows QH and SH, which ms-swift packs, led to a rule: its code keeps packed "
    "samples apart, and where no cell says how long they are, half of the attention of whole rows is taken (QH-001: 26%"
    " slow before, 11% since; SH-002 and SH-003, which split such rows, are no longer read). Of the eighth, of "
    "2026-11-29, 3 of 41 rows have a speed that is read (median 14.9%, 2 of them inside) and 13 a peak, and nothing "
    "was added for it, no word either: its other rows have models or cards that no catalog has, or words that no "
    "vocabulary has. On the same day peaks of rows KI, QC and QK, of their authors' own loops over a 4-bit base, were "
    "seen to be 25 to 91% above the forecast: by their code, not by a cell, they prepare the base as PEFT's guide "
    "does, all else in fp32, and keep the model's output. Such loops are read so since. These peaks are 1 to 18% off "
    "with it, QC-002 is 7% fast instead of 39%, and they are not blind for it. Of the ninth, collected on the same "
    "day, 14 of 78 rows are read, all of one source (JB: full fine-tuning of 8B under ZeRO-3, median 12.6%, all too "
    "fast, 10 inside); nothing was added for it: 26 others are of low confidence, and the rest are own loops around "
    "own models. On 2026-11-30 it was seen why: a sample padded to the length brings an explicit mask, which "
    "transformers' sdpa runs over all pairs by slower kernels, and nothing had told the forecast. Rows padded to their "
    "length are read so since, and the speed of those kernels, which one figure for heads of 256 had decided, is taken "
    "from published figures for heads of up to 128 as well (JB 12.6% off in the median before, 5.4% since; QC, QL and "
    "QA, which were too slow, are slower by 2 to 12 points). None of them is blind for it. On the same day words were"
    " added for rows KB, KF-003 and QS-001, and what cards without peer access reach through host memory was taken "
    "from runs of the training table too (TT-011 and TT-013, torchtune's README: a twentieth and an eighth of PCIe, "
    "where servers' all-reduces reach half); rows of GeForce cards here, 2 to 6 times too fast before, had shown that"
    " something was wrong, and no number of theirs was used. Later that day attention that a cell of Megatron's rows "
    "calls flash was found to be timed as cuDNN's, against what the forecast's own note promises: five rows XE of an "
    "H100, 14 to 21% too fast before, are 2 to 7% off since (231 rows: 11.8% before, 10.8% since); and rows that name "
    "FlashAttention-3 follow curves of their own, by its paper. None of them is blind for it. Rows XA, KB and UA had "
    "shown for a week that steps of few tokens are slow on cards with a large cache (15 to 45%); on the same day what "
    "PyTorch's kernels reach in an RTX 4090's cache was taken from a published benchmark, and how much of a step finds "
    "itself there was counted. No number of these rows was used, but they are not blind for it: on such cards they are "
    "10 to 26% slow with it (three of one short sample, which wait for their hosts, 45 to 48%), and rows of L4, L40S "
    "and RTX 5070 Ti, most of them fast before, are faster by up to 22 points. Still on that day words of a few cells "
    "were added again: row QB-003 is read since (13% fast), and row YG-001, which they opened, is not: whether "
    "flash-linear-attention ran is in none of its cells, PyTorch's code is forecast 38% slow for it and the package "
    "within 7%, and a row that does not say which it was is skipped since. In the evening a few more words opened rows "
    "ZK-001, ZK-002 and QB-002 (1%, 12% and 22% fast, the last outside), after a rule about Megatron Bridge's overlap "
    "had been kept from rows without the sequence parallelism that it needs (ZK-002: 16% before). Of the tenth, of "
    "2026-12-01, one of 77 rows was read at first (HF-001, 34% fast, inside); 36 are of low confidence, and 16 of a "
    "trainer in CUDA. Then words were added for it (a stage of LLaMA-Factory, what is offloaded to the CPU, a mean "
    "length in the cell about packing), and nothing else: whole models on one and four RTX 4090, six of ten rows "
    "offloaded (HL), are 9.4% off in the median, 8 of them inside."
)
COLLECTIONS = {
    "P": "first", "R": "first", "S": "second", "W": "second", "Z": "third", "Y": "fourth", "X": "fifth", "U": "sixth",
    "Q": "seventh", "K": "eighth", "J": "ninth", "H": "tenth",
}  # fmt: skip
"""Which collection a row is of, by the first letter of its id."""
NARROW = 0.1
"""Half-width of peak memory below which its code was compared."""
AFTER_THE_WIDTH = ("seventh", "eighth", "ninth", "tenth")
"""Collections made after the rule of the width."""


def cells(stats: Stats) -> list[str]:
    """n, errors, coverage and width."""
    return stats_cells({**stats.as_dict(), "median_half_width": stats.median_half_width})


def figures(speed: Compared) -> list[str]:
    """measured, forecast, interval, error, inside."""
    value = speed.predicted
    interval = f"{digits(value.low)} to {digits(value.high)}"
    inside = "yes" if speed.inside else "no"
    return [digits(speed.measured), digits(value.value), interval, percent(speed.error, signed=True), inside]


def line(item: Judged) -> list[str]:
    """One row of the page."""
    assert item.entry.run is not None
    assert item.speed is not None
    known = item.entry.run
    run = known.run
    gpus = f", {layout(run)}" if run.num_gpus > 1 else ""
    about = f"{run.method} {run.per_device_train_batch_size} x {run.max_length}{gpus}, {known.stack}"
    return [item.entry.id, known.gpu, f"{known.architecture.name.split('/')[-1]} {about}", *figures(item.speed)]


def by_counter(judged: Sequence[Judged], *, of_process: bool) -> list[Judged]:
    """Rows with a memory comparison: of PyTorch's counters, or of the process as nvidia-smi shows it."""
    return [
        item
        for item in judged
        if item.memory is not None
        and item.entry.run is not None
        and bool(OF_PROCESS.match(item.entry.run.counter)) is of_process
    ]


def narrow_words(compared: Sequence[Judged]) -> str:
    """How the narrow interval and the wide one fare."""
    held, told = memories(compared), []
    for narrow in (True, False):
        kind = [memory for memory in held if (memory.half_width < NARROW) is narrow]
        told.append(f"{sum(memory.inside for memory in kind)} of {len(kind)}")
    return f"Inside are {told[0]} with the narrow interval, {told[1]} with the wide one."


def memory_section(judged: Sequence[Judged]) -> list[str]:
    """Peak memory of one GPU, where a row states a counter that is forecast."""
    compared = [item for item in judged if item.memory is not None]
    overall, shown = (stats_of(memories(by_counter(judged, of_process=kind))) for kind in (False, True))
    rows = []
    for item in compared:
        run, memory = item.entry.run, item.memory
        assert run is not None
        assert memory is not None
        value, about = memory.predicted, f"{run.architecture.name.split('/')[-1]} {run.run.method}, {run.stack}"
        ends = f"{gib(value.low):.1f} to {gib(value.high):.1f}"
        told = [f"{gib(memory.measured):.1f}", f"{gib(value.value):.1f}", ends, percent(memory.error, signed=True)]
        gpus = f"{run.run.num_gpus} x {run.gpu}"
        rows.append([item.entry.id, gpus, about, run.counter, *told, "yes" if memory.inside else "no"])
    said = (
        f"{overall.n} rows, median error {percent(overall.median_abs_error)}, 90% within "
        f"{percent(overall.p90_abs_error)}, {percent(overall.coverage)} inside the 80% interval (median half-width "
        f"{percent(overall.median_half_width)}). Tensors of code that was compared with "
        "published counters or traced have a narrow interval, those of other code a wide one (docs/intervals.md), "
        "given on 2026-11-24, after these rows had shown the narrow one to be too narrow for other code; how wide is "
        "what rows of torchtune and torchtitan were off by before they were modelled. "
        f"{narrow_words(by_counter(judged, of_process=False))} Beside them {shown.n} rows state what "
        f"nvidia-smi shows, compared with the process: median error {percent(shown.median_abs_error)}, "
        f"{percent(shown.coverage)} inside (median half-width {percent(shown.median_half_width)})."
    )
    head = ["row", "GPU", "run", "counter", "measured, GiB", "forecast, GiB", "80% interval", "error", "inside"]
    return ["## Peak memory", "", said, "", *table(head, rows)]


def doubt_section(judged: Sequence[Judged]) -> list[str]:
    """Rows whose own peak contradicts how they were read: what nobody could know from their cells alone."""
    doubtful, others = ([item for item in judged if bool(item.doubt) is kind] for kind in (True, False))
    own, rest = (stats_of(speeds(items)) for items in (doubtful, others))
    said = (
        f"The peak memory of {len(doubtful)} rows, whatever its counter, is more than 25% above the process of the run "
        "that was read, or more than 20% below its tensors: other settings may have run than their cells say (weights "
        "in fp32, logits kept, another attention). They stay in every figure above. Their median speed error is "
        f"{percent(own.median_abs_error)} over {own.n} rows, that of the others {percent(rest.median_abs_error)} with "
        f"{percent(rest.coverage)} inside."
    )
    rows = [[i.entry.id, "–" if i.speed is None else percent(i.speed.error, signed=True), i.doubt] for i in doubtful]
    return ["## Rows whose own peak speaks of other settings", "", said, "", *table(["row", "speed", "peak"], rows)]


def width_section(judged: Sequence[Judged], narrowed: Mapping[str, Compared]) -> str:
    """What the width of left-out sources would hold, and of how many rows the shipped one is independent."""
    after = [item for item in judged if item.speed is not None and COLLECTIONS[item.entry.id[0]] in AFTER_THE_WIDTH]
    before = [i for i in judged if i.speed is not None and COLLECTIONS[i.entry.id[0]] not in AFTER_THE_WIDTH]
    told = []
    for items in (before, after):
        narrow = stats_of([narrowed[item.entry.id] for item in items])
        told.append((len(items), percent(stats_of(speeds(items)).coverage), percent(narrow.coverage)))
    (n, wide, small), (n_after, wide_after, small_after) = told
    return (
        f"The {n} rows of the first six collections had been seen when that rule was made: {wide} of them are inside, "
        f"{small} with the multiple that left-out sources need. The {n_after} of the seventh to the tenth "
        f"had not: {wide_after}, and {small_after}."
    )


def page(judged: Sequence[Judged], narrowed: Mapping[str, Compared], sources: Mapping[str, str]) -> str:
    """All of it as Markdown."""
    scored = [item for item in judged if item.speed is not None]
    overall = stats_of(speeds(judged))
    groups = {name: by_group(judged, GROUPS[name], speeds) for name in GROUPS}
    lines = ["# Forecasts of runs from unseen sources", "", ABOUT, ""]
    summary = {**asdict(overall), "median_of_sources": median_of_sources(judged, speeds)}
    lines += [headline(f"{overall.n} of {len(judged)} rows scored", summary), "", width_section(judged, narrowed), ""]
    lines += ["## By group", ""]
    collections = {
        name: stats_of(speeds([item for item in judged if COLLECTIONS[item.entry.id[0]] == name]))
        for name in dict.fromkeys(COLLECTIONS.values())
    }
    for kind, found in {"collection": collections, **groups}.items():
        lines += table([kind, *STATS_HEAD], ([name, *cells(stats)] for name, stats in found.items()))
    head = ["row", "GPU", "run", "measured", "forecast", "80% interval", "error", "inside"]
    lines += ["## Every row", "", *table(head, map(line, scored))]
    lines += memory_section(judged)
    lines += doubt_section(judged)
    lines += skipped_section(ids_by_reason([item for item in judged if item.speed is None]))
    lines += ["## Sources", "", *table(["rows", "source"], ([name, text] for name, text in sources.items()))]
    return "\n".join(lines)


def content(judged: Sequence[Judged], narrowed: Mapping[str, Compared]) -> dict[str, Any]:
    """The same for programs; `narrowed` has the speeds by id with the width that left-out sources need."""
    rows = []
    for item in judged:
        speed, run = item.speed, item.entry.run
        if speed is not None and run is not None:
            narrow = narrowed[item.entry.id].predicted
            figures = {"measured": speed.measured, **speed.predicted.as_dict(), "error": speed.error}
            left_out = {"left_out_width_low": narrow.low, "left_out_width_high": narrow.high}
            rows.append({"id": item.entry.id, "method": run.run.method, **figures, **left_out})
    return {
        "schema": "tunecast.unseen/1",
        "rows": rows,
        "summary": stats_of(speeds(judged)).as_dict(),
        "memory": memory_content(by_counter(judged, of_process=False)),
        "process": memory_content(by_counter(judged, of_process=True)),
    }


def memory_content(judged: Sequence[Judged]) -> dict[str, Any]:
    """Rows of one kind of counter, and their summary."""
    rows = [
        {"id": item.entry.id, "measured": held.measured, **held.predicted.as_dict(), "error": held.error}
        for item in judged
        if (held := item.memory) is not None
    ]
    return {"rows": rows, "summary": stats_of(memories(judged)).as_dict()}


def main() -> None:
    """Both files."""
    rows = read_table(TABLE)
    sources: dict[str, str] = {}
    for row in rows:
        sources.setdefault(row["id"].partition("-")[0], row["source"])
    entries, priors = read_entries(rows), load_priors()
    judged = judge_all(entries, shipped)
    narrow = with_width(priors, float(priors["left_out_width"]))
    narrowed = {i.entry.id: i.speed for i in judge_all(entries, lambda _: narrow) if i.speed is not None}
    text = page(judged, narrowed, sources)
    PAGE.write_text(text.rstrip() + "\n", encoding="utf-8")
    PAGE.with_suffix(".json").write_text(json.dumps(content(judged, narrowed), indent=1) + "\n", encoding="utf-8")
    print(next(part for part in text.splitlines() if part.startswith("**")))


if __name__ == "__main__":
    main()
