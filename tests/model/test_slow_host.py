"""Intervals where host and device are about as slow, against draws of both clocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.inventory import step_operations
from tunecast.model.on_device import job_factors
from tunecast.model.phase_table import phase_table
from tunecast.model.question import Question
from tunecast.model.slow_host import with_slow_host
from tunecast.model.target import resolve_targets
from tunecast.model.time import scalars, stacked, step_seconds
from tunecast.model.value import Z80, Value

LLAMA = "meta-llama/Llama-3.1-8B"
LENGTHS = (256, 512, 768, 1024, 1152, 1280, 1536, 2048)
DRAWS = 4000


def step_of(length: int, gpu: str = "h100-sxm5-80gb") -> Value:
    (target,) = resolve_targets([gpu], {})
    options = {"method": "lora", "max_length": length}
    return forecast(Question(architecture=load_architecture(LLAMA), options=options), target).step_time_s


def test_more_work_never_ends_earlier() -> None:
    """The same launches: the host is as unsure at every length, so no upper end lies below that of less work."""
    ends = [step_of(length).high for length in LENGTHS]
    assert all(later >= 0.99 * earlier for earlier, later in itertools.pairwise(ends))


@pytest.mark.parametrize("length", [1024, 1152])
def test_the_upper_end_where_the_clocks_cross(length: int) -> None:
    """Nine in ten draws of all fitted factors together lie below it, which the slopes at the forecast miss."""
    architecture = load_architecture(LLAMA)
    (target,) = resolve_targets(["h100-sxm5-80gb"], {})
    found = forecast(Question(architecture=architecture, options={"method": "lora", "max_length": length}), target)
    factors = job_factors(target, architecture, found.run)
    stack = stacked([phase_table(step_operations(architecture, found.run), factors, run=found.run)])
    draws = np.random.default_rng(0).multivariate_normal(
        np.zeros(len(factors.step_params)), np.array(factors.step_covariance), size=DRAWS
    )
    values = scalars(factors)
    seconds = [
        step_seconds(
            stack,
            values | {n: values.get(n, 1.0) * float(np.exp(m)) for n, m in zip(factors.step_params, draw, strict=True)},
            synchronous=False,
        )[0]
        for draw in draws
    ]
    below = float(np.mean(np.array(seconds) <= found.step_time_s.high))
    assert 0.87 <= below <= 0.96


def test_the_slow_host_is_at_the_upper_end_of_a_sum_of_two() -> None:
    """Two independent costs of equal size: the log of their sum spreads by the root of half a variance."""
    names, covariance = ("host_s_per_launch", "scale.host_calls"), np.diag([0.09, 0.09])
    values = {"host_s_per_launch": 1.0, "scale.host_calls": 1.0, "scale.memory": 2.0}

    def host_s(at: dict[str, float]) -> float:
        return at["host_s_per_launch"] + at["scale.host_calls"]

    slow = with_slow_host(values, names, covariance, lambda at: host_s(dict(at)))
    assert np.log(host_s(slow) / 2.0) == pytest.approx(Z80 * np.sqrt(0.09 / 2), rel=1e-6)
    assert slow["scale.memory"] == 2.0
    assert with_slow_host(values, names, covariance, lambda _: 0.0) == values
