"""Command line over file: what the user types wins, and takes with it what no longer fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.amount import AMOUNTS
from tunecast.model.configs.common import LORA_KERNELS, ONE_PIECE, TOKENS_UNPADDED, UNPACKED
from tunecast.model.configs.run_file import RunFile
from tunecast.model.configs.spread import CAST, UNWRAPPED, put_dtypes, settle_dtypes, told_by_spread
from tunecast.model.configs.zero_fields import OWN_ADAM
from tunecast.model.counts import parse_count
from tunecast.model.file_spread import BY_FILE, DTYPES, check_mesh, over_shards
from tunecast.model.read_numbers import as_number
from tunecast.model.resolve import ASSUMED
from tunecast.model.resolve_kernels import RAISED
from tunecast.model.resolve_parallel import ZERO
from tunecast.model.rows import ROWS_PACKED, packing_of, says_lengths
from tunecast.model.run import BY_SPREAD, MESH
from tunecast.model.sharding import FSDP
from tunecast.model.stacks import built_stack, load_stacks, stack_defaults

REPEATING = ("trl", "llama-factory")
"""Formats of ``transformers.Trainer``: ``max_steps`` wins over the epochs, the launcher's precision is taken."""
_ADAPTER = (
    "lora_r", "lora_target_modules", "lora_dropout", "adapter_dtype", "use_dora", "use_rslora", "modules_to_save",
    "modules_to_save_dtype",
)  # fmt: skip
_QUANTIZED = ("quant_method", "bnb_4bit_quant_type", "double_quant")
_KEPT = {"lora": _ADAPTER, "qlora": (*_ADAPTER, *_QUANTIZED), "full": ()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Options for one forecast, where each came from, and what to tell the user."""

    options: dict[str, Any]
    origins: dict[str, str]
    """By option: ``cli``, ``file`` or ``stack-default`` (the framework's default)."""
    notes: tuple[str, ...]


def merge_options(run_file: RunFile, typed: Mapping[str, Any]) -> Merged:
    """The file's options under those that were typed (None counts as not typed).

    A typed amount replaces the file's, whose ``max_steps`` still ends the run; a typed method drops the adapter and
    quantization fields that the method does not have; epochs without any amount are dropped, since they say nothing
    alone.
    """
    given = {name: value for name, value in typed.items() if value is not None}
    if given.get("allow_long_context") is False:  # a switch that can only be typed on
        del given["allow_long_context"]
    options = dict(run_file.options)
    notes = list(run_file.notes)
    notes = _rows_notes(notes, options | given, run_file)
    notes += _drop_replaced(options, given, run_file)
    notes += _drop_unfit(options, given, run_file)
    notes += _of_other_stack(options, given, run_file)
    notes = _settle(notes, options, given, run_file)
    if run_file.mesh is not None and not {"sharding", "dp_shard_size"} & given.keys():
        options[MESH] = run_file.mesh
        check_mesh({**options, **given})
    if given.get("packing") is False and options.get(ROWS_PACKED) and "padding_free" not in given:
        options.pop("padding_free", None)  # the file has it of packed rows
    spread = over_shards({**options, **given})
    options |= {name: spread[name] for name in ("sharding", "dp_shard_size") if name in spread}
    if {**options, **given}.get("sharding") not in FSDP:
        notes = [note for note in notes if note != UNWRAPPED]
    if "loss_type" in given:
        notes = [note for note in notes if ONE_PIECE not in note]
    if "optim" in given:
        notes = [note for note in notes if not note.startswith(OWN_ADAM)]
    if "lora" not in str(given.get("fused_kernels", "lora")):
        notes = [note for note in notes if not note.startswith(LORA_KERNELS)]
    if run_file.origins.get("attn_implementation") == "stack-default" and options["attn_implementation"] == "sdpa":
        del options["attn_implementation"]  # the stack's own default, which knows the families without sdpa
    origins = {name: run_file.origins.get(name, "file") for name in options}
    notes += _cap_samples(given, run_file)
    options |= given
    origins |= dict.fromkeys(given, "cli")
    _refuse_tf32(options, run_file)
    if not any(options.get(name) is not None for name in AMOUNTS) and "num_train_epochs" not in given:
        epochs = options.pop("num_train_epochs", None)
        origins.pop("num_train_epochs", None)
        if epochs is not None:
            notes.append(
                f"The file says {epochs:g} epoch{'' if epochs == 1 else 's'} but no file says how many samples: give "
                "--num-samples with --mean-tokens, or --tokens, for totals."
            )
    return Merged(options=options, origins=origins, notes=tuple(notes))


def _refuse_tf32(options: Mapping[str, Any], run_file: RunFile) -> None:
    """TF32 decides products in fp32 arithmetic, which are counted as fp32 proper; with 16 bits it changes nothing."""
    if run_file.tf32 and options.get("precision") == "fp32":
        raise NotSupportedError(
            "Products in TF32 (tf32: true of the file, with neither bf16 nor fp16) are not built yet; add --precision "
            "bf16-autocast, or set tf32: false for fp32 proper."
        )


def _cap_samples(given: dict[str, Any], run_file: RunFile) -> list[str]:
    """Cut typed samples, or tokens of samples, to what the file trains at most; returns what to tell of it."""
    most, mean = run_file.most_samples, as_number(given.get("mean_tokens"))
    if most is None:
        return []
    for name, each in (("num_samples", 1.0), ("tokens", mean)):
        flag, typed = "--" + name.replace("_", "-"), given.get(name)
        if typed is not None and each is not None and parse_count(typed, name=flag) > most * each:
            given[name] = most if each == 1.0 else most * each
            return [f"{flag} {typed} is cut to the {most:,} samples that max_samples of the file trains at most."]
    return []


def _rows_notes(notes: list[str], options: Mapping[str, Any], run_file: RunFile) -> list[str]:
    """The notes, with what is counted of rows that the file does not pack: its own words hold for full rows alone."""
    if options.get(ROWS_PACKED) is not False:
        return notes
    lengths, packed = says_lengths(options), packing_of(options)
    stale = (UNPACKED, TOKENS_UNPADDED) if lengths else (UNPACKED,) if packed else ()
    notes = [note for note in notes if not note.startswith(stale)] if stale else notes
    if packed is not False or options.get("packing") is not None:
        return notes
    field = run_file.their_fields.get(ROWS_PACKED)
    why = f"{run_file.format} packs none by default" if field is None else f"{field} of the file is false"
    return [*notes, f"{UNPACKED}: every sample is counted as a row of its own, since {why}; --packing fills rows."]


def _drop_replaced(options: dict[str, Any], given: Mapping[str, Any], run_file: RunFile) -> list[str]:
    """Take out what the command line replaces; returns what to tell of it."""
    if {**options, **given}.get("num_gpus") == 1:  # ZeRO and FSDP of one process: nobody to share with
        options.pop("sharding", None)
    elif given.get("sharding") == "fsdp":
        options.pop("adapter_dtype", None)
    own, typed = _kernels_of(options), given.get("fused_kernels")
    told = [] if not own or typed in (None, own) else [f"--fused-kernels {typed} replaces those of the file: {own}."]
    return told + _drop_amounts(options, given, run_file)


def _of_other_stack(options: Mapping[str, Any], given: Mapping[str, Any], run_file: RunFile) -> list[str]:
    """What of the file's framework stays beside a typed stack, whose own defaults are others."""
    stack = given.get("stack")
    if stack is None or stack == options.get("stack") or stack not in load_stacks():
        return []
    method = str(given.get("method") or options.get("method") or ASSUMED["method"])
    own = stack_defaults(str(stack), method)
    theirs = {
        name: (options[name], own[name])
        for name in own
        if name in options and name not in given and run_file.origins.get(name) == "stack-default"
    }
    kept = [
        f"--{name.replace('_', '-')} {value} ({stack}: {instead})"
        for name, (value, instead) in theirs.items()
        if str(value) != str(instead)
    ]
    if not kept:
        return []
    return [f"Defaults of {run_file.format} stay beside --stack {stack}, whose own are others: {'; '.join(kept)}."]


def _kernels_of(options: Mapping[str, Any]) -> str:
    """Fused kernels that a file names, or that its stack has."""
    own, stack = options.get("fused_kernels"), str(options.get("stack") or ASSUMED["stack"])
    if own is None:
        own = ",".join(built_stack(stack).get("defaults", {}).get("all", {}).get("fused_kernels", ()))
    return "" if own == "none" else str(own)


def _drop_amounts(options: dict[str, Any], given: Mapping[str, Any], run_file: RunFile) -> list[str]:
    """Take out the amounts that a typed one replaces; returns what to tell of it."""
    typed = next((name for name in AMOUNTS if name in given), None)
    steps = options.get("max_steps")
    if typed is None:
        idle = steps is not None and "num_train_epochs" in given
        field = run_file.their_fields.get("max_steps", "max_steps")
        return [f"{field} of the file decides, {steps:,} steps: --num-train-epochs changes nothing."] if idle else []
    replaced = {name: options.pop(name) for name in AMOUNTS if name in options}
    if steps is None or typed == "max_steps":
        flag = "--" + typed.replace("_", "-")
        theirs = ((run_file.their_fields.get(name, name), value) for name, value in replaced.items())
        return [f"{flag} replaces {field} of the file ({value:,})." for field, value in theirs]
    return [_keep_the_end(options, run_file, int(steps), "--" + typed.replace("_", "-"))]


def _settle(notes: list[str], options: dict[str, Any], given: Mapping[str, Any], run_file: RunFile) -> list[str]:
    """Dtypes and shards as the file has them where the job is spread as is typed; typed dtypes are taken as they stand.

    Returns the notes, with what is true of that way of spreading the job alone.
    """
    about = (RAISED, CAST.format("bf16"), CAST.format("fp16"), *run_file.wide_notes)
    typed = {name: given[name] for name in DTYPES if name in given}
    asked: dict[str, Any] = {**options, **{name: value for name, value in given.items() if name not in DTYPES}}
    told = told_by_spread(asked, run_file, run_file.format, typed)
    added = settle_dtypes(asked, told, run_file, typed)
    own = run_file.options.get("sharding") if given.get("sharding") in (None, *ZERO) else None
    options[BY_SPREAD] = {**told, BY_FILE: {"sharding": own}}
    put_dtypes(options, asked)
    return [*(note for note in notes if note not in about), *added]


def _keep_the_end(options: dict[str, Any], run_file: RunFile, steps: int, flag: str) -> str:
    """The file's own last step beside a typed amount of data: the Trainer begins the data again until it is reached,
    the others (axolotl's ``prepare_datasets``, litgpt's ``fit``, torchtune's recipes) end with the data before it."""
    field = run_file.their_fields.get("max_steps", "max_steps")
    said = f"{flag} is the amount of data, but {field} of the file ends the training"
    if run_file.format in REPEATING:
        options["steps_exactly"] = steps
        return f"{said} after {steps:,} steps, beginning the data again until then; --max-steps instead replaces it."
    options["steps_at_most"] = steps
    return f"{said} after {steps:,} steps where the data last longer; --max-steps instead replaces it."


def _drop_unfit(options: dict[str, Any], given: Mapping[str, Any], run_file: RunFile) -> list[str]:
    method, old = given.get("method"), run_file.options.get("method")
    if method is None or method == old or method not in _KEPT:
        return []
    for name in (*_ADAPTER, *_QUANTIZED):
        if name not in _KEPT[method]:
            options.pop(name, None)
    return [f"--method {method} replaces the file's {old}: its adapter and quantization fields go where unfit."]
