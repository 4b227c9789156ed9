"""LLaMA-Factory YAML. Read from ``hparams`` and ``model/adapter.py`` of 2025 and 2026.

Trained parameters are raised to fp32 unless ``pure_bf16``, full fine-tuning included; checkpointing is on and
reentrant. Packed rows have ``cutoff_len`` tokens: ``packing`` takes one off it (``hparams/data_args.py``), and rows are
filled to one more (``data/processor/supervised.py``).
"""

from __future__ import annotations

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.configs.common import (
    check_four_bit,
    check_one_half,
    copy_number,
    note_grouped,
    note_packed,
    put_code_age,
    put_degree,
    put_eight_bit,
    put_held_out,
    put_mixed_precision,
    put_packed,
    put_targets,
    put_unpacked,
    put_workers,
    put_wrapped,
    read_trainer_batch,
)
from tunecast.model.configs.frameworks import refuse
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source
from tunecast.model.configs.spread import TRAINERS_OFFLOAD, read_fsdp_config, read_fsdp_words
from tunecast.model.kept_samples import HELD_ROWS, MOST_SAMPLES
from tunecast.model.peft_targets import LINEAR_MODULES, MODULES_ALONE
from tunecast.model.sharding import FSDP

_ATTENTION = {
    "auto": "sdpa",
    "disabled": "eager",
    "sdpa": "sdpa",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}
_STAGES = ("sft", "pt")


def read(source: Source, draft: Draft, *, num_gpus: int | None) -> None:
    """Fill the draft from a LLaMA-Factory file."""
    del num_gpus
    draft.model_name = str(source.get("model_name_or_path"))
    _check_trains(source, draft)
    stage = str(source.get("stage") or source.default("stage"))
    if stage not in _STAGES:
        refuse(source, "stage", stage, "another stage than supervised or continued pre-training", "use sft or pt")
    _method(source, draft)
    _precision(source, draft)
    _attention(source, draft)
    _rows(source, draft, stage)
    read_trainer_batch(source, draft)
    _checkpointing(source, draft)
    _kernels(source, draft)
    put_degree(source, draft, "sequence_parallel_size", "cp")
    read_fsdp_config(
        source,
        draft,
        "fsdp_config",
        sharded=read_fsdp_words(source, draft),
        version_if_silent=1,  # its transformers is at most 5.6 (pyproject.toml of 0.9.5), whose Trainer takes that
        offload_key=TRAINERS_OFFLOAD,
    )
    if source.has("rope_scaling"):
        draft.put("allow_long_context", True, "rope_scaling")
    _data(source, draft)
    note_grouped(source, draft)
    put_workers(source, draft, started=source.has("ray_num_workers"))


def _check_trains(source: Source, draft: Draft) -> None:
    """``do_train`` is off by default; a file that predicts or evaluates alone trains nothing (``run_sft``), and one
    that names none of them is told of it."""
    for field in ("do_predict", "do_eval"):
        if source.on(field) and not source.on("do_train"):
            refuse(source, field, True, "a run without training", "add do_train: true to forecast training")
    if not source.on("do_train"):
        draft.note("LLaMA-Factory trains nothing without do_train: true; the training is forecast as if it were there.")


def _method(source: Source, draft: Draft) -> None:
    kind = str(source.get("finetuning_type") or source.default("finetuning_type"))
    stated = "finetuning_type" if source.has("finetuning_type") else None
    if kind not in ("lora", "full"):
        refuse(source, "finetuning_type", kind, "another method", "use lora or full")
    bits = _bits(source)
    if bits and kind == "full":
        raise InputError(f"{source.name}: quantization_bit is {bits}, but finetuning_type is full; use lora.")
    draft.put("method", "qlora" if bits else kind, "quantization_bit" if bits else stated)
    if kind == "lora":
        _adapters(source, draft)
    if bits == 4:
        _four_bit(source, draft)
    if bits == 8:
        put_eight_bit(draft, "quantization_bit")


def _bits(source: Source) -> int | None:
    bits = source.whole("quantization_bit")
    if bits not in (None, 4, 8):
        refuse(source, "quantization_bit", bits, f"a {bits}-bit base", "use 4 or 8")
    method = source.get("quantization_method")
    if bits and method is not None and str(method).lower() not in ("bnb", "bitsandbytes"):
        refuse(source, "quantization_method", method, "another quantization than bitsandbytes", "use bnb")
    return bits


def _adapters(source: Source, draft: Draft) -> None:
    copy_number(source, draft, "lora_rank", "lora_r")
    copy_number(source, draft, "lora_dropout", "lora_dropout", whole=False)
    targets = source.words("lora_target")
    named = targets or (str(source.default("lora_target")),)
    put_targets(source, draft, named, "lora_target" if targets else None, every=LINEAR_MODULES)
    if draft.options["lora_target_modules"] != LINEAR_MODULES:  # its PEFT is older than 0.19 (``requirements.txt``)
        draft.options["lora_target_modules"] = (*draft.options["lora_target_modules"], MODULES_ALONE)
    if source.has("adapter_name_or_path") and not source.on("create_new_adapter"):
        draft.note("adapter_name_or_path continues a saved adapter: its own rank and targets win over this file's.")
    rank = draft.options["lora_r"]
    if not source.has("lora_alpha"):
        draft.note(f"lora_alpha is not in the file: LLaMA-Factory takes twice the rank, {2 * rank}; it costs nothing.")


def _four_bit(source: Source, draft: Draft) -> None:
    kind = source.get("quantization_type")
    check_four_bit(
        source, draft, str(kind or source.default("quantization_type")), None if kind is None else "quantization_type"
    )
    stated = "double_quantization" if source.has("double_quantization") else None
    draft.put("double_quant", source.on("double_quantization"), stated)


def _precision(source: Source, draft: Draft) -> None:
    full = draft.options["method"] == "full"
    if source.has("additional_target"):
        draft.put("modules_to_save_dtype", "bf16" if source.on("pure_bf16") else "fp32")
    if source.on("pure_bf16"):
        draft.put("dtype", "bf16", "pure_bf16")
        draft.put("precision", "bf16", "pure_bf16")
        if not full:
            draft.put("adapter_dtype", "bf16", "pure_bf16")
        return
    check_one_half(source)
    fp16, bf16 = source.on("fp16"), source.on("bf16")
    loaded = "fp16" if fp16 else "bf16"
    draft.put("dtype", "fp32" if full else loaded, None if full or not (fp16 or bf16) else loaded)
    put_mixed_precision(
        draft,
        str(draft.options["dtype"]),
        "bf16" if source.has("bf16") else None,
        "fp16" if fp16 else None,
        is_bf16=bf16,
    )
    if full:
        draft.note_wide_weights(
            "LLaMA-Factory trains fp32 weights unless pure_bf16 is true: 4 bytes per weight and per gradient."
        )


def _rows(source: Source, draft: Draft, stage: str) -> None:
    copy_number(source, draft, "cutoff_len", "max_length")
    asked = source.flag("packing")
    neat = source.on("neat_packing")
    packed = neat or (stage == "pt" if asked is None else asked)
    if packed and stage == "pt":  # ``PretrainDatasetProcessor`` joins texts and cuts the whole into rows
        put_wrapped(draft, "stage" if source.has("stage") else None)
    if neat:
        note_packed(draft, "neat_packing")
    elif packed:
        put_packed(draft, "packing" if asked else None)
    else:
        put_unpacked(source, draft, "packing", "cutoff_len")
        draft.put("pad_to_multiple_of", source.default("pad_to_multiple_of"))


def _checkpointing(source: Source, draft: Draft) -> None:
    stated = "disable_gradient_checkpointing" if source.has("disable_gradient_checkpointing") else None
    on = not source.on("disable_gradient_checkpointing")
    draft.put("gradient_checkpointing", on, stated)
    draft.checkpoints_off = "disable_gradient_checkpointing: true"
    if on:
        stated = "use_reentrant_gc" if source.has("use_reentrant_gc") else None
        draft.put("reentrant", source.on("use_reentrant_gc"), stated)


def _attention(source: Source, draft: Draft) -> None:
    named = source.get("flash_attn")
    word = str(source.default("flash_attn") if named is None else named).lower()
    if word not in _ATTENTION:
        raise NotSupportedError(f"{source.name}: flash_attn is {named!r}; known are {', '.join(_ATTENTION)}.")
    draft.put("attn_implementation", _ATTENTION[word], None if named is None else "flash_attn")


def _kernels(source: Source, draft: Draft) -> None:
    """Unsloth gives models a forward with a loss of its own (``_CausalLM_fast_forward`` of its models/llama.py), which
    every trainer calls: the stack says which."""
    put_code_age(source, draft)
    if source.on("use_unsloth"):
        draft.put("stack", "unsloth", "use_unsloth")
        return
    draft.put("loss_type", source.default("loss_type"))
    if source.on("enable_liger_kernel"):
        draft.put("stack", "liger", "enable_liger_kernel")
        draft.put("loss_type", "liger", "enable_liger_kernel")
    else:
        draft.put("stack", "hf-peft")


def _data(source: Source, draft: Draft) -> None:
    """``max_samples`` caps each data set (``_load_single_dataset``); how many samples there are, the file does not
    say. ``val_size`` is taken off what is tokenized, which are packed rows where rows are packed (``get_dataset``)."""
    put_held_out(source, draft, "val_size")
    if (source.number("val_size") or 0) > 1:
        draft.put(HELD_ROWS, True, "val_size")
    cap = source.count("max_samples")
    names = source.words("dataset") or ()
    if cap is not None:
        draft.most_samples = cap * max(len(names), 1)
    if cap is not None and len(names) <= 1:
        draft.put(MOST_SAMPLES, cap, "max_samples")
        draft.note(
            f"max_samples: of --dataset FILE the first {cap:,} samples are counted, if it has more; --num-samples says "
            "how many there are."
        )
    elif cap is not None:
        draft.note(
            f"max_samples keeps at most {cap:,} samples of each of {len(names)} data sets: {cap * len(names):,} at "
            "most; how many there are is what --num-samples says."
        )


def settle(draft: Draft) -> None:
    """Under FSDP 2, which accelerate's launcher tells it, checkpoints are not reentrant whatever the file says
    (``prepare_model_for_training`` of ``model_utils/checkpointing.py``)."""
    if draft.options.get("sharding") in FSDP and not draft.their_fields.get("sharding", "").startswith("accelerate: "):
        draft.put("loads_on_gpu", True, draft.their_fields.get("sharding"))
    launched = draft.their_fields.get("fsdp_version", "").startswith("accelerate: ")
    under_fsdp2 = launched and draft.options.get("sharding") in FSDP and draft.options.get("fsdp_version") == 2
    if under_fsdp2 and draft.options.get("reentrant"):
        draft.put("reentrant", False)
        draft.note("LLaMA-Factory turns use_reentrant_gc off under FSDP 2.")
