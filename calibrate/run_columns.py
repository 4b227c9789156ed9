"""Headings of a table of runs: those that are read, other people's words for them, and what is not read at all."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tunecast.catalogs.errors import InputError

READ = (
    "id", "set", "source_date", "kind", "model", "params_b", "method", "rank", "lora_targets", "quant", "compute_dtype",
    "seq_len", "packed", "micro_batch", "grad_accum", "global_batch", "gpus", "gpu", "gpu_canonical_id", "parallelism",
    "internode_gbps", "grad_checkpointing", "attention_impl", "compile", "framework", "optimizer", "tokens_per_s",
    "tokens_per_s_per_gpu", "samples_per_s", "step_time_s", "peak_mem_gib", "reserved_or_allocated", "notes",
    "confidence",
)  # fmt: skip
"""Columns that say something of a run or of what was measured."""
KEPT = (
    "source", "gpu_variant_notes", "total_time_h", "total_tokens_or_steps", "tflops_per_gpu", "mfu", "cost_usd",
    "price_per_h",
)  # fmt: skip
"""Columns of the published table that no forecast needs."""
WORDS = {
    "model": r"(base )?model( name| id)?|model name or path",
    "method": r"(training |fine ?tuning |peft )?method",
    "rank": r"lora (r|rank)|r",
    "lora_targets": r"(lora )?target modules|targets|lora target modules",
    "quant": r"quantization|quantisation|quantized|quant (method|type)|base quantization|load in 4 ?bit",
    "compute_dtype": r"(mixed )?precision|dtype|torch dtype|data type|bf16",
    "seq_len": r"(max )?(seq(uence)?|context) len(gth)?|max length|max seq(uence)? len(gth)?|cutoff len|context",
    "packed": r"packing|sample packing|sequence packing|pack(ed)? samples",
    "micro_batch": r"(micro|per device|per gpu|device|train)( train)? batch( size)?|batch( size)?|mbs|bs"
    r"|per device train batch size|micro batch size",
    "grad_accum": r"grad(ient)? accum(ulation)?( steps)?|ga|accumulation( steps)?",
    "global_batch": r"global batch size|gbs|(total|effective) batch( size)?",
    "gpus": r"(num|number of|n) gpus|world size|gpu count|num devices",
    "gpu": r"gpu (type|name|model)|device|accelerator|card|hardware",
    "parallelism": r"sharding|strategy|distributed( strategy)?|parallel(ism)? strategy",
    "grad_checkpointing": r"(gradient|activation) checkpointing|activation checkpoint|grad(ient)? ckpt|recompute"
    r"|activation recomputation|ac",
    "attention_impl": r"attention( implementation)?|attn|attn impl(ementation)?|flash attention",
    "compile": r"torch compile|compiled",
    "framework": r"stack|software|trainer|library",
    "optimizer": r"optim",
    "source_date": r"date|day|measured on",
    "tokens_per_s": r"tok(ens)?( ?/ ?| per )s(ec(ond)?)?|tps|throughput|speed|tok per s",
    "tokens_per_s_per_gpu": r"tok(ens)?( ?/ ?| per )s(ec(ond)?)?( ?/ ?| per )gpu|tps per gpu|tgs",
    "samples_per_s": r"(samples|seqs|sequences)( ?/ ?| per )s(ec(ond)?)?|train samples per second",
    "step_time_s": r"step time|(time|s(ec(onds)?)?)( ?/ ?| per )(step|it(er(ation)?)?)|iteration time( s)?",
    "peak_mem_gib": r"peak (mem(ory)?|vram)( gi?b)?|vram( gi?b)?|(gpu )?memory( gi?b)?|max memory( gi?b)?|peak mem gb",
}
"""By column: what other tables call it, on headings in lower case whose dashes and underscores are blanks."""
CLOSE = 0.85
"""How alike a heading and a column's name are (`difflib`) from which one is taken for a slip of the other."""


def check_columns(path: Path, columns: Iterable[str]) -> None:
    """Raises InputError for a heading that is another word for a column which the table lacks: a setting that the row
    states would be read as its default."""
    own = list(columns)
    for heading in unread(own):
        meant = meant_by(heading)
        if meant and meant not in own:
            raise InputError(
                f"{path} has the column {heading!r}, which is not read; if it is {meant}, call it so, else drop it."
            )


def unread(columns: Sequence[str]) -> list[str]:
    """Headings that say nothing to a forecast and are no columns of the published table."""
    return [name for name in columns if name and name not in READ and name not in KEPT]


def meant_by(heading: str) -> str | None:
    """The column that a heading is another word for, or a slip of."""
    plain = re.sub(r"[\s_-]+", " ", re.sub(r"[()\[\]]", " ", heading.lower())).strip()
    found = next((column for column, words in WORDS.items() if re.fullmatch(words, plain)), None)
    return found or next(iter(difflib.get_close_matches(heading.lower(), READ, n=1, cutoff=CLOSE)), None)
