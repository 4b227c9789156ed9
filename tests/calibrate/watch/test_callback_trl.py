"""The callback in TRL's own SFTTrainer: padding, packing and TRL's tiled head, on a tiny model on the CPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LENGTH, VOCAB, tiny_llama

import tunecast
from tunecast.calibrate.watch.clock import StepClock
from tunecast.calibrate.watch.reading import read_job
from tunecast.calibrate.watch.record import read_run_record
from tunecast.catalogs.errors import NotSupportedError
from tunecast.run_validation import validate_run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
RECORDS = sorted((Path(__file__).resolve().parents[3] / "results" / "records").glob("cpu_*.json"))
STEPS = 8


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step a window: the tiny jobs here last less than a full one."""
    monkeypatch.setattr("tunecast.calibrate.watch.callback.StepClock", lambda **k: StepClock(**k, window_s=0.0))


def words() -> Any:
    """A tokenizer of so many made-up words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {**{f"w{i}": i for i in range(VOCAB - 3)}, "<unk>": VOCAB - 3, "<pad>": VOCAB - 2, "<eos>": VOCAB - 1}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def texts() -> Any:
    rng = random.Random(0)
    return datasets.Dataset.from_list(
        [{"text": " ".join(f"w{rng.randrange(500)}" for _ in range(rng.randrange(8, 60)))} for _ in range(64)]
    )


def config(folder: Path, **more: Any) -> Any:
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": True,
        "report_to": [], "use_cpu": True, "save_strategy": "no", "logging_steps": 4, "disable_tqdm": True,
        "max_length": LENGTH, **more,
    }  # fmt: skip
    return trl.SFTConfig(output_dir=str(folder / "out"), **settings)


class Seen:
    """The micro-batches that the decoder of the model was really given, counted apart from the callback."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.padded: list[bool] = []
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.model.register_forward_pre_hook(self._saw, with_kwargs=True)

    def _saw(self, module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            self.shapes.append(tuple(kwargs["input_ids"].shape))
            mask = kwargs.get("attention_mask")
            self.padded.append(mask is not None and bool((mask == 0).any()))

    @property
    def tokens(self) -> int:
        return sum(rows * length for rows, length in self.shapes)


def sft(folder: Path, *, method: str, **more: Any) -> tuple[Any, Seen, Any]:
    """(the callback, what the model saw, the trainer) after a whole training."""
    watch = tunecast.TunecastCallback(records=RECORDS, usd_per_gpu_hour=1.0, out=folder, tell=lambda _: None)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(
        model=tiny_llama(), args=config(folder, **more), train_dataset=texts(), processing_class=words(),
        callbacks=[watch], peft_config=adapters if method == "lora" else None,
    )  # fmt: skip
    seen = Seen(trainer.model)
    trainer.train()
    return watch, seen, trainer


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("lora", {}),
        ("full", {}),
        ("lora", {"packing": True}),
        ("full", {"packing": True}),
        ("lora", {"packing": True, "packing_strategy": "wrapped"}),
        ("lora", {"per_device_train_batch_size": 1, "pad_to_multiple_of": 64}),
        ("lora", {"gradient_checkpointing": False, "gradient_accumulation_steps": 1}),
    ],
)
def test_a_job_of_trl_is_forecast_as_it_runs(tmp_path: Path, method: str, more: dict[str, Any]) -> None:
    watch, seen, trainer = sft(tmp_path, method=method, **more)
    assert watch.broken is None
    record = read_run_record(watch.written)
    assert record["why_no_forecast"] is None
    run, told = record["run"], record["forecast"]
    micro_batches = STEPS * trainer.args.gradient_accumulation_steps
    assert len(seen.shapes) == micro_batches
    rows = round(sum(rows for rows, _ in seen.shapes) / micro_batches)
    assert run["per_device_train_batch_size"] == rows
    assert run["max_length"] == round(seen.tokens / sum(rows for rows, _ in seen.shapes))
    assert record["longest_run"]["max_length"] == max(length for _, length in seen.shapes)
    assert told["trainable_params"] == sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert run["gradient_checkpointing"] is trainer.args.gradient_checkpointing
    assert run["method"] == method
    padded = any(seen.padded[:4])
    assert run["padding_mask"] is padded
    assert padded is not more.get("packing", False)
    timed = sum(window["tokens"] for window in record["windows"])
    per_step = [
        sum(r * n for r, n in seen.shapes[i : i + micro_batches // STEPS])
        for i in range(0, micro_batches, micro_batches // STEPS)
    ]
    assert timed == sum(per_step[3:])  # the first three steps warm up


def test_packed_rows_laid_end_to_end_are_one_sample_of_the_forecast(tmp_path: Path) -> None:
    watch, seen, _ = sft(tmp_path, method="lora", packing=True)
    assert {rows for rows, _ in seen.shapes} == {1}
    told = read_run_record(watch.written)["forecast"]
    a_step = seen.tokens / STEPS
    assert told["tokens_per_s"]["value"] * told["step_time_s"]["value"] == pytest.approx(a_step, rel=0.02)


def test_the_logits_are_forecast_as_this_trl_makes_them(tmp_path: Path) -> None:
    from trl.trainer import utils

    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    expected = "chunked_nll" if hasattr(utils, "add_fused_lm_head") else config(tmp_path).loss_type
    assert read_job(config(tmp_path), model).options["loss_type"] == expected


def test_logits_are_never_whole_in_this_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer import utils

    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL makes the logits whole")
    made: list[tuple[int, ...]] = []
    head = torch.nn.Linear.forward
    monkeypatch.setattr(
        torch.nn.Linear, "forward",
        lambda self, x: (made.append((self.out_features, *x.shape)), head(self, x))[1],
    )  # fmt: skip
    sft(tmp_path, method="lora")
    assert made
    assert not [shape for shape in made if shape[0] == VOCAB]


def test_other_trainers_of_trl_are_measured_only(tmp_path: Path) -> None:
    args = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    with pytest.raises(NotSupportedError, match="DPOConfig"):
        read_job(args, tiny_llama())


def test_an_epoch_an_evaluation_and_an_early_stop(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 12

    watch = tunecast.TunecastCallback(records=RECORDS, out=tmp_path, tell=lambda _: None)
    args = config(tmp_path, max_steps=-1, num_train_epochs=1, eval_strategy="steps", eval_steps=5)
    trainer = trl.SFTTrainer(
        model=tiny_llama(), args=args, train_dataset=texts(), eval_dataset=texts().select(range(4)),
        processing_class=words(), callbacks=[watch, Stop()],
    )  # fmt: skip
    trainer.train()
    record = read_run_record(watch.written)
    assert (record["steps"], record["max_steps"], record["asides"]) == (12, 16, 2)
    assert sum(window["steps"] for window in record["windows"]) == 12 - 3
    found = {line.name for line in validate_run(watch.written).lines}
    assert "optimizer step" in found
    assert "training" not in found
