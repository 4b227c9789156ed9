"""The cells of one row together: what they state, where two contradict, and which base method and quant mean.

What decides is what a cell means, not how it is spelled. A base of which nothing is said is unquantized beside LoRA and
full training and NF4 beside QLoRA, with a note, unless the method's cell says bits or the row's software quantizes by
default. Samples that fill their length count in tokens; what counts memory is named in many words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunecast.calibrate.cell_grammar import facts_of
from tunecast.calibrate.framework_names import TRANSFORMERS, Software, kernels_added
from tunecast.calibrate.named_things import stored_as
from tunecast.calibrate.run_table import SkipRowError, number
from tunecast.calibrate.vocabulary import Options, cell, fills, lookup, number_alone, states, vocabulary
from tunecast.catalogs.gpus import Gpu, training_dtype
from tunecast.model.run import Run
from tunecast.model.stacks import PLAIN, ignores_padding
from tunecast.model.units import SIXTEEN_BITS

VOCABULARY_COLUMNS = (
    "method",
    "quant",
    "compute_dtype",
    "grad_checkpointing",
    "attention_impl",
    "compile",
    "parallelism",
    "packed",
    "optimizer",
    "lora_targets",
)
COUNTED = ("torch", "pytorch", "cuda", "gpu", "vram", "memory", "mem", "max", "maximum", "peak", "highest")
"""Words beside the name of a counter."""
LITGPT = "litgpt"
OBJECTIVE = re.compile(
    r"sft|supervised fine[- ]?tuning|instruction[- ]tuning|fine[- ]?tun(e|ing)|chat|alignment", re.IGNORECASE
)
"""What a run learns, which says nothing of what it trains."""
UNSLOTH = "unsloth"
"""The stack that trains adapters unless ``full_finetuning`` is set."""
WRITE_BASE = "write none, nf4 or 8-bit"


def cells(
    row: Mapping[str, str],
    gpus: int,
    software: Software,
    default: Callable[[str], Options | None],
    stated: set[str],
) -> Options:
    """Options of the columns with a vocabulary, one after the other; what they state is added to `stated`.

    A quant cell that states nothing is left to `with_base`. Targets that both method and lora_targets name are both
    given, the method's as ``method_targets``.
    """
    options: Options = {}
    told: dict[str, str] = {}
    for column in VOCABULARY_COLUMNS:
        text = row.get(column)
        if text is None or (column == "quant" and lookup(column, text) is None):
            continue
        says = states(column, text, gpus)
        if column == "lora_targets" and "lora_target_modules" in options:
            if not says:
                continue
            options["method_targets"] = options.pop("lora_target_modules")
        found = cell(column, text, gpus, default)
        _only_in(column, row, found.pop("only_in", None), software)
        added = kernels_added(found.pop("adds", ""))
        if added and "fused_kernels" in found:
            added["fused_kernels"] = f"{found['fused_kernels']},{added['fused_kernels']}"
        found |= added
        for name in found.keys() & options.keys():
            if found[name] != options[name]:
                raise SkipRowError(f"{told[name]} {row[told[name]]!r} and {column} {text!r} contradict each other")
        if says:
            stated.update((column, *found))
        told |= dict.fromkeys(found, column)
        options |= found
    _where_it_runs(row, gpus, software, options)
    return options


def _only_in(column: str, row: Mapping[str, str], label: str | None, software: Software) -> None:
    """Refuse what is read for one software alone beside another."""
    if label in (None, software.label):
        return
    other = f"framework is {row['framework']!r}" if row.get("framework") else "no framework is stated"
    raise SkipRowError(f"{column} {row[column]!r}: this is built for {label} alone, and {other}")


def _where_it_runs(row: Mapping[str, str], gpus: int, software: Software, options: Options) -> None:
    """What the method's cell says besides the method: one GPU or several, and the software."""
    several, named = options.pop("several", None), options.pop("software", None)
    if several is not None and several != (gpus > 1):
        raise SkipRowError(f"method {row['method']!r} contradicts the number of GPUs, {gpus}")
    if named not in (None, software.label):
        other = f"framework is {row['framework']!r}" if row.get("framework") else "no framework is stated"
        raise SkipRowError(f"method {row['method']!r} names {named}, and {other}: write it there")


def _as_stored(options: Options, row: Mapping[str, str]) -> None:
    """Weights that the model's name says are quantized are; raises SkipRowError where another cell denies it."""
    by, bits = stored_as(row["model"])
    if not bits:
        return
    quant = row.get("quant", "")
    own = str(options.get("quant_method") or ("bnb-4bit" if "bnb_4bit_quant_type" in options else ""))
    named = own.partition("-")[0] if "by" in (facts_of("quant", quant) or {}) or quant in vocabulary()["quant"] else ""
    if (not own and states("quant", quant, 1)) or (own and f"{bits}bit" not in own) or (by and named not in ("", by)):
        raise SkipRowError(f"quant {quant!r} contradicts model {row['model']!r}")
    if options["method"] == "full":
        raise SkipRowError(f"method {row['method']!r} trains all weights, but model {row['model']!r} is quantized")
    if not named and (by or not own):
        options["quant_method"] = f"{by or 'bnb'}-{bits}bit"


def with_base(options: Options, row: Mapping[str, str], software: Software, notes: list[str]) -> None:
    """LoRA on a quantized base is QLoRA; QLoRA without a quantized base is none."""
    _as_stored(options, row)
    bits, half = options.pop("base_bits", None), "half" in options
    named = options.pop("quantized_base", False)
    some = options.pop("quantized", False)
    quantized = "quant_method" in options or "bnb_4bit_quant_type" in options
    silent = "quant" in row and lookup("quant", row["quant"]) is None
    contradiction = f"quant {row.get('quant', '')!r} contradicts {_base_in(row)}"
    if bits in (4, 8) and options["method"] == "full":
        raise SkipRowError(
            f"{_base_in(row)} contradicts a method of full training: all weights are trained, and lie in {bits} bits"
        )
    if some and options["method"] == "full":
        raise SkipRowError(contradiction)
    if some and options["method"] != "qlora" and bits not in (4, 8):
        raise SkipRowError(
            f"quant {row['quant']!r}: whether the base has 4 bits or 8 is not stated; write nf4 or 8-bit"
        )
    if bits in (4, 8) or (some and options["method"] == "qlora"):
        bits = bits or 4
        of_quant = 8 if "8" in str(options.get("quant_method", "")) else 4
        if not (silent or some) and "quant" in row and (not quantized or of_quant != bits):
            raise SkipRowError(contradiction)
        options["method"] = "qlora"
        if not quantized:
            options["quant_method"] = f"bnb-{bits}bit"
    elif bits == 16 and options["method"] == "lora" and quantized:
        raise SkipRowError(contradiction)
    elif options["method"] == "lora" and quantized:
        options["method"] = "qlora"
    elif options["method"] == "qlora" and not quantized and "quant" in row and not silent:
        raise SkipRowError(contradiction)
    elif not quantized:
        _without_a_word(options, row, software, notes, says_16=bits == 16 or half)
    if options.get("bnb_4bit_quant_type") == "fp4" and "double_quant" not in options:
        options["double_quant"] = False  # ``BitsAndBytesConfig``: both are what it has unless told otherwise
        notes.append("fp4 without a word on double quantization: none, bitsandbytes' own default beside it.")
    _as_others_say(options, row, software, quantized_base=named)
    _compute_of_base(options, software)


def _base_in(row: Mapping[str, str]) -> str:
    """The cell besides quant that says how many bits the base has: compute_dtype's where it does, else the method's."""
    text = row.get("compute_dtype", "")
    return (
        f"compute_dtype {text!r}"
        if "base_bits" in (lookup("compute_dtype", text) or {})
        else f"method {row['method']!r}"
    )


def _as_others_say(options: Options, row: Mapping[str, str], software: Software, *, quantized_base: bool) -> None:
    """What compute_dtype and framework say of the method is so; LoRA on a quantized base is LoRA too."""
    method = options["method"]
    if quantized_base and method != "qlora":
        raise SkipRowError(
            f"compute_dtype {row['compute_dtype']!r} names a quantized base, and no other cell does: {WRITE_BASE} "
            "in quant"
        )
    if software.method in ("", method) or (software.method, method) == ("lora", "qlora"):
        return
    others = f"method {row['method']!r}" + (f" and quant {row['quant']!r}" if "quant" in row else "")
    raise SkipRowError(
        f"framework {row['framework']!r} names {software.method}, which {others} contradict: write there what ran"
    )


def _without_a_word(
    options: Options, row: Mapping[str, str], software: Software, notes: list[str], *, says_16: bool
) -> None:
    """The base of a row whose cells say nothing of it: unquantized, unless a method or a software quantizes."""
    quant, method = row.get("quant"), options["method"]
    silent = quant is not None and lookup("quant", quant) is None
    if method == "full" or not (silent or quant is None):
        pass
    elif method == "lora" and not says_16 and software.quantizes:
        raise SkipRowError(f"quant is not stated, and {software.quantizes}; {WRITE_BASE}")
    elif method == "lora" and not says_16 and quant:
        raise SkipRowError(f"quant {quant!r} states nothing, and a base of LoRA may be quantized; {WRITE_BASE}")
    if silent and method == "qlora":
        notes.append(f"quant is not stated: NF4 is taken for method {row['method']!r}, as its authors have it.")
    elif silent:
        notes.append(f"quant is not stated: method {row['method']!r} alone quantizes no base.")


def _compute_of_base(options: Options, software: Software) -> None:
    """The dtype of a 4-bit base's products is an option of bitsandbytes in transformers alone."""
    four = "bnb_4bit_quant_type" in options or options.get("quant_method") == "bnb-4bit"
    if not four or (software.code or TRANSFORMERS) != TRANSFORMERS:
        options.pop("bnb_4bit_compute_dtype", None)


def with_master(options: Options, row: Mapping[str, str]) -> None:
    """Master weights that the optimizer's cell names are mixed precision of the format that compute_dtype names."""
    if options.pop("bf16_states", False) and not all_in_bf16(options):
        raise SkipRowError(
            f"optimizer {row['optimizer']!r}: 16-bit states are those of AdamW on bf16 weights that are trained "
            "themselves; beside others they are not built"
        )
    if not options.pop("fp32_master", False) or "mixed" in options:
        return
    if "fp32" in (options.get("dtype"), options.get("master_dtype")):
        return
    named = number_alone(row.get("compute_dtype", ""))
    if named not in SIXTEEN_BITS:
        raise SkipRowError(
            f"optimizer {row['optimizer']!r} keeps master weights in fp32, which compute_dtype "
            f"{row.get('compute_dtype', '')!r} does not; write there bf16 with fp32 master weights"
        )
    options["mixed"] = named


def all_in_bf16(options: Options) -> bool:
    """Whether the cells state full training of bf16 weights without a copy of more bits: states have their dtype."""
    exact = options.get("dtype") == "bf16" and "mixed" not in options and not options.get("fp32_master")
    return exact and options["method"] == "full" and options.get("master_dtype") != "fp32"


def check_half(half: str, row: Mapping[str, str], run: Run) -> None:
    """The 16-bit format that the method's cell names is one that the run computes or keeps its weights in."""
    formats = {run.dtype, run.precision.removesuffix("-autocast"), run.bnb_4bit_compute_dtype}
    if half and half not in formats:
        raise SkipRowError(
            f"method {row['method']!r} names {half}, which compute_dtype {row.get('compute_dtype', '')!r} is not: "
            "write one of them"
        )


def samples_that_fill(row: Mapping[str, str]) -> bool:
    """Whether the row says that its samples fill their length unpacked, padded or not: padding is processed too."""
    facts = facts_of("packed", row.get("packed", "")) or {}
    return fills(facts) and not facts.get("packing")


def rows_are_full(row: Mapping[str, str], options: dict[str, Any]) -> bool:
    """Whether every row has as many tokens as the table says; takes what only this asks out of the options."""
    if options.pop("alone", False) and options["per_device_train_batch_size"] > 1:
        raise SkipRowError(f"packed {row['packed']!r}: a mean length is that of rows only where micro_batch is 1")
    return bool(options.pop("filled", "packed" not in row)) or row.get("packed", "yes").startswith(("yes", "n/a"))


def fill_padded(options: dict[str, Any]) -> None:
    """Samples padded to the length, and a model that is told which tokens are padding, where the stack tells it."""
    apart = options.get("cp", 1) == 1 and options.get("attention_length") is None
    if options.pop("padded", False) and apart and not ignores_padding(options.get("stack") or PLAIN):
        options.update(padding_mask=True, pad_to_multiple_of=options["max_length"])


def check_doubts(row: Mapping[str, str]) -> None:
    """Refuse a word with a question mark behind it: what ran is then a guess of who wrote the table."""
    for column in (*VOCABULARY_COLUMNS, "framework", "gpu", "model"):
        text = row.get(column, "")
        if re.search(r"\w\W*\?", text) and text not in vocabulary().get(column, {}):
            raise SkipRowError(f"{column} {text!r} is doubted by its question mark: write what ran, or leave it empty")


def note_full(row: dict[str, str], tokens_per_s: float | None, notes: list[str]) -> None:
    """That a speed told by the time of steps counts on samples as long as seq_len, where no column says whether."""
    told = any(number(row, column) is not None for column in ("tokens_per_s", "tokens_per_s_per_gpu"))
    if "packed" not in row and tokens_per_s is not None and not told:
        notes.append("packed is no column: every sample is taken as seq_len tokens long.")


def note_method(row: dict[str, str], software: Software, notes: list[str], stated: set[str]) -> None:
    """That full training is taken where the method's cell says only what is learnt; refused where adapters may be."""
    text = row.get("method", "")
    if OBJECTIVE.fullmatch(text.strip()) is None:
        return
    if (
        software.stack == UNSLOTH
        or number(row, "rank") is not None
        or states("lora_targets", row.get("lora_targets", ""), 1)
    ):
        raise SkipRowError(f"method {text!r} names no method: write full, LoRA or QLoRA")
    stated.discard("method")
    notes.append(f"method {text!r} says what is learnt: full training is taken.")


def why_no_speed(row: dict[str, str]) -> str:
    """Why a row that states samples/s has no tokens/s."""
    if number(row, "samples_per_s") is None:
        return ""
    return (
        f"samples_per_s {row['samples_per_s']!r} with packed {row.get('packed', '')!r} may count documents; "
        "write tokens_per_s, or in packed 'samples fill seq_len' or 'padded to max length' where every sample does"
    )


def counter_called(text: str) -> str:
    """``allocated`` or ``reserved`` where a cell names one of them, and what stands behind it; else the text."""
    plain = re.sub(r"\balloc\b", "allocated", text.lower().replace("_", " ").replace("memory/", ""))
    if len(re.findall(r"allocated|reserved", plain)) > 1 or "%" in plain:
        return text
    named = re.match(
        r"(?:(?:torch\.cuda\.)?(?:max|peak)(?: (?:memory|mem))? )?(allocated|reserved)\b(?:\(\)|\(gib\))?", plain
    )
    if named is not None:
        return named[1] + text[len(text) - len(plain[named.end() :]) :]
    kinds = [word for word in re.findall(r"[a-z]+", plain) if word not in COUNTED]
    return kinds[0] if kinds in (["allocated"], ["reserved"]) else text


def counter_of(row: Mapping[str, str], rules: Iterable[Mapping[str, Any]]) -> str:
    """Which memory counter the row has; a rule says where one counts what no forecast of a step is about."""
    told = next((str(rule["counter"]) for rule in rules if "counter" in rule), "")
    return told or counter_called(row.get("reserved_or_allocated", "") or "not stated")


def as_software_attends(options: Options, row: Mapping[str, str], software: Software, notes: list[str]) -> None:
    """LitGPT has no other attention than torch's, whose kernel is FlashAttention-2: who says that means it.

    Source: litgpt ``model.py``, ``scaled_dot_product_attention`` of torch.nn.functional.
    """
    if software.stack != LITGPT or options.get("attn_implementation") != "flash_attention_2":
        return
    if "attention_kernel" not in options:
        options["attn_implementation"] = "sdpa"
        notes.append(
            f"attention_impl {row.get('attention_impl', '')!r}: LitGPT calls torch's sdpa, which has that kernel."
        )


def on_old_card(options: Options, gpu: Gpu) -> None:
    """Shards in fp32 that are gathered in bf16 are gathered in fp16 on a card without bf16."""
    if training_dtype(gpu) == "bf16" or options.get("master_dtype") != "fp32" or options.get("dtype") != "bf16":
        return
    options |= {"dtype": "fp16", "precision": str(options.get("precision", "fp16-autocast")).replace("bf16", "fp16")}
