"""Attention inside the documents of packed rows: against sums over documents, draws at random, and plain bad input."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.documents import documents_of, reach, reach_of_mean
from tunecast.model.estimate import forecast
from tunecast.model.flops import model_flops_per_step
from tunecast.model.forecast import Forecast
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.sample_lengths import scale_of
from tunecast.model.target import resolve_targets

FLASH = {"attn_implementation": "flash_attention_2"}


def ask(model: str = "Qwen/Qwen2.5-0.5B", origins: dict[str, str] | None = None, **options: Any) -> Forecast:
    question = Question(
        architecture=load_architecture(model),
        options={"method": "lora", "max_length": 8192, **FLASH, **options},
        option_origins=origins or {},
    )
    return forecast(question, resolve_targets(["h100-sxm5-80gb"], {})[0])


def attention_work(model: str, **options: Any) -> dict[str, float]:
    """FLOPs of attention by phase."""
    architecture = load_architecture(model)
    run = resolve_run(architecture, {"method": "lora", **FLASH, **options}).run
    found: dict[str, float] = {}
    for operation in step_operations(architecture, run):
        if operation.kind is Kind.ATTENTION:
            found[str(operation.phase)] = found.get(str(operation.phase), 0.0) + operation.total_flops
    return found


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B", "mistralai/Mistral-7B-v0.1"])
def test_a_row_of_equal_documents_attends_as_much_as_those_documents_alone(model: str) -> None:
    """A row of 8 x 1,024 tokens kept apart: the pairs of 8 rows of 1,024, window or not."""
    packed = attention_work(model, max_length=8192, attention_length=1024)
    alone = attention_work(model, max_length=1024, per_device_train_batch_size=8)
    assert packed == pytest.approx(alone)


def test_documents_of_any_lengths_have_the_pairs_that_their_reach_says() -> None:
    """Counted one by one: token i of a document sees i tokens, itself among them, on the average half of them."""
    lengths = [random.Random(1).randint(10, 900) for _ in range(40)]
    pairs = sum(length * length / 2 for length in lengths)
    assert sum(lengths) * reach(lengths) / 2 == pytest.approx(pairs)


@pytest.mark.parametrize(("mean", "cut"), [(600, 16384), (600, 1024), (1000, 1024), (1024, 1024)])
def test_the_reach_of_a_mean_is_that_of_lengths_drawn_at_random(mean: float, cut: float) -> None:
    scale = scale_of(mean, cut) if mean < cut else 1e12
    drawn = np.minimum(np.random.default_rng(0).exponential(scale, 400_000), cut)
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert reach_of_mean(mean, cut) == pytest.approx(float((drawn**2).sum() / drawn.sum()), rel=0.01)


def test_only_attention_gets_shorter() -> None:
    whole, apart = ask(), ask(attention_length=512)
    assert apart.time_parts_s["attention"] < whole.time_parts_s["attention"] / 4
    assert apart.time_parts_s["gemm"] == pytest.approx(whole.time_parts_s["gemm"])
    assert apart.memory.allocated_bytes == whole.memory.allocated_bytes
    assert ask(attention_length=8192).step_time_s == whole.step_time_s


def test_required_work_counts_pairs_inside_documents() -> None:
    architecture = load_architecture("Qwen/Qwen2.5-0.5B")
    packed = resolve_run(architecture, {"method": "full", **FLASH, "max_length": 8192, "attention_length": 1024}).run
    alone = {"method": "full", **FLASH, "max_length": 1024, "per_device_train_batch_size": 8}
    expected = model_flops_per_step(architecture, resolve_run(architecture, alone).run)
    assert model_flops_per_step(architecture, packed) == pytest.approx(expected)


def test_a_file_of_data_says_how_long_documents_are(tmp_path: Path) -> None:
    """Samples of 100, 300 and 2,000 tokens of four bytes, the last cut at 1,000."""
    data = tmp_path / "data.txt"
    data.write_text("\n".join("x" * 4 * length for length in (100, 300, 2000)), encoding="utf-8")
    found = documents_of({"padding_free": True, "dataset": str(data)}, 1000)
    assert found is not None
    assert found.length == round((100**2 + 300**2 + 1000**2) / 1400)
    told = ask(max_length=1000, padding_free=True, dataset=str(data), num_train_epochs=1)
    assert told.run.attention_length == found.length
    assert any(f"attention spans {found.length} tokens" in note for note in told.notes)


def test_of_a_mean_alone_the_interval_says_what_other_lengths_would_take() -> None:
    """4,000 tokens in the mean: 2,000 exponential ones reach twice as far, uneven ones to the row's end."""
    many = {"per_device_train_batch_size": 4}  # enough for the host not to decide
    sure, unsure = ask(attention_length=4000, **many), ask(padding_free=True, mean_tokens=2000.0, **many)
    assert unsure.run.attention_length == round(reach_of_mean(2000.0, 8192))
    assert unsure.run_origins["attention_length"] == "assumed"
    width, least = (f.step_time_s.high / f.step_time_s.low for f in (unsure, sure))
    assert width > least
    near, far = ask(attention_length=2000, **many), ask(attention_length=8000, **many)
    assert near.step_time_s.value < unsure.step_time_s.value < far.step_time_s.value


def test_samples_that_fill_a_row_in_the_mean_are_all_as_long() -> None:
    found = ask(padding_free=True, mean_tokens=8192.0)
    assert found.run.attention_length == 8192
    assert not any("exponential" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"padding_free": True}, InputError, "add --dataset FILE, or --mean-tokens N"),
        ({"padding_free": True, "mean_tokens": 9000.0}, InputError, "above --max-length 8192"),
        ({"padding_free": True, "mean_tokens": 0.5}, InputError, "a sample has at least 1"),
        ({"padding_free": True, "mean_tokens": float("nan")}, InputError, "a sample has at least 1"),
        ({"attention_length": 90, "mean_tokens": 90.0, "packing": False}, InputError, "makes every sample a row"),
        ({"attention_length": 8193}, InputError, "beyond --max-length 8192"),
        ({"attention_length": 0}, InputError, "at least 1"),
        ({"attention_length": 512, "attn_implementation": "sdpa"}, InputError, "masks whole rows"),
        ({"attention_length": 512, "attn_implementation": "eager"}, InputError, "masks whole rows"),
        ({"attention_length": 512, "num_gpus": 2, "cp": 2}, NotSupportedError, "context parallelism"),
    ],
)
def test_bad_input_gets_one_sentence(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ask(**options)


def test_a_file_that_keeps_documents_apart_needs_no_lengths() -> None:
    """Then a row counts as one document, as before; ``--no-packing`` of the command line wins over the file."""
    origins = {"padding_free": "file"}
    assert ask(origins=origins, padding_free=True).run.attention_length is None
    assert ask(origins=origins, padding_free=True, packing=False, mean_tokens=90.0).run.attention_length is None
    assert ask(origins=origins, padding_free=True, mean_tokens=90.0).run.attention_length == 180


def test_a_file_keeps_documents_apart_with_the_attention_of_the_command_line() -> None:
    origins = {"padding_free": "file"}
    masked = ask(origins=origins, padding_free=True, mean_tokens=90.0, attn_implementation="sdpa")
    assert masked.run.attention_length is None


def test_a_length_that_was_asked_for_is_sure() -> None:
    """What is assumed of documents plays no part beside it."""
    both, alone = ask(padding_free=True, mean_tokens=500.0, attention_length=4000), ask(attention_length=4000)
    assert both.step_time_s == alone.step_time_s
    assert not any("attention spans" in note for note in both.notes)
    assert ask(padding_free=True, attention_length=700).run.attention_length == 700


def test_ends_of_documents_that_are_cut_hold_what_lies_between(tmp_path: Path) -> None:
    """Of many short samples and some that are cut at the row, more bytes per token shorten the short ones alone."""
    data = tmp_path / "data.txt"
    data.write_text("\n".join("x" * size for size in [400] * 90 + [40_000] * 10), encoding="utf-8")
    found = documents_of({"padding_free": True, "dataset": str(data)}, 8192)
    assert found is not None
    assert found.shortest is not None
    assert found.longest is not None
    assert found.shortest <= found.length <= found.longest


@pytest.mark.parametrize("model", ["google/gemma-3-1b-pt", "google/gemma-2-9b", "google/gemma-3-12b-pt"])
def test_layers_with_and_without_a_window_each_attend_as_far_as_they_do(model: str) -> None:
    """Forward: 4 FLOPs per pair of tokens and value of a head, of half of L^2 pairs, or of those in the window."""
    length, pairs_flops = 8192, 0.0
    architecture = load_architecture(model)
    for group in architecture.groups:
        block = group.layer.attention
        window = min(block.window or length, length)
        pairs = length * window - window * window / 2
        pairs_flops += group.count * 4.0 * block.num_heads * block.head_dim * pairs
    done = attention_work(model, max_length=length, gradient_checkpointing=False)
    assert done["forward"] == pytest.approx(pairs_flops, rel=0.01)
    assert done["backward"] == pytest.approx(2.5 * pairs_flops, rel=0.01)
