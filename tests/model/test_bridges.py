"""NVLink bridges, which only the user knows of: two cards at NVLink's rate, and more over PCIe between the pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tunecast import estimate, recommend
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import find_gpu
from tunecast.model.architectures import load_architecture
from tunecast.model.engine import screen
from tunecast.model.factors import Factor
from tunecast.model.on_device import job_factors
from tunecast.model.parallel_network import with_peers
from tunecast.model.resolve import resolve_run
from tunecast.model.target import resolve_targets

MODEL = "meta-llama/Llama-3.1-8B"
RUN: dict[str, Any] = {"method": "lora", "max_length": 512}
OPTION = "--nvlink if NVLink bridges join them"


def link(gpu: str, num_gpus: int = 2, *, gpus_per_node: int = 8, **said: Any) -> Factor:
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {**RUN, "num_gpus": num_gpus, "sharding": "fsdp", "gpus_per_node": gpus_per_node})
    (target,) = resolve_targets([gpu], {})
    return job_factors(target, architecture, run.run, {"internode_gbps": 100, **said}).factors["link_bytes_per_s"]


def ask(gpu: str, num_gpus: int = 2, **said: Any) -> Any:
    (found,) = estimate(MODEL, gpu=gpu, num_gpus=num_gpus, sharding="fsdp", **RUN, **said)
    return found


@pytest.mark.parametrize(
    ("gpu", "one_way_gb_per_s"),
    [("h100-nvl-94gb", 300), ("a100-pcie-80gb", 300), ("rtx-3090-24gb", 56.25), ("rtx-a6000-48gb", 56.25)],
)
def test_a_bridge_carries_what_nvlink_inside_machines_does_of_its_own_rate(gpu: str, one_way_gb_per_s: float) -> None:
    """One direction of the data sheets' 600 GB/s (H100 NVL, A100 PCIe) and 112.5 GB/s (GA102)."""
    inside, bridged = link("h100-sxm5-80gb"), link(gpu, nvlink=True)
    own = one_way_gb_per_s * 1e9
    whole = find_gpu("h100-sxm5-80gb").nvlink_bytes_per_s / 2
    reached = [[end / rate for end in (of.value, of.low, of.high)] for of, rate in ((inside, whole), (bridged, own))]
    assert reached[1] == pytest.approx(reached[0])
    assert bridged.value > link(gpu).value
    assert ask(gpu, nvlink=True).step_time_s.value < ask(gpu).step_time_s.value


@pytest.mark.parametrize(("gpu", "most"), [("rtx-a6000-48gb", 2), ("h100-nvl-94gb", 2), ("h200-nvl-141gb", 4)])
def test_a_ring_of_more_cards_than_bridges_join_is_as_fast_as_pcie(gpu: str, most: int) -> None:
    """Pairs, and four H200 NVL (its data sheet)."""
    assert link(gpu, most, nvlink=True).value > link(gpu, most).value
    assert link(gpu, 2 * most, nvlink=True) == link(gpu, 2 * most)
    more = ask(gpu, 2 * most, nvlink=True)
    assert more.step_time_s == ask(gpu, 2 * most).step_time_s
    assert any(f"bridges join {most} cards, so a ring of {2 * most} crosses PCIe" in note for note in more.notes)


def test_machines_of_two_have_bridges_however_many_there_are() -> None:
    assert link("rtx-a6000-48gb", 8, gpus_per_node=2, nvlink=True).value > link("rtx-a6000-48gb", 8).value


def test_the_option_is_named_where_bridges_may_be() -> None:
    def named(gpu: str, num_gpus: int, **said: Any) -> bool:
        return any(OPTION in note for note in ask(gpu, num_gpus, **said).notes)

    assert named("rtx-3090-24gb", 2)
    assert not any(named("rtx-3090-24gb", 2, nvlink=said) for said in (True, False))
    assert not named("rtx-3090-24gb", 4), "it would change nothing"
    assert not named("rtx-4090-24gb", 2), "a card without NVLink"


def test_bridges_of_cards_without_nvlink_are_refused() -> None:
    with pytest.raises(InputError, match=r"^--nvlink says .* l40s-48gb has no NVLink; leave --nvlink out\.$"):
        ask("l40s-48gb", nvlink=True)
    both = estimate(MODEL, gpu=["l40s-48gb", "rtx-a6000-48gb"], num_gpus=2, sharding="fsdp", nvlink=True, **RUN)
    assert [found.gpu for found in both] == ["rtx-a6000-48gb"]
    assert any(note.startswith("left out: l40s-48gb: --nvlink") for note in both[0].notes)
    assert ask("l40s-48gb", nvlink=False).step_time_s == ask("l40s-48gb").step_time_s


def test_many_plans_at_once_have_the_bridges_of_one_at_a_time() -> None:
    architecture, gpu = load_architecture(MODEL), "rtx-a6000-48gb"
    spreads = [{**RUN, "num_gpus": count, "sharding": "fsdp"} for count in (2, 4)]
    runs = [resolve_run(architecture, options).run for options in spreads]
    found = screen(architecture, runs, resolve_targets([gpu], {}), {"nvlink": True}).step_s[0]
    single = [ask(gpu, run.num_gpus, nvlink=True).step_time_s.value for run in runs]
    assert np.allclose(found, single, rtol=1e-6)


def test_recommend_searches_cards_with_bridges_and_others() -> None:
    asked = {**RUN, "tokens": "10M", "usd_per_gpu_hour": 1.0, "max_gpus": 2}
    found = recommend(MODEL, gpu=["rtx-a6000-48gb", "l40s-48gb"], nvlink=True, **asked)
    plain = recommend(MODEL, gpu=["rtx-a6000-48gb", "l40s-48gb"], **asked)
    assert found.fastest.forecast.gpu == plain.fastest.forecast.gpu == "l40s-48gb"
    assert found.fastest.forecast.step_time_s == plain.fastest.forecast.step_time_s
    with pytest.raises(InputError, match="l40s-48gb has no NVLink"):
        recommend(MODEL, gpu="l40s-48gb", nvlink=True, **asked)


def test_a_measured_link_stays_as_measured() -> None:
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {**RUN, "num_gpus": 2, "sharding": "fsdp"}).run
    (target,) = resolve_targets(["rtx-a6000-48gb"], {})
    factors = job_factors(target, architecture, run)
    own = replace(factors.factors["link_bytes_per_s"], origin="measured:record.json")
    measured = replace(factors, factors={**factors.factors, "link_bytes_per_s": own})
    assert with_peers(measured, run, target.gpu, {"nvlink": True}) == measured
