"""Samples of a data file that a training file does not train: capped, or kept for evaluation.

What is kept follows ``datasets.Dataset.train_test_split`` (a share rounded up), which axolotl calls on samples
(``create_train_validation_split`` of utils/data/shared.py) and LLaMA-Factory on what it tokenized, rows where it packs
(``split_dataset`` of data/data_utils.py after ``_get_preprocessed_dataset`` of data/loader.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.amount import Amount, resolve_amount
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run
from tunecast.model.resolve_litgpt import of_stack

Read = Callable[..., RunFile]
SAMPLES, LENGTH = 1000, 300
BATCH = {
    "axolotl": "sequence_len: 1000\nmicro_batch_size: 1\nnum_epochs: 1\n",
    "llama-factory": "cutoff_len: 1001\nper_device_train_batch_size: 1\nnum_train_epochs: 1\n",
    "litgpt": "train: {max_seq_length: 1000, global_batch_size: 1, epochs: 1}\n",
}


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text((json.dumps({"input_ids": [1] * LENGTH}) + "\n") * SAMPLES, encoding="utf-8")
    return str(path)


def amount_of(run_file: RunFile, **typed: Any) -> Amount:
    options = merge_options(run_file, typed).options
    own = {name: value for name, value in options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    architecture = of_stack(load_architecture("meta-llama/Llama-3.1-8B"), options)
    amount = resolve_amount(resolve_run(architecture, own).run, options)
    assert amount is not None
    return amount


@pytest.mark.parametrize(
    ("form", "lines", "samples"),
    [
        ("axolotl", "val_set_size: 0.5", 500),
        ("axolotl", "val_set_size: 0.0315", 968),
        ("axolotl", "val_set_size: 64", 936),
        ("axolotl", "val_set_size: 0", 1000),
        ("llama-factory", "val_size: 0.1", 900),
        ("llama-factory", "val_size: 64", 936),
        ("llama-factory", "dataset: mine\nmax_samples: 200", 200),
        ("llama-factory", "dataset: mine\nmax_samples: 5000", 1000),
        ("llama-factory", "dataset: mine\nmax_samples: 200\nval_size: 0.1", 180),
        ("llama-factory", "dataset: mine,yours\nmax_samples: 200", 1000),
        ("litgpt", "data: {class_path: litgpt.data.JSON, init_args: {val_split_fraction: 0.25}}", 750),
    ],
)
def test_samples_that_are_trained_are_counted(form: str, lines: str, samples: int, read: Read, data: str) -> None:
    assert amount_of(read(form, BATCH[form] + lines), dataset=data).steps == samples


@pytest.mark.parametrize(
    ("form", "lines", "rows"),
    [
        ("axolotl", "sample_packing: true\nval_set_size: 100", 900 * LENGTH / 1000),
        ("llama-factory", "packing: true\nval_size: 100", 1000 * LENGTH / 1000 - 100),
        ("llama-factory", "packing: true\nval_size: 0.1", 900 * LENGTH / 1000),
    ],
)
def test_llama_factory_keeps_packed_rows_where_it_packs(
    form: str, lines: str, rows: float, read: Read, data: str
) -> None:
    assert amount_of(read(form, BATCH[form] + lines), dataset=data).steps == math.ceil(rows)


def test_the_amount_says_what_is_not_trained(read: Read, data: str) -> None:
    lines = BATCH["llama-factory"] + "dataset: mine\nmax_samples: 200\nval_size: 0.1"
    how = amount_of(read("llama-factory", lines), dataset=data).how
    assert how.startswith("180 samples (the first 200 of 1,000; fields input_ids) of 300 tokens")
    assert "20 samples kept for evaluation" in how


def test_a_typed_number_of_samples_is_that_of_trained_ones(read: Read) -> None:
    run_file = read("axolotl", BATCH["axolotl"] + "val_set_size: 0.5")
    assert amount_of(run_file, num_samples=1000, mean_tokens=300).steps == 1000


def test_left_out_samples_are_not_kept_either(read: Read, tmp_path: Path) -> None:
    """axolotl leaves out long samples before it splits: 500 of 1,000 are too long, a tenth of the others is kept."""
    path = tmp_path / "long.jsonl"
    lines = [json.dumps({"input_ids": [1] * length}) + "\n" for length in (LENGTH, 1001)]
    path.write_text("".join(lines * 500), encoding="utf-8")
    assert amount_of(read("axolotl", BATCH["axolotl"] + "val_set_size: 0.1"), dataset=str(path)).steps == 450


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("val_set_size: 1000", "leaves none of 1,000 to train on"),
        ("val_set_size: 1", "leaves none of 1,000 to train on"),
        ("val_set_size: -0.1", "val_set_size is -0.1, but it is a share or a number"),
        ("val_set_size: most", "val_set_size is 'most', but it must be a number"),
    ],
)
def test_what_leaves_nothing_to_train_is_refused(lines: str, said: str, read: Read, data: str) -> None:
    with pytest.raises(InputError, match=said):
        amount_of(read("axolotl", BATCH["axolotl"] + lines), dataset=data)
