"""Efficiency curves from microbenchmarks: robust least squares in log space, left-out residuals, bootstrap.

The physical form is fitted first; what it leaves is given to the Gaussian process of
`tunecast.model.curves`, whose length and width are chosen by predicting trials left out (ten folds,
the form refitted each time), so that the stored spread is that of shapes never seen.

A kernel shorter than the host needs to issue a call hides behind it. Such trials say only that the kernel takes
no longer than that (`host_plateau`): they bound the form and count neither as residuals nor in the spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from tunecast.calibrate.fit_trials import Observation, log_seconds
from tunecast.model.curves import (
    FORMS,
    Array,
    Columns,
    Params,
    benched,
    columns,
    coordinates,
    kernel,
    residual,
    unevenness,
)
from tunecast.model.factors import Curve
from tunecast.model.value import Z80

MEASURED = "measured"
"""Origin of a fitted factor; the record's name is added on reading."""
ROBUST_LOG = 0.05
"""Log residual from which soft-L1 stops trusting a trial fully."""
WEAK_LOG_SD = 3.0
"""Width of the prior of every parameter around its start, in e-folds: it decides only what no trial decides."""
FOLDS = 10
"""Parts of the trials that are left out in turn."""
BOOTSTRAPS = 30
"""Fits to trials drawn again: enough for the ends of 80%, three draws beyond each."""
MIN_GP_POINTS = 8
"""Trials from which residuals are taken to be a process of the shape; fewer would be noise read as one."""
MIN_LEFT_OUT = 3
"""With fewer trials none is left out."""
UNTESTED_LOG_SD = 0.3
"""Spread of a curve through fewer than `MIN_LEFT_OUT` trials that borrows nothing: 80% within 0.7 to 1.5 times."""
STEEPEST_UNEVENNESS = 0.25
"""Residuals fall at most by 2^-0.25 when the work doubles: more is an accident of few trials."""
SMALLEST_LOG_ERROR = 0.005
"""Errors below half a percent are timing noise whatever their size."""
PLATEAU_LOG = 0.05
"""Trials this near to the fastest took as long as it did: several times the noise of a median."""
PLATEAU_TRIALS = 2
PLATEAU_WORK = 4.0
"""So many of them, of work that differs by this factor, took the host's time and not the device's."""
LENGTHS = (0.05, 0.15, 0.4, 1.0, 2.5)
"""Distances between shapes, in e-folds, over which residuals are tried to be alike."""
NOISE_SHARES = (0.03, 0.2, 0.6)
"""Shares of their variance that are tried to be noise of the single trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormSpec:
    """A form with its free parameters: start values (positive), allowed e-folds around them, and constants."""

    form: str
    start: Params
    reach: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest allowed value, where physics bounds them."""
    fixed: Params = field(default_factory=dict)
    least_log_sd: float = 0.0
    """Spread that the curve has whatever its own few trials say (that of the curve it borrows from)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCurve:
    """A curve, the 80% intervals of its parameters, and what it left."""

    curve: Curve
    intervals: dict[str, tuple[float, float]]
    left_out: tuple[float, ...]
    """Log(measured / predicted) of each observation when its fold was left out."""
    left_out_sd: tuple[float, ...]
    """The predictive standard deviation that came with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Observations of one curve as columns."""

    cols: Columns
    log_y: Array
    group: npt.NDArray[np.int64]
    """Number of the group of each observation, see `Observation.group`."""


def data_of(found: Sequence[Observation]) -> Data:
    """Observations as columns; a curve of one group has each trial as its own."""
    names = [o.group for o in found]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    alone = len(numbers) < FOLDS
    group = np.arange(len(found)) if alone else np.array([numbers[name] for name in names])
    return Data(cols=columns([o.operation for o in found]), log_y=log_seconds(found), group=group.astype(np.int64))


def host_plateau(found: Sequence[Observation]) -> float:
    """Seconds that the host takes to issue one call, where several trials of unlike work all take that; else 0."""
    fastest = min(o.seconds for o in found)
    near = [o for o in found if o.seconds <= fastest * np.exp(PLATEAU_LOG)]
    work = [o.operation.flops or o.operation.bytes or float(o.operation.shape[0]) for o in near]
    flat = len(near) >= PLATEAU_TRIALS and max(work) >= PLATEAU_WORK * min(work)
    return float(np.median([o.seconds for o in near])) if flat else 0.0


def visible(spec: FormSpec, log_y: Array) -> npt.NDArray[np.bool_]:
    """Which trials showed the device: they took longer than the host's call."""
    issue_s = spec.fixed.get("issue_s", 0.0)
    return np.exp(log_y - PLATEAU_LOG) > issue_s


def soft_l1(scaled: Array) -> Array:
    """Residuals whose squares are the soft-L1 loss 2 (sqrt(1 + r^2) - 1), sign kept."""
    return np.asarray(np.sign(scaled) * np.sqrt(2.0 * (np.sqrt(1.0 + scaled**2) - 1.0)))


def fit_params(spec: FormSpec, cols: Columns, log_y: Array, *, start: Params | None = None) -> Params:
    """Parameters of the form by soft-L1 least squares on log seconds, weakly held to the start values."""
    names = sorted(spec.start)
    centre = np.log([spec.start[name] for name in names])
    low = np.array(
        [np.log(spec.reach[n][0]) if n in spec.reach else c - 12.0 for n, c in zip(names, centre, strict=True)]
    )
    high = np.array(
        [np.log(spec.reach[n][1]) if n in spec.reach else c + 12.0 for n, c in zip(names, centre, strict=True)]
    )

    def params(theta: Array) -> Params:
        return dict(zip(names, np.exp(theta).tolist(), strict=True)) | spec.fixed

    def residuals(theta: Array) -> Array:
        error = (log_y - np.log(benched(spec.form, params(theta), cols))) / ROBUST_LOG
        return np.concatenate([soft_l1(error), (theta - centre) / WEAK_LOG_SD])

    first = centre if start is None else np.log([start[name] for name in names])
    found = least_squares(residuals, np.clip(first, low + 1e-9, high - 1e-9), bounds=(low, high), max_nfev=200)
    return params(found.x)


def _gp_candidate(at: Array, left: Array, length: float, share: float) -> tuple[float, float]:
    """(log predictive density, sd) of residuals left out one at a time, for one length and noise share."""
    gram = (1.0 - share) * kernel(at, at, length=length) + share * np.eye(len(at))
    inverse = np.linalg.inv(gram)
    error = (inverse @ left) / np.diag(inverse)
    unit = 1.0 / np.diag(inverse)
    variance = max(float(np.mean(error**2 / unit)), 1e-8)
    density = float(-0.5 * np.sum(np.log(variance * unit) + error**2 / (variance * unit)))
    return density, float(np.sqrt(variance))


def choose_gp(at: Array, left: Array) -> Params:
    """Unevenness, length, width and noise of the residual process that best predict residuals left out."""
    uneven = choose_unevenness(at, left)
    even = left / unevenness(uneven, at)
    best, chosen = -np.inf, {"gp_sd": float(np.std(even)), "gp_length": 1.0, "gp_noise": float(np.std(even))}
    for length in LENGTHS:
        for share in NOISE_SHARES:
            density, sd = _gp_candidate(at, even, length, share)
            if density > best:
                best = density
                chosen = {
                    "gp_sd": sd * float(np.sqrt(1.0 - share)),
                    "gp_length": length,
                    "gp_noise": sd * float(np.sqrt(share)),
                }
    return chosen | uneven


def choose_unevenness(at: Array, left: Array) -> Params:
    """How the size of residuals falls with the size of the work, by a line through their logarithms; never grows."""
    work = at[:, :-1].sum(axis=1)
    centre = float(work.mean())
    if np.ptp(work) == 0.0:
        return {"gp_slope": 0.0, "gp_centre": centre}
    size = np.log(np.abs(left) + SMALLEST_LOG_ERROR)
    slope = float(np.polyfit(work - centre, size, 1)[0])
    return {"gp_slope": float(np.clip(slope, -STEEPEST_UNEVENNESS, 0.0)), "gp_centre": centre}


def root_mean_square(errors: Array) -> float:
    """Of errors; 0 of none, which says nothing."""
    return float(np.sqrt(np.mean(errors**2))) if len(errors) else 0.0


def assemble(spec: FormSpec, params: Params, at: Array, left: Array, *, gp: Params | None) -> Curve:
    """A curve with its residual process; without one, only the spread."""
    spread = max(root_mean_square(left), 1e-4)
    if gp is None:
        return Curve(form=spec.form, params=params, log_sd=spread, origin=MEASURED)
    points = tuple((*map(float, row), float(value)) for row, value in zip(at, left, strict=True))
    return Curve(form=spec.form, params=params | gp, log_sd=spread, origin=MEASURED, residuals=points)


def _fit_once(spec: FormSpec, cols: Columns, log_y: Array, *, start: Params | None, gp: Params | None) -> Curve:
    params = fit_params(spec, cols, log_y, start=start)
    seen = np.flatnonzero(visible(spec, log_y))
    at, left = _residuals(spec, params, cols.rows(seen), log_y[seen])
    return assemble(spec, params, at, left, gp=gp)


def _residuals(spec: FormSpec, params: Params, cols: Columns, log_y: Array) -> tuple[Array, Array]:
    """(coordinates, log of measured over form)."""
    return coordinates(spec.form, cols), log_y - np.log(FORMS[spec.form](params, cols))


def predictive(curve: Curve, cols: Columns) -> tuple[Array, Array]:
    """Log seconds in a benchmark and their predictive standard deviation."""
    mean, covariance = residual(curve, coordinates(curve.form, cols))
    sd = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    seconds = FORMS[curve.form](curve.params, cols) * np.exp(mean)
    return np.log(np.maximum(seconds, curve.params.get("issue_s", 0.0))), sd


def left_out(spec: FormSpec, data: Data, *, start: Params, gp: Params | None, seed: int) -> tuple[Array, Array]:
    """Errors and predictive sds of every observation, each predicted without its fold.

    Trials of one group (one weight, several token counts) leave together: a shape never seen has none of them.
    """
    cols, log_y, count = data.cols, data.log_y, len(data.log_y)
    groups = int(data.group.max()) + 1
    fold = (np.random.default_rng(seed).permutation(groups) % min(FOLDS, groups))[data.group]
    error, sd = np.zeros(count), np.zeros(count)
    for one in range(int(fold.max()) + 1):
        inside, outside = np.flatnonzero(fold != one), np.flatnonzero(fold == one)
        curve = _fit_once(spec, cols.rows(inside), log_y[inside], start=start, gp=gp)
        mean, spread = predictive(curve, cols.rows(outside))
        error[outside], sd[outside] = log_y[outside] - mean, spread
    return error, sd


def _widen(gp: Params, error: Array, sd: Array) -> Params:
    """Scale the process so that 80% of the left-out errors are inside its 80% interval."""
    ratio = float(np.quantile(np.abs(error) / np.maximum(sd, 1e-9), 0.80)) / Z80
    return gp | {"gp_sd": gp["gp_sd"] * ratio, "gp_noise": gp["gp_noise"] * ratio}


def _bootstrap(
    spec: FormSpec, cols: Columns, log_y: Array, *, start: Params, seed: int
) -> dict[str, tuple[float, float]]:
    """80% intervals of the parameters over trials drawn again with replacement."""
    rng = np.random.default_rng(seed)
    draws: list[Params] = []
    for _ in range(BOOTSTRAPS):
        rows = rng.integers(0, len(log_y), len(log_y))
        draws.append(fit_params(spec, cols.rows(rows), log_y[rows], start=start))
    ends = {}
    for name in spec.start:
        low, high = np.quantile([draw[name] for draw in draws], [0.1, 0.9])
        ends[name] = (min(float(low), start[name]), max(float(high), start[name]))
    return ends


def fit_curve(specs: Sequence[FormSpec], found: Sequence[Observation], *, seed: int = 0) -> FittedCurve:
    """The form among `specs` that best predicts trials left out, with intervals and residuals."""
    data = data_of(found)
    cols, log_y = data.cols, data.log_y
    candidates = [_candidate(spec, data, seed=seed) for spec in specs]
    spec, params, gp, error, sd = min(candidates, key=lambda c: float(np.mean(np.abs(c[3]))))
    seen = np.flatnonzero(visible(spec, log_y))
    if gp is not None:
        gp = _widen(gp, error[seen], sd[seen])
    at, left = _residuals(spec, params, cols.rows(seen), log_y[seen])
    log_sd = max(root_mean_square(error[seen]), spec.least_log_sd)
    if len(log_y) < MIN_LEFT_OUT or not len(seen):
        log_sd = max(log_sd, untested_log_sd(spec))
    curve = replace(assemble(spec, params, at, left, gp=gp), log_sd=log_sd)
    return FittedCurve(
        curve=curve,
        intervals=_bootstrap(spec, cols, log_y, start=params, seed=seed),
        left_out=tuple(error.tolist()),
        left_out_sd=tuple(sd.tolist()),
    )


def untested_log_sd(spec: FormSpec) -> float:
    """Spread of a curve of which no trial was left out, or none showed the device."""
    return spec.least_log_sd or UNTESTED_LOG_SD


def _candidate(spec: FormSpec, data: Data, *, seed: int) -> tuple[FormSpec, Params, Params | None, Array, Array]:
    cols, log_y = data.cols, data.log_y
    params = fit_params(spec, cols, log_y)
    seen = np.flatnonzero(visible(spec, log_y))
    at, left = _residuals(spec, params, cols.rows(seen), log_y[seen])
    gp = choose_gp(at, left) if len(seen) >= MIN_GP_POINTS else None
    if len(log_y) < MIN_LEFT_OUT:
        error = log_y - np.log(benched(spec.form, params, cols))
        error[seen] = left
        return spec, params, gp, error, np.full(len(log_y), untested_log_sd(spec))
    error, sd = left_out(spec, data, start=params, gp=gp, seed=seed)
    return spec, params, gp, error, sd
