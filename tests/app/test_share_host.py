"""Two simulated cards in one slow machine: the record of the one improves the forecast of the other."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
RECORDED, ASKED = "mock:a100-sxm4-80gb#5@slow-host", "mock:l40s-48gb#5"
MODEL = "Qwen/Qwen2.5-0.5B"


def test_a_host_that_is_shared_is_forecast_better(tmp_path: Path) -> None:
    """At 256 tokens the host issues for longer than the card works; its speed is nothing the prior can know."""
    import tunecast
    from tunecast.asked import read_asked
    from tunecast.calibrate.mock.device import open_mock, with_physics
    from tunecast.measurement import measure_on

    record = tunecast.calibrate_device(RECORDED, out=tmp_path)
    machine = open_mock(RECORDED).physics.host
    card = with_physics(open_mock(ASKED), host=machine)
    for length in (128, 256):
        options = {"method": "lora", "max_length": length}
        truth_s = measure_on(card, read_asked(MODEL, options), 5).step_time_s.value
        bare = {**options, "trainer_loop": False}  # as it is measured
        (alone,) = tunecast.estimate(MODEL, gpu=ASKED, **bare)
        (shared,) = tunecast.estimate(MODEL, gpu=ASKED, records=[record], share_host=True, **bare)
        assert shared.bound_by == "host"
        assert abs(shared.step_time_s.value / truth_s - 1.0) < 0.6 * abs(alone.step_time_s.value / truth_s - 1.0)
        width = {name: f.step_time_s.high / f.step_time_s.low for name, f in (("alone", alone), ("shared", shared))}
        assert width["shared"] < width["alone"]
        assert shared.origins["host_s_per_launch"] == f"reference:{record.name}"
        assert shared.origins["scale.gemm"] == alone.origins["scale.gemm"]
