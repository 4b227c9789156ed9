"""Fill .venv. Standard library only: it runs before anything is installed.

torch first, because everything else follows from it:

* the Python that runs this has a working torch, new enough for transformers and able to use the GPU if there is one:
  the environment sees it (system site packages) and pip is told never to replace it;
* an NVIDIA GPU but no such torch: the index's own build, or where that does not run with driver and card, one for
  CUDA 12;
* neither: the CPU build pinned in constraints.txt.

Does nothing when pyproject.toml, constraints.txt and the interpreter are those of the last time; a change of
pyproject.toml alone installs into the environment that is there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "tunecast-setup"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_OLDER_INDEXES = ("https://download.pytorch.org/whl/cu128", "https://download.pytorch.org/whl/cu126")
"""Builds for drivers older than 580, and then for cards older than Turing."""
DOES_NOT_FIT = ("no kernel image", "not compiled with CUDA", "driver")
"""In what torch says where it is not for this card, has no CUDA, or finds the driver too old."""
OLDEST_TORCH = (2, 6)
"""What transformers 5.23 works with (``utils/import_utils.py``, ``is_torch_available``)."""


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"[setup] {text}", file=sys.stderr, flush=True)


def pip(*arguments: str) -> None:
    """Run the environment's pip; its failure ends the set-up."""
    command = [str(PYTHON), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(f"[setup] failed: {' '.join(command)}")


def torch_version(python: str | Path) -> str | None:
    """The version of a torch that imports and computes, or None."""
    code = "import torch; torch.zeros(2).add_(1); print(torch.__version__)"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else None


def uses_gpu(python: str | Path) -> bool:
    """Whether its torch has what this GPU and its driver need; a GPU that is full or taken says nothing against it."""
    code = "import torch; torch.zeros(2, device='cuda').add_(1).tolist()"
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False, env=seen)
    return done.returncode == 0 or not any(sign in done.stderr for sign in DOES_NOT_FIT)


def torch_to_keep(python: str | Path) -> str | None:
    """The version of a torch that is new enough and uses the GPU that this machine has; None where there is none."""
    found = torch_version(python)
    if found is None or tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TORCH:
        return None
    return found if not has_nvidia_gpu() or uses_gpu(python) else None


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    done = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return done.returncode == 0 and "GPU" in done.stdout


def cpu_index() -> list[str]:
    """pip options that prefer torch's CPU builds, where their index can be reached.

    Without it the package index may give the CUDA build: it works, but is a large download.
    """
    if sys.platform != "linux":
        return []
    try:
        with urllib.request.urlopen(f"{TORCH_CPU_INDEX}/torch/", timeout=5):
            return ["--extra-index-url", TORCH_CPU_INDEX]
    except OSError:
        return []


def see_parent() -> None:
    """Let the environment see the packages of the Python that runs this.

    System site packages do it, unless that Python is itself a virtual environment, whose packages a
    nested one does not see: then a path file does it.
    """
    if sys.prefix != sys.base_prefix:
        inside = next(VENV.glob("lib/python*/site-packages"))
        parents = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
        (inside / "parent.pth").write_text("".join(f"{path}\n" for path in parents))


def digest(*parts: bytes) -> str:
    """One word for some content."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def interpreter_fingerprint() -> str:
    """What the environment cannot survive a change of."""
    pins = (ROOT / "constraints.txt").read_bytes()
    return digest(sys.version.encode(), sys.executable.encode(), str(ROOT).encode(), pins)


def project_fingerprint() -> str:
    """What asks for another installation into the same environment."""
    return digest((ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes())


def requirements(torch_is_kept: bool) -> list[str]:
    """What to install after torch; a kept torch is not measured against our lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["calibrate"], *extras["dev"]]
    return [line for line in wanted if not (torch_is_kept and line.startswith("torch>"))]


def install(kept_torch: str | None) -> None:
    """Torch, then the rest under constraints that leave it alone, then tunecast itself."""
    pins = VENV / "constraints.txt"
    if kept_torch:
        say(f"keeping this Python's torch {kept_torch}")
    elif has_nvidia_gpu():
        say("NVIDIA GPU without a torch that uses it: installing the index's torch")
        pip("torch")
        for index in TORCH_OLDER_INDEXES:
            if not uses_gpu(PYTHON):
                say(f"it does not run with this driver or card: installing torch of {index}")
                pip("--force-reinstall", "--index-url", index, "torch")
        if not uses_gpu(PYTHON):
            sys.exit(
                "[setup] no torch of the index uses this GPU; https://pytorch.org/get-started/locally has the command "
                f"for this machine: run it for {sys.executable}, and the same set-up keeps what it installs"
            )
    else:
        say("no GPU: installing the pinned CPU torch")
        pip("-c", "constraints.txt", *cpu_index(), "torch")
    pins.write_text(f"torch=={torch_version(PYTHON)}\n")
    say("installing the rest")
    pip("-c", str(pins), *requirements(kept_torch is not None))
    pip("--no-deps", "-e", ".")


def main() -> None:
    """Make the environment, or bring it up to date, unless it is current."""
    if Path(sys.prefix).resolve() == VENV.resolve():
        sys.exit(f"[setup] PYTHON is {sys.executable}, of the environment to be made; name the Python to make it from")
    want = [interpreter_fingerprint(), project_fingerprint()]
    have = STAMP.read_text().split() if STAMP.exists() else []
    if have == want:
        return
    kept_torch = torch_to_keep(sys.executable)
    if have[:1] != want[:1]:
        say(f"making {VENV} with Python {sys.version.split()[0]} (once; takes minutes)")
        venv.create(VENV, clear=True, with_pip=True, system_site_packages=kept_torch is not None)
        if kept_torch:
            see_parent()
    STAMP.unlink(missing_ok=True)
    install(kept_torch)
    STAMP.write_text("\n".join(want))
    say("ready")


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
