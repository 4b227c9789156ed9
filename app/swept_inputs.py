"""Inputs that a sweep can vary, and what their values may be."""

from __future__ import annotations

import math
from typing import Any

from tunecast.catalogs.errors import InputError, UnknownNameError
from tunecast.model.other_names import what_to_type

WHOLE, NUMBER, SWITCH, TEXT, NUMBER_OR_TEXT = "whole", "number", "switch", "text", "number or text"
SPECIAL = {"model": TEXT, "mfu": NUMBER, "disk_mb_per_s": NUMBER, "load_efficiency": NUMBER}
"""Inputs of a sweep that are no options of ``estimate``: the model itself, model-FLOP utilisation in place of the time
model, the rate of the disk that weights are read from, and the share of that rate which loading reaches."""
AROUND_THE_RUN = {
    "tokens": TEXT, "num_samples": TEXT, "mean_tokens": NUMBER, "num_train_epochs": NUMBER, "max_steps": WHOLE,
    "dataset": TEXT, "packing": SWITCH, "group_by_length": SWITCH, "padding_free": SWITCH,
    "bytes_per_token": NUMBER, "streaming": SWITCH,
    "dataloader_num_workers": WHOLE, "internode_gbps": NUMBER, "nvlink": SWITCH, "p2p": SWITCH,
    "host_update_gb_per_s": NUMBER, "serial_fraction": NUMBER,
    "usd_per_gpu_hour": NUMBER, "achieved_tflops": NUMBER,
}  # fmt: skip
"""Options that are no field of a run or of what is around it."""
WRITTEN_OTHERWISE = {"reduce_bucket_size": NUMBER_OR_TEXT, "eval_samples": TEXT}
"""Fields that hold a number, whose option takes a word as well (``auto``, ``5k``)."""
ON, OFF = ("true", "on", "yes"), ("false", "off", "no")


def parse_over(text: str) -> tuple[str, list[Any]]:
    """``NAME=V1,V2,...`` as an input and its values; raises InputError with what can be swept."""
    name, _, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    words = [word.strip() for word in values.split(",") if word.strip()]
    if not words:
        raise InputError(f"--over {text!r} has no values; type for example --over max_length=1024,2048,4096.")
    if name == "gpu":
        raise InputError("A sweep looks at one GPU; tunecast estimate takes --gpu several times and compares cards.")
    kinds = sweepable()
    if name not in kinds:
        instead = what_to_type(name, kinds, lambda option, value: f"{option}={value}" if value else option)
        raise UnknownNameError(
            "input of a sweep",
            name,
            kinds,
            hint="Options of the run and of what is around it, model and mfu can be.",
            instead=instead,
        )
    return name, [_typed(name, kinds[name], word) for word in words]


def sweepable() -> dict[str, str]:
    """Every input that a sweep can change, with what its values are."""
    from dataclasses import fields

    from tunecast.model.run import BY_CARD, BY_DATA, Run
    from tunecast.model.whole_run_options import WholeRunOptions

    own = {field.name: kind_of(str(field.type)) for field in fields(Run) if field.name not in (*BY_CARD, *BY_DATA)}
    own |= {field.name: kind_of(str(field.type)) for field in fields(WholeRunOptions)}
    named = {name: kind for name, kind in own.items() if kind}
    return {**SPECIAL, **named, **WRITTEN_OTHERWISE, **AROUND_THE_RUN}


def kind_of(annotation: str) -> str:
    """What the values of a field of this type are; empty where one of them cannot be written between two commas."""
    words = {word.strip() for word in annotation.split("|")} - {"None"}
    if words == {"float", "str"}:
        return NUMBER_OR_TEXT
    kinds = {"bool": SWITCH, "int": WHOLE, "float": NUMBER, "str": TEXT, "tuple[str, ...]": TEXT}
    return kinds.get(words.pop(), "") if len(words) == 1 else ""


def _typed(name: str, kind: str, word: str) -> Any:
    """A value as its input wants it; counts such as 10M stay text."""
    if kind == TEXT:
        return word
    if kind == SWITCH:
        if word.lower() not in (*ON, *OFF):
            raise InputError(f"--over {name} has the value {word}, but it is on or off; type --over {name}=on,off.")
        return word.lower() in ON
    number = _number(word)
    if number is None and kind == NUMBER_OR_TEXT:
        return word
    if number is None or (kind == WHOLE and not number.is_integer()):
        wanted = "a whole number" if kind == WHOLE else "a number"
        raise InputError(f"--over {name} has the value {word}, but it must be {wanted}.")
    return int(number) if number.is_integer() and kind != NUMBER else number


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
