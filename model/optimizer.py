"""The trained tensors, and the kernels and memory of one update: clipping, step, gradients dropped.

Sources: ``torch.nn.utils.clip_grad_norm_``, ``torch/optim/adamw.py`` (``_multi_tensor_adamw``,
``_single_tensor_adamw``), ``torch/optim/sgd.py``, ``MultiTensorApply.cuh`` for how many kernels a list
of tensors takes, `optimizer_bnb.py` for bitsandbytes, `optimizer_torchao.py` for torchao.
Weight decay is 0, the Trainer's default, so its multiplication is absent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tunecast.model import optimizer_adafactor as adafactor
from tunecast.model import optimizer_torchao as torchao
from tunecast.model import scaler
from tunecast.model.architecture import Architecture
from tunecast.model.litgpt import is_litgpt
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.optimizer_bnb import (
    BITSANDBYTES,
    CODE_BYTES,
    BnbOptimizer,
    is_8bit,
    tensor_state_bytes,
    tensor_update_bytes,
)
from tunecast.model.optimizer_torchao import TORCHAO
from tunecast.model.run import Run
from tunecast.model.tape import allocated_bytes
from tunecast.model.trained import (
    Trained,
    by_dtype,
    stored_bytes,
    trained_dtype,
    trained_tensors,
    whole_bytes,
)
from tunecast.model.units import DTYPE_BYTES

MULTI_TENSOR_CHUNK = 65536
"""Elements per chunk (``MultiTensorApply.cuh``, kChunkSize)."""
MULTI_TENSOR_BLOCKS = 320
"""Chunks per launch (depth_to_max_blocks)."""
MULTI_TENSOR_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors per launch by number of lists (depth_to_max_tensors)."""
MULTI_TENSOR_TENSORS_SCALARS = {**MULTI_TENSOR_TENSORS, 1: 96}
"""The same with one scalar per tensor (depth_to_max_tensors_scalarlist)."""
STACK_INPUTS = 128
"""Inputs per kernel of a concatenation (``Shape.cu``, CAT_ARRAY_BATCH_SIZE)."""
NORM_EXTRA_LAUNCHES = 2
"""Zeroing of partial sums and their final reduction in ``_foreach_norm``."""
ADAM_STATES = 2
"""exp_avg and exp_avg_sq, each of a parameter's size and dtype."""


def optimizer_state_bytes(architecture: Architecture, run: Run, *, platform: str = "cuda") -> int:
    """AdamW's two moments in the parameters' dtype; bitsandbytes' and torchao's in their own; nothing for plain SGD.

    Step counters of a foreach update live on the host; a fused one keeps them on the GPU.
    """
    tensors = trained_tensors(architecture, run)
    if run.optim == "sgd":
        return 0
    if run.optim == adafactor.NAME:
        return adafactor.state_bytes(architecture, run)
    if run.optim in BITSANDBYTES:
        return bnb_state_bytes(tensors, BITSANDBYTES[run.optim], can_page=platform == "cuda")
    if run.optim in TORCHAO:
        return torchao_state_bytes(tensors, trained_dtype(run), TORCHAO[run.optim])
    counters = len(tensors) * allocated_bytes(STEP_COUNTER_BYTES) if is_fused(run) or platform == "cpu" else 0
    return ADAM_STATES * stored_bytes(tensors, trained_dtype(run)) + counters


def bnb_state_bytes(tensors: list[Trained], kind: BnbOptimizer, *, can_page: bool) -> int:
    """State of all tensors, and the code tables that quantized moments share."""
    quantized = any(is_8bit(kind, t.elements, is_embedding=t.is_embedding) for t in tensors)
    codes = kind.moments * allocated_bytes(CODE_BYTES) if quantized else 0
    each = Counter((t.elements, t.is_embedding) for t in tensors).items()
    return codes + sum(
        count * tensor_state_bytes(kind, elements, is_embedding=is_embedding, can_page=can_page)
        for (elements, is_embedding), count in each
    )


def torchao_state_bytes(tensors: list[Trained], dtype: str, kind: torchao.TorchaoOptimizer) -> int:
    """State of all tensors; tables of values are each tensor's own."""
    each = Counter((tensor.elements, own) for own, part in by_dtype(tensors, dtype) for tensor in part).items()
    return sum(count * torchao.state_bytes(kind, elements, own) for (elements, own), count in each)


def is_fused(run: Run) -> bool:
    """Whether the update is one fused kernel per group."""
    return run.optim == "adamw_torch_fused"


def parameter_groups(tensors: list[Trained]) -> list[list[Trained]]:
    """The Trainer's two groups: matrices, and vectors without weight decay."""
    groups = [[t for t in tensors if t.is_matrix], [t for t in tensors if not t.is_matrix]]
    return [group for group in groups if group]


def update_scratch_bytes(architecture: Architecture, run: Run, *, platform: str = "cuda") -> int:
    """Temporaries of the update: ``foreach`` AdamW takes a square root of a whole group, torchao's what the largest
    tensor needs; the others take none.

    Tensors of a second dtype are taken by themselves, while the roots of the first are still held. One tensor at a
    time (CPU), the root and its quotient of the largest tensor are alive together.
    """
    if run.optim == adafactor.NAME:
        return adafactor.scratch_bytes(architecture, run, trained_dtype(run))
    tensors = trained_tensors(architecture, run)
    if run.optim in TORCHAO:
        return max(
            (sum(map(allocated_bytes, torchao.scratch_blocks(TORCHAO[run.optim], t.elements))) for t in tensors),
            default=0,
        )
    if run.optim != "adamw_torch":
        return 0
    if platform == "cpu":
        return 2 * max((stored_bytes([tensor], trained_dtype(run)) for tensor in tensors), default=0)
    groups = [tensors] if is_litgpt(architecture) else parameter_groups(tensors)
    return max((stored_bytes(group, trained_dtype(run)) for group in groups), default=0)


def multi_tensor_launches(tensors: list[Trained], lists: int, *, scalars: bool = False) -> int:
    """Kernels for one multi-tensor operation over `lists` parallel lists: a launch fills with tensors or chunks."""
    per_launch = (MULTI_TENSOR_TENSORS_SCALARS if scalars else MULTI_TENSOR_TENSORS)[lists]
    launches = held = blocks = 0
    for tensor in tensors:
        chunks = -(-tensor.elements // MULTI_TENSOR_CHUNK)
        held += 1
        room = MULTI_TENSOR_BLOCKS - blocks
        if chunks < room:
            blocks += chunks
        else:
            filled, blocks = divmod(chunks - room, MULTI_TENSOR_BLOCKS)
            launches += 1 + filled
            held = 1 if blocks else 0
        if held == per_launch:
            launches += 1
            held = blocks = 0
    return launches + (1 if blocks else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTensor:
    """One multi-tensor operation: how many lists it takes and how many parameter sizes it moves."""

    name: str
    lists: int
    moves: int
    scalars: bool = False
    """Whether each tensor comes with a number of its own (bias corrections)."""


FOREACH_ADAMW = (
    MultiTensor(name="adamw.lerp", lists=2, moves=3),
    MultiTensor(name="adamw.decay_square", lists=1, moves=2),
    MultiTensor(name="adamw.add_square", lists=3, moves=4),
    MultiTensor(name="adamw.sqrt", lists=2, moves=2),
    MultiTensor(name="adamw.correct", lists=1, moves=2, scalars=True),
    MultiTensor(name="adamw.eps", lists=1, moves=2),
    MultiTensor(name="adamw.step", lists=3, moves=4, scalars=True),
)
"""``_multi_tensor_adamw``: 19 parameter sizes moved per update."""
WEIGHT_DECAY = MultiTensor(name="adamw.decay", lists=1, moves=2)
"""``_foreach_mul_`` of the parameters, where weight decay is not 0 (``torch.optim.AdamW``: 0.01)."""
FUSED = "adamw_torch_fused"
FOREACH_NOTE = (
    "The update is adamw_torch (foreach), which makes copies; transformers' Trainer with torch 2.8 or later takes "
    "adamw_torch_fused, of less memory and time: --optim adamw_torch_fused is that run."
)
"""Of a full run whose optimizer nobody named (``TrainingArguments.optim`` of transformers 4.54 and later)."""
FUSED_ADAMW = MultiTensor(name="adamw.fused", lists=4, moves=7)
"""``_fused_adamw_``: parameter and both moments read and written, gradient read."""
SGD = MultiTensor(name="sgd.step", lists=2, moves=3)
"""``_multi_tensor_sgd`` without momentum, the Trainer's default: one addition into the parameters."""
HOST_WAIT = "cuda.synchronize"
"""bitsandbytes waits for the device after every tensor (``sync_gpu``), as a traced stream names it."""
STEP_COUNTER_BYTES = 4
"""An fp32 counter per tensor; on the GPU only when the update is fused."""


SINGLE_ADAMW = (*FOREACH_ADAMW[:4], MultiTensor(name="adamw.correct", lists=1, moves=2), *FOREACH_ADAMW[5:])
"""``_single_tensor_adamw``: the same arithmetic, one tensor at a time."""


def update_operation(name: str, dtype: str, n_bytes: float, launches: int = 1, count: float = 1) -> Operation:
    """One operation of the update."""
    return Operation(
        name=name,
        kind=Kind.OPTIMIZER,
        phase=Phase.OPTIMIZER,
        dtype=dtype,
        bytes=float(n_bytes),
        launches=launches,
        count=count,
    )


def coefficient_operations(count: int, dtype: str) -> list[Operation]:
    """From `count` norms to one clipping coefficient: six kernels on scalars."""
    size = DTYPE_BYTES[dtype]
    return [
        update_operation("clip.stack", dtype, 2 * count * size, -(-count // STACK_INPUTS)),
        update_operation("clip.total", dtype, (count + 1) * size),
        *(update_operation(f"clip.{name}", dtype, 2 * size) for name in ("add", "reciprocal", "mul", "clamp")),
    ]


def clipping_operations(tensors: list[Trained], dtype: str) -> list[Operation]:
    """Global gradient norm, its coefficient, and every gradient scaled by it, on a GPU."""
    norms, scaled = [], []
    for own, part in by_dtype(tensors, dtype):
        size, launches = DTYPE_BYTES[own], multi_tensor_launches(part, 1)
        n_bytes = whole_bytes(part, own)
        norms.append(update_operation("clip.norm", own, n_bytes + len(part) * size, launches + NORM_EXTRA_LAUNCHES))
        scaled.append(update_operation("clip.scale", own, 2 * n_bytes + size, launches))
    return [*norms, *coefficient_operations(len(tensors), dtype), *scaled]


def single_clipping_operations(tensors: list[Trained], dtype: str) -> list[Operation]:
    """Clipping on a CPU: every kernel once per tensor."""
    norms, scaled = [], []
    for own, part in by_dtype(tensors, dtype):
        size, each = DTYPE_BYTES[own], sorted(Counter(tensor.elements for tensor in part).items())
        norms += [update_operation("clip.norm", own, (n + 1) * size, count=count) for n, count in each]
        scaled += [update_operation("clip.scale", own, (2 * n + 1) * size, count=count) for n, count in each]
    return [*norms, *coefficient_operations(len(tensors), dtype), *scaled]


def single_tensor_operations(tensors: list[Trained], dtype: str, optim: str) -> list[Operation]:
    """AdamW or SGD on a CPU: every kernel once per tensor, step counters included."""
    size, each = DTYPE_BYTES[dtype], sorted(Counter(tensor.elements for tensor in tensors).items())
    steps = (SGD,) if optim == "sgd" else SINGLE_ADAMW
    counted = [] if optim == "sgd" else [update_operation("adamw.count", "fp32", 2 * STEP_COUNTER_BYTES)] * len(tensors)
    updated = [
        update_operation(step.name, dtype, step.moves * n * size, count=count) for n, count in each for step in steps
    ]
    return [*counted, *updated]


def bnb_operations(tensors: list[Trained], dtype: str, kind: BnbOptimizer, platform: str) -> list[Operation]:
    """bitsandbytes' update: a kernel per tensor, after each of which a GPU's host waits, and once more when paged."""
    each = Counter((tensor.elements, tensor.is_embedding) for tensor in tensors).items()
    size, operations = DTYPE_BYTES[dtype], []
    for (elements, is_embedding), count in each:
        moved = tensor_update_bytes(kind, elements, elements * size, is_embedding=is_embedding)
        operations.append(update_operation("bitsandbytes.update", widest_state(dtype), moved, count=count))
    waits = len(tensors) if platform == "cuda" else 0
    return operations + [update_operation(HOST_WAIT, dtype, 0.0, 0, count=waits)] * (waits > 0)


def torchao_operations(tensors: list[Trained], dtype: str, kind: torchao.TorchaoOptimizer) -> list[Operation]:
    """torchao's update: a compiled call per tensor, which the host has to find first."""
    each = Counter(tensor.elements for tensor in tensors).items()
    found = update_operation(torchao.FOUND, dtype, 0.0, 0, count=len(tensors))
    return [found] + [
        update_operation(name, "fp32", moved, count=count)
        for elements, count in each
        for name, moved in torchao.kernels(kind, elements, dtype)
    ]


def widest_state(dtype: str) -> str:
    """The widest dtype an update of bitsandbytes touches: its state or its statistics are fp32."""
    return "fp32" if DTYPE_BYTES[dtype] <= DTYPE_BYTES["fp32"] else dtype


def group_operations(group: list[Trained], dtype: str, optim: str) -> list[Operation]:
    """AdamW or SGD over one parameter group on a GPU."""
    group_bytes = DTYPE_BYTES[dtype] * sum(tensor.elements for tensor in group)
    if optim == FUSED:
        launches = multi_tensor_launches(group, FUSED_ADAMW.lists)
        counters = [Trained(elements=1, is_matrix=False)] * len(group)
        counted = STEP_COUNTER_BYTES * len(group)
        moved = FUSED_ADAMW.moves * group_bytes + counted
        return [
            update_operation("adamw.count", "fp32", 2 * counted, multi_tensor_launches(counters, 1)),
            update_operation(FUSED_ADAMW.name, dtype, moved, launches),
        ]
    return [
        update_operation(
            each.name, dtype, each.moves * group_bytes, multi_tensor_launches(group, each.lists, scalars=each.scalars)
        )
        for each in ((SGD,) if optim == "sgd" else FOREACH_ADAMW)
    ]


def updates_in_backward(tensors: list[Trained], dtype: str, optim: str, platform: str) -> list[Operation]:
    """An optimizer for each tensor, as torchtune registers them; nothing is clipped, since no norm is known in time."""
    if optim in BITSANDBYTES:
        return bnb_operations(tensors, dtype, BITSANDBYTES[optim], platform)
    each = [(Trained(elements=n, is_matrix=True), count) for n, count in Counter(t.elements for t in tensors).items()]
    return [
        replace(operation, count=operation.count * count)
        for tensor, count in each
        for operation in group_operations([tensor], dtype, optim)
    ]


def update_operations(
    architecture: Architecture,
    run: Run,
    *,
    platform: str = "cuda",
    tensors: list[Trained] | None = None,
    dtype: str | None = None,
) -> list[Operation]:
    """Clipping and update in order; a GPU batches tensors, a CPU takes them one by one, as bitsandbytes does.

    Of all that trains, in the dtype it is stored in, or of these `tensors` in this `dtype` (a GPU's share).
    """
    tensors = trained_tensors(architecture, run) if tensors is None else tensors
    dtype = dtype or trained_dtype(run)
    if not tensors:
        return []
    on_gpu = platform == "cuda"
    if is_litgpt(architecture):
        return unclipped_update(tensors, dtype, run.optim, platform)
    if run.optimizer_in_backward:
        return updates_in_backward(tensors, dtype, run.optim, platform)
    operations = clipping_operations(tensors, dtype) if on_gpu else single_clipping_operations(tensors, dtype)
    if scaler.scales(architecture, run):
        launches = [multi_tensor_launches(part, 1) for _, part in by_dtype(tensors, dtype)]
        operations = [*scaler.unscaling_operations(tensors, dtype, launches), *operations]
        counters = -(-len(tensors) // MULTI_TENSOR_TENSORS[2])  # each with the check's result
        operations += scaler.checking_operations(tensors, counters, fused=is_fused(run))
    if run.optim == adafactor.NAME:
        return operations + adafactor.update_operations(architecture, run, dtype)
    grouped = run.optim == FUSED or (on_gpu and run.optim not in (*BITSANDBYTES, *TORCHAO))
    groups = parameter_groups(tensors) if grouped else [tensors]
    for own, part in (each for group in groups for each in by_dtype(group, dtype)):
        operations += own_updates(part, own, run.optim, platform)
    return operations


def unclipped_update(tensors: list[Trained], dtype: str, optim: str, platform: str) -> list[Operation]:
    """LitGPT's update: one group, no clipping, and torch's default weight decay, one more multiplication."""
    update = own_updates(tensors, dtype, optim, platform)
    if optim != "adamw_torch":
        return update
    moved = WEIGHT_DECAY.moves * DTYPE_BYTES[dtype] * sum(tensor.elements for tensor in tensors)
    launches = multi_tensor_launches(tensors, WEIGHT_DECAY.lists)
    return [update_operation(WEIGHT_DECAY.name, dtype, moved, launches), *update]


def own_updates(tensors: list[Trained], dtype: str, optim: str, platform: str) -> list[Operation]:
    """The update of tensors of one dtype (and, on a GPU, of one parameter group)."""
    if optim in BITSANDBYTES:
        return bnb_operations(tensors, dtype, BITSANDBYTES[optim], platform)
    if optim in TORCHAO:
        return torchao_operations(tensors, dtype, TORCHAO[optim])
    if platform == "cuda" or optim == FUSED:
        return group_operations(tensors, dtype, optim)
    return single_tensor_operations(tensors, dtype, optim)
