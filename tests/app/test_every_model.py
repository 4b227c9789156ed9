"""Every model of the catalog is forecast by formulas, or by --exact and says so, or is refused with the reason."""

from __future__ import annotations

import math

import pytest
from ci_share import some_for_ci

from tunecast.api import estimate
from tunecast.catalogs.errors import NotSupportedError, UnbuiltFamilyError
from tunecast.catalogs.models import load_models
from tunecast.models import find_architecture

ONLY_EXACT = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "facebook/opt-350m",
}
ENCODERS = {
    "google-bert/bert-base-uncased",
    "google-bert/bert-large-uncased",
    "FacebookAI/roberta-base",
    "FacebookAI/roberta-large",
    "answerdotai/ModernBERT-base",
    "answerdotai/ModernBERT-large",
}
BY_FORMULA = sorted(set(load_models()) - ONLY_EXACT - ENCODERS)


@pytest.mark.parametrize("model", some_for_ci(BY_FORMULA, 6))
def test_a_model_is_forecast_by_formulas_with_the_catalogs_parameters(model: str) -> None:
    (answer,) = estimate(model, gpu="b300-sxm-288gb", method="lora", max_length=64)
    row = load_models()[model]
    assert answer.total_params == row.total_params - (row.vision_params or 0)
    assert answer.memory.allocated_bytes.value > 2 * answer.total_params  # bf16 weights are the least
    assert sum(answer.memory.parts_bytes.values()) == pytest.approx(answer.memory.allocated_bytes.value)
    assert 0 < answer.step_time_s.value < math.inf


@pytest.mark.parametrize("model", sorted(ONLY_EXACT))
def test_a_model_without_formulas_names_the_option_that_serves_it(model: str) -> None:
    with pytest.raises(UnbuiltFamilyError, match=rf"^{model}.*--exact"):
        find_architecture(model)


@pytest.mark.parametrize("model", sorted(ENCODERS))
@pytest.mark.parametrize("exact", [False, True])
def test_an_encoder_is_refused_with_the_reason(model: str, exact: bool) -> None:
    with pytest.raises(NotSupportedError, match="only causal language models") as refused:
        find_architecture(model, exact=exact)
    assert not isinstance(refused.value, UnbuiltFamilyError)
