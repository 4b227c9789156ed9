"""Softmaxes of rows, rows joined and cut, heads moved: what a calibration measures of them, and what comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ci_share import some_for_ci

from tunecast.calibrate.fit_trials import walk_operation
from tunecast.calibrate.mock.device import open_mock
from tunecast.calibrate.plan import LATER, calibration_plan
from tunecast.model.architectures import load_architecture
from tunecast.model.curve_names import curve_key, find_curve
from tunecast.model.curves import Array
from tunecast.model.factors import FactorSet
from tunecast.model.inventory import step_operations
from tunecast.model.operation import SOFTMAX, STRAIGHT, STRIDED, Kind, Operation, Phase
from tunecast.model.priors import load_priors
from tunecast.model.resolve import resolve_run
from tunecast.model.walks import CURVES, walk_notes, with_walks

MOCK = "a100-sxm4-80gb#7"


@pytest.mark.parametrize("mode", ["quick", "full"])
@pytest.mark.parametrize(("card", "dtypes"), [("a100-sxm4-80gb", {"bf16", "fp32"}), ("t4-16gb", {"fp16", "fp32"})])
def test_every_card_runs_them_after_all_other_device_work(mode: str, card: str, dtypes: set[str]) -> None:
    plan = calibration_plan(open_mock(f"mock:{card}").hardware(), mode)
    walks = [spec.params for spec in plan if spec.bench == "walk"]
    assert {params["op"] for params in walks} == {"softmax", "softmax_backward", "join", "cut", "heads", "upcast"}
    assert {params["dtype"] for params in walks} == dtypes
    assert "walk" in LATER


def by_hand(op: str, made: list[Any]) -> Any:
    """What a trial's call gives, written out: e^x over its sum, and so on."""
    import torch

    first = made[0]
    weights = first.exp() / first.exp().sum(-1, keepdim=True)
    return {
        "softmax": lambda: weights,
        "softmax_backward": lambda: weights * (first - (first * weights).sum(-1, keepdim=True)),
        "join": lambda: torch.stack([torch.tensor([*a, *b]) for a, b in zip(*made, strict=True)]),
        "cut": lambda: torch.stack([torch.tensor([*row, 0.0]) for row in first]),
        "heads": lambda: torch.stack([first[:, head] for head in range(first.shape[1])]),
    }[op]()


@pytest.mark.parametrize("op", ["softmax", "softmax_backward", "join", "cut", "heads"])
def test_a_trial_does_what_its_name_says(op: str) -> None:
    """On this processor, in fp32; its bytes are those of what it reads and writes."""
    torch = pytest.importorskip("torch")
    from tunecast.calibrate.bench import walk_ops
    from tunecast.calibrate.devices.cpu import CpuDevice

    made: list[Any] = []

    def remembered(backend: Any, *shape: int, dtype: str) -> Any:
        made.append(torch.randn(*shape))
        return made[-1]

    more = {"heads": {"heads": 3}, "join": {"more": 1}, "cut": {"more": 1}}.get(op, {})
    params = {"op": op, "rows": 4, "width": 6, "dtype": "fp32", **more}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk_ops, "normal", remembered)
        found = walk_ops.CALLS[op](params, CpuDevice().backend)()
    assert torch.allclose(found, by_hand(op, made), atol=1e-6)
    assert found.is_contiguous()
    read = sum(x.nbytes for x in made)
    moved = {"softmax_backward": 6 * read, "cut": found.nbytes + 2 * read}.get(op, read + found.nbytes)
    assert walk_operation(params).bytes == moved


def test_a_cast_reads_half_of_what_it_writes() -> None:
    """On this processor: the same numbers in 32 bits, and the trial's bytes are those of both tensors."""
    torch = pytest.importorskip("torch")
    from tunecast.calibrate.bench import walk_ops
    from tunecast.calibrate.devices.cpu import CpuDevice

    params = {"op": "upcast", "rows": 4, "width": 6, "dtype": "bf16"}
    made = torch.randn(4, 6).to(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk_ops, "normal", lambda *_, **__: made)
        found = walk_ops.CALLS["upcast"](params, CpuDevice().backend)()
    assert found.dtype is torch.float32
    assert torch.equal(found.to(torch.bfloat16), made)
    assert walk_operation(params).bytes == made.nbytes + found.nbytes


EAGER = {"attn_implementation": "eager"}


@pytest.mark.parametrize(
    ("model", "options"),
    some_for_ci(
        [
            ("openai/gpt-oss-20b", {"method": "lora", "max_length": 512}),
            ("Qwen/Qwen2.5-7B", {"method": "qlora", "max_length": 512, "per_device_train_batch_size": 2, **EAGER}),
            ("google/gemma-2-2b", {"method": "lora", "max_length": 512}),
            ("meta-llama/Llama-3.1-8B", {"method": "full", "max_length": 512}),
            ("zai-org/GLM-4-9B-0414", {"method": "lora", "max_length": 512}),
        ]
    ),
)
def test_the_formulas_have_as_many_bytes_of_each_as_the_real_code(model: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from tunecast.calibrate.trace.depth import trace_extended

    architecture = load_architecture(model)
    run = resolve_run(architecture, options, gpu_has_bf16=True).run
    traced = walked(trace_extended(architecture, run, platform="cuda").stream)
    found = walked(step_operations(architecture, run))
    assert found.keys() == traced.keys()
    for place, moved in traced.items():
        assert found[place] == pytest.approx(moved, rel=0.01), place


def walked(operations: Iterable[Operation]) -> Counter[tuple[str, Phase]]:
    """Bytes by layout and phase."""
    found: Counter[tuple[str, Phase]] = Counter()
    for operation in operations:
        if operation.layout in (SOFTMAX, STRIDED, STRAIGHT):
            found[operation.layout, operation.phase] += operation.total_bytes
    return found


@pytest.fixture(scope="module")
def factors(calibrated: Callable[..., FactorSet]) -> FactorSet:
    """Curves of what moves bytes that a quick calibration of a simulated card gives."""
    return calibrated(MOCK, "memory", "gemm", "walk")


def test_rows_never_measured_are_forecast_by_their_own_curve(
    factors: FactorSet, log_errors: Callable[..., Array]
) -> None:
    """Against what the simulated card takes for them: widths and numbers of rows of other runs than the trials'."""
    softmaxes = [("softmax", {}), ("softmax_backward", {})]
    others = [
        ("upcast", {}),
        ("join", {"more": 1}),
        ("cut", {"more": 1}),
        ("cut", {"more": 700}),
        ("heads", {"heads": 5}),
    ]
    trials = [
        {"op": op, "rows": rows, "width": width, "dtype": dtype, **more}
        for rows, width in ((24576, 768), (57344, 3000), (40000, 6144))
        for dtype in ("bf16", "fp32")
        for op, more in (*softmaxes, *others)
        if (op, dtype) != ("upcast", "fp32")
    ]
    error = log_errors(factors, MOCK, "walk", trials)
    assert np.median(error) < 0.02
    assert np.max(error) < 0.05


def test_an_older_record_has_published_shares_of_a_copy_and_their_doubt(factors: FactorSet) -> None:
    """A new one keeps its own; so does a processor, of which nothing is published."""
    beliefs = load_priors()["beliefs"]
    older = replace(factors, curves={name: curve for name, curve in factors.curves.items() if name not in CURVES})
    assumed, memory = with_walks(older, beliefs), factors.curves["memory"]
    for name, layout in CURVES.items():
        curve = assumed.curves[name]
        assert curve.params["bytes_per_s"] == pytest.approx(beliefs["walks"][layout] * memory.params["bytes_per_s"])
        assert curve.log_sd > beliefs["walks"]["log_sd"] > 3 * factors.curves[name].log_sd
    assert with_walks(factors, beliefs).curves == factors.curves
    processor = replace(older, synchronous=True)
    assert with_walks(processor, beliefs) is processor
    assert find_curve(f"{Kind.MEMORY}-{STRIDED}", processor) is memory


def test_only_eager_runs_on_older_records_are_told(factors: FactorSet) -> None:
    llama, oss = load_architecture("meta-llama/Llama-3.1-8B"), load_architecture("openai/gpt-oss-20b")
    older = replace(factors, curves={"memory": factors.curves["memory"]})
    assumed = with_walks(older, load_priors()["beliefs"])
    plain, eager = (resolve_run(a, {"method": "lora"}, gpu_has_bf16=True).run for a in (llama, oss))
    assert walk_notes(llama, plain, assumed) == ()
    assert walk_notes(oss, eager, factors) == ()
    assert "new calibration" in walk_notes(oss, eager, assumed)[0]


def test_arithmetic_on_logits_is_no_cross_entropy() -> None:
    run = resolve_run(load_architecture("google/gemma-2-2b"), {"method": "lora"}, gpu_has_bf16=True).run
    found = step_operations(load_architecture("google/gemma-2-2b"), run)
    names = {o.name for o in found if o.kind is Kind.LOSS and curve_key(o) == "memory"}
    assert names == {"logits_scale", "logits_tanh"}
