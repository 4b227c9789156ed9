"""axolotl YAML. Read from its loaders and schemas of 2025 and 2026.

axolotl raises norms, embeddings and head of a quantized base to fp32 (``prepare_model_for_kbit_training``) and
casts them back to the training dtype before it adds adapters (``ModelLoader._configure_embedding_dtypes``), so
they rest in bf16. It switches its fused LoRA kernels on by itself.
"""

from __future__ import annotations

from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.configs.common import (
    COMPILERS,
    LORA_KERNELS,
    TOKENS_UNPADDED,
    check_four_bit,
    check_one_half,
    copy_number,
    copy_word,
    loaded_bits,
    note_dropped,
    note_grouped,
    note_packed,
    put_checkpoint_every,
    put_degree,
    put_eight_bit,
    put_filled,
    put_flat,
    put_held_out,
    put_mixed_precision,
    put_targets,
    put_unpacked,
    put_workers,
    put_written_targets,
    read_saves,
    read_steps,
    refuse_other_compilers,
)
from tunecast.model.configs.frameworks import load_frameworks, refuse
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source
from tunecast.model.configs.spread import put_sharding, read_fsdp_config, read_fsdp_words
from tunecast.model.file_spread import Mesh
from tunecast.model.kept_samples import DROPPED, LONG_SAMPLES, SPLIT
from tunecast.model.peft_targets import LINEAR_MODULES
from tunecast.model.stacks import attention_named

KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_OFFLOADED = ("offload", "unsloth")
"""Words for Unsloth's checkpoints in host memory (``_apply_gradient_checkpointing_patches``)."""
_ON_DISK = ("offload_disk",)
_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "xformers_attention": "xformers",
    "flex_attention": "flex_attention",
    "eager_attention": "eager",
}
"""Deprecated booleans, and what they set, in axolotl's order of precedence."""
_SHORT_ATTENTION = {"flash": "flash_attention_2", "flash_attention": "flash_attention_2"}
_UNSLOTH = ("unsloth_lora_mlp", "unsloth_lora_qkv", "unsloth_lora_o", "unsloth_cross_entropy_loss")
_FUSED = {
    "liger_rope": "rope",
    "liger_rms_norm": "rms_norm",
    "liger_glu_activation": "swiglu",
    "liger_swiglu": "swiglu",
    "liger_cross_entropy": "cross_entropy",
}
_LIGER = (*_FUSED, "liger_layer_norm")
KEPT_CHECKPOINTS = 4
"""Where no field says how many stay (``_configure_save_and_eval_strategy`` of core/builders/base.py, where steps win
over a strategy)."""
_VARLEN = ("flash_attention_2", "flash_attention_3")
"""Attention that keeps samples apart which lie end to end (``attn_supports_packing``)."""


def read(source: Source, draft: Draft, *, num_gpus: int | None) -> None:
    """Fill the draft from an axolotl file."""
    del num_gpus
    draft.model_name = str(source.get("base_model"))
    _method(source, draft)
    _precision(source, draft)
    _attention(source, draft)
    _rows(source, draft)
    _checkpointing(source, draft)
    _spread(source, draft)
    copy_word(source, draft, "optimizer", "optim")
    _kernels(source, draft)
    _amount(source, draft)
    note_grouped(source, draft)
    note_dropped(source, draft)
    _data(source, draft)
    put_workers(source, draft, started=source.on("use_ray"))


def _method(source: Source, draft: Draft) -> None:
    adapter, bits = source.get("adapter"), loaded_bits(source)
    _experts(source, draft, bits)
    if adapter is None:
        draft.put("method", "full")
        if bits is not None:
            raise InputError(f"{source.name}: {bits} is true without an adapter; add adapter: qlora or lora.")
        return
    if adapter not in ("lora", "qlora"):
        refuse(source, "adapter", adapter, "another kind of adapter", "use lora, qlora or none")
    if adapter == "qlora" and bits != "load_in_4bit":
        raise InputError(f"{source.name}: adapter is qlora without load_in_4bit: true; axolotl needs both.")
    if adapter == "lora" and bits == "load_in_4bit":
        raise InputError(
            f"{source.name}: adapter is lora with load_in_4bit: true, by which axolotl quantizes nothing and casts the "
            "whole model to fp32; write adapter: qlora, or take load_in_4bit out."
        )
    draft.put("method", "qlora" if bits else "lora", bits if adapter == "lora" and bits else "adapter")
    _adapters(source, draft)
    if bits == "load_in_4bit":
        _four_bit(source, draft)
    if bits == "load_in_8bit":
        put_eight_bit(draft, bits)


def _adapters(source: Source, draft: Draft) -> None:
    if not source.has("lora_r"):
        raise InputError(f"{source.name}: adapter is {source.get('adapter')} without lora_r; axolotl has no default.")
    copy_number(source, draft, "lora_r", "lora_r")
    copy_number(source, draft, "lora_dropout", "lora_dropout", whole=False)
    names = source.words("lora_target_modules") or ()
    if source.on("lora_target_linear"):
        put_targets(source, draft, (*names, "all-linear"), "lora_target_linear", every=LINEAR_MODULES)
    elif names:
        put_written_targets(source, draft, names, "lora_target_modules")
    else:
        raise InputError(f"{source.name}: no adapter targets; add lora_target_linear: true or lora_target_modules.")
    cast = source.flag("peft_autocast_adapter_dtype")
    if cast is False:
        draft.put("adapter_dtype", "bf16", "peft_autocast_adapter_dtype")
    if source.has("lora_model_dir"):
        draft.note("lora_model_dir continues a saved adapter: its own rank and targets win over this file's.")


def _experts(source: Source, draft: Draft, bits: str | None) -> None:
    """Experts in 4 bits, with double quantization whatever ``bnb_config_kwargs`` says of linear maps.

    Source: axolotl 0.19 ``monkeypatch/moe_quant.py``, ``schemas/config.py`` (``check_quantize_moe_experts``).
    """
    field = "quantize_moe_experts"
    if not source.on("quantize_moe_experts"):
        return
    if bits == "load_in_8bit":
        refuse(source, field, True, "experts stored in 8 bits", "write load_in_4bit: true, or take it out")
    refused = None
    if bits is None:
        refused = "without 4 or 8 bits", "write adapter: qlora and load_in_4bit: true"
    elif source.on("lora_target_linear"):
        refused = "beside lora_target_linear: true", "name lora_target_modules"
    if refused:
        found, instead = refused
        raise InputError(f"{source.name}: {field} is true {found}, which axolotl refuses; {instead}, or take it out.")
    if source.flag("bnb_config_kwargs.bnb_4bit_use_double_quant") is False:
        refuse(source, field, True, "experts with double quantization beside maps without", "leave both with it")
    draft.put(field, True, field)


def _four_bit(source: Source, draft: Draft) -> None:
    kind = source.get("bnb_config_kwargs.bnb_4bit_quant_type")
    field = "bnb_config_kwargs.bnb_4bit_quant_type"
    check_four_bit(source, draft, str(kind or source.default("bnb_4bit_quant_type")), field if kind else None)
    double = source.flag("bnb_config_kwargs.bnb_4bit_use_double_quant")
    if double is None:
        draft.put("double_quant", source.default("bnb_4bit_use_double_quant"))
    else:
        draft.put("double_quant", double, "bnb_config_kwargs.bnb_4bit_use_double_quant")


def _precision(source: Source, draft: Draft) -> None:
    """``bf16: auto`` is bf16 where the card has it; what the card lacks is settled with the device."""
    check_one_half(source)
    bf16 = source.get("bf16")
    word = str(source.default("bf16") if bf16 is None else bf16).lower()
    stated = None if bf16 is None else "bf16"
    if source.on("fp16") or source.on("float16"):
        field = "fp16" if source.on("fp16") else "float16"
        draft.put("dtype", "fp16", field)
        draft.put("precision", "fp16-autocast" if field == "fp16" else "fp16", field)
    elif source.on("bfloat16") or word == "full":
        field = "bfloat16" if source.on("bfloat16") else "bf16"
        draft.put("dtype", "bf16", field)
        draft.put("precision", "bf16", field)
    elif word in ("auto", "true"):
        draft.put("dtype", "bf16", stated)
        put_mixed_precision(draft, "bf16", stated, None, is_bf16=True)
    elif word == "false":
        draft.put("dtype", "fp32", stated)
        draft.put("precision", "fp32", stated)
    else:
        raise InputError(f"{source.name}: bf16 is {bf16!r}, but it is auto, true, false or full.")


def _rows(source: Source, draft: Draft) -> None:
    copy_number(source, draft, "sequence_len", "max_length")
    copy_number(source, draft, "micro_batch_size", "per_device_train_batch_size")
    _accumulation(source, draft)
    if source.on("sample_packing"):
        rows = draft.options["per_device_train_batch_size"]
        note_packed(draft, "sample_packing")
        if rows > 1:
            draft.note(f"axolotl lays the {rows} rows of a packed micro-batch end to end; a step has as many tokens.")
    elif _is_flat(source, draft):  # its collator gets no padding (``build_collator`` of core/builders/causal.py)
        put_flat(source, draft, "sample_packing", "batch_flattening", "sequence_len")
    elif source.on("pad_to_sequence_len"):
        put_filled(source, draft, "sample_packing", "pad_to_sequence_len", "sequence_len")
    else:
        put_unpacked(source, draft, "sample_packing", "sequence_len")
        to_longest = source.has("pad_to_sequence_len")  # false, which is not null (as ``build`` has it)
        multiple = 1 if to_longest else source.default("pad_to_multiple_of")
        draft.put("pad_to_multiple_of", multiple, "pad_to_sequence_len" if to_longest else None)


def _is_flat(source: Source, draft: Draft) -> bool:
    """Whether micro-batches are laid end to end; ``auto`` does where attention can and there is something to lay
    (``check_batch_flattening_fa``)."""
    if str(source.get("batch_flattening")).lower() != "auto":
        return source.on("batch_flattening")
    varlen = draft.options.get("attn_implementation") in _VARLEN
    return varlen and int(draft.options["per_device_train_batch_size"]) > 1


def _accumulation(source: Source, draft: Draft) -> None:
    """``batch_size`` counts the samples of one GPU's optimizer step, when it is used at all."""
    total = source.count("batch_size")
    if total is None or source.has("gradient_accumulation_steps"):
        copy_number(source, draft, "gradient_accumulation_steps", "gradient_accumulation_steps")
        return
    micro = int(draft.options["per_device_train_batch_size"])
    draft.put("gradient_accumulation_steps", max(total // micro, 1), "batch_size")


def _checkpointing(source: Source, draft: Draft) -> None:
    value = source.get("gradient_checkpointing")
    if isinstance(value, str) and value.lower() in _OFFLOADED:
        for option in ("gradient_checkpointing", "activation_offloading", "reentrant"):
            draft.put(option, True, "gradient_checkpointing")
        return
    if isinstance(value, str) and value.lower() in _ON_DISK:
        refuse(source, "gradient_checkpointing", value, "checkpoints on disk", "write true, false or offload")
    if isinstance(value, str) and value.lower() not in ("true", "false"):
        raise InputError(f"{source.name}: gradient_checkpointing is {value!r}, but it must be true, false or offload.")
    on = source.on("gradient_checkpointing")
    draft.put("gradient_checkpointing", on, None if value is None else "gradient_checkpointing")
    field = "gradient_checkpointing_kwargs.use_reentrant"
    reentrant = source.flag(field)
    if reentrant is not None:
        draft.put("reentrant", reentrant, field)
    elif on:
        draft.put("reentrant", source.default(field))
    if on:
        put_checkpoint_every(source, draft, ["gradient_checkpointing_kwargs"])


def _compile(source: Source, draft: Draft) -> None:
    """Backend and mode count only where ``torch_compile`` says so, as ``auto`` does with any torch of today
    (``_configure_torch_compile`` of core/builders/base.py)."""
    how = [field for field in COMPILERS if source.has(field)]
    if str(source.get("torch_compile")).lower() == "auto" or source.flag("torch_compile"):
        refuse_other_compilers(source, how)
        draft.put("torch_compile", True, "torch_compile")


def _attention(source: Source, draft: Draft) -> None:
    named = source.get("attn_implementation")
    if named is not None:
        word = _SHORT_ATTENTION.get(str(named), str(attention_named(named)))
        draft.put("attn_implementation", word, "attn_implementation")
        return
    for field, implementation in _ATTENTION.items():
        if source.on(field):
            draft.put("attn_implementation", implementation, field)
            return
    draft.put("attn_implementation", source.default("attn_implementation"))


def _spread(source: Source, draft: Draft) -> None:
    put_degree(source, draft, "tensor_parallel_size", "tp")
    put_degree(source, draft, "context_parallel_size", "cp")
    put_degree(source, draft, "sequence_parallel_degree", "cp")
    listed = read_fsdp_words(source, draft)
    configured = listed or source.has("fsdp_config")
    draft.mesh = mesh = _mesh(source, configured=configured)
    if mesh is not None and mesh.replicas and (mesh.shards or not configured):  # the whole job, which axolotl checks
        inner = int(draft.options.get("tp", 1)) * int(draft.options.get("cp", 1))
        draft.put("num_gpus", inner * mesh.replicas * (mesh.shards or 1), mesh.field)
    version = source.get("fsdp_version")
    version = 1 if version is None else version
    if configured:
        read_fsdp_config(source, draft, "fsdp_config", sharded=True, version_if_silent=version, knows_strategy=False)
        if draft.options["method"] == "qlora" and not source.on("fsdp_config.cpu_ram_efficient_loading"):
            draft.put("loads_on_gpu", True, "fsdp_config.cpu_ram_efficient_loading")
    elif mesh is not None:
        put_sharding(source, draft, "ddp", "dp_replicate_size")


def _mesh(source: Source, *, configured: bool) -> Mesh | None:
    """Shards and replicas where the file gives either; a size of one says nothing. Source: axolotl 0.19
    ``utils/distributed.py`` (``_get_parallel_config_kwargs``), which refuses shards without FSDP's section."""
    sizes = {name: source.count(name) or 1 for name in ("dp_replicate_size", "dp_shard_size")}
    replicas, shards = (size if size > 1 else None for size in sizes.values())
    if shards and not configured:
        raise InputError(
            f"{source.name}: dp_shard_size is {shards}, which axolotl refuses without fsdp_config; add fsdp_config, or "
            "take dp_shard_size out."
        )
    field = " x ".join(name for name, size in sizes.items() if size > 1)
    return Mesh(shards=shards, replicas=replicas, field=field) if field else None


def _plugins(source: Source) -> str:
    """The plugins of the file in one text; axolotl's own that are not built are refused by name."""
    names, known = source.words("plugins") or (), load_frameworks()["axolotl"]["plugins"]
    for name in names:
        part = name.lower().removeprefix("axolotl.integrations.").split(".")[0]
        if name.lower().startswith("axolotl.integrations.") and part not in known:
            refuse(source, "plugins", name, f"axolotl's {part}", f"built are {', '.join(known)}; take it out")
    return " ".join(names).lower()


def _kernels(source: Source, draft: Draft) -> None:
    """Stack and loss path: plugins and fused LoRA kernels replace the plain ones. Liger's kernels and axolotl's own run
    beside each other: ``check_auto_enable_lora_kernels`` and ``_apply_lora_kernel_patch`` of 0.19 do not ask for Liger.
    """
    plugins = _plugins(source)
    draft.put("loss_type", source.default("loss_type"))
    if source.on("liger_fused_linear_cross_entropy"):
        draft.put("loss_type", "liger", "liger_fused_linear_cross_entropy")
    if source.on("cut_cross_entropy") or ("cut_cross_entropy" in plugins and source.flag("cut_cross_entropy") is None):
        draft.put("loss_type", "cut_cross_entropy", "plugins" if plugins else "cut_cross_entropy")
    liger = [field for field in _LIGER if source.on(field)]
    unsloth = [field for field in _UNSLOTH if source.on(field)]
    if unsloth or "unsloth" in plugins:
        draft.put("stack", "unsloth", unsloth[0] if unsloth else "plugins")
        return
    fused = draft.options["method"] != "full" and fused_lora(source, draft)
    if liger:
        parts = dict.fromkeys(_FUSED[field] for field in liger if field in _FUSED)
        draft.put("fused_kernels", ",".join((*parts, *(["lora"] if fused else []))) or "none", liger[0])
    if not fused:
        draft.put("stack", "liger" if liger else "hf-peft", liger[0] if liger else None)


def fused_lora(source: Source, draft: Draft) -> bool:
    """Whether axolotl's fused LoRA kernels run, because they are asked for or by themselves; sets the stack.

    By themselves when no kernel field is given, but with remote code, under FSDP1, or (older versions) unless
    ``lora_dropout`` is 0, or an 8-bit base; ``rl`` is refused before (``check_auto_enable_lora_kernels``).
    """
    asked = [field for field in KERNELS if source.on(field)]
    if asked:
        draft.put("stack", "axolotl", asked[0])
        return True
    if any(source.has(field) for field in KERNELS) or source.on("trust_remote_code"):
        return False
    if source.on("load_in_8bit") or not source.default("lora_kernels_by_themselves"):
        return False
    if not source.default("lora_kernels_with_dropout") and source.number("lora_dropout") != 0:
        return False
    if draft.options.get("sharding") in ("fsdp", "hsdp") and str(source.get("fsdp_version")) != "2":
        return False
    draft.put("stack", "axolotl")
    draft.note(
        f"{LORA_KERNELS} by itself; set lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel and "
        "lora_embedding_kernel to false to train with the plain ones."
    )
    return True


def _data(source: Source, draft: Draft) -> None:
    """What axolotl does with samples that are longer than a row (``utils/data/utils.py``), and what is no text."""
    put_held_out(source, draft, "val_set_size")
    excess = str(source.get("excess_length_strategy") or "drop").lower()
    if _is_completion(source):
        draft.put(LONG_SAMPLES, SPLIT, "datasets")
    elif excess != "truncate":
        draft.put(LONG_SAMPLES, DROPPED, "excess_length_strategy" if source.has("excess_length_strategy") else None)
    if source.has("processor_type"):
        draft.note(
            f"processor_type: {source.get('processor_type')} prepares images, but this forecast is of text alone: "
            "neither their tokens nor the part of the model that sees them are counted."
        )


def _is_completion(source: Source) -> bool:
    """Whether every data set is of the type that makes pieces of long samples (``prompt_strategies/completion.py``)."""
    sets = source.peek("datasets")
    kinds = {str(each.get("type")) for each in sets if isinstance(each, dict)} if isinstance(sets, list) else set()
    return kinds == {"completion"}


def _check_saves(source: Source) -> None:
    """Raise InputError for fields of checkpoints that axolotl refuses together (``check_saves`` of
    utils/schemas/validation.py)."""
    if not source.peek("save_steps"):
        return
    strategy = source.peek("save_strategy")
    beside = "saves_per_epoch" if source.peek("saves_per_epoch") else ""
    if strategy and str(strategy) != "steps":
        beside = f"save_strategy: {strategy}"
    if beside:
        raise InputError(f"{source.name}: axolotl refuses save_steps beside {beside}; leave one of them out.")


def _amount(source: Source, draft: Draft) -> None:
    """Epochs, steps, and the size of the data set that axolotl wrote into the file after a first run.

    In packed mode axolotl counts 0.99 x ``total_num_tokens`` / ``sample_packing_eff_est`` row tokens per epoch.
    """
    read_steps(source, draft, "num_epochs", "max_steps")
    _check_saves(source)
    read_saves(source, draft, kept=KEPT_CHECKPOINTS, steps_win=True)
    _compile(source, draft)
    total: Any = source.number("total_num_tokens")
    if total is None or "max_steps" in draft.options:
        return
    efficiency = source.number("sample_packing_eff_est") if source.on("sample_packing") else None
    draft.put("tokens", round(total / (efficiency or 1.0)), "total_num_tokens")
    if efficiency is None:
        draft.note(f"{TOKENS_UNPADDED}: the number of steps is a lower bound.")
