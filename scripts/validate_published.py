"""Forecast every published run by priors that have not seen it, and write what came of it.

    scripts/validate-published            writes results/validation/{time,memory}.{json,md}
    scripts/validate-published --pages    only the pages, from the JSON that is there

Each row is forecast with its own source left out of the fit, effects and interval widths included; a
second time with its own GPU left out. Beside it stand the classic 6ND at a fixed MFU, and ftuneai where
scripts/rival_ftuneai.py has been run. Published runs outside results/published are not used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from validation_memory_page import memory_page
from validation_pages import time_page

from tunecast.calibrate.priors_fit import as_shipped
from tunecast.calibrate.priors_problem import timed_rows
from tunecast.calibrate.priors_records import shipped_records
from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.run_table import read_table
from tunecast.calibrate.validate import COUNTER, Compared, Judged, PriorsOf, judge_all, read_entries
from tunecast.calibrate.validate_folds import generation_of, gpu_of, leave_out, shipped, source_of
from tunecast.calibrate.validate_summary import (
    GROUPS,
    LARGEST,
    by_group,
    degrees_of,
    median_of_sources,
    memories,
    size_class,
    speeds,
    stats_of,
    verdict_shares,
)
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.units import gib

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "results" / "published" / "published-runs.csv"
OUT = ROOT / "results" / "validation"
CLASSIC_MFU = 0.35
"""What the classic estimate is given when nothing is measured; it is the rival here, not part of a forecast."""
FLOPS_PER_PARAM_TOKEN = 6
OF_VERDICTS = {"called_wrong": "verdict"}
"""Parts of a file whose explanations are of another kind than the file's."""
Pick = Callable[[Iterable[Judged]], list[Compared]]


def classic_tokens_per_s(run: PublishedRun) -> float | None:
    """MFU x dense peak x GPUs / 6N: every parameter trained, no recompute, no attention, no memory traffic."""
    peak = load_gpus()[run.gpu].peaks.get(run.run.compute_dtype)
    if peak is None:
        return None
    return CLASSIC_MFU * peak * run.run.num_gpus / (FLOPS_PER_PARAM_TOKEN * run.architecture.total_params)


def rival() -> dict[str, Any]:
    """Answers of the rival by row id; empty where it has not been run."""
    path = OUT / "ftuneai.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {"version": None, "rows": {}}


def described(item: Judged) -> dict[str, Any]:
    """What a page says of a row besides its figures."""
    run, prediction = item.entry.run, item.prediction
    assert run is not None
    assert prediction is not None
    parts = sorted(prediction.step.parts_s.items(), key=lambda pair: -pair[1])
    return {
        "id": item.entry.id,
        "source": run.source,
        "model": run.architecture.name,
        "gpu": run.gpu,
        "num_gpus": run.run.num_gpus,
        "sharding": run.run.sharding,
        **({"degrees": degrees} if (degrees := degrees_of(run.run)) else {}),
        "method": run.run.method,
        "batch": run.run.per_device_train_batch_size,
        "length": run.run.max_length,
        "size": size_class(run),
        "counter": run.counter,
        "verdict": prediction.verdict,
        "out_of_memory": item.entry.out_of_memory,
        "bound_by": prediction.step.bound_by,
        "shares": {name: value / prediction.step.step_time_s.value for name, value in parts[:3]},
    }


def figures(compared: Compared, scale: float) -> dict[str, Any]:
    """A comparison as stored."""
    value = compared.predicted.scaled(scale)
    return {
        "measured": compared.measured * scale,
        "value": value.value,
        "low": value.low,
        "high": value.high,
        "error": compared.error,
        "inside": compared.inside,
        "half_width": compared.half_width,
    }


def other(value: float | None, measured: float) -> dict[str, float] | None:
    """Another estimator's answer."""
    return None if value is None else {"value": value, "error": value / measured - 1.0}


def groups_of(judged: Sequence[Judged], pick: Pick) -> dict[str, Any]:
    """Statistics by every grouping, half-widths included."""
    return {kind: {name: full(s) for name, s in by_group(judged, key, pick).items()} for kind, key in GROUPS.items()}


def full(stats: Any) -> dict[str, Any]:
    """Statistics with the median half-width."""
    sides = {"below": stats.below, "above": stats.above}
    return {**stats.as_dict(), **sides, "median_half_width": stats.median_half_width}


def overall(judged: Sequence[Judged], pick: Pick) -> dict[str, Any]:
    """The headline figures."""
    return {**full(stats_of(pick(judged))), "median_of_sources": median_of_sources(judged, pick)}


def skipped(judged: Sequence[Judged], pick: Pick) -> dict[str, list[str]]:
    """Ids of rows without a comparison of this kind, by reason."""
    found: dict[str, list[str]] = {}
    for item in judged:
        if not pick([item]):
            half = item.why_no_speed if pick is speeds else item.why_no_memory
            found.setdefault(item.skipped or half, []).append(item.entry.id)
    return dict(sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[0])))


def time_content(
    by_source: Sequence[Judged],
    by_gpu: Sequence[Judged],
    by_generation: Sequence[Judged],
    widened: Sequence[Judged],
    explained: Mapping[str, str],
) -> dict[str, Any]:
    """results/validation/time.json."""
    theirs = rival()
    others = (by_gpu, by_generation, widened)
    unseen, older, wide = ({i.entry.id: i.speed for i in items if i.speed is not None} for items in others)
    rows = []
    for item in by_source:
        if item.speed is None or item.entry.run is None:
            continue
        measured = item.speed.measured
        answer = theirs["rows"].get(item.entry.id, {}).get("tokens_per_s")
        rows.append(
            {
                **described(item),
                **figures(item.speed, 1.0),
                "gpu_left_out": figures(unseen[item.entry.id], 1.0),
                "generation_left_out": figures(older[item.entry.id], 1.0),
                "as_shipped": figures(wide[item.entry.id], 1.0),
                "classic": other(classic_tokens_per_s(item.entry.run), measured),
                "ftuneai": other(answer, measured),
                "why": explained.get(item.entry.id, ""),
            }
        )
    large = [item for item in by_source if item.entry.run is not None and size_class(item.entry.run) == LARGEST]
    return {
        "made_by": "scripts/validate-published",
        "classic_mfu": CLASSIC_MFU,
        "ftuneai": theirs["version"],
        "summary": overall(by_source, speeds),
        "gpu_left_out": overall(by_gpu, speeds),
        "gpu_left_out_by_gpu": groups_of(by_gpu, speeds)["GPU"],
        "generation_left_out": overall(by_generation, speeds),
        "generation_left_out_by_gpu": groups_of(by_generation, speeds)["GPU"],
        "as_shipped": overall(widened, speeds),
        "large": full(stats_of(speeds(large))),
        "groups": groups_of(by_source, speeds),
        "rows": rows,
        "skipped": skipped(by_source, speeds),
    }


def auxiliary_content() -> dict[str, Any]:
    """Rows that are for ratios and checks alone, by the shipped priors, in which none of them took part."""
    checked = [row for row in read_table(TABLE) if row["set"] == "auxiliary" and row["confidence"] != "low"]
    sources = {row["id"].partition("-")[0]: row["source"] for row in checked}
    judged = [
        item
        for item in judge_all(read_entries(row | {"set": "training"} for row in checked), shipped)
        if item.speed is not None
    ]
    read = {item.entry.id.partition("-")[0] for item in judged}
    return {
        "summary": overall(judged, speeds),
        "groups": {kind: found for kind, found in groups_of(judged, speeds).items() if kind in ("source", "GPU")},
        "rows": [{**described(item), **figures(item.speed, 1.0)} for item in judged if item.speed is not None],
        "sources": {name: text for name, text in sources.items() if name in read},
    }


def memory_content(judged: Sequence[Judged], why: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """results/validation/memory.json."""
    theirs = rival()
    rows = []
    for item in judged:
        if item.memory is not None:
            mine = figures(item.memory, gib(1))
            answer = other(theirs["rows"].get(item.entry.id, {}).get("memory_gib"), mine["measured"])
            rows.append({**described(item), **mine, "ftuneai": answer, "why": why["memory"].get(item.entry.id, "")})
    listed = [item for item in judged if item.prediction is not None and of_no_counter(item.why_no_memory)]
    tests = [item for item in judged if item.prediction is not None and item.entry.out_of_memory]
    ran = [item for item in judged if item.prediction is not None and not item.entry.out_of_memory]
    return {
        "made_by": "scripts/validate-published",
        "ftuneai": theirs["version"],
        "summary": overall(judged, memories),
        "groups": groups_of(judged, memories),
        "verdicts": verdict_shares(judged),
        "called_wrong": [
            {**described(item), "why": why["verdict"].get(item.entry.id, "")}
            for item in ran
            if item.prediction and item.prediction.verdict == "no"
        ],
        "out_of_memory": [described(item) for item in tests],
        "listed": [listed_row(item) for item in listed],
        "rows": rows,
        "skipped": skipped(judged, memories),
    }


def of_no_counter(why: str) -> bool:
    """Whether a peak is not compared for want of a counter that forecasts are of."""
    return "neither allocated" in why or COUNTER in why


def listed_row(item: Judged) -> dict[str, Any]:
    """A row whose counter is not stated: both views beside its figure, no error."""
    assert item.prediction is not None
    run, memory = item.entry.run, item.prediction.memory
    assert run is not None
    assert run.peak_bytes is not None
    reserved = memory.reserved_bytes
    return {
        **described(item),
        "stated_gib": gib(run.peak_bytes),
        "allocated_gib": gib(memory.allocated_bytes.value),
        "reserved_gib": None if reserved is None else gib(reserved.value),
    }


def explanations() -> dict[str, dict[str, str]]:
    """Committed explanations: kind to row id to sentence."""
    loaded = json.loads((OUT / "explanations.json").read_text(encoding="utf-8"))
    return {
        kind: {row_id: entry["why"] for entry in entries for row_id in entry["rows"]}
        for kind, entries in loaded.items()
    }


def computed() -> dict[str, dict[str, Any]]:
    """Both files, from the table."""
    entries, records = read_entries(read_table(TABLE)), shipped_records()[0]
    runs = [entry.run for entry in entries if entry.run is not None and not entry.out_of_memory]
    speed_ids = {row.run.id for row in timed_rows(runs)}

    def judged(priors_of: PriorsOf, only: set[str] | None = None) -> list[Judged]:
        return judge_all([e for e in entries if only is None or e.id in only], priors_of)

    without_source = leave_out(runs, source_of, records=records, all_at_once=True)
    by_source = judged(without_source)
    widened = judged(lambda run: as_shipped(without_source(run)), speed_ids)
    by_gpu = judged(leave_out(runs, gpu_of, records=records, all_at_once=True), speed_ids)
    by_generation = judged(leave_out(runs, generation_of, records=records, all_at_once=True), speed_ids)
    why = explanations()
    return {
        "time": time_content(by_source, by_gpu, by_generation, widened, why["time"])
        | {"auxiliary": auxiliary_content()},
        "memory": memory_content(by_source, why),
    }


def explained_anew(content: Any, why: Mapping[str, str]) -> Any:
    """Rows as they were computed, with today's explanations."""
    if isinstance(content, dict):
        told = {"why": why.get(content["id"], "")} if "why" in content and "id" in content else {}
        return {key: explained_anew(value, why) for key, value in content.items()} | told
    return [explained_anew(value, why) for value in content] if isinstance(content, list) else content


def written(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The files that are there, explained anew."""
    why = explanations()
    loaded = {name: json.loads((OUT / f"{name}.json").read_text(encoding="utf-8")) for name in names}
    return {
        name: {key: explained_anew(part, why[OF_VERDICTS.get(key, name)]) for key, part in content.items()}
        for name, content in loaded.items()
    }


def main(arguments: Sequence[str]) -> None:
    """Write the files."""
    pages = {"time": time_page, "memory": memory_page}
    for name, content in (written(pages) if "--pages" in arguments else computed()).items():
        text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
        (OUT / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        (OUT / f"{name}.md").write_text(pages[name](json.loads(text)), encoding="utf-8")
    print(f"wrote {OUT}/time.md and memory.md")


if __name__ == "__main__":
    main(sys.argv[1:])
