"""Record against record: the test on raw samples, its correction, and what is refused."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.compare import (
    NOT_SIGNIFICANT,
    RecordPair,
    check_comparable,
    holm,
    named_records,
    pair_trials,
    verdict_of,
    welch_p_value,
)


def trial(samples_s: list[float], *, outcome: str = "ok", bench: str = "gemm") -> dict[str, Any]:
    return {"bench": bench, "params": {"m": 1}, "outcome": outcome, "samples_s": samples_s}


def noisy(median_s: float, n: int, seed: int, sd: float = 0.02) -> list[float]:
    source = random.Random(seed)
    return [median_s * math.exp(source.gauss(0, sd)) for _ in range(n)]


def test_welch_agrees_with_a_worked_example() -> None:
    """Logs 1, 2, 3 against 2, 3, 7: t = -2 / sqrt(1/3 + 7/3) = -1.2247, 2.546 degrees of freedom."""
    p = welch_p_value([math.exp(x) for x in (1, 2, 3)], [math.exp(x) for x in (2, 3, 7)])
    t, dof = 2 / math.sqrt(1 / 3 + 7 / 3), (1 / 3 + 7 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (7 / 3) ** 2 / 2)
    from scipy.integrate import quad

    density = math.gamma((dof + 1) / 2) / math.sqrt(dof * math.pi) / math.gamma(dof / 2)
    tail, _ = quad(lambda x: density * (1 + x * x / dof) ** (-(dof + 1) / 2), t, math.inf)
    assert p == pytest.approx(2 * tail, rel=1e-6)


def test_too_few_samples_cannot_tell() -> None:
    assert welch_p_value([1.0], [2.0, 2.1]) is None


def test_samples_without_any_noise_differ_or_not() -> None:
    assert welch_p_value([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert welch_p_value([1.0, 1.0], [1.1, 1.1]) == 0.0


def test_holm_steps_down_and_stops_at_the_first_failure() -> None:
    """0.05/4 = 0.0125, 0.05/3 = 0.0167, 0.05/2 = 0.025: the third fails, so the fourth does too."""
    assert holm([0.01, 0.04, 0.03, 0.005, None]) == [True, False, False, True, False]


def test_equal_records_rarely_raise_a_false_alarm() -> None:
    """400 tables of 10 equal trials: at most 5% of tables may have any verdict but "not significant"."""
    alarms = 0
    for table in range(400):
        shared = [
            (str(i), trial(noisy(1.0, 8, table * 100 + i)), trial(noisy(1.0, 8, table * 100 + i + 50)))
            for i in range(10)
        ]
        alarms += any(pair.verdict != NOT_SIGNIFICANT for pair in pair_trials(shared))
    assert alarms <= 0.05 * 400 + 3 * math.sqrt(400 * 0.05 * 0.95)


@pytest.mark.parametrize(("scale", "verdict"), [(1.2, "slower"), (0.8, "faster")])
def test_a_clear_difference_is_named_with_its_ratio(scale: float, verdict: str) -> None:
    (pair,) = pair_trials([("k", trial(noisy(1.0, 10, 1)), trial(noisy(scale, 10, 2)))])
    assert pair.verdict == verdict
    assert pair.ratio == pytest.approx(scale, rel=0.03)


def test_out_of_memory_on_one_side_is_an_outcome_not_a_ratio() -> None:
    (pair,) = pair_trials([("k", trial([], outcome="oom"), trial([1.0, 1.1]))])
    assert (pair.verdict, pair.ratio, pair.first_s, pair.second_s) == ("oom / ok", None, None, 1.05)


def test_several_trials_share_one_sentence() -> None:
    same = pair_trials([(str(i), trial(noisy(1.0, 8, i)), trial(noisy(1.0, 8, i + 9))) for i in range(3)])
    slower = pair_trials([("k", trial(noisy(1.0, 10, 1)), trial(noisy(1.3, 10, 2)))])
    assert verdict_of(same) == NOT_SIGNIFICANT
    assert verdict_of([*same, *slower]) == f"3 {NOT_SIGNIFICANT}, 1 slower"


def test_records_of_different_protocols_do_not_compare() -> None:
    with pytest.raises(InputError, match=r"protocol 1 and .* protocol 2"):
        check_comparable({"protocol": {"version": 1}}, {"protocol": {"version": 2}}, "a.json", "b.json")


def test_the_json_form_is_plain() -> None:
    pair = RecordPair(
        first="a", second="b", first_device="cpu", second_device="cpu", trials=(), only_first=1, only_second=0
    )
    assert pair.as_dict()["only_first"] == 1


def watched_run() -> Path:
    """A committed record of the callback."""
    return next((Path(__file__).parents[2] / "results/validation/callback").glob("cpu_run_*.json"))


def test_a_folder_is_the_newest_calibration_of_each_device(tmp_path: Path) -> None:
    made = (("old", "a", "2026-01-01"), ("new", "a", "2026-02-01"), ("other", "b", "2026-01-01"))
    for name, gpu, day in made:
        record = {"trials": [], "hardware": {"gpu": gpu}, "created_at": day}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    shutil.copy(watched_run(), tmp_path)
    assert named_records([tmp_path]) == [tmp_path / "new.json", tmp_path / "other.json"]
    assert named_records([tmp_path / "old.json", tmp_path]) == [
        tmp_path / name for name in ("old.json", "new.json", "other.json")
    ]


def test_a_folder_without_a_calibration_is_refused(tmp_path: Path) -> None:
    shutil.copy(watched_run(), tmp_path)
    with pytest.raises(InputError, match="watched runs alone"):
        named_records([tmp_path])
