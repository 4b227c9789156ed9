"""Architectures from the catalog and from config.json: exact parameter counts, clear refusals. No torch."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunecast.beside_the_text import part_notes
from tunecast.catalogs.configs import config_from_row, config_table
from tunecast.catalogs.errors import (
    InputError,
    NotSupportedError,
    TunecastError,
    UnbuiltFamilyError,
    UnknownNameError,
)
from tunecast.catalogs.models import ModelRow, load_models
from tunecast.model.architectures import (
    architecture_from_config,
    architecture_from_row,
    load_architecture,
)
from tunecast.model.config_fields import KIND
from tunecast.model.families import FAMILIES
from tunecast.model.families_vision import VISION_FAMILIES
from tunecast.model.litgpt import as_litgpt
from tunecast.model.resolve import resolve_run
from tunecast.model.text_part import class_defaults
from tunecast.model.trained import trainable_params

BUILT = {name for family in FAMILIES.values() for name in family.classes}
BUILT_ROWS = [row for row in load_models().values() if row.architecture_class in BUILT]
OTHER_ROWS = [row for row in load_models().values() if row.architecture_class not in BUILT]
REFUSED = ("facebook/opt-350m",)
"""Models of a built family with a switch that is not built."""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


QWEN = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""In the catalog by the classes that see."""


def test_catalog_has_most_built_families() -> None:
    unlisted = BUILT - {row.architecture_class for row in BUILT_ROWS}
    unseen = {f"{name}ForCausalLM" for name in ("Ministral", "Arcee", "HunYuanDenseV1", "Lfm2")}
    unseen |= {*QWEN, *(f.architecture_class for f in VISION_FAMILIES)}
    assert unlisted <= {"MptForCausalLM", "GraniteMoeForCausalLM", "Gemma4ForCausalLM", *unseen}
    assert len(BUILT_ROWS) >= 100


@pytest.mark.parametrize("row", BUILT_ROWS, ids=lambda row: row.hf_id)
def test_total_params_equal_the_count_on_the_meta_device(row: Any) -> None:
    if row.hf_id in REFUSED:
        with pytest.raises(NotSupportedError, match="which has no formulas; trace its real code with --exact"):
            architecture_from_row(row)
    else:
        assert architecture_from_row(row).total_params == row.total_params - (row.vision_params or 0)


@pytest.mark.parametrize("row", OTHER_ROWS[:5], ids=lambda row: row.hf_id)
def test_other_families_are_refused_by_class_name(row: Any) -> None:
    with pytest.raises(NotSupportedError, match=row.architecture_class):
        architecture_from_row(row)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen-1_8B", 1.84), ("Qwen/Qwen-7B", 7.72), ("Qwen/Qwen-14B-Chat", 14.17), ("Qwen/Qwen-72B", 72.29),
        ("mosaicml/mpt-1b (architecture only, trained from scratch)", 1.31595),
        ("mosaicml/mpt-7b (architecture only, trained from scratch)", 6.65886), ("llm-foundry/mpt-70b", 64.8624),
        ("THUDM/chatglm3-6b", 6.2436), ("THUDM/chatglm-6b", 6.1733), ("microsoft/phi-1_5", 1.418),
    ],
)  # fmt: skip
def test_models_without_code_in_transformers_have_their_published_size(name: str, billions: float) -> None:
    digits = len(str(billions).split(".")[1])
    assert round(load_architecture(name).total_params / 1e9, digits) == billions


def test_qwen_1_trains_as_many_adapter_parameters_as_its_own_scripts_print() -> None:
    qwen = load_architecture("Qwen/Qwen-7B-Chat")
    run = resolve_run(qwen, {"lora_r": 64, "lora_target_modules": "c_attn,c_proj,w1,w2"}).run
    assert trainable_params(qwen, run) == 143_130_624


def test_config_gives_the_same_architecture_as_the_catalog() -> None:
    from_config = architecture_from_config(CONFIG, "meta-llama/Llama-3.1-8B")
    assert from_config == load_architecture("meta-llama/Llama-3.1-8B")
    assert from_config.total_params == 8_030_261_248


def test_key_value_heads_default_as_in_each_configuration_class() -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("num_key_value_heads", "architectures")}
    assert architecture_from_config(config, "x").groups[0].layer.attention.num_kv_heads == 32
    mistral = architecture_from_config({**config, "model_type": "mistral"}, "x")
    assert mistral.groups[0].layer.attention.num_kv_heads == 8


def test_biases_follow_the_family_and_the_config() -> None:
    plain = architecture_from_config(CONFIG, "x").total_params
    biased = architecture_from_config({**CONFIG, "attention_bias": True, "mlp_bias": True}, "x").total_params
    assert biased - plain == 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
    qwen = architecture_from_config({**CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "x")
    assert qwen.total_params - plain == 32 * (4096 + 1024 + 1024)


def test_sliding_windows_split_layers_into_groups() -> None:
    config = {**CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    assert len(architecture_from_config(config, "x").groups) == 1, "use_sliding_window is false by default"
    groups = architecture_from_config({**config, "use_sliding_window": True, "max_window_layers": 24}, "x").groups
    assert [(group.count, group.layer.attention.window) for group in groups] == [(24, None), (8, 4096)]
    mistral = architecture_from_config(
        {**CONFIG, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "x"
    )
    assert [(group.count, group.layer.attention.window) for group in mistral.groups] == [(32, 4096)]


OF_EXPERTS = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers 1,000,000, above 1,000"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"num_key_value_heads": 5}, "do not divide"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "mistral"}, "model_type 'mistral', but its architectures name LlamaForCausalLM, .* 'llama'"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 32 layers"),
        ({"layer_types": ["foo"] * 32}, "'foo' among its layer_types"),
        ({"layer_types": "full_attention"}, "a list of the layers' kinds"),
        ({"head_dim": 127}, "heads of 127 values"),
        ({"rope_parameters": "default"}, "rope_parameters='default'.* an object"),
        ({"partial_rotary_factor": 2}, "from 0 to 1"),
        (OF_EXPERTS | {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (OF_EXPERTS | {"mlp_only_layers": 5}, "a list of layers' numbers"),
        (OF_EXPERTS | {"norm_topk_prob": "no"}, "true or false"),
        (OF_EXPERTS | {"num_experts": None}, "no number of experts in num_experts"),
        (OF_EXPERTS | {"num_experts": 64, "num_local_experts": 32}, "num_experts=64 and num_local_experts=32"),
        ({"hidden_act": None}, "hidden_act null"),
        ({"model_type": "gemma2", "architectures": None, "sliding_window": None}, "sliding_window null"),
    ],
)
def test_broken_configs_are_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        architecture_from_config({**CONFIG, **change}, "broken.json")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


SAVED = [row for row in BUILT_ROWS if row.architecture_class in config_table()]


@pytest.mark.parametrize("row", SAVED, ids=[row.hf_id for row in SAVED])
def test_a_config_that_transformers_saved_is_read_as_what_it_was_made_of(row: ModelRow) -> None:
    """Whole, and without what its class has by default: transformers 5 renames fields and writes others anew."""
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING
    config = dict(config_from_row(row))
    model_type = config["model_type"]
    if model_type not in mapping or model_type not in FAMILIES:
        pytest.skip("not in transformers")
    try:
        expected = architecture_from_config(config, "x")
    except NotSupportedError:
        pytest.skip("refused by name")
    own = mapping[model_type].from_dict(config)
    for saved in (own.to_dict(), own.to_diff_dict()):
        read = json.loads(json.dumps(saved, default=str)) | {"model_type": model_type}
        assert replace(architecture_from_config(read, "x"), config="") == replace(expected, config="")


def test_experts_go_by_either_name_and_may_be_none() -> None:
    config = {**CONFIG, **OF_EXPERTS, "num_hidden_layers": 2, "moe_intermediate_size": 512}
    by_name = [architecture_from_config({**config, name: 16}, "x") for name in ("num_experts", "num_local_experts")]
    assert by_name[0].total_params == by_name[1].total_params
    dense = architecture_from_config({**config, "num_experts": 0}, "x")
    assert all(group.layer.mlp.experts is None for group in dense.groups)


@pytest.mark.parametrize("model_type", sorted(class_defaults()))
def test_what_a_text_config_leaves_out_is_what_its_class_has(model_type: str) -> None:
    config = pytest.importorskip("transformers").CONFIG_MAPPING[model_type]()
    assert {field: getattr(config, field) for field in class_defaults()[model_type]} == class_defaults()[model_type]


def test_a_decoder_inside_another_config_says_what_differs_from_its_class_alone() -> None:
    """google/gemma-3-4b-it's published fields; the catalog states the same model in full."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    whole = {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}, "vision_config": {}}
    listed = load_architecture("google/gemma-3-4b-pt")
    found = architecture_from_config(whole, "x")
    assert found.total_params == listed.total_params
    assert found.groups == listed.groups
    (_, note) = part_notes(whole, "x")
    assert "num_attention_heads 8, vocab_size 262208, max_position_embeddings 131072" in note
    with pytest.raises(InputError, match="has no 'num_attention_heads'"):
        architecture_from_config(text, "x")


def test_windows_may_begin_with_the_first_layer() -> None:
    config = {**CONFIG, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}
    groups = architecture_from_config({**config, "use_sliding_window": True, "max_window_layers": 0}, "x").groups
    assert [(group.count, group.layer.attention.window) for group in groups] == [(32, 4096)]


JUNK: tuple[Any, ...] = ("x", "", [1], ["x"], {}, {"a": 1}, -1, 0, 1, 1.5, True, False, None, math.nan, 10**30)


def test_every_kind_of_layer_that_transformers_knows_is_one() -> None:
    known = pytest.importorskip("transformers.configuration_utils")
    assert all(KIND.fullmatch(kind) for kind in (*known.ALLOWED_LAYER_TYPES, "attention", "mamba"))


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_no_field_is_a_traceback_whatever_it_holds(model_type: str) -> None:
    """Every field that reading a family's config asks for, held against what may stand there."""
    listed = (config_from_row(row) for row in load_models().values() if row.architecture_class in config_table())
    own = next((config for config in listed if config["model_type"] == model_type), None)
    config = {**CONFIG, "model_type": model_type} if own is None else dict(own)
    config.pop("architectures", None)
    asked = Asked(config)
    with contextlib.suppress(TunecastError):
        architecture_from_config(asked, "x")
    assert len(asked.fields) > 5
    for field in asked.fields - {"text_config"}:
        for junk in JUNK:
            with contextlib.suppress(TunecastError):
                architecture_from_config({**config, field: junk}, "x")


class Asked(dict[str, Any]):
    """Remembers what it is asked for."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.fields: set[str] = set()

    def get(self, field: str, default: Any = None) -> Any:
        self.fields.add(field)
        return super().get(field, default)

    def __getitem__(self, field: str) -> Any:
        self.fields.add(field)
        return super().__getitem__(field)

    def __contains__(self, field: object) -> bool:
        self.fields.add(str(field))
        return super().__contains__(field)


def test_quantized_and_unknown_configs_are_refused_by_name() -> None:
    with pytest.raises(NotSupportedError, match="gptq"):
        architecture_from_config({**CONFIG, "quantization_config": {"quant_method": "gptq"}}, "x")
    for head in ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel", "Model"):
        with pytest.raises(NotSupportedError, match=f"is a Llama{head}, which is not built: only causal") as caught:
            architecture_from_config({**CONFIG, "architectures": [f"Llama{head}"]}, "x")
        assert not isinstance(caught.value, UnbuiltFamilyError), "the real code is no classifier's either"
    with pytest.raises(NotSupportedError, match="MambaForCausalLM"):
        architecture_from_config({**CONFIG, "model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "x")
    with pytest.raises(NotSupportedError, match="LlamaForSequenceClassification"):
        architecture_from_config({**CONFIG, "architectures": ["LlamaForSequenceClassification"]}, "x")


def test_the_decoder_of_a_multimodal_config_is_read() -> None:
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "sliding_window": 1024,
    }  # fmt: skip
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    row = load_models()["google/gemma-3-4b-pt"]
    assert architecture_from_config(config, "x").total_params == row.total_params - (row.vision_params or 0)


def test_names_of_older_configs_are_read() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    assert architecture_from_config(gpt2, "x").total_params == load_models()["openai-community/gpt2"].total_params
    falcon = {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "vocab_size": 65024, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
        "bias": False,
    }  # fmt: skip
    assert architecture_from_config(falcon, "x").total_params == load_models()["tiiuae/falcon-7b"].total_params


def test_loading_from_a_file_and_from_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert load_architecture(str(path)).total_params == load_architecture(str(tmp_path)).total_params == 8_030_261_248


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not JSON"), ("[1, 2]", "list"), ('{"a": 1}', "model_type"), ("\xff", "UTF-8")]
)
def test_foreign_files_are_one_sentence(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=words):
        load_architecture(str(path))


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(InputError, match="No such file"):
        load_architecture("/nowhere/config.json")
    with pytest.raises(UnknownNameError, match="Llama-3"):
        load_architecture("meta-llama/Llama-3.1-8X")


def test_a_width_that_its_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match=r"hidden_size 2047.*32 attention heads"):
        architecture_from_config({**CONFIG, "hidden_size": 2047}, "odd")


@pytest.mark.parametrize("bits", [{}, {"quant_method": "bnb-8bit"}])
def test_falcon_is_quantized_by_transformers_4_alone(bits: dict[str, Any]) -> None:
    """transformers 5 replaces maps that are ``nn.Linear`` itself, and Falcon's are not."""
    modeling = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    linear = pytest.importorskip("torch").nn.Linear
    assert issubclass(modeling.FalconLinear, linear)
    assert modeling.FalconLinear is not linear
    falcon, gpt2 = load_architecture("tiiuae/falcon-7b"), load_architecture("gpt2")
    with pytest.raises(NotSupportedError, match=r"quantizes none of the linear maps of falcon.*--method lora"):
        resolve_run(falcon, {"method": "qlora", **bits})
    assert resolve_run(as_litgpt(falcon), {"method": "qlora", "stack": "litgpt"}).run.base_quantization == "bnb-4bit"
    for architecture, older in ((falcon, {"hf_code": "4.49"}), (gpt2, {})):
        assert resolve_run(architecture, {"method": "qlora", **bits, **older}).run.base_quantization is not None


def test_a_key_value_count_of_none_is_all_heads() -> None:
    """As transformers' configurations read an explicit null; where the key is missing their default counts."""
    transformers = pytest.importorskip("transformers")
    for model_type, name in (("smollm3", "SmolLM3ForCausalLM"), ("seed_oss", "SeedOssForCausalLM")):
        plain = transformers.AutoConfig.for_model(model_type).to_dict() | {"architectures": [name]}
        told = {**plain, "num_key_value_heads": None}
        heads = transformers.AutoConfig.for_model(
            model_type, **{key: value for key, value in told.items() if key != "model_type"}
        ).num_key_value_heads
        (group, *_) = architecture_from_config(told, "told").groups
        assert group.layer.attention.num_kv_heads == heads == plain["num_attention_heads"]


@pytest.mark.parametrize(("model_type", "name"), [("t5", "T5ForConditionalGeneration"), ("bart", "BartForCausalLM")])
def test_an_encoder_with_a_decoder_is_refused_by_what_it_is(model_type: str, name: str) -> None:
    config = pytest.importorskip("transformers").AutoConfig.for_model(model_type).to_dict() | {"architectures": [name]}
    with pytest.raises(NotSupportedError, match=r"is an encoder and a decoder .* only causal language models"):
        architecture_from_config(config, "it")


@pytest.mark.parametrize("name", ["bigscience/bloomz-7b1-mt", "EleutherAI/gpt-j-6b", "tiiuae/falcon-7b"])
def test_attention_without_a_fused_kernel_is_told(name: str) -> None:
    assert any("every score in memory" in note for note in resolve_run(load_architecture(name), {}).notes)
    if name.startswith("tiiuae"):
        flash = resolve_run(load_architecture(name), {"attn_implementation": "flash_attention_2"})
        assert not any("every score in memory" in note for note in flash.notes)


def test_an_activation_of_more_kernels_than_the_familys_is_refused_by_name() -> None:
    """transformers' ``NewGELUActivation`` writes out what ``SiLUActivation`` does in one kernel, and holds parts."""
    silu = architecture_from_config({**CONFIG, "hidden_act": "silu"}, "x")
    assert architecture_from_config({**CONFIG, "hidden_act": "swish"}, "x") == silu
    for other in ("gelu_new", "relu", "no such name"):
        with pytest.raises(UnbuiltFamilyError, match=f"x has hidden_act='{other}'"):
            architecture_from_config({**CONFIG, "hidden_act": other}, "x")


@pytest.mark.parametrize("dropped", ["abc", "0.1", True, [0.1], -1, 1.5, 1.0, float("nan")])
@pytest.mark.parametrize("model_type", ["llama", "starcoder2", "mistral"])
def test_dropout_that_is_no_share_is_refused(model_type: str, dropped: object) -> None:
    config = {**CONFIG, "architectures": None, "model_type": model_type, "attention_dropout": dropped}
    with pytest.raises(InputError, match="attention_dropout"):
        architecture_from_config(config, "x")


@pytest.mark.parametrize(
    ("model_type", "dropped", "kept"), [("llama", None, 0.0), ("llama", 0, 0.0), ("llama", 0.1, 0.1)]
)
def test_dropout_is_as_the_config_says(model_type: str, dropped: object, kept: float) -> None:
    config = {**CONFIG, "model_type": model_type, "attention_dropout": dropped}
    assert architecture_from_config(config, "x").attention_dropout == kept


def test_dropout_that_the_code_does_not_read_changes_nothing() -> None:
    """``modeling_lfm2.py`` passes 0 to its attention, whatever its config says."""
    kinds = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "block_auto_adjust_ff_dim": False}
    config = {**CONFIG, **kinds, "architectures": None, "model_type": "lfm2", "attention_dropout": 0.1}
    assert architecture_from_config(config, "x").attention_dropout == 0.0
