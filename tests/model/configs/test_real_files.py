"""Fields of real training files that once were read otherwise than their frameworks read them: examples of axolotl,
LLaMA-Factory, torchtune and LitGPT, and DeepSpeed's and accelerate's files beside them.

The frameworks' sources are those of axolotl 0.19.0, LLaMA-Factory 0.9.5, trl 1.16.0, torchtune 0.6.1, litgpt 0.5.13,
DeepSpeed 0.18.6 and accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.configs import RunFile, read_mapping

Read = Callable[..., RunFile]


@pytest.mark.parametrize(
    "companion",
    [
        {"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}},
        {"deepspeed": {"zero_optimization": {"stage": 3, "cpu_offload_params": True}}},
        {
            "accelerate": {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {
                    "zero_stage": 3, "offload_optimizer_device": "none", "offload_param_device": "cpu",
                },
            }
        },
    ],
)  # fmt: skip
def test_parameters_alone_in_host_memory_are_not_the_states_too(read: Read, companion: dict[str, Any]) -> None:
    """DeepSpeed's ``stage3.py`` updates on the GPU unless ``offload_optimizer`` is given."""
    with pytest.raises(NotSupportedError, match=r"whose states stay on the GPU, .* offload the optimizer too"):
        read("llama-factory", **companion)


def test_lora_over_4_bits_quantizes_nothing_in_axolotl(read: Read) -> None:
    """``loaders/model.py``: 4 bits are for ``adapter: qlora`` alone, 8 for ``lora``; PEFT's ``prepare_model_for_kbit_
    training`` then casts what is left in 16 bits."""
    with pytest.raises(InputError, match="write adapter: qlora, or take load_in_4bit out"):
        read("axolotl", "load_in_4bit: true")
    assert read("axolotl", "adapter: qlora\nload_in_4bit: true").options["method"] == "qlora"
    assert read("axolotl", "load_in_8bit: true").options["quant_method"] == "bnb-8bit"


@pytest.mark.parametrize(
    ("form", "theirs", "other"),
    [
        ("trl", "cpu_offload", "offload_params"),
        ("llama-factory", "cpu_offload", "offload_params"),
        ("axolotl", "offload_params", "cpu_offload"),
    ],
)
def test_parameters_in_host_memory_go_by_each_frameworks_own_word(
    read: Read, form: str, theirs: str, other: str
) -> None:
    """``training_args.py`` of transformers 5 (``cpu_offload``); ``setup_fsdp_envs`` of axolotl's utils/trainer.py."""
    sharded = "" if form == "axolotl" else "fsdp: full_shard\n"
    assert read(form, f"{sharded}fsdp_config: {{{theirs}: true}}").options["offload"] is True
    passed_over = read(form, f"{sharded}fsdp_config: {{{other}: true}}")
    assert "offload" not in passed_over.options
    assert form == "axolotl" or f"fsdp_config.{other}" in passed_over.ignored


def test_axolotls_fsdp_config_has_no_strategy(read: Read) -> None:
    """``FSDPConfig`` of its utils/schemas/fsdp.py."""
    found = read("axolotl", "fsdp_version: 1\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}")
    assert found.options["sharding"] == "fsdp"
    assert [note for note in found.notes if note.startswith("fsdp_config.fsdp_sharding_strategy is no field")]
    silent = read("axolotl", "fsdp_version: 1\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}")
    assert not [note for note in silent.notes if "is no field" in note]


def test_a_packing_of_older_trl_says_which_version_has_it(read: Read) -> None:
    with pytest.raises(InputError, match=r"--stack-version 0\.18"):
        read("trl", "packing: true\npacking_strategy: ffd")


def test_llama_factorys_v1_files_are_refused_by_name() -> None:
    v1 = {"model": "Qwen/Qwen3-4B", "model_class": "llm", "train_dataset": "data/v1_sft_demo.yaml", "bf16": True}
    with pytest.raises(NotSupportedError, match="LLaMA-Factory's v1 trainer, which is not read yet"):
        read_mapping(v1, name="v1.yaml")


@pytest.mark.parametrize(
    ("parts", "packed"),
    [
        (["{_component_: a, packed: true}", "{_component_: b, packed: true}"], True),
        (["{_component_: a}", "{_component_: b}"], False),
    ],
)
def test_torchtunes_lists_of_data_are_packed_where_all_are(read: Read, parts: list[str], packed: bool) -> None:
    """``ConcatDataset`` of its datasets/_concat.py."""
    assert read("torchtune", f"dataset: [{', '.join(parts)}]").options["rows_packed"] == packed


def test_torchtunes_lists_of_data_that_are_packed_in_part_are_refused(read: Read) -> None:
    with pytest.raises(InputError, match="pack all or none"):
        read("torchtune", "dataset: [{_component_: a, packed: true}, {_component_: b}]")


def test_torchtune_offloads_where_it_shards(read: Read) -> None:
    """``full_finetune_distributed.py`` calls ``shard_model`` for several GPUs alone."""
    one, four = (read("torchtune", "fsdp_cpu_offload: true", num_gpus=count) for count in (None, 4))
    assert "offload" not in one.options
    assert any(note.startswith("fsdp_cpu_offload is for several GPUs") for note in one.notes)
    assert four.options["offload"] is True


def test_torchtunes_own_units_of_table_and_head_are_told(read: Read) -> None:
    lines = "custom_sharded_layers: [tok_embeddings, output]"
    told = [any(note.startswith("custom_sharded_layers") for note in read("torchtune", lines, num_gpus=n).notes)
            for n in (4, None)]  # fmt: skip
    assert told == [True, False]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("dtype: fp16", "dtype is fp16, which torchtune refuses"),
        ("optimizer_in_bwd: true\nclip_grad_norm: 1.0", "clip_grad_norm with optimizer_in_bwd"),
    ],
)
def test_what_torchtune_ends_with_at_once_is_refused(read: Read, lines: str, named: str) -> None:
    """``__init__`` of ``recipes/full_finetune_single_device.py``."""
    with pytest.raises(InputError, match=named):
        read("torchtune", lines)


@pytest.mark.parametrize(
    ("stated", "compiled"),
    [("true", True), ("false", None), ("{model: true, loss: true}", True), ("{model: false}", None)],
)
def test_torchtunes_compile_may_be_a_switch_for_each_part(read: Read, stated: str, compiled: bool | None) -> None:
    assert read("torchtune", f"compile: {stated}").options.get("torch_compile") == compiled


def test_litgpts_end_by_time_and_longlora_switched_off(read: Read) -> None:
    """``finetune/lora.py`` breaks at ``max_time``; ``longlora.use_longlora`` switches that on."""
    timed = read("litgpt", "train: {max_seq_length: 2048, max_time: 5}\nlonglora: {use_longlora: false}")
    assert any(note.startswith("train.max_time ends training") for note in timed.notes)
    with pytest.raises(NotSupportedError, match="LongLoRA"):
        read("litgpt", "longlora: {use_longlora: true}")


@pytest.mark.parametrize("name", ["stage3_max_live_parameters", "max_live_parameters"])
def test_deepspeeds_sizes_bear_two_names(read: Read, name: str) -> None:
    """Aliases of ``runtime/zero/config.py``, which may be given by the field's own name."""
    with pytest.raises(NotSupportedError, match=f"{name}: 30,000,000,000 asks for more memory"):
        read("llama-factory", deepspeed={"zero_optimization": {"stage": 3, name: 3e10}})


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, False),
        ({"zero_force_ds_cpu_optimizer": False}, True),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, True),
    ],
)
def test_torchs_adam_in_host_memory_is_told(read: Read, more: dict[str, Any], told: bool) -> None:
    zero2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, **more}
    notes = read("llama-factory", deepspeed=zero2).notes
    assert any(note.startswith("torch's AdamW updates states in host memory") for note in notes) == told


def test_torchtunes_vision_models_are_refused_by_name(read: Read) -> None:
    with pytest.raises(NotSupportedError, match="a model of images and text, which is not built yet"):
        read("torchtune", "model: {_component_: torchtune.models.llama3_2_vision.lora_llama3_2_vision_11b}")
