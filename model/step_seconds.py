"""What is forecast of one optimizer step: its seconds, what they are made of, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tunecast.model.value import Z80, Value, at_least_to, at_most_to, lognormal


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One optimizer step of the whole job."""

    step_time_s: Value
    parts_s: dict[str, float]
    """By operation kind and ``floor`` (device seconds), ``communication`` (exposed), ``host`` (time the device
    waited for its launches, and for an update of its own), ``bubble`` (of a pipeline), ``trainer`` (the Trainer's own
    Python, `trainer_loop`) and ``overhead``; they sum to `step_time_s`."""
    phases_s: dict[str, float]
    """By segment: forward, backward (with recompute), optimizer, overhead; they sum to `step_time_s`."""
    device_s: float
    host_s: float
    bound_by: str
    """``compute``, ``bandwidth``, ``host``, ``communication`` or ``pipeline bubble`` (`time._bound_by`); ``data`` comes
    from `feeding`."""
    log_sd: float
    """Standard deviation of the logarithm of the step time."""
    log_sd_parts: dict[str, float] = field(default_factory=dict)
    """What it is made of: ``curves``, ``factors``, ``left-out steps``, ``trainer``."""
    slow_host_s: float = 0.0
    """The step with a host as slow as its own 80% interval lets expect, below which the upper end does not lie."""

    least_s: float = 0.0
    """What links alone take at the fast end, or the rest without them, below which the lower end does not lie."""

    def spread_to(self, log_sd: float) -> StepTime:
        """The same step, less sure."""
        return replace(self, step_time_s=self._kept(lognormal(self.step_time_s.value, log_sd)), log_sd=log_sd)

    def unsure_between(self, one_s: float, other_s: float) -> StepTime:
        """The same step, its interval joined with what lies between both ends of an assumption: half their log-distance
        counts as one independent 80% error."""
        found = self._as_fast_as(min(one_s, other_s))
        return found.spread_to(math.hypot(self.log_sd, abs(math.log(other_s / one_s)) / 2.0 / Z80))

    def not_below(self, least_s: float) -> StepTime:
        """The same step, which is no faster than that even at the fast end."""
        kept = replace(self, least_s=max(self.least_s, least_s))
        return replace(kept, step_time_s=kept._kept(self.step_time_s))

    def _as_fast_as(self, fast_s: float) -> StepTime:
        """The same step where an assumption may be wrong: what it takes at the least is that of the faster end."""
        return replace(self, least_s=self.least_s * min(fast_s / self.step_time_s.value, 1.0))

    def _kept(self, between: Value) -> Value:
        return at_most_to(self.least_s, at_least_to(self.slow_host_s, between))

    def spread_between(self, fast_s: float, slow_s: float) -> StepTime:
        """The same step where something independent makes it as fast or as slow as that, each with a chance of a tenth.

        ``log_sd`` becomes that of a log-normal as wide in all.
        """
        own, seconds = Z80 * self.log_sd, self.step_time_s.value
        down = math.hypot(own, max(math.log(seconds / fast_s), 0.0))
        up = math.hypot(own, max(math.log(slow_s / seconds), 0.0))
        between = Value(value=seconds, low=seconds / math.exp(down), high=seconds * math.exp(up))
        kept = self._as_fast_as(fast_s)
        return replace(kept, step_time_s=kept._kept(between), log_sd=(down + up) / 2.0 / Z80)
