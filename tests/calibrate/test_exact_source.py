"""`tunecast estimate --exact`: the traced step as a forecast reads it, against the trace and the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import architecture_from_config
from tunecast.model.flops import model_flops_per_step
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.step_source import executed_by_dtype_of, model_flops_of, operations_of, timeline_of

for module in ("torch", "transformers", "peft", "bitsandbytes"):
    pytest.importorskip(module)

from tunecast.calibrate import exact_source  # noqa: E402
from tunecast.calibrate.exact import real_architecture  # noqa: E402
from tunecast.calibrate.exact_source import TracedSteps  # noqa: E402
from tunecast.calibrate.trace.tracer import trace_step  # noqa: E402

SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 2048, "model_type": "llama",
}  # fmt: skip
UNKNOWN = {**SMALL, "model_type": "persimmon"}
LLAMA = architecture_from_config(SMALL, "small llama")
DEEP = architecture_from_config({**SMALL, "num_hidden_layers": 8}, "deeper llama")


def run_of(**options: Any) -> Run:
    return resolve_run(LLAMA, {"max_length": 128, **options}).run


def totals(operations: tuple[Operation, ...]) -> tuple[float, float, float]:
    return (
        sum(o.total_flops for o in operations),
        sum(o.total_bytes for o in operations),
        sum(o.total_launches for o in operations),
    )


@pytest.mark.parametrize("options", [{"method": "lora"}, {"method": "qlora"}, {"method": "full", "optim": "sgd"}])
@pytest.mark.parametrize("micro_batches", [5])
def test_nothing_is_lost_between_trace_and_forecast(options: dict[str, Any], micro_batches: int) -> None:
    run = run_of(**options, gradient_accumulation_steps=micro_batches)
    source, trace = TracedSteps(), trace_step(LLAMA, run)
    assert totals(operations_of(LLAMA, run, source=source)) == pytest.approx(totals(trace.stream), rel=1e-12)
    forecast = timeline_of(LLAMA, run, source=source)
    assert forecast.allocated_bytes == trace.memory.peak_bytes == sum(forecast.parts_bytes.values())
    assert forecast.at_rest_bytes == trace.memory.at_rest_bytes
    assert forecast.moments == trace.memory.moments
    assert source(LLAMA, run, "cuda").trainable_params == trace.trainable_params


@pytest.mark.parametrize("loops", [False, True], ids=["grouped", "looped"])
def test_experts_are_traced_as_the_card_multiplies_them(loops: bool) -> None:
    config = {**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    moe = architecture_from_config(config, "small experts")
    run = replace(resolve_run(moe, {"max_length": 128, "lora_target_modules": "q_proj"}).run, loops_experts=loops)
    found = totals(operations_of(moe, run, source=TracedSteps()))
    assert found == pytest.approx(totals(step_operations(moe, run)), rel=1e-4)


def test_equal_kernels_are_one_operation() -> None:
    run = run_of(gradient_accumulation_steps=4)
    operations = operations_of(DEEP, run, source=TracedSteps())
    assert len(set(operations)) == len(operations) < len(trace_step(DEEP, run).stream) / 10


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_sharded_by_the_same_rules_as_the_formulas(sharding: str) -> None:
    run = run_of(method="full", num_gpus=4, sharding=sharding)
    forecast, formula = timeline_of(LLAMA, run, source=TracedSteps()), memory_timeline(LLAMA, run)
    assert forecast.allocated_bytes == pytest.approx(formula.allocated_bytes, rel=2e-3)
    assert forecast.parts_bytes["communication"] == formula.parts_bytes["communication"]
    exact, counted = (
        [o for o in operations if o.kind is Kind.COMMUNICATION]
        for operations in (operations_of(LLAMA, run, source=TracedSteps()), step_operations(LLAMA, run))
    )
    assert exact == counted != []


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-grad-op", "zero2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_gradient_that_waits_to_be_whole_is_one_from_its_birth_on(
    sharding: str, tied: bool, micro_batches: int
) -> None:
    """Few tokens beside a table of several layers: its gradient, which a tied head's waits for, is the peak."""
    few = architecture_from_config({**SMALL, "vocab_size": 8192, "tie_word_embeddings": tied}, "small llama of words")
    options = {"max_length": 16, "method": "full", "num_gpus": 16, "sharding": sharding}
    run = resolve_run(few, {**options, "gradient_accumulation_steps": micro_batches}).run
    traced, formula = timeline_of(few, run, source=TracedSteps()), memory_timeline(few, run)
    assert traced.moments == pytest.approx(formula.moments, rel=2e-3)
    smallest = 1e-3 * formula.allocated_bytes
    assert traced.parts_bytes == pytest.approx(formula.parts_bytes, rel=2e-3, abs=smallest)


def test_one_trace_serves_every_number_of_gpus() -> None:
    """But for accelerate's cast of the output, which DeepSpeed and FSDP2 go without (`seen_logits.is_widened`)."""
    source = TracedSteps()
    for sharding, traces in (("none", 1), ("ddp", 1), ("zero2", 2), ("fsdp", 2)):
        gpus = 1 if sharding == "none" else 8
        timeline_of(LLAMA, replace(run_of(), num_gpus=gpus, sharding=sharding), source=source)
        assert len(source.found) == traces


@pytest.mark.parametrize("options", [{}, {"reentrant": True}, {"gradient_checkpointing": False}])
def test_required_flops_of_the_trace_equal_the_formula(options: dict[str, Any]) -> None:
    """Without checkpointing the first layer's input gradient is really left out; everywhere else they are equal."""
    run = run_of(method="lora", gradient_accumulation_steps=3, **options)
    traced = TracedSteps()(LLAMA, run, "cuda").model_flops
    formula = model_flops_per_step(LLAMA, run)
    first_inputs = 0.0
    if not run.gradient_checkpointing:
        inward = [linear for linear in LLAMA.groups[0].layer.attention.linears if linear.name != "o_proj"]
        frozen = sum(linear.weight_params for linear in inward)
        adapters = sum(run.lora_r * linear.in_features for linear in inward)
        first_inputs = 2.0 * run.tokens_per_step * (frozen + adapters)
    assert traced == pytest.approx(formula - first_inputs, rel=1e-9)


@pytest.mark.parametrize("options", [{"method": "lora"}, {"method": "qlora"}, {"method": "full", "optim": "sgd"}])
@pytest.mark.parametrize("offloading", [False, True])
def test_a_reentrant_recomputation_is_no_backward(options: dict[str, Any], offloading: bool) -> None:
    """torch runs it inside the backward and has no context for it; its launches cost the host as the forward's do."""
    run = run_of(**options, reentrant=True, activation_offloading=offloading, gradient_accumulation_steps=3)
    traced, formula = operations_of(LLAMA, run, source=TracedSteps()), step_operations(LLAMA, run)
    for phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD):
        found, expected = (totals(tuple(o for o in each if o.phase is phase)) for each in (traced, formula))
        assert found[::2] == pytest.approx(expected[::2], rel=1e-9)
        assert found[1] == pytest.approx(expected[1], rel=1e-3)
        assert found[0] > 0.0


def test_a_family_without_formulas_is_traced() -> None:
    architecture = real_architecture(UNKNOWN, "unknown")
    run, source = resolve_run(architecture, {"max_length": 128, "lora_r": 8}).run, TracedSteps()
    trace = trace_step(architecture, run)
    assert timeline_of(architecture, run, source=source).allocated_bytes == trace.memory.peak_bytes
    assert sum(executed_by_dtype_of(architecture, run, source=source).values()) == pytest.approx(
        sum(o.flops for o in trace.stream if o.kind in (Kind.GEMM, Kind.ATTENTION))
    )
    linear = sum(x.weight_params for group in architecture.groups for x in group.layer.linears * group.count)
    adapters = trace.trainable_params
    products = 128 * (4.0 * (linear + architecture.embedding_params) + 6.0 * adapters)
    attention = 2 * 3 * 0.5 * 4.0 * 128 * 128 * 256
    assert model_flops_of(architecture, run, source=source) == pytest.approx(products + attention, rel=1e-9)


def test_weights_of_an_unknown_family_are_not_sharded_on_a_guess() -> None:
    architecture = real_architecture(UNKNOWN, "unknown")
    run = resolve_run(architecture, {"max_length": 128, "num_gpus": 2, "sharding": "ddp"}).run
    assert timeline_of(architecture, run, source=TracedSteps()).parts_bytes["communication"] > 0
    with pytest.raises(NotSupportedError, match="is not proven"):
        timeline_of(architecture, replace(run, sharding="fsdp"), source=TracedSteps())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss_type": "liger"}, "--loss-type liger"),
        ({"fused_kernels": ("rms_norm", "rope")}, "--fused-kernels rms_norm,rope"),
        ({"hf_code": "4.45"}, "--hf-code 4.45"),
        ({"tp": 2, "num_gpus": 2}, "--tp"),
        ({"sharding": "fsdp", "num_gpus": 2, "master_dtype": "fp32"}, "add --master-dtype none"),
    ],
)
def test_what_the_traced_code_would_leave_out_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(NotSupportedError, match=named):
        operations_of(LLAMA, replace(run_of(), **changes), source=TracedSteps())


def test_what_is_traced_next_is_told() -> None:
    told: list[str] = []
    TracedSteps(told=told.append)(DEEP, run_of(), "cuda")
    assert [line.split(":")[0] for line in told] == ["tracing 1 of 3", "tracing 2 of 3", "tracing 3 of 3"]


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_source, "find_spec", lambda name: None if name == "peft" else object())
    with pytest.raises(InputError, match=r'peft is not installed; type: pip install "tunecast\[calibrate\]"'):
        exact_source.check_installed()


def test_paged_state_without_room_crosses_pcie_beside_the_trace() -> None:
    run = run_of(method="full", optim="paged_adamw_32bit")
    full = replace(run, paged_bytes=1_000_000)
    beside = [o for o in operations_of(LLAMA, full, source=TracedSteps()) if o.kind is Kind.COMMUNICATION]
    assert sum(o.total_bytes for o in beside) == 2_000_000
    assert (
        totals(operations_of(LLAMA, run, source=TracedSteps()))[0]
        == totals(operations_of(LLAMA, full, source=TracedSteps()))[0]
    )
