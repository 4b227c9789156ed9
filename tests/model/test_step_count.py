"""Steps and micro-batches as the real Trainer of transformers makes them, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tunecast.model.amount import resolve_amount
from tunecast.model.architectures import load_architecture
from tunecast.model.phases import train
from tunecast.model.run import Run
from tunecast.model.run_work import work_of
from tunecast.model.step_count import full_frac, micro_batches, steps_of
from tunecast.model.value import Value
from tunecast.model.whole_run_options import WholeRunOptions

LENGTH = 1024


def plain(rows: int = 1, accumulation: int = 1, **more: Any) -> Run:
    return Run(
        method="full",
        max_length=LENGTH,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        **more,
    )


class Counted(torch.nn.Module):
    """One weight, and how often it was used in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"loss": (self.weight * x).sum()}


def trained(folder: Path, samples: int, rows: int, accumulation: int, epochs: float) -> tuple[int, int]:
    """(optimizer steps, micro-batches) of a real run."""
    from transformers import Trainer, TrainingArguments

    model = Counted()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="no",
    )
    data = [{"x": torch.ones(1)} for _ in range(samples)]
    found = Trainer(model=model, args=arguments, train_dataset=data).train()
    return found.global_step, model.calls


@pytest.mark.parametrize(
    ("samples", "rows", "accumulation", "epochs"),
    [(100, 1, 64, 10), (10, 1, 4, 3), (10, 2, 4, 3), (8, 2, 4, 2), (3, 1, 8, 2), (10, 1, 4, 2.5), (11, 3, 2, 0.5)],
)
def test_steps_and_micro_batches_are_those_of_the_trainer(
    samples: int, rows: int, accumulation: int, epochs: float, tmp_path: Path
) -> None:
    run = plain(rows, accumulation)
    steps, calls = trained(tmp_path, samples, rows, accumulation, epochs)
    assert steps_of(run, samples, epochs) == steps
    assert full_frac(run, samples, steps) * steps * accumulation == pytest.approx(calls)


def test_other_stacks_go_through_the_data_in_one() -> None:
    run = plain(1, 64, stack="litgpt")
    assert steps_of(run, 100, 10) == 16
    assert full_frac(run, 100, 16) == 1.0


def test_gpus_share_the_micro_batches_of_an_epoch() -> None:
    """100 rows on 8 GPUs are 13 micro-batches of one row on each, the last one not on all."""
    run = plain(1, 4, num_gpus=8, sharding="ddp")
    assert micro_batches(run, 100) == 13
    assert steps_of(run, 100, 3) == 12
    assert full_frac(run, 100, 12) == pytest.approx(3 * 13 / (12 * 4))


def test_a_run_takes_the_time_of_its_micro_batches_and_not_of_full_steps() -> None:
    run = plain(1, 64)
    amount = resolve_amount(run, {"num_samples": 100, "num_train_epochs": 10})
    assert amount is not None
    assert (amount.steps, amount.how.endswith("rounded up in every epoch")) == (20, True)
    work = work_of(load_architecture("Qwen/Qwen2.5-0.5B"), run, amount, forward_frac=0.3)
    assert (work.tokens, work.dataset_tokens) == (1000 * LENGTH, 100 * LENGTH)
    hours = train(work, Value(value=64.0, low=64.0, high=64.0), {}, WholeRunOptions()).hours
    assert hours.value * 3600 == pytest.approx(1000)


def test_a_file_that_ends_the_run_ends_it_within_an_epoch() -> None:
    """Three steps of 100 samples by 64: 64, 36 and 64 again."""
    run = plain(1, 64)
    amount = resolve_amount(run, {"num_samples": 100, "steps_exactly": 3})
    assert amount is not None
    assert amount.steps * amount.full_frac(run) == pytest.approx((100 + 64) / 64)


def test_typed_steps_are_full() -> None:
    run = plain(1, 64)
    amount = resolve_amount(run, {"max_steps": 7})
    assert amount is not None
    assert amount.full_frac(run) == 1.0


def test_steps_do_not_depend_on_how_a_batch_is_spread() -> None:
    """Plans that keep the global batch make the same steps: a rounding up of a rounding up is one."""
    for rows, accumulation, gpus in ((1, 32, 1), (4, 8, 1), (2, 4, 4), (1, 1, 32)):
        run = plain(rows, accumulation, num_gpus=gpus, sharding="ddp" if gpus > 1 else "none")
        assert [steps_of(run, samples, 3) for samples in (31, 32, 33, 1000)] == [3, 3, 6, 96]
