"""What a step is longer for collectives beside its work, against two streams worked off layer by layer."""

from __future__ import annotations

import pytest

from tunecast.model.factors import Curve, Factor, FactorSet
from tunecast.model.operation import Kind, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.time import step_time

LAYERS = 64
SHARE = 0.4


def streams(work_s: float, gathers_s: float) -> float:
    """Seconds of a pass whose layers each wait for a gather that is asked for one layer ahead, where work beside a
    gather goes on at what the gather's kernels leave of the processors."""
    own_work, own_gather = work_s / LAYERS, gathers_s / LAYERS
    now, gathered, worked = 0.0, 0.0, 0.0
    while worked < LAYERS - 1e-9:
        gathers = gathered < LAYERS - 1e-9 and gathered < int(worked + 1e-9) + 2 - 1e-9
        works = worked < int(gathered + 1e-9) - 1e-9
        rate = (1.0 - SHARE if gathers else 1.0) / own_work
        ends = [(int(gathered + 1e-9) + 1 - gathered) * own_gather] if gathers else []
        ends += [(int(worked + 1e-9) + 1 - worked) / rate] if works else []
        now += min(ends)
        gathered += min(ends) / own_gather if gathers else 0.0
        worked += min(ends) * rate if works else 0.0
    return now


def one_pass(work_s: float, gathers_s: float, run: Run, **shares: float) -> float:
    """Seconds of a forward of so much work, beside gathers that take as long."""
    gather = Operation(name="all_gather", kind=Kind.COMMUNICATION, phase=Phase.FORWARD, bytes=gathers_s, launches=1.0)
    work = Operation(name="copy", kind=Kind.MEMORY, phase=Phase.FORWARD, bytes=work_s)
    values = {"link_bytes_per_s": (run.num_gpus - 1) / run.num_gpus, "link_latency_s": 0.0, **shares}
    factors = FactorSet(
        gpu="test",
        curves={"memory": Curve(form="bandwidth", params={"bytes_per_s": 1.0}, log_sd=0.0, origin="measured")},
        factors={n: Factor(value=v, low=v, high=v, unit="1", origin="measured") for n, v in values.items()},
        step_log_sd=0.0,
    )
    return step_time([gather, work], factors, run=run).step_time_s.value


@pytest.mark.parametrize("gathers_s", [0.1, 0.5, 1.0, 1.5, 2.0, 4.0])
def test_a_pass_takes_as_long_as_its_two_streams(gathers_s: float) -> None:
    run = Run(method="full", num_gpus=4, sharding="fsdp")
    found = one_pass(1.0, gathers_s, run, exposed_frac=SHARE)
    assert found == pytest.approx(streams(1.0, gathers_s), abs=2.0 * (1.0 + gathers_s) / LAYERS)


def test_what_is_asked_for_late_has_a_share_of_its_own() -> None:
    shares = {"exposed_frac": 0.4, "exposed_late_frac": 0.9}
    taken = {
        sharding: one_pass(1.0, 0.5, Run(method="full", num_gpus=4, sharding=sharding), **shares)
        for sharding in ("fsdp", "hsdp", "zero3")
    }
    assert taken["zero3"] == pytest.approx(1.45)
    assert taken["fsdp"] == taken["hsdp"] == pytest.approx(1.2)


def test_where_nobody_says_what_hides_nothing_does() -> None:
    assert one_pass(1.0, 0.5, Run(method="full", num_gpus=4, sharding="fsdp")) == pytest.approx(1.5)
