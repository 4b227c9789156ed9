"""The command line."""

from __future__ import annotations

import re
import sys
from typing import Any, cast

ALIKE = 0.8
"""Share of letters in common, in order, at which an option is offered for one that there is not."""
SWITCH_VALUE = re.compile(
    r"Got unexpected extra argument\(s\) \((true|false|yes|no|on|off)\)|Option '(--[\w-]+)' does not take a value.*",
    re.IGNORECASE,
)
PARSER_WORDS = {
    "Input should be a valid integer, unable to parse string as an integer": "it must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "it must be a number",
}
"""What typer's parser says of a wrong number, and what is said instead."""


def in_our_words(message: str, cause: BaseException | None = None) -> str:
    """A usage error without the parser's own phrases; the `cause`, its validator's error, has what was typed."""
    found = _typed(cause)
    switch = SWITCH_VALUE.fullmatch(message)
    if switch is not None:
        named = switch[2] or "a switch"
        return f"{message} ({named} takes no value: type it alone, or with --no- before its name)"
    for theirs, ours in PARSER_WORDS.items():
        message = message.replace(theirs, ours if found is None else f"{ours}, not {found!r}")
    return message


def _typed(cause: BaseException | None) -> Any:
    """What was typed, where a validator says it."""
    errors = getattr(cause, "errors", None)
    return errors()[0].get("input") if callable(errors) else None


def _what_to_type(error: Any) -> str:
    """The command's help; where a number was asked for and several were given, a sweep over them."""
    found, name = _typed(error.__cause__), getattr(getattr(error, "param", None), "name", None)
    several = isinstance(found, str) and name and "," in found
    over = f"tunecast sweep MODEL --gpu NAME --over {name}={found} for several values; " if several else ""
    return f"{over}{error.ctx.command_path if error.ctx else 'tunecast'} --help"


def _no_such_option(error: Any) -> str:
    """What is said of an option that there is not: what to type instead of a name from another program, or else the
    options that it may be a slip of; empty for any other mistake."""
    typed = getattr(error, "option_name", None)
    if typed is None or error.ctx is None or not hasattr(error, "possibilities"):
        return ""
    from tunecast.model.other_names import what_to_type

    spelled = {
        name.lstrip("-").replace("-", "_"): name if name.startswith("--") else "MODEL"
        for param in error.ctx.command.params
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("--") or name == "model"
    }
    value = _typed_after(typed)
    instead = what_to_type(typed, spelled, lambda option, value: f"{spelled[option]} {value}".rstrip(), value)
    if instead:
        return f"No such option: {typed} ({instead})"
    error.possibilities = [name for name in error.possibilities or () if _alike(name, typed)]
    return str(error.format_message().rstrip("."))


def _typed_after(option: str) -> str:
    """The value that follows an option on the command line; empty where another option does."""
    for word, after in zip(sys.argv[1:], [*sys.argv[2:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            return value if equals else "" if after.startswith("-") else after
    return ""


def _alike(name: str, typed: str) -> bool:
    """Whether an option may be a slip of the pen of another; the parser offers all that share letters."""
    from difflib import SequenceMatcher

    plain = typed.lstrip("-")
    return name.lstrip("-").startswith(plain) or SequenceMatcher(None, name, typed).ratio() >= ALIKE


def main() -> None:
    """The ``tunecast`` command: what cannot be parsed is one sentence too, with exit code 2."""
    import typer

    from tunecast.cli.guard import INTERRUPTED
    from tunecast.cli.program import program

    # typer names its usage error only through what is derived from it.
    usage_error = cast(type[Exception], typer.BadParameter.__mro__[1])
    try:
        code = program(prog_name="tunecast", standalone_mode=False)
    except usage_error as caught:
        error = cast(Any, caught)
        message = in_our_words(error.format_message().rstrip("."), caught.__cause__)
        message = _no_such_option(error) or message
        # A command without any argument raises its own help text.
        sentence = message if "\n" in message else f"tunecast: {message}; type: {_what_to_type(error)}"
        print(sentence, file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        print("tunecast: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(code or 0)
