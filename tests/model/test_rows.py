"""Rows of one sample each: lengths and padding against brute force, and what a forecast makes of them."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ci_share import some_for_ci

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.model import dataset
from tunecast.model.amount import resolve_amount
from tunecast.model.architectures import load_architecture
from tunecast.model.estimate import forecast
from tunecast.model.flat_rows import MOST_UNEVEN
from tunecast.model.forecast import Forecast
from tunecast.model.question import Question
from tunecast.model.rows import held_run, likely_longest, unpacked_rows
from tunecast.model.run import Run
from tunecast.model.sample_lengths import STRETCH, longest_of, scale_of, stretched_longest
from tunecast.model.target import resolve_targets
from tunecast.model.whole_run_options import split_whole_run

LENGTHS = (100, 200, 300, 1000)


def ask(*, model: str = "Qwen/Qwen2.5-0.5B", **options: Any) -> Forecast:
    around, rest = split_whole_run(options)
    architecture = load_architecture(model)
    question = Question(architecture=architecture, options={"method": "lora", **rest}, whole_run=around)
    return forecast(question, resolve_targets(["a100-sxm4-80gb"], {})[0])


def write(folder: Path, lengths: tuple[int, ...]) -> str:
    """A sample per line, of so many tokens at the assumed four bytes each."""
    path = folder / "data.txt"
    path.write_text("\n".join("x" * 4 * length for length in lengths), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_the_mean_longest_is_that_of_all_draws(batch: int) -> None:
    draws = [max(draw) for draw in itertools.product(LENGTHS, repeat=batch)]
    assert likely_longest(LENGTHS, batch).mean() == pytest.approx(statistics.mean(draws))


def test_unpacked_samples_are_rows_padded_to_the_longest_of_their_micro_batch(tmp_path: Path) -> None:
    """Cut at 500 the mean is 275; of two draws the longest is 500 in 7 of 16 cases, 300 in 5, 200 in 3, 100 in 1."""
    run = Run(method="lora", max_length=500, per_device_train_batch_size=2)
    options = {"packing": False, "dataset": write(tmp_path, LENGTHS)}
    rows = unpacked_rows(run, options)
    assert rows is not None
    assert rows.length == round((7 * 500 + 5 * 300 + 3 * 200 + 100) / 16)
    assert rows.mean_tokens == 275
    assert rows.padding_frac == pytest.approx(1 - 275 / rows.length)
    amount = resolve_amount(run, {**options, "num_train_epochs": 3})
    assert amount is not None
    assert amount.steps == 6, "4 samples, 3 times, two in a step"


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_are_filled_to_a_multiple(tmp_path: Path, batch: int) -> None:
    """Cut at 500, lengths 100, 200, 300 and 500 become 128, 256, 320 and 512 in multiples of 64: collators fill up
    what was cut before."""
    run = Run(method="lora", max_length=500, per_device_train_batch_size=batch, pad_to_multiple_of=64)
    rows = unpacked_rows(run, {"packing": False, "dataset": write(tmp_path, LENGTHS)})
    assert rows is not None
    draws = [max(draw) for draw in itertools.product((128, 256, 320, 512), repeat=batch)]
    assert rows.length == round(statistics.mean(draws))
    assert rows.mean_tokens == 275
    assert "filled to a multiple of 64" in rows.how


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("multiple", [1, 8, 64, 700])
def test_filled_rows_of_exponential_lengths_are_those_of_many_draws(batch: int, multiple: int) -> None:
    mean, cut = 300.0, 1024.0
    draws = np.random.default_rng(7).exponential(scale_of(mean, cut), size=(200_000, batch)).clip(max=cut)
    filled = np.ceil(draws.max(axis=1) / multiple) * multiple if multiple > 1 else draws.max(axis=1)
    assert longest_of(batch, mean, cut, multiple) == pytest.approx(filled.mean(), rel=0.01)


def test_a_step_is_timed_at_the_mean_row_and_memory_at_the_longest() -> None:
    """One sample of 512 tokens in a row is the step of --max-length 512, with the memory of 2,048."""
    short, long = ask(max_length=512, max_steps=10), ask(max_length=2048, max_steps=10)
    found = ask(max_length=2048, num_samples=10, mean_tokens=512, packing=False)
    assert found.step_time_s.value == pytest.approx(short.step_time_s.value), "the host decides at every length"
    assert found.tokens_per_s.value == pytest.approx(short.tokens_per_s.value)
    assert found.memory == long.memory
    assert found.totals is not None
    assert found.totals.tokens == 10 * 512
    assert found.whole_run is not None
    assert any("memory at 2048" in note for note in found.notes)


def test_rows_that_were_cut_are_filled_up_too() -> None:
    """65 tokens filled to a multiple of 64 are 128, in time and in memory; nothing is longer than the model's own."""
    sizes = {"per_device_train_batch_size": 4, "padding_mask": True}
    found = ask(max_length=65, pad_to_multiple_of=64, mean_tokens=65, num_samples=100, packing=False, **sizes)
    whole = ask(max_length=128, max_steps=25, **sizes)
    assert found.step_time_s == whole.step_time_s
    assert found.memory == whole.memory
    untold = ask(max_length=65, pad_to_multiple_of=64, max_steps=25, **sizes)
    assert untold.step_time_s == whole.step_time_s
    assert untold.memory == whole.memory
    assert "rows of 65 tokens are filled up to 128" in untold.notes
    with pytest.raises(InputError, match="beyond the 32768 tokens"):
        ask(max_length=65, pad_to_multiple_of=10**9, max_steps=25)


def test_memory_is_that_of_the_longest_sample_where_all_are_short(tmp_path: Path) -> None:
    """1,000 tokens of four bytes each may be 1,334 of three; nothing is longer, whatever --max-length allows."""
    path = write(tmp_path, LENGTHS)
    found, longest = ask(max_length=4096, dataset=path), ask(max_length=1334, max_steps=1)
    assert found.run.max_length == 4096
    assert found.memory == longest.memory
    assert any("memory at 1334, which no sample is longer than" in note for note in found.notes)
    cut = ask(max_length=512, dataset=path)
    assert cut.memory == ask(max_length=512, max_steps=1).memory
    packed = ask(max_length=4096, dataset=path, packing=True)
    assert packed.memory == ask(max_length=4096, max_steps=1).memory


def test_the_longest_sample_of_a_file_read_in_part_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, LENGTHS)
    run = Run(method="lora", max_length=4096)
    assert held_run(run, {"dataset": path, "bytes_per_token": 4.0}).max_length == 1334, "a dense sample has more tokens"
    assert (
        held_run(replace(run, pad_to_multiple_of=1000), {"dataset": path, "bytes_per_token": 4.0}).max_length == 2000
    ), "filled up"
    assert held_run(replace(run, pad_to_multiple_of=4096), {"dataset": path}) == replace(run, pad_to_multiple_of=4096)
    monkeypatch.setattr(dataset, "READ_BYTES", 3000)
    (tmp_path / "long.txt").write_text("\n".join("x" * 400 for _ in range(20)), encoding="utf-8")
    assert held_run(run, {"dataset": str(tmp_path / "long.txt")}) == run


def test_speed_of_padded_rows_says_that_it_counts_padding() -> None:
    """Four rows of a mean of 300 tokens are padded to the longest; one row alone has no padding."""
    shared: dict[str, Any] = {"max_length": 1024, "tokens": "10M", "mean_tokens": 300, "packing": False}
    padded, alone = ask(per_device_train_batch_size=4, **shared), ask(per_device_train_batch_size=1, **shared)
    (told,) = [note for note in padded.notes if "tokens/s and $ per million tokens count" in note]
    rows = unpacked_rows(padded.run, shared)
    assert rows is not None
    assert f"{1 - 300 / rows.length:.0%} of them padding" in told
    assert padded.tokens_per_s.value * padded.step_time_s.value == pytest.approx(4 * rows.length)
    assert not any("tokens/s and $" in note for note in alone.notes)


def test_packing_processes_what_padding_wastes() -> None:
    """Samples of 512 in rows of 2,048: four times fewer rows when packed."""
    shared: dict[str, Any] = {
        "max_length": 2048, "num_samples": 4000, "mean_tokens": 512, "per_device_train_batch_size": 4,
    }  # fmt: skip
    packed, padded = ask(**shared, packing=True), ask(**shared, packing=False)
    assert packed.totals is not None
    assert padded.totals is not None
    assert padded.totals.tokens == 1000 * 4 * padded_length(512, 2048, 4)
    assert any("of them padding" in note and "assumed" in note for note in padded.notes)
    assert (silent := ask(**shared)).totals == padded.totals, "as Trainer has it unless told otherwise"
    assert any("packed: 250 steps, --packing" in note for note in silent.notes)
    assert not any("--packing" in note for note in (*padded.notes, *packed.notes))


def padded_length(mean: float, cut: int, batch: int) -> int:
    return round(longest_of(batch, mean, cut))


@pytest.mark.parametrize(
    "amount", [{"num_samples": 1000}, {"max_steps": 100}, {"num_samples": 1000, "steps_exactly": 50}]
)
def test_rows_of_unknown_lengths_widen_the_whole_run_as_told_and_no_step(amount: dict[str, int]) -> None:
    shared: dict[str, Any] = {**amount, "per_device_train_batch_size": 4, "packing": False, "train_only": True}
    guessed = ask(max_length=2048, mean_tokens=500, **shared)
    alike = {"max_length": padded_length(500, 2048, 4), "mean_tokens": padded_length(500, 2048, 4), **shared}
    known, free = ask(**alike, padding_mask=True), ask(**alike)
    assert guessed.total_time_h is not None
    assert known.total_time_h is not None
    step, total = ([of.high / of.value, of.value / of.low] for of in (guessed.step_time_s, guessed.total_time_h))
    own_step = known.step_time_s
    assert step == pytest.approx([own_step.high / own_step.value, own_step.value / own_step.low], rel=1e-2)
    masked = (
        guessed.step_time_s.value / free.step_time_s.value
    )  # alike samples need no mask, and wait for no longer one
    unlike = round(stretched_longest(4, 500, 2048))
    assert padded_length(500, 2048, 4) < unlike < 4 * 500, "no longest of four is above their sum, in the mean"
    ends = unlike / padded_length(500, 2048, 4), masked * padded_length(500, 2048, 4) / 500
    assert [math.log(end) for end in total] == pytest.approx(
        [math.hypot(math.log(own), math.log(end)) for own, end in zip(step, ends, strict=True)], rel=1e-3
    )
    (told,) = [note for note in guessed.notes if "all alike" in note]
    assert (
        f"the interval of the whole run, not that of a step, goes from rows of 500, all alike, to {unlike}, of" in told
    )


@pytest.mark.parametrize(("mean", "batch"), [(620, 8), (100, 4), (1900, 2)])
def test_of_a_mean_alone_the_longest_is_that_of_random_exponential_lengths(mean: float, batch: int) -> None:
    """Half a million seeded micro-batches; the scale is looked for so that the cut lengths have the mean."""
    draws = np.random.default_rng(3).exponential(1.0, (500_000, batch))
    scale = min(np.geomspace(mean, 300 * mean, 400), key=lambda s: abs(np.minimum(draws * s, 2048).mean() - mean))
    expected = np.minimum(draws * scale, 2048).max(axis=1).mean()
    assert longest_of(batch, mean, 2048) == pytest.approx(expected, rel=0.02)
    assert longest_of(1, mean, 2048) == mean
    assert longest_of(batch, 2048, 2048) == 2048


@pytest.mark.parametrize(("mean", "cut", "batch"), [(900, 16384, 2), (900, 4096, 32), (100, 2048, 1), (1900, 2048, 8)])
def test_the_most_unlike_lengths_have_that_mean_and_twice_the_mean_square(mean: float, cut: int, batch: int) -> None:
    """Seeded draws of exponential lengths to a power; no longest is above the sum of its micro-batch in the mean."""
    draws = np.random.default_rng(5).exponential(1.0, (400_000, batch)) ** STRETCH
    uncut = draws / math.gamma(1 + STRETCH)
    assert np.mean(uncut**2) == pytest.approx(MOST_UNEVEN, rel=0.1)
    scale = min(np.geomspace(mean / 2, 300 * mean, 500), key=lambda s: abs(np.minimum(uncut * s, cut).mean() - mean))
    expected = np.minimum(uncut * scale, cut).max(axis=1).mean()
    found = stretched_longest(batch, mean, cut)
    assert found == pytest.approx(expected, rel=0.03)
    assert longest_of(batch, mean, cut) * 0.99 <= found <= min(batch * mean * 1.01, cut)
    assert stretched_longest(batch, mean, cut, 64) >= found


def test_what_is_assumed_of_the_data_widens_time_and_cost(tmp_path: Path) -> None:
    """4 bytes a token may be 3 or 5: tokens may be 5 / 4 fewer and 4 / 3 more, beside the step's own error."""
    path = write(tmp_path, (300,) * 1000)
    shared = {"max_length": 512, "packing": True, "train_only": True}
    told, guessed = ask(**shared, num_samples=1000, mean_tokens=300), ask(**shared, dataset=path)
    assert told.total_time_h is not None
    assert guessed.total_time_h is not None
    assert guessed.total_time_h.value == told.total_time_h.value
    own, wide = (math.log(found.total_time_h.high / found.total_time_h.value) for found in (told, guessed))
    assert wide == pytest.approx(math.hypot(own, math.log(4 / 3)), rel=1e-6)
    low = math.log(guessed.total_time_h.value / guessed.total_time_h.low)
    assert low == pytest.approx(math.hypot(own, math.log(5 / 4)), rel=1e-6)
    assert guessed.cost_usd is not None
    assert guessed.cost_usd.high / guessed.cost_usd.value > math.exp(own)
    assert told.amount_assumed == ()
    assert guessed.amount_assumed == ("4 bytes a token (3 to 5)",)


def test_rows_of_samples_of_which_only_the_mean_is_known_may_all_be_alike() -> None:
    """The interval holds what rows of the mean's length take, and what those of far more unlike samples take."""
    shared: dict[str, Any] = {"max_length": 2048, "num_samples": 1000, "per_device_train_batch_size": 8}
    found = ask(**shared, mean_tokens=620, packing=False, train_only=True)
    alike = ask(**{**shared, "max_length": 620}, mean_tokens=620, packing=False, train_only=True)
    assert found.total_time_h is not None
    assert alike.total_time_h is not None
    assert found.total_time_h.low <= alike.total_time_h.value < found.total_time_h.value < found.total_time_h.high
    ends = f"(620 to {round(stretched_longest(8, 620, 2048))})"
    assert any("rows of" in words and ends in words for words in found.amount_assumed)
    assert ask(**shared, mean_tokens=620).amount_assumed == ("one sample a row", *found.amount_assumed)
    assert ask(**shared, mean_tokens=620, packing=True).amount_assumed == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"packing": False, "tokens": "1M"}, "--mean-tokens N"),
        ({"packing": False, "num_samples": 5, "mean_tokens": 9000}, "above --max-length 512"),
        ({"mean_tokens": 100, "num_train_epochs": 2}, "--num-train-epochs needs an amount"),
        ({"packing": True, "num_samples": 5}, "--packing needs the length"),
    ],
)
def test_what_lengths_are_unknown_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve_amount(Run(method="lora", max_length=512), options)


def spread_samples(folder: Path, samples: int = 400) -> tuple[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """A file of samples of exponential lengths of 500 tokens, and these lengths as cut at 2,048."""
    lengths = np.clip(np.random.default_rng(5).exponential(500.0, samples).astype(int), 1, 4000)
    return write(folder, tuple(int(length) for length in lengths)), np.minimum(lengths, 2048).astype(float)


@pytest.mark.parametrize(
    ("sharding", "micro_steps", "meet"),
    [("ddp", 1, True), ("ddp", 8, False), ("fsdp", 8, True), ("zero2", 8, True), ("zero1", 8, False)],
)
def test_copies_wait_for_the_longest_rows(tmp_path: Path, sharding: str, micro_steps: int, meet: bool) -> None:
    """Against 20,000 drawn steps of 8 copies of 2 samples: the largest of 8 in every micro-step, or of 8 sums."""
    path, cut = spread_samples(tmp_path)
    draws = np.random.default_rng(7).choice(cut, (20_000, micro_steps, 8, 2)).max(axis=3)
    waited = draws.max(axis=2).mean() if meet else draws.mean(axis=1).max(axis=1).mean()
    run = Run(
        method="lora", max_length=2048, per_device_train_batch_size=2, gradient_accumulation_steps=micro_steps,
        num_gpus=8, sharding=sharding,
    )  # fmt: skip
    rows = unpacked_rows(run, {"packing": False, "dataset": path})
    assert rows is not None
    assert rows.length == pytest.approx(waited, rel=0.03)
    assert rows.own_length == pytest.approx(draws.mean(), rel=0.02)
    assert np.mean(rows.lengths) == pytest.approx(rows.length, rel=0.01)
    alone = unpacked_rows(replace(run, num_gpus=1, sharding="none"), {"packing": False, "dataset": path})
    assert alone is not None
    assert alone.length == alone.own_length == rows.own_length


@pytest.mark.parametrize("batch", some_for_ci([1, 4]))
def test_a_step_takes_the_mean_of_the_steps_of_all_rows(tmp_path: Path, batch: int) -> None:
    """Against forecasts of rows of 60 drawn lengths each: where the host decides the short ones, the mean length is not
    that of the mean step."""
    path, cut = spread_samples(tmp_path)
    drawn = np.quantile(np.random.default_rng(9).choice(cut, (4000, batch)).max(axis=1), (np.arange(60) + 0.5) / 60)
    shared: dict[str, Any] = {"per_device_train_batch_size": batch, "padding_mask": batch > 1}

    def asked(**options: Any) -> float:
        return ask(model="Qwen/Qwen2.5-7B", **shared, **options).step_time_s.value

    each = [asked(max_length=int(length)) for length in drawn]
    at_mean = asked(max_length=int(drawn.mean()))
    found = asked(max_length=2048, dataset=path)
    assert found == pytest.approx(np.mean(each), rel=0.03)
    if batch == 1:
        assert np.mean(each) > 1.05 * at_mean


def test_waiting_is_no_work_and_lowers_the_efficiency(tmp_path: Path) -> None:
    """Eight copies of a model wait for the longest of their rows: the job scales worse than with rows all alike, and
    its FLOPs are those of its own rows."""
    path, _ = spread_samples(tmp_path)
    shared: dict[str, Any] = {
        "model": "Qwen/Qwen2.5-7B", "num_gpus": 8, "sharding": "ddp", "per_device_train_batch_size": 2,
        "max_length": 2048,
    }  # fmt: skip
    found, alike = ask(dataset=path, **shared), ask(**{**shared, "max_length": 500})
    assert found.scaling is not None
    assert alike.scaling is not None
    assert found.scaling.efficiency < alike.scaling.efficiency - 0.2
    one = ask(dataset=path, **{**shared, "num_gpus": 1, "sharding": "none"})
    assert found.model_flops_per_step == pytest.approx(8 * one.model_flops_per_step)
    rows = unpacked_rows(found.run, {"dataset": path, "packing": False})
    assert rows is not None
    assert found.tokens_per_s.value * found.step_time_s.value == pytest.approx(8 * 2 * rows.own_length)
    assert rows.own_length < rows.length
    (told,) = [note for note in found.notes if "8 copies of the model waiting for the longest" in note]
    assert f"a copy's own rows have {rows.own_length}" in told


def test_what_no_length_decides_takes_as_long_with_rows_of_unlike_lengths(tmp_path: Path) -> None:
    path, _ = spread_samples(tmp_path)
    shared: dict[str, Any] = {"model": "Qwen/Qwen2.5-7B", "max_length": 2048, "per_device_train_batch_size": 1}
    found = ask(dataset=path, **shared)
    rows = unpacked_rows(found.run, {"dataset": path, "packing": False})
    assert rows is not None
    alike = ask(**{**shared, "max_length": rows.length})
    for name in ("optimizer", "trainer", "overhead"):
        assert found.time_parts_s[name] == pytest.approx(alike.time_parts_s[name])
    assert sum(found.time_parts_s.values()) == pytest.approx(found.step_time_s.value)
    assert found.step_time_s.value > 1.05 * alike.step_time_s.value
    assert any("longer than one of rows all of the mean length" in note for note in found.notes)


@pytest.mark.parametrize(
    ("batch", "micro", "copies"), [(4, 1, 1), (2, 8, 1), (4, 2, 4), (1, 1, 8), (8, 4, 48), (2, 3, 7), (4, 1, 100)]
)
def test_rows_grouped_by_length_are_those_of_the_real_sampler(
    tmp_path: Path, batch: int, micro: int, copies: int
) -> None:
    """Micro-batches of transformers' sampler as accelerate deals them to processes: how long a copy's own rows are, and
    those that all copies wait for; with their samples end to end too."""
    torch = pytest.importorskip("torch")
    utils, loader = pytest.importorskip("transformers.trainer_pt_utils"), pytest.importorskip("accelerate.data_loader")
    path, drawn = spread_samples(tmp_path, 9600)
    own: list[float] = []
    waited: list[float] = []
    end_to_end: list[float] = []
    for seed in range(3):
        order = utils.get_length_grouped_indices(
            drawn.tolist(), batch * micro, generator=torch.Generator().manual_seed(seed)
        )
        dealt = torch.utils.data.BatchSampler(order, batch, drop_last=True)
        shards = [list(loader.BatchSamplerShard(dealt, copies, one, even_batches=False)) for one in range(copies)]
        steps = min(map(len, shards))
        longest = np.array([[max(drawn[index] for index in rows) for rows in shard[:steps]] for shard in shards])
        own.append(longest.mean())
        waited.append(longest.max(axis=0).mean())
        mean = np.array([[np.mean([drawn[index] for index in rows]) for rows in shard[:steps]] for shard in shards])
        end_to_end.append(mean.max(axis=0).mean())
    run = Run(
        method="full", max_length=2048, per_device_train_batch_size=batch, gradient_accumulation_steps=micro,
        num_gpus=copies, sharding="fsdp" if copies > 1 else "none",
    )  # fmt: skip
    found = unpacked_rows(run, {"dataset": path, "group_by_length": True, "packing": False})
    assert found is not None
    assert found.own_length == pytest.approx(np.mean(own), rel=0.02)
    assert found.length == pytest.approx(np.mean(waited), rel=0.03)
    flat = unpacked_rows(run, {"dataset": path, "group_by_length": True, "packing": False, "padding_free": True})
    assert flat is not None
    assert flat.own_length == pytest.approx(drawn.mean(), rel=0.01)
    assert flat.length == pytest.approx(np.mean(end_to_end), rel=0.03)
    random = unpacked_rows(run, {"dataset": path, "packing": False})
    assert random is not None
    assert found.own_length <= random.own_length
    assert found.length <= 1.02 * random.length


def test_of_a_mean_alone_grouped_rows_are_those_of_exponential_lengths(tmp_path: Path) -> None:
    """The same from a file of such lengths as from their mean."""
    lengths = np.minimum(-500 * np.log1p(-(np.arange(20_000) + 0.5) / 20_000), 2048).round().astype(int)
    path = write(tmp_path, tuple(int(length) for length in lengths if length))
    run = Run(method="lora", max_length=2048, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    shared = {"group_by_length": True, "packing": False}
    of_file = unpacked_rows(run, {"dataset": path, **shared})
    of_mean = unpacked_rows(run, {"mean_tokens": float(lengths.mean()), **shared})
    assert of_file is not None
    assert of_mean is not None
    assert of_mean.length == pytest.approx(of_file.length, rel=0.01)
    assert of_mean.longest is not None
    assert of_mean.longest < 0.5 * run.max_length, "lengths of two kinds would hardly meet in a micro-batch"


def test_streamed_samples_are_not_sorted(tmp_path: Path) -> None:
    """transformers says so in a warning and takes them as they come."""
    path, _ = spread_samples(tmp_path)
    run = Run(method="lora", max_length=2048, per_device_train_batch_size=8)
    shared = {"dataset": path, "packing": False, "streaming": True}
    assert unpacked_rows(run, {**shared, "rows_grouped": True}) == unpacked_rows(run, shared)
    with pytest.raises(InputError, match="leave it or --streaming out"):
        unpacked_rows(run, {**shared, "group_by_length": True})


def test_grouping_by_length_saves_padding_and_needs_rows_of_one_sample(tmp_path: Path) -> None:
    path, _ = spread_samples(tmp_path)
    shared: dict[str, Any] = {"dataset": path, "per_device_train_batch_size": 8, "max_length": 2048}
    random, grouped = ask(packing=False, **shared), ask(group_by_length=True, **shared)
    assert random.totals is not None
    assert grouped.totals is not None
    assert grouped.step_time_s.value < 0.8 * random.step_time_s.value
    assert any("in the order of their lengths within 96" in note for note in grouped.notes)
    apart = {"padding_free": True, "attn_implementation": "flash_attention_2"}
    for wrong in ({"packing": True}, apart):
        with pytest.raises(InputError, match="--group-by-length sorts samples that are rows of their own"):
            ask(group_by_length=True, **wrong, **shared)
    with pytest.raises(InputError, match="--group-by-length sorts samples that are rows of their own"):
        ask(group_by_length=True, max_length=2048, tokens="10M")


@pytest.mark.parametrize(("sharding", "waited"), [("fsdp", 16), ("ddp", 16)])
def test_tokens_of_padded_samples_reach_to_what_copies_wait_for(sharding: str, waited: int) -> None:
    """Nothing says how long samples are: of 8 copies of 2 samples the longest of 16 is waited for."""
    (found,) = tunecast.estimate(
        "Qwen/Qwen2.5-0.5B", gpu="a100-sxm4-80gb", tokens="50M", padding_mask=True, num_gpus=8, sharding=sharding,
        per_device_train_batch_size=2,
    )  # fmt: skip
    most = sum(1 / k for k in range(1, waited + 1))
    (told,) = found.amount_assumed
    assert f"up to {most:.2g} times as many tokens" in told
