"""The tensors that train, in the model's order: adapters with the modules trained whole beside them, or the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tunecast.model.architecture import Architecture, Layer, Linear, layer_kinds
from tunecast.model.root_modules import Sizes, embedding_adapter_sizes, head_adapter_sizes, saved_sizes
from tunecast.model.run import Run
from tunecast.model.tape import allocated_bytes
from tunecast.model.units import DTYPE_BYTES

OWN_LOOPS = ("torchtune", "litgpt")
"""Stacks that make their optimizer without transformers' Trainer: torchtune ``recipes/full_finetune_single_device.py``
(``_setup_optimizer``), LitGPT ``litgpt/utils.py`` (``instantiate_torch_optimizer``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """`count` trained tensors of one size, spread evenly over the layers they belong to."""

    elements: int
    is_matrix: bool
    is_embedding: bool = False
    """A table of tokens whose state bitsandbytes keeps in 32 bits, because transformers' Trainer asks it to."""
    dtype: str | None = None
    """Storage where it is another than that of the run's other trained tensors."""

    def bytes_in(self, dtype: str) -> int:
        """Bytes of its elements, in its own dtype or else in this one."""
        return self.elements * DTYPE_BYTES[self.dtype or dtype]


def adapter_tensors(layer: Layer, run: Run) -> list[Trained]:
    """Adapters of a layer: those on parts of a map, of linear maps, and of stacked experts."""
    parts, stacked = (
        block.adapter_sizes(run.lora_target_modules, run.lora_r) for block in (layer.attention, layer.mlp)
    )
    inside, around = ([Trained(elements=size, is_matrix=True) for size in sizes] for sizes in (parts, stacked))
    return [*inside, *linear_adapters(layer.linears, run), *around]


def linear_adapters(linears: Iterable[Linear], run: Run) -> list[Trained]:
    """lora_A and lora_B of every target among linear maps, with the bias of lora_B and DoRA's magnitudes if there
    are."""
    vectors = int(run.lora_bias) + int(run.use_dora)
    return [
        tensor
        for linear in linears
        if linear.name in run.lora_target_modules
        for tensor in (
            Trained(elements=run.lora_r * linear.in_features, is_matrix=True),
            Trained(elements=run.lora_r * linear.out_features, is_matrix=True),
            *[Trained(elements=linear.out_features, is_matrix=False)] * vectors,
        )
    ]


def saved_tensors(architecture: Architecture, run: Run) -> tuple[list[Trained], list[Trained]]:
    """Modules trained whole beside adapters: those before the layers, and those after."""
    before, after = saved_sizes(architecture, run)
    tensors = of_sizes(before, is_embedding=True), of_sizes(after)
    own = run.saved_dtype if run.saved_dtype != run.adapter_dtype else None
    head, tail = ([replace(tensor, dtype=own) for tensor in each] for each in tensors)
    return head, tail


def root_tensors(architecture: Architecture, run: Run) -> tuple[list[Trained], list[Trained]]:
    """What trains beside the layers' adapters, before the layers and after them: copies, and adapters; those of the map
    to inputs of layers are after them, where the real model has it."""
    before, after = saved_tensors(architecture, run)
    table, head = (of_sizes(sizes(architecture, run)) for sizes in (embedding_adapter_sizes, head_adapter_sizes))
    inputs = linear_adapters(architecture.root_linears, run)
    return [*before, *table], [*inputs, *head, *after]


def of_sizes(sizes: Sizes, *, is_embedding: bool = False) -> list[Trained]:
    """Trained tensors of these rows and columns (0: a vector)."""
    return [
        Trained(elements=rows * (columns or 1), is_matrix=columns > 0, is_embedding=is_embedding)
        for rows, columns in sizes
    ]


def base_tensors(layer: Layer, hidden_size: int) -> list[Trained]:
    """Weights, biases and norms of a layer, in the model's order."""
    tensors: list[Trained] = []
    for block in (layer.attention, layer.mlp):
        for linear in block.linears:
            tensors.append(Trained(elements=linear.weight_params, is_matrix=True))
            if linear.bias:
                tensors.append(Trained(elements=linear.out_features, is_matrix=False))
        if block is layer.attention:
            tensors += [Trained(elements=size, is_matrix=True) for size in layer.attention.matrix_sizes]
            tensors += [Trained(elements=size, is_matrix=False) for size in layer.attention.qk_norm_sizes]
    tensors += [Trained(elements=size, is_matrix=True) for size in layer.mlp.matrix_sizes]
    tensors += [Trained(elements=size, is_matrix=False) for size in layer.mlp.vector_sizes]
    tensors += [Trained(elements=linear.weight_params, is_matrix=True) for linear in layer.own_input]
    return tensors + [Trained(elements=size, is_matrix=False) for size in layer.norm_sizes(hidden_size)]


def trained_tensors(architecture: Architecture, run: Run) -> list[Trained]:
    """Every trained tensor in the model's order: adapters, or the whole model in a full fine-tune."""
    if run.has_adapters:
        before, after = root_tensors(architecture, run)
        layers = in_layers(architecture, lambda layer: adapter_tensors(layer, run))
        return _optimized([*before, *layers, *after], run)
    hidden = architecture.hidden_size
    layers = in_layers(architecture, lambda layer: base_tensors(layer, hidden))
    entry, end = (
        [Trained(elements=t.elements, is_matrix=t.is_matrix, is_embedding=t.is_embedding) for t in tensors]
        for tensors in (architecture.entry_tensors, architecture.exit_tensors)
    )
    return _optimized([*entry, *layers, *end], run)


def in_layers(architecture: Architecture, tensors_of: Callable[[Layer], list[Trained]]) -> list[Trained]:
    """The tensors of every layer in the model's order; layers of a kind have the same."""
    made = {kind.layer: tensors_of(kind.layer) for kind in layer_kinds(architecture)}
    return [tensor for group in architecture.groups for tensor in made[group.layer] * group.count]


def _optimized(tensors: list[Trained], run: Run) -> list[Trained]:
    """The tensors as the stack's optimizer sees them: without the Trainer no table is an exception."""
    if run.stack not in OWN_LOOPS:
        return tensors
    return [replace(tensor, is_embedding=False) for tensor in tensors]


def gradient_dtype(run: Run) -> str:
    """The dtype gradients are made and reduced in: that of what multiplies."""
    return run.adapter_dtype if run.has_adapters else run.dtype


def trained_dtype(run: Run) -> str:
    """Storage of trained parameters, their gradients and their optimizer state."""
    return run.master_dtype or (run.adapter_dtype if run.has_adapters else run.dtype)


def trainable_params(architecture: Architecture, run: Run) -> int:
    """Parameters that take gradients: r x (in + out) per adapter, or all of them in a full fine-tune."""
    if not run.has_adapters:
        return architecture.total_params
    return sum(tensor.elements for tensor in trained_tensors(architecture, run))


def stored_bytes(tensors: Iterable[Trained], dtype: str) -> int:
    """Bytes that one copy of the tensors takes from the allocator."""
    sizes = Counter(tensor.bytes_in(dtype) for tensor in tensors)
    return sum(count * allocated_bytes(n_bytes) for n_bytes, count in sizes.items())


def whole_bytes(tensors: Iterable[Trained], dtype: str) -> int:
    """Bytes of the tensors' elements, as a buffer or a file holds them."""
    return sum(tensor.bytes_in(dtype) for tensor in tensors)


def by_dtype(tensors: Iterable[Trained], dtype: str) -> list[tuple[str, list[Trained]]]:
    """Tensors of one dtype together, as multi-tensor updates take them, in order of appearance."""
    found: dict[str, list[Trained]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype or dtype, []).append(tensor)
    return list(found.items())
