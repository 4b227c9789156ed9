"""What a shell completes after a key is pressed: asked as bash asks it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tunecast.catalogs.gpus import load_gpus
from tunecast.cli.completion import choices


def completed(line: str) -> list[str]:
    """What may follow the last word of a command line."""
    asked = {"_TUNECAST_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    code = "import sys; sys.argv = ['tunecast']; from tunecast.cli import main; main()"
    command, environment = [sys.executable, "-c", code], {**os.environ, **asked}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("tunecast estimate meta-llama/Llama-3.1-7", {"meta-llama/Llama-3.1-70B"}),
        ("tunecast estimate x --method q", {"qlora"}),
        ("tunecast estimate x --stack uns", {"unsloth"}),
        ("tunecast estimate x --optim adamw_torch_f", {"adamw_torch_fused"}),
        ("tunecast recommend x --gpu h100-sxm", {name for name in load_gpus() if name.startswith("h100-sxm")}),
        ("tunecast sweep x --metric cost", {"cost", "cost-per-million"}),
        ("tunecast recommend x --provider runp", {"runpod"}),
        ("tunecast catalog p", {"prices"}),
        ("tunecast estimate x --num-gpus a", {"auto"}),
    ],
)
def test_values_are_completed(line: str, some: set[str]) -> None:
    found = completed(line)
    assert set(found) == some
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("metavar", "words"),
    [
        ("lora|qlora|full", ["lora", "qlora", "full"]),
        ("N|auto", ["auto"]),
        ("all-linear|a,b,c", ["all-linear"]),
        ("5|4.46|4.45", ["5", "4.46", "4.45"]),
        ("24h|3d", None),
        ("FILE", None),
        ("NAME=X", None),
        (None, None),
    ],
)
def test_placeholders_and_examples_are_no_choices(metavar: str | None, words: list[str] | None) -> None:
    found = choices(metavar)
    assert (None if found is None else found("")) == words
