"""The rows that `tunecast catalog ... --json` prints, and that loading them needs nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

from tunecast.catalogs.tables import cell, gpu_rows, model_rows, price_rows, read_rows

HEAVY = ("torch", "numpy", "pandas", "scipy", "pydantic")


def test_rows_have_the_facts_column_names_and_survive_json() -> None:
    gpus, models, prices = gpu_rows(), model_rows(), price_rows()
    files = ("gpus.csv", "models.csv", "prices.csv")
    assert [len(gpus), len(models), len(prices)] == [len(read_rows(name)) for name in files]
    assert {"canonical_id", "memory_bandwidth_gbs", "bf16_fp32acc_tflops", "source"} <= gpus[0].keys()
    assert {"hf_id", "total_params", "params_meta_verified", "licence", "source"} <= models[0].keys()
    assert {"provider", "gpu_canonical_id", "usd_per_gpu_hour", "snapshot_date", "rankable"} <= prices[0].keys()
    for rows in (gpus, models, prices):
        assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_cells_become_json_values() -> None:
    assert cell("l2_mb", "") is None
    assert cell("l2_mb", "5.5") == 5.5
    assert cell("sm_count", "108") == 108
    assert cell("compute_capability", "8.0") == "8.0"
    assert cell("tie_word_embeddings", "true") is True
    assert cell("head_dim", "128+64 qk, 128 v") == "128+64 qk, 128 v"
    assert cell("snapshot_date", "2026-10") == "2026-10"


def test_current_rows_are_fewer_and_keep_their_own_line() -> None:
    current = price_rows(current_only=True)
    everything = price_rows()
    assert 0 < len(current) < len(everything)
    assert all(row in everything for row in current)


def test_loading_all_three_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tunecast.catalogs.tables import gpu_rows, model_rows, price_rows\n"
        "assert gpu_rows() and model_rows() and price_rows()\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
