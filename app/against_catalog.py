"""A record against the catalog: what the device did, what its datasheet says, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tunecast.calibrate.fit_rates import modules_passed
from tunecast.calibrate.fit_trials import walk_operation
from tunecast.calibrate.stats import UNSTABLE_SPREAD_FRAC, spread_frac
from tunecast.model.priors import link_bytes_per_s, pcie_bytes_per_s
from tunecast.model.units import DTYPE_BYTES, GIGA, MEGA, MIB, MICROSECOND_S, TERA, gib
from tunecast.tables import DASH, digits, plain_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tunecast.catalogs.gpus import Gpu

Trial = Mapping[str, Any]

ORDINARY_SHARE = {"matrix": 0.70, "lasting": 0.35, "matrix4": 0.50, "attention": 0.50, "bandwidth": 0.80,
                  "transfer": 0.75, "link": 0.60, "fact": 0.90, "clock": 0.90}  # fmt: skip
"""Below this share of the catalog a healthy card seldom is. Matrix: the best shapes reach 80 to 87% on
A100 and H100 (Bekman, ml-engineering, mamf-finder). Lasting: a T4 at its 70 W keeps up 24 of 65 TFLOP/s (NVIDIA
developer forum 264462), an H200 0.68. With 4-bit weights the dequantization comes on top.
Attention: 50 to 73% (FlashAttention-2, Dao 2023, section 4). Bandwidth: copies reach 85 to 93%
(BabelStream). Transfer: pinned copies reach 80 to 90% of the link (NVIDIA bandwidthTest). Link: rings
reach 67 to 82% of one direction (NVIDIA/nccl-tests issues 149 and 212). Fact: memory,
power limit and clock are as sold. These choose a word in a table and enter no forecast."""
ABOVE_CATALOG = 1.03
"""Above this the catalog, the identification or the timer is wrong: under load clocks boost a little above the
datasheet's. The highest clock that a card names for itself may be far above (1,980 MHz of an H100 SXM, whose peak is
that of 1,830), and says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One measured quantity and its catalog value, in `unit`."""

    name: str
    unit: str
    measured: float
    catalog: float | None
    spread_frac: float | None
    """Standard deviation of one repetition over the median (from the MAD); None for what was read, not timed."""
    verdict: str

    @property
    def share(self) -> float | None:
        """Measured over catalog."""
        return None if not self.catalog else self.measured / self.catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogComparison:
    """All quantities of one record."""

    record: str
    device: str
    quantities: tuple[Quantity, ...]
    flags: tuple[str, ...]
    outcomes: dict[str, int]
    """Trials by outcome."""

    def as_dict(self) -> dict[str, Any]:
        """The plain JSON form."""
        rows = [asdict(quantity) | {"share": quantity.share} for quantity in self.quantities]
        return {**asdict(self), "schema": "tunecast.against-catalog/1", "quantities": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How the trials of one row become a rate: work over median seconds."""

    name: str
    unit: str
    kind: str
    """Key of `ORDINARY_SHARE`."""
    per_unit: float
    work: Callable[[Mapping[str, Any]], float]
    """Params of a trial to FLOPs, bytes or elements."""
    catalog: Callable[[Gpu, Mapping[str, Any]], float | None]


def gemm_flops(params: Mapping[str, Any]) -> float:
    """2mnk."""
    return 2.0 * float(params["m"]) * float(params["n"]) * float(params["k"])


def grouped_flops(params: Mapping[str, Any]) -> float:
    """2mnk of every expert."""
    return 2.0 * float(params["experts"]) * float(params["rows"]) * float(params["n"]) * float(params["k"])


def causal_attention_flops(params: Mapping[str, Any]) -> float:
    """Half of (scores and values): 2 x batch x heads x length^2 x head_dim; backward 2.5 times that."""
    batch, heads, length, head_dim = (float(params[name]) for name in ("batch", "heads", "length", "head_dim"))
    forward = 2.0 * batch * heads * length**2 * head_dim
    return forward * (2.5 if params["pass"] == "backward" else 1.0)


def other_attention_flops(params: Mapping[str, Any]) -> float:
    """As `causal_attention_flops`, but all pairs under a mask."""
    return causal_attention_flops(params) * (2.0 if params["masked"] else 1.0)


def dequant_bytes(params: Mapping[str, Any]) -> float:
    """Half a byte read and a number of the trial's dtype written per element; the block statistics (under 2%) are left
    out."""
    return (0.5 + DTYPE_BYTES[str(params.get("dtype", "bf16"))]) * float(params["elements"])


def moved_bytes(params: Mapping[str, Any]) -> float:
    """The bytes that the trial names."""
    return float(params["bytes"])


def walked_bytes(params: Mapping[str, Any]) -> float:
    """What the kernels of a walk read and write."""
    return walk_operation(params).bytes


def ring_bytes(params: Mapping[str, Any]) -> float:
    """What crosses every link of a ring: 2 (n - 1) / n of the payload for an all-reduce, half of that for others
    (nccl-tests' bus bandwidth, doc/PERFORMANCE.md)."""
    n, rounds = float(params["world_size"]), 2.0 if params["op"] == "all_reduce" else 1.0
    return rounds * (n - 1.0) / n * float(params["bytes"])


def link(gpu: Gpu, _params: Mapping[str, Any]) -> float | None:
    """One direction of the fastest link between two cards of a machine."""
    return link_bytes_per_s(gpu)


def peak(gpu: Gpu, params: Mapping[str, Any]) -> float | None:
    """Dense peak of the trial's dtype."""
    return gpu.peaks.get(params["dtype"])


def bandwidth(gpu: Gpu, _params: Mapping[str, Any]) -> float | None:
    """Memory bandwidth of the datasheet."""
    return gpu.bandwidth_bytes_per_s


def pcie(gpu: Gpu, params: Mapping[str, Any]) -> float | None:
    """One direction of the card's PCIe link; pageable memory is copied twice, so the link is no measure of it."""
    if not params["pinned"]:
        return None
    return pcie_bytes_per_s(gpu)


def nothing(_gpu: Gpu, _params: Mapping[str, Any]) -> float | None:
    """No catalog value exists."""
    return None


def _tflops(name: str, work: Callable[[Mapping[str, Any]], float], kind: str = "matrix") -> Rate:
    return Rate(name=name, unit="TFLOP/s", kind=kind, per_unit=TERA, work=work, catalog=peak)


def _uncompared(name: str, work: Callable[[Mapping[str, Any]], float]) -> Rate:
    """TFLOP/s of kernels of which nobody expects a share of the peak."""
    return Rate(name=name, unit="TFLOP/s", kind="attention", per_unit=TERA, work=work, catalog=nothing)


def _gbs(name: str, work: Callable[[Mapping[str, Any]], float], kind: str, catalog: Any = nothing) -> Rate:
    return Rate(name=name, unit="GB/s", kind=kind, per_unit=GIGA, work=work, catalog=catalog)


def _millions(name: str, unit: str, work: Callable[[Mapping[str, Any]], float]) -> Rate:
    return Rate(name=name, unit=unit, kind="bandwidth", per_unit=MEGA, work=work, catalog=nothing)


RATES = {
    "gemm": _tflops("matrix product {dtype}", gemm_flops),
    "lasting": _tflops("matrix product {dtype}, lasting", gemm_flops, "lasting"),
    "grouped": _tflops("experts' products {dtype}", grouped_flops),
    "matmul_4bit": _tflops("4-bit product {pass}", gemm_flops, "matrix4"),
    "attention": _tflops("attention {dtype} {pass}", causal_attention_flops, "attention"),
    "masked": _uncompared("{kernel} attention {dtype} {pass}", other_attention_flops),
    "memory": _gbs("memory {op}", moved_bytes, "bandwidth", bandwidth),
    "walk": _gbs("{op}", walked_bytes, "bandwidth"),
    "dequant": _gbs("{quant_type} dequantization", dequant_bytes, "bandwidth", bandwidth),
    "transfer": _gbs("{direction}, {pinned}", moved_bytes, "transfer", pcie),
    "disk": _gbs("disk {direction}, {cold}", moved_bytes, "transfer"),
    "load": _gbs("load a shard, {quantize}", moved_bytes, "transfer"),
    "checkpoint": _gbs("checkpoint save", moved_bytes, "transfer"),
    "collective": _gbs("{op}, {world_size} processes", ring_bytes, "link", link),
    "optimizer": _millions("optimizer {optim}", "M params/s", lambda params: float(params["elements"])),
    "loss": _millions("cross-entropy {dtype}", "M logits/s", lambda p: float(p["tokens"]) * float(p["vocab"])),
}
"""Benches shown by their best trial of each kind."""

WORDS = {
    ("direction", "h2d"): "host to device",
    ("direction", "d2h"): "device to host",
    ("pinned", True): "pinned",
    ("pinned", False): "pageable",
    ("cold", True): "cold",
    ("cold", False): "cached",
    ("quantize", True): "quantized",
    ("quantize", False): "as stored",
    ("op", "softmax_backward"): "softmax backward",
    ("op", "join"): "joining rows",
    ("op", "cut"): "cutting rows",
    ("op", "heads"): "moving heads",
}
"""Params whose values do not speak for themselves."""


def label(rate: Rate, params: Mapping[str, Any]) -> str:
    """What a row is called: the bench and the params that tell its rows apart."""
    return rate.name.format_map(
        {name: WORDS.get((name, value), value) for name, value in params.items() if not isinstance(value, list | dict)}
    )


def usable(trials: Iterable[Trial], bench: str) -> list[Trial]:
    """Trials of a bench that have times."""
    return [trial for trial in trials if trial["bench"] == bench and trial["outcome"] == "ok" and trial["samples_s"]]


def verdict(measured: float, catalog: float | None, kind: str, noise: float | None) -> str:
    """In words: how the share of the catalog compares with healthy cards, and whether the median is stable."""
    words = []
    if catalog:
        share = measured / catalog
        ordinary = ORDINARY_SHARE[kind]
        above = share > ABOVE_CATALOG and kind != "clock"
        words.append("above catalog: check" if above else "low" if share < ordinary else "ok")
    if noise is not None and noise > UNSTABLE_SPREAD_FRAC:
        words.append(f"unstable ({noise:.0%})")
    return ", ".join(words) or "measured"


BEYOND_CACHES_BYTES = 128 * MIB
"""Memory traffic from which no cache of a card or processor sold today holds most: B200's L2 has 126 MB."""


def beyond_caches(trials: Sequence[Trial]) -> tuple[list[Trial], str]:
    """Trials whose traffic goes to memory; without any the largest, and what to know of them."""
    most = max(moved_bytes(trial["params"]) for trial in trials)
    large = [trial for trial in trials if moved_bytes(trial["params"]) >= min(BEYOND_CACHES_BYTES, most)]
    return large, "" if most >= BEYOND_CACHES_BYTES else f"a cache may hold its {most / MIB:.3g} MiB"


def best_of(rate: Rate, trials: Sequence[Trial], gpu: Gpu | None) -> Quantity:
    """The fastest of some trials."""
    trials, doubt = beyond_caches(trials) if rate.name.startswith("memory") else (trials, "")
    best = max(trials, key=lambda trial: rate.work(trial["params"]) / median(trial["samples_s"]))
    measured = rate.work(best["params"]) / median(best["samples_s"]) / rate.per_unit
    datasheet = None if gpu is None else rate.catalog(gpu, best["params"])
    catalog = None if datasheet is None else datasheet / rate.per_unit
    noise = spread_frac(best["samples_s"])
    return Quantity(
        name=label(rate, best["params"]),
        unit=rate.unit,
        measured=measured,
        catalog=catalog,
        spread_frac=noise,
        verdict=", ".join(filter(None, (verdict(measured, catalog, rate.kind, noise), doubt))),
    )


def rate_quantities(trials: Sequence[Trial], gpu: Gpu | None) -> Iterable[Quantity]:
    """One quantity per bench and variant (dtype, pass, direction)."""
    for bench, rate in RATES.items():
        variants: dict[str, list[Trial]] = {}
        for trial in usable(trials, bench):
            variants.setdefault(label(rate, trial["params"]), []).append(trial)
        yield from (best_of(rate, variants[name], gpu) for name in sorted(variants))


def host_quantities(trials: Sequence[Trial]) -> Iterable[Quantity]:
    """Microseconds per launch, per synchronisation, and per module that a walk over a model goes past."""
    names = {"launch": "host, per launch", "sync": "host, per synchronisation", "modules": "host, per module passed"}
    for trial in (found for bench in names for found in usable(trials, bench)):
        times = trial["params"].get("kernels", 1) if trial["bench"] != "modules" else modules_passed(trial)
        noise = spread_frac(trial["samples_s"])
        yield Quantity(
            name=names[trial["bench"]],
            unit="µs",
            measured=median(trial["samples_s"]) / times / MICROSECOND_S,
            catalog=None,
            spread_frac=noise,
            verdict=verdict(0.0, None, "fact", noise),
        )


def fact_quantities(hardware: Mapping[str, Any], gpu: Gpu | None) -> Iterable[Quantity]:
    """What the device says about itself beside what it was sold as."""
    usable_bytes = None if gpu is None else gpu.usable_bytes
    clock_mhz = None if gpu is None else gpu.boost_clock_mhz
    facts = (
        ("usable memory", "GiB", _gib(hardware.get("memory_bytes")), _gib(usable_bytes), "fact"),
        ("power limit", "W", hardware.get("power_limit_w"), None if gpu is None else gpu.tdp_w, "fact"),
        ("highest SM clock", "MHz", hardware.get("max_sm_clock_mhz"), clock_mhz, "clock"),
    )
    for name, unit, measured, catalog, kind in facts:
        if measured is not None:
            yield Quantity(
                name=name,
                unit=unit,
                measured=measured,
                catalog=catalog,
                spread_frac=None,
                verdict=verdict(measured, catalog, kind, None),
            )


def _gib(n_bytes: float | None) -> float | None:
    return None if n_bytes is None else gib(n_bytes)


def against_catalog(path: Path) -> CatalogComparison:
    """Every quantity that a record holds, against the catalog."""
    from tunecast.calibrate.flags import flags_of
    from tunecast.calibrate.record import read_record
    from tunecast.measurement import catalog_gpu

    record = read_record(path)
    trials, hardware = record["trials"], record["hardware"]
    gpu = catalog_gpu(hardware["gpu"])
    found = (*rate_quantities(trials, gpu), *host_quantities(trials), *fact_quantities(hardware, gpu))
    outcomes = [trial["outcome"] for trial in trials]
    return CatalogComparison(
        record=str(path),
        device=str(hardware["gpu"] or hardware["name"]),
        quantities=found,
        flags=tuple(flags_of(record)),
        outcomes={outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)},
    )


def catalog_table(comparison: CatalogComparison) -> RenderableType:
    """The comparison for people."""
    numbers = ("measured", "catalog", "share")
    title = f"{comparison.device}: measured against catalog"
    table = plain_table("quantity", *numbers, "unit", "verdict", title=title, right=numbers)
    for quantity in comparison.quantities:
        share = quantity.share
        table.add_row(
            quantity.name,
            digits(quantity.measured),
            DASH if quantity.catalog is None else digits(quantity.catalog),
            DASH if share is None else f"{share:.0%}",
            quantity.unit,
            quantity.verdict,
        )
    counted = ", ".join(f"{n} {outcome}" for outcome, n in comparison.outcomes.items())
    told = [
        f"{flag} (time ran out: the rest was not measured)" if flag == "cut_short" else flag
        for flag in comparison.flags
    ]
    flags = f"; flags: {', '.join(told)}" if told else ""
    table.caption = f"trials: {counted}{flags}"
    table.caption_justify = "left"
    return table
