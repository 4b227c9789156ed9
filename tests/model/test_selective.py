"""Checkpoints that keep attention's results and every other product's lie between those of whole layers and none."""

from __future__ import annotations

import pytest

import tunecast
from tunecast.model.forecast import Forecast

OPTIONS = {"gpu": "h100-sxm5-80gb", "max_length": 1024, "lora_target_modules": "q_proj,v_proj"}


def told(model: str, dtype: str, method: str, **more: object) -> Forecast:
    (found,) = tunecast.estimate(model, dtype=dtype, method=method, **{**OPTIONS, **more})
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model", ["LGAI-EXAONE/EXAONE-4.0-1.2B", "meta-llama/Llama-3.2-1B", "allenai/OLMo-2-1124-7B"])
def test_kept_products_are_not_made_again(model: str, method: str, dtype: str) -> None:
    """Under autocast over fp32 weights a recomputation has casts that its forward has not, or lacks some."""
    more = {} if method == "lora" else {"lora_target_modules": None}
    none = told(model, dtype, method, gradient_checkpointing=False, **more)
    some = told(model, dtype, method, gradient_checkpointing=True, checkpoint_keeps_ops=True, **more)
    whole = told(model, dtype, method, gradient_checkpointing=True, **more)
    assert none.executed_flops_per_step < some.executed_flops_per_step < whole.executed_flops_per_step
    allocated = [each.memory.allocated_bytes.value for each in (whole, some, none)]
    assert allocated == sorted(allocated)
    if method == "lora":  # of a full fine-tune the update decides
        assert allocated[0] < allocated[1] < allocated[2]
