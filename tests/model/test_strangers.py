"""What an estimate says of its own interval: how often such intervals held for runs that nothing was fitted to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tunecast

PAGE = Path(__file__).parents[2] / "results" / "validation" / "unseen.md"


def told(**options: Any) -> list[str]:
    (found,) = tunecast.estimate("Qwen/Qwen2.5-0.5B", **options)
    return [note for note in found.notes if "nothing was fitted to" in note]


def test_an_estimate_without_a_calibration_says_what_the_page_says() -> None:
    (note,) = told(gpu="l40s-48gb")
    counted = re.search(r"held (\d+)% of (\d+) published runs .* and (\d+)% were slower", note)
    page = re.search(
        r"\*\*(\d+) of .* ([\d.]+)% inside the 80% interval, ([\d.]+)% below", PAGE.read_text(encoding="utf-8")
    )
    assert counted is not None
    assert page is not None
    assert counted[2] == page[1]
    assert abs(int(counted[1]) - float(page[2])) <= 0.55
    assert abs(int(counted[3]) - float(page[3])) <= 0.55


def test_it_says_how_often_intervals_of_the_method_asked_about_held() -> None:
    rows = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    alike = [row for row in rows if row["method"] == "qlora"]
    inside = sum(row["low"] <= row["measured"] <= row["high"] for row in alike)
    (note,) = told(gpu="l40s-48gb", method="qlora")
    assert f"({inside / len(alike):.0%} of {len(alike)} by qlora)" in note


def test_it_is_not_said_of_a_speed_that_the_user_gave_or_of_a_simulated_card() -> None:
    assert not told(gpu="l40s-48gb", achieved_tflops=100.0)
    assert not told(gpu="mock:l40s")
