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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.dataset import bytes_per_token
from tunecast.model.flat_rows import MOST_UNEVEN, lengths_of_mean, unevenness_of
from tunecast.model.kept_samples import SPLIT, long_samples, pieces
from tunecast.model.read_numbers import as_number, whole_number
from tunecast.model.resolve import ASSUMED
from tunecast.model.resolve_delta import has_linear_attention
from tunecast.model.rows import ROWS_FLAT, lays_flat, says_lengths, trained_data
from tunecast.model.run import Run
from tunecast.model.sample_lengths import scale_of
from tunecast.model.stack_versions import asked_versions
from tunecast.model.stacks import load_stacks
from tunecast.model.versions import in_range

Number = TypeVar("Number", int, float)


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
    """What the options say of the documents in a packed row; None where a row is one document, or one micro-batch
    (`flat_rows`).

    Raises InputError where ``--padding-free`` comes without lengths; where a training file said so (`from_file`), rows
    are then of one document, as with attention that keeps none apart.
    """
    if not options.get("padding_free") or lays_flat(options):
        return None
    apart = str(options.get("attn_implementation")).startswith("flash")
    if from_file and (options.get("packing") is False or not says_lengths(options) or not apart):
        return None
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
    length, ends, how = _by_file(options, max_length, lambda lengths: max(round(reach(lengths)), 1))
    return Documents(length=length, how=how, shortest=min(ends, default=None), longest=max(ends, default=None))


def _by_file(
    options: Mapping[str, Any], max_length: int, told: Callable[[tuple[int, ...]], Number]
) -> tuple[Number, tuple[Number, ...], str]:
    """(what the lengths of a file's samples tell, the same at every size that a token may have, in words); the second
    is empty where that is known."""
    found, per_token = trained_data(options), bytes_per_token(options)
    sizes = (per_token.low, per_token.value, per_token.high)
    ends = tuple(told(found.lengths(size, max_length) or (1,)) for size in sizes)  # cuts turn them
    how = f"samples of {found.name}, tokens of {per_token.value:.3g} bytes ({per_token.origin})"
    return ends[1], () if per_token.low == per_token.high else ends, how


@dataclass(frozen=True, slots=True, kw_only=True)
class Unevenness:
    """Of samples laid end to end: the mean of their squared lengths over their squared mean."""

    value: float
    how: str
    least: float | None = None
    """At the low end of what is assumed of the data; None: nothing is."""
    most: float | None = None
    """At the high end."""


def unevenness_in(options: Mapping[str, Any], max_length: int) -> Unevenness | None:
    """What the options say of samples that are laid end to end; None where they are not."""
    if not lays_flat(options):
        return None
    if options.get("dataset") is None:
        mean = as_number(options["mean_tokens"])
        if mean is None or not 1.0 <= mean <= max_length:
            return None  # `rows.unpacked_rows` says what is wrong
        value = unevenness_of(lengths_of_mean(mean, max_length))
        most = max(min(MOST_UNEVEN, max_length / mean), value)
        how = f"of samples only the mean of {mean:g} tokens is known, so their lengths are assumed to be exponential"
        return Unevenness(value=value, how=how, least=1.0, most=most)
    value, ends, how = _by_file(options, max_length, unevenness_of)
    return Unevenness(value=value, how=how, least=min(ends, default=None), most=max(ends, default=None))


def _row_asked(options: Mapping[str, Any]) -> int:
    return whole_number("max_length", options.get("max_length") or ASSUMED["max_length"])


FLAT_NOTE = (
    "{title} lays the samples of a micro-batch end to end unless told otherwise; --no-padding-free pads them, as its "
    "newest versions do where the host bounds the steps of a long run."
)


def flat_by_stack(architecture: Architecture, options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The option that a stack's trainer adds where samples are rows of their own, and a note; nothing where it, in the
    version asked for, or the model does not."""
    name = str(options.get("stack"))
    fact = load_stacks().get(name, {}).get("flat_rows")
    if fact is None or architecture.model_type in fact["not"] or has_linear_attention(architecture):
        return {}, ()
    version = asked_versions(name, options.get("stack_version")).get(name, "").rpartition(",")[2].lstrip("<>=")
    if version and not in_range(version, fact["versions"]):
        return {}, ()
    if options.get("packing") and options.get("padding_free") is None and says_lengths(options):
        return {"padding_free": True}, ()  # its packed rows are of samples that attention keeps apart, too
    added = {ROWS_FLAT: True}
    told = lays_flat({**options, **added}) and not options.get("padding_free")
    return added, (FLAT_NOTE.format(title=load_stacks()[name]["title"]),) if told else ()


def with_documents(
    run_options: dict[str, Any], options: Mapping[str, Any], origins: Mapping[str, str]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Run options with how far attention reaches, where what is known of the data says it; and all origins.

    Raises InputError where ``--attention-length`` comes with rows of one sample each."""
    if run_options.get("samples_unevenness") is not None:
        raise InputError(
            "samples_unevenness is no option: it is worked out from --dataset or --mean-tokens; leave it out."
        )
    if run_options.get("attention_length") is not None:
        if options.get("packing") is False:
            raise InputError(
                "--attention-length is about documents in packed rows, but --no-packing makes every sample a row; "
                "leave one of them out."
            )
        return run_options, origins
    length = _row_asked(run_options)
    flat = unevenness_in(options, length)
    found = documents_of(options, length, from_file=origins.get("padding_free") == "file")
    if flat is not None:
        name, value, sure = "samples_unevenness", round(flat.value, 4), flat.least is None
    elif found is not None:
        name, value, sure = "attention_length", found.length, found.shortest is None
    else:
        return run_options, origins
    return {**run_options, name: value}, {**origins, name: "cli" if sure else "assumed"}


def ends_of(run: Run, options: Mapping[str, Any]) -> tuple[Run, Run] | None:
    """The run with the shortest and the longest documents that are assumed possible; None where nothing is assumed."""
    if run.samples_unevenness is not None:
        flat = unevenness_in(options, _row_asked(options))
        if flat is None or flat.least is None or flat.most is None:
            return None
        return replace(run, samples_unevenness=flat.least), replace(run, samples_unevenness=flat.most)
    if run.attention_length is None or options.get("attention_length") is not None:
        return None
    found = documents_of(options, run.max_length)
    if found is None or found.shortest is None or found.longest is None:
        return None
    return replace(run, attention_length=found.shortest), replace(run, attention_length=found.longest)


def document_notes(run: Run, options: Mapping[str, Any]) -> tuple[str, ...]:
    """How far attention was taken to reach, and why."""
    flat = unevenness_in(options, _row_asked(options)) if run.samples_unevenness is not None else None
    if flat is not None:
        between = "" if flat.least is None else f" ({flat.least:.2g} to {flat.most:.2g})"
        of_samples = f"whose mean square is {flat.value:.3g}{between} times their squared mean"
        return (f"attention keeps samples apart, {of_samples}: {flat.how}",)
    if run.attention_length is None or options.get("attention_length") is not None:
        return ()
    found = documents_of(options, run.max_length)
    if found is None:
        return ()
    between = "" if found.shortest is None else f" ({found.shortest} to {found.longest})"
    told = f"attention spans {found.length} tokens of a packed row of {run.max_length}{between}: {found.how}"
    return (told,)
