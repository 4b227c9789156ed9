"""Bytes of published weights against the sizes of the published files, and what of them is downloaded."""

from __future__ import annotations

import pytest

import tunecast
from tunecast.model.architectures import load_architecture
from tunecast.model.published_weights import published_bytes

GB = 1e9
PUBLISHED: dict[tuple[str, str | None], float] = {
    ("meta-llama/Meta-Llama-3-8B", "bnb-4bit"): 5.70,
    ("meta-llama/Llama-2-7b-hf", "gptq-4bit"): 3.90,
    ("openai/gpt-oss-20b", None): 13.76,
    ("openai/gpt-oss-120b", None): 65.2,
    ("meta-llama/Llama-3.1-8B", None): 16.06,
}
"""By model and storage, GB of the hub's files: unsloth/llama-3-8b-bnb-4bit, TheBloke/Llama-2-7B-GPTQ, and the models'
own repositories."""


@pytest.mark.parametrize(("place", "size_gb"), PUBLISHED.items(), ids=str)
def test_published_files_are_as_large(place: tuple[str, str | None], size_gb: float) -> None:
    name, stored_as = place
    assert published_bytes(load_architecture(name), stored_as) / GB == pytest.approx(size_gb, rel=0.005)


def test_eight_bit_weights_take_a_byte_each() -> None:
    """DeepSeek-V3: its 671B parameters, those of the embeddings and the head in 16 bits."""
    architecture = load_architecture("deepseek-ai/DeepSeek-V3")
    wide = architecture.embedding_params + architecture.head_params
    assert published_bytes(architecture) == pytest.approx(architecture.total_params + wide, rel=0.001)


def load_how(model: str, **options: str) -> tuple[str, str]:
    (found,) = tunecast.estimate(model, gpu="l40s", max_length=512, tokens="1M", **options)
    assert found.whole_run is not None
    told = {phase.name: phase.how for phase in found.whole_run.phases}
    return told["download"], told["load"]


def test_a_copy_in_four_bits_is_downloaded_as_it_is_where_the_run_is_on_it() -> None:
    download, load = load_how("unsloth/llama-3-8b-bnb-4bit", method="qlora")
    assert download.startswith("5.7 GB")
    assert "quantized" not in load
    download, load = load_how("meta-llama/Meta-Llama-3-8B", method="qlora")
    assert download.startswith("16.1 GB")
    assert "quantized to 4 bits" in load
    assert load_how("unsloth/llama-3-8b-bnb-4bit", method="lora")[0].startswith("16.1 GB"), "of the unquantized weights"
