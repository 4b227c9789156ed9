"""Case B: the affordable guide's cards, prices and techniques."""

from __future__ import annotations

from typing import NamedTuple

from known_cases.asking import Figures, holds, markdown_table, memory_gib, told
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import find_gpu
from tunecast.catalogs.prices import Offer, load_prices, offers_for
from tunecast.model.units import GIGA, gib

CARDS = (
    ("RTX 3060 12 GB", "rtx-3060-12gb"),
    ("RTX 3090 24 GB", "rtx-3090-24gb"),
    ("RTX 4090", "rtx-4090-24gb"),
    ("A40", "a40-48gb"),
    ("A6000", "rtx-a6000-48gb"),
    ("A10G", "a10g-24gb"),
    ("A100 40 GB", "a100-sxm4-40gb"),
    ("A100 80 GB", "a100-sxm4-80gb"),
    ("H100", "h100-sxm5-80gb"),
    ("V100", "v100-sxm2-32gb"),
)
ANY_KIND = ("on-demand", "spot", "community", "marketplace")
MODEL = "meta-llama/Llama-3.1-8B"
RUN = {"method": "qlora", "max_length": 2048}
MILLION = 1e6


class Price(NamedTuple):
    """One of the guide's prices."""

    provider: str
    card: str
    usd_per_h: float


PRICES = (
    Price("runpod", "rtx-3090-24gb", 0.50),
    Price("runpod", "a100", 3.0),
    Price("vast", "rtx-3090-24gb", 0.30),
    Price("vast", "a100", 2.50),
    Price("lambda", "a100", 4.0),
    Price("vultr", "a100", 3.50),
)


def rows_of(provider: str, card: str) -> list[Offer]:
    """Every row of the catalog for that provider and card, history and unranked ones included."""
    return [
        o
        for o in load_prices()
        if o.provider == provider and (o.gpu_id == card or (card == "a100" and o.gpu_id.startswith("a100-")))
    ]


def usd_per_gpu_h(gpu: str, kinds: tuple[str, ...]) -> tuple[float, Offer] | None:
    """The lowest price of one GPU among the current offers of these kinds, and its offer."""
    offers = offers_for(gpu, 1, kinds)
    found = sorted(((o.usd_per_hour / o.gpus_paid, o.offer) for o in offers), key=lambda pair: pair[0])
    return found[0] if found else None


def cards() -> str:
    """Every card of the documents, with what the catalog knows of it and what the same work costs on it."""
    rows = []
    for name, gpu in sorted(CARDS, key=lambda card: find_gpu(card[1]).launch_year or 0):
        row = find_gpu(gpu)
        found, rent = told(MODEL, gpu, **RUN), usd_per_gpu_h(gpu, ANY_KIND)
        per_million = MILLION / found.tokens_per_s.value / 3600 * rent[0] if rent else None
        rows.append(
            [name, f"`{gpu}`", str(row.launch_year), f"{gib(row.usable_bytes or 0):.1f}",
             f"{row.bandwidth_bytes_per_s / GIGA:,.0f}", f"{memory_gib(found):.1f}, {found.verdict}",
             f"{found.tokens_per_s.value:,.0f}",
             f"{rent[0]:.2f} ({rent[1].provider}, {rent[1].price_type})" if rent else "no price",
             f"{per_million:.3f}" if per_million else "–"]
        )  # fmt: skip
    head = ["card", "id", "launched", "usable GiB", "GB/s", "8B QLoRA: GiB", "tokens/s", "lowest USD per GPU-hour",
            "USD per million tokens"]  # fmt: skip
    return markdown_table(head, rows)


def prices() -> str:
    """The guide's prices beside every row that the catalog has."""
    rows = []
    for price in PRICES:
        seen = rows_of(price.provider, price.card)
        for kind in sorted({o.price_type for o in seen}):
            of_kind = [o for o in seen if o.price_type == kind]
            rates = [o.usd_per_gpu_hour for o in of_kind]
            ends = sorted({min(rates), max(rates)})
            dates = sorted({str(o.snapshot_date) for o in of_kind})
            ranked = "" if any(o.rankable for o in of_kind) else "; not ranked: a filler or an unsure row"
            rows.append(
                [price.provider, price.card, f"{price.usd_per_h:.2f}", kind + ranked,
                 " to ".join(f"{rate:.2f}" for rate in ends), " to ".join(sorted({dates[0], dates[-1]})),
                 f"{price.usd_per_h / ends[-1] - 1:+.0%}"]
            )  # fmt: skip
    head = [
        "provider",
        "card",
        "guide, USD/h",
        "kind",
        "catalog, USD per GPU-hour",
        "seen",
        "guide above the highest row",
    ]
    return markdown_table(head, rows)


def newer_and_dearer() -> Figures:
    """Of which pairs of cards, one newer and dearer per hour, the newer one costs less per token.

    Once among the lowest offers of any kind, once among those of one provider and kind.
    """
    found: Figures = {}
    for name, price_of in (("any", lowest_usd_per_h), ("runpod", runpod_usd_per_h)):
        known = [
            (find_gpu(gpu).launch_year or 0, rent, rent / told(MODEL, gpu, **RUN).tokens_per_s.value, card)
            for card, gpu in CARDS
            if (rent := price_of(gpu)) is not None
        ]
        pairs = [(a, b) for a in known for b in known if a[0] < b[0] and a[1] < b[1]]
        won = [f"{b[3]} over {a[3]}" for a, b in pairs if b[2] < a[2]]
        found |= {f"{name}_pairs": str(len(pairs)), f"{name}_won": str(len(won)), f"{name}_list": ", ".join(won) or "–"}
    return found


def lowest_usd_per_h(gpu: str) -> float | None:
    """Of one GPU, over all offers."""
    found = usd_per_gpu_h(gpu, ANY_KIND)
    return found[0] if found else None


def runpod_usd_per_h(gpu: str) -> float | None:
    """Of one GPU among RunPod's community offers, which list the most of these cards."""
    offers = [o.offer.usd_per_gpu_hour for o in offers_for(gpu, 1, ("community",)) if o.offer.provider == "runpod"]
    return min(offers) if offers else None


def underestimates() -> str:
    """4-bit weights alone against what the training takes, on the smallest card."""
    rows = []
    for model in ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-14B"):
        for length in (512, 2048, 8192):
            found = told(model, "rtx-3060-12gb", method="qlora", max_length=length)
            weights = gib(found.total_params / 2)
            usable = gib(found.memory.usable_bytes or 0)
            rows.append(
                [model, f"{length:,}", f"{weights:.1f}", holds(weights < usable), f"{memory_gib(found):.1f}",
                 found.verdict or "–"]
            )  # fmt: skip
    head = ["model", "tokens", "half a byte per parameter, GiB", "would fit 12 GB", "tunecast, GiB", "verdict"]
    return markdown_table(head, rows)


def refused(model: str, gpu: str, **options: str) -> str:
    """What the command says to a neighbouring use."""
    try:
        told(model, gpu, **options)
    except InputError as error:
        return f"tunecast: {error}"
    raise AssertionError(f"{model} on {gpu} was not refused")


def figures() -> Figures:
    """Everything that the page states."""
    return {
        "cards": cards(),
        "prices": prices(),
        "underestimates": underestimates(),
        **newer_and_dearer(),
        "refused_images": refused("stabilityai/stable-diffusion-xl-base-1.0", "rtx-4090"),
        "refused_inference": refused(MODEL, "rtx-4090", method="inference"),
        "refused_tpu": refused(MODEL, "tpu-v5e"),
    }
