"""Case A: what LoRA of a 70B model costs on three cards."""

from __future__ import annotations

import math
from typing import NamedTuple

from known_cases.asking import Figures, hours_for, markdown_table, memory_gib, times, tokens_in, told, verdict
from tunecast.catalogs.gpus import load_gpus
from tunecast.catalogs.prices import offers_for
from tunecast.model.architectures import load_architecture
from tunecast.model.fits import LIKELY
from tunecast.model.forecast import Forecast
from tunecast.model.units import GIGA, MEGA, gib

MODEL = "meta-llama/Llama-2-70b-hf"
RUN = {"method": "lora", "sharding": "fsdp"}
JOINED = {"internode_gbps": 100.0}
"""For jobs of more than one machine, on cards whose machines no catalog row joins."""
MOST_GPUS = 32
FP16_BYTES = 2


class Row(NamedTuple):
    """One line of the document's result."""

    name: str
    gpu: str
    hours: float
    usd_per_h: float
    usd: float
    label: str


A100 = Row("A100", "a100-sxm4-40gb", 23.2, 14.1, 327.0, "fastest")
RTX_3090 = Row("RTX 3090", "rtx-3090-24gb", 30.3, 7.6, 230.6, "cheapest")
V100 = Row("V100", "v100-sxm2-32gb", 33.0, 12.0, 394.5, "balance")
ROWS = (RTX_3090, A100, V100)


def asked(gpu: str, num_gpus: int, **more: object) -> Forecast:
    """The case's run on so many GPUs."""
    joined = JOINED if num_gpus > 8 else {}
    return told(MODEL, gpu, num_gpus=num_gpus, **RUN, **joined, **more)


def weights_bytes() -> float:
    """Parameters x bytes per parameter."""
    return float(load_architecture(MODEL).total_params * FP16_BYTES)


def fewest_for_weights(gpu: str) -> int:
    """GPUs whose usable memory together holds the weights, and nothing else."""
    usable = load_gpus()[gpu].usable_bytes
    assert usable is not None
    return math.ceil(weights_bytes() / usable)


def fewest_that_fit(gpu: str) -> int:
    """GPUs on which the whole training fits more likely than not; past one machine, whole machines of eight."""
    counts: list[int] = [*range(fewest_for_weights(gpu), 9), *range(16, MOST_GPUS + 1, 8)]
    return next(count for count in counts if (asked(gpu, count).fit_probability or 0.0) >= LIKELY)


def tokens_of_a100_row() -> float:
    """What the A100 row must have trained on, if its GPUs are the fewest that fit; in millions, rounded."""
    found = asked(A100.gpu, fewest_that_fit(A100.gpu))
    return round(tokens_in(found, A100.hours) / MEGA) * MEGA


def arithmetic() -> str:
    """Hours x price beside the document's product, and the front that the rows make."""
    rows = []
    for row in ROWS:
        product = row.hours * row.usd_per_h
        beaten = [o.name for o in ROWS if o.hours < row.hours and o.usd < row.usd]
        rows.append(
            [row.name, f"{row.hours:g}", f"{row.usd_per_h:g}", f"{row.usd:g}", f"{product:.1f}",
             f"{product / row.usd - 1:+.2%}", row.label, " and ".join(beaten) or "–"]
        )  # fmt: skip
    head = ["GPU", "hours", "USD/h", "USD", "hours × USD/h", "off by", "its label", "dearer and slower than"]
    return markdown_table(head, rows)


def counts() -> str:
    """GPUs by weights alone and by the whole training, and the price of one that the document implies."""
    rows = []
    for row in ROWS:
        few, enough = fewest_for_weights(row.gpu), fewest_that_fit(row.gpu)
        per_gpu = sorted(row.usd_per_h / count for count in {few, enough})
        offers = offers_for(row.gpu, 1, price_types=("on-demand", "community", "spot", "marketplace"))
        today = f"{offers[0].usd_per_hour / offers[0].gpus_paid:.2f} ({offers[0].offer.provider})" if offers else "–"
        spread = " to ".join(f"{price:.2f}" for price in per_gpu)
        allocated = gib(asked(row.gpu, enough).memory.allocated_bytes.value)
        rows.append([row.gpu, str(few), str(enough), f"{allocated:.1f}", spread, today])
    head = ["GPU", "for the weights alone", "for the training", "GiB allocated on each then",
            "the document's USD/h for one GPU", "lowest offer of any kind"]  # fmt: skip
    return markdown_table(head, rows)


def predictions(tokens: float) -> str:
    """The other rows at the A100 row's tokens."""
    rows = []
    for row in ROWS:
        for count in sorted({fewest_for_weights(row.gpu), fewest_that_fit(row.gpu)}):
            found = asked(row.gpu, count)
            hours = hours_for(found, tokens)
            per_gpu = found.tokens_per_s.value / count
            needed = tokens / (row.hours * 3600) / per_gpu
            rows.append(
                [row.name, str(count), verdict(found), f"{hours:.1f}", f"{row.hours:g}",
                 times(hours / row.hours), f"{needed:.1f}"]
            )  # fmt: skip
    head = [
        "GPU",
        "GPUs",
        "fits",
        "tunecast, h",
        "document, h",
        "tunecast / document",
        "GPUs that the document's hours need",
    ]
    return markdown_table(head, rows)


def ten_percent() -> Figures:
    """LoRA that trains a tenth of the parameters: its rank and what it needs."""
    small = asked(A100.gpu, 5)
    rank = round(0.1 * small.total_params / small.trainable_params * small.run.lora_r)
    large = asked(A100.gpu, 5, lora_r=rank)
    return {
        "small_share": f"{small.trainable_params / small.total_params:.2%}",
        "small_params": f"{small.trainable_params / MEGA:.0f}M",
        "rank": str(rank),
        "large_share": f"{large.trainable_params / large.total_params:.1%}",
        "large_gib": f"{memory_gib(large):.1f}",
        "small_gib": f"{memory_gib(small):.1f}",
        "usable_gib": f"{(small.memory.usable_bytes or 0) / 2**30:.1f}",
        "large_verdict": "fits" if large.fits else "does not fit",
    }


def mixed_precision() -> Figures:
    """What 16 bits save of the step, against true fp32 at 16 GPUs, where both fit; and when it would be 20%."""
    half = asked(A100.gpu, 8)
    whole = asked(A100.gpu, 8, precision="fp32", dtype="fp32")
    peaks = load_gpus()[A100.gpu].peaks
    speed_up = peaks["bf16"] / peaks["fp32"]
    return {
        "mixed_saving": f"{1 - half.step_time_s.value / whole.step_time_s.value:.0%}",
        "mixed_share": f"{0.2 / (1 - 1 / speed_up):.0%}",
        "mixed_peak": times(speed_up),
    }


def on_todays_front(tokens: float) -> str:
    """Which of the three cards is among the plans that no other beats in both money and time."""
    from tunecast.recommender import recommend

    found = recommend(MODEL, method="lora", tokens=tokens)
    front = {picked.forecast.gpu for picked in found.front}
    kept = [row.name for row in ROWS if row.gpu in front]
    if not kept:
        return "None of the three cards is on the front any more."
    return f"Of the three cards, the front still has: {', '.join(kept)}."


def figures() -> Figures:
    """Everything that the page states."""
    tokens = tokens_of_a100_row()
    enough = fewest_that_fit(A100.gpu)
    return {
        "arithmetic": arithmetic(),
        "counts": counts(),
        "weights_gb": f"{weights_bytes() / GIGA:.0f}",
        "tokens": f"{tokens / MEGA:.0f}M",
        "a100_gpus": str(enough),
        "a100_usd_per_gpu_h": f"{A100.usd_per_h / enough:.2f}",
        "predictions": predictions(tokens),
        "front": on_todays_front(tokens),
        **ten_percent(),
        **mixed_precision(),
    }
