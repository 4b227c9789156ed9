"""What PEFT adapts in mixtures of experts, by its own code on models of transformers' own configurations."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.catalogs.errors import UnknownNameError
from tunecast.model.architectures import architecture_from_config
from tunecast.model.resolve import resolve_run
from tunecast.model.trained import trainable_params

FAMILIES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
LAYERS = 4


def config_of(model_type: str) -> Any:
    return pytest.importorskip("transformers").AutoConfig.for_model(model_type, num_hidden_layers=LAYERS)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj,gate_proj,up_proj,down_proj", "o_proj"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_adapters_are_as_large_as_pefts(model_type: str, targets: str) -> None:
    """PEFT turns names into stacked parameters only for families that transformers' table of conversions has."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    if model_type in ("mixtral", "deepseek_v3") and "gate_proj" in targets:
        pytest.skip("no maps of these names")
    config = config_of(model_type)
    architecture = architecture_from_config(config.to_dict() | {"architectures": [FAMILIES[model_type]]}, model_type)
    run = resolve_run(architecture, {"method": "lora", "lora_r": 16, "lora_target_modules": targets}).run
    named = targets if targets == "all-linear" else targets.split(",")
    with torch.device("meta"):
        real = peft.get_peft_model(
            transformers.AutoModelForCausalLM.from_config(config), peft.LoraConfig(r=16, target_modules=named)
        )
    assert trainable_params(architecture, run) == sum(p.numel() for p in real.parameters() if p.requires_grad)


def test_a_router_that_peft_does_not_take_is_no_target() -> None:
    config = config_of("qwen2_moe").to_dict() | {"architectures": ["Qwen2MoeForCausalLM"]}
    with pytest.raises(UnknownNameError, match="gate"):
        resolve_run(architecture_from_config(config, "it"), {"method": "lora", "lora_target_modules": "gate"})
