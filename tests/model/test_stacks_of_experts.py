"""What stacks make of ``all-linear`` and of dropout where experts are parameters of a stack (transformers 5)."""

from __future__ import annotations

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.architectures import load_architecture
from tunecast.model.resolve import resolve_run

MODEL = "Qwen/Qwen3-30B-A3B"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize("stack", ["ms-swift", "llama-factory"])
@pytest.mark.parametrize("asked", [{}, {"lora_target_modules": "all-linear"}])
def test_stacks_that_look_for_linear_modules_adapt_no_experts(stack: str, asked: dict[str, str]) -> None:
    """``find_all_linears`` of ms-swift 4.6 and ``find_all_linear_modules`` of LLaMA-Factory 0.9.5."""
    run = resolve_run(load_architecture(MODEL), {"method": "lora", "stack": stack, **asked}).run
    assert run.lora_target_modules == ATTENTION


def test_a_stacks_own_dropout_on_experts_is_refused_as_peft_refuses_it() -> None:
    """PEFT's ``ParamWrapper`` takes no dropout, whoever asks for it."""
    asked = {"method": "lora", "stack": "trl", "lora_target_modules": "all-linear"}
    with pytest.raises(InputError, match=r"by you or by the stack.*add --lora-dropout 0"):
        resolve_run(load_architecture(MODEL), asked)
    assert (
        "experts.down_proj"
        in resolve_run(load_architecture(MODEL), {**asked, "lora_dropout": 0.0}).run.lora_target_modules
    )
