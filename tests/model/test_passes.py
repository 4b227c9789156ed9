"""Two clocks through many micro-steps: the counted sum against a simulation that goes through every one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunecast.model.passes import Passes

seconds = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.25])
queues = st.sampled_from([0.0, 0.75, 2.0, 40.0, math.inf])


def simulated(passes: Passes) -> list[float]:
    """The times at which host and device are done, kernel batch by kernel batch: nothing is assumed to repeat."""
    host = device = 0.0
    spent = [0.0, 0.0, 0.0, 0.0]
    for segment in [*[0, 3, 1] * int(passes.micro_steps[0]), 2]:
        busy, issue, queue = (float(part[0, segment]) for part in (passes.busy, passes.issue, passes.queue))
        if passes.meets[0, segment]:
            host = max(host, device)
        done = device + busy + issue if passes.synchronous else max(device + busy, host + issue)
        host = done if passes.synchronous else max(host + issue, done - queue)
        spent[segment] += done - device
        device = done
    return spent


@settings(max_examples=300, deadline=None)
@given(
    busy=st.tuples(seconds, seconds, seconds, seconds),
    issue=st.tuples(seconds, seconds, seconds, seconds),
    queue=st.tuples(queues, queues, queues, queues),
    meets=st.tuples(*[st.integers(0, 1)] * 4),
    steps=st.sampled_from([1, 2, 7, 8, 9, 40, 333]),
    synchronous=st.booleans(),
)
def test_counted_micro_steps_are_those_gone_through(busy, issue, queue, meets, steps, synchronous) -> None:  # type: ignore[no-untyped-def]
    passes = Passes(
        busy=np.array([busy]),
        issue=np.array([issue]),
        queue=np.array([queue]),
        meets=np.array([meets], dtype=float),
        micro_steps=np.array([float(steps)]),
        synchronous=synchronous,
    )
    assert passes.seconds()[0] == pytest.approx(simulated(passes), rel=1e-9, abs=1e-9)


def test_runs_of_different_accumulation_side_by_side() -> None:
    """A host that is 1 s a micro-step faster fills a queue of 100 s in 100 of them; another is always behind."""
    alike = {"queue": np.full((2, 4), 100.0), "meets": np.zeros((2, 4)), "synchronous": False}
    busy, issue = (
        np.array([[1.0, 0.5, 1.0, 0.5], [0.0, 1.0, 1.0, 0.0]]),
        np.array([[0.5, 0.3, 150.0, 0.2], [1.0, 2.0, 5.0, 0.0]]),
    )
    found = Passes(busy=busy, issue=issue, micro_steps=np.array([10.0**9, 3.0]), **alike).seconds()
    assert found[0] == pytest.approx([1e9, 0.5e9, 50.0, 0.5e9])
    assert found[1] == pytest.approx([3.0, 6.0, 5.0, 0.0])
