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

COUNTED_AS_TYPED = ("bfloat16", "float16", "auto")
"""Dtypes of a config that are counted without a word: in 16 bits, as asked or as the card has them."""


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
    """What the user should be told of a config: which of its parts are left out, and how wide its weights are."""
    return (*part_notes(config, name), *width_notes(config, name))


def width_notes(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """That weights are said to be of another width than the 16 bits that are counted unless asked; raises InputError
    for what is no dtype."""
    from tunecast.model.text_part import text_part

    said = [part.get(key) for part in (config, text_part(config)) for key in ("dtype", "torch_dtype")]
    stated = next((each for each in said if each is not None), None)
    if stated is None:
        return ()
    if not isinstance(stated, str):
        raise InputError(f"The config {name} has a dtype of {stated!r}, which is none; write it as bfloat16.")
    dtype = stated.removeprefix("torch.")
    if dtype in COUNTED_AS_TYPED:
        return ()
    if dtype == "float32":
        loaded = "transformers 5 loads them so where its code names no dtype: --dtype fp32 counts them as they are"
        return (f"{name} says that its weights are float32, and {loaded}.",)
    return (f"{name} says that its weights are {dtype}, which is not built; they are counted by --dtype.",)


def part_notes(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """That a config's vision or audio part is left out; a config whose text decoder is nowhere by itself is refused."""
    from tunecast.model.text_part import text_part, untold

    parts = [part for part in OTHER_PARTS if config.get(part) is not None]
    decoder = text_part(config)
    if decoder is not config:
        own = (config.get("architectures") or [config.get("model_type")])[0]
        note = (
            f"{name} is a {own}: only its text decoder ({decoder['model_type']}) is forecast, on text; the weights of "
            "its other parts, whose size the config does not state, are left out."
        )
        filled = ", ".join(f"{field} {value}" for field, value in untold(config).items())
        told = f"its text_config leaves out what its class has by default in transformers 5, among it {filled}"
        return (note, f"{name}: {told}.") if filled else (note,)
    if parts:
        raise InputError(
            f"The config {name} is multimodal ({', '.join(parts)}) but has no text_config with a model_type, so its "
            "text decoder cannot be told from the rest; give the config.json of the text decoder alone."
        )
    return ()
