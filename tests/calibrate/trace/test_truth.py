"""The traced step against truths found elsewhere: published counts, torch's FLOP counter, hand calculations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tunecast.calibrate.trace import hf  # noqa: E402
from tunecast.calibrate.trace.tracer import Trace, trace_step  # noqa: E402
from tunecast.catalogs.errors import NotSupportedError  # noqa: E402
from tunecast.model.architecture import Architecture  # noqa: E402
from tunecast.model.operation import Kind, Phase  # noqa: E402
from tunecast.model.run import Run  # noqa: E402
from tunecast.model.units import GIB, TERA  # noqa: E402


def gemm_tflop(trace: Trace, *phases: Phase) -> float:
    return sum(trace.flops(phase, Kind.GEMM) for phase in phases or tuple(Phase)) / TERA


def test_llama_8b_lora_matches_the_known_example(llama8b: Architecture, run: Callable[..., Run]) -> None:
    """15.4 GiB at rest, 18.9 GiB at the loss, 90.7 TFLOP of matrix products, 41,943,040 trained parameters."""
    trace = trace_step(llama8b, run(max_length=2048))
    assert trace.memory.at_rest_bytes / GIB == pytest.approx(15.4, abs=0.05)
    assert trace.memory.peak_bytes / GIB == pytest.approx(18.9, abs=0.05)
    assert trace.memory.peak_moment == "loss"
    assert gemm_tflop(trace) == pytest.approx(90.7, abs=0.05)
    assert trace.trainable_params == 41_943_040
    assert trace.total_params == 8_030_261_248 + 41_943_040


def test_llama_8b_lora_matches_the_flop_counter(llama8b: Architecture, run: Callable[..., Run]) -> None:
    """Without checkpointing FlopCounterMode said 33.11 TFLOP forward and 35.38 backward.

    It does not halve the causal mask, and on meta tensors attention's backward is four plain
    products, twice the forward, where the flash kernel runs 2.5 times.
    """
    trace = trace_step(llama8b, run(max_length=2048, gradient_checkpointing=False))
    whole_mask = 2 * trace.flops(Phase.FORWARD, Kind.ATTENTION) / TERA
    assert gemm_tflop(trace, Phase.FORWARD) + whole_mask == pytest.approx(33.11, abs=0.01)
    assert gemm_tflop(trace, Phase.BACKWARD) + 2 * whole_mask == pytest.approx(35.38, abs=0.01)
    assert not trace.flops(Phase.RECOMPUTE)


def test_full_fine_tuning_doubles_the_forward(llama8b: Architecture, run: Callable[..., Run]) -> None:
    """Backward is 2.00 forwards of matrix products; foreach AdamW peaks 30 GiB above rest in square roots."""
    trace = trace_step(llama8b, run("full", max_length=2048))
    assert gemm_tflop(trace, Phase.BACKWARD) / gemm_tflop(trace, Phase.FORWARD) == pytest.approx(2.0, abs=0.001)
    assert trace.memory.peak_moment == "optimizer"
    assert (trace.memory.peak_bytes - trace.memory.at_rest_bytes) / GIB == pytest.approx(30, abs=0.2)
    assert trace.memory.parts["gradients"] / GIB == pytest.approx(15, abs=0.1)
    assert trace.memory.parts["scratch"] / GIB == pytest.approx(15, abs=0.1)


def test_mistral_layer_matches_the_hand_calculation(mistral7b: Architecture, run: Callable[..., Run]) -> None:
    """Per layer: 19.6 TFLOP of products, about 60 GB of memory-bound traffic, 2.5 TFLOP of flash attention."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    job = run(lora_target_modules=targets, max_length=4096, per_device_train_batch_size=4)
    layer = [op for op in trace_step(mistral7b, job).stream if op.layer == 15]
    total = {kind: sum(op.flops for op in layer if op.kind is kind) / TERA for kind in Kind}
    assert total[Kind.GEMM] == pytest.approx(19.6, abs=0.05)
    assert total[Kind.ATTENTION] == pytest.approx(2.5, abs=0.05)
    assert sum(op.bytes for op in layer if op.kind is Kind.MEMORY) / 1e9 == pytest.approx(60, rel=0.12)


@pytest.mark.parametrize(("method", "changes"), [("full", {}), ("lora", {"adapter_dtype": "bf16"})])
def test_products_equal_torchs_flop_counter(
    architecture: Callable[..., Architecture], run: Callable[..., Run], method: str, changes: dict[str, Any]
) -> None:
    """FlopCounterMode over the same code on the meta device; eager attention, so that all is matrix products."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = architecture(layers=2)
    job = run(method, precision="bf16", gradient_checkpointing=False, attn_implementation="eager", **changes)
    model = hf.build_model(shape, job, device="meta")
    tokens = torch.zeros(1, job.max_length, dtype=torch.int64, device="meta")
    position = torch.arange(job.max_length, device="meta")[None]
    mask = torch.zeros(1, 1, job.max_length, job.max_length, dtype=torch.bfloat16, device="meta")
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=tokens, position_ids=position, attention_mask=mask, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    trace = trace_step(shape, job)
    assert trace.flops(Phase.FORWARD, Kind.GEMM) == forward.get_total_flops()
    assert trace.flops(Phase.BACKWARD, Kind.GEMM) == backward.get_total_flops()


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"model_type": "mistral", "window": 32},
        {"model_type": "qwen2", "tied": True, "qkv_bias": True},
        {"model_type": "qwen3", "qk_norm": True, "head_dim": 128},
    ],
)
def test_the_real_model_has_the_architectures_parameters(
    architecture: Callable[..., Architecture], run: Callable[..., Run], shape: dict[str, Any]
) -> None:
    wanted = architecture(**shape)
    model = hf.build_model(wanted, run("full"), device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == wanted.total_params


def test_an_unknown_family_is_refused_by_name(architecture: Callable[..., Architecture]) -> None:
    with pytest.raises(NotSupportedError, match="mamba"):
        hf.hf_config(architecture(model_type="mamba"))


def test_an_unknown_optimizer_is_refused_by_name(run: Callable[..., Run]) -> None:
    with pytest.raises(NotSupportedError, match="galore_adamw"):
        hf.make_optimizer([torch.nn.Parameter(torch.zeros(2, 2))], run(optim="galore_adamw"))
