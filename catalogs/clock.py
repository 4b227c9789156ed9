"""Today, for the age of prices; `SOURCE_DATE_EPOCH` fixes it where output must not change from day to day."""

from __future__ import annotations

import os
from datetime import UTC, date, datetime


def today() -> date:
    """The current day, or the day of `SOURCE_DATE_EPOCH` (seconds, the convention of reproducible builds)."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return datetime.fromtimestamp(int(epoch), tz=UTC).date() if epoch.isdigit() else date.today()
