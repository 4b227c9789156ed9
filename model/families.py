"""What distinguishes one family of models from another, as data read from its modelling code.

A family of a shape that the blocks know is one more row of `FAMILIES`: its kernels follow from the fields.
Sources: ``models/<type>/{configuration,modeling}_<type>.py`` of transformers 5.
"""

from __future__ import annotations

import re

from tunecast.catalogs.errors import NotSupportedError, UnbuiltFamilyError
from tunecast.model.families_experts import EXPERT_FAMILIES, ODD_FAMILIES
from tunecast.model.families_gpt import LAYER_NORM_FAMILIES
from tunecast.model.families_later import LATER_FAMILIES
from tunecast.model.families_remote import REMOTE_FAMILIES
from tunecast.model.families_vision import VISION_FAMILIES
from tunecast.model.family import Family
from tunecast.model.shapes import GATED

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture_class="LlamaForCausalLM",
            mlp_bias_field=True,
            config_fields=("head_dim", "attention_bias", "mlp_bias"),
        ),
        Family(
            model_type="mistral",
            architecture_class="MistralForCausalLM",
            qkv_bias=False,
            default_kv_heads=8,
            window_rule="all",
            config_fields=("head_dim", "sliding_window"),
        ),
        Family(
            model_type="qwen2",
            architecture_class="Qwen2ForCausalLM",
            qkv_bias=True,
            default_kv_heads=32,
            window_rule="late",
            config_fields=("use_sliding_window", "sliding_window", "layer_types"),
        ),
        Family(
            model_type="qwen3",
            architecture_class="Qwen3ForCausalLM",
            qk_norm=True,
            default_kv_heads=32,
            default_head_dim=128,
            window_rule="late",
            config_fields=("head_dim", "attention_bias", "use_sliding_window", "sliding_window", "layer_types"),
        ),
        Family(
            model_type="granite",
            architecture_class="GraniteForCausalLM",
            mlp_bias_field=True,
            residual_scaled=True,
            embedding_scale="stream",
            logits="scaled",
            config_fields=("attention_bias", "mlp_bias"),
        ),
        Family(
            model_type="smollm3",
            architecture_class="SmolLM3ForCausalLM",
            mlp_bias_field=True,
            default_kv_heads=4,
            default_tied=True,
            nope_period=4,
            config_fields=("attention_bias", "mlp_bias", "no_rope_layers"),
        ),
        Family(
            model_type="olmo2",
            architecture_class="Olmo2ForCausalLM",
            qk_norm=True,
            qk_norm_by_head=False,
            rotary_wide=True,
            norm="rmsnorm-wide",
            norm_order="post",
            config_fields=("attention_bias",),
        ),
        Family(
            model_type="phi3",
            architecture_class="Phi3ForCausalLM",
            qkv_bias=False,
            attention_names=("qkv_proj", "o_proj"),
            mlp_names=("gate_up_proj", "down_proj"),
            window_rule="all",
            config_fields=("sliding_window",),
        ),
        Family(
            model_type="gemma3_text",
            masks="both",
            architecture_class="Gemma3ForCausalLM",
            other_classes=("Gemma3ForConditionalGeneration",),
            qk_norm=True,
            qk_norm_late=True,
            rotary_sets=2,
            default_kv_heads=4,
            default_head_dim=256,
            default_tied=True,
            window_rule="period",
            default_window=4096,
            global_period=6,
            activation="gelu",
            norm="rmsnorm-shifted",
            norm_order="both",
            embedding_scale="table",
            config_fields=("head_dim", "attention_bias", "sliding_window", "layer_types"),
        ),
        Family(
            model_type="gemma4_text",
            masks="both",
            architecture_class="Gemma4ForCausalLM",
            other_classes=("Gemma4ForConditionalGeneration",),
            keeps_config=True,
            attention="gemma4",
            qk_norm=True,
            rotary_sets=2,
            default_kv_heads=4,
            default_head_dim=256,
            default_tied=True,
            window_rule="period",
            default_window=512,
            global_period=6,
            activation="gelu",
            norm="rmsnorm-power",
            norm_order="both",
            embedding_scale="table",
            config_fields=(),
        ),
        Family(
            model_type="qwen3_5_text",
            architecture_class="Qwen3_5ForCausalLM",
            other_classes=("Qwen3_5ForConditionalGeneration",),
            keeps_config=True,
            attention=GATED,
            qk_norm=True,
            rotary_share=0.25,
            sections=(11, 11, 10),
            default_kv_heads=4,
            default_head_dim=256,
            norm="rmsnorm-shifted",
            config_fields=(),
        ),
        Family(
            model_type="qwen3_5_moe_text",
            architecture_class="Qwen3_5MoeForCausalLM",
            other_classes=("Qwen3_5MoeForConditionalGeneration",),
            keeps_config=True,
            attention=GATED,
            qk_norm=True,
            rotary_share=0.25,
            sections=(11, 11, 10),
            default_kv_heads=2,
            default_head_dim=256,
            default_inner=1,
            norm="rmsnorm-shifted",
            config_fields=(),
        ),
        Family(
            model_type="qwen3_next",
            architecture_class="Qwen3NextForCausalLM",
            keeps_config=True,
            attention=GATED,
            qk_norm=True,
            rotary_share=0.25,
            rotary_joins=True,
            default_kv_heads=2,
            default_head_dim=256,
            norm="rmsnorm-shifted",
            config_fields=(),
        ),
        Family(
            model_type="gemma",
            architecture_class="GemmaForCausalLM",
            default_kv_heads=16,
            default_head_dim=256,
            default_tied=True,
            activation="gelu",
            norm="rmsnorm-shifted",
            embedding_scale="table",
            config_fields=("head_dim", "attention_bias"),
        ),
        *LATER_FAMILIES,
        *VISION_FAMILIES,
        *LAYER_NORM_FAMILIES,
        *EXPERT_FAMILIES,
        *ODD_FAMILIES,
        *REMOTE_FAMILIES,
    )
}
"""By ``model_type``."""

NO_LANGUAGE_MODEL = re.compile(
    r"\w+(For(MaskedLM|(Sequence|Token)Classification|(Process)?RewardModel|QuestionAnswering|MultipleChoice)"
    r"|(?<!Head)(?<!LM)Model)"
)
"""Classes without a head over the vocabulary of the next token: BERT and its like, classifiers, reward models, bare
decoders. The real code would be traced as the language model of their type."""


NO_ATTENTION = re.compile(r"(model of type ')?(falcon_?mamba|mamba2?|rwkv|xlstm)(forcausallm|')", re.IGNORECASE)
"""Classes, or types where no class is given, whose layers have no attention: ``--exact`` does not trace them either."""


def family_of(architecture_class: str, name: str) -> Family:
    """The family by its Hugging Face class name, else a refusal that names the class."""
    for family in FAMILIES.values():
        if family.architecture_class == architecture_class:
            return family
    check_language_model(architecture_class, name)
    if NO_ATTENTION.fullmatch(architecture_class):
        raise UnbuiltFamilyError(
            f"{name} is a {architecture_class}, whose layers have no attention: that is not built, and not traced "
            "with --exact yet either; take a model that has attention in its layers."
        )
    raise UnbuiltFamilyError(
        f"{name} is a {architecture_class}, whose formulas are not built yet; `tunecast estimate` traces its real "
        "code with --exact, of all cards with --gpu all. `tunecast catalog models` lists models of the "
        f"{len(FAMILIES)} families that are built."
    )


def check_language_model(architecture_class: str, name: str) -> None:
    """Raise NotSupportedError for a class whose head is not that of a causal language model."""
    if NO_LANGUAGE_MODEL.fullmatch(architecture_class) and not any(
        architecture_class in family.classes for family in FAMILIES.values()
    ):
        raise NotSupportedError(
            f"{name} is a {architecture_class}, which is not built: only causal language models are forecast; "
            "`tunecast catalog models` lists them."
        )
