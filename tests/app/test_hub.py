"""Hub ids with a hub that the tests make up: config.json, stated parameters, and every way it can say no."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, UnbuiltFamilyError, UnknownNameError
from tunecast.hub import looks_like_hub_id
from tunecast.models import find_architecture

huggingface_hub = pytest.importorskip("huggingface_hub")

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
LLAMA_PARAMS = 2 * 256 * 64 + 64 + 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64)
"""Embedding and head, final norm; per layer q, k, v, o, the three maps of the MLP, two norms."""

Hub = Callable[..., list[str]]


def http_error(kind: str) -> Exception:
    """An error of the hub's library without the response that its constructor wants."""
    from huggingface_hub import errors

    error: type[Exception] = getattr(errors, kind)
    return error.__new__(error, kind)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """Put a hub in place that has one model; the list of files that were asked of it."""

    def put(
        config: dict[str, Any] = LLAMA,
        *,
        stated: int | None = LLAMA_PARAMS,
        info_error: Exception | None = None,
        file_error: Exception | None = None,
    ) -> list[str]:
        asked: list[str] = []

        class Api:
            def model_info(self, name: str, *, timeout: float, expand: list[str]) -> Any:
                assert expand == ["safetensors"]
                assert timeout <= 10.0
                if info_error is not None:
                    raise info_error
                return SimpleNamespace(safetensors=None if stated is None else SimpleNamespace(total=stated))

        def download(name: str, filename: str, *, etag_timeout: float, local_files_only: bool) -> str:
            asked.append(f"{filename}{' from the cache' if local_files_only else ''}")
            if file_error is not None:
                raise file_error
            path = tmp_path / filename
            path.write_text(json.dumps(config))
            return str(path)

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        return asked

    return put


def test_a_hub_model_is_its_config_and_nothing_else(hub: Hub) -> None:
    asked = hub()
    found = find_architecture("someone/small-llama")
    assert found.architecture.total_params == LLAMA_PARAMS
    assert found.architecture.name == "someone/small-llama"
    assert found.notes == ("someone/small-llama was read from the hub.",)
    assert asked == ["config.json"]


@pytest.mark.parametrize(("stated", "notes"), [(LLAMA_PARAMS + 5, 2), (None, 1)])
def test_parameters_are_compared_with_those_the_files_state(hub: Hub, stated: int | None, notes: int) -> None:
    hub(stated=stated)
    found = find_architecture("someone/small-llama")
    assert len(found.notes) == notes
    if stated is not None:
        assert f"{LLAMA_PARAMS:,}" in found.notes[1]
        assert f"{stated:,}" in found.notes[1]


def test_a_catalog_model_does_not_ask_the_hub(hub: Hub) -> None:
    asked = hub(info_error=AssertionError("asked"))
    assert find_architecture("meta-llama/Llama-3.1-8B").notes == ()
    assert asked == []


def test_without_a_network_the_cache_serves(hub: Hub) -> None:
    asked = hub(info_error=ConnectionError("no network"))
    assert find_architecture("someone/small-llama").architecture.total_params == LLAMA_PARAMS
    assert asked == ["config.json from the cache"]


REFUSALS = {
    "no network": (
        {"info_error": ConnectionError(), "file_error": http_error("LocalEntryNotFoundError")},
        "cannot be reached from here",
    ),
    "no such model": ({"info_error": http_error("RepositoryNotFoundError")}, "no public model someone/small-llama"),
    "gated": ({"file_error": http_error("GatedRepoError")}, "accept its terms"),
    "no config": ({"file_error": http_error("RemoteEntryNotFoundError")}, "no config.json"),
}


@pytest.mark.parametrize(("answers", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_every_no_is_one_sentence(hub: Hub, answers: dict[str, Any], sentence: str) -> None:
    hub(**answers)
    with pytest.raises(InputError, match=sentence):
        find_architecture("someone/small-llama")


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r'Unknown model .* type: pip install "tunecast\[calibrate\]"'):
        find_architecture("someone/small-llama")


def test_a_family_without_formulas_names_the_option(hub: Hub) -> None:
    hub({**LLAMA, "model_type": "persimmon", "architectures": ["PersimmonForCausalLM"]})
    with pytest.raises(UnbuiltFamilyError, match="--exact"):
        find_architecture("someone/persimmon")


def test_a_misspelt_catalog_name_never_leaves_the_machine(hub: Hub) -> None:
    asked = hub(info_error=AssertionError("asked"))
    with pytest.raises(UnknownNameError, match="Did you mean"):
        find_architecture("llama-3.1-8x")
    assert asked == []


@pytest.mark.parametrize(
    ("name", "yes"), [("a/b", True), ("a/b/c", False), ("a", False), ("../b", False), ("a/b c", False)]
)
def test_the_form_of_a_hub_id(name: str, yes: bool) -> None:
    assert looks_like_hub_id(name) is yes
