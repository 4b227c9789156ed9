"""The unit of work that formulas, the traced stream and the mock devices share.

The same type describes one kernel of a traced stream (``count == 1``, in order) and one entry of
the analytic inventory (``count`` executions per step), so that the two subtract.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What bounds an operation, and which efficiency curve it follows."""

    __hash__ = str.__hash__  # of the text it equals; Enum's own is a Python function, and tapes hash millions
    GEMM = "gemm"
    """Matrix product; ``shape`` is (m, n, k), ``layout`` nt | nn | tn. One kernel for a stack of products, of experts
    or of heads, has the shape of one and their number, (m, n, k, products); of several launches each is a product of
    the shape."""
    ATTENTION = "attention"
    """Fused attention; ``shape`` is (batch, heads, kv_heads, q_len, kv_len, head_dim)."""
    MEMORY = "memory"
    """Norms, activations, residuals, casts, rotary, softmax pieces: bound by bytes moved."""
    DEQUANT = "dequant"
    """4-bit weight to a 16-bit scratch weight; ``shape`` is (elements,)."""
    LOSS = "loss"
    """Cross-entropy and logits casts over the vocabulary: bytes moved, ``shape`` is (tokens, vocab)."""
    OPTIMIZER = "optimizer"
    """Parameter updates, gradient clipping and zeroing; bytes moved."""
    COMMUNICATION = "communication"
    """Collectives between GPUs; ``bytes`` is the payload per GPU, ``name`` the collective."""


VALUE_READ = "_local_scalar_dense"
"""Operator by which torch reads a value to the host: it waits for all work issued before it."""
SYNCHRONISATION = f"aten.{VALUE_READ}"
"""Name of the operations at which the host waits for the device, traced or written on the tape."""
CONTEXT = "cp."
"""What the names of context parallelism's collectives begin with (`context_parallel`)."""
NATIVE = "native"
FLASH = "flash"
HOPPER = "hopper"
EFFICIENT = "efficient"
MASKED = "masked"
CHOSEN = "chosen"
"""Layouts of attention by kernels that use the card's newest instructions (cuDNN's), by FlashAttention-2's, by
FlashAttention-3's, which are written for Hopper, and by PyTorch's memory-efficient ones, which ``sdpa`` runs for heads
that flash kernels do not take, and over all pairs under a mask. What it chooses under a mask where that may be another
kernel is a record's curve (`sdpa.with_others`)."""


class Phase(StrEnum):
    """When in the step an operation runs."""

    __hash__ = str.__hash__
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


CHUNKED = "chunked"
"""Layout of flash-linear-attention's kernels, which move bytes at a rate of their own."""
SOFTMAX = "softmax"
STRIDED = "strided"
"""Layouts of what only moves bytes, but not straight through memory: softmaxes of rows, forward and backward; and rows
joined or cut, and heads moved to another dimension."""
UPCAST = "upcast"
"""Layout of casts from 16 bits to 32, for which PyTorch has a kernel of its own (`upcasts`)."""
STRAIGHT = "straight"
"""Layout of arithmetic on logits beside their cross-entropy, whose curve has softmaxes in it: as all memory."""
GROUPED = "grouped"
"""Layouts of products of experts by PyTorch's grouped kernel end with it."""


def grouped_layout(layout: str) -> str:
    """The layout of a product by the grouped kernel: ``nt-grouped``."""
    return f"{layout}-{GROUPED}"


def plain_layout(layout: str) -> str:
    """How a product's operands lie, whatever kernel runs it: ``nt`` of ``nt-grouped``."""
    return layout.partition("-")[0]


def expert_shape(m: int, n: int, k: int, experts: int, *, inner: bool) -> tuple[int, int, int, int]:
    """The shape of each expert's product and their number, where so many experts share rows evenly; one without rows
    has no product. `inner`: rows are the inner dimension k, as of a weight's gradient, instead of m."""
    shared = max(min(experts, k if inner else m), 1)
    rows = max(round((k if inner else m) / shared), 1)
    return (m, n, rows, shared) if inner else (rows, n, k, shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kind of kernel work, executed `count` times in an optimizer step on one GPU."""

    name: str
    """What it is: ``q_proj``, ``rmsnorm``, or the traced operator, ``aten.mul``."""
    kind: Kind
    phase: Phase
    dtype: str = "bf16"
    """Compute dtype of the arithmetic (GEMM, attention) or of the widest tensor moved."""
    flops: float = 0.0
    """Floating-point operations of one execution, as kernels execute them (causal flash halves)."""
    bytes: float = 0.0
    """Bytes read plus bytes written by one execution."""
    launches: float = 1.0
    """Device kernels that the host issues for one execution."""
    shape: tuple[int, ...] = ()
    layout: str = ""
    """Of a product ``nt`` forward, ``nn`` input gradient, ``tn`` weight gradient, by the kernel for experts
    ``nt-grouped`` and so on; of attention `NATIVE`, `FLASH`,
    `HOPPER`, `EFFICIENT`, or nothing: what ``sdpa`` runs; of what only moves bytes `CHUNKED`, `SOFTMAX`, `STRIDED`,
    `UPCAST`, `STRAIGHT` or nothing."""
    count: float = 1.0
    """Executions per optimizer step on one GPU."""
    group: int = 0
    """Collectives: GPUs that take part."""
    group_per_node: float = 0
    """Collectives: how many of them are on one machine."""
    senders: int = 0
    """Collectives between machines: GPUs of one machine that share its network for it; 0: all."""
    blocking: bool = False
    """Collectives: whether the GPU waits for it at once; else it runs beside other work."""
    once: bool = False
    """Collectives: whether it comes in the last micro-batch only."""
    layer: int | None = None
    """Traced streams: layer index (0-based), None outside layers."""

    @property
    def total_flops(self) -> float:
        """FLOPs of all executions."""
        return self.flops * self.count

    @property
    def total_bytes(self) -> float:
        """Bytes of all executions."""
        return self.bytes * self.count

    @property
    def total_launches(self) -> float:
        """Launches of all executions."""
        return self.launches * self.count
