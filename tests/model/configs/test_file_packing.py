"""Whether samples fill rows: command line over file over the framework's default, with steps counted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tunecast
from tunecast.model.amount import Amount, resolve_amount
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run
from tunecast.model.rows import lays_flat

Read = Callable[..., RunFile]
BATCH = {
    "trl": "max_length: 1024\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 4\nnum_train_epochs: 1\n",
    "axolotl": "sequence_len: 1024\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\nnum_epochs: 1\n",
    "llama-factory": "cutoff_len: 1024\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 4\n"
    "num_train_epochs: 1\n",
    "torchtune": "batch_size: 1\ngradient_accumulation_steps: 4\nepochs: 1\n",
}
SAMPLES = {"num_samples": 10_000, "mean_tokens": 300}
ALONE = 2500
"""10,000 samples, four a step."""
FILLED = 733
"""3,000,000 tokens in steps of four rows of 1,024: 732.4."""
FILLED_2048 = 367
"""Rows of 2,048, four a step: 366.2."""


def amount_of(run_file: RunFile, typed: dict[str, Any]) -> Amount:
    options = merge_options(run_file, typed).options
    own = {name: value for name, value in options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    amount = resolve_amount(resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), own).run, options)
    assert amount is not None
    return amount


@pytest.mark.parametrize(
    ("form", "lines", "steps"),
    [
        ("trl", "packing: true", FILLED),
        ("trl", "packing: true\npacking_strategy: wrapped", FILLED),
        ("trl", "packing: false", ALONE),
        ("trl", "", ALONE),
        ("trl", "padding_free: true", ALONE),
        ("axolotl", "sample_packing: true", FILLED),
        ("axolotl", "sample_packing: false", ALONE),
        ("axolotl", "", ALONE),
        ("axolotl", "pad_to_sequence_len: true", ALONE),
        ("llama-factory", "packing: true", FILLED),
        ("llama-factory", "neat_packing: true", FILLED),
        ("llama-factory", "packing: false", ALONE),
        ("llama-factory", "", ALONE),
        ("llama-factory", "stage: pt", FILLED),
        ("torchtune", "dataset: {packed: true}", FILLED_2048),
        ("torchtune", "", ALONE),
    ],
)
def test_the_file_or_its_frameworks_default_decides(read: Read, form: str, lines: str, steps: int) -> None:
    amount = amount_of(read(form, BATCH[form] + lines), SAMPLES)
    assert (amount.steps, "packing" in amount.assumed) == (steps, False)


@pytest.mark.parametrize(
    ("form", "lines", "multiple"),
    [
        ("trl", "", None),
        ("trl", "pad_to_multiple_of: 16", 16),
        ("axolotl", "", 64),
        ("axolotl", "pad_to_sequence_len: null", 64),
        ("axolotl", "pad_to_sequence_len: false", 1),
        ("axolotl", "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rms_norm: true", 64),
        ("llama-factory", "", 8),
        ("llama-factory", "enable_liger_kernel: true", 8),
        ("llama-factory", "packing: true", None),
    ],
)
def test_rows_of_one_sample_are_filled_as_the_collator_does(
    read: Read, form: str, lines: str, multiple: int | None
) -> None:
    assert read(form, BATCH[form] + lines).options.get("pad_to_multiple_of") == multiple


@pytest.mark.parametrize("form", ["trl", "axolotl"])
@pytest.mark.parametrize(("lines", "packing", "steps"), [("true", False, ALONE), ("false", True, FILLED)])
def test_the_command_line_wins(read: Read, form: str, lines: str, packing: bool, steps: int) -> None:
    field = {"trl": "packing", "axolotl": "sample_packing"}[form]
    amount = amount_of(read(form, f"{BATCH[form]}{field}: {lines}"), {**SAMPLES, "packing": packing})
    assert (amount.steps, "packing" in amount.assumed) == (steps, False)


@pytest.mark.parametrize(("lines", "steps"), [("packing: true", 1), ("packing: false", 2), ("", 2)])
def test_samples_of_a_data_file(read: Read, tmp_path: Path, lines: str, steps: int) -> None:
    """Eight samples of some 300 tokens: two steps of four, or 2,400 tokens in one of 4,096."""
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"text": "x" * 300}) + "\n" for _ in range(8)))
    typed = {"dataset": str(data), "bytes_per_token": 1.0}
    amount = amount_of(read("trl", BATCH["trl"] + lines), typed)
    assert (amount.steps, "packing" in amount.assumed) == (steps, False)


@pytest.mark.parametrize("lines", ["packing: true", "packing: false", ""])
def test_without_lengths_a_sample_is_a_full_row(read: Read, lines: str) -> None:
    assert amount_of(read("trl", BATCH["trl"] + lines), {"num_samples": 10_000}).steps == ALONE


def test_notes_agree_with_the_numbers(read: Read) -> None:
    def told(lines: str, **typed: Any) -> list[str]:
        notes = merge_options(read("trl", BATCH["trl"] + lines), typed).notes
        return [note for note in notes if "Rows are not packed" in note]

    assert ["upper bound" in note for note in told("packing: false", num_samples=10_000)] == [True]
    (stated,) = told("packing: false", **SAMPLES)
    assert "a row of its own, since packing of the file is false" in stated
    (default,) = told("", **SAMPLES)
    assert "trl packs none by default" in default
    assert not told("packing: false", **SAMPLES, packing=True)
    assert not told("packing: true", **SAMPLES)


@pytest.mark.parametrize(
    ("lines", "typed", "most"),
    [
        ("packing: false", {}, 1 + 1 / 2 + 1 / 3 + 1 / 4),
        ("packing: false", {"packing": True}, 1.0),
        ("packing: false", {"per_device_train_batch_size": 1}, 1.0),
        ("packing: true", {}, 1.0),
        ("packing: false\ngroup_by_length: true", {}, 1.0),
    ],
)
def test_tokens_of_samples_of_unknown_length_may_be_padded(
    read: Read, lines: str, typed: dict[str, Any], most: float
) -> None:
    """The longest of four lengths that are spread exponentially is 25/12 of their mean, whatever that is."""
    file = read("trl", f"{BATCH['trl']}{lines}")
    amount = amount_of(file, {"per_device_train_batch_size": 4, "tokens": 10_000_000, **typed})
    assert (amount.least, amount.most) == (1.0, pytest.approx(most))
    assert any("no padding" in word for word in amount.assumed) == (most > 1.0)


def test_typed_documents_speak_of_packed_rows(read: Read) -> None:
    """``--padding-free`` is about the documents of packed rows, whatever the file has."""
    amount = amount_of(read("trl", f"{BATCH['trl']}packing: false"), {**SAMPLES, "padding_free": True})
    assert (amount.steps, amount.assumed) == (FILLED, ("packing",))


def test_estimate_and_recommend_say_what_they_count(tmp_path: Path) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(f"model_name_or_path: Qwen/Qwen2.5-0.5B\ndtype: bfloat16\n{BATCH['trl']}packing: false\n")
    (found,) = tunecast.estimate(str(file), gpu="rtx-4090", **SAMPLES)
    (typed,) = tunecast.estimate(str(file), gpu="rtx-4090", **SAMPLES, packing=False)
    assert found.totals == typed.totals
    assert "packing" not in found.amount_assumed
    rented = tunecast.recommend(str(file), gpu="rtx-4090", max_gpus=1, **SAMPLES)
    assert rented.steps.startswith("2,500 steps")
    assert any("a row of its own, since packing of the file is false" in note for note in rented.notes)


@pytest.mark.parametrize(
    ("form", "lines"),
    [
        ("trl", "padding_free: true\nattn_implementation: flash_attention_2"),
        ("axolotl", "batch_flattening: true\nflash_attention: true"),
        ("trl", "padding_free: true\nattn_implementation: kernels-community/flash-attn2"),
        ("axolotl", "batch_flattening: true\nattn_implementation: kernels-community/flash-attn2@v1"),
    ],
)
def test_samples_laid_end_to_end_are_forecast_so_where_attention_keeps_them_apart(
    read: Read, form: str, lines: str
) -> None:
    def flat(lines: str, **typed: Any) -> bool:
        return lays_flat(merge_options(read(form, BATCH[form] + lines), typed).options)

    assert flat(lines, mean_tokens=300.0)
    assert not flat(lines), "nothing says how long they are"
    assert not flat(lines, mean_tokens=300.0, packing=True)
    assert not flat(lines, mean_tokens=300.0, attn_implementation="sdpa")


def test_no_packing_over_a_file_that_packs_makes_padded_rows(read: Read) -> None:
    """The file keeps documents of packed rows apart; rows of one sample each were not said to lie end to end."""
    file = read("trl", BATCH["trl"] + "packing: true\nattn_implementation: flash_attention_2")
    typed = {"packing": False, "mean_tokens": 300.0}
    assert not lays_flat(merge_options(file, typed).options)
    assert lays_flat(merge_options(file, {**typed, "padding_free": True}).options)
