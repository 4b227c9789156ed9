"""What failed processes of a group said last: NCCL's own reason among torchrun's lines about it."""

from __future__ import annotations

import re
from itertools import pairwise

LAST_LINES = 3
"""Lines that are told."""
REASON_FOLLOWS = "Last error:"
"""After this line NCCL's exception has what went wrong (``ncclGetLastError``; PyTorch, c10d/NCCLUtils.cpp)."""
SIGNS = ("Error", "Watchdog caught")
"""In lines of exceptions, and of PyTorch's watchdog, which ends what hangs."""
NOT_A_REASON = "ChildFailedError"
"""torchrun's own exception, which says only that there was another."""
RANK = re.compile(r"(?:\[rank\d+\]:)?")
"""Before each line of an exception, by PyTorch (distributed/distributed_c10d.py)."""
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?:<\d+>|:\d+)?")
"""Of a machine (IPv4, with NCCL's or the usual way of writing its port): a record tells none."""
HANGING_GPUS = "where GPUs hang when they talk to each other directly, NCCL_P2P_DISABLE=1 avoids it"
"""NVIDIA's NCCL user guide, troubleshooting, GPU-to-GPU communication."""
REMEDIES = (("/dev/shm", "start the container with --shm-size=1g"), ("Watchdog caught", HANGING_GPUS))
"""What to try, by what was said. Docker gives /dev/shm 64 MB (the same guide, shared memory)."""


def last_words(output: str) -> str:
    """Why processes failed, by their output: NCCL's reason, else their exceptions, else its end; may be empty."""
    lines = [_rank_and_text(line) for line in output.splitlines()]
    texts = [text for _, text in lines if text]
    exceptions = [text for text in texts if any(sign in text for sign in SIGNS) and NOT_A_REASON not in text]
    told = _reasons(lines) or exceptions or texts
    reason = ADDRESS.sub("<address>", " / ".join(list(dict.fromkeys(told))[-LAST_LINES:]))
    return "; ".join([reason, *(remedy for sign, remedy in REMEDIES if sign in reason)])


def _rank_and_text(line: str) -> tuple[str, str]:
    rank = RANK.match(line)
    assert rank is not None
    return rank.group(), line[rank.end() :].strip()


def _reasons(lines: list[tuple[str, str]]) -> list[str]:
    """The lines after NCCL's headings, of the same process."""
    return [
        after
        for (rank, text), (next_rank, after) in pairwise(lines)
        if text == REASON_FOLLOWS and rank == next_rank and after
    ]
