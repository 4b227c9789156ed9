"""Commands of the design that are not built yet: refused by name, never guessed."""

from __future__ import annotations

from collections.abc import Callable

import typer

from tunecast.catalogs.errors import NotSupportedError
from tunecast.cli.guard import guarded

UNBUILT = {
    "report": "use the --json of the other commands",
}
"""Name to what to type instead."""


def _refusal(name: str) -> Callable[..., None]:
    @guarded
    def refuse() -> None:
        raise NotSupportedError(f"`tunecast {name}` is not built yet; {UNBUILT[name]}.")

    return refuse


def add_unbuilt(program: typer.Typer) -> None:
    """Register the refusals; they take any arguments and stay out of the help."""
    anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name in UNBUILT:
        program.command(name, hidden=True, context_settings=anything)(_refusal(name))
