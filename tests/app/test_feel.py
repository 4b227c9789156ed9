"""What using the commands feels like: nothing is found out late, nothing is printed that a file does not want."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from ci_share import some_for_ci
from typer.testing import CliRunner

import tunecast
from tunecast.catalogs.errors import TunecastError
from tunecast.cli.examples import EXAMPLES
from tunecast.cli.program import COMMANDS, program
from tunecast.plots import check_plot_path
from tunecast.report.write import check_paths

LLAMA = ("meta-llama/Llama-3.1-8B", "--method", "qlora", "--max-length", "2048", "--gpu", "l40s")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name in ("matplotlib", "jinja2") else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)


@pytest.mark.usefixtures("missing")
def test_a_missing_extra_is_named_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(TunecastError, match=r"matplotlib.*'tunecast\[report\]'"):
        check_plot_path(tmp_path / "a.svg")
    with pytest.raises(TunecastError, match=r"jinja2.*'tunecast\[report\]'"):
        check_paths(tmp_path / "a.html", None)


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("more", [(), ("--gpu", "a100-sxm4-80gb"), ("--explain",)])
def test_a_pipe_gets_no_colours_no_blanks_and_no_long_lines(
    columns: int, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = CliRunner().invoke(program, ["estimate", *LLAMA, "--tokens", "10M", *more])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line != line.rstrip() or "\x1b" in line] == []


def test_a_value_is_printed_as_finely_as_its_interval() -> None:
    done = CliRunner().invoke(program, ["estimate", *LLAMA, "--num-gpus", "2", "--tokens", "100k"])
    rows = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines() if line.startswith(" ")}
    for name in ("memory allocated, GiB", "memory reserved, GiB", "memory process, GiB", "$ per M tokens, train"):
        value = float(rows[name][0].lstrip("$"))
        low, high = (float(end) for end in rows[name][1].split("–"))
        assert low < value < high, name
    assert float(rows["GPU-hours"][0]) > 0
    assert rows["GPU-hours"][-1] in ("s", "min")


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_help_ends_with_examples_that_the_command_takes(command: str) -> None:
    shown = CliRunner().invoke(program, [command, "--help"], env={"COLUMNS": "80"}).output
    examples = [f"tunecast {example}" for example in EXAMPLES[command]]
    assert [line.strip() for line in shown.splitlines()[-len(examples) :]] == examples
    assert max(len(line) for line in shown.splitlines()[-len(examples) :]) <= 80
    group = typer.main.get_command(program)
    for example in EXAMPLES[command]:
        name, *arguments = shlex.split(example)
        assert name == command
        group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


def test_a_python_shell_shows_a_line_per_forecast() -> None:
    found = tunecast.estimate(LLAMA[0], method="qlora", max_length=2048, tokens="10M", gpu=["l40s", "a100-sxm4-80gb"])
    first, second = repr(found).splitlines()
    assert first.startswith("1 x l40s-48gb: fits, ")
    assert second.startswith("1 x a100-sxm4-80gb: fits, ")
    assert found[0].cost_usd is not None
    assert f"${found[0].cost_usd.value:.2f}" in first


@pytest.mark.parametrize("columns", some_for_ci([80, 100, 132, 200], 3))
@pytest.mark.parametrize(
    ("asked", "whole"),
    [
        (("estimate", *LLAMA[:-1], "rtx-a5000", "--gpu", "a100-sxm4-80gb"), ("rtx-a5000-24gb", "a100-sxm4-80gb")),
        (("recommend", *LLAMA, "--tokens", "1M", "--max-gpus", "2"), ("cheapest", "l40s-48gb", "checkpointing")),
        (("sweep", *LLAMA, "--tokens", "1M"), ("██████████", "bf16-autocast", "per_device_train_batch_size")),
        (("catalog", "gpus"), ("a100-sxm4-80gb",)),
    ],
)  # fmt: skip
def test_words_and_numbers_stay_whole_at_every_width(
    asked: tuple[str, ...], whole: tuple[str, ...], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = CliRunner().invoke(program, list(asked))
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= columns
    for word in whole:
        assert word in done.stdout


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals on this system")
@pytest.mark.parametrize("no_color", ["1", ""])
def test_a_terminal_that_wants_no_colours_gets_none(no_color: str) -> None:
    """Ours are those of the sign of life on stderr."""
    master, slave = os.openpty()
    own = {"NO_COLOR": no_color, "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "tunecast", "estimate", *LLAMA]
    process = subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave, env={**os.environ, **own})
    os.close(slave)
    shown = b""
    while chunk := read_or_end(master):
        shown += chunk
    os.close(master)
    assert process.wait(timeout=60) == 0
    assert b"l40s-48gb: fits" in shown
    coloured = re.search(rb"\x1b\[[0-9;]*(3[0-7]|38;|9[0-7])m", shown)
    assert (coloured is None) is bool(no_color)


def read_or_end(terminal: int) -> bytes:
    """What comes next; nothing once the other side has closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
