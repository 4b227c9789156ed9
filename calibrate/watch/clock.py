"""Seconds of the optimizer steps of a running job, in windows, with what is not a step left out.

The device works behind the host, so single steps cannot be timed without making the host wait. A window of
several steps can: the device is waited for once at each end, which costs nothing beside seconds of work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tunecast.model.value import Value

WARMUP_STEPS = 3
"""First steps, which also compile, allocate and fill caches; kept apart."""
WINDOW_S = 2.0
"""Shortest full window: waiting for the device once in two seconds is far below a thousandth of them."""
SLOW_START = 1.5
"""First windows whose steps take this many times as long as usual later are start-up, not what steps take (assumed;
rows of unlike length scatter less over seconds of steps)."""
FEWEST_WINDOWS = 3
"""Windows before their scatter says anything; with fewer the interval is their range, widened."""
FEW_WINDOWS_FRAC = 0.05
"""Half-width with fewer windows than that (assumed)."""
T90 = (
    3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372, 1.363, 1.356, 1.350, 1.345, 1.341,
    1.337, 1.333, 1.330, 1.328, 1.325, 1.323, 1.321, 1.319, 1.318, 1.316, 1.315, 1.314, 1.313, 1.311, 1.310,
)  # fmt: skip
"""90% quantiles of Student's t for 1 to 30 degrees of freedom (any table of it); beyond, the normal one serves."""
Z90 = 1.2816


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some consecutive optimizer steps, timed as a whole."""

    steps: int
    seconds: float
    tokens: int

    @property
    def step_s(self) -> float:
        """Mean seconds of one step."""
        return self.seconds / self.steps


@dataclass(slots=True)
class StepClock:
    """Told when steps begin and end and when the job turns to something else."""

    synchronize: Callable[[], None]
    now: Callable[[], float] = time.perf_counter
    warmup_steps: int = WARMUP_STEPS
    window_s: float = WINDOW_S
    windows: list[Window] = field(default_factory=list)
    stopped: list[tuple[str, float]] = field(default_factory=list)
    """What each evaluation or save was, and its seconds."""
    steps_seen: int = 0
    begun_s: float | None = None
    _opened_s: float | None = None
    _left_s: float | None = None
    _left_for: str = ""
    _stepped_s: float = 0.0
    """When the last step ended, as the host saw it."""
    _steps: int = 0
    _tokens: int = 0

    @property
    def aside_s(self) -> float:
        """Seconds of evaluations and saves."""
        return sum(seconds for _, seconds in self.stopped)

    @property
    def begins(self) -> str:
        """What the job is about to turn to after its last step; empty where that is the next step."""
        return "" if self._left_s is None else self._left_for

    @property
    def asides(self) -> int:
        """How many there were."""
        return len(self.stopped)

    def step_begins(self) -> None:
        """The job is about to run a step; ends an aside."""
        if self.begun_s is None:
            self.begun_s = self.now()
        if self._left_s is not None:
            self._come_back()
            self._open()

    def step_ends(self, tokens: int, *, followed_by: str = "", before_wait: Callable[[], None] | None = None) -> bool:
        """A step of so many tokens is over, and what is no step follows, if named; True when this closed a window.

        `before_wait` is called where one is about to close: the device still works, so that the host has time.
        """
        self.steps_seen += 1
        self._stepped_s = self.now()
        if self.steps_seen < self.warmup_steps:
            return False
        if self._opened_s is None:
            self._start(followed_by)
            return False
        self._steps += 1
        self._tokens += tokens
        if not followed_by and self.now() - self._opened_s < self.window_s:
            return False
        if before_wait is not None:
            before_wait()
        self._close()
        self._start(followed_by)
        return True

    def stops_for(self, kind: str, *, before_wait: Callable[[], None] | None = None) -> None:
        """The job turns to something else between two steps, beside what may have followed the last one."""
        if self._left_s is not None:
            self._come_back()
        elif self._opened_s is not None and self._steps:
            if before_wait is not None:
                before_wait()
            self._close()
        self._start(kind)

    def finish(self) -> None:
        """The job is over: what the open window holds still counts, and what followed the last step."""
        if self._left_s is not None:
            self._come_back()
        if self._opened_s is not None and self._steps:
            self._close()
        self._opened_s = None

    def break_off(self) -> None:
        """The job was interrupted: where no window is closed yet, the open one counts to the end of its last step."""
        if not self.windows and self._opened_s is not None and self._steps:
            self.windows.append(
                Window(steps=self._steps, seconds=self._stepped_s - self._opened_s, tokens=self._tokens)
            )
        self._opened_s = None

    def step_time_s(self) -> Value | None:
        """Mean seconds of a step with its 80% interval; None before the first window."""
        return predicted_mean(self.windows, ahead=None)

    def _come_back(self) -> None:
        """The end of an aside."""
        assert self._left_s is not None
        self.stopped.append((self._left_for, self.now() - self._left_s))
        self._left_s = None

    def _open(self) -> None:
        self._opened_s, self._steps, self._tokens = self.now(), 0, 0

    def _start(self, followed_by: str) -> None:
        """The next window: now, or when the job is back from what follows."""
        if followed_by:
            self._opened_s, self._left_s, self._left_for = None, self.now(), followed_by
        else:
            self.synchronize()
            self._open()

    def _close(self) -> None:
        assert self._opened_s is not None
        self.synchronize()
        self.windows.append(Window(steps=self._steps, seconds=self.now() - self._opened_s, tokens=self._tokens))


def settled(windows: list[Window]) -> list[Window]:
    """The windows without the first ones that are much slower than what came after: kernels that are still compiled or
    tuned, caches that fill, a machine that another job has just left. One is always kept."""
    first = 0
    while first + 1 < len(windows) and windows[first].step_s > SLOW_START * _usual_step_s(windows[first + 1 :]):
        first += 1
    return windows[first:]


def _usual_step_s(windows: list[Window]) -> float:
    """Seconds of a step in the window that half of the steps lie before, by speed."""
    ordered, half = sorted(windows, key=lambda window: window.step_s), sum(window.steps for window in windows) / 2.0
    counted = 0
    for window in ordered:
        counted += window.steps
        if counted >= half:
            return window.step_s
    raise AssertionError("windows have steps")


def predicted_mean(windows: list[Window], *, ahead: float | None) -> Value | None:
    """Seconds of a step: mean over the windows that have settled, with an 80% interval.

    `ahead` is how many windows the prediction is for: their own scatter, averaged, joins the uncertainty of the
    mean. None asks for the uncertainty of the mean alone. Scatter is that of whole windows; drift later is not known.
    """
    windows = settled(windows)
    if not windows:
        return None
    mean = sum(window.seconds for window in windows) / sum(window.steps for window in windows)
    n = len(windows)
    if n < FEWEST_WINDOWS:
        spread = FEW_WINDOWS_FRAC * mean
        rates = [window.step_s for window in windows]
        return Value(value=mean, low=min(mean - spread, *rates), high=max(mean + spread, *rates))
    sd = math.sqrt(sum((window.step_s - mean) ** 2 for window in windows) / (n - 1))
    t = T90[n - 2] if n - 2 < len(T90) else Z90
    half = t * sd * math.sqrt(1 / n + (0.0 if ahead is None else 1 / max(ahead, 1.0)))
    return Value(value=mean, low=max(mean - half, mean / 10), high=mean + half)
