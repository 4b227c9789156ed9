"""The safetensors file of ``load``: read by safetensors itself, and written without being held in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tunecast.calibrate.bench.files import SHARD_COLUMNS, SHARD_ROWS, _write_shard
from tunecast.model.units import MIB

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")

ROW_BYTES = 2 * SHARD_COLUMNS
PEAK_OF_WRITING = """
import resource, sys
from pathlib import Path
import torch
from tunecast.calibrate.bench.files import _write_shard
_write_shard(Path(sys.argv[1]), 1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
_write_shard(Path(sys.argv[1]), int(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
"""In a process of its own, whose peak nothing else has raised."""


@pytest.mark.parametrize("rows", [1, 3, SHARD_ROWS, SHARD_ROWS + 5])
def test_safetensors_reads_what_is_written(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "shard"
    _write_shard(path, rows * ROW_BYTES + 7)
    with safetensors.safe_open(str(path), framework="pt") as shard:
        tensors = [shard.get_tensor(name) for name in shard.keys()]  # noqa: SIM118 - a shard is no mapping
    assert sum(len(tensor) for tensor in tensors) == rows
    for tensor in tensors:
        assert tensor.dtype == torch.bfloat16
        assert tensor.shape[1] == SHARD_COLUMNS
        assert tensor.float().std().item() == pytest.approx(1.0, rel=0.1)
        assert torch.equal(tensor, tensors[0][: len(tensor)])


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is counted in KiB on Linux")
def test_a_shard_is_not_held_in_memory(tmp_path: Path) -> None:
    """A 4 GiB shard must not need 4 GiB of a machine with 12."""
    n_bytes = 512 * MIB
    command = [sys.executable, "-c", PEAK_OF_WRITING, str(tmp_path / "shard"), str(n_bytes)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "shard").stat().st_size == pytest.approx(n_bytes, rel=1e-3)
    assert int(said.stdout) < n_bytes / 3
