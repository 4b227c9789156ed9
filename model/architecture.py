"""What the network is: a small set of typed blocks with shapes, not a class per family.

An `Architecture` is a sequence of layer groups; each group repeats one `Layer` some number of
times. A layer holds an attention block and an MLP block, each described by its linear maps and a
few switches. Parameter counts follow from the shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tunecast.model.shapes import (
    BESIDE,
    OWN,
    REUSED,
    REUSED_LAST,
    DeltaNet,
    Experts,
    Latent,
    LayerInputs,
    ShortConvolution,
    norm_tensors,
)
from tunecast.model.shapes import Linear as Linear
from tunecast.model.shapes import RootTensor as RootTensor
from tunecast.model.shapes import has_bias as has_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head or grouped-query attention."""

    linears: tuple[Linear, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kind: str = "heads"
    """How its kernels are written: ``heads`` (multi-head and grouped-query), or another key of
    ``blocks.ATTENTIONS``."""
    qk_norm: bool = False
    """A norm over queries and keys: over each head (Qwen3, Gemma 3), or as `qk_norm_by_head` says."""
    qk_norm_by_head: bool = True
    """False: over the whole projection, before heads are split (OLMo 2)."""
    qk_norm_each: bool = False
    """Whether each head has a norm of its own (StableLM 2 12B)."""
    qk_norm_late: bool = False
    """Whether these norms come after the value projection (Gemma 3)."""
    qkv_split: str = "slices"
    """How one map's output becomes queries, keys and values: ``slices`` (Phi-3), ``chunks`` of equal width, whose
    gradients are joined in one kernel (GPT-2), chunks of each head, ``by-head`` (GPT-NeoX), or ``joined``: chunks of
    maps that Megatron-Core has joined (``joined.py``)."""
    rotary: bool = True
    """False: no position embedding in this layer (every fourth of SmolLM3)."""
    rotary_dim: int | None = None
    """Leading part of a head that is rotated; None for all of it."""
    q_scaled: bool = False
    """Whether queries are multiplied by a number after their map (OPT)."""
    q_scaled_by_position: bool = False
    """Whether rotated queries are multiplied by a number of their position (Ministral 3)."""
    window: int | None = None
    """Sliding-window length in tokens; None attends to everything before."""
    latent: Latent | None = None
    """Widths of latent attention; None for plain heads."""
    sinks: bool = False
    """Whether each head has a learned score that takes attention away (gpt-oss)."""
    softmax_wide: bool = True
    """Whether plain attention asks for a softmax in fp32; GPT-2's runs in the scores' own dtype, or autocast's."""
    softcap: bool = False
    """Whether scores are capped by a tanh (Gemma 2)."""
    rotary_joins: bool = False
    """Whether rotated parts of heads are joined with the rest even where it is empty (GLM, MiniMax)."""
    rotary_pairs: bool = False
    """Whether neighbours in a head are rotated into each other, by tables that every layer lays out anew (GLM)."""
    rotary_halves: bool = False
    """Whether a head is rotated as two halves by tables half as wide (gpt-oss)."""
    delta: DeltaNet | None = None
    """Widths of linear attention, which then stands in place of heads; rotary positions are those of other layers."""
    convolution: ShortConvolution | None = None
    """Widths of a short convolution, which then stands in place of heads, without positions of its own."""
    sections: tuple[int, ...] = ()
    """Angles of the rotary table that are those of a token's row and of its column in an image (Qwen3.5)."""
    sections_joined: bool = False
    """Whether a table is joined of these parts, not made whole and written over (Qwen2-VL)."""
    keys: str = OWN
    """Whose keys and values it attends to: see ``shapes.OWN``."""
    parts: tuple[tuple[str, int], ...] = ()
    """Names and widths of what the first map makes at once, where adapters sit on these parts (LitGPT)."""

    def adapter_sizes(self, targets: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Parameters of the two adapter matrices on parts of the first map: all that are adapted share both."""
        widths = [width for name, width in self.parts if name in targets]
        if not widths:
            return ()
        return rank * len(widths) * self.linears[0].in_features, rank * sum(widths)

    @property
    def matrix_sizes(self) -> tuple[int, ...]:
        """Parameters of each tensor of several dimensions that is no linear map's: the convolution's kernels."""
        if self.convolution is not None:
            return (self.convolution.params,)
        return () if self.delta is None else (self.delta.convolution_params,)

    @property
    def reuses_keys(self) -> bool:
        """Whether keys and values are those of an earlier layer."""
        return self.keys in (REUSED, REUSED_LAST)

    @property
    def fused(self) -> bool:
        """Whether queries, keys and values come from one linear map (Phi-3)."""
        return len(self.linears) == 2 and not self.reuses_keys

    @property
    def qk_norm_sizes(self) -> tuple[int, ...]:
        """Parameters of the norms of queries and keys, or of latents; of sinks; of linear attention's vectors."""
        if self.delta is not None:
            return self.delta.vector_sizes
        if self.sinks:
            return (self.num_heads,)
        if self.latent is not None:
            return self.latent.norm_sizes
        if not self.qk_norm:
            return ()
        if self.reuses_keys:
            return (self.head_dim,)
        if self.qk_norm_each:
            return (self.head_dim,) * (self.num_heads + self.num_kv_heads)
        heads = (1, 1) if self.qk_norm_by_head else (self.num_heads, self.num_kv_heads)
        return tuple(count * self.head_dim for count in heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Feed-forward block; `gated` is SwiGLU-like (gate, up, down), gate and up in one map when there are two."""

    linears: tuple[Linear, ...]
    intermediate_size: int
    kind: str = "dense"
    """How its kernels are written: ``dense``, or another key of ``blocks.MLPS``."""
    gated: bool = True
    activation: str = "silu"
    """``silu``, ``gelu`` (either form) or ``relu``: one kernel each way; ``relu2`` is its square (Arcee), and
    ``gelu_new`` is written out (GPT-2)."""
    experts: Experts | None = None
    """Routed experts; the linear maps then are those of the shared experts, if there are any."""

    @property
    def matrix_sizes(self) -> tuple[int, ...]:
        """Parameters of each matrix that is no linear map."""
        return () if self.experts is None else self.experts.matrix_sizes

    def stack_sizes(self, *, quantized: bool) -> tuple[int, ...]:
        """Parameters of each stack of all experts' maps, where they are in 4 bits."""
        return self.experts.stack_sizes if quantized and self.experts is not None else ()

    def sixteen_bit_sizes(self, *, quantized: bool) -> tuple[int, ...]:
        """The rest of `matrix_sizes`."""
        return () if self.experts is None else self.experts.sixteen_bit_sizes(quantized=quantized)

    @property
    def vector_sizes(self) -> tuple[int, ...]:
        """Parameters of each vector that is no linear map's bias."""
        return () if self.experts is None else self.experts.vector_sizes

    @property
    def buffer_sizes(self) -> tuple[int, ...]:
        """Elements of each buffer that is stored with the weights and never trained."""
        elements = 0 if self.experts is None else self.experts.buffer_elements
        return (elements,) if elements else ()

    @property
    def wide_buffers(self) -> bool:
        """Whether these buffers are fp32 whatever the weights are."""
        return self.experts is not None and self.experts.wide_buffer

    @property
    def idle_params(self) -> float:
        """Parameters of routed experts that one token does not go through."""
        if self.experts is None:
            return 0.0
        of_maps = sum((1.0 - self.share_of(linear)) * linear.params for linear in self.linears)
        return of_maps + (self.experts.idle_params if self.experts.stacked else 0.0)

    def share_of(self, linear: Linear) -> float:
        """Part of the tokens that go through a map of the layer: of experts in modules, those that choose it."""
        if self.experts is None or self.experts.stacked or linear not in self.linears[1:]:
            return 1.0
        return self.experts.per_token / self.experts.count

    def adapter_sizes(self, targets: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Parameters of each adapter matrix on stacked parameters."""
        return () if self.experts is None else self.experts.adapter_sizes(targets, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One transformer layer: attention, then MLP, each added to the residual stream."""

    attention: Attention
    mlp: Mlp
    norm: str = "rmsnorm"
    """``rmsnorm`` scales in the weight's dtype (Llama), ``rmsnorm-wide`` in fp32 (OLMo 2), ``rmsnorm-shifted`` in fp32
    by one plus the weight (Gemma), ``rmsnorm-power`` by the weight (Gemma 4), ``layernorm`` has a bias too,
    ``layernorm-plain`` has none (MPT); ``layernorm-low`` stays in 16 bits under autocast (llm-foundry); ``centred`` is
    a layer norm written out, without a bias (Cohere)."""
    norm_order: str = "pre"
    """``pre``, ``post`` (of each block's output, before it is added: OLMo 2) or ``both`` (Gemma)."""
    parallel: str = "none"
    """Attention and MLP side by side on the same input: ``none``; ``norms`` of their own (GPT-NeoX), ``norms-first``
    both of them before attention (Falcon 40B); ``shared`` norm (Phi)."""
    dropout: float = 0.0
    """Of each block's output before it is added, while training."""
    residual_first: bool = False
    """Whether blocks side by side are added to the residual one by one, not to each other first; code that does
    (StableLM) keeps attention's input and output by name until the layer ends."""
    other_params: int = 0
    """Parameters that no other field says: of layers known only from the real code."""
    residual_scaled: bool = False
    """Whether each block's output is multiplied by a number before it is added (Granite)."""
    output_scaled: bool = False
    """Whether the layer's output is multiplied by a number of its own, stored with the weights (Gemma 4)."""
    own_input: tuple[Linear, ...] = ()
    """Maps into the width of an input that the layer has of its own, and back from it (``LayerInputs``)."""

    @property
    def buffer_sizes(self) -> tuple[int, ...]:
        """Elements of each buffer that is stored with the weights and never trained."""
        return (*self.mlp.buffer_sizes, 1) if self.output_scaled else self.mlp.buffer_sizes

    @property
    def norms(self) -> int:
        """Norms over the hidden size in the layer."""
        if self.parallel == "shared":
            return 1
        beside = 3 if self.mlp.kind == BESIDE else 0
        return (4 if self.norm_order == "both" else 2) + beside + bool(self.own_input)

    def norm_sizes(self, hidden_size: int) -> tuple[int, ...]:
        """Parameters of each tensor of the layer's norms, those of queries and keys left out."""
        return norm_tensors(self.norm, hidden_size) * self.norms

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All linear maps, in the order the forward pass uses them."""
        return self.attention.linears + self.mlp.linears + self.own_input

    def params(self, hidden_size: int) -> int:
        """Parameters of the layer, norms included."""
        norms = sum(self.norm_sizes(hidden_size)) + sum(self.attention.qk_norm_sizes)
        stacked = sum(self.mlp.matrix_sizes) + sum(self.mlp.vector_sizes) + sum(self.attention.matrix_sizes)
        return sum(linear.params for linear in self.linears) + norms + stacked + self.other_params


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """`count` equal layers in a row."""

    layer: Layer
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A causal language model, as shapes."""

    name: str
    """Catalog id (the hub id), or the path of the config it was read from."""
    model_type: str
    """Hugging Face ``model_type``, for example ``llama``."""
    hidden_size: int
    vocab_size: int
    groups: tuple[LayerGroup, ...]
    tie_word_embeddings: bool
    max_position: int | None
    """Longest sequence the model was made for, in tokens; None when its config gives no limit."""
    embedding_scale: str = "none"
    """Embedded tokens are multiplied by a number: ``none``, in the ``table``'s module (Gemma) or after it, in the
    ``stream`` (Granite)."""
    rotary_sets: int = 1
    """Tables of rotary positions: one, or one for local and one for global layers (Gemma 3)."""
    rotary_wide: bool = False
    """Whether rotary positions are applied in fp32 (OLMo 2)."""
    rotary_by_flash: bool = False
    """Whether FlashAttention's package, where attention is its own, rotates too (Qwen 1)."""
    logits: str = "plain"
    """``plain``, ``scaled`` by a number (Granite) or ``capped`` by a tanh (Gemma 2)."""
    rotary_early: bool = False
    """Whether queries and keys are converted to fp32 before they are rotated, and back after (Cohere)."""
    finds_packing: bool = True
    """Whether its code looks for restarting positions before it makes a mask; OPT counts its positions instead."""
    masks: tuple[int | None, ...] = ()
    """Windows of the masks that its code makes whether layers need them or not; None is the full one."""
    alibi: str = ""
    """Whose table of slopes there is instead of positions: ``bloom``, ``mpt``, or none."""
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    """Of attention weights, where plain products write them; a fused kernel drops inside."""
    position_rows: int = 0
    """Rows of a learned table of positions; 0 where there is none."""
    embedding_norm: bool = False
    """Whether embedded tokens are normalised (BLOOM)."""
    head_bias: bool = False
    embedding_module: str = "embed_tokens"
    """Last part of the name of the table of tokens in the real model."""
    head_module: str = "lm_head"
    """Last part of the name of the output head in the real model."""
    layer_inputs: LayerInputs | None = None
    """Inputs that layers have of their own; None without any."""
    other_params: int = 0
    """Parameters outside layers beyond embedding, head and norm: of models known only from the real code."""
    has_entry: bool = True
    """False: a pipeline stage that gets its input from the stage before."""
    has_exit: bool = True
    """False: a pipeline stage that hands its output to the next one."""
    settings: str = ""
    """The config as a JSON object, of a model known only from the real code; its kernels have no formulas."""
    code: str = ""
    """Whose code builds it, and of which age, where it is not transformers: see `litgpt.py`."""
    config: str = ""
    """The config as a JSON object, of a family with formulas whose fields are too many to be told from its blocks."""

    def __hash__(self) -> int:
        """Of a few fields, which tell nearly all apart: a pattern has many groups, and caches ask often."""
        return hash((self.name, self.code, self.has_entry, self.has_exit, len(self.groups), self.num_layers))

    @property
    def norm(self) -> str:
        """Kind of the final norm: that of the layers."""
        return self.groups[0].layer.norm

    @property
    def num_layers(self) -> int:
        """Layers over all groups."""
        return sum(group.count for group in self.groups)

    @property
    def embedding_params(self) -> int:
        """Parameters of the input embedding table."""
        return self.vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        """Parameters of the output head that are stored (0 when tied to the embedding)."""
        return 0 if self.tie_word_embeddings else self.embedding_params

    @property
    def entry_tensors(self) -> tuple[RootTensor, ...]:
        """Parameters before the first layer: tables of tokens and positions, a norm."""
        if not self.has_entry:
            return ()
        tables = [self.embedding_params]
        if self.position_rows:
            tables.append(self.position_rows * self.hidden_size)
        norm = norm_tensors(self.norm, self.hidden_size) if self.embedding_norm else ()
        found = [RootTensor(elements=size, is_matrix=True, is_embedding=True) for size in tables]
        return (*found, *(RootTensor(elements=size) for size in norm))

    @property
    def root_linears(self) -> tuple[Linear, ...]:
        """Linear maps outside the layers, the head left out: adapters on all maps reach them, and 4-bit loading."""
        return () if self.layer_inputs is None else (self.layer_inputs.entering(self.hidden_size),)

    @property
    def exit_tensors(self) -> tuple[RootTensor, ...]:
        """Parameters after the last layer: norm, and a head that is not tied, with its bias; between them, as in the
        real model, what makes inputs of layers."""
        if not self.has_exit:
            return ()
        norm = tuple(RootTensor(elements=size) for size in norm_tensors(self.norm, self.hidden_size))
        head = (RootTensor(elements=self.head_params, is_matrix=True),) if self.head_params else ()
        inputs = () if self.layer_inputs is None else self.layer_inputs.tensors(self.hidden_size)
        return norm + inputs + head + ((RootTensor(elements=self.vocab_size),) if self.head_bias else ())

    @property
    def root_tensors(self) -> tuple[RootTensor, ...]:
        """Every parameter outside the layers."""
        return self.entry_tensors + self.exit_tensors

    @property
    def total_params(self) -> int:
        """Unique parameters; a tied head counts once."""
        layers = sum(group.count * group.layer.params(self.hidden_size) for group in self.groups)
        return layers + sum(tensor.elements for tensor in self.root_tensors) + self.other_params

    @property
    def active_params(self) -> float:
        """Those that one token goes through: all but the experts that it is not sent to."""
        return self.total_params - sum(group.count * group.layer.mlp.idle_params for group in self.groups)


@lru_cache(maxsize=256)
def layer_kinds(architecture: Architecture) -> tuple[LayerGroup, ...]:
    """Layers that differ, as they first appear, each with how many there are: few, where a pattern has many groups."""
    counts: dict[Layer, int] = {}
    for group in architecture.groups:
        counts[group.layer] = counts.get(group.layer, 0) + group.count
    return tuple(LayerGroup(layer=layer, count=count) for layer, count in counts.items())


def rotary_blocks(architecture: Architecture) -> list[Attention]:
    """The attention that each table of rotary positions is for: of layers with a window first, where there are two; any
    layer's stands for a kind that none of these layers is of (part of a model)."""
    blocks = [group.layer.attention for group in architecture.groups]
    if architecture.rotary_sets <= 1:
        return blocks[:1] * architecture.rotary_sets
    return [next((each for each in blocks if (each.window is None) is whole), blocks[0]) for whole in (False, True)]
