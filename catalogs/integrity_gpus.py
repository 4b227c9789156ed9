"""Checks of the GPU catalog: each takes rows and returns one sentence per fault, naming the row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tunecast.catalogs.integrity import Check, repeated
from tunecast.catalogs.tables import GIB, MEGA, MIB, TERA, Row, names, number

AGREEMENT = 0.05
"""Relative difference above which a published fp16 peak needs a reason beside it."""

HIGHEST_CLOCK_MHZ = 3000.0
"""No card in the file boosts above 2617 MHz; bounds a peak whose clock is unknown."""

DENSE_RATES: dict[str, frozenset[int]] = {
    "7.0": frozenset({1024}),
    "7.5": frozenset({512, 1024}),
    "8.0": frozenset({2048}),
    "8.6": frozenset({512, 1024}),
    "8.9": frozenset({512, 1024}),
    "9.0": frozenset({4096}),
    "10.0": frozenset({8192}),
    "10.3": frozenset({8192}),
    "12.0": frozenset({512, 1024}),
    "12.1": frozenset({512, 1024}),
    "gfx90a": frozenset({1024}),
    "gfx942": frozenset({2048}),
    "gfx950": frozenset({4096}),
}
"""Dense fp16 FLOP per SM (or CU) and clock with fp32 accumulation, by compute capability (NVIDIA
whitepapers, AMD CDNA datasheets). GeForce cards accumulate in fp32 at half the rate of their chip: 512."""

GEFORCE_RATE = 512

HIGHEST_RATIO = {"bf16_fp32acc_tflops": 1.0, "tf32_tflops": 0.5, "fp8_tflops": 2.0, "int8_tops": 2.0}
"""Dense rate of a dtype over the dense fp16 rate; GeForce int8 is not halved as fp16 is, so it gets twice this."""

FP32_PER_SM_CLOCK: dict[str, int] = {
    "7.0": 128,
    "7.5": 128,
    "8.0": 128,
    "8.6": 256,
    "8.9": 256,
    "9.0": 256,
    "10.0": 256,
    "10.3": 256,
    "12.0": 256,
    "12.1": 256,
    "gfx90a": 128,
    "gfx942": 256,
    "gfx950": 256,
}
"""fp32 FLOP per SM (or CU) and clock: two for each of its 64 or 128 lanes (NVIDIA whitepapers, AMD CDNA
datasheets; CDNA2 without its packed instructions, as its datasheet counts)."""

DISTINCT_MEMORY = 0.15
"""Two cards under one driver name differ by more than this in memory, or in SMs (`gpus.MEMORY_TOLERANCE` is 12%)."""

ESTIMATE_ROUNDING_GIB = 0.011


def gpu_ids_unique(rows: Sequence[Row]) -> list[str]:
    """No two rows share an id."""
    return repeated("GPU id", (row["canonical_id"] for row in rows))


def gpu_facts_present(rows: Sequence[Row]) -> list[str]:
    """Every row has a source, a date, a name and positive memory and bandwidth."""
    needed = ("source", "source_date", "nvml_names", "vendor", "architecture", "compute_capability")
    faults = [f"{row['canonical_id']}: {column} is empty" for row in rows for column in needed if not row[column]]
    positive = ("memory_marketing_gb", "memory_bandwidth_gbs", "fp32_tflops", "fp16_fp32acc_tflops")
    return faults + [
        f"{row['canonical_id']}: {column} is not a positive number"
        for row in rows
        for column in positive
        if not (number(row[column]) or 0) > 0
    ]


def gpu_fp16_agrees_with_clock(rows: Sequence[Row]) -> list[str]:
    """fp16 peak = SMs x dense FLOP per SM and clock x boost clock, within 5% or with a reason why it is lower.

    A peak above the product is never excused: that is what a sparse figure looks like.
    """
    return [fault for row in rows for fault in _fp16_faults(row)]


def _fp16_faults(row: Row) -> Iterable[str]:
    gpu_id, published = row["canonical_id"], number(row["fp16_fp32acc_tflops"]) or 0.0
    sm_count, rate = number(row["sm_count"]), number(row["flops_per_sm_clk_fp16"])
    clock_mhz = number(row["boost_clock_mhz"])
    if (sm_count is None or clock_mhz is None) and not row["fp16_mismatch_reason"]:
        yield f"{gpu_id}: SMs or clock unknown, and no reason why the fp16 peak is not checked"
    if sm_count is None or rate is None:
        return
    computed = sm_count * rate * (clock_mhz or HIGHEST_CLOCK_MHZ) * MEGA / TERA
    if published > computed * (1 + AGREEMENT):
        yield f"{gpu_id}: fp16 peak {published:g} exceeds SMs x rate x clock = {computed:.1f} TFLOP/s; sparse?"
    if published < computed * (1 - AGREEMENT) and not row["fp16_mismatch_reason"]:
        yield f"{gpu_id}: fp16 peak {published:g} is below SMs x rate x clock = {computed:.1f} TFLOP/s without a reason"


def gpu_peaks_dense(rows: Sequence[Row]) -> list[str]:
    """The per-SM rate is a dense one of its architecture and the other dtypes keep their dense ratio to fp16."""
    return [fault for row in rows for fault in (*_rate_faults(row), *_ratio_faults(row))]


def _is_geforce(row: Row) -> bool:
    return "GeForce" in row["nvml_names"]


def _rate_faults(row: Row) -> Iterable[str]:
    allowed = {GEFORCE_RATE} if _is_geforce(row) else DENSE_RATES.get(row["compute_capability"], frozenset())
    rate = number(row["flops_per_sm_clk_fp16"])
    if rate not in allowed:
        yield f"{row['canonical_id']}: {rate} fp16 FLOP per SM and clock is not dense for {row['compute_capability']}"


def _ratio_faults(row: Row) -> Iterable[str]:
    fp16 = number(row["fp16_fp32acc_tflops"]) or 0.0
    half_rate = number(row["flops_per_sm_clk_fp16"]) == GEFORCE_RATE
    for column, ratio in HIGHEST_RATIO.items():
        bound = fp16 * ratio * (2 if half_rate and column == "int8_tops" else 1)
        if (number(row[column]) or 0.0) > bound * (1 + AGREEMENT):
            yield f"{row['canonical_id']}: {column} {row[column]} is more than the dense {bound:g}; sparse?"


def gpu_memory_labelled(rows: Sequence[Row]) -> list[str]:
    """Usable memory is torch's, or an estimate that names its sibling, or unknown; never above the sticker."""
    ids = {row["canonical_id"] for row in rows}
    return [fault for row in rows for fault in _memory_faults(row, ids)]


def _memory_faults(row: Row, ids: Collection[str]) -> Iterable[str]:
    gpu_id, basis, usable = row["canonical_id"], row["usable_basis"], number(row["usable_gib"])
    if basis not in ("torch", "estimated", "unknown"):
        yield f"{gpu_id}: usable_basis {basis!r} is none of torch, estimated, unknown"
    if (usable is None) != (basis == "unknown"):
        yield f"{gpu_id}: usable_gib {row['usable_gib']!r} does not go with the basis {basis!r}"
    if (basis == "estimated") != (row["usable_from"] in ids):
        yield f"{gpu_id}: usable_from {row['usable_from']!r} does not go with the basis {basis!r}"
    if usable is not None and usable > float(row["memory_marketing_gb"]):
        yield f"{gpu_id}: usable {usable} GiB is more than the {row['memory_marketing_gb']} GB sold"


def gpu_names_decidable(rows: Sequence[Row]) -> list[str]:
    """A driver's name belongs to one card, or its cards are told apart by SMs or memory."""
    holders: dict[str, list[Row]] = {}
    for row in rows:
        for name in names(row["nvml_names"]):
            holders.setdefault(name.lower(), []).append(row)
    return [
        f"{second['canonical_id']}: {name!r} is also {first['canonical_id']}, with the same SMs and memory"
        for name, cards in holders.items()
        for i, first in enumerate(cards)
        for second in cards[i + 1 :]
        if not _told_apart(first, second)
    ]


def _told_apart(first: Row, second: Row) -> bool:
    sms = number(first["sm_count"]), number(second["sm_count"])
    sold = float(first["memory_marketing_gb"]), float(second["memory_marketing_gb"])
    return (None not in sms and sms[0] != sms[1]) or abs(sold[0] / sold[1] - 1) > DISTINCT_MEMORY


def gpu_fp32_agrees_with_clock(rows: Sequence[Row]) -> list[str]:
    """fp32 peak = SMs x fp32 FLOP per SM and clock x boost clock, within 5% or with a reason."""
    faults = []
    for row in rows:
        sm_count, clock_mhz = number(row["sm_count"]), number(row["boost_clock_mhz"])
        rate = FP32_PER_SM_CLOCK.get(row["compute_capability"])
        if sm_count is None or clock_mhz is None or rate is None:
            continue
        computed, stated = sm_count * rate * clock_mhz * MEGA / TERA, float(row["fp32_tflops"])
        if abs(stated / computed - 1) > AGREEMENT and not row["fp32_mismatch_reason"]:
            faults.append(
                f"{row['canonical_id']}: fp32 peak {stated:g} is not SMs x rate x clock = {computed:.1f} TFLOP/s, "
                "and no reason is given"
            )
    return faults


def gpu_bf16_equals_fp16(rows: Sequence[Row]) -> list[str]:
    """Tensor cores have one rate for both half precisions; a card without bf16 hardware leaves it empty."""
    faults = []
    for row in rows:
        bf16, fp16 = number(row["bf16_fp32acc_tflops"]), float(row["fp16_fp32acc_tflops"])
        if bf16 is not None and abs(bf16 / fp16 - 1) > AGREEMENT:
            faults.append(f"{row['canonical_id']}: bf16 peak {bf16:g} is not the fp16 peak {fp16:g}")
    return faults


def gpu_estimates_follow_sibling(rows: Sequence[Row]) -> list[str]:
    """Estimated memory is nvidia-smi's total less what the sibling loses between nvidia-smi and torch.

    Without a total it is the sibling's share of the memory sold. The sibling itself is known from torch. An
    estimate may lie lower where the total was seen with ECC on, which takes a part.
    """
    by_id = {row["canonical_id"]: row for row in rows}
    faults = []
    for row in rows:
        sibling = by_id.get(row["usable_from"])
        if row["usable_basis"] != "estimated" or sibling is None:
            continue
        if sibling["usable_basis"] != "torch":
            faults.append(f"{row['canonical_id']}: its sibling {row['usable_from']} was not seen by torch either")
            continue
        above = float(row["usable_gib"]) - _from_sibling(row, sibling)
        if above > ESTIMATE_ROUNDING_GIB or (above < -ESTIMATE_ROUNDING_GIB and "ECC" not in row["memory_gib_basis"]):
            faults.append(
                f"{row['canonical_id']}: {row['usable_gib']} GiB does not follow from {row['usable_from']}: "
                f"{_from_sibling(row, sibling):.2f}"
            )
    return faults


def _from_sibling(row: Row, sibling: Row) -> float:
    usable_gib = float(sibling["usable_gib"])
    total_mib, sibling_mib = number(row["memory_mib_nvidia_smi"]), number(sibling["memory_mib_nvidia_smi"])
    if total_mib is None or sibling_mib is None:
        return usable_gib / float(sibling["memory_marketing_gb"]) * float(row["memory_marketing_gb"])
    return (total_mib - sibling_mib) * MIB / GIB + usable_gib


GPU_CHECKS: tuple[Check, ...] = (
    gpu_ids_unique,
    gpu_names_decidable,
    gpu_facts_present,
    gpu_fp16_agrees_with_clock,
    gpu_fp32_agrees_with_clock,
    gpu_bf16_equals_fp16,
    gpu_peaks_dense,
    gpu_memory_labelled,
    gpu_estimates_follow_sibling,
)
