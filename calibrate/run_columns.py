"""Headings of a table of runs: those that are read, other people's words for them, settings that belong into a cell of
another column, and what is not read at all."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tunecast.catalogs.errors import InputError

READ = (
    "id", "set", "source_date", "kind", "model", "params_b", "method", "rank", "lora_targets", "quant",
    "compute_dtype", "seq_len", "packed", "mean_tokens", "micro_batch", "grad_accum", "global_batch", "gpus", "gpu",
    "gpu_canonical_id", "parallelism", "internode_gbps", "grad_checkpointing", "attention_impl", "compile",
    "framework", "optimizer", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s", "step_time_s", "total_time_h",
    "total_tokens_or_steps", "peak_mem_gib", "reserved_or_allocated", "notes", "confidence", "status",
)  # fmt: skip
"""Columns that say something of a run or of what was measured."""
MEASURABLE = frozenset(READ) - {"notes"}
"""Columns that a table has once, whatever the case of their letters."""
KEPT = ("source", "gpu_variant_notes", "tflops_per_gpu", "mfu", "cost_usd", "price_per_h")
"""Columns of the published table that no forecast needs."""
SECOND = r"s(ec(ond)?s?)?"
OFTEN = rf"( ?/ ?| per | ){SECOND}"
"""``/s``, ``per second``, and a blank, which a dash or an underscore in a heading may be."""
MEAN = r"((train(ing)?|avg|average|mean|median|throughput|speed) )*"
TOKENS_PER_S = rf"{MEAN}(toks?|tokens?){OFTEN}"
WHOLE = r"((total|train(ing)?|wall( ?clock)?|fine ?tuning|elapsed) )*"
EACH = r"( ?/ ?| per | )(gpu|device|card)"
WORDS = {
    "model": r"(base )?model( name| id)?|model name or path",
    "method": r"(training |fine ?tuning |peft )?method",
    "rank": r"lora (r|rank)|r",
    "lora_targets": r"(lora )?target modules|targets|lora target modules",
    "quant": r"quantization|quantisation|quantized|quant (method|type)|base quantization",
    "compute_dtype": r"(mixed )?precision|dtype|torch dtype|data type",
    "seq_len": r"(max )?(seq(uence)?|context) len(gth)?|max length|max seq(uence)? len(gth)?|cutoff len|context",
    "packed": r"packing|sample packing|sequence packing|pack(ed)? samples",
    "mean_tokens": r"(mean|avg|average) (sample |seq(uence)? |row |number of )?(tokens|len(gth)?)( per (sample|row))?"
    r"|tokens per sample|num tokens per sample",
    "micro_batch": r"(micro|per device|per gpu|device|train)( train)? batch( size)?|batch( size)?|mbs|bs"
    r"|per device train batch size|micro batch size",
    "grad_accum": r"grad(ient)? accum(ulation)?( steps)?|gas?|accum(ulation)?( steps)?|micro steps"
    r"|accumulate grad batches",
    "global_batch": r"global batch size|gbs|(total|effective) batch( size)?",
    "gpus": r"(num|number of|n|#|no\.?( of)?|count of) ?gpus?|gpus? (num|number)|world size|gpu count|(num )?devices",
    "gpu": r"gpu (type|name|model)|device|accelerator|card|hardware",
    "parallelism": r"sharding|strategy|distributed( strategy)?|parallel(ism)? strategy",
    "grad_checkpointing": r"((grad(ient)?|act(ivation)?) )?(checkpoint(ing|s)?|ckpt)|recompute"
    r"|activation recomputation|ac",
    "attention_impl": r"attention( implementation| backend| type)?|attn|attn impl(ementation)?",
    "compile": r"torch compile|compiled",
    "framework": r"stack|software|trainer|library",
    "optimizer": r"optim",
    "status": r"(run |final |exit |job )?(status|outcome)|end(ed)?( as)?",
    "source_date": r"date|day|measured on",
    "tokens_per_s": rf"{TOKENS_PER_S}|t ?/ ?s|tps|(train(ing)? )?(throughput|speed)",
    "tokens_per_s_per_gpu": rf"{TOKENS_PER_S}{EACH}|(toks?|tokens?){EACH}{OFTEN}|tps{EACH}|tgs",
    "samples_per_s": rf"{MEAN}(samples?|seqs?|sequences?|examples?){OFTEN}",
    "step_time_s": rf"{MEAN}(step|it(er(ation)?)?) (time|duration)( (in )?{SECOND})?|step s"
    rf"|{MEAN}(time( ?/ ?| per )|{SECOND}( ?/ ?| per | ))(step|it(er(ation)?)?)( (in )?{SECOND})?",
    "peak_mem_gib": r"((gpu|peak|max) )*(mem(ory)?|vram)( (peak|used|usage))?( gi?b)?",
}
"""By column: what other tables call it, on headings in lower case whose dashes and underscores are blanks."""
OPTIONS = {
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "packing": "packed",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "grad_accum",
    "num_gpus": "gpus",
    "lora_r": "rank",
    "lora_target_modules": "lora_targets",
    "gradient_checkpointing": "grad_checkpointing",
    "attn_implementation": "attention_impl",
    "optim": "optimizer",
}
"""Options of TRL, Transformers and this command line that say just what a column says: they are read as it."""
ALSO = {
    r"(use )?(fa|flash ?attn|flash ?attention)( ?[23])?|attn flash": ("attention_impl", "FlashAttention-2"),
    r"(use )?(fp ?16|bf ?16|half( precision)?)": ("compute_dtype", "bf16, bf16-mixed or fp16-mixed"),
    r"(time|step( time)?|iter(ation)?( time)?) ?(in )?ms|ms( ?/ ?| per )(step|it(er(ation)?)?)": (
        "step_time_s", "1500 ms"
    ),
    rf"{MEAN}((it(er(ation)?)?s?|steps)( ?/ ?| per )|(its?|iters|iterations|steps) ){SECOND}": (
        "step_time_s", "the seconds of one step: 1.5"
    ),
    r"total (time|runtime) ?(in )?(s|sec|seconds|min|minutes)"
    rf"|{WHOLE}(run ?time|(train(ing)?|wall( ?clock)?) time|wall ?clock|elapsed( time)?|duration)"
    rf"( (in )?({SECOND}|min(ute)?s?|h(ou)?rs?|h))?|{WHOLE}hours": (
        "total_time_h", "5400 s, 90 min or 1.5 h"
    ),
    r"(peak |max )?((gpu )?mem(ory)?|vram) (mi?b|in mi?b)": ("peak_mem_gib", "24576 MiB"),
    r"(torch cuda )?((max|peak) )?(gpu )?(mem(ory)?|vram) (allocated|reserved)( (gi?b|mi?b|bytes))?"
    r"|(max|peak) (allocated|reserved)( (mem(ory)?))?( (gi?b|mi?b))?": (
        "peak_mem_gib", "24576 MiB, and allocated or reserved into reserved_or_allocated"
    ),
}  # fmt: skip
"""Headings that say the whole of a column in another form: the column, and what a cell there looks like."""
INTO = {
    r"((num|n) )?nodes|n ?nodes|num machines|machines|(num )?hosts|# ?nodes": ("gpus", "16 (2 nodes)"),
    r"(num )?gpus?( ?/ ?| per )(node|machine)|n ?proc per node|gpus on each node": ("gpus", "16 (2 nodes)"),
    r"load in 8 ?bit|8 ?bit|int ?8|use 8 ?bit": ("quant", "8-bit"),
    r"load in 4 ?bit|4 ?bit|nf4|int ?4|use 4 ?bit": ("quant", "NF4 or 4-bit"),
    r"(quant(ization)? )?n?bits|w ?bits|quantization bit": ("quant", "4-bit, 8-bit or none"),
    r"(bnb 4 ?bit )?(use )?(double|nested) quant(ization)?": ("quant", "NF4, double quantization"),
    r"bnb 4 ?bit quant type|quant(ization)? dtype": ("quant", "NF4 or FP4"),
    r"bnb 4 ?bit compute dtype": ("quant", "NF4, bf16 compute"),
    r"(zero|deep ?speed|zero dp)( stage)?( optimization)?|zero ?[123]": ("parallelism", "ZeRO-1, ZeRO-2 or ZeRO-3"),
    r"fsdp( (version|sharding|strategy|sharding strategy))?|fsdp ?[12]|use fsdp": ("parallelism", "FSDP"),
    r"ddp|use ddp|hsdp": ("parallelism", "DDP, FSDP or HSDP"),
    r"(cpu |fsdp |param(eter)?s? |optim(izer)? )*offload(ing|ed)?( (param(eter)?s?|optim(izer)?|cpu|device))*": (
        "parallelism", "ZeRO-3 + CPU offload"
    ),
    r"tp( size| degree)?|tensor (model )?parallel(ism)?( size| degree)?": ("parallelism", "TP=4, DP=2"),
    r"pp( size| degree)?|pipeline (model )?parallel(ism)?( size| degree)?": ("parallelism", "TP=4, PP=2"),
    r"cp( size| degree)?|context parallel(ism)?( size| degree)?": ("parallelism", "TP=2, CP=2"),
    r"dp( size| degree)?|data parallel(ism)?( size| degree)?|dp (shard|replicate)( degree)?"
    r"|data parallel (shard|replicate) degree": ("parallelism", "TP=4, DP=2 or FSDP"),
    r"ep( size| degree)?|expert (model )?parallel(ism)?( size| degree)?": ("parallelism", "EP=8 (not built yet)"),
    r"(ulysses )?sp( size| degree)?|(use )?sequence parallel(ism)?( size| degree)?": (
        "parallelism", "TP=8 + sequence parallel, or Ulysses 4"
    ),
    r"vpp?( size| degree)?|virtual pipeline( model)?( parallel)?( size| degree)?|interleave": (
        "parallelism", "PP=4, VPP=2"
    ),
    r"(use )?(dist(ributed)?|sharded) optim(izer)?": ("parallelism", "TP=2, distributed optimizer"),
    r"(fine ?tuning|peft|tuner|train(ing)?) type|(use )?q?lora": ("method", "full, LoRA or QLoRA"),
    r"(use )?dora": ("method", "DoRA"),
    r"(use )?rs ?lora": ("method", "rsLoRA"),
    r"modules to save|(train(ed|s)?|tune(d)?) (embed(ding)?s?|head|lm head)( and .*)?": (
        "lora_targets", "only adapters: weights that are trained beside them are not read from a table"
    ),
    r"(use |enable )?liger( kernels?)?": ("framework", "TRL + Liger"),
    r"(use )?unsloth": ("framework", "Unsloth"),
    r"(use )?(activation|activations) offload(ing)?|offload activations": (
        "grad_checkpointing", "yes, with activation offloading"
    ),
    r"(use )?reentrant": ("grad_checkpointing", "yes (reentrant)"),
    r"padding ?free|varlen": ("packed", "no, padding-free"),
    r"neat packing|multi ?pack": ("packed", "neat_packing"),
    r"(use )?group(ed)?( ?by ?length)?|(use )?length (grouped|grouping|bucket(ed|ing|s)?)|train sampling strategy": (
        "packed", "no, group_by_length, or no"
    ),
    r"padding( strategy| side)?|padded": ("packed", "no, padded to max length, or padding-free"),
    r"pad to (max length|sequence len)": ("packed", "padded to max length"),
    r"(use )?fp ?8": ("compute_dtype", "FP8 (TE)"),
    r"optim(izer)? (in|fused in) (bwd|backward)": ("optimizer", "AdamW, optimizer_in_bwd"),
}  # fmt: skip
"""Headings of one setting of several that a column's cell says together, which would be lost even where that column is
there: the column, and what a cell there looks like."""
CLOSE = 0.85
"""How alike a heading and a column's name are (`difflib`) from which one is taken for a slip of the other."""


def check_columns(path: Path, columns: Iterable[str]) -> None:
    """Raises InputError for a heading that is there twice, or says what belongs into another column: a setting that the
    row states would be read as its default."""
    own = list(columns)
    lower = [name.lower() for name in own]
    for heading in own:
        if heading and (own.count(heading) > 1 or (heading.lower() in MEASURABLE and lower.count(heading.lower()) > 1)):
            raise InputError(f"{path} has the column {heading!r} twice; drop one of them.")
    for heading in unread(own):
        into, cell, lost = belongs_into(heading)
        if into and (lost or into not in own):
            raise InputError(
                f"{path} has the column {heading!r}, which is not read: what it says belongs into {into}; a cell there "
                f"says {cell}."
            )
    slips = {heading: meant for heading in unread(own) if (meant := meant_by(heading)) and meant not in own}
    if len(slips) == 1:
        ((heading, meant),) = slips.items()
        raise InputError(
            f"{path} has the column {heading!r}, which is not read; if it is {meant}, call it so, else drop it."
        )
    if slips:
        told = ", ".join(f"{heading!r} ({meant})" for heading, meant in slips.items())
        raise InputError(
            f"{path} has columns that are not read: {told}; call each what stands behind it, if it is that, or drop it."
        )


def by_column(headings: Sequence[str]) -> list[str]:
    """Headings of a table with names of options as those of columns, where a table has one for each."""
    meant = [OPTIONS.get(heading, heading) for heading in headings]
    return [own if meant.count(column) > 1 else column for own, column in zip(headings, meant, strict=True)]


def unread(columns: Sequence[str]) -> list[str]:
    """Headings that say nothing to a forecast and are no columns of the published table."""
    return [name for name in columns if name and name not in READ and name not in KEPT]


def belongs_into(heading: str) -> tuple[str, str, bool]:
    """The column into whose cells the setting of a heading belongs, what such a cell says, and whether the setting is
    lost even where that column is there; empty for other headings."""
    plain = _plain(heading)
    for table, lost in ((ALSO, False), (INTO, True)):
        for words, (column, cell) in table.items():
            if re.fullmatch(words, plain):
                return column, cell, lost
    return "", "", False


def _plain(heading: str) -> str:
    """A heading whose dashes, underscores, points and brackets are blanks."""
    return re.sub(r"[\s_.-]+", " ", re.sub(r"[()\[\]]", " ", heading.lower())).strip()


def meant_by(heading: str) -> str | None:
    """The column that a heading is another word for, or a slip of."""
    plain = _plain(heading)
    found = next((column for column, words in WORDS.items() if re.fullmatch(words, plain)), None)
    return found or next(iter(difflib.get_close_matches(heading.lower(), READ, n=1, cutoff=CLOSE)), None)
