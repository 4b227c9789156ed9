"""The forecast of one run on one device: memory, time and money, each with interval and origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunecast.model.amount import Amount, resolve_amount, steps_words
from tunecast.model.architecture import Architecture
from tunecast.model.chunked import chunked_notes
from tunecast.model.context_parallel import ring_notes
from tunecast.model.documents import document_notes
from tunecast.model.factors import FactorSet, scaled
from tunecast.model.feeding import RATE as TOKENIZING
from tunecast.model.feeding import fed
from tunecast.model.file_spread import with_dtypes
from tunecast.model.fits import fit_probability, fit_verdict, memory_view
from tunecast.model.flops import no_more_than_run
from tunecast.model.forecast import Forecast
from tunecast.model.hooks import unit_notes
from tunecast.model.loading import loading_notes
from tunecast.model.money import with_money
from tunecast.model.observed import observed
from tunecast.model.on_device import job_factors, resolve_for
from tunecast.model.paging import overflow_bytes
from tunecast.model.parallel_scaling import (
    Scaling,
    alone,
    comparable,
    given_fraction,
    pipeline_notes,
    scaling_notes,
    scaling_of,
)
from tunecast.model.phase_rates import phase_rates
from tunecast.model.phases import full_runs
from tunecast.model.priors import load_priors
from tunecast.model.question import Question
from tunecast.model.replay import is_replayed
from tunecast.model.resolve import Resolved, resolve_run
from tunecast.model.row_lengths import Rows
from tunecast.model.row_times import mean_step_ratio, ratio_notes, stretched
from tunecast.model.rows import held_run, own_run, row_notes, timed_run, unpacked_rows
from tunecast.model.run import Run
from tunecast.model.sdpa import efficient_notes, flash_3_notes
from tunecast.model.sharding import FSDP, ZERO
from tunecast.model.slowest_stage import timed_operations
from tunecast.model.step_source import (
    executed_by_dtype_of,
    model_flops_of,
    notes_of,
    trainable_params_of,
)
from tunecast.model.strangers import unseen_notes
from tunecast.model.target import Target
from tunecast.model.time import StepTime, step_time
from tunecast.model.timing import (
    achieved_notes,
    link_notes,
    share_without_padding,
    step_timing,
    unused_notes,
    utilizations,
)
from tunecast.model.trainer_loop import trainer_notes, walk_origins
from tunecast.model.training_totals import training_totals
from tunecast.model.walks import walk_notes

ORDINARY_FLAGS = ("power_capped",)
"""Flags of a record that say nothing against it: under load a card at its own power limit is normal, and training
meets the same limit."""
CUT_SHORT = "cut_short"
STORAGE = ("dtype", "precision", "adapter_dtype", "upcast_non_quantized")
"""Fields that a sharding may decide."""
STORAGE_DECIDED_BY = ("method", "stack", "stack_version", "quant_method", "offload", *STORAGE)
"""Options that they follow from."""


def estimate(question: Question, targets: Sequence[Target]) -> list[Forecast]:
    """One forecast per device, in the order given."""
    return [forecast(question, target) for target in targets]


def forecast(question: Question, target: Target) -> Forecast:
    """The forecast for one device."""
    resolved = resolve_for(question, target)
    run = resolved.run
    factors = scaled(job_factors(target, question.architecture, run, question.options), question.factor_scales)
    amount = resolve_amount(run, dict(question.options))
    inventory: dict[str, Any] = {"platform": target.platform, "source": question.source}
    held = held_run(run, question.options)
    view = memory_view(question.architecture, held, target, factors, question.source)
    rows, ratio = _rows(question, run, target)
    run = timed_run(run, rows)
    timed = replace(resolved, run=run)
    computed = stretched(step_timing(question, timed, target, factors), ratio)
    alike = 1.0 if amount is None else share_without_padding(computed, question, timed, target, factors)
    amount = None if amount is None else replace(amount, least=amount.least * alike)
    timing, watched = _watched(question, target, computed)
    storage = _storage_alone(question, target, resolved)
    scaling = _scaling(question, target, resolved.run, storage, timing, factors)
    rate = phase_rates(target.gpu, factors, question.whole_run.phase_rate)[TOKENIZING]
    timing, data_notes = fed(timing, run, rows, question.options, rate)
    probability = fit_probability(view)
    verdict = fit_verdict(view, probability)
    own = own_run(resolved.run, rows)
    executed = executed_by_dtype_of(question.architecture, own, **inventory)
    model_flops = no_more_than_run(model_flops_of(question.architecture, own, **inventory), executed)
    mfu, hfu = utilizations(model_flops, executed, timing.step_time_s.value, run, target)
    result = Forecast(
        model=question.architecture.name,
        gpu=target.id,
        architecture=question.architecture,
        run=resolved.run,
        run_origins=resolved.origins,
        fits=None if verdict is None else verdict != "no",
        fit_probability=probability,
        verdict=verdict,
        model_flops_per_step=model_flops,
        executed_flops_per_step=sum(executed.values()),
        trainable_params=trainable_params_of(question.architecture, run, **inventory),
        total_params=question.architecture.total_params,
        memory=view,
        step_time_s=timing.step_time_s,
        tokens_per_s=timing.step_time_s.inverse(own.tokens_per_step),
        mfu=mfu,
        hfu=hfu,
        bound_by=timing.bound_by,
        time_parts_s=timing.parts_s,
        origins=factor_origins(target, factors, question, run),
        alike_share=alike,
        amount_assumed=() if amount is None else amount.assumed,
        notes=(
            *resolved.notes,
            *notes_of(question.architecture, run, **inventory),
            *factors.notes,
            *efficient_notes(question.architecture, run, factors),
            *flash_3_notes(run, factors),
            *walk_notes(question.architecture, run, factors),
            *chunked_notes(run),
            *ring_notes(run),
            *loading_notes(question.architecture, run, view.peak_moment),
            *record_notes(target),
            *unseen_notes(target, question),
            *link_notes(run, factors, question),
            *unused_notes(run, target, question),
            *scaling_notes(scaling, run, storage),
            *pipeline_notes(timing, run),
            *trainer_notes(timing.parts_s, timing.step_time_s.value, factors),
            *unit_notes(timing.parts_s, timing.step_time_s.value),
            *row_notes(resolved.run, rows, held),
            *ratio_notes(ratio),
            *achieved_notes(question, rows),
            *document_notes(resolved.run, question.options),
            *data_notes,
            *([] if watched is None else [watched]),
            *_share_notes(question, run, target, factors),
            *_fit_notes(verdict),
            *_amount_notes(amount),
            *_merge_notes(question, run),
        ),
    )
    result = replace(result, scaling=scaling, totals=training_totals(result, amount, full_runs(question.whole_run)))
    return with_money(result, question, target, amount, factors=factors, timing=timing)


def _rows(question: Question, run: Run, target: Target) -> tuple[Rows | None, float]:
    """(rows of one sample each, the mean step over that of the mean row)."""
    rows = unpacked_rows(run, question.options)
    if question.achieved_tflops is not None:
        return rows, 1.0
    return rows, mean_step_ratio(rows, question.architecture, run, target, question.options)


def _storage_alone(question: Question, target: Target, resolved: Resolved) -> dict[str, Any]:
    """Storage and arithmetic of one GPU alone where FSDP or DeepSpeed may have others: those of the same question
    without them."""
    if resolved.run.sharding not in (*FSDP, *ZERO):
        return {}
    given = with_dtypes(question.options, None)
    known = {name: given[name] for name in STORAGE_DECIDED_BY if given.get(name) is not None}
    one = resolve_run(question.architecture, known, gpu_has_bf16=target.has_bf16).run
    return {name: getattr(one, name) for name in (*STORAGE, "master_dtype")}


def _scaling(
    question: Question, target: Target, run: Run, storage: Mapping[str, Any], timing: StepTime, factors: FactorSet
) -> Scaling | None:
    """How the job scales, whose `run` has its longest rows; None for one GPU, where the user gave the speed, or where
    one GPU, which has `storage`, runs other code. A traced run is compared by formula where its family has formulas."""
    fraction = given_fraction(question.options)
    if run.num_gpus == 1 or question.achieved_tflops is not None or not comparable(run):
        return None

    source = question.source if question.architecture.settings else None

    def alike(run: Run, factors: FactorSet) -> StepTime:
        (rows, ratio), platform = _rows(question, run, target), target.platform
        run = timed_run(run, rows)
        operations = timed_operations(question.architecture, run, factors, platform=platform, source=source)
        return _watched(question, target, stretched(step_time(operations, factors, run=run), ratio))[0]

    job = timing if question.source is None else alike(run, factors)
    one = replace(alone(run, storage), paged_bytes=0)
    one = replace(one, paged_bytes=overflow_bytes(question.architecture, one, target))
    own = scaled(job_factors(target, question.architecture, one, question.options), question.factor_scales)
    rows = unpacked_rows(run, question.options)
    at, longer_frac = timed_run(run, rows), 0.0 if rows is None else 1.0 - rows.own_length / rows.length
    operations = timed_operations(question.architecture, at, factors, platform=target.platform, source=source)
    return scaling_of(job, alike(one, own), operations, factors, run, fraction, longer_frac)


def _watched(question: Question, target: Target, timing: StepTime) -> tuple[StepTime, str | None]:
    """The step time as runs that were watched on this device move it."""

    def plain(architecture: Architecture, run: Run) -> StepTime:
        factors = job_factors(target, architecture, run)
        operations = timed_operations(architecture, run, factors, platform=target.platform)
        return step_time(operations, factors, run=run)

    own_log_sd = float(load_priors()["step_log_sd"]["seen"])
    return observed(timing, question.observations.get(target.id, ()), plain, own_log_sd=own_log_sd)


def factor_origins(target: Target, factors: FactorSet, question: Question, run: Run) -> dict[str, str]:
    """Where each factor of the forecast came from."""
    origins = {f"curve.{name}": curve.origin for name, curve in sorted(factors.curves.items())}
    origins |= {name: factor.origin for name, factor in sorted(factors.factors.items())}
    origins |= walk_origins(run, factors)
    if question.achieved_tflops is not None:
        origins = {"achieved_tflops": "assumed"}
    if target.gpu is not None:
        origins["usable_memory"] = "datasheet" if target.record is None else "measured"
    return origins


def _fit_notes(verdict: str | None) -> tuple[str, ...]:
    if verdict == "no":
        return ("does not fit: time and cost are computed as if memory sufficed",)
    if verdict is None:
        return ("usable memory of this card is unknown: whether the run fits is not said",)
    return ()


def _share_notes(question: Question, run: Run, target: Target, factors: FactorSet) -> tuple[str, ...]:
    """That memory of several GPUs is told otherwise than that of one."""
    terms = factors.memory_overhead_bytes
    if run.num_gpus == 1 or question.source is not None or "replayed_frac" not in terms:
        return ()
    if not is_replayed(question.architecture, alone(run), target.platform):
        return ()
    told = (
        f"of several GPUs what the allocator caches is a usual share of what a step adds "
        f"({terms['fragmentation_frac']:.0%}), of one GPU it is replayed: two may seem to take more than one"
    )
    return (told,)


def record_notes(target: Target) -> tuple[str, ...]:
    """What was wrong while the device was measured, and that a simulated card without a record has borrowed factors."""
    if target.record is None and target.shared is not None:
        return _flag_notes(target.shared.flags)
    if target.record is None:
        return ("no record of this simulated card: the real card's prior stands in",) if target.is_mock else ()
    return _flag_notes(target.record.get("flags") or ())


def _flag_notes(told: Iterable[str]) -> tuple[str, ...]:
    """The flags of a record that change how much it says."""
    flags = [flag for flag in told if flag not in ORDINARY_FLAGS]
    others = [flag for flag in flags if flag != CUT_SHORT]
    of_time = f"the record is flagged {CUT_SHORT}: its time ended before its trials; calibrate --full has more"
    of_device = f"the record is flagged {', '.join(others)}: calibrate again on a quiet device to be surer"
    return (*([of_time] if CUT_SHORT in flags else []), *([of_device] if others else []))


def _merge_notes(question: Question, run: Run) -> tuple[str, ...]:
    """That a merge was asked for where there is no adapter."""
    if run.has_adapters or not question.whole_run.merge:
        return ()
    return (f"--merge changes nothing: --method {run.method} trains no adapter that could be merged",)


def _amount_notes(amount: Amount | None) -> tuple[str, ...]:
    return () if amount is None else (f"{steps_words(amount.steps)}: {amount.how}",)
