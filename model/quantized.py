"""Bases of few bits beside bitsandbytes' 4: GPTQ's packed integers, by their checkpoint layout.

A GPTQ weight of k inputs and n outputs is four buffers (AutoGPTQ and GPTQModel ``qlinear_tritonv2``): ``qweight``
int32 (k x bits / 32, n), ``qzeros`` int32 (k / 128, n x bits / 32), ``scales`` fp16 (k / 128, n) and ``g_idx``
int32 (k). Two kernels train:

* triton v2 (``triton_utils/dequant.py``) writes the whole weight in fp16, (k, n), multiplies, and does both again in
  the backward; it keeps the buffers as saved tensors, so a checkpoint's recomputation waits for every map;
* PyTorch's operators (``qlinear_cuda_old.py`` from 128 tokens on, which transformers loads with exllama off) unpack by
  shift, cast, mask, difference and product, one kernel each, and autograd keeps the fp16 weight for the backward.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model.architecture import Linear
from tunecast.model.operation import Kind
from tunecast.model.run import Run
from tunecast.model.tape import Grads, Tape, Tensor, allocated_bytes


def weight_bits(run: Run) -> int:
    """Bits of a weight: 4 of ``gptq-4bit``."""
    return int((run.base_quantization or "").split("-")[1].removesuffix("bit"))


def gptq_buffers(linear: Linear, run: Run) -> dict[str, int]:
    """Bytes of each buffer of one weight."""
    k, n, bits = linear.in_features, linear.out_features, weight_bits(run)
    groups = -(-k // run.gptq_group_size) if run.gptq_group_size > 0 else 1
    return {
        "qweight": k * n * bits // 8,
        "qzeros": groups * n * bits // 8,
        "scales": 2 * groups * n,
        "g_idx": 4 * k,
    }


def gptq_bytes(linear: Linear, run: Run) -> int:
    """Memory of one weight's buffers, each rounded up by the allocator."""
    return sum(allocated_bytes(size) for size in gptq_buffers(linear, run).values())


def gptq_packed_bytes(linear: Linear, run: Run) -> int:
    """The part that FSDP shards: integers seen as fp16 parameters (fms-acceleration ``PATCH_FOR_FSDP_TRITON_V2``)."""
    sizes = gptq_buffers(linear, run)
    return sum(allocated_bytes(sizes[name]) for name in ("qweight", "qzeros"))


def dequantized(tape: Tape, linear: Linear, run: Run) -> Tensor:
    """The weight in fp16, (k, n)."""
    part, tape.part = tape.part, "scratch"
    weight = unpacked(tape, linear, run) if run.gptq_kernel == "torch" else written_at_once(tape, linear, run)
    tape.part = part
    return weight


def written_at_once(tape: Tape, linear: Linear, run: Run) -> Tensor:
    """All four buffers read, the weight written, in one kernel."""
    elements = linear.weight_params
    weight = tape.empty(elements, "fp16")
    moved = sum(gptq_buffers(linear, run).values()) + weight.bytes
    tape.kernel("dequantize", Kind.DEQUANT, (), (weight,), shape=(elements,), n_bytes=moved, dtype="fp16")
    return weight


def unpacked(tape: Tape, linear: Linear, run: Run) -> Tensor:
    """Shifted to int32, cast to int8 (int16 of 8 bits), masked in place, zeros taken off, scaled: five kernels.

    Left out: the same steps over the zeros, one of 128 as large.
    """
    elements, narrow = linear.weight_params, "int8" if weight_bits(run) == 4 else "int16"
    shifted = tape.empty(elements, "int32")
    packed = gptq_buffers(linear, run)["qweight"]
    tape.kernel("dequantize.shift", Kind.MEMORY, (), (shifted,), n_bytes=packed + shifted.bytes)
    cast = ops.elementwise(tape, "dequantize.cast", (shifted,), elements, narrow)
    tape.kernel("dequantize.mask", Kind.MEMORY, (cast,), (cast,))
    centred = ops.elementwise(tape, "dequantize.zeros", (cast,), elements, narrow)
    return ops.elementwise(tape, "dequantize.scale", (centred,), elements, "fp16")


def matmul_gptq(tape: Tape, linear: Linear, x: Tensor, run: Run, bias: Tensor | None) -> Tensor:
    """Product with a frozen GPTQ weight, dequantized in every pass, or by PyTorch's operators not in the backward.

    Stored (k, n), so that the forward reads it as nn and the backward as nt.
    """
    name, k, n, m = linear.name, linear.in_features, linear.out_features, x.elements // linear.in_features
    weight = dequantized(tape, linear, run)
    kept = (weight,) if run.gptq_kernel == "torch" else ()
    out = ops.gemm(tape, name, (x, weight), (m, n, k), "nn")
    if tape.would_grad(x):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        again = kept[0] if kept else dequantized(tape, linear, run)
        return (ops.gradient_gemm(tape, name, grad, again, (m, k, n), "nt"),)

    made = tape.record(out, (x,), backward, saves=kept)
    return made if bias is None else ops.add(tape, made, Tensor(out.elements, bias.dtype, None), name=f"{name}.bias")


def is_gptq(run: Run) -> bool:
    """Whether the base is stored by GPTQ."""
    return (run.base_quantization or "").startswith("gptq")
