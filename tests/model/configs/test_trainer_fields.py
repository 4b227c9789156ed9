"""Fields of the Trainer that say what is written and compiled: they count as the options do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tunecast
from tunecast.catalogs.errors import InputError

TRL = """
model_name_or_path: meta-llama/Llama-3.2-1B
dtype: bfloat16
bf16: true
per_device_train_batch_size: 4
max_length: 1024
packing: true
"""
AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
bf16: true
micro_batch_size: 4
gradient_accumulation_steps: 1
sequence_len: 1024
sample_packing: true
pad_to_sequence_len: true
flash_attention: true
optimizer: adamw_torch
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Llama-3.2-1B
stage: sft
finetuning_type: full
bf16: true
cutoff_len: 1024
packing: true
per_device_train_batch_size: 4
"""
FILES = {"trl": TRL, "axolotl": AXOLOTL, "llama-factory": LLAMA_FACTORY}


def asked(tmp_path: Path, form: str, lines: str, **options: Any) -> Any:
    file = tmp_path / f"{form}.yaml"
    file.write_text(FILES[form] + lines)
    (found,) = tunecast.estimate(str(file), gpu="l40s", config_format=form, **{"tokens": "10M", **options})
    return found


@pytest.mark.parametrize("form", FILES)
def test_a_file_counts_what_the_option_counts(tmp_path: Path, form: str) -> None:
    file = asked(tmp_path, form, "save_steps: 200\nsave_total_limit: 3\n")
    typed = asked(tmp_path, form, "", save_steps=200, save_total_limit=3)
    assert file.whole_run.phases_h == typed.whole_run.phases_h
    assert "checkpoints" in file.whole_run.phases_h
    assert file.cost_usd == typed.cost_usd
    assert any("Checkpoints every 200 steps are counted" in note for note in file.notes)
    assert not any("save_steps" in note and "counted only where" in note for note in file.notes)


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "save_strategy: 'no'\nsave_steps: 200",
        "save_strategy: epoch",
        "save_steps: 0.2",
        "save_only_model: true\nsave_steps: 200",
    ],
)
def test_what_is_not_every_so_many_steps_is_not(tmp_path: Path, lines: str) -> None:
    """A share of all steps, epochs, and weights without the optimizer's state are named as not counted."""
    found = asked(tmp_path, "trl", lines)
    assert "checkpoints" not in found.whole_run.phases_h
    if lines and "'no'" not in lines:
        assert any("counted only where --save-steps N says it" in note for note in found.notes)


def test_what_is_typed_wins(tmp_path: Path) -> None:
    lines = "save_steps: 100\n"
    often, seldom = asked(tmp_path, "trl", lines), asked(tmp_path, "trl", lines, save_steps=1000)
    assert often.whole_run.phases_h["checkpoints"] > seldom.whole_run.phases_h["checkpoints"]
    assert "checkpoints" not in asked(tmp_path, "trl", lines, train_only=True).whole_run.phases_h
    minutes = asked(tmp_path, "trl", lines, spot=True, checkpoint_interval_min=30)
    assert not any("Checkpoints every 100 steps" in note for note in minutes.notes)


def test_a_typed_number_of_steps_keeps_the_files_limit(tmp_path: Path) -> None:
    lines, typed = "save_steps: 100\nsave_total_limit: 2\n", {"save_steps": 50, "storage_usd_per_gb_month": 100.0}
    file, whole = asked(tmp_path, "trl", lines, **typed), asked(tmp_path, "trl", "", save_total_limit=2, **typed)
    assert file.whole_run.cost_parts_usd["storage"] == pytest.approx(whole.whole_run.cost_parts_usd["storage"])


@pytest.mark.parametrize("lines", ["save_strategy: epoch", 'save_strategy: "no"', "saves_per_epoch: 2"])
def test_what_axolotl_refuses_beside_steps_is_refused(tmp_path: Path, lines: str) -> None:
    """``check_saves`` of its utils/schemas/validation.py."""
    with pytest.raises(InputError, match="axolotl refuses save_steps beside save"):
        asked(tmp_path, "axolotl", f"save_steps: 20\n{lines}\n")


@pytest.mark.parametrize(
    ("lines", "kept"), [("", 4), ("save_strategy: steps", 4), ("save_strategy: no", 4), ("save_total_limit: 2", 2)]
)
def test_axolotl_keeps_four_checkpoints_and_its_steps_win_over_a_strategy(
    tmp_path: Path, lines: str, kept: int
) -> None:
    """``_configure_save_and_eval_strategy`` of core/builders/base.py."""
    price = {"storage_usd_per_gb_month": 100.0}
    file = asked(tmp_path, "axolotl", f"save_steps: 20\n{lines}\n", **price)
    whole = asked(tmp_path, "axolotl", "", save_steps=20, save_total_limit=kept, **price)
    assert file.whole_run.cost_parts_usd["storage"] == pytest.approx(whole.whole_run.cost_parts_usd["storage"])


def test_a_limit_of_checkpoints_that_nobody_writes_is_told(tmp_path: Path) -> None:
    limited = asked(tmp_path, "trl", "", save_total_limit=3)
    assert any(note.startswith("--save-total-limit says how many checkpoints stay") for note in limited.notes)
    assert not any("--save-total-limit" in note for note in asked(tmp_path, "axolotl", "").notes), "four, by default"
    cut = asked(tmp_path, "trl", "", save_total_limit=3, spot=True)
    assert not any("--save-total-limit" in note for note in cut.notes), "checkpoints against interruptions"
    with pytest.raises(InputError, match="--save-steps would change nothing"):
        asked(tmp_path, "trl", "", save_steps=10, train_only=True)


def test_yamls_own_no_saves_nothing(tmp_path: Path) -> None:
    """An unquoted no is false."""
    assert "checkpoints" not in asked(tmp_path, "trl", "save_strategy: no\nsave_steps: 20").whole_run.phases_h


def test_plans_pad_as_their_own_micro_batches_do(tmp_path: Path) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(TRL.replace("packing: true", "packing: false") + "gradient_accumulation_steps: 4\n")
    fastest = tunecast.recommend(str(file), gpu="l40s", max_gpus=4, tokens="10M").fastest
    assert fastest is not None
    plan = fastest.forecast
    assert plan.run.num_gpus * plan.run.per_device_train_batch_size == 16, "of a global batch of 16"
    names = ("num_gpus", "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
    own = {name: getattr(plan.run, name) for name in names}
    (same,) = tunecast.estimate(str(file), gpu="l40s", tokens="10M", sharding=plan.run.sharding, **own)
    assert plan.total_time_h is not None
    assert plan.total_time_h.high == pytest.approx(same.total_time_h.high, rel=0.02)


@pytest.mark.parametrize(
    ("form", "lines", "compiled"),
    [
        *((form, "", False) for form in FILES),
        *((form, "torch_compile: true", True) for form in FILES),
        *((form, "torch_compile: false", False) for form in FILES),
        *((form, "torch_compile_backend: inductor", form != "axolotl") for form in FILES),
        ("trl", "torch_compile: false\ntorch_compile_mode: default", True),
        ("axolotl", "torch_compile: false\ntorch_compile_mode: max-autotune", False),
        ("axolotl", "torch_compile: auto", True),
    ],
)
def test_a_file_compiles_what_the_option_compiles(tmp_path: Path, form: str, lines: str, compiled: bool) -> None:
    found = asked(tmp_path, form, lines)
    typed = asked(tmp_path, form, "", torch_compile=compiled)
    assert found.run == typed.run
    assert found.run.torch_compile == compiled


def test_without_an_amount_no_step_is_counted(tmp_path: Path) -> None:
    found = asked(tmp_path, "trl", "save_steps: 100\n", tokens=None)
    assert found.whole_run is None
    assert not any("change nothing" in note or "changes nothing" in note for note in found.notes)


def test_recommend_counts_them_too(tmp_path: Path) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(TRL + "save_steps: 20\n")
    found = tunecast.recommend(str(file), gpu="l40s", max_gpus=1, tokens="10M")
    assert any("Checkpoints every 20 steps are counted" in note for note in found.notes)
