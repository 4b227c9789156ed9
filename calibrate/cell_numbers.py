"""The number in one cell: its column's names and units around it, groups of thousands, powers; no table, no run.

Read are ``8182.5``, groups of thousands (``8,182`` in columns of counts and speeds, ``1,234,567`` everywhere), "about"
(``~``) and a spread (``± 50``) of what was measured, ``12.5k`` of a speed, and ``8k`` of a length where it is a power
of two (8,192). A unit is that of the column, or one that is turned into it: a speed may be of a minute, an hour or a
day, a step's time steps of a second or a minute, and a network's bytes or links are bits.
"""

from __future__ import annotations

import math
import re

from tunecast.model.units import HOUR_S, MINUTE_S

SPEEDS = ("tokens_per_s", "tokens_per_s_per_gpu")
MEASURED = (*SPEEDS, "samples_per_s", "step_time_s", "peak_mem_gib")
WHOLE = ("seq_len", "micro_batch", "grad_accum", "global_batch", "gpus", "rank")
"""Columns of counts."""
UNGROUPED = (*SPEEDS, "seq_len", "mean_tokens", "global_batch", "gpus")
"""Columns in which a comma groups thousands: elsewhere it may be that of decimals."""
SECOND = r"s(?:ec(?:onds?|s)?)?"
EACH = r"(?: ?(?:/|per|on each|each) ?(?:gpu|device|card|rank))"
TOKENS_PER_S = rf"(?:t|tok|toks|tokens?)? ?(?:/|per) ?{SECOND}|tps"
OF_ALL = r"(?:in )?total|overall|aggregated?|(?:on|across|over) all (?:gpus|cards|devices)"
STEP = r"(?: ?(?:/|per) ?(?:it|iter|iteration|(?:optimi[sz]er |training )?step))?"
SAMPLES = r"(?:samples?|seqs?|sequences?|examples?)"
UNITS = {
    "seq_len": rf"(?:tokens?|tok)(?: ?(?:/|per) ?{SAMPLES})?",
    "mean_tokens": rf"(?:tokens?|tok)(?: ?(?:/|per) ?{SAMPLES})?",
    "micro_batch": rf"{SAMPLES}?{EACH}|{SAMPLES}",
    "grad_accum": r"(?:micro[- ]?)?(?:steps?|batches)|x",
    "global_batch": SAMPLES,
    "gpus": r"x|gpus?|cards?|devices?|accelerators?|gcds?",
    "tokens_per_s": rf"(?:{TOKENS_PER_S})?\s*(?:{OF_ALL}|\((?:{OF_ALL})\))|{TOKENS_PER_S}",
    "tokens_per_s_per_gpu": rf"(?:{TOKENS_PER_S}){EACH}?|TGS",
    "step_time_s": SECOND + STEP,
    "peak_mem_gib": "GiB",
    "samples_per_s": rf"{SAMPLES}? ?(?:/|per) ?{SECOND}",
}
"""Units that may stand behind a column's numbers: its own."""
FRACTIONAL = (*MEASURED, "mean_tokens", "total_time_h", "total_tokens_or_steps", "internode_gbps", "params_b")
"""Columns whose numbers have decimals."""
DECIMAL_COMMA = re.compile(r"(?<![\d.,])(\d+),(\d+)(?![\d.,])")
POINTS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\.\d{3}){2,}(?![\d.])|(?:\.\d{3})+(?=,\d))")
"""Thousands between points that can be nothing else: two groups, or a comma behind one."""
COUNTED = {
    "seq_len": "tokens",
    "mean_tokens": "tokens",
    "micro_batch": "samples of one GPU",
    "grad_accum": "micro-batches",
    "global_batch": "samples of all GPUs",
    "gpus": "GPUs",
    "tokens_per_s": "tokens per second of all GPUs",
    "tokens_per_s_per_gpu": "tokens per second of one GPU",
    "step_time_s": "seconds",
    "peak_mem_gib": "GiB",
    "samples_per_s": "samples per second",
    "internode_gbps": "Gbit/s",
}
"""What a column's number counts, in words."""
NAMES = {
    "seq_len": (
        r"max|packed to|cutoff[ _]len|block[ _]size|(?:max[ _]?)?(?:(?:seq(?:uence)?|model)[ _]?)?len(?:gth)?"
        r"|(?:ctx|context)(?:[ _]len(?:gth)?)?"
    ),
    "micro_batch": r"(?:per[ _-]device[ _-])?(?:train[ _-])?(?:micro[ _-]?)?batch(?:[ _-]?size)?|m?bs",
    "grad_accum": r"gas?|accumulate[ _]grad[ _]batches|(?:gradient|grad)[ _-]accum(?:ulation)?(?:[ _-]steps)?",
    "global_batch": r"gbs|(?:global|effective|total)[ _-]batch(?:[ _-]size)?",
}
"""What a column's number may be called in its own cell."""
REMARKS = re.compile(
    r"\s*\((?:max(?:imum)?|effective|total|avg|average|mean|median|steady(?: state)?|(?:avg|average|mean|median) of \d+"
    r"(?: steps?)?)\)$",
    re.IGNORECASE,
)
"""What a bracket behind a number may say of it."""
TIMES_SIGN = ("gpus", "grad_accum", "micro_batch")
"""Columns whose count may have a times sign before it: ``x8``."""
BEHIND_LENGTH = r"\s*(?:\((?:{0})\)|\b(?:{0}))\s*$".format(
    r"max(?:imum)?|ctx|context(?: window| len(?:gth)?)?|(?:samples |sequences )?packed"
)
"""What a length may be called behind it."""
ONE = {"grad_accum": r"no|1 \((?:none|no|off|no accumulation)\)"}
"""Words for 1."""
TIMES = {"k": 1e3, "m": 1e6}
THOUSANDS = "[, '\u2019_\u2009\u00a0\u202f]"
POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
SPANS_S = {"min": MINUTE_S, "hou": HOUR_S, "hr": HOUR_S, "h": HOUR_S, "day": 24 * HOUR_S}
LONGER = re.compile(
    rf"(?P<n>\d[\d.,]*) ?(?P<power>[kMB]?) ?(?:(?:tok|toks|tokens?)(?P<each>{EACH})? ?)?(?:/|\bper) ?"
    rf"(?:(?P<min>min)(?:ute)?|(?P<hou>hou)r|(?P<hr>hr)|(?P<h>h)|(?P<day>day))(?P<each2>{EACH})?",
    re.IGNORECASE,
)
"""Tokens of a minute, an hour or a day."""
STEPS_OFTEN = re.compile(
    rf"(?P<n>\d[\d.]*) ?(?:its?|iter(?:ation)?s?|steps?) ?(?:/|per) ?(?:(?P<minute>min(?:ute)?)|{SECOND})",
    re.IGNORECASE,
)
"""Steps of a second or a minute."""
SAMPLES_A_MINUTE = re.compile(rf"[~\u2248]?\s*(\d[\d.,]*) ?{SAMPLES} ?(?:/|per) ?min(?:ute)?", re.IGNORECASE)
NETWORK = "internode_gbps"
LINKS_GBPS = {"FDR": 56.0, "EDR": 100.0, "HDR": 200.0, "NDR": 400.0, "XDR": 800.0}
"""InfiniBand's generations: what one link of four lanes sends."""
NETWORK_UNITS = {
    r"G|Gig|GbE|GE|[Gg]b(?:it)?s?(?:ps|/s(?:ec)?| ?per ?s(?:ec(?:ond)?)?)?|Gbit": 1.0,
    r"GB(?:ps|/s(?:ec)?)|G(?:iga)?[Bb]ytes?/s": 8.0,
    r"T|[Tt]b(?:it)?s?(?:ps|/s(?:ec)?)": 1e3,
    r"TB(?:ps|/s(?:ec)?)": 8e3,
}
"""Units of a network, and how many Gbit/s each is: a small b is a bit, a large one eight."""
NETWORK_WORDS = re.compile(
    r"\b(?:infiniband|ib|ethernet|roce(?: ?v[12])?|rdma|efa(?:v[1-3])?|mellanox|connectx-?\d|cx-?\d"
    r"|links?|nics?|ports?|rails?"
    r"|(?:per|each) (?:node|machine|server|host))\b|/ ?(?:node|machine|server|host)\b|[()\[\],]",
    re.IGNORECASE,
)
"""Words of a network that say nothing of its speed."""
EUROPEAN = re.compile(r"[1-9]\d{0,2}\.\d{3}")
"""2.700 is two thousand seven hundred in half of Europe."""


class NumberError(ValueError):
    """Why a text is no number of its column, after ``column 'text'``."""


def number_of(column: str, text: str) -> float:
    """The number that a cell says; NaN for none. Raises `NumberError` where it may be two, or of another column."""
    if re.fullmatch(ONE.get(column, "(?!)"), text, re.IGNORECASE):
        return 1.0
    if column == NETWORK:
        return _network_gbps(text)
    text = text if column == "rank" else REMARKS.sub("", text)
    seconds = _seconds_of_step(text) if column == "step_time_s" else None
    if seconds is not None:
        return seconds
    plain = _bare(column, text)
    minutely = SAMPLES_A_MINUTE.fullmatch(plain) if column == "samples_per_s" else None
    if minutely:
        return _decimal(_ungrouped("tokens_per_s", minutely[1])) / MINUTE_S
    if column in WHOLE and EUROPEAN.fullmatch(plain):
        raise NumberError(f"may be {float(plain):g} or {plain.replace('.', '')}: write it without a point")
    longer = LONGER.fullmatch(plain) if column in SPEEDS else None
    each = longer is not None and (longer["each"] or longer["each2"])
    if column == "tokens_per_s" and (each or re.search(rf"{EACH}$|\bTGS$", plain, re.IGNORECASE)):
        raise NumberError("is the speed of one GPU: write it into tokens_per_s_per_gpu")
    if column == "seq_len" and re.match(r"[~\u2248]", plain):
        raise NumberError("is about a length: write the one that samples were cut or padded to")
    if longer:
        span_s = next(length_s for name, length_s in SPANS_S.items() if longer[name])
        return _decimal(_ungrouped(column, longer["n"])) * POWERS[longer["power"].lower()] / span_s
    power = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKM])", plain)
    if power and column == "seq_len":
        return _length(float(power[1])) if power[2] in "kK" else math.nan
    if power and column in SPEEDS:
        return float(power[1]) * TIMES[power[2].lower()]
    return _decimal(_ungrouped(column, plain))


def _seconds_of_step(text: str) -> float | None:
    """A step's time in minutes or milliseconds, or as steps of a second or a minute; None in seconds."""
    minutes = re.fullmatch(rf"([\d.]+) ?min(?:ute)?s?{STEP}", text, re.IGNORECASE)
    if minutes:
        return _decimal(minutes[1]) * MINUTE_S
    often = STEPS_OFTEN.fullmatch(text)
    if often:
        steps = _decimal(often["n"])
        return (MINUTE_S if often["minute"] else 1.0) / steps if steps else math.nan
    milliseconds = re.fullmatch(rf"(.*\d.*?) ?(?:ms|milliseconds?|msecs?){STEP}", text)
    if milliseconds:
        return _decimal(re.sub(r"(?<=\d),(?=\d{3}\b)", "", _bare("step_time_s", milliseconds[1]))) / 1e3
    return None


def with_point(column: str, text: str) -> str:
    """A cell of a table that commas do not separate, its decimal comma a point: ``1,31``, ``2.700,5``.

    Three digits behind a comma may be thousands: of a figure they are read as behind a point, which is refused of a
    speed that may be either; elsewhere, and of ms and MiB, the comma is left.
    """
    if column not in FRACTIONAL:
        return text
    figure = column in MEASURED and not re.search(r"\d\s*m(?:s|i?b|illi|sec)", text, re.IGNORECASE)

    def pointed(found: re.Match[str]) -> str:
        sure = figure or len(found[2]) != 3 or found[1] == "0"
        return f"{found[1]}.{found[2]}" if sure else found[0]

    return DECIMAL_COMMA.sub(pointed, POINTS.sub(lambda found: found[0].replace(".", ""), text))


def why_none(column: str, text: str) -> str:
    """Why a cell is no number above 0, and what to type, behind ``column 'text'``."""
    numbers = re.findall(r"\d+(?:[.,]\d+)*", text)
    if not numbers or text.lstrip().startswith(("-", "\u2212")):
        return "is not a number above 0"
    if len(numbers) > 1:
        one = "one number, the mean" if column in MEASURED else "the one that ran"
        return f"holds {len(numbers)} numbers, {' and '.join(numbers)}: write {one}"
    (number,) = numbers
    comma = re.fullmatch(r"(\d+),(\d+)", number)
    if comma:
        return _comma(column, comma[1], comma[2])
    rest = text.replace(number, " ", 1).strip()
    if rest and _decimal(number) > 0:
        unit = f", in {COUNTED[column]}" if column in COUNTED else ""
        return f"holds {rest!r} beside {number}: write the number alone{unit}"
    return "is not a number above 0"


def _comma(column: str, before: str, behind: str) -> str:
    """What a comma that groups no thousands leaves open, or that decimals have a point."""
    if column in WHOLE:
        return "has a comma: write a whole number without one"
    if len(behind) == 3 and before != "0":
        return f"may be {before}.{behind} or {before}{behind}: write it without a comma"
    return f"has a decimal comma: write {before}.{behind}"


def may_be_thousands(column: str, text: str) -> bool:
    """Whether a speed is written as half of Europe writes one that is 1,000 times as high."""
    return column in (*SPEEDS, "samples_per_s") and EUROPEAN.fullmatch(_bare(column, text.strip())) is not None


def _bare(column: str, text: str) -> str:
    """A number without its name, its unit and what says that it is about so."""
    plain = _rank(text) if column == "rank" else text
    plain = re.sub(r"^[x\u00d7*]\s*(?=\d)", "", plain) if column in TIMES_SIGN else plain
    if column == "seq_len":
        plain = re.sub(BEHIND_LENGTH, "", plain, flags=re.IGNORECASE)
    if column in NAMES:
        plain = re.sub(rf"^(?:{NAMES[column]})(?:\s*[=:]\s*|\s+(?=\d))", "", plain, flags=re.IGNORECASE)
    of_unit = rf"(?:%|{UNITS[column]})?" if column in MEASURED else ""
    spread = rf"\s*\(?(?:\u00b1|\+/-)\s*[\d.,]+\s*{of_unit}\)?$" if column in MEASURED else "(?!)"
    plain = re.sub(spread, "", plain, flags=re.IGNORECASE)
    if column in UNITS:
        plain = re.sub(rf"\s*(?:(?:{UNITS[column]})|\((?:{UNITS[column]})\))\s*$", "", plain, flags=re.IGNORECASE)
    if column in (*MEASURED, "mean_tokens"):
        plain = re.sub(r"^(~|\u2248|ca\.?|about|approx\.?)\s*", "", plain)
    return re.sub(spread, "", plain, flags=re.IGNORECASE)


def _length(thousands: float) -> float:
    """A length in k: a power of two is one in 1,024, any other may be one in 1,000."""
    tokens = thousands * 1024
    if tokens == int(tokens) and int(tokens) & (int(tokens) - 1) == 0:
        return tokens
    raise NumberError(f"may be {thousands * 1000:g} or {tokens:g}: write which")


def _network_gbps(text: str) -> float:
    """What one machine sends, in Gbit/s: ``400 Gb/s``, ``50 GB/s``, ``8x400``, ``8x HDR``; NaN for none."""
    plain = re.sub(r"\s+", " ", NETWORK_WORDS.sub(" ", text)).strip()
    names = "|".join(LINKS_GBPS)
    product = re.fullmatch(r"(\d+) (\d+) ?[x\u00d7*] ?(\d+)", plain)
    if product and int(product[1]) == int(product[2]) * int(product[3]):
        return float(product[1])
    plain = re.sub(r"^(\S.*[A-Za-z]) ?[x\u00d7*] ?(\d+)$", r"\2x\1", plain)
    found = re.fullmatch(
        rf"(?:(?P<links>\d+) ?[x\u00d7*] ?)?(?P<name>(?i:{names}))?[ -]?(?P<n>\d+(?:\.\d+)?)? ?(?P<unit>[A-Za-z/ ]*?)"
        rf" ?(?P<behind>(?i:{names}))?",
        plain,
    )
    if found is None:
        return math.nan
    name, links = (found["name"] or found["behind"] or "").upper(), found["links"]
    unit = found["unit"].strip()
    if found["n"] is None and (unit or not name):
        return math.nan
    of_link = found["n"] is None or (found["name"] and not unit)
    if of_link and links is None:
        one = float(found["n"] or LINKS_GBPS[name])
        raise NumberError(f"says {one:g} Gbit/s of a link, and not how many a machine has: write {one:g} or 8x{one:g}")
    if found["n"] is None:
        return int(links) * LINKS_GBPS[name]
    gbps = next((value for form, value in NETWORK_UNITS.items() if re.fullmatch(form, unit)), None if unit else 1.0)
    return math.nan if gbps is None else float(found["n"]) * gbps * int(links or 1)


def _ungrouped(column: str, plain: str) -> str:
    grouped = re.fullmatch(rf"\d{{1,3}}(?:{THOUSANDS}\d{{3}})+(?:\.\d+)?", plain)
    if grouped and (column in UNGROUPED or len(re.findall(THOUSANDS, plain)) > 1):
        return re.sub(THOUSANDS, "", plain)
    return plain


def _decimal(plain: str) -> float:
    try:
        return float(plain)
    except ValueError:
        return math.nan


def _rank(text: str) -> str:
    """A rank without its name and without the alpha beside it (``r=16``, ``16 (alpha 32)``, ``16/32``, ``r16a32``)."""
    both = re.fullmatch(r"r\s*=\s*(?:alpha|\u03b1|a)\s*=\s*(\d+)", text, flags=re.IGNORECASE)
    plain = both[1] if both else re.sub(r"\s*[,;]?\s*\(?(?:use[_ ])?rs-?lora\)?$", "", text, flags=re.IGNORECASE)
    plain = re.sub(
        r"^(?:lora[_ ])?(?:alpha|\u03b1|a)\s*[=:]?\s*\d+\s*[\s,;/]\s*(?=[a-z])", "", plain, flags=re.IGNORECASE
    )
    plain = re.sub(r"^(lora[ _]?)?(rank|r|dim)\s*[=:]?\s*", "", plain, flags=re.IGNORECASE)
    plain = re.sub(r"\s*[,;]\s*(lora[_ ])?dropout\s*[=:]?\s*[\d.]+$", "", plain, flags=re.IGNORECASE)
    alpha = (
        r"(\s*[(,;/]?\s*(and |with )?(lora[_ ])?(alpha|\u03b1|a(?=\s*=|\d))\s*[=:]?\s*"
        r"(\d+(\s*[x*]?\s*r(ank)?)?|r(ank)?)\s*\)?|\s*/\s*\d+)$"
    )
    return re.sub(alpha, "", plain, flags=re.IGNORECASE)


def sequences_of(text: str, seq_len: int) -> float | None:
    """Sequences of a batch that a cell counts in tokens (``4M tokens``, ``524,288 tokens``); None where it does not.

    A million is 10^6 or, as papers that count in powers of two mean it, 2^20: whichever makes whole sequences; NaN
    where neither does, or both do.
    """
    stated = re.fullmatch(r"[~\u2248]?\s*([\d.,]+)\s*([kKM]?)\s*(?:tokens?|tok)", text.strip())
    if stated is None:
        return None
    value = _decimal(_ungrouped("global_batch", stated[1]))
    powers = {"": (1.0,), "k": (1e3, 2.0**10), "m": (1e6, 2.0**20)}[stated[2].lower()]
    whole = {value * power / seq_len for power in powers if value * power % seq_len == 0}
    return whole.pop() if len(whole) == 1 else math.nan
