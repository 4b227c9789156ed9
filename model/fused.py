"""Norms, rotary embedding, gated activation and cross-entropy as one Triton kernel each.

What is read, written, kept and overwritten follows the kernels' code: Unsloth ``kernels/rms_layernorm.py``,
``rope_embedding.py``, ``cross_entropy_loss.py`` (which fms-acceleration copies) and Liger ``ops/rms_norm.py``,
``rope.py``, ``swiglu.py``. They differ in launches by at most one, which is not told apart.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.context import Step
from tunecast.model.operation import Kind
from tunecast.model.tape import Grads, Tape, Tensor

LINEAR_KERNELS = FLA, CONVOLUTION = ("fla", "causal-conv1d")
"""Of linear attention, by packages that transformers takes where they are installed."""
PIP_NAMES = {FLA: "flash-linear-attention", CONVOLUTION: "causal-conv1d"}
"""By kernels, what pip installs them by."""
FUSED_KERNELS = ("rms_norm", "rope", "swiglu", "cross_entropy", "lora", "attention", *LINEAR_KERNELS)
"""What can be fused: norms, rotary embedding, gated activation, loss over full logits, low-rank adapters;
``attention``: cuDNN's kernels (Transformer Engine) instead of FlashAttention-2's, at the same memory; of linear
attention the gated delta rule of flash-linear-attention and the convolution of causal-conv1d, which transformers takes
where they are installed."""
VOCABULARY_BLOCK = 65536
"""Columns one program of the loss kernel takes; a larger vocabulary is put together by three small kernels more."""
GRADIENT_ROWS = 108
"""Rows of partial sums for a trained norm weight: one per multiprocessor (of an A100)."""


def overwritten(tensor: Tensor) -> Tensor:
    """What a kernel that works in place hands on: a view of the memory it was given."""
    return Tensor(tensor.elements, tensor.dtype, tensor.storage, is_view=True)


def rms_norm(step: Step, name: str, x: Tensor, width: int) -> Tensor:
    """One kernel each way. Keeps x and one fp32 number per row; the gradient is computed in its own memory.

    Bytes: x read and the result written; backward gradient and x read, gradient written.
    """
    tape, rows, weight = step.tape, x.elements // width, step.weight(name, width)
    out, roots = tape.empty(x.elements, x.dtype), tape.empty(rows, "fp32")
    tape.kernel("rmsnorm", Kind.MEMORY, (x, weight), (out, roots))
    if tape.would_grad(x, weight):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        tape.kernel("rmsnorm", Kind.MEMORY, (grad, x, weight, roots), (grad,))
        to_weight = None
        if weight.needs_grad:
            partial = ops.elementwise(tape, "rmsnorm", (), GRADIENT_ROWS * width, "fp32")
            summed = ops.elementwise(tape, "rmsnorm", (partial,), width, "fp32")
            to_weight = ops.cast_gradient(tape, summed, weight.dtype, "rmsnorm")
        return overwritten(grad), to_weight

    return tape.record(out, (x, weight), backward, saves=(x, roots))


def rotary(step: Step, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """One kernel each way, in place: no memory of its own, half of cos and sin read, no copy into another layout."""
    tape, (cos, sin) = step.tape, waves

    def kernel(given: Tensor) -> None:
        moved = 2 * given.bytes + (cos.bytes + sin.bytes) / 2
        tape.kernel("rotary", Kind.MEMORY, (given, cos, sin), (given,), n_bytes=moved)

    def backward(grad: Tensor) -> Grads:
        kernel(grad)
        return (overwritten(grad),)

    kernel(x)
    return tape.record(overwritten(x), (x,), backward, saves=(cos, sin))


def flash_rotary(tape: Tape, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """One kernel each way, into memory of its own, by half of each table; only the tables are kept.

    Source: flash-attn ``layers/rotary.py`` (``ApplyRotaryEmb``, not in place) and ``ops/triton/rotary.py``, which came
    with 2.1.2 in September 2023; the package before it needed another one for this.
    """
    halves = tuple(Tensor(wave.elements // 2, wave.dtype, wave.storage) for wave in waves)

    def kernel(given: Tensor) -> Tensor:
        return ops.elementwise(tape, "rotary", (given, *halves), given.elements, given.dtype)

    return tape.record(kernel(x), (x,), lambda grad: (kernel(grad),), saves=waves)


def swiglu(tape: Tape, gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``: one kernel each way. Keeps both inputs, which their gradients overwrite."""
    out = ops.elementwise(tape, "swiglu", (gate, up), gate.elements, gate.dtype)
    if tape.would_grad(gate, up):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        tape.kernel("swiglu", Kind.MEMORY, (grad, gate, up), (gate, up))
        return overwritten(gate), overwritten(up)

    return tape.record(out, (gate, up), backward, saves=(gate, up))


def swiglu_of_both(tape: Tape, both: Tensor) -> Tensor:
    """``swiglu`` of the halves of one map's output, one kernel each way (Megatron-Core ``bias_swiglu_impl``)."""
    out = ops.elementwise(tape, "swiglu", (both,), both.elements // 2, both.dtype)
    if tape.would_grad(both):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        tape.kernel("swiglu", Kind.MEMORY, (grad, both), (both,))
        return (overwritten(both),)

    return tape.record(out, (both,), backward, saves=(both,))


def cross_entropy(tape: Tape, logits: Tensor, target: Tensor, shape: tuple[int, int]) -> Tensor:
    """Mean loss from logits of any dtype: read once forward; backward read and overwritten by their gradient."""
    rows, vocab = shape
    losses, summed = tape.empty(rows, "fp32"), tape.empty(rows, "fp32")
    tape.kernel("cross_entropy", Kind.LOSS, (logits, target), (losses, summed), shape=shape)
    if vocab > VOCABULARY_BLOCK:
        parts = tape.empty(rows * -(-vocab // VOCABULARY_BLOCK), "fp32")
        tape.kernel("cross_entropy.join", Kind.MEMORY, (parts, losses), (summed, losses), launches=3)
    if tape.would_grad(logits):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        moved = 2 * logits.bytes + summed.bytes + target.bytes + 4
        tape.kernel("cross_entropy", Kind.LOSS, (logits, grad, summed, target), (logits,), shape=shape, n_bytes=moved)
        return (overwritten(logits),)

    by_row = tape.record(losses, (logits,), backward, saves=(logits, summed, target))
    return mean_loss(tape, by_row, target)


def mean_loss(tape: Tape, by_row: Tensor, target: Tensor) -> Tensor:
    """Sum over rows divided by the number of labels: four small kernels, one backward (a sum's is a view)."""
    valid = ops.elementwise(tape, "loss.valid", (target,), target.elements, "bool")
    count = ops.elementwise(tape, "loss.count", (valid,), 1, "int64")
    total = ops.elementwise(tape, "loss.sum", (by_row,), 1, "fp32")
    loss = ops.elementwise(tape, "loss.mean", (total, count), 1, "fp32")

    def backward(grad: Tensor) -> Grads:
        scaled = ops.elementwise(tape, "loss.mean", (grad, count), 1, "fp32")
        return (Tensor(by_row.elements, "fp32", scaled.storage, is_view=True),)

    return tape.record(loss, (by_row,), backward)
