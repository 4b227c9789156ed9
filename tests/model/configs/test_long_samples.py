"""What frameworks make of samples that are longer than a row, with rows counted by hand.

TRL's ``pack_dataset`` (trl/data_utils.py, 1.16) made 250 rows by ``bfd``, 550 by ``bfd_split`` and 538 by ``wrapped``
of 200 texts of 5,000 tokens and 200 of 500 in rows of 2,048.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model.amount import Amount, resolve_amount
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options
from tunecast.model.documents import documents_of, reach, reach_of_split
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run
from tunecast.model.rows import unpacked_rows

Read = Callable[..., RunFile]
WIDTH = 2048
LENGTHS = (5000,) * 200 + (500,) * 200
BATCH = {
    "trl": "max_length: 2048\nper_device_train_batch_size: 1\nnum_train_epochs: 1\npacking: true\n",
    "axolotl": "sequence_len: 2048\nmicro_batch_size: 1\nnum_epochs: 1\nsample_packing: true\n",
    "llama-factory": "cutoff_len: 2048\nper_device_train_batch_size: 1\nnum_train_epochs: 1\n",
    "torchtune": "batch_size: 1\nepochs: 1\n",
}


def written(folder: Path, lengths: Sequence[int] = LENGTHS) -> str:
    path = folder / "long.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in lengths), encoding="utf-8")
    return str(path)


def options_of(run_file: RunFile, typed: dict[str, Any]) -> dict[str, Any]:
    return merge_options(run_file, {"max_length": WIDTH, **typed}).options


def amount_of(options: dict[str, Any]) -> Amount:
    own = {name: value for name, value in options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    amount = resolve_amount(resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), own).run, options)
    assert amount is not None
    return amount


@pytest.mark.parametrize(
    ("strategy", "rows", "within"),
    [("bfd", 250, 0.005), ("bfd_split", 550, 0.025), ("wrapped", 538, 0.0)],
)
def test_rows_of_trl_are_those_that_it_packed(
    strategy: str, rows: int, within: float, read: Read, tmp_path: Path
) -> None:
    """Best-fit-decreasing leaves gaps at the ends of rows, which are not counted."""
    run_file = read("trl", f"{BATCH['trl']}packing_strategy: {strategy}")
    assert amount_of(options_of(run_file, {"dataset": written(tmp_path)})).steps == pytest.approx(rows, rel=within)


@pytest.mark.parametrize(
    ("form", "lines", "tokens"),
    [
        ("trl", "packing_strategy: wrapped", sum(LENGTHS)),
        ("torchtune", "dataset:\n  packed: true\n  split_across_pack: true", sum(LENGTHS)),
        ("torchtune", "dataset:\n  packed: true", 200 * (2048 + 500)),
        ("llama-factory", "stage: pt", sum(LENGTHS)),
        ("llama-factory", "packing: true", 200 * (2048 + 500)),
        ("axolotl", "", 200 * 500),
        ("axolotl", "excess_length_strategy: truncate", 200 * (2048 + 500)),
        ("axolotl", "datasets:\n  - path: here\n    type: completion", sum(LENGTHS)),
        ("axolotl", "datasets:\n  - path: here\n    type: alpaca", 200 * 500),
    ],
)
def test_long_samples_are_cut_split_or_left_out(form: str, lines: str, tokens: int, read: Read, tmp_path: Path) -> None:
    options = options_of(
        read(form, BATCH[form] + lines), {"dataset": written(tmp_path), "gradient_accumulation_steps": 1}
    )
    amount = amount_of(options)
    assert f"{tokens:,} tokens" in amount.how
    assert amount.steps == math.ceil(tokens / WIDTH)


def test_a_typed_layout_wins_over_a_file_that_wraps(read: Read, tmp_path: Path) -> None:
    """TRL without packing cuts: 400 samples, 400 rows."""
    run_file = read("trl", f"{BATCH['trl']}packing_strategy: wrapped")
    options = options_of(run_file, {"dataset": written(tmp_path), "packing": False})
    assert amount_of(options).steps == 400
    assert "200 samples cut at 2048" in amount_of(options).how


def test_pieces_and_left_out_samples_are_rows_of_their_own_where_nothing_is_packed(read: Read, tmp_path: Path) -> None:
    """A sample of 5,000 is three pieces: 2,048, 2,048 and 904."""
    data = {"dataset": written(tmp_path)}
    alone = BATCH["axolotl"].replace("true", "false")
    pieces = options_of(read("axolotl", f"{alone}datasets:\n  - path: here\n    type: completion"), data)
    assert amount_of(pieces).steps == 200 * 3 + 200
    kept = options_of(read("axolotl", alone), data)
    amount = amount_of(kept)
    assert (amount.steps, "200 samples longer than 2048 left out" in amount.how) == (200, True)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_data_without_a_sample_that_is_kept_are_refused(packing: str, read: Read, tmp_path: Path) -> None:
    run_file = read("axolotl", BATCH["axolotl"].replace("true", packing))
    with pytest.raises(InputError, match="no sample of 2048 tokens or fewer, and longer ones are left out"):
        amount_of(options_of(run_file, {"dataset": written(tmp_path, [5000] * 3)}))


def test_a_mean_above_the_length_of_rows_needs_rows_that_are_wrapped(read: Read) -> None:
    samples = {"num_samples": 1000, "mean_tokens": 3000}
    wrapped = read("trl", f"{BATCH['trl']}packing_strategy: wrapped")
    assert amount_of(options_of(wrapped, samples)).steps == math.ceil(3_000_000 / WIDTH)
    with pytest.raises(InputError, match="above --max-length 2048, where samples are cut"):
        amount_of(options_of(read("trl", BATCH["trl"]), samples))
    with pytest.raises(InputError, match="above --max-length 2048"):
        amount_of(options_of(wrapped, {**samples, "packing": False}))


def test_attention_reaches_over_the_pieces_of_split_samples(read: Read, tmp_path: Path) -> None:
    lines = f"{BATCH['trl']}packing_strategy: bfd_split\nattn_implementation: flash_attention_2"
    options = options_of(read("trl", lines), {"dataset": written(tmp_path)})
    found = documents_of(options, WIDTH)
    assert found is not None
    assert found.length == round(reach((2048, 2048, 904, 500)))


@pytest.mark.parametrize(("mean", "cut"), [(300.0, 2048), (3000.0, 2048), (2100.0, 512)])
def test_exponential_samples_in_pieces_have_the_reach_of_their_integral(mean: float, cut: int) -> None:
    """Every length to 60 means, weighed by its density, in pieces."""
    squares = tokens = 0.0
    for length in range(1, int(60 * mean)):
        density = math.exp(-length / mean)
        whole, rest = divmod(length, cut)
        squares += density * (whole * cut**2 + rest**2)
        tokens += density * length
    assert reach_of_split(mean, cut) == pytest.approx(squares / tokens, rel=0.003)


def test_rows_of_one_sample_have_a_range_that_holds_what_is_left_out(read: Read, tmp_path: Path) -> None:
    """Texts near the limit are in or out by how many bytes a token has."""
    path = tmp_path / "near.jsonl"
    texts = ["a" * 7800, "b" * 4000]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    options = options_of(read("axolotl", BATCH["axolotl"].replace("true", "false")), {"dataset": str(path)})
    own = {name: value for name, value in options.items() if name not in RUN_OPTIONS_ELSEWHERE}
    rows = unpacked_rows(resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), own).run, options)
    assert rows is not None
    assert rows.shortest is not None
    assert rows.longest is not None
    assert rows.shortest < rows.length <= rows.longest
