"""Checks of models, names and prices: each takes rows and returns one sentence per fault, naming the row.

GPUs have theirs in `integrity_gpus`, what renting costs beside the machine in `integrity_rental`.
`tests/integrity` runs them over the shipped files; a user's own file can be passed through them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import date

from tunecast.catalogs.prices import PRICE_TYPES
from tunecast.catalogs.tables import Row, names

ROUNDING = 0.01
"""Relative difference that rounding in a data file may leave."""

RUNPOD_FILLER_USD_PER_H = 0.5

SHAPE_CHECKED = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Classes whose parameter count follows from the row's own columns by one short formula."""

Check = Callable[[Sequence[Row]], list[str]]


# --- models -------------------------------------------------------------------------------------


def model_ids_unique(rows: Sequence[Row]) -> list[str]:
    """No two rows share a hub id, whatever its case."""
    return repeated("model", (row["hf_id"].lower() for row in rows))


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
    faults = repeated("alias", (row["alias"].lower() for row in rows))
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
    return repeated("price", (" ".join(row[c] for c in (*columns, "snapshot_date")) for row in rows))


def prices_sourced(rows: Sequence[Row]) -> list[str]:
    """Every price has a source, a known purchase kind and a date; a bare month is undated and may not rank."""
    faults = [f"{_price(row)}: source is empty" for row in rows if not row["source"]]
    for row in rows:
        if row["price_type"] not in PRICE_TYPES:
            faults.append(f"{_price(row)}: price_type {row['price_type']!r} is not known")
        if (row["statistic"] == "list") == (row["price_type"] == "marketplace"):
            faults.append(f"{_price(row)}: statistic {row['statistic']!r} does not go with {row['price_type']}")
        if not is_day(row["snapshot_date"]) and not row["why_not_rankable"]:
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
    """A family is declared once, is not itself a GPU and its members are; an ambiguous one has at least two."""
    faults = repeated("family", (row["family_id"] for row in rows))
    faults += [f"{row['family_id']}: is itself a GPU" for row in rows if row["family_id"] in gpu_ids]
    for row in rows:
        members = names(row["members"])
        faults += [f"{row['family_id']}: {m} is not a GPU of the catalog" for m in members if m not in gpu_ids]
        if (row["kind"] == "ambiguous") != (len(members) > 1):
            faults.append(f"{row['family_id']}: {len(members)} members do not go with {row['kind']!r}")
    return faults


MODEL_CHECKS: tuple[Check, ...] = (model_ids_unique, model_totals_verified, model_shapes_consistent)
PRICE_CHECKS: tuple[Check, ...] = (
    prices_positive,
    prices_per_gpu_agree,
    prices_unique,
    prices_sourced,
    prices_not_filler,
)


def repeated(what: str, keys: Iterable[str]) -> list[str]:
    """A fault for every key that occurs more than once."""
    return [f"{what} {key!r} occurs {count} times" for key, count in Counter(keys).items() if count > 1]


def _price(row: Row) -> str:
    parts = (row["provider"], row["tier"], row["gpu_canonical_id"], row["instance_or_sku"], row["snapshot_date"])
    return " ".join(part for part in parts if part)


def is_day(text: str) -> bool:
    """Whether a text is a day such as 2026-11-20; a month alone is not."""
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return len(text) == len("2026-01-01")
