"""How a job is spread over GPUs: FSDP's words, and what FSDP and ZeRO do to dtypes.

DeepSpeed's JSON is read in `deepspeed`, accelerate's YAML in `accelerate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.configs.frameworks import load_frameworks, refuse
from tunecast.model.configs.run_file import Draft, RunFile
from tunecast.model.configs.source import Source
from tunecast.model.file_spread import DTYPES, dtypes_by_spread, with_dtypes
from tunecast.model.resolve_kernels import RAISED
from tunecast.model.run import BY_SPREAD
from tunecast.model.sharding import FSDP
from tunecast.model.units import SIXTEEN_BITS

_FSDP_STRATEGY = {
    "1": "fsdp", "full_shard": "fsdp", "2": "fsdp-grad-op", "shard_grad_op": "fsdp-grad-op",
    "3": "ddp", "no_shard": "ddp", "4": "hsdp", "hybrid_shard": "hsdp", "5": None, "hybrid_shard_zero2": None,
    "true": "fsdp",
}  # fmt: skip
"""Sharding by FSDP's name or number; None where nothing of ours behaves like it."""
_UNITS = {"transformer_based_wrap": True, "size_based_wrap": False, "no_wrap": False}
"""FSDP's rules for its units, and whether they make one of every layer (accelerate 1.15 ``utils/constants.py``)."""
UNWRAPPED = (
    "The accelerate file names no fsdp_auto_wrap_policy: accelerate then makes one unit of the whole model and gathers "
    "all its weights at once; layers are counted as units, which fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP makes."
)
"""What is told of a file of accelerate's that leaves the units to it."""
TRAINERS_OFFLOAD = "cpu_offload"
"""transformers' own word in ``fsdp_config`` for parameters in host memory (``training_args.py``)."""
_UNBUILT = {
    "activation_checkpointing_offload": "checkpoints in host memory by FSDP's own code",
    "ignored_modules": "modules that FSDP does not shard",
}
"""Keys of accelerate's plugin that change the run and are not built."""
OFF_WORDS = ("no", "none", "false", "")


def asks(value: Any) -> bool:
    """Whether a field asks for what it names; absent, it does not."""
    return str(value).lower() not in OFF_WORDS


FSDP_TODAY = 2
"""FSDP's version where nothing names one (`resolve_parallel`)."""
CAST = "Under ZeRO, DeepSpeed trains in pure {}, with an fp32 copy and fp32 optimizer states of what is trained."
"""What is told of DeepSpeed's casts; the command line may make it untrue."""


def put_sharding(source: Source, draft: Draft, sharding: str, theirs: str) -> None:
    """Set the sharding; one that another file already set differently is refused."""
    known = draft.options.get("sharding")
    if known is not None and known != sharding:
        raise InputError(
            f"{source.name}: {theirs} means {sharding}, but {draft.their_fields.get('sharding', 'its framework')} "
            f"means {known}; keep one of them."
        )
    draft.put("sharding", sharding, theirs)


def fsdp_sharding(source: Source, field: str, value: Any) -> str:
    """Our sharding for FSDP's strategy."""
    word = str(value).strip().lower()
    if word not in _FSDP_STRATEGY:
        raise InputError(f"{source.name}: {field} is {value!r}, which is no FSDP strategy; FULL_SHARD is one.")
    sharding = _FSDP_STRATEGY[word]
    if sharding is None:
        refuse(source, field, value, "sharding of gradients and states alone under FSDP", "use FULL_SHARD or zero2")
    assert sharding is not None
    return sharding


def read_fsdp_words(source: Source, draft: Draft, field: str = "fsdp") -> bool:
    """``fsdp: full_shard auto_wrap offload`` as a string or list; False where it is off or absent."""
    value = source.get(field)
    words = value if isinstance(value, list) else str(value if value is not None else "").replace(",", " ").split()
    plain = [str(word).strip().lower() for word in words]
    strategies = [word for word in plain if word not in ("auto_wrap", "offload", *OFF_WORDS)]
    for word in strategies:
        put_sharding(source, draft, fsdp_sharding(source, field, word), field)
    if "offload" in plain:
        draft.put("offload", True, field)
    return bool(strategies)


def put_fsdp_version(source: Source, draft: Draft, field: str, value: Any) -> None:
    """FSDP's version where FSDP shards: 1 or 2, as a number or in quotes."""
    if draft.options.get("sharding") not in FSDP:
        return
    if str(value) not in ("1", "2"):
        raise InputError(f"{source.name}: {field} is {value!r}, but FSDP has versions 1 and 2.")
    draft.put("fsdp_version", int(value), field)


def read_fsdp_config(
    source: Source,
    draft: Draft,
    prefix: str,
    *,
    sharded: bool,
    version_if_silent: int | None = None,
    offload_key: str = "offload_params",
    knows_strategy: bool = True,
) -> None:
    """``fsdp_config`` of a training file or of accelerate, its keys with or without the ``fsdp_`` prefix.

    `offload_key` puts parameters into host memory: accelerate and axolotl have another than transformers. Where the
    framework has no field for a strategy (`knows_strategy`) all is sharded whatever the file says of it.
    """

    def find(key: str) -> tuple[Any, str | None]:
        return source.first((f"{prefix}.fsdp_{key}", f"{prefix}.{key}"))

    strategy, field = find("sharding_strategy")
    if not knows_strategy and strategy is not None:
        if fsdp_sharding(source, str(field), strategy) != "fsdp":
            draft.note(f"{field} is no field that this framework reads: weights, gradients and states are all sharded.")
        strategy = None
    reshard, reshard_field = find("reshard_after_forward")
    version, version_field = find("version")
    version = version_if_silent if version is None else version
    if sharded and strategy is None and reshard is not None:
        strategy, field = _by_reshard(source, str(reshard_field), reshard, version), reshard_field
    if sharded or strategy is not None:
        word = strategy if strategy is not None else "full_shard"
        put_sharding(source, draft, fsdp_sharding(source, field or prefix, word), field or prefix)
    if version is not None:
        put_fsdp_version(source, draft, version_field or prefix, version)
    if draft.options.get("sharding") in FSDP:
        _check_units(source, *find("auto_wrap_policy"))
    offload, field = find(offload_key)
    if asks(offload):
        draft.put("offload", True, field)
    checkpointing, field = find("activation_checkpointing")
    if asks(checkpointing):
        _put_own_checkpoints(source, draft, str(field))
    for key, what in _UNBUILT.items():
        value, field = find(key)
        if asks(value):
            refuse(source, str(field), value, what)


def _put_own_checkpoints(source: Source, draft: Draft, field: str) -> None:
    """FSDP's own checkpoints, not reentrant; beside the trainer's own transformers refuses them (``trainer.py``), and
    LLaMA-Factory, which sets its own past the Trainer, runs layers once more for each."""
    theirs = draft.their_fields.get("gradient_checkpointing", "")
    if draft.options.get("gradient_checkpointing") and "fsdp_config." not in theirs:
        raise InputError(
            f"{source.name}: {field} is true, but the training file leaves the trainer's own checkpoints on, and "
            f"layers cannot have both; write {draft.checkpoints_off} in it, or {field}: false."
        )
    draft.put("gradient_checkpointing", True, field)
    draft.put("reentrant", False)


def _check_units(source: Source, policy: Any, field: str | None) -> None:
    """FSDP's units are the layers: ``NO_WRAP`` makes one of the whole model, ``SIZE_BASED_WRAP`` others by size."""
    word = "transformer_based_wrap" if policy is None else str(policy).strip().lower()
    if word not in _UNITS:
        raise InputError(
            f"{source.name}: {field} is {policy!r}, but a rule for FSDP's units is TRANSFORMER_BASED_WRAP, "
            "SIZE_BASED_WRAP or NO_WRAP."
        )
    if not _UNITS[word]:
        refuse(source, str(field), policy, "units of FSDP that are no layers", "write TRANSFORMER_BASED_WRAP")


def _by_reshard(source: Source, field: str, value: Any, version: Any) -> Any:
    """FSDP's strategy by ``reshard_after_forward``: a yes or no of version 2, a strategy's name of version 1.

    Source: accelerate 1.15 ``utils/dataclasses.py`` (``FullyShardedDataParallelPlugin.__post_init__``).
    """
    word = str(value).strip().lower()
    if word == "true":
        return "full_shard"
    if word != "false":
        return value
    if str(version) != "2":
        refuse(
            source, field, value, "a yes or no, which FSDP 1 does not take", "write SHARD_GRAD_OP, or fsdp_version: 2"
        )
    return "shard_grad_op"


def settle_spread(draft: Draft, framework: str) -> None:
    """What ZeRO and FSDP do to the dtypes of the file's run; those without either are kept for what spreads the job
    otherwise."""
    draft.whole_dtypes = {name: draft.options[name] for name in DTYPES if name in draft.options}
    notes = settle_dtypes(draft.options, told_by_spread(draft.options, draft, framework, {}), draft, {})
    draft.withdraw_wide_weights()
    for note in notes:
        draft.note(note)
    raised = draft.options.get("master_dtype") == "fp32"
    for name in DTYPES:
        if draft.options.get(name) != draft.whole_dtypes.get(name) or (raised and name == "dtype"):
            draft.their_fields.pop(name, None)


def told_by_spread(
    options: Mapping[str, Any], file: Draft | RunFile, framework: str, typed: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Dtypes of a file's run by how its job is spread (`dtypes_by_spread`), with the `typed` ones of a command line."""
    shards = {**options, **file.whole_dtypes, "method": "full", "sharding": "fsdp"}
    masters = master_under_fsdp(shards, framework)
    told = dtypes_by_spread(file.whole_dtypes, masters, typed)
    if masters.get("master_dtype") == "none":  # of adapters neither
        told["fsdp"] = {**masters, **told["fsdp"]}
    return told


def settle_dtypes(
    options: dict[str, Any],
    told: Mapping[str, Mapping[str, Any]],
    file: Draft | RunFile,
    typed: Mapping[str, Any],
) -> list[str]:
    """Give options the dtypes that `told` has for their sharding; returns what is true of that way of spreading the
    job alone.

    DeepSpeed casts the whole module and uses no autocast; accelerate raises trained parameters to fp32 before
    FSDP shards them (`master_under_fsdp`).
    """
    sharding = None if options.get("num_gpus") == 1 else options.get("sharding")
    found = with_dtypes({**options, BY_SPREAD: told}, sharding)
    put_dtypes(options, found)
    precision = options.get("precision")
    known = (file.whole_dtypes.get("precision"), typed.get("precision"))
    if precision in SIXTEEN_BITS and precision not in known:
        return [CAST.format(precision)]
    if options.get("master_dtype") == "fp32" and "master_dtype" not in typed:
        return [RAISED]
    return list(file.wide_notes) if options.get("dtype") == "fp32" and "dtype" not in typed else []


def put_dtypes(options: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Give options the dtypes of others, and none that those do not have."""
    for name in DTYPES:
        options.pop(name, None)
        if name in found:
            options[name] = found[name]


def master_under_fsdp(options: Mapping[str, Any], framework: str) -> dict[str, Any]:
    """Options of a model trained whole under FSDP: fp32 shards where accelerate raises them, and that there are none
    where a framework that has mixed precision does not.

    What is gathered, and all that a layer computes with, has the 16 bits of FSDP's mixed precision: fp32 is in the
    shards alone. Source: accelerate 1.12 ``utils/fsdp_utils.py`` (``fsdp2_prepare_model``: "FSDP upcast of low
    precision parameters") and ``accelerator.py`` (``prepare_model``, the same of FSDP 1), whenever mixed precision is
    on; the versions of FSDP that a framework leaves to it are in frameworks.json (``fsdp_raises``).
    """
    precision = str(options.get("precision", ""))
    sharded = options.get("sharding") in FSDP and precision.endswith("-autocast")
    raises = options.get("fsdp_version", FSDP_TODAY) in load_frameworks()[framework].get("fsdp_raises", ())
    if options.get("method") != "full" or not sharded:
        return {}
    if not raises:
        return {"master_dtype": "none"}
    return {"dtype": precision.removesuffix("-autocast"), "master_dtype": "fp32"}
