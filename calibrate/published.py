"""Read a table of published runs into run fields, by a committed vocabulary.

A row that cannot be read honestly is skipped with the reason; nothing is guessed. Low-confidence
rows are never used. The table's columns are those of ``results/published/published-runs.csv``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from tunecast.calibrate.run_table import (
    SkipRowError,
    check_batch,
    check_confidence,
    check_possible,
    number,
    own_value,
    stated_tokens_per_s,
    whole,
)
from tunecast.catalogs.errors import TunecastError
from tunecast.catalogs.gpus import find_gpu, training_dtype
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.experts_modules import in_modules
from tunecast.model.joined import joined, joined_targets
from tunecast.model.litgpt import as_litgpt
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.units import GIB

DEFAULT_STACK = "hf-peft"
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
MEGATRON_LAYOUT = r"tp(\d+)/pp(\d+)/cp(\d+)/dp(\d+)"
"""Tensor, pipeline, context and data parallel degrees; Megatron's distributed optimizer shards states over the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One measured run that the model can forecast."""

    id: str
    source: str
    """Prefix of the id (``table`` without one): the group of rows measured by the same people in the same way."""
    stack: str
    """Label of the software stack, for the stack effect."""
    gpu: str
    architecture: Architecture
    run: Run
    tokens_per_s: float | None
    """Whole job, padding included."""
    peak_bytes: float | None
    counter: str
    """Which memory counter: ``allocated``, ``reserved`` or ``not stated``."""
    notes: str = ""
    attention_kernel: str = ""
    """Whose attention it ran, where that is older than the model's: a key of the beliefs' ``attention_kernels``."""
    internode_gbps: float | None = None
    """Network of one machine as the source states it; None: that of a catalog instance with this GPU."""

    @property
    def network(self) -> dict[str, float]:
        """What joins the machines, as an option of a question."""
        return {} if self.internode_gbps is None else {"internode_gbps": self.internode_gbps}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row that is not used, and why."""

    id: str
    reason: str


@functools.cache
def vocabulary() -> dict[str, Any]:
    """The committed mapping from free text to run fields."""
    text = resources.files("tunecast.calibrate").joinpath("data/vocabulary.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def read_runs(rows: Iterable[dict[str, str]]) -> tuple[list[PublishedRun], list[SkippedRow]]:
    """Rows the model can forecast, and the rest with reasons."""
    runs: list[PublishedRun] = []
    skipped: list[SkippedRow] = []
    for row in rows:
        try:
            runs.append(_read_row(row))
        except SkipRowError as skip:
            skipped.append(SkippedRow(id=row["id"], reason=str(skip)))
        except TunecastError as error:
            skipped.append(SkippedRow(id=row["id"], reason=str(error)))
    return runs, skipped


def _read_row(row: dict[str, str]) -> PublishedRun:
    check_confidence(row)
    if row.get("notes", "").startswith("OUT OF MEMORY"):
        raise SkipRowError("ran out of memory: a test of fit, not of speed")
    row = _filled(row)
    for rule in _rules(row):
        if "skip" in rule:
            raise SkipRowError(rule["skip"])
    name = row.get("gpu_canonical_id", row.get("gpu", "")) or vocabulary()["gpu"].get(row.get("gpu", ""), "")
    if not name:
        raise SkipRowError("the GPU is in no catalog" if "gpu_canonical_id" in row else "gpu is not stated")
    options, rules = _options(row), _rules(row)
    architecture = load_architecture(_clean_model(row["model"]))
    if "litgpt_code" in options:
        architecture = as_litgpt(architecture, options.pop("litgpt_code"))
    if options.get("hf_code", "5") != "5":
        architecture = in_modules(architecture)
    gpu = find_gpu(name)
    run = resolve_run(architecture, options, gpu_has_bf16=training_dtype(gpu) == "bf16").run
    run = replace(run, **{name: value for rule in rules for name, value in rule.get("after", {}).items()})
    if any("joined" in rule for rule in rules):
        architecture, run = joined(architecture), joined_targets(run)
    check_batch(row, run)
    tokens_per_s, peak_gib = stated_tokens_per_s(row, run), number(row, "peak_mem_gib")
    check_possible(tokens_per_s, architecture, run, gpu)
    return PublishedRun(
        id=row["id"],
        source=row["id"].split("-")[0] if "-" in row["id"] else "table",
        stack=_stack(row),
        gpu=gpu.id,
        architecture=architecture,
        run=run,
        tokens_per_s=tokens_per_s,
        peak_bytes=None if peak_gib is None else peak_gib * GIB,
        counter=_counter(row),
        notes=row.get("notes", ""),
        attention_kernel=next((rule["attention_kernel"] for rule in rules if "attention_kernel" in rule), ""),
        internode_gbps=next((float(rule["internode_gbps"]) for rule in rules if "internode_gbps" in rule), None),
    )


def _options(row: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {"allow_long_context": True}
    for column in VOCABULARY_COLUMNS:
        if column in row:
            options |= _lookup(column, row[column])
    if "framework" in row:
        options |= _framework_options(row, options)
        options |= _variant_options(row)
    options["max_length"] = whole(row, "seq_len")
    options["per_device_train_batch_size"] = whole(row, "micro_batch")
    options["gradient_accumulation_steps"] = whole(row, "grad_accum") if row.get("grad_accum") else 1
    options["num_gpus"] = whole(row, "gpus") if "gpus" in row else 1
    if options["num_gpus"] > 1 and "sharding" not in options:
        raise SkipRowError("parallelism is not stated")
    if options["num_gpus"] > 1 and options.get("sharding") == "fsdp":
        # TRL prepares no 4-bit base that FSDP shards (``is_sharded_qlora`` in its ``SFTTrainer``).
        options.pop("upcast_non_quantized", None)
    if upcast_by_accelerate(row, options):
        options["master_dtype"] = "fp32"
    if options["method"] != "full":
        if "rank" in row:
            options["lora_r"] = whole(row, "rank")
        if (
            "adapter_dtype" not in options
            and options.get("precision") in ("bf16", "fp16")
            and _stack(row) != DEFAULT_STACK
        ):
            # PEFT itself keeps the adapters of a 16-bit model in fp32 (autocast_adapter_dtype).
            options["adapter_dtype"] = options["precision"]
    return options


def _lookup(column: str, text: str) -> dict[str, Any]:
    known = vocabulary()[column]
    degrees = re.fullmatch(MEGATRON_LAYOUT, text) if column == "parallelism" and text not in known else None
    if degrees is not None:
        tensor, pipeline, context, data = (int(number) for number in degrees.groups())
        return {"tp": tensor, "pp": pipeline, "cp": context, "sharding": "zero1" if data > 1 else "none"}
    if not text and text not in known:
        raise SkipRowError(f"{column} is not stated; a table without that column takes the stack's default")
    found: dict[str, Any] | None = known.get(text, own_value(column, text))
    if found is None:
        raise SkipRowError(f"{column} {text!r} is not in the vocabulary")
    if "skip" in found:
        raise SkipRowError(f"{column} {text!r}: {found['skip']}")
    return found


def _stack(row: dict[str, str]) -> str:
    """Label of the software stack; plain transformers + PEFT where the table has no such column."""
    if "framework" not in row:
        return DEFAULT_STACK
    _variant_options(row)
    for prefix, label in vocabulary()["framework"]:
        if row["framework"].startswith(prefix):
            return str(label)
    raise SkipRowError(f"framework {row['framework']!r} is not in the vocabulary")


def upcast_by_accelerate(row: dict[str, str], options: dict[str, Any]) -> bool:
    """Whether accelerate turned trained weights into fp32 shards: the Trainer's FSDP under mixed precision does.

    Source: accelerate 0.28 and later, ``Accelerator.prepare_model`` ("Upcasted low precision parameters").
    """
    trainer = "fms-hf-tuning" in row.get("framework", "")
    sharded = options["num_gpus"] > 1 and options.get("sharding") == "fsdp"
    mixed = str(options.get("precision")).endswith("-autocast")
    return trainer and sharded and mixed and options["method"] == "full"


def _rules(row: dict[str, str]) -> list[dict[str, Any]]:
    """The rules that speak of this row."""
    return [
        rule
        for rule in vocabulary()["rules"]
        if all(re.search(pattern, row.get(column, "")) for column, pattern in rule["when"].items())
    ]


def _filled(row: dict[str, str]) -> dict[str, str]:
    """The row with cells filled that its source leaves empty, or set where the code that it ran says what they mean.

    A rule ``takes`` a cell from the notes by the first group of a pattern.
    """
    for rule in _rules(row) if "framework" in row else []:
        row = row | {column: text for column, text in rule.get("fills", {}).items() if not row.get(column)}
        row = row | rule.get("sets", {})
        for column, pattern in rule.get("takes", {}).items():
            stated = re.search(pattern, row.get("notes", ""))
            row = row if stated is None or row.get(column) else row | {column: stated[1]}
    return row


def _counter(row: dict[str, str]) -> str:
    """Which memory counter the row has; a rule says where one counts what no forecast of a step is about."""
    told = next((str(rule["counter"]) for rule in _rules(row) if "counter" in rule), "")
    return told or row.get("reserved_or_allocated", "") or "not stated"


def _framework_options(row: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """What is known of every run with a framework, model or method: versions of code, and settings of scripts."""
    found: dict[str, Any] = {}
    for rule in _rules(row):
        found |= rule.get("then", {})
    return found


def _variant_options(row: dict[str, str]) -> dict[str, Any]:
    """What the variant of a stack, named in the notes, says about the run."""
    match = re.search(r"Variant: (.*?)\. ", row.get("notes", ""))
    return _lookup("variant", match[1] if match else "")


def _clean_model(name: str) -> str:
    return re.sub(r" \(architecture\)$", "", name)
