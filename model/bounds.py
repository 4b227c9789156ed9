"""Sizes that mean something: beyond them an option is refused with its bound, not computed until a number overflows;
and words where there must be words.

Bounds are far outside anything that was ever done (the longest context, the largest cluster, the largest corpus), so
that they only catch slips of the keyboard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.read_numbers import as_number
from tunecast.model.run import Run
from tunecast.model.units import GIGA, MEGA, TERA

MOST_AMOUNT = MEGA * TERA
"""Tokens or samples: the largest corpora have some 10**14 tokens."""
MOST_USD_PER_H = MEGA
LEAST_MINUTES = 1e-3
"""Between checkpoints."""
MOST_MINUTES = 100 * MEGA
"""Of a phase: about 190 years."""
MOST_RATE = 1000 * TERA
"""Of a phase, in the unit of its name."""
MOST_OTHER = TERA
"""Of what is around training: watts, dollars, days."""
MOST_CHUNKS_WRITTEN = 8192
"""Chunks of a loss that are written down one by one."""

WHOLE: Mapping[str, int] = {
    "max_length": 10**8,
    "attention_length": 10**8,
    "per_device_train_batch_size": 10**6,
    "gradient_accumulation_steps": 10**7,
    "num_gpus": 10**6,
    "gpus_per_node": 10**6,
    "dp_shard_size": 10**6,
    "tp": 10**6,
    "pp": 10**6,
    "cp": 10**6,
    "pp_interleave": 10**6,
    "checkpoint_every": 10**6,
    "checkpoint_first": 10**6,
    "gptq_group_size": 10**9,
    "dataloader_num_workers": 10**5,
    "max_steps": 10**15,
    "max_gpus": 10**6,
    "global_batch": 10**7,
}
"""Largest value of each whole number."""
REAL: Mapping[str, tuple[float, float]] = {
    "num_train_epochs": (1e-6, MEGA),
    "internode_gbps": (1e-3, MEGA),
    "host_update_gb_per_s": (1e-3, MEGA),
    "mean_tokens": (1.0, GIGA),
    "bytes_per_token": (1e-3, MEGA),
}
"""Least and largest value of each other number."""

SEVERAL = "tuple[str, ...]"
WORDS = {
    field.name: str(field.type)
    for field in dataclasses.fields(Run)
    if field.type in ("str", "str | None", SEVERAL) and field.name != "offload"
}
"""Fields that hold text, by their types; ``--offload`` is a switch too."""


SWITCHES = (
    *(field.name for field in dataclasses.fields(Run) if field.type in ("bool", "bool | None")),
    "packing", "group_by_length", "padding_free", "streaming", "nvlink", "p2p", "allow_long_context",
)  # fmt: skip
"""Options that are on or off."""


def check_switches(options: Mapping[str, Any]) -> None:
    """Refuse anything but True and False for a switch: any text would count as on."""
    for name in SWITCHES:
        check_switch(name, options.get(name))


def check_switch(name: str, value: Any) -> None:
    """Raise InputError for a switch that is neither on nor off, nor left out."""
    if value is not None and value is not True and value is not False:
        raise InputError(f"{_flag(name)} is {value!r}, but it is a switch; give True or False, without quotes.")


def check_sizes(options: Mapping[str, Any]) -> None:
    """Raise InputError for the first option beyond its bounds; what is no number is left to its own reader."""
    for name, given in options.items():
        value = as_number(given)
        if value is None:
            continue
        if name in WHOLE and value > WHOLE[name]:
            raise InputError(f"{_flag(name)} is {value:,.10g}, beyond {WHOLE[name]:,}, the most that is forecast.")
        least, most = REAL.get(name, (value, value))
        if not least <= value <= most and value > 0:
            raise InputError(f"{_flag(name)} is {value:g}, which is not between {least:g} and {most:,.0f}.")


def check_words(options: Mapping[str, Any]) -> None:
    """Refuse anything but text where a field of the run takes a word, or several."""
    for name, value in options.items():
        kind = WORDS.get(name)
        if value is None or kind is None or isinstance(value, str):
            continue
        if kind != SEVERAL or not isinstance(value, Iterable):
            raise InputError(f"{_flag(name)} is {value!r}, which is no text; type it in quotes, or leave it out.")


def at_most(flag: str, value: float, most: float) -> float:
    """`value`, unless it is beyond `most`."""
    if value > most:
        raise InputError(f"{flag} is {value:,.10g}, beyond {most:,.0f}, the most that is forecast.")
    return value


def check_chunks(chunks: int, run: Run) -> None:
    """Refuse a loss in more chunks than are written down."""
    if chunks > MOST_CHUNKS_WRITTEN:
        raise InputError(
            f"The loss of {run.per_device_train_batch_size:,} x {run.max_length:,} tokens takes {chunks:,} chunks with "
            f"--stack {run.stack} and --loss-type {run.loss_type}, and at most {MOST_CHUNKS_WRITTEN:,} are forecast; "
            "lower --per-device-train-batch-size or --max-length."
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
