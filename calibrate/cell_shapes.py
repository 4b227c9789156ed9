"""A model told by its shape: the name of one that has it, or of its family with all dimensions.

"Llama-3-8B shape (32 layers, vocab 128256)" is that model, as long as it has what the brackets say; of a "Llama shape"
with other dimensions all have to be there, because none of them can be guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tunecast.calibrate.run_table import SkipRowError
from tunecast.catalogs.errors import TunecastError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.units import GIGA

SHAPE = re.compile(
    r"^(?P<name>.+?)[ _-](?:shape|sized|architecture|config)(?:[ _-]+[\d.]+ ?[BM])?\s*(?:\((?P<facts>[^()]*)\))?\s*$",
    re.IGNORECASE,
)
"""A model's name where its shape alone is meant, with what is said of it."""
DIMENSIONS = re.compile(r"^(?P<name>[^()]+?)\s*\((?P<facts>[^()]*)\)\s*$")
"""A model's name with its dimensions behind it."""
FAMILY = re.compile(r"(?:.*[ _-])?llama(?:[ _-]?[\d.]+)?(?:[ _-]like)?(?:[ _-][\d.]+ ?[BM])?", re.IGNORECASE)
"""What names no size of the family that has Llama's layers, or one like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A dimension: how tables word it, its name in a config, and where an architecture has it."""

    words: str
    field: str
    of: Callable[[Architecture], int]
    told: str
    """How to write it."""


FACTS = (
    Fact(words=r"(?P<n>\d+) layers", field="num_hidden_layers", of=lambda a: a.num_layers, told="N layers"),
    Fact(
        words=r"(?:dim|hidden(?: size)?|width|d_model)[ =]?(?P<n>\d+)",
        field="hidden_size",
        of=lambda a: a.hidden_size,
        told="hidden N",
    ),
    Fact(
        words=r"(?:ffn|mlp|feed[ -]?forward|intermediate)(?: size| dim| hidden)?[ =]?(?P<n>\d+)",
        field="intermediate_size",
        of=lambda a: max(linear.out_features for linear in a.groups[0].layer.linears),
        told="FFN N",
    ),
    Fact(
        words=r"(?P<n>\d+) (?:attention |query )?heads",
        field="num_attention_heads",
        of=lambda a: a.groups[0].layer.attention.num_heads,
        told="N heads",
    ),
    Fact(
        words=r"(?P<n>\d+) (?:kv|key[ -]value) heads",
        field="num_key_value_heads",
        of=lambda a: a.groups[0].layer.attention.num_kv_heads,
        told="N KV heads",
    ),
    Fact(
        words=r"vocab(?:ulary)?(?: size)?[ =]?(?P<n>\d+)", field="vocab_size", of=lambda a: a.vocab_size, told="vocab N"
    ),
)
OPTIONAL = ("num_key_value_heads",)
"""As many as there are heads where nothing is said, as in a config."""
SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?) ?B\b", re.IGNORECASE)
"""Billions of parameters in front of the dimensions."""
SIZE_SHARE = 0.25
"""Share by which that may be off: tables call 14.8 billion 13B where they changed a model's width."""
TIED = {"tied embeddings": True, "untied embeddings": False, "tied": True, "untied": False}


def of_shape(text: str, called: Callable[[str], Architecture]) -> Architecture | None:
    """The model whose shape a text names; `called` finds one by its name. None where the text names none.

    Raises SkipRowError for a model that lacks what is said of it, and for a family without all dimensions.
    """
    shape = SHAPE.fullmatch(text)
    if shape is None:
        return _of_dimensions(text, called)
    said = facts_of(shape["facts"] or "")
    found = _found(shape["name"], called)
    if said is None or (found is None and FAMILY.fullmatch(shape["name"]) is None):
        return None
    if found is not None and agrees(found, said):
        return found
    return built(text, said, found)


def _of_dimensions(text: str, called: Callable[[str], Architecture]) -> Architecture | None:
    """The model that a text names with its dimensions, or with the model whose shape it has; None where it has neither.

    Raises SkipRowError where the model of that name has another shape.
    """
    named = DIMENSIONS.fullmatch(text)
    if named is None:
        return None
    said, shape = facts_of(named["facts"]), SHAPE.fullmatch(named["facts"])
    of_name = _found(named["name"], called) if said or shape else None
    of_shape = _found(shape["name"], called) if shape else of_name
    if of_shape is None:
        return None
    if not agrees(of_shape, said or {}) or of_name not in (None, of_shape):
        raise SkipRowError(f"{text!r} contradicts itself: {(of_name or of_shape).name} has another shape")
    return of_shape


def _found(name: str, called: Callable[[str], Architecture]) -> Architecture | None:
    try:
        return called(name)
    except TunecastError:
        return None


def facts_of(text: str) -> dict[str, int | bool] | None:
    """Fields of a config that words between brackets say; None where some say another thing."""
    said: dict[str, int | bool] = {}
    for word in re.split(r"\s*[,;]\s*", text.strip().lower()) if text else ():
        if word in TIED:
            said["tie_word_embeddings"] = TIED[word]
            continue
        fact = next(((fact, m) for fact in FACTS if (m := re.fullmatch(fact.words, word))), None)
        if fact is None:
            return None
        if said.get(fact[0].field, int(fact[1]["n"])) != int(fact[1]["n"]):
            raise SkipRowError(f"{text!r} says two things of {fact[0].field}: write one")
        said[fact[0].field] = int(fact[1]["n"])
    return said


def agrees(found: Architecture, said: Mapping[str, int | bool]) -> bool:
    """Whether a model has all that is said."""
    tied = said.get("tie_word_embeddings", found.tie_word_embeddings)
    return tied is found.tie_word_embeddings and all(
        fact.of(found) == said[fact.field] for fact in FACTS if fact.field in said
    )


def built(text: str, said: Mapping[str, int | bool], named: Architecture | None) -> Architecture:
    """Llama's layers in these dimensions."""
    if named is not None and named.model_type != "llama":
        raise SkipRowError(f"{text!r} is not the shape of {named.name}: give its config.json")
    missing = [fact.told for fact in FACTS if fact.field not in said and fact.field not in OPTIONAL]
    if missing:
        why = f"is not the shape of {named.name}" if named else "names no size"
        raise SkipRowError(f"{text!r} {why}: write all of its dimensions between the brackets ({', '.join(missing)})")
    made = architecture_from_config({"model_type": "llama", **said}, text)
    size = SIZE.search(text.partition("(")[0])
    if size is not None and abs(float(size[1]) * GIGA / made.total_params - 1.0) > SIZE_SHARE:
        raise SkipRowError(
            f"{text!r} contradicts itself: these dimensions have {made.total_params / GIGA:.2f} billion parameters"
        )
    return made
