"""TRL: YAML of ``trl sft`` (``SFTConfig``, ``ModelConfig`` and ``TrainingArguments`` in one flat file).

Without ``use_peft`` the run is a full fine-tune whatever ``lora_r`` says; without ``dtype`` the base is held in
fp32; without ``loss_type`` the loss depends on TRL's version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.configs.common import (
    PACKED_NOTE,
    check_four_bit,
    check_one_half,
    copy_number,
    dtype_word,
    loaded_bits,
    note_grouped,
    note_packed,
    put_checkpoint_every,
    put_code_age,
    put_eight_bit,
    put_flat,
    put_mixed_precision,
    put_packed,
    put_unpacked,
    put_wrapped,
    put_written_targets,
    read_trainer_batch,
)
from tunecast.model.configs.frameworks import refuse
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source
from tunecast.model.configs.spread import TRAINERS_OFFLOAD, read_fsdp_config, read_fsdp_words
from tunecast.model.losses import CHUNKED_NOTE
from tunecast.model.peft_targets import LEFT_TO_PEFT
from tunecast.model.sharding import FSDP
from tunecast.model.stacks import attention_named

TILES = "chunked_nll"
"""What stands in for the tiles of logits that TRL makes since 1.15 (``add_fused_lm_head``)."""
_LORA_FIELDS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
_DTYPE_FIELDS = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
_ATTENTION_FIELDS = ("attn_implementation", "model_init_kwargs.attn_implementation")
LOSSES = ("nll", "dft", "chunked_nll")
"""What ``SFTTrainer`` takes; 1.15 and later read the last as the first. Others belong to other trainers."""
_PACKING = ("bfd", "bfd_split", "wrapped", "bfd-requeue")
_SPLITS = ("bfd_split", "wrapped", "bfd-requeue")
"""Those that lose nothing of a sample which is longer than a row (``pack_dataset`` of trl/data_utils.py)."""
_LIGER = ("use_liger_kernel", "use_liger")
"""transformers' field, and TRL's own of 2024 and early 2025 (``SFTConfig`` of 0.12 to 0.16)."""
_LIGER_PARTS = {"rms_norm": "rms_norm", "rope": "rope", "swiglu": "swiglu", "geglu": "swiglu"}
"""Kernels that Liger swaps in unless told otherwise, and ours."""
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")


def read(source: Source, draft: Draft, *, num_gpus: int | None) -> None:
    """Fill the draft from a TRL file."""
    del num_gpus
    draft.model_name = str(source.get("model_name_or_path"))
    _method(source, draft)
    _precision(source, draft)
    attention, field = source.first(_ATTENTION_FIELDS)
    draft.put("attn_implementation", attention_named(attention) or source.default("attn_implementation"), field)
    _rows(source, draft)
    read_trainer_batch(source, draft)
    _checkpointing(source, draft)
    _loss(source, draft)
    put_code_age(source, draft)
    note_grouped(source, draft)
    read_fsdp_config(source, draft, "fsdp_config", sharded=read_fsdp_words(source, draft), offload_key=TRAINERS_OFFLOAD)


def _method(source: Source, draft: Draft) -> None:
    bits = loaded_bits(source)
    if not source.on("use_peft"):
        draft.put("method", "full", "use_peft" if source.has("use_peft") else None)
        unused = [field for field in _LORA_FIELDS if source.has(field)]
        if unused:
            draft.note(
                f"use_peft is not on, so this is a full fine-tune and {', '.join(unused)} do nothing; add "
                "use_peft: true for adapters."
            )
        if bits is not None:
            raise InputError(f"{source.name}: {bits} is true without use_peft: true; add it.")
        return
    draft.put("method", "lora" if bits is None else "qlora", bits or "use_peft")
    copy_number(source, draft, "lora_r", "lora_r")
    copy_number(source, draft, "lora_dropout", "lora_dropout", whole=False)
    targets = source.words("lora_target_modules")
    if targets:
        put_written_targets(source, draft, targets, "lora_target_modules", alone=True)
    else:
        draft.put("lora_target_modules", LEFT_TO_PEFT)
    if bits == "load_in_4bit":
        _four_bit(source, draft)
    if bits == "load_in_8bit":
        put_eight_bit(draft, bits)
    if bits is not None:
        draft.put("adapter_dtype", source.default("adapters_of_quantized"))
        if source.has("lora_modules_to_save"):
            draft.put("modules_to_save_dtype", "bf16")


def _four_bit(source: Source, draft: Draft) -> None:
    kind = source.get("bnb_4bit_quant_type")
    check_four_bit(
        source, draft, str(kind or source.default("bnb_4bit_quant_type")), "bnb_4bit_quant_type" if kind else None
    )
    stated = "use_bnb_nested_quant" if source.has("use_bnb_nested_quant") else None
    draft.put("double_quant", source.on("use_bnb_nested_quant"), stated)
    draft.in_bytes = str(source.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.") == "uint8"


def _precision(source: Source, draft: Draft) -> None:
    """Weights as ``dtype`` says, float32 when it says nothing; bf16 autocast unless ``fp16``."""
    value, field = source.first(_DTYPE_FIELDS)
    quantized = source.on("use_peft") and loaded_bits(source) is not None
    asked = source.default("dtype_of_quantized" if quantized else "dtype") if value is None else value
    dtype = dtype_word(source, field or "dtype", asked)
    draft.put("dtype", dtype, field)
    if str(asked) == "auto":
        draft.note("dtype auto is the checkpoint's own: taken as bf16.")
    if value is None and dtype == "fp32":
        draft.note_wide_weights(
            "TRL loads the base in float32 because the file has no dtype: 4 bytes per unquantized parameter; add "
            "dtype: bfloat16 to halve that."
        )
    check_one_half(source)
    fp16 = source.on("fp16")
    bf16 = source.flag("bf16")
    stated, by_default = None if bf16 is None else "bf16", bool(source.default("bf16")) and not fp16
    put_mixed_precision(draft, dtype, stated, "fp16" if fp16 else None, is_bf16=by_default if bf16 is None else bf16)


def _rows(source: Source, draft: Draft) -> None:
    _, field = source.first(("max_length", "max_seq_length"))
    length = source.count(field) if field else source.default("max_length")
    draft.put("max_length", length, field)
    if field is None and source.nulls("max_length"):
        draft.note(
            f"max_length: null cuts no sample, so that rows are as long as samples are: {length} tokens are counted "
            "here; --max-length N says how long the longest is."
        )
    if source.on("packing"):
        strategy = source.get("packing_strategy")
        if strategy not in (None, *_PACKING, source.default("packing_strategy")):
            raise InputError(
                f"{source.name}: packing_strategy is {strategy!r}, but it is one of {', '.join(_PACKING)}"
                f"{'; a file of TRL before 0.19: --stack-version 0.18' if strategy == 'ffd' else ''}."
            )
        if strategy == "wrapped":
            put_packed(draft, "packing")
            draft.note(PACKED_NOTE)
        else:
            note_packed(draft, "packing")
        if strategy in _SPLITS:
            put_wrapped(draft, "packing_strategy")
    elif source.on("padding_free"):
        put_flat(source, draft, "packing", "padding_free", "max_length")
    else:
        put_unpacked(source, draft, "packing", "max_length")
        if source.has("pad_to_multiple_of"):
            copy_number(source, draft, "pad_to_multiple_of", "pad_to_multiple_of")


def _checkpointing(source: Source, draft: Draft) -> None:
    value, field = source.first(_CHECKPOINTING)
    on = bool(source.default("gradient_checkpointing")) if value is None else source.on(str(field))
    draft.put("gradient_checkpointing", on, field)
    kwargs = [f"{name}_kwargs.use_reentrant" for name in _CHECKPOINTING]
    _, field = source.first(kwargs)
    if on:
        draft.put("reentrant", source.on(str(field)) if field else source.default("use_reentrant"), field)
        put_checkpoint_every(source, draft, [f"{name}_kwargs" for name in _CHECKPOINTING])


def _loss(source: Source, draft: Draft) -> None:
    """The loss path: TRL's own tiles, or before 1.15 as stated; Liger's kernels turned the default back to ``nll``."""
    stated = source.get("loss_type")
    if stated is not None and stated not in LOSSES:
        refuse(
            source,
            "loss_type",
            stated,
            "the loss of another trainer than SFTTrainer",
            f"supervised fine-tuning has {', '.join(LOSSES)}",
        )
    _, field = source.first(_LIGER)
    liger = field is not None and source.on(field)
    draft.put("stack", "liger" if liger else "hf-peft", field if liger else None)
    if liger:
        _liger_kernels(source, draft)
    if source.default("head_is_tiled") and stated != "dft":
        draft.put("loss_type", TILES, "loss_type" if stated else None)
        draft.note("TRL since 1.15 makes tiles of the logits whatever loss_type says: chunked_nll stands in for them.")
    elif liger and stated in (None, "nll"):
        draft.put("loss_type", "liger", "use_liger_kernel")
    elif liger and stated == "chunked_nll":
        raise InputError(f"{source.name}: loss_type chunked_nll does not go with use_liger_kernel; keep one of them.")
    elif stated is None:
        draft.put("loss_type", source.default("loss_type"))
    else:
        draft.put("loss_type", str(stated), "loss_type")
    if draft.options["loss_type"] == TILES and not source.default("head_is_tiled"):
        draft.note(CHUNKED_NOTE)
    if draft.options["loss_type"] == "nll":
        draft.put("token_metrics", source.default("token_metrics"))


def _liger_kernels(source: Source, draft: Draft) -> None:
    """The kernels that ``liger_kernel_config`` leaves on (transformers ``integrations/liger.py`` hands them on as
    arguments of ``apply_liger_kernel_to_...``); cross-entropy is TRL's or Liger's fused one, as without it."""
    given = source.get("liger_kernel_config")
    if not isinstance(given, Mapping):
        return
    usual = {"fused_linear_cross_entropy": True, "cross_entropy": False}
    other = [name for name, on in usual.items() if given.get(name, on) is not on]
    if other and not source.default("head_is_tiled"):
        refuse(source, f"liger_kernel_config.{other[0]}", given[other[0]], "another cross-entropy", "type --loss-type")
    kernels = liger_kernels(given)
    if kernels is not None:
        draft.put("fused_kernels", kernels, "liger_kernel_config")


def liger_kernels(given: Mapping[str, Any]) -> str | None:
    """What ``--fused-kernels`` calls the kernels that ``liger_kernel_config`` leaves on; None where that is all."""
    off = {_LIGER_PARTS[name] for name, on in given.items() if name in _LIGER_PARTS and not on}
    kept = [name for name in dict.fromkeys(_LIGER_PARTS.values()) if name not in off]
    return (",".join(kept) or "none") if off else None


def settle(draft: Draft) -> None:
    """FSDP shards numbers alone, and TRL stores 4-bit weights in bytes unless told otherwise (``ModelConfig``;
    accelerate leaves these out, ``fsdp2_prepare_model``). PEFT under ZeRO-3: TRL forces reentrant checkpointing."""
    if draft.in_bytes and draft.options.get("sharding") in FSDP:
        raise InputError(
            "The file shards a 4-bit base by FSDP, but has no bnb_4bit_quant_storage, so that TRL stores it in bytes, "
            "which FSDP does not shard; add bnb_4bit_quant_storage: bfloat16."
        )
    adapters = draft.options.get("method") != "full"
    if adapters and draft.options.get("sharding") == "zero3" and draft.options.get("gradient_checkpointing"):
        draft.put("reentrant", True)
        draft.note("TRL uses reentrant checkpointing for adapters under ZeRO-3.")
