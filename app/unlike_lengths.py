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

    Rows of samples that are all alike, and work as much more as that of rows of far more unlike samples; of a data file
    both ends of the bytes that a token is assumed to have; or documents of a packed row between which attention may be
    assumed to end.
    """
    from tunecast.model.documents import ends_of

    told = _of_amount(question, run) if metric in OF_WHOLE_RUN else None
    if told is not None:
        return told
    documents = ends_of(run, question.options)
    if documents is None or documents[0].attention_length is None:
        return None
    reached = [str(end.attention_length) for end in documents]
    low, high = (
        {"attention_length": end.attention_length, "mean_tokens": None, **_as_many_tokens(question)}
        for end in documents
    )
    return (reached[0], reached[1]), low, high


def _of_amount(question: Question, run: Run) -> tuple[tuple[str, str], Settings, Settings] | None:
    """Ends by the work that the lengths of rows leave open (`Amount.least`, `most`); None where they are known."""
    from tunecast.model.amount import resolve_amount
    from tunecast.model.dataset import bytes_per_token

    amount, rows = resolve_amount(run, dict(question.options)), rows_asked(question, run)
    if amount is None or amount.least == amount.most:
        return None
    if question.options.get("dataset") is not None:
        per_token = bytes_per_token(question.options)
        few, many = f"{per_token.high:g} bytes a token", f"{per_token.low:g} bytes a token"
        return (few, many), _work(question, amount.least), _work(question, amount.most)
    if rows is None or rows.shortest is None:
        return None
    alike = {"max_length": rows.shortest, "mean_tokens": rows.shortest, **_as_many_samples(question)}
    return (f"rows of {rows.shortest}", f"rows of {rows.longest}"), alike, _work(question, amount.most)


def _work(question: Question, share: float) -> Settings:
    """So many times as many steps: rows that many times as long take as long."""
    steps = _count(question, "max_steps")
    if steps is not None:
        return {"max_steps": max(round(steps * share), 1)}
    return {"num_train_epochs": float(question.options.get("num_train_epochs") or 1.0) * share}


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
