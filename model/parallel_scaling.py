"""How well a job scales: its speed over that of one GPU, which serial fraction that makes, and the classic estimate.

Efficiency is tokens/s of N GPUs over N times those of one GPU that ran the same micro-batches alone, whether or not
they fit there: what is lost to waiting for links, to filling a pipeline, and to work that is repeated, split into
smaller products or slowed by sharding. Amdahl's serial fraction follows from it, s = (1/E - 1) / (N - 1) (Karp-Flatt
metric: Karp and Flatt, CACM 33(5), 1990), as a result. The classic estimate goes the other way, from a fraction that
the user believes: speedup = 1 / (s + (1 - s) / N) (Amdahl 1967).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunecast.model.factors import FactorSet
from tunecast.model.links import OF_HOST, collective_seconds, crosses_machines, links_of
from tunecast.model.operation import Kind, Operation
from tunecast.model.prior_effects import known_sharding
from tunecast.model.priors import load_priors
from tunecast.model.read_numbers import number_that
from tunecast.model.run import Run
from tunecast.model.sharding import FSDP
from tunecast.model.time import StepTime
from tunecast.model.units import short_time

WAITED = ("communication", "bubble")
"""Parts of a step that are no work."""
NOTHING = 0.005
TOLD_PARTS = 3
MADE_UP_FOR = 0.5
"""Share of the waiting from which what is faster beside it is worth a note: the efficiency hides the wait."""
MUCH_IDLE = 0.2
"""Share of a step from which a pipeline's bubble is worth a note."""
MICRO_BATCHES_A_STAGE = 4
"""With so many the bubble is a fifth of the step or less."""


LONGER_ROWS = "samples of unlike lengths: copies wait for the longest rows"
ROUNDING = 1e-9
"""Of a step: less than this is no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amdahl:
    """The classic estimate beside the forecast."""

    serial_fraction: float
    """As the user believes it."""
    speedup: float
    step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What N GPUs make of N times the work."""

    efficiency: float
    speedup: float
    """efficiency x N. Above N where sharing the update saves more than sharing costs."""
    serial_fraction: float | None
    """Amdahl's, as a result; 0 where N GPUs are more than N times as fast, None where they are slower than one, which
    no fraction up to 1 makes of them."""
    exposed_communication_s: float
    bubble_s: float
    slower_work_s: float
    """Beyond an N-th of one GPU's: repeated work, smaller products, sharding, waiting for longer rows of other copies.
    Negative: see `faster_parts_s`."""
    faster_parts_s: Mapping[str, float]
    """Parts of the step that take less than an N-th of one GPU's, most first: by how much."""
    bound_by: str
    """What costs most: a collective with the link it crosses, ``pipeline bubble``, `LONGER_ROWS`, what makes work
    slower, or ``nothing`` where all costs less than `NOTHING` of the step."""
    amdahl: Amdahl | None = None


def amdahl_speedup(serial_fraction: float, num_gpus: int) -> float:
    """1 / (s + (1 - s) / N)."""
    return 1.0 / (serial_fraction + (1.0 - serial_fraction) / num_gpus)


def serial_fraction_of(efficiency: float, num_gpus: int) -> float:
    """(1 / E - 1) / (N - 1), at least 0."""
    return max((1.0 / efficiency - 1.0) / (num_gpus - 1), 0.0)


def alone(run: Run, storage: Mapping[str, Any] | None = None) -> Run:
    """The same micro-batches on one GPU, which may store and compute otherwise (`resolve_parallel`)."""
    one = replace(run, num_gpus=1, tp=1, pp=1, pp_interleave=1, cp=1, async_tp=False, sharding="none")
    return replace(one, **(storage or {}))


def scaling_of(
    timing: StepTime,
    one: StepTime,
    operations: Sequence[Operation],
    factors: FactorSet,
    run: Run,
    serial_fraction: float | None,
    longer_frac: float = 0.0,
) -> Scaling:
    """How a job scales whose step takes `timing`, where one GPU takes `one` for its own (`alone`); `longer_frac` is the
    share of the tokens of the rows that copies wait for which a copy's own do not have."""
    waiting, bubble = timing.parts_s.get("communication", 0.0), timing.parts_s.get("bubble", 0.0)
    step = timing.step_time_s.value
    share = run.tokens_per_step / (alone(run).tokens_per_step * run.num_gpus)
    ideal = one.step_time_s.value * share
    saved = {name: part * share - timing.parts_s.get(name, 0.0) for name, part in one.parts_s.items()}
    least = ROUNDING * step
    slowest = min((name for name in saved if name not in WAITED), key=lambda name: saved[name])
    slower = step - waiting - bubble - ideal
    longer = min(max(slower, 0.0), longer_frac * step)
    lost = {"waiting": waiting, "bubble": bubble, "work": slower - longer, "rows": longer}
    efficiency = ideal / step
    return Scaling(
        efficiency=efficiency,
        speedup=efficiency * run.num_gpus,
        serial_fraction=None if efficiency * run.num_gpus < 1.0 else serial_fraction_of(efficiency, run.num_gpus),
        exposed_communication_s=waiting,
        bubble_s=bubble,
        slower_work_s=slower,
        faster_parts_s={
            name: saved[name] for name in sorted(saved, key=lambda name: -saved[name]) if saved[name] > least
        },
        bound_by=bound_by(operations, factors, run, lost, step, slowest),
        amdahl=classic(serial_fraction, run.num_gpus, ideal),
    )


def scaling_notes(scaling: Scaling | None, run: Run, storage: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Why a job may scale by more than its GPUs, or loses less than it waits; one GPU alone has `storage` in place of
    the run's own."""
    if not comparable(run):
        return (
            "no scaling efficiency is told: one GPU alone offloads by DeepSpeed, which keeps other states than FSDP",
        )
    if scaling is None:
        return ()
    n = run.num_gpus
    saved = list(scaling.faster_parts_s.items())[:TOLD_PARTS]
    less = ", ".join(f"{short_time(part_s)} less of {name}" for name, part_s in saved)
    why = "; ".join(causes_of(run, storage or {}))
    if scaling.efficiency <= 1.0 + NOTHING:
        lost_s = scaling.exposed_communication_s + scaling.bubble_s
        if not 0.0 < MADE_UP_FOR * lost_s <= sum(scaling.faster_parts_s.values()):
            return ()
        note = (
            f"{short_time(lost_s)} of a step are waiting for other GPUs, which the speed beside one GPU's does not "
            f"show: a step also has {less} than an N-th of one GPU's alone ({why})"
        )
        return (note,)
    return (f"{n} GPUs are more than {n} times as fast as one: a step has {less} than one GPU's alone ({why})",)


def causes_of(run: Run, storage: Mapping[str, Any]) -> list[str]:
    """Why a GPU of several may have less to do than one alone, which `storage` tells where it stores or computes
    otherwise."""
    causes = ["the update is shared" if run.offload == "none" else "what is offloaded is shared"]
    apart = {name: word for name, word in storage.items() if word != getattr(run, name)}
    if "precision" in apart:
        causes.append(f"the job computes in {run.precision}, one GPU in {apart['precision']}")
    elif "adapter_dtype" in apart:
        held = "gathered" if run.master_dtype else "stored"
        causes.append(f"adapters are {held} in {run.adapter_dtype} here, in {apart['adapter_dtype']} on one GPU")
    priors = load_priors()
    known = known_sharding(run.sharding, priors)
    if known is not None and priors["sharding_effects"][known]["value"] < 0.0:
        causes.append(f"all work is as fast as in published runs under {known}")
    return causes


def pipeline_notes(timing: StepTime, run: Run) -> tuple[str, ...]:
    """That stages idle for much of a step, and what shortens it."""
    idle = timing.parts_s.get("bubble", 0.0) / timing.step_time_s.value
    if idle < MUCH_IDLE:
        return ()
    enough = MICRO_BATCHES_A_STAGE * run.pp
    note = (
        f"stages wait {idle:.0%} of the step for each other, (stages - 1) / (micro-batches x chunks) of their work: "
        f"{run.pp - 1} / {run.gradient_accumulation_steps * run.pp_interleave}; with --gradient-accumulation-steps "
        f"{enough} it would be {run.pp - 1} / {enough * run.pp_interleave}"
    )
    return (note,)


def comparable(run: Run) -> bool:
    """Whether one GPU runs the same code: FSDP's offload exists for several alone."""
    return run.offload == "none" or run.sharding not in FSDP


def bound_by(
    operations: Sequence[Operation],
    factors: FactorSet,
    run: Run,
    lost_s: Mapping[str, float],
    step_s: float,
    slowest_part: str,
) -> str:
    """What costs most: waiting (by the collective that takes most of its link), the bubble, longer rows of other
    copies, or slower work (by the part of the step that grew most)."""
    most = max(lost_s, key=lambda name: lost_s[name])
    if lost_s[most] < NOTHING * step_s:
        return "nothing"
    if most == "bubble":
        return "pipeline bubble"
    if most == "rows":
        return LONGER_ROWS
    if most == "work":
        split = [f"{name} {degree}" for name in ("tp", "pp", "cp") if (degree := getattr(run, name)) > 1]
        apart = f"repeated and smaller work of {', '.join(split)}" if split else f"work slower in {run.sharding}"
        return f"{apart} ({slowest_part})"
    return slowest_collective(operations, factors, run)


def slowest_collective(operations: Sequence[Operation], factors: FactorSet, run: Run) -> str:
    """The collective that takes most of its link in all, and where."""
    sent = [o for o in operations if o.kind is Kind.COMMUNICATION and o.name not in OF_HOST]
    links = links_of(factors, run, across=crosses_machines(sent))
    totals: dict[str, float] = {}
    for operation in sent:
        where = "between machines" if operation.group > operation.group_per_node else "inside a machine"
        label = f"{operation.name} {where}"
        totals[label] = totals.get(label, 0.0) + collective_seconds(operation, links, run.num_gpus) * operation.count
    return max(totals, key=lambda label: totals[label])


def given_fraction(options: Mapping[str, Any]) -> float | None:
    """The serial fraction that the user believes in; refused where it is none, however many GPUs there are."""
    given = options.get("serial_fraction")
    if given is None:
        return None
    return number_that("--serial-fraction", given, lambda part: 0.0 <= part <= 1.0, "from 0 to 1", "0.05")


def classic(share: float | None, num_gpus: int, unhindered_s: float) -> Amdahl | None:
    """Amdahl's estimate from a fraction that the user gives; `unhindered_s` is the step if nothing were serial."""
    if share is None:
        return None
    speedup = amdahl_speedup(share, num_gpus)
    return Amdahl(serial_fraction=share, speedup=speedup, step_time_s=unhindered_s * num_gpus / speedup)
