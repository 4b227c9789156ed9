"""Dates of a table as people write them: one ISO form, or a refusal that says what to write."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tunecast.calibrate.cell_dates import DateError, iso_dates
from tunecast.calibrate.framework_names import last_day

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"


@pytest.mark.parametrize(
    ("text", "iso"),
    [
        ("Juni 2024", "2024-06"), ("15. Juni 2024", "2024-06-15"), ("M\u00e4rz 2024", "2024-03"),
        ("mars 2024", "2024-03"),
        ("Dez. 2024", "2024-12"), ("ao\u00fbt 2024", "2024-08"), ("12 de junio de 2024", "2024-06-12"),
        ("mai 2024", "2024-05"),
        ("2024\u5e746\u6708", "2024-06"), ("2024\u5e746\u670815\u65e5", "2024-06-15"),
        ("2024\ub144 6\uc6d4", "2024-06"),
        ("2024-06-15", "2024-06-15"), ("June 2024", "2024-06"), ("Jun 2024", "2024-06"), ("Sept. 2024", "2024-09"),
        ("june, 2024", "2024-06"), ("Mar-2024", "2024-03"), ("2024 June", "2024-06"), ("May 2024", "2024-05"),
        ("June 15, 2024", "2024-06-15"), ("June 15th 2024", "2024-06-15"), ("15 Jun 2024", "2024-06-15"),
        ("15-Jun-2024", "2024-06-15"), ("06/2024", "2024-06"), ("6/2024", "2024-06"), ("05.2024", "2024-05"),
        ("06/15/2024", "2024-06-15"), ("15/06/2024", "2024-06-15"), ("15.06.2024", "2024-06-15"),
        ("03/03/2024", "2024-03-03"), ("2024/06/15", "2024-06-15"), ("2024.06", "2024-06"), ("2024-6-5", "2024-06-05"),
        ("20240615", "2024-06-15"), ("202406", "2024-06"), ("2024-06-15T12:00:00Z", "2024-06-15"),
        ("2024-06-15 12:30", "2024-06-15"), ("Q2 2024", "2024-06"), ("2024Q1", "2024-03"), ("H2 2024", "2024-12"),
        ("June '25", "2025-06"), ("Jan-Mar 2024", "2024-01 to 2024-03"), ("June to July 2024", "2024-06 to 2024-07"),
        ("as of June 2024", "2024-06"), ("~2024", "2024"), ("end of 2024", "2024"),
        ("2024 (approx.)", "2024 (approx.)"),
        ("2025 (March)", "2025-03"), ("2024 (June)", "2024-06"), ("2025 (Q1)", "2025-03"), ("2024 (H1)", "2024-06"),
        ("2025 Q3-Q4", "2025-09 to 2025-12"), ("Q3/Q4 2025", "2025-09 to 2025-12"),
        ("2024 (rows added in 2025)", "2024 (rows added in 2025)"),
        ("June 2024 (commit 8641822)", "2024-06 (commit 8641822)"), ("2024-06 (v2)", "2024-06 (v2)"),
        ("2023-05 (accessed 2026-01)", "2023-05"), ("May 2023, retrieved on 3 Jan 2026", "2023-05"),
        ("accessed 2026-01", "2026-01"),
    ],
)  # fmt: skip
def test_a_date_keeps_its_month(text: str, iso: str) -> None:
    assert iso_dates(text) == iso


def test_a_quarter_counts_to_its_end() -> None:
    assert last_day(iso_dates("Q2 2024")) == "2024-06-31"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("03/04/2024", "may be 2024-03-04 or 2024-04-03: write which"),
        ("03.04.2024", "may be 2024-03-04 or 2024-04-03: write which"),
        ("Jun-25", "names no year"), ("25-Jun", "names no year"), ("06/15/24", "names no year"),
        ("yesterday", "names no year"), ("early 2024", "'early' beside 2024"), ("mid-2024", "'mid' beside 2024"),
        ("summer 2024", "'summer' beside 2024"), ("W23 2024", "'W23' beside 2024"),
        ("kes\u00e4kuu 2024", "'kes\u00e4kuu' beside 2024"),
        ("2024 (early)", "'early' beside 2024"), ("2024-06 to 08", "'08' beside 2024-06"),
        ("31/02/2024", "no day of the calendar"), ("13/14/2024", "no day of the calendar"),
        ("2025 (02)", "'02' beside 2025"), ("2025 (late March)", "'March' beside 2025"),
        ("2025 (Q1 or Q2)", "'Q1' beside 2025"), ("2025 H1-H2", "'H2' beside 2025-06"),
        ("2026-01-15 (code of 2023)", "2023 behind 2026-01-15: write the day alone whose software ran"),
        ("2025-06 (data of 2023)", "2023 behind 2025-06"), ("2026-01-15, code of 2023", "2023 behind 2026-01-15"),
        ("1999", "says 1999, when no such run was measured"), ("2099", "says 2099, when no such run"),
        ("2024-13", "no day of the calendar"), ("June 31, 2024", "no day of the calendar"),
    ],
)  # fmt: skip
def test_a_month_that_cannot_be_told_is_refused(text: str, told: str) -> None:
    with pytest.raises(DateError, match=told):
        iso_dates(text)


def test_the_committed_tables_dates_stand_as_they_are() -> None:
    with TABLE.open(encoding="utf-8", newline="") as handle:
        dates = {row["source_date"] for row in csv.DictReader(handle)} - {""}
    assert dates
    assert all(iso_dates(date) == date for date in dates)
