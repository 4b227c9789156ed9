"""Free text of one cell in terms of a column's vocabulary: every word is known, or the cell is not read.

A cell is folded (case, dashes, underscores, ``=`` and ``:`` do not matter) and read from left to right. At every place
the longest of the column's terms, remarks and words that may stand anywhere is taken. Precedence:

1. what is known and refused (``skip``) refuses the whole cell;
2. terms state facts; two different values of one fact contradict each other, and the cell is refused;
3. ``weak`` terms state facts where no other term says otherwise ("gradient checkpointing: off");
4. remarks, and the words between (brackets, commas, "with"), state nothing;
5. any other word refuses the cell, by name.

A word for no directly before a term ("no offload"), or directly behind it ("offload: no", "offload (none)"), denies
that term: it states what the term's entry says under ``denied``, and refuses the cell where there is nothing. A word
for no that stands alone is the column's own.

A cell of words for nothing ("not stated", "library default") states nothing: None. Words for yes and no are the same in
every column.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from tunecast.calibrate.run_table import SkipRowError

DASHES = re.compile("[\u2010-\u2015\u2212]")
BETWEEN = " ()[]{},;+/&|.@"
"""What may stand between pieces and means nothing."""
ENDS = re.compile(r"[()\[\]{},;+/&|@]| (?:and|with|plus|over) ")
"""Where an unknown piece ends."""
WORD_END = r"(?![a-z0-9])(?!(?<=[0-9])\.[0-9])"
"""A term is not the beginning of a longer word or number."""
JOINED_END = r"(?:(?![a-z0-9])|(?<=[0-9])(?=[a-z]))"
"""``tp4pp2`` is two terms."""
COMMIT = r"(?=[a-f]*[0-9])[0-9a-f]{7,40}(?![0-9a-z.])"
"""The hash of a commit, which says nothing of a version."""
VERSION = rf"(?!{COMMIT})[0-9][0-9a-z.+]*"
KINDS = ("skip", "terms", "weak", "unstated", "defaults", "remarks", "negations")
NOTHING = ("unstated", "defaults")
"""Words for nothing, and for a default that somebody else chose."""
BEFORE = ("no", "not", "non", "without")
"""Words for no that deny what follows them; all of them, and those for no in a cell, deny what they stand behind."""
ARTICLES = ("the", "a", "an")

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One wording and what it states."""

    pattern: re.Pattern[str]
    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    weakly: Mapping[str, Any] = field(default_factory=dict)
    """Facts that it states where no other term says otherwise."""
    denied: Mapping[str, Any] | None = None
    """Facts that it states beside a word for no; None: what it is instead is not known."""
    denied_weakly: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A term where it was found, with the numbers and versions that stand in it."""

    text: str
    term: Term
    facts: Mapping[str, Any]
    place: int = 0

    @property
    def end(self) -> int:
        """Place of the letter behind it."""
        return self.place + len(self.text)

    @property
    def states(self) -> bool:
        """Whether it is a term that says something."""
        return self.term.kind in ("terms", "weak")


@functools.cache
def grammar() -> dict[str, Any]:
    """The committed terms of every column."""
    text = resources.files("tunecast.calibrate").joinpath("data/vocabulary_terms.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def folded(text: str) -> str:
    """Text without what does not matter."""
    plain = DASHES.sub("-", unicodedata.normalize("NFKC", text).casefold()).replace("\u00d7", "x")
    plain = re.sub(r"\bw/o(ut)?\b", "without", plain.replace("\U0001f917", " hugging face "))
    plain = re.sub(r"\bw/(?=\s)", "with", plain)
    plain = re.sub(r"[=:]\s*true\b", " yes", plain)
    plain = re.sub(r"(?<!\S)--(bf16|fp16)(?=[\s,;)]|$)", r"\1 yes", plain)
    plain = re.sub(r"=\s*no\b", " false", plain)
    plain = re.sub(r"\s-+\s|(?<=\bno):\s", ", ", plain)
    return re.sub(r"[\s_=:~\"'`-]+", " ", plain).strip()


@functools.cache
def software() -> dict[str, Any]:
    """The committed names of training software."""
    text = resources.files("tunecast.calibrate").joinpath("data/vocabulary_frameworks.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


@functools.cache
def terms_of(column: str) -> tuple[Term, ...]:
    """Every term of a column, with those that may stand in any."""
    if column == "framework":
        return _families()
    data = grammar()
    end = JOINED_END if column == "parallelism" else WORD_END
    return tuple(
        term
        for source in (data["columns"].get(column, {}), data["anywhere"])
        for kind in KINDS
        for entry in source.get(kind, ())
        for term in _terms(kind, entry, end)
    )


def _terms(kind: str, entry: Any, end: str = WORD_END, tail: str = "") -> list[Term]:
    """One term for every wording of an entry, so that the longest of them can be found."""
    given: Mapping[str, Any] = {"says": entry} if isinstance(entry, str) else entry
    says = re.sub(r"\b(YES|NO)\b", lambda word: str(grammar()["words"][word[0]]), given["says"])
    spelled = (wording + tail for wording in wordings(says.replace("COMMIT", COMMIT)))
    patterns = [text.replace("VERSION", VERSION).replace(" ", " ?") for text in spelled]
    said = {name: given[name] for name in ("facts", "weakly", "denied", "denied_weakly", "reason") if name in given}
    return [Term(pattern=re.compile(f"(?:{pattern}){end}", re.ASCII), kind=kind, **said) for pattern in patterns]


def wordings(says: str) -> list[str]:
    """The alternatives of an expression, those in brackets left together."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(says):
        escaped = place > 0 and says[place - 1] == "\\"
        depth += {"(": 1, ")": -1}.get(letter, 0) if not escaped else 0
        if letter == "|" and depth == 0:
            parts.append(says[begin:place])
            begin = place + 1
    return [*parts, says[begin:]]


def _families() -> tuple[Term, ...]:
    """Names of software, each with its version where one stands behind it."""
    data = software()
    found: list[Term] = []
    for family in data["families"]:
        reason = family.get("skip", "")
        entry = {"says": family["says"], "facts": {"family": family["name"]}, "reason": reason}
        found += _terms("skip" if reason else "terms", entry, tail="( [vr]?(?P<version>VERSION))?")
    rest = [term for entry in data["remarks"] for term in _terms("remarks", entry)]
    rest += _terms("version", "[vr]?(?P<version>VERSION)")
    return (*found, *_terms("unstated", data["unstated"]), *rest)


def pieces_of(column: str, text: str) -> list[Piece]:
    """The terms that a cell is made of, words for no with what they deny; raises SkipRowError naming the first piece
    that is none."""
    plain, place = folded(text), 0
    found: list[Piece] = []
    while place < len(plain):
        if plain[place] in BETWEEN:
            place += 1
            continue
        piece = _longest(column, plain, place)
        if piece is None:
            raise SkipRowError(_unknown(column, text, plain, place))
        if piece.term.kind == "skip":
            named = "" if piece.text == plain else f"{piece.text!r}: "
            raise SkipRowError(f"{column} {text!r}: {named}{piece.term.reason}")
        found.append(piece)
        place += len(piece.text)
    found = found if column == "framework" else _with_denials(column, text, plain, found)
    stray = next((piece for piece in found if piece.term.kind == "negations"), None)
    if stray is not None:
        raise SkipRowError(_unknown(column, text, plain, stray.place))
    return found


@functools.cache
def _denial() -> re.Pattern[str]:
    return re.compile(f"{grammar()['words']['NO']}|{'|'.join(BEFORE)}")


def is_denial(text: str) -> bool:
    """Whether a folded text is a word for no."""
    return _denial().fullmatch(text) is not None


@functools.cache
def _answer() -> re.Pattern[str]:
    return re.compile(f"{grammar()['words']['YES']}|{grammar()['words']['NO']}")


def _with_denials(column: str, text: str, plain: str, pieces: list[Piece]) -> list[Piece]:
    """The pieces, with one for every word for no and the term that it denies."""
    found: list[Piece] = []
    denied: Piece | None = None
    rest = list(pieces)
    while rest:
        piece = rest.pop(0)
        if not is_denial(piece.text):
            found.append(piece)
            continue
        ahead = _ahead(plain, piece, rest)
        behind = _behind(plain, piece, found)
        if ahead is not None:
            ends = plain[piece.place : rest[ahead].end]
            found, rest = [*found, _denying(column, text, ends, piece.place, rest[ahead])], rest[ahead + 1 :]
        elif behind is not None:
            term = found[behind]
            if term is denied:
                raise SkipRowError(f"{column} {text!r}: {plain[term.place : piece.end]!r} denies one thing twice")
            found = [*found[:behind], _denying(column, text, plain[term.place : piece.end], term.place, term)]
        else:
            _not_of_brackets(column, text, plain, piece, found)
            found.append(piece)
            continue
        denied = found[-1]
    return found


def _not_of_brackets(column: str, text: str, plain: str, no: Piece, found: list[Piece]) -> None:
    """Refuse a word for no behind a bracket with a term: it may deny that, or what is before the bracket."""
    last = found[-1] if found else no
    if last.states and not _answer().fullmatch(last.text) and plain[last.end : no.place].strip(" ") == ")":
        raise SkipRowError(
            f"{column} {text!r}: what {plain[last.place : no.end]!r} denies is not known; write what was done"
        )


def _ahead(plain: str, no: Piece, rest: list[Piece]) -> int | None:
    """Which of the pieces to come a word for no denies: that directly behind it, or behind its article."""
    place = 1 if rest and rest[0].text in ARTICLES else 0
    if no.text not in BEFORE or len(rest) <= place or not rest[place].states:
        return None
    between = plain[no.end : rest[0].place] + plain[rest[0].end : rest[place].place]
    return place if not between.strip(" ") else None


def _behind(plain: str, no: Piece, found: list[Piece]) -> int | None:
    """Which of the pieces before it a word for no denies: that directly before it, or before a remark on that."""
    place, end = len(found) - 1, no.place
    while place >= 0 and plain[found[place].end : end].strip(" ") in (("", "(") if end == no.place else ("",)):
        if found[place].states:
            return None if _answer().fullmatch(found[place].text) else place
        if found[place].term.kind != "remarks":
            return None
        place, end = place - 1, found[place].place
    return None


def _denying(column: str, text: str, both: str, place: int, piece: Piece) -> Piece:
    """A term that is denied, as the term that this makes it."""
    if piece.term.denied is None:
        raise SkipRowError(f"{column} {text!r}: {both!r} does not say what was done instead; write that")
    term = replace(piece.term, kind="terms", weakly=piece.term.denied_weakly, denied=None)
    return Piece(text=both, term=term, facts=piece.term.denied, place=place)


def _longest(column: str, plain: str, place: int) -> Piece | None:
    best: Piece | None = None
    for term in terms_of(column):
        match = term.pattern.match(plain, place)
        if match is not None and len(match[0]) > (len(best.text) if best else 0):
            numbers = {name: _value(value) for name, value in match.groupdict().items() if value is not None}
            best = Piece(text=match[0], term=term, facts={**term.facts, **numbers}, place=place)
    return best


def _value(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _unknown(column: str, text: str, plain: str, place: int) -> str:
    end = ENDS.search(plain, place)
    piece = plain[place : end.start() if end else len(plain)].strip(BETWEEN) or plain[place:]
    whole = piece == plain
    return (
        f"{column} {text!r} is not in the vocabulary"
        if whole
        else (f"{column} {text!r}: {piece!r} is not in the vocabulary")
    )


def facts_of(column: str, text: str) -> Facts | None:
    """What a cell states; None where it states nothing. Raises SkipRowError for what is unknown or contradictory."""
    facts: Facts = {}
    said: dict[str, str] = {}
    pieces = pieces_of(column, text)
    for piece in pieces:
        for name, value in piece.facts.items() if piece.term.kind == "terms" else ():
            if facts.setdefault(name, value) != value:
                raise SkipRowError(f"{column} {text!r} contradicts itself: {said[name]!r} and {piece.text!r}")
            said.setdefault(name, piece.text)
    for piece in pieces:
        for name, value in (piece.facts if piece.term.kind == "weak" else piece.term.weakly).items():
            facts.setdefault(name, value)
    if not facts and pieces and not any(piece.term.kind in NOTHING for piece in pieces):
        raise SkipRowError(f"{column} {text!r} says nothing that is in the vocabulary")
    return facts or None


def meaning(column: str, text: str, facts: Facts) -> Facts:
    """Options that the facts mean together: themselves, or those of the column's first meaning of just these.

    ``only_in`` is the label of the software that a meaning is read for. Facts ``beside`` are options by another name.
    """
    meanings = grammar()["columns"].get(column, {}).get("means")
    if meanings is None:
        return facts
    names = grammar()["columns"][column].get("beside", {})
    beside = {names[name]: value for name, value in facts.items() if name in names}
    facts = {name: value for name, value in facts.items() if name not in names}
    for entry in meanings:
        when = entry["when"]
        if when.keys() == facts.keys() and all(_holds(when[name], facts[name]) for name in facts):
            if "skip" in entry:
                raise SkipRowError(f"{column} {text!r}: {entry['skip']}")
            told = {name: _filled(value, facts) for name, value in entry["options"].items()} | beside
            return told | ({"only_in": entry["only_in"]} if "only_in" in entry else {})
    words = [repr(piece.text) for piece in pieces_of(column, text) if piece.facts or piece.term.weakly]
    if not facts:
        raise SkipRowError(f"{column} {text!r}: {' and '.join(words)} can only stand beside a name; write that too")
    together = "alone" if len(words) == 1 else "together"
    raise SkipRowError(f"{column} {text!r}: the vocabulary has no meaning of {' and '.join(words)} {together}")


def _holds(wanted: Any, value: Any) -> bool:
    """A value, one of several, or any."""
    return value in wanted if isinstance(wanted, list) else wanted in ("*", value)


def _filled(value: Any, facts: Facts) -> Any:
    whole = re.fullmatch(r"\{(\w+)\}", value) if isinstance(value, str) else None
    return facts[whole[1]] if whole else value.format(**facts) if isinstance(value, str) else value
