"""Which change, or which two, make a run fit.

"Fits" is the verdict of that name (`fits.TIGHT_BELOW`); what fits only tightly says so, with its probability.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.estimate import forecast
from tunecast.model.fits import LIKELY, TIGHT_BELOW, chance_said
from tunecast.model.forecast import Forecast
from tunecast.model.grouped import stacks_experts
from tunecast.model.largest import changed, largest_that, run_fits
from tunecast.model.layer_splits import INNER, LAYERS, LONG_ROW, gpus_per_copy, splits_tried
from tunecast.model.loading import loads_whole
from tunecast.model.loss_chunks import head_uses
from tunecast.model.on_device import resolve_for
from tunecast.model.optimizer import FUSED
from tunecast.model.parallel import local_run
from tunecast.model.plans import divisors
from tunecast.model.question import Question
from tunecast.model.resolve_experts import OF_AXOLOTL
from tunecast.model.resolve_parallel import OFFLOADED_BY, ZERO
from tunecast.model.rows import held_run
from tunecast.model.run import Run
from tunecast.model.sharding import FSDP, shard_gpus
from tunecast.model.stacks import BUILT, shardings_of, splits_layers, splits_rows
from tunecast.model.target import Target

MOST_CHUNKS = 1024
"""Chunks of a loss that is proposed: each is written down, and with more of them other changes come first."""
MOST_SUGGESTIONS = 6
"""Changes that are told, those of least GPU time."""
MOST_GPUS = 64
"""Largest job that is proposed."""
SMALL_STATES = ("adamw_bnb_8bit", "paged_adamw_8bit")
"""Optimizers whose state is smaller than AdamW's or leaves the GPU, by preference."""
THRIFTY_LOSSES = ("chunked_nll", "liger", "cut_cross_entropy")
"""Loss paths that never hold the full logits."""

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a run after which it fits."""

    options: dict[str, Any]
    """What to ask for instead, by option name with underscores."""
    process_bytes: float
    """Memory of the process of one GPU with it."""
    step_time_s: float
    """One optimizer step of the whole job with it."""
    gpu_time_ratio: float
    """GPU time per token with it over without it; below 1 is cheaper."""
    fit_probability: float
    """That the run with it fits."""

    @property
    def typed(self) -> str:
        """The change as it is typed."""
        return " ".join(_typed(name, value) for name, value in self.options.items())


def _typed(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}"


def what_would_fit(question: Question, target: Target) -> list[Change]:
    """Changes after which the run fits on the device, those of least GPU time first.

    The global batch is kept. Where no single change is enough, each comes together with checkpointing and
    micro-batches of one sample, then with one of another kind; what fits only tightly is for last. A base that is
    in fp32 for no reason comes first.
    """
    before = forecast(question, target)
    for least in (TIGHT_BELOW, LIKELY):
        for tries in rounds(question, target, before.run, least):
            found = [change for options in tries if (change := tried(question, target, options, before, least))]
            if found:
                return sorted(found, key=lambda change: ("dtype" not in change.options, change.gpu_time_ratio))
    return []


def rounds(question: Question, target: Target, run: Run, least: float) -> Iterator[list[dict[str, Any]]]:
    """Changes to try, simple ones before those of several options."""
    together = thriftiest(run)
    yield list(candidates(question, target, run, least))
    asked = changed(question, together)
    try:
        thrifty = resolve_for(asked, target).run
    except (InputError, NotSupportedError):
        return
    if together:
        yield [together, *({**together, **one} for one in candidates(asked, target, thrifty, least))]
    yield [{**together, **both} for both in pairs(asked, target, thrifty, least)]
    yield [{**together, **one} for one in offloads(run)]


def pairs(question: Question, target: Target, run: Run, least: float) -> Iterator[dict[str, Any]]:
    """Two changes of different kinds, more GPUs with sharded weights as one of them, each kind by its first member."""
    kinds = [list(kind) for kind in kinds_of_change(question, target, run)]
    firsts = [one for kind in kinds for one in (kind if "method" in kind[0] else kind[:1])]
    for one, other in combinations(firsts, 2):
        if one.keys() != other.keys():
            yield {**one, **other}
    for one in firsts:
        asked = changed(question, one)
        for options in enough_gpus(asked, target, run, least):
            yield {**one, **options}


def offloads(run: Run) -> Iterator[dict[str, Any]]:
    """What host memory may take, which costs most time: the update, then all; DDP has nothing of the kind."""
    if run.offload != "none" or run.pp > 1:
        return
    words = [word for word, by in OFFLOADED_BY.items() if run.num_gpus == 1 or run.sharding in by]
    yield from ({"offload": word} for word in words)
    if not words:
        yield {"sharding": "fsdp", "offload": "all"}


def checkpoints(run: Run) -> dict[str, Any]:
    """Whole layers checkpointed, in place of their attention alone where that is what the run asks for."""
    return {"gradient_checkpointing": True} | ({"recompute_attention": False} if run.recompute_attention else {})


def thriftiest(run: Run) -> dict[str, Any]:
    """Checkpointing and micro-batches of one sample with as much more accumulation, where that is a change."""
    one = {} if run.gradient_checkpointing else checkpoints(run)
    batch, steps = run.per_device_train_batch_size, run.gradient_accumulation_steps
    if batch > 1:
        one |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": batch * steps}
    return one


def kinds_of_change(question: Question, target: Target, run: Run) -> Iterator[list[dict[str, Any]]]:
    """The changes worth trying, by kind, without those of sizes."""
    layers = [group.layer for group in question.architecture.groups]
    masked = run.attn_implementation == "eager" or any(layer.attention.window for layer in layers)
    flash = masked and target.platform == "cuda" and target.has_bf16 and not run.attn_implementation.startswith("flash")
    wide = run.has_adapters and run.base_quantization is None and run.dtype == "fp32" and run.autocast
    losses = [name for name in THRIFTY_LOSSES if name in BUILT["loss"] and run.loss_type == "nll"]
    methods: dict[str, tuple[str, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",)}
    unpacked = run.bnb_4bit_quant_type is not None and stacks_experts(question.architecture)
    packs = unpacked and run.stack in OF_AXOLOTL and not run.quantize_moe_experts
    kinds: tuple[list[dict[str, Any]], ...] = (
        [{"dtype": run.compute_dtype}] if wide else [],
        [{"quantize_moe_experts": True}] if packs else [],
        [{"loads_on_gpu": False}] if loads_whole(run) and run.sharding in FSDP else [],
        [] if run.gradient_checkpointing else [checkpoints(run)],
        [{"attn_implementation": "flash_attention_2"}] if flash else [],
        [{"attn_implementation": "sdpa"}] if run.attn_implementation == "eager" else [],
        [{"optim": FUSED}] if run.optim == "adamw_torch" and target.platform == "cuda" else [],
        [{"optim": name} for name in SMALL_STATES if name in BUILT["optimizer"] and name != run.optim],
        [{"loss_type": name} for name in losses if head_uses(replace(run, loss_type=name)) <= MOST_CHUNKS],
        [{"method": method} for method in methods.get(run.method, ())],
    )
    yield from (kind for kind in kinds if kind)


def candidates(question: Question, target: Target, run: Run, least: float = TIGHT_BELOW) -> Iterator[dict[str, Any]]:
    """The changes worth trying; of a kind with sizes, the smallest that fits."""
    for kind in kinds_of_change(question, target, run):
        yield from kind
    yield from smaller_batches(question, target, run, least)
    yield from enough_shards(question, target, run, least)
    yield from enough_parts(question, target, run, least)
    yield from enough_gpus(question, target, run, least)


def enough_gpus(question: Question, target: Target, run: Run, least: float) -> Iterator[dict[str, Any]]:
    """The fewest more GPUs with sharded weights, or with layers split further, on which it fits, if there are."""
    if target.platform != "cuda":
        return
    larger = wider_spread(run, question.options) if splits_layers(run.stack) else more_gpus(run)
    yield from first_that_fits(question, target, larger, least)


def smaller_batches(question: Question, target: Target, run: Run, least: float) -> Iterator[dict[str, Any]]:
    """Micro-batches that divide this one, with as much more accumulation: the largest that fits, if one does.

    Memory never falls when the batch grows, so divisors are searched by halves.
    """
    batch, steps = run.per_device_train_batch_size, run.gradient_accumulation_steps
    smaller = divisors(batch)[:-1]

    def option(rank: int) -> dict[str, Any]:
        size = smaller[rank - 1]
        return {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps * batch // size}

    best = largest_that(lambda rank: fits_with(question, target, option(rank), least), len(smaller)) if smaller else 0
    if best:
        yield option(best)


def enough_shards(question: Question, target: Target, run: Run, least: float) -> Iterator[dict[str, Any]]:
    """Of a run whose shards are copied, the smallest larger group with which it fits, all its GPUs the largest."""
    size = shard_gpus(local_run(run)) // run.cp
    larger = [n for n in divisors(run.dp) if n > size and n % size == 0]
    yield from first_that_fits(question, target, ({"dp_shard_size": n} for n in larger), least)


def enough_parts(question: Question, target: Target, run: Run, least: float) -> Iterator[dict[str, Any]]:
    """Of a long row, which no smaller micro-batch cuts, the fewest parts with which it fits, over the GPUs of a machine
    that each had a row of their own; accumulation keeps the global batch."""
    if run.cp > 1 or run.per_device_train_batch_size > 1 or run.max_length < LONG_ROW or not splits_rows(run.stack):
        return
    parts = [n for n in divisors(run.dp)[1:] if run.gpus_per_node % n == 0]
    options = ({"cp": n, "gradient_accumulation_steps": run.gradient_accumulation_steps * n} for n in parts)
    yield from first_that_fits(question, target, options, least)


def more_gpus(run: Run) -> Iterator[dict[str, Any]]:
    """Twice as many GPUs and so on with sharded weights, with as much less accumulation where it divides: by FSDP, or
    by DeepSpeed where it shards already, whose optimizer keeps fp32 copies that FSDP has only of fp32 weights."""
    sharding = "zero3" if run.sharding in ZERO else "fsdp"
    gpus = 2 * run.num_gpus if run.sharding == sharding else max(2, run.num_gpus)
    while gpus <= MOST_GPUS:
        steps, left = divmod(run.gradient_accumulation_steps * run.num_gpus, gpus)
        wanted: dict[str, Any] = {"num_gpus": gpus, "sharding": sharding}
        wanted |= {"gradient_accumulation_steps": steps} if steps and not left else {}
        yield {name: value for name, value in wanted.items() if getattr(run, name) != value}
        gpus *= 2


def wider_spread(run: Run, options: Options) -> Iterator[dict[str, Any]]:
    """With a stack that splits layers: as many GPUs and twice as many and so on, each with copies of the model over
    more GPUs or sharded as the stack does; accumulation keeps the global batch, and what would not is left out."""
    now = {"num_gpus": run.num_gpus, "tp": run.tp, "pp": run.pp, "sharding": run.sharding}
    now |= {"gradient_accumulation_steps": run.gradient_accumulation_steps}
    splits = [{"tp": 1, "pp": 1, **split} for split in splits_tried({**options, **dict.fromkeys(INNER)})]
    gpus = run.num_gpus
    while gpus <= MOST_GPUS:
        for split in (one for one in splits if gpus_per_copy(one, *LAYERS) >= run.tp * run.pp):
            copies, left = divmod(gpus, gpus_per_copy(split, *INNER) * run.cp)
            steps, uneven = divmod(run.gradient_accumulation_steps * run.dp, max(copies, 1))
            if copies and not left and not uneven:
                spread = shardings_of(run.stack)[-1] if copies * run.cp > 1 else "none"
                wanted = {"num_gpus": gpus, **split, "sharding": spread, "gradient_accumulation_steps": steps}
                changes = {name: value for name, value in wanted.items() if now[name] != value}
                if options.get("sharding") is None:
                    changes.pop("sharding", None)  # follows by itself
                if changes:
                    yield changes
        gpus *= 2


def fits_with(question: Question, target: Target, options: Options, least: float = TIGHT_BELOW) -> bool:
    """Whether the changed run fits with a probability of `least`; one that the rest of the run excludes does not."""
    asked = changed(question, options)
    try:
        resolved = resolve_for(asked, target)
    except (InputError, NotSupportedError):
        return False
    held = held_run(resolved.run, asked.options)
    return run_fits(question.architecture, held, target, question.source, least)


def first_that_fits(
    question: Question, target: Target, changes: Iterable[dict[str, Any]], least: float
) -> Iterator[dict[str, Any]]:
    """The first of the changes with which it fits, if one does."""
    yield from islice((options for options in changes if fits_with(question, target, options, least)), 1)


def tried(
    question: Question, target: Target, options: dict[str, Any], before: Forecast, least: float = TIGHT_BELOW
) -> Change | None:
    """The change with its memory and time, or None when the run still does not fit or nothing says how fast it is."""
    if not fits_with(question, target, options, least):
        return None
    try:
        after = forecast(changed(question, options), target)
    except InputError:
        return None
    assert after.memory.process_bytes is not None
    assert after.fit_probability is not None
    return Change(
        options=options,
        process_bytes=after.memory.process_bytes.value,
        step_time_s=after.step_time_s.value,
        gpu_time_ratio=gpu_seconds_per_token(after) / gpu_seconds_per_token(before),
        fit_probability=after.fit_probability,
    )


def gpu_seconds_per_token(found: Forecast) -> float:
    """GPU time that a token costs, s."""
    return found.step_time_s.value * found.run.num_gpus / found.run.tokens_per_step


def suggestions(question: Question, target: Target) -> tuple[str, ...]:
    """Notes that say what to change so that the run fits, with the price of it in GPU time."""
    changes = what_would_fit(question, target)
    if not changes:
        return (f"nothing that was tried, one change or two at once, makes it fit on {target.id}",)
    timed = question.achieved_tflops is None  # a speed of required work says nothing of what is recomputed
    return tuple(
        f"{change.typed} would make it fit{_tightly(change)} on {target.id}"
        + (f", at {change.gpu_time_ratio:.2f} x the GPU time per token" if timed else "")
        for change in changes[:MOST_SUGGESTIONS]
    )


def _tightly(change: Change) -> str:
    """That a change leaves little room, with its probability."""
    return "" if change.fit_probability >= TIGHT_BELOW else f" tightly ({chance_said(change.fit_probability)})"
