"""What stands beside the text decoder is said, or refused where the decoder cannot be told from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunecast import api
from tunecast.catalogs.errors import InputError

TEXT = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2,
    "num_attention_heads": 8, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
OWN = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {"hidden_size": 64}}


def file_of(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_a_catalog_models_vision_part_is_named_with_its_size() -> None:
    """4,300,079,472 published parameters less 3,880,263,168 of the text model are 0.42B, 0.8 GiB of two bytes."""
    (found,) = api.estimate("google/gemma-3-4b-pt", gpu="h100-sxm5-80gb", method="full")
    assert found.total_params + 419_816_304 == 4_300_079_472
    assert any(
        "0.42B parameters of its other parts, which see or hear (0.8 GiB in bf16), are left out" in note
        for note in found.notes
    )
    (text,) = api.estimate("meta-llama/Llama-3.1-8B", gpu="h100-sxm5-80gb")
    assert not any("multimodal" in note for note in text.notes)


def test_a_files_other_parts_are_named(tmp_path: Path) -> None:
    (found,) = api.estimate(file_of(tmp_path, {**OWN, "text_config": TEXT}), gpu="h100-sxm5-80gb")
    (note,) = [note for note in found.notes if "LlavaForConditionalGeneration" in note]
    assert "only its text decoder (llama) is forecast" in note


@pytest.mark.parametrize("text", [{}, {"text_config": {"hidden_size": 512}}, {**TEXT, "architectures": None}])
def test_a_config_without_a_text_part_of_its_own_is_refused(tmp_path: Path, text: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no text_config with a model_type"):
        api.estimate(file_of(tmp_path, {**OWN, **text}), gpu="h100-sxm5-80gb")


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"torch_dtype": "float32"}, "its weights are float32"), ({"dtype": "torch.float32"}, "--dtype fp32"),
        ({"dtype": "float64"}, "its weights are float64, which is not built"), ({"dtype": "bfloat16"}, ""),
        ({"torch_dtype": "float16"}, ""), ({"dtype": "auto"}, ""), ({}, ""),
    ],
)  # fmt: skip
def test_weights_of_another_width_than_is_counted_are_told(tmp_path: Path, stated: dict[str, Any], says: str) -> None:
    (found,) = api.estimate(file_of(tmp_path, {**TEXT, **stated}), gpu="h100-sxm5-80gb", method="lora")
    notes = [note for note in found.notes if "says that its weights are" in note]
    assert len(notes) == (1 if says else 0)
    assert all(says in note for note in notes)


def test_what_is_no_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dtype of 16"):
        api.estimate(file_of(tmp_path, {**TEXT, "torch_dtype": 16}), gpu="h100-sxm5-80gb")
