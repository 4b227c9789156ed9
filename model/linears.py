"""Linear maps with their adapters, as PEFT's LoRA layers run them.

Source: peft ``tuners/lora/layer.py`` and ``bnb.py``.
"""

from __future__ import annotations

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model import fp8
from tunecast.model import primitives as ops
from tunecast.model import primitives_heavy as heavy
from tunecast.model.architecture import Linear
from tunecast.model.context import Step
from tunecast.model.dora import adapted_result
from tunecast.model.products import operands as operands
from tunecast.model.products import product as product
from tunecast.model.quantized import is_gptq, matmul_gptq
from tunecast.model.quantized_bnb8 import matmul_8bit
from tunecast.model.tape import Tensor


def base_linear(step: Step, where: str, linear: Linear, x: Tensor) -> Tensor:
    """The frozen or trained base map, in few bits when the run says so."""
    bias = step.weight(f"{where}.{linear.name}.bias", linear.out_features) if linear.bias else None
    k, n, run = linear.in_features, linear.out_features, step.run
    if is_gptq(run):
        given = ops.cast(step.tape, x, run.compute_dtype)
        return matmul_gptq(step.tape, linear, given, run, bias)
    if run.base_quantization == "bnb-8bit":
        if step.platform != "cuda":
            raise NotSupportedError(
                "A CPU runs other code for an 8-bit base of bitsandbytes; use --quant-method bnb-4bit."
            )
        return matmul_8bit(step.tape, linear.name, x, k=k, n=n, bias=bias)
    if run.base_quantization == "bnb-4bit":
        given = ops.cast(step.tape, x, run.four_bit_dtype)
        bias = None if bias is None else ops.cast(step.tape, bias, run.four_bit_dtype)
        made = heavy.matmul_4bit(step.tape, linear.name, given, k=k, n=n, nested=run.double_quant, bias=bias)
        return ops.cast(step.tape, made, x.dtype)
    weight = step.weight(f"{where}.{linear.name}", linear.weight_params)
    if run.fp8 is not None:
        given = ops.cast(step.tape, x, step.activation_dtype)
        first = step.tape.micro_batch == 0
        kind, stored = run.fp8, run.fp8_weights
        return fp8.matmul(
            step.tape, linear.name, given, weight, k=k, n=n, kind=kind, first=first, stored=stored, bias=bias
        )
    return product(step, linear.name, x, weight, k=k, n=n, bias=bias)


def by_bitsandbytes(step: Step) -> bool:
    """Whether PEFT's layer is the one for bitsandbytes' bases."""
    return step.run.base_quantization in ("bnb-4bit", "bnb-8bit")


def unconverted(step: Step) -> bool:
    """Whether PEFT leaves dtypes to autocast: its quantized layers do while ``torch.is_autocast_enabled()`` (CUDA's).

    That for GPTQ did so before PEFT 0.15 only.
    """
    if not (step.run.autocast and step.platform == "cuda"):
        return False
    return by_bitsandbytes(step) or (is_gptq(step.run) and step.run.shifts_logits)


def adapter_input(step: Step, x: Tensor) -> Tensor:
    """The adapter's input: PEFT casts it to the adapter's dtype, unless it leaves dtypes to autocast."""
    if unconverted(step):
        return x
    return ops.cast(step.tape, x, step.run.adapter_dtype, name="adapter_input_cast")


def linear_map(step: Step, where: str, linear: Linear, x: Tensor) -> Tensor:
    """One linear map of a layer, with its adapter if it has one: base + scaling * B(A(x))."""
    result = base_linear(step, where, linear, x)
    if linear.name not in step.run.lora_target_modules:
        return result
    tape, rank = step.tape, step.run.lora_r
    dtype = result.dtype
    if step.run.base_quantization == "bnb-4bit":
        result = ops.copy(tape, result, name="adapter_clone", layout="")
    entry = adapter_input(step, x)
    if step.run.use_dora:
        total = adapted_result(step, where, linear, entry, result)
        tape.hold(entry)
        return total if unconverted(step) else ops.cast(tape, total, dtype)
    dropped = ops.dropout(tape, entry, step.run.lora_dropout)
    down = step.adapter(f"{where}.{linear.name}.lora_A", rank * linear.in_features)
    up = step.adapter(f"{where}.{linear.name}.lora_B", linear.out_features * rank)
    low = product(step, f"{linear.name}.lora_A", dropped, down, k=linear.in_features, n=rank)
    bias = step.adapter(f"{where}.{linear.name}.lora_B.bias", linear.out_features) if step.run.lora_bias else None
    delta = product(step, f"{linear.name}.lora_B", low, up, k=rank, n=linear.out_features, bias=bias)
    delta = ops.scale(tape, delta, name="adapter_scale")
    if by_bitsandbytes(step) and not unconverted(step):
        delta = ops.cast(tape, delta, dtype)
    total = ops.add(tape, result, delta, name="adapter_add")
    total = ops.cast(tape, total, dtype)
    tape.hold(entry)
    return total
