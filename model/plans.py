"""The plans of one job: how its global batch can be split over GPUs, micro-batches and accumulation.

The global batch is micro-batch x accumulation x GPUs and stays what it is, so that every plan trains the same
model; checkpointing, and the way several GPUs share the work, are free unless they were asked for: how data
parallelism shards, and with stacks that split layers into how many parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.bounds import check_sizes
from tunecast.model.curves import Array
from tunecast.model.documents import with_documents
from tunecast.model.engine_memory import Flags, memory_of
from tunecast.model.file_spread import DTYPES, OF_SHARDS, can_shard, over_shards, with_dtypes
from tunecast.model.grouped import experts_on_card, has_grouped_kernel, stacks_experts
from tunecast.model.layer_splits import INNER, LAYERS, NO_SPLIT, Split, gpus_per_copy, of_a_machine, ways_tried
from tunecast.model.on_device import LEAST_SHARDING_FIRST, shardings_tried
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve import ASSUMED, Resolved, resolve_run
from tunecast.model.resolve_parallel import FSDP, GPUS_PER_NODE
from tunecast.model.rows import held_run, unpacked_rows, with_padding
from tunecast.model.run import Run
from tunecast.model.stacks import shardings_of
from tunecast.model.target import Target

BATCH_OPTIONS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_gpus")
"""Options whose product is the global batch."""

WORTH = 0.02
"""Share of time that is worth a more complicated way to share the work."""
SURELY = 0.9
"""Of an extrapolated peak, what is taken for certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """Samples of one optimizer step of the whole job, and how that number came about."""

    samples: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to run the job on one GPU of a kind or more."""

    options: dict[str, Any]
    """Run options that say it, as typed with underscores."""
    resolved: Resolved

    @property
    def run(self) -> Run:
        """The run it resolves to."""
        return self.resolved.run

    def over(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The job's options with the plan's in their place; dtypes go where the plan has none."""
        gone = {name for name in (*OF_SHARDS, *DTYPES) if name not in self.options}
        return {**{name: value for name, value in options.items() if name not in gone}, **self.options}


def gpu_counts(most: int, inner: int = 1) -> tuple[int, ...]:
    """1, 2, 4, 8, ... copies of the model of `inner` GPUs each, and 3, 6, 12, ... where those fill whole machines, up
    to `most` GPUs."""
    check_sizes({"max_gpus": most})
    copies = whole_number("max_gpus", most) // inner
    if copies == 0:
        raise InputError(f"--max-gpus is {most}, but one copy of the model takes {inner} GPUs; raise it to {inner}.")
    doubled = {inner << power for power in range(copies.bit_length())}
    between = {3 * count for count in doubled if 3 * count <= most and 3 * count % GPUS_PER_NODE == 0}
    return tuple(sorted(doubled | between))


def only_count(asked: int, inner: int = 1) -> tuple[int, ...]:
    """The number of GPUs that is asked for, alone; raises InputError where copies of `inner` GPUs do not fill it."""
    check_sizes({"num_gpus": asked})
    if asked % inner:
        raise InputError(
            f"--num-gpus is {asked}, but one copy of the model takes {inner} GPUs; use a multiple of {inner}."
        )
    return (asked,)


def global_batch(
    options: Mapping[str, Any], counts: Sequence[int], asked: int | None = None, *, inner: int = 1
) -> GlobalBatch:
    """The user's: as asked, or the product of what was given; without either, one sample for each copy of the model on
    the most GPUs that double up.

    Raises InputError where a sharded job gives what each GPU takes and not how many GPUs there are.
    """
    if asked is not None:
        check_sizes({"global_batch": asked})
        return GlobalBatch(samples=whole_number("global_batch", asked), how="as asked with --global-batch")
    given = {name: options[name] for name in BATCH_OPTIONS if options.get(name) is not None}
    if not given:
        copies = 1 << ((counts[-1] // inner).bit_length() - 1)
        who = f"{copies} GPUs" if inner == 1 else f"{copies} copies of the model"
        least = f"the smallest in which each of {who} gets a sample" if copies > 1 else "one sample a step"
        how = f"{least}; --global-batch N sets it"
        return GlobalBatch(samples=copies, how=how)
    words = " x ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    sharding = options.get("sharding")
    if "num_gpus" not in given and sharding not in (None, "none"):
        raise InputError(
            f"The global batch is {words} on each GPU of a job under {sharding}, and nothing says how many GPUs it "
            "has; add for example --num-gpus 8, or --global-batch 64."
        )
    samples = 1
    for name in BATCH_OPTIONS:
        samples *= whole_number(name, given.get(name, ASSUMED[name]))
    alone = "" if "num_gpus" in given else " on one GPU, as no --num-gpus is given; --global-batch N sets another"
    of_a_copy = f", {inner} GPUs to a copy of the model" if inner > 1 else ""
    return GlobalBatch(samples=max(samples // inner, 1), how=f"from {words}{of_a_copy}{alone}")


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, the smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Plans that differ in their micro-batch only."""

    method: str
    num_gpus: int
    sharding: str
    checkpointing: bool
    split: Split = field(default_factory=lambda: NO_SPLIT)
    """Of layers and rows, where nobody asked for one."""

    def copies(self, options: Mapping[str, Any]) -> int:
        """Copies of the model, each of which trains its own samples."""
        return self.num_gpus // gpus_per_copy({**options, **self.split}, *INNER)


def lines(
    options: Mapping[str, Any], methods: Sequence[str], counts: Sequence[int], batch: int, layers: int = 1
) -> Iterator[_Line]:
    """Every way to run a job of a model of so many layers but for the micro-batch; what was asked for is kept, with
    what goes with it."""
    checkpointing = options.get("gradient_checkpointing")
    free = (False,) if options.get("recompute_attention") else (True, False)
    choices = free if checkpointing is None else (bool(checkpointing),)
    asked = options.get("sharding")
    for method in methods:
        asked_of = {**options, "method": method}
        for num_gpus in (n for n in counts if can_shard(asked_of, n)):
            tried = shardings_planned(options, num_gpus)
            for split in splits_that_deal_out(options, num_gpus, batch, layers):
                alone = num_gpus == gpus_per_copy({**options, **split}, *LAYERS)
                may = tried_of_parts(options, tried) if split.get("cp") else tried
                spread = ("none",) if alone else may if asked in (None, "none") else (str(asked),)
                yield from (
                    _Line(method=method, num_gpus=num_gpus, sharding=sharding, checkpointing=choice, split=split)
                    for sharding in spread
                    for choice in choices
                )


def shardings_planned(options: Mapping[str, Any], num_gpus: int) -> tuple[str, ...]:
    """Shardings that plans over so many GPUs try where none is asked for: the least that an estimate takes, and where
    those are anybody's, copies of shards on several machines and ZeRO-3, which holds no whole gradients."""
    tried = shardings_tried(options)
    if tried != LEAST_SHARDING_FIRST:
        return tried
    return (*tried, *(("hsdp",) if num_gpus > of_a_machine(options) else ()), "zero3")


def tried_of_parts(options: Mapping[str, Any], tried: Sequence[str]) -> tuple[str, ...]:
    """Of shardings that may be chosen, those beside which rows go in parts: a stack's own, else FSDP, as accelerate has
    its context parallelism (``ParallelismConfig``: ``cp_size`` needs FSDP2)."""
    return tuple(tried) if shardings_of(options.get("stack")) else tuple(name for name in tried if name in FSDP)


def splits_that_deal_out(options: Mapping[str, Any], num_gpus: int, batch: int, layers: int = 1) -> Iterator[Split]:
    """Splits with which so many GPUs are whole copies of the model that get equally many samples."""
    for split in ways_tried(options, layers):
        copies, left = divmod(num_gpus, gpus_per_copy({**options, **split}, *INNER))
        if copies and not left and batch % copies == 0:
            yield split


def deals_out(options: Mapping[str, Any], num_gpus: int, batch: int) -> bool:
    """Whether so many GPUs can share a global batch."""
    return next(splits_that_deal_out(options, num_gpus, batch), None) is not None


def first_line(options: Mapping[str, Any], methods: Sequence[str], counts: Sequence[int], batch: int) -> _Line:
    """The first of `lines`; where a training file's shards allow none of these counts, why is raised."""
    found = next(lines(options, methods, counts, batch), None)
    if found is not None:
        return found
    if not counts:
        raise InputError(
            f"A global batch of {batch} divides over none of the GPUs that were asked for; make --global-batch a "
            "multiple of their number."
        )
    for method in methods:
        for num_gpus in counts:
            over_shards({**options, "method": method, "num_gpus": num_gpus})
    raise InputError(
        f"A global batch of {batch} is dealt out by none of {', '.join(map(str, counts))} GPUs as the training file "
        "shards; raise --global-batch or --max-gpus."
    )


def line_options(options: Mapping[str, Any], line: _Line, micro_batch: int, batch: int) -> dict[str, Any]:
    """The run options of one plan of a line."""
    asked = {**options, **line.split, "method": line.method}
    spread = over_shards({**with_dtypes(asked, line.sharding), "num_gpus": line.num_gpus, "sharding": line.sharding})
    return {
        **spread,
        "gradient_checkpointing": line.checkpointing,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": batch // line.copies(options) // micro_batch,
    }


def undivided_options(options: Mapping[str, Any], line: _Line, batch: int) -> dict[str, Any]:
    """Those of the plan whose micro-batch is all that a copy of the model gets in a step: every kind of run has it."""
    return line_options(options, line, batch // line.copies(options), batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is planned: a model, the options that all plans share, and the free dimensions."""

    architecture: Architecture
    options: Mapping[str, Any]
    option_origins: Mapping[str, str]
    methods: tuple[str, ...]
    counts: tuple[int, ...]
    batch: GlobalBatch
    weights: str = ""
    """The hub's name of what is trained, where it is not the catalog's."""
    written: tuple[str, ...] = ()
    """Training files that the plan is to be written to: what one of them cannot say is no plan."""

    def refuse_unwritten(self, run: Run) -> None:
        """Raise NotSupportedError for a run that one of the files cannot say."""
        if not self.written:
            return
        from tunecast.model.configs.write_limits import refuse_unwritten

        packed = unpacked_rows(run, self.options) is None
        for kind in self.written:
            refuse_unwritten(kind, run, packed=packed)

    def resolve(self, options: Mapping[str, Any], like: Target | None = None) -> Resolved:
        """The run that options mean on a card of this kind (`kind_of_card`); None: of the newest kind."""
        own = {name: value for name, value in options.items() if name not in RUN_OPTIONS_ELSEWHERE}
        own, origins = with_documents(own, options, self.option_origins)
        own, origins = with_padding(own, options, origins)
        if like is None:
            return resolve_run(self.architecture, own, option_origins=origins)
        run = resolve_run(self.architecture, own, gpu_has_bf16=like.has_bf16, option_origins=origins)
        return experts_on_card(run, self.architecture, like)

    def kind_of_card(self, target: Target) -> tuple[bool, bool]:
        """What makes the same options another run on another card: bf16, and grouped products where experts are."""
        stacked = stacks_experts(self.architecture)
        return target.has_bf16, stacked and has_grouped_kernel(target.compute_capability)


def plans_that_may_fit(job: Job, like: Target, *, roomiest_bytes: float) -> list[Plan]:
    """Every plan on cards of one kind whose tensors fit the roomiest; of larger micro-batches than one that does not
    only the largest is tried, which accumulates nothing: FSDP then holds no whole gradients.

    Combinations that a run cannot have (resolving refuses them) are left out; raises what resolving said where
    nothing else is left, and nothing where others are only too large.
    """
    found: list[Plan] = []
    refusal: InputError | NotSupportedError | None = None
    allowed = 0
    for line in lines(job.options, job.methods, job.counts, job.batch.samples, job.architecture.num_layers):
        try:
            found += _line_plans(job, line, like, roomiest_bytes=roomiest_bytes)
            allowed += 1
        except (InputError, NotSupportedError) as error:
            refusal = refusal or error
    if not allowed and refusal is not None:
        raise refusal
    return found


def refused_by_files(job: Job) -> tuple[str, ...]:
    """A sentence of the plans that the files to be written cannot say, where there are any."""
    if not job.written:
        return ()
    for line in lines(job.options, job.methods, job.counts, job.batch.samples, job.architecture.num_layers):
        try:
            run = job.resolve(line_options(job.options, line, 1, job.batch.samples)).run
        except (InputError, NotSupportedError):
            continue
        try:
            job.refuse_unwritten(run)
        except NotSupportedError as error:
            return (f"plans that the file to be written cannot say were left out: {error}",)
    return ()


def refused_spreads(job: Job) -> tuple[str, ...]:
    """A sentence for each method of which no plan over several GPUs can be had, with what resolving says."""
    every = lines(job.options, job.methods, job.counts, job.batch.samples, job.architecture.num_layers)
    spread = [line for line in every if line.num_gpus > gpus_per_copy({**job.options, **line.split}, *LAYERS)]
    refusals: dict[str, list[str | None]] = {}
    for line in spread:
        try:
            job.resolve(undivided_options(job.options, line, job.batch.samples))
            said = None
        except (InputError, NotSupportedError) as error:
            said = str(error)
        refusals.setdefault(line.method, []).append(said)
    return tuple(
        f"no plan of {method} over more GPUs: {said[0]}"
        for method, said in refusals.items()
        if said[0] is not None and None not in said
    )


def _line_plans(job: Job, line: _Line, like: Target, *, roomiest_bytes: float) -> Iterator[Plan]:
    template: Resolved | None = None
    known: list[tuple[int, float]] = []
    sizes = divisors(job.batch.samples // line.copies(job.options))
    too_large = False
    for micro_batch in sizes:
        too_large = too_large or at_least(known, micro_batch) > roomiest_bytes
        if too_large and micro_batch != sizes[-1]:
            continue
        options = line_options(job.options, line, micro_batch, job.batch.samples)
        if line.split.get("pp_interleave") and options["gradient_accumulation_steps"] % line.split["pp"]:
            continue  # micro-batches take turns in as many stages
        try:
            template = template or job.resolve(options, like)
            run = replace(
                template.run,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=options["gradient_accumulation_steps"],
            )
            job.refuse_unwritten(run)
        except (InputError, NotSupportedError):
            if micro_batch == sizes[-1] and not known:
                raise
            continue  # what needs one micro-batch a step (an update in the backward)
        held = held_run(run, job.options)
        allocated_bytes = float(memory_of(job.architecture, [held], "cuda").allocated_bytes[0])
        if allocated_bytes > roomiest_bytes:
            too_large = True
            continue
        known.append((micro_batch, allocated_bytes))
        yield Plan(options=options, resolved=replace(template, run=run))


def at_least(known: Sequence[tuple[int, float]], micro_batch: int) -> float:
    """Bytes that a larger micro-batch takes at least, from two that are known, less a tenth; 0 with fewer.

    What is alive at each moment grows by the sample, and a peak is the largest of them: a convex function, which
    lies above the line through two of its points. Without accumulation gradients may die earlier: hence the tenth.
    """
    if len(known) < 2:
        return 0.0
    (first, low), (second, high) = known[-2:]
    return SURELY * (high + (high - low) / (second - first) * (micro_batch - second))


def best_plans(plans: Sequence[Plan], step_s: Array, allowed: Flags) -> dict[tuple[str, int], int]:
    """By method and number of GPUs, the fastest allowed plan of one device.

    The simplest way to share the work is kept unless another is faster by more than `WORTH`: they come in the order
    of `ways_tried` and `shardings_planned`.
    """
    best: dict[tuple[str, int], dict[tuple[int, int, int, int, str], int]] = {}
    for row in map(int, np.flatnonzero(allowed)):
        run = plans[row].run
        ways = best.setdefault((run.method, run.num_gpus), {})
        way = (run.tp, run.pp, run.pp_interleave, run.cp, run.sharding)
        if way not in ways or step_s[row] < step_s[ways[way]]:
            ways[way] = row
    rows = {which: list(ways.values()) for which, ways in best.items()}
    return {which: own[simplest_of_fastest([step_s[row] for row in own])] for which, own in rows.items()}


def simplest_of_fastest(step_s: Sequence[float]) -> int:
    """Which of several ways to share the work is taken, the simplest first: the first, unless a later one is faster
    by more than `WORTH`."""
    chosen = 0
    for way, taken_s in enumerate(step_s):
        if taken_s < (1.0 - WORTH) * step_s[chosen]:
            chosen = way
    return chosen
