"""One format, or a question: doubt never becomes a guess."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.model.configs import FORMATS, looks_like_training_file, read_config, read_mapping
from tunecast.model.configs.detect import detect_format, matching_formats
from tunecast.model.configs.load import load_mapping

Minimal = Callable[..., dict[str, Any]]
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_known_by_its_sign(minimal: Minimal, form: str) -> None:
    assert matching_formats(minimal(form)) == (form,)


def test_two_signs_are_an_error_that_names_both() -> None:
    both = {"base_model": "a/b", "adapter": "lora", "model_name_or_path": "a/b"}
    with pytest.raises(InputError, match=r"looks like axolotl and trl; say which with --config-format"):
        detect_format(both, name="run.yml")
    assert detect_format(both, name="run.yml", asked="axolotl") == "axolotl"


def test_no_sign_is_an_error_that_shows_the_keys() -> None:
    with pytest.raises(
        InputError, match=r"no known format \(its keys: epochs, model\); say which with --config-format"
    ):
        detect_format({"model": "a/b", "epochs": 3}, name="run.yml")


def test_an_empty_key_is_no_sign() -> None:
    assert matching_formats({"base_model": None, "adapter": "lora"}) == ()
    assert matching_formats({"model_name_or_path": "a/b", "template": None}) == ("trl",)


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"axolot.*Did you mean axolotl"):
        detect_format({}, name="run.yml", asked="axolot")


@pytest.mark.parametrize(("example", "flag"), [("accelerate.yaml", "--accelerate"), ("deepspeed.json", "--deepspeed")])
def test_a_companion_alone_is_told_where_it_belongs(example: str, flag: str) -> None:
    with pytest.raises(InputError, match=f"goes with a training file: add it with {flag} {example}"):
        read_config(EXAMPLES / example)


def test_a_format_that_is_asked_for_must_still_name_a_model() -> None:
    with pytest.raises(InputError, match="names no model, though it was read as trl"):
        read_mapping({"max_length": 1024}, name="run.yml", config_format="trl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\n", "is no valid YAML"),
        ("- one\n- two\n", "holds no mapping"),
        ("", "holds no mapping"),
    ],
)
def test_files_that_are_no_mapping(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_config(path)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^Cannot read .*run.yaml: No such file or directory"):
        read_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("flag", ["accelerate", "deepspeed"])
def test_a_companion_of_no_known_kind_is_refused_by_name(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"foo": 1}')
    with pytest.raises(InputError, match=rf"x.json is no {flag} file \(its keys: foo\); --{flag} takes one with"):
        read_config(EXAMPLES / "trl.yaml", **{flag: path})
    with pytest.raises(InputError, match=r"nope.json: No such file or directory; give (accelerate|DeepSpeed)'s file"):
        read_config(EXAMPLES / "trl.yaml", **{flag: tmp_path / "nope.json"})


@pytest.mark.parametrize("form", FORMATS)
def test_a_training_file_in_json_is_known_by_what_it_holds(tmp_path: Path, minimal: Minimal, form: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(minimal(form)))
    assert looks_like_training_file(str(path))
    assert read_config(path) == read_mapping(minimal(form), name="run.json")
    path.write_text('{"model_type": "llama", "hidden_size": 64}')
    assert not looks_like_training_file(str(path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yml", "base_model: a/b\nmicro_batch_size: 2\nmicro_batch_size: 4\nsequence_len: 512\n"),
        ("run.json", '{"base_model": "a/b", "micro_batch_size": 2, "micro_batch_size": 4, "sequence_len": 512}'),
    ],
)
def test_a_field_that_stands_twice_is_told(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = read_config(path)
    assert found.options["per_device_train_batch_size"] == 4
    assert f"micro_batch_size stands twice in {name}: the last one counts." in found.notes
    path.write_text(text.replace('"micro_batch_size": 2, ', "").replace("micro_batch_size: 2\n", ""))
    assert not any("twice" in note for note in read_config(path).notes)


def test_yaml_that_holds_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    for held in ("{inner: *p}", "[*p]"):
        path.write_text(f"base_model: a/b\nmicro_batch_size: 2\nplugins: &p {held}\n")
        with pytest.raises(InputError, match="no valid YAML: an alias names what it stands in"):
            read_config(path)


@pytest.mark.parametrize("asked", [None, "litgpt"])
def test_a_file_of_litgpt_pretrain_is_refused_by_name(asked: str | None) -> None:
    train = {"max_tokens": 3_000_000_000, "max_seq_length": 2048}
    file = {"model_name": "pythia-160m", "precision": "bf16-mixed", "train": train}
    with pytest.raises(NotSupportedError, match=r"model_name without .* litgpt pretraining is not built"):
        read_mapping(file, name="lg.yaml", config_format=asked)


def test_a_word_that_is_no_kind_of_checkpoints_is_not_taken_for_one(minimal: Minimal) -> None:
    def told(word: str) -> str:
        with pytest.raises(InputError) as caught:
            read_mapping(minimal("axolotl") | {"gradient_checkpointing": word}, name="run.yml")
        return str(caught.value)

    assert "'maybe', but it must be true, false or offload" in told("maybe")
    assert "checkpoints on disk, which is not built yet" in told("offload_disk")


def test_a_format_like_none_is_refused_without_an_offer() -> None:
    with pytest.raises(UnknownNameError) as caught:
        detect_format({}, name="run.yml", asked="foo")
    assert "Did you mean" not in str(caught.value)


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("base_model: !!python/object/apply:os.getcwd []\nadapter: lora\n")
    with pytest.raises(InputError, match="is no valid YAML"):
        read_config(path)


_KEYS = st.sampled_from(
    [
        *("base_model", "adapter", "micro_batch_size", "sequence_len", "plugins"),
        *("model_name_or_path", "template", "stage", "use_peft", "max_length", "fsdp", "deepspeed"),
        *("checkpoint_dir", "train", "lora_r", "bf16", "distributed_type", "zero_optimization"),
    ]
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.sampled_from(["", "lora", "auto"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(_KEYS, _VALUES, max_size=8), st.sampled_from([None, *FORMATS]))
def test_whatever_a_file_holds_the_answer_is_a_run_or_one_sentence(content: dict[str, Any], asked: str | None) -> None:
    try:
        run_file = read_mapping(content, name="run.yml", config_format=asked)
    except InputError:
        return
    assert run_file.format in FORMATS
    assert run_file.options["method"] in ("lora", "qlora", "full")


def _fields(mapping: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [
        field for key, value in mapping.items() if isinstance(value, dict) for field in _fields(value, (*prefix, key))
    ]
    return [*((*prefix, key) for key in mapping), *inner]


def _replaced(mapping: dict[str, Any], field: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = field
    return mapping | {key: _replaced(mapping[key], tuple(rest), value) if rest else value}


@pytest.mark.parametrize(
    "example", sorted(path.name for path in EXAMPLES.glob("*.y*ml") if "accelerate" not in path.name)
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_example_with_one_odd_value_is_a_run_or_one_sentence(example: str, data: st.DataObject) -> None:
    content = load_mapping(EXAMPLES / example)
    odd = _replaced(content, data.draw(st.sampled_from(_fields(content))), data.draw(_VALUES))
    try:
        run_file = read_mapping(odd, name=example)
    except InputError:
        return
    assert run_file.options.get("per_device_train_batch_size", 1) >= 1
    assert run_file.options.get("gradient_accumulation_steps", 1) >= 1
