"""The data file: versions, sources, and what it says against the frameworks that are installed here."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.configs import FORMATS
from tunecast.model.configs.frameworks import differences, framework_range, in_range, load_frameworks

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "model" / "configs"


@pytest.fixture
def drift() -> ModuleType:
    """The development command, which is no part of the installed package."""
    spec = importlib.util.spec_from_file_location("framework_drift", ROOT / "scripts" / "framework_drift.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("version", "versions", "inside"),
    [
        ("1.7", ">=1.7", True),
        ("1.7.0", ">=1.7", True),
        ("1.10.0.dev0", ">=1.7", True),
        ("1.6.9", ">=1.7", False),
        ("1.6.9", ">=1.0,<1.7", True),
        ("1.7.0", ">=1.0,<1.7", False),
        ("v0.5.13", ">=0.5", True),
    ],
)
def test_versions_compare_by_number(version: str, versions: str, inside: bool) -> None:
    assert in_range(version, versions) is inside


def test_a_version_without_record_is_refused_with_the_recorded_ranges() -> None:
    with pytest.raises(InputError, match=r"No defaults of TRL 0.12.1 are recorded; recorded are >=1.15; >=1.7,<1.15; "):
        framework_range("trl", "0.12.1")
    with pytest.raises(InputError, match="'newest' is no version"):
        framework_range("trl", "newest")


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_defaults_and_refusals_with_sources(form: str) -> None:
    facts = load_frameworks()[form]
    assert facts["source"]
    assert facts["source_date"]
    assert all(entry["source"] and entry["defaults"] for entry in facts["ranges"])
    fields = [entry["field"] for entry in facts["refused"]]
    assert len(fields) == len(set(fields))
    assert all(entry["what"] for entry in facts["refused"])
    assert len({frozenset(entry["defaults"]) for entry in facts["ranges"]}) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_every_recorded_default_is_read_by_the_reader(form: str) -> None:
    """A default that no code asks for would be a fact without effect."""
    names = (form.replace("-", "_"), "common", "read")
    text = [ast.parse((SOURCES / f"{name}.py").read_text()) for name in names]
    words = {node.value for tree in text for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    unused = [field for field in framework_range(form, None)["defaults"] if field not in words]
    assert unused == []


@pytest.mark.parametrize("builder", load_frameworks()["torchtune"]["builders"])
def test_torchtune_builders_are_catalog_models(builder: str) -> None:
    from tunecast.catalogs.models import find_model

    assert find_model(load_frameworks()["torchtune"]["builders"][builder]).hf_id


@pytest.mark.parametrize("form", ["trl", "llama-factory"])
def test_trainer_defaults_are_the_installed_transformers(drift: ModuleType, form: str) -> None:
    pytest.importorskip("transformers")
    recorded = framework_range(form, None)["defaults"]
    installed = drift.class_defaults("transformers:TrainingArguments")
    shared = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "num_train_epochs", "fp16")
    assert differences({field: recorded[field] for field in shared}, installed) == []
    assert set(shared) <= set(installed)


def test_differences_name_field_and_both_values() -> None:
    recorded = {"lora_r": 16, "optim": "adamw_torch", "ours_only": 1}
    installed = {"lora_r": 8, "optim": "adamw_torch", "theirs_only": 2}
    assert differences(recorded, installed) == ["lora_r: recorded 16, installed 8"]


@dataclass
class Newer:
    """A framework that moved one default."""

    max_length: int = 2048
    lora_r: int = 16
    anything: list[str] = dataclasses.field(default_factory=list)


def test_the_drift_command_compares_what_is_installed_and_names_the_rest(
    drift: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(package: str) -> str:
        if package != "trl":
            raise PackageNotFoundError(package)
        return "1.11.0"

    monkeypatch.setattr(drift, "told_stacks", lambda: False)
    monkeypatch.setattr(drift, "version", version)
    monkeypatch.setattr(drift, "import_module", lambda name: SimpleNamespace(SFTConfig=Newer, ModelConfig=Newer))
    assert drift.main() == 3
    out, err = capsys.readouterr()
    assert "max_length: recorded 1024, installed 2048" in out
    assert "lora_r" not in out
    assert "axolotl: not installed" in err
    monkeypatch.setattr(drift, "version", lambda package: version("absent"))
    assert drift.main() == 0


@pytest.mark.parametrize(("stack", "packages"), [("hf-peft", ("transformers", "peft")), ("trl", ("trl",))])
def test_stacks_are_what_the_installed_packages_do(drift: ModuleType, stack: str, packages: tuple[str, ...]) -> None:
    for package in packages:
        pytest.importorskip(package)
    found = drift.stack_drift(stack)
    assert [title.split()[1] for title in found] == list(packages)
    assert not any(found.values())


def test_a_stack_is_compared_in_the_range_of_the_installed_version(
    drift: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older transformers has other defaults, and what differs from its own range is told."""
    monkeypatch.setattr(drift, "version", lambda package: "4.52.4" if package == "transformers" else version("absent"))
    monkeypatch.setitem(drift.PROBES, "transformers", lambda: {"optim": "adamw_torch", "reentrant": False})
    found = drift.stack_drift("hf-peft")
    assert found == {
        "hf-peft: transformers 4.52.4 (>=4.49,<4.54)": ["reentrant: recorded True, installed False"],
    }


def test_defaults_of_the_installed_transformers_are_read_from_its_class(drift: ModuleType) -> None:
    pytest.importorskip("transformers")
    defaults = drift.class_defaults("transformers:TrainingArguments")
    assert (defaults["per_device_train_batch_size"], defaults["max_steps"]) == (8, -1)
