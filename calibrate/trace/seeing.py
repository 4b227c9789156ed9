"""Causal language models as transformers builds them; decoders of models that see are taken out of the whole."""

from __future__ import annotations

from typing import Any

from tunecast.model.families_vision import WHOLE

SMALLEST = {"depth": 1, "deepstack_visual_indexes": [0]}
"""A vision part that is built to be taken out again."""


def language_model(config: Any, *, tied: bool, **choices: Any) -> Any:
    """A causal language model: of a decoder that transformers has inside a model that sees only, that one without its
    vision part, which text does not go through; whether its head is `tied` is said of the whole model."""
    import transformers

    whole = WHOLE.get(config.model_type)
    if whole is None:
        return transformers.AutoModelForCausalLM.from_config(config, **choices)
    seeing = transformers.AutoConfig.for_model(
        whole, text_config=config.to_dict(), vision_config=SMALLEST, tie_word_embeddings=tied
    )
    model = transformers.AutoModelForImageTextToText.from_config(seeing, **choices)
    del model.model.visual
    return model
