"""What is installed, under which names, and that the wheel runs with no checkout around it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {"app": "tunecast", "calibrate": "tunecast.calibrate", "catalogs": "tunecast.catalogs"}
LAYERS |= {"model": "tunecast.model", "results": "tunecast.results"}


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def folders_with_init() -> dict[str, str]:
    """Installed package name to folder, for every folder of ours that has an __init__.py."""
    found = {}
    for layer, package in LAYERS.items():
        for init in (ROOT / layer).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / layer).parts
            found[".".join((package, *parts))] = "/".join((layer, *parts))
    return found


def test_packages_list_is_exactly_the_folders_with_an_init(pyproject: dict[str, Any]) -> None:
    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == sorted(folders_with_init())


def test_each_package_is_mapped_to_its_folder(pyproject: dict[str, Any]) -> None:
    assert pyproject["tool"]["setuptools"]["package-dir"] == folders_with_init()


def test_every_folder_with_python_in_it_is_a_package() -> None:
    folders = {str(p.parent.relative_to(ROOT)) for layer in LAYERS for p in (ROOT / layer).rglob("*.py")}
    assert folders == set(folders_with_init().values())


def test_no_folder_of_the_root_shadows_the_installed_package() -> None:
    assert not (ROOT / "tunecast").exists()


def test_the_bare_names_are_not_imported_beside_ours() -> None:
    """A bare `model` beside `tunecast.model` would be a second copy of every class."""
    import tunecast.model.run

    copies = [name for name in sys.modules if name.split(".")[0] in LAYERS]
    assert tunecast.model.run.Run.__module__ == "tunecast.model.run"
    ours = [name for name in copies if str(ROOT) in str(getattr(sys.modules[name], "__file__", ""))]
    assert ours == []


def test_every_package_is_marked_as_typed() -> None:
    assert {layer for layer in LAYERS if (ROOT / layer / "py.typed").exists()} >= set(LAYERS) - {"results"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, pyproject: dict[str, Any]) -> Path:
    """The wheel, built from a clean copy so that no stale build folder can fill it."""
    copy = tmp_path_factory.mktemp("source") / "tunecast"
    generated = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for layer in LAYERS:
        shutil.copytree(ROOT / layer, copy / layer, ignore=generated)
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=generated)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed apart from everything else."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    return target


def run_installed(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "100"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def names_in(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        yield from archive.namelist()


@pytest.mark.wheel
@pytest.mark.slow
def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names_in(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tunecast"}
    assert not [name for name in names_in(wheel) if "test" in name.split("/")]


@pytest.mark.wheel
@pytest.mark.slow
def test_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    names = set(names_in(wheel))
    for layer, package in LAYERS.items():
        for path in (ROOT / layer).rglob("*.py"):
            assert f"{package.replace('.', '/')}/{path.relative_to(ROOT / layer)}" in names
    for layer in ("calibrate", "catalogs", "model"):
        for path in (ROOT / layer).rglob("data/*"):
            assert f"tunecast/{path.relative_to(ROOT)}" in names


@pytest.mark.wheel
@pytest.mark.slow
def test_wheel_holds_priors_and_the_records_they_read_and_no_other_results(wheel: Path) -> None:
    inside = {name for name in names_in(wheel) if name.startswith("tunecast/results/")}
    records = {f"tunecast/results/records/{path.name}" for path in (ROOT / "results/records").glob("*.json")}
    assert records
    own = ("__init__.py", "priors.json", "validation/unseen.json")
    assert inside == {*(f"tunecast/results/{name}" for name in own), *records}


@pytest.mark.wheel
@pytest.mark.slow
@pytest.mark.parametrize("where", ["repository root", "elsewhere"])
def test_installed_wheel_runs(installed: Path, tmp_path: Path, where: str) -> None:
    folder = ROOT if where == "repository root" else tmp_path
    (tmp_path / "model.py").write_text("raise SystemExit('the user has a model.py')\n")
    origin = run_installed(installed, folder, "-c", "import tunecast.model.run as m; print(m.__file__)")
    assert origin.stdout.startswith(str(installed)), origin.stderr
    arguments = ("-m", "tunecast", "estimate", "meta-llama/Llama-3.1-8B", "--gpu", "a100-sxm4-80gb", "--json")
    answer = run_installed(installed, folder, *arguments)
    assert answer.returncode == 0, answer.stderr
    assert '"tunecast.forecast/1"' in answer.stdout
