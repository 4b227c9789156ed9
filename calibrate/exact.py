"""A forecast's inputs from the real code instead of the formulas: any causal model that transformers can build.

The model is made on the meta device, its layers are read off, and `trace_step` runs one step on fake tensors.
Families without formulas of their own work here too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from tunecast.calibrate.trace import hf
from tunecast.calibrate.trace.refusals import reason_of
from tunecast.calibrate.trace.seeing import language_model
from tunecast.calibrate.trace.tracer import Trace, trace_step
from tunecast.catalogs.configs import config_from_row
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture, Attention, Layer, LayerGroup, Linear, Mlp
from tunecast.model.architectures import check_layers
from tunecast.model.families import check_language_model
from tunecast.model.run import Run
from tunecast.model.text_part import text_part
from tunecast.model.units import GIGA

NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
"""Fields of a config without which its layers are not those of a transformer."""


def real_architecture(config: Mapping[str, Any], name: str) -> Architecture:
    """The architecture that the real code builds from a config: layers as they are on the meta device.

    Linear maps are read by name; all other parameters of a layer (norms, routers, stacked experts) are counted. Of a
    multimodal model that is its text decoder, where transformers has a causal language model of it.
    """
    classes = config.get("architectures")
    check_language_model(str(classes[0]) if isinstance(classes, list) and classes else "", name)
    config = _decoder_of(config)
    fields = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
    if not isinstance(fields.get("model_type"), str):
        raise InputError(f"The config {name} has no 'model_type'; give a Hugging Face config.json.")
    check_layers(fields.get("num_hidden_layers"), name)
    settings = json.dumps(fields, sort_keys=True)
    model = _meta_model(settings, name)
    text = model.config.get_text_config()
    missing = [field for field in NEEDED if not hasattr(text, field)]
    if missing:
        raise NotSupportedError(
            f"{name} is a {fields['model_type']}, whose config has no {' and no '.join(missing)}: models without "
            "attention are not traced yet; take one that has attention in its layers."
        )
    groups: list[LayerGroup] = []
    own = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * text.num_hidden_layers
    for layer, settings_of_layer in zip(hf.decoder_layers(model), own, strict=True):
        described = _layer(layer, settings_of_layer)
        if groups and groups[-1].layer == described:
            groups[-1] = LayerGroup(layer=described, count=groups[-1].count + 1)
        else:
            groups.append(LayerGroup(layer=described, count=1))
    inside = sum(group.count * group.layer.params(text.hidden_size) for group in groups)
    embedding = text.vocab_size * text.hidden_size
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    total = sum(parameter.numel() for parameter in model.parameters())
    return Architecture(
        name=name,
        model_type=str(fields["model_type"]),
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        groups=tuple(groups),
        tie_word_embeddings=tied,
        max_position=getattr(text, "max_position_embeddings", None),
        other_params=total - inside - embedding * (1 if tied else 2),
        settings=settings,
    )


def _decoder_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text decoder's own config, if transformers builds a language model from it; else the whole."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = text_part(config)
    return text if text.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else config


def exact_notes(architecture: Architecture, run: Run) -> tuple[str, ...]:
    """What the real code does that a user of it may not expect."""
    if not architecture.settings:
        return ()
    model = _meta_model(architecture.settings, architecture.name)
    notes: list[str] = []
    if run.attn_implementation == "sdpa" and model.config._attn_implementation != "sdpa":
        notes.append(
            f"transformers has no sdpa for {architecture.model_type}: {model.config._attn_implementation} attention."
        )
    if any(name.endswith("linear_attn") for name, _ in model.named_modules()):
        notes.append(
            f"the linear attention of {architecture.model_type} is traced as transformers' PyTorch code; with the fla "
            "package it takes fewer kernels and less memory."
        )
    stacked = sum(p.numel() for layer in hf.decoder_layers(model) for p in layer.parameters() if is_stacked(p))
    if run.bnb_4bit_quant_type is not None and stacked:
        notes.append(
            f"{stacked / GIGA:.1f}B parameters of stacked experts stay in {run.dtype}: transformers 5 quantizes linear "
            "maps only."
        )
    return tuple(notes)


def is_stacked(parameter: Any) -> bool:
    """Whether a parameter holds a matrix for each of several experts; kernels of a depthwise convolution over time,
    as linear attention has them, are three-dimensional too."""
    return bool(parameter.ndim == 3 and min(parameter.shape[1:]) > 1)


def _meta_model(settings: str, name: str) -> Any:
    import torch

    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore", FutureWarning)
            config = hf.config_of_settings(settings)
            return language_model(config, tied=getattr(config, "tie_word_embeddings", False))
    except Exception as error:  # other people's code, on any config
        raise NotSupportedError(
            f"transformers builds no causal language model from {name}: {reason_of(error)}"
        ) from error


def _layer(layer: Any, text: Any) -> Layer:
    """A decoder layer as its linear maps, and how many parameters it has besides."""
    import torch
    from transformers.pytorch_utils import Conv1D

    linears = [
        _linear(name, module) for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)
    ]
    heads = text.num_attention_heads
    attention = Attention(
        linears=tuple(linears),
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )
    others = sum(parameter.numel() for parameter in layer.parameters()) - sum(linear.params for linear in linears)
    inner = getattr(text, "intermediate_size", None) or 0
    mlp = Mlp(linears=(), intermediate_size=max(inner) if isinstance(inner, list) else inner)  # Gemma 3n: of each layer
    return Layer(attention=attention, mlp=mlp, norm="counted", other_params=others)


def _linear(name: str, module: Any) -> Linear:
    """A linear map by the last part of its name; GPT-2's ``Conv1D`` stores its weight transposed."""
    rows, columns = module.weight.shape
    out_features, in_features = (columns, rows) if hasattr(module, "nf") else (rows, columns)
    return Linear(
        name=name.rsplit(".", 1)[-1],
        in_features=in_features,
        out_features=out_features,
        bias=module.bias is not None,
    )


def load_real_architecture(name_or_path: str) -> Architecture:
    """A catalog model or a config.json, for the real code."""
    from pathlib import Path

    from tunecast.catalogs.models import find_model
    from tunecast.model.config_file import looks_like_path, read_config

    if looks_like_path(name_or_path):
        path = Path(name_or_path).expanduser()
        path = path / "config.json" if path.is_dir() else path
        return real_architecture(read_config(path), str(path))
    row = find_model(name_or_path)
    return real_architecture(config_from_row(row), row.hf_id)


def exact_trace(architecture_or_config: Architecture | Mapping[str, Any], run: Run, *, platform: str = "cuda") -> Trace:
    """One step of the real code: its operations in the order of issue, the memory of every moment, whose peak's parts
    sum up to it, and parameter counts."""
    if isinstance(architecture_or_config, Architecture):
        return trace_step(architecture_or_config, run, platform=platform)
    return trace_step(real_architecture(architecture_or_config, "the given config"), run, platform=platform)
