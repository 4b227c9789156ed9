"""What a model holds between steps: weights, packed 4-bit weights, adapters, optimizer state.

Every tensor is rounded up to the allocator's block, as ``torch.cuda.memory_allocated`` counts it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tunecast.model.architecture import Architecture, Layer, Linear, layer_kinds, rotary_blocks
from tunecast.model.litgpt import has_stable_embedding, is_litgpt, stable_embedding
from tunecast.model.optimizer import optimizer_state_bytes
from tunecast.model.primitives_heavy import CODE_ENTRIES, NESTED_BLOCK, QUANT_BLOCK
from tunecast.model.quantized import gptq_bytes, gptq_packed_bytes, is_gptq
from tunecast.model.quantized_bnb8 import int8_bytes, int8_packed_bytes
from tunecast.model.run import Run
from tunecast.model.scaler import state_bytes
from tunecast.model.stacks import load_stacks
from tunecast.model.tape import allocated_bytes
from tunecast.model.trained import saved_tensors, stored_bytes, trained_dtype, trained_tensors
from tunecast.model.units import DTYPE_BYTES

QUANT_CODE_BYTES = 16 * 4
"""The 16 values of nf4 or fp4, in fp32, held by every quantized weight."""
ROTARY_BUFFERS = 2
"""``inv_freq`` and its original, fp32, half a head long."""


def quantized_bytes(elements: int, *, double_quant: bool) -> int:
    """A 4-bit weight of so many parameters: half a byte per parameter, one absmax per 64, the code table.

    Absmax is fp32, or with double quantization one byte plus an fp32 per 256 of them and one offset.
    Source: bitsandbytes ``quantize_4bit``. The shared second-level code table is left to the model.
    """
    blocks = -(-elements // QUANT_BLOCK)
    total = allocated_bytes(-(-elements // 2)) + allocated_bytes(QUANT_CODE_BYTES)
    if not double_quant:
        return total + allocated_bytes(4 * blocks)
    second = -(-blocks // NESTED_BLOCK)
    return total + allocated_bytes(blocks) + allocated_bytes(4 * second) + allocated_bytes(4)


def layer_packed_bytes(layer: Layer, run: Run) -> int:
    """What sharding divides of the quantized weights of one layer: packed ones, not their statistics."""
    if run.base_quantization is None:
        return 0
    if is_gptq(run):
        return sum(gptq_packed_bytes(linear, run) for linear in layer.linears)
    if run.base_quantization == "bnb-8bit":
        return sum(int8_packed_bytes(linear) for linear in layer.linears)
    sizes = [linear.weight_params for linear in layer.linears]
    sizes += layer.mlp.stack_sizes(quantized=run.quantize_moe_experts)
    return sum(allocated_bytes(-(-elements // 2)) for elements in sizes)


def few_bit_bytes(linears: Iterable[Linear], run: Run) -> int:
    """Packed weights and statistics of linear maps; 0 when the base is not quantized."""
    if run.base_quantization is None:
        return 0
    if is_gptq(run):
        return sum(gptq_bytes(linear, run) for linear in linears)
    if run.base_quantization == "bnb-8bit":
        return sum(int8_bytes(linear) for linear in linears)
    return sum(quantized_bytes(linear.weight_params, double_quant=run.double_quant) for linear in linears)


def stacks_bytes(layer: Layer, run: Run) -> int:
    """Packed experts and statistics of one layer, where they are in 4 bits."""
    sizes = layer.mlp.stack_sizes(quantized=run.quantize_moe_experts)
    return sum(quantized_bytes(elements, double_quant=run.double_quant) for elements in sizes)


def layer_weight_bytes(layer: Layer, hidden_size: int, run: Run) -> int:
    """Unquantized parameters of one layer: norms and biases always, linear weights unless quantized."""
    size = DTYPE_BYTES[run.dtype]
    sizes = [*layer.norm_sizes(hidden_size), *layer.attention.qk_norm_sizes, *layer.attention.matrix_sizes]
    sizes += layer.mlp.sixteen_bit_sizes(quantized=run.quantize_moe_experts) + layer.mlp.vector_sizes
    sizes += [linear.out_features for linear in layer.linears if linear.bias]
    whole = sum(allocated_bytes(size * elements) for elements in sizes)
    of_buffer = DTYPE_BYTES["fp32"] if layer.mlp.wide_buffers else size
    whole += sum(allocated_bytes(of_buffer * elements) for elements in layer.buffer_sizes)
    if run.base_quantization is not None:
        return whole
    of_map = DTYPE_BYTES["fp8"] if run.fp8_weights else size
    return whole + sum(allocated_bytes(of_map * linear.weight_params) for linear in layer.linears)


def root_weight_bytes(architecture: Architecture, run: Run) -> int:
    """Embeddings, norms and head: never quantized, but for LitGPT's head; and other maps, which are. A tied head is
    stored once."""
    size, head = DTYPE_BYTES[run.dtype], quantized_head(architecture, run)
    whole = sum(allocated_bytes(size * tensor.elements) for tensor in architecture.root_tensors)
    if run.base_quantization is not None:
        whole -= sum(allocated_bytes(size * linear.weight_params) for linear in architecture.root_linears)
    return whole if head is None else whole - allocated_bytes(size * head.weight_params)


def quantized_head(architecture: Architecture, run: Run) -> Linear | None:
    """The head where it is stored in 4 bits: Lightning replaces every linear map."""
    if not (is_litgpt(architecture) and architecture.has_exit and run.base_quantization == "bnb-4bit"):
        return None
    return Linear(name="lm_head", in_features=architecture.hidden_size, out_features=architecture.vocab_size)


def litgpt_buffer_bytes(architecture: Architecture, run: Run) -> int:
    """cos and sin of every position, fp32, and in every layer the places of adapted parts, where not all are."""
    attention = architecture.groups[0].layer.attention
    wave = allocated_bytes(4 * run.max_length * (attention.rotary_dim or attention.head_dim))
    widths = [width for name, width in attention.parts if name in run.lora_target_modules]
    places = allocated_bytes(8 * sum(widths)) if 0 < len(widths) < len(attention.parts) else 0
    return 2 * architecture.rotary_sets * wave + architecture.num_layers * places


def buffer_bytes(architecture: Architecture, run: Run) -> int:
    """Rotary frequencies, and the number that each table's embeddings are multiplied by where a module holds it."""
    if is_litgpt(architecture):
        return litgpt_buffer_bytes(architecture, run)
    attention = architecture.groups[0].layer.attention
    head_dim = attention.rotary_dim or attention.head_dim
    if attention.kind == "gptj":  # a table of sines and cosines of every position in every layer
        return architecture.num_layers * allocated_bytes(4 * (architecture.max_position or 0) * head_dim)
    tables = 1 if architecture.layer_inputs is None else 2
    scale = tables * allocated_bytes(4) if architecture.embedding_scale == "table" else 0
    widths = [block.rotary_dim or block.head_dim for block in rotary_blocks(architecture)]
    return sum(ROTARY_BUFFERS * allocated_bytes(4 * width // 2) for width in widths) + scale


def gone_original_bytes(architecture: Architecture, run: Run) -> int:
    """Originals of modules trained whole that Unsloth's own checkpointing leaves on disk; a tied one if both are."""
    if not (run.activation_offloading and run.reentrant and load_stacks()[run.stack].get("saves_root_targets")):
        return 0
    saved = len(run.modules_to_save)
    gone = saved // 2 if architecture.tie_word_embeddings else saved
    return gone * allocated_bytes(DTYPE_BYTES[run.dtype] * architecture.embedding_params)


def saved_scale_bytes(architecture: Architecture, run: Run) -> int:
    """The number that embedded tokens are multiplied by, once more in a copy of its module."""
    copied = architecture.embedding_module in run.modules_to_save and architecture.embedding_scale == "table"
    return allocated_bytes(4) if copied else 0


def master_ratio(run: Run) -> int:
    """Bytes of what trains over those it multiplies with: 2 where fp32 shards are gathered in 16 bits."""
    return DTYPE_BYTES[run.master_dtype or run.dtype] // DTYPE_BYTES[run.dtype]


def static_parts(architecture: Architecture, run: Run, *, platform: str = "cuda") -> dict[str, int]:
    """Bytes at rest between steps on one unsharded GPU, by part; the batch's ids and labels, and which of
    them are padding, are activations."""
    groups, hidden = layer_kinds(architecture), architecture.hidden_size
    quantized = sum(
        group.count * (few_bit_bytes(group.layer.linears, run) + stacks_bytes(group.layer, run)) for group in groups
    )
    quantized += few_bit_bytes(architecture.root_linears, run)
    head = quantized_head(architecture, run)
    quantized += 0 if head is None else quantized_bytes(head.weight_params, double_quant=run.double_quant)
    shared_code = allocated_bytes(4 * CODE_ENTRIES) if quantized and run.double_quant else 0
    layers = sum(group.count * layer_weight_bytes(group.layer, hidden, run) for group in groups)
    saved = stored_bytes(itertools.chain(*saved_tensors(architecture, run)), trained_dtype(run))
    trained = stored_bytes(trained_tensors(architecture, run), trained_dtype(run)) if run.has_adapters else saved
    base = root_weight_bytes(architecture, run) + layers + saved_scale_bytes(architecture, run)
    base -= gone_original_bytes(architecture, run)
    base *= 1 if run.has_adapters else master_ratio(run)
    stable = stable_embedding(architecture) if has_stable_embedding(architecture, run) else ()
    kept = [allocated_bytes(DTYPE_BYTES[run.dtype] * elements) for _, elements in stable]
    return {
        "gradients": sum(kept),
        "weights": base + buffer_bytes(architecture, run) + saved + sum(kept[1:]),
        "quantized": quantized + shared_code,
        "adapters": trained - saved,
        "optimizer_state": optimizer_state_bytes(architecture, run, platform=platform) + state_bytes(architecture, run),
        "activations": (3 if run.has_padding else 2) * allocated_bytes(8 * run.tokens_per_micro_batch),
    }
