"""Evaluations and saves that are due, against the real Trainer's own stops."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunecast.calibrate.watch.callback import TrainingWatch, start_watching
from tunecast.calibrate.watch.reading import (
    checkpointing_options,
    fsdp_options,
    loss_options,
    read_job,
    refuse_other_adapters,
    spread_options,
)
from tunecast.calibrate.watch.stops import (
    BOTH,
    EVALUATION,
    SAVE,
    expected,
    steps_per_epoch,
    unseen_words,
)
from tunecast.catalogs.errors import NotSupportedError

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "asked",
    [
        {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "no"},
        {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 6},
        {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4, "eval_delay": 6, "save_strategy": "no"},
        {"num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "epoch"},
        {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 5},
        {"max_steps": 13, "eval_strategy": "epoch", "save_strategy": "no"},
        {"max_steps": 12, "eval_strategy": "no", "save_strategy": "steps", "save_steps": 0.25},
    ],
)
def test_planned_stops_are_those_of_a_real_training(asked: dict[str, Any], tmp_path: Path) -> None:
    from tiny_models import same_samples, tiny_llama

    from tunecast.calibrate.watch.callback import TunecastCallback

    data, happened = same_samples(20), []

    class Listens(transformers.TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            happened.append((state.global_step, EVALUATION))

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            happened.append((state.global_step, SAVE))

    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], disable_tqdm=True, **asked,
    )  # fmt: skip
    watch = TunecastCallback(out=None, tell=lambda text: None)
    trainer = transformers.Trainer(
        model=tiny_llama(), args=args, train_dataset=data, eval_dataset=data, callbacks=[watch, Listens()]
    )
    trainer.train()
    plan = watch.watcher.stops
    told = Counter()
    for step, kind in plan:
        told.update([(step, EVALUATION), (step, SAVE)] if kind == BOTH else [(step, kind)])
    assert told == Counter(happened)
    assert [kind for kind, _ in watch.watcher.clock.stopped] == [kind for _, kind in plan]


def test_only_stops_of_a_kind_that_was_seen_have_a_time() -> None:
    ahead = Counter({EVALUATION: 3, SAVE: 1})
    value, unseen = expected(ahead, [(EVALUATION, 2.0), (EVALUATION, 4.0)])
    assert (value.low, value.value, value.high) == (6.0, 9.0, 12.0)
    assert unseen_words(unseen) == " without 1 save, not seen yet"
    assert unseen_words(Counter()) == ""
    several = Counter({EVALUATION: 2, SAVE: 1, BOTH: 1})
    assert unseen_words(several) == " without 2 evaluations, 1 save and 1 evaluation with a save, not seen yet"


def test_data_without_a_length_have_no_epochs() -> None:
    args = SimpleNamespace(gradient_accumulation_steps=3)
    assert steps_per_epoch(args, [0] * 10) == 4
    assert steps_per_epoch(args, iter([0])) is None


@pytest.mark.parametrize(
    ("plugin", "sharding", "version"),
    [
        ({"fsdp_version": 2, "reshard_after_forward": True}, "fsdp", 2),
        ({"fsdp_version": 2, "reshard_after_forward": False}, "fsdp-grad-op", 2),
        ({"fsdp_version": 1, "reshard_after_forward": "full_shard"}, "fsdp", 1),
        ({"fsdp_version": 1, "reshard_after_forward": "shard_grad_op"}, "fsdp-grad-op", 1),
        ({"fsdp_version": 1, "reshard_after_forward": "hybrid_shard"}, "hsdp", 1),
    ],
)
def test_fsdp_is_read_as_its_plugin_takes_it(plugin: dict[str, Any], sharding: str, version: int) -> None:
    args = SimpleNamespace(fsdp_plugin_args=plugin, fsdp=True, world_size=8, deepspeed=None)
    assert spread_options(args) == {"num_gpus": 8, "sharding": sharding, "fsdp_version": version}
    assert fsdp_options(args) == {"sharding": sharding, "fsdp_version": version}


def test_parameters_of_fsdp_in_host_memory_are_read() -> None:
    """``cpu_offload`` of accelerate's plugin, as transformers 5 has it; ``accelerate launch`` by the environment."""
    plugin = {"fsdp_version": 2, "reshard_after_forward": True}
    args = SimpleNamespace(fsdp_plugin_args={**plugin, "cpu_offload": True}, fsdp=True, world_size=8, deepspeed=None)
    assert spread_options(args)["offload"] == "all"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_OFFLOAD_PARAMS", "true")
        assert fsdp_options(SimpleNamespace(fsdp_plugin_args=plugin))["offload"] == "all"


@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        ({}, None),
        ({"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}, None),
        ({"offload_optimizer": {"device": "cpu"}}, "optimizer"),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "all"),
        ({"offload_param": {"device": "cpu"}}, "parameters alone in host memory"),
        ({"offload_optimizer": {"device": "nvme"}}, r"on a disk \(nvme\)"),
    ],
)
def test_what_deepspeed_keeps_in_host_memory_is_read(zero: dict[str, Any], offload: str | None) -> None:
    deepspeed = pytest.importorskip("accelerate.utils.deepspeed")
    config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3, **zero}})
    args = SimpleNamespace(world_size=4, deepspeed="zero3.json", hf_deepspeed_config=config)
    if offload in (None, "optimizer", "all"):
        assert spread_options(args).get("offload") == offload
    else:
        with pytest.raises(NotSupportedError, match=offload):
            spread_options(args)


def test_ligers_kernels_that_are_switched_off_are_read() -> None:
    args = SimpleNamespace(use_liger_kernel=True, liger_kernel_config={"rope": False}, loss_type=None)
    assert loss_options(args)["fused_kernels"] == "rms_norm,swiglu"
    assert "fused_kernels" not in loss_options(SimpleNamespace(use_liger_kernel=True, liger_kernel_config=None))


def test_what_the_options_do_not_say_is_refused_by_name(tmp_path: Path) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from tiny_models import tiny_llama

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])

    def adapted(**config: Any) -> Any:
        return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **config))

    assert read_job(args, adapted()).options["lora_r"] == 4
    for config in ({"rank_pattern": {"v_proj": 8}}, {"layers_to_transform": [0]}):
        with pytest.raises(NotSupportedError, match="patterns of ranks, layers or names"):
            read_job(args, adapted(**config))
    model = adapted()
    own = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    with pytest.raises(NotSupportedError, match="The optimizer is SGD, which was handed to the Trainer"):
        read_job(args, model, own)
    usual = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    assert read_job(args, model, usual).options["optim"].startswith("adamw")


@pytest.mark.parametrize("sharding", ["fsdp", "fsdp-grad-op", "hsdp"])
def test_a_process_that_holds_a_share_is_not_asked_how_much_is_trained(sharding: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from tiny_models import tiny_llama

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 8})
    model = peft.get_peft_model(tiny_llama(), adapter)
    plain = read_job(args, peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))
    shared = {**plain.options, "num_gpus": 16, "sharding": sharding, "fsdp_version": 1}
    refuse_other_adapters(model, plain.architecture, shared)
    with pytest.raises(NotSupportedError, match="patterns of ranks"):
        refuse_other_adapters(model, plain.architecture, {**plain.options, "num_gpus": 16, "sharding": "ddp"})


def test_a_plan_of_stops_that_cannot_be_read_costs_neither_job_nor_measurement(tmp_path: Path) -> None:
    from tiny_models import tiny_llama

    class Endless:
        def __len__(self) -> int:
            raise NotImplementedError("no length")

    told: list[str] = []
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    state = transformers.TrainerState(max_steps=6)
    watch = TrainingWatch(tell=told.append)
    watcher = start_watching(watch, args, state, tiny_llama(), {"train_dataloader": Endless()})
    assert watcher.job is not None
    assert watcher.stops == ()
    assert [line for line in told if "could not be read (NotImplementedError: no length)" in line]


def checkpoints_of(monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], env: dict[str, str], **more: Any) -> Any:
    """What is read of a job of eight processes whose Trainer sets no checkpoints unless `more` says so."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    args = SimpleNamespace(
        **{"activation_checkpointing": False, "activation_checkpointing_kwargs": None, "world_size": 8, **more},
        fsdp_plugin_args=told, fsdp=bool(told),
    )  # fmt: skip
    return checkpointing_options(args, SimpleNamespace())


LAUNCHED = {"ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "true"}


@pytest.mark.parametrize(
    ("told", "env", "on"),
    [
        ({"fsdp_version": 2, "activation_checkpointing": True}, {}, True),
        ({"fsdp_version": 2, "activation_checkpointing": False}, LAUNCHED, False),
        ({"fsdp_version": 2}, {}, False),
        ({}, LAUNCHED, True),
        ({}, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, False),  # of a job without FSDP
    ],
)
def test_fsdps_own_checkpoints_are_read(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], env: dict[str, str], on: bool
) -> None:
    assert checkpoints_of(monkeypatch, told, env) == {"gradient_checkpointing": on, "reentrant": False}


def test_checkpoints_in_host_memory_and_selective_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
    with pytest.raises(NotSupportedError, match="FSDP keeps checkpoints in host memory"):
        checkpoints_of(monkeypatch, {"fsdp_version": 2, **both}, {})
    for name in ("offload", "selective"):
        kwargs = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {name: True}}
        with pytest.raises(NotSupportedError, match=f"Checkpoints are set with {name}"):
            checkpoints_of(monkeypatch, {}, {}, **kwargs)
