"""How long the rows of training are, and how much of them is padding.

Packed samples fill rows of ``max_length``. Unpacked ones, which every stack whose defaults are recorded trains unless
told otherwise, are rows of their own, each padded to the longest of its micro-batch, as Trainer's collators do, or to
the next multiple of some length (`Run.pad_to_multiple_of`; 64 in axolotl, 8 in LLaMA-Factory), and the model is told
which tokens are padding (`Run.padding_mask`). With samples of lengths t(1) <= ... <= t(n) drawn at
random, the longest of b is

    sum over i of t(i) ((i / n)^b - ((i - 1) / n)^b)

in the mean. Copies of the model wait for the one with the longest rows: of c copies that meet in every micro-step
(FSDP and ZeRO-3 gather each layer, ZeRO-2 reduces what each backward made) the rows waited for are the longest of b c
samples; copies that meet once after a micro-steps wait for the largest of c sums, whose excess over the mean is that
of one micro-step over the root of a (exact for normal lengths).

A step is timed at the mean row waited for. Its time is no straight line over the length, though: the host decides that
of short rows, the card that of long ones, and attention grows with the square. So it is stretched to the mean over
`LIKELY` lengths of that row which are equally likely (`Rows.lengths`, `row_times`). Memory stays that of the longest
row (`longest_row`), which some micro-batch reaches: ``max_length``, filled up like any other. FLOPs are those of a
copy's own rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError
from tunecast.model.counts import parse_count
from tunecast.model.dataset import Dataset, bytes_per_token, kept, read_dataset
from tunecast.model.factors import Factor
from tunecast.model.flat_rows import flat_of_file, flat_of_mean
from tunecast.model.grouped_rows import first_lengths, group_size, length_in
from tunecast.model.kept_samples import HELD_OUT, HELD_ROWS, MOST_SAMPLES, joins_samples, long_samples
from tunecast.model.read_numbers import as_number
from tunecast.model.resolve import ASSUMED
from tunecast.model.row_lengths import LIKELY, Rows, filled, longest_row, waited_for, whole
from tunecast.model.run import Run
from tunecast.model.sample_lengths import equal_parts, lengths_at, likely_lengths, stretched_longest
from tunecast.model.stacks import built_stack, ignores_padding, keeps_samples_apart

if TYPE_CHECKING:
    from tunecast.model.curves import Array

ROWS_PACKED = "rows_packed"
"""Option that nobody types: whether a training file, or its framework by default, packs rows."""
ROWS_GROUPED = "rows_grouped"
"""Option that nobody types: whether a training file sorts samples by length."""
ROWS_FLAT = "rows_flat"
"""Option that nobody types: whether a training file lays the samples of a micro-batch end to end."""
LENGTHS = ("mean_tokens", "dataset")
"""Options that say how long samples are."""
WHOLE_RUN_ENDS = "the interval of the whole run, not that of a step, goes"
LEAST_TOLD = 0.005
"""Share of padding that rounds to 1% or more."""


def likely_longest(lengths: Sequence[float] | Array, batch: int) -> Array:
    """(`LIKELY`,) means of equally likely parts of the lengths of the longest of `batch` samples drawn with
    replacement, the shortest first."""
    import numpy as np

    each = np.sort(np.asarray(lengths, dtype=float))
    return equal_parts(each, (np.arange(len(each) + 1) / len(each)) ** batch, LIKELY)


def says_lengths(options: Mapping[str, Any]) -> bool:
    """Whether options say how long samples are."""
    return any(options.get(name) is not None for name in LENGTHS)


def packing_of(options: Mapping[str, Any]) -> bool | None:
    """Whether samples fill rows: as typed, else where samples have a length as a training file or the stack's own data
    loader has it, else not; None where samples have none. ``--padding-free`` and ``--attention-length`` speak of packed
    rows, whatever the file has: nobody said so, but they do."""
    typed, of_file = options.get("packing"), options.get(ROWS_PACKED)
    if typed is not None or not says_lengths(options):
        return typed
    if lays_flat(options):
        return False
    inside = bool(options.get("padding_free")) or options.get("attention_length") is not None
    return True if of_file or (of_file is None and joins_samples(options)) else None if inside else False


def lays_flat(options: Mapping[str, Any]) -> bool:
    """Whether the samples of a micro-batch are laid end to end (`flat_rows`): as typed, or as a training file or the
    stack has it where their lengths are known, its attention keeps them apart, and nothing typed speaks of padded or of
    packed rows."""
    packed = bool(options.get("packing")) or options.get("attention_length") is not None
    if not says_lengths(options) or packed or options.get("padding_free") is False:
        return False
    if options.get("packing") is False and options.get("padding_free"):
        return True
    padded = bool(options.get("padding_mask")) or options.get("pad_to_multiple_of") is not None
    kernel = str(options.get("attn_implementation"))
    apart = kernel.startswith("flash") or (kernel != "eager" and keeps_samples_apart(options.get("stack")))
    return bool(options.get(ROWS_FLAT)) and apart and not padded


def trained_data(options: Mapping[str, Any]) -> Dataset:
    """The data file as a training file has it trained: how many of its samples, and what becomes of long ones."""
    packed, held = packing_of(options) is not False, float(options.get(HELD_OUT) or 0.0)
    return kept(
        read_dataset(str(options["dataset"])),
        long_samples(options, packed=packed),
        options.get(MOST_SAMPLES),
        held,
        held_rows=packed and bool(options.get(HELD_ROWS)),
    )


def groups_rows(options: Mapping[str, Any]) -> bool:
    """Whether samples of like length make a micro-batch: as typed, else as a training file has it. Of streamed data
    nobody knows the lengths, and transformers leaves a file's wish (``Trainer._get_train_sampler``)."""
    typed = options.get("group_by_length")
    if options.get("streaming"):
        if typed:
            raise InputError(
                "--group-by-length sorts samples by lengths that streamed data do not have, so that the Trainer "
                "ignores it; leave it or --streaming out."
            )
        return False
    return bool(options.get(ROWS_GROUPED) if typed is None else typed)


def alone_by_default(options: Mapping[str, Any]) -> bool:
    """Whether samples are rows of their own, or would be, because nobody said how rows are made."""
    return options.get("packing") is None and options.get(ROWS_PACKED) is None and packing_of(options) is False


def with_padding(
    run_options: dict[str, Any], options: Mapping[str, Any], origins: Mapping[str, str]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Run options with what is known of padding (`Run.padding_mask`) where nobody said it; and all origins."""
    most = as_number(options.get("max_length") or ASSUMED["max_length"])
    if fills_rows(options) and most is not None:  # a length that is searched is none yet
        step = int(options["rows_padded"])
        run_options = {**run_options, "pad_to_multiple_of": math.ceil(most / step) * step}
        origins = {**origins, "pad_to_multiple_of": origins.get("rows_padded", "file")}
    if run_options.get("padding_mask") and options.get("packing"):
        raise InputError("--padding-mask says that samples are padded, --packing that they fill rows; leave one out.")
    stack = str(run_options.get("stack") or ASSUMED["stack"])
    if run_options.get("padding_mask") is not None or ignores_padding(stack) or not pads_rows(options):
        return run_options, origins
    filled = origins.get("rows_padded", "file") if fills_rows(options) else "assumed"
    origin = "cli" if options.get("dataset") is not None else filled  # assumed: an unknown spread, or all alike
    return {**run_options, "padding_mask": True}, {**origins, "padding_mask": origin}


def fills_rows(options: Mapping[str, Any]) -> bool:
    """Whether a training file pads every row to the multiple of ``rows_padded`` that ``max_length`` is or is below
    (axolotl's ``pad_to_sequence_len``), and the command line does not say how rows are made, or to what they are
    filled."""
    typed = [options.get(name) for name in ("packing", "pad_to_multiple_of")]
    return bool(options.get("rows_padded")) and typed == [None, None]


def multiple_of(options: Mapping[str, Any]) -> float:
    """Tokens that the length of a row is a multiple of, as typed or by the stack's default."""
    typed = as_number(options.get("pad_to_multiple_of"))
    stack = str(options.get("stack") or ASSUMED["stack"])
    return typed or built_stack(stack).get("defaults", {}).get("all", {}).get("pad_to_multiple_of", 1)


def pads_rows(options: Mapping[str, Any]) -> bool:
    """Whether rows are samples of unlike lengths, of which the shorter ones of a micro-batch are padded: those of a
    training file that packs none are, whether or not their lengths are known."""
    lengths = says_lengths(options)
    of_file = options.get("rows_padded") or (options.get(ROWS_PACKED) is False and not lengths)
    if of_file and options.get("packing") is None and not options.get("padding_free"):
        return True
    if packing_of(options) is not False or lays_flat(options):
        return False
    most = as_number(options.get("max_length") or ASSUMED["max_length"])
    if most is None:
        return False  # a length that is searched, or one that resolving refuses
    if options.get("dataset") is not None:
        found, size_bytes = trained_data(options), bytes_per_token(options).value
        return _unlike(found, size_bytes, int(most), multiple_of(options))
    mean = as_number(options.get("mean_tokens"))
    return mean is not None and mean < most


@lru_cache(maxsize=64)
def _unlike(found: Dataset, size_bytes: float, most: int, multiple: float) -> bool:
    """Whether samples of a file are of more than one length, `most` tokens of so many bytes at most, or of one that is
    no multiple of what rows are filled to."""
    lengths = set(found.lengths(size_bytes, most))
    return len(lengths) > 1 or any(length % multiple for length in lengths)


def unpacked_rows(run: Run, options: Mapping[str, Any]) -> Rows | None:
    """Rows of one sample each (``--no-packing``); None where samples are packed, or where nothing is said of them."""
    if packing_of(options) is not False:
        if options.get("group_by_length"):
            raise InputError(
                "--group-by-length sorts samples that are rows of their own; add --no-packing with --dataset FILE or "
                "--mean-tokens N, or leave it out."
            )
        return None
    if options.get("dataset") is not None:
        return _rows_of_file(run, options)
    if options.get("mean_tokens") is None:
        raise InputError(
            "--no-packing makes every sample a row, whose length nothing says; add --dataset FILE, or --mean-tokens N."
        )
    mean, batch = float(options["mean_tokens"]), run.per_device_train_batch_size
    if not 1.0 <= mean <= run.max_length:
        raise InputError(
            f"--mean-tokens is {mean:g}, which is not between 1 and --max-length {run.max_length}; change one of them."
        )
    if lays_flat(options):
        return flat_of_mean(run, mean, _samples_asked(options, mean), grouped=groups_rows(options))
    most, group = longest_row(run), group_size(run, None) if groups_rows(options) else None
    own, waited = _own_and_waited(lambda of: _likely_of_mean(run, mean, of, group), run, group)
    rows = Rows(
        length=whole(waited.mean()),
        own_length=whole(own.mean()),
        mean_tokens=mean,
        samples=None,
        how=_how(run, group),
        lengths=tuple(whole(length) for length in waited),
    )
    if own.mean() >= most:
        return rows
    how = f"{rows.how}; of lengths only the mean is known, so they are assumed to be spread exponentially"
    if batch * run.dp == 1:
        return replace(rows, how=how)
    alike, unlike = filled(mean, run), _most_unlike(run, mean)
    if group and batch * run.dp < group:  # one micro-step in each group may have samples of both kinds
        unlike = min(unlike, filled(mean + run.max_length * batch * run.dp / group, run))
    unlike = max(unlike, whole(waited.mean()))
    ends = f"{WHOLE_RUN_ENDS} from rows of {alike}, all alike, to {unlike}, of lengths far more unlike than that"
    return replace(rows, how=f"{how}; {ends}", shortest=alike, longest=unlike)


def _most_unlike(run: Run, mean: float) -> int:
    """Tokens of the rows that a job waits for, of samples whose lengths are as unlike as is assumed possible."""
    import numpy as np

    own, of_all = (
        np.array([stretched_longest(of, mean, run.max_length, run.pad_to_multiple_of)])
        for of in (run.per_device_train_batch_size, run.per_device_train_batch_size * run.dp)
    )
    return whole(waited_for(own, of_all, run)[0])


def _samples_asked(options: Mapping[str, Any], mean: float) -> float | None:
    """Samples of an epoch, as typed or by its tokens; None where neither is said."""
    if options.get("num_samples") is not None:
        return parse_count(options["num_samples"], name="--num-samples")
    if options.get("tokens") is not None:
        return parse_count(options["tokens"], name="--tokens") / mean
    return None


def _likely_of_mean(run: Run, mean: float, batch: int, group: int | None) -> Array:
    """(`LIKELY`,) equally likely lengths of the longest of `batch` samples of which the mean is known."""
    cut, multiple = run.max_length, run.pad_to_multiple_of
    if group is None or batch >= group:
        return likely_lengths(batch, mean, cut, multiple, LIKELY)
    return first_lengths(batch, group, lambda at: lengths_at(at, mean, cut, multiple), LIKELY)


def _own_and_waited(longest_of: Callable[[int], Array], run: Run, group: int | None) -> tuple[Array, Array]:
    """Equally likely lengths of a copy's own rows and of those waited for, by those of the longest of some samples."""
    batch = run.per_device_train_batch_size
    own, of_all = longest_of(batch), longest_of(batch * run.dp)
    return own, of_all if group else waited_for(own, of_all, run)


def _how(run: Run, group: int | None = None) -> str:
    """How rows of one sample get their length, in words; `group`: so many are sorted by length."""
    alone = "rows of one sample each"
    if run.pad_to_multiple_of >= run.max_length:
        return f"{alone}, every one padded to {longest_row(run)}"
    batch, multiple = run.per_device_train_batch_size, run.pad_to_multiple_of
    longest = f"padded to the longest of {batch}" if batch > 1 else ""
    filled = f"filled to a multiple of {multiple}" if multiple > 1 else ""
    waits = f"{run.dp} copies of the model waiting for the longest" if run.dp > 1 else ""
    if group:
        alone += f" in the order of their lengths within {group}"
    return ", ".join(filter(None, (alone, " and ".join(filter(None, (longest, filled))), waits)))


def _rows_of_file(run: Run, options: Mapping[str, Any]) -> Rows:
    found = trained_data(options)
    if lays_flat(options):
        return flat_of_file(found, bytes_per_token(options), run, grouped=groups_rows(options))
    return _rows_of(found, bytes_per_token(options), run, groups_rows(options))


@lru_cache(maxsize=256)
def _rows_of(found: Dataset, per_token: Factor, run: Run, grouped: bool) -> Rows:
    """Rows of a file's samples, cut and filled up and in micro-batches as the run has them."""
    import numpy as np

    most, multiple = run.max_length, run.pad_to_multiple_of
    samples, lengths = found.pieces(per_token.value, most), np.array(found.lengths(per_token.value, most))
    if samples < 1:
        raise found.none_left(most)

    group = group_size(run, samples) if grouped else None

    def likely(size_bytes: float) -> tuple[Array, Array]:
        """Equally likely lengths of a copy's own rows, and of the rows waited for; none of no samples."""
        tokens = np.array(found.lengths(size_bytes, most), dtype=float)
        each = np.sort(np.ceil(tokens / multiple) * multiple)
        if not len(each):
            return each, each
        return _own_and_waited(lambda of: _likely_of_file(each, of, group), run, group)

    def work(size_bytes: float) -> int:
        """Tokens of a mean row, had the epoch as many rows as by the value."""
        waited = likely(size_bytes)[1]
        return round(whole(waited.mean()) * found.pieces(size_bytes, most) / samples) if len(waited) else 0

    known = per_token.low == per_token.high
    ends = () if known else (work(per_token.high), work(per_token.value), work(per_token.low))
    own, waited = likely(per_token.value)
    return Rows(
        length=whole(waited.mean()),
        own_length=whole(own.mean()),
        lengths=tuple(whole(length) for length in waited),
        mean_tokens=float(lengths.mean()),
        samples=samples,
        how=_how(run, group),
        shortest=min(ends, default=None),
        longest=max(ends, default=None),
    )


def _likely_of_file(each: Array, batch: int, group: int | None) -> Array:
    """(`LIKELY`,) equally likely lengths of the longest of `batch` samples of these lengths, which are sorted."""
    if group is None or batch >= group:
        return likely_longest(each, batch)
    return first_lengths(batch, group, length_in(each), LIKELY)


def held_run(run: Run, options: Mapping[str, Any]) -> Run:
    """The run at the longest row that it meets, whose memory is its peak: ``max_length``, filled up where rows are
    samples, or less where every sample of a data file is a row of its own and shorter.

    A file's longest sample is taken to have as many tokens as the low end of what is assumed of bytes per token says,
    below a tokenizer's mean as well: a dense sample has more tokens than its size says.
    """
    if packing_of(options) is not False:
        return timed_run(run, None)
    flat = unpacked_rows(run, options) if lays_flat(options) else None
    if flat is not None and flat.peak is not None:
        return replace(run, max_length=flat.peak)
    most = longest_row(run)
    if options.get("dataset") is None:
        return run if most == run.max_length else replace(run, max_length=most)
    found, per_token = read_dataset(str(options["dataset"])), bytes_per_token(options)
    assumed = bytes_per_token({})
    densest = 1.0 if found.tokenized else min(per_token.low, per_token.value * assumed.low / assumed.value)
    longest = min(filled(math.ceil(_largest(found) / densest), run), most) if found.whole else most
    return run if longest == run.max_length else replace(run, max_length=longest)


@lru_cache(maxsize=16)
def _largest(found: Dataset) -> int:
    return max(found.sizes_bytes)


def likely_runs(run: Run, rows: Rows | None) -> tuple[Run, ...]:
    """The run at every one of the equally likely lengths of its rows; at one where they are alike, or nothing is known
    of them."""
    if rows is None:
        return (timed_run(run, None),)
    return tuple(replace(run, max_length=length) for length in rows.lengths)


def timed_run(run: Run, rows: Rows | None) -> Run:
    """The run at the length of its mean row; rows of which nothing but padding is known are the longest."""
    length = rows.length if rows is not None else longest_row(run) if run.padding_mask else run.max_length
    return run if length == run.max_length else replace(run, max_length=length)


def own_run(run: Run, rows: Rows | None) -> Run:
    """The run at the length of a copy's own mean row, which is what it processes while it waits for longer ones."""
    return timed_run(run, None) if rows is None else replace(run, max_length=rows.own_length)


def row_notes(run: Run, rows: Rows | None, held: Run) -> tuple[str, ...]:
    """What is timed, how much of it is padding, and at which length memory is."""
    if rows is None:
        length = timed_run(run, None).max_length
        return (f"rows of {run.max_length} tokens are filled up to {length}",) if length > run.max_length else ()
    if rows.flat:
        waited = f"; a copy's own have {rows.own_length}" if rows.own_length < rows.length else ""
        largest = f"those of the largest micro-batch of {rows.micro_batches:,}, which the interval does not widen for"
        return (f"timed at {rows.length} tokens a sample ({rows.how}){waited}; memory at {held.max_length}, {largest}",)
    dearer = 1.0 / (1.0 - rows.own_padding_frac)
    counted = f", which tokens/s and $ per million tokens count (a token of the data costs {dearer:.2f} times as much)"
    counted = counted if rows.own_padding_frac >= LEAST_TOLD else ""
    waited = f"; a copy's own rows have {rows.own_length}" if rows.own_length < rows.length else ""
    padding = f"{rows.own_padding_frac:.0%} of them padding{counted}"
    told = f"timed at {rows.length} tokens a row ({rows.how}){waited}, {padding}"
    if held.max_length < longest_row(run):
        return (f"{told}; memory at {held.max_length}, which no sample is longer than",)
    return (f"{told}; memory at {held.max_length}" if rows.length < held.max_length else told,)
