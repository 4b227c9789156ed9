"""What a visitor asked: form fields, the link that holds them, and the command that says the same."""

from __future__ import annotations

import base64
import binascii
import shlex
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from urllib.parse import urlencode

from tunecast.catalogs.errors import InputError

PATH_MARKS = (".json", ".yaml", ".yml")
FILE_PART = "file"
"""Part of a link that holds a pasted training file: deflated, in base64 of the URL alphabet."""
LONGEST_FILE_PART = 6000
"""Characters of it: with the other fields below the 8,000 that servers and browsers are to take (RFC 9110, 4.1)."""
LONGEST_FILE = 200_000
"""Characters of a file that a link may unfold to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The form. Everything is text or a switch; empty means not given."""

    model: str = "meta-llama/Llama-3.1-8B"
    config: str = ""
    """A training file of one of the five frameworks, pasted; it takes the model's place."""
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
    """The fields of a link, with the catalogs' own names; unknown fields are left out.

    Raises InputError for a training file that cannot be unpacked.
    """
    known = {field.name for field in fields(Fields)} - {"config"}
    given: dict[str, str | bool] = {name: value for name, value in query.items() if name in known}
    if "checkpointing" in given:
        given["checkpointing"] = given["checkpointing"] not in ("0", "false", "False", "")
    if query.get(FILE_PART):
        given = {"tokens": "", **given, "config": unpacked(query[FILE_PART])}
    return canonical(Fields(**given))  # type: ignore[arg-type]


def canonical(asked: Fields) -> Fields:
    """The form with full names for short ones, as its menus have them; what no catalog has stays as it is."""
    from tunecast.catalogs.gpus import find_gpu

    cards = [_full_name(lambda name: find_gpu(name).id, name) for name in _listed(asked.gpu)]
    return replace(
        asked,
        model=_full_name(_same_model, asked.model.strip()),
        gpu=",".join(dict.fromkeys(cards)),
        method=asked.method.strip().lower(),
    )


def _same_model(name: str) -> str:
    """The hub id of a model, unless another of the same shape stands for it in the catalog."""
    from tunecast.catalogs.models import find_model

    found = find_model(name).hf_id
    return found if found.lower().endswith(name.lower()) else name


def _full_name(found: Callable[[str], str], name: str) -> str:
    try:
        return found(name)
    except InputError:
        return name  # the answer says that no catalog has it


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def link(asked: Fields) -> str:
    """The query that brings the same form back, from ``?`` on; raises InputError where a pasted file is too long."""
    usual = Fields()
    left_out = ("config", "model", *IN_A_FILE, "checkpointing") if asked.config.strip() else ("config",)
    said = {field.name: getattr(asked, field.name) for field in fields(Fields) if field.name not in left_out}
    if asked.config.strip():
        said[FILE_PART] = packed(asked.config)
        usual = replace(usual, tokens="")
    changed = {n: value for n, value in said.items() if value != getattr(usual, n, None) or n == "model"}
    return "?" + urlencode({name: int(value) if isinstance(value, bool) else value for name, value in changed.items()})


def packed(text: str) -> str:
    """A training file as a part of a link; raises InputError where it is too long for one."""
    found = base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii").rstrip("=")
    if len(found) > LONGEST_FILE_PART or len(text) > LONGEST_FILE:
        raise InputError(
            f"The pasted file makes a link of {len(found):,} characters, and more than {LONGEST_FILE_PART:,} do not "
            "travel well; save it as config.yaml and send it with the command below."
        )
    return found


def unpacked(part: str) -> str:
    """The training file of a link; raises InputError where the link was cut or changed."""
    try:
        data = base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
        unfolding = zlib.decompressobj()
        text = unfolding.decompress(data, LONGEST_FILE * 4).decode("utf-8")
    except (binascii.Error, zlib.error, UnicodeDecodeError) as error:
        raise _cut_link() from error
    if not unfolding.eof:
        raise _cut_link()
    return text


def _cut_link() -> InputError:
    return InputError("The training file in this link cannot be read: the link was cut or changed; paste the file.")


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
        raise InputError(
            f"{FLAGS[name]} is {text!r}, which is no {'whole ' if kind is int else ''}number; type for example 2."
        ) from error


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
    names = _listed(asked.gpu)
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
