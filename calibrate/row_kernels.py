"""What a row says of kernels and numbers in more cells than one, and what its card, its date and its versions allow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tunecast.calibrate.framework_names import last_day
from tunecast.calibrate.run_table import SkipRowError
from tunecast.catalogs.gpus import Gpu, training_dtype
from tunecast.catalogs.rental_facts import BITS_PER_BYTE
from tunecast.model.architecture import Architecture
from tunecast.model.fused import FLA, LINEAR_KERNELS
from tunecast.model.parallel_network import catalog_network
from tunecast.model.resolve_delta import has_linear_attention
from tunecast.model.run import Run
from tunecast.model.stacks import FLASH_3, FLASH_ATTENTION
from tunecast.model.units import GIGA

NAMED = re.compile(
    r"\b(?P<kernel>flash[ -]?attention(?:[ -]?v?[23](?![.\d]))?|xformers)\b(?!\s*(?:v|==)?\s*\d+\.\d)", re.IGNORECASE
)
"""A kernel in the column of software; with a version of its package it is one of the things that were installed."""
BY_DEFAULT = re.compile(r"(the )?default,? \(?(no|without|not) flash[ -]?att(ention|n)( ?v?2)?\)?", re.IGNORECASE)
FLASH_2_SINCE, FLASH_3_SINCE = "2023-07-17", "2024-07-11"
"""arXiv 2307.08691 and 2407.08608."""
SDPA_SINCE, FLASH_SINCE = (4, 36), (4, 34)
"""transformers' first releases with ``attn_implementation`` sdpa and with FlashAttention-2 (its release notes)."""
AMPERE = 8.0
"""Compute capability from which FlashAttention-2 runs (its README)."""
HALVES = {"bf16": r"\b(bf16|bfloat16)\b", "fp16": r"\b(fp16|float16)\b"}
WIDE = r"(fp32|float32|32[ -]?bits?)"
DYNAMIC = re.compile(r"unsloth-bnb-4bit$", re.IGNORECASE)


def with_kernel_of_software(row: dict[str, str], notes: list[str]) -> dict[str, str]:
    """The row with the attention that its column of software names, where no other cell says which it was."""
    if BY_DEFAULT.fullmatch(row.get("attention_impl", "")):
        return {**row, "attention_impl": "default"}
    found = NAMED.search(row.get("framework", ""))
    if found is None or row.get("attention_impl"):
        return row
    notes.append(f"attention_impl is not stated: framework {row['framework']!r} names {found['kernel']}.")
    return {**row, "attention_impl": found["kernel"]}


def with_base_of_quant(row: dict[str, str]) -> dict[str, str]:
    """The row with the number of bits of an unquantized base that its column of storage names; raises SkipRowError
    where two 16-bit numbers contradict each other."""
    quant, dtype = row.get("quant", "").strip().lower(), row.get("compute_dtype", "").strip().lower()
    half = next((name for name, words in HALVES.items() if re.fullmatch(words, dtype)), None)
    if half is None:
        return row
    if re.fullmatch(WIDE, quant):
        return {**row, "compute_dtype": f"fp32 weights, {half} autocast"}
    if any(re.fullmatch(words, quant) for name, words in HALVES.items() if name != half):
        raise SkipRowError(f"quant {row['quant']!r} and compute_dtype {row['compute_dtype']!r} contradict each other")
    return row


def check_named_numbers(row: Mapping[str, str], run: Run) -> None:
    """Raise SkipRowError where the column of software names the other 16-bit number."""
    named = {half for half, words in HALVES.items() if re.search(words, row.get("framework", ""), re.IGNORECASE)}
    used = {half for half in HALVES if half in run.precision or run.dtype == half}
    if len(named) == 1 and len(used) == 1 and named != used:
        raise SkipRowError(
            f"framework {row['framework']!r} and compute_dtype {row.get('compute_dtype', '')!r} contradict each other"
        )


def check_kernel(row: Mapping[str, str], options: Mapping[str, Any], gpu: Gpu) -> None:
    """Raise SkipRowError for attention that the card, the date or the software of a row did not have."""
    chosen, said = str(options.get("attn_implementation", "")), f"attention_impl {row.get('attention_impl', '')!r}"
    flash = chosen.startswith("flash_attention")
    named = NAMED.search(row.get("framework", ""))
    if chosen == "eager" and named is not None and row.get("attention_impl"):
        raise SkipRowError(f"{said} and framework {row['framework']!r} contradict each other: it names {named[0]}")
    if flash and gpu.vendor == "nvidia" and float(gpu.compute_capability or 0.0) < AMPERE:
        raise SkipRowError(f"{said}: FlashAttention-2 needs Ampere or later, which {gpu.id} is not")
    if flash and "attention_kernel" not in options and "" < last_day(row.get("source_date", "")) < FLASH_2_SINCE:
        raise SkipRowError(f"{said}: FlashAttention-2 came on {FLASH_2_SINCE}, and the first version is not built")
    if chosen == FLASH_3 and "" < last_day(row.get("source_date", "")) < FLASH_3_SINCE:
        raise SkipRowError(f"{said}: FlashAttention-3 came on {FLASH_3_SINCE}")
    version = re.search(r"\btransformers[ =v]*(\d+)\.(\d+)", row.get("framework", ""))
    release = (int(version[1]), int(version[2])) if version else SDPA_SINCE
    since = {"sdpa": SDPA_SINCE, **dict.fromkeys(FLASH_ATTENTION, FLASH_SINCE)}.get(chosen)
    if since is not None and row.get("attention_impl") and release < since:
        raise SkipRowError(
            f"{said}: transformers has it since {since[0]}.{since[1]}, and framework names {release[0]}.{release[1]}"
        )


def with_linear_attention(
    row: Mapping[str, str], options: dict[str, Any], architecture: Architecture, of_software: str
) -> None:
    """Add to the options the packages that a row's linear attention runs by, and take out what only this asks;
    `of_software` are the kernels that the software brings. Raises SkipRowError where a table that tells of attention
    does not tell which code that was: PyTorch's is far slower."""
    rule, convolution = options.pop("delta_rule", ""), options.pop("convolution", "")
    if not has_linear_attention(architecture):
        return
    named = [part for part in str(options.get("fused_kernels", "")).split(",") if part]
    by_packages = FLA in (*named, *of_software.split(","))
    if "attention_impl" in row and not rule and not by_packages:
        raise SkipRowError(
            f"attention_impl {row['attention_impl']!r} does not say whether flash-linear-attention ran the linear "
            f"attention of {architecture.name}: write fla, or no fla, beside the kernel of its other layers"
        )
    if rule == "torch" and by_packages:
        raise SkipRowError(
            f"attention_impl {row['attention_impl']!r} and framework {row['framework']!r}, which names {FLA}, "
            "contradict each other"
        )
    added = [part for part in (rule, convolution) if part in LINEAR_KERNELS]
    if added:
        options["fused_kernels"] = ",".join(dict.fromkeys((*named, *added)))


def check_software_of_card(row: Mapping[str, str], gpu: Gpu, notes: list[str]) -> None:
    """Raise SkipRowError for AMD's software on another card; tell of 4 bits of which Unsloth leaves some maps out."""
    if re.search(r"\brocm\b", row.get("framework", ""), re.IGNORECASE) and gpu.vendor != "amd":
        raise SkipRowError(f"framework {row['framework']!r} is AMD's, and {gpu.id} is no AMD card")
    if DYNAMIC.search(row.get("model", "")):
        notes.append(f"model {row['model']!r}: Unsloth's dynamic 4 bits leave some layers in 16, which are read as 4.")


def check_bf16(row: Mapping[str, str], gpu: Gpu) -> None:
    """Raise SkipRowError for bf16 on a card that has none: neither the emulation of it nor fp16 is what it says."""
    if re.search(HALVES["bf16"], row.get("compute_dtype", ""), re.IGNORECASE) and training_dtype(gpu) != "bf16":
        raise SkipRowError(
            f"compute_dtype {row['compute_dtype']!r}: {gpu.id} has no bf16, and emulating it is not built: write fp16 "
            "if that ran"
        )


def note_network(run: Run, gpu: Gpu, stated: float | None, notes: list[str]) -> None:
    """Which network is taken where several machines are joined by one that nobody states."""
    if run.num_gpus <= run.gpus_per_node or stated is not None:
        return
    known = catalog_network(gpu.id, run.gpus_per_node)
    if known is not None:
        fast, slow = (rate * BITS_PER_BYTE / GIGA for rate in (known.bytes_per_s, known.slower_bytes_per_s))
        notes.append(
            f"internode_gbps is not stated: {fast:,.0f} Gbit/s are taken ({known.where}), and the interval allows for "
            f"{slow:,.0f}."
        )
