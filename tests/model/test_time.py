"""Step time: two clocks against a brute-force queue, limits, intervals, and the JSON of factors."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tunecast.catalogs.errors import InputError
from tunecast.model.factors import Curve, Factor, FactorSet
from tunecast.model.factors_io import factor_set_from_record, factors_from_dict, factors_to_dict
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.phase_table import phase_table
from tunecast.model.run import Run
from tunecast.model.segments import FORWARD, HEAD
from tunecast.model.time import run_clocks, scalars, step_time

RUN = Run(method="lora")
ORDER = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def factor(value: float) -> Factor:
    return Factor(value=value, low=value / 1.1, high=value * 1.1, unit="1", origin="measured")


def factor_set(*, synchronous: bool = False, **values: float) -> FactorSet:
    """One FLOP and one byte take one second, on an otherwise perfect device."""
    return FactorSet(
        gpu="test",
        curves={
            "gemm.bf16": Curve(form="gemm", params={"flops_per_s": 1.0}, log_sd=0.0, origin="measured"),
            "attention.bf16.forward": Curve(
                form="attention", params={"flops_per_s": 1.0}, log_sd=0.0, origin="measured"
            ),
            "memory": Curve(form="bandwidth", params={"bytes_per_s": 1.0}, log_sd=0.0, origin="measured"),
        },
        factors={name: factor(value) for name, value in values.items()},
        step_log_sd=0.0,
        synchronous=synchronous,
    )


def memory(seconds: float, phase: Phase = Phase.FORWARD, count: float = 1.0, launches: float = 1.0) -> Operation:
    return Operation(name="op", kind=Kind.MEMORY, phase=phase, bytes=seconds, count=count, launches=launches)


def queue_seconds(stream: list[tuple[float, float]]) -> float:
    """Brute force: (host seconds to issue, device seconds) kernel by kernel; the last end on the device."""
    host = device = 0.0
    for issue_s, work_s in stream:
        host += issue_s
        device = max(device, host) + work_s
    return device


WORK = st.floats(0.01, 5.0)


@given(
    works=st.tuples(WORK, WORK, WORK),
    issue=st.floats(0.01, 5.0),
    micro_steps=st.integers(1, 4),
    kernels=st.sampled_from([200, 400]),
)
@example(works=(5.0, 1.0, 1.0), issue=2.5, micro_steps=2, kernels=200)
def test_two_clocks_against_a_kernel_queue(
    works: tuple[float, float, float], issue: float, micro_steps: int, kernels: int
) -> None:
    """Phases of evenly mixed kernels: the recurrence is exact but for the last kernel of a host-bound phase."""
    operations, stream = [], []
    for phase, work in zip(ORDER, works, strict=True):
        times = 1 if phase is Phase.OPTIMIZER else micro_steps
        operations.append(memory(work, phase, count=float(kernels * times)))
    for phase, work in zip([*ORDER[:2] * micro_steps, ORDER[2]], [*works[:2] * micro_steps, works[2]], strict=True):
        assert phase in ORDER
        stream += [(issue, work)] * kernels
    run = replace(RUN, gradient_accumulation_steps=micro_steps)
    found = step_time(operations, factor_set(host_s_per_launch=issue), run=run).step_time_s.value
    assert found == pytest.approx(queue_seconds(stream), abs=2 * (max(works) + issue))


def test_the_lead_of_a_heavy_phase_pays_for_a_light_one() -> None:
    """Forward: 10 kernels of 2 s; backward: 10 of 0.1 s; issuing takes 1 s each. 20 s of work + 1 s of work, but the
    host needs 20 s: at the end of forward it leads by 10 s and has 10 s to go, so the device waits for nothing."""
    operations = [memory(2.0, Phase.FORWARD, 10.0), memory(0.1, Phase.BACKWARD, 10.0)]
    found = step_time(operations, factor_set(host_s_per_launch=1.0), run=RUN)
    assert found.step_time_s.value == pytest.approx(21.0)
    assert found.parts_s["host"] == pytest.approx(0.0)


def test_a_long_head_does_not_hide_a_host_that_was_behind_in_the_layers() -> None:
    """10 layers' kernels of 0.1 s, issued at 1 s each, then a loss of 8 s: the loss starts when the last is issued.

    Evenly mixed, 9 s of work would hide behind 11 s of issuing.
    """
    loss = Operation(name="log_softmax", kind=Kind.LOSS, phase=Phase.FORWARD, bytes=8.0)
    found = step_time([memory(0.1, Phase.FORWARD, 10.0), loss], factor_set(host_s_per_launch=1.0), run=RUN)
    stream = [(1.0, 0.1)] * 10 + [(1.0, 8.0)]
    assert found.step_time_s.value == pytest.approx(queue_seconds(stream), abs=1.2)
    assert found.phases_s["forward"] == pytest.approx(found.step_time_s.value)


@pytest.mark.parametrize("first", ["up_proj", "lm_head"])
def test_a_head_of_the_layers_shape_is_still_the_head(first: str) -> None:
    """Two products in a layer and one of the head, all of 24 FLOPs: 48 s of the layers, 24 s of the head."""
    layers = Operation(name="up_proj", kind=Kind.GEMM, phase=Phase.FORWARD, shape=(2, 2, 3), flops=24.0, count=2.0)
    head = replace(layers, name="lm_head", count=1.0)
    operations = [layers, head] if first == "up_proj" else [head, layers]
    table = phase_table(operations, factor_set(), run=RUN)
    assert table.device_s.sum(axis=1)[[FORWARD, HEAD]] == pytest.approx([48.0, 24.0])


@pytest.mark.parametrize("first", ["scores", "up_proj"])
def test_scores_of_another_products_shape_enter_their_layers(first: str) -> None:
    """Two layers, entered at 3 s each, two products in each, issued at 1 s each."""
    scores = Operation(name="scores", kind=Kind.GEMM, phase=Phase.FORWARD, shape=(2, 2, 3), flops=24.0, count=2.0)
    other = replace(scores, name="up_proj")
    operations = [scores, other] if first == "scores" else [other, scores]
    told = factor_set(host_s_per_launch=1.0, **{"scale.host_layers": 3.0})
    assert step_time(operations, told, run=RUN).host_s == pytest.approx(4 + 6)


def test_the_host_enters_layers_and_calls_the_optimizer() -> None:
    """Two layers of 1 launch, recomputed and run back, and an optimizer of one call and 6 launches, at 1 s a launch:
    12 s; entering a layer costs 3 s more, forward and recomputed, the call 5 s."""
    attention = Operation(
        name="sdpa", kind=Kind.ATTENTION, phase=Phase.FORWARD, dtype="bf16", shape=(1, 1, 1, 1, 1, 1), count=2.0
    )
    operations = [
        attention,
        replace(attention, phase=Phase.RECOMPUTE),
        replace(attention, phase=Phase.BACKWARD),
        Operation(name="adamw", kind=Kind.OPTIMIZER, phase=Phase.OPTIMIZER, launches=6.0),
    ]
    bare = step_time(operations, factor_set(host_s_per_launch=1.0), run=RUN)
    assert bare.host_s == pytest.approx(12.0)
    told = factor_set(host_s_per_launch=1.0, **{"scale.host_layers": 3.0, "scale.host_calls": 5.0})
    assert step_time(operations, told, run=RUN).host_s == pytest.approx(12 + 12 + 5)


def test_operators_on_one_tensor_are_no_calls_of_the_optimizer() -> None:
    """Adafactor's hundred operators are issued like any other; equal bytes of a call over lists keep its own cost."""
    over_lists = Operation(name="adamw", kind=Kind.OPTIMIZER, phase=Phase.OPTIMIZER, dtype="fp32", bytes=8.0)
    one = replace(over_lists, name="adafactor.mul", count=100.0)
    told = factor_set(host_s_per_launch=1.0, **{"scale.host_calls": 5.0})
    for operations in ([over_lists, one], [one, over_lists]):
        assert step_time(operations, told, run=RUN).host_s == pytest.approx(100 + 1 + 5)


def test_a_shallow_queue_limits_the_lead() -> None:
    """As above with room for one launch: the host cannot run ahead, so backward is host-bound."""
    operations = [memory(2.0, Phase.FORWARD, 10.0), memory(0.1, Phase.BACKWARD, 10.0)]
    found = step_time(operations, factor_set(host_s_per_launch=1.0, launch_queue_depth=1.0), run=RUN)
    assert found.step_time_s.value == pytest.approx(20.0 - 2.0 + 10.0)


def test_clocks_meet_where_a_value_is_read() -> None:
    """Two micro-steps, forward 1 s of work, backward 30 s, each 10 s of issuing. Running on, the second forward is
    issued while the first backward runs: 10 + 30 + 1 + 30. A read at its start makes it wait: 10 + 30 + 10 + 30."""
    operations = [memory(0.1, Phase.FORWARD, 20.0), memory(3.0, Phase.BACKWARD, 20.0)]
    read = Operation(name="aten._local_scalar_dense", kind=Kind.MEMORY, phase=Phase.FORWARD, count=2.0, launches=0.0)
    run, factors = replace(RUN, gradient_accumulation_steps=2), factor_set(host_s_per_launch=1.0)
    assert step_time(operations, factors, run=run).step_time_s.value == pytest.approx(71.0)
    assert step_time([*operations, read], factors, run=run).step_time_s.value == pytest.approx(80.0)


def test_host_bound_limit() -> None:
    found = step_time([memory(1e-6, count=1000.0)], factor_set(host_s_per_launch=1e-3, step_overhead_s=0.5), run=RUN)
    assert found.step_time_s.value == pytest.approx(1.5)
    assert found.bound_by == "host"
    assert found.parts_s["host"] == pytest.approx(1.0 - 1e-3)


def test_device_bound_limit_and_bound_by() -> None:
    gemm = Operation(name="q", kind=Kind.GEMM, phase=Phase.FORWARD, shape=(10, 10, 10), flops=2000.0)
    factors = factor_set(host_s_per_launch=1e-9)
    assert step_time([gemm], factors, run=RUN).step_time_s.value == pytest.approx(2000.0)
    assert step_time([gemm], factors, run=RUN).bound_by == "compute"
    assert step_time([memory(3000.0), gemm], factors, run=RUN).bound_by == "bandwidth"


def test_a_synchronous_device_adds_host_and_work() -> None:
    found = step_time([memory(2.0, count=3.0)], factor_set(synchronous=True, host_s_per_launch=1.0), run=RUN)
    assert found.step_time_s.value == pytest.approx(3 * (2.0 + 1.0))


@given(
    host=st.floats(0.0, 3.0),
    overhead=st.floats(0.0, 3.0),
    scale=st.floats(0.5, 2.0),
    synchronous=st.booleans(),
    micro_steps=st.integers(1, 3),
)
def test_parts_and_phases_each_add_up(
    host: float, overhead: float, scale: float, synchronous: bool, micro_steps: int
) -> None:
    operations = [memory(1.0, p, count=6.0, launches=2.0) for p in Phase]
    values = {"host_s_per_launch": host, "step_overhead_s": overhead, "scale.memory": scale}
    run = replace(RUN, gradient_accumulation_steps=micro_steps)
    found = step_time(operations, factor_set(synchronous=synchronous, **values), run=run)
    assert sum(found.parts_s.values()) == pytest.approx(found.step_time_s.value)
    assert sum(found.phases_s.values()) == pytest.approx(found.step_time_s.value)


@given(
    base=st.lists(
        st.tuples(st.sampled_from(list(Phase)), st.floats(0.001, 10.0), st.integers(1, 50)), min_size=1, max_size=6
    ),
    extra=st.tuples(st.sampled_from(list(Phase)), st.floats(0.0, 10.0), st.integers(1, 50)),
    host=st.floats(0.0, 2.0),
    synchronous=st.booleans(),
)
def test_more_work_is_never_faster(
    base: list[tuple[Phase, float, int]], extra: tuple[Phase, float, int], host: float, synchronous: bool
) -> None:
    factors = factor_set(synchronous=synchronous, host_s_per_launch=host, step_overhead_s=1e-3)
    operations = [memory(s, p, float(c)) for p, s, c in base]
    more = [*operations, memory(extra[1], extra[0], float(extra[2]))]
    before, after = (step_time(o, factors, run=RUN).step_time_s.value for o in (operations, more))
    assert after >= before * (1 - 1e-12)


def test_equal_operations_may_be_listed_or_counted() -> None:
    factors = factor_set(host_s_per_launch=0.3)
    listed = step_time([memory(1.0)] * 5, factors, run=RUN)
    assert listed.step_time_s == step_time([memory(1.0, count=5.0)], factors, run=RUN).step_time_s


def all_reduce(payload: float) -> Operation:
    return Operation(name="all_reduce", kind=Kind.COMMUNICATION, phase=Phase.BACKWARD, bytes=payload, launches=1.0)


def test_ring_all_reduce_beside_work() -> None:
    """8 bytes on 4 GPUs at 1 B/s: 2 x 3 rounds of 2 s and 1 s of latency is 18 s beside 10 s of work. Two thirds of
    them are 12 s; a third is less than the 8 s that are left when the work is done."""
    run = replace(RUN, num_gpus=4)
    operations = [memory(10.0, Phase.BACKWARD), all_reduce(8.0)]
    link = {"link_bytes_per_s": 1.0, "link_latency_s": 1.0}
    assert step_time(operations, factor_set(**link), run=run).step_time_s.value == pytest.approx(28.0)
    most, least = (step_time(operations, factor_set(**link, exposed_frac=share), run=run) for share in (2 / 3, 1 / 3))
    assert most.step_time_s.value == pytest.approx(22.0)
    assert least.step_time_s.value == pytest.approx(18.0)
    assert (most.bound_by, least.bound_by) == ("communication", "bandwidth")


def test_many_gpus_without_a_link_factor_are_refused() -> None:
    with pytest.raises(InputError, match="link_bytes_per_s"):
        step_time([all_reduce(8.0)], factor_set(), run=replace(RUN, num_gpus=2))


def test_a_missing_precision_is_refused_by_name() -> None:
    gemm = Operation(name="q", kind=Kind.GEMM, phase=Phase.FORWARD, dtype="fp32", shape=(1, 1, 1), flops=2.0)
    with pytest.raises(InputError, match=r"gemm\.fp32.*gemm\.bf16"):
        step_time([gemm], factor_set(), run=RUN)


def test_interval_joins_curve_factor_and_left_out_spread() -> None:
    """All device time on one curve of sd 0.03, one factor of sd 0.04 on all of it, 0.12 left: 0.13 in all."""
    factors = replace(
        factor_set(**{"scale.memory": 1.0}),
        curves={"memory": Curve(form="bandwidth", params={"bytes_per_s": 1.0}, log_sd=0.03, origin="measured")},
        step_params=("scale.memory",),
        step_covariance=((0.04**2,),),
        step_log_sd=0.12,
    )
    found = step_time([memory(5.0)], factors, run=RUN)
    assert found.log_sd == pytest.approx(0.13, rel=1e-4)
    assert math.log(found.step_time_s.high / found.step_time_s.value) == pytest.approx(1.2815515655 * 0.13, rel=1e-4)


def test_a_run_that_leans_on_an_uncertain_factor_is_less_sure() -> None:
    factors = replace(
        factor_set(**{"scale.memory": 1.0, "scale.gemm": 1.0}),
        step_params=("scale.memory", "scale.gemm"),
        step_covariance=((0.2**2, 0.0), (0.0, 0.01**2)),
    )
    gemm = Operation(name="q", kind=Kind.GEMM, phase=Phase.FORWARD, shape=(10, 10, 10), flops=2000.0)
    leaning = step_time([gemm, memory(2000.0)], factors, run=RUN).log_sd
    assert leaning == pytest.approx(math.hypot(0.1, 0.005), rel=1e-3)
    assert step_time([gemm], factors, run=RUN).log_sd == pytest.approx(0.01, rel=1e-3)


def test_clocks_can_be_read_apart() -> None:
    table = phase_table([memory(1.0, count=4.0)], factor_set(), run=RUN)
    clocks = run_clocks(table, {"host_s_per_launch": 0.5}, synchronous=False)
    assert (clocks.device_s, clocks.host_s) == pytest.approx((4.0, 2.0))
    assert np.sum(clocks.segments_s) == pytest.approx(clocks.step_s)


def test_factors_survive_json() -> None:
    factors = replace(
        factor_set(synchronous=True, host_s_per_launch=1e-6),
        step_params=("host_s_per_launch",),
        step_covariance=((0.01,),),
        memory_overhead_bytes={"context": 5e8},
        notes=("measured warm",),
    )
    back = factors_from_dict(json.loads(json.dumps(factors_to_dict(factors))))
    assert back == factors
    assert scalars(back) == {"host_s_per_launch": 1e-6}


def test_a_record_names_itself_as_origin() -> None:
    factors = factor_set_from_record({"fitted": factors_to_dict(factor_set(host_s_per_launch=1.0))}, name="a.json")
    assert factors.factors["host_s_per_launch"].origin == "measured:a.json"
    assert factors.curves["memory"].origin == "measured:a.json"


@pytest.mark.parametrize("record", [{}, {"fitted": None}, {"fitted": {}}])
def test_an_unfitted_record_is_refused_with_the_command(record: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"tunecast fit a\.json"):
        factor_set_from_record(record, name="a.json")


def damaged(change: str) -> dict[str, object]:
    raw = factors_to_dict(factor_set(host_s_per_launch=1.0))
    if change == "schema":
        return {**raw, "schema": "tunecast.fitted/9"}
    if change == "missing":
        return {k: v for k, v in raw.items() if k != "curves"}
    if change == "nan":
        return {**raw, "step_log_sd": float("nan")}
    return {**raw, "factors": {"host_s_per_launch": {"value": "fast"}}}


@pytest.mark.parametrize("change", ["schema", "missing", "nan", "text"])
def test_damaged_factors_are_refused(change: str) -> None:
    with pytest.raises(InputError, match="tunecast fit"):
        factor_set_from_record({"fitted": damaged(change)}, name="a.json")
