"""DoRA's peak where a map's input is wide, against PEFT's real code traced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tunecast

WIDE = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen2", "Qwen2ForCausalLM"), ("starcoder2", "Starcoder2ForCausalLM")]
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_peak_holds_the_identity_until_the_adapted_weight_is_made(
    model_type: str, name: str, dropout: float, tmp_path: Path
) -> None:
    """Of as many rows and columns as the widest map has inputs, and in fp32 until both products are done."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        model_type, **WIDE, num_key_value_heads=2, vocab_size=512, bos_token_id=0, eos_token_id=0
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict() | {"architectures": [name]}, default=str))
    options = {"method": "lora", "use_dora": True, "lora_dropout": dropout, "max_length": 64, "gpu": "h100-sxm5-80gb"}
    (told,), (traced,) = (tunecast.estimate(str(path), exact=exact, **options) for exact in (False, True))
    assert told.memory.allocated_bytes.value == pytest.approx(traced.memory.allocated_bytes.value, rel=1e-3)
