"""The step time of a question on a device: from its operations, or from a speed that the user gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tunecast.catalogs.errors import ImpossibleError, InputError
from tunecast.model.architecture import Architecture
from tunecast.model.documents import ends_of
from tunecast.model.exposed import SHARES
from tunecast.model.factors import Factor, FactorSet
from tunecast.model.links import OF_HOST, PAGING, communication_seconds, crosses_machines
from tunecast.model.operation import Kind, Operation
from tunecast.model.paging import paged_state_bytes
from tunecast.model.parallel_network import NETWORK_FACTORS, can_be_bridged
from tunecast.model.parallel_offload import HOST_RATE, OFFLOAD_FACTORS, PAGING_WAYS
from tunecast.model.priors import VISITS
from tunecast.model.question import Question
from tunecast.model.read_numbers import number_above_zero
from tunecast.model.resolve import Resolved
from tunecast.model.row_lengths import Rows
from tunecast.model.rows import packing_of
from tunecast.model.run import Run
from tunecast.model.sharding import shards_of
from tunecast.model.slowest_stage import timed_operations
from tunecast.model.step_source import executed_by_dtype_of, model_flops_of
from tunecast.model.target import Target
from tunecast.model.time import StepTime, step_time
from tunecast.model.units import TERA
from tunecast.model.value import exact

LINK_FACTORS = ("link_bytes_per_s", "link_latency_s", "link_start_s")
LATENCIES = ("link_latency_s", "link_start_s", "node_latency_s")


def step_timing(question: Question, resolved: Resolved, target: Target, factors: FactorSet) -> StepTime:
    """Seconds of one step, from the operations or from the speed that the user gave."""
    timed = certain_timing(question, resolved, target, factors)
    return unsure_of_documents(timed, question, resolved, target, factors)


def achieved_notes(question: Question, rows: Rows | None) -> tuple[str, ...]:
    """That a speed which was given is that of the copy with the longest rows, where the others wait for it."""
    if question.achieved_tflops is None or rows is None or rows.own_length >= rows.length:
        return ()
    told = f"of the copy with the longest rows, {rows.length} tokens; a copy's own have {rows.own_length}"
    return (f"--achieved-tflops is taken as the speed {told}, so that MFU, in which the others wait, is less",)


def certain_timing(question: Question, resolved: Resolved, target: Target, factors: FactorSet) -> StepTime:
    """Seconds of one step, its run taken as certain."""
    run = resolved.run
    operations = timed_operations(question.architecture, run, factors, platform=target.platform, source=question.source)
    if question.achieved_tflops is None:
        return linked_step(question.architecture, run, operations, factors)
    achieved_tflops = number_above_zero("--achieved-tflops", question.achieved_tflops, "400")
    flops = model_flops_of(question.architecture, run, platform=target.platform, source=question.source)
    peak = target.peaks.get(run.product_dtype)
    if peak is not None and achieved_tflops * TERA > peak:
        raise InputError(
            f"--achieved-tflops {achieved_tflops:g} is above the {peak / TERA:g} TFLOP/s dense "
            f"{run.product_dtype} peak of {target.id}; type what one GPU really reaches, "
            f"for example {peak / TERA / 2:.0f}."
        )
    seconds = flops / (achieved_tflops * TERA * run.num_gpus)
    executed = executed_by_dtype_of(question.architecture, run, platform=target.platform, source=question.source)
    least_s = seconds_at_peak(executed, run, target.peaks)
    if least_s is not None and least_s > seconds:
        most = flops / least_s / run.num_gpus / TERA
        more = sum(executed.values()) / flops
        raise InputError(
            f"--achieved-tflops {achieved_tflops:g} of required work is {more:.2f} times as much with what is "
            f"recomputed, above {_peak_words(executed, run, target)} of {target.id}; "
            f"type at most {math.floor(most * 10) / 10:g}."
        )
    return StepTime(
        step_time_s=exact(seconds),
        parts_s={"achieved": seconds},
        phases_s={"step": seconds},
        device_s=seconds,
        host_s=0.0,
        bound_by="compute",
        log_sd=0.0,
    )


def linked_step(architecture: Architecture, run: Run, operations: Sequence[Operation], factors: FactorSet) -> StepTime:
    """Seconds of a step of these operations, with what is not known of its links and its host."""
    state = paged_state_bytes(architecture, run) if run.paged_bytes else 0
    return linked(step_time(operations, factors, run=run), operations, factors, run, paged_state_bytes=state)


def linked(
    timing: StepTime, operations: Sequence[Operation], factors: FactorSet, run: Run, *, paged_state_bytes: int = 0
) -> StepTime:
    """The interval of several GPUs, or of one with a part in host memory: joined with what a slow or fast link or
    host would make of it. Of paged optimizer state, all may move at worst, and at best what does not fit goes out while
    it comes in (`paging`).

    By how much the slow end is slower counts as an independent 80% error upwards, by how much the fast one is faster
    downwards: a board with few lanes may cost much where nothing is left to win.
    """
    if run.num_gpus == 1 and run.offload == "none" and not run.paged_bytes:
        return timing
    paged = {"low": float(paged_state_bytes), "high": run.paged_bytes / PAGING_WAYS}
    ends = [
        step_time(
            [replace(o, bytes=paged[end]) if o.name == PAGING else o for o in operations],
            replace(factors, factors=_link_at(factors, end)),
            run=run,
        )
        for end in ("low", "high")
    ]
    slow_s, fast_s = (end.step_time_s.value for end in ends)
    least_s = least_linked_s(operations, factors, run)
    return timing.spread_between(min(slow_s, fast_s), max(slow_s, fast_s)).not_below(least_s)


def least_linked_s(operations: Sequence[Operation], factors: FactorSet, run: Run) -> float:
    """Seconds that a step takes at the least: the fast end of its work without links, what the busiest of its links,
    those inside machines or those between them, are busy at their own fast end, or that work with as little of them
    exposed as may be."""
    work = [o for o in operations if o.kind is not Kind.COMMUNICATION]
    sent = (o for o in operations if o.kind is Kind.COMMUNICATION)
    between = [o for o in sent if o.name not in OF_HOST and not o.name.endswith(".copy")]
    fast = replace(factors, factors=_link_at(factors, "high"))
    alone = step_time(work, fast, run=run).step_time_s
    parts = ([o for o in between if crosses_machines([o]) is across] for across in (True, False))
    busy_s = (float(communication_seconds(part, fast, run=run).sum()) for part in parts)
    hidden = {name: replace(factor, value=factor.low) for name, factor in fast.factors.items() if name in SHARES}
    least_exposed = replace(fast, factors={**fast.factors, **hidden})
    beside_s = step_time([*work, *between], least_exposed, run=run).step_time_s.value
    return max(alone.low, *busy_s, beside_s * alone.low / alone.value)


def unsure_of_documents(
    timing: StepTime, question: Question, resolved: Resolved, target: Target, factors: FactorSet
) -> StepTime:
    """The interval joined with what shorter or longer documents than assumed would make of attention."""
    ends = ends_of(resolved.run, question.options)
    if ends is None or question.achieved_tflops is not None:
        return timing
    timed = (certain_timing(question, replace(resolved, run=run), target, factors).step_time_s.value for run in ends)
    short_s, long_s = timed
    return timing.unsure_between(short_s, long_s)


def share_without_padding(
    timing: StepTime, question: Question, resolved: Resolved, target: Target, factors: FactorSet
) -> float:
    """Time of a step without a mask of padding over that with one, where only the mean length says that there is any:
    samples that are all alike need none. Else 1."""
    run = resolved.run
    if not run.has_padding or resolved.origins["padding_mask"] != "assumed" or question.achieved_tflops is not None:
        return 1.0
    alike = replace(resolved, run=replace(run, padding_mask=False))
    free_s = certain_timing(question, alike, target, factors).step_time_s.value
    return min(free_s / timing.step_time_s.value, 1.0)


def _link_at(factors: FactorSet, end: str) -> dict[str, Factor]:
    """All factors, those of the link at one end of their intervals (a low latency is the good end)."""
    good = {"low": "high", "high": "low"}
    moved = dict(factors.factors)
    visits = tuple(name for name in VISITS if name not in factors.step_params)
    for name in (*LINK_FACTORS, *NETWORK_FACTORS, *OFFLOAD_FACTORS, *visits):
        if name in moved:
            which = good[end] if name in (*LATENCIES, *VISITS) else end
            moved[name] = replace(moved[name], value=getattr(moved[name], which))
    return moved


def unused_layout(run: Run, question: Question) -> Iterator[str]:
    """Options of a layout that this one has no part for; a training file may state what other layouts need."""
    single = "" if run.num_gpus > run.tp * run.pp else "data parallelism has one GPU"
    single = "there is one GPU" if run.num_gpus == 1 else single
    always = shards_of(replace(run, sync_each_micro_batch=False)).gradients
    every = f"{run.sharding} reduces gradients of every micro-batch" if always else ""
    every = "a step has one micro-batch" if run.gradient_accumulation_steps == 1 else every
    packed = "" if (run.base_quantization or "").startswith("gptq") else "no base in GPTQ's 4 bits"
    without = {
        "sequence_parallel": "" if run.tp > 1 else "there is no --tp",
        "cp_kind": "" if run.cp > 1 else "there is no --cp",
        "fsdp_version": single,
        "sync_each_micro_batch": single or every,
        "gpus_per_node": "" if run.num_gpus > 1 else "there is one GPU",
        "compile_loss": "" if run.torch_compile else "without --torch-compile nothing is compiled",
        "reentrant": "" if run.gradient_checkpointing else "there are no checkpoints",
        **dict.fromkeys(("gptq_group_size", "gptq_kernel"), packed),
    }
    for name, why in without.items():
        given = question.options.get(name)
        if given is not None and why and question.option_origins.get(name, "cli") == "cli":
            option = f"{'--no-' if given is False else '--'}{name.replace('_', '-')}"
            yield f"{option}{'' if isinstance(given, bool) else f' {given}'} changes nothing: {why}"


def unused_notes(run: Run, target: Target, question: Question) -> tuple[str, ...]:
    """Options about samples, links and several GPUs that change nothing here."""
    options, found, gpu = question.options, [], target.gpu
    joined = gpu.link_kind if gpu is not None and gpu.nvlink_bytes_per_s > 0 else "nvlink-bridge"
    why = "there is one GPU" if run.num_gpus == 1 else ""
    why = why or ("" if joined == "nvlink-bridge" else f"GPUs of {target.id} are joined by {joined}")
    bridged = "NVLink bridges join the cards" if options.get("nvlink") and can_be_bridged(gpu, run) else ""
    for name, reason in (("p2p", why or bridged), ("nvlink", why)):
        if options.get(name) is not None and reason:
            found.append(f"{'--' if options[name] else '--no-'}{name} changes nothing: {reason}")
    if options.get("serial_fraction") is not None and (run.num_gpus == 1 or question.achieved_tflops is not None):
        why = "there is one GPU" if run.num_gpus == 1 else "--achieved-tflops is the speed of all GPUs"
        found.append(f"--serial-fraction changes nothing: {why}")
    packed = packing_of(options) is not False
    unread = not options.get("padding_free") and options.get("num_samples") is None
    if packed and unread and options.get("mean_tokens") is not None:
        found.append("--mean-tokens changes nothing: packed samples fill rows, and tokens are counted without it")
    if options.get("dataloader_num_workers") is not None and not options.get("streaming"):
        found.append("--dataloader-num-workers changes nothing: without --streaming data are tokenized before training")
    if options.get("internode_gbps") is not None and run.num_gpus <= run.gpus_per_node:
        found.append(f"--internode-gbps changes nothing: one machine of {run.gpus_per_node} GPUs is enough")
    if options.get(HOST_RATE) is not None and run.offload == "none":
        found.append("--host-update-gb-per-s changes nothing: without --offload no host updates anything")
    return (*found, *unused_layout(run, question))


def utilizations(
    required: float, executed: Mapping[str, float], step_s: float, run: Run, target: Target
) -> tuple[float | None, float | None]:
    """MFU and HFU of a step of the whole job; None where the card has no peak in the compute dtype.

    MFU: required FLOPs over time and the dense peak of the compute dtype (8-bit floats where layers multiply in
    them), whatever slower dtype multiplies beside it: it compares runs. HFU: executed FLOPs over time, each product
    against the peak of its own dtype, so the share of the step in which full units would do the work. Where products
    of a faster dtype mix in (LLM.int8 multiplies forward in int8, up to 4 times as fast as bf16), MFU takes HFU's
    mixed peak too: of the compute dtype alone, no limit would follow from it.
    """
    peak, least_s = target.peaks.get(run.product_dtype), seconds_at_peak(executed, run, target.peaks)
    if peak is None or least_s is None:
        return None, None
    mixed = sum(executed.values()) / least_s
    mfu = utilization("MFU", required, step_s, max(mixed, peak * run.num_gpus), target)
    return mfu, utilization("HFU", sum(executed.values()), step_s, mixed, target)


def seconds_at_peak(executed: Mapping[str, float], run: Run, peaks: Mapping[str, float]) -> float | None:
    """Seconds that all GPUs would take for FLOPs by dtype if each ran at the dense peak of its own, that of the
    compute dtype where the card has none; None where it has not that either."""
    peak = peaks.get(run.product_dtype)
    if peak is None:
        return None
    return sum(flops / peaks.get(dtype, peak) for dtype, flops in executed.items()) / run.num_gpus


def _peak_words(executed: Mapping[str, float], run: Run, target: Target) -> str:
    """The dense peak of each dtype that multiplies."""
    dtypes = [dtype for dtype in executed if dtype in target.peaks] or [run.product_dtype]
    peaks = [f"{target.peaks[dtype] / TERA:g} TFLOP/s dense {dtype}" for dtype in sorted(dtypes)]
    return f"the {' and '.join(peaks)} peak{'s' if len(peaks) > 1 else ''}"


def utilization(name: str, flops: float, step_s: float, peak: float, target: Target) -> float:
    """flops / seconds / peak; above 1, an error that names the figures, never a number."""
    share = flops / step_s / peak
    if share > 1.0:
        raise ImpossibleError(
            f"{name} of {target.id} comes out at {share:.2f}, above 1: {flops:.3e} FLOPs in {step_s:.4g} s "
            f"against a peak of {peak:.3e} FLOP/s ({_peak_source(target)}); check the peak or the record."
        )
    return share


def _peak_source(target: Target) -> str:
    return "fastest measured matrix product" if target.gpu is None else target.gpu.source


def link_notes(run: Run, factors: FactorSet, question: Question) -> tuple[str, ...]:
    """Which factors of several GPUs, and of a host that keeps a part of the model, nobody has measured."""
    if question.achieved_tflops is not None:
        return ()
    links = (*LINK_FACTORS, *NETWORK_FACTORS) if run.num_gpus > 1 else ()
    names = (*links, *(OFFLOAD_FACTORS if run.offload != "none" or run.paged_bytes else ()))
    assumed = [name for name in names if name in factors.factors and factors.factors[name].origin == "assumed"]
    return (f"assumed, not measured: {', '.join(assumed)}",) if assumed else ()
