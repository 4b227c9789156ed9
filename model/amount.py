"""How much data the job processes, and how many optimizer steps that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.bounds import check_sizes
from tunecast.model.counts import parse_count as parse_count
from tunecast.model.dataset import Dataset, bytes_per_token
from tunecast.model.factors import Factor
from tunecast.model.kept_samples import OF_DATA, SPLIT, long_samples
from tunecast.model.read_numbers import is_count, number_above_zero, number_that
from tunecast.model.row_lengths import Rows, waited_for
from tunecast.model.rows import (
    ROWS_FLAT,
    ROWS_GROUPED,
    ROWS_PACKED,
    alone_by_default,
    fills_rows,
    packing_of,
    timed_run,
    trained_data,
    unpacked_rows,
)
from tunecast.model.run import Run
from tunecast.model.step_count import full_frac, rows_per_step, steps_of

STEPS_AT_MOST, STEPS_EXACTLY = "steps_at_most", "steps_exactly"
AMOUNTS = ("tokens", "num_samples", "max_steps", "dataset")
"""Options that say how long training is, one of them at a time."""
OF_A_FILE = (STEPS_AT_MOST, STEPS_EXACTLY, "rows_padded", ROWS_PACKED, ROWS_GROUPED, *OF_DATA)
"""Options that nobody types: a training file's ``max_steps`` beside a typed amount of data, and whether it pads rows to
their full length or packs them, and which samples it trains."""


ALONE = ("one sample a row",)
"""What is assumed of rows where nobody said how they are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Optimizer steps of the whole job, with the sentence that says how they were counted."""

    steps: int
    how: str
    epochs: float = 1.0
    """Times that the same data are gone through; 1 where only steps are known."""
    least: float = 1.0
    """Tokens to process at the low end of what is assumed of the data, over those that are forecast."""
    most: float = 1.0
    """At the high end."""
    assumed: tuple[str, ...] = ()
    """What nobody said of the data, in words."""
    samples_per_row: float = 1.0
    """Samples that a row of ``max_length`` tokens holds, where they are packed and their lengths are known."""
    rows: float | None = None
    """Rows of one epoch; None where only steps are known, which are then full."""

    def full_frac(self, run: Run) -> float:
        """Work of all steps over that of as many full ones."""
        return 1.0 if self.rows is None else full_frac(run, self.rows, self.steps)


def resolve_amount(run: Run, options: dict[str, Any]) -> Amount | None:
    """Steps from the one given of ``max_steps``, ``tokens``, ``dataset`` and ``num_samples``; None without any.

    `tokens` are tokens of one epoch. Samples with `mean_tokens` are rows of their own unless `packing_of` says that
    they fill rows of ``max_length``; without it each sample is one row padded to ``max_length``.
    """
    check_sizes(options)
    _refuse_two(options)
    _check_mean(run, options)
    rows = unpacked_rows(run, options)
    found = _counted(run, options, rows)
    return found if found is None or rows is not None else replace(found, samples_per_row=_to_a_row(run, options))


def _to_a_row(run: Run, options: Mapping[str, Any]) -> float:
    """Samples in a row that they fill; 1 where nothing says how long they are."""
    mean = options.get("mean_tokens")
    if options.get("dataset") is not None:
        file = trained_data(options)
        mean = file.mean_tokens(bytes_per_token(options).value, run.max_length)
    return 1.0 if mean is None else run.max_length / parse_count(mean, name="--mean-tokens")


def _counted(run: Run, options: dict[str, Any], rows: Rows | None) -> Amount | None:
    """The amount, in rows of one sample each where there are `rows`."""
    epochs = options.get("num_train_epochs")
    repeats = 1.0 if epochs is None else number_above_zero("--num-train-epochs", epochs, "1 or 3")
    if options.get("max_steps") is not None:
        amount = _from_steps(options["max_steps"])
        alone = ALONE if alone_by_default(options) else ()
        if rows is None or rows.samples is not None:
            return replace(amount, assumed=alone)
        return _between(amount, rows, (*alone, *_length_words(rows)))
    found = _from_data(run, options, rows, repeats)
    return None if found is None else _ended(found, options, rows)


def _from_data(run: Run, options: dict[str, Any], rows: Rows | None, repeats: float) -> Amount | None:
    """Steps from an amount of data, gone through `repeats` times."""
    if rows is not None:
        amount = _from_rows(run, rows, options, repeats)
        if amount is None and options.get("num_train_epochs") is not None:
            raise InputError("--num-train-epochs needs an amount; add --tokens 10M or --num-samples 5000.")
        return amount
    padded = _padded_samples(options)
    if padded is not None:
        run = timed_run(run, None)
        what = f"{padded:,.0f} samples x {_epochs(repeats)}, each padded to {run.max_length} tokens"
        return _from_tokens(run, padded * run.max_length, what, repeats)
    if options.get("tokens") is not None:
        tokens = parse_count(options["tokens"], name="--tokens")
        found = _from_tokens(run, tokens, f"{tokens:,.0f} tokens x {_epochs(repeats)}", repeats)
        return padded_by(found, run, options)
    if options.get("dataset") is not None:
        return _from_dataset(run, options, repeats)
    if options.get("num_samples") is not None:
        return _from_samples(run, options, repeats)
    unused = packing_of(options) is not None and not options.get("padding_free")  # which asks how long documents are
    only_data = ("num_train_epochs", "mean_tokens") if unused else ("num_train_epochs",)
    alone = [name for name in only_data if options.get(name) is not None]
    if alone:
        flags = " and ".join("--" + name.replace("_", "-") for name in alone)
        need = "needs" if len(alone) == 1 else "need"
        raise InputError(f"{flags} {need} an amount; add --tokens 10M or --num-samples 5000.")
    return None


def padded_by(amount: Amount, run: Run, options: Mapping[str, Any]) -> Amount:
    """An amount of tokens with what padding may add in micro-batches of this run; others as they are."""
    if options.get("tokens") is None:
        return amount
    most = _most_padded(run, options)
    words = (f"no padding (to the longest of a batch: up to {most:.2g} times as many tokens)",) if most > 1.0 else ()
    return replace(amount, most=most, assumed=words)


def _most_padded(run: Run, options: Mapping[str, Any]) -> float:
    """Tokens with padding over those without, where a training file packs no rows, or samples are said to be padded,
    and nothing says how long they are: the mean of the longest of those that wait for each other (of a micro-batch, of
    copies of the model too) over that of all, of lengths spread as `rows` takes them where their mean alone is known
    (exponentially: the sum of 1 / k). 1 where rows are packed, end to end or of like lengths."""
    padded = bool(options.get("padding_mask")) or options.get(ROWS_PACKED) is False
    padded = padded and not options.get("packing")
    if not padded or options.get(ROWS_FLAT) or options.get(ROWS_GROUPED):
        return 1.0
    import numpy as np

    batch = run.per_device_train_batch_size
    own, of_all = (np.array([sum(1.0 / k for k in range(1, of + 1))]) for of in (batch, batch * run.dp))
    return float(waited_for(own, of_all, run)[0])


def _padded_samples(options: Mapping[str, Any]) -> float | None:
    """Samples of unknown lengths that a training file pads to ``max_length``; None where it does not, or where how
    many there are is not known."""
    if not fills_rows(options) or options.get("num_samples") is None:
        return None
    return parse_count(options["num_samples"], name="--num-samples")


def _check_mean(run: Run, options: Mapping[str, Any]) -> None:
    """Raise InputError for a mean length that no sample of this run can have."""
    if options.get("mean_tokens") is None:
        return
    mean = number_above_zero("--mean-tokens", options["mean_tokens"], "600")
    packed = packing_of(options) is not False
    if mean > run.max_length and long_samples(options, packed=packed) != SPLIT:
        raise InputError(
            f"--mean-tokens {mean:g} is above --max-length {run.max_length}, where samples are cut; raise --max-length "
            "or lower the mean (a training file whose packing splits long samples, TRL's packing_strategy: wrapped "
            "say, may have it)."
        )


def _between(amount: Amount, rows: Rows, assumed: tuple[str, ...]) -> Amount:
    """The amount with the work of the shortest and of the longest rows that what is `assumed` leaves open."""
    return replace(
        amount,
        least=(rows.shortest or rows.length) / rows.length,
        most=(rows.longest or rows.length) / rows.length,
        assumed=assumed,
    )


def _refuse_two(options: dict[str, Any]) -> None:
    given = [name for name in AMOUNTS if options.get(name) is not None]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise InputError(f"{flags} both set the amount of data; keep one of them.")
    if options.get("dataset") is not None and options.get("mean_tokens") is not None:
        raise InputError("--dataset and --mean-tokens both say how long samples are; keep one of them.")


def _epochs(repeats: float) -> str:
    return f"{repeats:g} epoch{'' if repeats == 1 else 's'}"


def steps_words(steps: int) -> str:
    return f"{steps:,} step{'' if steps == 1 else 's'}"


def _ended(amount: Amount, options: Mapping[str, Any], rows: Rows | None) -> Amount:
    """The same where a training file's ``max_steps`` ends the run: at most so many, or with the Trainer just so many,
    since it begins the data again until they are done (``Trainer._inner_training_loop``). How long rows of one sample
    are stays open."""
    most, exactly = options.get(STEPS_AT_MOST), options.get(STEPS_EXACTLY)
    steps = exactly if exactly is not None else most
    if steps is None or steps == amount.steps or (exactly is None and steps > amount.steps):
        return amount
    how = f"max_steps of the file, where {amount.how} would be {steps_words(amount.steps)}"
    ended = replace(amount, steps=steps, how=how, epochs=amount.epochs * steps / amount.steps)
    return replace(ended, least=1.0, most=1.0) if rows is None else ended


def _from_steps(asked: Any) -> Amount:
    steps = number_that("--max-steps", asked, is_count, "a whole number above 0", "500")
    return Amount(steps=int(steps), how="as asked")


def _from_tokens(run: Run, tokens: float, what: str, epochs: float) -> Amount:
    """Steps of `tokens` in each of some epochs, in full rows."""
    rows = tokens / run.max_length
    steps = steps_of(run, rows, epochs)
    how = f"{what}, {run.tokens_per_step:,} tokens per step{_rounded(run, rows, epochs, steps)}"
    return Amount(steps=steps, how=how, epochs=epochs, rows=rows)


def _rounded(run: Run, rows: float, epochs: float, steps: int) -> str:
    """That every epoch ends with a step of its own, where that makes more of them."""
    return ", rounded up in every epoch" if steps > math.ceil(rows * epochs / rows_per_step(run)) else ""


def _packed_words(options: Mapping[str, Any]) -> tuple[str, ...]:
    """That samples fill rows, where nobody said so."""
    return () if packing_of(options) else ("packing",)


def _packed(run: Run, options: Mapping[str, Any], samples: float, epochs: float) -> str:
    """That samples fill rows; where only the documents in them were spoken of, with the steps of rows of one sample
    each beside it."""
    if packing_of(options):
        own = options.get("packing") is None and options.get(ROWS_PACKED) is None
        return f"packed, as {options['stack']}'s data loader has it (--no-packing)" if own else "packed"
    steps = steps_of(run, samples, epochs)
    return f"packed, which is assumed (one sample a row: {steps_words(steps)}, --no-packing)"


def _alone(run: Run, options: Mapping[str, Any], tokens: float, epochs: float) -> str:
    """That samples are rows of their own where nobody said so, with the steps of full rows beside it; else nothing."""
    if not alone_by_default(options):
        return ""
    steps = steps_of(run, tokens / run.max_length, epochs)
    return (
        f", one sample a row, which is assumed, as {run.stack} has it unless told otherwise "
        f"(packed: {steps_words(steps)}, --packing)"
    )


def _of_bytes(found: Dataset, per_token: Factor) -> str:
    """How a file's tokens were counted: ``tokens of 3.9 bytes (assumed)``."""
    size = "" if found.tokenized else f" of {per_token.value:.3g} bytes"
    return f"tokens{size} ({per_token.origin})"


def _text_words(per_token: Factor) -> tuple[str, ...]:
    """How many bytes a token has, where no tokenizer counted."""
    if per_token.low == per_token.high:
        return ()
    return (f"{per_token.value:g} bytes a token ({per_token.low:g} to {per_token.high:g})",)


def _from_dataset(run: Run, options: Mapping[str, Any], repeats: float) -> Amount:
    """A file's samples, none longer than ``max_length``, packed; tokens by measured or assumed bytes per token."""
    found, per_token = trained_data(options), bytes_per_token(options)
    low, tokens, high = (
        found.tokens(size, run.max_length) for size in (per_token.high, per_token.value, per_token.low)
    )
    if tokens == 0:
        raise found.none_left(run.max_length)
    counted = f"{tokens:,.0f} {_of_bytes(found, per_token)}"
    what = (
        f"{found.name}: {found.samples:,} samples{found.fields_words}{found.read_words}, {counted}"
        f"{found.kept_words(per_token.value, run.max_length)}, x {_epochs(repeats)}, "
        f"{_packed(run, options, found.pieces(per_token.value, run.max_length), repeats)}"
    )
    return replace(
        _from_tokens(run, tokens, what, repeats),
        least=min(low, tokens, high) / tokens,
        most=max(low, tokens, high) / tokens,
        assumed=(*_packed_words(options), *_text_words(per_token)),
    )


def _from_rows(run: Run, rows: Rows, options: Mapping[str, Any], repeats: float) -> Amount | None:
    """Every sample is a row of its own."""
    samples = rows.samples
    if samples is None and options.get("num_samples") is not None:
        samples = parse_count(options["num_samples"], name="--num-samples")
    if samples is None and options.get("tokens") is not None:
        samples = parse_count(options["tokens"], name="--tokens") / rows.mean_tokens
    if samples is None:
        return None
    per_step, steps = rows_per_step(run), steps_of(run, samples, repeats)
    counted = bytes_per_token(options)
    file = None if options.get("dataset") is None else trained_data(options)
    fields = "" if file is None else file.fields_words + file.read_words + ("" if file.whole else ",")
    lengths = "" if file is None else f", {_of_bytes(file, counted)}{file.kept_words(counted.value, run.max_length)}"
    amount = Amount(
        steps=steps,
        rows=samples,
        how=f"{samples:,.0f} samples{fields} of {rows.mean_tokens:.0f} tokens x {_epochs(repeats)}, "
        f"{per_step} sample{'' if per_step == 1 else 's'} per step{_rounded(run, samples, repeats, steps)}{lengths}"
        f"{_alone(run, options, samples * rows.mean_tokens, repeats)}",
        epochs=repeats,
    )
    lengths_words = _text_words(counted) if rows.samples is not None else _length_words(rows)
    return _between(amount, rows, (*(ALONE if alone_by_default(options) else ()), *lengths_words))


def _length_words(rows: Rows) -> tuple[str, ...]:
    """How long rows are, where only the mean of samples is known."""
    if rows.shortest is None or rows.longest is None:
        return ()
    return (f"rows of {rows.length} tokens ({rows.shortest} to {rows.longest})",)


def _from_samples(run: Run, options: dict[str, Any], repeats: float) -> Amount:
    samples = parse_count(options["num_samples"], name="--num-samples")
    if options.get("mean_tokens") is None:
        if options.get("packing"):
            raise InputError("--packing needs the length of samples; add --mean-tokens N, or --dataset FILE.")
        padded = f"each padded to {run.max_length} tokens (no --mean-tokens given)"
        what = f"{samples:,.0f} samples x {_epochs(repeats)}, {padded}"
        full = _from_tokens(run, samples * run.max_length, what, repeats)
        return replace(full, assumed=(f"samples of {run.max_length} tokens",))
    mean = parse_count(options["mean_tokens"], name="--mean-tokens")
    what = f"{samples:,.0f} samples of {mean:g} tokens x {_epochs(repeats)}, {_packed(run, options, samples, repeats)}"
    return replace(_from_tokens(run, samples * mean, what, repeats), assumed=_packed_words(options))
