"""Checks of the data files: each takes rows and returns one sentence per fault, naming the row.

`tests/integrity` runs them over the shipped files; a user's own file can be passed through them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import date

from tunecast.catalogs.prices import PRICE_TYPES
from tunecast.catalogs.tables import MEGA, TERA, Row, names, number

AGREEMENT = 0.05
"""Relative difference above which a published fp16 peak needs a reason beside it."""

ROUNDING = 0.01
"""Relative difference that rounding in a data file may leave."""

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

RUNPOD_FILLER_USD_PER_H = 0.5

SHAPE_CHECKED = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Classes whose parameter count follows from the row's own columns by one short formula."""

Check = Callable[[Sequence[Row]], list[str]]


# --- GPUs ---------------------------------------------------------------------------------------


def gpu_ids_unique(rows: Sequence[Row]) -> list[str]:
    """No two rows share an id."""
    return _repeated("GPU id", (row["canonical_id"] for row in rows))


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


# --- models -------------------------------------------------------------------------------------


def model_ids_unique(rows: Sequence[Row]) -> list[str]:
    """No two rows share a hub id, whatever its case."""
    return _repeated("model", (row["hf_id"].lower() for row in rows))


def model_totals_verified(rows: Sequence[Row]) -> list[str]:
    """total_params is the count verified on the meta device, and no fewer than the active ones."""
    faults = []
    for row in rows:
        total, verified, active = (int(row[c]) for c in ("total_params", "params_meta_verified", "active_params"))
        if total != verified:
            faults.append(f"{row['hf_id']}: total_params {total} is not the verified {verified}")
        if not 0 < active <= total:
            faults.append(f"{row['hf_id']}: active_params {active} is not within 1..{total}")
        if row["count_check"] == "equal" and int(row["hub_or_public_count"]) != verified:
            faults.append(f"{row['hf_id']}: public count {row['hub_or_public_count']} is not {verified}")
    return faults


def model_shapes_consistent(rows: Sequence[Row]) -> list[str]:
    """Heads divide by their KV heads; sources are given; plain decoder counts follow from the shape."""
    faults = [f"{row['hf_id']}: source is empty" for row in rows if not row["source"]]
    for row in rows:
        if int(row["num_heads"]) % int(row["num_kv_heads"]):
            faults.append(f"{row['hf_id']}: {row['num_heads']} heads do not divide by {row['num_kv_heads']} KV heads")
        if row["architecture_class"] in SHAPE_CHECKED and _shape_params(row) != int(row["total_params"]):
            faults.append(f"{row['hf_id']}: the shape has {_shape_params(row)} parameters, not {row['total_params']}")
    return faults


def _shape_params(row: Row) -> int:
    """Parameters of a Llama-like decoder: embeddings, head, and per layer q, k, v, o, three MLP maps and norms.

    Qwen2 adds biases to q, k and v; Qwen3 adds a norm over each head of q and of k.
    """
    hidden, mlp, layers = int(row["hidden_size"]), int(row["intermediate_size"]), int(row["num_layers"])
    head_dim = int(row["head_dim"])
    q, kv = int(row["num_heads"]) * head_dim, int(row["num_kv_heads"]) * head_dim
    layer = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * mlp + 2 * hidden
    layer += (q + 2 * kv) * (row["qkv_bias"] == "yes")
    layer += 2 * head_dim * (row["architecture_class"] == "Qwen3ForCausalLM")
    embeddings = int(row["vocab_size"]) * hidden * (1 if row["tie_word_embeddings"] == "true" else 2)
    return embeddings + layers * layer + hidden


def aliases_point_at_models(rows: Sequence[Row], hf_ids: Collection[str]) -> list[str]:
    """Every alias is unique, is not itself listed, and points at a listed model."""
    faults = _repeated("alias", (row["alias"].lower() for row in rows))
    faults += [f"{row['alias']}: {row['hf_id']} is not in the catalog" for row in rows if row["hf_id"] not in hf_ids]
    return faults + [f"{row['alias']}: is itself in the catalog" for row in rows if row["alias"] in hf_ids]


# --- prices -------------------------------------------------------------------------------------


def prices_positive(rows: Sequence[Row]) -> list[str]:
    """Every price and every count is above zero."""
    columns = ("usd_per_hour", "usd_per_gpu_hour", "gpu_count", "instance_gpus")
    return [f"{_price(row)}: {c} {row[c]!r} is not positive" for row in rows for c in columns if not float(row[c]) > 0]


def prices_per_gpu_agree(rows: Sequence[Row]) -> list[str]:
    """Price of the listing = GPUs listed x price per GPU; whole machines hold at least the listed GPUs."""
    faults = []
    for row in rows:
        listed = int(row["gpu_count"])
        product = listed * float(row["usd_per_gpu_hour"])
        if abs(product / float(row["usd_per_hour"]) - 1) > ROUNDING:
            faults.append(f"{_price(row)}: {listed} x {row['usd_per_gpu_hour']} is not {row['usd_per_hour']} USD/h")
        if int(row["instance_gpus"]) % listed:
            faults.append(f"{_price(row)}: a machine of {row['instance_gpus']} GPUs is not sold in {listed}s")
    return faults


def prices_join_gpus(rows: Sequence[Row], gpu_ids: Collection[str], families: Collection[str]) -> list[str]:
    """Every price is of a GPU in the catalog or of a declared family."""
    known = {*gpu_ids, *families}
    return [
        f"{_price(row)}: {row['gpu_canonical_id']} is neither a GPU nor a declared family"
        for row in rows
        if row["gpu_canonical_id"] not in known
    ]


def prices_unique(rows: Sequence[Row]) -> list[str]:
    """No offer is listed twice for one day."""
    columns = ("provider", "tier", "gpu_canonical_id", "instance_or_sku", "region", "gpu_count", "price_type")
    return _repeated("price", (" ".join(row[c] for c in (*columns, "snapshot_date")) for row in rows))


def prices_sourced(rows: Sequence[Row]) -> list[str]:
    """Every price has a source, a known purchase kind and a date; a bare month is undated and may not rank."""
    faults = [f"{_price(row)}: source is empty" for row in rows if not row["source"]]
    for row in rows:
        if row["price_type"] not in PRICE_TYPES:
            faults.append(f"{_price(row)}: price_type {row['price_type']!r} is not known")
        if (row["statistic"] == "list") == (row["price_type"] == "marketplace"):
            faults.append(f"{_price(row)}: statistic {row['statistic']!r} does not go with {row['price_type']}")
        if not _is_day(row["snapshot_date"]) and not row["why_not_rankable"]:
            faults.append(f"{_price(row)}: {row['snapshot_date']!r} is not a day, so it may not be ranked")
    return faults


def prices_not_filler(rows: Sequence[Row]) -> list[str]:
    """RunPod's 0.50, which it answers for cards it does not offer, and test fixtures are marked as not rankable."""
    return [
        f"{_price(row)}: looks like a filler or a fixture but may be ranked"
        for row in rows
        if not row["why_not_rankable"] and (is_filler(row) or "fixture" in row["note"])
    ]


def is_filler(row: Row) -> bool:
    """RunPod answers exactly 0.50 per GPU for cards that it does not offer in a tier."""
    return row["provider"] == "runpod" and float(row["usd_per_gpu_hour"]) == RUNPOD_FILLER_USD_PER_H


def families_point_at_gpus(rows: Sequence[Row], gpu_ids: Collection[str]) -> list[str]:
    """A family is not itself a GPU and its members are; an ambiguous one has at least two."""
    faults = [f"{row['family_id']}: is itself a GPU" for row in rows if row["family_id"] in gpu_ids]
    for row in rows:
        members = names(row["members"])
        faults += [f"{row['family_id']}: {m} is not a GPU of the catalog" for m in members if m not in gpu_ids]
        if (row["kind"] == "ambiguous") != (len(members) > 1):
            faults.append(f"{row['family_id']}: {len(members)} members do not go with {row['kind']!r}")
    return faults


GPU_CHECKS: tuple[Check, ...] = (
    gpu_ids_unique,
    gpu_facts_present,
    gpu_fp16_agrees_with_clock,
    gpu_peaks_dense,
    gpu_memory_labelled,
)
MODEL_CHECKS: tuple[Check, ...] = (model_ids_unique, model_totals_verified, model_shapes_consistent)
PRICE_CHECKS: tuple[Check, ...] = (
    prices_positive,
    prices_per_gpu_agree,
    prices_unique,
    prices_sourced,
    prices_not_filler,
)


def _repeated(what: str, keys: Iterable[str]) -> list[str]:
    return [f"{what} {key!r} occurs {count} times" for key, count in Counter(keys).items() if count > 1]


def _price(row: Row) -> str:
    parts = (row["provider"], row["tier"], row["gpu_canonical_id"], row["instance_or_sku"], row["snapshot_date"])
    return " ".join(part for part in parts if part)


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return len(text) == len("2026-01-01")
