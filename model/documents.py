"""How far attention reaches in packed rows whose documents are kept apart ("padding-free" training).

Kernels that are told where documents begin (``flash_attn_varlen_func``, Transformer Engine's THD layout) mix tokens of
one document only: TRL's ``padding_free``, axolotl's ``sample_packing``, LLaMA-Factory's ``neat_packing``. A document of
l tokens has l^2 / 2 pairs, so a row of many has as many pairs as one of documents that are all

    mean of l^2 / mean of l

tokens long: `Run.attention_length`. With a file of data its samples say both means. Where only the mean m is known,
lengths are taken as in `sample_lengths`: exponential, cut at ``max_length``, 2 m where few are cut; the interval goes
from m, all alike, to 4 m (a log-normal of log deviation 1.18; conversations are rarely more uneven).
Left out: what finding the documents' ends costs beyond `attention_blocks.look_for_packing`, and gaps at a row's end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.dataset import bytes_per_token
from tunecast.model.kept_samples import SPLIT, long_samples, pieces
from tunecast.model.read_numbers import as_number
from tunecast.model.rows import trained_data
from tunecast.model.run import Run
from tunecast.model.sample_lengths import scale_of

MOST_UNEVEN = 4.0
"""Mean of squares over the squared mean, at the high end of what is assumed of lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Tokens that attention spans in a packed row, in the mean of its pairs."""

    length: int
    how: str
    shortest: int | None = None
    """At the low end of what is assumed of the data; None: nothing is."""
    longest: int | None = None


def reach(lengths: Sequence[float]) -> float:
    """Mean of squares over mean: the length of equal documents with as many pairs per token."""
    return sum(length * length for length in lengths) / sum(lengths)


def reach_of_mean(mean: float, cut: float) -> float:
    """`reach` of exponential lengths with this mean, cut at `cut`: the integral of 2 x exp(-x / s), over the mean."""
    if mean >= cut:
        return cut
    scale = scale_of(mean, cut)
    return 2.0 * scale * (scale - math.exp(-cut / scale) * (scale + cut)) / mean


def reach_of_split(mean: float, cut: float) -> float:
    """`reach` of exponential lengths with this mean in pieces of `cut` and a rest: what is left of a sample after a
    piece is as long as a new one, so that pieces are samples of the same scale that were cut."""
    inside = -math.expm1(-cut / mean)
    return 2.0 * (mean - cut * (1.0 - inside) / inside) if inside else cut


def documents_of(options: Mapping[str, Any], max_length: int, *, from_file: bool = False) -> Documents | None:
    """What the options say of the documents in a packed row; None where a row is one document.

    Raises InputError where ``--padding-free`` comes without lengths, NotSupportedError where rows are not packed;
    where a training file said so (`from_file`), rows are then of one document, as with attention that keeps none apart.
    """
    said = any(options.get(name) is not None for name in ("dataset", "mean_tokens"))
    if not options.get("padding_free"):
        return None
    apart = str(options.get("attn_implementation")).startswith("flash")
    if from_file and (options.get("packing") is False or not said or not apart):
        return None
    if options.get("packing") is False:
        raise NotSupportedError(
            "--padding-free with --no-packing, rows of changing length without padding, is not built yet; "
            "leave one of them out."
        )
    if options.get("dataset") is not None:
        return _of_file(options, max_length)
    if options.get("mean_tokens") is None:
        raise InputError(
            "--padding-free counts attention inside documents, whose length nothing says; "
            "add --dataset FILE, or --mean-tokens N."
        )
    mean = as_number(options["mean_tokens"])
    if mean is None or mean < 1.0:
        raise InputError(
            f"--mean-tokens is {options['mean_tokens']!r}, but a sample has at least 1; type for example 500."
        )
    split = long_samples(options, packed=True) == SPLIT
    if mean == max_length and not split:
        return Documents(length=max_length, how=f"samples of {mean:g} tokens in the mean, none longer, are all a row")
    alike = reach(pieces(round(mean), max_length, SPLIT)) if split else min(mean, max_length)
    spread = reach_of_split(mean, max_length) if split else reach_of_mean(alike, max_length)
    length = min(max(round(spread), 1), max_length)
    return Documents(
        length=length,
        how=f"of documents only the mean of {mean:g} tokens is known, so their lengths are assumed to be exponential",
        shortest=min(round(alike), length),
        longest=min(round(MOST_UNEVEN * mean), max_length),
    )


def _of_file(options: Mapping[str, Any], max_length: int) -> Documents:
    found, per_token = trained_data(options), bytes_per_token(options)

    def length(size_bytes: float) -> int:
        return max(round(reach(found.lengths(size_bytes, max_length) or (1,))), 1)

    known = per_token.low == per_token.high
    ends = [length(size_bytes) for size_bytes in (per_token.low, per_token.value, per_token.high)]  # cuts turn them
    return Documents(
        length=length(per_token.value),
        how=f"samples of {found.name}, tokens of {per_token.value:.3g} bytes ({per_token.origin})",
        shortest=None if known else min(ends),
        longest=None if known else max(ends),
    )


def ends_of(run: Run, options: Mapping[str, Any]) -> tuple[Run, Run] | None:
    """The run with the shortest and the longest documents that are assumed possible; None where nothing is assumed."""
    if run.attention_length is None or options.get("attention_length") is not None:
        return None
    found = documents_of(options, run.max_length)
    if found is None or found.shortest is None or found.longest is None:
        return None
    return replace(run, attention_length=found.shortest), replace(run, attention_length=found.longest)


def document_notes(run: Run, options: Mapping[str, Any]) -> tuple[str, ...]:
    """How far attention was taken to reach, and why."""
    if run.attention_length is None or options.get("attention_length") is not None:
        return ()
    found = documents_of(options, run.max_length)
    if found is None:
        return ()
    between = "" if found.shortest is None else f" ({found.shortest} to {found.longest})"
    told = f"attention spans {found.length} tokens of a packed row of {run.max_length}{between}: {found.how}"
    return (told,)
