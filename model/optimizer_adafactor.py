"""Adafactor as the Trainer runs it: second moments by row and column, one tensor at a time in plain operators.

Source: transformers ``optimization.Adafactor`` with ``scale_parameter`` and ``relative_step`` off, as the Trainer asks
for it: no first moment. State is fp32 whatever the parameters are; 16-bit parameters and gradients are copied to fp32
for the step. What the loop's variables of one tensor hold lives on into the next one's turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architecture import Architecture, Layer
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.root_modules import Sizes, embedding_adapter_sizes, head_adapter_sizes, saved_sizes
from tunecast.model.run import Run
from tunecast.model.tape import allocated_bytes
from tunecast.model.units import DTYPE_BYTES

NAME = "adafactor"
FP32 = 4
"""Bytes of the numbers that the update works with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A trained tensor: a matrix of rows and columns, or a vector (no columns)."""

    rows: int
    columns: int = 0
    dtype: str | None = None
    """Storage where it is another than that of the run's other trained tensors."""

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        return self.rows * (self.columns or 1)


def shapes(architecture: Architecture, run: Run) -> list[Shape]:
    """Every trained tensor, matrices first: the Trainer's two groups."""
    if any(group.layer.mlp.matrix_sizes for group in architecture.groups):
        raise NotSupportedError(
            f"--optim {NAME} of {architecture.name}, whose experts are stacked in one parameter, is not built yet; "
            "use --optim adamw_torch, or --exact."
        )
    before, after = root_shapes(architecture, run)
    layers: list[Shape] = []
    for group in architecture.groups:
        hidden = architecture.hidden_size
        one = adapter_shapes(group.layer, run) if run.has_adapters else base_shapes(group.layer, hidden)
        layers += list(one) * group.count
    found = [*before, *layers, *after]
    return [shape for shape in found if shape.columns] + [shape for shape in found if not shape.columns]


def root_shapes(architecture: Architecture, run: Run) -> tuple[list[Shape], list[Shape]]:
    """Trained tensors before the layers and after them."""
    width = architecture.hidden_size
    if run.has_adapters:
        before, after = (of_sizes(sizes, run.saved_dtype) for sizes in saved_sizes(architecture, run))
        table, head = embedding_adapter_sizes(architecture, run), head_adapter_sizes(architecture, run)
        return [*before, *of_sizes(table)], [*of_sizes(head), *after]
    entry, end = (
        [
            Shape(rows=tensor.elements // width, columns=width) if tensor.is_matrix else Shape(rows=tensor.elements)
            for tensor in tensors
        ]
        for tensors in (architecture.entry_tensors, architecture.exit_tensors)
    )
    return entry, end


def of_sizes(sizes: Sizes, dtype: str | None = None) -> list[Shape]:
    """Shapes of rows and columns."""
    return [Shape(rows=rows, columns=columns, dtype=dtype) for rows, columns in sizes]


def adapter_shapes(layer: Layer, run: Run) -> Iterator[Shape]:
    """lora_A (rank x in) and lora_B (out x rank) of every target, biases and magnitudes."""
    for linear in layer.linears:
        if linear.name in run.lora_target_modules:
            yield Shape(rows=run.lora_r, columns=linear.in_features)
            yield Shape(rows=linear.out_features, columns=run.lora_r)
            yield from [Shape(rows=linear.out_features)] * (int(run.lora_bias) + int(run.use_dora))


def base_shapes(layer: Layer, hidden_size: int) -> Iterator[Shape]:
    """Weights, biases and norms of a layer."""
    for linear in layer.linears:
        yield Shape(rows=linear.out_features, columns=linear.in_features)
        if linear.bias:
            yield Shape(rows=linear.out_features)
    vectors = (*layer.attention.qk_norm_sizes, *layer.mlp.vector_sizes, *layer.norm_sizes(hidden_size))
    yield from (Shape(rows=size) for size in vectors)


def state_bytes(architecture: Architecture, run: Run) -> int:
    """Second moments of every row and column (of every number of a vector), and the parameters' root mean square."""
    return sum(
        count * (allocated_bytes(FP32 * shape.rows) + allocated_bytes(FP32 * shape.columns) + allocated_bytes(FP32))
        for shape, count in Counter(shapes(architecture, run)).items()
    )


def scratch_bytes(architecture: Architecture, run: Run, dtype: str) -> int:
    """Largest temporaries of the update: the tensor's update twice and its 16-bit copies, with the last one's update.

    Squared gradients and squares plus eps are alive together while the previous tensor's update still is; 16-bit
    gradients are copied while its parameter's copy still is, too.
    """
    largest = before = 0
    for shape in shapes(architecture, run):
        copied = 1 if DTYPE_BYTES[shape.dtype or dtype] < FP32 else 0
        own = allocated_bytes(FP32 * shape.elements)
        largest = max(largest, 2 * own + 2 * copied * own + before, before * (1 + 2 * copied))
        before = own
    return largest


def update_operations(architecture: Architecture, run: Run, dtype: str) -> list[Operation]:
    """Every kernel of the update, equal ones counted together; none are batched over tensors."""
    counts: Counter[tuple[str, float]] = Counter()
    for shape, count in Counter(shapes(architecture, run)).items():
        for name, n_bytes in tensor_kernels(shape, dtype):
            counts[name, n_bytes] += count
    return [
        Operation(
            name=f"{NAME}.{name}", kind=Kind.OPTIMIZER, phase=Phase.OPTIMIZER, dtype="fp32", bytes=moved, count=count
        )
        for (name, moved), count in counts.items()
    ]


def tensor_kernels(shape: Shape, dtype: str) -> Iterator[tuple[str, float]]:
    """Name and bytes of the kernels for one tensor, in order."""
    whole, size = FP32 * shape.elements, DTYPE_BYTES[shape.dtype or dtype] * shape.elements
    narrow = size < whole
    if narrow:
        yield from [("copy", size + whole)] * 2
    yield from root_mean_square(whole)
    yield from [("square", 2 * whole), ("eps", 2 * whole)]
    yield from factored_kernels(shape) if shape.columns else [
        ("decay", 2 * whole), ("add", 3 * whole), ("rsqrt", 2 * whole), ("mul", 3 * whole),
    ]  # fmt: skip
    yield from root_mean_square(whole)
    yield from [("threshold", 2 * FP32), ("clamp", 2 * FP32), ("div", 2 * whole + FP32), ("rate", 2 * whole)]
    yield from [("neg", 2 * whole), ("add", 3 * whole)]
    if narrow:
        yield ("copy", size + whole)


def root_mean_square(whole: int) -> list[tuple[str, float]]:
    """A norm and its division."""
    return [("norm", whole + FP32), ("root", 2 * FP32)]


def factored_kernels(shape: Shape) -> Iterator[tuple[str, float]]:
    """Moving means of rows and columns, and their product as the update."""
    whole, rows, columns = FP32 * shape.elements, FP32 * shape.rows, FP32 * shape.columns
    for part in (rows, columns):
        yield from [("decay", 2 * part), ("mean", whole + part), ("add", 3 * part)]
    yield from [("mean", rows + FP32), ("div", 2 * rows + FP32), ("rsqrt", 2 * rows), ("rsqrt", 2 * columns)]
    yield from [("outer", rows + columns + whole), ("mul", 3 * whole)]
