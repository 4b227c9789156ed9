"""Samples laid end to end without padding: against micro-batches drawn at random, each timed as the one row it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunecast
from tunecast.asked import read_asked
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.configs.write import config_for
from tunecast.model.documents import reach
from tunecast.model.estimate import forecast
from tunecast.model.flat_rows import flat_lengths, largest, lengths_of_mean, unevenness_of
from tunecast.model.forecast import Forecast
from tunecast.model.inventory import step_operations
from tunecast.model.largest import question_that_fits
from tunecast.model.operation import Kind
from tunecast.model.plans import Job, global_batch
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.rows import lays_flat
from tunecast.model.target import resolve_targets

FLASH = {"method": "lora", "attn_implementation": "flash_attention_2"}
FLAT = {**FLASH, "padding_free": True, "packing": False}
PARTS = 8


def ask(model: str = "Qwen/Qwen2.5-7B", **options: Any) -> Forecast:
    question = Question(architecture=load_architecture(model), options=options)
    return forecast(question, resolve_targets(["h100-sxm5-80gb"], {})[0])


def drawn_sums(lengths: tuple[float, ...], batch: int, copies: int, many: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Sorted tokens per sample of the largest of `copies` micro-batches, many times over."""
    draws = np.random.default_rng(3).choice(np.asarray(lengths), size=(many, copies, batch))
    return np.sort(draws.mean(axis=2).max(axis=1))


@pytest.mark.parametrize(("batch", "copies"), [(1, 1), (4, 1), (16, 1), (4, 8), (1, 3)])
def test_lengths_are_those_of_micro_batches_drawn_at_random(batch: int, copies: int) -> None:
    lengths = lengths_of_mean(500, 2048)
    drawn = drawn_sums(lengths, batch, copies, 80_000).reshape(PARTS, -1).mean(axis=1)
    found = flat_lengths(lengths, 2048, batch, copies, PARTS)
    assert found == pytest.approx(drawn, rel=0.03, abs=3.0)
    if copies == 1:
        assert found.mean() == pytest.approx(500, rel=1e-3)


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_the_largest_of_many_is_the_median_of_those_drawn(batch: int) -> None:
    lengths = (100.0, 200.0, 900.0, 2000.0)
    drawn = np.random.default_rng(6).choice(np.asarray(lengths), size=(300, 500, batch)).mean(axis=2).max(axis=1)
    assert largest(lengths, 2048, batch, 500) == pytest.approx(np.median(drawn), rel=0.02)


def test_short_samples_in_a_long_row_scatter_no_more_for_it(tmp_path: Path) -> None:
    data = tmp_path / "tokens.jsonl"
    data.write_text("\n".join('{"input_ids": [' + ", ".join(["1"] * 100) + "]}" for _ in range(50)), encoding="utf-8")
    options = {**FLAT, "dataset": str(data), "per_device_train_batch_size": 8, "num_gpus": 8, "sharding": "zero3"}
    found = [ask(**options, max_length=length, model="Qwen/Qwen2.5-0.5B") for length in (128, 32768)]
    assert found[0].memory.allocated_bytes == found[1].memory.allocated_bytes
    assert all(any("timed at 100 tokens" in note for note in each.notes) for each in found)


@pytest.mark.parametrize("amount", [{"num_samples": "8k"}, {"num_samples": 8000}, {"tokens": "4M"}])
def test_the_micro_batches_of_an_epoch_are_counted_however_they_are_typed(amount: dict[str, Any]) -> None:
    found = ask(**FLAT, max_length=2048, per_device_train_batch_size=8, mean_tokens=500.0, **amount)
    assert any("largest micro-batch of 1,000," in note for note in found.notes)


def test_samples_that_are_all_alike_are_timed_at_their_length() -> None:
    assert flat_lengths((700.0,), 2048, 8, 4, PARTS) == pytest.approx([700.0] * PARTS, abs=0.5)
    assert unevenness_of((700.0, 700.0)) == 1.0


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_step_takes_as_long_as_the_mean_of_drawn_ones(batch: int, tmp_path: Path) -> None:
    """Each drawn micro-batch is one packed row with the documents it has."""
    lengths = np.minimum(np.random.default_rng(1).exponential(900, 400).astype(int) + 20, 4096)
    data = tmp_path / "data.txt"
    data.write_text("\n".join("x" * 4 * length for length in lengths), encoding="utf-8")
    drawn = np.random.default_rng(2).choice(lengths, size=(60, batch))
    shared = {**FLASH, "gradient_accumulation_steps": 1}

    def row(samples: Any) -> float:
        tokens, spans = int(samples.sum()), round(reach([float(length) for length in samples]))
        options = {"max_length": tokens, "attention_length": spans, "allow_long_context": True}
        return ask(**shared, **options).step_time_s.value

    each = np.array([row(samples) for samples in drawn])
    found = ask(**shared, max_length=4096, per_device_train_batch_size=batch, dataset=str(data), **flat_only())
    noise = each.std() / len(each) ** 0.5 / each.mean()
    assert found.step_time_s.value == pytest.approx(each.mean(), rel=0.02 + 2.0 * noise)


def flat_only() -> dict[str, Any]:
    return {"padding_free": True, "packing": False}


@pytest.mark.parametrize("batch", [1, 8])
def test_attention_has_the_pairs_of_every_sample_by_itself(batch: int) -> None:
    """Summed over many draws of a micro-batch's lengths, not taken at the mean."""
    lengths = lengths_of_mean(400, 1024)
    uneven = unevenness_of(lengths)
    architecture = load_architecture("Qwen/Qwen2.5-0.5B")

    def flops(**options: Any) -> float:
        run = resolve_run(architecture, {**FLASH, **options}).run
        return sum(each.total_flops for each in step_operations(architecture, run) if each.kind is Kind.ATTENTION)

    per_pair = flops(max_length=1024) / 1024**2
    drawn = np.random.default_rng(4).choice(np.asarray(lengths), size=(4000, batch))
    of_samples = per_pair * (drawn**2).sum(axis=1).mean()
    at = flat_lengths(lengths, 1024, batch, 1, 64)
    found = [flops(max_length=round(m), per_device_train_batch_size=batch, samples_unevenness=uneven) for m in at]
    assert np.mean(found) == pytest.approx(of_samples, rel=0.04)


def test_memory_is_that_of_the_largest_micro_batch_in_one_row() -> None:
    found = ask(**FLAT, max_length=2048, per_device_train_batch_size=8, mean_tokens=500.0, num_samples=8000)
    tokens = round(largest(lengths_of_mean(500, 2048), 2048, 8, 1000) * 8)
    row = ask(**FLASH, max_length=tokens, attention_length=900)
    assert found.memory.allocated_bytes is not None
    assert row.memory.allocated_bytes is not None
    assert found.memory.allocated_bytes.value == pytest.approx(row.memory.allocated_bytes.value, rel=0.005)
    padded = ask(**FLASH, packing=False, max_length=2048, per_device_train_batch_size=8, mean_tokens=500.0)
    assert padded.memory.allocated_bytes is not None
    assert found.memory.allocated_bytes.value < 0.8 * padded.memory.allocated_bytes.value


def test_the_largest_micro_batch_that_fits_has_the_sums_of_so_many() -> None:
    """More samples fit than of padded ones, one more than found does not, and the longest row is refused by name."""
    flat = {**FLAT, "max_length": 2048, "mean_tokens": 500.0}
    (target,) = resolve_targets(["a100-sxm4-80gb"], {})
    architecture = load_architecture("meta-llama/Llama-3.1-8B")

    def found(options: dict[str, Any], dimension: str = "per_device_train_batch_size") -> int:
        question = Question(architecture=architecture, options=options)
        return int(question_that_fits(question, target, dimension)[0].options[dimension])

    most = found(flat)
    assert most > 2 * found({**flat, "padding_free": False})
    sizes = [{**flat, "per_device_train_batch_size": size} for size in (most, most + 1)]
    verdicts = [forecast(Question(architecture=architecture, options=each), target).verdict for each in sizes]
    assert verdicts == ["fits", "tight"]
    with pytest.raises(NotSupportedError, match="longest --max-length of samples that are laid end to end"):
        found({**flat, "per_device_train_batch_size": 4}, "max_length")
    assert found(flat, "max_length") > 8192, "a sample alone is its own row"


def test_steps_and_tokens_are_those_of_the_data() -> None:
    """10,000 samples of 500 tokens, 8 in a micro-batch: no token is padding, and speed counts each once."""
    found = ask(**FLAT, max_length=2048, per_device_train_batch_size=8, mean_tokens=500.0, num_samples=10_000)
    assert found.totals is not None
    assert found.totals.tokens == pytest.approx(10_000 * 500, rel=1e-3)
    assert found.totals.gpu_hours == pytest.approx(1250 * found.step_time_s.value / 3600, rel=1e-3)
    assert found.tokens_per_s.value == pytest.approx(8 * 500 / found.step_time_s.value, rel=0.01)


def test_copies_wait_for_the_largest_of_their_micro_batches() -> None:
    options = {**FLAT, "max_length": 2048, "per_device_train_batch_size": 2, "mean_tokens": 500.0, "num_gpus": 8}
    waits, once = (ask(**options, sharding=sharding) for sharding in ("zero3", "ddp"))
    accumulated = ask(**options, sharding="ddp", gradient_accumulation_steps=16)
    assert waits.step_time_s.value > 1.3 * ask(**{**options, "num_gpus": 1}).step_time_s.value
    assert accumulated.step_time_s.value < 16 * once.step_time_s.value


def test_wide_intervals_where_only_the_mean_is_known(tmp_path: Path) -> None:
    data = tmp_path / "tokens.jsonl"
    data.write_text("\n".join('{"input_ids": [' + ", ".join(["1"] * 4000) + "]}" for _ in range(20)), encoding="utf-8")
    sizes = {"max_length": 32768, "per_device_train_batch_size": 4}
    sure, unsure = ask(**FLAT, **sizes, dataset=str(data)), ask(**FLAT, **sizes, mean_tokens=4000.0)
    assert unsure.step_time_s.high / unsure.step_time_s.value > sure.step_time_s.high / sure.step_time_s.value


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"packing": False}, InputError, "whose length nothing says"),
        ({"mean_tokens": 5000.0, "packing": False}, InputError, "above --max-length 4096"),
        ({"mean_tokens": 500.0, "packing": False, "pad_to_multiple_of": 8}, InputError, "--pad-to-multiple-of says"),
        ({"mean_tokens": 500.0, "packing": False, "padding_mask": True}, InputError, "--padding-mask says"),
        ({"mean_tokens": 500.0, "packing": False, "attn_implementation": "sdpa"}, InputError, "masks whole rows"),
        ({"mean_tokens": 500.0, "packing": False, "num_gpus": 2, "cp": 2}, NotSupportedError, "context parallelism"),
        ({"mean_tokens": 500.0, "packing": False, "samples_unevenness": 2.0}, InputError, "is no option"),
    ],
)
def test_bad_input_gets_one_sentence(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ask(**{**FLASH, "padding_free": True, "max_length": 4096, **options})


@pytest.mark.parametrize(
    ("options", "field"),
    [({"packing": True}, "attention_length"), ({"packing": False}, "samples_unevenness")],
)
def test_plans_know_how_far_attention_reaches(options: dict[str, Any], field: str) -> None:
    asked = {**FLASH, "padding_free": True, "mean_tokens": 500.0, "max_length": 4096, **options}
    job = Job(
        architecture=load_architecture("Qwen/Qwen2.5-0.5B"),
        options=asked,
        option_origins={},
        methods=("lora",),
        counts=(1,),
        batch=global_batch(asked, (1,), 8),
    )
    planned, forecasted = job.resolve(asked).run, ask(model="Qwen/Qwen2.5-0.5B", **asked).run
    assert getattr(planned, field) is not None
    assert getattr(planned, field) == getattr(forecasted, field)


@pytest.mark.parametrize(
    ("model", "options", "flat"),
    [
        ("meta-llama/Llama-3.1-8B", {}, True),
        ("meta-llama/Llama-3.1-8B", {"packing": False}, True),
        ("meta-llama/Llama-3.1-8B", {"packing": True}, False),
        ("meta-llama/Llama-3.1-8B", {"padding_free": False}, False),
        ("meta-llama/Llama-3.1-8B", {"stack_version": "2025.12.5"}, True),
        ("meta-llama/Llama-3.1-8B", {"stack_version": "2025.12.1"}, False),
        ("meta-llama/Llama-3.1-8B", {"stack": "hf-peft"}, False),
        ("meta-llama/Llama-3.1-8B", {"attention_length": 300}, False),
        ("meta-llama/Llama-3.1-8B", {"pad_to_multiple_of": 8}, False),
        ("meta-llama/Llama-3.1-8B", {"attn_implementation": "eager"}, False),
        ("google/gemma-2-9b", {}, False),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {}, False),
    ],
)
def test_unsloth_lays_samples_end_to_end_by_itself(model: str, options: dict[str, Any], flat: bool) -> None:
    """Its trainer.py since 2025.12.5, but for Gemma 2, gpt-oss, hybrid linear attention and images."""
    asked = {"stack": "unsloth", "method": "qlora", "mean_tokens": 500.0, "num_samples": 800, **options}
    read = read_asked(model, asked)
    assert lays_flat(read.options) is flat
    assert any("end to end unless told otherwise" in note for note in read.notes) is flat


def test_what_is_typed_of_unsloths_rows_is_answered() -> None:
    """Padded to a multiple, attention that cannot keep samples apart, and the longest row of a sample alone."""
    asked: dict[str, Any] = {"stack": "unsloth", "method": "qlora", "mean_tokens": 500.0, "num_samples": 800}
    for more in ({"pad_to_multiple_of": 8}, {"attn_implementation": "eager"}, {"max_length_that_fits": True}):
        told = tunecast.estimate("meta-llama/Llama-3.1-8B", gpu="l40s", **asked, **more)[0]
        assert told.run.samples_unevenness is None


def test_files_of_a_plan_with_a_stacks_own_attention_name_one_that_keeps_samples_apart() -> None:
    asked: dict[str, Any] = {"stack": "unsloth", "method": "qlora", "mean_tokens": 500.0, "num_samples": 800}
    told = tunecast.estimate("meta-llama/Llama-3.1-8B", gpu="l40s", per_device_train_batch_size=4, **asked)[0]
    assert told.run.attn_implementation == "sdpa"
    for kind, field in (("trl", "padding_free"), ("axolotl", "batch_flattening")):
        written = config_for(kind, told.architecture, told.run, 100, packed=False)
        assert (written["attn_implementation"], written[field]) == ("flash_attention_2", True)


def test_unsloths_packed_rows_keep_their_samples_apart() -> None:
    asked = {"stack": "unsloth", "method": "qlora", "mean_tokens": 500.0, "num_samples": 800, "packing": True}
    assert read_asked("meta-llama/Llama-3.1-8B", asked).options["padding_free"] is True
    told = tunecast.estimate("meta-llama/Llama-3.1-8B", gpu="l40s", max_length=2048, **asked)[0]
    assert told.run.attention_length is not None
    assert told.run.attention_length < 2048
