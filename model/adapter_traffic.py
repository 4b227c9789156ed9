"""What PEFT's adapters cost in memory traffic, and what would take less: a LoRA step can be slower than a full one.

Around every adapted map PEFT casts the input to the adapter's fp32, scales and adds its result in fp32 and does the
same to gradients; the traced code moves those bytes (``tests/model/test_against_trace.py``). They go where adapters
are in 16 bits, where one fused function adds them in place, and by half or more where fewer maps are adapted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.estimate import forecast
from tunecast.model.forecast import Forecast
from tunecast.model.operation import Kind
from tunecast.model.question import Question
from tunecast.model.run import Run
from tunecast.model.target import Target
from tunecast.model.units import short_time

LEAST_SHARE = 0.2
"""Of the step in memory-bound kernels, from which adapters are looked at."""
LEAST_SAVED = 0.05
"""Of the step, from which a change is worth a note."""
LEAST_OF_TRAFFIC = 0.2
"""Of the memory traffic's seconds that the best change saves, from which adapters are much of it."""
FEWER = "q_proj,v_proj"
"""PEFT's own choice for Llama and its relatives (``TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``)."""


def changes(run: Run) -> Iterator[dict[str, Any]]:
    """What moves fewer bytes around adapters."""
    if run.adapter_dtype == "fp32":
        yield {"adapter_dtype": "bf16"}
    if not run.fuses("lora"):
        yield {"fused_kernels": ",".join((*run.fused_kernels, "lora"))}
    if set(FEWER.split(",")) < set(run.lora_target_modules):
        yield {"lora_target_modules": FEWER}


def typed(options: dict[str, Any]) -> str:
    """The change as it is typed."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())


def adapter_notes(question: Question, target: Target, found: Forecast) -> tuple[str, ...]:
    """The seconds that each change would take, where traffic is much of the step and a change saves enough of it.

    A run that does not fit is told what would make it fit instead.
    """
    run, step_s = found.run, found.step_time_s.value
    moved_s = found.time_parts_s.get(str(Kind.MEMORY), 0.0)
    if not run.has_adapters or found.verdict == "no" or moved_s < LEAST_SHARE * step_s:
        return ()
    told, least_s = [], step_s
    for options in changes(run):
        try:
            after = forecast(replace(question, options={**question.options, **options}), target)
        except InputError:
            continue
        if after.step_time_s.value < (1.0 - LEAST_SAVED) * step_s:
            told.append(f"{short_time(after.step_time_s.value)} with {typed(options)}")
            least_s = min(least_s, after.step_time_s.value)
    if step_s - least_s < LEAST_OF_TRAFFIC * moved_s or not told:
        return ()
    experts = any(name.startswith("experts.") for name in run.lora_target_modules)
    what = "copies of experts' weights to add adapters to are" if experts else "adapters' casts, scalings and sums are"
    note = (
        f"{what} much of the {short_time(moved_s)} of memory traffic in this step of "
        f"{short_time(step_s)}; the same step is forecast at {', '.join(told)}"
    )
    return (note,)
