"""LitGPT's formulas against traces of its own code, of three ages, recorded by scripts/litgpt_traces.py.

litgpt and its pins do not go with today's transformers, so the traces are files; the script runs them anew.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tunecast.model.architecture import Architecture, LayerGroup
from tunecast.model.architectures import load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.litgpt import as_litgpt
from tunecast.model.memory import MemoryForecast, memory_timeline
from tunecast.model.operation import Phase
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.trained import trainable_params

TRACES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "litgpt_traces.json").read_text(encoding="utf-8")
)["traces"]
ADAPTER_PARTS = "qkv.lora_B"
"""A convolution, whose FLOPs the tracer does not count."""


def name_of(trace: dict[str, Any]) -> str:
    return "-".join([trace["code"], *(str(value) for value in trace["case"].values())])


def run_of_case(trace: dict[str, Any]) -> tuple[Architecture, Run]:
    case = trace["case"]
    architecture = load_architecture(case["model"])
    if "layers" in case:
        layers = [group.layer for group in architecture.groups for _ in range(group.count)][: case["layers"]]
        runs = ((layer, len(list(equal))) for layer, equal in groupby(layers))
        groups = tuple(LayerGroup(layer=layer, count=count) for layer, count in runs)
        architecture = replace(architecture, groups=groups)
    architecture = as_litgpt(architecture, trace["code"])
    options: dict[str, Any] = {
        "stack": "litgpt",
        "method": case["method"],
        "max_length": case["length"],
        "per_device_train_batch_size": case.get("batch", 1),
        "gradient_accumulation_steps": case.get("micro", 1),
        "double_quant": case["quant"].endswith("-dq") if "quant" in case else None,
        "lora_target_modules": case.get("targets"),
    }
    if case.get("precision") == "bf16-mixed":
        options |= {"dtype": "fp32", "precision": "bf16-autocast"}
        options |= {} if case["method"] == "full" else {"adapter_dtype": "fp32"}
    return architecture, resolve_run(architecture, options).run


Both = tuple[dict[str, Any], Architecture, Run, MemoryForecast]


@pytest.fixture(params=TRACES, ids=name_of)
def both(request: pytest.FixtureRequest) -> Both:
    """A trace, and what the formulas say of the same run."""
    architecture, run = run_of_case(request.param)
    return request.param, architecture, run, memory_timeline(architecture, run)


def unmeasured_bytes(run: Run, forecast: MemoryForecast) -> int:
    """Optimizer state that the trace leaves out: that of tensors too small for managed memory."""
    return forecast.parts_bytes["optimizer_state"] if run.bnb_4bit_quant_type else 0


def test_peak_and_its_moment(both: Both) -> None:
    trace, _, run, forecast = both
    assert forecast.peak_moment == trace["peak_moment"]
    assert forecast.allocated_bytes - unmeasured_bytes(run, forecast) == pytest.approx(trace["peak_bytes"], rel=1e-4)


def test_peak_of_every_moment(both: Both) -> None:
    trace, _, run, forecast = both
    for moment, peak_bytes in trace["moments"].items():
        if moment == "optimizer" and run.bnb_4bit_quant_type:
            continue  # paged AdamW is not traced
        found = forecast.moments[moment] - unmeasured_bytes(run, forecast)
        assert found == pytest.approx(peak_bytes, rel=5e-3), moment


def test_flops_and_trained_parameters(both: Both) -> None:
    trace, architecture, run, _ = both
    operations = step_operations(architecture, run)
    counted = (o for o in operations if o.phase is not Phase.OPTIMIZER and o.name != ADAPTER_PARTS)
    flops = sum(o.total_flops for o in counted)
    assert flops == pytest.approx(trace["flops"], rel=1e-5)
    assert trainable_params(architecture, run) == trace["trained_params"]


def test_the_traces_are_of_three_ages_and_far_inside_the_bar() -> None:
    assert {trace["code"] for trace in TRACES} == {"litgpt-0.5.11", "litgpt-0.5", "litgpt-0.3"}
    assert {trace["versions"]["litgpt"] for trace in TRACES} == {"0.5.13", "0.5.3", "0.4.13"}
    errors = []
    for trace in TRACES:
        architecture, run = run_of_case(trace)
        errors.append(abs(memory_timeline(architecture, run).allocated_bytes / trace["peak_bytes"] - 1.0))
    assert median(errors) <= 0.02
    assert max(errors) <= 0.05
