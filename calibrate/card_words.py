"""Words beside a card's name: of its bus, its power, its memory's kind, bridges that it lacks, and MI250X boards.

What is said of the bus and the power is taken where it is the card's own by the catalog; another number of lanes or of
watts is another speed. A board of MI250X is two dies (GCDs), each a GPU of its own to torch and in the catalog, so that
a number of MI250X alone may be either (AMD's data sheet of the MI250X; `rocm-smi` lists the dies).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tunecast.calibrate.run_table import SkipRowError
from tunecast.catalogs.gpus import Gpu, load_gpus

NO_NVLINK = r"\b(?:no|without|w/o)\s+nv-?link(?:\s+bridges?)?\b"
BUS = r"\bpcie\s*(?:gen\s*(?P<gen>[345])(?:\.0)?|(?P<version>[345])\.0)(?:\s*x\s*(?P<lanes>1|4|8|16))?(?![\w.])"
LIMIT = r"(?:power[ -]limit|tdp|tgp)"
WATTS = rf"(?<![\w.])(?:{LIMIT}(?: of)?\s*)?(?P<watts>\d{{2,4}})\s?W(?:atts?)?(?:\s+{LIMIT})?\b"
SPARK = r"\bdgx[ -]spark\b[\s,]*\(?\s*(?:nvidia\s+)?gb10\b\)?|\bgb10\b[\s,]*\(?\s*(?:nvidia\s+)?dgx[ -]spark\b\)?"
"""A DGX Spark and the name of its chip."""
SPARK_MEMORY = r"(?<=\bdgx spark)[\s,]*\(?\s*128 ?gb\b(?: unified(?: memory)?)?\)?"
"""The memory that every DGX Spark has, shared by its processor and its GPU."""
HBM2E = r"\bhbm2e\b"
H100_OF_HBM2E = ("h100-pcie-80gb", "h100-hbm2e-96gb")
"""The H100s whose memory is HBM2e (NVIDIA's H100 data sheet of 2022; the 96 GB card's driver name)."""
DIE = r"(?:gcds?|dies?)"
MI250X = r"(?:amd )?(?:instinct )?mi250xs?"
DIES = tuple(
    re.compile(form, re.IGNORECASE)
    for form in (
        (
            rf"(?:(?P<boards>\d{{1,3}}) ?[x*]? ?)?{MI250X}(?: (?:boards?|cards?|modules?))?,? ?\(?"
            rf"(?P<dies>\d{{1,4}}) ?x? ?{DIE}\)?"
        ),
        rf"(?P<dies>\d{{1,4}}) ?[x*]? ?{MI250X} \(?{DIE}\)?",
        rf"(?P<dies>\d{{1,4}}|one|single|a) ?[x*]? ?{DIE} of (?:(?:an?|one|(?P<boards>\d{{1,3}}) ?[x*]?) )?{MI250X}",
        rf"{MI250X} \(?(?:gcd|die)\)?",
    )
)


def as_named(text: str) -> str:
    """A card's text without what is said of its bus, its power and bridges that it lacks."""
    plain = re.sub(rf"[\s,]*\(?\s*{NO_NVLINK}\s*\)?", " ", text, flags=re.IGNORECASE)
    plain = re.sub(BUS, "PCIe", plain, flags=re.IGNORECASE)
    plain = re.sub(rf"[\s,]*\(?\s*{WATTS}\s*\)?", " ", plain)
    plain = re.sub(SPARK, "DGX Spark", plain, flags=re.IGNORECASE)
    plain = re.sub(SPARK_MEMORY, "", plain, flags=re.IGNORECASE)
    return re.sub(r"\(\s*\)", " ", plain).strip(" ,")


def lacks_nvlink(text: str) -> bool:
    """Whether a card's text says that no NVLink joins it to others."""
    return re.search(NO_NVLINK, text, re.IGNORECASE) is not None


def check_said(text: str, gpu_id: str) -> None:
    """What a text says beside a card's name is so of that card; raises SkipRowError."""
    gpu: Gpu = load_gpus()[gpu_id]
    bus, power = re.search(BUS, text, re.IGNORECASE), re.search(WATTS, text)
    if bus is not None:
        gen, lanes = int(bus["gen"] or bus["version"]), int(bus["lanes"] or gpu.pcie_lanes or 0)
        if (gen, lanes) != (gpu.pcie_gen, gpu.pcie_lanes):
            raise SkipRowError(
                f"gpu {text!r}: {bus[0]!r} is not the PCIe {gpu.pcie_gen}.0 x{gpu.pcie_lanes} of {gpu_id}, and another "
                "bus is not built"
            )
    if power is not None and float(power["watts"]) != gpu.tdp_w:
        own = "" if gpu.tdp_w is None else f" of {gpu.tdp_w:g} W"
        raise SkipRowError(f"gpu {text!r}: {power['watts']} W is not the power limit{own} of {gpu_id}: not built")
    if lacks_nvlink(text) and gpu.link_kind not in ("none", "nvlink-bridge"):
        raise SkipRowError(f"gpu {text!r} contradicts itself: {gpu_id} is joined by {gpu.link_kind}")


def by_memory_kind(text: str, ids_of: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    """Ids that a text may mean; of H100s those whose memory is of the kind that it names, of any size where it names
    none."""
    if not re.search(r"\bh100\b", text, re.IGNORECASE) or not re.search(HBM2E, text, re.IGNORECASE):
        return ids_of(text)
    ids = ids_of(re.sub(rf"[\s-]*{HBM2E}", "", text, flags=re.IGNORECASE))
    found = tuple(gpu_id for gpu_id in ids if gpu_id in H100_OF_HBM2E)
    if ids and not found:
        raise SkipRowError(f"gpu {text!r} contradicts itself: H100s with HBM2e are {' and '.join(H100_OF_HBM2E)}")
    sized = re.search(r"\d ?g(?:i?b)?\b|\bpcie\b", text, re.IGNORECASE)
    return found if sized or not found else H100_OF_HBM2E


def dies_in(text: str) -> tuple[int | None, bool]:
    """(number of dies that a text on MI250X says, whether it is on dies); raises SkipRowError where boards and dies
    beside them contradict each other."""
    plain = re.sub(r"\s+", " ", text.replace("\u00d7", "x")).strip()
    said = next((match.groupdict() for form in DIES if (match := form.fullmatch(plain))), None)
    if said is None:
        return None, False
    word = said.get("dies")
    dies = None if word is None else int(word) if word.isdigit() else 1
    boards = said.get("boards")
    if boards is not None and dies != 2 * int(boards):
        raise SkipRowError(f"gpu {text!r} contradicts itself: {boards} boards of MI250X are {2 * int(boards)} GCDs")
    return dies, True


def check_dies(row: Mapping[str, str]) -> None:
    """A number of MI250X is one of dies; raises SkipRowError where it may be one of boards."""
    text, gpus = row.get("gpu", ""), row.get("gpus", "")
    of_dies = re.search(rf"\b{DIE}\b", gpus, re.IGNORECASE)
    named = re.search(r"\bmi250x", f"{text} {row.get('gpu_canonical_id', '')}", re.IGNORECASE)
    if of_dies and not named:
        raise SkipRowError(f"gpus {gpus!r} counts dies, which are GPUs of their own on MI250X boards alone: write GPUs")
    by_id = re.search(r"\bmi250x-\d+gb\b", text, re.IGNORECASE) or (
        row.get("gpu_canonical_id") and not re.search(r"\d\s*[x*]|^\s*\d", text)
    )
    if not named or of_dies or by_id or re.search(rf"\b{DIE}\b", text, re.IGNORECASE):
        return
    raise SkipRowError(
        f"gpu {text!r} may count boards, each of which is two GPUs (GCDs): write the number of GCDs, as 8 GCDs of "
        "MI250X"
    )
