"""Benchmarks of arithmetic: matrix products, attention, cross-entropy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tunecast.calibrate.bench.tensors import normal
from tunecast.calibrate.bench.timing import Prepared, copies_to_rotate
from tunecast.calibrate.devices.backend import Backend
from tunecast.catalogs.errors import InputError
from tunecast.model.operation import EFFICIENT, FLASH
from tunecast.model.units import DTYPE_BYTES


def prepare_gemm(params: dict[str, Any], backend: Backend) -> Prepared:
    """(m x k)(k x n): ``nt`` is a linear layer's forward, ``nn`` its input gradient, ``tn`` its weight gradient."""
    m, n, k, dtype = params["m"], params["n"], params["k"], params["dtype"]
    copies = copies_to_rotate((m * k + n * k + m * n) * DTYPE_BYTES[dtype], backend)
    return Prepared(calls=[_gemm_call(m, n, k, dtype, params["layout"], backend) for _ in range(copies)])


def _gemm_call(m: int, n: int, k: int, dtype: str, layout: str, backend: Backend) -> Callable[[], object]:
    import torch

    if layout not in GEMM_LAYOUTS:
        raise InputError(f"GEMM layout {layout!r} was asked for, but only nt, nn and tn exist; use one of these.")
    a = normal(backend, *((k, m) if layout[0] == "t" else (m, k)), dtype=dtype)
    b = normal(backend, *((n, k) if layout[1] == "t" else (k, n)), dtype=dtype)
    left, right = (a.t() if layout[0] == "t" else a), (b.t() if layout[1] == "t" else b)
    out = torch.empty((m, n), device=backend.torch_device, dtype=left.dtype)
    return lambda: torch.mm(left, right, out=out)


GEMM_LAYOUTS = ("nt", "nn", "tn")


def prepare_grouped(params: dict[str, Any], backend: Backend) -> Prepared:
    """Products of stacked experts as transformers calls them: rows sorted by expert, equally many for each."""
    experts, rows, n, k, dtype = (params[name] for name in ("experts", "rows", "n", "k", "dtype"))
    copies = copies_to_rotate(experts * (rows * k + n * k + rows * n) * DTYPE_BYTES[dtype], backend)
    return Prepared(calls=[_grouped_call(experts, rows, n, k, params, backend) for _ in range(copies)])


def _grouped_call(
    experts: int, rows: int, n: int, k: int, params: dict[str, Any], backend: Backend
) -> Callable[[], object]:
    """One call. Sources: transformers 5 ``integrations/moe.py``, ``_grouped_linear``; PyTorch ``derivatives.yaml``."""
    import torch

    layout, dtype = params["layout"], params["dtype"]
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # a name of its own since 2.10
    ends = torch.arange(rows, experts * rows + 1, rows, device=backend.torch_device, dtype=torch.int32)
    entry = normal(backend, experts * rows, n if layout == "nn" else k, dtype=dtype)
    if layout == "tn":
        gradient = normal(backend, experts * rows, n, dtype=dtype)
        return lambda: grouped(gradient.t(), entry, offs=ends)
    weight = normal(backend, experts, n, k, dtype=dtype)
    right = weight.transpose(-2, -1) if layout == "nt" else weight
    return lambda: grouped(entry, right, offs=ends)


def prepare_attention(params: dict[str, Any], backend: Backend) -> Prepared:
    """Causal scaled dot-product attention as transformers calls it, forward or backward alone: without a mask, or
    under an explicit one (``masked``), which is one of numbers for each sample. With ``kernel`` by FlashAttention-2
    (PyTorch's copy of it) or a memory-efficient kernel, whatever the device's own choice is."""
    batch, length, head_dim, dtype = (params[name] for name in ("batch", "length", "head_dim", "dtype"))
    heads, kv_heads = params["heads"], params["kv_heads"]
    elements = batch * length * head_dim * (2 * heads + 2 * kv_heads)
    copies = copies_to_rotate(elements * DTYPE_BYTES[dtype], backend)
    backward = params["pass"] == "backward"
    return Prepared(
        calls=[
            _attention_call((batch, length, heads, kv_heads, head_dim), params, backward, backend)
            for _ in range(copies)
        ]
    )


def _attention_call(
    shape: tuple[int, int, int, int, int], params: dict[str, Any], backward: bool, backend: Backend
) -> Callable[[], object]:
    import torch

    (batch, length, heads, kv_heads, head_dim), dtype = shape, params["dtype"]

    def projected(count: int) -> Any:
        """What a projection leaves: heads interleaved with positions, seen head first."""
        flat = normal(backend, batch, length, count * head_dim, dtype=dtype, requires_grad=backward)
        return flat.view(batch, length, count, head_dim).transpose(1, 2)

    query, key, value = projected(heads), projected(kv_heads), projected(kv_heads)
    mask = _causal_numbers(query) if params.get("masked") else None

    def forward() -> Any:
        with _only(params.get("kernel"), backend):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv_heads
            )

    return _gradient_call(forward(), (query, key, value)) if backward else forward


def _causal_numbers(query: Any) -> Any:
    """What PyTorch makes of transformers' mask of booleans: zeros and minus infinities, (batch, 1, length, length)."""
    import torch

    batch, _, length, _ = query.shape
    hidden = torch.ones((batch, 1, length, length), dtype=torch.bool, device=query.device).triu(1)
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)


def _only(kernel: str | None, backend: Backend) -> contextlib.AbstractContextManager[Any]:
    """Where ``sdpa`` has this kernel alone to choose from; a CPU has one for all."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {FLASH: SDPBackend.FLASH_ATTENTION, EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}
    if kernel not in kernels or backend.torch_device == "cpu":
        return contextlib.nullcontext()
    only: contextlib.AbstractContextManager[Any] = sdpa_kernel(kernels[kernel])
    return only


def _gradient_call(output: Any, inputs: tuple[Any, ...]) -> Callable[[], object]:
    """The backward pass alone: gradients of kept outputs, over and over."""
    import torch

    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def prepare_loss(params: dict[str, Any], backend: Backend) -> Prepared:
    """Full-logit cross-entropy of transformers: upcast to fp32, log-softmax, and the backward of both."""
    tokens, vocab, dtype = params["tokens"], params["vocab"], params["dtype"]
    copies = copies_to_rotate(tokens * vocab * DTYPE_BYTES[dtype], backend)
    return Prepared(calls=[_loss_call(tokens, vocab, dtype, backend) for _ in range(copies)])


def _loss_call(tokens: int, vocab: int, dtype: str, backend: Backend) -> Callable[[], object]:
    import torch

    logits = normal(backend, tokens, vocab, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,), device=backend.torch_device)

    def forward_backward() -> object:
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        return torch.autograd.grad(loss, logits)

    return forward_backward


def prepare_matmul_4bit(params: dict[str, Any], backend: Backend) -> Prepared:
    """bitsandbytes' 4-bit linear of m rows over an n x k weight, forward, or the input gradient alone."""
    from tunecast.calibrate.bench.tensors import random_4bit

    m, n, k, dtype = params["m"], params["n"], params["k"], params.get("dtype", "bf16")
    copies = copies_to_rotate(n * k // 2 + (m * k + m * n) * DTYPE_BYTES[dtype], backend)
    weights = [
        random_4bit(
            n,
            k,
            quant_type=params["quant_type"],
            double_quant=params["double_quant"],
            device=backend.torch_device,
            dtype=dtype,
        )
        for _ in range(copies)
    ]
    backward = params["pass"] == "backward"
    return Prepared(calls=[_matmul_4bit_call(m, k, dtype, weight, backward, backend) for weight in weights])


def _matmul_4bit_call(
    m: int, k: int, dtype: str, weight: tuple[Any, Any], backward: bool, backend: Backend
) -> Callable[[], object]:
    import bitsandbytes

    packed, state = weight
    rows = normal(backend, m, k, dtype=dtype, requires_grad=True)

    def forward() -> Any:
        return bitsandbytes.matmul_4bit(rows, packed, quant_state=state)

    return _gradient_call(forward(), (rows,)) if backward else forward
