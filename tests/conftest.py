"""Every test sees the prices that ship, on 2026-11-20: no refresh on this machine and no later day changes a result."""

from __future__ import annotations

import os

os.environ["TUNECAST_CACHE_DIR"] = os.devnull
os.environ["SOURCE_DATE_EPOCH"] = "1795132800"
