"""torchtune YAML. The builder named by ``model._component_`` says model and method; the recipe is not in the file.

torchtune has its own modelling code (stack ``torchtune``), one dtype for base, adapters and arithmetic, and takes
the GPU count from ``tune run --nproc_per_node``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError, TunecastError
from tunecast.catalogs.models import ModelRow, find_model
from tunecast.model.configs.common import (
    ONE_PIECE,
    PACKED_NOTE,
    copy_number,
    dtype_word,
    put_degree,
    put_packed,
    put_targets,
    put_unpacked,
    put_wrapped,
)
from tunecast.model.configs.frameworks import load_frameworks, refuse
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source
from tunecast.model.file_spread import Mesh
from tunecast.model.loss_chunks import CHUNKED_CE, KEPT_CHUNKS, LINEAR_CE, OUTPUT_CHUNKS

_OPTIMIZERS = {
    "AdamW": "adamw_torch",
    "PagedAdamW": "paged_adamw_32bit",
    "PagedAdamW8bit": "paged_adamw_8bit",
    "AdamW8bit": "adamw_bnb_8bit",
    "SGD": "sgd",
}
_OF_TORCHAO = {"AdamW8bit": "ao_adamw_8bit", "AdamW4bit": "ao_adamw_4bit", "AdamWFp8": "ao_adamw_fp8"}
_LOSSES = {"CrossEntropyLoss": "nll", "CEWithChunkedOutputLoss": CHUNKED_CE, "LinearCrossEntropyLoss": LINEAR_CE}
_MLP = ("gate_proj", "up_proj", "down_proj")
_OTHER_HEADS = re.compile(r"_(reward|classifier)(_|$)")
_MODELS = "torchtune.models."
_PREFIX = re.compile(r"^(q?lora|q?dora|qat|qat_lora)_(.+)$")


def read(source: Source, draft: Draft, *, num_gpus: int | None) -> None:
    """Fill the draft from a torchtune file."""
    component = source.get("model._component_")
    if component is None:
        raise InputError(f"{source.name}: there is no model._component_, which names the model; add it.")
    prefix, builder = _split(source, str(component).rsplit(".", 1)[-1])
    _check_folder(source, str(component), builder)
    draft.model_name = _model_name(source, draft, builder)
    draft.put("stack", "torchtune", "model._component_")
    quantized = prefix == "lora" and source.on("model.quantize_base")
    draft.put(
        "method",
        "qlora" if quantized else prefix or "full",
        "model.quantize_base" if quantized else "model._component_",
    )
    if prefix:
        _adapters(source, draft)
    _precision(source, draft)
    _rows(source, draft)
    copy_number(source, draft, "batch_size", "per_device_train_batch_size")
    copy_number(source, draft, "gradient_accumulation_steps", "gradient_accumulation_steps")
    _software(source, draft)
    _spread(source, draft, num_gpus)
    _amount(source, draft)


def _split(source: Source, builder: str) -> tuple[str | None, str]:
    """Method prefix and the plain builder's name."""
    if _OTHER_HEADS.search(builder):
        refuse(source, "model._component_", builder, "a model that gives scores", "use the language model's builder")
    if "vision" in builder:
        refuse(source, "model._component_", builder, "a model of images and text", "use a language model's builder")
    match = _PREFIX.match(builder)
    if match is None:
        return None, builder
    if match[1] not in ("lora", "qlora"):
        refuse(source, "model._component_", builder, f"the method {match[1]}", "use a lora_ or qlora_ builder")
    return match[1], match[2]


def _model_name(source: Source, draft: Draft, builder: str) -> str:
    """The catalog name of a builder, else the last part of the checkpoint's folder."""
    known = load_frameworks()["torchtune"]["builders"].get(builder)
    folder = source.get("checkpointer.checkpoint_dir")
    if known is not None:
        return str(known)
    if folder is None:
        raise InputError(f"{source.name}: the model builder {builder} is not known; add checkpointer.checkpoint_dir.")
    name = _folder(source)
    draft.note(f"The builder {builder} is not in our table: the model is taken from the folder's name, {name}.")
    return name


def _folder(source: Source) -> str:
    """Last part of the checkpoint's folder."""
    return PurePosixPath(str(source.get("checkpointer.checkpoint_dir") or "")).name


def _check_folder(source: Source, component: str, builder: str) -> None:
    """The checkpoint's folder, where its name is a model's, holds one that the builder can be."""
    try:
        stored = find_model(_folder(source))
    except TunecastError:
        return
    if not _can_be(component, builder, stored, _folder(source)):
        raise InputError(
            f"{source.name}: model._component_ is {component}, but checkpointer.checkpoint_dir is {_folder(source)}, "
            "another model; make both the one that is trained."
        )


def _can_be(component: str, builder: str, stored: ModelRow, folder: str) -> bool:
    """Whether a builder makes a stored model: of its shape, or by a builder that is not in the table, of its class;
    of a family without builders there, named as the folder is. Of components that are not torchtune's nobody knows."""
    builders: dict[str, str] = load_frameworks()["torchtune"]["builders"]
    if builder in builders:
        return _shape(find_model(builders[builder])) == _shape(stored)
    family = _family(component)
    classes = {find_model(name).architecture_class for one, name in builders.items() if one.startswith(f"{family}_")}
    named = re.sub(r"[^a-z0-9]", "", family) in re.sub(r"[^a-z0-9]", "", folder.lower())
    return not family or (stored.architecture_class in classes if classes else named)


def _family(component: str) -> str:
    """The package of a builder's model among torchtune's; empty for components that are not torchtune's."""
    return component.rsplit(".", 2)[-2] if component.startswith(_MODELS) else ""


def _shape(row: ModelRow) -> tuple[str, int, int]:
    return row.architecture_class, row.hidden_size, row.num_layers


def _adapters(source: Source, draft: Draft) -> None:
    copy_number(source, draft, "model.lora_rank", "lora_r")
    copy_number(source, draft, "model.lora_dropout", "lora_dropout", whole=False)
    names = list(source.words("model.lora_attn_modules") or ())
    targets = ["o_proj" if name == "output_proj" else name for name in names]
    targets += _MLP if source.on("model.apply_lora_to_mlp") else ()
    targets += ("lm_head",) if source.on("model.apply_lora_to_output") else ()
    if not targets:
        raise InputError(f"{source.name}: model.lora_attn_modules is empty; torchtune has no default for it.")
    component = str(source.get("model._component_"))
    if _family(component) in ("phi3", "phi4"):
        refuse(
            source,
            "model._component_",
            component,
            "adapters on torchtune's own maps of Phi (apart, where transformers joins them)",
            "forecast it by full fine-tuning, or another model",
        )
    put_targets(source, draft, targets, "model.lora_attn_modules" if names else "model.apply_lora_to_mlp")
    if draft.options["method"] == "qlora":
        draft.put("bnb_4bit_quant_type", "nf4", "model._component_")
        draft.put("double_quant", True, "model._component_")
        draft.note("torchtune's NF4 is torchao's, not bitsandbytes': blocks of 64 with 8-bit scales.")


def _precision(source: Source, draft: Draft) -> None:
    value = source.get("dtype")
    dtype = dtype_word(source, "dtype", source.default("dtype") if value is None else value)
    stated = None if value is None else "dtype"
    draft.put("dtype", dtype, stated)
    draft.put("precision", dtype, stated)
    if draft.options["method"] != "full" and dtype != "fp32":
        draft.put("adapter_dtype", dtype, stated)


def _rows(source: Source, draft: Draft) -> None:
    packed = _all_packed(source)
    copy_number(source, draft, "tokenizer.max_seq_len", "max_length")
    if "max_length" not in draft.options:
        draft.note("tokenizer.max_seq_len is not in the file: torchtune cuts nothing; give --max-length.")
    if packed:
        put_packed(draft, "dataset.packed")
        if not _datasets(source) and source.on("dataset.split_across_pack"):
            put_wrapped(draft, "dataset.split_across_pack")
        draft.note(PACKED_NOTE)
    else:
        put_unpacked(source, draft, "dataset.packed", "tokenizer.max_seq_len")


def _datasets(source: Source) -> list[Any]:
    """Those of a list, which torchtune joins (``datasets/_concat.py``); none where one stands alone."""
    stated = source.peek("dataset")
    return list(source.get("dataset")) if isinstance(stated, list) else []


def _all_packed(source: Source) -> bool:
    """Whether rows are packed; several data sets must agree (``ConcatDataset``)."""
    parts = _datasets(source)
    if not parts:
        return source.on("dataset.packed")
    packed = {bool(part.get("packed")) for part in parts if isinstance(part, Mapping)}
    if len(packed) > 1:
        raise InputError(f"{source.name}: dataset is packed in part, which torchtune refuses; pack all or none.")
    return packed == {True}


def _compiles(source: Source) -> bool:
    """A switch, or on torchtune's main branch one for each part (``recipes/full_finetune_distributed.py``)."""
    stated = source.peek("compile")
    return bool(source.get("compile").get("model", True)) if isinstance(stated, Mapping) else source.on("compile")


def _refused_at_start(source: Source, draft: Draft) -> None:
    """What torchtune's recipes end with as they begin (0.6.1 ``full_finetune_single_device.py``)."""
    if draft.options["dtype"] == "fp16":
        raise InputError(f"{source.name}: dtype is {source.get('dtype')}, which torchtune refuses; write bf16 or fp32.")
    if source.on("optimizer_in_bwd") and source.has("clip_grad_norm"):
        raise InputError(
            f"{source.name}: clip_grad_norm with optimizer_in_bwd, which torchtune refuses; take one of them out."
        )


def _software(source: Source, draft: Draft) -> None:
    _checkpointing(source, draft)
    draft.put("attn_implementation", source.default("attn_implementation"))
    draft.put("optim", _optimizer(source), "optimizer._component_")
    if source.on("optimizer_in_bwd"):
        draft.put("optimizer_in_backward", True, "optimizer_in_bwd")
    if _compiles(source):
        draft.put("torch_compile", True, "compile")
    _refused_at_start(source, draft)
    loss = source.get("loss._component_")
    name = str(loss or source.default("loss")).rsplit(".", 1)[-1]
    if name not in _LOSSES:
        raise NotSupportedError(f"{source.name}: loss._component_ {name} is not a loss of supervised fine-tuning.")
    kind = _LOSSES[name]
    beside = [field for field in ("model.apply_lora_to_output", "tensor_parallel_dim") if _has_own_head(source, field)]
    if kind in KEPT_CHUNKS and beside:
        kind = "nll"
        draft.note(
            f"{name} goes chunk by chunk; with {beside[0]} it is {ONE_PIECE}, whose peak is up to 6 bytes per logit "
            "higher."
        )
    draft.put("loss_type", kind, None if loss is None else "loss._component_")
    chunks = source.whole("loss.num_output_chunks")
    if kind in KEPT_CHUNKS and chunks not in (None, OUTPUT_CHUNKS):
        draft.note(f"loss.num_output_chunks is {chunks}: {OUTPUT_CHUNKS} chunks are counted, torchtune's default.")


def _has_own_head(source: Source, field: str) -> bool:
    """Whether an adapter on the head, or a vocabulary over several GPUs, is asked for."""
    return source.on(field) if field.startswith("model.") else (source.whole(field) or 1) > 1


def _checkpointing(source: Source, draft: Draft) -> None:
    """Every layer's checkpoint by the switch, or some by ``ac_mode``, which the distributed recipe of a whole model
    knows and which counts without the switch alone: with both, nothing is checkpointed.

    Source: torchtune 0.6.1 ``recipes/full_finetune_distributed.py`` and ``training/activations.py`` (the n-th layer
    of every n; no layer-wise choice of operations).
    """
    switch = source.flag("enable_activation_checkpointing")
    on, field = source.on("enable_activation_checkpointing"), "enable_activation_checkpointing"
    mode = str(source.get("ac_mode") or "none").lower() if draft.options["method"] == "full" else "none"
    if mode not in ("none", "full", "selective"):
        raise InputError(f"{source.name}: ac_mode is {mode!r}, but it is full or selective.")
    if source.has("ac_mode") and draft.options["method"] == "full":
        on, field = mode != "none" and not on, "ac_mode"
        switch = on
    draft.put("gradient_checkpointing", on, None if switch is None else field)
    if mode == "selective" and on:
        every = source.count("ac_option")
        draft.put("checkpoint_every", every if every is None or every > 1 else None, "ac_option")


def _optimizer(source: Source) -> str:
    component = str(source.get("optimizer._component_") or "")
    if not component:
        raise InputError(f"{source.name}: there is no optimizer._component_; add it, torch.optim.AdamW say.")
    name = component.rsplit(".", 1)[-1]
    known = _OF_TORCHAO if component.startswith("torchao.") else _OPTIMIZERS
    if name not in known:
        refuse(source, "optimizer._component_", component, "another optimizer", f"use one of {', '.join(known)}")
    if name == "AdamW" and source.on("optimizer.fused"):
        return "adamw_torch_fused"
    return known[name]


def _spread(source: Source, draft: Draft, num_gpus: int | None) -> None:
    """The distributed recipe is FSDP2; a single-device recipe has no sharding."""
    put_degree(source, draft, "tensor_parallel_dim", "tp")
    put_degree(source, draft, "context_parallel_dim", "cp")
    split = int(draft.options.get("tp", 1)) * int(draft.options.get("cp", 1))
    draft.mesh = _mesh(source)
    several = draft.mesh is not None or (num_gpus is not None and num_gpus > split)
    if source.on("fsdp_cpu_offload"):
        if several:
            draft.put("offload", True, "fsdp_cpu_offload")
        else:
            draft.note(
                "fsdp_cpu_offload is for several GPUs, which torchtune alone shards: --num-gpus N says how many."
            )
    if several:
        if source.has("custom_sharded_layers"):
            draft.note(
                "custom_sharded_layers gives the table and the head units of their own, which is not built: both are "
                "counted as whole throughout a step, an upper bound of memory."
            )
        kept = source.flag("fsdp_reshard_after_forward") is False
        said = "fsdp_reshard_after_forward" if kept else None if draft.mesh is None else draft.mesh.field
        draft.put("sharding", "fsdp-grad-op" if kept else "fsdp", said)


def _mesh(source: Source) -> Mesh | None:
    """Shards and replicas of ``ParallelDims`` (torchtune's main branch, ``training/_distributed.py``), whose
    ``_validate`` asserts that they are the whole job; shards of -1 are what replicas leave."""
    sizes = {name: source.whole(name) for name in ("data_parallel_replicate_dim", "data_parallel_shard_dim")}
    replicas, shards = (max(size or 0, 0) for size in sizes.values())
    if max(replicas, shards) < 2:
        return None
    field = " x ".join(name for name, size in sizes.items() if size is not None and size > 0)
    return Mesh(shards=shards or None, replicas=max(replicas, 1), field=field)


def _amount(source: Source, draft: Draft) -> None:
    copy_number(source, draft, "epochs", "num_train_epochs", whole=False)
    per_epoch = source.count("max_steps_per_epoch")
    if per_epoch is not None:
        epochs = float(draft.options["num_train_epochs"])
        draft.put("max_steps", round(per_epoch * epochs), "max_steps_per_epoch")
