"""What is printed of a whole training: FLOPs beside the classic estimate, GPU-hours, days and money."""

from __future__ import annotations

import re

import pytest

from tunecast.cli.program import program


def test_llama_3_1_405b_as_meta_trained_it_is_told_in_full(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """15.6T tokens on 16,000 H100 at 400 TFLOP/s each: by hand 3.8e25 FLOPs, 26.4M GPU-hours, 69 days, 53M USD."""
    monkeypatch.setenv("COLUMNS", "100")
    asked = ["--method", "full", "--tokens", "15.6T", "--num-gpus", "16000", "--sharding", "fsdp"]
    speed = ["--achieved-tflops", "400", "--usd-per-gpu-hour", "2", "--gpu", "h100-sxm5-80gb"]
    assert not program(["estimate", "meta-llama/Llama-3.1-405B", *asked, *speed], standalone_mode=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 100
    printed = "\n".join(lines)
    classic = 6 * 405.85e9 * 15.6e12
    told = re.search(r"training FLOPs \S+ 6ND: (\S+)", printed)
    assert told is not None
    assert float(told[1]) == pytest.approx(classic, rel=0.005)
    assert "8ND: 5.07e+25" in printed
    hours = re.search(r"GPU-hours ([\d,]+) ([\d.]+) days", printed)
    assert hours is not None
    assert float(hours[1].replace(",", "")) == pytest.approx(classic / 400e12 / 3600, rel=0.01)
    assert float(hours[2]) == pytest.approx(classic / 400e12 / 86400 / 16000, rel=0.01)
    cost = re.search(r"cost, \$ \$([\d,]+)", printed)
    assert cost is not None
    assert float(cost[1].replace(",", "")) == pytest.approx(classic / 400e12 / 3600 * 2, rel=0.01)
