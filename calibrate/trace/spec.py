"""Architecture and Run as plain JSON values, for the ``step`` trials of records. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture, Attention, Layer, LayerGroup, Linear, Mlp
from tunecast.model.run import Run
from tunecast.model.shapes import DeltaNet, Experts, Latent, LayerInputs, ShortConvolution


def architecture_to_dict(architecture: Architecture) -> dict[str, Any]:
    """Every field by its name; tuples become lists."""
    return {name: _listed(value) for name, value in asdict(architecture).items()}


def run_to_dict(run: Run) -> dict[str, Any]:
    """Every field by its name; tuples become lists."""
    return {name: _listed(value) for name, value in asdict(run).items()}


def architecture_from_dict(data: dict[str, Any]) -> Architecture:
    """Inverse of `architecture_to_dict`."""
    try:
        groups = tuple(LayerGroup(layer=_layer(group["layer"]), count=group["count"]) for group in data["groups"])
        given = data.get("layer_inputs")
        inputs = None if given is None else LayerInputs(**given)
        masks = tuple(data.get("masks", ()))
        return Architecture(**{**data, "groups": groups, "masks": masks, "layer_inputs": inputs})
    except TypeError as error:
        raise _newer(error) from error


def run_from_dict(data: dict[str, Any]) -> Run:
    """Inverse of `run_to_dict`."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    try:
        return Run(**fields)
    except TypeError as error:
        raise _newer(error) from error


def _newer(error: TypeError) -> InputError:
    """A field that this version has not."""
    field = str(error).rpartition(" ")[2]
    return InputError(
        f"The record's model or run has the field {field}, which this tunecast does not know: a newer one wrote it; "
        "type pip install -U tunecast, or calibrate anew."
    )


def _layer(data: dict[str, Any]) -> Layer:
    """A layer; ``norms``, which early records hold, follows from the other fields now."""
    data = {name: value for name, value in data.items() if name != "norms"}
    attention, mlp = _with_linears(data["attention"]), _with_linears(data["mlp"])
    attention["parts"] = tuple((name, width) for name, width in attention.get("parts", ()))
    attention["sections"] = tuple(attention.get("sections", ()))
    if attention.get("delta") is not None:
        attention["delta"] = DeltaNet(**attention["delta"])
    if attention.get("convolution") is not None:
        attention["convolution"] = ShortConvolution(**attention["convolution"])
    if attention.get("latent") is not None:
        attention["latent"] = Latent(**attention["latent"])
    if mlp.get("experts") is not None:
        mlp["experts"] = Experts(**mlp["experts"])
    own = _linears(data.get("own_input", ()))
    return Layer(**{**data, "attention": Attention(**attention), "mlp": Mlp(**mlp), "own_input": own})


def _with_linears(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "linears": _linears(block["linears"])}


def _linears(maps: Iterable[dict[str, Any]]) -> tuple[Linear, ...]:
    return tuple(Linear(**linear) for linear in maps)


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(inner) for inner in value]
    return value
