"""LitGPT YAML of ``litgpt finetune_lora`` and ``finetune_full``; the command is not in the file, its fields are.

Adapters are named as Hugging Face names these maps, which LitGPT's stack understands and others too.

Accumulation follows from the global batch, the micro-batch and the GPUs; several GPUs mean FSDP with
checkpointing, one GPU neither (``litgpt/finetune/lora.py``).
"""

from __future__ import annotations

from pathlib import PurePosixPath

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.configs.common import (
    check_four_bit,
    copy_number,
    put_held_out,
    put_targets,
    put_unpacked,
)
from tunecast.model.configs.frameworks import refuse
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source

_TARGETS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
    "lora_head": ("lm_head",),
}
_PRECISIONS = {
    "bf16-true": ("bf16", "bf16"),
    "16-true": ("fp16", "fp16"),
    "32-true": ("fp32", "fp32"),
    "bf16-mixed": ("fp32", "bf16-autocast"),
    "16-mixed": ("fp32", "fp16-autocast"),
}
_QUANTIZE = {
    "bnb.nf4": ("nf4", False),
    "bnb.nf4-dq": ("nf4", True),
    "bnb.fp4": ("fp4", False),
    "bnb.fp4-dq": ("fp4", True),
}
_LORA_FIELDS = ("lora_r", "lora_alpha", "lora_dropout", *_TARGETS)


def read(source: Source, draft: Draft, *, num_gpus: int | None) -> None:
    """Fill the draft from a LitGPT file; `num_gpus` of the command line wins over ``devices``."""
    draft.model_name = _model_name(source)
    draft.put("stack", "litgpt")
    _method(source, draft)
    _precision(source, draft)
    gpus = _gpus(source, draft, num_gpus)
    _rows(source, draft, gpus)
    _software(source, draft, gpus)
    put_held_out(source, draft, "data.init_args.val_split_fraction")
    copy_number(source, draft, "train.epochs", "num_train_epochs", whole=False)
    if source.has("train.max_time") and draft.options.get("method") != "full":
        draft.note(
            "train.max_time ends training after so many seconds, which is not counted: the forecast is of all of it."
        )
    steps = source.count("train.max_steps")
    if steps is not None:
        draft.put("max_steps", steps, "train.max_steps")


def refuse_pretraining(source: Source) -> None:
    """A file of ``litgpt pretrain`` starts from a name or no checkpoint at all."""
    fields = [field for field in ("model_name", "initial_checkpoint_dir", "model_config") if source.has(field)]
    if fields and not source.has("checkpoint_dir"):
        raise NotSupportedError(
            f"{source.name}: {fields[0]} without checkpoint_dir is a file of litgpt pretrain, and litgpt pretraining "
            "is not built; a fine-tuning file has checkpoint_dir, and estimate MODEL --method full comes near."
        )


def _model_name(source: Source) -> str:
    """``checkpoints/<owner>/<name>`` is the hub id of the checkpoint."""
    parts = PurePosixPath(str(source.get("checkpoint_dir"))).parts
    return "/".join(parts[-2:]) if len(parts) > 2 else "/".join(parts)


def _method(source: Source, draft: Draft) -> None:
    stated = next((field for field in _LORA_FIELDS if source.has(field)), None)
    quantize = source.get("quantize")
    if stated is None:
        draft.put("method", "full")
        draft.note("No lora_ field is in the file: read as litgpt finetune_full.")
        if quantize is not None:
            raise InputError(f"{source.name}: quantize is {quantize} without any lora_ field; a 4-bit base needs them.")
        return
    draft.put("method", "lora" if quantize is None else "qlora", stated if quantize is None else "quantize")
    copy_number(source, draft, "lora_r", "lora_r")
    copy_number(source, draft, "lora_dropout", "lora_dropout", whole=False)
    chosen = [field for field in _TARGETS if source.on(field)]
    if not chosen:
        raise InputError(f"{source.name}: every lora_ target is off; switch on lora_query or another one.")
    given = next((field for field in chosen if source.has(field)), None)
    put_targets(source, draft, [name for field in chosen for name in _TARGETS[field]], given)
    if quantize is not None:
        _four_bit(source, draft, str(quantize))


def _four_bit(source: Source, draft: Draft, quantize: str) -> None:
    if quantize not in _QUANTIZE:
        refuse(source, "quantize", quantize, "another base than 4-bit", f"use one of {', '.join(_QUANTIZE)}")
    kind, double = _QUANTIZE[quantize]
    check_four_bit(source, draft, kind, "quantize")
    draft.put("double_quant", double, "quantize")


def _precision(source: Source, draft: Draft) -> None:
    value = source.get("precision")
    word = str(source.default("precision") if value is None else value)
    if word not in _PRECISIONS:
        raise InputError(f"{source.name}: precision is {value!r}, but it is one of {', '.join(_PRECISIONS)}.")
    stated = None if value is None else "precision"
    dtype, precision = _PRECISIONS[word]
    draft.put("dtype", dtype, stated)
    draft.put("precision", precision, stated)
    if draft.options["method"] == "qlora" and word.endswith("-mixed"):
        raise InputError(f"{source.name}: LitGPT does not quantize under precision {word}; set precision: bf16-true.")
    if draft.options["method"] != "full":
        draft.put("adapter_dtype", dtype, stated)


def _gpus(source: Source, draft: Draft, num_gpus: int | None) -> int:
    devices = source.get("devices")
    if num_gpus is not None:
        return num_gpus
    if devices is not None and str(devices).lower() in ("auto", "-1"):
        raise InputError(f"{source.name}: devices is {devices}; say how many GPUs with --num-gpus.")
    gpus = (source.count("devices") or int(source.default("devices"))) * (source.count("num_nodes") or 1)
    draft.put("num_gpus", gpus, "devices" if devices is not None else None)
    nodes = source.count("num_nodes") or 1
    if nodes > 1:
        draft.put("gpus_per_node", gpus // nodes, "num_nodes")
    return gpus


def _rows(source: Source, draft: Draft, gpus: int) -> None:
    """Micro-batch and accumulation: ``global_batch_size // gpus // micro_batch_size`` (``TrainArgs``)."""
    copy_number(source, draft, "train.micro_batch_size", "per_device_train_batch_size")
    stated = "train.global_batch_size" if source.has("train.global_batch_size") else None
    batch = source.count("train.global_batch_size") or int(source.default("train.global_batch_size"))
    micro = int(draft.options["per_device_train_batch_size"])
    accumulation = batch // gpus // micro
    if accumulation < 1:
        raise InputError(
            f"{source.name}: train.global_batch_size {batch} is below {gpus} GPUs x train.micro_batch_size {micro}; "
            "raise it or use fewer GPUs."
        )
    draft.put("gradient_accumulation_steps", accumulation, stated)
    copy_number(source, draft, "train.max_seq_length", "max_length")
    if "max_length" not in draft.options:
        draft.note("train.max_seq_length is not in the file, so the longest sample decides; give --max-length.")
    put_unpacked(source, draft, None, "train.max_seq_length")


def _software(source: Source, draft: Draft, gpus: int) -> None:
    draft.put("gradient_checkpointing", gpus > 1)
    if gpus > 1:
        draft.put("reentrant", False)
        draft.put("sharding", "fsdp")
        draft.put("fsdp_version", 1 if draft.options["method"] == "full" else 2)
        if draft.options["method"] == "qlora":
            raise InputError(f"{source.name}: LitGPT does not quantize on {gpus} GPUs; set devices: 1.")
    draft.put("attn_implementation", source.default("attn_implementation"))
    draft.put("loss_type", source.default("loss_type"))
    _optimizer(source, draft)


def _optimizer(source: Source, draft: Draft) -> None:
    """AdamW of torch; of bitsandbytes, paged, when the base is quantized."""
    value = source.get("optimizer")
    field = "optimizer.class_path" if isinstance(value, dict) else "optimizer"
    path = str(source.get(field) or source.default("optimizer"))
    if path.rsplit(".", 1)[-1] != "AdamW":
        refuse(source, field, path, "another optimizer", "use AdamW")
    optim = "paged_adamw_32bit" if draft.options["method"] == "qlora" else "adamw_torch"
    draft.put("optim", optim, None if value is None else field)
