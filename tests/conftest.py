"""Every test sees the prices that ship, on 2026-11-20: no refresh on this machine and no later day changes a result.

Nor does its speed or its luck: Hypothesis draws the same examples each time and judges no example by its duration.
"""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ["TUNECAST_CACHE_DIR"] = os.devnull
os.environ["SOURCE_DATE_EPOCH"] = "1795132800"

settings.register_profile(
    "tunecast", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tunecast")

gc.disable()


@pytest.fixture(scope="module", autouse=True)
def garbage_between_modules() -> None:
    """Garbage is collected between modules, and what earlier ones keep (traces, tables, classes of torch) is left out:
    searching it again and again was a quarter of the time of all tests."""
    gc.collect()
    gc.freeze()


def _from_file(traced: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """The function with what any process found kept in a file of its arguments' name."""

    def shared(*texts: str) -> Any:
        file = folder / hashlib.sha256("\n".join(texts).encode()).hexdigest()
        if file.is_file():
            return pickle.loads(file.read_bytes())
        found = traced(*texts)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(found))
        own.replace(file)
        return found

    return shared


@pytest.fixture(scope="session", autouse=True)
def steps_of_mocks_traced_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a mock runs in a step is traced from the real code, which takes seconds: once for all processes of a
    session, not once in each."""
    try:
        from tunecast.calibrate.mock import step
    except ImportError:
        return  # without the packages that calibrate
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "traced"
    folder.mkdir(exist_ok=True)
    step._traced = lru_cache(maxsize=128)(_from_file(step._traced.__wrapped__, folder))
