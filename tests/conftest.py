"""Every test sees the prices that ship, on 2026-11-20: no refresh on this machine and no later day changes a result.

Nor does its speed or its luck: Hypothesis draws the same examples each time and judges no example by its duration.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ["TUNECAST_CACHE_DIR"] = os.devnull
os.environ["SOURCE_DATE_EPOCH"] = "1795132800"

settings.register_profile(
    "tunecast", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tunecast")
