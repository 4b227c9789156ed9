"""The traced stream of the plain HF + PEFT stack and the formulas feed one time model, and agree by phase.

The bar is 5% of launches and bytes in every phase over at least eight families; the step time follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tunecast.catalogs.gpus import find_gpu
from tunecast.model.architectures import architecture_from_config
from tunecast.model.host import host_launches
from tunecast.model.operation import Operation, Phase
from tunecast.model.priors import prior_factors
from tunecast.model.resolve import resolve_run
from tunecast.model.step_source import operations_of
from tunecast.model.time import step_time

CONFIG: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 8192,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {"head_dim": 64}, "granite": {},
    "olmo2": {}, "phi3": {"sliding_window": None}, "starcoder2": {}, "gemma": {"head_dim": 64}, "cohere": {},
    "gpt_neox": {"num_key_value_heads": None}, "stablelm": {},
}  # fmt: skip
METHODS = {"llama": "qlora", "qwen2": "full", "gemma": "qlora", "olmo2": "full"}
"""LoRA for the others."""
BAR = 0.05


def by_phase(operations: Iterable[Operation]) -> dict[str, Counter[str]]:
    """Launches and bytes of each phase."""
    found: dict[str, Counter[str]] = {}
    for operation in operations:
        phase = found.setdefault(operation.phase.value, Counter())
        phase["launches"] += operation.total_launches
        phase["bytes"] += operation.total_bytes
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_formulas_and_trace_agree_by_phase_and_in_time(family: str) -> None:
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    from tunecast.calibrate.exact_source import TracedSteps

    fields = {**CONFIG, **FAMILIES[family], "model_type": family}
    architecture = architecture_from_config({k: v for k, v in fields.items() if v is not None}, family)
    options = {"method": METHODS.get(family, "lora"), "max_length": 512, "per_device_train_batch_size": 2}
    run = resolve_run(architecture, options).run
    formulas = operations_of(architecture, run)
    traced = operations_of(architecture, run, source=TracedSteps())
    expected, found = by_phase(traced), by_phase(formulas)
    assert found.keys() == expected.keys()
    for phase, quantities in expected.items():
        for quantity, value in quantities.items():
            assert found[phase][quantity] == pytest.approx(value, rel=BAR), (phase, quantity)
    factors = prior_factors(find_gpu("a100-sxm4-80gb"), run)
    times = [step_time(operations, factors, run=run) for operations in (traced, formulas)]
    assert times[1].step_time_s.value == pytest.approx(times[0].step_time_s.value, rel=0.01)
    assert times[1].bound_by == times[0].bound_by


def test_at_least_eight_families_and_all_methods_are_here() -> None:
    assert len(FAMILIES) >= 8
    assert set(METHODS.values()) | {"lora"} == {"lora", "qlora", "full"}


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch"])
def test_formulas_and_trace_cost_the_host_alike_in_the_update(optim: str) -> None:
    """Launches and calls over lists of tensors; Adafactor's operators take one tensor each."""
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    from tunecast.calibrate.exact_source import TracedSteps

    architecture = architecture_from_config({**CONFIG, "model_type": "llama"}, "llama")
    run = resolve_run(architecture, {"method": "lora", "max_length": 512, "optim": optim}).run
    values = {"scale.host_calls": 3.0}
    formulas, traced = (
        host_launches(
            [each for each in operations_of(architecture, run, source=source) if each.phase is Phase.OPTIMIZER], values
        )
        for source in (None, TracedSteps())
    )
    assert formulas == pytest.approx(traced, rel=BAR)
