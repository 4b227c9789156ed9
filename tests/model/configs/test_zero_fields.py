"""DeepSpeed's JSON: its own optimizer, dtype of reductions and sizes of ZeRO-3, and what else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options
from tunecast.model.configs.zero_fields import OWN_ADAM
from tunecast.model.memory import memory_timeline
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run

Read = Callable[..., RunFile]
FULL = "finetuning_type: full"


def zero(stage: int, **more: Any) -> dict[str, Any]:
    """A file of DeepSpeed's; names with two underscores lie in ``zero_optimization``."""
    inside = {name.removeprefix("zero__"): more.pop(name) for name in list(more) if name.startswith("zero__")}
    return {"zero_optimization": {"stage": stage, **inside}, **more}


def adam(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    """The block of Hugging Face's example files."""
    return {"type": kind, "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", **params}}


def run_of(found: RunFile, **typed: Any) -> Run:
    options = merge_options(found, {"num_gpus": 8, **typed}).options
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    return resolve_run(llama, {k: v for k, v in options.items() if k not in RUN_OPTIONS_ELSEWHERE}).run


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "adamw"])
def test_deepspeeds_adam_is_the_fused_one(read: Read, stage: int, kind: str) -> None:
    """As --optim adamw_torch_fused with that sharding: FusedAdam holds two moments in fp32 and no temporaries."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    found = read("llama-factory", FULL, deepspeed=zero(stage, optimizer=adam(kind), scheduler=scheduler))
    assert any(note.startswith(OWN_ADAM) and f"{kind}, with its FusedAdam" in note for note in found.notes)
    assert not [field for field in found.ignored if "optimizer" in field]
    llama, run = load_architecture("meta-llama/Llama-3.1-8B"), run_of(found)
    by_hand = run_of(read("llama-factory", FULL, deepspeed=zero(stage)), optim="adamw_torch_fused")
    assert run == by_hand
    assert memory_timeline(llama, run).allocated_bytes == memory_timeline(llama, by_hand).allocated_bytes


def test_it_takes_the_place_of_the_training_files_optimizer(read: Read) -> None:
    lines = f"{FULL}\noptim: adamw_bnb_8bit"
    found = read("llama-factory", lines, deepspeed=zero(2, optimizer=adam()))
    assert found.options["optim"] == "adamw_torch_fused"
    assert any("in place of optim adamw_bnb_8bit of the training file" in note for note in found.notes)
    merged = merge_options(found, {"optim": "adamw_bnb_8bit", "num_gpus": 8})
    assert merged.options["optim"] == "adamw_bnb_8bit"
    assert not any(note.startswith(OWN_ADAM) for note in merged.notes)


def test_torchs_adam_and_the_hosts(read: Read) -> None:
    torchs = read("llama-factory", FULL, deepspeed=zero(2, optimizer=adam(torch_adam=True)))
    assert torchs.options["optim"] == "adamw_torch"
    host = zero(2, zero__offload_optimizer={"device": "cpu"}, optimizer=adam())
    found = read("llama-factory", FULL, deepspeed=host)
    assert (found.options["optim"], found.options["offload"]) == ("adamw_torch_fused", "optimizer")
    assert any("DeepSpeedCPUAdam in host memory" in note for note in found.notes)
    assert run_of(found).offload == "optimizer"


@pytest.mark.parametrize("kind", ["Lamb", "OneBitAdam", "Muon", "Lion", "SGD"])
def test_other_optimizers_of_deepspeeds_are_refused_by_name(read: Read, kind: str) -> None:
    with pytest.raises(NotSupportedError, match=rf"optimizer\.type: {kind} asks for .* write AdamW, or leave"):
        read("llama-factory", deepspeed=zero(2, optimizer=adam(kind)))


@pytest.mark.parametrize("block", [{"params": {"lr": 1e-4}}, "AdamW"])
def test_an_optimizer_without_a_type_is_told(read: Read, block: Any) -> None:
    with pytest.raises(InputError, match="optimizer has no type; write AdamW"):
        read("llama-factory", deepspeed=zero(2, optimizer=block))


@pytest.mark.parametrize("lines", ["bf16: true", "bf16: false\nfp16: true"])
def test_gradients_are_reduced_in_the_dtype_that_is_trained_in(read: Read, lines: str) -> None:
    same = read("llama-factory", lines, deepspeed=zero(2, communication_data_type="bf16"))
    assert not [field for field in same.ignored if "communication" in field]
    with pytest.raises(NotSupportedError, match=r"communication_data_type: fp32 asks for gradients of (b|f)(f|p)16"):
        read("llama-factory", lines, deepspeed=zero(2, communication_data_type="fp32"))
    with pytest.raises(InputError, match="is 'int8', but DeepSpeed knows fp16, bf16, fp32"):
        read("llama-factory", lines, deepspeed=zero(2, communication_data_type="int8"))


SIZES = (
    "sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)  # fmt: skip


BUFFERS = ("sub_group_size", "stage3_prefetch_bucket_size")


@pytest.mark.parametrize("name", [name for name in SIZES if name not in BUFFERS])
def test_sizes_of_zero_3_that_leave_weights_gathered(read: Read, name: str) -> None:
    field = f"zero__{name}"
    with pytest.raises(
        NotSupportedError, match=rf"zero_optimization\.{name}: 1,000,000,000,000,000 asks for more memory"
    ):
        read("llama-factory", deepspeed=zero(3, **{field: 1e15}))
    assert read("llama-factory", deepspeed=zero(2, **{field: 1e15})).options["sharding"] == "zero2"


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_zero_3(read: Read, name: str) -> None:
    field = f"zero__{name}"
    with pytest.raises(InputError, match="must be a number"):
        read("llama-factory", deepspeed=zero(3, **{field: "large"}))
    small = read("llama-factory", deepspeed=zero(3, **{field: 0}))
    counted = f"{name} of the DeepSpeed file: counted as DeepSpeed's own"
    assert any(note.startswith(f"{counted} sizes, which are greater") for note in small.notes)
    large = read("llama-factory", deepspeed=zero(3, **{field: 5e5 if name.endswith("threshold") else 2e9}))
    assert any(note.startswith(f"{counted}, which is smaller") for note in large.notes)
    auto = read("llama-factory", deepspeed=zero(3, **{field: "auto"}))
    assert not any("DeepSpeed's own" in note for note in auto.notes)
    assert not [ignored for ignored in (*small.ignored, *auto.ignored) if name in ignored]


def test_the_usual_sizes_need_no_word(read: Read) -> None:
    """Those of Hugging Face's example of ZeRO-3."""
    usual = {
        "zero__sub_group_size": 1e9, "zero__stage3_prefetch_bucket_size": "auto",
        "zero__stage3_param_persistence_threshold": "auto", "zero__stage3_max_live_parameters": 1e9,
        "zero__stage3_max_reuse_distance": 1e9,
    }  # fmt: skip
    assert read("llama-factory", deepspeed=zero(3, **usual)).notes == read("llama-factory", deepspeed=zero(3)).notes


ON = {"enabled": True}
PRUNED = {"sparse_pruning": {"shared_parameters": ON}}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"zero__zenflow": {"topk_ratio": 0.05}}, "zenflow"),
        ({"zero__offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload: True"),
        ({"zero__zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights"),
        ({"zero__stage3_use_all_reduce_for_fetch_params": True}, "stage3_use_all_reduce_for_fetch_params"),
        ({"amp": ON}, "amp.enabled"),
        ({"data_efficiency": ON}, "data_efficiency.enabled"),
        ({"curriculum_learning": ON}, "curriculum_learning.enabled"),
        ({"progressive_layer_drop": ON}, "progressive_layer_drop.enabled"),
        ({"compression_training": PRUNED}, "compression_training.sparse_pruning"),
        ({"compression_training": {"layer_reduction": ON}}, "compression_training.layer_reduction"),
        ({"quantize_training": ON}, "quantize_training.enabled"),
        ({"elasticity": ON}, "elasticity.enabled"),
        ({"hybrid_engine": ON}, "hybrid_engine.enabled"),
        ({"expert_parallel": ON}, "expert_parallel.enabled"),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16_master_weights_and_grads"),
        ({"data_types": {"param_dtype": "fp32"}}, "data_types.param_dtype"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
    ],
)
def test_what_changes_time_or_memory_is_refused_by_name(read: Read, more: dict[str, Any], named: str) -> None:
    with pytest.raises(NotSupportedError) as refusal:
        read("llama-factory", deepspeed=zero(3, **more))
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "more",
    [
        {"amp": {"enabled": "auto"}},
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"data_efficiency": {"enabled": False, "seed": 1}},
        {"compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": False}}}},
        {"compile": {"deepcompile": False}},
        {"zero__offload_optimizer": {"device": "none", "super_offload": False, "ratio": 1.0}},
    ],
)
def test_what_is_switched_off_is_let_through(read: Read, more: dict[str, Any]) -> None:
    assert read("llama-factory", deepspeed=zero(3, **more)).options == read("llama-factory", deepspeed=zero(3)).options


@pytest.mark.parametrize(
    ("name", "where"), [("cpu_offload", "optimizer"), ("cpu_offload_param", "all"), ("cpu_offload_params", "all")]
)
def test_older_words_for_offloading(read: Read, name: str, where: str) -> None:
    both = {"zero__cpu_offload": True, f"zero__{name}": True}
    assert read("llama-factory", deepspeed=zero(3, **both)).options["offload"] == where
    assert "offload" not in read("llama-factory", deepspeed=zero(3, **{f"zero__{name}": False})).options
