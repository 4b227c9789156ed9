"""How rows are made, as the fields of a training file: padded, end to end, in the order of their lengths, cut."""

from __future__ import annotations

from typing import Any

from tunecast.model.run import Run

Mapped = dict[str, Any]
FLAT_FIELDS: dict[str, Mapped] = {
    "trl": {"packing": False, "packing_strategy": None, "padding_free": True},
    "axolotl": {"sample_packing": False, "pad_to_sequence_len": None, "batch_flattening": True},
}
"""Fields that lay the samples of a micro-batch end to end (`flat_rows`)."""
GROUPED_FIELDS: dict[str, Mapped] = {
    "trl": {"train_sampling_strategy": "group_by_length"},
    "axolotl": {"group_by_length": True},
    "llama-factory": {"train_sampling_strategy": "group_by_length"},
}
"""Fields that sort samples by length (`grouped_rows`), as of transformers 5 where the format is its own."""


def rows_alone(kind: str, run: Run, *, grouped: bool) -> Mapped:
    """What rows of one sample each have in place of packed ones, filled to the run's multiple where the format can,
    and `grouped` by their lengths or as they come."""
    return {**_made(kind, run), **(GROUPED_FIELDS[kind] if grouped else {})}


def _made(kind: str, run: Run) -> Mapped:
    multiple = run.pad_to_multiple_of
    if run.samples_unevenness is not None:
        return FLAT_FIELDS[kind]
    if kind == "trl":
        return {"packing": False, "packing_strategy": None, "pad_to_multiple_of": multiple if multiple > 1 else None}
    if kind == "axolotl":  # true fills all rows alike, false none, and without it every one to axolotl's multiple
        filled = multiple >= run.max_length
        return {"sample_packing": False, "pad_to_sequence_len": filled or (False if multiple == 1 else None)}
    return {"packing": False, "neat_packing": None, "cutoff_len": run.max_length}


def long_cut(kind: str, *, packed: bool) -> Mapped:
    """Fields by which samples that are longer than a row are cut, as the forecast counts them: TRL's packing goes on
    with them in the next row unless it is ``bfd``, axolotl leaves them out."""
    if kind == "axolotl":
        return {"excess_length_strategy": "truncate"}
    return {"packing_strategy": "bfd"} if kind == "trl" and packed else {}
