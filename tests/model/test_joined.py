"""Joined projections against the same layers apart, by hand arithmetic."""

from __future__ import annotations

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.joined import joined, joined_targets
from tunecast.model.operation import Kind, Operation
from tunecast.model.parallel import split_layer
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run

LLAMA = load_architecture("meta-llama/Llama-3.1-8B")
TOKENS, HIDDEN, LAYERS = 2 * 1024, 4096, 32
BF16 = 2


def resolved(**options: object) -> Run:
    plain = {"max_length": 1024, "per_device_train_batch_size": 2, "gradient_checkpointing": False}
    return resolve_run(LLAMA, {**plain, **options}, gpu_has_bf16=True).run


def bytes_of(operations: list[Operation], name: str) -> float:
    return sum(o.bytes * o.count for o in operations if o.name == name)


def test_joining_changes_no_weight_and_no_product() -> None:
    assert joined(LLAMA).total_params == LLAMA.total_params
    run = resolved(method="full")
    apart, together = step_operations(LLAMA, run), step_operations(joined(LLAMA), run)
    for found in (apart, together):
        assert sum(o.total_flops for o in found if o.kind is Kind.GEMM) == pytest.approx(
            sum(o.total_flops for o in apart if o.kind is Kind.GEMM)
        )
    products = [sum(o.count for o in found if o.kind is Kind.GEMM) for found in (apart, together)]
    assert products[0] - products[1] == 3 * LAYERS * 3


def test_one_product_returns_the_gradient_that_three_had_to_add() -> None:
    """Per layer: q + k + v are two additions and gate + up one, each two reads and a write of tokens x hidden."""
    run = resolved(method="full")
    apart, together = step_operations(LLAMA, run), step_operations(joined(LLAMA), run)
    saved = bytes_of(apart, "grad_add") - bytes_of(together, "grad_add")
    assert saved == pytest.approx(LAYERS * (2 + 1) * 3 * TOKENS * HIDDEN * BF16)


def test_the_gated_unit_of_both_halves_moves_as_much_in_one_kernel_each_way() -> None:
    """Forward reads both halves and writes one; backward reads the gradient and both, and writes both."""
    run = resolved(method="full", fused_kernels="swiglu")
    together = step_operations(joined(LLAMA), run)
    assert bytes_of(together, "swiglu") == pytest.approx(LAYERS * (3 + 5) * TOKENS * 14336 * BF16)
    assert bytes_of(together, "swiglu") == pytest.approx(bytes_of(step_operations(LLAMA, run), "swiglu"))


def test_adapters_of_joined_maps_are_one() -> None:
    run = resolved(method="lora", lora_target_modules="all-linear", lora_r=8)
    assert joined_targets(run).lora_target_modules == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    some = resolved(method="lora", lora_target_modules="q_proj,k_proj,v_proj")
    assert joined_targets(some).lora_target_modules == ("qkv_proj",)
    together = step_operations(joined(LLAMA), joined_targets(run))
    assert {o.name for o in together if ".lora_" in o.name and o.kind is Kind.GEMM} >= {"qkv_proj.lora_A"}


@pytest.mark.parametrize(("targets", "named"), [("q_proj,v_proj", "q_proj, v_proj"), ("o_proj,up_proj", "up_proj")])
def test_a_part_of_a_joined_map_has_no_adapter_of_its_own(targets: str, named: str) -> None:
    with pytest.raises(InputError, match=f"lora_target_modules names {named}, but .* are one map here"):
        joined_targets(resolved(method="lora", lora_target_modules=targets))


def test_a_tensor_parallel_rank_holds_whole_groups_of_heads() -> None:
    """A quarter of Llama-3.1-8B: 8 heads of queries, 2 of keys and 2 of values of 128, and a quarter of both halves."""
    layer = split_layer(joined(LLAMA).groups[0].layer, 4)
    qkv, out = layer.attention.linears
    both, down = layer.mlp.linears
    assert (qkv.out_features, out.in_features) == ((8 + 2 + 2) * 128, 1024)
    assert (both.out_features, down.in_features) == (2 * 14336 // 4, 14336 // 4)


def test_experts_are_not_joined() -> None:
    with pytest.raises(NotSupportedError, match="Mixtral"):
        joined(load_architecture("mistralai/Mixtral-8x7B-v0.1"))
