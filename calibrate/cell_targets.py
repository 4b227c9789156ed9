"""Words of the lora_targets column as modules of the row's model.

Precedence: the model's own module names; words for groups of them ("attention", "all linear"); letters and other
frameworks' names (``q``, ``wq``, ``query``), each of which stands for the module that the model calls by one of its
names. A name that none of them explains is left as it stands, and refused where the run is resolved. Names beside the
group that they are of ("attention (q, v)") are all that is meant of it; what a cell leaves out ("q, v, no MLP") must be
in nothing that it names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from tunecast.calibrate.cell_grammar import facts_of, folded, grammar, is_denial, pieces_of, terms_of
from tunecast.calibrate.run_table import SkipRowError
from tunecast.model.adapter_targets import adaptable_modules
from tunecast.model.architecture import Architecture
from tunecast.model.litgpt import is_litgpt
from tunecast.model.peft_targets import peft_targets
from tunecast.model.root_modules import root_modules

SPLIT = r"[\s,;/+&|]+|\band\b"
LEFT_OUT = (
    r"[\s,(]*\b(except|excluding|excl\.?|without|w/o|but not|no|not)( for)?( the)?"
    r" (lm_head|head|output (layer|head))\b\)?"
)
"""What all linear maps leave out anyway (PEFT ``_maybe_include_all_linear_layers``: not the output layer)."""
ROOT = r"(?:lm_head|embed_tokens)"
SAVED = re.compile(
    rf"[\s,;(+&]*(?:\b(?:and|with|plus)\s+)?\b(?:modules_to_save\s*[:=]?\s*)?(?P<roots>{ROOT}(?:[\s,+&/]+(?:and\s+)?{ROOT})?)"
    r"(?:\s+(?:are|is|also|both))*\s+(?:fully\s+|also\s+)?(?:trained|saved|tuned|fine-?tuned|trainable)"
    r"(?:\s+(?:in full|fully|whole|as a whole|too|as well|completely))?\s*\)?(?:\s*\(modules_to_save\))?",
    re.IGNORECASE,
)
"""The table of tokens and the head beside adapters, trained as a whole (PEFT ``modules_to_save``)."""
COUNTED = r"\s*\(?\b[\d][\d.,]*\s?[kmb]? trainable( param(eter)?s)?\)?"
"""How many parameters that makes."""
JOINED_WITH_OUTPUT = r"(?:\b(?:fused|joined)\s+)?\bqkv\b[\s,+&/]+(?:and\s+)?(?:out(?:put)?\s+)?proj(?:ection)?\b"
"""The joined map of an attention, and the projection of its result: all of it."""
LITGPT_SWITCH = r"\blora_(query|key|value|projection|mlp|head)\b(\s*[:=]\s*true\b)?"
"""LitGPT's options of ``finetune_lora``, each of which switches one map on."""
LITGPT_OFF = r"\blora_(query|key|value|projection|mlp|head)\b\s*[:=]\s*(false|no|off|0)\b"
DENIED = re.compile(
    r"[\s,;(]*(?:[-\u2013\u2014]\s+)?\b(?:no|not|without|w/o)\s+(?:the\s+)?(?P<ahead>[a-z_][\w.]*)"
    r"(?:\s+(?:layers?|modules?|projections?))?\s*\)?"
    r"|[\s,;]*\b(?P<behind>[a-z_][\w.]*)\s*[:=]\s*(?:no|false|off|none)\b(?!\s*[a-z_])",
    re.IGNORECASE,
)
"""A name or a group beside a word for no."""
KINDS = re.compile(
    r"\s*\(?(?P<number>\d+) (?:target[ _-]?)?(?:linear )?(?:modules?|linears?|projections?|maps?)\)?\s*", re.I
)
"""A number of kinds of modules alone: all of them, of a model that has as many."""
ALTERNATIVES = re.compile(r"\(\s*(\w+(?:\s*\|\s*\w+)+)\s*\)_(proj\w*)", re.IGNORECASE)
"""Names by their beginnings: ``(q|v)_proj``."""
JOINED = {
    "qkv": "qkv", "attention output": "o", "experts": "gud", "linear_fc1": "gu", "c_proj": "od", "table of tokens": "e",
    "head": "h", "q": "q", "k": "k", "v": "v", "o": "o", "gate": "g", "up": "u", "down": "d",
    "attention": "qkvo", "mlp": "gud", "qv": "qv", "text": "qkvogud", "all": "qkvogud",
}  # fmt: skip
"""The maps, a letter each, that a name, what it does or a group may stand for."""
PLUS = r"\s*(?:\+|&|\band\b|\bplus\b)\s*"
GATE, SHORT = "gate", {"up", "down"}
ALL, EVERY = "all-linear", "<all>"
LITGPT_PARTS = {"attention": "query,key,value,projection", "qkv": "query,key,value", "qv": "query,value", "mlp": "mlp"}
"""Words of LitGPT's ``lora_query`` and its neighbours, by groups."""


@functools.cache
def synonyms() -> dict[str, tuple[str, ...]]:
    """What one module is called, by what it does."""
    found: dict[str, list[str]] = grammar()["module_names"]["names"]
    return {role: tuple(names) for role, names in found.items()}


def targets_of(text: str) -> dict[str, Any] | None:
    """Options of a cell, its names not yet those of a model; None where it states nothing."""
    text = re.sub(r"\bdefault values?\b", "default", text, flags=re.IGNORECASE)
    text = re.sub(COUNTED, "", text, flags=re.IGNORECASE)
    text = ALTERNATIVES.sub(lambda found: ",".join(f"{n.strip()}_{found[2]}" for n in found[1].split("|")), text)
    kinds = KINDS.fullmatch(text)
    if kinds is not None:
        return {"lora_target_modules": f"<{int(kinds['number'])}>"}
    text = re.sub(JOINED_WITH_OUTPUT, "attention", text, flags=re.IGNORECASE)
    saved = SAVED.search(text)
    if saved is not None:
        others = targets_of(f"{text[: saved.start()]} {text[saved.end() :]}".strip())
        roots = sorted({name.lower() for name in re.findall(ROOT, saved["roots"], re.IGNORECASE)})
        return None if others is None else others | {"modules_to_save": ",".join(roots)}
    bare = re.sub(LEFT_OUT, "", text, flags=re.IGNORECASE)
    if bare != text and targets_of(bare) == {"lora_target_modules": ALL}:
        return {"lora_target_modules": ALL}
    denied = next((found for found in DENIED.finditer(text) if _maps_of(found["ahead"] or found["behind"])), None)
    if denied is not None:
        return _left_out(text, denied)
    names, rest = _names(re.sub(LITGPT_OFF, " ", text, flags=re.IGNORECASE))
    if names and not rest:
        return {"lora_target_modules": ",".join(names)}
    if names:
        try:
            parts = _parts_beside(rest)
        except SkipRowError as unknown:
            told = str(unknown).removeprefix(f"lora_targets {rest!r}")
            piece = "" if told.startswith(":") else f": {rest!r}"
            raise SkipRowError(f"lora_targets {text!r}{piece}{told}") from unknown
        if is_denial(folded(rest)):
            raise SkipRowError(f"lora_targets {text!r}: what {rest!r} denies is not known")
        parts = [part for part in parts if not _named_within(text, names, part)]
        return {"lora_target_modules": ",".join((*names, *(f"<{part}>" for part in parts)))}
    named = (str(piece.facts["part"]) for piece in pieces_of("lora_targets", text) if "part" in piece.facts)
    parts = list(dict.fromkeys(named))
    if not parts:
        facts_of("lora_targets", text)
        return None
    stray = next((piece.text for piece in pieces_of("lora_targets", text) if is_denial(piece.text)), None)
    if stray is not None:
        raise SkipRowError(f"lora_targets {text!r}: what {stray!r} denies is not known")
    if "all" in parts and set(parts) not in ({"all"}, {"all", "attention", "mlp"}):
        raise SkipRowError(f"lora_targets {text!r} contradicts itself: all and {parts[-1]!r}")
    parts = parts if "all" in parts else [part for part in parts if not any(_less(other, part) for other in parts)]
    return {"lora_target_modules": ALL if "all" in parts else ",".join(f"<{part}>" for part in parts)}


def _parts_beside(rest: str) -> list[str]:
    """The group of maps in what stands beside names; of a group and its part ("qkv, dense (attention)") the part."""
    found = [str(piece.facts["part"]) for piece in pieces_of("lora_targets", rest) if "part" in piece.facts]
    parts = list(dict.fromkeys(part for part in found if not any(_less(other, part) for other in found)))
    extra = (facts_of("lora_targets", rest) or {}) if len(parts) > 1 or not found else {"part": parts[0]}
    return [str(extra[name]) for name in extra if extra[name] != "peft"]


def _maps_of(word: str) -> set[str]:
    """The maps that a name or a group stands for; empty where the word is neither."""
    last = word.rsplit(".", 1)[-1]
    role = next((role for role, names in synonyms().items() if last.lower() in (name.lower() for name in names)), "")
    if role or last in JOINED:
        return set(JOINED[last if last in JOINED else role])
    terms = [term for term in terms_of("lora_targets") if term.pattern.fullmatch(folded(word))]
    parts = [str(term.facts["part"]) for term in terms if term.facts]
    return set(JOINED.get(parts[0], "")) if parts else {last} if re.fullmatch(r"[A-Za-z]\w*_\w+", last) else set()


def _less(one: str, group: str) -> bool:
    """Whether a group is a part of another."""
    return _maps_of(one) < _maps_of(group)


def _left_out(text: str, denied: re.Match[str]) -> dict[str, Any] | None:
    """Options of a cell without the modules that it denies; raises SkipRowError where it names them too."""
    word, behind = denied["ahead"] or denied["behind"], text[denied.end() :].strip(" )]")
    clear = not behind or denied["behind"] or (denied[0].rstrip().endswith(")") and "(" in denied[0])
    found = targets_of(f"{text[: denied.start()]} {text[denied.end() :]}")
    kept = str(found["lora_target_modules"]).split(",") if found and clear else []
    maps = [JOINED["all"] if name == ALL else _maps_of(name.strip("<>")) for name in kept]
    own = all(len(letter) > 1 for letter in _maps_of(word)) and any(name == ALL or name[0] == "<" for name in kept)
    last, added = word.rsplit(".", 1)[-1].lower(), re.search(f"{PLUS}$", text[: denied.start("behind")], re.IGNORECASE)
    named = any(last in map(str.lower, names) for role, names in synonyms().items() if role != "head")
    listed = denied["behind"] and (named or added)
    if not maps or own or listed or not all(maps) or any(_maps_of(word) & set(named) for named in maps):
        raise SkipRowError(
            f"lora_targets {text!r} leaves out {word!r}: write the names of all modules that are adapted"
        )
    return found


def _named_within(text: str, names: Sequence[str], part: str) -> bool:
    """Whether names beside a group are maps of it: they are all that is meant."""
    within = [name for name in names if part != "all" and _maps_of(name) <= _maps_of(part)]
    words = "|".join(term.pattern.pattern for term in terms_of("lora_targets") if term.facts.get("part") == part)
    for name in within:
        one = rf"\b{re.escape(folded(name))}\b"
        if re.search(rf"(?:{words}){PLUS}{one}|{one}{PLUS}(?:{words})|\ball (?:{words})", folded(text)):
            raise SkipRowError(
                f"lora_targets {text!r} names {name!r} and all of {part}: write the names of all modules"
            )
    return bool(within)


def _names(text: str) -> tuple[list[str], str]:
    """Module names and letters in a cell, and what is left of it."""
    every = [name for names in synonyms().values() for name in names]
    known = {name.lower(): name for name in reversed(every)}
    names = [switch[1] for switch in re.finditer(LITGPT_SWITCH, text, re.IGNORECASE)]
    rest: list[str] = []
    plain = re.sub(LITGPT_SWITCH, " ", text, flags=re.IGNORECASE)
    for part in re.split(SPLIT, re.sub(r"[\[\]'\"`()]", " ", plain)):
        word = part.strip(".: ")
        last = word.rsplit(".", 1)[-1]
        if last.lower() in known:
            names.append(last if last in every else known[last.lower()])
        elif re.fullmatch(r"[A-Za-z]\w*_\w+", last) and not _is_group(last):
            names.append(last)
        elif word:
            rest.append(word)
    return names, " ".join(rest)


def _is_group(word: str) -> bool:
    """Whether a word with underscores is one of those for groups of maps (``all_linear``)."""
    return any(term.pattern.fullmatch(folded(word)) for term in terms_of("lora_targets") if term.kind == "terms")


def same_targets(architecture: Architecture, one: str, other: str) -> bool:
    """Whether two cells name the same modules of a model."""
    every = adaptable_modules(architecture)
    first, second = (set(in_model(architecture, asked).split(",")) for asked in (one, other))
    first, second = (names - {ALL} | (set(every) if ALL in names else set()) for names in (first, second))
    return first == second


def separate(asked: str) -> str:
    """Megatron's names of joined maps as those of the maps that transformers keeps apart; other names as they are."""
    parts: dict[str, str] = grammar()["module_names"]["megatron"]
    return ",".join(dict.fromkeys(part for name in asked.split(",") for part in parts.get(name, name).split(",")))


def in_model(architecture: Architecture, asked: str) -> str:
    """Target modules in the model's own names."""
    if asked == ALL:
        return asked
    layers, roots = adaptable_modules(architecture), root_modules(architecture)
    own = (*layers, *roots)
    names, found = asked.split(","), list[str]()
    if SHORT & {*names}:  # "gate, up, down" are maps of the feed-forward, where a router is called gate, too
        own = tuple(name for name in own if name != GATE)
    for name in names:
        found += () if name == EVERY else [name] if name in own else _own_names(architecture, own, name)
    if EVERY in names:
        named = [name for name in found if name not in roots]
        if named and set(named) != set(layers):
            raise SkipRowError(f"lora_targets names {', '.join(named)}, which are not all linear maps, and all of them")
        return ",".join((ALL, *(name for name in found if name in roots)))
    return ",".join(dict.fromkeys(found))


def _own_names(architecture: Architecture, own: Sequence[str], name: str) -> list[str]:
    if name.startswith("<"):
        return _part(architecture, own, name.strip("<>"))
    roles = [role for role, names in synonyms().items() if name in names]
    for role in roles:
        matches = [other for other in synonyms()[role] if other in own]
        if matches:
            return matches[:1]
    if roles and roles[0] in ("q", "k", "v"):
        return [other for other in synonyms()["qkv"] if other in own][:1] or [name]
    if roles == ["attention output"]:  # Megatron's "dense", of a model whose attention ends otherwise
        return [other for other in synonyms()["o"] if other in own][:1] or [name]
    return [name]


def _part(architecture: Architecture, own: Sequence[str], part: str) -> list[str]:
    """The modules of a group of maps."""
    if is_litgpt(architecture) and part in LITGPT_PARTS:
        return LITGPT_PARTS[part].split(",")
    attention = {linear.name for group in architecture.groups for linear in group.layer.attention.linears}
    roles = {"qkv": ("q", "k", "v", "qkv"), "qv": ("q", "v")}
    if part.isdigit():
        layers = adaptable_modules(architecture)
        if len(layers) != int(part):
            raise SkipRowError(
                f"lora_targets: {architecture.name} has {len(layers)} kinds of modules; write which {part}"
            )
        return [*layers]
    if part == "attention":
        return [name for name in own if name in attention] or ["attention"]
    if part in ("mlp", "text"):
        roots = root_modules(architecture)
        return [name for name in own if name not in roots and (part == "text" or name not in attention)]
    if part == "peft":
        return _peft_default(architecture, own)
    names = [name for role in roles[part] for name in synonyms()[role]]
    return [name for name in own if name in names] or [part]


def _peft_default(architecture: Architecture, own: Sequence[str]) -> list[str]:
    """PEFT's targets for families that it knows."""
    names = peft_targets(architecture, own)
    if not names:
        raise SkipRowError(
            f"lora_targets: PEFT has no targets of its own for {architecture.model_type}; write the modules adapted"
        )
    return [*names]
