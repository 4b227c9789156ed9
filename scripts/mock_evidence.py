#!/usr/bin/env python3
"""Evidence on mock GPUs: forecasts of deep runs from shallow calibrations, and coverage of the fit's intervals.

    python scripts/mock_evidence.py [--out results/validation/mock] [--only forecasts|coverage]

Forecasts: a quick calibration (steps of at most four layers) of three mocks, then the predicted against
the simulated step time of whole models. Coverage: 20 seeds and three variants of the hidden physics; the
80% interval of the fitted rate against the mock's true rate, on shapes of real layers that were not
calibrated. A mock's physics knows none of our formulas. Exits with 3 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunecast.calibrate.devices.protocol import Device, TrialSpec
from tunecast.calibrate.fit import StepFitter, step_inventory
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.plan import calibration_plan
from tunecast.calibrate.record import read_record
from tunecast.calibrate.runner import calibrate, trial_entry
from tunecast.calibrate.trace.spec import architecture_to_dict, run_to_dict
from tunecast.model.architectures import load_architecture
from tunecast.model.curves import columns, seconds
from tunecast.model.factors import Curve, FactorSet
from tunecast.model.factors_io import factor_set_from_record
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind, Operation
from tunecast.model.record_spread import with_unlike
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.time import curve_key, step_time
from tunecast.model.value import Z80

GPUS = ("a100-sxm4-80gb", "rtx-4090-24gb", "h100-sxm5-80gb")
LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
SHAPES: tuple[dict[str, Any], ...] = (
    {"max_length": 2048},
    {"max_length": 1024, "per_device_train_batch_size": 4},
    {"max_length": 4096},
)
MEDIAN_BAR, WORST_BAR = 0.05, 0.12
"""Largest median and worst absolute error of step time."""
COVERAGE_BAR = (0.70, 0.90)
VARIANTS = ("tiles", "throttling", "slow-host")
SEEDS = 20
MICRO = ("gemm", "memory", "dequant", "attention", "loss")
UNSEEN_MODELS = (
    "meta-llama/Llama-2-13b-hf", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-14B",
    "Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-72B", "meta-llama/Llama-3.2-3B", LLAMA_70B, LLAMA_8B,
)  # fmt: skip
UNSEEN_LENGTHS = (384, 640, 768, 1024, 1536, 2048, 3072, 4096)
UNSEEN_PER_KIND = {Kind.GEMM: 25, Kind.ATTENTION: 6, Kind.MEMORY: 8, Kind.DEQUANT: 4}
TRUTH_REPEATS = 41
"""Repetitions whose median is taken as the mock's true rate; its noise is about a percent each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastRow:
    """One run on one mock, predicted and simulated."""

    mock: str
    model: str
    method: str
    max_length: int
    batch: int
    predicted_s: float
    low_s: float
    high_s: float
    simulated_s: float
    bound_by: str

    @property
    def error(self) -> float:
        """Predicted over simulated, less one."""
        return self.predicted_s / self.simulated_s - 1.0

    @property
    def inside(self) -> bool:
        """Whether the simulated time is inside the 80% interval."""
        return self.low_s <= self.simulated_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageRow:
    """One unseen shape of one calibration."""

    mock: str
    variant: str
    kind: str
    log_error: float
    """Log of true over fitted seconds."""
    log_sd: float

    @property
    def inside(self) -> bool:
        """Whether the true rate is inside the fit's 80% interval."""
        return abs(self.log_error) <= Z80 * self.log_sd


def make_run(model: str, **options: Any) -> Run:
    """A run of the catalog model, as the command line resolves it, its steps driven by no Trainer."""
    return resolve_run(load_architecture(model), {**options, "trainer_loop": False}, gpu_has_bf16=True).run


def simulated_seconds(device: Device, model: str, run: Run) -> float:
    """The mock's step time, memory ignored."""
    params = {"architecture": architecture_to_dict(load_architecture(model)), "run": run_to_dict(run), "steps": 5}
    return statistics.median(device.run(TrialSpec(bench="step", params=params, repeats=5, warmup=2)).samples_s)


def calibrated(gpu: str) -> tuple[Device, FactorSet]:
    """A quick calibration of the mock through the ordinary path: record file, fit, factors."""
    device = open_mock(f"mock:{gpu}", ignore_memory=True)
    with tempfile.TemporaryDirectory() as folder:
        path = calibrate(open_mock(f"mock:{gpu}"), mode="quick", out_dir=folder)
        return device, with_unlike(factor_set_from_record(read_record(path), name=path.name))


def wanted_runs(gpu: str) -> Iterable[tuple[str, str]]:
    """(model, method) to forecast on this GPU."""
    yield from ((LLAMA_8B, "lora"), (LLAMA_8B, "qlora"))
    if not gpu.startswith("rtx"):
        yield LLAMA_70B, "qlora"


def forecast_rows(gpu: str) -> list[ForecastRow]:
    """Every wanted run on one mock."""
    device, factors = calibrated(gpu)
    rows = []
    for model, method in wanted_runs(gpu):
        for shape in SHAPES:
            run = make_run(model, method=method, **shape)
            found = step_time(step_operations(load_architecture(model), run), factors, run=run)
            rows.append(
                ForecastRow(
                    mock=device.id,
                    model=model,
                    method=method,
                    max_length=run.max_length,
                    batch=run.per_device_train_batch_size,
                    predicted_s=found.step_time_s.value,
                    low_s=found.step_time_s.low,
                    high_s=found.step_time_s.high,
                    simulated_s=simulated_seconds(device, model, run),
                    bound_by=found.bound_by,
                )
            )
    return rows


def shape_params(operation: Operation) -> tuple[str, dict[str, Any]] | None:
    """The microbenchmark of exactly this operation's shape, None where there is none."""
    if operation.kind is Kind.GEMM and operation.layout in ("nt", "nn", "tn") and operation.dtype == "bf16":
        m, n, k = operation.shape[:3]
        return "gemm", {"m": m, "n": n, "k": k, "layout": operation.layout, "dtype": "bf16"}
    if operation.kind is Kind.MEMORY and operation.launches == 1 and operation.bytes >= 2**16:
        return "memory", {"op": "copy", "bytes": int(operation.bytes), "dtype": "bf16"}
    if operation.kind is Kind.DEQUANT:
        (elements,) = operation.shape
        nf4 = {"quant_type": "nf4", "double_quant": True, "dtype": "bf16"}
        return "dequant", {"elements": elements, "rows": elements // 1024, "cols": 1024, **nf4}
    if operation.kind is Kind.ATTENTION:
        batch, heads, kv_heads, length, _, head_dim = operation.shape
        direction = "backward" if operation.phase == "backward" else "forward"
        shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length, "head_dim": head_dim}
        return "attention", {**shape, "dtype": "bf16", "pass": direction}
    return None


def layer_operations(rng: np.random.Generator) -> list[Operation]:
    """Operations of real layers: several models, lengths, batches, ranks and methods, drawn at random."""
    found: list[Operation] = []
    for _ in range(12):
        model = str(rng.choice(UNSEEN_MODELS))
        run = make_run(
            model,
            method=str(rng.choice(["lora", "qlora"])),
            max_length=int(rng.choice(UNSEEN_LENGTHS)),
            per_device_train_batch_size=int(rng.choice([1, 2, 3])),
            lora_r=int(rng.choice([8, 16, 32, 64])),
        )
        found += step_operations(load_architecture(model), run)
    return found


def unseen_shapes(
    rng: np.random.Generator, seen: set[str], curves: Container[str]
) -> list[tuple[Operation, TrialSpec]]:
    """Distinct shapes that the calibration has not measured, a fixed number of each kind, of kernels with `curves` from
    microbenchmarks of their own: strided copies and masked attention are other kernels."""
    pool: dict[Kind, dict[str, tuple[Operation, TrialSpec]]] = {kind: {} for kind in UNSEEN_PER_KIND}
    for operation in layer_operations(rng):
        params = shape_params(operation)
        if params is None or operation.kind not in pool or curve_key(operation) not in curves:
            continue
        spec = TrialSpec(bench=params[0], params=params[1], repeats=TRUTH_REPEATS, warmup=2)
        if spec.key not in seen:
            pool[operation.kind][spec.key] = (operation, spec)
    chosen = []
    for kind, wanted in UNSEEN_PER_KIND.items():
        candidates = [pool[kind][key] for key in sorted(pool[kind])]
        order = rng.permutation(len(candidates))[:wanted]
        chosen += [candidates[i] for i in order]
    return chosen


def micro_curves(device: Device) -> tuple[dict[str, Curve], set[str]]:
    """Curves from the microbenchmarks of a quick calibration, and what they measured."""
    hardware = device.hardware()
    device.settle(20.0)
    specs = [spec for spec in calibration_plan(hardware) if spec.bench in MICRO]
    trials = [trial_entry(spec, device.run(spec)) for spec in specs]
    fitter = StepFitter(gpu=device.id, synchronous=False, processors=hardware.multiprocessors, inventory=step_inventory)
    curves = {name: fitted.curve for name, fitted in fitter.fit_curves(trials).items()}
    return curves, {spec.key for spec in specs}


def coverage_rows(gpu: str, seed: int, variant: str) -> list[CoverageRow]:
    """Unseen shapes of one mock."""
    device = open_mock(f"mock:{gpu}#{seed}@{variant}", ignore_memory=True)
    curves, seen = micro_curves(device)
    rows = []
    for operation, spec in unseen_shapes(np.random.default_rng(seed), seen, curves):
        true_s = statistics.median(device.run(spec).samples_s)
        curve = curves[curve_key(operation)]
        timed = seconds(curve, columns([operation]))
        benched_s = max(float(timed.seconds[0]), curve.params.get("issue_s", 0.0))
        rows.append(
            CoverageRow(
                mock=device.id,
                variant=variant,
                kind=str(operation.kind),
                log_error=float(np.log(true_s / benched_s)),
                log_sd=float(timed.log_sd[0]),
            )
        )
    return rows


def forecast_summary(rows: Sequence[ForecastRow]) -> dict[str, Any]:
    """Median and worst absolute error, and coverage of the step-time interval with its width."""
    errors = [abs(row.error) for row in rows]
    return {
        "rows": len(rows),
        "median_abs_error": statistics.median(errors),
        "worst_abs_error": max(errors),
        "coverage": statistics.mean(row.inside for row in rows),
        "median_half_width": statistics.median(row.high_s / row.predicted_s - 1.0 for row in rows),
        "bar": {"median": MEDIAN_BAR, "worst": WORST_BAR},
    }


def coverage_summary(rows: Sequence[CoverageRow]) -> dict[str, Any]:
    """Coverage overall, by variant and by kind, each with the median error and half width."""

    def part(chosen: Sequence[CoverageRow]) -> dict[str, float]:
        return {
            "shapes": len(chosen),
            "coverage": statistics.mean(row.inside for row in chosen),
            "median_abs_error": statistics.median(abs(row.log_error) for row in chosen),
            "median_half_width": statistics.median(Z80 * row.log_sd for row in chosen),
        }

    def by(field: str) -> dict[str, dict[str, float]]:
        names = sorted({getattr(row, field) for row in rows})
        return {name: part([row for row in rows if getattr(row, field) == name]) for name in names}

    return {"all": part(rows), "variant": by("variant"), "kind": by("kind"), "bar": list(COVERAGE_BAR)}


def forecast_table(rows: Sequence[ForecastRow]) -> list[str]:
    """Markdown lines."""
    lines = ["| mock | model | method | length x batch | predicted s | simulated s | error | inside 80% |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        interval = f"{row.predicted_s:.3f} ({row.low_s:.3f} to {row.high_s:.3f})"
        lines.append(
            f"| {row.mock} | {row.model} | {row.method} | {row.max_length} x {row.batch} | {interval} "
            f"| {row.simulated_s:.3f} | {row.error:+.1%} | {'yes' if row.inside else 'no'} |"
        )
    return lines


def coverage_table(summary: dict[str, Any]) -> list[str]:
    """Markdown lines."""
    lines = ["| shapes | count | inside 80% | median error | median half width |", "|---|---|---|---|---|"]
    parts = {"all": summary["all"], **summary["variant"], **summary["kind"]}
    for name, part in parts.items():
        lines.append(
            f"| {name} | {part['shapes']} | {part['coverage']:.1%} | {part['median_abs_error']:.1%} "
            f"| {part['median_half_width']:.1%} |"
        )
    return lines


def rounded(value: Any) -> Any:
    """Floats to five significant digits, all the way down."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def write(folder: Path, name: str, title: str, content: dict[str, Any], table: Iterable[str]) -> None:
    """One JSON file, a line per row, and one Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(row, sort_keys=True) for row in rounded(content["rows"]))
    summary = json.dumps(rounded(content["summary"]), sort_keys=True)
    text = f'{{"summary": {summary},\n "rows": [\n  {rows}]}}\n'
    (folder / f"{name}.json").write_text(text, encoding="utf-8")
    made = "Made by `scripts/mock_evidence.py`."
    (folder / f"{name}.md").write_text("\n".join([f"# {title}", "", made, "", *table]) + "\n", encoding="utf-8")


def run_forecasts(folder: Path) -> bool:
    """Write the forecast evidence; whether it is within the bars."""
    rows = [row for gpu in GPUS for row in forecast_rows(gpu)]
    summary = forecast_summary(rows)
    content = {"summary": summary, "rows": [asdict(row) | {"error": row.error, "inside": row.inside} for row in rows]}
    line = (
        f"Median absolute error {summary['median_abs_error']:.1%}, worst {summary['worst_abs_error']:.1%}; "
        f"{summary['coverage']:.0%} inside the 80% interval (median half width {summary['median_half_width']:.1%})."
    )
    write(
        folder, "forecasts", "Deep runs forecast from shallow calibrations", content, [line, "", *forecast_table(rows)]
    )
    print(line)
    return summary["median_abs_error"] <= MEDIAN_BAR and summary["worst_abs_error"] <= WORST_BAR


def run_coverage(folder: Path) -> bool:
    """Write the coverage evidence; whether it is within the bars."""
    rows: list[CoverageRow] = []
    for seed in range(SEEDS):
        for variant in VARIANTS:
            rows += coverage_rows(GPUS[seed % len(GPUS)], seed, variant)
            print(f"seed {seed} {variant}: {statistics.mean(r.inside for r in rows):.1%} so far", file=sys.stderr)
    summary = coverage_summary(rows)
    content = {"summary": summary, "rows": [asdict(row) | {"inside": row.inside} for row in rows]}
    write(folder, "coverage", "Coverage of fitted rates on shapes never seen", content, coverage_table(summary))
    print(f"Coverage {summary['all']['coverage']:.1%} over {len(rows)} unseen shapes.")
    return COVERAGE_BAR[0] <= summary["all"]["coverage"] <= COVERAGE_BAR[1]


def main() -> int:
    """Run what was asked; 0 when every bar is met, else 3."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/validation/mock"))
    parser.add_argument("--only", choices=["forecasts", "coverage"])
    arguments = parser.parse_args()
    tasks = {"forecasts": run_forecasts, "coverage": run_coverage}
    met = [task(arguments.out) for name, task in tasks.items() if arguments.only in (None, name)]
    return 0 if all(met) else 3


if __name__ == "__main__":
    sys.exit(main())
