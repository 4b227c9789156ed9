"""What a family says about its experts and its latent attention, and the shapes that a config then gives.

Sources: ``models/<type>/configuration_<type>.py`` of transformers 5.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture, Attention, Layer, LayerGroup, Linear, Mlp
from tunecast.model.config_fields import DENSE, LAYER_KINDS, SPARSE, kinds_by_layer, positive, switch, whole
from tunecast.model.family_convolved import MODEL_TYPE as LFM2
from tunecast.model.family_convolved import convolved_layers
from tunecast.model.family_delta import MODEL_TYPES as QWEN
from tunecast.model.family_delta import QWEN_MOE, QWEN_NEXT, delta_layers
from tunecast.model.family_gemma import gemma_layers, inputs_of_layers
from tunecast.model.shapes import BEHIND_GATE, BESIDE, Experts, Latent
from tunecast.model.variants import refuse

SOFTCAP = 50.0
"""``attn_logit_softcapping`` of a Gemma 2 config that says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRule:
    """How one family's config describes its experts."""

    router: str
    count_field: str = "num_experts"
    other_count_field: str = ""
    """Its other name (``attribute_map`` of the configuration class); transformers 5 saves some by that."""
    may_have_none: bool = False
    """Whether a number of 0 is that of a model without experts."""
    count: int = 0
    """Experts when the config says nothing."""
    per_token: int = 0
    """Experts per token when the config says nothing."""
    width_field: str = "moe_intermediate_size"
    width: int = 0
    """Inner width of an expert when the config says nothing."""
    normalised: bool | None = True
    """None: ``norm_topk_prob`` of the config decides, which is false when absent."""
    shared_field: str | None = None
    """Field with the number of shared experts, which are one dense block of as many widths."""
    shared: int = 0
    gated_width: int = 0
    """Inner width of a shared expert behind a gate, when ``shared_expert_intermediate_size`` is absent; 0: none."""
    dense_first: int = 0
    """Layers before the first with experts, when ``first_k_dense_replace`` is absent."""
    groups: int = 1
    groups_kept: int = 1
    bias: bool = False
    clamped: bool = False
    peft_names: str = ""
    """Where transformers' table of conversions has the family (``conversion_mapping._MODEL_TO_CONVERSION_PATTERN``;
    ``mixtral`` by PEFT itself), for PEFT converts no others."""
    module_names: str = ""
    """Empty: as `peft_names`."""
    wide_buffer: bool = False
    linear_router: bool = False
    per_token_field: str = "num_experts_per_tok"
    kinds: bool = False
    """Whether a list of the layers' kinds says which route, and no other field."""

    def shape(self, config: Mapping[str, Any], hidden_size: int, name: str) -> Experts:
        """The experts of one layer."""
        chosen = switch(config, "norm_topk_prob", name) if self.normalised is None else self.normalised
        experts = Experts(
            count=self.count_of(config, name),
            per_token=positive(config, self.per_token_field, name, self.per_token),
            hidden_size=hidden_size,
            intermediate_size=positive(config, self.width_field, name, self.width),
            router=self.router,
            groups=positive(config, "n_group", name, self.groups),
            groups_kept=positive(config, "topk_group", name, self.groups_kept),
            normalised=chosen,
            bias=self.bias,
            clamped=self.clamped,
            peft_names=self.peft_names,
            module_names=self.module_names or self.peft_names,
            wide_buffer=self.wide_buffer,
            linear_router=self.linear_router,
        )
        if experts.per_token > experts.count:
            raise InputError(
                f"The config {name} sends each token to {experts.per_token} of {experts.count} experts; "
                f"correct {self.per_token_field}."
            )
        if experts.count % experts.groups or experts.groups_kept > experts.groups:
            raise InputError(
                f"The config {name} chooses among {experts.groups_kept} of {experts.groups} groups of its "
                f"{experts.count} experts; correct topk_group or n_group."
            )
        return experts

    def count_of(self, config: Mapping[str, Any], name: str) -> int:
        """Experts by either name that the family's configs have for them, or its class's default."""
        said = {field: config[field] for field in (self.count_field, self.other_count_field) if field in config}
        if len({*map(str, said.values())}) > 1:
            told = " and ".join(f"{field}={value!r}" for field, value in said.items())
            raise InputError(f"The config {name} has {told}, which are one field of this family; correct one.")
        field, value = next(iter(said.items()), (self.count_field, None))
        if said and value is None:
            raise InputError(f"The config {name} has no number of experts in {field}; give how many.")
        least = whole if self.may_have_none and said else positive
        return least({field: value}, field, name, self.count)

    def shared_width(self, config: Mapping[str, Any], name: str) -> int:
        """Inner width of the shared experts; 0 without any."""
        if self.gated_width:
            return positive(config, "shared_expert_intermediate_size", name, self.gated_width)
        if self.shared_field is None:
            return 0
        return whole(config, self.shared_field, name, self.shared) * positive(
            config, self.width_field, name, self.width
        )

    def routing_layers(self, config: Mapping[str, Any], num_layers: int, name: str) -> list[bool]:
        """Which layers route: after the first dense ones, each ``decoder_sparse_step``-th not listed as dense; or those
        that ``mlp_layer_types`` says, where the family reads it in place of all others."""
        if self.kinds:
            kinds = kinds_by_layer(config, LAYER_KINDS, num_layers, name)
            kinds = [DENSE] * self.dense_first + [SPARSE] * num_layers if kinds is None else kinds
            return [kind == SPARSE for kind in kinds[:num_layers]]
        first = whole(config, "first_k_dense_replace", name, self.dense_first)
        period = positive(config, "decoder_sparse_step", name, 1)
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(i) is int for i in dense):
            raise InputError(
                f"The config {name} has mlp_only_layers={dense!r}, but it must be a list of layers' numbers."
            )
        return [i >= first and (i + 1) % period == 0 and i not in dense for i in range(num_layers)]


GEMMA_EXPERTS = ExpertsRule(router="gemma4", linear_router=True, per_token_field="top_k_experts")
"""Of Gemma 4, where ``enable_moe_block`` is set."""
GLM = ExpertsRule(
    other_count_field="num_local_experts",
    router="sigmoid-groups",
    count_field="n_routed_experts",
    count=128,
    per_token=8,
    width=1408,
    shared_field="n_shared_experts",
    shared=1,
    dense_first=1,
    wide_buffer=True,
    peft_names="qwen2_moe",
)
"""GLM-4.5 to 4.7."""
EXPERTS: dict[str, ExpertsRule] = {
    "mixtral": ExpertsRule(
        other_count_field="num_experts",
        router="softmax-wide",
        count_field="num_local_experts",
        count=8,
        per_token=2,
        width_field="intermediate_size",
        peft_names="mixtral",
    ),
    "qwen3_moe": ExpertsRule(
        other_count_field="num_local_experts",
        may_have_none=True,
        router="softmax",
        count=128,
        per_token=8,
        width=768,
        normalised=None,
        peft_names="qwen2_moe",
    ),
    "qwen3_vl_moe_text": ExpertsRule(
        other_count_field="num_local_experts",
        router="softmax",
        count=60,
        per_token=4,
        width=1408,
        module_names="qwen2_moe",
    ),
    QWEN_MOE: ExpertsRule(router="softmax", count=256, per_token=8, width=512, gated_width=512),
    QWEN_NEXT: ExpertsRule(
        may_have_none=True,
        router="softmax",
        count=512,
        per_token=10,
        width=512,
        gated_width=512,
        peft_names="qwen2_moe",
    ),
    "olmoe": ExpertsRule(
        other_count_field="num_local_experts",
        router="softmax",
        count=64,
        per_token=8,
        width_field="intermediate_size",
        width=2048,
        normalised=None,
        peft_names="qwen2_moe",
    ),
    "granitemoe": ExpertsRule(
        router="softmax-last", count_field="num_local_experts", count=8, per_token=2, width_field="intermediate_size"
    ),
    "gpt_oss": ExpertsRule(
        other_count_field="num_experts",
        router="softmax-last-narrow",
        count_field="num_local_experts",
        count=128,
        per_token=4,
        width_field="intermediate_size",
        bias=True,
        clamped=True,
    ),
    "deepseek_v2": ExpertsRule(
        other_count_field="num_experts",
        router="softmax-wide-input",
        count_field="n_routed_experts",
        count=64,
        width=1407,
        normalised=False,
        shared_field="n_shared_experts",
        shared=2,
        peft_names="qwen2_moe",
    ),
    "deepseek_v3": ExpertsRule(
        other_count_field="num_local_experts",
        router="sigmoid-groups",
        count_field="n_routed_experts",
        count=256,
        per_token=8,
        width=2048,
        shared_field="n_shared_experts",
        shared=1,
        dense_first=3,
        groups=8,
        groups_kept=4,
        peft_names="qwen2_moe",
    ),
    "glm4_moe": GLM,
    "glm4_moe_lite": replace(GLM, count=64, per_token=4, width=1536, kinds=True),
    "qwen2_moe": ExpertsRule(
        may_have_none=True,
        router="softmax",
        count=60,
        per_token=4,
        width=1408,
        normalised=None,
        gated_width=5632,
        module_names="qwen2_moe",
    ),
    "minimax_m2": ExpertsRule(
        other_count_field="num_experts",
        router="sigmoid",
        count_field="num_local_experts",
        count=256,
        per_token=8,
        width_field="intermediate_size",
        width=1536,
        peft_names="mixtral",
    ),
}
"""By ``model_type``."""


def with_experts(architecture: Architecture, config: Mapping[str, Any], name: str) -> Architecture:
    """The architecture with what only its config tells: experts, and attention beyond plain heads.

    One of a family with experts carries its config even if none of its layers has them: the class's own defaults do.
    """
    layers = [group.layer for group in architecture.groups for _ in range(group.count)]
    changed = odd_attention(layers, architecture, config)
    rule = EXPERTS.get(architecture.model_type)
    if rule is not None:
        routes = rule.routing_layers(config, len(changed), name)
        none = rule.may_have_none and rule.count_of(config, name) == 0
        routed = None if none else routed_block(rule, config, layers[0].mlp, architecture.hidden_size, name)
        changed = [
            replace(layer, mlp=routed) if here and routed else layer
            for here, layer in zip(routes, changed, strict=True)
        ]
    if changed == layers and rule is None:
        return architecture
    given = inputs_of_layers(config, architecture) if architecture.model_type == "gemma4_text" else None
    settings = json.dumps(dict(config), sort_keys=True)
    return replace(architecture, groups=runs_of(changed), layer_inputs=given, config=settings)


def odd_attention(layers: list[Layer], architecture: Architecture, config: Mapping[str, Any]) -> list[Layer]:
    """The layers with the attention that their family has beyond plain heads."""
    if architecture.model_type == "gemma2" and config.get("attn_logit_softcapping", SOFTCAP) is not None:
        return [replace(layer, attention=replace(layer.attention, softcap=True)) for layer in layers]
    if architecture.model_type == "gpt_oss":
        return [replace(layer, attention=replace(layer.attention, sinks=True, rotary_halves=True)) for layer in layers]
    if architecture.model_type == "gemma4_text":
        routed = gemma_experts(config, layers[0].mlp, architecture)
        return gemma_layers([replace(layer, mlp=routed) for layer in layers], architecture, config)
    if architecture.model_type in QWEN:
        return delta_layers(layers, architecture, config)
    if architecture.model_type == LFM2:
        return convolved_layers(layers, architecture, config)
    if architecture.model_type in LATENTS:
        block = latent_block(layers[0].attention.num_heads, architecture, config)
        return [replace(layer, attention=block) for layer in layers]
    return layers


def gemma_experts(config: Mapping[str, Any], dense: Mlp, architecture: Architecture) -> Mlp:
    """Gemma 4's dense block, beside routed experts where the config has them: the router is its last linear map."""
    if not switch(config, "enable_moe_block", architecture.name):
        return dense
    experts = GEMMA_EXPERTS.shape(config, architecture.hidden_size, architecture.name)
    router = Linear(name="proj", in_features=architecture.hidden_size, out_features=experts.count)
    return replace(dense, linears=(*dense.linears, router), kind=BESIDE, experts=experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRule:
    """Latent attention of one family: widths where its config says nothing."""

    rotary: str = "interleaved"
    q_rank: int = 1536
    nope_dim: int = 128
    value_dim: int = 128
    greedy: bool = False
    """Whether its code reads ``topk_method``, of which ``greedy`` is built."""


LATENTS = {
    "deepseek_v2": LatentRule(rotary="complex", greedy=True),
    "deepseek_v3": LatentRule(),
    "glm4_moe_lite": LatentRule(q_rank=768, nope_dim=192, value_dim=256),
}
"""By ``model_type``."""


def latent_block(heads: int, architecture: Architecture, config: Mapping[str, Any]) -> Attention:
    """Latent attention with its linear maps."""
    name, hidden, rule = architecture.name, architecture.hidden_size, LATENTS[architecture.model_type]
    refuse(config, name, attention_bias=False, rope_interleave=True)
    if rule.greedy:
        refuse(config, name, topk_method="greedy")
    q_rank = config.get("q_lora_rank", rule.q_rank)
    latent = Latent(
        q_rank=q_rank,
        kv_rank=positive(config, "kv_lora_rank", name, 512),
        nope_dim=positive(config, "qk_nope_head_dim", name, rule.nope_dim),
        rope_dim=positive(config, "qk_rope_head_dim", name, 64),
        value_dim=positive(config, "v_head_dim", name, rule.value_dim),
        rotary=rule.rotary,
    )
    widths = {"q_proj": (hidden, heads * latent.key_dim)}
    if q_rank is not None:
        widths = {"q_a_proj": (hidden, q_rank), "q_b_proj": (q_rank, heads * latent.key_dim)}
    widths["kv_a_proj_with_mqa"] = (hidden, latent.kv_rank + latent.rope_dim)
    widths["kv_b_proj"] = (latent.kv_rank, heads * (latent.nope_dim + latent.value_dim))
    widths["o_proj"] = (heads * latent.value_dim, hidden)
    return Attention(
        linears=tuple(Linear(name=n, in_features=into, out_features=out) for n, (into, out) in widths.items()),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=latent.key_dim,
        kind="latent",
        rotary_dim=latent.rope_dim,
        latent=latent,
    )


def routed_block(rule: ExpertsRule, config: Mapping[str, Any], dense: Mlp, hidden_size: int, name: str) -> Mlp:
    """Routed experts, and the dense block's maps at the width of the shared ones."""
    width = rule.shared_width(config, name)
    inward = [replace(linear, in_features=hidden_size, out_features=width) for linear in dense.linears[:-1]]
    shared = [*inward, replace(dense.linears[-1], in_features=width, out_features=hidden_size)]
    if rule.gated_width:
        shared.append(Linear(name="shared_expert_gate", in_features=hidden_size, out_features=1))
    return replace(
        dense,
        linears=tuple(shared) if width else (),
        intermediate_size=width,
        kind=BEHIND_GATE if rule.gated_width else "experts",
        experts=rule.shape(config, hidden_size, name),
    )


def runs_of(layers: Iterable[Layer]) -> tuple[LayerGroup, ...]:
    """Equal layers in a row as groups."""
    groups = ((layer, len(list(run))) for layer, run in itertools.groupby(layers))
    return tuple(LayerGroup(layer=layer, count=count) for layer, count in groups)
