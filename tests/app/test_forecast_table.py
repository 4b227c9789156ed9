"""What people read: order, words, and that nothing is lost on a narrow terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

import tunecast
from tunecast.forecast_table import best_first, forecast_report, notes, offer, origin, share
from tunecast.model.forecast import Forecast
from tunecast.model.value import Value
from tunecast.run_line import heading, run_line
from tunecast.tables import seconds

Make = Callable[..., Forecast]


def printed(forecasts: list[Forecast], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in forecast_report(forecasts, width):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def priced(make: Make, gpu: str, cost: float, **changes: object) -> Forecast:
    return make(gpu, cost_usd=Value(value=cost, low=cost, high=cost), **changes)


def test_those_that_fit_come_first_and_the_cheapest_of_them_before(make: Make) -> None:
    too_small = priced(make, "rtx-4090-24gb", 1.0, fits=False, verdict="no")
    dear, cheap = priced(make, "h100-sxm5-80gb", 30.0), priced(make, "a100-sxm4-80gb", 20.0, verdict="tight")
    unpriced = make("h200-sxm5-141gb", cost_usd=None, cost_per_million_tokens_usd=None, offer=None)
    unknown = priced(make, "gb10-128gb", 2.0, fits=None, verdict=None)
    order = best_first([too_small, unknown, unpriced, dear, cheap])
    assert [f.gpu for f in order] == [
        "a100-sxm4-80gb",
        "h100-sxm5-80gb",
        "h200-sxm5-141gb",
        "gb10-128gb",
        "rtx-4090-24gb",
    ]


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_no_number_is_cut_at_any_width(width: int, make: Make) -> None:
    long_id = make("rtx-pro-6000-blackwell-maxq-96gb", verdict="no", fits=False)
    text = printed([make(), long_id], width)
    assert max(map(len, text.splitlines())) <= width
    for whole in ("43.0/79.1", "2.50 s", "2.00–3.00", "410", "10.0 h", "$15.00", "12.0–18.0", "prior", "fits", "no"):
        assert whole in text, whole
    assert "runpod" in text
    assert "rtx-pro-6000-blackwell-maxq-96gb" in text or width < 100


def test_without_an_amount_a_million_tokens_are_priced(make: Make) -> None:
    text = printed([make(total_time_h=None, cost_usd=None), make("b", total_time_h=None)], 120)
    assert "$/M tokens" in text
    assert "$1.50" in text
    assert "time" not in text.split("factors")[0].replace("training", "")


def test_the_origin_gets_a_column_where_it_differs(make: Make) -> None:
    measured = make("l4-24gb", origins={"gemm": "measured:l4.json"})
    different, same = printed([make(), measured], 100), printed([make(), make()], 100)
    assert "factors" in next(line for line in different.splitlines() if line.startswith(" GPU"))
    assert "factors" not in next(line for line in same.splitlines() if line.startswith(" GPU"))
    assert "factors of all: prior" in " ".join(same.split())


def test_one_gpu_is_shown_in_detail(make: Make) -> None:
    text = printed([make()], 80)
    for words in (
        "fits (probability 97%)",
        "allocated",
        "reserved",
        "process",
        "usable",
        "weights",
        "38.0",
        "peak: loss",
    ):
        assert words in text, words
    for words in ("optimizer step", "MFU / HFU", "36% / 53%", "bound by compute", "whole run", "10.0 h", "prior"):
        assert words in text, words


def test_views_that_a_device_does_not_have_are_left_out(make: Make) -> None:
    forecast = make("cpu", offer=None, cost_usd=None, cost_per_million_tokens_usd=None, mfu=None, hfu=None)
    forecast = replace(forecast, memory=replace(forecast.memory, reserved_bytes=None))
    text = printed([forecast], 80)
    assert "reserved" not in text
    assert "– / –" in text
    assert "offer" not in text


def test_the_run_line_says_what_was_assumed(make: Make) -> None:
    line = run_line(make())
    assert line.startswith("meta-llama/Llama-3.1-70B: qlora, r=16 on 2 module kinds, 1 x 1024 tokens")
    assert "207M of 70.6B parameters train" in line
    assert line.endswith("Assumed: max_length 1024.")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"num_gpus": 8, "tp": 8}, "8 GPUs (tp 8)"),
        ({"num_gpus": 8, "pp": 4, "sharding": "ddp"}, "8 GPUs (ddp, pp 4)"),
        ({"num_gpus": 16384, "tp": 8, "pp": 16, "cp": 2, "sharding": "fsdp"}, "16384 GPUs (fsdp, tp 8, pp 16, cp 2)"),
        ({"num_gpus": 4, "sharding": "zero2"}, "4 GPUs (zero2)"),
    ],
)
def test_the_run_line_says_how_gpus_share_the_work(make: Make, layout: dict[str, Any], said: str) -> None:
    plain = make()
    line = run_line(replace(plain, run=replace(plain.run, **layout)))
    assert f", {said}, checkpointing" in line


@pytest.mark.parametrize(
    ("origins", "word"),
    [
        ({"gemm": "measured:a.json"}, "measured"),
        ({"gemm": "published", "host": "assumed", "usable_memory": "datasheet"}, "prior"),
        ({"gemm": "measured:a.json", "link": "published"}, "measured+prior"),
        ({"gemm": "published", "usable_memory": "measured"}, "prior"),
        ({"achieved_tflops": "assumed"}, "given"),
    ],
)
def test_factors_are_measured_or_prior(origins: dict[str, str], word: str, make: Make) -> None:
    assert origin(make(origins=origins)) == word


def test_an_offer_names_its_kind_unless_on_demand(make: Make) -> None:
    assert offer(make()) == "runpod $1.50/h"
    assert offer(make(offer={"provider": "vast", "price_type": "spot"})) == "vast spot"


def test_a_note_is_printed_once_with_the_gpus_it_holds_for(make: Make) -> None:
    forecasts = [make(str(i), notes=("all", "few") if i < 4 else ("all",)) for i in range(5)]
    assert notes(forecasts)[1:] == ["- all", "- few (0, 1 and 2 more)"]


def test_notes_that_differ_only_in_the_gpu_are_one(make: Make) -> None:
    forecasts = [make(gpu, notes=(f"no run on {gpu} is known",)) for gpu in ("l4-24gb", "a40-48gb")]
    forecasts.append(make("t4-16gb", notes=(), origins={"gemm": "measured:t4.json"}))
    assert notes(forecasts)[1:] == ["- no run on this GPU is known (l4-24gb, a40-48gb)"]


def test_an_interval_is_in_the_unit_of_its_value(make: Make) -> None:
    """0.9 s prints as milliseconds, so its interval, which reaches above a second, does too."""
    text = printed([make(step_time_s=Value(value=0.9, low=0.75, high=1.1))], 80)
    assert "900 ms  750–1,100" in text


def test_the_headline_names_variants_of_adapters_and_where_checkpoints_are(make: Callable[..., Forecast]) -> None:
    plain = make()
    run = replace(
        plain.run, use_dora=True, modules_to_save=("lm_head",), checkpoint_every=2, activation_offloading=True
    )
    assert "r=16 on 2 module kinds," in run_line(plain)
    assert "checkpointing on," in run_line(plain)
    line = run_line(replace(plain, run=run))
    assert "r=16 DoRA on 2 module kinds and lm_head whole" in line
    assert "checkpointing 1 of 2 layers in host memory" in line


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ({"method": "qlora"}, "qlora, r="),
        ({"method": "qlora", "quant_method": "bnb-8bit"}, "lora, int8 base, r="),
        ({"method": "qlora", "quant_method": "gptq-4bit", "precision": "fp16-autocast"}, "lora, 4-bit GPTQ base, r="),
        ({"method": "full"}, "full, 1 x"),
    ],
)
def test_the_headline_says_what_the_base_is_stored_in(options: dict[str, str], title: str) -> None:
    (told,) = tunecast.estimate("meta-llama/Llama-3.2-1B", gpu="l40s", **options)
    assert run_line(told).startswith(f"meta-llama/Llama-3.2-1B: {title}")


def test_the_heading_of_a_table_is_what_most_cards_run_and_names_the_rest(make: Make) -> None:
    """A card without bf16 comes first in the catalog, and is the exception."""
    origins = {"precision": "assumed", "max_length": "assumed"}
    old, *rest = [make(gpu, run_origins=origins) for gpu in ("t4-16gb", "l40s-48gb", "a100-sxm4-80gb")]
    old = replace(old, run=replace(old.run, precision="fp16-autocast"))
    told = heading([old, *rest])
    assert "Assumed: precision bf16-autocast (fp16-autocast on t4-16gb), max_length 1024." in told
    assert heading(rest) == run_line(rest[0])
    assert heading([old]) == run_line(old)


def test_the_table_of_all_cards_says_who_has_no_bf16() -> None:
    """Volta and Turing have no bf16 (capability below 8.0)."""
    found = tunecast.estimate(
        "Qwen/Qwen2.5-0.5B", gpu=["v100-pcie-16gb", "t4-16gb", "l4-24gb", "a10-24gb", "l40s-48gb"]
    )
    assert "precision bf16-autocast (fp16-autocast on v100-pcie-16gb, t4-16gb)" in heading(found)
    assert "bf16-autocast (fp16-autocast on v100-pcie-16gb, t4-16gb)" in found._repr_html_()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.36, "36%"), (0.0996, "10%"), (0.0949, "9.5%"), (0.004, "0.4%"), (1.24, "124%"), (None, "–")],
)
def test_small_shares_keep_a_decimal(value: float | None, shown: str) -> None:
    assert share(value) == shown


def test_a_table_has_the_classic_step_of_every_card() -> None:
    """5% serial on 4 GPUs: 1 / (0.05 + 0.95 / 4) = 3.5 times one."""
    cards = ["l40s-48gb", "a100-sxm4-80gb"]
    asked: dict[str, Any] = {"method": "lora", "num_gpus": 4, "serial_fraction": 0.05}
    both = tunecast.estimate("meta-llama/Llama-3.1-8B", gpu=cards, **asked)
    (told,) = [note for note in notes(both) if "classic" in note]
    assert told.startswith("- Amdahl's classic step at 0.05, 3.5 of 4 GPUs: ")
    for one in both:
        alone = printed([one], 100)
        assert one.scaling is not None
        assert one.scaling.amdahl is not None
        step = seconds(one.scaling.amdahl.step_time_s)
        assert f"{one.gpu} {step}" in told
        assert re.search(rf"classic at 0.05 +{step}", alone)
    plain = tunecast.estimate("meta-llama/Llama-3.1-8B", gpu=cards, num_gpus=4)
    assert not any("classic" in note for note in notes(plain))
