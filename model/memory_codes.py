"""Whose code holds a run's tensors, and how exact a forecast of them is: narrow where such code was compared.

Tensors of code that was traced, or whose published peaks of allocated memory took part in the fit, agree within one
percent. Of other code no formula here was ever compared with such a figure: what published runs of other code left open
is its spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.gpus import Gpu
from tunecast.model.factors import FactorSet
from tunecast.model.run import Run
from tunecast.model.value import Z80

COMPARED, SHARED, OTHER = "allocated_log_sd", "sharded_log_sd", "other_code_log_sd"
"""Standard deviation of log(predicted / published) of allocated memory, by whether the run's code was compared, and
with several GPUs."""

PER_THREAD = "_per_thread"
"""In the names of terms that are bytes for each thread that a card holds."""
USUAL_CONTEXT_THREADS = 132 * 2048
"""Assumed of a card whose multiprocessors nobody has stated, and of AMD's, whose software reserves by other rules: an
H100's."""


def memory_code(run: Run, same: Mapping[str, str]) -> str:
    """Stack, sharding and what else decides which tensors exist when, for example ``hf-peft fsdp compiled``.

    `same` names the stacks that run another one's code.
    """
    sharding = run.sharding if run.num_gpus > 1 else "one GPU"
    split = [name for name, ways in (("tp", run.tp), ("pp", run.pp), ("cp", run.cp)) if ways > 1]
    apart = ["compiled"] * run.torch_compile + ["offloaded"] * (run.offload != "none")
    return " ".join((same.get(run.stack, run.stack), sharding, *split, *apart))


def effects_stack(stack: str, priors: Mapping[str, Any]) -> str:
    """The stack whose effects on time a run has: its own where published rows have it, else the one whose code it runs
    (``trl``, ``llama-factory``, ... train transformers' models with its Trainer and PEFT)."""
    rows = priors["effects_by_kind"].get("stack.gemm", {})
    same = priors["beliefs"].get("memory_codes", {}).get("same", {})
    return stack if stack in rows else str(same.get(stack, stack))


def is_compared(run: Run, priors: Mapping[str, Any]) -> bool:
    """Whether code that holds tensors as this run's does was traced, or has published peaks that were read."""
    known = priors["beliefs"]["memory_codes"]
    return memory_code(run, known["same"]) in {*known["traced"], *priors["memory_codes"]}


def memory_overheads_of(run: Run | None, priors: Mapping[str, Any], gpu: Gpu) -> dict[str, float]:
    """The priors' memory terms for this run: `COMPARED` is the spread of its code, ``context`` bytes of this card."""
    stored, threads = priors["memory_overhead_bytes"], context_threads(gpu)
    terms = {
        name.replace(PER_THREAD, ""): value * threads if PER_THREAD in name else value
        for name, value in stored.items()
        if name not in (OTHER, SHARED)
    }
    spread = _spread(run, priors)
    return terms if spread is None else terms | {COMPARED: spread}


def _spread(run: Run | None, priors: Mapping[str, Any]) -> float | None:
    """How exact the tensors of the run's code are; None where the priors do not say."""
    terms = priors["memory_overhead_bytes"]
    found = [terms.get(COMPARED)]
    if run is not None and run.num_gpus > 1:
        found.append(terms.get(SHARED))
    if run is not None and OTHER in terms and not is_compared(run, priors):
        found.append(terms[OTHER])
    return max((spread for spread in found if spread is not None), default=None)


def context_threads(gpu: Gpu) -> int:
    """Threads by which a CUDA context grows: it reserves local memory for all that the card holds at once (NVIDIA on
    its developer forum, "Local memory management", topic 289339: threads of a multiprocessor x multiprocessors x bytes
    of a thread). Of 141 MiB on a T4, 426 on an RTX 6000 Ada and 770 on an H100, 3.5, 2.0 and 2.9 KiB are for each.
    """
    threads = _stated_threads(gpu)
    return USUAL_CONTEXT_THREADS if threads is None else threads


def _stated_threads(gpu: Gpu) -> int | None:
    """The card's own such threads; None where they are not known, and of AMD's."""
    return gpu.resident_threads if gpu.vendor == "nvidia" else None


def context_notes(gpu: Gpu) -> tuple[str, ...]:
    """That the context is that of another card, where no rule gives this one's."""
    if _stated_threads(gpu) is not None:
        return ()
    return ("what the process holds beyond its allocator is taken to be an H100's: nobody has stated it for this card",)


def with_other_code(own: FactorSet, run: Run | None, priors: Mapping[str, Any]) -> FactorSet:
    """A record's factors: it measured plain code on one GPU, and says nothing of how exact another's tensors are."""
    notes = code_notes(run, priors)
    if not notes and (run is None or run.num_gpus == 1):
        return own
    return replace(_no_surer(own, _spread(run, priors) or 0.0), notes=(*own.notes, *notes))


def as_other_code(own: FactorSet, priors: Mapping[str, Any]) -> FactorSet:
    """The same factors for code that was never compared, whatever its software."""
    return _no_surer(own, priors["memory_overhead_bytes"].get(OTHER, 0.0))


def _no_surer(own: FactorSet, log_sd: float) -> FactorSet:
    """The same factors with tensors that are at least so unsure."""
    terms = own.memory_overhead_bytes
    return replace(own, memory_overhead_bytes=terms | {COMPARED: max(log_sd, terms.get(COMPARED, 0.0))})


def code_notes(run: Run | None, priors: Mapping[str, Any]) -> tuple[str, ...]:
    """What a forecast says of tensors that no published peak was compared with."""
    other = priors["memory_overhead_bytes"].get(OTHER)
    if run is None or other is None or is_compared(run, priors):
        return ()
    code = memory_code(run, priors["beliefs"]["memory_codes"]["same"])
    told = f"no peak of allocated memory of such code ({code}) was compared with its forecast"
    return (
        f"{told}: the interval of memory is that of other such code, about {math.expm1(Z80 * other):.0%} either way",
    )
