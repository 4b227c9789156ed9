"""The callback in real Trainers on tiny models: it reads the job right, measures it, and never breaks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LENGTH, VOCAB, lora, same_samples, tiny_llama

import tunecast
from tunecast.calibrate.watch.clock import StepClock
from tunecast.calibrate.watch.reading import read_job
from tunecast.calibrate.watch.record import read_run_record
from tunecast.calibrate.watch.watcher import shown_s
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.resolve import resolve_run
from tunecast.model.trained import trainable_params
from tunecast.run_validation import validate_run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

RECORDS = Path(__file__).resolve().parents[3] / "results" / "records"


def arguments(folder: Path, **more: Any) -> Any:
    settings = {
        "max_steps": 12, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": True,
        "report_to": [], "use_cpu": True, "gradient_checkpointing": True, "save_strategy": "no",
        "logging_steps": 4, "disable_tqdm": True, **more,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder / "out"), **settings)


def trained(model: Any, args: Any, *callbacks: Any) -> Any:
    trainer = transformers.Trainer(model=model, args=args, train_dataset=same_samples(200), callbacks=[*callbacks])
    trainer.train()
    return trainer


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step a window: the tiny jobs here last less than a full one."""
    monkeypatch.setattr("tunecast.calibrate.watch.callback.StepClock", lambda **k: StepClock(**k, window_s=0.0))


@pytest.mark.usefixtures("short_windows")
def test_a_job_is_forecast_measured_and_recorded(tmp_path: Path) -> None:
    lines: list[str] = []
    watch = tunecast.TunecastCallback(
        records=sorted(RECORDS.glob("cpu_*.json")), usd_per_gpu_hour=3.0, out=tmp_path, tell=lines.append
    )
    model = lora(tiny_llama())
    trained(model, arguments(tmp_path), watch)
    assert watch.broken is None
    record = read_run_record(watch.written)
    assert record["why_no_forecast"] is None
    assert record["steps"] == record["max_steps"] == 12
    assert sum(window["steps"] for window in record["windows"]) == 12 - 3
    assert all(window["tokens"] == 2 * 2 * LENGTH * window["steps"] for window in record["windows"])
    run = record["run"]
    assert (run["max_length"], run["lora_r"], run["lora_dropout"]) == (LENGTH, 4, 0.1)
    assert set(run["lora_target_modules"]) == {"q_proj", "down_proj"}
    assert record["forecast"]["trainable_params"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert record["usd_per_h"] == 3.0
    assert len([text for text in lines if "/step" in text]) == 2
    assert "forecast" in lines[0]


@pytest.mark.usefixtures("short_windows")
def test_without_a_record_of_this_processor_it_is_measured_only(tmp_path: Path) -> None:
    lines: list[str] = []
    watch = tunecast.TunecastCallback(out=tmp_path, tell=lines.append)
    trained(lora(tiny_llama()), arguments(tmp_path), watch)
    record = read_run_record(watch.written)
    assert record["forecast"] is None
    assert "calibrate" in record["why_no_forecast"]
    assert record["windows"]
    (why,) = [text for text in lines if "measured figures follow" in text]
    assert "records=" in why
    assert "--" not in why.replace("--device cpu", "")


@pytest.mark.usefixtures("short_windows")
def test_work_that_no_record_knows_is_named_and_each_line_comes_once(tmp_path: Path) -> None:
    lines: list[str] = []
    watch = tunecast.TunecastCallback(
        records=sorted(RECORDS.glob("cpu_*.json")), out=None, every_steps=6, tell=lines.append
    )
    trained(tiny_llama().float(), arguments(tmp_path, bf16=False), watch)
    assert (
        "tunecast: no forecast for this job, measured figures follow: attention in fp32 was not measured on cpu"
        in (lines[0])
    )
    assert "--precision" not in lines[0]
    told = [text.split(" · ")[0] for text in lines if "/step" in text]
    assert told[-2:] == ["tunecast: step 6/12", "tunecast: step 12/12"]
    assert told.count("tunecast: step 12/12") == 1
    assert not any("0 s left" in text.split(" · ") for text in lines)


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        (0.0, "0 s"),
        (0.27, "0.270 s"),
        (0.0406, "0.0406 s"),
        (12.0, "12.0 s"),
        (99.97, "1 min 40 s"),
        (250.0, "4 min 10 s"),
    ],
)
def test_ends_of_an_interval_have_as_many_digits_as_its_value(seconds: float, says: str) -> None:
    assert shown_s(seconds) == says


@pytest.mark.usefixtures("short_windows")
def test_saves_are_aside(tmp_path: Path) -> None:
    watch = tunecast.TunecastCallback(out=None, tell=lambda _: None)
    trained(lora(tiny_llama()), arguments(tmp_path, save_strategy="steps", save_steps=6), watch)
    assert watch.broken is None
    assert watch.watcher.clock.asides == 2  # after 6 of 12 steps, and after the last
    assert watch.watcher.clock.aside_s > 0


def test_what_breaks_inside_is_told_once_and_the_training_ends_as_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("sensor fell off")

    monkeypatch.setattr("tunecast.calibrate.watch.watcher.Watcher.step_ends", fail)
    lines: list[str] = []
    watch = tunecast.TunecastCallback(out=tmp_path, tell=lines.append)
    model = lora(tiny_llama())
    trainer = trained(model, arguments(tmp_path), watch)
    assert trainer.state.global_step == 12
    assert [text for text in lines if "sensor fell off" in text] == lines
    assert len(lines) == 1
    assert not model._forward_pre_hooks
    assert watch.written is None


def test_a_tell_function_that_fails_ends_neither_the_training_nor_the_watching(tmp_path: Path, capsys: Any) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("no chat today")

    watch = tunecast.TunecastCallback(out=tmp_path, tell=fail)
    assert trained(lora(tiny_llama()), arguments(tmp_path), watch).state.global_step == 12
    assert watch.broken is None
    assert watch.written is not None
    assert "no chat today" in capsys.readouterr().err


@pytest.mark.usefixtures("short_windows")
def test_what_cannot_be_read_or_written_is_told_at_the_start_and_the_job_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lines: list[str] = []
    watch = tunecast.TunecastCallback(records=tmp_path / "none.json", out=tmp_path / "file" / "x", tell=lines.append)
    trained(lora(tiny_llama()), arguments(tmp_path), watch)
    assert watch.broken is None
    assert "none.json" in lines[1]
    assert "leaves no record" in lines[0]
    assert watch.watcher.clock.windows


@pytest.mark.parametrize("wrong", [{"usd_per_gpu_hour": -1.0}, {"usd_per_gpu_hour": float("nan")}, {"every_steps": 0}])
def test_impossible_arguments_are_refused_before_the_training(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        tunecast.TunecastCallback(**wrong)


class StopEarlyError(Exception):
    """What ends a training early."""


def interrupted_at(step: int) -> Any:
    """A callback that ends the training at a step."""

    class Interrupt(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                raise StopEarlyError

    return Interrupt()


@pytest.mark.usefixtures("short_windows")
def test_an_interrupted_job_leaves_its_record_and_its_hook_does_not_count_into_the_next(tmp_path: Path) -> None:
    watch = tunecast.TunecastCallback(out=tmp_path / "records", tell=lambda _: None)
    interrupt = interrupted_at(9)
    trainer = transformers.Trainer(
        model=lora(tiny_llama()), args=arguments(tmp_path, save_strategy="steps", save_steps=6),
        train_dataset=same_samples(200), callbacks=[watch, interrupt],
    )  # fmt: skip
    with pytest.raises(StopEarlyError):
        trainer.train()
    at_save = read_run_record(watch.written)
    assert at_save["steps"] == 6  # a machine that is taken away leaves what the last save wrote
    trainer.remove_callback(interrupt)
    trainer.train()
    first, second = sorted(map(read_run_record, (tmp_path / "records").glob("*.json")), key=lambda r: int(r["steps"]))
    assert (first["steps"], second["steps"]) == (9, 12)
    assert all(window["tokens"] == 2 * 2 * LENGTH * window["steps"] for window in second["windows"])


@pytest.mark.usefixtures("short_windows")
def test_a_record_without_a_forecast_still_holds_its_run_for_later(tmp_path: Path) -> None:
    watch = tunecast.TunecastCallback(out=tmp_path, tell=lambda _: None)
    trained(lora(tiny_llama()), arguments(tmp_path), watch)
    record = read_run_record(watch.written)
    assert record["forecast"] is None
    assert (record["run"]["max_length"], record["run"]["lora_r"]) == (LENGTH, 4)
    found = validate_run(watch.written, records=sorted(RECORDS.glob("cpu_*.json")))
    assert found.lines[0].forecast is not None


@pytest.mark.usefixtures("short_windows")
def test_watching_changes_no_result(tmp_path: Path) -> None:
    def final_loss(callbacks: list[Any]) -> float:
        transformers.set_seed(0)
        model = lora(tiny_llama())
        data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, VOCAB, (50, LENGTH))]
        trainer = transformers.Trainer(model=model, args=arguments(tmp_path), train_dataset=data, callbacks=callbacks)
        return float(trainer.train().training_loss)

    watched = final_loss([tunecast.TunecastCallback(out=None, tell=lambda _: None)])
    assert watched == final_loss([])


def test_a_compiled_model_is_compiled_as_without_us(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    def compiled(callbacks: list[Any]) -> dict[str, Any]:
        torch._dynamo.reset()
        counters.clear()
        args = arguments(tmp_path, torch_compile=True, torch_compile_backend="eager", gradient_checkpointing=False)
        trained(tiny_llama(), args, *callbacks)
        return {name: dict(counters[name]) for name in ("frames", "stats", "graph_break", "recompiles")}

    watch = tunecast.TunecastCallback(out=None, tell=lambda _: None)
    assert compiled([watch]) == compiled([])
    assert watch.broken is None
    assert watch.watcher.lengths.batches == 2 * 12
    assert watch.watcher.job.options["torch_compile"]


def job_options(tmp_path: Path, model: Any, **more: Any) -> dict[str, Any]:
    return read_job(arguments(tmp_path, **more), model).options


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, {"precision": "bf16-autocast", "dtype": "bf16", "gradient_checkpointing": True, "reentrant": False}),
        ({"bf16": False}, {"precision": "bf16"}),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, {"reentrant": True}),
        ({"gradient_checkpointing": False}, {"gradient_checkpointing": False}),
        ({"optim": "adamw_torch"}, {"optim": "adamw_torch"}),
    ],
)
def test_arguments_are_read_as_the_trainer_means_them(
    tmp_path: Path, more: dict[str, Any], expected: dict[str, Any]
) -> None:
    options = job_options(tmp_path, lora(tiny_llama()), **more)
    assert {name: options[name] for name in expected} == expected


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_job_as_read_trains_what_the_model_trains(tmp_path: Path, method: str) -> None:
    model = lora(tiny_llama()) if method == "lora" else tiny_llama()
    job = read_job(arguments(tmp_path), model)
    run = resolve_run(job.architecture, {**job.options, "max_length": LENGTH}).run
    assert run.method == method
    assert job.architecture.total_params == sum(
        p.numel() for name, p in model.named_parameters() if "lora_" not in name
    )
    assert trainable_params(job.architecture, run) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "more",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
        {"use_rslora": True},
    ],
)
def test_adapters_of_every_kind_are_read(tmp_path: Path, more: dict[str, Any]) -> None:
    model = lora(tiny_llama(), **more)
    job = read_job(arguments(tmp_path), model)
    run = resolve_run(job.architecture, {**job.options, "max_length": LENGTH}).run
    assert trainable_params(job.architecture, run) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def in_four_bits(model: Any, **options: Any) -> Any:
    """The model with its layers' maps in 4 bits, as someone who puts them in place by hand leaves it."""
    bnb = pytest.importorskip("bitsandbytes")
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                packed = bnb.nn.Linear4bit(child.in_features, child.out_features, bias=False, **options)
                packed.load_state_dict(child.state_dict())
                setattr(module, name, packed.to("cpu"))
    return model


def test_four_bit_maps_are_seen_where_the_configuration_is_silent(tmp_path: Path) -> None:
    packed = in_four_bits(tiny_llama(), quant_type="fp4", compress_statistics=False)
    assert not hasattr(packed.config, "quantization_config")
    options = job_options(tmp_path, lora(packed))
    assert {"method": "qlora", "bnb_4bit_quant_type": "fp4", "double_quant": False}.items() <= options.items()


def test_eight_bit_maps_are_refused_where_the_configuration_is_silent(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.down_proj = bnb.nn.Linear8bitLt(128, 64, bias=False)
    with pytest.raises(NotSupportedError, match="8-bit"):
        read_job(arguments(tmp_path), lora(model))


def test_what_has_no_formula_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    with pytest.raises(NotSupportedError, match="frozen without adapters"):
        read_job(arguments(tmp_path), model)
    adapter = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    scaled = peft.get_peft_model(tiny_llama(), adapter)
    with pytest.raises(NotSupportedError, match="IA3"):
        read_job(arguments(tmp_path), scaled)
    with pytest.raises(NotSupportedError, match="Linear"):
        read_job(arguments(tmp_path), torch.nn.Linear(2, 2))


def test_a_damaged_record_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schema": "tunecast.run/1"}))
    with pytest.raises(InputError, match="not a whole tunecast"):
        read_run_record(path)
