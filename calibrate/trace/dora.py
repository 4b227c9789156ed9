"""DoRA over 4-bit layers without weights: PEFT reads their values when it attaches itself and in each forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def dequantized_weight(module: Any) -> Any:
    """PEFT's ``dequantize_module_weight`` for a layer on the meta device, and for one packed on fake tensors."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    if hasattr(module, "packed_state"):
        return dequantize_4bit(module.weight, module.packed_state)
    if module.weight.device.type == "meta" and hasattr(module, "out_features"):  # no Conv1D, which is never packed
        return torch.empty(module.out_features, module.in_features, dtype=torch.get_default_dtype(), device="meta")
    return module.weight


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Inside, DoRA needs no values of 4-bit weights."""
    from unittest import mock

    from peft.tuners.lora import dora

    with (
        mock.patch.object(dora, "dequantize_module_weight", dequantized_weight),
        mock.patch.object(dora, "deepcopy", lambda layer: layer),
    ):
        yield
