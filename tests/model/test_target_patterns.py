"""Targets as a regular expression: paths of modules as transformers has them, and what PEFT makes of a pattern."""

from __future__ import annotations

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.catalogs.models import load_models
from tunecast.model.adapter_targets import target_modules, targets_there
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.resolve import resolve_run
from tunecast.model.target_patterns import DECODERS, NO_PATHS, PLAIN, SEEING, places
from tunecast.model.trained import trainable_params

SEEN = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
"""As axolotl's examples of models that see have it."""
LFM2 = {
    "model_type": "lfm2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4000, "max_position_embeddings": 4096,
    "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3, "conv_bias": False,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip


def one_of_each_family() -> list[str]:
    """The first model of each family that the catalog has, but for those whose paths are not known."""
    found: dict[str, str] = {}
    for row in load_models().values():
        try:
            architecture = load_architecture(row.hf_id)
        except (InputError, NotSupportedError):
            continue
        if architecture.model_type not in NO_PATHS:
            found.setdefault(architecture.model_type, row.hf_id)
    return list(found.values())


def same_paths(architecture: Architecture, decoder: str) -> None:
    """Every linear map of the layers is where transformers has it, in a module that is there."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tunecast.calibrate.trace.hf import hf_config
    from tunecast.calibrate.trace.seeing import language_model

    with torch.device("meta"):
        model = language_model(hf_config(architecture), tied=architecture.tie_word_embeddings)
    names = {linear.name for group in architecture.groups for linear in group.layer.linears}
    modules = dict(model.named_modules())
    real = {
        path
        for path, module in modules.items()
        if path.rpartition(".")[2] in names
        and (isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D")
    }
    found = list(places(architecture, decoder))
    assert {path for name, path in found if name} == real
    assert {path for name, path in found if not name} <= modules.keys()


@pytest.mark.parametrize("name", one_of_each_family())
def test_paths_are_transformers(name: str) -> None:
    architecture = load_architecture(name)
    same_paths(architecture, DECODERS.get(architecture.model_type, PLAIN)[0])


def test_paths_of_a_convolution_are_transformers() -> None:
    same_paths(architecture_from_config(LFM2, "lfm2"), "model.layers")


def test_paths_in_a_model_that_sees_are_transformers() -> None:
    config = {
        "model_type": "qwen2_5_vl_text", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4000, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    same_paths(architecture_from_config(config, "qwen2_5_vl_text"), SEEING[0])


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("Qwen/Qwen2.5-0.5B", r"model\.layers\.\d+\.self_attn\.(q|v)_proj"),
        ("Qwen/Qwen2.5-0.5B", r".*_proj"),
        ("Qwen/Qwen2.5-0.5B", r"^(?!.*visual).*(?:q_proj|v_proj)$"),
        ("EleutherAI/pythia-160m", r".*\.mlp\..*h|embed_out"),
        ("openai-community/gpt2", r"transformer\.h\.\d+\.attn\.c_attn"),
        ("EleutherAI/pythia-160m", r".*layers.*(query_key_value|dense_h_to_4h)$"),
        ("Qwen/Qwen1.5-MoE-A2.7B", r".*shared_expert\.(gate|up|down)_proj"),
        ("Qwen/Qwen3-30B-A3B", r"model\.layers\.\d+\.mlp\.experts\.(gate|up|down)_proj"),
        ("Qwen/Qwen3-30B-A3B", r".*layers\.[01]\.self_attn\.q_proj|.*\.mlp\.gate"),
        ("mistralai/Mixtral-8x7B-v0.1", r".*\.(w1|w2|w3|o_proj)"),
        ("deepseek-ai/DeepSeek-V2-Lite", r".*\.mlp\.(gate|up|down)_proj"),
        ("zai-org/GLM-4.5-Air", r".*\.shared_experts\.(gate|up)_proj"),
        ("Qwen/Qwen3.5-0.8B", r".*(linear_attn\.out_proj|self_attn\.[qk]_proj)"),
    ],
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # PEFT's own, though it uses them
def test_a_pattern_means_what_peft_makes_of_it(name: str, pattern: str) -> None:
    """The adapters that PEFT itself puts on the real model, given the pattern."""
    for module in ("torch", "transformers", "peft"):
        pytest.importorskip(module)
    import peft
    import torch
    import transformers

    from tunecast.calibrate.trace.grid import at_depth
    from tunecast.calibrate.trace.hf import hf_config

    architecture = at_depth(load_architecture(name), 4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config(architecture, 4))
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=pattern, task_type="CAUSAL_LM"))
    real = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    resolved = resolve_run(architecture, {"max_length": 512, "lora_r": 8, "lora_target_modules": pattern})
    assert trainable_params(architecture, resolved.run) == real
    assert any("regular expression of targets means" in note for note in resolved.notes)


def test_a_name_may_have_the_end_of_its_path_before_it() -> None:
    """PEFT takes ``self_attn.q_proj`` where a path ends so (``key.endswith``)."""
    model = load_architecture("Qwen/Qwen2.5-0.5B")
    assert target_modules(model, "self_attn.o_proj,mlp.up_proj") == target_modules(model, "o_proj,up_proj")
    with pytest.raises(InputError, match=r"Unknown target module 'mlp\.q_proj'"):
        target_modules(model, "mlp.q_proj")


def test_both_maps_of_a_stacked_parameter_in_a_files_list_are_there() -> None:
    """Each alone is refused, as by PEFT."""
    model = load_architecture("Qwen/Qwen3-30B-A3B")
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    assert targets_there(model, [*names, "w1"]) == (tuple(names), ("w1",))


@pytest.mark.parametrize("name", ["google/gemma-3-4b-pt", "mistralai/Mistral-Small-3.1-24B-Base-2503"])
def test_paths_of_a_model_that_sees_are_those_of_its_language_model(name: str) -> None:
    architecture = load_architecture(name)
    named = target_modules(architecture, "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj")
    assert target_modules(architecture, SEEN) == named


@pytest.mark.parametrize(
    ("name", "pattern", "said"),
    [
        ("Qwen/Qwen2.5-0.5B", r"model\.layers\.[0-9]\.self_attn\.q_proj", "q_proj in some places only"),
        ("Qwen/Qwen1.5-MoE-A2.7B", r".*layers\.\d\.mlp\.shared_expert\.up_proj", "up_proj in some places"),
        ("Qwen/Qwen2.5-0.5B", r"(.*_proj", "Python cannot read"),
        ("Qwen/Qwen2.5-0.5B", r".*\.w[123]", "matches no linear map .* model.layers.0.self_attn.q_proj"),
        ("Qwen/Qwen2.5-0.5B", r"q_proj|v_proj", "it has to match whole paths"),
        ("Qwen/Qwen3-30B-A3B", r".*experts.*", "also matches blocks of layers"),  # the block of all experts
        ("Qwen/Qwen2.5-0.5B", r".*self_attn.*", "also matches blocks of layers"),
        ("google/gemma-3-4b-pt", rf"({SEEN}|model.vision_tower.*fc1)", "parts beside the language model"),
        ("facebook/opt-125m", r".*\.(q|v)_proj", "paths are not known here"),
        ("zai-org/GLM-4.5-Air", r".*\.up_proj", "names up_proj without gate_proj"),
    ],
)
def test_a_pattern_that_means_something_else_is_refused(name: str, pattern: str, said: str) -> None:
    with pytest.raises((InputError, NotSupportedError), match=said):
        target_modules(load_architecture(name), pattern)
