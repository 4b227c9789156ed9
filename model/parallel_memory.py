"""What splitting a model over GPUs adds to the memory of one of them: micro-batches in flight, exchange buffers.

Sources: Narayanan et al. 2021 (arXiv 2104.04473, section 2.2), Korthikanti et al. 2022 (arXiv 2205.05198, appendix)
for what a pipeline stage holds.
"""

from __future__ import annotations

from functools import lru_cache

from tunecast.model.architecture import Architecture
from tunecast.model.context_parallel import exchange_bytes
from tunecast.model.operation import Phase
from tunecast.model.run import Run
from tunecast.model.short_stack import ShortStack, short_stack
from tunecast.model.step import tape_run, write_step
from tunecast.model.tape import Tape
from tunecast.model.tape_parts import Storage

NOT_KEPT = ("gradients", "logits", "scratch")
"""Parts that a micro-batch in flight does not hold: its loss comes right before its own backward, and 8-bit copies of
weights are one set for all."""


def micro_batches_in_flight(run: Run, stage: int) -> float:
    """Micro-batches whose forward a stage has done and whose backward it has not: p - stage, at most all.

    Interleaved in v chunks: (2 (p - stage - 1) + (v - 1) p + 1) / v, chunks counted as parts of a micro-batch.
    """
    stages, chunks = run.pp, run.pp_interleave
    plain = stages - stage
    if chunks > 1:
        warm = 2 * (stages - stage - 1) + (stages if stages > 1 else 0) * (chunks - 1) + 1
        return min(warm, run.gradient_accumulation_steps * chunks) / chunks
    return min(plain, run.gradient_accumulation_steps)


def most_in_flight(run: Run) -> int:
    """Micro-batches of a step from which on more of them take no more memory: two, and with pipeline stages enough to
    fill the first one (`micro_batches_in_flight`, fewer than 2 p)."""
    return 2 * run.pp


def kept_on(tape: Tape, stack: ShortStack) -> int:
    """Bytes alive between the forward and the backward of the first micro-batch at the depth that the tape's `stack`
    stands for: what a layer keeps is born in it."""
    end = max(
        index for index, event in enumerate(tape.events) if event.micro_batch == 0 and event.phase is Phase.FORWARD
    )
    born: dict[Storage, int | None] = {}
    for event in tape.events[: end + 1]:
        for storage in event.writes:
            born.setdefault(storage, event.layer)
    used = {storage for event in tape.events[end + 1 :] for storage in (*event.reads, *event.writes)}
    kept = (storage for storage in born.keys() & used if storage.part not in NOT_KEPT)
    return sum(storage.bytes * stack.copies(born[storage]) for storage in kept)


def kept_bytes(architecture: Architecture, run: Run, platform: str) -> int:
    """The same at the model's depth."""
    return _kept_bytes(architecture, tape_run(run), platform)


@lru_cache(maxsize=4096)
def _kept_bytes(architecture: Architecture, run: Run, platform: str) -> int:
    stack = short_stack(architecture, run)
    return kept_on(write_step(stack.architecture, run, platform), stack)


def added_bytes(architecture: Architecture, run: Run, stage: int, kept: int, moment: str) -> dict[str, int]:
    """By part, what is alive beside one micro-batch's own at a moment of the step."""
    if moment in ("load", "optimizer"):
        return {"activations": 0, "communication": 0}
    waiting = int((micro_batches_in_flight(run, stage) - 1) * kept)
    return {
        "activations": waiting,
        "communication": exchange_bytes(architecture, run) if moment in ("forward", "backward") else 0,
    }
