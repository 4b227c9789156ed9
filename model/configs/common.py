"""Readings that several formats share: precision, adapters' targets, Trainer fields, spreading over GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.configs.frameworks import refuse
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source
from tunecast.model.families import FAMILIES
from tunecast.model.kept_samples import HELD_OUT, LONG_SAMPLES, WRAPPED
from tunecast.model.read_numbers import as_number
from tunecast.model.rows import ROWS_FLAT, ROWS_GROUPED, ROWS_PACKED
from tunecast.model.stacks import DTYPE_ALIASES, HF_CODES
from tunecast.model.target_patterns import is_pattern

ROOT_NAMES = {name for family in FAMILIES.values() for name in (family.embedding_module, family.head_module)}
"""What families call their table of tokens and their head."""

PACKED_NOTE = (
    "Packed rows are counted as one document each; attention kernels that keep documents apart do less work than that."
)
UNPACKED = "Rows are not packed"
"""How the notes begin that hold as long as nothing else says how rows are made."""
TOKENS_UNPADDED = "total_num_tokens counts tokens without padding"
"""How the note on axolotl's count begins, which holds until samples have a length."""

ONE_PIECE = "counted as one piece"
"""Words of the note on torchtune's chunked losses, which a typed loss replaces."""
LORA_KERNELS = "axolotl switches its fused LoRA kernels on"
"""How the note on them begins, which typed kernels replace."""

PRESENT_CODE = HF_CODES[0]


def note_packed(draft: Draft, field: str) -> None:
    """What to know about packed rows whose documents the trainer keeps apart where its attention can: the varlen
    kernels of FlashAttention. What the command line makes of attention decides (`documents.documents_of`)."""
    put_packed(draft, field)
    draft.put("padding_free", True, field)
    draft.note(
        f"{field} keeps the documents of packed rows apart where attention is FlashAttention: it is then counted "
        "inside them if --mean-tokens N or --dataset FILE says how long they are; else a row counts as one document, "
        "an upper bound that the interval does not widen for."
    )


def put_packed(draft: Draft, field: str | None) -> None:
    """Rows are packed, because `field` says so, or by default."""
    draft.put(ROWS_PACKED, True, field)


def put_wrapped(draft: Draft, field: str | None) -> None:
    """What does not fit into a packed row goes on in the next, because `field` says so, or by default."""
    draft.put(LONG_SAMPLES, WRAPPED, field)


def put_held_out(source: Source, draft: Draft, field: str) -> None:
    """Samples that `field` keeps for evaluation, a share or a number: they are not trained on."""
    asked = source.number(field)
    if asked is not None and asked < 0:
        raise InputError(f"{source.name}: {field} is {asked:g}, but it is a share or a number of samples; write 0.05.")
    if not asked:
        return
    draft.put(HELD_OUT, float(asked), field)
    draft.note(
        f"{field} keeps samples for evaluation: of --dataset FILE they are not trained on; evaluating is counted only "
        "where --eval-samples N with --eval-steps N says it."
    )


def put_unpacked(source: Source, draft: Draft, field: str | None, length_field: str) -> None:
    """Rows of one sample each, by `field` or where it is not there by default, and what to know of them."""
    draft.put(ROWS_PACKED, False, field if field is not None and source.has(field) else None)
    draft.note(
        f"{UNPACKED}: every one is counted as {length_field} tokens long, an upper bound, since batches are padded to "
        "their longest row only; --mean-tokens N or --dataset FILE counts the padding there is. With --tokens and "
        "neither, steps count no padding, a lower bound that the interval of the whole run allows for."
    )


def put_flat(source: Source, draft: Draft, packing: str, field: str, length_field: str) -> None:
    """Rows of one sample each that `field` lays end to end without padding; `packing` says that they are not packed."""
    draft.put(ROWS_PACKED, False, packing if source.has(packing) else None)
    draft.put("padding_mask", False, field)
    draft.put(ROWS_FLAT, True, field)
    draft.note(
        f"{field} lays the samples of a micro-batch end to end without padding, which --mean-tokens N or --dataset "
        f"FILE forecasts where attention is FlashAttention; else a sample is counted as {length_field} tokens long, or "
        "as long as the longest of its micro-batch, an upper bound."
    )


def put_filled(source: Source, draft: Draft, packing: str, field: str, length_field: str) -> None:
    """Rows of one sample each that `field` fills to the next multiple of the framework's at their longest; `packing`
    says that they are not packed."""
    draft.put(ROWS_PACKED, False, packing if source.has(packing) else None)
    draft.put("rows_padded", source.default("pad_to_multiple_of"), field)
    draft.note(
        f"{UNPACKED}: {field} fills every one to {length_field} tokens. With --tokens and neither --mean-tokens N nor "
        "--dataset FILE, steps count no padding, a lower bound that the interval of the whole run allows for."
    )


def note_grouped(source: Source, draft: Draft) -> None:
    """Samples of like length in one micro-batch (``LengthGroupedSampler`` of transformers ``trainer_pt_utils.py``)."""
    if draft.options.get(ROWS_PACKED) is not False:
        return
    strategy = str(source.get("train_sampling_strategy"))
    if source.on("group_by_length") or strategy == "group_by_length":
        draft.put(ROWS_GROUPED, True, "group_by_length" if source.on("group_by_length") else "train_sampling_strategy")
    elif strategy == "batch_rebalance":
        draft.note(
            "train_sampling_strategy: batch_rebalance deals samples so that the GPUs wait less for each other than is "
            "counted, which is as for random ones: an upper bound."
        )


def note_dropped(source: Source, draft: Draft) -> None:
    """The last micro-batch of an epoch, which may be left out where it is not full."""
    if source.on("dataloader_drop_last"):
        draft.note(
            "dataloader_drop_last leaves the last micro-batch of an epoch out where it is not full; it is counted, so "
            "that an epoch may have one step less than is forecast."
        )


def put_workers(source: Source, draft: Draft, *, started: bool) -> None:
    """Ray's workers, each of which has a GPU, where Ray starts the run."""
    if started:
        draft.put("num_gpus", source.count("ray_num_workers") or 1, "ray_num_workers")


def copy_number(source: Source, draft: Draft, theirs: str, ours: str, *, whole: bool = True) -> None:
    """Carry a number over: the file's, else the framework's default. Whole ones are counts of at least 1."""
    value = source.count(theirs) if whole else source.number(theirs)
    if value is None:
        draft.put(ours, source.default(theirs))
    else:
        draft.put(ours, value, theirs)


def copy_word(source: Source, draft: Draft, theirs: str, ours: str) -> None:
    """Carry a word over: the file's, else the framework's default."""
    value = source.get(theirs)
    if value is None:
        draft.put(ours, source.default(theirs))
    else:
        draft.put(ours, str(value), theirs)


def dtype_word(source: Source, field: str, value: Any) -> str:
    """A dtype in our words; ``auto`` is the checkpoint's own, bf16 for the models in the catalog."""
    word = str(value).strip().removeprefix("torch.")
    word = DTYPE_ALIASES.get(word, word)
    if word == "auto":
        return "bf16"
    if word not in ("bf16", "fp16", "fp32"):
        raise InputError(f"{source.name}: {field} is {value!r}, but a dtype is bfloat16, float16, float32 or auto.")
    return word


def put_mixed_precision(draft: Draft, dtype: str, bf16: str | None, fp16: str | None, *, is_bf16: bool) -> None:
    """The arithmetic of a Trainer run: autocast where ``bf16`` or ``fp16`` is on, else the weights' own dtype.

    `bf16` and `fp16` are the fields that state it, None where they do not.
    """
    if fp16 is not None:
        draft.put("precision", "fp16-autocast", fp16)
    elif is_bf16:
        draft.put("precision", "bf16-autocast", bf16)
    else:
        draft.put("precision", dtype, bf16)


def check_one_half(source: Source) -> None:
    """Refuse both kinds of mixed precision, as ``TrainingArguments`` does."""
    if source.on("fp16") and str(source.get("bf16")).strip().lower() == "true":
        raise InputError(f"{source.name}: bf16 and fp16 exclude each other; keep one of them.")


def check_four_bit(source: Source, draft: Draft, kind: str, theirs: str | None) -> None:
    """Set the 4-bit type; bitsandbytes has two."""
    if kind not in ("nf4", "fp4"):
        raise InputError(f"{source.name}: {theirs} is {kind!r}, but a 4-bit base is nf4 or fp4.")
    draft.put("bnb_4bit_quant_type", kind, theirs)


def loaded_bits(source: Source) -> str | None:
    """``load_in_4bit`` or ``load_in_8bit``, whichever is on; both are a contradiction."""
    on = [field for field in ("load_in_4bit", "load_in_8bit") if source.on(field)]
    if len(on) > 1:
        raise InputError(f"{source.name}: {' and '.join(on)} exclude each other; keep one of them.")
    return on[0] if on else None


def put_code_age(source: Source, draft: Draft) -> None:
    """The age of transformers that an older version of the framework runs on."""
    age = source.default("hf_code")
    if age != PRESENT_CODE:
        draft.put("hf_code", age)


def put_checkpoint_every(source: Source, draft: Draft, sections: Iterable[str]) -> None:
    """``every_n_layers`` of the Trainer's keywords for checkpoints (transformers 5.23, ``modeling_utils.py``)."""
    _, field = source.first([f"{section}.every_n_layers" for section in sections])
    every = None if field is None else source.count(field)
    draft.put("checkpoint_every", every if every is None or every > 1 else None, field)


def put_eight_bit(draft: Draft, theirs: str) -> None:
    """bitsandbytes' LLM.int8 base; its 4-bit options say nothing."""
    draft.put("quant_method", "bnb-8bit", theirs)


EVERYTHING = ("all-linear", "all")
"""Words for every linear map of the layers."""


def put_targets(
    source: Source, draft: Draft, names: Iterable[str], theirs: str | None, *, every: str = "all-linear"
) -> None:
    """Adapter targets; a word for every linear map of the layers may stand beside the embeddings or the head. `every`
    is our word for it: PEFT's, or that of a framework which names the modules itself."""
    names = tuple(names)
    if any(is_pattern(name) for name in names):
        raise InputError(
            f"{source.name}: {theirs} has a regular expression ({','.join(names)}) where its framework compares names "
            "as they are; name the modules, for example [q_proj, v_proj], or all linear maps."
        )
    if any(name in EVERYTHING for name in names):
        names = (every, *(name for name in names if name in ROOT_NAMES))
    draft.put("lora_target_modules", every if names == (every,) else names, theirs)


def put_written_targets(source: Source, draft: Draft, names: Iterable[str], field: str, *, alone: bool = False) -> None:
    """Adapter targets that PEFT gets as the file has them: names, or a text that it reads as a regular expression;
    `alone`: a list of one is handed on as a text."""
    value = source.get(field)
    text = value[0] if alone and isinstance(value, list) and len(value) == 1 else value
    if is_pattern(text):
        draft.put("lora_target_modules", text, field)
        return
    if isinstance(text, str) and text.lower() not in EVERYTHING:
        raise InputError(
            f"{source.name}: {field} is the text {text!r}, which PEFT reads as a regular expression of whole paths and "
            f"finds no module by; write a list of names, [{', '.join(dict.fromkeys((*names, 'v_proj')))}]."
        )
    put_targets(source, draft, names, field)


def read_steps(source: Source, draft: Draft, epochs: str, steps: str) -> None:
    """Epochs and steps; a step count of -1 means that epochs decide."""
    copy_number(source, draft, epochs, "num_train_epochs", whole=False)
    count = source.whole(steps)
    if count is not None and count > 0:
        draft.put("max_steps", count, steps)


def read_saves(source: Source, draft: Draft, *, kept: int | None = None, steps_win: bool = False) -> None:
    """Checkpoints that a ``transformers.TrainingArguments`` file asks for every so many steps, with the optimizer's
    state; `kept` of them stay unless the file says how many, and the strategy says nothing beside steps that win over
    it. A share of all steps, epochs, and weights alone are left among the fields that are not counted."""
    limit = _counted(source, "save_total_limit")
    if limit is None and source.peek("save_total_limit") is None:
        limit = kept
    if limit is not None:
        draft.saves["save_total_limit"] = limit
    by_steps = steps_win or source.peek("save_strategy") is None or source.word("save_strategy") == "steps"
    steps = _counted(source, "save_steps")
    if not by_steps or steps is None or source.word("save_only_model") in ("true", "yes", "on", "1"):
        return
    draft.saves["save_steps"] = steps
    for field in ("save_steps", "save_strategy", "save_total_limit", "save_only_model"):
        source.get(field)


def _counted(source: Source, field: str) -> int | None:
    """A whole number above 0 of a field that stays unread; None for anything else."""
    number = as_number(source.peek(field))
    return int(number) if number is not None and number >= 1.0 and float(number).is_integer() else None


COMPILERS = {"torch_compile_backend": "inductor", "torch_compile_mode": "default"}
"""Fields of how to compile, and what is built of each."""


def read_compile(source: Source, draft: Draft) -> None:
    """``torch.compile`` as ``transformers.TrainingArguments`` asks for it: a backend or a mode does too, whatever
    ``torch_compile`` says (``TrainingArguments.__post_init__``)."""
    how = [field for field in COMPILERS if source.has(field)]
    refuse_other_compilers(source, how)
    if source.flag("torch_compile") or how:
        draft.put("torch_compile", True, "torch_compile" if source.flag("torch_compile") else how[0])


def refuse_other_compilers(source: Source, fields: Iterable[str]) -> None:
    """Refuse by name how fields among `COMPILERS` would compile, where it is not built."""
    for field in fields:
        if source.get(field) != COMPILERS[field]:
            refuse(source, field, source.get(field), "another torch.compile", f"write {COMPILERS[field]}")


def read_trainer_batch(source: Source, draft: Draft) -> None:
    """Batch, accumulation, optimizer and amount of a ``transformers.TrainingArguments`` file."""
    copy_number(source, draft, "per_device_train_batch_size", "per_device_train_batch_size")
    copy_number(source, draft, "gradient_accumulation_steps", "gradient_accumulation_steps")
    copy_word(source, draft, "optim", "optim")
    note_dropped(source, draft)
    read_steps(source, draft, "num_train_epochs", "max_steps")
    read_saves(source, draft)
    read_compile(source, draft)


def put_degree(source: Source, draft: Draft, theirs: str, ours: str) -> None:
    """A parallel degree above 1 becomes the option that refuses it by name."""
    degree = source.whole(theirs)
    if degree is not None and degree > 1:
        draft.put(ours, degree, theirs)
