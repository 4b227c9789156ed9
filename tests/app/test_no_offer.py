"""Cards that nobody rents out on demand, and kernels that old cards do not have: said, with what to type."""

from __future__ import annotations

import pytest

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.price_book import shipped_book
from tunecast.catalogs.prices import PRICE_TYPES

MODEL = "Qwen/Qwen2.5-1.5B"
CARD = "rtx-3090-24gb"


def test_an_answer_without_a_price_says_so_and_what_else_there_is() -> None:
    """The catalog has this card from private owners alone."""
    assert not shipped_book().offers_for(CARD)
    assert shipped_book().offers_for(CARD, 1, PRICE_TYPES)
    silent, priced, owned = (
        tunecast.estimate(MODEL, gpu=CARD, method="lora", **more)[0]
        for more in ({}, {"usd_per_gpu_hour": 0.2}, {"owned": True, "electricity_usd_per_kwh": 0.3})
    )
    (told,) = [note for note in silent.notes if note.startswith("no price")]
    cheapest = min(
        (job.offer for job in shipped_book().offers_for(CARD, 1, PRICE_TYPES)), key=lambda offer: offer.usd_per_gpu_hour
    )
    assert told == (
        f"no price: nobody is known to rent this GPU on demand; {cheapest.provider} has it {cheapest.price_type} "
        f"(--usd-per-gpu-hour {cheapest.usd_per_gpu_hour:g}, or recommend --purchase {cheapest.price_type})"
    )
    assert silent.offer is None
    for other in (priced, owned):
        assert not any(note.startswith("no price") for note in other.notes)


def test_a_card_nobody_rents_out_at_all_is_told_apart() -> None:
    assert not shipped_book().offers_for("v100s-pcie-32gb", 1, PRICE_TYPES)
    (found,) = tunecast.estimate(MODEL, gpu="v100s-pcie-32gb", method="lora")
    assert "no price: nobody is known to rent this GPU; --usd-per-gpu-hour N counts a price of your own" in found.notes


def test_recommend_names_what_would_take_other_offers() -> None:
    shared = {"method": "lora", "tokens": "10M", "gpu": CARD}
    said = tunecast.recommend(MODEL, **shared).refusal()
    assert said.startswith(
        f"Nobody is known to rent out {CARD} as asked: no offer of 1 or 2 or 4 or 8 in one machine; "
    )
    assert "--purchase community" in said
    assert "--max-gpus" not in said
    assert tunecast.recommend(MODEL, **shared, purchase=["community", "marketplace"]).front


@pytest.mark.parametrize("gpu", ["v100-sxm2-32gb", "t4-16gb"])
def test_cut_cross_entropy_is_of_newer_cards(gpu: str) -> None:
    """apple/ml-cross-entropy asks for Ampere or newer; Unsloth has kernels of its own."""
    with pytest.raises(InputError, match=r"cut_cross_entropy was asked for, but .* kernels run from 8\.0 on"):
        tunecast.estimate(MODEL, gpu=gpu, method="lora", loss_type="cut_cross_entropy")
    assert tunecast.estimate(MODEL, gpu="l4", method="lora", loss_type="cut_cross_entropy")
    large = {"method": "lora", "max_length": 4096, "per_device_train_batch_size": 6}
    (found,) = tunecast.estimate(MODEL, gpu=gpu, **large)
    changes = [note for note in found.notes if "make it fit" in note]
    assert changes
    assert not any("cut_cross_entropy" in note for note in changes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"usd_per_gpu_hour": float("inf")}, "--usd-per-gpu-hour is inf, but it must be finite"),
        ({"exact": "yes"}, "--exact is 'yes', but it is a switch"),
        ({"share_host": "no"}, "--share-host is 'no', but it is a switch"),
    ],
)
def test_what_python_can_get_wrong_is_told(given: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        tunecast.estimate(MODEL, gpu="l4", **given)  # type: ignore[arg-type]


def test_an_empty_name_is_no_model() -> None:
    with pytest.raises(InputError, match="The model is an empty word"):
        tunecast.estimate("", gpu="l4")


def test_a_plan_with_its_price_says_nothing_of_none() -> None:
    found = tunecast.recommend(MODEL, method="lora", tokens="10M", gpu="l40s")
    assert found.front
    for picked in found.front:
        assert not any(note.startswith("no price") for note in picked.forecast.notes)
