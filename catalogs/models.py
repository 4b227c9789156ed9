"""Model shapes by hub id, last path part or alias. Turning a row into an Architecture is the model layer's work."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.catalogs.refused import refuse_network
from tunecast.catalogs.tables import Row, integer, read_rows

UNSLOTH = "unsloth"
"""Owner on the hub of copies under their originals' names: NAME, NAME-bnb-4bit and NAME-unsloth-bnb-4bit (unsloth's
``models/mapper.py``)."""
REBUILT = ("Phi3ForCausalLM",)
"""Classes whose models Unsloth's copies hold as another one (its Phi-3 and Phi-4 are of Llama's or Mistral's)."""
IN_FEW_BITS = re.compile(r"[-_](?:(?:unsloth[-_])?bnb[-_]4bit|gptq[-_]int[48])$", re.IGNORECASE)
IN_16_BITS = re.compile(r"[-_]bf16$", re.IGNORECASE)
"""End of the name of a copy of the model that is named before it, by the same owner or by Unsloth."""
NOT_TRAINED = re.compile(
    r"[-_](?P<kind>fp8|awq|gguf|mlx|nvfp4|mxfp4)(?:[-_](?:block|dynamic|int4|[468]bit|bf16))?$", re.IGNORECASE
)
"""The same of a copy whose weights no forecast trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One network's shape as its configuration states it, with counts verified on the meta device."""

    hf_id: str
    family: str
    architecture_class: str
    hidden_size: int
    intermediate_size: int | None
    """Of the dense MLP; None where every layer is a mixture of experts."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: str
    """A number; for latent attention the parts, as "128+64 qk, 128 v"."""
    vocab_size: int
    tie_word_embeddings: bool
    mlp_type: str
    qkv_bias: bool
    max_position: int | None
    """None where positions have no limit (ALiBi)."""
    sliding_window: int | None
    """Tokens that a local layer looks back; None where there is none or it is switched off."""
    n_experts: int | None
    experts_per_token: int | None
    moe_intermediate: int | None
    shared_experts: int | None
    attention_type: str
    total_params: int
    """Unique parameters: a tied head counts once; a vision tower is included."""
    active_params: int
    """Total minus the routed experts that a token does not use; embeddings included."""
    vision_params: int | None
    hub_or_public_count: int | None
    count_check: str
    licence: str
    gated: bool | None
    """Whether the hub asks for access; None where unsure."""
    checkpoint_dtype: str
    checkpoint_bytes: int | None
    checkpoint_bytes_derived: int | None
    """Count times bytes per value, without duplicated heads and file headers; None for mixed formats."""
    source: str
    source_date: str
    note: str

    @property
    def download_bytes(self) -> int | None:
        """Bytes of the published weights: from an index file where one was found, else derived, else None."""
        return self.checkpoint_bytes or self.checkpoint_bytes_derived


@cache
def load_models() -> dict[str, ModelRow]:
    """All models by hub id, in the file's order."""
    return {row["hf_id"]: _model(row) for row in read_rows("models.csv")}


def find_model(name: str) -> ModelRow:
    """The model called `name`: a hub id, its last part, or an alias (a copy or tune of the same shape).

    Case, blanks and dashes do not matter (dots do: opt-1.3b is not opt-13b). A copy with another
    context length comes back with its own. Raises UnknownNameError with the closest names, InputError
    where several models share the name, NotSupportedError for a copy that no forecast trains.
    """
    matches = _index().get(_key(name), ())
    if not matches:
        refuse_network(name)
        copied = _original(name)
        if copied is not None:
            return copied
        _refuse_storage(name)
        raise UnknownNameError("model", name, _known_names(), hint="A local config.json works too.")
    if len(matches) > 1:
        choices = ", ".join(row.hf_id for row in matches)
        raise InputError(f"Model {name!r} is ambiguous: say which of {choices}.")
    return matches[0]


def model_aliases() -> dict[str, str]:
    """Every alias and the hub id of the listed model whose shape it has."""
    return {row["alias"]: row["hf_id"] for row in read_rows("model_aliases.csv")}


def shape_of(name: str) -> ModelRow | None:
    """The listed model whose shape another model of this name has; None where the name is the model's own, or of a copy
    or tune of it."""
    found = _aliases_of("same-shape").get(_key(name))
    return None if found is None else load_models()[found]


def _aliases_of(kind: str) -> dict[str, str]:
    """Hub ids of listed models by the keys of other names of one kind."""
    return {_key(row["alias"]): row["hf_id"] for row in read_rows("model_aliases.csv") if row["kind"] == kind}


def find_quantized(name: str) -> ModelRow | None:
    """The listed model of which `name` is a copy in few bits; None where it is no such copy."""
    keys = _aliases_of("quantized")
    short = {key.rsplit("/", 1)[-1]: model for key, model in keys.items()}
    found = keys.get(_key(name)) or short.get(_key(name))
    if found is None and _key(name) not in _index() and IN_FEW_BITS.search(name):
        return _original(name)
    return None if found is None else load_models()[found]


def _original(name: str) -> ModelRow | None:
    """The listed model that a name's own words say it is a copy of; None where they do not, or not of one alone."""
    owner, _, last = name.strip().rpartition("/")
    plain = IN_16_BITS.sub("", IN_FEW_BITS.sub("", last))
    if owner.lower() == UNSLOTH:
        rows = tuple(row for row in _last_parts().get(_key(plain), ()) if row.architecture_class not in REBUILT)
    else:
        rows = () if plain == last else _index().get(_key(f"{owner}/{plain}" if owner else plain), ())
    return rows[0] if len(rows) == 1 else None


def _refuse_storage(name: str) -> None:
    """Raises NotSupportedError for a copy of a listed model whose weights no forecast trains on."""
    stored = NOT_TRAINED.search(name)
    plain = name if stored is None else name[: stored.start()]
    if stored is None or not (_key(plain) in _index() or _original(plain)):
        return
    raise NotSupportedError(
        f"{name} is {plain} with its weights in {stored['kind'].upper()}, and training on those is not built; give "
        f"{plain} for training on its 16-bit weights."
    )


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9/.]", "", name.lower())


@cache
def _index() -> dict[str, tuple[ModelRow, ...]]:
    """Full names first; a last path part names a model only where no full name does."""
    full: dict[str, list[ModelRow]] = {}
    short: dict[str, list[ModelRow]] = {}
    for name, row in _named_rows():
        _add(full, _key(name), row)
        _add(short, _key(name.rsplit("/", 1)[-1]), row)
    return {key: tuple(rows) for key, rows in (short | full).items()}


@cache
def _last_parts() -> dict[str, tuple[ModelRow, ...]]:
    """Models by the last parts of hub ids: of the listed ones, and of copies and tunes of their shape."""
    found: dict[str, list[ModelRow]] = {}
    for name, row in _named_rows():
        if "/" in name:
            _add(found, _key(name.rsplit("/", 1)[-1]), row)
    return {key: tuple(rows) for key, rows in found.items()}


def _add(index: dict[str, list[ModelRow]], key: str, row: ModelRow) -> None:
    rows = index.setdefault(key, [])
    if row not in rows:
        rows.append(row)


def _named_rows() -> Iterable[tuple[str, ModelRow]]:
    models = load_models()
    yield from models.items()
    for row in read_rows("model_aliases.csv"):
        model, window = models[row["hf_id"]], integer(row["max_position"])
        yield row["alias"], model if window is None else replace(model, max_position=window)


def _known_names() -> list[str]:
    """Names to offer for one that is none; a table's remark in brackets is nothing to type."""
    typed = (name for name, _ in _named_rows() if "(" not in name)
    spelled = (form for name in typed for form in (name, name.rsplit("/", 1)[-1]))
    return list({form.lower(): form for form in spelled}.values())


def _flag(text: str) -> bool | None:
    return {"true": True, "yes": True, "false": False, "no": False}.get(text)


def _model(row: Row) -> ModelRow:
    return ModelRow(
        hf_id=row["hf_id"],
        family=row["family"],
        architecture_class=row["architecture_class"],
        hidden_size=int(row["hidden_size"]),
        intermediate_size=integer(row["intermediate_size"]),
        num_layers=int(row["num_layers"]),
        num_heads=int(row["num_heads"]),
        num_kv_heads=int(row["num_kv_heads"]),
        head_dim=row["head_dim"],
        vocab_size=int(row["vocab_size"]),
        tie_word_embeddings=row["tie_word_embeddings"] == "true",
        mlp_type=row["mlp_type"],
        qkv_bias=row["qkv_bias"] == "yes",
        max_position=integer(row["max_position"]),
        sliding_window=integer(row["sliding_window"]),
        n_experts=integer(row["n_experts"]),
        experts_per_token=integer(row["experts_per_token"]),
        moe_intermediate=integer(row["moe_intermediate"]),
        shared_experts=integer(row["shared_experts"]),
        attention_type=row["attention_type"],
        total_params=int(row["total_params"]),
        active_params=int(row["active_params"]),
        vision_params=integer(row["vision_params"]),
        hub_or_public_count=integer(row["hub_or_public_count"]),
        count_check=row["count_check"],
        licence=row["licence"],
        gated=_flag(row["gated"]),
        checkpoint_dtype=row["checkpoint_dtype"],
        checkpoint_bytes=integer(row["checkpoint_bytes"]),
        checkpoint_bytes_derived=integer(row["checkpoint_bytes_derived"]),
        source=row["source"],
        source_date=row["source_date"],
        note=row["note"],
    )
