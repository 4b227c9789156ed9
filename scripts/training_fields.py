"""Refresh the lists of fields in docs/training-files.md: what is read of each format, what is refused, the defaults.

Read fields are found in the readers' source (every name that a reader asks its file for), refused fields and
defaults in model/configs/data/frameworks.json. Run: scripts/training-fields
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from tunecast.model.configs.frameworks import load_frameworks

PAGE = Path(__file__).resolve().parent.parent / "docs" / "training-files.md"
BLOCK = re.compile(r"<!-- fields of: (?P<name>\S+) -->\n.*?<!-- end of fields -->\n", re.DOTALL)
READERS = {
    "axolotl": "axolotl",
    "llama-factory": "llama_factory",
    "trl": "trl",
    "torchtune": "torchtune",
    "litgpt": "litgpt",
}
"""By format: its module."""
PUT_TOGETHER = {
    "axolotl": ("gradient_checkpointing_kwargs.use_reentrant", "gradient_checkpointing_kwargs.every_n_layers"),
    "trl": tuple(
        f"{name}_checkpointing_kwargs.{key}"
        for name in ("gradient", "activation")
        for key in ("use_reentrant", "every_n_layers")
    ),
    "litgpt": ("optimizer.class_path",),
}
"""Names that a reader puts together while it reads; the test, which listens to readers, finds them."""
OURS = ("reentrant", "ddp", "hsdp")
"""Words in the readers that are no fields of a file."""
FIELD = re.compile(r"^[a-z][a-zA-Z0-9_]*(\._?[a-zA-Z0-9_]+)*$")
OPTIONS_OF = {"copy_number": 1, "copy_word": 1, "put_degree": 1, "check_four_bit": 1}
"""Helpers whose last so many names are ours, not the file's."""


def module_names(module: ModuleType) -> dict[str, tuple[str, ...]]:
    """Tuples and dictionaries of words at the top of a module, by name."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, tuple | dict)}
    return {name: tuple(value) for name, value in found.items() if all(isinstance(word, str) for word in value)}


def called(call: ast.Call) -> str | None:
    """``get`` of ``source.get(...)``, ``copy_number`` of ``copy_number(source, ...)``; None for other calls."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr if isinstance(function.value, ast.Name) and function.value.id == "source" else None
    takes_source = any(isinstance(argument, ast.Name) and argument.id == "source" for argument in call.args)
    return function.id if isinstance(function, ast.Name) and takes_source else None


def strings(node: ast.AST, constants: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Words in an argument: written there, in a tuple, or in a constant of the module."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple):
        for part in node.elts:
            yield from strings(part, constants)
    elif isinstance(node, ast.Name):
        yield from constants.get(node.id, ())
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "items":
        yield from strings(node.func.value, constants)


def asked_names(tree: ast.AST, constants: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Every field that a piece of code asks its source for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := called(node)) not in (None, "default", "refuse"):
            words = [word for argument in node.args for word in strings(argument, constants)]
            yield from words[: len(words) - OPTIONS_OF.get(str(name), 0)]
        if isinstance(node, ast.For | ast.comprehension):
            yield from strings(node.iter, constants)


def helpers_of(module: ModuleType) -> Iterator[FunctionType]:
    """Functions that a reader takes from its neighbours, and what these take from each other in their module."""
    near = [value for value in vars(module).values() if isinstance(value, FunctionType)]
    for function in near:
        if function.__module__.startswith("tunecast.model.configs.") and function.__module__ != module.__name__:
            yield function
            neighbours = vars(sys.modules[function.__module__])
            used = set(function.__code__.co_names) & set(neighbours)
            yield from (value for name in used if isinstance(value := neighbours[name], FunctionType))


def read_fields(form: str) -> list[str]:
    """The fields that the reader of a format asks for, in alphabetical order."""
    module = import_module(f"tunecast.model.configs.{READERS[form]}")
    found = set(PUT_TOGETHER.get(form, ()))
    found |= set(asked_names(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")), module_names(module)))
    for helper in helpers_of(module):
        constants = module_names(sys.modules[helper.__module__])
        found |= set(asked_names(ast.parse(inspect.getsource(helper)), constants))
    if "fsdp_config" in found:
        found.add("fsdp")
    found |= {switch["field"] for switch in load_frameworks()[form].get("switches", ())}
    return sorted(field for field in found if FIELD.match(field) and field not in OURS)


def quoted(fields: list[str]) -> str:
    """Fields as code, wrapped."""
    return textwrap.fill(", ".join(f"`{field}`" for field in fields) + ".", 120, break_long_words=False)


def shown(value: Any) -> str:
    """A default as the file would have it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def section(form: str) -> str:
    """The three lists of one format."""
    facts = load_frameworks()[form]
    ranges = facts["ranges"]
    defaults = [f"{field}={shown(value)}" for field, value in ranges[0]["defaults"].items()]
    refused = sorted({entry["field"] for entry in facts["refused"]})
    older = f" Recorded too: {', '.join(entry['versions'] for entry in ranges[1:])}." if ranges[1:] else ""
    return "\n\n".join(
        [
            f"Read:\n{quoted(read_fields(form))}",
            f"Refused by name when they are set:\n{quoted(refused)}",
            f"Where the file is silent, {facts['title']} {ranges[0]['versions']}:\n{quoted(defaults)}{older}",
        ]
    )


def refreshed(text: str) -> str:
    """The page with every list made again."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- fields of: {match['name']} -->\n{section(match['name'])}\n<!-- end of fields -->\n"

    return BLOCK.sub(replaced, text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
