"""``--stack trl`` and ``--stack llama-factory`` are what a file of that framework without further fields means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run
from tunecast.model.stacks import load_stacks

FIELDS = (
    "method", "dtype", "precision", "adapter_dtype", "lora_r", "lora_dropout", "lora_target_modules", "loss_type",
    "bnb_4bit_quant_type", "double_quant", "upcast_non_quantized", "optim", "attn_implementation",
    "gradient_checkpointing", "reentrant", "fused_kernels",
)  # fmt: skip
FILES = [
    ("trl", "lora", "dtype:"),
    ("trl", "qlora", "dtype:\nload_in_4bit: true"),
    ("trl", "full", "dtype:\nuse_peft: false"),
    ("llama-factory", "lora", ""),
    ("llama-factory", "qlora", "quantization_bit: 4"),
    ("llama-factory", "full", "finetuning_type: full"),
]


@pytest.mark.parametrize(("stack", "method", "lines"), FILES)
def test_a_stack_is_its_frameworks_defaults(read: Callable[..., RunFile], stack: str, method: str, lines: str) -> None:
    architecture = load_architecture("meta-llama/Llama-3.1-8B")
    by_name = resolve_run(architecture, {"stack": stack, "method": method}).run
    options = merge_options(read(stack, lines), {}).options
    by_file = resolve_run(architecture, {k: v for k, v in options.items() if k not in RUN_OPTIONS_ELSEWHERE}).run
    assert {name: getattr(by_name, name) for name in FIELDS} == {name: getattr(by_file, name) for name in FIELDS}


@pytest.mark.parametrize("typed", [{}, {"reentrant": False}])
def test_a_compiled_layer_in_torchtunes_checkpoint_is_recomputed_whole(
    read: Callable[..., RunFile], typed: dict[str, bool]
) -> None:
    """By its file, by its stack, and where compilation is typed; torchtune puts checkpoints around compiled layers."""
    llama, own = load_architecture("meta-llama/Llama-3.1-8B"), {"stack": "torchtune", "method": "full", **typed}
    compiled = read("torchtune", "compile: true\nenable_activation_checkpointing: true")
    eager = read("torchtune", "compile: false\nenable_activation_checkpointing: true")
    asked = [
        merge_options(compiled, typed).options,
        merge_options(eager, {"torch_compile": True, **typed}).options,
        {**own, "torch_compile": True},
    ]
    runs = [resolve_run(llama, {k: v for k, v in each.items() if k not in RUN_OPTIONS_ELSEWHERE}).run for each in asked]
    assert [run.reentrant for run in runs] == [not typed] * 3
    assert resolve_run(llama, own).run.reentrant is False


SHARDED = [
    ("hf-peft", {"precision": "bf16-autocast"}, 2, "fp32"),
    ("hf-peft", {"precision": "bf16-autocast", "dtype": "bf16", "fsdp_version": 1}, 1, "fp32"),
    ("hf-peft", {"precision": "bf16"}, 2, None),
    ("ms-swift", {}, 2, "fp32"),
    ("trl", {}, 2, "fp32"),
    ("trl", {"master_dtype": "none"}, 2, None),
    ("axolotl", {}, 2, None),
    ("axolotl", {"fsdp_version": 1}, 1, "fp32"),
    ("torchtune", {}, 2, None),
]


@pytest.mark.parametrize(("stack", "options", "version", "master"), SHARDED)
def test_mixed_precision_under_fsdp_trains_fp32_shards(
    stack: str, options: dict[str, Any], version: int, master: str | None
) -> None:
    """accelerate raises what trains, whatever it was loaded in (`test_real_sharding` runs it); axolotl's own code of
    FSDP 2 and torchtune's pure 16 bits do not."""
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    asked = {"stack": stack, "method": "full", "num_gpus": 8, "sharding": "fsdp", **options}
    found = resolve_run(llama, asked)
    assert (found.run.master_dtype, found.run.fsdp_version) == (master, version)
    assert any("accelerate raises" in note for note in found.notes) == (master == "fp32")
    if master == "fp32":
        assert found.run.dtype == "bf16"


def test_every_built_stack_says_for_which_versions_and_by_which_source_it_is() -> None:
    for name, stack in load_stacks().items():
        if stack["built"]:
            assert stack["versions"], name
            assert len(stack["source"]) > 40, name
