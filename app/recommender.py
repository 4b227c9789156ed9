"""What to rent for a run: `recommend` behind the command line, and its answer as JSON."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError, NotSupportedError, TunecastError, UnknownNameError
from tunecast.model.read_numbers import number_above_zero, number_that, plain_numbers
from tunecast.model.units import gib

if TYPE_CHECKING:
    from tunecast.asked import Asked
    from tunecast.model.amount import Amount
    from tunecast.model.forecast import Forecast
    from tunecast.model.market import Limits, Search
    from tunecast.model.plans import Job
    from tunecast.model.recommend import Choice
    from tunecast.model.target import Target
    from tunecast.recommendation import Recommendation

UNDIVIDED = "does not divide over"
DEFAULT_MAX_GPUS = 8


def recommend(
    model: str | Path,
    *,
    gpu: str | Iterable[str] = "all",
    records: Iterable[str | Path] = (),
    methods: str | Sequence[str] | None = None,
    max_gpus: int | None = None,
    global_batch: int | None = None,
    budget: float | None = None,
    deadline: str | float | None = None,
    min_fit_confidence: float | None = None,
    provider: str | Sequence[str] | None = None,
    region: str | Sequence[str] | None = None,
    spot: bool | None = None,
    purchase: Sequence[str] = (),
    usd_per_gpu_hour: float | None = None,
    prices: str | Path | Iterable[str | Path] = (),
    written: Iterable[str] = (),
    **options: Any,
) -> Recommendation:
    """What to rent: the cheapest, the fastest and the balanced plan of a run over all GPUs, counts and offers.

    `model` and `options` as for `estimate`. The global batch (micro-batch x accumulation x GPUs) is kept; how it is
    split, checkpointing, sharding, tensor and pipeline parallelism of a stack that splits layers, and the parts of long
    rows (context parallelism) are chosen unless given. `methods` are compared with each other; `deadline` is hours, or
    text such as ``"36h"`` and ``"2d"``; `budget` US dollars; `spot` also takes interruptible offers, and `purchase`
    other kinds (community, marketplace, reserved, committed). `written` names training files that a plan is to be
    written to (trl, axolotl, llama-factory): plans that one of them cannot say are left out.
    Raises InputError for what cannot be used, with what to type instead.
    """
    from tunecast.asking import gpu_names, several_paths
    from tunecast.calibrate.fitted_records import fitted_records
    from tunecast.model.market import survey
    from tunecast.model.num_gpus import parse_hours
    from tunecast.model.recommend import choose
    from tunecast.model.target import device_ids

    model, options, names = str(model), plain_numbers(options), gpu_names(gpu)
    around, options = _around(options, spot)
    limits = _limits(
        budget_usd=_above_zero("--budget", budget),
        deadline_h=None if deadline is None else parse_hours(deadline),
        min_fit_confidence=min_fit_confidence,
        price_types=purchase_kinds(spot, purchase),
        providers=_several(provider),
        regions=_several(region),
        usd_per_gpu_hour=_above_zero("--usd-per-gpu-hour", usd_per_gpu_hour),
    )
    search, notes = _search(
        model, options, _several(methods), max_gpus, global_batch, limits, around, several_paths(prices), tuple(written)
    )
    targets = _rentable(names, fitted_records(records, device_ids(names)))
    _check_bridges(search, targets)
    with garbage_uncollected():
        market = survey(search, targets)
        choice = with_more_gpus(search, targets, choose(search, market, limits))
        return _answer(search, choice, market.plans, notes)


def with_more_gpus(search: Search, targets: Sequence[Target], choice: Choice) -> Choice:
    """The choice with what twice as many GPUs would buy, where the fastest plan takes all and the batch allows it."""
    from tunecast.model.market import survey
    from tunecast.model.recommend import more_gpus

    most = search.job.counts[-1]
    if search.gpus_fixed:
        return choice
    takes_all = not choice.front or choice.fastest.num_gpus == most
    if not takes_all or search.job.batch.samples % (2 * most):
        return choice
    larger = replace(search, job=replace(search.job, counts=(2 * most,)))
    try:
        market = survey(larger, targets)
    except (InputError, NotSupportedError):
        return choice  # a run of no more GPUs
    found = more_gpus(market, choice.front, search.limits, most)
    if found is None:
        return choice
    return replace(choice, relaxations=tuple(sorted((*choice.relaxations, found), key=lambda r: r.effort)))


@contextmanager
def garbage_uncollected() -> Iterator[None]:
    """Without the cyclic collector: a screen makes millions of small objects, and few of them die together."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _around(options: Mapping[str, Any], spot: bool | None) -> tuple[Any, dict[str, Any]]:
    """Options of the whole run, and the rest."""
    from tunecast.model.whole_run_options import split_whole_run

    around, rest = split_whole_run({**options, "spot": bool(spot)})
    if around.owned:
        raise InputError("--owned leaves nothing to rent; use tunecast estimate --owned for machines of your own.")
    return around, rest


def _limits(**given: Any) -> Limits:
    from tunecast.model.market import Limits

    if given["min_fit_confidence"] is None:
        del given["min_fit_confidence"]
    else:
        given["min_fit_confidence"] = number_that(
            "--min-fit-confidence",
            given["min_fit_confidence"],
            lambda p: 0.0 <= p < 1.0,
            "a probability below 1",
            "0.9",
        )
    return Limits(**given)


def purchase_kinds(spot: bool | None, purchase: Sequence[str]) -> tuple[str, ...]:
    """Purchase kinds that may be chosen: on demand, and what is asked for."""
    from tunecast.catalogs.prices import PRICE_TYPES

    for kind in purchase:
        if kind not in PRICE_TYPES:
            raise UnknownNameError("purchase kind", kind, PRICE_TYPES, hint=f"There are {', '.join(PRICE_TYPES)}.")
    if spot is False and "spot" in purchase:
        raise InputError("--no-spot and --purchase spot exclude each other; keep one of them.")
    return tuple(dict.fromkeys(("on-demand", *(("spot",) if spot else ()), *purchase)))


def _above_zero(flag: str, value: float | None) -> float | None:
    return None if value is None else number_above_zero(flag, value, "20")


def _several(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Names from a list or from text with commas; None where nothing is given."""
    words = given.split(",") if isinstance(given, str) else [w for text in given or () for w in text.split(",")]
    found = tuple(word.strip() for word in words if word.strip())
    return found or None


def _search(
    model: str,
    options: dict[str, Any],
    methods: tuple[str, ...] | None,
    max_gpus: int | None,
    batch: int | None,
    limits: Limits,
    around: Any,
    prices: tuple[str | Path, ...],
    written: tuple[str, ...],
) -> tuple[Search, tuple[str, ...]]:
    """The question that every card is asked."""
    from tunecast.asked import read_asked, with_saves
    from tunecast.asking import with_tokenizer
    from tunecast.catalogs.price_book import price_book
    from tunecast.model.amount import AMOUNTS
    from tunecast.model.layer_splits import INNER, gpus_per_copy
    from tunecast.model.market import Search
    from tunecast.model.plans import (
        BATCH_OPTIONS,
        Job,
        deals_out,
        global_batch,
        gpu_counts,
        only_count,
        refused_by_files,
        refused_spreads,
    )
    from tunecast.model.read_numbers import whole_number
    from tunecast.model.resolve import ASSUMED, checked_method

    if options.get("num_gpus") == "auto":
        del options["num_gpus"]
    bound = options.get("num_gpus") if max_gpus is None else None
    refuse_unscreened(options)
    asked = read_asked(model, with_tokenizer(model, options), as_stored=set(methods or ("qlora",)) == {"qlora"})
    asked, by_file = as_its_file(asked, written)
    around, saved = with_saves(around, asked)
    if not any(asked.options.get(name) is not None for name in AMOUNTS):
        raise InputError(f"What to rent for {model} depends on how much it trains; add --tokens 10M, for example.")
    for method in methods or ():
        checked_method(method)
    if methods and asked.options.get("method") not in (None, *methods):
        raise InputError(f"--method {asked.options['method']} is not among --methods {','.join(methods)}; keep one.")
    inner = gpus_per_copy(asked.options, *INNER)
    given = whole_number("num_gpus", asked.options.get("num_gpus") or 1)
    most = max(DEFAULT_MAX_GPUS, given) if max_gpus is None else max_gpus
    counts = gpu_counts(most, inner) if bound is None else only_count(given, inner)
    total = global_batch(asked.options, counts, batch, inner=inner)
    usable = tuple(count for count in counts if deals_out(asked.options, count, total.samples))
    shared = {name: value for name, value in asked.options.items() if name not in (*BATCH_OPTIONS, "method")}
    job = Job(
        architecture=asked.architecture,
        options=shared,
        option_origins=asked.origins if asked.options.get("method") else {**asked.origins, "method": "assumed"},
        methods=methods or (str(asked.options.get("method") or ASSUMED["method"]),),
        counts=usable,
        batch=total,
        weights=asked.weights,
        written=written,
    )
    uneven = [count for count in counts if count not in usable]
    notes = [*asked.notes, *by_file, *saved]
    if bound is not None:
        notes.append(
            f"--num-gpus {bound} binds: no other number of GPUs was tried; --max-gpus {most} beside it tries up to "
            f"{most} at its global batch"
        )
    if uneven:
        words = ", ".join(map(str, uneven))
        notes.append(f"a global batch of {total.samples} {UNDIVIDED} {words} GPUs: --global-batch changes it")
    amount = _amount(job)
    notes += [*refused_spreads(job), *refused_by_files(job)]
    if shared.get("sharding") not in (None, "none") and inner in usable:
        notes.append(f"--sharding {shared['sharding']} is that of plans over several GPUs; one GPU shards nothing")
    search = Search(
        job=job,
        limits=limits,
        book=price_book(prices),
        around=around,
        amount=amount,
        gpus_fixed=bound is not None,
    )
    return search, tuple(notes)


def as_its_file(asked: Asked, written: Sequence[str]) -> tuple[Asked, tuple[str, ...]]:
    """The question with the stack of the one file that its plan is written to, where nothing says another and that
    framework runs what no field of its file turns off: TRL makes tiles of the logits."""
    decided = [name for name in ("stack", "loss_type") if asked.options.get(name) is not None]
    if tuple(written) != ("trl",) or decided:
        return asked, ()
    own = replace(asked, options={**asked.options, "stack": "trl"}, origins={**asked.origins, "stack": "searched"})
    return own, ("planned as TRL runs it, whose file is written; --stack hf-peft plans the plain Trainer",)


def refuse_unscreened(options: Mapping[str, Any]) -> None:
    """Plans are screened with data that they do not wait for."""
    if options.get("streaming"):
        raise NotSupportedError(
            "recommend screens plans whose data are ready, so --streaming is not built there; leave it out, or use "
            "tunecast estimate."
        )


def _rentable(names: Sequence[str], records: Mapping[str, Any]) -> list[Target]:
    """The cards asked for; a CPU or a simulated card cannot be rented."""
    from tunecast.model.target import resolve_targets

    targets = resolve_targets(names, records)
    for target in targets:
        if target.platform == "cpu" or target.is_mock:
            raise InputError(f"Nobody rents out {target.id}; name catalog GPUs with --gpu, and leave its record out.")
    return targets


def _check_bridges(search: Search, targets: Sequence[Target]) -> None:
    """Raise InputError for NVLink bridges where no card has NVLink; of several cards, the others go over PCIe."""
    from tunecast.model.parallel_network import without_bridge

    cards = [target.gpu for target in targets if target.gpu is not None]
    asked = search.job.options
    if cards and asked.get("nvlink") and not any("nvlink" in without_bridge(asked, gpu) for gpu in cards):
        raise InputError(
            f"--nvlink says that NVLink bridges join the cards, but {cards[0].id} has no NVLink; leave --nvlink out."
        )


def _answer(search: Search, choice: Choice, screened: int, notes: tuple[str, ...]) -> Recommendation:
    from tunecast.model.amount import steps_words
    from tunecast.model.question import Question
    from tunecast.model.recommend import full_forecast
    from tunecast.recommendation import Picked, Recommendation

    job = search.job
    question = Question(architecture=job.architecture, options=job.options, option_origins=job.option_origins)
    front = tuple(Picked(candidate=c, forecast=full_forecast(question, search, c)) for c in choice.front)

    def otherwise(picked: Picked, changes: Mapping[str, Any]) -> Forecast:
        plan = picked.candidate.plan
        changed = replace(plan, options={**plan.options, **changes})
        return full_forecast(question, search, replace(picked.candidate, plan=changed))

    balance = None if not front else next(p for p in front if p.candidate is choice.balance)
    return Recommendation(
        model=job.architecture.name,
        weights=job.weights or job.architecture.name,
        batch=job.batch,
        steps=f"{steps_words(search.amount.steps)}: {search.amount.how}",
        limits=search.limits,
        front=front,
        balance=balance,
        rejected=choice.rejected,
        relaxations=choice.relaxations,
        screened=screened,
        notes=(*notes, *_largest_note(search, choice, notes), *_loading_note(job, choice)),
        amount_options=dict(job.options),
        save_steps=search.around.save_steps,
        save_total_limit=search.around.save_total_limit,
        otherwise=otherwise,
    )


def _largest_note(search: Search, choice: Choice, notes: tuple[str, ...]) -> tuple[str, ...]:
    """Said when the fastest plan takes as many GPUs as may be tried, and `notes` do not say why there are no more."""
    most = search.job.counts[-1]
    told = any(relaxation.limit == "--max-gpus" for relaxation in choice.relaxations)
    takes = f"all {most} GPUs that were tried" if most > 1 else "the one GPU that was tried"
    if search.gpus_fixed or not choice.front or choice.fastest.num_gpus < most or told:
        return ()
    batch = search.job.batch.samples
    if batch % (2 * most):
        undivided = f"a global batch of {batch} {UNDIVIDED} {2 * most}: --global-batch changes it"
        return () if any(UNDIVIDED in note for note in notes) else (f"the fastest plan takes {takes}, and {undivided}",)
    return (f"the fastest plan takes {takes}: --max-gpus {2 * most} looks further",)


def _loading_note(job: Job, choice: Choice) -> tuple[str, ...]:
    """That cards are too small for a quantized base however many share it, since each has to load it (`loading`)."""
    from tunecast.catalogs.gpus import load_gpus
    from tunecast.model.loading import loading_parts
    from tunecast.model.sharding import SHARDS

    split = any(int(job.options.get(way) or 1) > 1 for way in ("tp", "pp", "cp"))
    left_out = [rejected.gpu for rejected in choice.rejected if rejected.reason == "does not fit"]
    if "qlora" not in job.methods or split or not left_out or max(job.counts) == 1:
        return ()
    asked = str(job.options.get("sharding"))
    shared = asked if asked in SHARDS and SHARDS[asked].weights else "fsdp"
    try:
        run = job.resolve({**job.options, "method": "qlora", "num_gpus": 2, "sharding": shared}).run
    except TunecastError:
        return ()
    whole = sum(loading_parts(job.architecture, run).values())
    small = [name for name in left_out if (load_gpus()[name].usable_bytes or whole) < whole]
    if not small:
        return ()
    cards = ", ".join(small[:2]) + (f" and {len(small) - 2} more" if len(small) > 2 else "")
    note = (
        f"too small for this model in 4 or 8 bits however many GPUs share it: {cards}; transformers 5 loads the whole "
        f"quantized base ({gib(whole):.1f} GiB) on every GPU, axolotl under FSDP in host memory: --stack axolotl"
    )
    return (note,)


def _amount(job: Job) -> Amount:
    """Optimizer steps of the job: the same for every plan, since all keep the batch."""
    from tunecast.model.amount import resolve_amount
    from tunecast.model.plans import first_line, undivided_options

    line = first_line(job.options, job.methods, job.counts, job.batch.samples)
    run = job.resolve(undivided_options(job.options, line, job.batch.samples)).run
    amount = resolve_amount(run, dict(job.options))
    assert amount is not None
    return amount
