"""Shapes of blocks beyond plain heads and dense maps: routed experts, linear attention, latent attention, inputs of
single layers.

Part of an `Architecture`; which numbers a family has is said in `families.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

FUSED_PARAMETER = "gate_up_proj"
"""The stacked parameter that holds two maps of each expert."""
BESIDE = "gemma4-experts"
"""Kind of a block of experts beside a dense one, each between norms of its own (Gemma 4)."""
BEHIND_GATE = "gated-shared-experts"
"""Kind of a block of experts beside a shared one, whose output is multiplied by a gate of one number per token (Qwen3.5
MoE): its last linear map."""
GATED, DELTA, DELTA_JOINED = "gated", "delta", "delta-joined"
"""Kinds of attention: with an output that is multiplied by a gate which its queries' map makes beside them; linear, by
the gated delta rule, from four maps (Qwen3.5) or from two that hold all of a key's head side by side (Qwen3-Next)."""
CONVOLVED = "convolution"
"""Kind of a token mixer that is no attention: a short causal convolution between two gates (LFM2)."""
TURNED_FIRST = "turned-first"
"""Kind of attention whose queries and keys are rotated before they are normalised (HunYuan)."""
OWN, STORED, REUSED, REUSED_LAST = "own", "stored", "reused", "reused-last"
"""Whose keys and values a layer attends to: its own, which layers after it may reuse (``stored``), or those of an
earlier layer. The last one to reuse them is told apart: its backward is the first to make gradients of them."""
INPUT_MAP, INPUT_TABLE, INPUT_NORM = "per_layer_model_projection", "embed_tokens_per_layer", "per_layer_projection_norm"
"""What the real model calls the modules that make inputs of layers."""
CORRECTED = ("sigmoid-groups", "sigmoid")
"""Routers whose scores a stored buffer corrects: keys of ``routers.ROUTERS``."""
FUSED_MAPS = 2
"""Maps in it: PEFT gives its adapter as many times the rank (``_convert_peft_config_moe``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One affine map of a layer, named as the module that the real code has."""

    name: str
    """Last part of the Hugging Face module name, for example ``q_proj``."""
    in_features: int
    out_features: int
    bias: bool = False

    @property
    def weight_params(self) -> int:
        """Parameters of the weight, without the bias."""
        return self.in_features * self.out_features

    @property
    def params(self) -> int:
        """Parameters of weight and bias."""
        return self.weight_params + (self.out_features if self.bias else 0)


def has_bias(norm: str) -> bool:
    """Whether a norm adds a bias."""
    return norm.startswith("layernorm") and not norm.endswith("-plain")


def norm_tensors(norm: str, width: int) -> tuple[int, ...]:
    """Parameters of one norm: its weight, and the bias of a layer norm unless it is ``plain``; ``counted`` among
    others of the layer."""
    if norm == "counted":
        return ()
    return (width, width) if has_bias(norm) else (width,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RootTensor:
    """A parameter outside the layers."""

    elements: int
    is_matrix: bool = False
    is_embedding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts of one layer.

    transformers 5 keeps ``gate_up_proj`` and ``down_proj`` of all experts in one three-dimensional parameter each,
    which are no ``nn.Linear``: 4-bit loading passes them by.
    """

    count: int
    per_token: int
    """Experts that each token goes to."""
    hidden_size: int
    intermediate_size: int
    """Inner width of one expert."""
    router: str = "softmax"
    """How scores become weights: a key of ``routers.ROUTERS``."""
    normalised: bool = True
    """Whether a token's weights are divided by their sum."""
    groups: int = 1
    """Groups of experts among which the router chooses first (DeepSeek); 1 where it does not."""
    groups_kept: int = 1
    bias: bool = False
    """Whether router and experts have biases (gpt-oss)."""
    clamped: bool = False
    """Whether gate and up are interleaved and clamped, with a sigmoid in between (gpt-oss)."""
    stacked: bool = True
    """False: every expert's maps are linear maps of the block (transformers before 5)."""
    peft_names: str = ""
    """Whose module names of transformers 4 PEFT turns into stacked parameters: a key of ``resolve_experts.RENAMED``;
    empty where it leaves names alone."""
    module_names: str = ""
    """What its maps were called as modules of transformers 4: a key of ``experts_modules.NAMES``; empty: not known."""

    wide_buffer: bool = False
    """Whether the buffer that corrects scores is fp32 whatever the weights are (GLM-4.5)."""
    linear_router: bool = False
    """Whether the router is a linear map of the block, with vectors of its own that scale input and weights (Gemma
    4)."""

    @property
    def buffer_elements(self) -> int:
        """Numbers of the buffer that corrects the router's scores (DeepSeek-V3, MiniMax)."""
        return self.count if self.router in CORRECTED else 0

    @property
    def router_params(self) -> int:
        """Parameters of the router's weight; none where it is a linear map."""
        return 0 if self.linear_router else self.count * self.hidden_size

    @property
    def up_params(self) -> int:
        """Parameters of all experts' gate and up maps."""
        return self.count * 2 * self.intermediate_size * self.hidden_size

    @property
    def down_params(self) -> int:
        """Parameters of all experts' down maps."""
        return self.count * self.intermediate_size * self.hidden_size

    @property
    def maps_params(self) -> int:
        """Parameters of all experts' maps."""
        return self.up_params + self.down_params

    @property
    def matrix_sizes(self) -> tuple[int, ...]:
        """Parameters of each tensor of two or more dimensions that is no linear map's, in the model's order."""
        if not self.stacked:
            return ()
        if self.linear_router:
            return (self.up_params, self.down_params)
        if not self.bias:
            return (self.router_params, self.up_params, self.down_params)
        up_bias, down_bias = self.count * 2 * self.intermediate_size, self.count * self.hidden_size
        return (self.router_params, self.up_params, up_bias, self.down_params, down_bias)

    @property
    def idle_params(self) -> float:
        """Of stacked experts: those of the experts that one token is not sent to, the router's left out."""
        share = 1.0 - self.per_token / self.count
        return share * (sum(self.matrix_sizes) - self.router_params)

    def sixteen_bit_sizes(self, *, quantized: bool) -> tuple[int, ...]:
        """Those of `matrix_sizes` that stay as they are while the stacks of all experts' maps are in 4 bits."""
        packed = self.stack_sizes if quantized else ()
        return tuple(size for size in self.matrix_sizes if size not in packed)

    @property
    def stack_sizes(self) -> tuple[int, ...]:
        """Parameters of each stack of all experts' maps, in the model's order."""
        return (self.up_params, self.down_params) if self.stacked else ()

    @property
    def vector_sizes(self) -> tuple[int, ...]:
        """Parameters of each vector: the router's bias, or its scales."""
        if self.linear_router:
            return (self.hidden_size, self.count)
        return (self.count,) if self.bias else ()

    @property
    def params(self) -> int:
        """All parameters of router and experts."""
        return sum(self.matrix_sizes) + sum(self.vector_sizes)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Stacked parameters that adapters sit on: (matrices, in, out, times the rank) by name."""
        up, inner = f"experts.{FUSED_PARAMETER}", self.intermediate_size
        return {
            "gate.weight": (1, self.hidden_size, self.count, 1),
            up: (self.count, self.hidden_size, 2 * inner, FUSED_MAPS),
            "experts.down_proj": (self.count, inner, self.hidden_size, 1),
        }

    def adapter_sizes(self, targets: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Parameters of each adapter matrix: every expert has its own factors, stacked into one matrix each way."""
        return tuple(
            times * rank * matrices * width
            for name, (matrices, into, out, times) in self.parameter_shapes.items()
            if name in targets
            for width in (into, out)
        )

    def active_adapter_params(self, targets: tuple[str, ...], rank: int) -> float:
        """Adapter parameters that one token is multiplied by: those of the experts it goes to."""
        shapes = [shape for name, shape in self.parameter_shapes.items() if name in targets]
        return float(
            sum(times * rank * (into + out) * min(count, self.per_token) for count, into, out, times in shapes)
        )

    @property
    def active_weight_params(self) -> int:
        """Weights that one token is multiplied by: the router's, and those of the experts it goes to."""
        return self.router_params + self.maps_params // self.count * self.per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """An input of its own for every layer, made of tokens before the first: rows of a second table of tokens, and a map
    of embedded tokens, each for all layers side by side (Gemma 4 E2B and E4B)."""

    layers: int
    """Layers of the whole model, however few of them are written."""
    width: int
    """Of one layer's input."""
    vocab_size: int
    """Rows of the second table."""

    @property
    def joined_width(self) -> int:
        """Width of the inputs of all layers side by side."""
        return self.layers * self.width

    @property
    def table_params(self) -> int:
        """Parameters of the second table, an embedding that is never quantized."""
        return self.vocab_size * self.joined_width

    def entering(self, hidden_size: int) -> Linear:
        """The map of embedded tokens to the inputs of all layers."""
        return Linear(name=INPUT_MAP, in_features=hidden_size, out_features=self.joined_width)

    def tensors(self, hidden_size: int) -> tuple[RootTensor, ...]:
        """Parameters that make the inputs: the second table, the map, a norm over one layer's input."""
        table = RootTensor(elements=self.table_params, is_matrix=True, is_embedding=True)
        entering = RootTensor(elements=self.entering(hidden_size).weight_params, is_matrix=True)
        return table, entering, RootTensor(elements=self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Linear attention by the gated delta rule: a state of keys times values for each head instead of scores."""

    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: each head of keys and queries serves several of values."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the causal convolution over queries, keys and values spans."""

    @property
    def keys_width(self) -> int:
        """Width of all heads of keys, or of queries."""
        return self.key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        """Width of all heads of values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of queries, keys and values side by side, which the convolution runs over one by one."""
        return 2 * self.keys_width + self.values_width

    @property
    def convolution_params(self) -> int:
        """Parameters of the depthwise convolution, which is no linear map and has no bias."""
        return self.channels * self.kernel

    @property
    def vector_sizes(self) -> tuple[int, ...]:
        """Parameters of each vector: bias and logarithm of the decay of every head, and the norm of its output."""
        return (self.value_heads, self.value_heads, self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """A depthwise causal convolution in place of attention, its input and its output multiplied by gates."""

    channels: int
    kernel: int
    """Tokens that it spans."""

    @property
    def params(self) -> int:
        """Of the convolution, which is no linear map and has no bias."""
        return self.channels * self.kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: keys and values (and perhaps queries) come from a narrow latent of each token."""

    q_rank: int | None
    """Width of the queries' latent; None: queries come straight from the input."""
    kv_rank: int
    nope_dim: int
    """Part of a query or key head without rotary positions."""
    rope_dim: int
    """Part with them; of keys, one for all heads."""
    value_dim: int
    rotary: str = "complex"
    """``complex`` numbers in fp32 (V2) or ``interleaved`` pairs (V3)."""

    @property
    def key_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def value_share(self) -> float:
        """Width of a value over that of a key."""
        return self.value_dim / self.key_dim

    @property
    def is_even(self) -> bool:
        """Whether values are as wide as keys, which flash kernels need."""
        return self.value_dim == self.key_dim

    @property
    def norm_sizes(self) -> tuple[int, ...]:
        """Parameters of the norms of the latents."""
        return (self.kv_rank,) if self.q_rank is None else (self.q_rank, self.kv_rank)
