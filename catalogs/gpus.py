"""GPUs as torch sees them, by any of their names.

All peaks are dense, with fp32 accumulation, which is what training uses. An empty fact is None (or,
among the peaks, absent): a GPU without a bf16 entry has no bf16 hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from tunecast.catalogs.errors import InputError, UnknownNameError
from tunecast.catalogs.refused import refuse_hardware
from tunecast.catalogs.tables import GIB, GIGA, MIB, TERA, Row, integer, names, number, read_rows

PEAK_COLUMNS = {
    "fp32": "fp32_tflops",
    "tf32": "tf32_tflops",
    "fp16": "fp16_fp32acc_tflops",
    "bf16": "bf16_fp32acc_tflops",
    "fp8": "fp8_tflops",
    "int8": "int8_tops",
}
"""Our dtype names and the columns that hold their dense peaks."""

MEMORY_TOLERANCE = 0.12
"""How far the memory that a device reports may be from the catalog's: ECC takes 6% off a Quadro or an
A10, torch reports up to 3% less than nvidia-smi, and two cards that share a name differ by 17% or more."""

_FORM_FACTORS = frozenset({"pcie", "sxm", "sxm2", "sxm4", "sxm5", "nvl"})
_VENDOR_WORDS = ("nvidia", "geforce", "tesla", "amdinstinct", "amd", "instinct", "radeon")


RESIDENT_THREADS = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}
"""Most threads on one multiprocessor, by compute capability (CUDA programming guide, table of technical
specifications)..."""
USUAL_RESIDENT_THREADS = 2048
"""...that of all others: 7.0, 8.0, 9.0, 10.x; and of an AMD compute unit (32 waves of 64 lanes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device as torch sees it (one die of an MI250X), from the datasheet."""

    id: str
    nvml_names: tuple[str, ...]
    aliases: tuple[str, ...]
    vendor: str
    architecture: str
    compute_capability: str
    """NVIDIA: "8.0"; AMD: the gfx target."""
    sm_count: int | None
    usable_bytes: int | None
    """What torch can allocate from; None where nobody has reported it."""
    usable_basis: str
    """torch (reported by `total_memory`), estimated (from `usable_from`) or unknown."""
    usable_from: str
    """The sibling card that an estimate comes from, else empty."""
    memory_marketing_gb: float
    bandwidth_bytes_per_s: float
    l2_bytes: int | None
    peaks: dict[str, float] = field(hash=False)
    """Dense FLOP/s (int8: OP/s) by dtype."""
    flops_per_sm_clock_fp16: float | None
    boost_clock_mhz: float | None
    pcie_gen: int | None
    pcie_lanes: int | None
    nvlink_bytes_per_s: float
    """Both directions together, per GPU; 0 without a link."""
    link_kind: str
    """nvlink, nvlink-bridge (only where a bridge is mounted: rarely in a cloud), infinity-fabric, none."""
    tdp_w: float | None
    launch_year: int | None
    source: str
    source_date: str
    note: str

    @property
    def major(self) -> str:
        """Major compute capability of NVIDIA's cards, the gfx target of AMD's."""
        return self.compute_capability.split(".")[0]

    @property
    def processor_hz(self) -> float | None:
        """Clocks of all multiprocessors together in a second, at their boost clock; None where one is not known."""
        return self.sm_count * self.boost_clock_mhz * 1e6 if self.sm_count and self.boost_clock_mhz else None

    @property
    def resident_threads(self) -> int | None:
        """Threads that the whole device holds at once; None where its multiprocessors are not known."""
        most = RESIDENT_THREADS.get(self.compute_capability, USUAL_RESIDENT_THREADS)
        return None if self.sm_count is None else self.sm_count * most

    @property
    def generation(self) -> str:
        """Cards whose processors and memory are alike: 8.0 (A100), 8.6 and 8.9 have little in common but their major
        capability, 10.x and 12.x one chip family each."""
        return self.major if self.major in ("10", "12") else self.compute_capability


@cache
def load_gpus() -> dict[str, Gpu]:
    """All GPUs by id, in the file's order."""
    return {row["canonical_id"]: _gpu(row) for row in read_rows("gpus.csv")}


def training_dtype(gpu: Gpu) -> str:
    """The half precision that this GPU trains in: bf16, or fp16 on cards without bf16 hardware."""
    return "bf16" if "bf16" in gpu.peaks else "fp16"


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`: an id, an NVML or torch name, or an everyday name such as 4090 or A10G.

    Raises UnknownNameError for a name in no catalog and InputError, with the choices, for one that
    several cards share. An accelerator that is no GPU, such as a TPU, raises NotSupportedError.
    """
    gpus = load_gpus()
    exact = gpus.get(name.strip().lower())
    if exact is not None:
        return exact
    ids = ids_called(name)
    if not ids:
        refuse_hardware(name)
        _refuse_several(name)
        raise UnknownNameError("GPU", name, _meant_by(name), hint="`tunecast catalog gpus` lists all.")
    if len(ids) > 1:
        raise InputError(f"GPU {name!r} is ambiguous: say which of {', '.join(ids)}.")
    return gpus[ids[0]]


def _refuse_several(name: str) -> None:
    """Raises InputError for a card with how many of it, or for several cards, in one name."""
    counted = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*(.+)|(.+):(\d+))\s*", name, re.IGNORECASE)
    if counted and ids_called(card := counted[2] or counted[3]):
        raise InputError(
            f"GPU {name!r} is several of one card: type {card} for it and --num-gpus {counted[1] or counted[4]}."
        )
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and all(map(ids_called, parts)):
        raise InputError(f"GPU {name!r} is several cards: type {' '.join(f'--gpu {part}' for part in parts)}.")


def ids_called(name: str) -> tuple[str, ...]:
    """Ids by driver name, then by everyday name; each as written, then without the vendor's words."""
    for index in (_names_index(), _everyday_index()):
        for key in (_key(name), _without_vendor(name)):
            if key in index:
                return index[key]
    return ()


def match_device(name: str, memory_bytes: int | None = None, sm_count: int | None = None) -> Gpu | None:
    """The catalog's row for a device that reports this name, memory and SM (or CU) count.

    Cards that share a name (RTX 3080, 4060 Ti, 5060 Ti) are told apart by SMs and memory. None where
    no row agrees: a variant that is not in the catalog, a MIG slice, or two rows that cannot be told apart.
    """
    gpus = load_gpus()
    candidates = [gpus[i] for i in _names_index().get(_key(name), ())]
    fitting = [g for g in candidates if _sm_agrees(g, sm_count) and _memory_agrees(g, memory_bytes)]
    return fitting[0] if len(fitting) == 1 else None


def _sm_agrees(gpu: Gpu, sm_count: int | None) -> bool:
    return sm_count is None or gpu.sm_count is None or gpu.sm_count == sm_count


def _memory_agrees(gpu: Gpu, memory_bytes: int | None) -> bool:
    if memory_bytes is None:
        return True
    expected = gpu.usable_bytes or gpu.memory_marketing_gb * GIB
    return abs(memory_bytes / expected - 1) <= MEMORY_TOLERANCE


def _key(name: str) -> str:
    """A name without case, blanks and punctuation: "RTX 4090" and "rtx-4090" are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _without_vendor(name: str) -> str:
    key = _key(name)
    for word in _VENDOR_WORDS:
        key = key.removeprefix(word)
    return key


def _index(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    index: dict[str, list[str]] = {}
    for key, gpu_id in pairs:
        if gpu_id not in index.setdefault(key, []):
            index[key].append(gpu_id)
    return {key: tuple(ids) for key, ids in index.items()}


@cache
def _names_index() -> dict[str, tuple[str, ...]]:
    """What drivers call a card, with and without the vendor, and its id."""
    spelled = [(name, g.id) for g in load_gpus().values() for name in (g.id, *g.nvml_names)]
    return _index([(form(name), gpu_id) for name, gpu_id in spelled for form in (_key, _without_vendor)])


@cache
def _everyday_index() -> dict[str, tuple[str, ...]]:
    """What people call a card: its aliases, and its id with the form factor, memory or RTX left out."""
    spelled = [(name, g.id) for g in load_gpus().values() for name in (*g.aliases, *everyday_names(g.id))]
    return _index([(form(name), gpu_id) for name, gpu_id in spelled for form in (_key, _without_vendor)])


def everyday_names(gpu_id: str) -> list[str]:
    """Short forms of an id: a100-sxm4-80gb gives a100, a100-80gb, a100-sxm4, a100-sxm; rtx-4090-24gb gives 4090."""
    *model, memory = gpu_id.split("-")
    form = next((part for part in model if part in _FORM_FACTORS), "")
    base = "-".join(part for part in model if part not in _FORM_FACTORS)
    bases = [base, base.removeprefix("rtx-"), base.removeprefix("quadro-")]
    forms = ["", form, "sxm" if form.startswith("sxm") else form]
    short = {"-".join(part for part in (b, f, m) if part) for b in bases for f in forms for m in ("", memory)}
    return sorted(short, key=lambda name: (len(name), name))


def _known_names() -> list[str]:
    gpus = load_gpus().values()
    spelled = (name for g in gpus for name in (g.id, *g.nvml_names, *g.aliases, *everyday_names(g.id)))
    return list({name.lower(): name for name in spelled}.values())


def _meant_by(name: str) -> list[str]:
    """Names that a slip of the keyboard may have meant: with a word or a number in common, if it has words.

    Numbers alone make ``foo9000`` and A6000 look alike.
    """
    words = set(re.findall(r"[a-z]+|[0-9]+", name.lower()))
    if not any(word.isalpha() for word in words):
        return _known_names()
    return [known for known in _known_names() if words & set(re.findall(r"[a-z]+|[0-9]+", known.lower()))]


def _gpu(row: Row) -> Gpu:
    usable_gib = number(row["usable_gib"])
    l2_mib = number(row["l2_mb"])
    return Gpu(
        id=row["canonical_id"],
        nvml_names=names(row["nvml_names"]),
        aliases=names(row["aliases"]),
        vendor=row["vendor"],
        architecture=row["architecture"],
        compute_capability=row["compute_capability"],
        sm_count=integer(row["sm_count"]),
        usable_bytes=None if usable_gib is None else round(usable_gib * GIB),
        usable_basis=row["usable_basis"],
        usable_from=row["usable_from"],
        memory_marketing_gb=float(row["memory_marketing_gb"]),
        bandwidth_bytes_per_s=float(row["memory_bandwidth_gbs"]) * GIGA,
        l2_bytes=None if l2_mib is None else round(l2_mib * MIB),
        peaks={dtype: float(row[col]) * TERA for dtype, col in PEAK_COLUMNS.items() if row[col]},
        flops_per_sm_clock_fp16=number(row["flops_per_sm_clk_fp16"]),
        boost_clock_mhz=number(row["boost_clock_mhz"]),
        pcie_gen=integer(row["pcie_gen"]),
        pcie_lanes=integer(row["pcie_lanes"]),
        nvlink_bytes_per_s=(number(row["nvlink_gbs"]) or 0.0) * GIGA,
        link_kind=row["link_kind"],
        tdp_w=number(row["tdp_w"]),
        launch_year=integer(row["launch_year"]),
        source=row["source"],
        source_date=row["source_date"],
        note=row["note"],
    )
