"""What is not known of the lengths of samples, as ends that a tornado moves a run between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunecast.model.question import Question
    from tunecast.model.row_lengths import Rows
    from tunecast.model.run import Run

LENGTHS = "lengths of samples"
OF_WHOLE_RUN = ("cost", "time", "train")
"""Metrics that samples of other lengths move: memory is that of the longest row however the others are, and tokens/s
count the padding that they have."""
TOLD_PADDING = 0.02
"""Share of padding from which tokens/s are worth a word."""

Settings = dict[str, Any]


def rows_asked(question: Question, run: Run) -> Rows | None:
    """Rows of one sample each, as asked; None where samples are packed, or nothing is said of them."""
    from tunecast.model.rows import unpacked_rows

    return unpacked_rows(run, question.options)


def length_ends(question: Question, run: Run, metric: str) -> tuple[tuple[str, str], Settings, Settings] | None:
    """(labels, settings at the low end, at the high end) of lengths of which the mean alone is known; None where they
    are known, or the metric does not look at them.

    Rows of samples that are all alike, and rows as long as those of far more unlike samples, of as many samples; or
    documents of a packed row between which attention may be assumed to end.
    """
    from tunecast.model.documents import ends_of

    rows = rows_asked(question, run)
    if rows is not None and rows.shortest is not None and rows.longest is not None and metric in OF_WHOLE_RUN:
        ends = (rows.shortest, rows.longest)
        low, high = ({"max_length": length, "mean_tokens": length, **_as_many_samples(question)} for length in ends)
        return (f"rows of {ends[0]}", f"rows of {ends[1]}"), low, {**high, "padding_mask": run.padding_mask}
    documents = ends_of(run, question.options)
    if documents is None or documents[0].attention_length is None:
        return None
    reached = [str(end.attention_length) for end in documents]
    low, high = (
        {"attention_length": end.attention_length, "mean_tokens": None, **_as_many_tokens(question)}
        for end in documents
    )
    return (reached[0], reached[1]), low, high


def _as_many_samples(question: Question) -> Settings:
    """As many samples whatever their length, where the amount is told in tokens."""
    tokens = _count(question, "tokens")
    return {} if tokens is None else {"tokens": None, "num_samples": tokens / _mean_tokens(question)}


def _as_many_tokens(question: Question) -> Settings:
    """As many tokens whatever documents they make, where the amount is told in samples."""
    samples = _count(question, "num_samples")
    return {} if samples is None else {"num_samples": None, "tokens": samples * _mean_tokens(question)}


def _count(question: Question, option: str) -> float | None:
    from tunecast.model.amount import parse_count

    asked = question.options.get(option)
    return None if asked is None else parse_count(asked, name=f"--{option.replace('_', '-')}")


def _mean_tokens(question: Question) -> float:
    return float(question.options["mean_tokens"])


def padding_note(question: Question, run: Run) -> tuple[str, ...]:
    """That tokens/s of padded rows compare only runs with as much padding."""
    rows = rows_asked(question, run)
    if rows is None or rows.flat or rows.own_padding_frac < TOLD_PADDING:
        return ()
    note = (
        "tokens/s count padding, of which larger micro-batches have more, and copies wait for the longest rows: time "
        "and cost say what is faster"
    )
    return (note,)
