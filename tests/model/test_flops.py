"""FLOPs and trained parameters against hand calculation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tunecast.model.architecture import Architecture
from tunecast.model.flops import executed_flops_per_step, model_flops_per_step
from tunecast.model.inventory import step_operations, total_flops
from tunecast.model.operation import Kind, Phase
from tunecast.model.primitives import attention_flops
from tunecast.model.run import Run
from tunecast.model.trained import trainable_params

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]


def test_trained_parameters_of_an_8b_adapter(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    assert trainable_params(llama, run_of(llama)) == 41_943_040
    attention_only = run_of(llama, lora_target_modules="q_proj,k_proj,v_proj,o_proj", lora_r=8)
    assert trainable_params(llama, attention_only) == 32 * 8 * (2 * 8192 + 2 * 5120)
    assert trainable_params(llama, run_of(llama, method="full")) == llama.total_params


def test_tied_head_trains_once(make: Make, run_of: RunOf) -> None:
    qwen = make("qwen2.5-0.5b")
    assert trainable_params(qwen, run_of(qwen, method="full")) == 494_032_768


def test_lora_needs_about_4n_and_full_6n_per_token(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b")
    matrices = llama.total_params - llama.embedding_params
    tokens = 128
    lora = model_flops_per_step(llama, run_of(llama, max_length=tokens, lora_r=1)) / tokens
    assert lora == pytest.approx(4 * matrices, rel=0.01)
    full = model_flops_per_step(llama, run_of(llama, max_length=tokens, method="full")) / tokens
    assert full == pytest.approx(6 * matrices, rel=0.01)


def test_model_flops_add_up_by_hand(make: Make, run_of: RunOf) -> None:
    qwen, length, rank = make("qwen2.5-0.5b", 1), 512, 16
    linears = 896 * (896 + 128 + 128) + 896 * 896 + 3 * 896 * 4864
    adapters = rank * (896 + 896 + 2 * (896 + 128) + 896 + 896 + 3 * (896 + 4864))
    attention = 3 * 4 * 14 * 64 * length * length / 2
    by_hand = length * (4 * linears + 6 * adapters + 4 * 151936 * 896) + attention
    assert model_flops_per_step(qwen, run_of(qwen, max_length=length, lora_r=rank)) == pytest.approx(by_hand, rel=1e-12)


def test_step_counts_the_whole_job(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b", 4)
    one = run_of(llama, max_length=512)
    many = run_of(
        llama, max_length=512, per_device_train_batch_size=2, gradient_accumulation_steps=3, num_gpus=4, sharding="ddp"
    )
    assert model_flops_per_step(llama, many) == pytest.approx(24 * model_flops_per_step(llama, one))
    assert executed_flops_per_step(llama, many) == pytest.approx(24 * executed_flops_per_step(llama, one))


def test_checkpointing_executes_more_but_needs_no_more(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b", 4)
    with_it, without = run_of(llama), run_of(llama, gradient_checkpointing=False)
    assert model_flops_per_step(llama, with_it) == model_flops_per_step(llama, without)
    assert executed_flops_per_step(llama, with_it) > 1.2 * executed_flops_per_step(llama, without)


def test_executed_minus_required_is_explained(make: Make, run_of: RunOf) -> None:
    """Without checkpointing only two things differ: flash recomputes scores, and layer 0's input needs no gradient."""
    llama, length = make("llama-3.1-8b", 4), 1024
    run = run_of(llama, max_length=length, gradient_checkpointing=False)
    scores_again = 0.5 * 4 * attention_flops(1, 32, length, 128)
    first_layer_inputs = 2 * length * (4096 * (4096 + 1024 + 1024) + 3 * 16 * 4096)
    expected = model_flops_per_step(llama, run) + scores_again - first_layer_inputs
    assert executed_flops_per_step(llama, run) == pytest.approx(expected, rel=1e-12)


def test_matrix_products_of_the_design_example(make: Make, run_of: RunOf) -> None:
    """Traced figure of the design: 90.7 TFLOP of products for 8B, r=16, all linear, 2,048 tokens, checkpointing."""
    llama = make("llama-3.1-8b")
    products = total_flops(step_operations(llama, run_of(llama, max_length=2048)), Kind.GEMM)
    assert products == pytest.approx(90.744e12, rel=1e-4)


def test_early_stop_skips_the_unneeded_last_product(make: Make, run_of: RunOf) -> None:
    """Without an adapter on down_proj its recomputed product is skipped; the reentrant kind runs it."""
    llama, length = make("llama-3.1-8b", 4), 512
    options = {"max_length": length, "lora_target_modules": "q_proj,v_proj"}

    def recomputed(run: Run) -> float:
        return sum(
            op.total_flops
            for op in step_operations(llama, run)
            if op.phase is Phase.RECOMPUTE and op.name == "down_proj"
        )

    assert recomputed(run_of(llama, **options)) == 0
    assert recomputed(run_of(llama, **options, reentrant=True)) == 4 * 2 * length * 14336 * 4096
    everywhere = run_of(llama, max_length=length)
    assert recomputed(everywhere) == 4 * 2 * length * 14336 * 4096


def test_a_window_bounds_attention() -> None:
    assert attention_flops(1, 1, 8, 1) == 4 * 32
    assert attention_flops(1, 1, 8, 1, window=8) == attention_flops(1, 1, 8, 1)
    assert attention_flops(1, 1, 1024, 1, window=1) == pytest.approx(4 * 1023.5)
