"""How many GPUs a row names, on how many machines, and the words that are left to name the card.

Precedence of the number: the column ``gpus``; then the card's text; then a parallelism cell that says "single GPU"; one
where the table speaks of no number. What two cells say must agree. A DGX of A100, H100, H200, B200 or B300 has 8 GPUs
(its datasheets), an HGX board 4 or 8, a DGX Spark one; clouds' machines are those of the price catalog. ``2x8`` is two
machines of 8: the smaller number first, as every launcher counts (``nnodes`` x ``nproc_per_node``). A number beside
machines is of one of them only with words that say so ("of", "x", "each"), else of all or of one, as far as machines of
the card have that many.
"""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass

from tunecast.calibrate.card_words import as_named, check_dies, dies_in
from tunecast.calibrate.run_table import NOTHING, Row, SkipRowError, number, whole
from tunecast.catalogs.gpus import ids_called
from tunecast.catalogs.prices import load_prices

MACHINE = r"(?:nodes?|machines?|hosts?|servers?|instances?|vms?)"
MACHINE_OF = r"(?:node|machine|host|server|box|instance)"
ONE = {"a": 1, "one": 1, "single": 1}
NUMBER = r"(?P<{}>\d{{1,4}}|one|single)"
CARD_BEHIND = r"(?=\(?[a-z]|[0-9]{4}\b)"
OF_ONE = rf"(?:each|per\s+{MACHINE}|/\s*{MACHINE})"
EACH = rf"(?:\s*(?:x|\*)?\s*(?:gpus?|cards?)?\s*{OF_ONE}?\)?)"
IN_GPUS = (
    r"(?P<count>\d+)\s*(?:x|gpus?|cards?)?\s*\(\s*(?P<nodes>\d+)\s*x\s*(?P<per_node>\d+)\s*\)",
    (
        rf"(?P<count>\d+)\s*(?:x|gpus?|cards?)?\s*[(,]?\s*(?:on\s+)?{NUMBER.format('nodes')}\s*{MACHINE}"
        r"(?:\s*(?:of|x)\s*(?P<per_node>\d+))?(?:\s*gpus?)?\s*\)?"
    ),
    (
        rf"(?P<count>\d+)\s*(?:x|gpus?|cards?)?\s*\(\s*{NUMBER.format('nodes')}\s*{MACHINE}\s*(?:of|x|with|,)?\s*"
        rf"(?P<per_node>\d+)\s*(?:x|gpus?|cards?)?\s*{OF_ONE}\s*\)"
    ),
    rf"{NUMBER.format('nodes')}\s*(?:x\s*)?{MACHINE}\s*(?:of|x)\s*(?P<per_node>\d+)\s*(?:x|gpus?|cards?)?",
    (
        rf"{NUMBER.format('nodes')}\s*(?:x\s*)?{MACHINE}\s*(?:of|x|with|,|\()?\s*(?P<per_node>\d+)\s*"
        rf"(?:x|gpus?|cards?)?\s*{OF_ONE}\s*\)?"
    ),
    (
        rf"{NUMBER.format('nodes')}\s*(?:x\s*)?{MACHINE}\s*(?:with|,|\()?\s*(?P<beside>\d+)\s*(?:x|gpus?|cards?)?"
        r"(?:\s+in\s+total|\s+total)?\s*\)?"
    ),
    r"(?P<nodes>\d+)\s*x\s*(?P<per_node>\d+)\s*(?:gpus?|cards?)?",
)
"""A cell of the column ``gpus`` that is more than a number."""
SINGLE = r"(?:on )?(?:a )?(?:single|one|1)(?:[ -](?:gpu|card|device))?"
CLOUDS = ("aws", "azure", "gcp", "lambda")
"""Providers whose machines have names that say nothing else."""
EIGHT = r"(?:a100|h100|h200|b200|b300|a800|h800)"
MEMORY_FIRST = (
    r"(?<![\w.])(?P<gb>\d+) ?gi?b[\s-]+"
    r"(?=(?:(?:nvidia|tesla|geforce|rtx)[\s-])*(?!hbm)(?:[abhlvtm][a-z]{0,2}\d|\d{4}))"
)
"""A memory before its card (``80GB A100``), whose number is no number of cards."""
BOARDS = r"a100[\s-]*(?:sxm4?)?[\s-]*80|h100|h200|b200|b300|a800|h800|mi300|mi325|mi355"
"""Cards on boards of 8 at most (OAM, HGX); A100 40 GB are 16 in Google's a2-megagpu-16g, cards in slots up to 16."""
NVL72 = 72
"""GPUs on one NVLink network of a GB200 or GB300 rack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cards:
    """What a text says of cards."""

    card: str
    """The words that are left, of the card itself."""
    counts: tuple[int, ...] = ()
    """Numbers of GPUs that it may mean; none where it says no number."""
    nodes: int | None = None
    """Machines, where it says."""
    per_node: int | None = None
    """GPUs of one machine (of one NVLink network), where it says."""
    own: int | None = None
    """GPUs of the kind of machine that it names without saying how many."""
    instance: str = ""
    """Id of the card of a cloud's machine that it names."""
    machine: str = ""
    """A machine of several GPUs that it names without saying how many of them ran."""


@functools.cache
def instances() -> dict[str, tuple[str, int]]:
    """Card and number of cards by the names of the clouds' machines, in small letters, Azure's without "Standard" too;
    only names of one shape."""
    found: dict[str, set[tuple[str, int]]] = {}
    for offer in load_prices():
        if offer.provider in CLOUDS and re.search(r"\d", offer.offer_sku):
            sku, shape = offer.offer_sku.lower(), (offer.gpu_id, offer.gpu_count)
            for name in (sku, sku.removeprefix("standard_")):
                found.setdefault(name, set()).add(shape)
    return {name: next(iter(shapes)) for name, shapes in found.items() if len(shapes) == 1}


@functools.cache
def cards_in(text: str) -> Cards:
    """The numbers of a text that names a card, and what is left of it."""
    dies, on_dies = dies_in(text)
    if on_dies:
        return Cards(card="MI250X", counts=() if dies is None else (dies,))
    plain = re.sub(r"\s+", " ", as_named(_family(text.replace("\u00d7", "x")))).strip()
    plain, memory = _taken(MEMORY_FIRST, plain)
    plain = f"{plain.strip()} {memory['gb']}GB" if memory else plain
    plain, instance, each, times = _instance(plain)
    plain, dgx = _taken(rf"(?:{NUMBER.format('n')}\s*[x*]?\s*)?\b(?P<kind>dgx|hgx)(?=[ -]+{EIGHT}\b)", plain)
    spark = re.search(r"\bdgx[ -]spark\b", plain, re.IGNORECASE)
    boxed = re.fullmatch(
        rf"(?P<b>.*?)\(?\b(?P<n>\d{{1,2}})[- ]?gpus?\b(?P<m>.*?)[\s-]{MACHINE_OF}\)?", plain, re.IGNORECASE
    )
    if boxed and not re.search(r"\d\s*[x*]|\bdgx\b|\bhgx\b", boxed["b"] + boxed["m"], re.IGNORECASE):
        card, each = f"{boxed['b'].strip()} {boxed['m'].strip()}".strip(" ,-"), int(boxed["n"])
        return Cards(card=card, counts=(each,), per_node=each, own=each)
    plain, nodes, per_node, total = _machines(plain)
    plain, count = _count(plain)
    shape = Cards(card=plain, instance=instance, per_node=per_node)
    if dgx or instance:
        board = (4, 8) if dgx.get("kind", "").lower() == "hgx" else (8,) if dgx else (each,)
        machines = times if instance else _value(dgx.get("n")) or nodes
        return _of_machines(text, shape, plain, board, machines, total or count)
    if spark:
        return Cards(card=plain, counts=() if count is None else (count,), per_node=1)
    if re.search(r"\bgb[23]00[ -]+nvl72\b", plain, re.IGNORECASE):
        card = re.sub(r"[ -]+nvl72\b", "", plain, flags=re.IGNORECASE)
        racks = () if count is None else (count, count * NVL72)
        return Cards(card=card, counts=racks, per_node=NVL72, machine="" if count else text)
    if total is not None and nodes is not None and per_node is not None:
        one = nodes == 1 or per_node <= most(text)
        counts = (total,) if one else (per_node, total)
        return Cards(card=plain, counts=counts, nodes=nodes, per_node=per_node if one else None)
    if re.search(r"\b(dgx|hgx)\b", plain, re.IGNORECASE) and not spark:
        behind = re.search(rf"{EIGHT}.*\b(dgx|hgx)\b", plain, re.IGNORECASE)
        ran = _of_dgx(text, count) if behind else ()
        return Cards(card=plain, counts=ran, machine="" if ran else text)
    behind = re.search(rf"\b(?P<word>{MACHINE})\)?$", plain, re.IGNORECASE) if nodes is None and not spark else None
    if behind and not ids_called(plain) and (count in (None, 1) or behind["word"].lower().endswith("s")):
        return Cards(card=plain, nodes=count, machine=text)
    if nodes is None or count is None:
        return Cards(card=plain, counts=() if count is None else (count,), nodes=nodes, machine=text if nodes else "")
    return Cards(card=plain, counts=of_all(text, nodes, count), nodes=nodes, per_node=count if nodes == 1 else None)


def most(card: str) -> int:
    """GPUs of the largest machines (NVLink networks) that are sold with a card."""
    if re.search(r"gb[23]00", card, re.IGNORECASE):
        return NVL72
    board = re.search(BOARDS, card, re.IGNORECASE) and not re.search(r"pcie|nvl\b", card, re.IGNORECASE)
    return 8 if board else 16


def of_all(card: str, nodes: int, count: int) -> tuple[int, ...]:
    """GPUs of all machines that a number beside them may mean: itself, or that many in each of them."""
    if nodes == 1:
        return (count,)
    total = count % nodes == 0 and count // nodes <= most(card)
    each = count <= most(card)
    found = (*((count,) if total else ()), *((count * nodes,) if each else ()))
    return found or (count, count * nodes)


def _of_dgx(text: str, count: int | None) -> tuple[int, ...]:
    """GPUs by a number beside a DGX that may count GPUs or machines: ``DGX H100 x2``."""
    if count is None:
        return ()
    sure = count == 8 or re.search(rf"\b{count}[\s-]*gpus?\b", text, re.IGNORECASE)
    return (count,) if sure else (count, 8 * count)


def _taken(pattern: str, text: str) -> tuple[str, dict[str, str]]:
    """A text without the first match of a pattern, and what its groups hold."""
    found = re.search(pattern, text, re.IGNORECASE)
    if found is None:
        return text, {}
    rest = f"{text[: found.start()]} {text[found.end() :]}"
    return re.sub(r"\s+", " ", rest).strip(), {name: said for name, said in found.groupdict().items() if said}


def _value(text: str | None) -> int | None:
    return None if text is None else ONE.get(text.lower()) or int(text)


def _family(text: str) -> str:
    """A text with the one machine of a family (``p4d``) for the family in brackets behind a card, where it has one."""
    found = re.search(r"\((?:aws )?(p\d[a-z]+)\)\s*$", text, re.IGNORECASE)
    machines = [] if found is None else [name for name in instances() if name.startswith(f"{found[1].lower()}.")]
    return text if found is None or len(machines) != 1 else f"{text[: found.start()]}({machines[0]})"


def _instance(text: str) -> tuple[str, str, int, int | None]:
    """A text without the name of a cloud's machine, that machine's card and number of cards, and how many of it."""
    for word in re.findall(r"[\w.-]+", text):
        name = re.sub(r"^\d+x(?=[a-z])|^ml\.", "", word.lower())
        if name not in instances():
            continue
        machine = re.escape(word.lower()[word.lower().index(name) :])
        behind = r"(?:\s*[x*]\s*(?P<after>\d{1,4})\b)?"
        rest, said = _taken(rf"(?:(?<![\w.])(?P<before>\d{{1,4}})\s*[x*]\s*)?(?:ml\.)?{machine}{behind}", text)
        gpu_id, each = instances()[name]
        return (
            re.sub(r"\(\s*\)|^[\s,(]+|[\s,)]+$", "", rest).strip(),
            gpu_id,
            each,
            _value(said.get("before") or said.get("after")),
        )
    return text, "", 0, None


def _machines(text: str) -> tuple[str, int | None, int | None, int | None]:
    """A text without its machines; their number, GPUs of each and GPUs of all."""
    nodes_of = rf"{NUMBER.format('nodes')}\s*(?:x\s*)?{MACHINE}\s*"
    joined = rf"{nodes_of}(?:of|x)\s*\(?(?P<per>\d{{1,2}})(?!\d){EACH}"
    each = rf"{nodes_of}(?:with|,|\()?\s*(?P<per>\d{{1,2}})(?!\d)\s*(?:x|\*)?\s*(?:gpus?|cards?)?\s*{OF_ONE}\)?"
    behind = rf"{nodes_of}(?:of|x|with|,|\()?\s*(?P<per>\d{{1,2}})(?!\d)(?=\s*[x*]?\s*[^,()]*\s{OF_ONE}\)?$)"
    crossed = rf"(?<![\w.-])(?P<nodes>\d{{1,4}})\s*[x*]\s*\(?(?P<per>\d{{1,2}})(?:\s*[x*]\s*|\s+){CARD_BEHIND}"
    ended = re.fullmatch(
        rf"(?P<per>\d{{1,2}})\s*[x*]\s*(?P<card>[a-z].*?)\s*[x*]\s*(?P<nodes>\d{{1,4}})\s*{MACHINE}",
        text,
        re.IGNORECASE,
    )
    if ended:
        return ended["card"], int(ended["nodes"]), int(ended["per"]), int(ended["nodes"]) * int(ended["per"])
    for pattern in (each, behind, joined, crossed):
        rest, said = _taken(pattern, text)
        if said:
            nodes, per = _value(said["nodes"]) or 1, int(said["per"])
            rest = re.sub(rf"\s{OF_ONE}\)?$", "", rest, flags=re.IGNORECASE) if pattern is behind else rest
            return re.sub(r"^\s*[x*]\s*", "", rest.strip("() ,")), nodes, per, nodes * per
    rest, said = _taken(rf"\(?\b(?P<nodes>\d{{1,3}}|one|single)\s*(?:x\s*)?{MACHINE}\b\s*(?:with\b|,)?\s*\)?", text)
    return rest.strip(" ,"), _value(said.get("nodes")), None, None


def _count(text: str) -> tuple[str, int | None]:
    """A text without its number of cards: before the card, behind it, or both (``8x H100 x2`` are 16)."""
    before = (
        rf"(?<![\w.-])(?P<n>\d{{1,4}})\s*[x*]\s*{CARD_BEHIND}|^(?P<n2>\d{{1,3}})\s+(?=[a-z])"
        r"|^(?P<n3>\d{4,})\s+(?=[a-wyz]+\d)|^(?P<n4>one|single)[\s-]+(?:gpu[\s-]+)?(?=[a-z])"
    )
    behind = (
        r"(?:\s+|(?<=[\dbs]))[x*]\s*(?P<n>\d{1,4})\s*$|\s*\(\s*x?\s*(?P<n2>\d+)\s*(?:x|gpus?|cards?)?\s*\)\s*$"
        r"|,?\s+(?P<n3>\d+)[\s-]*gpus?\s*$|[\s,]+\(?(?P<n4>one|single)(?:[\s-]+(?:gpu|card))?\)?\s*$"
    )
    text, first = _taken(before, text)
    text, last = _taken(behind, text)
    numbers = [_value(said) or 0 for found in (first, last) for said in found.values()]
    return text, None if not numbers else numbers[0] * (numbers[1] if len(numbers) > 1 else 1)


def _of_machines(
    text: str, shape: Cards, card: str, board: tuple[int, ...], machines: int | None, count: int | None
) -> Cards:
    """GPUs of machines that have a known number of them; a count beside it is of all, or of one machine."""
    if machines is None:
        several = text if max(board) > 1 and count is None else ""
        beside = (count,) if shape.instance and count else _of_dgx(text, count)
        ran = beside or (() if several else (1,))
        own = board[0] if len(board) == 1 else None
        return Cards(card=card, counts=ran, own=own, instance=shape.instance, machine=several)
    counts = tuple(machines * each for each in board)
    if count is not None:
        counts = tuple(number for number in counts if count in (number, number // machines))
        if not counts:
            raise SkipRowError(f"gpu {text!r} contradicts itself: {machines} machines and {count} GPUs")
    return Cards(card=card, counts=counts, instance=shape.instance, nodes=machines)


def cards_of(row: Row) -> tuple[int, int | None]:
    """How many GPUs ran, and how many of them a machine has where a cell says."""
    check_dies(row)
    text = row.get("gpu", "")
    named = Cards(card="") if text.lower() in NOTHING else cards_in(text)
    stated = row.get("gpus", "")
    machines = re.fullmatch(rf"{NUMBER.format('n')}\s*{MACHINE}", stated.strip(), re.IGNORECASE)
    if machines and (named.own or named.counts):
        return _of_named_machines(row, named, _value(machines["n"]) or 1)
    count, per_node = _of_column(row, stated)
    if count is None:
        return _of_text(row, text, named)
    nodes_said = re.search(rf"\b{MACHINE}\b", f"{row.get('parallelism', '')} {stated}", re.IGNORECASE)
    several = nodes_said or (named.own is not None and named.own == named.per_node)
    if named.counts and count not in named.counts and not (several and count % named.counts[0] == 0):
        raise SkipRowError(f"gpu {text!r} and gpus {stated!r} contradict each other")
    of_text = _per_node(named, count)
    if None not in (per_node, of_text) and per_node != of_text and of_text != NVL72:
        raise SkipRowError(f"gpu {text!r} and gpus {stated!r} contradict each other")
    own = named.own if named.own and count > named.own and count % named.own == 0 else None
    return count, next((each for each in (of_text, per_node, own) if each is not None), None)


def _per_node(named: Cards, count: int) -> int | None:
    """GPUs of one machine by a card's text."""
    if named.per_node is None and named.nodes and count % named.nodes == 0:
        return count // named.nodes
    return named.per_node


def with_one_gpu(row: Row) -> Row:
    """The row, its column ``gpus`` a plain 1 where any cell says that one GPU ran."""
    with contextlib.suppress(SkipRowError):
        return {**row, "gpus": "1"} if cards_of(row)[0] == 1 else row
    return row


def _of_text(row: Row, text: str, named: Cards) -> tuple[int, int | None]:
    """The number that the card's text says, or that none does."""
    if len(named.counts) > 1:
        either = " or ".join(map(str, named.counts))
        raise SkipRowError(f"gpu {text!r} may be {either} GPUs: write their number into gpus")
    if named.machine:
        raise SkipRowError(f"gpu {text!r} is a machine of several GPUs: write how many ran into gpus")
    if named.counts:
        return named.counts[0], _per_node(named, named.counts[0])
    if "gpus" in row and not re.fullmatch(SINGLE, row.get("parallelism", "").strip(), re.IGNORECASE):
        raise SkipRowError("gpus is not stated")
    return 1, None


def _of_column(row: Row, text: str) -> tuple[int | None, int | None]:
    """GPUs and GPUs of one machine by the column ``gpus``; None for what it does not say."""
    plain = re.sub(r"\s+", " ", text.replace("\u00d7", "x")).strip()
    said = next((m.groupdict() for form in IN_GPUS if (m := re.fullmatch(form, plain, re.IGNORECASE))), None)
    if said is None:
        of_card = _of_card(row, text, plain)
        if of_card is not None:
            return of_card
        return (None, None) if number(row, "gpus") is None else (whole(row, "gpus"), None)
    nodes, per_node = _value(said["nodes"]) or 1, _value(said.get("per_node"))
    count = _beside(row, text, nodes, int(said["beside"])) if "beside" in said else _value(said.get("count"))
    crossed = any(re.fullmatch(form, plain) for form in (IN_GPUS[0], IN_GPUS[-1]))
    if per_node is not None and crossed and nodes > per_node:
        raise SkipRowError(
            f"gpus {text!r} may be {nodes} machines of {per_node} or {per_node} of {nodes}: write "
            f"{nodes * per_node} ({min(nodes, per_node)} nodes)"
        )
    if count is None and nodes > 1 and (per_node or 0) > most(_named(row)):
        raise SkipRowError(f"gpus {text!r}: no machine has {per_node} of these cards; write {per_node} ({nodes} nodes)")
    count = nodes * (per_node or 0) if count is None else count
    if count % nodes or (per_node is not None and nodes * per_node != count) or count == 0:
        raise SkipRowError(f"gpus {text!r} contradicts itself")
    return count, count // nodes


def _of_named_machines(row: Row, named: Cards, nodes: int) -> tuple[int, int]:
    """GPUs of as many machines as the column ``gpus`` says, whose kind or number of cards the card's text says."""
    text, stated = row.get("gpu", ""), row["gpus"]
    counts: tuple[int, ...]
    if named.own:
        counts = (nodes * named.own,)
    elif named.nodes is not None:
        counts = named.counts if named.nodes == nodes else ()
    else:
        counts = of_all(_named(row), nodes, named.counts[0]) if len(named.counts) == 1 else named.counts
    if not counts:
        raise SkipRowError(f"gpu {text!r} and gpus {stated!r} contradict each other")
    if len(counts) > 1 or counts[0] % nodes:
        either = " or ".join(map(str, counts))
        raise SkipRowError(f"gpu {text!r} and gpus {stated!r} may be {either} GPUs: write their number into gpus")
    return counts[0], counts[0] // nodes


def _of_card(row: Row, text: str, plain: str) -> tuple[int, int | None] | None:
    """GPUs by a cell of ``gpus`` that names the row's card or a machine of it: ``8 x B200``, ``16 (2x p4de.24xlarge)``;
    None where it names none."""
    total = re.fullmatch(r"(?P<count>\d+)\s*\((?P<card>[^()]+)\)", plain)
    found = cards_in(total["card"] if total else plain)
    ids = (found.instance,) if found.instance and not found.card else ids_called(found.card)
    if not ids or not found.counts:
        return None
    own = cards_in(row.get("gpu", "")).card or row.get("gpu_canonical_id", "")
    called = ids_called(own) or tuple(gpu_id for gpu_id in ids if _in_name(gpu_id, own))
    stated = int(total["count"]) if total else found.counts[0]
    if own and not {*ids} & {*called}:
        raise SkipRowError(f"gpu {row.get('gpu', '')!r} and gpus {text!r} contradict each other")
    if stated not in found.counts or (total is None and len(found.counts) > 1):
        raise SkipRowError(f"gpus {text!r} contradicts itself")
    return stated, _per_node(found, stated)


def _in_name(gpu_id: str, card: str) -> bool:
    """Whether every word of a card that has a number, but its slot, is one of an id."""
    words = re.findall(r"[a-z]*\d+[a-z]*", re.sub(r"(?<=\d) (?=g(?:i?b)\b)|sxm\d?", "", card.lower()))
    return bool(words) and all(word in gpu_id.split("-") for word in words)


def _named(row: Row) -> str:
    """What a row's cells call its card."""
    return f"{row.get('gpu', '')} {row.get('gpu_canonical_id', '')}"


def _beside(row: Row, text: str, nodes: int, number_beside: int) -> int:
    """GPUs of all by a number beside machines in the column ``gpus``."""
    counts = of_all(_named(row), nodes, number_beside)
    if len(counts) > 1 and not re.search(r"\btotal\b", text, re.IGNORECASE):
        either = " or ".join(map(str, counts))
        raise SkipRowError(f"gpus {text!r} may be {either} GPUs: write {counts[0]} ({nodes} nodes), or {counts[-1]}")
    return number_beside if number_beside in counts else counts[0]
