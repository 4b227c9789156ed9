"""``--stack torchtitan``: what its code does on one GPU, under FSDP and with split layers, and what is refused."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunecast import estimate
from tunecast.calibrate.published import read_runs
from tunecast.catalogs.errors import TunecastError
from tunecast.model.architectures import load_architecture
from tunecast.model.memory import moment_parts
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.run_validation import options_of_run

LLAMA = load_architecture("meta-llama/Llama-3.1-8B")
ROWS = Path(__file__).parents[2] / "results" / "published" / "unseen-runs.csv"


def resolved(**options: Any) -> Run:
    return resolve_run(LLAMA, {"stack": "torchtitan", "method": "full", "max_length": 8192, **options}).run


def dtypes(run: Run) -> tuple[str | None, ...]:
    return run.dtype, run.precision, run.master_dtype, run.reduce_dtype


def test_fp32_parameters_are_gathered_in_bf16_under_fsdp_and_cast_by_autocast_without() -> None:
    """torchtitan 0.2.0 distributed/utils.py (``maybe_enable_amp``), models/llama3/infra/parallelize.py."""
    sharded = ("bf16", "bf16", "fp32", "fp32")
    alone = ("fp32", "bf16-autocast", None, None)
    assert dtypes(resolved()) == alone
    assert dtypes(resolved(num_gpus=8, sharding="ddp")) == alone
    for layout in ({"num_gpus": 8}, {"num_gpus": 16, "tp": 8}, {"num_gpus": 16, "pp": 4}, {"num_gpus": 8, "cp": 2}):
        run = resolved(**layout)
        assert (run.sharding, dtypes(run)) == ("fsdp-grad-op" if "pp" in layout else "fsdp", sharded), layout
    pure = resolved(num_gpus=8, dtype="bf16", master_dtype="none", reduce_dtype="none")
    assert dtypes(pure) == ("bf16", "bf16", None, None)


def test_a_parameter_takes_sixteen_bytes_of_fp32() -> None:
    """Weights, gradients and two moments, whole on one GPU and shared out under FSDP."""
    for gpus in (1, 8):
        found = moment_parts(LLAMA, resolved(num_gpus=gpus, per_device_train_batch_size=1))
        held = [p["weights"] + p["gradients"] + p["optimizer_state"] for moment, p in found if moment == "optimizer"]
        assert max(held) == pytest.approx(16 * LLAMA.total_params / gpus, rel=0.01), gpus


def test_every_micro_batch_is_reduced_but_for_those_of_stages() -> None:
    """train.py has no ``set_requires_gradient_sync``; PyTorch's pipeline schedules call it themselves."""
    for layout, every in (({"num_gpus": 8}, True), ({"num_gpus": 16, "pp": 2}, False)):
        run = resolved(gradient_accumulation_steps=4, **layout)
        assert run.sync_each_micro_batch is every
        whole = max(parts["gradients"] for _, parts in moment_parts(LLAMA, run))
        assert (whole < LLAMA.total_params) == every


def test_every_run_of_torchtitan_that_was_published_can_be_typed() -> None:
    """What `validate` reads of a table of other people's runs, as options of ``--stack torchtitan``."""
    with ROWS.open(encoding="utf-8") as table:
        runs, _ = read_runs(csv.DictReader(table))
    read = [run for run in runs if run.stack == "torchtitan"]
    assert len(read) >= 5
    for each in read:
        run = replace(each.run, stack="torchtitan")
        found = resolve_run(each.architecture, options_of_run(each.architecture, run)).run
        assert found == replace(run, stack_version=found.stack_version), each.id


REFUSED = [
    ({"method": "lora"}, "--method lora with --stack torchtitan .* is not built; use --method full"),
    ({"num_gpus": 8, "sharding": "zero3"}, "--sharding zero3 is not built for --stack torchtitan, which takes none or"),
    ({"num_gpus": 8, "tp": 8}, "computes in fp32 where --tp or --pp split layers without FSDP"),
    ({"num_gpus": 8, "fsdp_version": 1}, "--fsdp-version 1 is not built for --stack torchtitan"),
    ({"fused_kernels": "rms_norm"}, "--fused-kernels rms_norm is not built for --stack torchtitan, which takes none"),
    ({"stack_version": "0.3.0"}, "No defaults of torchtitan 0.3.0 are recorded"),
]


def test_a_card_without_bf16_is_refused() -> None:
    with pytest.raises(TunecastError, match="this GPU has no bf16; take one that has, or leave --stack torchtitan out"):
        resolve_run(LLAMA, {"stack": "torchtitan", "method": "full"}, gpu_has_bf16=False)


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_torchtitan_does_not_have_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TunecastError, match=told):
        resolved(**options)


def test_its_loader_cuts_rows_out_of_samples_joined_whatever_their_length() -> None:
    """By hand: 100,000 samples of 1,000 tokens are 12,207 rows of 8,192, of 12,000 tokens 146,484; 8 rows a step."""

    def steps(mean: int, **options: Any) -> str:
        asked = {"stack": "torchtitan", "method": "full", "max_length": 8192, "num_gpus": 8, "sharding": "fsdp"}
        data = {"num_samples": 100_000, "mean_tokens": mean}
        found = estimate("meta-llama/Llama-3.1-8B", gpu="h200", **asked, **data, **options)[0]
        (told,) = [note.partition(" steps")[0] for note in found.notes if " steps: " in note]
        return told

    assert steps(1000) == "1,526"
    assert steps(12000) == "18,311"
    assert steps(1000, packing=False) == "12,500"
