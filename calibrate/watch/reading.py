"""What a Trainer is about to run, in the words of a forecast: read from its arguments and its model.

Nothing is changed and nothing is computed on the device. What cannot be told is refused by name; the caller then
measures without a forecast.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tunecast.calibrate.linear_kernels import installed_kernels
from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.configs.trl import liger_kernels
from tunecast.model.stacks import FLASH_2, FLASH_3

SHORT_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
WRAPPERS = {"AcceleratedOptimizer", "DeepSpeedOptimizerWrapper"}
"""accelerate's classes around an optimizer."""
PACKED_LINEARS = {"Linear4bit", "Linear8bitLt"}
"""bitsandbytes' linear maps, and PEFT's around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as the forecast sees it; lengths follow from its first batches."""

    architecture: Architecture
    options: dict[str, Any]
    """As on the command line with underscores, without ``max_length``."""


def read_job(args: Any, model: Any, optimizer: Any = None) -> Job:
    """`args` is a ``TrainingArguments`` (or a TRL config), `model` and `optimizer` what the callback is handed.

    Raises NotSupportedError (or InputError) for an architecture or a way of training without formulas.
    """
    from tunecast.model.architectures import architecture_from_config

    refuse_other_trainers(args)
    refuse_other_optimizer(args, optimizer)
    base = base_model(model)
    config = dict(base.config.to_dict())
    config.pop("quantization_config", None)
    config.setdefault("architectures", None)
    name = str(config.get("_name_or_path") or config.get("model_type"))
    options = {
        **method_options(model, base),
        **dtype_options(args, model, base),
        **trainer_options(args, base),
        **spread_options(args),
        "allow_long_context": True,
    }
    architecture = architecture_from_config(config, name)
    refuse_other_adapters(model, architecture, options)
    kernels = installed_kernels(architecture)
    return Job(architecture=architecture, options=options | ({"fused_kernels": ",".join(kernels)} if kernels else {}))


def trl_config(args: Any) -> str | None:
    """The name of TRL's own class among the arguments' classes (``SFTConfig``); None without TRL."""
    of_trl = (kind.__name__ for kind in type(args).__mro__ if kind.__module__.partition(".")[0] == "trl")
    return next(of_trl, None)


def refuse_other_trainers(args: Any) -> None:
    """What is no supervised fine-tuning on one batch after the other has other passes than the forecast's."""
    config = trl_config(args)
    if config not in (None, "SFTConfig"):
        raise NotSupportedError(f"The trainer takes {config}, and of TRL only supervised fine-tuning is forecast.")
    if not_data_parallel(args) > 1:
        raise NotSupportedError("The job splits samples or layers over processes, and only its data are read here.")
    if int(getattr(args, "n_gpu", 1)) > 1:
        raise NotSupportedError(
            "One process drives several GPUs (nn.DataParallel), which is not forecast: use torchrun."
        )


def refuse_other_optimizer(args: Any, optimizer: Any) -> None:
    """An optimizer that was handed to the Trainer, of another class than ``optim`` names."""
    while type(optimizer).__name__ in WRAPPERS:
        optimizer = optimizer.optimizer
    if optimizer is None or type(optimizer).__module__.partition(".")[0] == "deepspeed":
        return
    from transformers import Trainer

    try:
        named = Trainer.get_optimizer_cls_and_kwargs(args)[0]
    except Exception:  # what this transformers cannot make by name alone is left to the forecast, which knows the name
        return
    packages = {kind.__module__.partition(".")[0] for kind in (named, type(optimizer))}
    if isinstance(named, type) and not isinstance(optimizer, named) and packages != {"bitsandbytes"}:
        raise NotSupportedError(
            f"The optimizer is {type(optimizer).__name__}, which was handed to the Trainer, and optim says "
            f"{getattr(args.optim, 'value', args.optim)}; only optimizers that optim names are forecast."
        )


def refuse_other_adapters(model: Any, architecture: Architecture, options: Mapping[str, Any]) -> None:
    """Adapters that the options do not say: other ranks or layers for some modules (``rank_pattern``,
    ``exclude_modules``, ``layers_to_transform``). Told by how much is trained, where this process holds all of it."""
    if options["method"] == "full":
        return
    from tunecast.model.resolve import resolve_run
    from tunecast.model.sharding import shards_of
    from tunecast.model.trained import trainable_params

    run = resolve_run(architecture, {**options, "max_length": 1}).run
    if shards_of(run).weights:
        return
    told = trainable_params(architecture, run)
    real = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if told != real:
        raise NotSupportedError(
            f"The model trains {real:,} parameters, and adapters of rank {options['lora_r']} on every "
            f"{options['lora_target_modules']} have {told:,}: patterns of ranks, layers or names, and "
            "other weights trained beside adapters, are not forecast."
        )


def not_data_parallel(args: Any) -> int:
    """Processes that share one batch: tensor, context and sequence parallel ones (accelerate's own count)."""
    return int(getattr(getattr(args, "parallelism_config", None), "non_data_parallel_size", 1))


def base_model(model: Any) -> Any:
    """The transformers model under PEFT's and accelerate's wrappers."""
    while not hasattr(model, "config") or hasattr(model, "module"):
        if not hasattr(model, "module"):
            raise NotSupportedError(
                f"The model, a plain {type(model).__name__}, has no config; a model of transformers has."
            )
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def method_options(model: Any, base: Any) -> dict[str, Any]:
    """What is trained, and how the base is stored."""
    configs = getattr(model, "peft_config", None)
    if configs is None:
        frozen = sum(not parameter.requires_grad for parameter in base.parameters())
        if frozen:
            raise NotSupportedError(
                f"{frozen} tensors of the model are frozen without adapters, which is not forecast."
            )
        return {"method": "full"}
    adapter = configs[getattr(model, "active_adapter", "default")]
    kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
    if kind != "LORA":
        raise NotSupportedError(f"The adapters are {kind}, and only LORA is forecast.")
    lora = {
        "method": "lora",
        "lora_r": int(adapter.r),
        "lora_dropout": float(adapter.lora_dropout),
        "lora_target_modules": ",".join(adapted_modules(model)),
        "use_dora": bool(adapter.use_dora),
        "use_rslora": bool(adapter.use_rslora),
        "lora_bias": bool(adapter.lora_bias),
    }
    return lora | saved_options(model, adapter) | four_bit_options(base)


def saved_options(model: Any, adapter: Any) -> dict[str, Any]:
    """Modules trained whole beside the adapters, and the dtype of their copies."""
    if not adapter.modules_to_save:
        return {}
    copies = [p for name, p in model.named_parameters() if ".modules_to_save." in name and p.requires_grad]
    return {"modules_to_save": ",".join(adapter.modules_to_save), "modules_to_save_dtype": commonest(copies)}


def adapted_modules(model: Any) -> list[str]:
    """Last names of the modules that carry an adapter, each once, in the model's order."""
    names = (name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A"))
    return list(dict.fromkeys(names))


def four_bit_options(base: Any) -> dict[str, Any]:
    """The base's 4-bit storage; an 8-bit or otherwise quantized base is refused."""
    quantization = getattr(base.config, "quantization_config", None)
    if quantization is None:
        return packed_options(base)
    said = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    if not said.get("load_in_4bit", said.get("_load_in_4bit")):
        raise NotSupportedError(
            f"The base is quantized by {said.get('quant_method')}, and only 4-bit bases are forecast."
        )
    return {
        "method": "qlora",
        "bnb_4bit_quant_type": said["bnb_4bit_quant_type"],
        "double_quant": bool(said["bnb_4bit_use_double_quant"]),
    }


def packed_options(base: Any) -> dict[str, Any]:
    """The same of linear maps of bitsandbytes that somebody put in place, of which the configuration says nothing."""
    weights = [module.weight for module in base.modules() if type(module).__name__ in PACKED_LINEARS]
    if not weights:
        return {}
    if not hasattr(weights[0], "quant_type"):
        raise NotSupportedError("The base has 8-bit linear maps of bitsandbytes, and only 4-bit bases are forecast.")
    return {
        "method": "qlora",
        "bnb_4bit_quant_type": weights[0].quant_type,
        "double_quant": bool(weights[0].compress_statistics),
    }


def dtype_options(args: Any, model: Any, base: Any) -> dict[str, Any]:
    """Storage of base and adapters by their largest share, and autocast or pure arithmetic."""
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    own = {id(parameter) for parameter in adapters}
    weights = [p for p in base.parameters() if id(p) not in own and str(p.dtype) in SHORT_DTYPES]
    dtype = commonest(weights)
    autocast = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    options = {"dtype": dtype, "precision": f"{autocast}-autocast" if autocast else dtype}
    return options | ({"adapter_dtype": commonest(adapters)} if adapters else {})


def commonest(parameters: Iterable[Any]) -> str:
    """The dtype that most of these parameters' elements have."""
    elements: dict[str, int] = {}
    for parameter in parameters:
        elements[str(parameter.dtype)] = elements.get(str(parameter.dtype), 0) + parameter.numel()
    if not elements:
        raise NotSupportedError("The model has no weights in bf16, fp16 or fp32, so its dtype cannot be told.")
    dtype = max(elements, key=lambda name: elements[name])
    if dtype not in SHORT_DTYPES:
        raise NotSupportedError(f"The weights are {dtype}, and only bf16, fp16 and fp32 are forecast.")
    return SHORT_DTYPES[dtype]


def trainer_options(args: Any, base: Any) -> dict[str, Any]:
    """Batch, checkpointing, optimizer, attention and loss."""
    return {
        "per_device_train_batch_size": int(args.per_device_train_batch_size),
        "gradient_accumulation_steps": int(args.gradient_accumulation_steps),
        "optim": str(getattr(args.optim, "value", args.optim)),
        "attn_implementation": attention_name(str(getattr(base.config, "_attn_implementation", None) or "sdpa")),
        **checkpointing_options(args, base),
        **loss_options(args),
        **({"torch_compile": True} if getattr(args, "torch_compile", False) else {}),
    }


def attention_name(name: str) -> str:
    """Flash kernels from the hub (``kernels-community/flash-attn2``) by the name of the package's own."""
    kernel = name.rpartition("/")[2].removeprefix("vllm-")
    versions = {"flash-attn2": FLASH_2, "flash-attn3": FLASH_3}
    return next((own for begins, own in versions.items() if kernel.startswith(begins)), name)


def checkpointing_options(args: Any, base: Any) -> dict[str, Any]:
    """Checkpointing by its newer name (transformers 5.23) or its older one."""
    kwargs = newer(args, "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    kwargs = kwargs if isinstance(kwargs, Mapping) else {}
    on = newer(args, "activation_checkpointing", "gradient_checkpointing") or newer(
        base, "is_activation_checkpointing", "is_gradient_checkpointing"
    )
    by_fsdp = not on and fsdp_checkpoints(args)
    unbuilt = [name for name in ("offload", "selective") if on and kwargs.get(name)]
    if unbuilt:
        raise NotSupportedError(f"Checkpoints are set with {unbuilt[0]}, and only plain ones are forecast.")
    every = int(kwargs.get("every_n_layers") or 1)
    return {
        "gradient_checkpointing": bool(on) or by_fsdp,
        "reentrant": not by_fsdp and bool(kwargs.get("use_reentrant", False)),
        **({"activation_offloading": True} if getattr(args, "activation_offloading", False) else {}),
        **({"checkpoint_every": every} if on and every > 1 else {}),
    }


def fsdp_checkpoints(args: Any) -> bool:
    """Whether FSDP sets checkpoints of its own, as the arguments or ``accelerate launch`` say, never reentrant ones
    (accelerate 1.15 ``accelerator.py`` and ``fsdp2_apply_ac``); their offloading is refused by name."""
    if not runs_fsdp(args) or int(args.world_size) == 1:
        return False
    if fsdp_asks(args, "activation_checkpointing_offload"):
        raise NotSupportedError("FSDP keeps checkpoints in host memory by its own code, which is not forecast.")
    return fsdp_asks(args, "activation_checkpointing")


def fsdp_asks(args: Any, name: str, variable: str = "") -> bool:
    """Whether a switch of FSDP's is on, in the arguments or in the environment (`variable`, else by the same name)."""
    told = dict(getattr(args, "fsdp_plugin_args", None) or {}).get(name)
    told = os.environ.get(f"FSDP_{(variable or name).upper()}") if told is None else told
    return str(told).lower() in ("1", "true")


def newer(holder: Any, name: str, older: str) -> Any:
    """An attribute by its name, or by the older one where it has none: the older one warns where both are."""
    return getattr(holder, name) if hasattr(holder, name) else getattr(holder, older, None)


def loss_options(args: Any) -> dict[str, Any]:
    """The loss path, and Liger's kernels.

    TRL since 1.15 never makes the full logits, whatever ``loss_type`` says: its own head makes tiles of them, twice,
    as chunks do; the chunked loss stands in for it. Liger's kernels then leave the loss alone.
    """
    stack = {"stack": "liger"} if getattr(args, "use_liger_kernel", False) else {}
    kernels = liger_kernels(getattr(args, "liger_kernel_config", None) or {}) if stack else None
    stack |= {} if kernels is None else {"fused_kernels": kernels}
    if trl_config(args) is not None and trl_head_is_tiled():
        return stack | {"loss_type": "chunked_nll"}
    if stack:
        return stack | {"loss_type": "liger"}
    return {"loss_type": str(args.loss_type)} if getattr(args, "loss_type", None) else {}


def trl_head_is_tiled() -> bool:
    """Whether the TRL that is running puts its tiled head into every model."""
    import sys

    return hasattr(sys.modules.get("trl.trainer.utils"), "add_fused_lm_head")


def spread_options(args: Any) -> dict[str, Any]:
    """How many GPUs, and how the job is spread over them."""
    gpus = int(args.world_size)
    if gpus == 1:
        return {}
    if getattr(args, "deepspeed", None):
        stage = getattr(getattr(args, "hf_deepspeed_config", None), "get_value", lambda _: None)(
            "zero_optimization.stage"
        )
        if stage not in (1, 2, 3):
            raise NotSupportedError(f"DeepSpeed runs at ZeRO stage {stage}, and only 1, 2 and 3 are forecast.")
        return {"num_gpus": gpus, "sharding": f"zero{stage}", **zero_offload(args)}
    return {"num_gpus": gpus, **(fsdp_options(args) if runs_fsdp(args) else {"sharding": "ddp"})}


def zero_offload(args: Any) -> dict[str, Any]:
    """What DeepSpeed keeps in host memory: the optimizer's states, or parameters at rest too."""
    states, parameters = (
        str(args.hf_deepspeed_config.get_value(f"zero_optimization.{part}.device", "none")).lower()
        for part in ("offload_optimizer", "offload_param")
    )
    if "nvme" in (states, parameters):
        raise NotSupportedError("DeepSpeed keeps states or parameters on a disk (nvme), which is not forecast.")
    if states == "none" and parameters == "none":
        return {}
    if states == "none":
        raise NotSupportedError("DeepSpeed keeps parameters alone in host memory, which is not forecast.")
    return {"offload": "optimizer" if parameters == "none" else "all"}


def runs_fsdp(args: Any) -> bool:
    """Whether the job runs under FSDP, by its own arguments or by ``accelerate launch``."""
    return bool(getattr(args, "fsdp", None)) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def fsdp_options(args: Any) -> dict[str, Any]:
    """FSDP's version, and what of the weights it lets go: as the arguments hand them to accelerate's plugin, or as
    ``accelerate launch`` sets them in the environment. Version 1 names its strategy where version 2 has a switch."""
    plugin = dict(getattr(args, "fsdp_plugin_args", None) or {})
    version = int(plugin.get("fsdp_version") or os.environ.get("FSDP_VERSION") or 1)
    named = (plugin.get("sharding_strategy"), plugin.get("reshard_after_forward"))
    told = (*named, os.environ.get("FSDP_SHARDING_STRATEGY"), os.environ.get("FSDP_RESHARD_AFTER_FORWARD"))
    strategy = str(next((one for one in told if one is not None), getattr(args, "fsdp", ""))).lower()
    offloads = fsdp_asks(args, "cpu_offload", "offload_params")
    common = {"fsdp_version": version, **({"offload": "all"} if offloads else {})}
    if "hybrid" in strategy or strategy in ("4", "5"):
        return {"sharding": "hsdp", **common}
    keeps = "grad_op" in strategy or strategy in ("false", "2")
    return {"sharding": "fsdp-grad-op" if keeps else "fsdp", **common}
