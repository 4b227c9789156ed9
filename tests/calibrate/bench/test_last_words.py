"""Why processes of collectives failed, in their own words."""

from __future__ import annotations

from pathlib import Path

import nccl_without_shm
import pytest

from tunecast.calibrate.bench import collectives
from tunecast.calibrate.bench.collectives import CollectiveGroup
from tunecast.calibrate.bench.last_words import last_words

pytest.importorskip("torch")

TWO = ("cpu", "cpu")
AGENT = """\
E0827 12:00:03.1 71 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1) local_rank: 0 (pid: 75)
Traceback (most recent call last):
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
tunecast.calibrate.bench.collective_worker FAILED
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""
"""What torchrun adds once a process of it has failed."""


def nccl_output(*reasons: str) -> str:
    """Of as many processes, each with the reason that NCCL gave it."""
    return "".join(nccl_without_shm.OUTPUT.format(rank=rank, reason=reason) for rank, reason in enumerate(reasons))


def test_nccls_own_reason_comes_through_once_and_with_a_remedy() -> None:
    reason = nccl_without_shm.REASON
    assert last_words(nccl_output(reason, reason) + AGENT) == f"{reason}; start the container with --shm-size=1g"


def test_a_machines_address_is_not_told() -> None:
    output = (
        "[rank1]: Last error:\n[rank1]: socketPollConnect: connect to 10.0.17.4<43211> returned Connection refused\n"
    )
    told = last_words(output)
    assert "10.0.17.4" not in told
    assert told == "socketPollConnect: connect to <address> returned Connection refused"


def test_a_reason_without_the_word_error_comes_through() -> None:
    reason = "Cuda failure 'peer access is not supported between these two devices'"
    assert last_words(nccl_output(reason) + AGENT) == reason


def test_where_nccl_knows_no_reason_the_exceptions_are_told() -> None:
    said = last_words(nccl_output("", "") + AGENT)
    assert "unhandled system error" in said
    assert "ncclSystemError" in said
    assert "ChildFailedError" not in said


def test_the_watchdog_that_ends_a_hanging_collective_is_heard() -> None:
    caught = (
        "[E827 12:00:00.1 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=60000) ran for 60012 milliseconds"
    )
    said = last_words(f"[rank0]:{caught} before timing out.\n{AGENT}")
    assert said.startswith(caught)
    assert said.endswith("NCCL_P2P_DISABLE=1 avoids it")


@pytest.mark.parametrize(("output", "says"), [("", ""), ("a\nb\n\nc\nd\n", "b / c / d")])
def test_output_without_exceptions_is_told_by_its_end(output: str, says: str) -> None:
    assert last_words(output) == says


def test_the_reason_goes_through_torchrun_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "WORKER", nccl_without_shm.__name__)
    monkeypatch.setenv("PYTHONPATH", str(Path(nccl_without_shm.__file__).parent))
    with pytest.raises(RuntimeError) as raised:
        CollectiveGroup(TWO)
    reason = f"{nccl_without_shm.REASON}; start the container with --shm-size=1g"
    assert str(raised.value) == f"The processes did not form: {reason}"
