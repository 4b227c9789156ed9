"""The words of a table's cells as run options: whole cells that are known exactly, then cells piece by piece.

Precedence within a cell:

1. an entry for the whole text in ``data/vocabulary.json``: the words of the committed table;
2. a value of the command line's own option (``fsdp``, ``adamw_torch_fused``);
3. pieces, by the terms of ``data/vocabulary_terms.json`` (`cell_grammar`, `cell_layout`, `cell_targets`);
4. a cell that states nothing ("", "not stated", "library default"): the default of the row's software where its code
   has one (``stacks.json``) and tunecast did not choose it (``ours``), with a note; else the row is skipped.

Between cells: what the framework's code is known to do, then what the columns say, then the rules of
``data/vocabulary.json`` for the rows they name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NoReturn

from tunecast.calibrate.cell_grammar import Facts, facts_of, meaning
from tunecast.calibrate.cell_layout import WRITE, layout_of
from tunecast.calibrate.cell_targets import targets_of
from tunecast.calibrate.framework_names import PLAIN, TRANSFORMERS, Software, had_sdpa
from tunecast.calibrate.run_table import SkipRowError, own_value
from tunecast.model.peft_targets import LEFT_TO_PEFT
from tunecast.model.stack_versions import chosen_ranges, code_age, defaults_then
from tunecast.model.stacks import METHODS, load_stacks, ours, stack_defaults
from tunecast.model.units import SIXTEEN_BITS

MEGATRON_LAYOUT = r"tp(\d+)/pp(\d+)/cp(\d+)/dp(\d+)"
"""Tensor, pipeline, context and data parallel degrees; Megatron's distributed optimizer shards states over the last."""
FIELDS = {
    "grad_checkpointing": "gradient_checkpointing",
    "attention_impl": "attn_implementation",
    "optimizer": "optim",
    "lora_targets": "lora_target_modules",
    "rank": "lora_r",
}
"""Columns whose empty cell a stack's own default may stand for, and the field it has."""
ALONE = ("-", "\u2013", "\u2014", "n/a", "na", "none", "no", "1")
"""What tables write of the parallelism of one GPU."""
DASHES = "[-\u2013\u2014\u2212]+"
PADDED, GROUPED, FLAT, FLAT_GROUPED = (
    "padded samples of unknown length",
    "padded samples in the order of their lengths, of unknown length",
    "samples laid end to end without padding, of unknown length",
    "samples laid end to end in the order of their lengths, of unknown length",
)
"""Why the speed of samples that are not packed is not read: how rows are made of them, their length being unknown."""
UNPADDED = r"(?i)\b(not|never|un)[ -]?padded\b"
DENIED, OFF = r"(?<!\bnot )(?<!\bno )(?<!\bwithout )\b", r"\b(?! (false|no|off|0)\b)"
SORTED = f"{DENIED}((group(ed)?|bucket(ed|ing)?|sorted)( by length)?|grouping|length (grouped|sorted)){OFF}"
PACKS = f"^(yes|true)\\b|{DENIED}pack(ed|ing){OFF}"
"""Words for samples in the order of their lengths, and for packed ones, in a cell that says that they are padded."""
UNKNOWN_LENGTH = (
    "the tokens processed are not known; where every sample is as long as seq_len, "
    "write padded to max length, or samples fill seq_len; else their mean length into mean_tokens"
)
SHARDED = ("fsdp", "fsdp-grad-op", "hsdp")
BY_TRAINER = ("hf-peft", "trl", "liger")
"""Stacks that leave FSDP to transformers' Trainer: version 2 since transformers 5 (``training_args.py`` of 5.23), 1
before; accelerate by itself, and axolotl and LLaMA-Factory with it, take 1 (``FullyShardedDataParallelPlugin``)."""

Options = dict[str, Any]


@functools.cache
def vocabulary() -> dict[str, Any]:
    """The committed mapping from whole cells to run fields, and its rules."""
    text = resources.files("tunecast.calibrate").joinpath("data/vocabulary.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def lookup(column: str, text: str, gpus: int = 1) -> Options | None:
    """Options of a cell; None where it states nothing. Raises SkipRowError for what is unknown or refused."""
    known = vocabulary().get(column, {})
    text = "-" if re.fullmatch(DASHES, text) else text
    if text in known:
        found: Options = known[text]
        if "skip" in found:
            raise SkipRowError(f"{column} {text!r}: {found['skip']}")
        return dict(found)
    if not text:
        return None
    if column == "parallelism" and gpus == 1 and text.lower() in ALONE:
        return {"sharding": "none"}
    degrees = re.fullmatch(MEGATRON_LAYOUT, text) if column == "parallelism" else None
    if degrees is not None:
        tensor, pipeline, context, data = (int(number) for number in degrees.groups())
        return {"tp": tensor, "pp": pipeline, "cp": context, "sharding": "zero1" if data > 1 else "none"}
    own = own_value(column, text)
    if own is not None and column != "lora_targets":
        return own
    try:
        return in_pieces(column, text, gpus)
    except SkipRowError:
        if own is None:
            raise
        return own


def in_pieces(column: str, text: str, gpus: int = 1) -> Options | None:
    """Options of a cell by its pieces alone."""
    if column == "parallelism":
        return layout_of(text, gpus)
    if column == "lora_targets":
        return targets_of(text)
    try:
        facts = facts_of(column, re.sub(UNPADDED, "no padding", text) if column == "packed" else text)
    except SkipRowError as skip:
        if column == "packed" and PADDED in str(skip):
            _padded(text)
        raise
    if facts is None:
        return None
    if column == "packed":
        return _lengths(text, facts)
    if "lora_dropout" in facts:
        _dropout(text, facts)
    if column == "grad_checkpointing" and "gradient_checkpointing" not in facts:
        raise SkipRowError(f"{column} {text!r} does not say whether it checkpoints: write yes or no as well")
    if facts.pop("tf32", False) and "fp32" in (facts.get("number", "fp32"), facts.get("weights")) and not halved(facts):
        raise SkipRowError(f"{column} {text!r}: products of fp32 numbers in TF32 are not built")
    if facts.pop("some", False) and facts.setdefault("bits", "some") == 16:
        raise SkipRowError(f"{column} {text!r} contradicts itself: yes, and no bits fewer than 16")
    return meaning(column, text, facts)


def halved(facts: Mapping[str, Any]) -> bool:
    """Whether products run in 16 or 8 bits, so that a switch of fp32 ones changes next to nothing."""
    return facts.get("number") in SIXTEEN_BITS or facts.get("weights") in SIXTEEN_BITS or bool(facts.get("eight"))


def _dropout(text: str, facts: Facts) -> None:
    """A dropout is that of adapters; of a model trained whole there is none to forecast, and 0 is none."""
    facts["lora_dropout"] = float(facts["lora_dropout"])
    if facts.get("method") != "full":
        return
    if facts.pop("lora_dropout"):
        raise SkipRowError(f"method {text!r}: dropout in a model that is trained whole is not built")


def _lengths(text: str, facts: Mapping[str, Any]) -> Options:
    """That samples fill their length, and the length if the cell says so; padding up to it is processed too."""
    if not facts.get("packing") and not fills(facts):
        _unfilled(text, facts)
    if facts.get("packing") and facts.get("filled") is False:
        raise SkipRowError(f"packed {text!r} contradicts itself: packed samples fill their length")
    found: Options = {"filled": True, **{name: True for name in ("alone", "padded") if facts.get(name)}}
    if facts.get("tokens") or facts.get("made_up"):
        found.pop("padded", None)  # drawn to the length, whatever it is called
    stated = {value for value in facts.values() if isinstance(value, int) and not isinstance(value, bool)}
    if len(stated) > 1:
        raise SkipRowError(f"packed {text!r} contradicts itself: {' and '.join(map(str, sorted(stated)))}")
    return found | ({"filled_length": stated.pop()} if stated else {})


def _padded(text: str) -> None:
    """What else a cell of padded samples says, whatever its other words: that rows are packed, which contradicts it, or
    that samples are in the order of their lengths. Raises SkipRowError for both."""
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    if re.search(PACKS, words):
        raise SkipRowError(f"packed {text!r} contradicts itself: packed rows are not padded to the longest sample")
    if re.search(SORTED, words):
        raise SkipRowError(f"packed {text!r}: {GROUPED}: {UNKNOWN_LENGTH}")


def _unfilled(text: str, facts: Mapping[str, Any]) -> NoReturn:
    """Why samples that neither fill their length nor are packed have no speed: by what their rows are made of."""
    if facts.get("flattened"):
        how = FLAT_GROUPED if facts.get("grouped") else FLAT
        raise SkipRowError(f"packed {text!r}: {how}: write their mean length into mean_tokens")
    if facts.get("unpadded"):
        raise SkipRowError(
            f"packed {text!r}: samples without padding are packed, or laid end to end: write yes, or padding-free"
        )
    raise SkipRowError(f"packed {text!r}: {GROUPED if facts.get('grouped') else PADDED}: {UNKNOWN_LENGTH}")


def fills(facts: Mapping[str, Any]) -> bool:
    """Whether every sample is said to fill its length: by name, or by tokens drawn at random in a cell without a no."""
    return bool(facts.get("filled", facts.get("tokens") and facts.get("packing") is not False))


def cell(column: str, text: str, gpus: int, default: Callable[[str], Options | None]) -> Options:
    """Options of a cell, or of the default of the row's software where it states nothing; one GPU has nothing to state
    of how several share the work."""
    known = vocabulary().get(column, {})
    stands = default(column) if not text else None
    if stands is not None:
        return stands
    found = lookup(column, text, gpus)
    if found is None and text:
        found = default(column)
        found = found if found is not None else dict(known[""]) if "" in known else None
    if found is None and column == "parallelism" and gpus == 1:
        return {"sharding": "none"}
    if found is not None and "skip" in found:
        raise SkipRowError(f"{column} {text!r}: {found['skip']}")
    if found is None and column == "parallelism":
        raise SkipRowError(f"parallelism is not stated: {WRITE}")
    if found is None:
        raise SkipRowError(f"{column} is not stated; a table without that column takes the stack's default")
    return found


def states(column: str, text: str, gpus: int) -> bool:
    """Whether a cell says anything of its own, and leaves nothing to a default."""
    return bool(text) and lookup(column, text, gpus) is not None


def defaults_of(software: Software, method: str) -> Options:
    """Field values that the software's code gives a run of this method when nothing is said."""
    asked = software.options.get("stack_version")
    chosen = chosen_ranges(software.stack, None if asked is None else str(asked))
    return defaults_then(stack_defaults(software.stack, method), chosen, method)


def default_for(software: Software, row: Mapping[str, str], notes: list[str]) -> Callable[[str], Options | None]:
    """What a cell that states nothing stands for, by column; None where nobody's code says."""

    def default(column: str) -> Options | None:
        name = FIELDS.get(column)
        method = lookup("method", row.get("method", "")) or {}
        if column == "attention_impl" and software.attention:
            notes.append(f"attention_impl is not stated: {software.attention!r} is what {software.label} runs.")
            return {"attn_implementation": software.attention}
        if name is None or not software.stack or method.get("method") not in METHODS:
            return None
        if column == "lora_targets" and method["method"] == "full":
            return {}
        late = software.code != TRANSFORMERS or had_sdpa(row.get("source_date", ""))
        if name in ours(software.stack) or (name == "attn_implementation" and not late):
            return None
        value = defaults_of(software, str(method["method"])).get(name)
        if value is None:
            return None
        if value == LEFT_TO_PEFT:
            notes.append(f"{column} is not stated: {software.stack} leaves them to PEFT.")
            return {"lora_target_modules": f"<{LEFT_TO_PEFT}>"}
        notes.append(f"{column} is not stated: {value!r} is the default of {software.stack}.")
        return {}

    return default


def with_numbers(options: Options, software: Software, bare: str) -> None:
    """Dtypes of the weights where a cell names the arithmetic alone.

    Mixed precision keeps trained weights in fp32: as they are under autocast, in shards under FSDP, in the optimizer
    under DeepSpeed and Megatron, whose model is in 16 bits; a frozen base is in 16 bits. A loop of its own that shards
    has no accelerate around it: autocast over fp32 weights is just that. A bare ``bf16`` is the dtype
    of the weights; whether products run under autocast is then the software's default, and beside adapters under
    transformers' Trainer always so: it is the Trainer's flag. torch's own ZeRO-1 (ZeroRedundancyOptimizer) casts no
    weights. Sources: torch.autocast docs; TrainingArguments.bf16;
    accelerate ``Accelerator.prepare_model`` ("Upcasted low precision parameters", no autocast around DeepSpeed's
    engine); Megatron-LM ``Float16Module``.
    """
    mixed = options.pop("mixed", "") or (bare if software.mixes and bare in SIXTEEN_BITS else "")
    sharding, trains_base = str(options.get("sharding", "none")), options["method"] == "full"
    of_torch = options.pop("of_torch", False)
    deepspeed = sharding.startswith("zero") and not of_torch
    if bare in SIXTEEN_BITS and software.stack and not mixed:
        defaults = defaults_of(software, str(options["method"]))
        flag = software.code == TRANSFORMERS and not trains_base
        autocast = flag or str(defaults.get("precision", "")).endswith("-autocast")
        autocast = autocast and not software.own_loop
        own_fp32 = trains_base and software.stack not in (PLAIN, "trl", "liger") and defaults.get("dtype") == "fp32"
        wide = autocast and trains_base and (own_fp32 or bare == "fp16")
        options |= {"dtype": "fp32" if wide else bare, "precision": f"{bare}-autocast" if autocast else bare}
    if mixed:
        whole = sharding in ("none", "ddp") or of_torch or (software.own_loop and sharding in SHARDED)
        wide = trains_base and whole and not software.joins
        pure = software.joins or (trains_base and deepspeed)
        options |= {"dtype": "fp32" if wide else mixed, "precision": mixed if pure else f"{mixed}-autocast"}
        if trains_base and sharding in SHARDED and not wide:
            options["master_dtype"] = "fp32"
    if of_torch and sharding != "none" and trains_base and options.get("precision") in SIXTEEN_BITS:
        raise SkipRowError(
            "parallelism: torch's ZeroRedundancyOptimizer over weights in 16 bits shards states in 16 bits, which is "
            "not built; under autocast weights are in fp32"
        )
    if software.joins and options.get("fp8") == "te":
        options["fp8"] = "megatron"
    if "master_dtype" in software.options and not (trains_base and sharding in SHARDED):
        options.pop("master_dtype", None)
    if "reduce_dtype" in software.options and sharding not in SHARDED:
        options.pop("reduce_dtype", None)
    if software.code == TRANSFORMERS and software.stack and not (software.own_loop and sharding in SHARDED):
        _as_accelerate_does(options, deepspeed=deepspeed, trains_base=trains_base)


def as_shards(options: Options) -> Options:
    """The same options, but fp32 weights beside fp32 masters of full training under FSDP are those masters, gathered
    in the format named (torchtitan's ``mixed_precision_param``)."""
    named = str(options.get("precision", ""))
    masters = options.get("master_dtype") == options.get("dtype") == "fp32" and options.get("sharding") in SHARDED
    return options | ({"dtype": named.removesuffix("-autocast")} if masters and named.endswith("-autocast") else {})


def _as_accelerate_does(options: Options, *, deepspeed: bool, trains_base: bool) -> None:
    """The Trainer's DeepSpeed turns all into 16 bits; its FSDP trains fp32 shards."""
    half = str(options.get("precision", "")).removesuffix("-autocast")
    sharding = options.get("sharding", "none")
    if deepspeed and half in SIXTEEN_BITS and options.get("num_gpus", 1) > 1:
        options |= {"dtype": half, "precision": half}
        if not trains_base:
            options.setdefault("adapter_dtype", half)
    if sharding in SHARDED:
        today = options.get("stack") in BY_TRAINER and (code_age(options) or "5") == "5"
        options.setdefault("fsdp_version", 2 if today else 1)
        if trains_base and str(options.get("precision", "")).endswith("-autocast"):
            options |= {"dtype": half, "master_dtype": "fp32"}


def upcast_by_accelerate(row: Mapping[str, str], options: Options) -> bool:
    """Whether accelerate turned trained weights into fp32 shards: the Trainer's FSDP under mixed precision does.

    Source: accelerate 0.28 and later, ``Accelerator.prepare_model`` ("Upcasted low precision parameters").
    """
    trainer = "fms-hf-tuning" in row.get("framework", "")
    sharded = options["num_gpus"] > 1 and options.get("sharding") == "fsdp"
    mixed = str(options.get("precision")).endswith("-autocast")
    return trainer and sharded and mixed and options["method"] == "full"


def absent_columns(software: Software, row: Mapping[str, str], method: str) -> Options:
    """Defaults of known software for columns that a table does not have; other software's stack brings them itself."""
    stacks = load_stacks()
    if software.stack or software.label == PLAIN or not stacks.get(software.label, {}).get("built"):
        return {}
    defaults = stack_defaults(software.label, method)
    return {name: defaults[name] for column, name in FIELDS.items() if column not in row and name in defaults}


def number_alone(text: str) -> str:
    """The format that a cell of compute_dtype names where it says nothing else of the arithmetic."""
    facts = facts_of("compute_dtype", text) or {}
    return str(facts["number"]) if facts.keys() - {"base_bits", "quantized_base", "adapters"} == {"number"} else ""


def bare_number(row: Mapping[str, str], software: Software) -> str:
    """The 16-bit format that the row's software computes in, where the cell says no more than that."""
    if not (software.stack or software.mixes) or not row.get("compute_dtype"):
        return ""
    return number_alone(row["compute_dtype"])
