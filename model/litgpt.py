"""LitGPT's own model code: the architecture it builds from a model's shapes, in several ages of it.

Source: litgpt ``model.py``, ``lora.py``, ``config.py`` and ``finetune/lora.py`` of 0.3.1 to 0.5.13, traced of 0.4.13,
0.5.3 and 0.5.13. One map makes queries, keys and
values; the head is never tied to the embedding; 4-bit bases include the head (Lightning's ``BitsandbytesPrecision``).
"""

from __future__ import annotations

from dataclasses import replace

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architecture import Architecture, Attention, Layer, Linear, Mlp
from tunecast.model.run import Run

STACK = "litgpt"
PRESENT = "litgpt-0.5.11"
"""0.5.11 and later: queries, keys and values lie side by side; adapters are sharded tensor by tensor (FSDP 2)."""
FLAT = "litgpt-0.5.5"
"""0.5.5 to 0.5.10: adapters are sharded in flat parameters (FSDP 1), as all were before."""
GROUPED = "litgpt-0.5"
"""0.5.0 to 0.5.4: queries, keys and values lie group by group; the bitsandbytes that it pins, 0.42, keeps the inputs of
its maps as long as the graph lives, and the loop's logits hold that through the forward of the next micro-batch."""
BEFORE = "litgpt-0.3"
"""0.3 to 0.4: the same, with a plain embedding."""
FIRST = "lit-gpt-2023"
"""lit-gpt of October 2023: the same again, but the longest sample comes first, when nothing is held from before."""
CODES = (PRESENT, FLAT, GROUPED, BEFORE, FIRST)
SLICED = (PRESENT, FLAT)
STABLE = (PRESENT, FLAT, GROUPED)
"""Whose quantized base gets bitsandbytes' ``StableEmbedding``."""
KIND = "litgpt"
"""Of attention and feed-forward blocks."""
NORMS = {"rmsnorm": "litgpt-rmsnorm", "rmsnorm-shifted": "litgpt-rmsnorm-shifted", "layernorm": "layernorm"}
GELUS = ("gelu", "gelu_new")
"""Both forms are one kernel here."""

WORDS = {
    "query": ("query",),
    "key": ("key",),
    "value": ("value",),
    "projection": ("projection",),
    "mlp": ("fc_1", "fc_2", "fc", "proj"),
    "head": ("lm_head",),
}
"""LitGPT's words for what ``lora_<word>`` adapts, and the maps they stand for."""
FOREIGN = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "projection",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
"""Hugging Face's names of the same maps."""


def is_litgpt(architecture: Architecture) -> bool:
    """Whether LitGPT's code builds it."""
    return architecture.code in CODES


def has_stable_embedding(architecture: Architecture, run: Run) -> bool:
    """Whether the embedding is bitsandbytes' ``StableEmbedding``: a quantized base's since 0.5.

    It comes after the optimizer was made, so that its gradients are made, kept for good and never used.
    """
    return architecture.code in STABLE and run.base_quantization == "bnb-4bit"


def stable_embedding(architecture: Architecture) -> tuple[tuple[str, int], ...]:
    """Name and elements of each of its parameters: the table, and a layer norm's weight and bias."""
    hidden = architecture.hidden_size
    return ("embed_tokens", architecture.embedding_params), ("embed_norm", hidden), ("embed_norm.bias", hidden)


def as_litgpt(architecture: Architecture, code: str = PRESENT) -> Architecture:
    """The model as LitGPT builds it; what LitGPT or these formulas do not have is refused by name."""
    if is_litgpt(architecture):
        return architecture
    refuse_unknown(architecture)
    groups = tuple(replace(group, layer=litgpt_layer(group.layer, architecture, code)) for group in architecture.groups)
    return replace(
        architecture,
        code=code,
        groups=groups,
        tie_word_embeddings=False,
        embedding_scale="none" if architecture.embedding_scale == "none" else "stream",
        finds_packing=False,
        config="",
    )


def refuse_unknown(architecture: Architecture) -> None:
    """Refuse what has no formulas in LitGPT's code."""
    reasons = {
        "a model known only from its real code": bool(architecture.settings),
        "positions other than rotary ones": bool(architecture.alibi or architecture.position_rows),
        "a norm after the embedding": architecture.embedding_norm,
        "scaled logits": architecture.logits == "scaled",
    }
    for group in architecture.groups:
        layer, attention, mlp = group.layer, group.layer.attention, group.layer.mlp
        reasons |= {
            "experts": mlp.experts is not None,
            "latent attention": attention.latent is not None,
            "linear attention": attention.delta is not None,
            "short convolutions": attention.convolution is not None,
            "norms of whole queries and keys": attention.qk_norm and not by_head(attention),
            "positions of neighbours in a head": attention.rotary_pairs,
            "queries scaled by position": attention.q_scaled_by_position,
            "layers without positions": not attention.rotary,
            f"the norm {layer.norm}": layer.norm not in NORMS,
            "norms after its blocks alone": layer.norm_order == "post",
            f"the activation {mlp.activation}": mlp.activation != "silu" and mlp.activation not in GELUS,
            "scaled residuals": layer.residual_scaled,
        }
        for what, there in reasons.items():
            if there:
                raise NotSupportedError(
                    f"{architecture.name} by LitGPT's code was asked for, but that is not built for {what} yet; "
                    "use --stack hf-peft."
                )


def by_head(block: Attention) -> bool:
    """Whether one norm serves every head of the queries, and one of the keys (Qwen3)."""
    return block.qk_norm_by_head and not block.qk_norm_each


def litgpt_layer(layer: Layer, architecture: Architecture, code: str) -> Layer:
    """One block: its norms, one map for queries, keys and values, and a feed-forward block of LitGPT's classes."""
    return Layer(
        attention=fused_attention(layer.attention, architecture.hidden_size, code, architecture.max_position),
        mlp=litgpt_mlp(layer.mlp, architecture.hidden_size),
        norm=NORMS[layer.norm],
        norm_order=layer.norm_order,
        parallel="norms" if layer.parallel == "norms-first" else layer.parallel,
    )


def fused_attention(block: Attention, hidden: int, code: str, limit: int | None) -> Attention:
    """``CausalSelfAttention``: the maps ``qkv`` and ``proj``, which its adapters call projection.

    A window beyond the positions of the model (Phi-3.5) is none in LitGPT's table of configurations.
    """
    widths = [heads * block.head_dim for heads in (block.num_heads, block.num_kv_heads, block.num_kv_heads)]
    bias, out_bias = block.linears[0].bias, block.linears[-1].bias
    return Attention(
        kind=KIND,
        linears=(
            Linear(name="qkv", in_features=hidden, out_features=sum(widths), bias=bias),
            Linear(name="projection", in_features=widths[0], out_features=hidden, bias=out_bias),
        ),
        parts=tuple(zip(("query", "key", "value"), widths, strict=True)),
        num_heads=block.num_heads,
        num_kv_heads=block.num_kv_heads,
        head_dim=block.head_dim,
        rotary_dim=block.rotary_dim,
        window=block.window if block.window is None or limit is None or block.window <= limit else None,
        softcap=block.softcap,
        qk_norm=block.qk_norm,
        qkv_split="slices" if code in SLICED else "by-group",
    )


def litgpt_mlp(mlp: Mlp, hidden: int) -> Mlp:
    """``LLaMAMLP`` and ``GemmaMLP`` (fc_1, fc_2, proj), or ``GptNeoxMLP`` (fc, proj)."""
    inner, bias = mlp.intermediate_size, mlp.linears[0].bias
    inward = ("fc_1", "fc_2") if mlp.gated else ("fc",)
    return Mlp(
        kind=KIND,
        linears=(
            *(Linear(name=name, in_features=hidden, out_features=inner, bias=bias) for name in inward),
            Linear(name="proj", in_features=inner, out_features=hidden, bias=bias),
        ),
        intermediate_size=inner,
        gated=mlp.gated,
        activation="silu" if mlp.activation == "silu" else "gelu",
    )
