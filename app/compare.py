"""``tunecast compare``, record against record: the same trials, told apart by a test on their raw samples.

Two records are comparable trial by trial when their protocols agree; the trial's key (bench and
params) is its identity. Whether two sets of samples differ is decided by Welch's t-test on the
logarithms of the samples (repeat times scale, so noise is multiplicative), at 5% over the whole table
by Holm's correction. Samples within a record share its warm-up and its neighbours, so the test sees
noise within a session, not between sessions: the table says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, mean, median, variance
from typing import TYPE_CHECKING, Any

from tunecast.catalogs.errors import InputError
from tunecast.tables import DASH, plain_table, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

Trial = dict[str, Any]
FALSE_ALARM = 0.05
"""Chance that any row of a comparison of equal records is called different."""
FEWEST_SAMPLES = 2
NOT_SIGNIFICANT = "not significant"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPair:
    """One trial in two records."""

    key: str
    bench: str
    first_s: float | None
    second_s: float | None
    """Medians; None when that record has no time for it (`outcomes` says why)."""
    ratio: float | None
    """Second over first: below 1 the second is faster."""
    p_value: float | None
    verdict: str
    """``faster``, ``slower`` (the second record), ``not significant``, or the outcomes when one has no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPair:
    """Two records, trial by trial."""

    first: str
    second: str
    first_device: str
    second_device: str
    trials: tuple[TrialPair, ...]
    only_first: int
    only_second: int
    """Trials that one record has and the other does not."""

    def as_dict(self) -> dict[str, Any]:
        """The plain JSON form."""
        return asdict(self)


def named_records(paths: Sequence[Path]) -> list[Path]:
    """The files named, and the calibrations of every folder named, of each device the newest; raises InputError where
    there is none."""
    from tunecast.calibrate.watch.observations import split_records

    found = [file for path in paths for file in (split_records(path)[0] if path.is_dir() else [path])]
    if not found:
        raise InputError(f"{paths[0]} holds records of watched runs alone; name a record of tunecast calibrate.")
    return found


def trial_key(trial: Trial) -> str:
    """Bench and sorted params, as `TrialSpec.key`."""
    params = trial["params"]
    return f"{trial['bench']}({','.join(f'{name}={params[name]}' for name in sorted(params))})"


def welch_p_value(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Two-sided p-value of Welch's t-test on log samples; None with too few samples to tell.

    t is the difference of means over the root of the summed variances of the means; its degrees of
    freedom are Welch and Satterthwaite's.
    """
    if min(len(first), len(second)) < FEWEST_SAMPLES:
        return None
    logs = [[math.log(sample) for sample in samples] for samples in (first, second)]
    if not any(variance(values) for values in logs):
        return 0.0 if logs[0][0] != logs[1][0] else 1.0
    from scipy.special import stdtr

    parts = [variance(values) / len(values) for values in logs]
    t = abs(mean(logs[0]) - mean(logs[1])) / math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, logs, strict=True))
    return 2.0 * float(stdtr(freedom, -t))


def holm(p_values: Sequence[float | None]) -> list[bool]:
    """Which rows are significant when together they may raise a false alarm with chance `FALSE_ALARM`."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    significant = [False] * len(p_values)
    for rank, (p, index) in enumerate(known):
        if p > FALSE_ALARM / (len(known) - rank):
            break
        significant[index] = True
    return significant


def between_records(first: Path, second: Path) -> RecordPair:
    """Compare the trials that two records share; refuse records of different protocols."""
    from tunecast.calibrate.record import read_record

    one, two = read_record(first), read_record(second)
    check_comparable(one, two, first.name, second.name)
    trials = [{trial_key(trial): trial for trial in record["trials"]} for record in (one, two)]
    shared = [key for key in trials[0] if key in trials[1]]
    return RecordPair(
        first=first.name,
        second=second.name,
        first_device=str(one["hardware"]["gpu"] or one["hardware"]["name"]),
        second_device=str(two["hardware"]["gpu"] or two["hardware"]["name"]),
        trials=tuple(pair_trials([(key, trials[0][key], trials[1][key]) for key in shared])),
        only_first=len(trials[0]) - len(shared),
        only_second=len(trials[1]) - len(shared),
    )


def check_comparable(one: dict[str, Any], two: dict[str, Any], first: str, second: str) -> None:
    """A change of protocol changes what a trial's name means."""
    from tunecast.catalogs.errors import InputError

    versions = [record["protocol"]["version"] for record in (one, two)]
    if versions[0] != versions[1]:
        raise InputError(
            f"{first} was measured by protocol {versions[0]} and {second} by protocol {versions[1]}, so their "
            "trials do not compare; calibrate again with this version."
        )


def pair_trials(shared: Sequence[tuple[str, Trial, Trial]]) -> list[TrialPair]:
    """Medians, ratios and verdicts of shared trials; the correction runs over all of them."""
    timed = [all(trial["outcome"] == "ok" and trial["samples_s"] for trial in pair) for _, *pair in shared]
    p_values = [
        welch_p_value(one["samples_s"], two["samples_s"]) if ok else None
        for (_, one, two), ok in zip(shared, timed, strict=True)
    ]
    rows = zip(shared, timed, p_values, holm(p_values), strict=True)
    return [_pair(key, one, two, ok, p, significant) for (key, one, two), ok, p, significant in rows]


def _pair(key: str, one: Trial, two: Trial, timed: bool, p: float | None, significant: bool) -> TrialPair:
    medians = [
        median(trial["samples_s"]) if trial["outcome"] == "ok" and trial["samples_s"] else None for trial in (one, two)
    ]
    ratio = medians[1] / medians[0] if medians[0] and medians[1] else None
    verdict = NOT_SIGNIFICANT
    if not timed or ratio is None:
        verdict = f"{one['outcome']} / {two['outcome']}"
    elif significant:
        verdict = "faster" if ratio < 1 else "slower"
    return TrialPair(
        key=key, bench=one["bench"], first_s=medians[0], second_s=medians[1], ratio=ratio, p_value=p, verdict=verdict
    )


def pair_table(pair: RecordPair) -> RenderableType:
    """One row per bench: its trials' ratios together, and how many of them differ."""
    title = f"{pair.second} ({pair.second_device}) against {pair.first} ({pair.first_device})"
    table = plain_table(
        "trials", "n", "time ratio", "first", "second", "verdict", title=title, right=("n", "time ratio")
    )
    for bench in dict.fromkeys(trial.bench for trial in pair.trials):
        table.add_row(*bench_row(bench, [trial for trial in pair.trials if trial.bench == bench]))
    table.caption = caption(pair)
    table.caption_justify = "left"
    return table


def bench_row(bench: str, trials: Sequence[TrialPair]) -> list[str]:
    """A bench's geometric-mean ratio and the verdicts of its trials."""
    ratios = [trial.ratio for trial in trials if trial.ratio is not None]
    single = trials[0] if len(trials) == 1 else None
    times = [seconds(t) if t else DASH for t in (single.first_s, single.second_s)] if single else [DASH, DASH]
    return [
        bench,
        str(len(trials)),
        f"{geometric_mean(ratios):.3f}" if ratios else DASH,
        *times,
        verdict_of(trials),
    ]


def verdict_of(trials: Sequence[TrialPair]) -> str:
    """The verdicts of several trials in a few words."""
    verdicts = [trial.verdict for trial in trials]
    if set(verdicts) == {NOT_SIGNIFICANT}:
        return NOT_SIGNIFICANT
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    return ", ".join(verdict if len(trials) == 1 else f"{n} {verdict}" for verdict, n in counts.items())


def caption(pair: RecordPair) -> str:
    """What the numbers mean, and what was left out."""
    missing = [
        f"{n} trials only in {name}"
        for n, name in ((pair.only_first, pair.first), (pair.only_second, pair.second))
        if n
    ]
    meaning = (
        "time ratio: geometric mean of second / first. Verdicts: Welch's t-test on log samples, 5% over the table "
        "(Holm); noise between sessions is not in the samples."
    )
    return " ".join([meaning, *([f"{'; '.join(missing)}."] if missing else [])])
