"""Weights in fp16 that train under fp16 autocast: PyTorch's scaler refuses them, and so does a forecast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tunecast.catalogs.errors import InputError
from tunecast.model.architectures import load_architecture
from tunecast.model.resolve import resolve_run

MODEL = "Qwen/Qwen2.5-0.5B"
SCALED = {"precision": "fp16-autocast"}


def test_the_scaler_refuses_gradients_in_fp16() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ({"method": "full", "dtype": "fp16"}, "use --dtype fp32"),
        ({"method": "lora", "adapter_dtype": "fp16"}, "use --adapter-dtype fp32"),
        ({"method": "qlora", "adapter_dtype": "fp16", "stack": "trl"}, "use --adapter-dtype fp32"),
        (
            {"method": "lora", "dtype": "fp16", "modules_to_save": "lm_head", "modules_to_save_dtype": "fp16"},
            "use --modules-to-save-dtype fp32",
        ),
        ({"method": "full", "dtype": "fp16", "num_gpus": 2, "sharding": "ddp"}, "use --dtype fp32"),
    ],
)
def test_it_is_refused_with_what_to_type(asked: dict[str, Any], instead: str) -> None:
    with pytest.raises(InputError, match=instead):
        resolve_run(load_architecture(MODEL), {**SCALED, **asked})


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "full", "dtype": "fp32"},
        {"method": "lora", "dtype": "fp16"},  # its adapters are in fp32
        {
            "method": "full",
            "dtype": "fp16",
            "num_gpus": 2,
            "sharding": "fsdp",
        },  # scaled by FSDP's own, in shards of fp32
    ],
)
def test_what_trains_is_forecast(asked: dict[str, Any]) -> None:
    assert resolve_run(load_architecture(MODEL), {**SCALED, **asked}).run.precision == "fp16-autocast"


def test_both_kinds_of_16_bits_are_told() -> None:
    assert (torch.ones(1, dtype=torch.bfloat16) + torch.ones(1, dtype=torch.float16)).dtype == torch.float32
    architecture = load_architecture(MODEL)
    mixed = resolve_run(architecture, {**SCALED, "method": "lora", "dtype": "bf16"})
    assert any("PyTorch computes in fp32" in note and "--dtype fp16" in note for note in mixed.notes)
    alone = resolve_run(architecture, {**SCALED, "method": "lora", "dtype": "fp16"})
    assert not any("PyTorch computes in fp32" in note for note in alone.notes)
