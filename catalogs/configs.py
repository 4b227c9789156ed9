"""A catalog row as the ``config.json`` of its network, as far as shapes go."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from tunecast.catalogs.errors import NotSupportedError
from tunecast.catalogs.models import ModelRow


@cache
def config_table() -> dict[str, Any]:
    """By class: the ``model_type``, which columns are which fields, and what the columns do not say."""
    table = files("tunecast.catalogs") / "data" / "model_configs.json"
    entries: dict[str, Any] = json.loads(table.read_text(encoding="utf-8"))
    return entries


def config_from_row(row: ModelRow) -> dict[str, Any]:
    """The ``config.json`` of a catalog model, as far as its shapes go; a multimodal model's text part."""
    table = config_table()
    entry = table.get(row.architecture_class)
    if entry is None:
        raise NotSupportedError(f"{row.hf_id} is a {row.architecture_class}, whose real code is not run yet.")
    fields = {**table["*"]["fields"], **entry.get("fields", {})}
    config: dict[str, Any] = {"model_type": entry["model_type"], **entry.get("constants", {})}
    for field, column in fields.items():
        value = None if column is None else getattr(row, column)
        if value is not None:
            config[field] = int(value) if field == "head_dim" else value
    return {**config, **entry.get("models", {}).get(row.hf_id, {})}
