"""The statistics of the priors against rows that were made with known parameters, effects and spreads."""

from __future__ import annotations

import numpy as np
import pytest

from tunecast.calibrate.priors_hierarchy import (
    STUDENT_DF,
    Array,
    Problem,
    effects_of,
    linear,
    marginal_of,
    solve,
    student_weights,
)

SOURCES, ROWS_EACH = 30, 12
TRUE = {"source": 0.2, "row": 0.05}
MOVES = {"source": ("a", "b"), "source.a": ("a",), "source.b": ("b",)}
"""A source is slower in all of its work, or in one of two kinds of it."""


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
        believed_sd={**dict.fromkeys({group for group, _ in effects}, 0.1), "row": 0.1},
        believed_sd_log_sd=1.0,
        columns=("a", "b"),
        moves=MOVES,
        measured=measured,
        timed=lambda shared, slower: np.log(
            np.exp(shared[0] + slower[:, 0]) * work + np.exp(shared[1] + slower[:, 1]) * (1.0 - work)
        ),
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
    share = np.exp(problem.timed(np.array([0.0, -50.0]), np.zeros((len(measured), 2))))
    plain, odd = solve(problem), solve(two_speeds(names, measured, share))
    assert odd.params["a"] == pytest.approx(plain.params["a"], rel=0.02)
    assert odd.effects[("source", "00")] == pytest.approx(plain.effects[("source", "00")], abs=0.05)


def test_weights_are_those_of_students_noise() -> None:
    """(df + 1) / (df + z^2): 1 at one standard deviation, a quarter at z = 4 with four degrees of freedom."""
    assert student_weights(np.array([0.1, 0.4]), 0.1) == pytest.approx([1.0, (STUDENT_DF + 1) / (STUDENT_DF + 16)])


def test_an_effect_slows_the_kinds_of_work_that_it_reaches() -> None:
    """Three quarters of the time are of kind a, a quarter of kind b: those are the slopes."""
    effects, members = effects_of([[("source", "x"), ("source.a", "x"), ("source.b", "x")]])
    problem = two_speeds([[*effects]], np.zeros(1), np.array([0.75]))
    assert (problem.effects, problem.members.tolist()) == (effects, members.tolist())
    _, slopes = linear(problem, np.zeros(5))
    by_name = dict(zip((*problem.names, *(group for group, _ in effects)), slopes[0], strict=True))
    assert by_name == pytest.approx({"a": 0.75, "b": 0.25, "source": 1.0, "source.a": 0.75, "source.b": 0.25}, abs=1e-3)


def by_kind(rng: np.random.Generator, sds: tuple[float, float], crowded: int = ROWS_EACH) -> tuple[Problem, Array]:
    """Sources that differ in each kind of work by spreads of their own; the first may have many more rows."""
    source = np.repeat(np.arange(SOURCES), [crowded, *[ROWS_EACH] * (SOURCES - 1)])
    work = rng.random(len(source))
    slower = rng.normal(0.0, sds, (SOURCES, 2))
    times = 2.0 * work * np.exp(slower[source, 0]) + 0.5 * (1.0 - work) * np.exp(slower[source, 1])
    measured = np.log(times) + rng.normal(0.0, TRUE["row"], len(source))
    return two_speeds([[("source.a", f"{s:02d}"), ("source.b", f"{s:02d}")] for s in source], measured, work), slower


def test_spreads_by_kind_of_work_are_recovered() -> None:
    """One kind of work differs by 5% from source to source, the other by 40%."""
    problem, slower = by_kind(np.random.default_rng(3), (0.05, 0.4))
    found = solve(problem)
    assert found.sds["source.a"] == pytest.approx(0.05, rel=0.4)
    assert found.sds["source.b"] == pytest.approx(0.4, rel=0.3)
    effects = np.array([found.effects[("source.b", f"{s:02d}")] for s in range(SOURCES)])
    assert np.corrcoef(effects, slower[:, 1])[0, 1] > 0.95
    assert found.params["a"] == pytest.approx(2.0, rel=0.05)


def test_one_source_with_most_rows_does_not_decide_for_all() -> None:
    """A source with 600 of 948 rows and a slowdown of its own: the level is that of the sources, not of the rows."""
    problem, slower = by_kind(np.random.default_rng(5), (0.05, 0.4), crowded=600)
    found = solve(problem)
    of_sources = 0.5 * np.exp(slower[:, 1].mean())
    assert found.params["b"] == pytest.approx(of_sources, rel=0.12)
    assert np.sqrt(found.covariance[1, 1]) > 0.04


def test_the_gradient_of_the_likelihood_is_its_slope(made: tuple[Problem, Array]) -> None:
    problem, _ = made
    marginal = marginal_of(problem, solve(problem).vector, np.ones(len(problem.measured)))
    at, step = np.log([0.15, 0.07]), 1e-5
    _, gradient = marginal.minus_log(at)
    slopes = [
        (marginal.minus_log(at + step * u)[0] - marginal.minus_log(at - step * u)[0]) / (2 * step) for u in np.eye(2)
    ]
    assert gradient == pytest.approx(slopes, rel=1e-4)


def test_the_likelihood_is_that_of_correlated_normal_rows(made: tuple[Problem, Array]) -> None:
    """Against the density of all rows at once, parameters and effects integrated out: the same differences."""
    problem, _ = made
    vector = solve(problem).vector
    marginal = marginal_of(problem, vector, np.ones(len(problem.measured)))
    level, slopes = linear(problem, vector)
    missed = problem.measured - level - slopes @ (np.concatenate([problem.centre, problem.effect_centre]) - vector)

    def dense(source: float, row: float) -> float:
        prior = np.diag([*problem.width**2, *[source**2] * len(problem.effects)])
        covariance = slopes @ prior @ slopes.T + row**2 * np.eye(len(missed))
        belief = sum((np.log(sd / 0.1)) ** 2 for sd in (source, row))
        return 0.5 * float(missed @ np.linalg.solve(covariance, missed) + np.linalg.slogdet(covariance)[1] + belief)

    points = [(0.2, 0.05), (0.1, 0.08), (0.3, 0.04)]
    ours = [marginal.minus_log(np.log(point))[0] for point in points]
    theirs = [dense(*point) for point in points]
    assert np.diff(ours) == pytest.approx(np.diff(theirs), rel=1e-6)
