"""Operators with kernels of their own: attention, embedding, loss and 4-bit products.

Sources: PyTorch's flash attention (``flash_api.cpp``) and loss kernels, bitsandbytes 0.50
``autograd/_functions.py`` and ``_dequant_linear_fallback``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunecast.model import flash_3
from tunecast.model.operation import EFFICIENT, MASKED, Kind, Phase
from tunecast.model.primitives import (
    ATTENTION_BACKWARD_FLOPS,
    attention_flops,
    elementwise,
    gemm,
    gradient_gemm,
)
from tunecast.model.tape import Grads, Tape, Tensor

QUANT_BLOCK = 64
"""Weights that share one absmax (``Params4bit`` blocksize)."""
NESTED_BLOCK = 256
"""absmax values that share one second-level absmax (``compress_statistics``)."""
CODE_ENTRIES = 256
"""Entries of the second-level code table."""
FLASH_BACKWARD_LAUNCHES = 3
"""Row sums of dO.O, the main kernel, conversion of dQ (``flash_bwd_launch_template.h``)."""
FLASH_ROW_BLOCK = 128
"""Rows are padded to a multiple of this in the backward's buffers (``flash_api.cpp``)."""
GROUPED_BACKWARD_LAUNCHES = 2
"""Sums of dK and dV over the query heads of a group (``flash_api.cpp``, ``mha_bwd``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of one attention call."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    masked: bool = False
    """Whether an explicit mask comes along, which keeps the kernel from skipping masked tiles."""
    window: int | None = None
    """Sliding window that the kernel knows of, whose far tiles it skips."""
    hopper: bool = False
    """Whether the kernels are FlashAttention-3's."""
    spans: int | None = None
    """Tokens of the documents that the kernel keeps apart in a row, or in all rows laid end to end; None: a row is one
    document."""

    @property
    def documents(self) -> float:
        """Documents of all rows."""
        return self.batch * self.length / self.span

    @property
    def span(self) -> int:
        """Tokens that attention spans."""
        return self.length if self.spans is None else min(self.spans, self.batch * self.length)

    @property
    def as_tuple(self) -> tuple[int, ...]:
        """(batch, heads, kv_heads, q_len, kv_len, head_dim); documents that are kept apart are a batch of their own."""
        return (max(round(self.documents), 1), self.heads, self.kv_heads, self.span, self.span, self.head_dim)

    @property
    def flops(self) -> float:
        """Forward FLOPs as executed: all pairs with an explicit mask, else the causal half."""
        causal = self.documents * attention_flops(1, self.heads, self.span, self.head_dim, self.window)
        return 2.0 * causal if self.masked else causal

    @property
    def backward_scratch_elements(self) -> int:
        """fp32 elements that the GPU's backward allocates: dQ and row sums, and dK, dV per query head (16-bit), or what
        FlashAttention-3's does."""
        if self.hopper:
            return flash_3.scratch_elements(self.batch, self.heads, self.kv_heads, self.length, self.head_dim)
        rows = -(-self.length // FLASH_ROW_BLOCK) * FLASH_ROW_BLOCK
        buffers = self.batch * self.heads * rows * (self.head_dim + 1)
        grouped = self.batch * self.heads * self.length * self.head_dim if self.heads != self.kv_heads else 0
        return buffers + grouped

    @property
    def launches(self) -> tuple[int, int]:
        """Kernels of the GPU's forward and backward."""
        grouped = self.heads != self.kv_heads
        if self.hopper:
            shared = flash_3.GROUPED_BACKWARD_LAUNCHES if grouped else 0
            return flash_3.FORWARD_LAUNCHES, flash_3.BACKWARD_LAUNCHES + shared
        return 1, FLASH_BACKWARD_LAUNCHES + (GROUPED_BACKWARD_LAUNCHES if grouped else 0)


WIDEST_FLASH = 256
"""Widest head that FlashAttention's kernels take (csrc/flash_attn/flash_api.cpp, ``mha_fwd``)."""


def mask_bias(tape: Tape, mask: Tensor, dtype: str, shape: AttentionShape) -> Tensor:
    """The mask as numbers to add to the scores, made anew in every layer (``where`` between two scalars).

    The mask itself may be one for all samples; its numbers are written once per sample.
    """
    scalars = [elementwise(tape, "mask.scalar", (), 1, dtype) for _ in range(2)]
    return elementwise(tape, "mask.where", (mask, *scalars), shape.batch * shape.length**2, dtype)


EFFICIENT_IN_REGISTERS = 128
"""Widest head of which the memory-efficient backward keeps the gradients of keys and values in registers."""


def layout_of(shape: AttentionShape) -> str:
    """Which kernel ``sdpa`` runs, as a layout of operations: PyTorch's memory-efficient one under an explicit mask or
    for wide heads; nothing: the device's own."""
    return MASKED if shape.masked else EFFICIENT if shape.head_dim > WIDEST_FLASH else ""


def wide_scratch_elements(shape: AttentionShape) -> int:
    """fp32 sums of the gradients of keys and values that the memory-efficient backward keeps in memory.

    Source: PyTorch ``mem_eff_attention/kernel_backward.h``, ``kNeedsAccumGradK``.
    """
    if shape.head_dim <= EFFICIENT_IN_REGISTERS:
        return 0
    return 2 * shape.batch * shape.heads * shape.length * shape.head_dim


def flash_attention(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: AttentionShape,
    *,
    on_gpu: bool,
    bias: Tensor | None = None,
    remade: bool = False,
    held: tuple[Tensor, ...] = (),
) -> Tensor:
    """Fused attention: keeps q, k, v, its output, a log-sum-exp per row and the bias if any, never the scores. `held`
    is still there in the backward, as an argument of a checkpoint is.

    With `remade`, a checkpoint of its own keeps the inputs alone, and the backward makes the rest again.
    """
    size, layout, (launches, back) = shape.as_tuple, layout_of(shape), shape.launches
    inputs = (q, k, v) if bias is None else (q, k, v, bias)

    def forward() -> tuple[Tensor, Tensor]:
        made = tape.empty(q.elements, q.dtype), tape.empty(shape.batch * shape.heads * shape.length, "fp32")
        tape.kernel(
            "attention",
            Kind.ATTENTION,
            inputs,
            made,
            flops=shape.flops,
            launches=launches,
            shape=size,
            layout=layout,
            dtype=q.dtype,
        )
        return made

    out, row_sums = first = forward()
    if tape.would_grad(q, k, v):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        row = shape.batch * shape.length * shape.head_dim
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        grads = tuple(tape.empty(row * count, q.dtype) for count in heads)
        with tape.in_phase(Phase.RECOMPUTE):
            results = forward() if remade else first
        reads = (grad, *inputs, *results)
        elements = shape.backward_scratch_elements + (wide_scratch_elements(shape) if layout else 0)
        scratch = (tape.empty(elements, "fp32", part="scratch"),) if on_gpu else ()
        tape.kernel(
            "attention",
            Kind.ATTENTION,
            reads,
            (*grads, *scratch),
            flops=ATTENTION_BACKWARD_FLOPS * shape.flops,
            n_bytes=sum(tensor.bytes for tensor in (*reads, *grads)),
            launches=back,
            shape=size,
            layout=layout,
            dtype=q.dtype,
        )
        return tuple(given if tensor.needs_grad else None for given, tensor in zip(grads, (q, k, v), strict=True))

    return tape.record(out, (q, k, v), backward, saves=(*inputs, *held) if remade else (*inputs, out, row_sums, *held))


def embedding(tape: Tape, table: Tensor, ids: Tensor, hidden_size: int) -> Tensor:
    """Rows of the table; a trained table gets a dense gradient (zeros of its full size, then scattered sums)."""
    out = tape.empty(ids.elements * hidden_size, table.dtype)
    tape.kernel("embedding", Kind.MEMORY, (ids,), (out,), n_bytes=2 * out.bytes + ids.bytes)

    def backward(grad: Tensor) -> Grads:
        dense = tape.empty(table.elements, grad.dtype)
        tape.kernel("embedding", Kind.MEMORY, (grad, ids), (dense,), launches=2)
        return (dense,)

    return tape.record(out, (table,), backward, saves=(ids,))


def log_softmax(tape: Tape, logits: Tensor, shape: tuple[int, int]) -> Tensor:
    """Over the vocabulary, in fp32; keeps its result."""
    out = elementwise(tape, "log_softmax", (logits,), logits.elements, logits.dtype, kind=Kind.LOSS)
    tape.events[-1].shape = shape

    def backward(grad: Tensor) -> Grads:
        given = elementwise(tape, "log_softmax", (grad, out), out.elements, out.dtype, kind=Kind.LOSS)
        tape.events[-1].shape = shape
        return (given,)

    return tape.record(out, (logits,), backward, saves=(out,))


def nll_loss(tape: Tape, log_probs: Tensor, target: Tensor, shape: tuple[int, int]) -> Tensor:
    """Mean of the targets' log probabilities. Its backward zeroes and writes a full tokens x vocabulary tensor."""
    picked = target.elements * 4
    out = tape.empty(1, "fp32")
    n_bytes = picked + target.bytes + 2 * out.bytes
    tape.kernel("nll_loss", Kind.LOSS, (log_probs, target), (out,), shape=shape, n_bytes=n_bytes)

    def backward(grad: Tensor) -> Grads:
        full = tape.empty(log_probs.elements, log_probs.dtype)
        moved = picked + target.bytes + 2 * out.bytes + full.bytes
        reads = (grad, log_probs, target)
        tape.kernel("nll_loss", Kind.LOSS, reads, (full,), shape=shape, n_bytes=moved, launches=2)
        return (full,)

    return tape.record(out, (log_probs,), backward, saves=(log_probs, target))


def dequantized(
    tape: Tape, elements: int, dtype: str, *, nested: bool, in_place: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A 16-bit copy of a 4-bit weight, and the absmax values made for it: packed nibbles read, the weight written.

    Double quantization first restores the absmax values (one kernel) and adds their offset (one more).
    """
    part, tape.part = tape.part, "scratch"
    blocks = -(-elements // QUANT_BLOCK)
    absmax = Tensor(blocks, "fp32", None)
    made: tuple[Tensor, ...] = ()
    if nested:
        second_level = 4 * (-(-blocks // NESTED_BLOCK) + CODE_ENTRIES)
        absmax = tape.empty(blocks, "fp32")
        tape.kernel("absmax", Kind.MEMORY, (), (absmax,), n_bytes=blocks + second_level + absmax.bytes)
        restored = absmax if in_place else tape.empty(blocks, "fp32")
        tape.kernel("absmax", Kind.MEMORY, (absmax,), (restored,), n_bytes=2 * absmax.bytes + 4)
        absmax, made = restored, (absmax, restored)
    weight = tape.empty(elements, dtype)
    packed = -(-elements // 2)
    tape.kernel(
        "dequantize",
        Kind.DEQUANT,
        (absmax,),
        (weight,),
        shape=(elements,),
        n_bytes=packed + absmax.bytes + weight.bytes,
        dtype=dtype,
    )
    tape.part = part
    return weight, made


def matmul_4bit(
    tape: Tape, name: str, x: Tensor, *, k: int, n: int, nested: bool, bias: Tensor | None = None
) -> Tensor:
    """Product with a frozen 4-bit weight: dequantized in the forward, in every recomputation and in the backward.

    bitsandbytes keeps the packed weight outside autograd's saved tensors, so that early stop of a
    checkpoint does not wait for it. Holds for more than 1,536 tokens on CUDA and always on a CPU; fewer
    tokens may run a fused kernel, which is left out.
    """
    m = x.elements // k
    weight, made = dequantized(tape, n * k, x.dtype, nested=nested, in_place=False)
    reads = (x, weight) if bias is None else (x, weight, bias)
    out = gemm(tape, name, reads, (m, n, k), "nt")
    tape.hold(*made)

    def backward(grad: Tensor) -> Grads:
        again, _ = dequantized(tape, n * k, grad.dtype, nested=nested, in_place=True)
        return (gradient_gemm(tape, name, grad, again, (m, k, n), "nn"),)

    return tape.record(out, (x,), backward)
