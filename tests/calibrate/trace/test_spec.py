"""Architecture and Run survive the way into a record and back."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tunecast.calibrate.trace.spec import architecture_from_dict, architecture_to_dict, run_from_dict, run_to_dict
from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.run import Run


@pytest.mark.parametrize("changes", [{}, {"model_type": "mistral", "window": 4096}, {"tied": True, "qkv_bias": True}])
def test_architecture_survives_json(architecture: Callable[..., Architecture], changes: dict[str, object]) -> None:
    original = architecture(**changes)
    assert architecture_from_dict(json.loads(json.dumps(architecture_to_dict(original)))) == original


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_run_survives_json(run: Callable[..., Run], method: str) -> None:
    original = run(method, gradient_accumulation_steps=4)
    assert run_from_dict(json.loads(json.dumps(run_to_dict(original)))) == original


def test_names_are_the_fields(run: Callable[..., Run]) -> None:
    assert run_to_dict(run())["lora_target_modules"][0] == "q_proj"
    assert run_to_dict(run())["per_device_train_batch_size"] == 1


def test_a_record_older_than_a_field_gets_its_default() -> None:
    older = run_to_dict(Run(method="qlora", bnb_4bit_quant_type="nf4"))
    del older["upcast_non_quantized"]
    assert run_from_dict(older) == Run(method="qlora", bnb_4bit_quant_type="nf4")


def test_a_record_newer_than_this_version_is_told_in_a_sentence(architecture: Callable[..., Architecture]) -> None:
    run, shape = run_to_dict(Run(method="lora")), architecture_to_dict(architecture())
    with pytest.raises(InputError, match="'surprise', which this tunecast does not know"):
        run_from_dict({**run, "surprise": 1})
    with pytest.raises(InputError, match="'surprise', which this tunecast does not know"):
        architecture_from_dict({**shape, "surprise": 1})
