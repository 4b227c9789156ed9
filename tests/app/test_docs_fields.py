"""The lists of fields in docs/training-files.md are what the readers ask for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tunecast.model.configs.load import load_mapping
from tunecast.model.configs.read import READERS, read_mapping
from tunecast.model.configs.source import Source

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "axolotl": "axolotl.yml",
    "llama-factory": "llama-factory.yaml",
    "trl": "trl.yaml",
    "torchtune": "torchtune.yaml",
    "litgpt": "litgpt.yaml",
}


@pytest.fixture(scope="module")
def fields() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_fields_script", ROOT / "scripts" / "training_fields.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_lists_of_today(fields: ModuleType) -> None:
    text = fields.PAGE.read_text(encoding="utf-8")
    assert {match["name"] for match in fields.BLOCK.finditer(text)} == set(READERS)
    assert fields.refreshed(text) == text, "run scripts/training-fields"


@pytest.mark.parametrize("form", READERS)
def test_every_field_that_is_asked_for_while_reading_an_example_is_listed(
    fields: ModuleType, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    get = Source.get

    def listened(self: Source, field: str) -> object:
        asked.add(field)
        return get(self, field)

    monkeypatch.setattr(Source, "get", listened)
    read_mapping(load_mapping(ROOT / "docs" / "examples" / EXAMPLES[form]), name=form)
    listed = set(fields.read_fields(form)) | {entry["field"] for entry in fields.load_frameworks()[form]["refused"]}
    outside = {"deepspeed", "accelerate_config", "num_processes", "mixed_precision"}
    inside_fsdp = {field for field in asked if field.startswith("fsdp_config.")}
    assert asked - listed - outside - inside_fsdp == set()
