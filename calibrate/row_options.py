"""Options of a row of a table of runs: what its cells say, and where they say nothing what its software does."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from tunecast.calibrate.cell_cards import cards_of
from tunecast.calibrate.cell_layout import WRITE
from tunecast.calibrate.framework_names import TRANSFORMERS, Software, has_own_loop
from tunecast.calibrate.row_cells import as_software_attends, cells, note_method, with_base, with_master
from tunecast.calibrate.row_plain import variant_options
from tunecast.calibrate.row_rules import with_rules
from tunecast.calibrate.row_sharding import check_shared, unshared
from tunecast.calibrate.run_table import SkipRowError, micro_batches, number, whole
from tunecast.calibrate.vocabulary import (
    absent_columns,
    as_shards,
    bare_number,
    default_for,
    defaults_of,
    upcast_by_accelerate,
    with_numbers,
)
from tunecast.model.architecture import Architecture
from tunecast.model.documents import reach_of_mean
from tunecast.model.resolve_fused import why_not_fused
from tunecast.model.resolve_parallel import FSDP
from tunecast.model.stacks import PLAIN, ours
from tunecast.model.units import SIXTEEN_BITS

TORCHTITAN = "torchtitan"
HALF = "half of seq_len"
"""What a rule says of attention inside packed samples whose length no cell says."""


def options_of(
    row: dict[str, str], rules: list[dict[str, Any]], software: Software, notes: list[str], stated: set[str]
) -> dict[str, Any]:
    """Options of a row; those that its cells state are added to `stated`."""
    options: dict[str, Any] = {"allow_long_context": True, **software.options, **software.loop}
    options["num_gpus"], per_node = cards_of(row)
    default = default_for(software, row, notes)
    options |= cells(row, options["num_gpus"], software, default, stated)
    unshared(row, options, notes)
    as_software_attends(options, row, software, notes)
    _as_copies_are(options, row, software, notes)
    if per_node is not None and options.setdefault("gpus_per_node", per_node) != per_node:
        raise SkipRowError(
            f"parallelism {row['parallelism']!r} has machines of {options['gpus_per_node']} GPUs, gpus and gpu of "
            f"{per_node}: they contradict each other"
        )
    stated.update(() if per_node is None else ("gpus_per_node",))
    if "method" not in options:
        raise SkipRowError(f"method {row.get('method', '')!r} names no method")
    note_method(row, software, notes, stated)
    options = absent_columns(software, row, str(options["method"])) | options
    with_base(options, row, software, notes)
    with_master(options, row)
    if options.pop("of_method", options["method"]) != options["method"]:
        raise SkipRowError(f"parallelism {row['parallelism']!r} contradicts method {row['method']!r}")
    stated.update(("dtype", "precision") if "mixed" in stated or bare_number(row, software) else ())
    stated.update(("lora_r",) if number(row, "rank") is not None else ())
    with_numbers(options, software, bare_number(row, software))
    if options.pop("on_host", False) and options.get("offload", "none") == "none":
        raise SkipRowError(
            f"optimizer {row['optimizer']!r} is on the CPU, but parallelism {row.get('parallelism', '')!r} does not "
            "offload it: write the offload there (ZeRO-2 + optimizer offload), or here the optimizer that ran"
        )
    if options.pop("distributed_optimizer", False) and options.get("sharding") == "ddp":
        options["sharding"] = "zero1"
    if "framework" in row:
        options = as_shards(with_rules(options, rules, notes) | variant_options(row))
    options["max_length"] = whole(row, "seq_len")
    if options.pop("filled_length", options["max_length"]) != options["max_length"]:
        raise SkipRowError(f"seq_len {row['seq_len']!r} and packed {row['packed']!r} contradict each other")
    _as_documents_may_be(options, row, notes)
    options["per_device_train_batch_size"] = whole(row, "micro_batch")
    copies = options["num_gpus"] // math.prod(int(options.get(way, 1)) for way in ("tp", "pp", "cp"))
    options["gradient_accumulation_steps"] = micro_batches(row, options["max_length"], max(copies, 1), notes)
    if options["num_gpus"] > 1 and "sharding" not in options:
        raise SkipRowError(f"parallelism is not stated: {WRITE}")
    check_shared(row, options)
    if options["num_gpus"] > 1 and options.get("sharding") == "fsdp":
        # TRL prepares no 4-bit base that FSDP shards (``is_sharded_qlora`` in its ``SFTTrainer``).
        options.pop("upcast_non_quantized", None)
    if upcast_by_accelerate(row, options):
        options["master_dtype"] = "fp32"
    if not software.stack and options["num_gpus"] > 1 and options.get("sharding") in FSDP:
        options.setdefault("master_dtype", "none")
    _as_own_loops_do(row, software, options, notes)
    _as_others_load(row, software, options)
    _adapters(row, software, options, default)
    return options


def _as_documents_may_be(options: dict[str, Any], row: dict[str, str], notes: list[str]) -> None:
    """How far attention reaches in packed samples that it keeps apart: by the mean length that the row states; where
    nothing says how long they are, between hardly any attention and that of a whole row."""
    if options.get("attention_length") is None:
        return
    mean, length = number(row, "mean_tokens"), int(options["max_length"])
    if mean is not None and mean >= 1.0:
        options["attention_length"] = max(round(reach_of_mean(min(mean, length), length)), 1)
        notes[:] = [note for note in notes if not note.startswith("attention_length is not stated")]
        notes.append(
            f"attention spans {options['attention_length']} tokens of a packed row: of its samples the mean of "
            f"{mean:g} tokens is stated, and their lengths are assumed to be exponential."
        )
    elif options["attention_length"] == HALF:
        options["attention_length"] = max(length // 2, 1)


def _as_copies_are(options: dict[str, Any], row: dict[str, str], software: Software, notes: list[str]) -> None:
    """How copies share the model where parallelism names degrees alone."""
    named = re.search(r"\bddp\b|replic", row.get("parallelism", ""), re.IGNORECASE)
    if software.label == TORCHTITAN and options.get("sharding") == "ddp" and not named:
        options["sharding"] = "fsdp"
        notes.append("parallelism names no sharding: torchtitan's data parallelism is FSDP (ParallelDims, dp_shard).")


def _as_others_load(row: dict[str, str], software: Software, options: dict[str, Any]) -> None:
    """Code that transformers' Trainer does not drive is taken to load a quantized base that FSDP shares in shares or in
    host memory (torchtune's ``training/_distributed.py``, AnswerDotAI's fsdp_qlora), not whole on every GPU."""
    others = software.code != TRANSFORMERS or has_own_loop(row.get("framework", ""))
    if others and options["method"] == "qlora" and options.get("sharding") in FSDP and options["num_gpus"] > 1:
        options.setdefault("loads_on_gpu", False)


def _as_own_loops_do(row: dict[str, str], software: Software, options: dict[str, Any], notes: list[str]) -> None:
    """What loops around transformers that their authors wrote do where nothing says otherwise.

    A quantized base whose products are in 16 bits without autocast, under FlashAttention, stays as it is read: what
    transformers casts for that kernel is not built. Sources: transformers' and PEFT's own examples (``outputs =
    model(...)`` before ``loss.backward()``: the result stays until the next), PEFT's guide to quantization
    (``prepare_model_for_kbit_training``).
    """
    if software.code != TRANSFORMERS or not has_own_loop(row.get("framework", "")):
        return
    held = options.setdefault("keeps_outputs", True)
    told = ["hold the model's output through the backward"] if held else []
    quantized = options["method"] == "qlora" and str(options.get("quant_method", "bnb-4bit")).startswith("bnb")
    pure = options.get("precision") in SIXTEEN_BITS
    flash = str(options.get("attn_implementation", "")).startswith("flash")
    if quantized and not (pure and flash) and options.setdefault("upcast_non_quantized", True):
        told.append("prepare the quantized base as PEFT's guide does, all else in fp32")
        if pure:
            options |= {"dtype": "fp32", "bnb_4bit_compute_dtype": options["precision"], "precision": "fp32"}
    if told:
        notes.append(f"framework {row['framework']!r}: a loop of its authors is taken to {' and to '.join(told)}.")


def _adapters(row: dict[str, str], software: Software, options: dict[str, Any], default: Callable[[str], Any]) -> None:
    """Rank, targets and storage of adapters, where there are any."""
    stated = number(row, "rank")
    if options["method"] == "full":
        if stated is not None:
            raise SkipRowError(f"rank {row['rank']!r} is of adapters, but method {row['method']!r} trains all weights")
        return
    if stated is not None and options.setdefault("lora_r", whole(row, "rank")) != stated:
        raise SkipRowError(f"rank {row['rank']!r} contradicts method {row['method']!r}")
    if "rank" in row and "lora_r" not in options and default("rank") is None:
        raise SkipRowError("rank is not stated")
    if software.stack and "lora_target_modules" not in options and "lora_targets" in row:
        chosen = "lora_target_modules" in ours(software.stack)
        if chosen:
            raise SkipRowError("lora_targets is not stated")
    if not software.stack and software.label != PLAIN and options.get("precision") in SIXTEEN_BITS:
        # PEFT itself keeps the adapters of a 16-bit model in fp32 (autocast_adapter_dtype).
        options.setdefault("adapter_dtype", options["precision"])


def fusable(software: Software, options: dict[str, Any], architecture: Architecture) -> str:
    """Fused kernels of the software and those that the row names, as far as the model and the rest of the run allow."""
    own = defaults_of(software, str(options["method"])).get("fused_kernels", ()) if software.stack else ()
    every = dict.fromkeys((*own, *software.fused.split(","), *str(options.get("fused_kernels", "")).split(",")))
    values = {"loss_type": "nll", "attn_implementation": "sdpa", **options}
    return ",".join(part for part in every if part and not why_not_fused(part, values, architecture)) or "none"
