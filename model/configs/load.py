"""Files of fields and values: YAML, or JSON by its suffix; what stands in them twice is told."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tunecast.catalogs.errors import InputError

TRAINING_FILE = "a training file in YAML or JSON"
WANTED = {"accelerate": "accelerate's file in YAML", "deepspeed": "DeepSpeed's file in JSON"}
"""What a companion option takes, in words."""


def load_mapping(path: Path, wanted: str = TRAINING_FILE) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping; `wanted` says in messages what was to be given."""
    return load_with_repeated(path, wanted)[0]


def load_with_repeated(path: Path, wanted: str = TRAINING_FILE) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(mapping, fields that stand twice in one mapping of the file, of which the last one counts)."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"Cannot read {path}: {reason}; give {wanted}.") from error
    try:
        loaded, repeated = _from_json(text) if path.suffix.lower() == ".json" else _from_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        kind = "JSON" if path.suffix.lower() == ".json" else "YAML"
        raise InputError(f"{path} is no valid {kind}: {' '.join(str(error).split())}.") from error
    if not isinstance(loaded, dict):
        raise InputError(f"{path} holds no mapping of fields to values; give {wanted}.")
    return loaded, repeated


def _from_json(text: str) -> tuple[Any, tuple[str, ...]]:
    repeated: list[str] = []

    def paired(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.extend(_twice(key for key, _ in pairs))
        return dict(pairs)

    return json.loads(text, object_pairs_hook=paired), tuple(repeated)


def _from_yaml(text: str) -> tuple[Any, tuple[str, ...]]:
    import yaml

    loaded = yaml.safe_load(text)
    return loaded, tuple(_repeated(yaml.compose(text, Loader=yaml.SafeLoader), "", set()))


def _repeated(node: Any, prefix: str, done: set[int], above: tuple[int, ...] = ()) -> Iterator[str]:
    """Dotted keys that a node of YAML holds twice, those of a node with several names once; raises ValueError for one
    that holds itself."""
    if id(node) in above:
        raise ValueError("an alias names what it stands in")
    if id(node) in done:
        return
    done.add(id(node))
    inner = node.value if isinstance(getattr(node, "value", None), list) else []
    pairs = [item for item in inner if isinstance(item, tuple)]
    yield from _twice(prefix + str(key.value) for key, _ in pairs)
    for key, value in pairs:
        yield from _repeated(value, f"{prefix}{key.value}.", done, (*above, id(node)))
    for item in inner if not pairs else ():
        yield from _repeated(item, prefix, done, (*above, id(node)))


def _twice(keys: Iterable[str]) -> list[str]:
    return [key for key, times in Counter(keys).items() if times > 1 and not key.endswith("<<")]
