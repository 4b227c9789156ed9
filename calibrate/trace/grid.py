"""The grid of cases on which the formulas are held against the traced code: which they are, and how far off.

Models come from the catalog: the smallest and the largest of every family that the formulas and the real-code
step both know, so that a new family enters by being built. Options are drawn once per model and number from
a seed made of both, and include every optimizer, loss and attention that is built.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tunecast.calibrate.trace.tracer import Trace, trace_step
from tunecast.catalogs.errors import TunecastError
from tunecast.catalogs.models import ModelRow, load_models
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Operation
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.stacks import BUILT, FLASH_3

CASE_NUMBERS = (0, 1, 2, 5)
"""Cases of a model: each method once at `DEPTH`, and one at the model's depth."""
DEPTH = 2
"""Layers of a case at real width; the memory of one place is linear in depth."""
WHOLE_EVERY = 6
"""One case in so many has the model's real depth, through the exact extension of shallow traces..."""
WHOLE_UP_TO = 32
"""...unless it is deeper than this: a minute each for what a test of the extension shows too."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
METHODS = ("lora", "qlora", "full")
CHECKPOINTING: tuple[dict[str, Any], ...] = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": False},
    {"gradient_checkpointing": True, "reentrant": True},
)
CHOSEN: dict[str, tuple[Any, ...]] = {
    "max_length": LENGTHS,
    "per_device_train_batch_size": (1, 1, 2, 3, 4, 8),
    "gradient_accumulation_steps": (1, 1, 1, 2, 4),
    "optim": BUILT["optimizer"],
    "loss_type": ("nll", "chunked_nll"),
    "attn_implementation": tuple(name for name in BUILT["attention"] if name != FLASH_3),  # which no trace has
}
"""Options that every case draws."""
CHOSEN_ADAPTER: dict[str, tuple[Any, ...]] = {
    "lora_r": (4, 8, 16, 64, 256),
    "lora_target_modules": ("all-linear", "all-linear", 2),
    "lora_dropout": (0.0, 0.0, 0.05),
    "adapter_dtype": ("fp32", "fp32", "bf16"),
}
"""Options of cases with adapters; a number of targets stands for so many first modules."""
SAVED = ("embed_tokens", "lm_head", "embed_tokens,lm_head")
"""Modules trained whole beside adapters, in some cases of models that do not tie them and name them so."""
OTHER_NAMES = ("gpt_neox", "gpt2", "gptj", "bloom", "falcon")
"""Families whose embeddings and head have other names: PEFT finds no module of these names there."""
CHOSEN_PRECISION: tuple[dict[str, Any], ...] = ({}, {}, {}, {"dtype": "fp32"}, {"precision": "bf16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison: a model at a depth, and the options of its run."""

    model: str
    layers: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tells this case from all others."""
        return " ".join([self.model, f"x{self.layers}", *(f"{k}={v}" for k, v in sorted(self.options.items()))])


def at_depth(architecture: Architecture, layers: int) -> Architecture:
    """The architecture cut to its first `layers` layers."""
    groups, left = [], layers
    for group in architecture.groups:
        if left > 0:
            groups.append(replace(group, count=min(group.count, left)))
        left -= group.count
    windows = {group.layer.attention.window is None for group in groups}
    rotary_sets = min(architecture.rotary_sets, len(windows))  # one for each kind of the layers that are left
    return replace(architecture, groups=tuple(groups), rotary_sets=rotary_sets)


def buildable(row: ModelRow) -> Architecture | None:
    """The architecture if formulas and the real-code step both know it, at few layers too: not where a layer takes
    its keys from one before (Gemma 4 E2B and E4B, which have tests of their own)."""
    from tunecast.calibrate.trace.hf import hf_config

    try:
        architecture = load_architecture(row.hf_id)
        hf_config(architecture)
    except TunecastError:
        return None
    reuses = any(group.layer.attention.reuses_keys for group in architecture.groups)
    return None if reuses else architecture


def grid_models() -> dict[str, Architecture]:
    """The smallest and the largest model of every catalog family that is built, by hub id."""
    families: dict[str, list[ModelRow]] = defaultdict(list)
    for row in load_models().values():
        families[row.family].append(row)
    found: dict[str, Architecture] = {}
    for rows in families.values():
        rows.sort(key=lambda row: row.total_params)
        known = [(row.hf_id, architecture) for row in rows if (architecture := buildable(row)) is not None]
        found.update(known[:1] + known[-1:])
    return found


def targets_of(architecture: Architecture, asked: Any) -> str:
    """Adapter targets as an option: a number stands for so many modules of the first layer."""
    if not isinstance(asked, int):
        return str(asked)
    return ",".join(linear.name for linear in architecture.groups[0].layer.linears[:asked])


def draw_variants(architecture: Architecture, options: dict[str, Any], number: int) -> dict[str, Any]:
    """What some cases have beside: adapters of another kind, modules trained whole, checkpoints elsewhere or fewer."""
    chance = random.Random(f"{architecture.name} {number} variants")
    experts = any(group.layer.mlp.experts is not None for group in architecture.groups)
    drawn: dict[str, Any] = {}
    if options["method"] != "full" and not experts:
        drawn |= chance.choice(({}, {}, {}, {"use_dora": True}, {"lora_bias": True}, {"use_rslora": True}))
        named = architecture.model_type not in OTHER_NAMES
        if named and not architecture.tie_word_embeddings and options["loss_type"] == "nll":
            drawn |= chance.choice(({}, {}, {"modules_to_save": chance.choice(SAVED)}))
    if options["gradient_checkpointing"]:
        drawn |= chance.choice(({}, {}, {}, {}, {"activation_offloading": True}, {"checkpoint_every": 2}))
    return drawn | ({"optim": "adamw_torch"} if experts and options["optim"] == "adafactor" else {})


def draw_options(architecture: Architecture, method: str, number: int) -> dict[str, Any]:
    """The options of case `number` of this model: the same in every process and on every machine."""
    chance = random.Random(f"{architecture.name} {number}")
    options = {"method": method, **{name: chance.choice(values) for name, values in CHOSEN.items()}}
    options |= chance.choice(CHECKPOINTING)
    if method != "full":
        options |= {name: chance.choice(values) for name, values in CHOSEN_ADAPTER.items()}
        options["lora_target_modules"] = targets_of(architecture, options["lora_target_modules"])
        options |= chance.choice(CHOSEN_PRECISION)
    if method == "qlora":
        options |= {"bnb_4bit_quant_type": chance.choice(("nf4", "fp4")), "double_quant": chance.random() < 0.7}
    return options | draw_variants(architecture, options, number) | only_choices(architecture)


def only_choices(architecture: Architecture) -> dict[str, Any]:
    """Options at which a family has one choice, or the grid keeps to one: products of experts are bf16."""
    layers = [group.layer for group in architecture.groups]
    only: dict[str, Any] = {}
    if any(layer.mlp.experts for layer in layers):
        names = ("dtype", "lora_dropout", "use_dora", "lora_bias", "reentrant")
        only |= dict.fromkeys(names)
    if any(layer.attention.latent for layer in layers):
        only["attn_implementation"] = "sdpa"
    if any(layer.attention.softcap or layer.attention.sinks for layer in layers):
        only["attn_implementation"] = "eager"
    return only


def model_cases(architecture: Architecture, numbers: Iterable[int] = CASE_NUMBERS) -> Iterator[Case]:
    """The cases of one model: methods in turn, now and then at its real depth."""
    for number in numbers:
        whole = number % WHOLE_EVERY == WHOLE_EVERY - 1 and architecture.num_layers <= WHOLE_UP_TO
        layers = (
            architecture.num_layers if whole else min(max(DEPTH, with_experts(architecture)), architecture.num_layers)
        )
        options = draw_options(architecture, METHODS[number % len(METHODS)], number)
        yield Case(model=architecture.name, layers=layers, options=options)


def with_experts(architecture: Architecture) -> int:
    """The least depth with experts: PEFT places adapters by the family, which a cut without them would not be."""
    layers = 0
    for group in architecture.groups:
        if group.layer.mlp.experts:
            return layers + 1
        layers += group.count
    return 0


def resolved_case(case: Case, architecture: Architecture) -> tuple[Architecture, Run]:
    """The cut architecture and the run of a case."""
    cut = at_depth(architecture, case.layers)
    return cut, resolve_run(cut, {"allow_long_context": True, **case.options}).run


def off_by(found: float, expected: float) -> float:
    """Relative error of `found`; two zeros agree, and something where nothing is expected is wholly wrong."""
    if expected == 0:
        return 0.0 if found == 0 else 1.0
    return found / expected - 1.0


def phase_totals(operations: Iterable[Operation]) -> dict[str, dict[str, float]]:
    """FLOPs, launches and bytes by phase. Attention's bytes are left out: its arithmetic bounds it."""
    totals: dict[str, dict[str, float]] = {}
    for op in operations:
        total = totals.setdefault(op.phase.value, {"flops": 0.0, "launches": 0.0, "bytes": 0.0})
        total["flops"] += op.total_flops
        total["launches"] += op.total_launches
        total["bytes"] += op.total_bytes if op.kind is not Kind.ATTENTION else 0.0
    return totals


def worst_by_phase(found: dict[str, dict[str, float]], expected: dict[str, dict[str, float]]) -> dict[str, float]:
    """The error of largest size over the phases, by quantity."""
    zero = dict.fromkeys(("flops", "launches", "bytes"), 0.0)
    phases = {*found, *expected}
    return {
        quantity: max((off_by(found.get(p, zero)[quantity], expected.get(p, zero)[quantity]) for p in phases), key=abs)
        for quantity in zero
    }


def comparison(case: Case, architecture: Architecture) -> dict[str, Any]:
    """One row: traced and computed figures of a case, and the relative errors of the computed ones."""
    cut, run = resolved_case(case, architecture)
    trace = trace_step.__wrapped__(cut, run)
    return row_of(case, cut, run, trace)


def row_of(case: Case, cut: Architecture, run: Run, trace: Trace) -> dict[str, Any]:
    """A row of the results file; errors are relative."""
    forecast, operations = memory_timeline(cut, run), step_operations(cut, run)
    traced, computed = phase_totals(trace.stream), phase_totals(operations)
    flops = [sum(phase["flops"] for phase in totals.values()) for totals in (computed, traced)]
    phases = worst_by_phase(computed, traced)
    return {
        "case": case.name,
        "model": case.model,
        "model_type": cut.model_type,
        "layers": case.layers,
        **{name: case.options.get(name) for name in ("method", "max_length", "per_device_train_batch_size")},
        "traced_peak_bytes": trace.memory.peak_bytes,
        "computed_peak_bytes": forecast.allocated_bytes,
        "traced_peak_moment": trace.memory.peak_moment,
        "computed_peak_moment": forecast.peak_moment,
        "traced_flops": flops[1],
        "errors": {
            "allocated": off_by(forecast.allocated_bytes, trace.memory.peak_bytes),
            "at_rest": off_by(forecast.at_rest_bytes, trace.memory.at_rest_bytes),
            "moment": max((off_by(forecast.moments[m], n) for m, n in trace.memory.moments.items()), key=abs),
            "flops": off_by(*flops),
            **{f"phase_{quantity}": error for quantity, error in phases.items()},
        },
    }
