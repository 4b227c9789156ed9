"""One family of models as data: what its modelling code does, field by field."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One ``model_type`` whose kernels the tape writes, proven against the trace of its real code."""

    model_type: str
    architecture_class: str
    other_classes: tuple[str, ...] = ()
    """Further class names of models that this family describes."""
    own_linears: bool = False
    """Whether its linear maps are a class of their own, which transformers 5 leaves out of 4-bit quantization."""
    keeps_config: bool = False
    """Whether its architectures carry their config, for the real code: its fields say more than blocks do."""
    in_transformers: bool = True
    """Whether transformers has its code; else it comes with the checkpoint, and no trace proves the formulas."""
    attention_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear maps of attention; two where one map makes queries, keys and values."""
    softmax_wide: bool = True
    qkv_split: str = "slices"
    """How one map's output becomes queries, keys and values: see ``Attention.qkv_split``."""
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Linear maps of the MLP: three; two where gate and up are one map, or where there is no gate."""
    gated: bool = True
    qkv_bias: bool | None = None
    """Bias of q, k, v: fixed by the family, or None when ``attention_bias`` of the config decides."""
    o_bias: bool | None = None
    """Bias of the output projection: fixed, or None when ``attention_bias`` of the config decides."""
    mlp_bias: bool = False
    """Whether the maps of the MLP have biases."""
    qk_norm: bool = False
    qk_norm_by_head: bool = True
    qk_norm_late: bool = False
    qk_norm_each: bool = False
    mlp_bias_field: bool = False
    """Whether ``mlp_bias`` of the config is read."""
    default_kv_heads: int | None = None
    """``num_key_value_heads`` when the config has none; None means as many as the query heads."""
    own_kv_heads: bool = False
    """Whether every head has keys and values of its own: the config's class has no ``num_key_value_heads``."""
    fixed_kv_heads: int | None = None
    """Key-value heads, whatever the config says (Falcon 7B)."""
    default_head_dim: int | None = None
    """``head_dim`` when the config has none; None means hidden size over heads."""
    default_tied: bool = False
    """``tie_word_embeddings`` when the config has none."""
    window_rule: str = "none"
    """Layers with a sliding window: ``none``, ``all``, ``late`` (from ``max_window_layers`` on, if
    ``use_sliding_window``) or ``period`` (all but each `global_period`-th)."""
    default_window: int | None = None
    """``sliding_window`` when the config has none."""
    global_period: int = 1
    masks: str = "needed"
    """Which masks its code makes: those that layers need, the ``full`` one anyway (EXAONE 4), ``both`` (OLMo 3), or
    beside the full one an ``empty`` one, of a window of no tokens that no layer has (Qwen2-MoE)."""
    nope_period: int | None = None
    """Each layer at a multiple of this has no rotary embedding."""
    activation: str = "silu"
    """Of the MLP: see ``Mlp.activation``."""
    norm: str = "rmsnorm"
    norm_order: str = "pre"
    parallel: str = "none"
    """Attention and MLP side by side: see ``Layer.parallel``."""
    residual_first: bool = False
    """See ``Layer.residual_first``."""
    positions: str = "rotary"
    """``rotary``, ``learned`` (a table of `position_extra` rows more than there are positions), ``alibi``."""
    position_extra: int = 0
    rotary_share: float = 1.0
    """Part of a head that is rotated, unless the config says another."""
    rotary_dim: int | None = None
    """Rotated part of a head as a number of its own (GPT-J)."""
    rotary_share_fields: tuple[str, ...] = ("partial_rotary_factor",)
    """Fields of a config that say it."""
    default_inner: int | None = None
    """``intermediate_size`` over ``hidden_size`` when the config has none."""
    inner_divisor: int = 1
    """``intermediate_size`` of the config over the MLP's inner width (Qwen 1: 2)."""
    head_bias: bool = False
    embedding_module: str = "embed_tokens"
    head_module: str = "lm_head"
    """Names of the table of tokens and of the head: see ``Architecture``."""
    dropout: float = 0.0
    """Of each block's output, while training."""
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    rotary_joins: bool = False
    """Whether rotated parts of heads are joined with the rest even where it is empty."""
    rotary_pairs: bool = False
    """Whether neighbours in a head are rotated into each other, not its halves (GLM)."""
    rotary_early: bool = False
    """Whether queries and keys are converted to fp32 before they are rotated (Cohere)."""
    global_rotary: bool = True
    """False: layers without a window have no rotary embedding (Cohere 2)."""
    sections: tuple[int, ...] = ()
    """``mrope_section`` when the config has none: angles of time, row and column; empty where positions are one."""
    sections_joined: bool = False
    """See ``Attention.sections_joined``."""
    q_scaled: bool = False
    """Whether queries are multiplied by a number after their map (OPT)."""
    q_scaled_by_position: bool = False
    """Whether rotated queries are multiplied by a number of their position (Ministral 3)."""
    finds_packing: bool = True
    """Whether its code looks for restarting positions before it makes a mask."""
    embedding_norm: bool = False
    attention: str = "heads"
    """Writer of its attention: a key of ``blocks.ATTENTIONS``."""
    residual_scaled: bool = False
    embedding_scale: str = "none"
    rotary_sets: int = 1
    rotary_wide: bool = False
    rotary_by_flash: bool = False
    logits: str = "plain"
    config_fields: tuple[str, ...] = ("head_dim",)
    """Fields of its configuration class, beyond those all have, that the architecture decides."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Every class name it goes by."""
        return (self.architecture_class, *self.other_classes)
