"""How the base is quantized and which kernels are fused: which choices exist and which exclude each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.fp8 import FP8_KINDS
from tunecast.model.joined import STACKS
from tunecast.model.litgpt import is_litgpt
from tunecast.model.loss_chunks import TORCHTUNE
from tunecast.model.optimizer_torchao import TORCHAO
from tunecast.model.resolve_bf16 import CARD
from tunecast.model.resolve_fused import take_fused
from tunecast.model.resolve_parallel import FSDP, Fields
from tunecast.model.resolve_shared_dtypes import note_narrow, raises_adapters, raises_trained
from tunecast.model.run import Run
from tunecast.model.stacks import (
    DTYPE_ALIASES,
    DTYPES,
    HF_CODES,
    HF_CODES_SAID,
    QUANT_TYPES,
    built_choice,
    one_of,
)
from tunecast.model.step_count import TRAINERS
from tunecast.model.units import DTYPE_BYTES, GIB, SIXTEEN_BITS

GPTQ_KERNELS = ("triton", "torch")
GPTQ_DTYPES = {"dtype": "fp16", "precision": "fp16-autocast"}
"""The only arithmetic of the kernels that train a GPTQ base (triton v2 writes weights in fp16)."""


FOUR_BIT_OPTIONS: dict[str, Any] = {
    "bnb_4bit_quant_type": None,
    "double_quant": False,
    "bnb_4bit_compute_dtype": None,
    "quantize_moe_experts": False,
}
"""Options of bitsandbytes' 4 bits, and what another storage has in their place."""


def take_quantization(fields: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Storage of the base in 4 or 8 bits: only with qlora. Returns the defaults that this storage leaves."""
    if fields.values["method"] != "qlora":
        refuse_quantization(fields)
        for name, value in {**FOUR_BIT_OPTIONS, "upcast_non_quantized": False, "quant_method": None}.items():
            fields.put(name, value, "stack-default")
        return dict(defaults)
    said = "file" if fields.origins["method"] == "file" else "stack-default"
    method = fields.take("quant_method", defaults.get("quant_method", "bnb-4bit"), said)
    built_choice("quantization", "quant-method", str(method))
    if method == "bnb-4bit":
        kind = fields.take("bnb_4bit_quant_type", defaults["bnb_4bit_quant_type"], "stack-default")
        one_of("bnb-4bit-quant-type", kind, QUANT_TYPES)
        fields.values["double_quant"] = bool(fields.take("double_quant", defaults["double_quant"], "stack-default"))
        compute = fields.take("bnb_4bit_compute_dtype", None, "stack-default")
        fields.values["bnb_4bit_compute_dtype"] = _dtype_word("bnb-4bit-compute-dtype", compute)
        quantized = fields.take("quantize_moe_experts", False, "stack-default")
        fields.values["quantize_moe_experts"] = bool(quantized)
    else:
        refuse_four_bit_options(fields, method)
    take_gptq(fields, method)
    upcast = fields.take("upcast_non_quantized", defaults["upcast_non_quantized"], "stack-default")
    fields.values["upcast_non_quantized"] = bool(upcast)
    if upcast and method.startswith("gptq"):
        raise InputError(
            "--upcast-non-quantized was asked for, but PEFT's preparation leaves a GPTQ model as it is; leave it out."
        )
    return {**defaults, **GPTQ_DTYPES} if method.startswith("gptq") else dict(defaults)


def _dtype_word(option: str, word: Any) -> str | None:
    """A dtype in our words, or None for nothing."""
    return None if word in (None, "none") else one_of(option, DTYPE_ALIASES.get(word, word), DTYPES)


def without_autocast(fields: Fields) -> None:
    """Weights decide the arithmetic: of dtype and precision the one that was not given follows the other."""
    given = [name for name in ("dtype", "precision") if name in fields.given]
    if len(given) == 1:
        other = "dtype" if given[0] == "precision" else "precision"
        fields.put(other, fields.values[given[0]], fields.origins[given[0]])
    if given == ["dtype"] and fields.values["dtype"] == "fp32" and fields.origins["dtype"] == "cli":
        fields.notes.append(
            "Arithmetic is in fp32 too, as the weights decide it; a Trainer's bf16: true multiplies in 16 bits beside "
            "fp32 weights: --precision bf16-autocast."
        )


def check_pure_precision(values: Mapping[str, Any]) -> None:
    """Refuse arithmetic without autocast in another dtype than that of the weights: no such run exists."""
    dtype, precision = values["dtype"], values["precision"]
    if precision in DTYPES and dtype != precision:
        raise InputError(
            f"--precision {precision} has no autocast, so the weights decide the arithmetic, but --dtype is {dtype}; "
            f"type --precision {dtype}, or --dtype {precision}."
        )


def check_compute_dtype(values: Mapping[str, Any]) -> None:
    """bitsandbytes' compute dtype beside autocast: the same, or the products would be cast once more.

    Embeddings, norms, biases and head in fp32 need 16-bit products to be told from the rest: by autocast, or by it.
    """
    compute, precision = values.get("bnb_4bit_compute_dtype"), values["precision"]
    if compute is not None and precision.endswith("-autocast") and not precision.startswith(compute):
        raise NotSupportedError(
            f"--bnb-4bit-compute-dtype {compute} under --precision {precision} is not built yet; leave it out, or use "
            f"--precision fp32 for a loop without autocast."
        )
    mixed = precision.endswith("-autocast") or (precision == "fp32" and compute in SIXTEEN_BITS)
    if values["upcast_non_quantized"] and not mixed:
        raise InputError(
            f"--upcast-non-quantized mixes fp32 with 16-bit products, but --precision is {precision}; use --precision "
            "bf16-autocast, or --precision fp32 with --bnb-4bit-compute-dtype bf16 for a loop without autocast."
        )


SCALED_BY_TRAINER = tuple(stack for stack in TRAINERS if stack != "unsloth")
"""Stacks whose Trainer scales losses under fp16 autocast by PyTorch's own scaler."""


def check_scaler(run: Run) -> None:
    """Refuse weights trained in fp16 under fp16 autocast, whose gradients PyTorch's scaler will not unscale
    (``torch/amp/grad_scaler.py``, ``_unscale_grads_``: "Attempting to unscale FP16 gradients."); FSDP's own does, and
    DeepSpeed has another."""
    if run.precision != "fp16-autocast" or run.stack not in SCALED_BY_TRAINER or run.sharding not in ("none", "ddp"):
        return
    options = {"--adapter-dtype": run.adapter_dtype} if run.has_adapters else {"--dtype": run.dtype}
    if run.has_adapters and run.modules_to_save:
        options["--modules-to-save-dtype"] = run.saved_dtype
    for option, dtype in options.items():
        if dtype == "fp16":
            raise InputError(
                f"--precision fp16-autocast scales losses, and PyTorch refuses to unscale gradients of weights in fp16 "
                f"({option} fp16); use {option} fp32."
            )


def promotion_notes(values: Mapping[str, Any]) -> list[str]:
    """That PyTorch computes with both kinds of 16 bits in 32."""
    dtype, computed = values["dtype"], values["precision"].removesuffix("-autocast")
    if {dtype, computed} != set(SIXTEEN_BITS):
        return []
    note = (
        f"Weights in {dtype} beside {computed} arithmetic: where both meet PyTorch computes in fp32, which takes more "
        f"memory and time than --dtype {computed}."
    )
    return [note]


def few_bit_notes(values: Mapping[str, Any]) -> list[str]:
    """What is not counted: LLM.int8's outliers (`quantized_bnb8`), and casts of 4-bit weights that were loaded in fp32,
    as TRL does without a ``dtype``: their ``quant_state`` keeps that dtype, which TRL makes their compute dtype.
    """
    if values["quant_method"] == "bnb-8bit":
        note = "LLM.int8 multiplies input columns with outliers (6 and above) again in 16 bits, which is not counted."
        return [note]
    wide = values["dtype"] == "fp32" and not values["upcast_non_quantized"]
    if not (wide and values.get("bnb_4bit_quant_type") and values["precision"].endswith("-autocast")):
        return []
    note = (
        "A 4-bit base loaded in fp32 is restored in fp32 and cast to 16 bits at every product, which is not counted; "
        "with dtype bfloat16 (--dtype bf16) there is no such copy."
    )
    return [note]


def wide_base_notes(architecture: Architecture, values: Mapping[str, Any]) -> list[str]:
    """That a frozen base lies in fp32 although products are 16 bits wide, and what it costs."""
    frozen = values["method"] != "full" and values["quant_method"] is None and not values["bnb_4bit_quant_type"]
    if not (frozen and values["dtype"] == "fp32" and values["precision"].endswith("-autocast")):
        return []
    narrow = values["precision"].removesuffix("-autocast")
    spent_bytes = architecture.total_params * (DTYPE_BYTES["fp32"] - DTYPE_BYTES[narrow])
    note = (
        f"The frozen base is in fp32, which takes {spent_bytes / GIB:.1f} GiB more than {narrow} and is cast to it at "
        f"every product: --dtype {narrow} (torch_dtype where the model is loaded) is as good for adapters."
    )
    return [note]


RAISED = (
    "Under FSDP accelerate raises trained parameters to fp32 before it shards them: 4 bytes per weight of a shard, "
    "gathered and multiplied in 16 bits."
)
"""What is told where that is so; the command line may make it untrue."""


def take_master(fields: Fields, defaults: Mapping[str, Any]) -> None:
    """fp32 shards of a model that computes in 16 bits: only where FSDP trains it whole."""
    values = fields.values
    take_reduction(fields, defaults)
    take_fp8_weights(fields)
    own = None if values["dtype"] == "fp32" else defaults.get("master_dtype")
    given = fields.take("master_dtype", own or _shards_of_stack(fields), "stack-default")
    fields.values["master_dtype"] = None if given in (None, "none") else one_of("master-dtype", given, ("fp32",))
    if fields.values["master_dtype"] is None:
        return
    raised = raises_adapters(fields)
    if not raised and (values["method"] != "full" or values["num_gpus"] == 1 or values["sharding"] not in FSDP):
        raise InputError(
            f"--master-dtype fp32 says what FSDP keeps of a model trained whole, but --method is {values['method']} "
            f"and --sharding {values['sharding']}; leave it out."
        )
    if values["dtype"] == "fp32":
        raise InputError("--master-dtype fp32 adds nothing to --dtype fp32; leave it out.")


def _shards_of_stack(fields: Fields) -> str | None:
    """fp32 where accelerate raises what trains (`raises_trained`): adapters, or a whole model, which is gathered in 16
    bits whatever it was loaded in; a typed fp32 stands."""
    values = fields.values
    if raises_adapters(fields):
        fields.notes.append(RAISED)
        return "fp32"
    stands = "dtype" in fields.given and values["dtype"] == "fp32"
    note_narrow(fields)
    if "master_dtype" in fields.given or values["method"] != "full" or not raises_trained(values) or stands:
        return None
    if values["dtype"] == "fp32":
        fields.put("dtype", values["precision"].removesuffix("-autocast"), "stack-default")
    fields.notes.append(RAISED)
    return "fp32"


def take_reduction(fields: Fields, defaults: Mapping[str, Any]) -> None:
    """fp32 sums of 16-bit gradients: FSDP's policy of mixed precision, Megatron's buffer."""
    sums = fields.values["sharding"] in FSDP or fields.values["stack"] in STACKS
    sums_wide = sums and fields.values["dtype"] == "bf16"  # Megatron-LM's --fp16 adds in fp16
    given = fields.take("reduce_dtype", defaults.get("reduce_dtype") if sums_wide else None, "stack-default")
    fields.values["reduce_dtype"] = None if given in (None, "none") else one_of("reduce-dtype", given, ("fp32",))
    sharding = fields.values["sharding"]
    if fields.values["reduce_dtype"] is not None and not sums:
        raise InputError(
            f"--reduce-dtype fp32 says how FSDP or Megatron reduces gradients, but --sharding is {sharding}; leave it "
            "out."
        )


def take_fp8(fields: Fields) -> None:
    """8-bit products: of 16-bit weights, not of quantized ones."""
    given = fields.take("fp8", None, "stack-default")
    fields.values["fp8"] = None if given in (None, "none") else one_of("fp8", given, FP8_KINDS)
    if fields.values["fp8"] is None:
        return
    if fields.values["method"] == "qlora":
        raise InputError("--fp8 multiplies 16-bit weights, but --method qlora has quantized ones; leave --fp8 out.")
    if fields.origins["precision"] == CARD:
        raise NotSupportedError(
            f"--fp8 {fields.values['fp8']} needs bf16 around products of 8-bit floats, and this device has neither; "
            "choose a Hopper, Ada or Blackwell card, or leave --fp8 out."
        )
    if fields.values["dtype"] != "bf16" or not fields.values["precision"].startswith("bf16"):
        raise InputError(
            f"--fp8 needs bf16 around its products, but --dtype is {fields.values['dtype']} and --precision "
            f"{fields.values['precision']}; use --dtype bf16 --precision bf16-autocast."
        )


def take_fp8_weights(fields: Fields) -> None:
    """Weights stored in 8 bits, refused where nobody stores them so."""
    values = fields.values
    values["fp8_weights"] = bool(fields.take("fp8_weights", False, "stack-default"))
    if not values["fp8_weights"]:
        return
    if values["fp8"] is None:
        raise InputError("--fp8-weights stores what is multiplied in 8 bits; add --fp8 megatron (or te).")
    if values["fp8"] in ("torchao", "megatron-mxfp8"):
        raise NotSupportedError(
            f"--fp8-weights with --fp8 {values['fp8']} is not built; use --fp8 te, megatron or megatron-current."
        )
    if values["sharding"] not in ("none", "ddp", "zero1"):
        raise NotSupportedError(
            f"--fp8-weights with --sharding {values['sharding']} is not built; use none, ddp or zero1 (Megatron's "
            "distributed optimizer)."
        )
    if values["method"] == "full" and (values["sharding"] != "zero1" or values["fp8"] == "te"):
        raise InputError(
            "--fp8-weights of --method full needs the fp32 copies of Megatron's distributed optimizer; use --fp8 "
            "megatron --sharding zero1."
        )


def take_in_backward(fields: Fields) -> None:
    """Updates as gradients come: of one GPU and one micro-batch, by an optimizer that takes tensors one by one."""
    values = fields.values
    values["optimizer_in_backward"] = bool(fields.take("optimizer_in_backward", False, "stack-default"))
    if not values["optimizer_in_backward"]:
        return
    if values["gradient_accumulation_steps"] > 1:
        raise InputError(
            f"--optimizer-in-backward was asked for, but --gradient-accumulation-steps "
            f"{values['gradient_accumulation_steps']} needs the gradients kept; leave one of the two out."
        )
    if values["num_gpus"] > 1 or values["optim"] in ("adafactor", *TORCHAO):
        raise NotSupportedError(
            f"--optimizer-in-backward with --num-gpus {values['num_gpus']} and --optim {values['optim']} is not built "
            "yet; use one GPU and AdamW, SGD or bitsandbytes' 8-bit optimizers."
        )


HOST_UPDATED = ("adamw_torch", "adamw_torch_fused")
"""Optimizers whose update of states in host memory is counted."""


def take_gptq(fields: Fields, method: str) -> None:
    """Kernel and group size of a GPTQ base; nothing of another."""
    plain = Run(method="qlora")
    for name in ("gptq_kernel", "gptq_group_size"):
        if name in fields.given and not method.startswith("gptq"):
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} belongs to a GPTQ base, but --quant-method is {method}; leave it out.")
        fields.take(name, getattr(plain, name), "stack-default")
    one_of("gptq-kernel", fields.values["gptq_kernel"], GPTQ_KERNELS)
    size = fields.values["gptq_group_size"]
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise InputError(f"--gptq-group-size is {size!r}, but it must be a whole number of weights, or -1 for all.")


def check_gptq_dtypes(values: Mapping[str, Any]) -> None:
    """A GPTQ base multiplies in fp16."""
    if (values["quant_method"] or "").startswith("gptq") and not values["precision"].startswith("fp16"):
        raise InputError(
            f"The kernels that train a GPTQ base multiply in fp16, but --precision is {values['precision']}; "
            "use --precision fp16-autocast."
        )


def refuse_quantization(fields: Fields) -> None:
    """A base in few bits is frozen: without adapters nothing would train."""
    given, method = fields.given, fields.values["method"]
    if any(given.get(name) for name in (*FOUR_BIT_OPTIONS, "quant_method")):
        raise InputError(f"A quantized base is that of --method qlora, but --method is {method}; use --method qlora.")
    if given.get("upcast_non_quantized"):
        raise InputError(
            f"--upcast-non-quantized prepares a 4-bit base, but --method is {method}; "
            "use --method qlora, or --dtype fp32 for weights in fp32."
        )


def refuse_four_bit_options(fields: Fields, method: str) -> None:
    """Options of bitsandbytes' 4 bits say nothing about another storage."""
    for name, empty in FOUR_BIT_OPTIONS.items():
        if fields.given.get(name):
            flag = name.replace("_", "-")
            raise InputError(
                f"--{flag} belongs to --quant-method bnb-4bit, but --quant-method is {method}; leave one of them out."
            )
        fields.put(name, empty, "stack-default")


def take_kernels(fields: Fields, architecture: Architecture, defaults: Mapping[str, Any]) -> None:
    """Fused kernels, and the age of the code."""
    code = fields.take("hf_code", defaults.get("hf_code", "5"), "stack-default")
    if code not in HF_CODES:
        raise InputError(f"--hf-code is {code!r}, but it names an age of transformers; type {HF_CODES_SAID}.")
    take_fp8(fields)
    take_in_backward(fields)
    for name, ordinary in (("torch_compile", False), ("compile_loss", not is_litgpt(architecture))):
        fields.values[name] = bool(fields.take(name, defaults.get(name, ordinary), "stack-default"))
    recomputes = fields.values["gradient_checkpointing"] and "reentrant" not in fields.given
    if recomputes and fields.values["torch_compile"] and fields.values["stack"] == TORCHTUNE:
        fields.put("reentrant", True, "stack-default")  # its checkpoints are around compiled layers: all is made again
    take_fused(fields, architecture, defaults)


def check_host_update(values: Mapping[str, Any]) -> None:
    """Raise NotSupportedError for an optimizer whose update of states in host memory is not known.

    DeepSpeed has its own AdamW there and refuses others (``runtime/engine.py``, ``zero_force_ds_cpu_optimizer``);
    bitsandbytes' kernels run on GPUs.
    """
    if values["offload"] == "none" or values["optim"] in HOST_UPDATED:
        return
    raise NotSupportedError(
        f"--optim {values['optim']} with --offload {values['offload']} is not built: states in host memory are updated "
        f"by AdamW; use --optim {' or '.join(HOST_UPDATED)}."
    )
