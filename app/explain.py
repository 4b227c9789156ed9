"""Every term of a forecast with its formula, its inputs and where they come from (``estimate --explain``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tunecast.catalogs.errors import InputError
from tunecast.model.cached_copies import SCALE_CACHED
from tunecast.model.curve_names import curve_key, find_curve, kind_of
from tunecast.model.factors import HOST_S_PER_LAUNCH
from tunecast.model.forecast_json import run_with_origins
from tunecast.model.hooks import adapter_visits_of, has_hooks, visits_of, wraps_adapters
from tunecast.model.host import WALKED, host_launches, host_seconds
from tunecast.model.inventory import flops_by_dtype
from tunecast.model.links import OF_HOST
from tunecast.model.priors import HOOKS, UNITS, load_priors
from tunecast.model.sharding_copies import copies_for_others
from tunecast.model.time import scalars
from tunecast.model.timing import seconds_at_peak
from tunecast.model.trainer_loop import modules_of, walk_origin, walks_of
from tunecast.model.units import GIGA, TERA, gib
from tunecast.run_line import checkpointing_word
from tunecast.tables import DASH, count, digits, dollars, duration, plain_table, seconds
from tunecast.whole_run_table import SMALLEST_SHOWN_USD

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tunecast.model.factors import FactorSet
    from tunecast.model.forecast import Forecast
    from tunecast.model.operation import Operation
    from tunecast.model.question import Question
    from tunecast.model.run import Run
    from tunecast.model.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One number of a forecast."""

    section: str
    """``resolved run``, ``memory``, ``time``, ``run`` or ``money``."""
    name: str
    value: str
    formula: str
    inputs: str
    origin: str


RESERVED_FORMULA = (
    "blocks of the allocator: its requests replayed where the card's own steps, or published runs, follow that, else "
    "allocated + a share of what comes and goes"
)
MEMORY_FORMULAS = {
    "weights": "parameters kept in their storage dtype x bytes each",
    "quantized": "quantized parameters x bits, with absmax and their own quantization",
    "adapters": "trained adapter parameters x bytes of their dtype",
    "gradients": "trained parameters x bytes, from the backward that makes them to the update",
    "optimizer_state": "states per trained parameter x bytes, rounded up to 512 per tensor",
    "activations": "what autograd keeps at this moment: checkpoints, one layer's recomputation and its gradients",
    "logits": "tokens x vocabulary x bytes of every copy that is alive",
    "scratch": "dequantized weights, temporaries of the update",
    "communication": "buffers of what sharding gathers and reduces",
    "workspaces": "what PyTorch keeps for matrix products: one workspace for each of two threads, by the card",
}
TIME_FORMULAS = {
    "gemm": "sum of 2 m n k / rate(m, n, k)",
    "attention": "sum of FLOPs / rate(length, head size)",
    "memory": "sum of bytes moved / rate(bytes), faster while they stay in a large cache",
    "dequant": "sum of elements / rate(elements)",
    "loss": "sum of bytes moved / rate(tokens, vocabulary)",
    "optimizer": "sum of bytes moved / rate(elements)",
    "floor": "kernels x the shortest time of one",
    "communication": "collectives by rings and trees: a share of those beside work, or what outlasts it",
    "host": "launches x seconds each beyond the device's own time, the update it does under --offload, "
    "and paged optimizer state that comes and goes over PCIe",
    "overhead": "seconds per step beside its kernels",
    "bubble": "idle share of pipeline stages",
    "trainer": "modules that the Trainer walks over, while nothing is issued",
    "units": "visits of adapters that are units of FSDP 1, for which the device runs dry",
}


def explain(model: str, *, gpu: str, **options: Any) -> list[Term]:
    """The terms of one forecast on one GPU; options are those of `estimate`. Raises InputError as `estimate` does."""
    from tunecast.model.estimate import forecast

    question, target = one_question(model, gpu=gpu, **options)
    return explained(question, target, forecast(question, target))


def one_question(model: str, *, gpu: str | Sequence[str], **options: Any) -> tuple[Question, Target]:
    """What is asked, and of which device; raises InputError where it is not one."""
    from tunecast.asking import asked_question

    question, targets, _ = asked_question(model, gpu=gpu, **options)
    if len(targets) != 1:
        raise InputError(f"--explain looks at one GPU, but {len(targets)} were asked for; name one with --gpu.")
    return question, targets[0]


def explained(question: Question, target: Target, told: Forecast) -> list[Term]:
    """The terms of a forecast that was made of this question on this device."""
    from tunecast.model.on_device import job_factors
    from tunecast.model.rows import held_run, timed_run, unpacked_rows
    from tunecast.model.slowest_stage import timed_operations

    factors = job_factors(target, told.architecture, told.run, question.options)
    timed = timed_run(told.run, unpacked_rows(told.run, question.options))
    operations = timed_operations(told.architecture, timed, factors, platform=target.platform, source=question.source)
    by_priors = target.record is None and question.achieved_tflops is None
    slower = float(load_priors()["source_effect"]["value"]) if by_priors else None
    return [
        *field_terms(told),
        *memory_terms(told, held_run(told.run, question.options), target),
        *time_terms(told, operations, factors, target, slower),
        *run_terms(told),
        *money_terms(told),
    ]


SHARE_SHOWN = 1e-6
"""Of a step's time, the least that a kind of operation must take to be shown."""
ORIGINS = {
    "cli": "asked for",
    "file": "the training file",
    "stack-default": "default of the stack or framework",
    "assumed": "assumed",
    "searched": "chosen among what fits",
    "card": "what the device can do",
}


def field_terms(told: Forecast) -> Iterable[Term]:
    """Every field of the resolved run that says something, with where its value came from."""
    for name, found in run_with_origins(told.run, told.run_origins).items():
        value, origin = found["value"], found["origin"]
        if value is not None and value != []:
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            yield Term(section="resolved run", name=name, value=shown, formula="", inputs="", origin=ORIGINS[origin])


def memory_terms(told: Forecast, held: Run, target: Target) -> Iterable[Term]:
    """Parts of the peak, of the run at its longest rows, then what the allocator and the context add."""
    view = told.memory
    counted = "counted from the code's own tensors"
    for name, n_bytes in sorted(view.parts_bytes.items(), key=lambda item: -item[1]):
        if n_bytes > 0:
            formula = MEMORY_FORMULAS.get(name, "bytes alive")
            yield _term("memory", name, f"{gib(n_bytes):.3f} GiB", formula, _memory_inputs(name, told, held), counted)
    formula, when = "sum of the parts at the worst moment", f"peak: {view.peak_moment}"
    yield _term("memory", "allocated", f"{gib(view.allocated_bytes.value):.3f} GiB", formula, when, counted)
    overheads = "measured on this device" if target.record is not None else "fitted to published runs"
    for name, value, formula in (
        ("reserved", view.reserved_bytes, RESERVED_FORMULA),
        ("process", view.process_bytes, "reserved + context of the driver and its libraries"),
    ):
        if value is not None:
            shown = f"{gib(value.value):.3f} GiB"
            yield _term("memory", name, shown, formula, _span(gib(value.low), gib(value.high)), overheads)
    if view.usable_bytes is not None:
        origin = "measured" if target.record is not None else "catalog"
        yield _term("memory", "usable", f"{gib(view.usable_bytes):.3f} GiB", "what the card exposes", "", origin)


def _memory_inputs(name: str, told: Forecast, run: Run) -> str:
    architecture = told.architecture
    quantized = "quantized" in told.memory.parts_bytes and told.memory.parts_bytes["quantized"] > 0
    known = {
        "weights": f"{count(told.total_params)} parameters{' less the quantized' if quantized else ''}, {run.dtype}",
        "quantized": f"linear maps of {architecture.num_layers} layers, {run.bnb_4bit_quant_type or run.quant_method}",
        "adapters": f"{count(told.trainable_params)} parameters, {run.adapter_dtype}",
        "gradients": f"{count(told.trainable_params)} parameters",
        "optimizer_state": f"{count(told.trainable_params)} parameters, {run.optim}",
        "logits": f"{run.tokens_per_micro_batch:,} tokens x {architecture.vocab_size:,}",
        "activations": f"{run.per_device_train_batch_size} x {run.max_length} tokens, {architecture.num_layers} layers "
        f"of {architecture.hidden_size}, checkpointing {checkpointing_word(run)}",
    }
    return known.get(name, "")


def time_terms(
    told: Forecast, operations: Sequence[Operation], factors: FactorSet, target: Target, slower: float | None
) -> Iterable[Term]:
    """Each kind of operation with its work, the speed it reaches and the curve that says so; `slower` is the log of
    time that the priors add to the device's work of a source that they have not seen."""
    peak = target.peaks.get(told.run.product_dtype)
    for kind, part_s in sorted(told.time_parts_s.items(), key=lambda item: -item[1]):
        if part_s > SHARE_SHOWN * told.step_time_s.value:
            of_kind = [o for o in operations if o.kind == kind and o.name not in OF_HOST]
            formula = TIME_FORMULAS.get(kind, "given")
            origin = _curve_origin(kind, of_kind, factors)
            yield _term("time", kind, seconds(part_s), formula, _work(of_kind, part_s, told.run, target), origin)
    each, inputs = factors.factors.get(HOST_S_PER_LAUNCH), _issued(operations, factors, told.run)
    step, origin = told.step_time_s, "" if each is None else each.origin
    added = "" if slower is None else f", its work {math.expm1(slower):.1%} slower, as sources left out of the fit were"
    yield _term("time", "optimizer step", seconds(step.value), f"clocks of host and device{added}",
                f"{inputs}; {_span(step.low, step.high)} s", origin)  # fmt: skip
    flops = f"{told.model_flops_per_step:.4g} FLOPs required, {told.executed_flops_per_step:.4g} executed"
    if told.mfu is not None and told.hfu is not None and peak is not None:
        beside = f"{flops}, peak {peak / TERA:.0f} TFLOP/s {told.run.product_dtype} x {told.run.num_gpus}"
        formula = "FLOPs / step time / peak; of HFU, each product over the peak of its own dtype"
        yield _term("time", "MFU / HFU", f"{told.mfu:.1%} / {told.hfu:.1%}", formula, beside, "datasheet")


def _issued(operations: Sequence[Operation], factors: FactorSet, run: Run) -> str:
    """What the host issues in a step, and what each launch costs it."""
    launches = sum(operation.launches * operation.count for operation in operations)
    each, hooks = factors.factors.get(HOST_S_PER_LAUNCH), factors.factors.get(HOOKS)
    told = f"{launches:,.0f} launches"
    values = scalars(factors)
    as_forward = host_launches(operations, values)
    if f"{as_forward:.0f}" != f"{launches:.0f}":
        told += f", as much as {as_forward:,.0f} of the forward,"
    counts = np.array([[operation.count] for operation in operations])
    if hooks is not None and has_hooks(run):
        visits = visits_of(operations, counts).sum()
        told += f" + {visits:,.0f} visits of modules by hooks, each as much as {hooks.value:.1f} launches,"
    if UNITS in factors.factors and wraps_adapters(run):
        visits, costs = adapter_visits_of(operations, counts, run).sum(), factors.factors[UNITS].value
        told += f" + {visits:,.0f} visits of adapters that are units of FSDP, each as much as {costs:.1f} launches,"
    if run.trainer_loop:
        walked = walks_of(modules_of(operations, counts, run), np.array([float(run.gradient_accumulation_steps)])).sum()
        costs = host_seconds({**values, HOST_S_PER_LAUNCH: 1.0}, synchronous=factors.synchronous)[WALKED]
        told += f" + {walked:,.0f} modules that the Trainer walks over, each as much as {costs:g} launches,"
    return told if each is None else f"{told} x {each.value * 1e6:.2f} us"


def _work(operations: Sequence[Operation], part_s: float, run: Run, target: Target) -> str:
    """Kernels, FLOPs or bytes, and the speed that these seconds mean."""
    if not operations:
        return ""
    kernels = sum(operation.launches * operation.count for operation in operations)
    flops, moved = sum(o.total_flops for o in operations), sum(o.total_bytes for o in operations)
    if flops > 0 and operations[0].kind in ("gemm", "attention"):
        least_s = seconds_at_peak(flops_by_dtype(operations), replace(run, num_gpus=1), target.peaks)
        share = "" if least_s is None else f", {least_s / part_s:.0%} of peak"
        return f"{kernels:,.0f} kernels, {flops / TERA:.3g} TFLOP: {flops / part_s / TERA:.3g} TFLOP/s{share}"
    if operations[0].kind == "communication":
        return f"{kernels:,.0f} kernels, {moved / GIGA:.3g} GB; partly beside other work, so no rate"
    around = sum(o.total_bytes for o in operations if copies_for_others(o.name))
    beside = f", of it {around / GIGA:.3g} GB around the collectives" if around else ""
    faster = target.gpu is not None and moved / part_s > target.gpu.bandwidth_bytes_per_s
    stay = ", part of it in the cache" if faster else ""
    return f"{kernels:,.0f} kernels, {moved / GIGA:.3g} GB{beside}: {moved / part_s / GIGA:.4g} GB/s{stay}"


def _curve_origin(kind: str, operations: Sequence[Operation], factors: FactorSet) -> str:
    """Origins of the curves that these operations follow, or of the factor that stands in for one, and of what they
    are scaled by."""
    if kind == "trainer":
        return walk_origin(factors)
    if kind == "units":
        return factors.factors[UNITS].origin
    measured = any(kind_of(name) == kind for name in factors.curves)
    found = {find_curve(curve_key(each), factors).origin for each in operations if measured}
    if not found and kind == "communication":
        told = ("link", "node", "exposed")
        found = {factor.origin for name, factor in factors.factors.items() if name.startswith(told)}
    if not found and kind in ("host", "overhead"):
        found = {
            factor.origin for name, factor in factors.factors.items() if name.startswith(("host", "step_overhead"))
        }
    if not found and "memory" in factors.curves:
        found = {factors.curves["memory"].origin}
    scales = (f"scale.{kind}", *((SCALE_CACHED,) if kind == "memory" else ()))
    found |= {factors.factors[name].origin for name in scales if name in factors.factors}
    return ", ".join(sorted(found)) or DASH


def run_terms(told: Forecast) -> Iterable[Term]:
    """Phases of the whole run."""
    if told.whole_run is None:
        return
    for phase in told.whole_run.phases:
        span = f"{duration(phase.hours.low)} to {duration(phase.hours.high)}"
        yield _term("run", phase.name, duration(phase.hours.value), phase.how or "as given", span, phase.origin)
    if told.total_time_h is not None:
        total = told.total_time_h
        span = f"{duration(total.low)} to {duration(total.high)}"
        yield _term("run", "whole run", duration(total.value), "sum of the phases", span, "")


def money_terms(told: Forecast) -> Iterable[Term]:
    """What is paid, to whom."""
    if told.cost_usd is None or told.whole_run is None:
        return
    offer = told.offer or {}
    source = ", ".join(str(offer[key]) for key in ("provider", "snapshot_date", "source") if offer.get(key))
    for name, usd in told.whole_run.cost_parts_usd.items():
        if usd >= SMALLEST_SHOWN_USD:
            formula = "hours paid x price of the machines" if name == "rent" else "amount x price"
            price = told.whole_run.usd_per_h
            inputs = f"${price:.2f}/h for the job" if name == "rent" and price is not None else ""
            yield _term("money", name, dollars(usd), formula, inputs, source if name == "rent" else "")
    span = _span(told.cost_usd.low, told.cost_usd.high)
    yield _term("money", "cost", dollars(told.cost_usd.value), "sum of the parts", f"${span}", "")


def _span(low: float, high: float) -> str:
    return f"{digits(low)} to {digits(high)}"


def _term(section: str, name: str, value: str, formula: str, inputs: str, origin: str) -> Term:
    return Term(
        section=section, name=name.replace("_", " "), value=value, formula=formula, inputs=inputs, origin=origin
    )


def terms_table(terms: Sequence[Term]) -> list[RenderableType]:
    """One table per section; formula, inputs and origin under each other where there is little room."""
    tables: list[RenderableType] = []
    for section in dict.fromkeys(term.section for term in terms):
        table = plain_table(section, "value", "formula, inputs, origin", right=("value",))
        for term in terms:
            if term.section == section:
                words = "\n".join(word for word in (term.formula, term.inputs, term.origin) if word)
                table.add_row(term.name, term.value, words)
        tables.append(table)
    return tables


def terms_to_list(terms: Sequence[Term]) -> list[dict[str, str]]:
    """The terms as plain JSON data."""
    return [asdict(term) for term in terms]
