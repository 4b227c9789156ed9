"""Bytes of a model in a GGUF file, tensor by tensor as llama.cpp's ``llama-quantize`` chooses their types.

Source of every rule: ``src/llama-quant.cpp`` of ggml-org/llama.cpp (``llama_tensor_get_type_impl``,
``tensor_type_fallback``, ``tensor_allows_quantization``), without an importance matrix or types of one's own. Bits per
value are those of the blocks of ``ggml-common.h``. Falcon's own exceptions, and maps that llama.cpp merges or splits
(latent attention), are not told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tunecast.catalogs.rental_facts import BITS_PER_BYTE
from tunecast.model.architecture import Architecture, Attention, Layer, Linear, Mlp

BITS = {"Q8_0": 8.5, "Q6_K": 6.5625, "Q5_1": 6.0, "Q5_K": 5.5, "Q5_0": 5.5, "Q4_K": 4.5, "F16": 16.0, "F32": 32.0}
"""Of one value, the scales of its block among them."""
BASES = {"q8": "Q8_0", "q6": "Q6_K", "q5": "Q5_K", "q4": "Q4_K"}
"""The type that most tensors of an export have: Q8_0, Q6_K, Q5_K_M and Q4_K_M as ``llama-quantize`` calls them."""
MIXED = ("q5", "q4")
"""Exports whose more sensitive tensors have more bits."""
NARROWER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What a tensor has instead whose rows are no multiple of 256 values."""
LONG_BLOCK, SHORT_BLOCK = 256, 32
VALUES = ("v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "linear_qkv", "kv_b_proj")
"""Maps that make values, alone or beside queries and keys (``category_is_attn_v``)."""
KEYS = "k_proj"
EIGHT_EXPERTS = 8
"""For as many, whose attention is small beside them, keys and values have 8 bits and the output map has 5."""
SEVENTY_B = (80, 8)
"""Layers, and heads of queries that share a key, of what llama.cpp calls a 70B (``LLM_TYPE_70B``)."""


@dataclass(frozen=True, slots=True)
class Map:
    """Values of a matrix whose rows are this long, and the type that it would have."""

    values: int
    row: int
    type: str


def more_bits(layer: int, layers: int) -> bool:
    """Whether a layer is among those whose sensitive tensors have more bits: the first and last eighth, and every third
    between them (``use_more_bits``)."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def stored_type(wanted: str, row: int) -> str:
    """The type that rows of this length can have."""
    block = SHORT_BLOCK if wanted == "Q8_0" else LONG_BLOCK
    found = wanted if row % block == 0 else NARROWER_BLOCKS.get(wanted, "F16")
    return found if row % SHORT_BLOCK == 0 else "F16"


def of_attention(attention: Attention, base: str, *, seventy_b: bool, experts: int, mixed: bool) -> Iterator[Map]:
    """The maps of an attention block. `mixed`: whether its layer is one of more bits."""
    output = attention.linears[-1]
    for linear in attention.linears:
        wanted = base
        if linear.name in VALUES:
            wanted = "Q6_K" if mixed else "Q5_K" if base == "Q4_K" and seventy_b else base
        if experts == EIGHT_EXPERTS and linear.name in (*VALUES, KEYS):
            wanted = "Q8_0"
        elif experts == EIGHT_EXPERTS and linear is output and base == "Q4_K":
            wanted = "Q5_K"
        yield of_linear(linear, wanted)


def of_mlp(mlp: Mlp, hidden_size: int, base: str, *, mixed: bool) -> Iterator[Map]:
    """The maps of an MLP, of its experts too: those that lead back have more bits where the layer is `mixed`."""
    down = "Q6_K" if mixed else base
    for linear in mlp.linears:
        yield of_linear(linear, down if linear.out_features == hidden_size else base)
    if mlp.experts is not None and mlp.experts.stacked:
        yield Map(mlp.experts.up_params, mlp.experts.hidden_size, base)
        yield Map(mlp.experts.down_params, mlp.experts.intermediate_size, down)


def of_linear(linear: Linear, wanted: str) -> Map:
    """The weight of a map."""
    return Map(linear.weight_params, linear.in_features, wanted)


def of_layer(layer: Layer, hidden_size: int, base: str, *, seventy_b: bool, experts: int, mixed: bool) -> list[Map]:
    """The maps of a layer."""
    attention = of_attention(layer.attention, base, seventy_b=seventy_b, experts=experts, mixed=mixed)
    own = (of_linear(linear, base) for linear in layer.own_input)
    return [*attention, *of_mlp(layer.mlp, hidden_size, base, mixed=mixed), *own]


def tables(architecture: Architecture, base: str) -> list[Map]:
    """The table of tokens and the head: what makes the logits has 6 bits or more."""
    width = architecture.hidden_size
    top = "Q8_0" if width % LONG_BLOCK or base == "Q8_0" else "Q6_K"
    table = Map(architecture.embedding_params, width, base if architecture.head_params else top)
    return [table, Map(architecture.head_params, width, top)]


def maps_of(architecture: Architecture, export: str) -> list[Map]:
    """Every tensor that is quantized."""
    base, layers = BASES[export], architecture.num_layers
    attention = architecture.groups[0].layer.attention
    grouped = attention.num_heads // max(attention.num_kv_heads, 1)
    experts = max((e.count for g in architecture.groups if (e := g.layer.mlp.experts) is not None), default=0)
    found, place = tables(architecture, base), 0
    for group in architecture.groups:
        for index in range(place, place + group.count):
            found += of_layer(
                group.layer,
                architecture.hidden_size,
                base,
                seventy_b=(layers, grouped) == SEVENTY_B,
                experts=experts,
                mixed=export in MIXED and more_bits(index, layers),
            )
        place += group.count
    return found


def bytes_of(maps: Iterable[Map]) -> float:
    """Bytes of these tensors."""
    return sum(each.values * BITS[stored_type(each.type, each.row)] for each in maps) / BITS_PER_BYTE


def gguf_bytes(architecture: Architecture, export: str) -> float:
    """Bytes of the file's tensors. Norms, biases, routers and tables of positions stay in 32 bits; parameters whose
    shape is not known (of models known only from their real code) have the bits of most.

    `export` is a key of `BASES`.
    """
    maps = maps_of(architecture, export)
    unknown = architecture.other_params + sum(g.count * g.layer.other_params for g in architecture.groups)
    rest = architecture.total_params - unknown - sum(each.values for each in maps)
    return bytes_of(maps) + (unknown * BITS[BASES[export]] + rest * BITS["F32"]) / BITS_PER_BYTE
