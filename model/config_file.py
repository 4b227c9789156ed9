"""The file that holds a Hugging Face ``config.json``, and MODEL as a word for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunecast.catalogs.confined import is_there, may_read
from tunecast.catalogs.errors import InputError, NotSupportedError

CODE = (".py", ".ipynb", ".sh")
"""Endings of names of scripts and notebooks, which say no run without being run."""


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object of a config file; unreadable or foreign content is one sentence."""
    if path.name.lower().endswith(CODE):
        raise NotSupportedError(
            f"{path} is code, which is not read ({', '.join(CODE)}); give its model by name or as a config.json with "
            "the run's options, or a training file (YAML) of axolotl, LLaMA-Factory, TRL, torchtune or LitGPT."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(
            f"Cannot read the config {path}: {reason}; give a Hugging Face config.json{_or_name(path)}."
        ) from error
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InputError(f"The config {path} is not JSON ({error}); give a Hugging Face config.json.") from error
    if not isinstance(config, dict):
        raise InputError(f"The config {path} holds a {type(config).__name__}, not a JSON object; give a config.json.")
    return config


def _or_name(path: Path) -> str:
    """The listed model that a folder which is not there is called after, as most copies of one are."""
    from tunecast.catalogs.models import find_model

    try:
        return f", or the model by its name, {find_model(path.name).hf_id}"
    except InputError:
        return ""


def looks_like_path(text: str) -> bool:
    """Whether MODEL names a local file or folder rather than a catalog id."""
    return text.endswith((".json", *CODE)) or text.startswith((".", "/", "~")) or is_there(Path(text))


def config_path(name: str) -> Path:
    """The config that MODEL names as a file or as the folder that holds it."""
    if not may_read(Path(name)):
        raise InputError(
            f"{name!r} looks like a path, and files of the machine that answers are not read; name a model."
        )
    try:
        path = Path(name).expanduser()
        return path / "config.json" if path.is_dir() else path
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"Cannot read the config {name!r}: {error} Give a Hugging Face config.json.") from error


def model_word(given: Any) -> str:
    """MODEL as a word; what only Python can get wrong is refused."""
    if not isinstance(given, str | Path):
        raise InputError(f"model is {given!r}, but it is the name of a model or the path of a file, as a word.")
    return str(given)
