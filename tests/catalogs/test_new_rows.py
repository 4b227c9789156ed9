"""Adding a GPU, a model and a price is adding rows: no code changes."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json
from tunecast.catalogs import tables

shipped = tables._read

def with_new_rows(name):
    rows = [dict(row) for row in shipped(name)]
    if name == "gpus.csv":
        new = next(r for r in rows if r["canonical_id"] == "a100-sxm4-80gb")
        rows.append(new | {"canonical_id": "z900-sxm-80gb", "nvml_names": "NVIDIA Z900", "aliases": "Zed"})
    if name == "models.csv":
        new = next(r for r in rows if r["hf_id"] == "Qwen/Qwen2.5-0.5B")
        rows.append(new | {"hf_id": "somebody/New-0.5B"})
    if name == "prices.csv":
        new = next(r for r in rows if r["offer_sku"] == "g5.xlarge")
        rows.append(new | {"gpu_canonical_id": "z900-sxm-80gb", "usd_per_hour": "3", "usd_per_gpu_hour": "3"})
    return tuple(rows)

tables._read = with_new_rows

import tunecast
from tunecast.catalogs.gpus import match_device
from tunecast.catalogs.integrity import MODEL_CHECKS, PRICE_CHECKS
from tunecast.catalogs.integrity_gpus import GPU_CHECKS
from tunecast.catalogs.tables import read_rows

checked = {"gpus.csv": GPU_CHECKS, "models.csv": MODEL_CHECKS, "prices.csv": PRICE_CHECKS}
faults = [fault for name, checks in checked.items() for check in checks for fault in check(read_rows(name))]
(forecast,) = tunecast.estimate("somebody/New-0.5B", gpu="zed")
found = match_device("NVIDIA Z900", 80 * 1024**3, 108)
print(json.dumps([faults, forecast.gpu, forecast.fits, forecast.offer["usd_per_hour"], found and found.id]))
"""


def test_a_new_gpu_model_and_price_are_rows_only() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], "z900-sxm-80gb", True, 3.0, "z900-sxm-80gb"]
