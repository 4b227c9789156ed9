#!/usr/bin/env python3
"""Diverse runs on mock GPUs that no prior has seen, forecast with and without a calibration.

    python scripts/mock_diverse.py [--out results/validation/mock] [--only simulated|calibrated|priors|records]

``simulated`` traces the code of transformers, PEFT and bitsandbytes for every run and simulates it on three mocks of
every card (minutes). ``calibrated`` calibrates one mock of every card (quick: steps of at most four layers of a Llama)
and forecasts the runs on it (minutes). ``priors`` forecasts them on all mocks with what ships for a card that nobody
has measured: seconds, and to be run again whenever the priors change. ``records`` fits the priors anew for every card,
with a calibration of one of its mocks read as a record in ``results/records`` would be, and forecasts the runs on all
cards by them (minutes; no bar). Exits with 3 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mock_evidence import rounded, simulated_seconds
from mock_unlike import of_unlike, told_of_unlike

from tunecast.calibrate.fitted_records import fitted_records
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.priors_fit import as_shipped, priors_of
from tunecast.calibrate.priors_problem import read_training, rows_of_records
from tunecast.calibrate.priors_records import RecordRuns, record_runs
from tunecast.calibrate.record import read_record
from tunecast.calibrate.runner import calibrate
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import load_architecture
from tunecast.model.factors import FactorSet
from tunecast.model.grouped import on_capability
from tunecast.model.inventory import step_operations
from tunecast.model.on_device import target_factors
from tunecast.model.priors import load_priors, prior_factors
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.target import Target, resolve_targets
from tunecast.model.time import step_time

CARDS = (
    "a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-4090-24gb", "rtx-3090-24gb", "l4-24gb", "a10-24gb", "rtx-5090-32gb",
    "mi300x-192gb",
)  # fmt: skip
CALIBRATED_SEED = 11
SEEDS = (11, 12, 13)
"""Mocks of each card: hidden physics drawn anew; 0 has served while the model was built, these have not."""
TABLE = Path(__file__).resolve().parent.parent / "results" / "published" / "published-runs.csv"
Options = dict[str, Any]
FUSED = {"optim": "adamw_torch_fused"}
"""Full runs name their update: a default that moves would forecast another run than was simulated."""
RUNS: tuple[tuple[str, Options], ...] = (
    ("Qwen/Qwen2.5-0.5B", {"method": "full", "max_length": 512, "per_device_train_batch_size": 8, **FUSED}),
    ("Qwen/Qwen2.5-0.5B", {"method": "lora", "max_length": 2048, "gradient_checkpointing": False}),
    ("Qwen/Qwen3-0.6B", {"method": "full", "max_length": 1024, "optim": "adamw_torch_fused"}),
    ("HuggingFaceTB/SmolLM2-1.7B", {"method": "full", "max_length": 2048, "gradient_accumulation_steps": 4, **FUSED}),
    ("meta-llama/Llama-3.2-1B", {"method": "qlora", "max_length": 4096, "gradient_checkpointing": False}),
    ("Qwen/Qwen2.5-1.5B", {"method": "lora", "max_length": 8192, "lora_r": 64}),
    ("meta-llama/Llama-3.2-3B", {"method": "full", "max_length": 1024, "optim": "adamw_bnb_8bit"}),
    ("google/gemma-2-2b", {"method": "lora", "max_length": 1024, "per_device_train_batch_size": 2}),
    ("Qwen/Qwen3-4B", {"method": "qlora", "max_length": 16384}),
    ("mistralai/Mistral-7B-v0.3", {"method": "lora", "max_length": 4096, "lora_target_modules": "q_proj,v_proj"}),
    ("Qwen/Qwen2.5-7B", {"method": "full", "max_length": 2048, **FUSED}),
    ("meta-llama/Llama-3.1-8B", {"method": "lora", "max_length": 512, "gradient_checkpointing": False}),
    ("meta-llama/Llama-3.1-8B", {"method": "qlora", "max_length": 8192}),
    ("meta-llama/Llama-3.1-8B", {"method": "lora", "max_length": 1024, "use_dora": True}),
    ("meta-llama/Llama-3.1-8B", {"method": "full", "max_length": 4096, "optim": "paged_adamw_8bit"}),
    ("allenai/OLMo-2-1124-7B", {"method": "qlora", "max_length": 1024, "per_device_train_batch_size": 8}),
    ("meta-llama/Llama-2-13b-hf", {"method": "lora", "max_length": 512, "gradient_accumulation_steps": 8}),
    ("microsoft/phi-4", {"method": "qlora", "max_length": 2048, "lora_r": 8}),
    ("deepseek-ai/DeepSeek-V2-Lite", {"method": "lora", "max_length": 1024}),
    ("mistralai/Mistral-Small-24B-Base-2501", {"method": "lora", "max_length": 16384}),
    ("Qwen/Qwen3-30B-A3B", {"method": "lora", "max_length": 2048}),
    ("Qwen/Qwen2.5-32B", {"method": "qlora", "max_length": 2048, "per_device_train_batch_size": 4}),
    ("Qwen/Qwen2.5-32B", {"method": "full", "max_length": 1024, **FUSED}),
    ("mistralai/Mixtral-8x7B-v0.1", {"method": "qlora", "max_length": 2048}),
    ("meta-llama/Llama-3.1-70B", {"method": "lora", "max_length": 4096}),
    ("meta-llama/Llama-3.1-70B", {"method": "qlora", "max_length": 512}),
    ("Qwen/Qwen2.5-72B", {"method": "qlora", "max_length": 8192}),
)
MEDIAN_BAR = 0.04
"""Largest median absolute error of step time after a quick calibration."""
COVERAGE_BAR = (0.72, 0.88)
"""Share of simulated times inside the 80% interval without a calibration."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One of `RUNS`, resolved."""

    model: str
    options: Options
    run: Run

    @property
    def what(self) -> str:
        """Method, length x batch, and what is unusual."""
        plain = ("method", "max_length", "per_device_train_batch_size")
        more = "".join(f", {name} {value}" for name, value in self.options.items() if name not in plain)
        return f"{self.run.method} {self.run.max_length} x {self.run.per_device_train_batch_size}{more}"

    def on(self, mock: str) -> Run:
        """The run on the card that a mock imitates."""
        capability = load_gpus()[card_of({"mock": mock})].compute_capability
        return on_capability(load_architecture(self.model), self.run, capability)


@cache
def cases() -> tuple[Case, ...]:
    """All runs as the command line resolves them on a card with bf16, their steps driven by no Trainer."""
    found = []
    for model, options in RUNS:
        asked = {**options, "trainer_loop": False}
        run = resolve_run(load_architecture(model), asked, gpu_has_bf16=True).run
        found.append(Case(model=model, options=options, run=run))
    return tuple(found)


def forecast_row(case: Case, mock: str, factors: FactorSet, simulated_s: float) -> Row:
    """Predicted against simulated."""
    run = case.on(mock)
    found = step_time(step_operations(load_architecture(case.model), run), factors, run=run)
    value = found.step_time_s
    return {
        "mock": mock,
        "model": case.model,
        "run": case.what,
        "predicted_s": value.value,
        "low_s": value.low,
        "high_s": value.high,
        "simulated_s": simulated_s,
        "error": value.value / simulated_s - 1.0,
        "inside": value.low <= simulated_s <= value.high,
        "bound_by": found.bound_by,
    }


def simulated_rows(card: str, seed: int) -> list[Row]:
    """Every run on one mock; memory is ignored, so that a small card has all of them."""
    device = open_mock(f"mock:{card}#{seed}", ignore_memory=True)
    return [
        {
            "mock": device.id,
            "model": case.model,
            "run": case.what,
            "simulated_s": simulated_seconds(device, case.model, case.on(device.id)),
        }
        for case in cases()
    ]


def calibrated_target(mock: str) -> Target:
    """A quick calibration by the ordinary path: record file, fit, factors."""
    with tempfile.TemporaryDirectory() as folder:
        path = calibrate(open_mock(mock), mode="quick", out_dir=folder)
        return resolve_targets([mock], fitted_records([path]))[0]


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors, coverage and width."""
    errors = [abs(row["error"]) for row in rows]
    return {
        "rows": len(rows),
        "median_abs_error": statistics.median(errors),
        "p90_abs_error": statistics.quantiles(errors, n=10, method="inclusive")[-1],
        "worst_abs_error": max(errors),
        "bias": statistics.median(row["error"] for row in rows),
        "coverage": statistics.mean(row["inside"] for row in rows),
        "median_half_width": statistics.median(row["high_s"] / row["predicted_s"] - 1.0 for row in rows),
    }


def grouped(rows: Sequence[Row], name_of: Callable[[Row], str]) -> dict[str, dict[str, Any]]:
    """A summary of each group."""
    names = dict.fromkeys(name_of(row) for row in rows)
    return {name: summary_of([row for row in rows if name_of(row) == name]) for name in names}


def card_of(row: Row) -> str:
    """The catalog card of a row's mock."""
    return str(row["mock"]).removeprefix("mock:").partition("#")[0]


def run_of(row: Row) -> str:
    """Model and run of a row."""
    return f"{row['model']} {row['run']}"


def group_table(head: str, groups: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown lines, one per group."""
    lines = [f"| {head} | rows | median error | p90 | worst | bias | inside 80% | median half width |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, s in groups.items():
        errors = " | ".join(f"{s[key]:.1%}" for key in ("median_abs_error", "p90_abs_error", "worst_abs_error"))
        rest = f"{s['bias']:+.1%} | {s['coverage']:.0%} | {s['median_half_width']:.1%}"
        lines.append(f"| {name} | {s['rows']} | {errors} | {rest} |")
    return [*lines, ""]


def worst_table(rows: Sequence[Row], count: int) -> list[str]:
    """The rows that are furthest off."""
    lines = ["| mock | model | run | predicted s | simulated s | error | bound by |", "|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:count]:
        interval = f"{row['predicted_s']:.3f} ({row['low_s']:.3f} to {row['high_s']:.3f})"
        lines.append(
            f"| {row['mock']} | {row['model']} | {row['run']} | {interval} | {row['simulated_s']:.3f} "
            f"| {row['error']:+.1%} | {row['bound_by']} |"
        )
    return lines


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """One file, a line per row, so that it diffs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(row) for row in rounded(list(content["rows"])))
    head = {key: rounded(value) for key, value in content.items() if key != "rows"}
    path.write_text(f'{json.dumps(head)[:-1]}{", " if head else ""}"rows": [\n  {rows}]}}\n', encoding="utf-8")


def write_page(path: Path, lines: Iterable[str]) -> None:
    """One Markdown page."""
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def told(summary: Mapping[str, Any]) -> str:
    """The sentence on top of a page."""
    return (
        f"{summary['rows']} rows: median absolute error {summary['median_abs_error']:.1%}, 90th percentile "
        f"{summary['p90_abs_error']:.1%}, worst {summary['worst_abs_error']:.1%}; {summary['coverage']:.0%} inside the "
        f"80% interval (median half width {summary['median_half_width']:.1%})."
    )


def run_simulated(folder: Path) -> bool:
    """Simulate all runs on all mocks."""
    rows: list[Row] = []
    for card in CARDS:
        for seed in SEEDS:
            rows += simulated_rows(card, seed)
        print(f"{card}: {len(rows)} simulated so far", file=sys.stderr)
    write_json(folder / "simulated.json", {"rows": rows})
    return True


def simulated(folder: Path) -> list[tuple[str, Case, float]]:
    """(mock, run, seconds) as they were simulated."""
    by_name = {(case.model, case.what): case for case in cases()}
    rows = json.loads((folder / "simulated.json").read_text(encoding="utf-8"))["rows"]
    return [(row["mock"], by_name[row["model"], row["run"]], row["simulated_s"]) for row in rows]


MADE = "Made by `python scripts/mock_diverse.py --only calibrated`, from times that `--only simulated` wrote."


def run_calibrated(folder: Path) -> bool:
    """Forecast the runs on one mock of each card from its calibration."""
    rows: list[Row] = []
    for card in CARDS:
        mock = f"mock:{card}#{CALIBRATED_SEED}"
        target = calibrated_target(mock)
        found = [
            forecast_row(case, mock, target_factors(target, case.run), true_s)
            for where, case, true_s in simulated(folder)
            if where == mock
        ]
        print(f"{card}: {told(summary_of(found))}", file=sys.stderr)
        rows += found
    by_card = {card: [row for row in rows if card_of(row) == card] for card in CARDS}
    summary, unlike = summary_of(rows), of_unlike(by_card)
    write_json(folder / "diverse.json", {"summary": summary | {"bar": MEDIAN_BAR, "unlike": unlike}, "rows": rows})
    page = ["# Diverse runs after a quick calibration", "", MADE, ""]
    page += [
        told(summary),
        "",
        told_of_unlike(unlike),
        "",
        *group_table("card", grouped(rows, card_of)),
        *group_table("run", grouped(rows, run_of)),
    ]
    write_page(folder / "diverse.md", [*page, "## The 20 worst rows", "", *worst_table(rows, 20)])
    print(told(summary))
    return bool(summary["median_abs_error"] <= MEDIAN_BAR)


def known_card(row: Row) -> str:
    """Whether published runs on the card are among the priors: its interval is then narrower."""
    return "among the priors" if card_of(row) in load_priors()["device_effects"] else "not among the priors"


WHY = """The priors describe real cards with real software; a mock's physics is drawn from ranges of its own, which
nobody has compared with a real card, and nothing is tuned to this page. Rows of one card are not independent: what its
mocks share with each other and not with the prior shows as bias. A card among the priors has the narrow interval that
published runs on it earn, and a mock that borrows its name has not earned it."""


def run_priors(folder: Path) -> bool:
    """Forecast the simulated runs without any calibration."""
    truths = simulated(folder)
    targets = {mock: resolve_targets([mock], {})[0] for mock, _, _ in truths}
    rows = [forecast_row(case, mock, target_factors(targets[mock], case.run), true_s) for mock, case, true_s in truths]
    groups = {
        "published runs on the card": grouped(rows, known_card),
        "card": grouped(rows, card_of),
        "bound by": grouped(rows, lambda row: str(row["bound_by"])),
        "run": grouped(rows, run_of),
    }
    summary = summary_of(rows)
    content = {"summary": summary | {"bar": list(COVERAGE_BAR)}, **groups}
    text = json.dumps(rounded(content), indent=1) + "\n"
    (folder / "without_calibration.json").write_text(text, encoding="utf-8")
    command = "Made by `python scripts/mock_diverse.py --only priors`."
    page = ["# The same runs without a calibration", "", command, "", told(summary), "", *WHY.splitlines(), ""]
    for head, group in groups.items():
        page += group_table(head, group)
    write_page(folder / "without_calibration.md", page)
    print(told(summary))
    return COVERAGE_BAR[0] <= float(summary["coverage"]) <= COVERAGE_BAR[1]


def rows_by_priors(folder: Path, priors: Mapping[str, Any]) -> list[Row]:
    """Every run on the calibrated mock of every card, forecast by these priors."""
    priors, gpus = {"memory_overhead_bytes": {}, **priors}, load_gpus()
    return [
        forecast_row(case, mock, prior_factors(gpus[card_of({"mock": mock})], case.run, priors), true_s)
        for mock, case, true_s in simulated(folder)
        if mock.endswith(f"#{CALIBRATED_SEED}")
    ]


def steps_of_mock(card: str) -> RecordRuns:
    """The whole steps of a quick calibration of the card's mock, as those of a record of the card."""
    with tempfile.TemporaryDirectory() as folder:
        path = calibrate(open_mock(f"mock:{card}#{CALIBRATED_SEED}"), mode="quick", out_dir=folder)
        return record_runs(read_record(path), f"record of a mock {card}", load_gpus()[card])


ABOUT_RECORDS = """What one record in `results/records` would do to the priors. For every card a quick calibration
of one of its mocks was read as a record of the card, and the priors were fitted anew with it; then the 27 runs were
forecast by priors, on the mock itself (whole models, of which the record has steps of at most four layers) and on
those of the other cards, whose physics shares with it only what the mocks' ranges share. The multiple that widens all
intervals comes from sources left out; records are one of them. Nothing is tuned to this page."""


def run_records(folder: Path) -> bool:
    """Forecast the runs by priors that have read one record more."""
    published = read_training(TABLE).rows
    before = rows_by_priors(folder, as_shipped(priors_of(published)))
    lines = ["| card | runs on | rows | median error, without and with | inside 80% | median half width |"]
    lines.append("|---|---|---|---|---|---|")
    own: dict[str, list[Row]] = {"without": [], "with": []}
    for card in CARDS:
        after = rows_by_priors(folder, as_shipped(priors_of([*published, *rows_of_records([steps_of_mock(card)])])))
        own["without"] += [row for row in before if card_of(row) == card]
        own["with"] += [row for row in after if card_of(row) == card]
        for where, here in (("it", True), ("the other cards", False)):
            pair = [summary_of([row for row in rows if (card_of(row) == card) == here]) for rows in (before, after)]
            cells = (
                " -> ".join(f"{s[key]:{form}}" for s in pair)
                for key, form in (("median_abs_error", ".1%"), ("coverage", ".0%"), ("median_half_width", ".1%"))
            )
            lines.append(f"| {card} | {where} | {pair[0]['rows']} | {' | '.join(cells)} |")
        print(lines[-2], file=sys.stderr)
    told_of = [f"{name.capitalize()} a record of its card: {told(summary_of(rows))}" for name, rows in own.items()]
    command = "Made by `python scripts/mock_diverse.py --only records`."
    page = ["# Priors that have read a record", "", command, "", *ABOUT_RECORDS.splitlines(), "", *told_of, "", *lines]
    write_page(folder / "records.md", page)
    print("\n".join(told_of))
    return True


def main() -> int:
    """Run what was asked; 0 when every bar is met, else 3."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/validation/mock"))
    parser.add_argument("--only", choices=["simulated", "calibrated", "priors", "records"])
    arguments = parser.parse_args()
    tasks = {"simulated": run_simulated, "calibrated": run_calibrated, "priors": run_priors, "records": run_records}
    met = [task(arguments.out) for name, task in tasks.items() if arguments.only in (None, name)]
    return 0 if all(met) else 3


if __name__ == "__main__":
    sys.exit(main())
