"""Whatever cannot be parsed is one sentence on stderr and exit code 2; help is the exception."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def tunecast(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tunecast", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("estimate", "llama-3.1-8b", "--lora-r", "foo"), "'--lora-r': it must be a whole number"),
        (("estimate", "llama-3.1-8b", "--lora-dropout", "foo"), "'--lora-dropout': it must be a number, not 'foo'"),
        (("estimate", "llama-3.1-8b", "--mean-tokens", "abc"), "'--mean-tokens': it must be a number, not 'abc'"),
        (("sweep", "llama-3.1-8b", "--lora-r", "8,16"), "tunecast sweep MODEL --gpu NAME --over lora_r=8,16"),
        (("estimate", "llama-3.1-8b", "--bogus"), "--bogus"),
        (("estimate",), "MODEL"),
        (("nope",), "nope"),
        (("estimate", "llama-3.1-8b", "--lora-r", "100000"), "--lora-r"),
    ],
)
def test_usage_errors_are_one_sentence(arguments: tuple[str, ...], named: str) -> None:
    done = tunecast(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("tunecast: ")
    assert named in line


def test_the_bare_command_shows_its_help() -> None:
    done = tunecast()
    assert "Usage: tunecast" in done.stdout + done.stderr
    assert "tunecast: Usage" not in done.stderr


def test_a_cpu_is_not_asked_to_hold_what_it_cannot() -> None:
    """405 billion bf16 weights and their gradients are 1.5 TiB: no machine that runs this test holds their training."""
    done = tunecast("measure", "meta-llama/Llama-3.1-405B", "--method", "full", "--device", "cpu", "--json")
    assert done.returncode == 3
    assert "nothing was started" in done.stderr
    (answer,) = json.loads(done.stdout)
    assert answer["fits"] is False
    assert answer["step_time_s"] is None
