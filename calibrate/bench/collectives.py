"""Collectives between the GPUs of this machine (NCCL) or between processes of this CPU (gloo), through torchrun.

One group of processes serves all trials of a calibration: starting one takes longer than measuring.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tunecast.calibrate.bench.last_words import HANGING_GPUS, last_words
from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec

WORKER = "tunecast.calibrate.bench.collective_worker"
GROUP_TIMEOUT_S = 60.0
"""What one collective may take: then the processes end by themselves, in their own words. A link that hangs never
ends, and the largest payload over a slow one (512 MiB at 1 GB/s) takes a second."""
START_TIMEOUT_S = 180.0
"""torch is imported by every process, NCCL looks for links and the first collective runs: seconds to a minute on a
slow disk, and `GROUP_TIMEOUT_S` where it hangs."""
JOB_TIMEOUT_S = 120.0
"""Beyond `GROUP_TIMEOUT_S`, with what PyTorch and torchrun take to end what hangs."""
POLL_S = 0.01
"""Between looks for a result, outside what is timed."""
STOP_TIMEOUT_S = 10.0
"""What a group has to end by itself before it is told to."""
END_TIMEOUT_S = 35.0
"""What torchrun has to end its processes: it kills after 30 s (torch.distributed.elastic.multiprocessing.api)."""


class CollectiveGroup:
    """Processes that wait for collectives to time."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        """A process on each of the devices: GPUs (``cuda:1``), or ``cpu`` again and again. Raises RuntimeError when
        the group does not form."""
        self._devices = devices
        self._folder = Path(tempfile.mkdtemp(prefix="tunecast-collectives-"))
        self._output = (self._folder / "output.txt").open("wb")
        self._jobs = 0
        worker = ("-m", WORKER, str(self._folder), library_of(devices), str(GROUP_TIMEOUT_S), *devices)
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(devices)))
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TUNECAST_STARTER_PID": str(os.getpid())}
        self._process = subprocess.Popen(
            [sys.executable, *launch, *worker], stdout=self._output, stderr=subprocess.STDOUT, env=environment
        )
        self._wait_for([self._folder / f"joined-{rank}" for rank in range(len(devices))], START_TIMEOUT_S, "form")

    def seconds(self, op: str, n_bytes: int, *, repeats: int, warmup: int) -> list[float]:
        """Seconds of every repetition, warm-up first. Raises RuntimeError when a process fails."""
        job = {"op": op, "bytes": n_bytes, "repeats": repeats, "warmup": warmup}
        path, result = (self._folder / f"{name}-{self._jobs}.json" for name in ("job", "result"))
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(job))
        draft.rename(path)
        self._jobs += 1
        self._wait_for([result], JOB_TIMEOUT_S, f"finish {op} of {n_bytes} bytes")
        found: list[float] = json.loads(result.read_text())
        return found

    def _wait_for(self, paths: list[Path], timeout_s: float, what: str) -> None:
        end_s = time.monotonic() + timeout_s
        while not all(path.exists() for path in paths):
            failed = self._process.poll() is not None
            if failed or time.monotonic() > end_s:
                why = self._last_words() if failed else self._silence(timeout_s)
                self.close(patience_s=0.0)
                raise RuntimeError(f"The processes did not {what}: {why}")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        said = last_words((self._folder / "output.txt").read_text(errors="replace"))
        return said or f"exit code {self._process.returncode}"

    def _silence(self, timeout_s: float) -> str:
        found = f"nothing happened for {timeout_s:.0f} s"
        return f"{found}; {HANGING_GPUS}" if library_of(self._devices) == "nccl" else found

    def close(self, *, patience_s: float = STOP_TIMEOUT_S) -> None:
        """End the processes and remove their folder.

        Those that hang are ended by torchrun, whose children they are, each in a session of its own: had it been
        killed, they would go on and keep their GPUs busy.
        """
        if self._folder.exists():
            (self._folder / "stop").touch()
        if not self._ends_in(patience_s):
            self._process.terminate()
            if not self._ends_in(END_TIMEOUT_S):
                self._process.kill()
                self._process.wait()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ends_in(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def library_of(devices: tuple[str, ...]) -> str:
    """What carries collectives between such devices."""
    return "nccl" if devices[0].startswith("cuda") else "gloo"


_groups: dict[tuple[str, ...], CollectiveGroup] = {}
_failures: dict[tuple[str, ...], str] = {}
"""Why groups failed: what hung or broke once would do so in every other collective."""


def close_groups() -> None:
    """End every group that this process started, and forget which failed."""
    _failures.clear()
    while _groups:
        _groups.popitem()[1].close()


atexit.register(close_groups)


def run_collective(spec: TrialSpec, backend: Backend) -> TrialResult:
    """The ``collective`` bench: bf16 payload of `bytes` in all, the time of the slowest process.

    Raises RuntimeError when the processes fail, and at once, in the same words, for the collectives after it.
    """
    devices = backend.ranks(int(spec.params["world_size"]))
    if devices in _failures:
        raise RuntimeError(_failures[devices])
    try:
        if devices not in _groups:
            _groups[devices] = CollectiveGroup(devices)
        taken = _groups[devices].seconds(
            spec.params["op"], spec.params["bytes"], repeats=spec.repeats, warmup=spec.warmup
        )
    except RuntimeError as error:
        _groups.pop(devices, None)
        _failures[devices] = str(error)
        raise
    return TrialResult(
        outcome="ok",
        samples_s=tuple(taken[spec.warmup :]),
        warmup_s=tuple(taken[: spec.warmup]),
        extra={"library": library_of(devices)},
    )
