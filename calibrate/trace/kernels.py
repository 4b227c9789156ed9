"""From one traced operator call to the kernel work it stands for: kind, shape, FLOPs, bytes, launches."""

from __future__ import annotations

import functools
import math
from typing import Any

from tunecast.model.operation import (
    EFFICIENT,
    MASKED,
    SOFTMAX,
    STRAIGHT,
    STRIDED,
    SYNCHRONISATION,
    VALUE_READ,
    Kind,
    Operation,
    Phase,
    expert_shape,
    grouped_layout,
)
from tunecast.model.primitives import cast_layout
from tunecast.model.primitives_heavy import EFFICIENT_IN_REGISTERS, WIDEST_FLASH

NO_KERNEL = frozenset(
    {
        VALUE_READ, "_unsafe_view", "alias", "detach", "detach_", "device", "empty", "empty_like",
        "empty_strided", "is_same_size", "lift_fresh", "lift_fresh_copy", "new_empty", "new_empty_strided",
        "resize_", "set_", "size", "stride", "_reshape_alias", "item",
    }
)  # fmt: skip
"""Operators that only make or describe tensors: no kernel runs. Views are recognised by their schema."""

GROUPED = "_grouped_mm"
"""Products of stacked experts: rows sorted by expert, where each one's rows end as third argument."""
ADDED = "baddbmm"
"""A stack of products added to its first argument, which is copied to the result first, in a kernel of its own (PyTorch
LinearAlgebra.cpp, common_checks_baddbmm_bmm)."""
GEMMS = frozenset({"mm", "addmm", "bmm", ADDED, GROUPED})
WRITE_ONLY = frozenset({"copy_", "fill_", "zero_"})
"""In-place operators that do not read what they overwrite."""

ATTENTION_BACKWARD_FLOPS = 2.5
"""Flash attention's backward has five products where the forward has two (FlashAttention-2, section 3.1)."""
FLASH_BACKWARD_LAUNCHES = 3
"""dO.O row sums, the main kernel, conversion of the fp32 dQ (PyTorch flash_bwd_launch_template.h)."""
GQA_BACKWARD_LAUNCHES = 2
"""Sums of expanded dK and dV over query groups (PyTorch flash_api.cpp, mha_bwd)."""

FLASH_SEQUENCE_BLOCK = 128
"""Sequence lengths are rounded up to this for flash backward's buffers, head sizes to 32 or, above 128,
to 64 (PyTorch flash_api.cpp, mha_bwd)."""

SYNCHRONISATIONS = frozenset({SYNCHRONISATION, "cuda.synchronize"})
"""Names of operations at which the host waits until the device has done everything before."""

MULTI_TENSOR_CHUNK = 65536
"""Elements per chunk (PyTorch MultiTensorApply.cuh, kChunkSize)."""
MULTI_TENSOR_BLOCKS = 320
"""Chunks per launch (MultiTensorApply.cuh, depth_to_max_blocks)."""
MULTI_TENSOR_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors per launch by number of lists (MultiTensorApply.cuh, depth_to_max_tensors)."""
MULTI_TENSOR_TENSORS_SCALARS = {**MULTI_TENSOR_TENSORS, 1: 96}
"""The same with one scalar per tensor (depth_to_max_tensors_scalarlist)."""
FOREACH_NORM_EXTRA_LAUNCHES = 2
"""Zeroed partial results and their final reduction (PyTorch ForeachReduceOp.cu)."""
FUSED_ADAM_LISTS = 4
"""Parameters, gradients and two moments (PyTorch FusedAdamUtils.cuh)."""
CAT_INPUTS = 128
"""Inputs per kernel of a concatenation (PyTorch Shape.cu, CAT_ARRAY_BATCH_SIZE)."""
BNB_UPDATES = frozenset({"optimizer_update_32bit", "optimizer_update_8bit_blockwise"})
"""One update of bitsandbytes' optimizers, which synchronise the device after each (``Optimizer8bit.step``)."""
TWO_KERNELS = frozenset({"nll_loss_backward", "slice_backward", "select_backward", "embedding_dense_backward"})
"""A zeroed output, then the values (PyTorch TensorShape.cpp, slice_backward and select_backward)."""


def tensors_in(value: Any) -> list[Any]:
    """All tensors of nested arguments, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for inner in value for t in tensors_in(inner)]
    if isinstance(value, dict):
        return [t for inner in value.values() for t in tensors_in(inner)]
    return []


def unique_bytes(tensor: Any) -> int:
    """Bytes of distinct elements: expanded dimensions (stride 0) count once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def dtype_name(tensors: list[Any]) -> str:
    """Our name of the widest floating dtype moved; of any dtype when none floats."""
    names = {
        "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64",
    }  # fmt: skip
    floating = [t for t in tensors if t.dtype.is_floating_point] or tensors
    if not floating:
        return "int64"
    widest = max(floating, key=lambda t: t.element_size())
    name = str(widest.dtype).removeprefix("torch.")
    return names.get(name, name)


@functools.cache
def operator_name(func: Any) -> str:
    """``mm`` of ``aten.mm.default``."""
    return str(func._schema.name.split("::")[-1])


@functools.cache
def launches_nothing(func: Any, name: str) -> bool:
    """Whether the call runs no kernel: views, metadata, bare allocation."""
    return name in NO_KERNEL or func.is_view or func._schema.name.startswith(("prim", "profiler"))


def gemm_shape(a: Any, b: Any) -> tuple[int, int, int]:
    """(m, n, k) of one product. Rows that many stacked matrices share out among them count once."""
    return (a.shape[-2], b.shape[-1], a.shape[-1])


def gemm_layout(a: Any, b: Any) -> str:
    """``nt`` | ``nn`` | ``tn`` from which operand is stored transposed."""
    transposed = {True: "t", False: "n"}
    return transposed[_is_transposed(a)] + transposed[_is_transposed(b)]


def _is_transposed(matrix: Any) -> bool:
    rows, columns = matrix.stride()[-2:]
    return bool(rows == 1 and columns != 1)


def attention_shape(q: Any, k: Any) -> tuple[int, ...]:
    """(batch, heads, kv_heads, q_len, kv_len, head_dim)."""
    return (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])


def attention_flops(shape: tuple[int, ...], causal: bool) -> float:
    """Two products of scores and values; a causal kernel runs half of the tiles."""
    batch, heads, _, q_len, kv_len, head_dim = shape
    return 4.0 * batch * heads * q_len * kv_len * head_dim * (0.5 if causal else 1.0)


def attention_scratch_bytes(shape: tuple[int, ...], layout: str) -> int:
    """Buffers inside a backward of attention: `flash_backward_scratch_bytes`, and of the memory-efficient kernel fp32
    dK and dV where heads are wider than it keeps in registers (PyTorch mem_eff_attention/kernel_backward.h)."""
    batch, heads, _, _, kv_len, head_dim = shape
    wide = layout in (EFFICIENT, MASKED) and head_dim > EFFICIENT_IN_REGISTERS
    return flash_backward_scratch_bytes(shape) + (2 * 4 * batch * heads * kv_len * head_dim if wide else 0)


def flash_backward_scratch_bytes(shape: tuple[int, ...]) -> int:
    """Buffers inside flash attention's backward: fp32 dQ and row sums, and dK, dV per query head with GQA."""
    batch, heads, kv_heads, q_len, kv_len, head_dim = shape
    rows = _rounded_up(q_len, FLASH_SEQUENCE_BLOCK)
    columns = _rounded_up(head_dim, 32 if head_dim <= 128 else 64)
    buffers = 4 * batch * heads * rows * (columns + 1)
    expanded = 2 * 2 * batch * heads * kv_len * head_dim if heads != kv_heads else 0
    return buffers + expanded


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def synchronisation(phase: Phase) -> Operation:
    """The host waits for the device; no kernel."""
    return Operation(name="cuda.synchronize", kind=Kind.OPTIMIZER, phase=phase, launches=0.0)


def moved_bytes(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes read plus bytes written, from the schema: inputs are read, mutated and new tensors written."""
    moved = 0
    for value, argument in _named_arguments(func, args, kwargs):
        written = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (written and (name in WRITE_ONLY or argument.kwarg_only))
        moved += sum(unique_bytes(t) * (int(reads) + int(written)) for t in tensors_in(value))
    if not func._schema.is_mutable:
        moved += sum(unique_bytes(t) for t in tensors_in(out))
    return moved + _correction_bytes(name, args, out)


def _named_arguments(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    schema = func._schema.arguments
    named = list(zip(args, schema, strict=False))
    by_name = {argument.name: argument for argument in schema}
    return named + [(value, by_name[key]) for key, value in kwargs.items() if key in by_name]


def _correction_bytes(name: str, args: Any, out: Any) -> int:
    """Operators that touch only a part of an argument, or that write twice."""
    if name in ("embedding", ADDED):
        return unique_bytes(out) - unique_bytes(args[0])
    if name == "nll_loss_forward":
        return int(args[1].numel() * args[0].element_size()) - unique_bytes(args[0])
    if name == "nll_loss_backward":
        return int(args[2].numel() * args[0].element_size()) - unique_bytes(args[1])
    if name in ("slice_backward", "select_backward"):
        return unique_bytes(args[0])
    if name in BNB_UPDATES:
        return -_overstated_update_bytes(name, args)
    if name == "_fused_adamw_":
        return -sum(unique_bytes(gradient) for gradient in args[1])
    if name in ("full_like", "zeros_like", "ones_like", "new_ones", "new_zeros", "new_full"):
        return -unique_bytes(args[0])
    return 0


def _overstated_update_bytes(name: str, args: Any) -> int:
    """bitsandbytes' schemas call the gradient and the code tables written; its kernels only read them."""
    codes = args[12:14] if name == "optimizer_update_8bit_blockwise" else ()
    return sum(unique_bytes(tensor) for tensor in tensors_in([args[1], *codes]))


def multi_tensor_launches(tensor_lists: list[list[Any]], *, scalars: bool = False) -> int:
    """Kernels that multi_tensor_apply launches: a launch fills with tensors or with chunks."""
    limits = MULTI_TENSOR_TENSORS_SCALARS if scalars else MULTI_TENSOR_TENSORS
    per_launch = limits[len(tensor_lists)]
    launches = tensors = blocks = 0
    for tensor in tensor_lists[0]:
        chunks = -(-tensor.numel() // MULTI_TENSOR_CHUNK)
        if not chunks:
            continue
        tensors += 1
        for chunk in range(1, chunks + 1):
            blocks += 1
            full_of_tensors = tensors == per_launch and chunk == chunks
            if full_of_tensors or blocks == MULTI_TENSOR_BLOCKS:
                launches += 1
                blocks = 0
                tensors = 0 if chunk == chunks else 1
    return launches + (1 if blocks else 0)


def launch_count(name: str, args: Any, out: Any) -> int:
    """Kernels of one call on CUDA; one unless the operator is known to issue more."""
    if name.startswith(("_foreach", "_fused", "_amp_foreach")):
        lists = [list(a) for a in args if isinstance(a, list | tuple) and a and hasattr(a[0], "numel")]
        scalars = any(isinstance(a, list | tuple) and a and isinstance(a[0], float) for a in args)
        if name == "_foreach_norm":
            return multi_tensor_launches(lists) + FOREACH_NORM_EXTRA_LAUNCHES
        if name.startswith("_fused"):
            return multi_tensor_launches(lists[:FUSED_ADAM_LISTS])
        fresh = [] if name.endswith("_") or not isinstance(out, list | tuple) else [list(out)]
        return multi_tensor_launches(lists + fresh, scalars=scalars)
    if name in ("cat", "stack"):
        return -(-len(args[0]) // CAT_INPUTS)
    return 2 if name in TWO_KERNELS else 1


def describe(
    func: Any, args: Any, kwargs: Any, out: Any, *, phase: Phase, layer: int | None, vocab_size: int
) -> Operation | None:
    """The operation of one call, or None when no kernel runs."""
    name = operator_name(func)
    if launches_nothing(func, name):
        return None
    moved = moved_bytes(func, name, args, kwargs, out)
    tensors = tensors_in(args) + tensors_in(kwargs) + tensors_in(out)
    common: dict[str, Any] = {
        "name": f"{func._schema.name.split('::')[0]}.{name}",
        "phase": phase,
        "layer": layer,
        "bytes": float(moved),
        "dtype": dtype_name(tensors),
    }
    if name in GEMMS:
        return _gemm(name, args, common)
    if "scaled_dot_product" in name or name == "_flash_attention_forward":
        return _attention(name, args, kwargs, common)
    if name == "int8_linear_matmul":
        k, n = args[0].shape[-1], args[1].shape[0]
        m = args[0].numel() // k
        shape: dict[str, Any] = {"flops": 2.0 * m * n * k, "shape": (m, n, k), "layout": "nt"}
        return Operation(kind=Kind.GEMM, **shape, **{**common, "dtype": "int8"})
    if name == "dequantize_4bit":
        return Operation(kind=Kind.DEQUANT, shape=(out.numel(),), **{**common, "dtype": dtype_name([out])})
    launches = float(launch_count(name, args, out))
    if phase is Phase.OPTIMIZER:
        return Operation(kind=Kind.OPTIMIZER, launches=launches, **common)
    wide = _vocabulary_rows(tensors, vocab_size)
    if wide is not None and name not in ("embedding", "embedding_dense_backward"):
        layout = STRAIGHT if name in SHAPING else ""
        return Operation(kind=Kind.LOSS, launches=launches, shape=wide, layout=layout, **common)
    return Operation(kind=Kind.MEMORY, launches=launches, layout=walk_of(name, args, out), **common)


SHAPING = ("div", "mul", "tanh", "tanh_backward")
"""What divides, caps and multiplies logits before their cross-entropy."""
SOFTMAXES = ("_softmax", "_safe_softmax", "_softmax_backward_data")
JOINS = ("cat", "stack", "slice_backward")


def walk_of(name: str, args: Any, out: Any) -> str:
    """How a kernel that moves bytes walks through memory, where that is not straight; or that it casts to 32 bits."""
    if name in SOFTMAXES:
        return SOFTMAX
    if name == "_to_copy":
        return cast_layout(dtype_name([args[0]]), dtype_name([out]))
    moves = name == "clone" and not args[0].is_contiguous()
    return STRIDED if moves or name in JOINS else ""


def copied_base(args: Any, out: Any, *, phase: Phase, layer: int | None) -> Operation:
    """The copy by which `ADDED` begins."""
    moved = float(unique_bytes(args[0]) + unique_bytes(out))
    dtype = dtype_name([out])
    return Operation(name="aten.copy_", kind=Kind.MEMORY, phase=phase, layer=layer, bytes=moved, dtype=dtype)


def operand_copies(name: str, args: Any, *, phase: Phase, layer: int | None) -> list[Operation]:
    """Copies of a stack's operands that cuBLAS cannot read as they lie: no dimension of their matrices is contiguous
    (PyTorch Blas.cpp, prepare_batch_matrix_for_cublas)."""
    operands = {ADDED: args[1:3], "bmm": args[:2]}.get(name, ())
    return [
        Operation(
            name="aten.clone", kind=Kind.MEMORY, phase=phase, layer=layer, bytes=2.0 * unique_bytes(each),
            dtype=dtype_name([each]),
        )
        for each in operands
        if 1 not in each.stride()[-2:]
    ]  # fmt: skip


def value_read(tensor: Any, *, phase: Phase, layer: int | None) -> Operation:
    """A value read by the host: one small device-to-host copy, at which host and device meet."""
    return Operation(
        name=SYNCHRONISATION,
        kind=Kind.MEMORY if phase is not Phase.OPTIMIZER else Kind.OPTIMIZER,
        phase=phase,
        layer=layer,
        bytes=2.0 * unique_bytes(tensor),
        dtype=dtype_name([tensor]),
    )


def _gemm(name: str, args: Any, common: dict[str, Any]) -> Operation:
    a, b = args[1:3] if name in ("addmm", ADDED) else args[:2]
    m, n, k = gemm_shape(a, b)
    flops = 2.0 * m * n * k
    shape: tuple[int, ...] = (m, n, k)
    layout = gemm_layout(a, b)
    if name == GROUPED:
        shape, layout = expert_shape(m, n, k, args[2].numel(), inner=b.ndim == 2), grouped_layout(layout)
    elif a.ndim == 3:
        flops, shape = a.shape[0] * flops, (m, n, k, a.shape[0])
    fields = {**common, "dtype": dtype_name([a])}
    return Operation(kind=Kind.GEMM, flops=flops, shape=shape, layout=layout, **fields)


def _attention(name: str, args: Any, kwargs: Any, common: dict[str, Any]) -> Operation:
    backward = "backward" in name
    q, k = args[1:3] if backward else args[:2]
    shape = attention_shape(q, k)
    if "efficient" in name:
        return _narrow_attention(args, kwargs, shape, common, backward=backward)
    causal = bool(args[7] if backward else (args[4] if len(args) > 4 else kwargs.get("is_causal", False)))
    flops = attention_flops(shape, causal) * (ATTENTION_BACKWARD_FLOPS if backward else 1.0)
    grouped = GQA_BACKWARD_LAUNCHES if shape[1] != shape[2] else 0
    launches = float(FLASH_BACKWARD_LAUNCHES + grouped) if backward else 1.0
    # The CPU's flash operator stands for the GPU's: same tensors in and out.
    masked = kwargs.get("attn_mask") is not None
    layout = MASKED if masked else EFFICIENT if shape[-1] > WIDEST_FLASH else ""
    fields = {**common, "dtype": dtype_name([q]), "name": common["name"].replace("_for_cpu", ""), "layout": layout}
    return Operation(kind=Kind.ATTENTION, flops=flops, shape=shape, launches=launches, **fields)


def _narrow_attention(
    args: Any, kwargs: Any, shape: tuple[int, ...], common: dict[str, Any], *, backward: bool
) -> Operation:
    """The memory-efficient kernel with values narrower than keys: two products forward, five backward."""
    place = 11 if backward else 6
    causal = bool(args[place] if len(args) > place else kwargs.get("is_causal", False))
    q, v = (args[1], args[3]) if backward else (args[0], args[2])
    share = v.shape[-1] / q.shape[-1]
    products = (3.0 + 2.0 * share) / 2.0 if backward else (1.0 + share) / 2.0
    launches = float(FLASH_BACKWARD_LAUNCHES) if backward else 1.0
    flops = products * attention_flops(shape, causal)
    masked = args[4 if backward else 3] is not None
    fields = {**common, "dtype": dtype_name([q]), "layout": MASKED if masked else EFFICIENT}
    return Operation(kind=Kind.ATTENTION, flops=flops, shape=shape, launches=launches, **fields)


def _vocabulary_rows(tensors: list[Any], vocab_size: int) -> tuple[int, int] | None:
    """(tokens, vocab) when a tensor of vocabulary width passes through."""
    for tensor in tensors:
        if tensor.ndim >= 2 and tensor.shape[-1] == vocab_size:
            return (tensor.numel() // vocab_size, vocab_size)
    return None
