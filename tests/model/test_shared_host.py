"""What a record of one card says about another: its host, by shrinkage, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import find_gpu
from tunecast.model.estimate import record_notes
from tunecast.model.factors import Factor, FactorSet
from tunecast.model.factors_io import factors_to_dict
from tunecast.model.on_device import target_factors
from tunecast.model.priors import prior_factors
from tunecast.model.shared_host import HostRecord, with_shared_host
from tunecast.model.target import Target, resolve_targets
from tunecast.model.value import Z80

A, B = "a100-sxm4-80gb", "h100-sxm5-80gb"


def factor(value: float, log_sd: float) -> Factor:
    wide = math.exp(Z80 * log_sd)
    return Factor(value=value, low=value / wide, high=value * wide, unit="s", origin="measured:a.json")


def measured(log_sd: float = 0.05) -> FactorSet:
    """A card whose host takes 20 microseconds per launch, half of it in the backward."""
    ratios = {"scale.host_backward": factor(0.5, log_sd), "scale.gemm": factor(3.0, log_sd)}
    host = {"host_s_per_launch": factor(20e-6, log_sd)}
    return FactorSet(gpu=A, curves={}, factors={**host, **ratios}, step_log_sd=0.01)


def record_of(gpu: str) -> dict[str, Any]:
    return {"hardware": {"gpu": gpu, "memory_bytes": None}, "trials": [], "fitted": factors_to_dict(measured())}


def target_of(name: str, records: dict[str, dict[str, Any]]) -> Target:
    return resolve_targets([name], records, share_host=True)[0]


def test_the_host_is_the_normal_posterior_and_the_rest_is_the_priors() -> None:
    prior = prior_factors(find_gpu(B))
    found = with_shared_host(prior, HostRecord(gpu=A, factors=measured(log_sd=0.25)))
    place = prior.step_params.index("host_s_per_launch")
    v, s = prior.step_covariance[place][place], 0.25**2
    mean = (math.log(prior.factors["host_s_per_launch"].value) / v + math.log(20e-6) / s) / (1 / v + 1 / s)
    host = found.factors["host_s_per_launch"]
    assert math.log(host.value) == pytest.approx(mean)
    assert math.log(host.high / host.value) == pytest.approx(Z80 * math.sqrt(1 / (1 / v + 1 / s)))
    assert found.step_covariance[place][place] == pytest.approx(1 / (1 / v + 1 / s))
    assert host.origin == "reference:a.json"
    moved = {"host_s_per_launch", "scale.host_backward"}
    rest = {name: kept for name, kept in found.factors.items() if name not in moved}
    assert rest == {name: kept for name, kept in prior.factors.items() if name not in moved}
    assert (found.curves, found.step_log_sd) == (prior.curves, prior.step_log_sd)
    assert 0.5 < found.factors["scale.host_backward"].value < 1.0


def test_a_record_that_knows_nothing_moves_nothing_and_a_sure_one_everything() -> None:
    prior = prior_factors(find_gpu(B))
    for log_sd, expected in ((50.0, prior.factors["host_s_per_launch"].value), (1e-4, 20e-6)):
        found = with_shared_host(prior, HostRecord(gpu=A, factors=measured(log_sd=log_sd)))
        assert found.factors["host_s_per_launch"].value == pytest.approx(expected, rel=1e-3)


def test_a_card_with_a_record_keeps_its_own_and_the_others_share_it() -> None:
    own, other = resolve_targets([A, B], {A: record_of(A)}, share_host=True)
    assert own.shared is None
    assert own.record is not None
    assert target_factors(own).factors["host_s_per_launch"].origin == "measured:a.json"
    assert target_factors(other).factors["host_s_per_launch"].origin == "reference:a.json"
    assert any("as measured on a100-sxm4-80gb (a.json)" in note for note in target_factors(other).notes)


def test_without_the_option_a_record_of_another_card_is_refused_with_it() -> None:
    with pytest.raises(InputError, match="--share-host"):
        resolve_targets([B], {A: record_of(A)})


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ((), "0 were given"),
        ((A, "l4-24gb"), "2 were given"),
        (("cpu",), "launches nothing"),
        ((f"mock:{A}#0",), "simulated"),
    ],
)
def test_what_shares_no_host_is_refused(records: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        target_of(B, {gpu: record_of(gpu) for gpu in records})


def test_simulated_cards_may_share_a_simulated_host() -> None:
    assert target_of(f"mock:{B}", {f"mock:{A}#0": record_of(f"mock:{A}#0")}).shared is not None
    assert replace(target_of(B, {A: record_of(A)}), shared=None) == resolve_targets([B], {})[0]


@pytest.mark.parametrize("recorded", [(A,), (f"mock:{A}#0",), ("cpu",), (A, "l4-24gb")])
@pytest.mark.parametrize("asked", [(B,), (f"mock:{B}#0",), (B, f"mock:{B}#0"), (B, "l40s-48gb")])
def test_a_record_of_another_card_offers_its_host_only_where_it_can_be_taken(
    recorded: tuple[str, ...], asked: tuple[str, ...]
) -> None:
    records = {gpu: record_of(gpu) for gpu in recorded}
    with pytest.raises(InputError, match="not among the devices asked for") as caught:
        resolve_targets(asked, records)
    try:
        taken = all(target.shared for target in resolve_targets(asked, records, share_host=True))
    except InputError:
        taken = False
    assert ("--share-host" in str(caught.value)) is taken


def test_the_flags_of_the_record_are_told_of_the_host_that_is_taken_from_it() -> None:
    record = record_of(A) | {"flags": ["host_varied", "not_settled"]}
    target = target_of(B, {A: record})
    assert target.shared is not None
    assert target.shared.flags == ("host_varied", "not_settled")
    assert any("host_varied" in note for note in record_notes(target))
    assert record_notes(target_of(B, {A: record_of(A)})) == ()
