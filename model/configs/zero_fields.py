"""What else DeepSpeed's JSON says of memory and time: its own optimizer, the dtype of reductions, ZeRO-3's sizes.

Source: DeepSpeed 0.19.8, whose files are named at each function.
"""

from __future__ import annotations

from tunecast.catalogs.errors import InputError
from tunecast.model.configs.frameworks import refuse
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source
from tunecast.model.units import DTYPE_BYTES
from tunecast.model.zero_memory import LIVE_ELEMENTS, PERSISTENT_ELEMENTS, PREFETCH_ELEMENTS, SUB_GROUP_ELEMENTS

_ADAM = ("adam", "adamw")
"""Types of which DeepSpeed makes AdamW (``adam_w_mode`` is on unless switched off, which costs the same)."""
OWN_ADAM = "DeepSpeed makes the optimizer that its file names"
"""How the note on it begins, which a typed --optim replaces."""
_WORDS = ("fp16", "bf16", "fp32")
_SIZES = {
    "sub_group_size": SUB_GROUP_ELEMENTS,
    "stage3_max_live_parameters": LIVE_ELEMENTS,
    "stage3_max_reuse_distance": LIVE_ELEMENTS,
    "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS,
    "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
}
"""Elements by field, as DeepSpeed has them and `zero_memory` counts them."""
_BUFFERS = ("sub_group_size", "stage3_prefetch_bucket_size")
"""Those of a buffer, which a greater one makes no more than greater; the others leave weights gathered."""
_MANY_TIMES = 10
"""Of DeepSpeed's own size, from which so many weights stay gathered that the step is another one (assumed)."""


def put_optimizer(source: Source, draft: Draft) -> None:
    """DeepSpeed's AdamW in place of the training file's optimizer: FusedAdam, which holds and moves what torch's fused
    AdamW does; with offloading DeepSpeedCPUAdam; torch's own where ``torch_adam`` asks for it.

    Source: ``runtime/engine.py`` (``_configure_basic_optimizer``, ``get_optimizer_configuration``); that the Trainer
    makes none then: transformers ``integrations/deepspeed.py`` (``deepspeed_optim_sched``).
    """
    if not source.has("optimizer"):
        return
    kind = source.get("optimizer.type")
    if kind is None:
        raise InputError(f"{source.name}: optimizer has no type; write AdamW, or leave the block out.")
    if str(kind).strip().lower() not in _ADAM:
        refuse(
            source, "optimizer.type", kind, "an optimizer of DeepSpeed's own",
            "write AdamW, or leave the block out, so that the training file's optimizer runs",
        )  # fmt: skip
    stated = draft.their_fields.get("optim")
    place = "" if stated is None else f", in place of {stated} {draft.options['optim']} of the training file"
    if source.flag("optimizer.params.torch_adam"):
        draft.put("optim", "adamw_torch", "optimizer")
        kernels = "torch's AdamW"
    else:
        draft.put("optim", "adamw_torch_fused", "optimizer")
        offloads = draft.options.get("offload", "none") != "none"
        kernels = "DeepSpeedCPUAdam in host memory" if offloads else "its FusedAdam, counted as torch's fused AdamW"
    draft.note(f"{OWN_ADAM}, {kind}, with {kernels}{place}.")


def check_reductions(source: Source, draft: Draft) -> None:
    """Gradients are reduced in the dtype that is trained in; a wider or narrower one is refused.

    Source: ``runtime/engine.py`` (``communication_data_type``), ``zero/stage_1_and_2.py``
    (``gradient_reduction_w_predivide``), ``zero/stage3.py`` (``__avg_scatter_contiguous_grads``).
    """
    field = "communication_data_type"
    stated = source.get(field)
    if stated is None:
        return
    dtype = str(stated).strip().lower()
    if dtype not in _WORDS:
        raise InputError(f"{source.name}: {field} is {stated!r}, but DeepSpeed knows {', '.join(_WORDS)}.")
    own = str(draft.options.get("precision", "bf16")).removesuffix("-autocast")
    if DTYPE_BYTES[dtype] != DTYPE_BYTES.get(own, DTYPE_BYTES["bf16"]):
        refuse(
            source, field, stated, f"gradients of {own} that are reduced in {dtype}",
            f"leave it out: DeepSpeed reduces them in {own}",
        )  # fmt: skip


def check_sizes(source: Source, draft: Draft) -> None:
    """ZeRO-3's sizes are counted as DeepSpeed has them: others are told, and refused where weights stay gathered.

    ``auto`` is the Trainer's, by the hidden size, and below DeepSpeed's (``integrations/deepspeed.py``). Source:
    ``runtime/zero/config.py``, which takes their names without ``stage3_`` too.
    """
    if draft.options.get("sharding") != "zero3":
        return
    smaller: list[str] = []
    greater: list[str] = []
    for name, usual in _SIZES.items():
        spellings = [f"zero_optimization.{one}" for one in dict.fromkeys((name, name.removeprefix("stage3_")))]
        value, field = source.first(spellings)
        if field is None or value == "auto":
            continue
        elements = source.number(field)
        assert elements is not None
        if elements > _MANY_TIMES * usual and name not in _BUFFERS:
            refuse(
                source, field, f"{elements:,.0f}", f"more memory than DeepSpeed's own size of {usual:,} elements",
                "write that or leave it out",
            )  # fmt: skip
        if elements != usual:
            (greater if elements > usual else smaller).append(name)
    counted = "of the DeepSpeed file: counted as DeepSpeed's own"
    if greater:
        draft.note(f"{', '.join(greater)} {counted}, which is smaller, so that memory is a lower bound.")
    if smaller:
        draft.note(
            f"{', '.join(smaller)} {counted} sizes, which are greater, so that memory is an upper bound; what a step "
            "waits for gathers that smaller ones begin later is not counted."
        )
