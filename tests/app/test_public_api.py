"""What `import tunecast` promises."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tunecast
from tunecast.catalogs.errors import InputError

PUBLIC = {
    "DeviceError",
    "Forecast",
    "InputError",
    "NotSupportedError",
    "OutOfMemoryError",
    "Run",
    "TunecastCallback",
    "TunecastError",
    "UnknownNameError",
    "Value",
    "__version__",
    "calibrate_device",
    "estimate",
    "fit",
    "frame",
    "load_architecture",
    "measure",
    "recommend",
}


def test_all_is_exactly_this() -> None:
    assert set(tunecast.__all__) == PUBLIC
    assert set(tunecast.__all__) <= set(dir(tunecast))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_loads(name: str) -> None:
    assert getattr(tunecast, name) is not None
    assert name == "__version__" or inspect.getdoc(getattr(tunecast, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'estimates'"):
        tunecast.estimates  # noqa: B018


def test_importing_the_package_loads_nothing_of_ours_or_heavy() -> None:
    code = "import sys, tunecast; print([m for m in sys.modules if m.startswith('tunecast.') or m == 'numpy'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_forecasts_become_a_pandas_table_with_units_in_its_columns(make: Callable[..., tunecast.Forecast]) -> None:
    table = tunecast.frame([make("a100-sxm4-80gb"), make("l4-24gb", cost_usd=None)])
    assert list(table["gpu"]) == ["a100-sxm4-80gb", "l4-24gb"]
    assert table.loc[0, ["step_time_s_low", "step_time_s", "step_time_s_high"]].tolist() == [2.0, 2.5, 3.0]
    assert table.loc[0, "process_gib"] == pytest.approx(43.0)
    assert table["cost_usd"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_gpus": "two"}, "--num-gpus is 'two', but it must be a whole number"),
        ({"model": None}, "model is None, but it is the name of a model"),
        ({"gpu": 5}, "gpu is 5, but it is a word"),
        ({"gpu": ["l40s", 5]}, "gpu is ['l40s', 5], but it is a word"),
        ({"gpu": []}, "gpu=[] names no device"),
    ],
)
def test_what_only_python_can_get_wrong_is_a_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as refusal:
        tunecast.estimate(**{"model": "Qwen/Qwen2.5-0.5B", "gpu": "l40s", **given})
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tunecast.recommend("Qwen/Qwen2.5-0.5B", gpu=5, tokens=1e6), "gpu is 5, but it is a word"),
        (lambda: tunecast.recommend("Qwen/Qwen2.5-0.5B", gpu=[5], tokens=1e6), "gpu is [5], but it is a word"),
        (lambda: tunecast.fit(3), "record is 3, but it is the path"),
        (lambda: tunecast.load_architecture(None), "model is None, but it is the name of a model"),
        (lambda: tunecast.calibrate_device("mock:l4-24gb", num_gpus="two"), "--num-gpus is 'two', but it must be"),
    ],
)
def test_so_it_is_elsewhere(call: Callable[[], object], says: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with pytest.raises(InputError) as refusal:
            call()
    assert says in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_numpys_numbers_and_paths_are_taken(tmp_path: Path) -> None:
    """As a column of pandas gives them; a path of prices may stand alone."""
    numpy = pytest.importorskip("numpy")
    model = "Qwen/Qwen2.5-0.5B"
    given = {"max_length": numpy.int64(1024), "gradient_checkpointing": numpy.bool_(True), "lora_r": numpy.int32(8)}
    (found,) = tunecast.estimate(model, gpu="l40s", **given)
    (plain,) = tunecast.estimate(model, gpu="l40s", max_length=1024, gradient_checkpointing=True, lora_r=8)
    assert (found.step_time_s, found.memory) == (plain.step_time_s, plain.memory)
    with pytest.raises(InputError, match="whole number of at least 1"):
        tunecast.estimate(model, gpu="l40s", max_length=numpy.float64(10.5))
    with pytest.raises(InputError, match=r"nowhere\.csv"):
        tunecast.estimate(model, gpu="l40s", prices=str(tmp_path / "nowhere.csv"))
    with pytest.raises(InputError, match=r"nowhere\.json"):
        tunecast.estimate(tmp_path / "nowhere.json", gpu="l40s")
    with pytest.raises(InputError, match="--max-batch is 'no', but it is a switch"):
        tunecast.estimate(model, gpu="l40s", max_batch="no")
