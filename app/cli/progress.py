"""Progress on stderr: a bar with the time left, off when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tunecast.cli.console import err

Report = Callable[[int, int, str, float | None], None]
"""Trials done, trials in all, what runs now, seconds left."""


def clock(seconds: float | None) -> str:
    """Time left as m:ss."""
    return "" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"


@contextmanager
def progress_bar() -> Iterator[Report | None]:
    """A bar that a calibration reports to; None when nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"), TextColumn("{task.description}"))
    with Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task("starting", total=None, left="")

        def report(done: int, total: int, what: str, left_s: float | None) -> None:
            bar.update(task, completed=done, total=total, description=what, left=clock(left_s))

        yield report


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over things that are counted; None when nobody watches."""
    with progress_bar() as report:
        yield None if report is None else lambda done, total: report(done, total, what, None)


@contextmanager
def told_on_stderr(wanted: bool) -> Iterator[Callable[[str], None] | None]:
    """What runs now, as one line that changes; None when nobody watches."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    with err().status("reading the model") as status:
        yield status.update


@contextmanager
def told_or_printed(what: str) -> Iterator[Callable[[str], None]]:
    """What runs now, as one line that changes, first `what`; where nobody watches, a line for each thing told."""
    if not sys.stderr.isatty():
        yield err().print
        return
    with err().status(what) as status:
        yield status.update


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """A sign of life while something runs that cannot say how far it is."""
    if not sys.stderr.isatty():
        yield
        return
    with err().status(what):
        yield
