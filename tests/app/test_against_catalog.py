"""A record's rates against the datasheet, by hand arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.against_catalog import fact_quantities, host_quantities, rate_quantities, verdict
from tunecast.catalogs.gpus import find_gpu, load_gpus
from tunecast.model.units import GIB

A100 = find_gpu("a100-sxm4-80gb")


def trial(bench: str, seconds: float, **params: Any) -> dict[str, Any]:
    return {"bench": bench, "params": params, "outcome": "ok", "samples_s": [seconds] * 3}


def only(trials: list[dict[str, Any]], gpu: Any = A100) -> Any:
    (quantity,) = rate_quantities(trials, gpu)
    return quantity


def test_a_matrix_product_is_two_mnk_over_the_dense_peak() -> None:
    """4,096 cubed is 137.4 GFLOP; in 0.55 ms 249.9 TFLOP/s, 80% of the A100's 312."""
    quantity = only([trial("gemm", 0.55e-3, m=4096, n=4096, k=4096, dtype="bf16", layout="nt")])
    assert quantity.measured == pytest.approx(249.9, rel=1e-3)
    assert quantity.catalog == 312
    assert quantity.share == pytest.approx(0.801, rel=1e-3)
    assert quantity.verdict == "ok"


def test_products_of_experts_are_two_mnk_of_each() -> None:
    """8 x 512 x 14,336 x 4,096 x 2 is 481.0 GFLOP; in 0.8 ms 601.3 TFLOP/s, 61% of an H100's 989."""
    shape = {"experts": 8, "rows": 512, "n": 14336, "k": 4096, "dtype": "bf16", "layout": "nt"}
    quantity = only([trial("grouped", 0.8e-3, **shape)], gpu=find_gpu("h100-sxm5-80gb"))
    assert quantity.measured == pytest.approx(601.3, rel=1e-3)
    assert quantity.share == pytest.approx(0.608, rel=2e-3)


def test_the_best_shape_of_a_dtype_is_shown() -> None:
    slow = trial("gemm", 1e-3, m=512, n=512, k=512, dtype="bf16", layout="nt")
    fast = trial("gemm", 1e-3, m=4096, n=4096, k=4096, dtype="bf16", layout="tn")
    assert only([slow, fast]).measured == pytest.approx(137.4, rel=1e-3)


def test_bandwidth_is_bytes_moved_over_the_datasheet() -> None:
    quantity = only([trial("memory", 1e-3, op="copy", bytes=10**9, dtype="bf16")])
    assert (quantity.measured, quantity.unit) == (pytest.approx(1000), "GB/s")
    assert quantity.verdict == "low"


def test_memory_is_shown_beyond_the_caches() -> None:
    """A copy of 64 KiB at 100 GB/s stays in a cache; of 256 MiB, 20 GB/s is what memory has. Without a large one the
    word says so."""
    cached = trial("memory", 65536 / 100e9, op="copy", bytes=65536, dtype="bf16")
    large = trial("memory", 2**28 / 20e9, op="copy", bytes=2**28, dtype="bf16")
    both = only([cached, large], gpu=None)
    assert both.measured == pytest.approx(20.0, rel=1e-3)
    assert "cache" not in both.verdict
    assert "a cache may hold its 0.0625 MiB" in only([cached], gpu=None).verdict


@pytest.mark.parametrize(("dtype", "moved"), [("bf16", 2.5), ("fp32", 4.5)])
def test_dequantization_writes_numbers_of_its_dtype(dtype: str, moved: float) -> None:
    """Half a byte read, and two or four written, per element."""
    quantity = only([trial("dequant", 1e-3, elements=10**6, quant_type="nf4", double_quant=True, dtype=dtype)])
    assert quantity.measured == pytest.approx(moved)


def test_causal_attention_counts_half_of_the_square() -> None:
    """1 x 32 heads x 4,096^2 x 128 x 4 / 2 is 137.4 GFLOP; backward is 2.5 times that."""
    shape = {"batch": 1, "heads": 32, "kv_heads": 8, "length": 4096, "head_dim": 128, "dtype": "bf16"}
    forward = only([trial("attention", 1e-3, **shape, **{"pass": "forward"})])
    backward = only([trial("attention", 1e-3, **shape, **{"pass": "backward"})])
    assert forward.measured == pytest.approx(137.4, rel=1e-3)
    assert backward.measured == pytest.approx(2.5 * forward.measured)


def test_a_pinned_transfer_is_held_against_the_pcie_link() -> None:
    """Generation 4 times 16 lanes is 31.5 GB/s in one direction."""
    quantity = only([trial("transfer", 1.0, bytes=26 * 10**9, pinned=True, direction="h2d")])
    assert quantity.catalog == pytest.approx(31.5, rel=1e-2)
    assert quantity.verdict == "ok"


def test_a_cpu_has_no_catalog_and_is_not_judged() -> None:
    quantity = only([trial("gemm", 1.0, m=1024, n=1024, k=1024, dtype="fp32", layout="nt")], gpu=None)
    assert (quantity.catalog, quantity.share, quantity.verdict) == (None, None, "measured")


def test_trials_without_times_are_left_out() -> None:
    out_of_memory = {**trial("gemm", 1.0, m=1, n=1, k=1, dtype="bf16", layout="nt"), "outcome": "oom", "samples_s": []}
    assert list(rate_quantities([out_of_memory], A100)) == []


def test_a_launch_costs_the_run_over_its_kernels() -> None:
    (quantity,) = host_quantities([trial("launch", 0.005, kernels=1000)])
    assert (quantity.measured, quantity.unit) == (pytest.approx(5.0), "µs")


def test_facts_beside_what_was_sold() -> None:
    hardware = {"memory_bytes": 40 * GIB, "power_limit_w": 400.0, "max_sm_clock_mhz": None}
    facts = {quantity.name: quantity for quantity in fact_quantities(hardware, A100)}
    assert facts["usable memory"].verdict == "low"
    assert facts["power limit"].verdict == "ok"
    assert "highest SM clock" not in facts


@pytest.mark.parametrize(("mhz", "word"), [(1980, "ok"), (1830, "ok"), (1410, "low")])
def test_the_highest_clock_that_an_h100_names_is_above_that_of_its_peak(mhz: int, word: str) -> None:
    facts = fact_quantities({"max_sm_clock_mhz": mhz}, load_gpus()["h100-sxm5-80gb"])
    assert [quantity.verdict for quantity in facts] == [word]


def test_a_share_above_the_catalog_is_a_question_not_praise() -> None:
    assert verdict(120.0, 100.0, "matrix", 0.01) == "above catalog: check"


def test_a_noisy_median_says_so() -> None:
    """Deviations from the median 1.0 are 0.2, 0, 0.2: MAD 0.2, times 1.4826 makes 30%."""
    noisy = {**trial("memory", 1.0, op="copy", bytes=2 * 10**12, dtype="bf16"), "samples_s": [0.8, 1.0, 1.2]}
    assert only([noisy]).verdict == "ok, unstable (30%)"


@pytest.mark.parametrize(("op", "crosses"), [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875)])
def test_a_collective_is_shown_by_what_crosses_a_link(op: str, crosses: float) -> None:
    """Of 1 GB among 8 in 10 ms: bus bandwidth as nccl-tests has it, beside the 300 GB/s of an A100's NVLink."""
    quantity = only([trial("collective", 0.01, op=op, bytes=10**9, world_size=8)])
    assert (quantity.measured, quantity.unit, quantity.catalog) == (pytest.approx(100 * crosses), "GB/s", 300)
    assert quantity.name == f"{op}, 8 processes"
