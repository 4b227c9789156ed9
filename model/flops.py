"""FLOPs of one optimizer step of the whole job: what the mathematics needs, and what the kernels run.

A product of m x k by k x n costs 2mkn: one multiplication and one addition per term. Only matrix
products and attention are counted; elementwise work is bytes (see the inventory).
"""

from __future__ import annotations

from collections.abc import Mapping

from tunecast.model.architecture import Architecture, Attention, Layer, Linear
from tunecast.model.inventory import flops_by_dtype, part_operations, step_operations
from tunecast.model.operation import Kind
from tunecast.model.parallel import is_split, stages_counted
from tunecast.model.primitives import attention_flops
from tunecast.model.root_modules import adapts_embedding, head_adapter_sizes
from tunecast.model.run import Run

FROZEN_PASSES = 2
"""Products per frozen weight: output, input gradient."""
TRAINED_PASSES = 3
"""Products per trained weight: output, input gradient, weight gradient."""
ATTENTION_PASSES = 3
"""Attention forward, and twice as much backward (four products for two; recomputed scores are not required work)."""
STATE_PRODUCTS = 3
"""Products of a token with a state of linear attention (Yang et al. 2024, arXiv 2412.06464)."""


def linear_flops_per_token(linear: Linear, run: Run) -> float:
    """Required FLOPs per token of one linear map: 4 per frozen weight, 6 per trained one, plus its adapter.

    Leaves out biases, recomputation, dequantization, and that the first layer's input may need no gradient.
    """
    passes = FROZEN_PASSES if run.has_adapters else TRAINED_PASSES
    base = 2.0 * passes * linear.weight_params
    if linear.name not in run.lora_target_modules:
        return base
    return base + 2.0 * TRAINED_PASSES * run.lora_r * (linear.in_features + linear.out_features)


def expert_flops_per_token(layer: Layer, run: Run) -> float:
    """Required FLOPs per token of the router and of the experts that a token goes to."""
    if layer.mlp.experts is None or not layer.mlp.experts.stacked:
        return 0.0
    passes = FROZEN_PASSES if run.has_adapters else TRAINED_PASSES
    base = 2.0 * passes * layer.mlp.experts.active_weight_params
    return base + 2.0 * TRAINED_PASSES * layer.mlp.experts.active_adapter_params(run.lora_target_modules, run.lora_r)


def head_flops_per_token(architecture: Architecture, run: Run) -> float:
    """Required FLOPs per token of the output head over the whole vocabulary, tied or not, with its adapter."""
    frozen = run.has_adapters and architecture.head_module not in run.modules_to_save
    base = 2.0 * (FROZEN_PASSES if frozen else TRAINED_PASSES) * architecture.embedding_params
    factors = sum(rows * columns for rows, columns in head_adapter_sizes(architecture, run))
    return base + 2.0 * TRAINED_PASSES * factors


def embedding_flops_per_token(architecture: Architecture, run: Run) -> float:
    """Required FLOPs per token of an adapter on the table of tokens: its first factor is looked up, not multiplied."""
    if not adapts_embedding(architecture, run):
        return 0.0
    return 2.0 * TRAINED_PASSES * run.lora_r * architecture.hidden_size


def attention_flops_per_sample(attention: Attention, length: int) -> float:
    """Required FLOPs of causal attention over one sample: forward plus twice as much backward, mask halved.

    Of linear attention: its state read for the key and for the query of every token, and written to. Of a short
    convolution none are counted, as of elementwise arithmetic.
    """
    if attention.convolution is not None:
        return 0.0
    if attention.delta is not None:
        net = attention.delta
        return ATTENTION_PASSES * length * STATE_PRODUCTS * 2.0 * net.values_width * net.key_dim
    forward = attention_flops(1, attention.num_heads, length, attention.head_dim, attention.window)
    share = 1.0 if attention.latent is None else (1.0 + attention.latent.value_share) / 2.0
    return ATTENTION_PASSES * forward * share


def layer_flops_per_sample(layer: Layer, run: Run) -> float:
    """Required FLOPs of one layer for one sample."""
    linears = sum(layer.mlp.share_of(linear) * linear_flops_per_token(linear, run) for linear in layer.linears)
    linears += expert_flops_per_token(layer, run)
    linears += 2.0 * TRAINED_PASSES * sum(layer.attention.adapter_sizes(run.lora_target_modules, run.lora_r))
    spanned = run.attention_spans or run.max_length
    documents = run.max_length / spanned
    return run.max_length * linears + documents * attention_flops_per_sample(layer.attention, spanned)


def input_flops_per_token(architecture: Architecture, run: Run) -> float:
    """Required FLOPs per token of the map to inputs that layers have of their own."""
    return sum(linear_flops_per_token(linear, run) for linear in architecture.root_linears)


def model_flops_per_step(architecture: Architecture, run: Run) -> float:
    """Required FLOPs of one optimizer step of the whole job (the numerator of MFU).

    No recomputation, no dequantization, causal attention halved: about 4N per token plus adapters for LoRA,
    6N for a full fine-tune.
    """
    samples = run.tokens_per_step / run.max_length
    layers = sum(group.count * layer_flops_per_sample(group.layer, run) for group in architecture.groups)
    ends = head_flops_per_token(architecture, run) + embedding_flops_per_token(architecture, run)
    ends += input_flops_per_token(architecture, run)
    return samples * (layers + run.max_length * ends)


def no_more_than_run(by_weights: float, executed: Mapping[str, float]) -> float:
    """Required FLOPs of a step by its weights (`model_flops_per_step`), but no more than its kernels run by dtype: the
    gradient of the first layer's input is left out where nothing before it trains."""
    return min(by_weights, sum(executed.values()))


def executed_flops_per_step(architecture: Architecture, run: Run) -> float:
    """FLOPs the kernels of all GPUs run in one optimizer step, recomputation included (the numerator of HFU)."""
    return sum(executed_by_dtype(architecture, run).values())


def executed_by_dtype(architecture: Architecture, run: Run) -> dict[str, float]:
    """The same by the dtype that multiplies: what is stored in few bits may multiply in them, or in 16."""
    if not is_split(run):
        counted = flops_by_dtype(step_operations(architecture, run), Kind.GEMM, Kind.ATTENTION)
        return {dtype: run.num_gpus * flops for dtype, flops in counted.items()}
    found: dict[str, float] = {}
    for stage, count in stages_counted(architecture, run):
        counted = flops_by_dtype(part_operations(architecture, run, stage), Kind.GEMM, Kind.ATTENTION)
        for dtype, flops in counted.items():
            found[dtype] = found.get(dtype, 0.0) + run.num_gpus / run.pp * count * flops
    return found
