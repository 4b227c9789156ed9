"""What the Trainer does around a step: against the modules of real models and its own calls; and where it counts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunecast
from tunecast.calibrate.trace.spec import run_from_dict
from tunecast.catalogs.errors import InputError
from tunecast.explain import explain
from tunecast.model.architectures import load_architecture
from tunecast.model.factors import FactorSet
from tunecast.model.inventory import step_operations
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.time import step_time
from tunecast.model.trainer_loop import PER_MICRO_STEP, PER_STEP, WALK_LAUNCHES, WALK_LOG_SD, modules_of

TRAINER_RUNS = Path(__file__).parents[2] / "results" / "validation" / "gpu-h200-2" / "trainer"
RECORD = Path(__file__).parents[2] / "results" / "records" / "h200-sxm5-141gb_20261127T231105Z_7932ba65.json"


def run_of(model: str, **options: Any) -> Run:
    given = {"method": "lora", "max_length": 512, "per_device_train_batch_size": 1, **options}
    return resolve_run(load_architecture(model), given, gpu_has_bf16=True).run


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("Qwen/Qwen2.5-0.5B", {}),
        ("Qwen/Qwen2.5-0.5B", {"method": "full"}),
        ("meta-llama/Llama-3.2-1B", {"method": "qlora", "lora_target_modules": "q_proj,v_proj"}),
        ("google/gemma-2-2b", {"lora_r": 8}),
        ("Qwen/Qwen3-30B-A3B", {"lora_target_modules": "q_proj,k_proj,v_proj,o_proj"}),
    ],
)
def test_the_modules_walked_over_are_those_of_the_real_model(model: str, options: dict[str, Any]) -> None:
    """Counted by the products of the forward, where layers differ in what they hold beside them: within a tenth, and a
    sixth of a whole model, whose norms and activations are most of it."""
    pytest.importorskip("transformers")
    from tunecast.calibrate.trace.hf import build_model

    architecture, run = load_architecture(model), run_of(model, **options)
    operations = step_operations(architecture, run)
    (counted,) = modules_of(operations, np.array([[o.count] for o in operations]), run)
    real = sum(1 for _ in build_model(architecture, run, device="meta").modules())
    assert counted == pytest.approx(real, rel=0.16 if run.method == "full" else 0.1)


def test_the_trainer_goes_over_the_model_as_often_as_is_counted(tmp_path: Path) -> None:
    """Calls that visit every module, of the real Trainer over three steps of two micro-steps."""
    transformers = pytest.importorskip("transformers")
    from tiny_models import lora, same_samples, tiny_llama

    model, calls = lora(tiny_llama()), Counter()
    watched = {"train": model, "zero_grad": model, "parameters": model, "num_parameters": model.base_model.model}

    class Starts(transformers.TrainerCallback):  # type: ignore[misc, name-defined, unused-ignore]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                calls.clear()

    for name, holder in watched.items():

        def counted(*args: Any, name: str = name, real: Any = getattr(holder, name), **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        setattr(holder, name, counted)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=1, gradient_accumulation_steps=2,
        report_to=[], use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model=model, args=args, train_dataset=same_samples(20), callbacks=[Starts()]).train()
    steps, micro_steps = 3, 6
    assert calls["train"] == calls["num_parameters"] == micro_steps
    assert calls["zero_grad"] == steps
    assert calls["parameters"] >= steps  # the clipping's, and one more at the end
    assert calls["train"] + calls["num_parameters"] == PER_MICRO_STEP * micro_steps
    assert calls["zero_grad"] + steps == PER_STEP * steps


@pytest.fixture(scope="module")
def factors() -> FactorSet:
    from tunecast.model.factors_io import factor_set_from_record

    return factor_set_from_record(json.loads(RECORD.read_text(encoding="utf-8")))


def seconds(model: str, run: Run, factors: FactorSet) -> float:
    return step_time(step_operations(load_architecture(model), run), factors, run=run).step_time_s.value


def test_a_real_trainer_takes_about_as_much_longer_as_is_forecast(factors: FactorSet) -> None:
    """Both jobs that an H200 ran: one waits for the host, one for the card, and each took 28 ms more by the Trainer.
    The constant lies between them, so what is tested is that one constant serves both."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(TRAINER_RUNS.glob("*.json"))]
    assert len(found) == 2
    for job in found:
        bare = run_from_dict(json.loads((TRAINER_RUNS.parent / "runs" / f"{job['name']}.json").read_text())["run"])
        longer = seconds(job["model"], replace(bare, trainer_loop=True), factors)
        forecast_s = longer - seconds(job["model"], bare, factors)
        measured_s = job["trainer_step_s"] - (job["before_s"] + job["after_s"]) / 2.0
        assert forecast_s == pytest.approx(measured_s, rel=0.25)
        assert longer == pytest.approx(job["trainer_step_s"], rel=0.15)


@pytest.mark.parametrize("micro_steps", [1, 2, 6])
def test_walks_add_to_a_step_whatever_bounds_it(factors: FactorSet, micro_steps: int) -> None:
    """While modules are walked over, nothing is issued: no work of the card hides it, however much there is."""
    model = "Qwen/Qwen2.5-0.5B"
    slower = replace(
        factors,
        factors={name: replace(f, value=0.0) if name == "step_overhead_s" else f for name, f in factors.factors.items()}
        | {"scale.host_walks": replace(factors.factors["host_s_per_launch"], value=1.0 + WALK_LAUNCHES)},
    )
    added = []
    for length in (128, 8192):
        run = run_of(model, max_length=length, gradient_accumulation_steps=micro_steps, gradient_checkpointing=False)
        assert run.trainer_loop
        added.append(seconds(model, run, slower) - seconds(model, run, factors))
    walked = 1994 * (PER_MICRO_STEP * micro_steps + PER_STEP) * factors.factors["host_s_per_launch"].value
    overhead = factors.factors["step_overhead_s"].value
    assert added == pytest.approx([walked - overhead] * 2, rel=0.01)


@pytest.mark.parametrize(
    ("options", "driven"),
    [
        ({}, True), ({"stack": "unsloth"}, True), ({"keeps_outputs": True}, False), ({"trainer_loop": False}, False),
        ({"stack": "torchtune"}, False),
    ],
)  # fmt: skip
def test_who_drives_the_steps_follows_from_the_stack(options: dict[str, Any], driven: bool) -> None:
    assert run_of("meta-llama/Llama-3.2-1B", **options).trainer_loop is driven


@pytest.mark.parametrize(
    ("options", "says"),
    [({"stack": "torchtune"}, "--stack torchtune has none"), ({"keeps_outputs": True}, "a loop of one's own")],
)
def test_the_trainer_is_refused_where_another_loop_runs(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        run_of("meta-llama/Llama-3.2-1B", trainer_loop=True, **options)


def test_its_doubt_is_in_the_interval_and_its_origin_is_told() -> None:
    """Nothing measured it on this card: half a step of it is half as unsure as it is."""
    asked = {"gpu": "h200-sxm5-141gb", "method": "lora", "max_length": 512, "gradient_checkpointing": False}
    (driven,) = tunecast.estimate("Qwen/Qwen2.5-0.5B", **asked)
    (bare,) = tunecast.estimate("Qwen/Qwen2.5-0.5B", trainer_loop=False, **asked)
    assert driven.origins["trainer_launches_per_module"] == "assumed"
    assert "trainer_launches_per_module" not in bare.origins
    assert any("--no-trainer-loop" in note for note in driven.notes)
    assert not any("--no-trainer-loop" in note for note in bare.notes)
    (terms,) = ([t for t in explain("Qwen/Qwen2.5-0.5B", **asked) if t.name == "trainer"],)
    assert [term.origin for term in terms] == ["assumed"]


def test_the_more_a_step_is_the_trainers_the_less_sure_it_is(factors: FactorSet) -> None:
    run = run_of("Qwen/Qwen2.5-0.5B", gradient_checkpointing=False)
    operations = step_operations(load_architecture("Qwen/Qwen2.5-0.5B"), run)
    driven, bare = (step_time(operations, factors, run=replace(run, trainer_loop=on)) for on in (True, False))
    share = driven.parts_s["trainer"] / driven.step_time_s.value
    assert 0.05 < share < 0.5
    assert driven.log_sd_parts["trainer"] == pytest.approx(WALK_LOG_SD * share)
    assert bare.log_sd_parts["trainer"] == 0.0
    assert driven.log_sd**2 == pytest.approx(sum(part**2 for part in driven.log_sd_parts.values()))
