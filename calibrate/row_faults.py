"""Why a row cannot be read, in its own columns: every cell that is at fault, not only the first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from tunecast.calibrate.framework_names import software_of
from tunecast.calibrate.named_things import gpu_called, model_called
from tunecast.calibrate.row_cells import VOCABULARY_COLUMNS
from tunecast.calibrate.row_plain import said_otherwise
from tunecast.calibrate.run_table import SkipRowError, naming, number
from tunecast.calibrate.vocabulary import lookup, vocabulary
from tunecast.catalogs.gpus import load_gpus

PARALLELISM = (
    "tp",
    "pp",
    "cp",
    "cp-kind",
    "sharding",
    "offload",
    "fsdp-version",
    "pp-interleave",
    "sequence-parallel",
    "gpus-per-node",
)
COLUMN_OF = {
    "attn-implementation": "attention_impl",
    "checkpoint-keeps-ops": "grad_checkpointing",
    "dtype": "compute_dtype",
    "fp8": "compute_dtype",
    "gradient-accumulation-steps": "grad_accum",
    "gradient-checkpointing": "grad_checkpointing",
    "hf-code": "framework",
    "internode-gbps": "internode_gbps",
    "lora-r": "rank",
    "lora-target-modules": "lora_targets",
    "master-dtype": "compute_dtype",
    "max-length": "seq_len",
    "method": "method",
    "num-gpus": "gpus",
    "optim": "optimizer",
    "per-device-train-batch-size": "micro_batch",
    "precision": "compute_dtype",
    "quant-method": "quant",
    "reentrant": "grad_checkpointing",
    "stack": "framework",
    "stack-version": "framework",
    "torch-compile": "compile",
    "use-dora": "method",
    "recompute-attention": "grad_checkpointing",
    **dict.fromkeys(PARALLELISM, "parallelism"),
}
"""By option of the command line: the column that sets it in a table."""
ALONE = tuple(column for column in VOCABULARY_COLUMNS if column not in ("parallelism", "lora_targets"))
"""Columns of words that can be read without the rest of the row."""
NUMBERS = ("seq_len", "micro_batch", "grad_accum", "global_batch", "rank", "tokens_per_s", "step_time_s")
REPAIRABLE = re.compile(
    r"is not in the vocabulary|: Unknown |is not a (whole )?number|says nothing that is"
    r"|has a (decimal )?comma|without a comma|holds .* beside|holds \d+ numbers|: write which$"
)
"""Of a reason: that other words in the cell would have been read."""
SPLIT = "; "
OTHER_RUN = re.compile(
    r"[:;,] (?:use|type) "
    r"(?:--no-padding-free, or leave --attention-length out"
    r"|--tp 1(?: with --sharding fsdp)?(?:, or --method lora)?|--gradient-checkpointing in its place)"
)
"""Advice on the command line that would have another run than the row's forecast."""
Row = Mapping[str, str]


def in_columns(refusal: str, row: Row | None = None) -> str:
    """A refusal in words of the command line's options, behind the columns that these options are in a table; where no
    option can mend a row, in words of its cells."""
    for pattern, in_cells in IN_CELLS:
        found = pattern.search(refusal)
        if found is not None:
            return in_cells(found, row or {})
    options = re.findall(r"--(?:no-)?([a-z][a-z0-9-]*)", refusal)
    columns = list(dict.fromkeys(COLUMN_OF[option] for option in options if option in COLUMN_OF))
    said = OTHER_RUN.sub("", refusal).replace("--recompute-attention", "recomputing attention alone")
    return f"{', '.join(columns)}: {said}" if columns else said


def _of_old_code(found: re.Match[str], row: Row) -> str:
    said = " of ".join(f"{column} {row[column]!r}" for column in ("framework", "source_date") if row.get(column))
    return f"{said or 'framework'}: transformers before 5, as which the experts of {found['model']} are not built"


def _flash_in_fp32(_: re.Match[str], row: Row) -> str:
    stated, default = row.get("compute_dtype", ""), f"the default of framework {row.get('framework', '')!r}"
    if stated:
        return f"compute_dtype {stated!r} is fp32, which flash kernels do not take: write the 16-bit format, or sdpa"
    default = default if row.get("framework") else "the default"
    return f"compute_dtype is not stated, and {default} is fp32, which flash kernels do not take: write what ran"


def _gptq_in_another(found: re.Match[str], row: Row) -> str:
    stated = row.get("compute_dtype", "")
    default = f"compute_dtype is not stated, by default {found['precision']}"
    said = f"compute_dtype {stated!r}" if stated else default
    return f"{said}: the kernels that train a GPTQ base multiply in fp16; write fp16 mixed if they did"


def _across_samples(found: re.Match[str], row: Row) -> str:
    stated = (
        f"attention_impl {row['attention_impl']!r}" if row.get("attention_impl") else f"{found['kernel']} attention"
    )
    laid = f"samples that lie end to end (packed {row.get('packed', '')!r})"
    return f"{stated} does not keep {laid} apart: write the flash kernel that did, or what else kept them apart"


def _apart_unbuilt(found: re.Match[str], row: Row) -> str:
    return f"packed {row.get('packed', '')!r}: attention inside samples with {found['what']} is not built yet"


IN_CELLS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], Row], str]], ...] = (
    (re.compile(r"The experts of (?P<model>\S+) as transformers before 5 ran them are not built"), _of_old_code),
    (re.compile(r"Flash kernels take 16-bit numbers, but --precision is fp32"), _flash_in_fp32),
    (re.compile(r"--attn-implementation (?P<kernel>\S+) masks whole rows"), _across_samples),
    (re.compile(r"Attention inside documents \(.*\) with (?P<what>.*) is not built yet"), _apart_unbuilt),
    (re.compile(r"train a GPTQ base multiply in fp16, but --precision is (?P<precision>\S+);"), _gptq_in_another),
)
"""Refusals whose advice is about options that a table does not have, and what they mean in cells."""


def with_others(row: Row, first: str) -> str:
    """A reason to skip a row; if other words would be read, followed by what else in it would have to be others."""
    if not REPAIRABLE.search(first):
        return first
    told = [first]
    for check in _checks(row):
        try:
            check()
        except SkipRowError as fault:
            if REPAIRABLE.search(str(fault)) and str(fault) not in first:
                told.append(str(fault))
    return SPLIT.join(told)


def _checks(row: Row) -> Iterator[Callable[[], object]]:
    """What can be asked of one cell alone."""
    card = row.get("gpu", "")
    if card and not row.get("gpu_canonical_id") and vocabulary()["gpu"].get(card, card) not in load_gpus():
        yield lambda: _named("gpu", gpu_called, card)
    if row.get("model"):
        yield lambda: _named("model", model_called, row["model"])
    if row.get("framework") and row["framework"] not in vocabulary()["framework"]:
        yield lambda: software_of(row["framework"], row.get("source_date", ""))
    for column in ALONE:
        if row.get(column):
            yield lambda column=column: lookup(column, row[column])  # type: ignore[misc]
    for column in NUMBERS:
        if said_otherwise(column, row.get(column, "")):
            continue
        yield lambda column=column: number(dict(row), column)  # type: ignore[misc]


def _named(column: str, find: Callable[[str], object], text: str) -> None:
    with naming(column):
        find(text)
