"""Benchmarks of storage: disk to host and back, a safetensors shard to the device, an adapter checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tunecast.calibrate.bench.page_cache import drop_from_cache, filesystem_of, resident_frac, scratch_root
from tunecast.calibrate.bench.tensors import normal
from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec
from tunecast.model.units import MIB

CHUNK_BYTES = 8 * MIB
"""Bytes per read or write call: large enough that the calls themselves cost nothing."""
SHARD_COLUMNS = 4096
"""Width of the tensors in a shard, that of an 8B model."""
SHARD_ROWS = 4096
FREE_SPACE_FACTOR = 2
"""Free space asked for, as a multiple of the file: nothing of the user's is squeezed."""


@contextmanager
def scratch_file(n_bytes: int) -> Iterator[Path | None]:
    """A path for `n_bytes` in a folder removed afterwards; None where the disk has no room."""
    root = scratch_root()
    if shutil.disk_usage(root).free < FREE_SPACE_FACTOR * n_bytes:
        yield None
        return
    with TemporaryDirectory(prefix="tunecast-", dir=root) as folder:
        yield Path(folder) / "trial"


def _no_room(n_bytes: int) -> TrialResult:
    message = f"The scratch disk has less than {FREE_SPACE_FACTOR} x {n_bytes} bytes free."
    return TrialResult(outcome="unsupported", message=message)


def _seconds(fn: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    fn()
    return time.perf_counter() - start_s


def _write(path: Path, n_bytes: int, *, sync: bool) -> None:
    block = os.urandom(min(CHUNK_BYTES, n_bytes))
    with path.open("wb", buffering=0) as file:
        left = n_bytes
        while left > 0:
            left -= file.write(block[:left]) or 0
        if sync:
            os.fsync(file.fileno())


def _read(path: Path) -> None:
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _result(spec: TrialSpec, seconds: list[float], extra: dict[str, Any]) -> TrialResult:
    return TrialResult(
        outcome="ok",
        samples_s=tuple(seconds[spec.warmup :]),
        warmup_s=tuple(seconds[: spec.warmup]),
        extra={"filesystem": filesystem_of(scratch_root()), **extra},
    )


def run_disk(spec: TrialSpec, backend: Backend) -> TrialResult:
    """Sequential read or write of one file. A cold write ends in fsync; a warm one ends in the page cache."""
    n_bytes, cold = spec.params["bytes"], spec.params["cold"]
    rounds = range(spec.warmup + spec.repeats)
    with scratch_file(n_bytes) as path:
        if path is None:
            return _no_room(n_bytes)
        if spec.params["direction"] == "write":
            return _result(spec, [_seconds(lambda: _write(path, n_bytes, sync=cold)) for _ in rounds], {"synced": cold})
        _write(path, n_bytes, sync=True)
        seconds, extra = _timed_reads(path, lambda: _read(path), cold, len(rounds))
        return _result(spec, seconds, extra)


def _timed_reads(path: Path, read: Callable[[], object], cold: bool, rounds: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds of each read; before each cold one the file leaves the page cache, and we look whether it did.

    ``cold_proved`` is about this machine's page cache: a cache of the hypervisor or the drive cannot be seen.
    """
    seconds, resident = [], []
    for _ in range(rounds):
        if cold:
            drop_from_cache(path)
            resident.append(resident_frac(path))
        seconds.append(_seconds(read))
    if not cold:
        return seconds, {}
    return seconds, {"cold_proved": all(part == 0.0 for part in resident), "resident_frac": resident}


def run_load(spec: TrialSpec, backend: Backend) -> TrialResult:
    """A safetensors shard of bf16 matrices from a cold disk to the device, each quantized to NF4 if asked."""
    n_bytes = spec.params["bytes"]
    with scratch_file(n_bytes) as path:
        if path is None:
            return _no_room(n_bytes)
        _write_shard(path, n_bytes)
        seconds, extra = _timed_reads(
            path, lambda: _load_shard(path, spec.params["quantize"], backend), True, spec.warmup + spec.repeats
        )
        return _result(spec, seconds, {**extra, "file_bytes": path.stat().st_size})


def _write_shard(path: Path, n_bytes: int) -> None:
    """A safetensors file of about `n_bytes`, whose tensors are one block of random numbers again and again.

    Written piece by piece, so that the host holds the block (32 MiB) and not the file, as ``save_file`` would have it:
    8 bytes with the header's length, the header (JSON with dtype, shape and place of each tensor, filled up with blanks
    to a multiple of 8 bytes), the tensors (safetensors' README, "Format").
    """
    import torch

    rows_in_all = max(1, n_bytes // (2 * SHARD_COLUMNS))
    sizes = [min(SHARD_ROWS, rows_in_all - start) for start in range(0, rows_in_all, SHARD_ROWS)]
    block = torch.randn(sizes[0], SHARD_COLUMNS, dtype=torch.bfloat16).view(torch.uint8).numpy()
    header = json.dumps(_shard_header(sizes)).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for rows in sizes:
            file.write(block[:rows].data)
        file.flush()
        os.fsync(file.fileno())


def _shard_header(sizes: list[int]) -> dict[str, Any]:
    """Tensors of these many rows, one after the other."""
    ends = [2 * SHARD_COLUMNS * rows for rows in accumulate(sizes)]
    return {
        f"layer.{index}.weight": {"dtype": "BF16", "shape": [rows, SHARD_COLUMNS], "data_offsets": [start, end]}
        for index, (rows, start, end) in enumerate(zip(sizes, [0, *ends], ends, strict=False))
    }


def _load_shard(path: Path, quantize: bool, backend: Backend) -> None:
    from bitsandbytes import functional
    from safetensors import safe_open

    kept = []
    with safe_open(str(path), framework="pt", device=backend.torch_device) as shard:
        for name in shard.keys():  # noqa: SIM118 - a shard is no mapping
            tensor = shard.get_tensor(name)
            kept.append(
                functional.quantize_4bit(tensor, quant_type="nf4", compress_statistics=True)
                if quantize
                else tensor.clone()
            )
    backend.synchronize()


def run_checkpoint(spec: TrialSpec, backend: Backend) -> TrialResult:
    """Save adapter tensors of ``bytes`` in all from the device into one safetensors file, as PEFT does (no fsync)."""
    from safetensors.torch import save_file

    n_bytes = spec.params["bytes"]
    rows = max(1, n_bytes // (4 * SHARD_COLUMNS))
    adapter = {"adapter": normal(backend, rows, SHARD_COLUMNS, dtype="fp32")}
    with scratch_file(n_bytes) as path:
        if path is None:
            return _no_room(n_bytes)

        def save() -> None:
            save_file({name: tensor.cpu() for name, tensor in adapter.items()}, str(path))

        return _result(spec, [_seconds(save) for _ in range(spec.warmup + spec.repeats)], {})
