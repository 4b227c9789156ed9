"""One process of a group that times collectives; started by torchrun, told what to do by files in a folder.

Usage: torchrun --nproc-per-node N -m tunecast.calibrate.bench.collective_worker FOLDER nccl|gloo TIMEOUT_S DEVICE...

There are N devices: ``cuda:1`` and ``cuda:2``, or ``cpu`` N times. ``joined-<rank>`` appears once a first collective
went through. Job n is ``job-<n>.json`` with op, bytes, repeats and warmup; rank 0 answers with ``result-<n>.json``.
The group ends when ``stop`` appears, or when its starter is gone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

POLL_S = 0.02
ELEMENT_BYTES = 2
"""bf16, the dtype of gradients and gathered weights."""


def main(folder: Path, library: str, timeout_s: float, devices: list[str]) -> None:
    """Join the group, then work off jobs in order."""
    import torch.distributed as dist

    rank = int(os.environ["LOCAL_RANK"])
    join(library, devices[rank], timeout_s)
    (folder / f"joined-{rank}").touch()
    number = 0
    while (job := next_job(folder, number)) is not None:
        seconds = run_job(job, devices[rank])
        if rank == 0:
            answer(folder, number, seconds)
        number += 1
    dist.destroy_process_group()


def join(library: str, device: str, timeout_s: float) -> None:
    """Form the group, and have a first collective go through: only then GPUs have talked to each other.

    A collective that takes longer than `timeout_s` ends the process, by an exception of gloo or by NCCL's watchdog.
    """
    import torch
    import torch.distributed as dist

    here = torch.device(device)
    bound = here if here.type == "cuda" else None
    if bound is not None:
        torch.cuda.set_device(bound)
    dist.init_process_group(library, device_id=bound, timeout=timedelta(seconds=timeout_s))
    dist.all_reduce(torch.zeros(1, device=here))
    _waiting_for(device)()


def next_job(folder: Path, number: int) -> dict[str, Any] | None:
    """Wait for job `number`; None when there will be no more."""
    path, starter = folder / f"job-{number}.json", int(os.environ["TUNECAST_STARTER_PID"])
    while not path.exists():
        if (folder / "stop").exists() or not alive(starter):
            return None
        time.sleep(POLL_S)
    job: dict[str, Any] = json.loads(path.read_text())
    return job


def alive(pid: int) -> bool:
    """Whether a process of ours still exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run_job(job: dict[str, Any], device: str) -> list[float]:
    """Seconds of every repetition, warm-up first: that of the slowest process, all starting together."""
    import torch
    import torch.distributed as dist

    wait = _waiting_for(device)
    call = collective(job["op"], job["bytes"], device)
    seconds = []
    for _ in range(job["warmup"] + job["repeats"]):
        dist.barrier()
        wait()
        start_s = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start_s)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(value) for value in slowest.tolist()]


def _waiting_for(device: str) -> Callable[[], object]:
    """What waits for a collective; on a CPU it returns when it is done."""
    import torch

    return torch.cuda.synchronize if device.startswith("cuda") else _nothing


def _nothing() -> None:
    """There is nothing to wait for."""


def collective(op: str, n_bytes: int, device: str) -> Callable[[], object]:
    """One collective over a whole buffer of `n_bytes` (before it is scattered, or once it is gathered)."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    elements = n_bytes // ELEMENT_BYTES // world * world
    whole = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    part = torch.zeros(elements // world, dtype=torch.bfloat16, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    return calls[op]


def answer(folder: Path, number: int, seconds: list[float]) -> None:
    """Write a result; it appears whole."""
    path = folder / f"result-{number}.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(seconds))
    draft.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:])
