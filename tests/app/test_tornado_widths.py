"""What nobody chose moves a step by no more than the step is unsure, input by input."""

from __future__ import annotations

from pathlib import Path

import pytest

import tunecast
from tunecast.sweep import sweep

RECORDS = Path(__file__).resolve().parents[2] / "results" / "records"
H100 = RECORDS / "h100-sxm5-80gb_20261127T162304Z_830ee0e3.json"


@pytest.mark.parametrize("max_length", [1024, 4096])
def test_a_rate_alone_is_no_less_sure_than_the_step(max_length: int) -> None:
    """A kind's time is as unsure as the curves that this run follows, not as the least known of a record's."""
    asked = {"gpu": "h100-sxm5-80gb", "method": "lora", "tokens": "10M", "max_length": max_length, "records": H100}
    (found,) = tunecast.estimate("meta-llama/Llama-3.1-8B", **asked)
    bars = sweep("meta-llama/Llama-3.1-8B", **asked, metric="step").bars
    rates = [bar for bar in bars if bar.kind == "uncertain" and bar.name.startswith("time of ")]
    assert rates
    for bar in rates:
        assert bar.low is not None
        assert bar.high is not None
        assert bar.high - bar.low <= 1.25 * (found.step_time_s.high - found.step_time_s.low), bar.name
