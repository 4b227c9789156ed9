"""The whole fit on synthetic trials made by a simulator of its own: a queue of kernels, written here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ci_share import some_for_ci

from tunecast.calibrate.fit import StepFitter, fit_record
from tunecast.calibrate.fit_rates import model_flops, rate_factors
from tunecast.calibrate.fit_steps import MeasuredStep, folds, remaining_sds
from tunecast.calibrate.trace.spec import architecture_to_dict, run_to_dict
from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.factors_io import factor_set_from_record
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.time import step_time
from tunecast.model.value import Z80

Trial = dict[str, Any]
RATE, BANDWIDTH, FLOOR_S = 200e12, 1.6e12, 3e-6
HOT, HOST_S, OVERHEAD_S = 1.08, 9e-6, 1.5e-3
"""In a step products are 8% slower than alone, a launch costs the host 9 us, and every step 1.5 ms more."""


def toy(width: int, depth: int) -> Architecture:
    return Architecture(
        name=f"toy-{width}x{depth}",
        model_type="llama",
        hidden_size=width,
        vocab_size=1000,
        groups=(),
        tie_word_embeddings=True,
        max_position=None,
    )


def toy_layers(architecture: Architecture) -> int:
    return int(architecture.name.rsplit("x", 1)[1])


def toy_operations(architecture: Architecture, run: Run, platform: str) -> tuple[Operation, ...]:
    """A network of four square products and six elementwise kernels per layer; backward has twice the products."""
    tokens, width = run.tokens_per_micro_batch, architecture.hidden_size
    times = toy_layers(architecture) * run.gradient_accumulation_steps
    gemm = {"kind": Kind.GEMM, "flops": 2.0 * tokens * width * width, "shape": (tokens, width, width), "layout": "nt"}
    moved = {"kind": Kind.MEMORY, "bytes": 4.0 * tokens * width}
    return (
        Operation(name="mm", phase=Phase.FORWARD, count=4.0 * times, **gemm),  # type: ignore[arg-type]
        Operation(name="add", phase=Phase.FORWARD, count=6.0 * times, **moved),  # type: ignore[arg-type]
        Operation(name="mm", phase=Phase.BACKWARD, count=8.0 * times, **gemm),  # type: ignore[arg-type]
        Operation(name="add", phase=Phase.BACKWARD, count=9.0 * times, **moved),  # type: ignore[arg-type]
        Operation(name="adam", kind=Kind.OPTIMIZER, phase=Phase.OPTIMIZER, bytes=1e6, count=8.0),
    )


def gemm_seconds(m: int, n: int, k: int) -> float:
    return 2.0 * (m + 60) * (n + 60) * (k + 50) / RATE + FLOOR_S


def kernel_seconds(operation: Operation) -> float:
    if operation.kind is Kind.GEMM:
        return HOT * gemm_seconds(*operation.shape)
    return operation.bytes / BANDWIDTH + FLOOR_S


def queue_seconds(architecture: Architecture, run: Run, host_s: float) -> float:
    """Kernel by kernel: layers in order, micro-batches in order, the device behind or waiting for the host."""
    by_phase: dict[Phase, list[tuple[float, int]]] = {phase: [] for phase in Phase}
    micro = toy_layers(architecture) * run.gradient_accumulation_steps
    for operation in toy_operations(architecture, run, "cuda"):
        repeats = 1 if operation.phase is Phase.OPTIMIZER else micro
        by_phase[operation.phase].append((kernel_seconds(operation), round(operation.count / repeats)))
    segments = [(phase, toy_layers(architecture)) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    order = segments * run.gradient_accumulation_steps + [(Phase.OPTIMIZER, 1)]
    host = device = 0.0
    for phase, layers in order:
        for seconds, count in by_phase[phase] * layers:
            for _ in range(count):
                host += host_s
                device = max(device, host) + seconds
    return device + OVERHEAD_S


def trial(bench: str, seconds: float, rng: np.random.Generator, noise: float = 0.004, **params: object) -> Trial:
    samples = seconds * np.exp(rng.normal(0.0, noise, 7))
    return {"bench": bench, "params": params, "outcome": "ok", "samples_s": samples.tolist(), "memory": {}}


def micro_trials(rng: np.random.Generator) -> list[Trial]:
    sizes = [(m, n, n) for m in (256, 700, 2048, 5000) for n in (512, 1024, 2048, 3000, 4096)]
    out = [trial("gemm", gemm_seconds(*s), rng, m=s[0], n=s[1], k=s[2], dtype="bf16", layout="nt") for s in sizes]
    for size in np.geomspace(2**16, 2**30, 12):
        out.append(trial("memory", size / BANDWIDTH + FLOOR_S, rng, op="copy", bytes=int(size), dtype="bf16"))
    return [*out, trial("launch", 500 * 3e-6, rng, kernels=500)]


CONFIGURATIONS = [
    (1024, 1, 1024), (2048, 2, 2048), (4096, 1, 2048), (4096, 2, 4096), (4096, 4, 1024), (2048, 4, 512),
    (512, 2, 256), (512, 4, 256), (1024, 4, 128), (3000, 3, 1500), (256, 4, 1024),
]  # fmt: skip


def step_trial(width: int, depth: int, length: int, rng: np.random.Generator, host_s: float = HOST_S) -> Trial:
    run = Run(method="lora", max_length=length)
    params = {"architecture": architecture_to_dict(toy(width, depth)), "run": run_to_dict(run)}
    return trial("step", queue_seconds(toy(width, depth), run, host_s), rng, **params)


def all_trials(seed: int, host_s: float = HOST_S) -> list[Trial]:
    rng = np.random.default_rng(seed)
    return [*micro_trials(rng), *(step_trial(*configuration, rng, host_s) for configuration in CONFIGURATIONS)]


def fitter(trials: Sequence[Trial], *, synchronous: bool = False) -> StepFitter:
    return StepFitter(gpu="toy", synchronous=synchronous, inventory=toy_operations).fit(trials)


@pytest.fixture(scope="module")
def fitted() -> StepFitter:
    return fitter(all_trials(0))


def layer_host_s(found: StepFitter) -> float:
    """Host seconds per launch over a layer's 10 forward and 17 backward launches, which these steps cannot part."""
    factors = found.factors_.factors
    return factors["host_s_per_launch"].value * (10 + 17 * factors["scale.host_backward"].value) / 27


def test_hidden_in_step_effects_are_recovered(fitted: StepFitter) -> None:
    factors = fitted.factors_.factors
    assert factors["scale.gemm"].value == pytest.approx(HOT, rel=0.02)
    assert layer_host_s(fitted) == pytest.approx(HOST_S, rel=0.02)
    assert factors["gemm.bf16.flops_per_s"].value == pytest.approx(RATE, rel=0.03)
    assert factors["memory.bytes_per_s"].value == pytest.approx(BANDWIDTH, rel=0.03)
    assert all(f.low <= f.value <= f.high for f in factors.values())


@pytest.mark.parametrize(
    ("width", "depth", "length", "accumulation"),
    [(4096, 80, 2048, 1), (4096, 32, 4096, 2), (512, 24, 256, 1), (512, 24, 128, 4), (3000, 40, 1024, 1)],
)
def test_deep_runs_are_forecast_from_shallow_ones(
    fitted: StepFitter, width: int, depth: int, length: int, accumulation: int
) -> None:
    """Device-bound and host-bound, twenty times deeper than measured: within 3% and inside the 98% interval."""
    run = Run(method="lora", max_length=length, gradient_accumulation_steps=accumulation)
    found = step_time(toy_operations(toy(width, depth), run, "cuda"), fitted.factors_, run=run)
    truth = queue_seconds(toy(width, depth), run, HOST_S)
    assert found.step_time_s.value == pytest.approx(truth, rel=0.03)
    assert abs(math.log(truth / found.step_time_s.value)) < 2.33 * found.log_sd


def test_a_host_four_times_slower_is_recognised() -> None:
    """The launch benchmark says 3 us; steps are bound by a host of 36 us: the search must not stop at 3."""
    assert layer_host_s(fitter(all_trials(1, host_s=36e-6))) == pytest.approx(36e-6, rel=0.02)


@pytest.mark.parametrize("seeds", some_for_ci([3, 6]))
def test_step_interval_covers_steps_never_seen(seeds: int) -> None:
    """Each configuration has an effect of its own, sd 3%, that no factor explains: 80% intervals hold 70 to 90%."""
    inside = []
    for seed in range(seeds):
        rng = np.random.default_rng(100 + seed)
        trials = all_trials(seed)
        for row in (t for t in trials if t["bench"] == "step"):
            row["samples_s"] = (np.array(row["samples_s"]) * np.exp(rng.normal(0.0, 0.03))).tolist()
        factors = fitter(trials).factors_
        for width, depth, length in [
            (4096, 8, 2048),
            (2048, 6, 4096),
            (3000, 5, 700),
            (4096, 3, 3000),
            (1024, 8, 8192),
        ]:
            run = Run(method="lora", max_length=length)
            found = step_time(toy_operations(toy(width, depth), run, "cuda"), factors, run=run)
            truth = math.log(queue_seconds(toy(width, depth), run, HOST_S) / found.step_time_s.value)
            inside += [abs(truth + error) <= Z80 * found.log_sd for error in rng.normal(0.0, 0.03, 20)]
    assert 0.70 <= np.mean(inside) <= 0.90


def test_on_a_synchronous_device_times_add() -> None:
    """Truth: every kernel costs its work and 9 us of host."""
    rng = np.random.default_rng(7)
    trials = micro_trials(rng)
    for width, depth, length in CONFIGURATIONS:
        run, architecture = Run(method="lora", max_length=length), toy(width, depth)
        operations = toy_operations(architecture, run, "cpu")
        seconds = sum(o.count * (kernel_seconds(o) + HOST_S) for o in operations) + OVERHEAD_S
        params = {"architecture": architecture_to_dict(architecture), "run": run_to_dict(run)}
        trials.append(trial("step", seconds, rng, **params))
    run = Run(method="lora", max_length=256)
    operations = toy_operations(toy(512, 24), run, "cpu")
    found = step_time(operations, fitter(trials, synchronous=True).factors_, run=run)
    truth = sum(o.count * (kernel_seconds(o) + HOST_S) for o in operations) + OVERHEAD_S
    assert found.step_time_s.value == pytest.approx(truth, rel=0.03)


def record(trials: list[Trial], **hardware: object) -> dict[str, Any]:
    facts = {"device": "mock:toy#0", "gpu": "mock:toy#0", "name": "toy", "multiprocessors": None}
    return {"hardware": {**facts, **hardware}, "software": {}, "trials": trials, "fitted": None}


def test_fit_record_is_json_and_says_what_it_used() -> None:
    trials = [t | {"id": i} for i, t in enumerate(all_trials(2))]
    trials.append({"id": 99, "bench": "gemm", "params": {}, "outcome": "oom", "samples_s": []})
    fitted = json.loads(json.dumps(fit_record(record(trials), inventory=toy_operations), allow_nan=False))
    assert fitted["schema"] == "tunecast.fitted/1"
    assert "99" not in fitted["trials_used"]
    assert len(fitted["residuals"]["steps"]) == len(CONFIGURATIONS)
    assert set(fitted["mfu"]) == {"lora"}
    assert 0 < fitted["mfu"]["lora"]["low"] <= fitted["mfu"]["lora"]["value"] <= fitted["mfu"]["lora"]["high"] < 1
    factors = factor_set_from_record({"fitted": fitted}, name="r.json")
    assert factors.factors["scale.gemm"].origin == "measured:r.json"
    assert factors.step_params


@pytest.mark.thorough
def test_the_fit_is_deterministic() -> None:
    first, second = (fit_record(record(all_trials(3)), inventory=toy_operations) for _ in range(2))
    assert first == second


def test_without_steps_there_is_a_note_and_the_launch_benchmark() -> None:
    found = fitter(micro_trials(np.random.default_rng(0))).factors_
    assert found.factors["host_s_per_launch"].value == pytest.approx(3e-6, rel=0.02)
    assert any("whole steps" in note for note in found.notes)


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(InputError, match="no usable gemm"):
        fitter([])


def test_remaining_spread_is_what_variances_do_not_explain() -> None:
    error = np.random.default_rng(0).normal(0.0, 0.05, 4000)
    step_sd, host_sd = remaining_sds(error, np.full(4000, 0.03**2), np.zeros(4000))
    assert step_sd == pytest.approx(0.04, rel=0.15)
    assert host_sd == 0.0


def test_what_only_host_bound_steps_miss_is_the_hosts_spread() -> None:
    """Truth: 1% on every step, and 10% of the host's time where the host is the bound."""
    rng = np.random.default_rng(1)
    slope = np.repeat([0.0, 1.0], 2000)
    step_sd, host_sd = remaining_sds(rng.normal(0.0, np.hypot(0.01, 0.1 * slope)), np.full(4000, 1e-8), slope)
    assert step_sd == pytest.approx(0.01, rel=0.2)
    assert host_sd == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("seed", some_for_ci([5, 6, 8], 3))
def test_samples_that_scatter_are_no_spread_between_runs(seed: int) -> None:
    """Every step as the truth has it, measured with 30% of noise: that noise is no run's own."""
    rng, trials = np.random.default_rng(seed), all_trials(seed)
    for row in (t for t in trials if t["bench"] == "step"):
        row["samples_s"] = (np.mean(row["samples_s"]) * np.exp(rng.normal(0.0, 0.3, 30))).tolist()
    noisy = fitter(trials)
    assert noisy.step_fit_ is not None
    missed = float(np.median(np.abs(noisy.step_fit_.left_out)))
    assert missed > 0.02
    assert noisy.factors_.step_log_sd < missed / 1.5


def test_steps_of_one_width_are_left_out_together(fitted: StepFitter) -> None:
    widths = [width for width, _, _ in CONFIGURATIONS]
    found = [sorted({widths[place] for place in fold}) for fold in folds(fitted.steps_)]
    assert found == [[width] for width in dict.fromkeys(widths)]


def test_few_widths_are_left_out_step_by_step(fitted: StepFitter) -> None:
    alike: list[MeasuredStep] = [replace(step, group="4096") for step in fitted.steps_]
    assert folds(alike) == [[place] for place in range(len(alike))]


def test_a_host_that_never_was_the_bound_does_not_widen_a_run_that_it_does_not_bind() -> None:
    """Every step is bound by the device: none tells the host's cost, all say that it is not much more."""
    rng = np.random.default_rng(5)
    host_s = 1e-6
    shapes = [(4096, 1, 2048), (4096, 2, 4096), (3000, 3, 1500), (2048, 2, 4096), (8192, 1, 1024), (5120, 2, 2048)]
    trials = [*micro_trials(rng), *(step_trial(*shape, rng, host_s) for shape in shapes)]
    run = Run(method="lora", max_length=2048)
    found = step_time(toy_operations(toy(4096, 32), run, "cuda"), fitter(trials).factors_, run=run)
    truth = queue_seconds(toy(4096, 32), run, host_s)
    assert found.step_time_s.low <= truth <= found.step_time_s.high
    assert found.log_sd < 0.05


CACHE_BYTES, CACHE_GAIN = 40 * 2**20, 0.6
"""The catalog's L2 of an A100; in steps, kernels of up to as many bytes take 0.6 of their benchmark's time."""


def test_kernels_that_steps_find_in_the_cache_have_a_rate_of_their_own() -> None:
    """Benchmarks rotate their buffers, steps do not. Truth: small kernels are faster in steps, large ones are not."""

    def cached_seconds(operation: Operation) -> float:
        if operation.kind is Kind.GEMM:
            return gemm_seconds(*operation.shape)
        gain = CACHE_GAIN if operation.bytes < CACHE_BYTES else 1.0
        return gain * operation.bytes / BANDWIDTH + FLOOR_S

    def truth(width: int, depth: int, length: int) -> float:
        operations = toy_operations(toy(width, depth), Run(method="lora", max_length=length), "cuda")
        return sum(o.count * cached_seconds(o) for o in operations) + OVERHEAD_S

    rng = np.random.default_rng(8)
    shapes = [(w, d, n) for w, d in ((512, 4), (1024, 2), (2048, 2), (4096, 1)) for n in (1024, 4096, 16384)]
    trials = micro_trials(rng)
    for width, depth, length in shapes:
        run = Run(method="lora", max_length=length)
        params = {"architecture": architecture_to_dict(toy(width, depth)), "run": run_to_dict(run)}
        trials.append(trial("step", truth(width, depth, length), rng, **params))
    found = StepFitter(gpu="mock:a100-sxm4-80gb#0", synchronous=False, inventory=toy_operations).fit(trials)
    assert found.factors_.factors["scale.cached"].value < 0.8
    for width, length in ((768, 2048), (2048, 32768)):
        run = Run(method="lora", max_length=length)
        step = step_time(toy_operations(toy(width, 24), run, "cuda"), found.factors_, run=run)
        assert step.step_time_s.value == pytest.approx(truth(width, 24, length), rel=0.03)


def test_model_flops_leave_out_recomputation() -> None:
    gemm = Operation(name="q", kind=Kind.GEMM, phase=Phase.FORWARD, flops=10.0, count=3.0)
    attention = Operation(name="sdpa", kind=Kind.ATTENTION, phase=Phase.BACKWARD, flops=5.0)
    assert model_flops([gemm, replace(gemm, phase=Phase.RECOMPUTE), attention]) == pytest.approx(30.0 + 4.0)


def test_rates_come_from_the_largest_transfer() -> None:
    def moved(n_bytes: int, seconds: float) -> Trial:
        params = {"bytes": n_bytes, "pinned": True, "direction": "h2d"}
        return {"bench": "transfer", "params": params, "outcome": "ok", "samples_s": [seconds] * 3}

    found = rate_factors([moved(1000, 1.0), moved(10**9, 0.1), moved(10**6, 0.001)])
    assert found["transfer.h2d.pinned.bytes_per_s"].value == pytest.approx(1e10)
