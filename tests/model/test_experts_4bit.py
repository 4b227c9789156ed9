"""Stacked experts in 4 bits against the traced real code, a real step of it, and what is refused beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ci_share import some_pairs_for_ci

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.experts_modules import in_modules
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.units import gib

BASE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4000, "max_position_embeddings": 4096,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "head_dim": 64,
        "norm_topk_prob": True, "mlp_only_layers": [0],
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 128},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 64,
    },
}  # fmt: skip
FOUR_BITS: dict[str, Any] = {
    "method": "qlora", "quantize_moe_experts": True, "lora_target_modules": "q_proj,o_proj", "max_length": 256,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "as the stack has it": {},
    "double quantization": {"double_quant": True},
    "nothing checkpointed": {"gradient_checkpointing": False},
    "norms and embeddings in fp32": {"upcast_non_quantized": True},
    "two samples, padded": {"per_device_train_batch_size": 2, "padding_mask": True},
}


def small(model_type: str) -> Architecture:
    return architecture_from_config({**BASE, **CONFIGS[model_type], "model_type": model_type}, model_type)


def run_of(architecture: Architecture, **options: Any) -> Run:
    return resolve_run(architecture, {**FOUR_BITS, **options}).run


@pytest.mark.parametrize(("name", "asked"), some_pairs_for_ci(CONFIGS, RUNS, 3))
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], name: str, asked: str) -> None:
    same_as_traced(small(name), **{**FOUR_BITS, **RUNS[asked]})


def test_a_real_step_trains_the_adapters_over_packed_experts() -> None:
    """bitsandbytes' own code on this CPU: stacks are bytes, adapters get gradients, restored weights do not stay."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    import torch
    from torch.nn.utils import parametrize

    from tunecast.calibrate.trace import hf

    architecture = small("qwen3_moe")
    run = run_of(architecture, max_length=64)
    model = hf.build_model(architecture, run, device="cpu")
    experts = [module for module in model.modules() if parametrize.is_parametrized(module, "down_proj")]
    assert len(experts) == 1  # the first layer has none
    packed = experts[0].parametrizations["down_proj"].original
    assert packed.dtype is torch.uint8
    assert packed.numel() == 16 * 128 * 256 // 2
    params = hf.trainable_parameters(model)
    ids = torch.randint(0, 4000, (1, 64))
    hf.loss_of(model, {"input_ids": ids, "labels": ids}, run).backward()
    assert all(each.grad is not None for each in params)
    assert not parametrize._cache


def restored(architecture: Architecture, run: Run) -> list[Operation]:
    """What restores the stacks: as many weights at once as all experts' up or down maps have."""
    experts = next(group.layer.mlp.experts for group in architecture.groups if group.layer.mlp.experts)
    whole = {(experts.up_params,), (experts.down_params,)}
    return [op for op in step_operations(architecture, run) if op.kind is Kind.DEQUANT and op.shape in whole]


def test_all_experts_are_restored_in_every_pass_and_wait_for_the_backward() -> None:
    """By hand: 48 layers, two stacks each; autograd keeps what the forward restored, unless the layer runs again."""
    model = load_architecture("Qwen/Qwen3-30B-A3B")
    found = restored(model, run_of(model))
    assert {phase: sum(op.count for op in found if op.phase is phase) for phase in Phase} == {
        **dict.fromkeys(Phase, 0), Phase.FORWARD: 2 * 48, Phase.RECOMPUTE: 2 * 48,
    }  # fmt: skip
    assert sum(op.shape[0] * op.count for op in found) == 2 * 48 * 128 * 3 * 2048 * 768
    kept = run_of(model, gradient_checkpointing=False)
    more = memory_timeline(model, kept).allocated_bytes - memory_timeline(model, run_of(model)).allocated_bytes
    assert more > 2 * 47 * 128 * 3 * 2048 * 768


def test_weights_at_rest_by_hand() -> None:
    """Qwen3-30B-A3B: half a byte for each of 29.0B weights in experts, an absmax of four bytes for each 64."""
    model = load_architecture("Qwen/Qwen3-30B-A3B")
    four, sixteen = (
        memory_timeline(model, run_of(model, quantize_moe_experts=asked, double_quant=False)).at_rest_bytes
        for asked in (True, False)
    )
    weights = 48 * 128 * 3 * 2048 * 768
    assert sixteen - four == pytest.approx(weights * (2 - 1 / 2 - 4 / 64), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "said", "kind"),
    [
        ("meta-llama/Llama-3.1-8B", {}, "run without any", InputError),
        ("Qwen/Qwen3-30B-A3B", {"lora_target_modules": "all-linear"}, "adapters on the experts", NotSupportedError),
        ("Qwen/Qwen3-30B-A3B", {"num_gpus": 4, "sharding": "zero3"}, "weights of one dtype", InputError),
        ("Qwen/Qwen3-30B-A3B", {"num_gpus": 4, "sharding": "fsdp", "fsdp_version": 1}, "one dtype", InputError),
        ("Qwen/Qwen3-30B-A3B", {"method": "lora"}, "use --method qlora", InputError),
        ("Qwen/Qwen3-30B-A3B", {"stack": "torchtune"}, "use --stack axolotl or hf-peft", InputError),
        ("Qwen/Qwen3-30B-A3B", {"quant_method": "bnb-8bit"}, "belongs to --quant-method bnb-4bit", InputError),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    name: str, options: dict[str, Any], said: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=said):
        run_of(load_architecture(name), **options)


def test_axolotl_packs_them_on_nvidia_cards_alone() -> None:
    """``check_quantize_moe_experts``: "requires CUDA (not compatible with ROCm or other backends)"."""
    import tunecast

    with pytest.raises(InputError, match="NVIDIA cards alone"):
        tunecast.estimate("Qwen/Qwen3-30B-A3B", gpu="mi300x-192gb", **FOUR_BITS)
    (fits,) = tunecast.estimate("Qwen/Qwen3-30B-A3B", gpu="l40s-48gb", **FOUR_BITS)
    assert gib(fits.memory.process_bytes.value) < 24


def test_experts_that_are_modules_are_in_4_bits_anyway() -> None:
    """Of transformers 4: linear maps, which bitsandbytes replaces."""
    older = in_modules(load_architecture("Qwen/Qwen3-30B-A3B"))
    with pytest.raises(InputError, match="4 bits anyway"):
        run_of(older, hf_code="4.49")
