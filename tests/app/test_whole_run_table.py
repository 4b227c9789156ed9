"""The whole run as people read it: nothing beyond 100 columns, every phase with its origin, sums that hold."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import tunecast
from tunecast.forecast_table import forecast_report
from tunecast.model.forecast import Forecast
from tunecast.model.forecast_json import forecast_to_dict

MODEL = "meta-llama/Llama-3.1-8B"
AROUND = {
    "dataset_gb": 2,
    "eval_samples": 500,
    "eval_steps": 1000,
    "save_steps": 500,
    "merge": True,
    "export": "q4",
    "upload": True,
    "trials": 8,
    "early_stopping_fraction": 0.3,
    "phase_machine": ["prepare=0.1", "deploy=0.2"],
}


def ask(**options: Any) -> Forecast:
    asked: dict[str, Any] = {"method": "qlora", "max_length": 2048, "tokens": "20M", "gpu": "h100-sxm5-80gb", **options}
    (forecast,) = tunecast.estimate(MODEL, **asked)
    return forecast


def printed(forecasts: list[Forecast], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in forecast_report(forecasts, width):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_phase_has_its_line_and_its_origin() -> None:
    forecast = ask(**AROUND)
    text = printed([forecast])
    assert max(map(len, text.splitlines())) <= 100
    lines = {words[0]: line for line in text.splitlines() if (words := line.split())}
    for phase in forecast.phases_h:
        assert phase in lines, phase
    assert "assumed" in lines["download"]
    assert "$0.10/h" in text
    assert "other machines" in text
    assert "assumed, not measured: start, setup, download" in text


def test_the_table_shows_training_beside_the_whole_run() -> None:
    forecasts = tunecast.estimate(MODEL, method="qlora", tokens="20M", gpu=["h100-sxm5-80gb", "l4"])
    text = printed(forecasts)
    assert text.count("train ") >= 2
    assert max(map(len, text.splitlines())) <= 100
    heading = next(line for line in printed(forecasts, 140).splitlines() if line.startswith(" GPU"))
    assert "train" in heading


def test_interruptions_are_told_with_rate_source_distribution_and_break_even() -> None:
    forecast = ask(
        tokens="2B", spot=True, usd_per_gpu_hour=1.5, interruption_rate_per_month=0.9, checkpoint_interval_min="60"
    )
    text = printed([forecast])
    assert max(map(len, text.splitlines())) <= 100
    for words in ("interruptions expected", "90th percentile", "on demand instead", "cheaper if interruptible costs"):
        assert words in text, words
    answer = forecast_to_dict(forecast)["interruptions"]
    assert answer["checkpoint_interval_min"] == 60.0
    assert answer["origin"] == "cli"
    low, high = answer["percentiles_h"]["p10"], answer["percentiles_h"]["p90"]
    assert low < answer["expected_time_h"] < high
    assert answer["expected_time_h"] > answer["uninterrupted_time_h"]
    price = answer["break_even_usd_per_h"]
    assert price * answer["expected_time_h"] == pytest.approx(answer["on_demand_usd"])


def test_ones_own_machine_has_no_offer_and_says_what_its_electricity_is_made_of() -> None:
    forecast = ask(gpu="rtx-3090-24gb", owned=True, electricity_usd_per_kwh=0.3)
    text = printed([forecast])
    assert forecast.offer is None
    assert forecast.cost_usd is not None
    assert "energy, kWh" in text
    assert "assumed" in text.split("energy, kWh")[1]
    assert "start" not in forecast.phases_h


def test_an_hour_that_is_begun_is_paid_and_told() -> None:
    text = printed([ask(max_steps=100, tokens=None, billing_granularity_s=3600)])
    assert "1.00 h are paid" in text


def test_no_interruptible_offer_is_said() -> None:
    forecast = ask(gpu="quadro-rtx-8000-48gb", spot=True)
    assert forecast.cost_usd is None
    assert forecast.total_time_h is not None
    assert any("no interruptible offer" in note for note in forecast.notes)
