"""Bases of few bits beside bitsandbytes' 4: GPTQ's packed integers, by their checkpoint layout.

A GPTQ weight of k inputs and n outputs is four buffers (AutoGPTQ and GPTQModel ``qlinear_tritonv2``): ``qweight``
int32 (k x bits / 32, n), ``qzeros`` int32 (k / 128, n x bits / 32), ``scales`` fp16 (k / 128, n) and ``g_idx``
int32 (k). The kernel that trains (triton v2, ``triton_utils/dequant.py``) writes the whole weight in fp16, (k, n),
multiplies, and does both again in the backward; it keeps the buffers as saved tensors, so a checkpoint's
recomputation waits for every map.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.architecture import Linear
from tunecast.model.operation import Kind
from tunecast.model.run import Run
from tunecast.model.tape import Grads, Tape, Tensor, allocated_bytes

GROUP_SIZE = 128
"""Weights along the input that share a scale and a zero: of every GPTQ checkpoint in the published runs."""


def weight_bits(method: str) -> int:
    """Bits of a weight: 4 of ``gptq-4bit``."""
    return int(method.split("-")[1].removesuffix("bit"))


def gptq_buffers(k: int, n: int, bits: int) -> dict[str, int]:
    """Bytes of each buffer of one weight."""
    groups = -(-k // GROUP_SIZE)
    return {
        "qweight": k * n * bits // 8,
        "qzeros": groups * n * bits // 8,
        "scales": 2 * groups * n,
        "g_idx": 4 * k,
    }


def gptq_bytes(linear: Linear, bits: int) -> int:
    """Memory of one weight's buffers, each rounded up by the allocator."""
    sizes = gptq_buffers(linear.in_features, linear.out_features, bits)
    return sum(allocated_bytes(size) for size in sizes.values())


def gptq_packed_bytes(linear: Linear, bits: int) -> int:
    """The part that FSDP shards: integers seen as fp16 parameters (fms-acceleration ``PATCH_FOR_FSDP_TRITON_V2``)."""
    sizes = gptq_buffers(linear.in_features, linear.out_features, bits)
    return sum(allocated_bytes(sizes[name]) for name in ("qweight", "qzeros"))


def dequantized(tape: Tape, k: int, n: int, bits: int) -> Tensor:
    """The weight in fp16, (k, n): all four buffers read, the weight written, in one kernel."""
    part, tape.part = tape.part, "scratch"
    weight = tape.empty(k * n, "fp16")
    tape.part = part
    moved = sum(gptq_buffers(k, n, bits).values()) + weight.bytes
    tape.kernel("dequantize", Kind.DEQUANT, (), (weight,), shape=(k * n,), n_bytes=moved, dtype="fp16")
    return weight


def matmul_gptq(tape: Tape, name: str, x: Tensor, *, k: int, n: int, bits: int, bias: Tensor | None = None) -> Tensor:
    """Product with a frozen GPTQ weight, dequantized in the forward, in every recomputation and in the backward.

    Stored (k, n), so that the forward reads it as nn and the backward as nt.
    """
    m = x.elements // k
    out = ops.gemm(tape, name, (x, dequantized(tape, k, n, bits)), (m, n, k), "nn")
    if tape.would_grad(x):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        return (ops.gradient_gemm(tape, name, grad, dequantized(tape, k, n, bits), (m, k, n), "nt"),)

    made = tape.record(out, (x,), backward)
    return made if bias is None else ops.add(tape, made, Tensor(out.elements, bias.dtype, None), name=f"{name}.bias")


def is_gptq(run: Run) -> bool:
    """Whether the base is stored by GPTQ."""
    return (run.base_quantization or "").startswith("gptq")
