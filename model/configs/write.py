"""A run as the training file of another tool: the reverse of the readers, for the fields that decide memory and time.

Rows are packed to exactly `max_length`, or hold one sample each, as the forecast counts them. What a format cannot
say, or its framework does differently, `write_back.differences` finds by reading the file back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tunecast.model.adapter_targets import adaptable_modules, linear_modules
from tunecast.model.architecture import Architecture
from tunecast.model.configs.axolotl import KERNELS
from tunecast.model.configs.trl import LOSSES
from tunecast.model.configs.write_limits import EIGHT_BITS, TRL_PRESETS, offloads_alone, refuse_unwritten
from tunecast.model.configs.write_rows import Mapped, long_cut, rows_alone
from tunecast.model.resolve_experts import renamed_targets
from tunecast.model.run import BUCKET_ELEMENTS, Run
from tunecast.model.sharding import FSDP, shards_of
from tunecast.model.stacks import FLASH_2, FLASH_3
from tunecast.model.target_patterns import SEEING

DATASET = "YOUR-DATASET"
"""Stands where only the user knows."""
OUTPUT = "out"
WORDS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LEARNING_RATE = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}
"""axolotl has no default: PEFT's examples for adapters, TRL's for whole models. It costs nothing."""
FLASH_WORDS = {"sdpa": "sdpa", "eager": "disabled", FLASH_2: "fa2", FLASH_3: "fa3"}
Every = Callable[[Architecture], tuple[str, ...]]


def attention_written(run: Run) -> str:
    """The attention that keeps samples apart as the run has it, where a stack of its own chooses it under sdpa."""
    apart = run.attention_spans is not None and run.attn_implementation == "sdpa"
    return FLASH_2 if apart else run.attn_implementation


def targets(architecture: Architecture, run: Run, every: Every = adaptable_modules) -> list[str] | None:
    """Adapter targets by name; None for `every` one that a framework's word for all of them means.

    Never None beside experts in 4 bits, which axolotl refuses. Parameters of stacked experts go by the names that their
    maps had, which PEFT turns into them: of the parameters' own names among ``target_modules`` it finds no module, and
    adapts nothing.
    """
    if set(run.lora_target_modules) == set(every(architecture)) and not run.quantize_moe_experts:
        return None
    older: dict[str, list[str]] = {}
    for old, new in renamed_targets(architecture).items():
        older.setdefault(new, []).append(old)
    return [old for name in run.lora_target_modules for old in older.get(name, [name])]


def decoder_alone(architecture: Architecture, run: Run) -> str:
    """A pattern of the run's maps in the text decoder of a model that sees: others have maps of the same names."""
    names = targets(architecture, run) or adaptable_modules(architecture)
    return rf"{re.escape(SEEING[0])}\.\d+\..*\.({'|'.join(map(re.escape, names))})"


OFFLOADED_PARTS = {"none": (), "optimizer": ("optimizer",), "all": ("optimizer", "param")}
"""What DeepSpeed is told to keep in host memory."""


def deepspeed(run: Run) -> Mapped:
    """DeepSpeed's own settings for a ZeRO stage; the trainer fills in what says auto."""
    beside: Mapped = {"overlap_comm": True} if run.overlap_comm else {}
    if run.sharding == "zero3":  # else the Trainer saves shares that no loader takes (``Trainer.save_model``)
        beside["stage3_gather_16bit_weights_on_model_save"] = True
    if run.reduce_bucket_size != BUCKET_ELEMENTS:
        beside["reduce_bucket_size"] = run.reduce_bucket_size
    for part in OFFLOADED_PARTS[run.offload]:
        beside[f"offload_{part}"] = {"device": "cpu", "pin_memory": True}
    return {
        "zero_optimization": {"stage": int(run.sharding.removeprefix("zero")), **beside},
        "bf16": {"enabled": run.compute_dtype == "bf16"},
        "fp16": {"enabled": run.compute_dtype == "fp16"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }


def trainer_precision(run: Run) -> str:
    """What the trainer is told: DeepSpeed's own 16 bits are switched on by the words for autocast."""
    own = "zero" in run.sharding and not run.precision.endswith("-autocast")
    return f"{run.precision}-autocast" if own else run.precision


def launcher_precision(run: Run) -> str | None:
    """What accelerate's launcher is told beside one of TRL's presets, all of which say bf16, which the Trainer takes
    for itself wherever its own file says false; None where bf16 is meant."""
    if trainer_precision(run) == "bf16-autocast":
        return None
    return run.precision.removesuffix("-autocast") if run.precision.endswith("-autocast") else "no"


def without_empty(mapping: Mapping[str, Any]) -> Mapped:
    """The mapping without what is None."""
    return {name: value for name, value in mapping.items() if value is not None}


def checkpointing_kwargs(run: Run) -> Mapped | None:
    """Which kind of checkpointing."""
    return {"use_reentrant": run.reentrant} if run.gradient_checkpointing else None


def base_fields(run: Run, four_bit: Mapped, eight_bit: Mapped) -> Mapped:
    """How the base is stored; nothing where it is not quantized."""
    if run.method != "qlora":
        return {}
    return eight_bit if run.base_quantization == EIGHT_BITS else four_bit


def trl_layout(run: Run) -> Mapped:
    """Which of TRL's presets its launcher takes; DeepSpeed's settings in the file itself where the preset has others:
    that of ZeRO-1 states one accumulation step (accelerate_configs/zero1.yaml), and the Trainer refuses another."""
    if run.num_gpus == 1 and not offloads_alone(run):
        return {}
    accumulates = run.sharding == "zero1" and run.gradient_accumulation_steps > 1
    own = "zero" in run.sharding and (accumulates or deepspeed_of_its_own(run))
    preset = "fsdp1" if run.sharding == "fsdp" and run.fsdp_version == 1 else TRL_PRESETS.get(run.sharding)
    if offloads_alone(run):
        preset = "zero3" if run.offload == "all" else "zero2"  # which share nothing there but what is offloaded
    return {
        "accelerate_config": TRL_PRESETS["ddp"] if own else preset,
        "num_processes": run.num_gpus,
        "mixed_precision": launcher_precision(run),
        "deepspeed": deepspeed(run) if own else None,
        **({} if own else launchers_offload(run)),
    }


def launchers_offload(run: Run) -> Mapped:
    """What accelerate's launcher is told beside a preset of what goes to host memory."""
    if run.sharding in FSDP:
        return {"fsdp_offload_params": True if run.offload == "all" else None}
    return {f"offload_{part}_device": "cpu" for part in OFFLOADED_PARTS[run.offload]}


def deepspeed_of_its_own(run: Run) -> bool:
    """Whether DeepSpeed is told what no preset of TRL says."""
    return run.overlap_comm or run.reduce_bucket_size != BUCKET_ELEMENTS


def trl_file(architecture: Architecture, run: Run, steps: int) -> Mapped:
    """``trl sft --config FILE``."""
    adapters = {
        "use_peft": True,
        "lora_r": run.lora_r,
        "lora_dropout": run.lora_dropout,
        "lora_target_modules": targets(architecture, run) or "all-linear",
        "lora_modules_to_save": list(run.modules_to_save) or None,
        "use_dora": run.use_dora or None,
        "use_rslora": run.use_rslora or None,
    }
    four_bit = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": run.bnb_4bit_quant_type,
        "use_bnb_nested_quant": run.double_quant,
        "bnb_4bit_quant_storage": WORDS[run.dtype] if shards_of(run).weights and run.num_gpus > 1 else None,
    }
    base = base_fields(run, four_bit, {"load_in_8bit": True})
    return without_empty(
        {
            "model_name_or_path": architecture.name,
            "dtype": WORDS[run.dtype],
            "dataset_name": DATASET,
            "output_dir": OUTPUT,
            **(adapters if run.has_adapters else {}),
            **base,
            "bf16": trainer_precision(run) == "bf16-autocast",
            "fp16": trainer_precision(run) == "fp16-autocast" or None,
            "max_length": run.max_length,
            "packing": True,
            "packing_strategy": "wrapped" if run.attention_length is None else "bfd",
            "per_device_train_batch_size": run.per_device_train_batch_size,
            "gradient_accumulation_steps": run.gradient_accumulation_steps,
            "max_steps": steps,
            "gradient_checkpointing": run.gradient_checkpointing,
            "gradient_checkpointing_kwargs": checkpointing_kwargs(run),
            "activation_offloading": run.activation_offloading or None,
            "attn_implementation": attention_written(run),
            "torch_compile": run.torch_compile or None,
            "optim": run.optim,
            "loss_type": run.loss_type if run.stack != "liger" and run.loss_type in LOSSES else None,
            "use_liger_kernel": True if run.stack == "liger" else None,
            **trl_layout(run),
        }
    )


LIGER_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
CUT_PLUGIN = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
LIGER_FIELDS = {
    "liger_rope": "rope",
    "liger_rms_norm": "rms_norm",
    "liger_glu_activation": "swiglu",
    "liger_cross_entropy": "cross_entropy",
}
"""axolotl's fields of Liger's kernels, and the run's names of these."""


def axolotl_plugins(run: Run) -> Mapped:
    """axolotl's plugins and their fields for kernels of Liger and for cut cross-entropy; Unsloth's are its own."""
    if run.stack == "unsloth":
        return {}
    fields_on: Mapped = {name: True for name, kernel in LIGER_FIELDS.items() if kernel in run.fused_kernels}
    if run.loss_type == "liger":
        fields_on["liger_fused_linear_cross_entropy"] = True
    plugins = [LIGER_PLUGIN] if fields_on else []
    if run.loss_type == "cut_cross_entropy":
        plugins.append(CUT_PLUGIN)
    return {"plugins": plugins, **fields_on} if plugins else {}


def axolotl_file(architecture: Architecture, run: Run, steps: int) -> Mapped:
    """``axolotl train FILE``."""
    named = targets(architecture, run, linear_modules)
    adapters = {
        "adapter": "lora" if run.base_quantization == EIGHT_BITS else run.method,
        "lora_r": run.lora_r,
        "lora_alpha": 2 * run.lora_r,
        "lora_dropout": run.lora_dropout,
        "lora_target_linear": True if named is None else None,
        "lora_target_modules": named,
        "lora_modules_to_save": list(run.modules_to_save) or None,
        "peft_use_dora": run.use_dora or None,
        "peft_use_rslora": run.use_rslora or None,
        **({} if run.stack == "axolotl" else dict.fromkeys(KERNELS, False)),
    }
    four_bit = {
        "load_in_4bit": True,
        "bnb_config_kwargs": {
            "bnb_4bit_quant_type": run.bnb_4bit_quant_type,
            "bnb_4bit_use_double_quant": run.double_quant,
        },
        "quantize_moe_experts": run.quantize_moe_experts or None,
    }
    base = base_fields(run, four_bit, {"load_in_8bit": True})
    sharded = {
        "fsdp_version": 2,
        "fsdp_config": {
            "reshard_after_forward": True,
            "offload_params": run.offload == "all",
            "cpu_ram_efficient_loading": True,  # else every process loads the whole model (`loading`)
        },
    }
    spread = sharded if run.sharding == "fsdp" else {"deepspeed": deepspeed(run)} if "zero" in run.sharding else {}
    return without_empty(
        {
            "base_model": architecture.name,
            "datasets": [{"path": DATASET, "type": "completion"}],
            "output_dir": OUTPUT,
            **(adapters if run.has_adapters else {}),
            **base,
            "bf16": trainer_precision(run) == "bf16-autocast",
            "bfloat16": trainer_precision(run) == "bf16" or None,
            "fp16": trainer_precision(run) == "fp16-autocast" or None,
            "sequence_len": run.max_length,
            "sample_packing": True,
            "pad_to_sequence_len": True,
            "micro_batch_size": run.per_device_train_batch_size,
            "gradient_accumulation_steps": run.gradient_accumulation_steps,
            "max_steps": steps,
            "learning_rate": LEARNING_RATE[run.method],
            "gradient_checkpointing": run.gradient_checkpointing,
            "gradient_checkpointing_kwargs": checkpointing_kwargs(run),
            "activation_offloading": run.activation_offloading or None,
            "attn_implementation": attention_written(run),
            "torch_compile": run.torch_compile or None,
            "optimizer": run.optim,
            **axolotl_plugins(run),
            "context_parallel_size": run.cp if run.cp > 1 else None,
            **spread,
        }
    )


def llama_factory_file(architecture: Architecture, run: Run, steps: int) -> Mapped:
    """``llamafactory-cli train FILE``."""
    named = targets(architecture, run, linear_modules)
    adapters = {
        "lora_rank": run.lora_r,
        "lora_dropout": run.lora_dropout,
        "lora_target": "all" if named is None else ",".join(named),
        "additional_target": ",".join(run.modules_to_save) or None,
        "use_dora": run.use_dora or None,
        "use_rslora": run.use_rslora or None,
    }
    four_bit = {
        "quantization_bit": 4,
        "quantization_method": "bnb",
        "quantization_type": run.bnb_4bit_quant_type,
        "double_quantization": run.double_quant,
    }
    base = base_fields(run, four_bit, {"quantization_bit": 8, "quantization_method": "bnb"})
    spread = {"deepspeed": deepspeed(run)} if "zero" in run.sharding else {}
    return without_empty(
        {
            "model_name_or_path": architecture.name,
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full" if run.method == "full" else "lora",
            "dataset": DATASET,
            "template": "default",
            "output_dir": OUTPUT,
            **(adapters if run.has_adapters else {}),
            **base,
            "pure_bf16": True if trainer_precision(run) == "bf16" else None,
            "bf16": True if trainer_precision(run) == "bf16-autocast" else None,
            "fp16": True if trainer_precision(run) == "fp16-autocast" else None,
            "cutoff_len": run.max_length,
            "packing": True,
            "neat_packing": None if run.attention_length is None else True,
            "per_device_train_batch_size": run.per_device_train_batch_size,
            "gradient_accumulation_steps": run.gradient_accumulation_steps,
            "max_steps": steps,
            "disable_gradient_checkpointing": not run.gradient_checkpointing,
            "use_reentrant_gc": run.reentrant if run.gradient_checkpointing else None,
            "flash_attn": FLASH_WORDS.get(run.attn_implementation),
            "enable_liger_kernel": True if run.stack == "liger" else None,
            "torch_compile": run.torch_compile or None,
            "optim": run.optim,
            **spread,
        }
    )


WRITERS: dict[str, Callable[[Architecture, Run, int], Mapped]] = {
    "trl": trl_file,
    "axolotl": axolotl_file,
    "llama-factory": llama_factory_file,
}


def config_for(
    kind: str,
    architecture: Architecture,
    run: Run,
    steps: int,
    *,
    packed: bool = True,
    cut: bool = False,
    grouped: bool = False,
    epochs: float = 1.0,
    weights: str = "",
    sees: bool = False,
) -> Mapped:
    """The training file of a run over so many `epochs`, of data with samples that are `cut` or without, and `grouped`
    by their lengths where they are not `packed`; layouts that none of the three can say are refused. `weights` is the
    hub's name of the model, if the catalog has another; what it `sees` with is not adapted, which names of maps alone
    would do.

    axolotl ends at ``max_steps`` or after its epochs, whichever comes first; the others at ``max_steps``.
    """
    refuse_unwritten(kind, run, packed=packed)
    named = replace(architecture, name=weights or architecture.name)
    mapping = WRITERS[kind](named, run, steps) | (long_cut(kind, packed=packed) if cut else {})
    if kind == "axolotl":
        mapping["num_epochs"] = math.ceil(epochs)
    if sees and run.has_adapters and kind != "llama-factory":  # which freezes all but the decoder (freeze_vision_tower)
        pattern = decoder_alone(named, run)
        mapping.pop("lora_target_linear", None)
        mapping["lora_target_modules"] = [pattern] if kind == "trl" else pattern  # TRL hands a list of one on as a text
    if packed:
        return mapping
    return without_empty({**mapping, **rows_alone(kind, run, grouped=grouped)})
