"""`recommend`: what is chosen, what binds, why others lost, and what the command prints and writes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from ci_share import fewer_in_ci
from typer.testing import CliRunner

from tunecast import estimate, recommend
from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.cli.program import program
from tunecast.model.recommend import WORTH, margin
from tunecast.recommend_table import chance_lines, plan_words, unproven, unproven_line
from tunecast.recommendation import Recommendation

MODEL = "Qwen/Qwen2.5-0.5B"
JOB: dict[str, Any] = {"method": "lora", "max_length": 512, "tokens": "20M"}
CARDS = ("l4-24gb", "l40s-48gb", "a100-sxm4-80gb", "h100-sxm5-80gb")
runner = CliRunner()


def ask(**changes: Any) -> Recommendation:
    return recommend(MODEL, **{"gpu": CARDS, "max_gpus": 4, **JOB, **changes})


@pytest.fixture(scope="module")
def free() -> Recommendation:
    """Without any limit."""
    return ask()


def everything(found: Recommendation) -> list[tuple[float, float]]:
    """(hours, USD) of the front and of the best plan of every card that lost."""
    lost = [rejected.candidate for rejected in found.rejected if rejected.candidate is not None]
    return [(c.time_h, c.usd) for c in (*(picked.candidate for picked in found.front), *lost)]


def test_the_front_falls_in_time_as_it_rises_in_money_and_nothing_beats_it(free: Recommendation) -> None:
    points = [(picked.candidate.usd, picked.candidate.time_h) for picked in free.front]
    assert points == sorted(points)
    assert [hours for _, hours in points] == sorted((hours for _, hours in points), reverse=True)
    for hours, usd in everything(free):
        for picked in free.front:
            front_h, front_usd = picked.candidate.time_h, picked.candidate.usd
            assert not (hours < 0.99 * front_h and usd <= front_usd), "a loser beats the front"


def test_the_named_plans_are_the_ends_and_a_member_of_the_front(free: Recommendation) -> None:
    assert free.cheapest is free.front[0]
    assert free.fastest is free.front[-1]
    assert free.balance in free.front


def test_the_full_forecast_of_a_plan_has_the_screened_time_and_money(free: Recommendation) -> None:
    for picked in free.front:
        assert picked.forecast.total_time_h is not None
        assert picked.forecast.cost_usd is not None
        assert picked.forecast.total_time_h.value == pytest.approx(picked.candidate.time_h, rel=1e-6)
        assert picked.forecast.cost_usd.value == pytest.approx(picked.candidate.usd, rel=1e-6)
        assert picked.forecast.total_time_h.low < picked.forecast.total_time_h.high
        assert picked.forecast.offer == picked.candidate.price.offer


def test_plans_of_rows_of_one_sample_each_are_those_of_estimate() -> None:
    """How long rows are depends on the micro-batch; steps do not."""
    data: dict[str, Any] = {"tokens": None, "num_samples": 4000, "mean_tokens": 300, "max_length": 2048}
    found, packed = ask(**data), ask(**data, packing=True)
    assert found.steps.startswith("1,000 steps")
    assert packed.steps.startswith("147 steps")
    for picked in found.front[: fewer_in_ci(99, 2)]:
        assert picked.forecast.total_time_h is not None
        assert picked.forecast.total_time_h.value == pytest.approx(picked.candidate.time_h, rel=1e-6)
        options = {**picked.candidate.plan.options, **data, "usd_per_gpu_hour": 1.0}
        (told,) = estimate(MODEL, gpu=picked.candidate.target.id, **options)
        assert told.step_time_s == picked.forecast.step_time_s
        assert told.totals == picked.forecast.totals


def test_more_gpus_are_offered_only_where_the_batch_divides_over_them() -> None:
    """Four samples a step go to four GPUs at most, eight to eight."""
    slow: dict[str, Any] = {"gpu": "l40s-48gb", "max_length": 2048}
    (told,) = [note for note in ask(global_batch=4, **slow).notes if "GPUs that were tried" in note]
    assert told.endswith("a global batch of 4 does not divide over 8: --global-batch changes it")
    more = ask(global_batch=8, **slow)
    assert any("--max-gpus 8 looks further" in note for note in more.notes) or any(
        relaxation.limit == "--max-gpus" for relaxation in more.relaxations
    )


def test_every_plan_keeps_the_global_batch_and_every_card_has_an_answer(free: Recommendation) -> None:
    assert free.batch.samples == 4  # no batch given, and up to 4 GPUs: one sample for each
    for picked in free.front:
        run = picked.forecast.run
        assert run.per_device_train_batch_size * run.gradient_accumulation_steps * run.num_gpus == 4
    answered = {picked.forecast.gpu for picked in free.front} | {rejected.gpu for rejected in free.rejected}
    assert answered == set(CARDS)


def test_a_given_batch_is_kept_and_counts_that_do_not_divide_it_are_told() -> None:
    found = ask(gpu="l40s-48gb", per_device_train_batch_size=3, gradient_accumulation_steps=2)
    assert found.batch.samples == 6
    assert any("does not divide over 4" in note for note in found.notes)
    assert {picked.candidate.num_gpus for picked in found.front} <= {1, 2}
    assert ask(gpu="l40s-48gb", global_batch=12).batch.samples == 12


def test_a_budget_is_kept_and_what_more_would_buy_is_told(free: Recommendation) -> None:
    assert free.cheapest is not None
    assert free.fastest is not None
    budget = math.sqrt(free.cheapest.candidate.usd * free.fastest.candidate.usd)
    found = ask(budget=budget)
    assert all(picked.candidate.usd <= budget for picked in found.front)
    (more,) = [relaxation for relaxation in found.relaxations if relaxation.limit == "--budget"]
    assert more.candidate.usd > budget
    assert found.fastest is not None
    assert more.candidate.time_h < found.fastest.candidate.time_h


def test_a_deadline_is_kept_and_what_waiting_would_save_is_told(free: Recommendation) -> None:
    assert free.cheapest is not None
    worth_telling = (1.0 + WORTH) * free.cheapest.candidate.usd
    as_cheap = [picked.candidate.time_h for picked in free.front if picked.candidate.usd < worth_telling]
    deadline = 0.9 * min(as_cheap)  # so that who keeps it pays more
    found = ask(deadline=f"{deadline}h")
    assert found.front
    assert all(picked.candidate.time_h <= deadline for picked in found.front)
    assert found.cheapest is not None
    (later,) = [relaxation for relaxation in found.relaxations if relaxation.limit == "--deadline"]
    assert later.candidate.time_h > deadline
    assert later.candidate.usd < found.cheapest.candidate.usd


def test_what_more_gpus_would_buy_is_told_where_the_batch_divides() -> None:
    long = {"gpu": "a100-sxm4-80gb", "max_length": 4096, "tokens": "500M", "global_batch": 8}
    found, larger = ask(max_gpus=2, **long), ask(max_gpus=4, **long)
    (more,) = [relaxation for relaxation in found.relaxations if relaxation.limit == "--max-gpus"]
    assert (more.now, more.needed) == ("2", "4")
    assert larger.fastest is not None
    assert more.candidate.time_h == pytest.approx(larger.fastest.candidate.time_h)


def test_nothing_within_the_budget_names_the_limit_and_the_least_that_would_do(free: Recommendation) -> None:
    assert free.cheapest is not None
    found = ask(budget=0.01)
    assert not found.front
    assert found.to_dict()["cheapest"] is None
    assert "--budget $0.01" in found.refusal()
    needed = min(relaxation.candidate.usd for relaxation in found.relaxations)
    assert needed == pytest.approx(free.cheapest.candidate.usd)
    assert {rejected.reason for rejected in found.rejected} == {"over budget"}


def test_limits_that_only_together_are_too_tight_are_both_named(free: Recommendation) -> None:
    assert free.cheapest is not None
    assert free.fastest is not None
    found = ask(budget=0.5 * free.cheapest.candidate.usd, deadline=0.5 * free.fastest.candidate.time_h)
    assert not found.front
    assert "--budget and --deadline together" in found.refusal()


def test_a_model_that_fits_no_card_is_said_card_by_card() -> None:
    found = recommend("meta-llama/Llama-3.1-70B", gpu=["t4-16gb", "l4-24gb"], method="lora", tokens="1M", max_gpus=2)
    assert not found.front
    assert {rejected.reason for rejected in found.rejected} == {"does not fit"}
    assert "does not fit 2" in found.refusal()


def test_spot_only_when_asked_and_with_what_interruptions_add() -> None:
    plain, spot = ask(gpu="h100-sxm5-80gb"), ask(gpu="h100-sxm5-80gb", spot=True)
    assert {picked.candidate.kind for picked in plain.front} == {"on-demand"}
    cut = [picked for picked in spot.front if picked.candidate.kind == "spot"]
    assert cut
    assert all("interruptions" in picked.forecast.phases_h for picked in cut)


def test_one_provider(free: Recommendation) -> None:
    found = ask(provider="runpod")
    assert {picked.candidate.price.offer["provider"] for picked in found.front} == {"runpod"}
    with pytest.raises(UnknownNameError, match="provider"):
        ask(provider="runpot")


def test_methods_compete() -> None:
    found = ask(method=None, methods="lora,qlora", gpu="l40s-48gb", max_gpus=1)
    assert {picked.candidate.plan.run.method for picked in found.front} <= {"lora", "qlora"}
    assert found.front[0].candidate.plan.run.method == "lora"  # a small model fits without 4 bits, which cost time


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "--tokens"),
        ({"deadline": "soon"}, "--deadline"),
        ({"budget": 0}, "--budget"),
        ({"min_fit_confidence": 1.5}, "--min-fit-confidence"),
        ({"purchase": ["lease"]}, "purchase kind"),
        ({"spot": False, "purchase": ["spot"]}, "--no-spot"),
        ({"owned": True, "electricity_usd_per_kwh": 0.3}, "--owned"),
        ({"gpu": "mock:l4-24gb"}, "rents"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ask(**changes)


def command(*arguments: str) -> Any:
    gpus = [word for card in CARDS for word in ("--gpu", card)]
    job = ["--method", "lora", "--max-length", "512", "--tokens", "20M", "--max-gpus", "4"]
    return runner.invoke(program, ["recommend", MODEL, *gpus, *job, *arguments], env={"COLUMNS": "100"})


@pytest.mark.parametrize(
    ("model", "card", "asked", "micro_batch"),
    [
        ("mistralai/Mistral-7B-v0.1", "rtx-a4500-20gb", {"method": "lora", "max_length": 512}, 1),
        ("meta-llama/Llama-3.1-8B", "b200-sxm-180gb", {"method": "lora", "max_length": 2048}, 8),
    ],
)
def test_a_faster_plan_is_not_left_out_on_a_card_without_a_record(
    model: str, card: str, asked: dict[str, Any], micro_batch: int
) -> None:
    """Without checkpoints and with its largest micro-batch it fits by a replay, by the screen's share not surely."""
    fastest = {"per_device_train_batch_size": micro_batch, "gradient_checkpointing": False}
    fastest |= {"gradient_accumulation_steps": 8 // micro_batch}
    (alone,) = estimate(model, gpu=[card], **asked, **fastest)
    assert alone.fit_probability is not None
    assert alone.fit_probability >= 0.9
    found = recommend(model, gpu=[card], tokens="10M", global_batch=8, max_gpus=1, usd_per_gpu_hour=1.0, **asked)
    (picked,) = found.front
    assert picked.candidate.plan.run.per_device_train_batch_size == micro_batch
    assert not picked.candidate.plan.run.gradient_checkpointing
    assert picked.candidate.fit_probability == pytest.approx(alone.fit_probability, rel=1e-6)


def test_a_plan_is_not_named_that_its_own_forecast_doubts() -> None:
    """The screen gives the thriftiest full fine-tuning of Qwen3-0.6B 98% on a T4, its forecast nearer to 80%."""
    asked: dict[str, Any] = {"gpu": ["t4-16gb"], "method": "full", "max_length": 2048}
    thriftiest = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
    (alone,) = estimate("Qwen/Qwen3-0.6B", **asked, **thriftiest)
    assert alone.fit_probability is not None
    assert alone.fit_probability < 0.9
    found = recommend("Qwen/Qwen3-0.6B", **asked, tokens="10M", global_batch=1, max_gpus=1, usd_per_gpu_hour=1.0)
    assert found.front == ()
    assert [rejected.reason for rejected in found.rejected] == ["fit not sure"]
    assert f"{alone.fit_probability:.0%}" in found.rejected[0].detail


def test_a_faster_plan_is_not_left_out_for_what_only_the_screen_doubts() -> None:
    """On one calibrated card the screen gives a share for what the allocator caches; the plan's own forecast knows."""
    record = min((Path(__file__).parents[2] / "results" / "records").glob("h200-*.json"))
    on_card: dict[str, Any] = {"gpu": ["h200-sxm5-141gb"], "records": [record], "method": "qlora", "max_length": 1024}
    fastest = {"per_device_train_batch_size": 16, "gradient_checkpointing": False}
    (alone,) = estimate("meta-llama/Llama-3.1-8B", **on_card, **fastest)
    assert alone.fit_probability is not None
    assert alone.fit_probability > 0.9
    found = recommend(
        "meta-llama/Llama-3.1-8B", **on_card, tokens="10M", global_batch=16, num_gpus=1, usd_per_gpu_hour=4.0
    )
    assert found.cheapest is not None
    run = found.cheapest.candidate.plan.run
    assert {name: getattr(run, name) for name in fastest} == fastest
    told = found.to_dict()["cheapest"]
    assert told["fit_probability"] == found.cheapest.forecast.fit_probability == pytest.approx(alone.fit_probability)
    assert not [relaxation for relaxation in found.relaxations if relaxation.limit == "--min-fit-confidence"]


def test_the_command_prints_the_design_s_json() -> None:
    answer = command("--json")
    assert answer.exit_code == 0
    found = json.loads(answer.stdout)
    assert found["schema"] == "tunecast.recommendation/1"
    assert {"cheapest", "fastest", "balance", "pareto", "rejected"} <= set(found)
    assert found["cheapest"]["forecast"]["schema"] == "tunecast.forecast/1"
    assert found["pareto"][0]["gpu"] == found["cheapest"]["gpu"]
    assert all(entry["reason"] and entry["detail"] for entry in found["rejected"])


def test_the_table_fits_100_columns_and_names_the_three_plans() -> None:
    answer = command()
    assert answer.exit_code == 0
    assert max(len(line.rstrip()) for line in answer.stdout.splitlines()) <= 100
    for word in ("cheapest", "balance", "fastest", "runners-up", "80% intervals"):
        assert word in answer.stdout
    assert "…" not in answer.stdout


def test_no_plan_is_exit_code_3_and_one_sentence() -> None:
    answer = command("--budget", "0.01")
    assert answer.exit_code == 3
    assert "No plan keeps --budget $0.01" in answer.stderr


def test_limits_that_no_plan_keeps_together_are_all_named() -> None:
    """A surer plan and a cheaper one: the budget was typed, and the confidence has a default that binds too."""
    options = {"method": "qlora", "num_samples": "20k", "mean_tokens": 300, "max_length": 1024, "budget": 1.0}
    found = recommend("meta-llama/Llama-3.1-8B", gpu=["l40s", "rtx-4090"], **options)
    limits = {relaxation.limit: relaxation for relaxation in found.relaxations}
    assert set(limits) == {"--budget", "--min-fit-confidence"}
    said = found.refusal()
    assert said.startswith("No plan keeps ")
    assert " and " in said.split(" together; ")[0]
    for limit, relaxation in limits.items():
        assert f"{limit} {relaxation.needed} would allow {relaxation.buys}" in said
    (unsure,) = (each for each in found.to_dict()["binding"] if each["limit"] == "--min-fit-confidence")
    assert unsure["fit_probability"] == pytest.approx(float(unsure["needed"].rstrip("%")) / 100.0, abs=0.001)
    over = [each for each in found.rejected if each.reason == "over budget"]
    assert over
    for each in over:
        assert each.candidate is not None
        assert each.detail.startswith(f"${each.candidate.usd:.2f} at best")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    answer = command("--plot", str(tmp_path / "money.svg"))
    assert answer.exit_code == 0
    drawn = (tmp_path / "money.svg").read_text()
    assert re.search(r"cheapest( and \w+)*: ", drawn)
    assert "whole run, USD" in drawn


def test_all_offers_of_a_70b_are_searched_without_heavy_imports() -> None:
    """The bar of 2 s is a benchmark's; here only that nothing slow is imported, and that it ends."""
    import subprocess
    import sys

    code = (
        "import sys; from tunecast.recommender import recommend; "
        "found = recommend('meta-llama/Llama-3.1-70B', method='qlora', tokens='10M'); "
        "heavy = {'torch', 'scipy', 'pandas', 'matplotlib'} & set(sys.modules); "
        "print(len(found.front), len(found.rejected), sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    front, rejected, heavy = done.stdout.split(maxsplit=2)
    assert heavy.strip() == "[]"
    assert int(front) >= 3
    assert int(front) + int(rejected) >= 76


def test_a_number_of_gpus_that_is_asked_for_is_the_only_one() -> None:
    """``--max-gpus`` beside it asks for others too, which keep its global batch."""
    asked: dict[str, Any] = {"method": "lora", "tokens": "10M", "gpu": CARDS, "global_batch": 8}
    only = recommend("meta-llama/Llama-3.1-8B", num_gpus=2, **asked)
    assert {picked.candidate.num_gpus for picked in only.front} == {2}
    assert {each.candidate.num_gpus for each in only.rejected if each.candidate is not None} <= {2}
    assert any(note.startswith("--num-gpus 2 binds") for note in only.notes)
    wider = recommend("meta-llama/Llama-3.1-8B", num_gpus=2, max_gpus=8, **asked)
    assert {picked.candidate.num_gpus for picked in wider.front} > {2}
    assert any(note.startswith("--num-gpus 2 binds") and "--max-gpus 8" in note for note in only.notes)
    with pytest.raises(InputError, match="A global batch of 3 divides over none of the GPUs"):
        recommend("meta-llama/Llama-3.1-8B", num_gpus=2, **{**asked, "global_batch": 3})
    with pytest.raises(InputError, match="--num-gpus"):
        recommend("meta-llama/Llama-3.1-8B", num_gpus="two", **asked)
    with pytest.raises(InputError, match="--num-gpus is 6, but one copy of the model takes 4 GPUs"):
        recommend("meta-llama/Llama-3.1-8B", num_gpus=6, tp=4, **asked)


def test_the_chance_to_keep_a_limit_is_told_by_the_plans_own_interval() -> None:
    asked: dict[str, Any] = {"method": "lora", "tokens": "10M", "gpu": "l40s-48gb", "max_gpus": 1}
    (picked,) = recommend("meta-llama/Llama-3.1-8B", **asked).front
    time = picked.forecast.total_time_h
    assert time is not None
    for hours, low, high in ((time.value * 1.001, 0.5, 0.52), (time.high, 0.899, 0.901)):
        found = recommend("meta-llama/Llama-3.1-8B", deadline=hours, **asked)
        chance = found.front[0].keeps_deadline(found.limits)
        assert chance is not None
        assert low <= chance <= high
        (told,) = [line for line in chance_lines(found) if "deadline" in line]
        assert f"{chance:.0%}" in told
        assert found.to_dict()["cheapest"]["deadline_probability"] == chance
        assert found.to_dict()["cheapest"]["budget_probability"] is None
    assert not list(chance_lines(recommend("meta-llama/Llama-3.1-8B", **asked)))


def test_a_card_of_a_maker_without_fitted_runs_is_marked_in_the_table() -> None:
    """Of AMD's cards no published run and no record is among the priors."""
    asked: dict[str, Any] = {"method": "lora", "tokens": "10M", "max_gpus": 1, "global_batch": 1}
    found = recommend("meta-llama/Llama-3.1-8B", gpu=("mi300x-192gb", "h100-sxm5-80gb"), **asked)
    assert {picked.forecast.gpu: unproven(picked) for picked in found.front}["mi300x-192gb"]
    (line,) = unproven_line(found)
    assert line.startswith("* mi300x-192gb: no run on any card of this maker")
    assert not list(unproven_line(recommend("meta-llama/Llama-3.1-8B", gpu="h100-sxm5-80gb", **asked)))


def test_the_least_confidence_that_helps_is_looked_for_among_slower_plans_too() -> None:
    """The fastest plans that are not sure enough may be the least sure: what is said to be needed is the surest's."""
    asked: dict[str, Any] = {"method": "full", "tokens": "10M", "max_gpus": 4, "gpu": ("a100-sxm4-40gb", "l40s-48gb")}
    (told,) = [each for each in recommend("meta-llama/Llama-3.1-8B", **asked).relaxations if "fit" in each.limit]
    needed = float(told.needed.rstrip("%")) / 100
    assert needed > 0.85
    less = recommend("meta-llama/Llama-3.1-8B", min_fit_confidence=needed, **asked)
    assert less.cheapest is not None
    assert less.cheapest.candidate.usd == pytest.approx(told.candidate.usd)


def test_samples_that_may_be_alike_need_no_mask_in_a_plan_either() -> None:
    """The low end of a plan's time is that of the same estimate."""
    rows: dict[str, Any] = {"num_samples": 2000, "mean_tokens": 300, "max_length": 1024, "packing": False}
    found = recommend(
        "meta-llama/Llama-3.1-8B", gpu="rtx-4090-24gb", method="qlora", global_batch=4, max_gpus=1, **rows
    )
    for picked in found.front:
        run = picked.forecast.run
        (same,) = estimate(
            "meta-llama/Llama-3.1-8B", gpu="rtx-4090-24gb", method="qlora", **rows,
            per_device_train_batch_size=run.per_device_train_batch_size,
            gradient_accumulation_steps=run.gradient_accumulation_steps,
            gradient_checkpointing=run.gradient_checkpointing,
        )  # fmt: skip
        assert same.total_time_h is not None
        assert picked.forecast.total_time_h is not None
        assert picked.forecast.total_time_h.low == pytest.approx(same.total_time_h.low, rel=1e-6)


def test_groups_of_shards_are_told_and_kept() -> None:
    """Sixteen GPUs in copies of four: in the plan, in its line and in its JSON."""
    asked: dict[str, Any] = {"method": "full", "max_length": 4096, "tokens": "20M", "global_batch": 16}
    asked |= {"gpu": ("h100-sxm5-80gb",), "max_gpus": 16, "sharding": "fsdp", "dp_shard_size": 4}
    found = recommend("meta-llama/Llama-3.1-8B", **asked)
    grouped = [picked for picked in found.front if picked.candidate.plan.run.sharding == "hsdp"]
    assert grouped
    for picked in grouped:
        assert picked.candidate.plan.run.dp_shard_size == 4
        assert picked.forecast.run == picked.candidate.plan.run
        assert "hsdp over 4" in plan_words(picked.candidate, with_method=False)
    plans = {plan["num_gpus"]: plan for plan in found.to_dict()["pareto"]}
    assert {plan["dp_shard_size"] for plan in plans.values() if plan["sharding"] == "hsdp"} == {4}


def test_layers_are_split_by_a_stack_that_splits_them() -> None:
    """Whole copies of 70B with states in fp32 fit no card; the full forecast of a plan is of the same split."""
    asked: dict[str, Any] = {"method": "full", "max_length": 2048, "tokens": "10M", "gpu": ("h200-sxm5-141gb",)}
    found = recommend("meta-llama/Llama-3.1-70B", stack="megatron", max_gpus=16, **asked)
    assert found.front
    for picked in found.front:
        run = picked.candidate.plan.run
        assert run.tp * run.pp > 1
        assert (picked.forecast.run.tp, picked.forecast.run.pp) == (run.tp, run.pp)
        assert picked.forecast.run_origins["tp"] == "searched"
        assert picked.forecast.total_time_h is not None
        assert picked.forecast.total_time_h.value == pytest.approx(picked.candidate.time_h, rel=1e-6)
    assert {plan["tp"] for plan in found.to_dict()["pareto"]} == {p.candidate.plan.run.tp for p in found.front}
    asked |= {"tp": 8, "pp": 1}
    typed = recommend("meta-llama/Llama-3.1-70B", stack="megatron", max_gpus=16, **asked)
    assert {picked.candidate.plan.run.tp for picked in typed.front} <= {8}


def test_what_the_screen_does_not_know_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="--streaming"):
        recommend("Qwen/Qwen2.5-0.5B", num_samples=100, mean_tokens=100, streaming=True)


def test_a_margin_that_rounds_to_nothing_is_told_in_words() -> None:
    assert margin(2.04, -0.01) == "$2.04 less, as fast"
    assert margin(2.04, 0.001) == "$2.04 less, as fast"
    assert margin(0.001, 2.0) == "2.0 h less, as dear"
    assert margin(0.001, -0.001) == "as dear and as fast"
    assert margin(1.25, 0.85) == "$1.25 and 51 min less"


def test_a_file_with_fsdp_is_planned_without_it_too_in_its_own_dtype(tmp_path: Path) -> None:
    """Shards of FSDP keep fp32; on one GPU the same file trains the bf16 weights that it loads."""
    training, companion = tmp_path / "trl.yaml", tmp_path / "fsdp.yaml"
    training.write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\ndataset_name: x\ndtype: bfloat16\nbf16: true\n"
        "max_length: 2048\nper_device_train_batch_size: 2\ngradient_checkpointing: true\nmax_steps: 500\n"
    )
    companion.write_text("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n")
    found = recommend(str(training), accelerate=companion, gpu="a100-sxm4-80gb")
    runs = {picked.forecast.run.num_gpus: picked.forecast.run for picked in found.front}
    assert (runs[1].sharding, runs[1].dtype, runs[1].master_dtype) == ("none", "bf16", None)
    assert (runs[8].sharding, runs[8].dtype, runs[8].master_dtype) == ("fsdp", "bf16", "fp32")


def test_an_update_in_the_backward_is_planned_with_one_micro_batch_a_step() -> None:
    """It frees gradients at once, so that nothing accumulates: smaller micro-batches are no plans of it."""
    asked = {"method": "full", "max_length": 512, "optimizer_in_backward": True, "gradient_accumulation_steps": None}
    found = recommend(MODEL, gpu="h100-sxm5-80gb", tokens="1M", max_gpus=1, global_batch=4, **asked)
    (picked,) = found.front
    assert picked.forecast.run.optimizer_in_backward
    assert (picked.forecast.run.per_device_train_batch_size, picked.forecast.run.gradient_accumulation_steps) == (4, 1)


def test_a_plan_says_what_estimate_says_of_its_offer(tmp_path: Path) -> None:
    """Sixteen GPUs over machines whose network nobody states."""
    path = tmp_path / "p.csv"
    path.write_text("gpu_canonical_id,provider,gpu_count,usd_per_gpu_hour\nh100-sxm5-80gb,somebody,8,2.0\n")
    asked = {"method": "full", "max_length": 1024, "tokens": "10M", "gpu": "h100-sxm5-80gb", "prices": [path]}
    (told,) = estimate("meta-llama/Llama-3.1-8B", num_gpus=16, sharding="fsdp", **asked)
    found = recommend("meta-llama/Llama-3.1-8B", max_gpus=16, global_batch=16, **asked)
    sixteen = [picked.forecast for picked in found.front if picked.forecast.run.num_gpus == 16]
    assert sixteen
    for each in (told, *sixteen):
        assert any("own network is not stated" in note for note in each.notes)


def test_a_file_whose_shards_allow_no_count_is_refused_in_a_sentence() -> None:
    """DeepSpeed of one process keeps an fp32 copy of a whole model, which is not built: one GPU is no plan."""
    examples = Path(__file__).parents[2] / "docs" / "examples"
    asked = {"deepspeed": examples / "deepspeed.json", "method": "full", "tokens": "5M", "gpu": "h100-sxm5-80gb"}
    with pytest.raises(NotSupportedError, match="DeepSpeed on one GPU"):
        recommend(str(examples / "trl.yaml"), max_gpus=1, global_batch=16, **asked)
    found = recommend(str(examples / "trl.yaml"), max_gpus=2, global_batch=16, **asked)
    assert {picked.forecast.run.num_gpus for picked in found.front} == {2}


def test_cards_without_bf16_are_left_out_where_the_stack_needs_it_and_named() -> None:
    found = recommend("gpt2", method="full", stack="torchtitan", max_length=512, tokens="1M", max_gpus=1)
    without = {rejected.gpu: rejected for rejected in found.rejected}
    assert found.front
    assert without["t4-16gb"].reason == "not built"
    assert "take one that has" in without["t4-16gb"].detail


def test_a_filter_never_makes_the_cheapest_plan_cheaper() -> None:
    """200 GB lie at AWS: every provider's traffic is reckoned, not that of the cheapest hours alone."""
    asked: dict[str, Any] = {
        "method": "qlora", "tokens": "10M", "max_length": 2048, "gpu": ("l40s-48gb", "l4-24gb"), "prepare": True,
        "dataset_gb": 200, "data_location": "s3=500", "phase_rate": "tokenize_tokens_per_s=20000000",
    }  # fmt: skip
    anywhere, there = (recommend("meta-llama/Llama-3.1-8B", **asked, **more) for more in ({}, {"provider": "aws"}))
    assert anywhere.cheapest is not None
    assert there.cheapest is not None
    assert anywhere.cheapest.candidate.usd <= there.cheapest.candidate.usd


def test_budget_and_deadline_together_name_what_keeps_the_other() -> None:
    found = ask(budget=0.01, deadline="1m")
    over = [rejected.detail for rejected in found.rejected if rejected.reason == "over budget"]
    assert over
    assert all("in time" in detail or "past 1 min" in detail for detail in over)


def test_a_provider_that_sells_otherwise_is_told_by_kind_and_not_by_size() -> None:
    """vast.ai lists a marketplace only, whatever else is unknown of other cards."""
    done = runner.invoke(program, ["recommend", MODEL, "--tokens", "1M", "--provider", "vast"])
    assert done.exit_code == 3
    assert "--purchase" in done.output
    assert "--global-batch" not in done.output.split("Nobody is known")[1]


def test_a_file_without_a_sharding_is_sharded_where_the_plan_is_searched(tmp_path: Path) -> None:
    """Its 7.6 billion parameters in full fit on no card as copies of the model, which is what it is launched as."""
    file = tmp_path / "trl.yaml"
    file.write_text("model_name_or_path: Qwen/Qwen2.5-7B\nbf16: true\nmax_length: 2048\n", encoding="utf-8")
    shared: dict[str, Any] = {"gpu": "h100-sxm5-80gb", "tokens": "10M", "config_format": "trl"}
    (launched,) = estimate(str(file), num_gpus=8, **shared)
    (searched,) = estimate(str(file), num_gpus="auto", **shared)
    planned = recommend(str(file), **shared)
    assert (launched.run.sharding, launched.verdict) == ("ddp", "no")
    assert (searched.run.sharding, searched.verdict) == ("fsdp", "fits")
    assert planned.cheapest is not None
    assert planned.cheapest.forecast.run.sharding in ("fsdp", "zero1", "zero2", "zero3")
