"""Read a table of published runs into run fields, by a committed vocabulary.

A row that cannot be read honestly is skipped with the reason; nothing is guessed. Low-confidence
rows are never used. The table's columns are those of ``results/published/published-runs.csv``.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tunecast.calibrate.cell_cards import cards_of, with_one_gpu
from tunecast.calibrate.cell_targets import in_model, same_targets, separate
from tunecast.calibrate.framework_names import Software, attention_of, has_own_loop, software_of, trainer_drives
from tunecast.calibrate.named_things import check_card, gpu_called, model_called
from tunecast.calibrate.row_cells import (
    as_software_attends,
    cells,
    check_doubts,
    check_half,
    counter_of,
    note_full,
    note_method,
    on_old_card,
    rows_are_full,
    samples_that_fill,
    why_no_speed,
    with_base,
    with_master,
)
from tunecast.calibrate.row_faults import in_columns, with_others
from tunecast.calibrate.row_kernels import (
    check_bf16,
    check_kernel,
    check_named_numbers,
    check_software_of_card,
    note_network,
    with_base_of_quant,
    with_kernel_of_software,
)
from tunecast.calibrate.row_kind import check_confidence, check_kind
from tunecast.calibrate.row_plain import plain_cells, variant_options
from tunecast.calibrate.row_rules import filled, from_rules, rules_of, with_rules
from tunecast.calibrate.row_sharding import check_shared, network_gbps, nvlink_said, unshared
from tunecast.calibrate.run_table import (
    NOTHING,
    OUT_OF_MEMORY,
    SkipRowError,
    check_batch,
    check_possible,
    check_size,
    dated,
    micro_batches,
    naming,
    number,
    out_of_memory,
    peak_memory,
    whole,
)
from tunecast.calibrate.vocabulary import (
    absent_columns,
    as_shards,
    bare_number,
    default_for,
    defaults_of,
    upcast_by_accelerate,
    vocabulary,
    with_numbers,
)
from tunecast.calibrate.whole_time import speed_of
from tunecast.catalogs.errors import TunecastError
from tunecast.catalogs.gpus import Gpu, find_gpu, load_gpus, training_dtype
from tunecast.model.adapter_targets import target_modules
from tunecast.model.architecture import Architecture
from tunecast.model.experts_modules import in_modules
from tunecast.model.grouped import experts_on_card
from tunecast.model.joined import joined, joined_targets
from tunecast.model.litgpt import as_litgpt
from tunecast.model.loss_budget import on_card
from tunecast.model.paging import paging_on_card
from tunecast.model.resolve import resolve_run
from tunecast.model.resolve_fused import why_not_fused
from tunecast.model.resolve_litgpt import of_stack
from tunecast.model.resolve_parallel import FSDP, MEGATRONS
from tunecast.model.run import Run
from tunecast.model.sdpa import sdpa_on_card
from tunecast.model.stack_versions import code_age
from tunecast.model.stacks import ours
from tunecast.model.target import resolve_targets
from tunecast.model.units import GIB

"""Compute capability from which FlashAttention-2 runs (its README)."""
DEFAULT_STACK, TORCHTITAN, MEGATRON = "hf-peft", "torchtitan", "megatron"


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
    whole_time: str = ""
    """That the speed is of the whole wall time, evaluations and saves included, in a sentence: nothing is fitted to it.
    Empty where a speed or a step's time is stated."""
    peak_bytes: float | None
    counter: str
    """Which memory counter: ``allocated``, ``reserved`` or ``not stated``."""
    why_no_speed: str = ""
    """Why stated samples/s are not the row's speed, or empty."""
    why_no_memory: str = ""
    """Why a stated peak memory cannot be read, or empty."""
    notes: str = ""
    attention_kernel: str = ""
    """Whose attention it ran, where that is older than the model's: a key of the beliefs' ``attention_kernels``."""
    internode_gbps: float | None = None
    """Network of one machine as the source states it; None: that of a catalog instance with this GPU."""
    nvlink: bool | None = None
    """Whether a cell says that NVLink bridges join its cards; None of cards without them."""
    reading_notes: tuple[str, ...] = ()
    """What no cell says and the code of the row's software or the catalog does, in sentences."""
    host: str = ""
    """The kind of machine that issued it, where several sources share one; empty: their own."""
    own_loop: bool = False
    """Whether its authors wrote the training loop: how exact its tensors are is then as of other code."""
    stated: frozenset[str] = field(default=frozenset(), compare=False)
    """Columns whose cells state something, and the run fields that they state; the others are the software's defaults,
    or follow from these."""

    @property
    def mark(self) -> str:
        """Eight hexadecimal digits of what ran and what was measured: of two rows with one id, which is which."""
        figures = (f"{figure or 0:.6g}" for figure in (self.tokens_per_s, self.peak_bytes))
        told = " ".join((self.id, self.gpu, self.architecture.name, self.run.method, *figures))
        return hashlib.sha256(told.encode()).hexdigest()[:8]

    @property
    def network(self) -> dict[str, Any]:
        """What joins the machines and the cards inside one, as options of a question."""
        said = {"internode_gbps": self.internode_gbps, "nvlink": self.nvlink}
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row that is not used, and why."""

    id: str
    reason: str


def read_runs(rows: Iterable[dict[str, str]]) -> tuple[list[PublishedRun], list[SkippedRow]]:
    """Rows the model can forecast, and the rest with reasons."""
    runs: list[PublishedRun] = []
    skipped: list[SkippedRow] = []
    for row in rows:
        try:
            runs.append(_read_row(row))
        except SkipRowError as skip:
            skipped.append(SkippedRow(id=row["id"], reason=with_others(row, str(skip))))
        except TunecastError as error:
            skipped.append(SkippedRow(id=row["id"], reason=in_columns(str(error), row)))
    return runs, skipped


def _read_row(row: dict[str, str]) -> PublishedRun:
    check_confidence(row)
    check_kind(row)
    check_doubts(row)
    row = dated(row)
    check_card(row)
    row = plain_cells(with_one_gpu(row))
    if row.get("model", "").lower() in NOTHING:
        raise SkipRowError("model is not stated")
    row = out_of_memory(row)
    if row.get("notes", "").startswith(OUT_OF_MEMORY):
        raise SkipRowError("ran out of memory: a test of fit, not of speed")
    notes: list[str] = []
    row = with_kernel_of_software(with_base_of_quant(filled(row, notes)), notes)
    rules = rules_of(row)
    for rule in rules:
        if "skip" in rule:
            raise SkipRowError(rule["skip"])
    gpu = find_gpu(_gpu_id(row, notes))
    software = _software(row, notes)
    stated: set[str] = set()
    options = _options(row, rules, software, notes, stated)
    stated.update(("internode_gbps",) if number(row, "internode_gbps") is not None else ())
    check_software_of_card(row, gpu, notes)
    check_bf16(row, gpu)
    check_kernel(row, options, gpu)
    kernel = _kernel(row, options, gpu)
    samples_fill = samples_that_fill(row)
    full = rows_are_full(row, options) or samples_fill
    architecture = _architecture(row, options)
    if "lora_target_modules" in options:
        _targets(row, options, architecture, software)
    if software.fused or (software.stack and "fused_kernels" in options):
        options["fused_kernels"] = _fusable(software, options, architecture)
    half = str(options.pop("half", ""))
    run = _on_its_card(row, architecture, options, gpu, notes)
    run = replace(run, **from_rules(rules, "after_else", but=stated), **from_rules(rules, "after"))
    check_half(half, row, run)
    check_named_numbers(row, run)
    if software.joins or any("joined" in rule for rule in rules):
        with naming("lora_targets"):
            run = joined_targets(run)
        architecture = joined(architecture)
    if software.label == MEGATRON and run.sharding in MEGATRONS:
        run = _as_megatron(run, software)
    check_batch(row, run)
    tokens_per_s, whole_run = speed_of(row, run, full=full, samples_fill=samples_fill)
    note_full(row, tokens_per_s, notes)
    peak_gib, why_no_memory = peak_memory(row, gpu)
    check_possible(row, tokens_per_s, architecture, run, gpu)
    network = network_gbps(row, rules)
    note_network(run, gpu, network, notes)
    return PublishedRun(
        id=row["id"],
        source=row["id"].split("-")[0] if "-" in row["id"] else "table",
        stack=software.label,
        gpu=gpu.id,
        architecture=architecture,
        run=run,
        tokens_per_s=tokens_per_s,
        whole_time=whole_run.note,
        why_no_speed=why_no_speed(row) or whole_run.why_not if tokens_per_s is None else "",
        peak_bytes=None if peak_gib is None else peak_gib * GIB,
        counter=counter_of(row, rules),
        why_no_memory=why_no_memory,
        notes=row.get("notes", ""),
        attention_kernel=kernel or next((rule["attention_kernel"] for rule in rules if "attention_kernel" in rule), ""),
        internode_gbps=network,
        nvlink=nvlink_said(row, gpu, run, notes),
        reading_notes=tuple(notes),
        own_loop=has_own_loop(row.get("framework", "")),
        stated=frozenset(stated),
    )


def _architecture(row: dict[str, str], options: dict[str, Any]) -> Architecture:
    """The model of a row, by the code that ran it; takes what only this asks out of the options."""
    with naming("model"):
        architecture = model_called(row["model"])
    check_size(row, architecture)
    if "litgpt_code" in options:
        architecture = as_litgpt(architecture, options.pop("litgpt_code"))
    else:
        architecture = of_stack(architecture, options)
    return architecture if (code_age(options) or "5") == "5" else in_modules(architecture)


def _on_its_card(
    row: dict[str, str], architecture: Architecture, options: dict[str, Any], gpu: Gpu, notes: list[str]
) -> Run:
    """The run of a row's options, with what its card decides."""
    on_old_card(options, gpu)
    resolved = resolve_run(architecture, options, gpu_has_bf16=training_dtype(gpu) == "bf16")
    (target,) = resolve_targets([gpu.id], {})
    resolved = on_card(sdpa_on_card(resolved, architecture, target), architecture, target)
    return paging_on_card(experts_on_card(resolved, architecture, target), architecture, target).run


def _as_megatron(run: Run, software: Software) -> Run:
    """The run by Megatron-Core's buffers and optimizer: Transformer Engine's fused AdamW (``core/optimizer``)."""
    optim = "adamw_torch_fused" if run.optim == "adamw_torch" else run.optim
    return replace(run, stack=MEGATRON, optim=optim, reduce_dtype="fp32" if software.adds_in_fp32 else None)


def _targets(row: dict[str, str], options: dict[str, Any], architecture: Architecture, software: Software) -> None:
    """The modules that method and lora_targets name, in the model's own names; raises SkipRowError by their column."""
    asked, of_method = str(options["lora_target_modules"]), options.pop("method_targets", None)
    if of_method and not same_targets(architecture, of_method, asked):
        raise SkipRowError(f"method {row['method']!r} and lora_targets {row['lora_targets']!r} contradict each other")
    options["lora_target_modules"] = found = in_model(architecture, separate(asked) if software.joins else asked)
    if options["method"] != "full":
        with naming("lora_targets" if row.get("lora_targets") else "method"):
            target_modules(architecture, found)


def _kernel(row: dict[str, str], options: dict[str, Any], gpu: Gpu) -> str:
    """Another attention kernel than FlashAttention-2, where it exists."""
    kernel = str(options.pop("attention_kernel", ""))
    if options.pop("of_amd", False) and gpu.vendor != "amd":
        raise SkipRowError(
            f"attention_impl {row['attention_impl']!r}: it is of AMD's software, and {gpu.id} is no AMD card"
        )
    if kernel == "flash-3" and gpu.compute_capability != "9.0":
        raise SkipRowError(f"attention_impl {row['attention_impl']!r}: it is written for Hopper, which {gpu.id} is not")
    return kernel


def _gpu_id(row: dict[str, str], notes: list[str]) -> str:
    """The catalog's id of the card, from the column with ids or from the text."""
    stated = row.get("gpu", "")
    found = row.get("gpu_canonical_id", "") or vocabulary()["gpu"].get(stated, "")
    if not (found or stated):
        raise SkipRowError("gpu is not stated")
    column = "gpu_canonical_id" if row.get("gpu_canonical_id", "") else "gpu"
    with naming(column):
        found, note = (str(found), "") if found in load_gpus() else gpu_called(str(found or stated))
    notes.extend([note] if note else [])
    return found


def _software(row: dict[str, str], notes: list[str]) -> Software:
    """The training software: known texts have their label alone; plain transformers without a column."""
    if "framework" not in row:
        return Software(label=DEFAULT_STACK)
    known: dict[str, str] = vocabulary()["framework"]
    if row["framework"] in known:
        label = known[row["framework"]]
        return Software(label=label, attention=attention_of(label), trainer=trainer_drives(label))
    found = software_of(row["framework"], row.get("source_date", ""))
    notes.extend(found.notes)
    return found


def _options(
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
    options["per_device_train_batch_size"] = whole(row, "micro_batch")
    copies = options["num_gpus"] // math.prod(int(options.get(way, 1)) for way in ("tp", "pp", "cp"))
    options["gradient_accumulation_steps"] = micro_batches(row, options["max_length"], max(copies, 1), notes)
    if options["num_gpus"] > 1 and "sharding" not in options:
        raise SkipRowError("parallelism is not stated")
    check_shared(row, options)
    if options["num_gpus"] > 1 and options.get("sharding") == "fsdp":
        # TRL prepares no 4-bit base that FSDP shards (``is_sharded_qlora`` in its ``SFTTrainer``).
        options.pop("upcast_non_quantized", None)
    if upcast_by_accelerate(row, options):
        options["master_dtype"] = "fp32"
    if not software.stack and options["num_gpus"] > 1 and options.get("sharding") in FSDP:
        options.setdefault("master_dtype", "none")
    _adapters(row, software, options, default)
    return options


def _as_copies_are(options: dict[str, Any], row: dict[str, str], software: Software, notes: list[str]) -> None:
    """How copies share the model where parallelism names degrees alone."""
    named = re.search(r"\bddp\b|replic", row.get("parallelism", ""), re.IGNORECASE)
    if software.label == TORCHTITAN and options.get("sharding") == "ddp" and not named:
        options["sharding"] = "fsdp"
        notes.append("parallelism names no sharding: torchtitan's data parallelism is FSDP (ParallelDims, dp_shard).")


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
    if not software.stack and software.label != DEFAULT_STACK and options.get("precision") in ("bf16", "fp16"):
        # PEFT itself keeps the adapters of a 16-bit model in fp32 (autocast_adapter_dtype).
        options.setdefault("adapter_dtype", options["precision"])


def _fusable(software: Software, options: dict[str, Any], architecture: Architecture) -> str:
    """Fused kernels of the software and those that the row names, as far as the model and the rest of the run allow."""
    own = defaults_of(software, str(options["method"])).get("fused_kernels", ()) if software.stack else ()
    every = dict.fromkeys((*own, *software.fused.split(","), *str(options.get("fused_kernels", "")).split(",")))
    values = {"loss_type": "nll", "attn_implementation": "sdpa", **options}
    return ",".join(part for part in every if part and not why_not_fused(part, values, architecture)) or "none"
