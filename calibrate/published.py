"""Read a table of published runs into run fields, by a committed vocabulary.

A row that cannot be read honestly is skipped with the reason; nothing is guessed. Low-confidence
rows are never used. The table's columns are those of ``results/published/published-runs.csv``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tunecast.calibrate.cell_cards import with_one_gpu
from tunecast.calibrate.cell_targets import in_model, same_targets, separate
from tunecast.calibrate.framework_names import Software, attention_of, has_own_loop, software_of, trainer_drives
from tunecast.calibrate.named_things import check_card, gpu_called, model_called
from tunecast.calibrate.row_cells import (
    check_doubts,
    check_half,
    counter_of,
    fill_padded,
    note_full,
    on_old_card,
    rows_are_full,
    samples_that_fill,
    why_no_speed,
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
    with_linear_attention,
)
from tunecast.calibrate.row_kind import check_confidence, check_kind
from tunecast.calibrate.row_options import fusable, options_of
from tunecast.calibrate.row_peak import peak_memory
from tunecast.calibrate.row_plain import plain_cells
from tunecast.calibrate.row_rules import check_rules, filled, from_rules, rules_of
from tunecast.calibrate.row_sharding import network_gbps, nvlink_said
from tunecast.calibrate.run_end import OUT_OF_MEMORY, check_status, out_of_memory
from tunecast.calibrate.run_table import (
    NOTHING,
    SkipRowError,
    check_batch,
    check_possible,
    check_size,
    dated,
    naming,
    number,
)
from tunecast.calibrate.vocabulary import vocabulary
from tunecast.calibrate.whole_time import speed_of
from tunecast.catalogs.errors import TunecastError
from tunecast.catalogs.gpus import Gpu, find_gpu, load_gpus, training_dtype
from tunecast.model.adapter_targets import target_modules
from tunecast.model.architecture import Architecture
from tunecast.model.experts_modules import in_modules
from tunecast.model.flash_3 import runs_flash_3
from tunecast.model.grouped import experts_on_card
from tunecast.model.joined import joined, joined_targets
from tunecast.model.litgpt import as_litgpt
from tunecast.model.loss_budget import on_card
from tunecast.model.paging import paging_on_card
from tunecast.model.resolve import resolve_run
from tunecast.model.resolve_litgpt import of_stack
from tunecast.model.resolve_parallel import MEGATRONS
from tunecast.model.run import Run
from tunecast.model.sdpa import sdpa_on_card
from tunecast.model.stack_versions import code_age
from tunecast.model.stacks import FLASH_3, PLAIN
from tunecast.model.target import resolve_targets
from tunecast.model.units import GIB

MEGATRON = "megatron"


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
    mean_tokens: float | None = None
    """Mean length of samples that are not packed, by which its speed is compared (`mean_rows`)."""
    grouped: bool = False
    """Whether these samples come in the order of their lengths (``--group-by-length``)."""
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
    check_status(row)
    notes: list[str] = []
    row = with_kernel_of_software(with_base_of_quant(filled(row, notes)), notes)
    rules = rules_of(row)
    check_rules(row, rules)
    gpu = find_gpu(_gpu_id(row, notes))
    software = _software(row, notes)
    stated: set[str] = set()
    options = options_of(row, rules, software, notes, stated)
    stated.update(("internode_gbps",) if number(row, "internode_gbps") is not None else ())
    check_software_of_card(row, gpu, notes)
    check_bf16(row, gpu)
    check_kernel(row, options, gpu)
    kernel = _kernel(row, options, gpu)
    samples_fill = samples_that_fill(row)
    full = rows_are_full(row, options) or samples_fill
    fill_padded(options)
    architecture = _architecture(row, options)
    if "lora_target_modules" in options:
        _targets(row, options, architecture, software)
    with_linear_attention(row, options, architecture, software.fused)
    if software.fused or (software.stack and "fused_kernels" in options):
        options["fused_kernels"] = fusable(software, options, architecture)
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
    peak_gib, why_no_memory = peak_memory(row, gpu, architecture, run)
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
    if options.get("attn_implementation") == FLASH_3 and not runs_flash_3(gpu):
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
        return Software(label=PLAIN)
    known: dict[str, str] = vocabulary()["framework"]
    if row["framework"] in known:
        label = known[row["framework"]]
        return Software(label=label, attention=attention_of(label), trainer=trainer_drives(label))
    found = software_of(row["framework"], row.get("source_date", ""))
    notes.extend(found.notes)
    return found
