"""Imports run one way: app -> calibrate -> model -> catalogs. Read from the source, not from a running import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "app": {"app", "calibrate", "model", "catalogs", "results"},
    "calibrate": {"calibrate", "model", "catalogs", "results"},
    "model": {"model", "catalogs", "results"},
    "catalogs": {"catalogs"},
    "results": {"results"},
}
HARDWARE_LIBRARIES = {"torch", "transformers", "peft", "bitsandbytes", "accelerate", "pynvml", "safetensors"}
LATE_EVERYWHERE = {"pandas", "scipy", "matplotlib", "jinja2"}
BARE_NAMES = {"app", "calibrate", "model", "catalogs", "results"}


@dataclass(frozen=True)
class Import:
    """One imported module of one file."""

    module: str
    at_top: bool
    type_only: bool


def _guarded_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(source: str) -> Iterator[Import]:
    """Every import in a module, `from` imports with each name appended (it may be a module)."""

    def walk(node: ast.AST, *, in_function: bool, type_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, not in_function, type_only)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which layer they reach"
            for alias in node.names:
                yield Import(f"{node.module}.{alias.name}", not in_function, type_only)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, in_function=inside, type_only=type_only or _guarded_for_types(node))

    yield from walk(ast.parse(source), in_function=False, type_only=False)


def layer_of(module: str) -> str | None:
    """Our layer that a module belongs to, None for the modules of others."""
    parts = module.split(".")
    if parts[0] != "tunecast":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "app"


def sources() -> list[Path]:
    return sorted(path for layer in MAY_IMPORT for path in (ROOT / layer).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_imports_run_one_way(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    wrong = {i.module for i in imports_of(path.read_text()) if (layer_of(i.module) or layer) not in MAY_IMPORT[layer]}
    assert not wrong, f"{relative(path)} reaches up: {sorted(wrong)}"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_no_module_is_imported_by_its_bare_folder_name(path: Path) -> None:
    wrong = {i.module for i in imports_of(path.read_text()) if i.module.split(".")[0] in BARE_NAMES}
    assert not wrong


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_hardware_libraries_are_imported_late_and_only_in_calibrate(path: Path) -> None:
    in_calibrate = path.relative_to(ROOT).parts[0] == "calibrate"
    wrong = {
        i.module
        for i in imports_of(path.read_text())
        if i.module.split(".")[0] in HARDWARE_LIBRARIES and not i.type_only and (i.at_top or not in_calibrate)
    }
    assert not wrong, f"{relative(path)} imports {sorted(wrong)}; only inside functions of calibrate/"


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_slow_libraries_are_imported_late(path: Path) -> None:
    """Modules of the fit may import scipy at the top: they are themselves imported only to fit."""
    wrong = {
        i.module
        for i in imports_of(path.read_text())
        if i.module.split(".")[0] in LATE_EVERYWHERE and i.at_top and not i.type_only
    }
    if path.relative_to(ROOT).parts[0] == "calibrate" and "fit" in path.stem:
        wrong = {module for module in wrong if not module.startswith("scipy")}
    assert not wrong, f"{relative(path)} imports {sorted(wrong)} at the top; move it into the function that needs it"


@pytest.mark.parametrize("path", [p for p in sources() if p.relative_to(ROOT).parts[0] == "model"], ids=relative)
def test_the_model_needs_no_scipy(path: Path) -> None:
    assert not {i.module for i in imports_of(path.read_text()) if i.module.split(".")[0] == "scipy"}


def _may_not_see_the_mock(path: Path) -> bool:
    """All but itself and what opens it by name: nothing that fits, corrects, judges or forecasts."""
    return path.relative_to(ROOT).parts[:2] != ("calibrate", "mock") and relative(path) != "calibrate/devices/open.py"


@pytest.mark.parametrize("path", [p for p in sources() if _may_not_see_the_mock(p)], ids=relative)
def test_the_truth_of_the_mock_is_hidden_from_whatever_fits_or_forecasts(path: Path) -> None:
    wrong = {i.module for i in imports_of(path.read_text()) if i.module.startswith("tunecast.calibrate.mock")}
    assert not wrong, f"{relative(path)} looks into the mock's physics"


def test_the_mock_does_not_borrow_the_formulas_it_is_there_to_check() -> None:
    """Its truth is independent: of `model/` it may read the shared types, no time or memory formula."""
    shared = {"architecture", "architectures", "factors", "operation", "run", "resolve", "stacks", "units", "value"}
    for path in (ROOT / "calibrate" / "mock").glob("*.py"):
        used = {i.module.split(".")[2] for i in imports_of(path.read_text()) if layer_of(i.module) == "model"}
        assert used <= shared, f"{relative(path)} imports formulas: {sorted(used - shared)}"


def test_measuring_without_a_fit_imports_neither_scipy_nor_torch_on_the_way() -> None:
    modules = "tunecast.calibrate.runner, tunecast.calibrate.measure, tunecast.calibrate.devices.open"
    code = f"import sys, {modules}; print([m for m in ('torch', 'scipy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_reader_of_imports_sees_what_it_should() -> None:
    source = (
        "import torch\n"
        "from tunecast.model import run\n"
        "def f():\n    import scipy.stats\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import pandas\n"
    )
    found = {i.module: (i.at_top, i.type_only) for i in imports_of(source)}
    assert found["torch"] == (True, False)
    assert found["tunecast.model.run"] == (True, False)
    assert found["scipy.stats"] == (False, False)
    assert found["pandas"] == (True, True)
    assert layer_of("tunecast.model.run") == "model"
    assert layer_of("tunecast.errors") == "app"
    assert layer_of("numpy") is None
