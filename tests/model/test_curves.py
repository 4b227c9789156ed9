"""Curves against hand calculation and against their limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunecast.model.curve_shares import SHARES, floor_frac, shares
from tunecast.model.curves import FORMS, benched, columns, residual, seconds
from tunecast.model.factors import Curve
from tunecast.model.operation import Kind, Operation, Phase


def gemm(m: int, n: int, k: int, layout: str = "nt", dtype: str = "bf16") -> Operation:
    return Operation(
        name="gemm",
        kind=Kind.GEMM,
        phase=Phase.FORWARD,
        dtype=dtype,
        shape=(m, n, k),
        layout=layout,
        flops=2.0 * m * n * k,
    )


def moved(n_bytes: float, launches: float = 1.0) -> Operation:
    return Operation(name="copy", kind=Kind.MEMORY, phase=Phase.FORWARD, bytes=n_bytes, launches=launches)


def curve(form: str, params: dict[str, float], **more: object) -> Curve:
    return Curve(form=form, params=params, log_sd=0.1, origin="test", **more)  # type: ignore[arg-type]


def time_of(form: str, params: dict[str, float], *operations: Operation) -> np.ndarray:
    return seconds(curve(form, params), columns(operations)).seconds


def test_one_rate_is_enough_for_a_gemm() -> None:
    assert time_of("gemm", {"flops_per_s": 1e14}, gemm(1024, 2048, 4096))[0] == pytest.approx(
        2 * 1024 * 2048 * 4096 / 1e14
    )


def test_gemm_tile_area_and_prologue_by_hand() -> None:
    params = {"flops_per_s": 1e12, "tile": 10.0, "area": 100.0, "k0": 5.0, "nn": 2.0, "t0_s": 1e-6}
    expected = 2 * ((100 + 10) * (50 + 10) + 100) * (20 + 5) / 1e12
    nt, nn = time_of("gemm", params, gemm(100, 50, 20), gemm(100, 50, 20, "nn"))
    assert nt == pytest.approx(expected + 1e-6)
    assert nn == pytest.approx(2 * expected + 1e-6)


def test_a_skinny_gemm_takes_the_time_of_its_bytes() -> None:
    m, n, k = 8192, 1, 8192
    found = time_of("gemm", {"flops_per_s": 1e15, "bytes_per_s": 1e12}, gemm(m, n, k))[0]
    assert found == pytest.approx((m * n + n * k + m * k) * 2 / 1e12, rel=1e-6)


def test_waves_are_paid_for_whole() -> None:
    """A 4-processor grid of 256x128 tiles: five tiles cost two waves, as eight do."""
    params = {"flops_per_s": 4e12, "processors": 4.0, "quantised": 1.0, "half": 1e-6}
    wave_s = 2 * 256 * 128 * 64 / 1e12
    two_waves = time_of("gemm_waves", {**params, "half": 1e6}, gemm(256 * 8, 128, 64))
    assert time_of("gemm_waves", params, gemm(256 * 4, 128, 64))[0] == pytest.approx(wave_s, rel=1e-4)
    assert two_waves[0] > time_of("gemm_waves", {**params, "half": 1e6}, gemm(256 * 4, 128, 64))[0]


@given(tiles=st.integers(1, 400), processors=st.integers(1, 160))
def test_smooth_waves_never_cost_more_than_quantised_ones(tiles: int, processors: int) -> None:
    params = {"flops_per_s": 1e14, "processors": float(processors)}
    operation = gemm(128 * tiles, 128, 1024)
    smooth = time_of("gemm_waves", {**params, "quantised": 0.0}, operation)[0]
    assert smooth <= time_of("gemm_waves", {**params, "quantised": 1.0}, operation)[0] * (1 + 1e-12)


def test_a_memory_operation_of_two_kernels_is_two_kernels() -> None:
    params = {"bytes_per_s": 1e12, "t0_s": 2e-6, "cache_bytes": 1e7, "cache_bytes_per_s": 4e12}
    together = time_of("bandwidth", params, moved(6e6, 2.0))[0]
    assert together == pytest.approx(2 * time_of("bandwidth", params, moved(3e6))[0])


def test_the_cache_tier_has_both_limits() -> None:
    params = {"bytes_per_s": 1e12, "cache_bytes": 1e7, "cache_bytes_per_s": 4e12}
    small, large = time_of("bandwidth", params, moved(1e3), moved(1e11))
    assert small == pytest.approx(1e3 / 4e12, rel=1e-3)
    assert large == pytest.approx(1e11 / 1e12, rel=1e-3)


def test_attention_by_hand() -> None:
    operation = Operation(
        name="sdpa", kind=Kind.ATTENTION, phase=Phase.FORWARD, flops=1e12, shape=(1, 32, 8, 2048, 2048, 128)
    )
    params = {"flops_per_s": 1e14, "length0": 1024.0, "head_dim0": 64.0, "t0_s": 1e-5}
    assert time_of("attention", params, operation)[0] == pytest.approx(1e12 * 1.5 * 1.5 / 1e14 + 1e-5)


@given(
    form=st.sampled_from(sorted(FORMS)),
    size=st.integers(64, 4096),
    more=st.integers(1, 4096),
)
def test_more_work_is_never_faster(form: str, size: int, more: int) -> None:
    """In every form, growing one axis of the work cannot shorten it."""
    params = {
        "flops_per_s": 1e14, "bytes_per_s": 1e12, "t0_s": 1e-6, "tile": 32.0, "area": 1e5, "k0": 64.0,
        "processors": 108.0, "quantised": 1.0, "half": 32.0, "cache_bytes": 1e6, "cache_bytes_per_s": 3e12,
        "own_s": 1e-6, "tail": 0.5, "wide": 0.2,
    }  # fmt: skip

    def work(n: int) -> Operation:
        return Operation(
            name="x",
            kind=Kind.GEMM,
            phase=Phase.FORWARD,
            flops=float(n) ** 2,
            bytes=1e3 * n,
            shape=(n, 128, n, n, n, 128),
        )

    small, large = time_of(form, params, work(size), work(size + more))
    assert small <= large * (1 + 1e-9)


def test_floor_is_the_share_of_t0() -> None:
    found = floor_frac(curve("bandwidth", {"bytes_per_s": 1e12, "t0_s": 1e-6}), columns([moved(1e6), moved(0.0)]))
    assert found == pytest.approx([0.5, 1.0])


def test_a_benchmark_sees_the_host_where_it_is_slower() -> None:
    params = {"bytes_per_s": 1e12, "t0_s": 1e-6, "issue_s": 4e-6}
    assert benched("bandwidth", params, columns([moved(1e6), moved(1e7)])) == pytest.approx([4e-6, 11e-6])
    assert time_of("bandwidth", params, moved(1e6))[0] == pytest.approx(2e-6)


def test_a_thin_product_is_the_memorys_and_a_thick_one_its_own() -> None:
    """Both bounds by hand; where they are equal each has half."""
    params = {"flops_per_s": 1e14, "bytes_per_s": 1e12, "bytes_apart": 1.0}
    thin, thick = gemm(131072, 2048, 16), gemm(8192, 8192, 8192)
    found = dict(zip(SHARES, shares(curve("gemm", params), columns([thin, thick])), strict=True))
    assert found["memory"][0] > 0.99
    assert found["memory"][1] < 0.01
    m = n = k = 300
    even = {**params, "bytes_per_s": (m * n + n * k + m * k) * 2 / (2 * m * n * k / 1e14)}
    assert shares(curve("gemm", even), columns([gemm(m, n, k)]))[:2, 0] == pytest.approx([0.5, 0.5])


def test_half_of_the_kernels_that_just_fill_the_cache_find_it() -> None:
    found = shares(
        curve("bandwidth", {"bytes_per_s": 1e12, "l2_bytes": 4e7}), columns([moved(4e7), moved(8e8), moved(4e5)])
    )
    assert found[SHARES.index("cached")] == pytest.approx([1 / 2, 1 / 401, 1.0], rel=1e-3)
    assert found.sum(axis=0) == pytest.approx([1.0, 1.0, 1.0])


def test_a_prior_tells_neither_memory_nor_cache_apart() -> None:
    found = shares(
        curve("gemm", {"flops_per_s": 1e14, "bytes_per_s": 1e12, "t0_s": 1e-6}), columns([gemm(131072, 2048, 16)])
    )
    assert found[SHARES.index("memory")] == found[SHARES.index("cached")] == 0.0


def test_attention_ends_with_its_longest_block() -> None:
    """One head of 16 blocks on 100 processors: 2 x 16/17 of the mean block, which is a sixteenth of the work."""
    operation = Operation(
        name="sdpa", kind=Kind.ATTENTION, phase=Phase.FORWARD, flops=1e12, shape=(1, 1, 1, 2048, 2048, 128)
    )
    params = {"flops_per_s": 1e14, "processors": 100.0, "tail": 0.0}
    assert time_of("attention", params, operation)[0] == pytest.approx(1e12 / 16 * (32 / 17) / (1e14 / 100))


RESIDUALS = ((math.log(1e6), 0.0, 0.3), (math.log(1e9), 0.0, -0.2))
PROCESS = {"bytes_per_s": 1e12, "gp_sd": 0.3, "gp_length": 0.5, "gp_noise": 0.001}


def test_measured_shapes_are_reproduced_and_far_ones_fall_back() -> None:
    known = curve("bandwidth", PROCESS, residuals=RESIDUALS)
    timed = seconds(known, columns([moved(1e6), moved(1e9), moved(1e3)]))
    smooth = np.array([1e6, 1e9, 1e3]) / 1e12
    assert np.log(timed.seconds / smooth) == pytest.approx([0.3, -0.2, 0.0], abs=1e-3)
    assert timed.log_sd[:2] == pytest.approx([0.0, 0.0], abs=0.01)
    assert timed.log_sd[2] == pytest.approx(0.3, rel=0.01)


def test_equal_shapes_share_their_error() -> None:
    timed = seconds(curve("bandwidth", {"bytes_per_s": 1e12}), columns([moved(1e6), moved(1e6)]))
    assert timed.sum_variance(np.array([1.0, 1.0])) == pytest.approx(4 * 0.1**2)


def test_layouts_inform_each_other_less_than_themselves() -> None:
    at = np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    known = curve("gemm", {"gp_sd": 0.3, "gp_length": 1.0, "gp_noise": 0.0}, residuals=((0.0, 0.0, 0.0, 0.0, 0.3),))
    mean, covariance = residual(known, at)
    assert mean == pytest.approx([0.3, 0.3 * math.exp(-1)], rel=1e-3)
    assert covariance[0, 0] < 1e-4 < covariance[1, 1]


SPLIT = {
    "flops_per_s": 1e14,
    "area": 0.5 * 100 * 128 * 128,
    "processors": 100.0,
    "wave_tile_m": 128.0,
    "wave_tile_n": 128.0,
}


def test_a_result_of_few_tiles_loses_a_wave_as_short_as_its_parts_of_k() -> None:
    few, many = gemm(128 * 4, 16, 8192), gemm(128 * 40, 128 * 5, 8192)
    whole = time_of("gemm", SPLIT, few, many)
    parted = time_of("gemm", {**SPLIT, "split_depth": 512.0}, few, many)
    wave_s = 2 * SPLIT["area"] * 8192 / SPLIT["flops_per_s"]
    assert whole[0] - parted[0] == pytest.approx(wave_s * (1 - 1 / 16), rel=1e-9)  # 25 would fit, k has 16 parts
    assert parted[1] == whole[1]


@given(tiles=st.integers(1, 400), k=st.integers(1, 65536))
def test_splitting_k_never_costs_and_never_beats_the_work_itself(tiles: int, k: int) -> None:
    product = gemm(128 * tiles, 128, k)
    parted = time_of("gemm", {**SPLIT, "split_depth": 512.0}, product)[0]
    assert product.flops / SPLIT["flops_per_s"] <= parted <= time_of("gemm", SPLIT, product)[0]


def fused_attention(head_dim: int) -> Operation:
    length, heads = 1024, 8
    shape = (1, heads, heads, length, length, head_dim)
    flops = 2.0 * heads * length * length * head_dim
    return Operation(name="flash", kind=Kind.ATTENTION, phase=Phase.FORWARD, dtype="bf16", shape=shape, flops=flops)


@pytest.mark.parametrize(("head_dim", "kernel"), [(64, 64), (72, 96), (80, 96), (128, 128), (192, 192), (200, 256)])
def test_heads_are_padded_to_the_sizes_that_kernels_exist_for(head_dim: int, kernel: int) -> None:
    """The seconds per FLOP are those of the kernel's own size, times what is padding."""
    params = {"flops_per_s": 1e14, "head_step": 32.0}
    asked, own = fused_attention(head_dim), fused_attention(kernel)
    assert time_of("attention", params, asked)[0] == pytest.approx(time_of("attention", params, own)[0])
    assert time_of("attention", {"flops_per_s": 1e14}, asked)[0] == pytest.approx(asked.flops / 1e14)
