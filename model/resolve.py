"""Options, files and stack defaults become one `Run`, and every field says where it came from.

Order of precedence: what the user typed or wrote in a file, then the stack's default, then an
assumption (amounts that nobody can know: length, batch, accumulation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.catalogs.refused import refuse_method
from tunecast.model.adapter_targets import adaptable_modules, target_modules
from tunecast.model.architecture import Architecture
from tunecast.model.bounds import check_chunks, check_sizes, check_switches, check_words
from tunecast.model.experts_modules import PRESENT
from tunecast.model.families import FAMILIES
from tunecast.model.joined import STACKS
from tunecast.model.litgpt import is_litgpt
from tunecast.model.litgpt_head import CHUNK_TOKENS as LITGPT_CHUNK_TOKENS
from tunecast.model.loss_chunks import head_uses
from tunecast.model.losses import CHUNKED_NOTE, FULL_NOTE
from tunecast.model.optimizer import FOREACH_NOTE
from tunecast.model.other_names import what_to_type
from tunecast.model.peft_targets import LEFT_TO_PEFT, LINEAR_MODULES, OWN_ALL_LINEAR, peft_targets
from tunecast.model.published_weights import wide_checkpoint_notes
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_adapters import take_variants
from tunecast.model.resolve_attention import (
    attention_defaults,
    attention_notes,
    check_recomputation,
    take_documents,
    take_padding,
    take_recomputation,
)
from tunecast.model.resolve_bf16 import CARD, by_card, in_fp32, without_bf16
from tunecast.model.resolve_experts import (
    check_experts_4bit,
    check_stacked,
    check_unsloths_experts,
    expert_notes,
)
from tunecast.model.resolve_kernels import (
    check_compute_dtype,
    check_gptq_dtypes,
    check_host_update,
    check_pure_precision,
    check_scaler,
    few_bit_notes,
    promotion_notes,
    take_kernels,
    take_master,
    take_quantization,
    wide_base_notes,
    without_autocast,
)
from tunecast.model.resolve_layer_inputs import check_layer_kinds
from tunecast.model.resolve_litgpt import (
    check_code,
    check_litgpt,
    defaults_by_gpus,
)
from tunecast.model.resolve_loop import take_loop
from tunecast.model.resolve_parallel import take_parallel
from tunecast.model.resolve_shared_dtypes import casts_all, settle_zero, share_dtype, zero_defaults
from tunecast.model.resolve_stacks import check_layers, check_stack, defaults_by_spread
from tunecast.model.run import BY_CARD, Run
from tunecast.model.stack_versions import adapter_default, chosen_ranges, defaults_then, silent_note, told_ranges
from tunecast.model.stacks import (
    DTYPE_ALIASES,
    DTYPES,
    METHODS,
    PRECISIONS,
    attention_named,
    built_choice,
    one_of,
    ours,
    ours_without_version,
    stack_defaults,
)
from tunecast.model.target_patterns import is_pattern, pattern_note
from tunecast.model.units import SIXTEEN_BITS
from tunecast.model.unsloth_rules import CARD_FIELDS, UNSLOTH_LOSSES

ASSUMED = {
    "method": "lora",
    "stack": "hf-peft",
    "max_length": 1024,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_gpus": 1,
}
"""Used when neither the user nor the stack says. 1,024 tokens is TRL's ``SFTConfig.max_length``."""

COUNTS = ("max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "num_gpus")
RUN_FIELDS = tuple(field.name for field in dataclasses.fields(Run))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A complete run, the origin of each field, and what the user should be told about it."""

    run: Run
    origins: dict[str, str]
    """By field of `Run`: ``cli``, ``file``, ``stack-default``, ``assumed`` or ``searched``."""
    notes: tuple[str, ...] = ()


class _Fields:
    """Values and origins under construction."""

    def __init__(self, options: Mapping[str, Any], option_origins: Mapping[str, str]) -> None:
        self.given = {name: value for name, value in options.items() if value is not None}
        if "attn_implementation" in self.given:
            self.given["attn_implementation"] = attention_named(self.given["attn_implementation"])
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        self._option_origins = option_origins

    def take(self, name: str, default: Any, default_origin: str) -> Any:
        """Record the user's value of a field, or its default."""
        user_said = name in self.given
        self.values[name] = self.given[name] if user_said else default
        self.origins[name] = self._option_origins.get(name, "cli") if user_said else default_origin
        return self.values[name]

    def put(self, name: str, value: Any, origin: str) -> None:
        """Record a value that follows from others."""
        self.values[name] = value
        self.origins[name] = origin


def check_length(architecture: Architecture, max_length: int, *, allow_long: bool, assumed: bool = False) -> None:
    """Refuse a sequence longer than the model was made for, unless explicitly allowed."""
    limit = architecture.max_position
    if limit is not None and max_length > limit and not allow_long:
        asked = f"No --max-length was typed, and the assumed {max_length}" if assumed else f"--max-length {max_length}"
        raise InputError(
            f"{asked} is beyond the {limit} tokens of {architecture.name}; "
            f"{'type' if assumed else 'use'} at most {limit}, or add --allow-long-context."
        )


def check_known(options: Mapping[str, Any]) -> None:
    """Refuse options nobody reads."""
    readable = {*RUN_FIELDS, "offload", "allow_long_context"} - {*BY_CARD}
    for name in options:
        if name not in readable:
            instead = what_to_type(
                name, readable, lambda option, value: f"{option}={value!r}" if value else option, options[name]
            )
            raise UnknownNameError("run option", name, readable, instead=instead)


def _numbers(fields: _Fields, architecture: Architecture) -> None:
    """Length, batch, accumulation and GPUs."""
    for name in COUNTS:
        fields.values[name] = whole_number(name, fields.take(name, ASSUMED[name], "assumed"))
    check_length(
        architecture,
        fields.values["max_length"],
        allow_long=bool(fields.given.get("allow_long_context", False)),
        assumed="max_length" not in fields.given,
    )


def _adapters(fields: _Fields, architecture: Architecture, defaults: Mapping[str, Any]) -> None:
    """Rank, targets, dropout and storage of the adapters; a full fine-tune has none of them."""
    names = ("lora_r", "lora_target_modules", "lora_dropout", "adapter_dtype")
    if fields.values["method"] == "full":
        for name in names:
            if name in fields.given and name != "adapter_dtype":
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} needs adapters, but --method is full; use --method lora or qlora.")
        empty = Run(method="full")
        for name in names:
            fields.put(name, getattr(empty, name), "stack-default")
        return
    rank = whole_number("lora_r", fields.take("lora_r", defaults["lora_r"], "stack-default"))
    if rank > architecture.hidden_size:
        raise InputError(
            f"--lora-r is {rank}, but {architecture.name} is {architecture.hidden_size} wide and no update has a "
            "higher rank than that; type for example 16 or 64."
        )
    fields.values["lora_r"] = rank
    asked = fields.take("lora_target_modules", defaults["lora_target_modules"], "stack-default")
    fields.values["lora_target_modules"] = found = target_modules(architecture, _present(fields, architecture, asked))
    if is_pattern(asked):
        fields.notes.append(pattern_note(found))
    dropout = fields.take("lora_dropout", defaults["lora_dropout"], "stack-default")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"--lora-dropout is {dropout!r}, but it must be at least 0 and below 1.")
    check_stacked(fields.values["lora_target_modules"], {**fields.given, "lora_dropout": dropout})
    dtype = fields.given.get("dtype") or defaults["dtype"]
    adapter = fields.take("adapter_dtype", adapter_default(defaults["adapter_dtype"], dtype), "stack-default")
    fields.values["adapter_dtype"] = one_of("adapter-dtype", DTYPE_ALIASES.get(adapter, adapter), DTYPES)


def _present(fields: _Fields, architecture: Architecture, asked: Any) -> Any:
    """A stack's own targets without those that this model does not have; what PEFT adapts where they are left to it,
    or all linear maps, as an assumption, where it has none for the family."""
    known, stack = adaptable_modules(architecture), fields.values["stack"]
    if asked == "all-linear" and stack in OWN_ALL_LINEAR:
        return LINEAR_MODULES
    if asked == LEFT_TO_PEFT:
        found = peft_targets(architecture, known)
        if not found:
            fields.origins["lora_target_modules"] = "assumed"
            fields.notes.append(
                f"PEFT has no targets of its own for {architecture.model_type}, and asks for some: all-linear is "
                "assumed (--lora-target-modules)."
            )
        return found or "all-linear"
    if "lora_target_modules" in fields.given or asked in ("all-linear", LINEAR_MODULES):
        return asked
    kept = [name for name in str(asked).split(",") if name in known]
    if not kept:
        raise InputError(
            f"--stack {stack} adapts {asked} unless told otherwise, but {architecture.name} has "
            f"{', '.join(known)}; name some with --lora-target-modules, or type all-linear there."
        )
    return kept


def _dtypes(fields: _Fields, defaults: Mapping[str, Any], *, gpu_has_bf16: bool, emulates_bf16: bool) -> None:
    """Storage and arithmetic of the base; a card without bf16 gets fp16, a CPU that emulates it fp32, and a note."""
    dtype = fields.take("dtype", defaults["dtype"], "stack-default")
    fields.values["dtype"] = one_of("dtype", DTYPE_ALIASES.get(dtype, dtype), DTYPES)
    precision = one_of("precision", fields.take("precision", defaults["precision"], "stack-default"), PRECISIONS)
    if _whole_base(fields) and precision in DTYPES:
        without_autocast(fields)
    before = dict(fields.values)
    if emulates_bf16 and fields.values["stack"] not in STACKS:
        in_fp32(fields)
    elif casts_all(fields) and fields.values["precision"] in SIXTEEN_BITS:
        settle_zero(fields, gpu_has_bf16=gpu_has_bf16)
    elif not gpu_has_bf16:
        without_bf16(fields)
    if emulates_bf16 or not gpu_has_bf16:
        by_card(fields, before)
    if _whole_base(fields):
        check_pure_precision(fields.values)
    check_compute_dtype(fields.values)
    if fields.values["upcast_non_quantized"]:
        _upcast(fields)


def _whole_base(fields: _Fields) -> bool:
    """Whether the base is stored in floating-point numbers."""
    return fields.values["bnb_4bit_quant_type"] is None and fields.values["quant_method"] is None


def _upcast(fields: _Fields) -> None:
    """Embeddings, norms, biases and head in fp32, as PEFT's preparation of a 4-bit model leaves them."""
    fields.put("dtype", "fp32", fields.origins["upcast_non_quantized"])


def _software(fields: _Fields, defaults: Mapping[str, Any]) -> None:
    """Checkpointing, attention, loss and optimizer implementations."""
    take_recomputation(fields, defaults)
    for name, what in (("attn_implementation", "attention"), ("loss_type", "loss"), ("optim", "optimizer")):
        value = fields.take(name, defaults[name], "stack-default")
        built_choice(what, name.replace("_", "-"), str(value))
    fields.values["sdpa_cudnn"] = bool(fields.take("sdpa_cudnn", defaults.get("sdpa_cudnn", True), "stack-default"))
    take_loop(fields, defaults)
    if fields.values["attn_implementation"].startswith("flash") and fields.values["precision"] == "fp32":
        raise InputError("Flash kernels take 16-bit numbers, but --precision is fp32; use --attn-implementation sdpa.")
    if fields.values["loss_type"] == "chunked_nll" and (
        fields.values["stack"] == "trl" or fields.origins["loss_type"] == "cli"
    ):
        fields.notes.append(CHUNKED_NOTE)
    tiles = fields.values["stack"] == "trl" and defaults.get("token_metrics", "none") == "none"
    if tiles and fields.values["loss_type"] == "nll" and fields.origins["loss_type"] == "cli":
        fields.notes.append(FULL_NOTE)
    chosen = "optim" in ours_without_version(fields.values["stack"]) and fields.given.get("stack_version") is None
    if chosen and fields.values["method"] == "full" and fields.given.get("optim") is None:
        fields.notes.append(FOREACH_NOTE)
    if fields.values["optim"].startswith("paged") and fields.given.get("offload") in (None, "none"):
        fields.notes.append(
            "Paged moments of the optimizer live in managed memory: they fill GPU memory that is free and leave when "
            "it is needed, so no memory figure here counts them."
        )


def _refuse_own_linears(fields: _Fields, architecture: Architecture) -> None:
    """A base that transformers 5 does not quantize, because its maps are a class of their own (``FalconLinear``)."""
    family = FAMILIES.get(architecture.model_type)
    packed = fields.values["bnb_4bit_quant_type"] is not None or fields.values["quant_method"] == "bnb-8bit"
    theirs = fields.values["hf_code"] == PRESENT and not is_litgpt(architecture)
    if family is not None and family.own_linears and packed and theirs:
        raise NotSupportedError(
            f"transformers 5 quantizes none of the linear maps of {architecture.model_type}, a class of their own, so "
            "that this base would stay in 16 bits: --method lora is that run, and --hf-code 4.49 (transformers 4) one "
            "that quantizes them."
        )


def defaults_of_version(fields: _Fields, today: dict[str, Any]) -> dict[str, Any]:
    """The stack's defaults in the versions asked for, else in the newest; the run says which they are."""
    asked = fields.given.get("stack_version")
    chosen = chosen_ranges(fields.values["stack"], None if asked is None else str(asked))
    fields.take("stack_version", None, "stack-default")
    fields.put("stack_version", told_ranges(chosen), fields.origins["stack_version"])
    if asked is not None:
        fields.notes.extend(one.note for one in chosen if one.note)
        fields.notes.extend(silent_note(fields.values["stack"], str(asked)))
    return defaults_then(today, chosen, fields.values["method"])


def checked_method(method: str) -> str:
    """The method if there is one of that name; raises NotSupportedError for inference and other neighbouring uses."""
    refuse_method(method)
    return one_of("method", method, METHODS)


def _ours_here(run: Run, *, of_version: bool) -> list[str]:
    """Fields of the stack's run that tunecast chose, of which this run has something that weighs."""
    applies = {
        "optim": run.method == "full",
        "lora_r": run.has_adapters,
        "lora_target_modules": run.has_adapters,
        "bnb_4bit_quant_type": run.bnb_4bit_quant_type is not None,
        "double_quant": run.bnb_4bit_quant_type is not None,
    }
    chosen = ours(run.stack) if of_version else (*ours(run.stack), *ours_without_version(run.stack))
    return [name for name in chosen if applies.get(name, True)]


def resolve_run(
    architecture: Architecture,
    options: Mapping[str, Any],
    *,
    gpu_has_bf16: bool = True,
    emulates_bf16: bool = False,
    option_origins: Mapping[str, str] | None = None,
) -> Resolved:
    """The complete run that `options` mean for this model, with the origin of every field.

    Options are named as on the command line with underscores; None counts as not given.
    `option_origins` says ``file`` for those that a file gave (the others are ``cli``).
    Impossible combinations raise `InputError`, unbuilt ones `NotSupportedError`.
    """
    check_known(options)
    check_words(options)
    check_switches(options)
    check_sizes(options)
    fields = _Fields(options, option_origins or {})
    method = checked_method(fields.take("method", ASSUMED["method"], "assumed"))
    defaults = defaults_of_version(fields, stack_defaults(fields.take("stack", ASSUMED["stack"], "assumed"), method))
    check_code(architecture, fields.values["stack"])
    check_layers(architecture, fields.values["stack"])
    _numbers(fields, architecture)
    defaults = defaults_by_spread(fields, defaults_by_gpus(fields, architecture, defaults))
    defaults = zero_defaults(fields, defaults)
    defaults = take_quantization(fields, defaults)
    _adapters(fields, architecture, defaults)
    _dtypes(fields, defaults, gpu_has_bf16=gpu_has_bf16, emulates_bf16=emulates_bf16)
    _software(fields, attention_defaults(fields, architecture, defaults))
    take_kernels(fields, architecture, defaults)
    check_gptq_dtypes(fields.values)
    take_parallel(fields, architecture, defaults)
    share_dtype(fields)
    check_host_update(fields.values)
    take_variants(fields, architecture)
    take_master(fields, defaults)
    check_stack(fields)
    check_litgpt(fields, architecture)
    take_documents(fields, architecture)
    take_padding(fields, architecture, defaults)
    check_layer_kinds(fields, architecture)
    if fields.values["num_gpus"] == 1:
        fields.put("fsdp_version", Run(method="full").fsdp_version, "stack-default")
    _refuse_own_linears(fields, architecture)
    fields.notes.extend(
        (*few_bit_notes(fields.values), *promotion_notes(fields.values), *wide_base_notes(architecture, fields.values))
    )
    check_unsloths_experts(architecture, fields.values)
    check_experts_4bit(architecture, fields.values)
    fields.notes.extend(expert_notes(architecture, fields.values))
    run = Run(**{name: fields.values[name] for name in RUN_FIELDS if name in fields.values})
    check_recomputation(architecture, run)
    check_scaler(run)
    fields.notes.extend(attention_notes(architecture, run))
    fields.notes.extend(wide_checkpoint_notes(architecture, run, typed="dtype" in fields.given))
    rows = run.max_length if run.has_adapters else run.tokens_per_micro_batch
    check_chunks(-(-rows // LITGPT_CHUNK_TOKENS) if is_litgpt(architecture) else head_uses(run), run)
    origins = {name: fields.origins.get(name, "stack-default") for name in RUN_FIELDS}
    origins |= {name: "assumed" for name in CARD_FIELDS if run.loss_type in UNSLOTH_LOSSES}
    chosen = _ours_here(run, of_version=fields.given.get("stack_version") is not None)
    ours = (name for name in chosen if fields.origins.get(name, CARD) != CARD and name not in fields.given)
    origins |= dict.fromkeys(ours, "assumed")
    return Resolved(run=run, origins=origins, notes=tuple(fields.notes))
