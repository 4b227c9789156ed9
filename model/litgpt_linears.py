"""Linear maps of LitGPT with their adapters: ``LoRALinear``, and ``LoRAQKVLinear`` over parts of one map.

Source: litgpt ``lora.py`` of 0.5.13 and of 0.4.13; Lightning's ``BitsandbytesPrecision``, which quantizes from fp16, so
that bitsandbytes unpacks a weight to fp16 and converts it; bitsandbytes ``autograd/_functions.py`` of 0.42 and 0.49.
Left out: the copies and workspaces inside cuDNN's convolutions, of the adapter's rank.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model.architecture import Attention, Linear
from tunecast.model.context import Step
from tunecast.model.linears import base_linear, product
from tunecast.model.litgpt import PRESENT, SLICED
from tunecast.model.operation import Kind
from tunecast.model.products import operands
from tunecast.model.tape import Grads, Tape, Tensor

LOADED_DTYPE = "fp16"
"""The dtype that weights have when they are quantized (``_Linear4bit.quantize``), and that they unpack to."""
PRODUCTS_BACK = 2
"""Of a convolution: for its input and for its weight."""


def base_map(step: Step, where: str, linear: Linear, x: Tensor) -> Tensor:
    """The base's map, in 4 bits where the run says so."""
    if step.run.base_quantization != "bnb-4bit":
        return base_linear(step, where, linear, x)
    bias = step.weight(f"{where}.{linear.name}.bias", linear.out_features) if linear.bias else None
    return matmul_4bit(step, linear, x, bias)


def unpacked(tape: Tape, elements: int, dtype: str, *, nested: bool) -> Tensor:
    """A 4-bit weight in fp16, then in the dtype of the product."""
    half, made = heavy.dequantized(tape, elements, LOADED_DTYPE, nested=nested, in_place=True)
    tape.hold(*made)
    part, tape.part = tape.part, "scratch"
    weight = ops.elementwise(tape, "dequantize.cast", (half,), elements, dtype) if dtype != LOADED_DTYPE else half
    tape.part = part
    return weight


def matmul_4bit(step: Step, linear: Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    """Product with a frozen 4-bit weight; bitsandbytes up to 0.42 keeps its input to the end of the backward."""
    tape, k, n, nested = step.tape, linear.in_features, linear.out_features, step.run.double_quant
    m, name = x.elements // k, linear.name
    weight = unpacked(tape, n * k, x.dtype, nested=nested)
    reads = (x, weight) if bias is None else (x, weight, bias)
    out = ops.gemm(tape, name, reads, (m, n, k), "nt")

    def backward(grad: Tensor) -> Grads:
        again = unpacked(tape, n * k, grad.dtype, nested=nested)
        return (ops.gradient_gemm(tape, name, grad, again, (m, k, n), "nn"),)

    made = tape.record(out, (x,), backward)
    if made.node is not None and step.architecture.code not in SLICED:
        tape.keep(x)
        step.outliving.append(x)
    return made


def linear_map(step: Step, where: str, linear: Linear, x: Tensor) -> Tensor:
    """One map with its adapter if it has one: base + dropout(x) A' B' scaling."""
    result = base_map(step, where, linear, x)
    if linear.name not in step.run.lora_target_modules:
        return result
    tape, rank, name = step.tape, step.run.lora_r, linear.name
    dropped = ops.dropout(tape, x, step.run.lora_dropout)
    down = step.adapter(f"{where}.{name}.lora_A", rank * linear.in_features)
    up = step.adapter(f"{where}.{name}.lora_B", linear.out_features * rank)
    low = product(step, f"{name}.lora_A", dropped, down, k=linear.in_features, n=rank)
    delta = product(step, f"{name}.lora_B", low, up, k=rank, n=linear.out_features)
    return ops.add(tape, result, ops.scale(tape, delta, name="adapter_scale"), name="adapter_add")


def qkv_map(step: Step, where: str, block: Attention, x: Tensor) -> Tensor:
    """Queries, keys and values in one map, with one adapter over those of them that have one."""
    tape, run, linear = step.tape, step.run, block.linears[0]
    result = base_map(step, where, linear, x)
    widths = [width for name, width in block.parts if name in run.lora_target_modules]
    if not widths:
        return result
    to_low, to_up = block.adapter_sizes(run.lora_target_modules, run.lora_r)
    dropped = ops.dropout(tape, x, run.lora_dropout)
    down, up = step.adapter(f"{where}.qkv.lora_A", to_low), step.adapter(f"{where}.qkv.lora_B", to_up)
    low = product(step, "qkv.lora_A", dropped, down, k=linear.in_features, n=run.lora_r * len(widths))
    if block.num_heads == block.num_kv_heads:
        delta = convolution(step, low, up, sum(widths))
    else:
        delta = convolutions(step, low, up, widths)
    if len(widths) < len(block.parts):
        delta = padded(step, delta, linear.out_features)
    return ops.add(tape, result, ops.scale(tape, delta, name="adapter_scale"), name="adapter_add")


def convolution(step: Step, low: Tensor, up: Tensor, out_features: int) -> Tensor:
    """``conv1d`` of width one: every part's rank rows times its own factor, all parts in one kernel."""
    tape, rank, tokens = step.tape, step.run.lora_r, step.tokens
    name, shape = "qkv.lora_B", (tokens, out_features, rank)
    low, up = operands(step, low, up)
    if tape.would_grad(low, up):
        tape.mark_saved()
    out = ops.gemm(tape, name, (low, up), shape, "nt")

    def backward(grad: Tensor) -> Grads:
        given = tuple(tape.empty(tensor.elements, tensor.dtype) for tensor in (low, up))
        flops = PRODUCTS_BACK * ops.gemm_flops(*shape)
        tape.kernel(name, Kind.GEMM, (grad, low, up), given, flops=flops, shape=shape, layout="nn", dtype=grad.dtype)
        return given

    return tape.record(out, (low, up), backward, saves=(low, up))


def convolutions(step: Step, low: Tensor, up: Tensor, widths: list[int]) -> Tensor:
    """The same part by part, where they are of unequal width: rows and factors are split, results are joined."""
    tape, count = step.tape, len(widths)
    rows = ops.chunks(tape, low, count, name="qkv.lora_split") if count > 1 else [low]
    factors = split_weight(tape, up, [width * step.run.lora_r for width in widths])
    made = [convolution(step, *pair) for pair in zip(rows, factors, widths, strict=True)]
    return joined_parts(tape, made, step.tokens * sum(widths))


def split_weight(tape: Tape, up: Tensor, sizes: list[int]) -> list[Tensor]:
    """Rows of the second factor for each part; their gradients are joined in one kernel."""
    waiting: list[Tensor] = []

    def backward(grad: Tensor) -> Grads:
        waiting.append(grad)
        if len(waiting) < len(sizes):
            return (None,)
        return (ops.elementwise(tape, "qkv.lora_split", tuple(waiting), up.elements, grad.dtype),)

    return [tape.record(Tensor(size, up.dtype, up.storage, is_view=True), (up,), backward) for size in sizes]


def joined_parts(tape: Tape, made: list[Tensor], elements: int) -> Tensor:
    """``cat``, of one part too: one kernel; backward each part's gradient is a view."""
    out = ops.elementwise(tape, "qkv.lora_join", made, elements, made[0].dtype)

    def backward(grad: Tensor) -> Grads:
        return [Tensor(part.elements, grad.dtype, grad.storage, is_view=True) for part in made]

    return tape.record(out, made, backward)


def padded(step: Step, delta: Tensor, out_features: int) -> Tensor:
    """Updates of the adapted parts put into zeros of the whole width; the gradient is picked out of it."""
    tape, width = step.tape, delta.elements // step.tokens
    out = ops.elementwise(tape, "qkv.lora_zeros", (), step.tokens * out_features, delta.dtype)
    index = Tensor(width, "int64", None)
    if step.architecture.code == PRESENT:
        index = ops.elementwise(tape, "qkv.lora_index", (index,), width, "int64")
    tape.kernel("qkv.lora_pad", Kind.MEMORY, (out, index, delta), (out,))
    if tape.would_grad(delta):
        tape.mark_saved()

    def backward(grad: Tensor) -> Grads:
        return (ops.elementwise(tape, "qkv.lora_pad", (grad, index), delta.elements, grad.dtype),)

    return tape.record(out, (delta,), backward, saves=(index, delta))
