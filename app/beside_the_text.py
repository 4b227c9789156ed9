"""What a model has beside the text decoder that is forecast: a vision part, or another storage of the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError
from tunecast.model.units import DTYPE_BYTES, GIB, GIGA

if TYPE_CHECKING:
    from tunecast.catalogs.models import ModelRow

OTHER_PARTS = ("vision_config", "audio_config", "speech_config", "mm_vision_tower")
"""Fields of a ``config.json`` that say of a part beside the text decoder."""


def vision_notes(row: ModelRow) -> tuple[str, ...]:
    """How large the vision part is that the forecast of a catalog model leaves out."""
    if not row.vision_params:
        return ()
    gib = row.vision_params * DTYPE_BYTES["bf16"] / GIB
    note = (
        f"{row.hf_id} is multimodal: only its text decoder is forecast, on text; the {row.vision_params / GIGA:.2f}B "
        f"parameters of its other parts, which see or hear ({gib:.1f} GiB in bf16), are left out, loaded or trained."
    )
    return (note,)


def config_notes(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """That a config's vision or audio part is left out; a config whose text decoder is nowhere by itself is refused."""
    from tunecast.model.architectures import text_part

    parts = [part for part in OTHER_PARTS if config.get(part) is not None]
    decoder = text_part(config)
    if decoder is not config:
        own = (config.get("architectures") or [config.get("model_type")])[0]
        note = (
            f"{name} is a {own}: only its text decoder ({decoder['model_type']}) is forecast, on text; the weights of "
            "its other parts, whose size the config does not state, are left out."
        )
        return (note,)
    if parts:
        raise InputError(
            f"The config {name} is multimodal ({', '.join(parts)}) but has no text_config with a model_type, so its "
            "text decoder cannot be told from the rest; give the config.json of the text decoder alone."
        )
    return ()
