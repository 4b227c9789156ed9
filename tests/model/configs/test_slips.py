"""What a user gets wrong in a training file: slips in field names, and companions given with the wrong option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunecast.asked import ignored_notes, read_asked
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.configs import read_config

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"


@pytest.mark.parametrize(
    ("example", "right", "wrong"),
    [
        ("axolotl.yml", "sample_packing:", "sample_paking:"),
        ("axolotl.yml", "gradient_accumulation_steps:", "gradient_acumulation_steps:"),
        ("llama-factory.yaml", "cutoff_len:", "cutof_len:"),
        ("trl.yaml", "use_peft:", "use_pefft:"),
        ("trl.yaml", "lora_r:", "lora_rank:"),
        ("axolotl.yml", "gradient_checkpointing:", "gradient_checkpoint:"),
    ],
)
def test_a_slip_in_a_name_is_told_with_what_is_meant(tmp_path: Path, example: str, right: str, wrong: str) -> None:
    text = (EXAMPLES / example).read_text(encoding="utf-8")
    assert right in text
    path = tmp_path / example
    path.write_text(text.replace(right, wrong, 1), encoding="utf-8")
    notes = read_config(path).notes
    assert f"{wrong[:-1]} is read by nothing here: is {right[:-1]} meant?" in notes


@pytest.mark.parametrize("example", ["axolotl.yml", "llama-factory.yaml", "trl.yaml", "torchtune.yaml", "litgpt.yaml"])
def test_the_projects_own_fields_are_no_slips(example: str) -> None:
    assert not [note for note in read_config(EXAMPLES / example).notes if "meant?" in note or "No fields" in note]


def test_a_slip_beside_the_field_that_is_meant_is_told(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yml"
    path.write_text((EXAMPLES / "axolotl.yml").read_text(encoding="utf-8") + "\nlora_rnk: 4\n", encoding="utf-8")
    found = read_config(path)
    assert "lora_rnk is read by nothing here: is lora_r meant?" in found.notes
    assert "lora_rnk" not in found.ignored


@pytest.mark.parametrize(
    ("example", "title"),
    [("trl.yaml", "TRL"), ("axolotl.yml", "axolotl"), ("llama-factory.yaml", "LLaMA-Factory")],
)
def test_a_field_that_a_framework_does_not_have_stands_apart(tmp_path: Path, example: str, title: str) -> None:
    path = tmp_path / example
    path.write_text((EXAMPLES / example).read_text(encoding="utf-8") + "\nfoo_bar: 3\nddp_timeout: 5\n")
    found = read_config(path)
    assert f"No fields of {title}, as far as is recorded: foo_bar." in found.notes
    assert "foo_bar" not in found.ignored
    assert "ddp_timeout" in found.ignored


def test_where_the_fields_are_not_recorded_the_note_says_that_one_may_be_unknown() -> None:
    """torchtune's are those of any component; axolotl's stand in ``known_fields.json``."""
    (told,) = ignored_notes(("output_dir", "foo_bar"), all_known=False)
    assert told == "Fields of the file that change nothing here, or that nothing here knows: output_dir, foo_bar."


@pytest.mark.parametrize("targets", ["q_prj", "q_prj,v_prj"])
def test_targets_that_no_module_has_are_named(tmp_path: Path, targets: str) -> None:
    path = tmp_path / "llama-factory.yaml"
    text = (EXAMPLES / "llama-factory.yaml").read_text(encoding="utf-8")
    path.write_text(re.sub(r"lora_target: .*", f"lora_target: {targets}", text), encoding="utf-8")
    with pytest.raises(InputError, match=r"targets \(q_prj.*\) are no modules of .*; it has q_proj"):
        read_asked(str(path), {})


def test_every_ignored_field_is_named() -> None:
    ignored = read_config(EXAMPLES / "axolotl.yml").ignored
    assert len(ignored) > 10
    told = " ".join(ignored_notes(ignored))
    assert all(field in told for field in ignored)


def test_fields_of_evaluation_and_checkpoints_name_the_options_that_count_them() -> None:
    """They take time, so "change nothing" would be false."""
    evaluated, saved, rest = ignored_notes(("eval_steps", "learning_rate", "val_set_size", "saves_per_epoch"))
    assert evaluated.startswith("eval_steps, val_set_size of the file: counted only where --eval-samples N")
    assert saved == "saves_per_epoch of the file: counted only where --save-steps N says it."
    assert rest == "Fields of the file that change nothing here: learning_rate."


def test_a_companion_with_the_wrong_option_is_refused() -> None:
    training = EXAMPLES / "trl.yaml"
    with pytest.raises(InputError, match="one of deepspeed; give it with --deepspeed"):
        read_config(training, accelerate=EXAMPLES / "deepspeed.json")
    with pytest.raises(InputError, match="one of accelerate; give it with --accelerate"):
        read_config(training, deepspeed=EXAMPLES / "accelerate.yaml")
    with pytest.raises(InputError, match="one of axolotl; give it as the training file"):
        read_config(training, accelerate=EXAMPLES / "axolotl.yml")


def test_deepspeeds_file_in_place_of_a_model_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="--deepspeed"):
        architecture_from_config({"zero_optimization": {"stage": 2}}, "deepspeed.json")


@pytest.mark.parametrize(
    ("example", "line", "told"),
    [
        ("axolotl.yml", "lora_modules_to_save: true", "lora_modules_to_save is True, but it names modules"),
        ("axolotl.yml", "lora_modules_to_save: [1]", "lora_modules_to_save is [1], but it names modules"),
        ("llama-factory.yaml", "additional_target: true", "additional_target is True, but it names modules"),
        ("axolotl.yml", "total_num_tokens: .inf", "total_num_tokens is inf, but it must be a number"),
        ("axolotl.yml", "num_epochs: .nan", "num_epochs is nan, but it must be a number"),
    ],
)
def test_a_value_of_another_kind_is_told_in_a_sentence(tmp_path: Path, example: str, line: str, told: str) -> None:
    field = line.partition(":")[0]
    kept = [text for text in (EXAMPLES / example).read_text("utf-8").splitlines() if not text.startswith(f"{field}:")]
    path = tmp_path / example
    path.write_text("\n".join([*kept, line, ""]), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        read_config(path)
    assert told in str(refused.value)


@pytest.mark.parametrize("name", ["train.py", "notebooks/Fine-tune.ipynb", "run.sh"])
def test_scripts_and_notebooks_are_not_read_and_what_is_is_said(name: str, tmp_path: Path) -> None:
    """Whether or not the file is there."""
    with pytest.raises(NotSupportedError, match=r"is code, which is not read .* or a training file \(YAML\)"):
        load_architecture(name)
    (tmp_path / "train.py").write_text("print()\n")
    with pytest.raises(NotSupportedError, match="is code"):
        load_architecture(str(tmp_path / "train.py"))
