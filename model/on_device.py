"""A question on one device: the factors that apply there, and the run it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.chunked import with_chunked
from tunecast.model.documents import with_documents
from tunecast.model.factors import FactorSet
from tunecast.model.factors_io import factor_set_from_record
from tunecast.model.file_spread import file_sharding, with_dtypes
from tunecast.model.fits import LIKELY, TIGHT_BELOW, fit_probability, memory_view
from tunecast.model.flash_3 import runs_flash_3
from tunecast.model.fused import FLA
from tunecast.model.grouped import experts_on_card
from tunecast.model.loss_budget import on_card
from tunecast.model.memory_codes import with_other_code
from tunecast.model.overheads import overheads_from_factors
from tunecast.model.paging import paging_on_card
from tunecast.model.parallel_network import check_bridge, with_network
from tunecast.model.parallel_offload import with_host
from tunecast.model.priors import load_priors, prior_factors
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE, Question
from tunecast.model.read_numbers import whole_number
from tunecast.model.record_software import with_software
from tunecast.model.record_spread import with_unlike
from tunecast.model.resolve import Resolved, resolve_run
from tunecast.model.resolve_parallel import FSDP, OFFLOADED_BY, ZERO
from tunecast.model.rows import held_run, with_padding
from tunecast.model.run import BY_SPREAD, Run
from tunecast.model.sdpa import LEAST_FLASH, has_flash, sdpa_on_card, with_flash, with_others
from tunecast.model.sharded_record import with_sharding
from tunecast.model.shared_host import with_shared_host
from tunecast.model.stacks import FLASH_2, FLASH_3, shardings_of
from tunecast.model.stand_in import with_stand_ins
from tunecast.model.target import Target
from tunecast.model.timing import LINK_FACTORS
from tunecast.model.walks import with_walks

LEAST_TRITON = 8.0
"""Compute capability from which Triton supports NVIDIA's cards (its README, Compatibility)."""
LEAST_SHARDING_FIRST = ("ddp", "zero1", "zero2", "fsdp")
"""Tried in this order when several GPUs are asked for and no sharding is."""
LEAST_SHARDING_OF_STAGES = ("ddp", "zero1", "fsdp")
"""The same for pipeline stages, whose gradients stay whole over all micro-batches."""

CHANCE_DIGITS = 3
"""Of probabilities to fit, below which the smaller of two runs is nearer to fitting."""
COPIES = LEAST_SHARDING_FIRST[0]
LEAST_SHARDING_OFFLOADED = {"optimizer": OFFLOADED_BY["optimizer"], "all": ("fsdp",), "True": ("fsdp",)}
"""The same where something lives in host memory: what a framework offloads with."""


def target_factors(target: Target, run: Run | None = None) -> FactorSet:
    """Factors of the device's own record, else its prior for that run, its host perhaps another card's.

    A record of one card has not measured the link between cards: that comes from the prior, and says so. Products in
    a dtype that it has not measured are those of one that it has, by the priors' ratio (`stand_in`).
    """
    if target.gpu is None:
        assert target.record is not None
        return with_unlike(factor_set_from_record(target.record))
    prior = replace(prior_factors(target.gpu, run), gpu=target.id)
    if target.record is None:
        return prior if target.shared is None else with_shared_host(prior, target.shared)
    measured = with_flash(with_unlike(factor_set_from_record(target.record)), target.gpu, run)
    beliefs = load_priors()["beliefs"]
    measured = with_walks(with_others(measured, beliefs, run, target.gpu), beliefs)
    measured = with_chunked(measured, beliefs, target.gpu, run)
    alone = with_stand_ins(measured, prior, run, beliefs)
    timed = with_sharding(with_software(alone, run, load_priors()), prior, run, load_priors())
    own = with_other_code(timed, run, load_priors())
    borrowed = {name: prior.factors[name] for name in LINK_FACTORS if name in prior.factors}
    if "link_latency_s" in own.factors:  # what was measured of a hop has its share of the start
        borrowed.pop("link_start_s", None)
    return with_process(replace(own, factors={**borrowed, **own.factors}), prior)


def with_process(own: FactorSet, prior: FactorSet) -> FactorSet:
    """A record without a reading of a whole step's process takes what the priors say of the card."""
    if overheads_from_factors(own) is not None or overheads_from_factors(prior) is None:
        return own
    note = "no whole step of the record told what the process holds beyond its tensors: the priors say it"
    terms = prior.memory_overhead_bytes | own.memory_overhead_bytes
    return replace(own, memory_overhead_bytes=terms, notes=(*own.notes, note))


def job_factors(
    target: Target, architecture: Architecture, run: Run, options: Mapping[str, Any] | None = None
) -> FactorSet:
    """All factors of a job on this device: its own, those of the links it needs and of the host it offloads to."""
    linked = with_network(target_factors(target, run), run, target.gpu, options or {})
    return with_host(linked, architecture, run, target.gpu, options=options or {})


def resolve_for(question: Question, target: Target) -> Resolved:
    """The run on this device; several GPUs without a sharding get the least one that fits."""
    options = {k: v for k, v in question.options.items() if k not in RUN_OPTIONS_ELSEWHERE}
    options, origins = with_documents(options, question.options, question.option_origins)
    options, origins = with_padding(options, question.options, origins)

    def resolved(sharding: str | None = None) -> Resolved:
        tried = options if sharding is None else {**options, "sharding": sharding}
        if sharding is not None and BY_SPREAD in question.options:
            told = with_dtypes({**question.options, **tried}, sharding)
            tried = {name: value for name, value in told.items() if name not in RUN_OPTIONS_ELSEWHERE}
        run = resolve_run(
            question.architecture,
            tried,
            gpu_has_bf16=target.has_bf16,
            emulates_bf16=target.emulates_bf16,
            option_origins=origins,
        )
        check_kernels(run.run, target)
        check_bridge(target.gpu, run.run, question.options)
        run = on_card(sdpa_on_card(run, question.architecture, target), question.architecture, target)
        run = experts_on_card(run, question.architecture, target)
        run = replace(run, notes=(*run.notes, *unsharded_notes(question.options, run.run)))
        return paging_on_card(run, question.architecture, target, question.source)

    if target.platform == "cpu" and whole_number("num_gpus", options.get("num_gpus") or 1) > 1:
        raise InputError("--num-gpus above 1 needs GPUs; a CPU is one device.")
    if data_copies(options) <= 1 or options.get("sharding") is not None:
        return resolved()
    return _least_sharding(question, target, resolved)


def unsharded_notes(options: Mapping[str, Any], run: Run) -> tuple[str, ...]:
    """What a training file says of several GPUs and one has no use for."""
    own = file_sharding(options)
    if run.num_gpus > 1 or run.sharding != "none" or own not in (*FSDP, *ZERO):
        return ()
    return (f"{own} of the file shards nothing on one GPU; --num-gpus 2 or more forecasts it.",)


LEAST_CUT = 8.0
"""Compute capability that apple/ml-cross-entropy asks for (its README: Ampere or newer); Unsloth has kernels of its
own."""


def check_kernels(run: Run, target: Target) -> None:
    """Raise InputError for flash attention, a cut cross-entropy or kernels of fla on an NVIDIA card that they do not
    run on."""
    gpu = target.gpu
    if run.attn_implementation == FLASH_3 and not runs_flash_3(gpu):
        raise NotSupportedError(
            f"--attn-implementation {FLASH_3} was asked for, but its kernels are written for Hopper cards and "
            f"{target.id} is none: its speed there is not built; type --attn-implementation {FLASH_2} or sdpa."
        )
    if gpu is None or gpu.vendor != "nvidia" or gpu.compute_capability is None:
        return
    has = f"{target.id} has compute capability {gpu.compute_capability}"
    if run.flash and not has_flash(gpu):
        raise InputError(
            f"--attn-implementation {run.attn_implementation} was asked for, but {has} and FlashAttention-2 runs from "
            f"{LEAST_FLASH} on; type --attn-implementation sdpa."
        )
    cut = run.loss_type == "cut_cross_entropy" and run.stack != "unsloth"
    if cut and float(gpu.compute_capability) < LEAST_CUT:
        raise InputError(
            f"--loss-type cut_cross_entropy was asked for, but {has} and its kernels run from {LEAST_CUT} on; type "
            "--loss-type liger."
        )
    if run.fuses(FLA) and float(gpu.compute_capability) < LEAST_TRITON:
        others = ",".join(part for part in run.fused_kernels if part != FLA) or "none"
        raise InputError(
            f"--fused-kernels {FLA} was asked for, but {has} and Triton, which its kernels are written in, supports "
            f"cards from {LEAST_TRITON} on; type --fused-kernels {others}."
        )


def data_copies(options: Mapping[str, Any]) -> float:
    """GPUs that data parallelism runs over: all of the job over those that split shapes and layers."""
    gpus, tp, pp = (whole_number(name, options.get(name) or 1) for name in ("num_gpus", "tp", "pp"))
    return gpus / (tp * pp)


def shardings_tried(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Shardings that may be chosen where none is asked for, the least first; they go with the offload asked for."""
    staged = whole_number("pp", options.get("pp") or 1) > 1
    own = ("fsdp",) if options.get("dp_shard_size") else shardings_of(options.get("stack"), staged=staged)
    if own:
        return own
    least = LEAST_SHARDING_OF_STAGES if staged else LEAST_SHARDING_FIRST
    return LEAST_SHARDING_OFFLOADED.get(str(options.get("offload")), least)


def trains_copies(question: Question) -> bool:
    """Whether a training file tells the run and asks for no sharding: it is launched as copies of the model on the GPUs
    that are given, by stacks that do not shard by themselves. What is searched for may be sharded."""
    options = question.options
    searched = question.option_origins.get("num_gpus") == "searched"
    own = shardings_tried(options) != LEAST_SHARDING_FIRST
    return BY_SPREAD in options and not searched and not own


def _least_sharding(question: Question, target: Target, resolved: Any) -> Resolved:
    """The first sharding that surely fits, else the one that is likeliest to, or where none may the smallest; of those
    by anybody ZeRO-3 too where gradients accumulate, which FSDP holds whole."""
    tried = shardings_tried(question.options)
    if trains_copies(question):
        return _told_sharding(resolved(sharding=COPIES), f"{COPIES}, since the file asks for none")
    if len(tried) == 1:
        only: Resolved = resolved(sharding=tried[0])
        return _told_sharding(only, only.run.sharding)
    first: Resolved = resolved(sharding=tried[0])
    accumulates = tried == LEAST_SHARDING_FIRST and first.run.gradient_accumulation_steps > 1
    found = []
    for sharding in (*tried, *(("zero3",) if accumulates else ())):
        one: Resolved = first if sharding == tried[0] else resolved(sharding=sharding)
        chance, whole = _room(question, target, one)
        if chance >= TIGHT_BELOW:
            return _told_sharding(one, f"{sharding} is the least that fits")
        found.append((round(chance, CHANCE_DIGITS), -whole, one))
    chance, _, closest = max(found, key=lambda each: each[:2])
    name = closest.run.sharding
    how = f"{name} is the likeliest to fit" if chance >= LIKELY else f"none fits, {name} comes closest"
    return _told_sharding(closest, how)


def _room(question: Question, target: Target, found: Resolved) -> tuple[float, float]:
    """(probability that a run fits, 0 where the card's usable memory is unknown; bytes of its process)."""
    held = held_run(found.run, question.options)
    view = memory_view(question.architecture, held, target, target_factors(target, found.run), question.source)
    whole = 0.0 if view.process_bytes is None else view.process_bytes.value
    return fit_probability(view) or 0.0, whole


def _told_sharding(found: Resolved, what: str) -> Resolved:
    """A run whose sharding was chosen, with a note of how."""
    note = f"--sharding not given: {what}"
    return replace(found, origins={**found.origins, "sharding": "assumed"}, notes=(*found.notes, note))
