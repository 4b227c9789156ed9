"""Every test sees the prices that ship, on 2026-11-20: no refresh on this machine and no later day changes a result.

Nor does its speed or its luck: Hypothesis draws the same examples each time and judges no example by its duration.
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings
from shared_traces import FOLDER, share
from shared_work import share_work

os.environ["TUNECAST_CACHE_DIR"] = os.devnull
os.environ["SOURCE_DATE_EPOCH"] = "1795132800"

settings.register_profile(
    "tunecast", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tunecast")

gc.disable()

LONGEST = (
    "priors_records", "engine", "fitting", "gpu_evidence", "validate", "real_step", "later_families_against_trace",
    "real_sharding", "gemma4_small_against_trace", "recommend", "real_copies", "families_against_trace",
    "qwen35_against_trace", "qwen3_next_against_trace", "fit", "priors", "exact_source", "mock_end_to_end", "exact",
    "depth", "rows", "other_work", "report", "committed_records", "memory_at_depth", "hub_client", "share_host",
    "callback", "grid", "gemma4_against_trace", "failing_collectives", "sweep", "walk_trials", "callback_trl",
    "measure_command", "callback_spread", "real_order", "known_cases", "grouped", "odd_attention_against_trace",
    "real_mesh", "collectives", "truth", "estimate_command", "packaging", "demands", "feel", "fit_curves",
)  # fmt: skip
"""Test files that take longest, which begin first, so that no process is left with one of them at the end."""


def place(item: pytest.Item) -> int:
    """When the file of a test begins."""
    name = item.path.stem.removeprefix("test_")
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first. CI, which has 25 minutes, leaves out what is marked ``thorough``; everybody else runs
    it."""
    items.sort(key=place)
    if not os.environ.get("CI"):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="module", autouse=True)
def garbage_between_modules() -> None:
    """Garbage is collected between modules, and what earlier ones keep (traces, tables, classes of torch) is left out:
    searching it again and again was a quarter of the time of all tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def worked_out_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a mock runs in a step is traced from the real code, the published table is timed and records are fitted,
    which takes seconds: once for all processes of a session, not once in each."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ[FOLDER] = str(folder / "traced")
    try:
        from tunecast.calibrate.mock import step

        share(step)
        share_work(folder / "worked")
    except ImportError:
        return  # without the packages that calibrate
