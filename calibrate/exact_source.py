"""The real code as the source of a forecast's operations and memory: `tunecast estimate --exact`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from tunecast.calibrate import exact
from tunecast.calibrate.trace.depth import counted_micro_batches, trace_micro_batches, with_names
from tunecast.calibrate.trace.kernels import SYNCHRONISATIONS
from tunecast.calibrate.trace.refusals import NEEDED, REAL_LOSSES
from tunecast.calibrate.trace.result import Trace
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.fused import LINEAR_KERNELS
from tunecast.model.host import ONE_TENSOR
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.optimizer_adafactor import NAME as ADAFACTOR
from tunecast.model.optimizer_torchao import TORCHAO
from tunecast.model.run import BUCKET_ELEMENTS, BY_DATA, Run
from tunecast.model.seen_logits import is_widened
from tunecast.model.stacks import BUILT, code_of
from tunecast.model.step_source import StepInventory
from tunecast.model.tape_peaks import PARTS, Parts, Place, layer_position

REQUIRED_BACKWARD = 2.0 / 2.5
"""Products of attention's backward that are required work, over those that flash kernels run (one is recomputed)."""

ONE_GPU: dict[str, Any] = {
    "num_gpus": 1, "sharding": "none", "gpus_per_node": 8, "sync_each_micro_batch": False, "stack": "hf-peft",
    "stack_version": "", "paged_bytes": 0, "overlap_comm": False, "reduce_dtype": None,
    "reduce_bucket_size": BUCKET_ELEMENTS, "loads_on_gpu": None,
}  # fmt: skip
"""Fields that change nothing in what one GPU runs by itself."""
TRACED = (
    "method", "lora_r", "lora_target_modules", "lora_dropout", "use_dora", "use_rslora", "lora_bias",
    "modules_to_save", "modules_to_save_dtype", "adapter_dtype", "dtype", "precision", "bnb_4bit_quant_type",
    "double_quant", "bnb_4bit_compute_dtype", "quant_method",
    "upcast_non_quantized", "quantize_moe_experts",
    "max_length", "per_device_train_batch_size", "gradient_accumulation_steps",
    "gradient_checkpointing", "reentrant", "checkpoint_every", "checkpoint_first", "activation_offloading", "optim",
    "attn_implementation", "sdpa_cudnn", "padding_mask", "pad_to_multiple_of", "loops_experts", "loss_type",
    "keeps_outputs", "token_metrics", "trainer_loop", *ONE_GPU,
)  # fmt: skip
"""Fields of a run that the traced code follows."""
TRACED_VALUES = {
    "loss_type": REAL_LOSSES,
    "quant_method": (None, "bnb-4bit", "bnb-8bit"),
    "optim": tuple(name for name in BUILT["optimizer"] if name not in TORCHAO),
}

Told = Callable[[str], None]


def check_installed() -> None:
    """Refuse, in one sentence, a trace without the packages it runs."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(
            f"--exact runs the real code, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            'installed; type: pip install "tunecast[calibrate]"'
        )


def check_traced(run: Run) -> None:
    """Refuse, by name, what the traced code would leave out: kernels and parallelism that are not Hugging Face's."""
    whose = code_of(run.stack)
    if whose:
        raise NotSupportedError(f"--exact runs Hugging Face's code, not {whose}; leave it or --stack {run.stack} out.")
    plain = {each.name: each.default for each in fields(Run)}
    for name, ordinary in plain.items():
        value = getattr(run, name)
        if name == "fused_kernels":  # of linear attention are refused where they would run
            value = tuple(part for part in value if part not in LINEAR_KERNELS)
        followed = value in TRACED_VALUES.get(name, (value,)) if name in TRACED else value == ordinary
        if not followed:
            shown = ",".join(value) if isinstance(value, tuple) else value
            if name in BY_DATA:
                name, shown = "padding_free", "with --no-packing"
            flag = name.replace("_", "-")
            if name == "master_dtype":
                raise NotSupportedError(
                    f"--exact traces weights in one dtype, but what trains of this run's shards is held in {shown}, as "
                    "FSDP 2 does under autocast; add --master-dtype none, or leave --exact out."
                )
            raise NotSupportedError(
                f"--exact runs the code of transformers, PEFT and bitsandbytes, which has no --{flag} {shown}; leave "
                "one of the two out."
            )


@dataclass(slots=True)
class TracedSteps:
    """A `StepSource` that traces each run once, whatever the number of GPUs and of devices that ask."""

    told: Told = lambda _: None
    """Hears what is traced next."""
    found: dict[tuple[Architecture, Run, str], StepInventory] = field(default_factory=dict)

    def __call__(self, architecture: Architecture, run: Run, platform: str) -> StepInventory:
        check_traced(run)
        key = (architecture, replace(run, **ONE_GPU, trainer_loop=is_widened(run)), platform)
        if key not in self.found:
            self.found[key] = traced_inventory(*key, told=self.told)
        return self.found[key]


def traced_inventory(
    architecture: Architecture, run: Run, platform: str, *, told: Told = lambda _: None
) -> StepInventory:
    """One step of the real code on one GPU, as the forecast reads it."""
    quiet = logging.getLogger("transformers")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        trace = trace_micro_batches(architecture, run, platform=platform, told=told)
        trace = with_names(trace, architecture, run)
        notes = exact.exact_notes(architecture, run)
    finally:
        quiet.setLevel(level)
    operations = merged_stream(trace, run.gradient_accumulation_steps)
    if run.optim == ADAFACTOR:
        operations = tuple(map(_of_one_tensor, operations))
    return StepInventory(
        operations=operations,
        places=traced_places(trace, architecture.num_layers),
        model_flops=required_flops(operations),
        trainable_params=trace.trainable_params,
        notes=(f"memory, FLOPs and kernels traced from the real code: {', '.join(versions())}", *notes),
    )


def _of_one_tensor(operation: Operation) -> Operation:
    """An operation of Adafactor's update under the name of those that take one tensor."""
    other = "_foreach" in operation.name or operation.name in SYNCHRONISATIONS
    if operation.kind is not Kind.OPTIMIZER or other:
        return operation
    return replace(operation, name=f"{ONE_TENSOR}{operation.name}")


def versions() -> Iterable[str]:
    """The packages traced, as ``name 1.2.3``."""
    return (f"{name} {version(name)}" for name in NEEDED)


def merged_stream(trace: Trace, micro_batches: int) -> tuple[Operation, ...]:
    """Equal kernels of the whole optimizer step as one operation with their count."""
    counts: dict[Operation, float] = {}
    for part, times in counted_micro_batches(trace.stream, micro_batches):
        for operation in part:
            somewhere = replace(operation, layer=None) if operation.layer is not None else operation
            counts[somewhere] = counts.get(somewhere, 0.0) + operation.count * times
    return tuple(replace(operation, count=count) for operation, count in counts.items())


def traced_places(trace: Trace, depth: int) -> tuple[tuple[Place, Parts], ...]:
    """The peak of every place, layers named as the formulas name them; ``load`` is what stays between steps."""
    found: list[tuple[Place, Parts]] = [(("load", "outside", False), whole_parts(trace.rest_parts))]
    for place, peak in trace.peaks.items():
        backward = place.moment == "backward" or (place.moment == "loss" and place.tail)
        for position in layer_position(place.layer, depth) or ("middle",):
            found.append(((place.moment, position, backward), whole_parts(peak.parts)))
    return tuple(found)


def whole_parts(parts: Mapping[str, int]) -> Parts:
    """Every part of a forecast; a single process keeps nothing for communication."""
    return {part: parts.get(part, 0) for part in PARTS}


def required_flops(operations: Iterable[Operation]) -> float:
    """FLOPs that the mathematics needs: recomputation left out, attention's backward twice its forward.

    Left in: masked halves of attention that ran as plain products (eager).
    """
    return sum(
        operation.total_flops * (_required(operation) if operation.kind is Kind.ATTENTION else 1.0)
        for operation in operations
        if operation.kind in (Kind.GEMM, Kind.ATTENTION) and operation.phase is not Phase.RECOMPUTE
    )


def _required(operation: Operation) -> float:
    return REQUIRED_BACKWARD if operation.phase is Phase.BACKWARD and "backward" in operation.name else 1.0
