"""Adapters where nobody names a module: PEFT's own choice, by family."""

from __future__ import annotations

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.adapter_targets import adaptable_modules
from tunecast.model.architectures import load_architecture
from tunecast.model.peft_targets import peft_targets
from tunecast.model.resolve import resolve_run

FAMILIES = [
    ("meta-llama/Llama-3.1-8B", "llama"), ("mistralai/Mistral-7B-v0.1", "mistral"), ("google/gemma-2-9b", "gemma2"),
    ("openai-community/gpt2", "gpt2"), ("EleutherAI/pythia-1.4b", "gpt_neox"), ("tiiuae/falcon-7b", "falcon"),
    ("bigscience/bloom-560m", "bloom"), ("microsoft/phi-1_5", "phi"), ("Qwen/Qwen2.5-7B", "qwen2"),
    ("EleutherAI/gpt-j-6b", "gptj"), ("facebook/opt-1.3b", "opt"), ("stabilityai/stablelm-2-1_6b", "stablelm"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "family"), FAMILIES)
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_trl_leaves_the_targets_to_peft(model: str, family: str, method: str) -> None:
    mapping = pytest.importorskip("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    older = {"hf_code": "4.49"} if family == "falcon" else {}  # transformers 5 quantizes none of its maps
    resolved = resolve_run(load_architecture(model), {"stack": "trl", "method": method, **older})
    assert set(resolved.run.lora_target_modules) == set(mapping[family])
    assert resolved.origins["lora_target_modules"] == "stack-default"


@pytest.mark.parametrize(("model", "family"), [("microsoft/phi-4", "phi3"), ("openai/gpt-oss-20b", "gpt_oss")])
def test_all_linear_is_assumed_where_peft_has_none(model: str, family: str) -> None:
    mapping = pytest.importorskip("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    architecture = load_architecture(model)
    assert family not in mapping
    assert architecture.model_type == family
    assert peft_targets(architecture, adaptable_modules(architecture)) == ()
    resolved = resolve_run(architecture, {"stack": "trl", "method": "lora"})
    assert resolved.run.lora_target_modules == adaptable_modules(architecture)
    assert resolved.origins["lora_target_modules"] == "assumed"
    assert any("all-linear is assumed" in note for note in resolved.notes)


def test_a_stack_whose_targets_the_model_lacks_says_what_to_type() -> None:
    with pytest.raises(InputError, match=r"--stack torchtune adapts q_proj.*gpt2 has c_attn.*all-linear"):
        resolve_run(load_architecture("openai-community/gpt2"), {"stack": "torchtune", "method": "lora"})
