"""Weights that are published in few bits: a config's storage is the run's, a copy's name says what the run is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunecast import api, recommend
from tunecast.asked import read_asked
from tunecast.catalogs.errors import InputError, TunecastError

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2,
    "num_attention_heads": 8, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
STORED = [
    (GPTQ, {"quant_method": "gptq-4bit", "gptq_group_size": 64}),
    ({**GPTQ, "bits": 8, "group_size": -1}, {"quant_method": "gptq-8bit", "gptq_group_size": -1}),
    (NF4, {"quant_method": "bnb-4bit", "bnb_4bit_quant_type": "nf4", "double_quant": False}),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"quant_method": "bnb-8bit"}),
]


def estimated(folder: Path, stored: dict[str, Any], **options: Any) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, "quantization_config": stored}), encoding="utf-8")
    (found,) = api.estimate(str(path), gpu="rtx-4090", **options)
    return found


@pytest.mark.parametrize(("stored", "expected"), STORED)
def test_a_configs_storage_is_the_runs(tmp_path: Path, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    found = estimated(tmp_path, stored)
    assert found.run.method == "qlora"
    for name, value in expected.items():
        assert getattr(found.run, name) == value
        assert found.run_origins[name] == "file"
    (typed,) = api.estimate(**typed_run(tmp_path, expected))
    assert found.memory == typed.memory


def typed_run(folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The same run typed out, on the unquantized config."""
    path = folder / "plain.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return {"model": str(path), "gpu": "rtx-4090", "method": "qlora", **expected}


def test_options_that_say_otherwise_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--method is full, but the config .* holds its weights in gptq-4bit"):
        estimated(tmp_path, GPTQ, method="full")
    with pytest.raises(InputError, match="--gptq-group-size is 128"):
        estimated(tmp_path, GPTQ, gptq_group_size=128)
    with pytest.raises(TunecastError, match=r"already quantized \(awq\)"):
        estimated(tmp_path, {"quant_method": "awq", "bits": 4})


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", {"method": "qlora"}),
        ("TheBloke/Llama-2-7B-GPTQ", {"method": "qlora", "quant_method": "gptq-4bit"}),
        ("unsloth/Llama-3.1-8B-unsloth-bnb-4bit", {"method": "qlora"}),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", {"method": "qlora", "quant_method": "gptq-8bit"}),
    ],
)
def test_a_quantized_copy_is_told_from_its_base(name: str, typed: dict[str, Any]) -> None:
    (found,) = api.estimate(name, gpu="h100-sxm5-80gb", method="lora")
    (note,) = [note for note in found.notes if "holds the weights of" in note]
    for option, value in typed.items():
        assert f"--{option.replace('_', '-')} {value}" in note
    (own,) = api.estimate(name, gpu="h100-sxm5-80gb", **typed)
    assert not any("holds the weights of" in note for note in own.notes)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", ("qlora", "bnb-4bit", "nf4")),
        ("TheBloke/Llama-2-7B-GPTQ", ("qlora", "gptq-4bit", None)),
    ],
)
def test_a_quantized_copy_without_a_method_is_trained_as_it_is_stored(
    name: str, run: tuple[str, str, str | None]
) -> None:
    (found,) = api.estimate(name, gpu="h100-sxm5-80gb")
    assert (found.run.method, found.run.quant_method, found.run.bnb_4bit_quant_type) == run
    assert found.run_origins["method"] == "assumed"
    (note,) = [note for note in found.notes if "taken as --method qlora of it" in note]
    assert note.startswith(name)
    (wide,) = api.estimate(name, gpu="h100-sxm5-80gb", method="full")
    assert wide.run.base_quantization is None
    shared: dict[str, Any] = {"gpu": "h100-sxm5-80gb", "tokens": "1M"}
    found_by_methods = [recommend(name, methods=methods, **shared).cheapest for methods in ("qlora", "lora,qlora")]
    assert [plan is not None for plan in found_by_methods] == [True, True]
    (stored,) = [recommend(name, **shared).cheapest]
    assert stored is not None
    assert stored.forecast.run.quant_method == run[1]


FILES = {
    "llama-factory": "model_name_or_path: {name}\nstage: sft\nfinetuning_type: lora\ntemplate: llama3\nbf16: true\n",
    "trl": "model_name_or_path: {name}\nuse_peft: true\ndtype: bfloat16\n",
    "axolotl": "base_model: {name}\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nmicro_batch_size: 1\n",
}


@pytest.mark.parametrize("form", FILES)
def test_a_file_that_names_a_4_bit_copy_trains_it_in_4_bits(tmp_path: Path, form: str) -> None:
    """transformers quantizes by the checkpoint's own ``quantization_config`` whatever the file says
    (``modeling_utils.py``, ``get_hf_quantizer``); Unsloth's copies are NF4 with double quantization."""
    file = tmp_path / "run.yaml"
    file.write_text(FILES[form].format(name="unsloth/llama-3-8b-bnb-4bit"))
    (found,) = api.estimate(str(file), gpu="l40s")
    run = {field: getattr(found.run, field) for field in ("method", "bnb_4bit_quant_type", "double_quant")}
    assert run == {"method": "qlora", "bnb_4bit_quant_type": "nf4", "double_quant": True}
    assert found.run_origins["method"] == "file"
    assert any("is read as qlora of that base" in note for note in found.notes)
    assert not any("holds the weights of" in note for note in found.notes)
    (plain,) = api.estimate(str(file), gpu="l40s", method="lora")
    assert plain.run.method == "lora"


def test_a_file_that_names_a_quantized_config_is_read_as_it_is_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": NF4}))
    file = tmp_path / "run.yaml"
    file.write_text(FILES["trl"].format(name=tmp_path))
    (found,) = api.estimate(str(file), gpu="rtx-4090")
    assert (found.run.method, found.run.double_quant) == ("qlora", False)
    assert any("is read as qlora of that base" in note for note in found.notes)


def test_another_model_of_a_listed_shape_is_told_to_be_counted_as_that() -> None:
    asked = read_asked("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", {"method": "qlora"})
    assert asked.architecture.name == "Qwen/Qwen3-8B"
    assert "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B is counted as Qwen/Qwen3-8B, whose shape it has" in asked.notes
    for own in ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", "unsloth/Qwen3-8B"):
        assert not any("is counted as" in note for note in read_asked(own, {"method": "qlora"}).notes)
