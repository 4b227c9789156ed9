"""What the caching allocator reserves for a run, found by replaying its allocations in order.

Weights first, then two steps as the tape has them: the state of the optimizer appears in the first one, among the
blocks that its activations left, and the second finds these taken. Nothing is given back after that, so that further
steps reserve no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from tunecast.model.allocator import CachingAllocator
from tunecast.model.architecture import Architecture, Linear
from tunecast.model.litgpt import is_litgpt
from tunecast.model.loss_chunks import CHUNKED_NLL
from tunecast.model.memory_static import QUANT_CODE_BYTES, few_bit_bytes, static_parts
from tunecast.model.optimizer import ADAM_STATES, STEP_COUNTER_BYTES, parameter_groups
from tunecast.model.optimizer_bnb import BITSANDBYTES, tensor_state_bytes
from tunecast.model.optimizer_torchao import TORCHAO, scratch_blocks
from tunecast.model.optimizer_torchao import state_blocks as torchao_blocks
from tunecast.model.primitives_heavy import NESTED_BLOCK, QUANT_BLOCK
from tunecast.model.run import Run
from tunecast.model.short_stack import layers_of
from tunecast.model.stacks import PLAIN
from tunecast.model.step import MICRO_BATCHES
from tunecast.model.tape_parts import allocated_bytes
from tunecast.model.trained import Trained, linear_adapters, root_tensors, trained_dtype, trained_tensors
from tunecast.model.units import DTYPE_BYTES
from tunecast.model.unrolled import Changes, step_changes
from tunecast.model.workspaces import THREADS

STEPS = 2
"""Steps after which no more is reserved."""
FILL_ELEMENTS = 1 << 20
"""Weights are filled piece by piece from a block of so many fp32 numbers, beside a copy in their dtype
(`calibrate/weights.py`)."""
FOREACH, FUSED = "adamw_torch", "adamw_torch_fused"
REPLAYED = (FOREACH, FUSED, "sgd", *BITSANDBYTES, *TORCHAO)
"""Optimizers whose update allocates what is written here."""
TRANSFORMERS = (PLAIN, "trl", "llama-factory", "ms-swift")
"""Stacks that run transformers' and PEFT's code under PyTorch's own settings of the allocator. Unsloth and axolotl
start it with ``expandable_segments`` and rounded sizes, whose rules are others (``unsloth/__init__.py``, axolotl's
``set_pytorch_cuda_alloc_conf``); the order of others' allocations was compared with nothing."""
LOSSES = ("nll", CHUNKED_NLL)
"""Losses of PyTorch's own kernels."""
LEFT_OUT = 0.01
"""Share of the resting state that the list of tensors may miss; it is a block of its own then."""


def is_replayed(architecture: Architecture, run: Run, platform: str) -> bool:
    """Whether everything that the run allocates is known in order, and by which rules: on one GPU, with nothing moved
    to the host, by code that neither a compiler nor an update inside the backward has reordered, without fused kernels:
    of 29 published runs with them 13 reserve 0.24 to 0.44 of what their step adds beyond a replay, others -0.26 to
    0.12."""
    spread = run.num_gpus > 1 or run.tp * run.pp * run.cp > 1 or run.offload != "none" or run.activation_offloading
    reordered = run.torch_compile or run.optimizer_in_backward or is_litgpt(architecture)
    own = run.optim in REPLAYED and run.stack in TRANSFORMERS and run.loss_type in LOSSES and not run.fused_kernels
    own = own and run.master_dtype is None and not architecture.settings
    return platform == "cuda" and own and not spread and not reordered


def replayed_bytes(architecture: Architecture, run: Run, platform: str, workspace_bytes: int = 0) -> int | None:
    """Bytes that the allocator holds after `STEPS` steps; None where the run's order is not known.

    Micro-batches after the first are equal, so that two of them tell.
    """
    if not is_replayed(architecture, run, platform):
        return None
    micro_batches = min(run.gradient_accumulation_steps, MICRO_BATCHES)
    return _replayed(architecture, replace(run, gradient_accumulation_steps=micro_batches), workspace_bytes)


@lru_cache(maxsize=1024)
def _replayed(architecture: Architecture, run: Run, workspace_bytes: int) -> int | None:
    """None as well for a run of more bytes than any device addresses."""
    try:
        return _played(architecture, run, workspace_bytes)
    except OverflowError:
        return None


def _played(architecture: Architecture, run: Run, workspace_bytes: int) -> int | None:
    changes = step_changes(architecture, run, "cuda")
    allocator = CachingAllocator()
    for _ in range(THREADS if workspace_bytes else 0):
        allocator.allocate(workspace_bytes // THREADS)
    if changes is None or not load(allocator, architecture, run):
        return None
    tensors, dtype, kept = trained_tensors(architecture, run), trained_dtype(run), changes.kept()
    for step in range(STEPS):
        addresses = play(allocator, changes)
        update(allocator, tensors, run.optim, dtype, is_first=step == 0)
        for slot in kept:
            allocator.free(addresses[slot])
    return allocator.reserved_bytes


def play(allocator: CachingAllocator, changes: Changes) -> list[int]:
    """Allocate and free as the changes say; the address of every tensor."""
    addresses = [0] * changes.tensors
    allocate, free = allocator.allocate, allocator.free
    for slot, size in zip(changes.slots, changes.sizes, strict=True):
        if size:
            addresses[slot] = allocate(size)
        else:
            free(addresses[slot])
    return addresses


def update(allocator: CachingAllocator, tensors: Sequence[Trained], optim: str, dtype: str, *, is_first: bool) -> None:
    """State of every tensor in the first update, group by group; a ``foreach`` one takes roots of a whole group,
    torchao's what it needs for one tensor after the other."""
    for group in parameter_groups(list(tensors)):
        for tensor in group if is_first or optim in TORCHAO else ():
            for n_bytes in state_blocks(tensor, optim, dtype) if is_first else ():
                allocator.allocate(n_bytes)
            passing = scratch_blocks(TORCHAO[optim], tensor.elements) if optim in TORCHAO else []
            for address in [allocator.allocate(n_bytes) for n_bytes in passing]:
                allocator.free(address)
        roots = [allocator.allocate(tensor.bytes_in(dtype)) for tensor in group] if optim == FOREACH else []
        for address in roots:
            allocator.free(address)


def state_blocks(tensor: Trained, optim: str, dtype: str) -> list[int]:
    """Bytes of what the optimizer keeps for a tensor, each an allocation."""
    if optim in BITSANDBYTES:
        kind = BITSANDBYTES[optim]
        every = tensor_state_bytes(kind, tensor.elements, is_embedding=tensor.is_embedding, can_page=True)
        return [every // kind.moments] * kind.moments if every else []
    if optim == "sgd":
        return []
    if optim in TORCHAO:
        return torchao_blocks(TORCHAO[optim], tensor.elements, tensor.dtype or dtype)
    counter = [STEP_COUNTER_BYTES] if optim == FUSED else []
    return counter + [tensor.bytes_in(dtype)] * ADAM_STATES


def load(allocator: CachingAllocator, architecture: Architecture, run: Run) -> bool:
    """Allocate weights, adapters and the batch; whether the list of them is whole."""
    drawn, block = (allocator.allocate(DTYPE_BYTES["fp32"] * FILL_ELEMENTS) for _ in range(2))
    allocator.free(drawn)
    total = 0
    for made in resting_made(architecture, run):
        passing = []
        for n_bytes, stays in made:
            address = allocator.allocate(n_bytes)
            if stays:
                total += allocated_bytes(n_bytes)
            else:
                passing.append(address)
        for address in passing:
            allocator.free(address)
    allocator.free(block)
    at_rest = {**static_parts(architecture, run), "optimizer_state": 0}
    missing = sum(at_rest.values()) - total
    if missing > 0:
        allocator.allocate(missing)
    allocator.empty_cache()
    return -LEFT_OUT * total <= missing <= LEFT_OUT * total


Made = list[tuple[int, bool]]
"""Bytes of each allocation while a tensor is made, in order, and whether it stays."""


def resting_made(architecture: Architecture, run: Run) -> Iterator[Made]:
    """Everything at rest but the optimizer's state, in the order of the model's modules."""
    before, after = root_tensors(architecture, run) if run.has_adapters else ([], [])
    for tensor in architecture.entry_tensors:
        yield filled(tensor.elements, run.dtype, is_matrix=tensor.is_matrix)
    yield from trained_made(before, run)
    for layer in layers_of(architecture):
        for linear in layer.linears:
            yield from linear_made(linear, run)
        for block in (layer.attention, layer.mlp) if run.has_adapters else ():
            sizes = block.adapter_sizes(run.lora_target_modules, run.lora_r)
            yield from trained_made((Trained(elements=size, is_matrix=True) for size in sizes), run)
        for elements in layer.mlp.stack_sizes(quantized=run.quantize_moe_experts):
            yield four_bit_made(elements, double_quant=run.double_quant)
        in_sixteen = layer.mlp.sixteen_bit_sizes(quantized=run.quantize_moe_experts)
        whole = [*layer.attention.matrix_sizes, *in_sixteen]
        yield from (filled(size, run.dtype, is_matrix=True) for size in whole)
        small = [*layer.norm_sizes(architecture.hidden_size), *layer.attention.qk_norm_sizes, *layer.mlp.vector_sizes]
        yield from (filled(size, run.dtype, is_matrix=False) for size in small)
    for tensor in architecture.exit_tensors:
        yield filled(tensor.elements, run.dtype, is_matrix=tensor.is_matrix)
    yield from trained_made(after, run)
    yield [(DTYPE_BYTES["int64"] * run.tokens_per_micro_batch, True)]


def trained_made(tensors: Iterable[Trained], run: Run) -> Iterator[Made]:
    """Tensors that train beside a frozen model."""
    for tensor in tensors:
        yield filled(tensor.elements, tensor.dtype or run.adapter_dtype, is_matrix=tensor.is_matrix)


def filled(elements: int, dtype: str, *, is_matrix: bool) -> Made:
    """A tensor, and the numbers it is filled with in its dtype."""
    size = DTYPE_BYTES[dtype]
    beside = [(size * FILL_ELEMENTS, False)] if is_matrix and dtype != "fp32" else []
    return [(size * elements, True), *beside]


def linear_made(linear: Linear, run: Run) -> Iterator[Made]:
    """A linear map's weight, its adapters, its bias."""
    if run.base_quantization == "bnb-4bit":
        yield four_bit_made(linear.weight_params, double_quant=run.double_quant)
    elif run.base_quantization is not None:
        yield [(few_bit_bytes([linear], run), True)]
    else:
        yield filled(linear.weight_params, "fp8" if run.fp8_weights else run.dtype, is_matrix=True)
    if run.has_adapters:
        yield from trained_made(linear_adapters([linear], run), run)
    if linear.bias:
        yield filled(linear.out_features, run.dtype, is_matrix=False)


def four_bit_made(elements: int, *, double_quant: bool) -> Made:
    """A packed weight with its statistics, which double quantization makes of wider ones (`quantized_bytes`)."""
    blocks = -(-elements // QUANT_BLOCK)
    packed, wide, code = (-(-elements // 2), True), 4 * blocks, (QUANT_CODE_BYTES, True)
    if not double_quant:
        return [packed, (wide, True), code]
    statistics = [(4, True), (wide, False), (4 * -(-blocks // NESTED_BLOCK), True), (blocks, True)]
    return [packed, (wide, False), code, *statistics]
