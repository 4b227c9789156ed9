"""Model names as people and the hub spell them."""

from __future__ import annotations

import pytest

from tunecast.catalogs.errors import NotSupportedError, UnknownNameError
from tunecast.catalogs.models import find_model, find_quantized, load_models, model_aliases


@pytest.mark.parametrize(
    ("name", "hf_id"),
    [
        ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B"),
        ("META-LLAMA/llama-3.1-70b", "meta-llama/Llama-3.1-70B"),
        ("llama-3.1-70b", "meta-llama/Llama-3.1-70B"),
        ("Llama 3.1 70B", "meta-llama/Llama-3.1-70B"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "meta-llama/Llama-3.1-8B"),
        ("NousResearch/Llama-2-70b-hf", "meta-llama/Llama-2-70b-hf"),
        ("TheBloke/Llama-2-70B-GPTQ", "meta-llama/Llama-2-70b-hf"),
        ("TechxGenus/Meta-Llama-3-8B-GPTQ", "meta-llama/Meta-Llama-3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("google/gemma-3-27b-it", "google/gemma-3-27b-pt"),
        ("gpt2", "openai-community/gpt2"),
        ("opt-1.3b", "facebook/opt-1.3b"),
        ("opt-13b", "facebook/opt-13b"),
    ],
)
def test_a_name_finds_its_model(name: str, hf_id: str) -> None:
    assert find_model(name).hf_id == hf_id


def test_every_hub_id_finds_itself_and_every_alias_its_model() -> None:
    models = load_models()
    assert {hf_id: find_model(hf_id).hf_id for hf_id in models} == {hf_id: hf_id for hf_id in models}
    aliases = model_aliases()
    assert {alias: find_model(alias).hf_id for alias in aliases} == aliases


def test_a_copy_with_another_window_keeps_its_own() -> None:
    assert find_model("Qwen/Qwen3-4B-Instruct-2507").max_position == 262144
    assert find_model("huggyllama/llama-7b").max_position == 2048
    assert find_model("meta-llama/Llama-2-7b-hf").max_position == 4096


@pytest.mark.parametrize(
    ("name", "hf_id", "few_bits"),
    [
        ("unsloth/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", False),
        ("unsloth/Qwen3-30B-A3B-bnb-4bit", "Qwen/Qwen3-30B-A3B", True),
        ("unsloth/gpt-oss-20b-unsloth-bnb-4bit", "openai/gpt-oss-20b", True),
        ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b", False),
        ("unsloth/Llama-3.2-3B-Instruct-unsloth-bnb-4bit", "meta-llama/Llama-3.2-3B", True),
        ("unsloth/Mistral-Nemo-Instruct-2407", "mistralai/Mistral-Nemo-Base-2407", False),
        ("Qwen/Qwen3-8B-GPTQ-Int8", "Qwen/Qwen3-8B", True),
        ("gpt-oss-120b-unsloth-bnb-4bit", "openai/gpt-oss-120b", True),
    ],
)
def test_a_copy_by_the_same_owner_or_unsloth_is_told_by_its_name(name: str, hf_id: str, few_bits: bool) -> None:
    """Each pair of Unsloth's is one of its own table of copies and originals (``unsloth/models/mapper.py``)."""
    assert find_model(name).hf_id == hf_id
    assert (find_quantized(name) is not None) == few_bits


def test_a_copy_by_rule_keeps_the_window_of_what_it_copies() -> None:
    assert find_model("unsloth/Qwen3-4B-Instruct-2507-unsloth-bnb-4bit").max_position == 262144


@pytest.mark.parametrize(
    "name",
    ["someone/Qwen3-8B", "someone/Qwen3-8B-bnb-4bit", "unsloth/phi-4", "unsloth/Phi-3-mini-4k-instruct-bnb-4bit"],
)
def test_a_copy_that_may_be_another_shape_stays_unknown(name: str) -> None:
    """Unsloth's Phi-3 and Phi-4 are rebuilt as other classes."""
    with pytest.raises(UnknownNameError):
        find_model(name)


@pytest.mark.parametrize(
    ("name", "plain", "kind"),
    [
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B", "FP8"),
        ("unsloth/Llama-3.1-8B-Instruct-FP8-Dynamic", "unsloth/Llama-3.1-8B-Instruct", "FP8"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct", "AWQ"),
        ("unsloth/Qwen3-30B-A3B-GGUF", "unsloth/Qwen3-30B-A3B", "GGUF"),
    ],
)
def test_a_copy_that_no_forecast_trains_is_refused_by_its_original(name: str, plain: str, kind: str) -> None:
    with pytest.raises(NotSupportedError, match=f"is {plain} with its weights in {kind}, .*; give {plain} for"):
        find_model(name)
    assert find_model(plain)


@pytest.mark.parametrize(
    ("typo", "meant"), [("Llama-3.1-80B", "Llama-3.1-8B"), ("mistralai/Mistral-7B-v0.4", "mistralai/Mistral-7B-v0.3")]
)
def test_an_unknown_model_offers_the_closest_once_each(typo: str, meant: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_model(typo)
    offered = str(caught.value).split("Did you mean ")[1].split("?")[0].split(", ")
    assert meant in offered
    assert len(set(offered)) == len(offered)


@pytest.mark.parametrize("name", ["mosaicml/mpt-7b", "mosaicml/mpt-30b", "nvidia/GPT3-175B"])
def test_what_is_offered_is_something_else_and_can_be_typed(name: str) -> None:
    """The catalog has MosaicML's own MPT under a name that says what it is not in brackets."""
    with pytest.raises(UnknownNameError) as caught:
        find_model(name)
    offered = str(caught.value).split("Did you mean ")[1].split("?")[0].split(", ")
    assert all(find_model(other) for other in offered)
    assert not any(other.startswith(name) for other in offered)


@pytest.mark.parametrize("name", ["nope/model", "someone/unknown-7b"])
def test_a_model_like_none_offers_none(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        find_model(name)
    assert "Did you mean" not in str(caught.value)


def test_an_unknown_owner_of_a_known_name_is_not_guessed() -> None:
    with pytest.raises(UnknownNameError):
        find_model("somebody/Llama-3.1-70B")


def test_known_counts() -> None:
    """Against the numbers the hub shows: Llama-3.1-8B 8,030,261,248; Mixtral-8x7B 46.7B with 12.9B active."""
    assert find_model("Llama-3.1-8B").total_params == 8_030_261_248
    mixtral = find_model("mistralai/Mixtral-8x7B-v0.1")
    assert mixtral.total_params == pytest.approx(46.7e9, rel=0.001)
    assert mixtral.active_params == pytest.approx(12.9e9, rel=0.005)


def test_facts_that_were_not_found_are_none() -> None:
    models = load_models()
    assert models["bigscience/bloom-560m"].max_position is None
    assert models["deepseek-ai/DeepSeek-V3"].download_bytes is None
    assert models["Qwen/Qwen2.5-7B"].sliding_window is None
    assert models["bigcode/starcoder2-7b"].gated is None
