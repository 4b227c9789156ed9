"""Options typed by the names they have in other programs: what is said instead, and that it is right."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer.main

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.cli import main
from tunecast.cli.program import program
from tunecast.model.configs import read_config
from tunecast.model.kept_samples import OF_DATA
from tunecast.model.other_names import ELSEWHERE, VALUES, what_to_type
from tunecast.swept_inputs import parse_over

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FILES = ["axolotl.yml", "litgpt.yaml", "llama-factory.yaml", "torchtune.yaml", "trl.yaml"]
OF_NO_OPTION = {"sdp_attention", "lora_query", "_component_", "class_path", "global_batch_size"}
"""Last words of fields that say what several options say, or one value of theirs."""
COMMANDS = typer.main.get_command(program).commands  # type: ignore[attr-defined]
MODEL = "Qwen/Qwen2.5-0.5B"


def options_of(command: str) -> set[str]:
    """Long options of a command with underscores, and without dashes."""
    spelled = {name for param in COMMANDS[command].params for name in (*param.opts, *param.secondary_opts)}
    return {name.lstrip("-").replace("-", "_") for name in spelled if name.startswith("--")}


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    """What the command line answers to a usage error."""
    monkeypatch.setattr(sys, "argv", ["tunecast", *typed])
    with pytest.raises(SystemExit) as end:
        main()
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert not captured.out
    return captured.err


@pytest.mark.parametrize("name", FILES)
def test_a_field_of_a_training_file_is_the_option_that_its_reader_takes_it_for(name: str) -> None:
    estimate = options_of("estimate")
    file = read_config(EXAMPLES / name)
    fields: dict[str, set[str]] = {}
    for ours, theirs in file.their_fields.items():
        if ours in OF_DATA:  # which nobody types
            continue
        fields.setdefault(theirs.rsplit(".", 1)[-1], set()).add("packing" if ours == "rows_packed" else ours)
    elsewhere = {theirs: ours for theirs, ours in fields.items() if theirs not in estimate | OF_NO_OPTION}
    assert elsewhere
    for theirs, ours in elsewhere.items():
        told = what_to_type(theirs, estimate, lambda option, _value: option)
        found = re.fullmatch(r"type (\w+) instead", told)
        assert found, (theirs, told)
        assert found.group(1) in ours, (theirs, told)


def test_every_option_that_is_offered_is_one() -> None:
    every = set().union(*(options_of(command) for command in COMMANDS))
    assert {*ELSEWHERE} | {option for values in VALUES.values() for option in values} <= every | {"out"}


@pytest.mark.parametrize("option", sorted(ELSEWHERE))
def test_no_option_is_called_what_another_is(option: str) -> None:
    """A pattern that takes an option's own name would never be asked for it, but might hide a slip of the pen."""
    for other in {*ELSEWHERE} - {option, "device"}:
        assert not re.fullmatch(ELSEWHERE[option], other) or {option, other} <= {"gpu", "device"}


@pytest.mark.parametrize(
    "name",
    [
        "load_in_4bit", "load_in_8bit", "full_finetune", "bf16", "fp16", "use_flash_attention_2", "use_liger_kernel",
        "use_unsloth", "fsdp", "ddp", "zero_stage_3", "zero2",
    ],
)  # fmt: skip
def test_a_value_that_is_offered_is_taken(name: str) -> None:
    told = what_to_type(name, options_of("estimate"), lambda option, value: f"{option}={value}")
    offered = dict(re.findall(r"(\w+)=(\S+)", told))
    assert offered, told
    spread = {"num_gpus": 8} if "sharding" in offered else {}
    forecast = tunecast.estimate(MODEL, gpu="a100-sxm4-80gb", **{"method": "lora"} | offered | spread)
    assert {option: getattr(forecast[0].run, option) for option in offered} == offered


@pytest.mark.parametrize(
    ("name", "value", "typed"),
    [
        ("zero_stage", 3, "sharding=zero3"),
        ("fsdp", "shard_grad_op", "sharding=fsdp-grad-op"),
        ("fsdp_sharding_strategy", "HYBRID_SHARD", "sharding=hsdp"),
        ("strategy", "deepspeed_stage_2", "sharding=zero2"),
        ("mixed_precision", "fp16", "precision=fp16-autocast"),
        ("mixed_precision", "bf16", "precision=bf16-autocast"),
        ("bf16", False, "precision=fp32"),
        ("quantization_bits", 8, "method=qlora and quant_method=bnb-8bit"),
        ("bits", "4", "method=qlora"),
        ("attn", "fa2", "attn_implementation=flash_attention_2"),
        ("lora_target", "all", "lora_target_modules=all-linear"),
        ("recompute", "false", "no_gradient_checkpointing"),
        ("nproc_per_node", 8, "num_gpus"),
    ],
)
def test_what_is_typed_after_a_name_is_heeded(name: str, value: object, typed: str) -> None:
    told = what_to_type(name, options_of("estimate"), lambda o, v: f"{o}={v}" if v else o, value)
    assert told == f"type {typed} instead"
    offered = dict(pair.split("=") for pair in typed.split(" and ") if "=" in pair)
    spread = {"num_gpus": 16} if "sharding" in offered else {}
    assert tunecast.estimate(MODEL, gpu="a100-sxm4-80gb", **{"method": "lora"} | offered | spread)


def test_what_is_off_is_left_out_and_other_programs_settings_are_told_apart() -> None:
    def told(name: str, value: object = "", command: str = "estimate") -> str:
        return what_to_type(name, options_of(command), lambda o, v: f"--{o}={v}" if v else f"--{o}", value)

    assert told("load_in_4bit", False) == "it is off unless something asks for it, so leave it out"
    assert told("recompute_granularity", "selective").startswith("selective is --recompute_attention and full")
    assert told("resume", command="calibrate").endswith("--fresh starts anew")
    assert told("output_dir", command="report") == "type --out instead"
    assert told("output_dir") == "no forecast depends on it, so leave it out"
    assert {told("stage", "sft"), told("ddp_backend", "nccl"), told("template", "llama3")} == {""}


def test_a_switch_with_a_value_is_told_how_it_is_turned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("estimate", MODEL, "--gpu", "l40s")
    assert "takes no value: type it alone, or with --no-" in said(monkeypatch, capsys, *asked, "--packing", "True")
    assert "--packing takes no value" in said(monkeypatch, capsys, *asked, "--packing=true")
    assert said(monkeypatch, capsys, *asked, "--vram", "48").startswith("tunecast: No such option: --vram; type:")


def test_switches_are_true_or_false_in_python() -> None:
    for name in ("use_dora", "packing", "train_only", "p2p"):
        with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} is 'false', but it is a switch; give True"):
            tunecast.estimate(MODEL, gpu="l40s", tokens="1M", **{name: "false"})
    found = tunecast.recommend(MODEL, gpu="l40s", tokens="1M", budget="20", max_gpus=1)
    assert found.limits.budget_usd == 20.0
    with pytest.raises(InputError, match=r"^--budget is '\$20', which is not above 0"):
        tunecast.recommend(MODEL, gpu="l40s", tokens="1M", budget="$20")


def test_the_command_line_says_it_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("estimate", MODEL, "--gpu", "l40s")
    length = said(monkeypatch, capsys, *asked, "--max-seq-length", "512")
    assert length == (
        "tunecast: No such option: --max-seq-length (type --max-length instead); type: tunecast estimate --help\n"
    )
    assert "(type --method qlora instead)" in said(monkeypatch, capsys, *asked, "--load_in_4bit")
    assert "(type --no-gradient-checkpointing instead)" in said(monkeypatch, capsys, *asked, "--no-recompute")
    assert "no forecast depends on it" in said(monkeypatch, capsys, *asked, "--learning-rate", "1e-4")
    assert "(Possible options: --max-length)" in said(monkeypatch, capsys, *asked, "--max-lenght", "512")


def test_each_command_offers_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    global_batch = "--global-batch-size"
    assert "(type --global-batch instead)" in said(monkeypatch, capsys, "recommend", MODEL, global_batch, "64")
    assert "--gradient-accumulation-steps times the GPUs" in said(
        monkeypatch, capsys, "estimate", MODEL, global_batch, "64"
    )
    assert "(type --device instead)" in said(monkeypatch, capsys, "calibrate", "--gpu", "cpu")
    assert "(type --gpu instead)" in said(monkeypatch, capsys, "estimate", MODEL, "--device", "l40s")


def test_options_may_be_written_as_transformers_scripts_write_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = []
    for dash in ("-", "_"):
        typed = [name.replace("-", dash) for name in ("max-length", "per-device-train-batch-size")]
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "tunecast",
                "estimate",
                MODEL,
                "--gpu",
                "l40s",
                "--method",
                "lora",
                f"--{typed[0]}=512",
                f"--{typed[1]}",
                "2",
            ],
        )
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        heads.append(capsys.readouterr().out)
    assert heads[0] == heads[1]
    assert "2 x 512 tokens" in heads[0]


def test_python_and_sweeps_say_it_too() -> None:
    with pytest.raises(InputError, match=r"^Unknown run option 'seq_len'; type max_length instead\.$"):
        tunecast.estimate(MODEL, gpu="l40s", seq_len=512)
    with pytest.raises(InputError, match=r"^Unknown run option 'load_in_4bit'; type method='qlora' instead\.$"):
        tunecast.estimate(MODEL, gpu="l40s", load_in_4bit=True)
    with pytest.raises(InputError, match=r"^Unknown input of a sweep 'seq_len'; type max_length instead\.$"):
        parse_over("seq_len=512,1024")


@pytest.mark.parametrize(
    ("typed", "version"),
    [
        ("--attn=fa3", 3), ("--attn-impl=flash_attention_3", 3), ("--flash-attn=3", 3), ("--use-flash-attention-3", 3),
        ("--attn=fa2", 2), ("--flash-attn=2", 2), ("--attn=flash", 2),
    ],
)  # fmt: skip
def test_flash_attention_is_told_by_the_version_that_was_typed(
    typed: str, version: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said(monkeypatch, capsys, "estimate", MODEL, "--gpu", "h100-sxm5-80gb", typed)
    assert f"--attn-implementation flash_attention_{version}" in told
