"""Files of training data: samples and text as counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.model import dataset
from tunecast.model.amount import resolve_amount
from tunecast.model.dataset import read_dataset
from tunecast.model.rows import held_run
from tunecast.model.run import Run

SAMPLES = [
    {"prompt": "a" * 30, "answer": "b" * 10},
    {"messages": [{"role": "user", "content": "é" * 8}, {"role": "system", "content": ""}], "id": 7},
]
"""40 bytes; 16 bytes of é, and 10 of the roles' names."""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_text_is_counted_however_deep(name: str, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(sample) for sample in SAMPLES) + "\n\n"
    found = read_dataset(write(tmp_path, name, lines if name.endswith("l") else json.dumps(SAMPLES)))
    assert (found.samples, found.sizes_bytes, found.whole) == (2, (40, 26), True)


@pytest.mark.parametrize(
    ("sample", "size", "left_out"),
    [
        # tatsu-lab/alpaca: its text says the other fields once more.
        ({"instruction": "i" * 5, "input": "", "output": "o" * 7, "text": "t" * 12}, 12, ("text",)),
        # HuggingFaceH4/ultrachat_200k.
        ({"prompt": "u" * 9, "prompt_id": "f00", "messages": [{"content": "u" * 9, "role": "user"}]}, 13,
         ("prompt", "prompt_id")),
        # allenai/c4, databricks/dolly-15k, openai/gsm8k, ShareGPT files.
        ({"text": "w" * 30, "timestamp": "2019", "url": "https"}, 30, ("timestamp", "url")),
        ({"instruction": "i" * 4, "context": "c" * 6, "response": "r" * 8, "category": "qa"}, 18, ("category",)),
        ({"question": "q" * 11, "answer": "a" * 2}, 13, ()),
        ({"id": "x1", "conversations": [{"from": "gpt", "value": "v" * 6}]}, 9, ("id",)),
        # Nothing known: all of it.
        ({"premise": "p" * 3, "hypothesis": "h" * 4, "label": 1}, 7, ()),
    ],
)  # fmt: skip
def test_of_named_fields_those_are_counted_that_are_trained(
    sample: dict[str, object], size: int, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    found = read_dataset(write(tmp_path, "x.jsonl", json.dumps(sample) + "\n"))
    assert (found.sizes_bytes, found.left_out) == ((size,), left_out)
    amount = resolve_amount(Run(method="lora", max_length=500), {"dataset": str(tmp_path / "x.jsonl")})
    assert amount is not None
    assert all(field in amount.how for field in (*found.counted, *left_out))


def test_lines_and_cells(tmp_path: Path) -> None:
    assert read_dataset(write(tmp_path, "x.txt", "abc\n\nde\n")).sizes_bytes == (3, 2)
    cells = read_dataset(write(tmp_path, "x.csv", 'question,answer\nab,"c\nd"\n,e\n'))
    assert cells.sizes_bytes == (5, 1)


def test_of_a_large_file_the_beginning_stands_for_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "READ_BYTES", 1000)
    path = write(tmp_path, "x.txt", "x" * 99 + "\n" + ("y" * 99 + "\n") * 99)
    found = read_dataset(path)
    assert not found.whole
    assert len(found.sizes_bytes) == 10
    assert found.samples == pytest.approx(100, rel=0.01)
    assert found.tokens(4, 1024) == pytest.approx(100 * 25, rel=0.01)


def test_a_dataset_becomes_steps_cut_at_the_length(tmp_path: Path) -> None:
    """Ten samples of 100 tokens and one of 1,000 cut at 500: 1,500 tokens, twice, in steps of 500."""
    path = write(tmp_path, "x.txt", ("x" * 400 + "\n") * 10 + "y" * 4000)
    run = Run(method="lora", max_length=500)
    amount = resolve_amount(run, {"dataset": str(path), "num_train_epochs": 2, "packing": True})
    assert amount is not None
    assert (amount.steps, amount.epochs) == (6, 2)
    assert "1 sample cut at 500" in amount.how
    assert "assumed" in amount.how


def test_token_ids_are_counted_as_they_are(tmp_path: Path) -> None:
    """Data that was tokenized before: what `datasets` and trainers keep, whatever text stands beside it."""
    samples = [{"input_ids": list(range(n)), "text": "a" * 1000} for n in (300, 500, 0, 100)]
    path = write(tmp_path, "x.jsonl", "\n".join(map(json.dumps, samples)))
    found = read_dataset(path)
    assert (found.samples, found.sizes_bytes, found.tokenized) == (3, (300, 500, 100), True)
    options = {"dataset": str(path), "packing": True, "num_train_epochs": 2}
    amount = resolve_amount(Run(method="lora", max_length=400), options)
    assert amount is not None
    assert amount.steps == 2 * (300 + 400 + 100) / 400
    assert "800 tokens (the file's own input_ids), 1 sample cut at 400" in amount.how
    assert (amount.least, amount.most) == (1.0, 1.0)
    run = Run(method="lora", max_length=4096)
    assert held_run(run, {"dataset": str(path), "packing": False}).max_length == 500
    with pytest.raises(InputError, match="nothing is left to tokenize"):
        resolve_amount(run, options | {"bytes_per_token": 3.0})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.avro", "", "convert it"),
        ("x.jsonl", "{broken", "damaged"),
        ("x.json", '{"a": "b"}', "no list of samples"),
        ("x.txt", "\n\n", "holds no text"),
        ("x.jsonl", '{"input_ids": []}', "holds empty input_ids alone"),
        ("x.jsonl", '{"input_ids": "hello"}', "sample 1 has input_ids that are no list of whole numbers"),
        ("x.jsonl", '{"input_ids": [1]}\n{"input_ids": [1.5]}', "sample 2 has input_ids that are no list"),
        ("x.jsonl", '{"input_ids": [1]}\n{"text": "a"}', "sample 2 has no input_ids"),
        ("x.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}', "preference training is not built"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        read_dataset(write(tmp_path, name, text))


def test_a_missing_file_and_two_amounts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no file"):
        read_dataset(tmp_path / "nothing.jsonl")
    with pytest.raises(InputError, match="--tokens and --dataset"):
        resolve_amount(Run(method="lora"), {"tokens": "1M", "dataset": "x.jsonl"})


def test_a_damaged_line_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    """The fourth line, after an empty one; a line separator inside a text ends no line."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n\n{"text": "a\u2028b"}\n{"text": broken}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"data.jsonl is damaged \(line 4: Expecting value, column 10\)"):
        read_dataset(path)
