"""The statistics of the priors against rows that were made with known parameters, effects and spreads."""

from __future__ import annotations

import numpy as np
import pytest

from tunecast.calibrate.priors_hierarchy import (
    HOST,
    STUDENT_DF,
    Array,
    Problem,
    effects_of,
    linear,
    solve,
    student_weights,
)

SOURCES, ROWS_EACH = 30, 12
TRUE = {"source": 0.2, "row": 0.05}


def two_speeds(names: list[list[tuple[str, str]]], measured: Array, work: Array) -> Problem:
    """Rows that take ``a x + b (1 - x)`` for a share x of their own, a and b unknown."""
    effects, members = effects_of(names)
    return Problem(
        names=("a", "b"),
        centre=np.zeros(2),
        width=np.array([1.0, 1.0]),
        effects=effects,
        members=members,
        effect_centre=np.zeros(len(effects)),
        believed_sd={"source": 0.1, "row": 0.1},
        believed_sd_log_sd=1.0,
        measured=measured,
        timed=lambda shared, slower, _: np.log(np.exp(shared[0]) * work + np.exp(shared[1]) * (1.0 - work)) + slower,
    )


@pytest.fixture(scope="module")
def made() -> tuple[Problem, Array]:
    rng = np.random.default_rng(7)
    n = SOURCES * ROWS_EACH
    work = rng.random(n)
    source = np.repeat(np.arange(SOURCES), ROWS_EACH)
    slower = rng.normal(0.0, TRUE["source"], SOURCES)
    measured = np.log(2.0 * work + 0.5 * (1.0 - work)) + slower[source] + rng.normal(0.0, TRUE["row"], n)
    return two_speeds([[("source", f"{s:02d}")] for s in source], measured, work), slower


def test_parameters_effects_and_spreads_are_recovered(made: tuple[Problem, Array]) -> None:
    problem, slower = made
    found = solve(problem)
    assert found.params["a"] == pytest.approx(2.0, rel=0.08)
    assert found.params["a"] / found.params["b"] == pytest.approx(4.0, rel=0.03)
    assert found.sds["source"] == pytest.approx(TRUE["source"], rel=0.3)
    assert found.sds["row"] == pytest.approx(TRUE["row"], rel=0.25)
    effects = np.array([found.effects[("source", f"{s:02d}")] for s in range(SOURCES)])
    assert np.corrcoef(effects, slower)[0, 1] > 0.98


def test_what_rows_leave_open_is_the_common_level(made: tuple[Problem, Array]) -> None:
    """Thirty sources of spread 0.2 leave 0.2 / sqrt(30) of the level; the ratio of the two speeds is known better."""
    problem, _ = made
    found = solve(problem)
    level = np.sqrt(found.covariance[0, 0])
    ratio = np.sqrt(np.array([1.0, -1.0]) @ found.covariance[:2, :2] @ np.array([1.0, -1.0]))
    assert level == pytest.approx(found.sds["source"] / np.sqrt(SOURCES), rel=0.25)
    assert ratio < level / 2.0


def test_an_odd_row_moves_little(made: tuple[Problem, Array]) -> None:
    problem, _ = made
    measured = problem.measured.copy()
    measured[5] += 3.0
    names = [[problem.effects[i] for i in np.flatnonzero(row)] for row in problem.members]
    share = np.exp(problem.timed(np.array([0.0, -50.0]), np.zeros(len(measured)), np.zeros(len(measured))))
    plain, odd = solve(problem), solve(two_speeds(names, measured, share))
    assert odd.params["a"] == pytest.approx(plain.params["a"], rel=0.02)
    assert odd.effects[("source", "00")] == pytest.approx(plain.effects[("source", "00")], abs=0.05)


def test_weights_are_those_of_students_noise() -> None:
    """(df + 1) / (df + z^2): 1 at one standard deviation, a quarter at z = 4 with four degrees of freedom."""
    assert student_weights(np.array([0.1, 0.4]), 0.1) == pytest.approx([1.0, (STUDENT_DF + 1) / (STUDENT_DF + 16)])


def test_effects_on_the_host_slow_the_host_alone() -> None:
    effects, members = effects_of([[("source", "x"), (HOST, "x")]])
    problem = Problem(
        names=("device", "host"),
        centre=np.zeros(2),
        width=np.ones(2),
        effects=effects,
        members=members,
        effect_centre=np.zeros(2),
        believed_sd={"source": 0.1, HOST: 0.1, "row": 0.1},
        believed_sd_log_sd=1.0,
        measured=np.zeros(1),
        timed=lambda shared, work, host: np.log(3.0 * np.exp(shared[0] + work) + np.exp(shared[1] + host)),
    )
    _, slopes = linear(problem, np.zeros(4))
    by_name = dict(zip((*problem.names, *(group for group, _ in effects)), slopes[0], strict=True))
    assert by_name == pytest.approx({"device": 0.75, "host": 0.25, HOST: 0.25, "source": 0.75}, abs=1e-3)
