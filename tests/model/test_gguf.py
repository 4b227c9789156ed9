"""Exported files against the sizes of published ones, which llama.cpp wrote."""

from __future__ import annotations

import pytest

from tunecast.model.architectures import load_architecture
from tunecast.model.gguf import gguf_bytes, more_bits, stored_type

GB, GIB = 1e9, 2.0**30
BARTOWSKI = "huggingface.co/bartowski: phi-4-GGUF, Llama-3.1-Nemotron-70B-Instruct-HF-GGUF, Mixtral-8x22B-v0.1-GGUF"
GEMMA = "huggingface.co/RichardErkhov/LlamaFinetuneBase_-_Gemma-2-9B-gguf, whose GB are 2**30 bytes"
PUBLISHED = [
    ("microsoft/phi-4", "q4", 9.05 * GB, BARTOWSKI),
    ("microsoft/phi-4", "q5", 10.60 * GB, BARTOWSKI),
    ("microsoft/phi-4", "q6", 12.03 * GB, BARTOWSKI),
    ("microsoft/phi-4", "q8", 15.58 * GB, BARTOWSKI),
    ("meta-llama/Llama-3.1-70B", "q4", 42.52 * GB, BARTOWSKI),
    ("meta-llama/Llama-3.1-70B", "q5", 49.95 * GB, BARTOWSKI),
    ("meta-llama/Llama-3.1-70B", "q6", 57.89 * GB, BARTOWSKI),
    ("meta-llama/Llama-3.1-70B", "q8", 74.98 * GB, BARTOWSKI),
    ("mistralai/Mixtral-8x22B-v0.1", "q4", 85.58 * GB, BARTOWSKI),
    ("mistralai/Mixtral-8x22B-v0.1", "q5", 99.96 * GB, BARTOWSKI),
    ("google/gemma-2-9b", "q4", 5.37 * GIB, GEMMA),
    ("google/gemma-2-9b", "q5", 6.19 * GIB, GEMMA),
    ("google/gemma-2-9b", "q6", 7.07 * GIB, GEMMA),
    ("google/gemma-2-9b", "q8", 9.15 * GIB, GEMMA),
]


@pytest.mark.parametrize(("model", "export", "published", "source"), PUBLISHED)
def test_files_are_as_large_as_published_ones(model: str, export: str, published: float, source: str) -> None:
    assert gguf_bytes(load_architecture(model), export) == pytest.approx(published, rel=0.012), source


def test_rows_of_other_lengths_take_types_of_shorter_blocks() -> None:
    assert [stored_type("Q4_K", row) for row in (512, 896, 100)] == ["Q4_K", "Q5_0", "F16"]
    assert [stored_type("Q8_0", row) for row in (512, 896, 100)] == ["Q8_0", "Q8_0", "F16"]


def test_small_models_have_more_bits_than_large_ones() -> None:
    """A table of tokens that makes the logits too has 6 or 8 bits, and rows of 896 values no block of 256."""
    bits = {}
    for model in ("Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"):
        architecture = load_architecture(model)
        bits[model] = 8.0 * gguf_bytes(architecture, "q4") / architecture.total_params
    assert list(bits.values()) == sorted(bits.values(), reverse=True)
    assert bits["Qwen/Qwen2.5-0.5B"] > 6.0


def test_half_of_the_layers_keep_more_bits() -> None:
    assert [layer for layer in range(32) if more_bits(layer, 32)] == [
        0,
        1,
        2,
        3,
        6,
        9,
        12,
        15,
        18,
        21,
        24,
        27,
        *range(28, 32),
    ]
