"""DeepSpeed's JSON: the ZeRO stage, offloading, buckets, and numbers that the training file states too."""

from __future__ import annotations

from tunecast.catalogs.errors import InputError
from tunecast.model.configs.frameworks import refuse, refuse_unsupported
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source
from tunecast.model.configs.spread import asks, put_sharding
from tunecast.model.configs.zero_fields import check_reductions, check_sizes, put_optimizer
from tunecast.model.resolve_parallel import ZERO
from tunecast.model.units import SIXTEEN_BITS


def read_deepspeed(source: Source, draft: Draft) -> None:
    """DeepSpeed JSON: the ZeRO stage, offloading, and batch sizes that the trainer was not left to fill in."""
    refuse_unsupported("deepspeed", source)
    put_sharding(source, draft, zero_sharding(source, "zero_optimization.stage"), "zero_optimization.stage")
    put_offload(source, draft, *(f"zero_optimization.{part}.device" for part in ("offload_optimizer", "offload_param")))
    _put_older_offload(source, draft)
    put_optimizer(source, draft)
    _note_torchs_adam(source, draft)
    check_reductions(source, draft)
    check_sizes(source, draft)
    _put_overlap(source, draft, "zero_optimization.overlap_comm")
    _put_bucket(source, draft, "zero_optimization.reduce_bucket_size")
    _agree_on_halves(source, draft)
    for theirs, ours in (
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ):
        agree(source, draft, theirs, ours)
    if source.get("train_batch_size") not in (None, "auto"):
        draft.whole_batch = source.count("train_batch_size")


def check_whole_batch(draft: Draft, num_gpus: int | None) -> None:
    """DeepSpeed's own count of a step's samples is what the other fields make of it
    (``_batch_assertion`` of its ``runtime/config.py``)."""
    if draft.whole_batch is None:
        return
    micro, steps = (
        int(draft.options.get(name, 1)) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    gpus = num_gpus or draft.options.get("num_gpus")
    split = int(draft.options.get("cp", 1)) * int(draft.options.get("tp", 1))
    counted = micro * steps * (int(gpus) // split if gpus else 1)
    if draft.whole_batch == counted or (not gpus and draft.whole_batch % counted == 0):
        return
    raise InputError(
        f"deepspeed file: train_batch_size is {draft.whole_batch}, but micro-batch {micro} x accumulation {steps}"
        f"{f' x {int(gpus) // split} GPUs' if gpus else ''} makes {counted}; make them agree or write auto."
    )


def _agree_on_halves(source: Source, draft: Draft) -> None:
    """16 bits that both files state must be the same, which the Trainer checks too; ``auto`` asks the training file."""
    stated, precision = draft.their_fields.get("precision"), str(draft.options.get("precision", ""))
    for half in SIXTEEN_BITS:
        field = f"{half}.enabled"
        if stated is None or source.get(field) in (None, "auto"):
            continue
        if bool(source.flag(field)) != precision.startswith(half):
            raise InputError(
                f"{source.name}: {field} is {source.get(field)}, but {stated} of the training file means "
                f"{precision.removesuffix('-autocast')}; make them agree or write auto."
            )


def zero_sharding(source: Source, field: str) -> str:
    """Our sharding for a ZeRO stage; 0 is refused, DeepSpeed casts there too (`resolve_shared_dtypes.casts_all`)."""
    stage = source.whole(field)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"{source.name}: {field} is {stage!r}, but a ZeRO stage is 0, 1, 2 or 3.")
    if stage == 0:
        refuse(
            source, field, stage, "DeepSpeed without ZeRO, which casts the module and keeps an fp32 copy on every GPU",
            "write stage 1, or leave DeepSpeed out for plain data parallelism",
        )  # fmt: skip
    return f"zero{stage}"


def put_offload(source: Source, draft: Draft, states: str, parameters: str) -> None:
    """The devices of the optimizer's states and of parameters at rest, by the names of their fields.

    DeepSpeed's two switches do not know of each other (``runtime/zero/stage3.py``): parameters alone leave the update
    on the GPU.
    """
    alone = not asks(source.get(states))
    for field, where in ((states, "optimizer"), (parameters, "all")):
        device = source.get(field)
        if asks(device):
            _put_where(source, draft, field, where if str(device) == "cpu" else str(device), alone=alone)


def _put_older_offload(source: Source, draft: Draft) -> None:
    """Yes or no in place of a device, which DeepSpeed still takes (``zero/config.py``: ``deprecated``)."""
    for name, where in (("cpu_offload", "optimizer"), ("cpu_offload_params", "all"), ("cpu_offload_param", "all")):
        field = f"zero_optimization.{name}"
        if source.flag(field):
            alone = where == "all" and draft.options.get("offload") is None
            _put_where(source, draft, field, where, alone=alone)


def _put_where(source: Source, draft: Draft, field: str, where: str, *, alone: bool) -> None:
    """What is in host memory by this field, unless parameters are `alone` there."""
    if alone:
        refuse(
            source, field, source.get(field), "parameters in host memory whose states stay on the GPU",
            "offload the optimizer too, or neither",
        )  # fmt: skip
    draft.put("offload", where, field)


def _note_torchs_adam(source: Source, draft: Draft) -> None:
    """accelerate swaps DeepSpeedCPUAdam in for states in host memory, unless told not to (``accelerator.py``,
    ``zero_force_ds_cpu_optimizer``); torch's own takes the host longer."""
    kept = [source.flag("zero_force_ds_cpu_optimizer") is False, bool(source.flag("optimizer.params.torch_adam"))]
    if draft.options.get("offload", "none") != "none" and any(kept):
        draft.note(
            "torch's AdamW updates states in host memory here, and DeepSpeedCPUAdam, which is faster, is counted: time "
            "is a lower bound."
        )


def _put_overlap(source: Source, draft: Draft, field: str) -> None:
    """Whether reductions run beside the backward, where a stage leaves that open."""
    if draft.options.get("sharding") in ("zero1", "zero2") and source.has(field):
        draft.put("overlap_comm", bool(source.flag(field)), field)


def _put_bucket(source: Source, draft: Draft, field: str) -> None:
    """Elements of ZeRO's bucket; ``auto`` is left to the model's hidden size."""
    if draft.options.get("sharding") in ZERO and source.has(field):
        size = source.get(field)
        draft.put("reduce_bucket_size", size if size == "auto" else source.count(field), field)


def agree(source: Source, draft: Draft, theirs: str, ours: str) -> None:
    """A number that both files state must be the same; ``auto`` asks the training file."""
    if source.get(theirs) in (None, "auto"):
        return
    value = source.count(theirs)
    stated = draft.their_fields.get(ours)
    if stated is not None and draft.options[ours] != value:
        raise InputError(
            f"{source.name}: {theirs} is {value}, but {stated} of the training file is {draft.options[ours]}; "
            "make them equal or write auto."
        )
    draft.put(ours, value, theirs)
