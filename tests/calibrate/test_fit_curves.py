"""Curve fits against parameters that are known, and intervals against shapes that were never seen."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from ci_share import some_for_ci

from tunecast.calibrate.fit_curves import UNTESTED_LOG_SD, FittedCurve, fit_curve, host_plateau, predictive
from tunecast.calibrate.fit_forms import curve_observations, specs_for
from tunecast.calibrate.fit_trials import gemm_operation
from tunecast.model.curves import columns
from tunecast.model.value import Z80

PROCESSORS = 108
RATE = 250e12
BANDWIDTH = 1.5e12
Shape = tuple[int, int, int]


def trial(
    bench: str, seconds: float, rng: np.random.Generator, noise: float = 0.005, **params: object
) -> dict[str, object]:
    samples = seconds * np.exp(rng.normal(0.0, noise, 7))
    return {"bench": bench, "params": params, "outcome": "ok", "samples_s": samples.tolist()}


def gemm_trial(shape: Shape, seconds: float, rng: np.random.Generator) -> dict[str, object]:
    m, n, k = shape
    return trial("gemm", seconds, rng, m=m, n=n, k=k, dtype="bf16", layout="nt")


def fitted(trials: list[dict[str, object]], name: str, processors: int | None = None) -> FittedCurve:
    found = curve_observations(trials)[name]
    return fit_curve(specs_for(name, found, processors=processors, fitted={}), found)


def sawtooth_seconds(shape: Shape) -> float:
    """A GPU of 108 processors with one 224 x 112 tile, which the fit does not try, and whole waves."""
    m, n, k = shape
    waves = math.ceil(math.ceil(m / 224) * math.ceil(n / 112) / PROCESSORS)
    compute = waves * 2 * 224 * 112 * (k + 80) * PROCESSORS / RATE
    return max(compute, 2 * (m * n + n * k + m * k) / BANDWIDTH) + 4e-6


def smooth_seconds(shape: Shape) -> float:
    m, n, k = shape
    return 2 * ((m + 40) * (n + 40) + 2e5) * (k + 60) / RATE + 5e-6


def real_shapes(count: int, seed: int) -> list[Shape]:
    rng = np.random.default_rng(seed)
    widths = (1024, 2048, 3584, 4096, 5120, 8192, 11008, 14336)
    return [(int(rng.integers(256, 8192)), int(rng.choice(widths)), int(rng.choice(widths))) for _ in range(count)]


def test_known_parameters_come_back() -> None:
    rng = np.random.default_rng(1)
    trials = [gemm_trial(shape, smooth_seconds(shape), rng) for shape in real_shapes(60, 1)]
    trials += [gemm_trial((16, 64, k), smooth_seconds((16, 64, k)), rng) for k in (64, 256, 1024, 4096)]
    found = fitted(trials, "gemm.bf16")
    assert found.curve.params["flops_per_s"] == pytest.approx(RATE, rel=0.02)
    assert found.curve.params["area"] == pytest.approx(2e5, rel=0.3)
    assert found.curve.params["t0_s"] == pytest.approx(5e-6, rel=0.1)
    low, high = found.intervals["flops_per_s"]
    assert low <= found.curve.params["flops_per_s"] <= high
    assert high / low < 1.05


def test_memory_curve_finds_both_tiers() -> None:
    rng = np.random.default_rng(2)

    def seconds(n_bytes: float) -> float:
        return 3e-6 + n_bytes / (4e12 if n_bytes < 2e7 else 1e12)

    sizes = np.geomspace(2**16, 2**31, 24)
    trials = [trial("memory", seconds(b), rng, op="copy", bytes=int(b), dtype="bf16") for b in sizes]
    found = fitted(trials, "memory")
    assert found.curve.params["bytes_per_s"] == pytest.approx(1e12, rel=0.03)
    assert found.curve.params["t0_s"] == pytest.approx(3e-6, rel=0.15)
    assert 5e6 < found.curve.params["cache_bytes"] < 8e7


def test_one_outlier_does_not_move_the_rate() -> None:
    rng = np.random.default_rng(3)
    trials = [gemm_trial(shape, smooth_seconds(shape), rng) for shape in real_shapes(40, 3)]
    trials.append(gemm_trial((4096, 4096, 4096), 3 * smooth_seconds((4096, 4096, 4096)), rng))
    assert fitted(trials, "gemm.bf16").curve.params["flops_per_s"] == pytest.approx(RATE, rel=0.03)


@pytest.mark.parametrize("processors", some_for_ci([None, PROCESSORS]))
def test_interval_covers_shapes_never_seen(processors: int | None) -> None:
    """Sawtooth truth, 8 calibrations of 60 shapes, 200 unseen shapes each: 80% intervals hold 70 to 90%."""
    inside = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        trials = [gemm_trial(shape, sawtooth_seconds(shape), rng) for shape in real_shapes(60, seed)]
        curve = fitted(trials, "gemm.bf16", processors).curve
        unseen = real_shapes(200, 1000 + seed)
        operations = [gemm_operation({"m": m, "n": n, "k": k, "dtype": "bf16", "layout": "nt"}) for m, n, k in unseen]
        mean, sd = predictive(curve, columns(operations))
        inside += (np.abs(np.log([sawtooth_seconds(s) for s in unseen]) - mean) <= Z80 * sd).tolist()
    assert 0.70 <= np.mean(inside) <= 0.90


def test_tiles_are_read_off_the_sawtooth() -> None:
    """Truth: one tile of 192 x 96, whole waves, no bandwidth limit; a prediction of an odd shape within 3%."""

    def seconds(shape: Shape) -> float:
        m, n, k = shape
        waves = math.ceil(math.ceil(m / 192) * math.ceil(n / 96) / PROCESSORS)
        return waves * 2 * 192 * 96 * (k + 80) * PROCESSORS / RATE + 4e-6

    rng = np.random.default_rng(6)
    trials = [gemm_trial(shape, seconds(shape), rng) for shape in real_shapes(60, 6)]
    curve = fitted(trials, "gemm.bf16", PROCESSORS).curve
    assert (curve.params["tile0_m"], curve.params["tile0_n"]) == (192.0, 96.0)
    mean, _ = predictive(
        curve, columns([gemm_operation({"m": 777, "n": 5120, "k": 2048, "dtype": "bf16", "layout": "nt"})])
    )
    assert math.exp(mean[0]) == pytest.approx(seconds((777, 5120, 2048)), rel=0.03)


def test_a_dtype_with_few_trials_borrows_the_shape_effects() -> None:
    """fp32 at a tenth of the rate, one trial: other shapes follow from the bf16 curve, slowed ten times."""
    rng = np.random.default_rng(4)
    trials = [gemm_trial(shape, smooth_seconds(shape), rng) for shape in real_shapes(60, 4)]
    trials.append(
        trial("gemm", 10 * smooth_seconds((2048,) * 3), rng, m=2048, n=2048, k=2048, dtype="fp32", layout="nt")
    )
    groups = curve_observations(trials)
    half = fit_curve(specs_for("gemm.bf16", groups["gemm.bf16"], processors=None, fitted={}), groups["gemm.bf16"]).curve
    specs = specs_for("gemm.fp32", groups["gemm.fp32"], processors=None, fitted={"gemm.bf16": half})
    single = fit_curve(specs, groups["gemm.fp32"]).curve
    mean, _ = predictive(
        single, columns([gemm_operation({"m": 300, "n": 4096, "k": 8192, "dtype": "fp32", "layout": "nt"})])
    )
    assert math.exp(mean[0]) == pytest.approx(10 * smooth_seconds((300, 4096, 8192)), rel=0.06)


def test_failed_trials_are_not_observations() -> None:
    rng = np.random.default_rng(5)
    good = gemm_trial((1024, 1024, 1024), 1e-4, rng)
    trials = [good, {**good, "outcome": "oom", "samples_s": []}, {**good, "outcome": "error"}]
    assert len(curve_observations(trials)["gemm.bf16"]) == 1


def behind_a_host(seconds: float, call_s: float = 4e-6) -> float:
    """What a benchmark sees that repeats a call back to back: the host issues the next while the device works."""
    return max(seconds, call_s)


def test_kernels_behind_the_hosts_calls_do_not_become_a_cache() -> None:
    """Truth: 1.5 us and 2 TB/s at every size; calls take 4 us, so kernels below 5 MB all look alike."""
    rng = np.random.default_rng(9)
    sizes = [2**exponent for exponent in (14, 16, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30)]
    trials = [
        trial("memory", behind_a_host(1.5e-6 + size / 2e12), rng, op="copy", bytes=size, dtype="bf16") for size in sizes
    ]
    found = curve_observations(trials)["memory"]
    call_s = host_plateau(found)
    assert call_s == pytest.approx(4e-6, rel=0.02)
    curve = fit_curve(specs_for("memory", found, processors=None, fitted={}, issue_s=call_s), found).curve
    assert curve.params["t0_s"] == pytest.approx(1.5e-6, rel=0.1)
    assert curve.params["bytes_per_s"] == pytest.approx(2e12, rel=0.02)
    assert "cache_bytes" not in curve.params
    assert len(curve.residuals) == sum(1.5e-6 + size / 2e12 > 4.2e-6 for size in sizes)


@pytest.mark.parametrize("hidden", [(True, False), (True, True), (True, True, True), (False, False)])
def test_a_curve_through_few_trials_behind_a_host_has_a_spread(hidden: tuple[bool, ...]) -> None:
    """Trials as fast as the host's call show nothing of the device; where none does, the spread is the untested one."""
    rng, call_s = np.random.default_rng(12), 5e-6
    sizes = [2 ** (10 + 2 * i) if behind else 2 ** (24 + i) for i, behind in enumerate(hidden)]
    trials = [
        trial("memory", behind_a_host(1e-6 + size / 2e12, call_s), rng, op="copy", bytes=size, dtype="bf16")
        for size in sizes
    ]
    found = curve_observations(trials)["memory"]
    fit = fit_curve(specs_for("memory", found, processors=None, fitted={}, issue_s=call_s), found)
    assert fit.curve.log_sd >= UNTESTED_LOG_SD
    assert len(fit.left_out) == len(fit.left_out_sd) == len(hidden)
    assert np.isfinite([fit.curve.log_sd, *fit.left_out, *fit.left_out_sd, *fit.curve.params.values()]).all()
    assert max(map(abs, fit.left_out)) < 0.5


def test_a_floor_of_equal_work_is_no_plateau() -> None:
    rng = np.random.default_rng(10)
    alike = [trial("memory", 4e-6, rng, op=op, bytes=2**16, dtype="bf16") for op in ("copy", "add")]
    longer = [trial("memory", 9e-6, rng, op="copy", bytes=2**24, dtype="bf16")]
    assert host_plateau(curve_observations([*alike, *longer])["memory"]) == 0.0


def scheduled_seconds(heads: int, length: int, head_dim: int) -> float:
    """Causal attention block by block: 128 rows of queries each, taken longest first by the next free processor."""
    rows = math.ceil(length / 128)
    work = sorted((128 * 128 * head_dim * 4 * (row + 1) for row in range(rows) for _ in range(heads)), reverse=True)
    free = [0.0] * PROCESSORS
    for flops in work:
        heapq.heappush(free, heapq.heappop(free) + flops / (RATE / PROCESSORS))
    return max(free) + 4e-6


def attention_trial(shape: Shape, rng: np.random.Generator) -> dict[str, object]:
    heads, length, head_dim = shape
    params = {"batch": 1, "heads": heads, "kv_heads": heads, "length": length, "head_dim": head_dim}
    return trial("attention", scheduled_seconds(*shape), rng, dtype="bf16", **params, **{"pass": "forward"})


def test_few_heads_of_attention_are_as_long_as_their_longest_block() -> None:
    """Heads too few to fill the processors, never measured so: a tenth of the error of a rate that only falls."""
    rng = np.random.default_rng(11)
    shapes = [(h, n, 128) for h, n in ((32, 1024), (32, 2048), (32, 8192), (64, 2048), (64, 4096), (16, 4096))]
    shapes += [(16, 1024, 128), (12, 2048, 128), (32, 4096, 64), (32, 512, 128), (24, 1024, 64)]
    trials = [attention_trial(shape, rng) for shape in shapes]
    name = "attention.bf16.forward"
    unseen = [(6, 2048, 128), (8, 4096, 128), (40, 512, 128)]
    missed = []
    for processors in (PROCESSORS, None):
        curve = fitted(trials, name, processors).curve
        operations = [
            curve_observations([attention_trial(shape, rng)])[name][0].operation for shape in unseen
        ]  # the same operations, their seconds unused
        mean, _ = predictive(curve, columns(operations))
        missed.append(np.abs(mean - np.log([scheduled_seconds(*shape) for shape in unseen])))
    assert missed[0].max() < 0.12
    assert missed[0].mean() < missed[1].mean() / 2


def test_one_trial_is_a_rate_and_no_floor() -> None:
    """A quick calibration that ended early: one attention of a length that takes 88 ms. Half as many tokens take about
    a quarter of it, and not what a guess at a floor leaves; what borrows its shape has no floor above its own time."""
    rng = np.random.default_rng(5)
    shape = {"batch": 1, "heads": 9, "kv_heads": 3, "head_dim": 64, "dtype": "fp32", "pass": "backward"}
    once = trial("attention", 88e-3, rng, length=512, **shape)
    masked = trial("masked", 13e-3, rng, length=128, kernel="masked", masked=True, **shape)
    moved = [
        trial("memory", 2e-7 + n / 20e9, rng, op="copy", bytes=n, dtype="fp32") for n in (1 << 16, 1 << 22, 1 << 26)
    ]
    groups = curve_observations([once, masked, *moved])
    curves = {}
    for name, found in groups.items():
        curves[name] = fit_curve(specs_for(name, found, processors=None, fitted=curves), found).curve
    own = next(name for name in curves if name.startswith("attention.") and name.endswith("backward"))
    half = curve_observations([trial("attention", 1.0, rng, length=256, **shape)])[own][0].operation
    assert np.exp(predictive(curves[own], columns([half]))[0][0]) < 0.45 * 88e-3
    for name, found in groups.items():
        if name.startswith("attention"):
            assert curves[name].params["t0_s"] < 0.5 * min(each.seconds for each in found)
