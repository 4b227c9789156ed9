"""Case E: QLoRA of Mistral 7B on one A10G, and what bits and attention cost."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from known_cases.asking import Figures, change, markdown_table, memory_gib, told
from tunecast.model.forecast import Forecast
from tunecast.model.largest import largest_that
from tunecast.model.units import GIGA, MINUTE_S, gib

MODEL = "mistralai/Mistral-7B-v0.1"
GPU = "a10g-24gb"
RANK = 32
MOST_TOKENS = 8192
BATCHES = (1, 2, 4, 8, 16)
USUAL = range(128, 2049)
"""Lengths of instruction data."""
MOST_EPOCHS = 10


class Claim(NamedTuple):
    """One of the document's two times."""

    name: str
    minutes: float
    iterations: int
    samples: int


CLAIMS = (Claim("10 minutes", 10, 500, 200), Claim("an hour", 60, 1000, 6000))


def asked(batch: int, length: int, **more: object) -> Forecast:
    """The case's run."""
    options: dict[str, object] = {"method": "qlora", "lora_r": RANK, **more}
    return told(MODEL, GPU, per_device_train_batch_size=batch, max_length=length, **options)


@cache
def training_minutes(claim: Claim, batch: int, length: int) -> float:
    """Training alone, without start-up and download."""
    return asked(batch, length).step_time_s.value * claim.iterations / MINUTE_S


def longest_within(claim: Claim, batch: int) -> int | None:
    """The length at which the claim's time is just reached; None where one token is too slow or 8,192 too fast."""
    if training_minutes(claim, batch, MOST_TOKENS) < claim.minutes or training_minutes(claim, batch, 1) > claim.minutes:
        return None
    return largest_that(lambda length: training_minutes(claim, batch, length) <= claim.minutes, MOST_TOKENS)


def why_not(claim: Claim, batch: int, length: int) -> str:
    """Whether the length and the epochs are those of a usual run that fits, or what is odd about it."""
    epochs = claim.iterations * batch / claim.samples
    if asked(batch, length).fits is False:
        return "no: does not fit 24 GB"
    if length < USUAL[0]:
        return "no: samples of a few words"
    if length > USUAL[-1]:
        return "long documents only"
    return "many epochs of few samples" if epochs > MOST_EPOCHS else "yes"


def conditions(claim: Claim) -> str:
    """For each batch the length that makes the time true."""
    rows = []
    for batch in BATCHES:
        length = longest_within(claim, batch)
        if length is None:
            rows.append([str(batch), "none up to 8,192", "–", "–", "–", "–"])
            continue
        found = asked(batch, length)
        rows.append(
            [str(batch), f"{length:,}", f"{training_minutes(claim, batch, length):.1f}",
             f"{claim.iterations * batch / claim.samples:.2g}", f"{memory_gib(found):.1f}",
             why_not(claim, batch, length)]
        )  # fmt: skip
    return markdown_table(["batch", "tokens", "minutes of training", "epochs", "GiB", "plausible"], rows)


def trained() -> str:
    """Fewer trained parameters by rank: of all, and of the elements that a packed 4-bit model seems to have."""
    rows = []
    for rank in (8, 16, 32, 64, 128):
        found = asked(1, 512, lora_r=rank)
        rows.append(
            [str(rank), f"{found.trainable_params / 1e6:.1f}M",
             f"{1 - found.trainable_params / found.total_params:.1%}",
             f"{1 - found.trainable_params / (packed_elements(found) + found.trainable_params):.1%}"]
        )  # fmt: skip
    return markdown_table(["rank", "trained", "fewer than all 7.24 billion", "fewer than the packed elements"], rows)


def packed_elements(found: Forecast) -> float:
    """Elements of the base as stored: two 4-bit weights share one byte, which a naive count takes for one weight."""
    shape = found.architecture
    kept = 2 * shape.vocab_size * shape.hidden_size
    return kept + (found.total_params - kept) / 2


def weights() -> str:
    """Bytes of the weights alone and of the whole process, by storage."""
    ways = (
        ("fp32", {"method": "lora", "precision": "fp32", "dtype": "fp32"}),
        ("bf16", {"method": "lora"}),
        ("8 bits", {"method": "qlora", "quant_method": "bnb-8bit"}),
        ("4 bits (NF4)", {"method": "qlora"}),
    )
    rows, before = [], None
    for name, options in ways:
        found = asked(1, 512, **options)
        parts = found.memory.parts_bytes
        bytes_of = parts.get("weights", 0.0) + parts.get("quantized", 0.0)
        before = before or (bytes_of, memory_gib(found))
        rows.append(
            [name, f"{bytes_of / GIGA:.1f}", change(bytes_of, before[0]), f"{memory_gib(found):.1f}",
             change(memory_gib(found), before[1])]
        )  # fmt: skip
    return markdown_table(["weights", "GB of weights", "to fp32", "GiB of the process", "to fp32"], rows)


def attention() -> str:
    """Memory above the weights by length, with the whole score matrix and without."""
    rows = []
    for length in (1024, 2048, 4096, 8192):
        cells = []
        for kind in ("eager", "sdpa"):
            found = asked(1, length, attn_implementation=kind, loss_type="chunked_nll")
            parts = found.memory.parts_bytes
            resting = sum(parts.get(name, 0.0) for name in ("weights", "quantized", "adapters", "optimizer_state"))
            cells.append(gib(found.memory.allocated_bytes.value - resting))
        rows.append([f"{length:,}", *(f"{cell:.2f}" for cell in cells), f"{length**2:,}", f"{length**1.5:,.0f}"])
    head = ["tokens", "eager: GiB beyond weights and states", "sdpa", "n²", "n·√n"]
    return markdown_table(head, rows)


def figures() -> Figures:
    """Everything that the page states."""
    short, long = CLAIMS
    return {
        "ten_minutes": conditions(short), "an_hour": conditions(long), "trained": trained(), "weights": weights(),
        "attention": attention(),
        "tokens_ratio": f"{long.minutes / long.iterations / (short.minutes / short.iterations):.0f}",
    }  # fmt: skip
