"""Routed experts against the traced stream of the real code: kernels, FLOPs, memory; and what a token needs of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from ci_share import some_pairs_for_ci

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.models import load_models
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.families_experts import EXPERT_FAMILIES
from tunecast.model.flops import executed_flops_per_step, model_flops_per_step
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import SYNCHRONISATION, Kind, Operation
from tunecast.model.resolve import resolve_run
from tunecast.model.trained import trainable_params

BASE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 8192,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "head_dim": 64,
        "norm_topk_prob": True, "mlp_only_layers": [0],
    },
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 256},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"max_length": 512},
    "lora, attention only, nothing checkpointed": {
        "gradient_checkpointing": False, "lora_target_modules": "q_proj,o_proj", "max_length": 256,
    },
    "qlora": {"method": "qlora", "max_length": 512},
    "full": {"method": "full", "max_length": 512},
    "full, two samples, nothing checkpointed": {
        "method": "full", "gradient_checkpointing": False, "per_device_train_batch_size": 2, "max_length": 256,
    },
    "lora with padding": {"padding_mask": True, "per_device_train_batch_size": 2, "max_length": 256},
    "full, in fp32": {"method": "full", "dtype": "fp32", "max_length": 256},
    "lora, in fp16": {"dtype": "fp16", "precision": "fp16-autocast", "max_length": 256},
}  # fmt: skip


def small(model_type: str, **changes: Any) -> Architecture:
    return architecture_from_config({**BASE, **CONFIGS[model_type], "model_type": model_type, **changes}, model_type)


def test_every_family_with_experts_is_here() -> None:
    assert set(CONFIGS) == {family.model_type for family in EXPERT_FAMILIES}


@pytest.mark.parametrize(("name", "method"), some_pairs_for_ci(CONFIGS, METHODS, 3))
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], name: str, method: str) -> None:
    same_as_traced(small(name), **METHODS[method])


@pytest.mark.parametrize("loops", [False, True], ids=["grouped", "looped"])
@pytest.mark.parametrize("method", ["lora", "lora, attention only, nothing checkpointed", "full"])
def test_products_of_experts_are_the_traced_ones(method: str, loops: bool) -> None:
    """As one kernel, and one after the other, and those of adapters on all experts' weights: shapes, layouts, launches,
    bytes, and where the host waits."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    from tunecast.calibrate.trace.tracer import trace_step

    architecture = small("qwen3_moe")
    run = replace(resolve_run(architecture, METHODS[method]).run, loops_experts=loops)

    def products(operations: Iterable[Operation]) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for op in operations:
            if len(op.shape) == 4 or (op.kind is Kind.GEMM and op.launches > 1) or op.name == SYNCHRONISATION:
                found[op.phase, op.kind, op.shape, op.layout, op.launches, op.bytes] += op.count
        return found

    found = products(step_operations(architecture, run))
    assert found == products(trace_step(architecture, run).stream)
    assert len(found) > 4


CLASSES = {family.architecture_class for family in EXPERT_FAMILIES}
ROWS = [row for row in load_models().values() if row.architecture_class in CLASSES]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.hf_id)
def test_parameters_equal_the_catalog(row: Any) -> None:
    assert load_architecture(row.hf_id).total_params == row.total_params


def test_required_flops_count_the_experts_that_a_token_goes_to() -> None:
    """4 per active weight and token for LoRA on frozen weights, by hand: Mixtral 8x7B sends a token to 2 of 8."""
    mixtral = load_architecture("mistralai/Mixtral-8x7B-v0.1")
    run = resolve_run(mixtral, {"max_length": 1024, "lora_target_modules": "q_proj"}).run
    expert, attention = 3 * 4096 * 14336, 2 * 4096 * 4096 + 2 * 4096 * 1024
    active = 32 * (attention + 2 * expert + 8 * 4096) + 32000 * 4096
    adapters, causal = 32 * 6 * 16 * (4096 + 4096), 32 * 3 * 4 * 4096 * 512
    assert model_flops_per_step(mixtral, run) == 1024 * (4 * active + adapters + causal)
    assert executed_flops_per_step(mixtral, run) < 2 * model_flops_per_step(mixtral, run)


def test_more_experts_need_more_memory_and_no_more_work() -> None:
    few, many = small("mixtral"), small("mixtral", num_local_experts=32)
    run = resolve_run(few, {"max_length": 512, "lora_target_modules": "q_proj,o_proj"}).run
    assert memory_timeline(many, run).allocated_bytes > memory_timeline(few, run).allocated_bytes
    assert executed_flops_per_step(many, run) == pytest.approx(executed_flops_per_step(few, run), rel=0.01)


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(InputError, match="num_experts_per_tok"):
        small("mixtral", num_experts_per_tok=9)


TARGETS = {
    "all-linear": "all-linear",
    "attention": ["q_proj", "k_proj"],
    "experts": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    "router": ["gate"],
}


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # PEFT's own, though it uses them
@pytest.mark.parametrize("asked", TARGETS.values(), ids=TARGETS)
def test_targets_mean_what_peft_makes_of_them(asked: Any) -> None:
    """The adapters that PEFT itself puts on the real model, given what the user wrote."""
    for module in ("torch", "transformers", "peft"):
        pytest.importorskip(module)
    import peft
    import torch
    import transformers

    from tunecast.calibrate.trace import hf

    architecture = small("qwen3_moe")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf.hf_config(architecture))
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=asked, task_type="CAUSAL_LM"))
    real = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    run = resolve_run(architecture, {"max_length": 512, "lora_r": 16, "lora_target_modules": asked}).run
    assert trainable_params(architecture, run) == real


def test_what_peft_refuses_of_experts_is_refused() -> None:
    mixtral = small("mixtral")
    with pytest.raises(InputError, match="w3"):
        resolve_run(mixtral, {"lora_target_modules": "q_proj,w1"})
    with pytest.raises(InputError, match="lora-dropout"):
        resolve_run(mixtral, {"lora_dropout": 0.1})
    assert resolve_run(mixtral, {"lora_dropout": 0.1, "lora_target_modules": "q_proj"}).run.lora_dropout == 0.1


def test_qlora_says_that_experts_are_not_quantized() -> None:
    """8 experts of three 14,336 x 4,096 matrices in 32 layers, two bytes each, are 84 GiB."""
    mixtral = load_architecture("mistralai/Mixtral-8x7B-v0.1")
    notes = resolve_run(mixtral, {"method": "qlora", "lora_target_modules": "q_proj"}).notes
    assert any("84.0 GiB of stacked experts stay in bf16" in note for note in notes)
    run = resolve_run(mixtral, {"method": "qlora", "lora_target_modules": "q_proj", "max_length": 512}).run
    assert memory_timeline(mixtral, run).parts_bytes["weights"] > 84 * 2**30
