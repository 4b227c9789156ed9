"""What training files of other tools cannot say, each refused by name with what to type instead."""

from __future__ import annotations

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.configs.write_rows import FLAT_FIELDS
from tunecast.model.litgpt import STACK
from tunecast.model.resolve_experts import on_parameters
from tunecast.model.run import Run
from tunecast.model.stacks import FLASH_2

EIGHT_BITS = "bnb-8bit"
TRL_PRESETS = {"ddp": "multi_gpu", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "fsdp": "fsdp2"}
"""accelerate's files that ship with TRL, by the shardings that all three writers have fields for."""


def offloads_alone(run: Run) -> bool:
    """Whether DeepSpeed runs on one GPU, for what it keeps in host memory."""
    return run.num_gpus == 1 and run.offload != "none"


def a_file(kind: str) -> str:
    """A training file of this kind, as a sentence begins with it."""
    return f"A{'n' if kind.startswith('a') else ''} {kind} file"


def refuse_unwritten_degrees(kind: str, run: Run) -> None:
    """axolotl alone has a field of its own for sequences that GPUs split, under FlashAttention 2
    (``check_context_parallel_size`` of its schema)."""
    degrees = {name: getattr(run, name) for name in ("tp", "pp", "cp") if getattr(run, name) > 1}
    by_axolotl = list(degrees) == ["cp"] and run.cp_kind == "ring"
    if not degrees or (by_axolotl and kind == "axolotl" and run.attn_implementation == FLASH_2):
        return
    plan, instead = (" ".join(f"--{n} {words.format(d)}" for n, d in degrees.items()) for words in ("{}", "1"))
    if by_axolotl:
        instead = f"--attn-implementation {FLASH_2} and write axolotl=FILE, or {instead}"
    raise NotSupportedError(f"{a_file(kind)} of a plan with {plan} is not built yet; add {instead}.")


def refuse_unwritten(kind: str, run: Run, *, packed: bool) -> None:
    """Raise NotSupportedError for what files of this kind cannot say, with what to type instead."""
    if run.stack == STACK:
        raise NotSupportedError(f"{a_file(kind)} of a run by LitGPT's code is another run; leave --stack {STACK} out.")
    refuse_unwritten_degrees(kind, run)
    if run.cp > 1 and packed and run.per_device_train_batch_size > 1:
        raise NotSupportedError(
            f"axolotl splits packed rows (--cp {run.cp}) one at a time alone; add --per-device-train-batch-size 1."
        )
    if offloads_alone(run) and kind != "trl":
        raise NotSupportedError(
            f"{a_file(kind)} of a plan with --offload {run.offload} on one GPU is not built yet; write trl=FILE, or "
            "type --offload none."
        )
    if run.sharding not in ("none", *TRL_PRESETS):
        raise NotSupportedError(
            f"{a_file(kind)} of a plan with --sharding {run.sharding} is not built yet; use --sharding fsdp, ddp, "
            "zero1, zero2 or zero3."
        )
    if run.sharding == "fsdp" and kind == "llama-factory":
        raise NotSupportedError(
            "A llama-factory file alone loads the whole model on every GPU before FSDP shares it (llamafactory-cli "
            "tells transformers too late); type --sharding zero3, or write axolotl=FILE."
        )
    if run.samples_unevenness is not None and kind not in FLAT_FIELDS:
        raise NotSupportedError(
            f"{a_file(kind)} cannot lay samples end to end without packing them, as this plan does; add --packing, or "
            f"write another: {', '.join(FLAT_FIELDS)}."
        )
    if run.base_quantization not in (None, "bnb-4bit", EIGHT_BITS):
        raise NotSupportedError(
            f"A training file of a plan with --quant-method {run.base_quantization} is not built yet; use bnb-4bit or "
            f"{EIGHT_BITS}."
        )
    if run.quantize_moe_experts and kind != "axolotl":
        raise NotSupportedError(
            f"{a_file(kind)} cannot ask for stacked experts in 4 bits, as this plan has them; write axolotl=FILE."
        )
    stacked = on_parameters(run.lora_target_modules)
    if kind == "llama-factory" and stacked:
        raise NotSupportedError(
            f"A llama-factory file cannot ask for adapters on stacked experts ({', '.join(stacked)}), which its PEFT "
            "(0.18) has not; name attention alone, for example --lora-target-modules q_proj,k_proj,v_proj,o_proj."
        )
