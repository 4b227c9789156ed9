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
