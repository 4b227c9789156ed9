"""How far a run may be from a record's forecast beyond what the record itself can tell.

A record's spread of steps (`step_log_sd`) is that of its own whole steps, each width predicted by the others: shallow
models of one family. Deep ones, experts, other norms, adapters of other kinds are unlike all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tunecast.model.factors import FactorSet

UNLIKE_LOG_SD = 0.024
"""Standard deviation of the log of the step time beside all else, with which 80% intervals hold 80% of the 216 runs of
``results/validation/mock/diverse.json`` (``python scripts/mock_diverse.py --only calibrated``): runs on eight simulated
cards, each calibrated in its quick mode. By the other seven cards it is 0.020 to 0.028. Nothing of a real card was
fitted."""


def with_unlike(own: FactorSet) -> FactorSet:
    """A record's factors, whose forecasts allow for runs unlike its steps."""
    return replace(own, step_log_sd=math.hypot(own.step_log_sd, UNLIKE_LOG_SD))
