"""What a visitor asked: form fields, the link that holds them, and the command that says the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlencode

from tunecast.catalogs.errors import InputError

PATH_MARKS = (".json", ".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The form. Everything is text or a switch; empty means not given."""

    model: str = "meta-llama/Llama-3.1-8B"
    config: str = ""
    """A training file of axolotl, LLaMA-Factory or TRL, pasted; it takes the model's place."""
    method: str = "qlora"
    gpu: str = ""
    """Comma-separated; empty is all."""
    num_gpus: str = ""
    max_length: str = "2048"
    batch: str = "1"
    accumulation: str = ""
    checkpointing: bool = True
    tokens: str = "10M"
    usd_per_gpu_hour: str = ""


FLAGS = {
    "method": "--method",
    "num_gpus": "--num-gpus",
    "max_length": "--max-length",
    "batch": "--per-device-train-batch-size",
    "accumulation": "--gradient-accumulation-steps",
    "tokens": "--tokens",
    "usd_per_gpu_hour": "--usd-per-gpu-hour",
}
"""Fields that are options of ``estimate``."""
IN_A_FILE = ("method", "max_length", "batch", "accumulation")
"""Options that a pasted training file says itself."""
NUMBERS = {"num_gpus": int, "max_length": int, "batch": int, "accumulation": int, "usd_per_gpu_hour": float}


def from_query(query: Mapping[str, str]) -> Fields:
    """The fields of a link; unknown names are left out."""
    known = {field.name for field in fields(Fields)}
    given: dict[str, str | bool] = {name: value for name, value in query.items() if name in known}
    if "checkpointing" in given:
        given["checkpointing"] = given["checkpointing"] not in ("0", "false", "False", "")
    return Fields(**given)  # type: ignore[arg-type]


def link(asked: Fields) -> str:
    """The query that brings the same form back, from ``?`` on; a pasted file is too long for a link and left out."""
    usual = Fields()
    said = {field.name: getattr(asked, field.name) for field in fields(Fields) if field.name != "config"}
    changed = {name: value for name, value in said.items() if value != getattr(usual, name) or name == "model"}
    return "?" + urlencode({name: int(value) if isinstance(value, bool) else value for name, value in changed.items()})


def options(asked: Fields) -> dict[str, object]:
    """Options of `tunecast.estimate`; raises InputError that names the field for text that is no number."""
    names = {"batch": "per_device_train_batch_size", "accumulation": "gradient_accumulation_steps"}
    found: dict[str, object] = {}
    for name in FLAGS:
        text = str(getattr(asked, name)).strip()
        if text and not (asked.config.strip() and name in IN_A_FILE):
            found[names.get(name, name)] = _number(name, text)
    if not asked.config.strip():
        found["gradient_checkpointing"] = asked.checkpointing
    return found


def _number(name: str, text: str) -> object:
    kind = NUMBERS.get(name)
    if kind is None or (name == "num_gpus" and text == "auto"):
        return text
    try:
        return kind(text.replace(",", ""))
    except ValueError as error:
        raise InputError(f"{FLAGS[name]} is {text!r}, which is no number; type for example 2.") from error


def model_of(asked: Fields) -> str:
    """The model's name; paths are refused, because the page may run on somebody else's machine."""
    name = asked.model.strip()
    if not name:
        raise InputError("No model is given; type for example meta-llama/Llama-3.1-8B.")
    if name.startswith((".", "/", "~")) or name.lower().endswith(PATH_MARKS):
        raise InputError(f"{name!r} looks like a path; give a model's name, or paste a training file below.")
    return name


def gpus_of(asked: Fields) -> list[str]:
    """The GPUs asked for; devices of the machine that runs the page are refused."""
    names = [name.strip() for name in asked.gpu.split(",") if name.strip()]
    for name in names:
        if name == "cpu":
            raise InputError("The page forecasts cards that can be rented; for a CPU use the command line.")
    return names or ["all"]


def command(asked: Fields) -> str:
    """The command line that gives the same answer."""
    words = ["tunecast", "estimate", "config.yaml" if asked.config.strip() else model_of(asked)]
    for name, flag in FLAGS.items():
        text = str(getattr(asked, name)).strip()
        if text and not (asked.config.strip() and name in IN_A_FILE):
            words += [flag, text]
    if not asked.config.strip() and not asked.checkpointing:
        words.append("--no-gradient-checkpointing")
    for name in gpus_of(asked):
        words += ["--gpu", name] if name != "all" else []
    return shlex.join(words)
