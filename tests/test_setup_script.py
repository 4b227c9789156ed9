"""`scripts/setup` makes .venv from a Python outside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a .venv that an earlier set-up made, and the shell half of the script; the other half tells by
    which Python it runs."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "setup", tmp_path / "scripts" / "setup")
    (tmp_path / "scripts" / "setup.py").write_text("import sys; print(sys.prefix)\n", encoding="utf-8")
    venv.create(tmp_path / ".venv", with_pip=False, symlinks=True)
    return tmp_path


def test_an_activated_environment_is_not_made_from_itself(project: Path) -> None:
    inside = project / ".venv" / "bin"
    told = {**os.environ, "PATH": f"{inside}:{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin", "VIRTUAL_ENV": str(inside)}
    told.pop("PYTHON", None)
    told.pop("TUNECAST_PYTHON", None)
    done = subprocess.run(["sh", "scripts/setup"], cwd=project, env=told, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).resolve() != (project / ".venv").resolve()


def test_a_python_inside_it_is_refused_before_anything_is_cleared(project: Path) -> None:
    shutil.copy(SCRIPTS / "setup.py", project / "scripts" / "setup.py")
    told = {**os.environ, "PYTHON": str(project / ".venv" / "bin" / "python3")}
    told.pop("TUNECAST_PYTHON", None)
    done = subprocess.run(["sh", "scripts/setup"], cwd=project, env=told, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "name the Python to make it from" in done.stderr
    assert (project / ".venv" / "pyvenv.cfg").exists()


TORCH = """
__version__ = {version!r}

class zeros:
    def __init__(self, size, device="cpu"):
        if device == "cuda" and {says!r}:
            raise RuntimeError({says!r})

    def add_(self, other):
        return self

    def tolist(self):
        return []
"""


@pytest.mark.parametrize(
    ("version", "says", "has_gpu", "kept"),
    [
        ("2.8.0+cu128", "", True, True),
        ("2.8.0+cu128", "CUDA error: out of memory", True, True),  # somebody else's work on the card
        ("2.13.0+cu130", "The NVIDIA driver on your system is too old (found version 12080)", True, False),
        ("2.13.0+cu130", "CUDA error: no kernel image is available for execution on the device", True, False),
        ("2.13.0+cpu", "Torch not compiled with CUDA enabled", True, False),
        ("2.13.0+cpu", "Torch not compiled with CUDA enabled", False, True),
        ("2.4.1+cu124", "", True, False),  # transformers works with none older than 2.6
    ],
)
def test_a_torch_is_kept_if_transformers_and_the_gpu_work_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, says: str, has_gpu: bool, kept: bool
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import setup as script

    (tmp_path / "torch.py").write_text(TORCH.format(version=version, says=says), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(script, "has_nvidia_gpu", lambda: has_gpu)
    assert script.torch_to_keep(sys.executable) == (version if kept else None)


def test_builds_for_older_drivers_and_cards_are_tried_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import setup as script

    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(script, "VENV", tmp_path)
    monkeypatch.setattr(script, "pip", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(script, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(script, "torch_version", lambda _python: "2.13.0")
    monkeypatch.setattr(script, "uses_gpu", lambda _python: any("cu126" in word for words in asked for word in words))
    script.install(None)
    assert [words[-2].rpartition("/")[2] for words in asked[1:3]] == ["cu128", "cu126"]
    assert asked[0] == ("torch",)
    monkeypatch.setattr(script, "uses_gpu", lambda _python: False)
    with pytest.raises(SystemExit, match="no torch of the index uses this GPU"):
        script.install(None)
