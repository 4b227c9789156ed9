"""Products of stacked experts: one kernel for all of them, or one product after the other.

PyTorch's ``_grouped_mm`` has a kernel for bf16 on compute capabilities 9.x and 10.x, and by Composable Kernel on AMD's
gfx942 and gfx950 (``aten/src/ATen/native/cuda/GroupedBlas.cpp``, ``_grouped_mm_cuda``). For anything else it copies
the experts' offsets to the host, which waits for them, and multiplies expert by expert (``GroupedMMUtils.h``,
``_grouped_mm_fallback``); so it does on a CPU. Below compute capability 8.0, transformers 5 has a loop of its own
instead (``integrations/moe.py``, ``_can_use_grouped_mm``), which is not built here.
"""

from __future__ import annotations

import re
from dataclasses import replace

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.resolve import Resolved
from tunecast.model.resolve_experts import has_stacks
from tunecast.model.run import Run
from tunecast.model.target import Target

MAJORS = ("9", "10")
AMD = ("gfx942", "gfx950")
AMD_CAPABILITY = "gfx"
"""How the catalog's capabilities of AMD's cards begin."""
LEAST_CAPABILITY = 8.0
"""From which transformers calls ``_grouped_mm``."""
_STACKED = re.compile(r'"(num_experts|num_local_experts|n_routed_experts)": [1-9]')
"""In the config of a model that is known only from its real code."""
LOOP_NOTE = (
    "experts are multiplied one after the other here, and the host waits for their rows' numbers: PyTorch's grouped "
    "products are one kernel for bf16 on compute capabilities 9 and 10, gfx942 and gfx950 only"
)


def stacks_experts(architecture: Architecture) -> bool:
    """As `has_stacks`, whose stacks grouped products read; also of models known only from their real code."""
    return has_stacks(architecture) or bool(_STACKED.search(architecture.settings))


def has_grouped_kernel(compute_capability: str | None) -> bool:
    """Whether grouped products of bf16 are one kernel on a card, by what the catalog calls its capability; on a CPU
    (None) they are not."""
    return compute_capability is not None and (
        compute_capability.partition(".")[0] in MAJORS or compute_capability in AMD
    )


def loops_over_experts(architecture: Architecture, run: Run, compute_capability: str | None) -> bool:
    """Whether a run's experts are multiplied one after the other on such a card."""
    return stacks_experts(architecture) and not (run.experts_dtype == "bf16" and has_grouped_kernel(compute_capability))


def on_capability(architecture: Architecture, run: Run, compute_capability: str | None) -> Run:
    """The run with `Run.loops_experts` as it is on such a card."""
    return replace(run, loops_experts=loops_over_experts(architecture, run, compute_capability))


def with_experts(resolved: Resolved, architecture: Architecture, compute_capability: str | None) -> Resolved:
    """The run as `on_capability` has it, and a note where a card loops; a CPU has no other way."""
    run = on_capability(architecture, resolved.run, compute_capability)
    told = (LOOP_NOTE,) if run.loops_experts and compute_capability is not None else ()
    return replace(resolved, run=run, notes=(*resolved.notes, *told))


def check_experts(
    architecture: Architecture, device: str, compute_capability: str | None, *, packed: bool = False
) -> None:
    """Raises NotSupportedError for stacked experts on a card on which transformers does not call ``_grouped_mm``, and
    for `packed` ones on AMD's, which axolotl refuses (``check_quantize_moe_experts``)."""
    if packed and str(compute_capability).startswith(AMD_CAPABILITY):
        raise NotSupportedError(
            f"--quantize-moe-experts on {device} was asked for, but axolotl packs experts on NVIDIA cards alone; leave "
            "it out."
        )
    is_nvidia = re.fullmatch(r"\d+\.\d+", compute_capability or "")
    if is_nvidia and stacks_experts(architecture) and float(is_nvidia[0]) < LEAST_CAPABILITY:
        raise NotSupportedError(
            f"{architecture.name} on {device} (compute capability {compute_capability}) was asked for, but how "
            f"transformers runs its experts below {LEAST_CAPABILITY} is not built; take a card from {LEAST_CAPABILITY} "
            "on, an A100 or later."
        )


def experts_on_card(resolved: Resolved, architecture: Architecture, target: Target) -> Resolved:
    """The run as `with_experts` has it on this device; raises NotSupportedError as `check_experts`."""
    packed = resolved.run.quantize_moe_experts
    check_experts(architecture, target.id, target.compute_capability, packed=packed)
    return with_experts(resolved, architecture, target.compute_capability)
