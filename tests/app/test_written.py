"""Written plans: other tools' own schemas accept them, and our readers make the same run of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from schema_check import problems
from typer.testing import CliRunner

from tunecast import estimate, recommend
from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.catalogs.gpus import load_gpus
from tunecast.cli.program import program
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.configs import read_config
from tunecast.model.configs.write import WRITERS, config_for
from tunecast.model.configs.write_back import differences
from tunecast.model.resolve import resolve_run
from tunecast.model.rows import packing_of
from tunecast.model.trained import trainable_params
from tunecast.recommendation import Recommendation
from tunecast.rental_tasks import DSTACK_BACKENDS, RUNPOD_GPUS, SKYPILOT_CLOUDS, SKYPILOT_GPUS, dstack_gpu
from tunecast.written import TRAINING, read_asked_files, with_written, write_plan

SCHEMAS = Path(__file__).resolve().parents[1] / "fixtures" / "schemas"
SCHEMA_OF = {
    "trl": "trl_sft",
    "axolotl": "axolotl",
    "llama-factory": "llama_factory",
    "skypilot": "skypilot_task",
    "dstack": "dstack_task",
}
MODEL = "meta-llama/Llama-3.1-8B"
RUNS: dict[str, dict[str, Any]] = {
    "qlora": {"method": "qlora", "lora_dropout": 0.05, "double_quant": False},
    "lora-ddp": {"method": "lora", "num_gpus": 4, "sharding": "ddp", "lora_target_modules": "q_proj,v_proj"},
    "lora-zero2": {"method": "lora", "num_gpus": 2, "sharding": "zero2", "gradient_checkpointing": False},
    "lora-fsdp": {"method": "lora", "num_gpus": 8, "sharding": "fsdp", "lora_r": 64},
    "full": {"method": "full", "attn_implementation": "flash_attention_2", "optim": "adamw_torch_fused"},
    "full-fsdp": {"method": "full", "num_gpus": 8, "sharding": "fsdp", "reentrant": True},
    "lora-saved": {"method": "lora", "modules_to_save": "embed_tokens,lm_head"},
    "full-zero2": {"method": "full", "num_gpus": 8, "sharding": "zero2"},
    "full-zero3": {"method": "full", "num_gpus": 8, "sharding": "zero3"},
    "lora-zero1": {"method": "lora", "num_gpus": 4, "sharding": "zero1"},
    "qlora-fsdp": {"method": "qlora", "num_gpus": 4, "sharding": "fsdp"},
    "qlora-zero3": {"method": "qlora", "num_gpus": 4, "sharding": "zero3"},
    "full-zero3-all": {"method": "full", "num_gpus": 8, "sharding": "zero3", "offload": "all"},
    "full-zero2-states": {"method": "full", "num_gpus": 8, "sharding": "zero2", "offload": "optimizer"},
    "full-zero1-states": {"method": "full", "num_gpus": 8, "sharding": "zero1", "offload": "optimizer"},
    "full-fsdp-all": {"method": "full", "num_gpus": 8, "sharding": "fsdp", "offload": "all", "reentrant": True},
    "full-alone-all": {"method": "full", "offload": "all"},
    "full-alone-states": {"method": "full", "offload": "optimizer"},
    "full-pure": {"method": "full", "precision": "bf16", "activation_offloading": True},
    "lora-fp16": {"method": "lora", "precision": "fp16-autocast", "dtype": "fp16"},
}
RING = {
    "method": "full",
    "num_gpus": 8,
    "sharding": "fsdp",
    "cp": 4,
    "max_length": 4096,
    "attn_implementation": "flash_attention_2",
}
TILED = {"loss_type": "chunked_nll"}
"""TRL since 1.15 makes tiles of the logits whatever the file says."""
ADMITTED: dict[tuple[str, str], dict[str, Any]] = {
    ("trl", "qlora"): {"adapter_dtype": "bf16"},  # TRL casts the adapters of a 4-bit base
    ("axolotl", "lora-fsdp"): {"master_dtype": None},  # its own FSDP 2 raises nothing
    ("axolotl", "qlora-fsdp"): {"master_dtype": None},
    ("trl", "qlora-zero3"): {"reentrant": True},  # TRL's, of adapters under ZeRO-3
    ("llama-factory", "full-pure"): {"activation_offloading": False},  # no field of it
    ("llama-factory", "lora-saved"): {"modules_to_save_dtype": "fp32"},  # it raises all that trains
}


def schema(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / f"{SCHEMA_OF[kind]}.json").read_text())
    return found


def test_when_one_file_cannot_be_written_none_is(found: Recommendation, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("kept", encoding="utf-8")
    asked = [("trl", tmp_path / "old.yaml"), ("axolotl", tmp_path / "new.yaml"), ("dstack", tmp_path / "no" / "t.yaml")]
    with pytest.raises(InputError, match=r"t\.yaml cannot be written"):
        write_plan(found, asked, "cheapest")
    assert [each.name for each in tmp_path.iterdir()] == ["old.yaml"]
    assert (tmp_path / "old.yaml").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_training_file_says_the_whole_run_or_what_it_does_otherwise(kind: str, name: str, packed: bool) -> None:
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {**RUNS[name], "max_length": 2048, "gradient_accumulation_steps": 4}).run
    if kind != "trl" and run.num_gpus == 1 and run.offload != "none":
        with pytest.raises(NotSupportedError, match="on one GPU is not built yet; write trl=FILE"):
            config_for(kind, architecture, run, 250, packed=packed)
        return
    if kind == "llama-factory" and run.sharding == "fsdp":
        with pytest.raises(NotSupportedError, match="loads the whole model on every GPU before FSDP shares it"):
            config_for(kind, architecture, run, 250, packed=packed)
        return
    written = yaml.safe_load(yaml.safe_dump(config_for(kind, architecture, run, 250, packed=packed)))
    assert list(problems(written, schema(kind))) == []
    tiled = TILED if kind == "trl" else {}
    filled = {} if packed or kind != "llama-factory" else {"pad_to_multiple_of": 8}  # whatever its file says
    found = differences(kind, written, architecture, run, packed=packed)
    assert found == {**ADMITTED.get((kind, name), {}), **tiled, **filled}


@pytest.mark.parametrize(
    ("kind", "multiple", "said", "otherwise"),
    [
        ("trl", 1, {}, None),
        ("trl", 96, {"pad_to_multiple_of": 96}, None),
        ("axolotl", 1, {"pad_to_sequence_len": False}, None),
        ("axolotl", 64, {}, None),
        ("axolotl", 96, {}, 64),
        ("axolotl", 2048, {"pad_to_sequence_len": True}, None),
        ("llama-factory", 8, {}, None),
        ("llama-factory", 64, {}, 8),
    ],
)
def test_a_file_fills_rows_as_the_plan_does_or_a_note_says_otherwise(
    kind: str, multiple: int, said: dict[str, Any], otherwise: int | None
) -> None:
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {"method": "lora", "max_length": 2048, "pad_to_multiple_of": multiple}).run
    written = config_for(kind, architecture, run, 250, packed=False)
    assert {name: value for name, value in written.items() if name.startswith("pad_to")} == said
    assert differences(kind, written, architecture, run, packed=False).get("pad_to_multiple_of") == otherwise


@pytest.mark.parametrize("kind", ["trl", "axolotl"])
def test_a_file_of_the_plans_own_framework_is_no_other_stack(kind: str) -> None:
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {"method": "lora", "stack": kind}).run
    assert "stack" not in differences(kind, config_for(kind, architecture, run, 10), architecture, run)


def test_kernels_and_loss_of_liger_are_said_to_axolotl() -> None:
    architecture = load_architecture(MODEL)
    for stack, loss in (("liger", "liger"), ("axolotl", "cut_cross_entropy"), ("axolotl", "liger")):
        run = resolve_run(architecture, {"method": "qlora", "stack": stack, "loss_type": loss}).run
        written = config_for("axolotl", architecture, run, 10)
        of_plugins = {name: value for name, value in written.items() if name.startswith(("plugins", "liger_"))}
        own = {name: value for name, value in written.items() if name not in of_plugins}
        assert list(problems(own, schema("axolotl"))) == []  # plugins bring fields of their own
        assert of_plugins["plugins"]
        assert differences("axolotl", written, architecture, run) == {}


def test_a_file_keeps_the_weights_and_epochs_that_were_asked_for(tmp_path: Path) -> None:
    """axolotl ends after its epochs, one unless it is told, whatever max_steps says."""
    source = tmp_path / "own.yml"
    source.write_text(
        "base_model: mistralai/Mistral-Small-24B-Instruct-2501\nload_in_4bit: true\nadapter: qlora\n"
        "lora_r: 16\nlora_alpha: 8\nlora_target_linear: true\nsequence_len: 2048\nsample_packing: true\n"
        "micro_batch_size: 2\nnum_epochs: 3\n"
        "datasets: [{path: mine, type: alpaca}]\nlearning_rate: 0.0001\n",
        encoding="utf-8",
    )
    plan = recommend(str(source), gpu="h100-sxm5-80gb", max_gpus=1, tokens="1M")
    files = {kind: tmp_path / f"{kind}.yaml" for kind in TRAINING}
    write_plan(plan, read_asked_files([f"{kind}={path}" for kind, path in files.items()], "cheapest"), "cheapest")
    for kind, path in files.items():
        text = path.read_text(encoding="utf-8")
        assert "Mistral-Small-24B-Instruct-2501" in text
        assert "learning rate" in text.partition("base_model")[0]
        (again,) = estimate(str(path), gpu="h100-sxm5-80gb", tokens="1M", num_gpus=1)
        assert plan.cheapest is not None
        if kind != "llama-factory":  # which the catalog's rows of padded samples would move
            assert again.total_time_h is not None
            own = plan.cheapest.forecast.total_time_h
            assert own is not None
            assert again.total_time_h.value == pytest.approx(own.value, rel=0.15)


def test_packages_that_a_plan_counts_on_are_installed_and_forecast(tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "lora", "max_length": 512, "tokens": "1M", "gpu": "l40s-48gb", "max_gpus": 1}
    plan = recommend("Qwen/Qwen3.5-0.8B", fused_kernels="fla,causal-conv1d", **options)
    asked = read_asked_files([f"{kind}={tmp_path / kind}.yaml" for kind in ("trl", "dstack")], "cheapest")
    training, task = write_plan(plan, asked, "cheapest")
    assert not any("fused_kernels is" in note for note in training.notes)
    assert any("pip install flash-linear-attention causal-conv1d" in note for note in training.notes)
    commands = yaml.safe_load(task.path.read_text())["commands"]
    assert commands[1].endswith("flash-linear-attention causal-conv1d")
    assert "--fused-kernels fla,causal-conv1d" in next(line for line in commands if "estimate" in line)


@pytest.mark.parametrize("kind", ["trl", "axolotl", "llama-factory"])
@pytest.mark.parametrize(("sharding", "installed"), [("zero1", True), ("ddp", False)])
def test_deepspeed_is_installed_where_the_training_file_starts_it(
    kind: str, sharding: str, installed: bool, tmp_path: Path
) -> None:
    """It is an extra of every trainer (TRL's ``deepspeed``, LLaMA-Factory's, axolotl's)."""
    options: dict[str, Any] = {"method": "lora", "max_length": 2048, "tokens": "1M", "gpu": "l40s-48gb", "max_gpus": 2}
    plan = recommend("Qwen/Qwen2.5-1.5B", sharding=sharding, **options)
    asked = read_asked_files([f"{each}={tmp_path / each}.yaml" for each in (kind, "dstack")], "fastest")
    _, task = write_plan(plan, asked, "fastest")
    commands = yaml.safe_load(task.path.read_text())["commands"]
    assert plan.fastest.candidate.num_gpus == 2
    assert ("deepspeed" in commands[1].split()) is installed


def test_axolotl_is_told_of_sequences_that_gpus_split() -> None:
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {**RING, "stack": "axolotl"}).run
    written = yaml.safe_load(yaml.safe_dump(config_for("axolotl", architecture, run, 250)))
    assert list(problems(written, schema("axolotl"))) == []
    assert written["context_parallel_size"] == 4
    assert differences("axolotl", written, architecture, run) == {}
    for kind in ("trl", "llama-factory"):
        with pytest.raises(NotSupportedError, match="write axolotl=FILE, or --cp 1"):
            config_for(kind, architecture, run, 250)


def test_axolotl_splits_packed_rows_one_at_a_time() -> None:
    """``check_context_parallel_size`` of its schema."""
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {**RING, "per_device_train_batch_size": 2}).run
    with pytest.raises(NotSupportedError, match="add --per-device-train-batch-size 1"):
        config_for("axolotl", architecture, run, 250)


WIDE: dict[str, Any] = {"method": "lora", "max_length": 8192, "tokens": "10M", "gpu": "rtx-4090-24gb", "max_gpus": 1}
"""Logits decide whether such a run fits the card."""


@pytest.mark.parametrize(
    ("kind", "asked", "runs", "cure"),
    [
        ("axolotl", {"loss_type": "chunked_nll"}, "loss_type nll", "--stack axolotl --loss-type cut_cross_entropy"),
        ("llama-factory", {"loss_type": "chunked_nll"}, "loss_type nll", "--stack liger"),
    ],
)
def test_a_file_whose_own_run_does_not_fit_is_refused(
    kind: str, asked: dict[str, Any], runs: str, cure: str, tmp_path: Path
) -> None:
    plan = recommend("meta-llama/Llama-3.1-8B", **WIDE, **asked)
    path = tmp_path / "f.yaml"
    with pytest.raises(NotSupportedError, match=f"does not fit 1 x rtx-4090-24gb, .*{runs}.*type {cure}"):
        write_plan(plan, [(kind, path)], "cheapest")
    assert not path.exists()
    words = cure.split()
    stated = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    cured = recommend("meta-llama/Llama-3.1-8B", **WIDE, **stated, written=(kind,))
    assert cured.cheapest is not None
    write_plan(cured, [(kind, path)], "cheapest")
    (again,) = estimate(path, gpu="rtx-4090-24gb", tokens="10M")
    assert again.verdict == "fits"
    assert again.cost_usd is not None
    assert cured.cheapest.forecast.step_time_s is not None
    assert again.step_time_s is not None
    assert again.step_time_s.value == pytest.approx(cured.cheapest.forecast.step_time_s.value)


def test_a_file_that_runs_otherwise_has_a_forecast_of_its_own(tmp_path: Path) -> None:
    """TRL makes tiles of the logits, the plain Trainer does not."""
    options: dict[str, Any] = {"method": "full", "tokens": "10M", "gpu": "l40s-48gb", "max_gpus": 1}
    plan, path = recommend("gpt2", **options), tmp_path / "t.yaml"
    (written,) = write_plan(plan, [("trl", path)], "cheapest")
    told = next(note for note in written.notes if note.startswith("so this file's own forecast is "))
    (again,) = estimate(path, gpu="l40s-48gb", tokens="10M")
    assert again.total_time_h is not None
    assert f"{again.total_time_h.value:.2f} h" in told


def test_a_plan_that_is_written_for_trl_alone_is_planned_as_trl_runs_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "full", "tokens": "10M", "gpu": "l40s-48gb", "max_gpus": 1}
    plan, path = recommend("gpt2", **options, written=("trl",)), tmp_path / "t.yaml"
    assert plan.cheapest is not None
    assert plan.cheapest.forecast.run.stack == "trl"
    assert any("--stack hf-peft" in note for note in plan.notes)
    (written,) = write_plan(plan, [("trl", path)], "cheapest")
    assert not [note for note in written.notes if "forecast" in note]
    for asked in ({"stack": "hf-peft"}, {"loss_type": "nll"}):
        own = recommend("gpt2", **options, **asked, written=("trl",)).cheapest
        assert own is not None
        assert own.forecast.run.stack == "hf-peft"
    both = recommend("gpt2", **options, written=("trl", "axolotl")).cheapest
    assert both is not None
    assert both.forecast.run.stack == "hf-peft"


def test_plans_that_the_file_cannot_say_are_left_out() -> None:
    """At 65,536 tokens one H100 has no room, and rows in parts, which LLaMA-Factory has not, have."""
    options: dict[str, Any] = {"method": "lora", "max_length": 65536, "tokens": "10M", "gpu": "h100-sxm5-80gb"}
    free = recommend(MODEL, **options).cheapest
    assert free is not None
    assert free.forecast.run.cp > 1
    tiled = recommend(MODEL, **options, stack="liger", written=("llama-factory",))
    assert tiled.cheapest is not None
    assert {picked.forecast.run.cp for picked in tiled.front} == {1}
    assert any("cannot say were left out" in note for note in tiled.notes)
    none = recommend(MODEL, **options, written=("llama-factory",))
    assert none.cheapest is None
    split = recommend(MODEL, **options, attn_implementation="flash_attention_2", written=("axolotl",)).cheapest
    assert split is not None
    assert config_for("axolotl", split.forecast.architecture, split.forecast.run, 10)["context_parallel_size"] > 1


def test_sharding_that_the_file_cannot_say_is_not_planned(tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "full", "tokens": "10M", "gpu": "h100-sxm5-80gb", "max_length": 2048}
    plan = recommend(MODEL, **options, written=("llama-factory",))
    assert plan.cheapest is not None
    assert plan.cheapest.forecast.run.sharding == "zero3"
    write_plan(plan, [("llama-factory", tmp_path / "l.yaml")], "cheapest")


def test_deepspeed_is_installed_where_it_offloads_on_one_gpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": "lora", "max_length": 2048, "tokens": "1M", "gpu": "l40s-48gb", "max_gpus": 1}
    plan = recommend("Qwen/Qwen2.5-1.5B", offload="optimizer", **options)
    asked = read_asked_files([f"{each}={tmp_path / each}.yaml" for each in ("trl", "dstack")], "cheapest")
    training, task = write_plan(plan, asked, "cheapest")
    assert yaml.safe_load(training.path.read_text())["offload_optimizer_device"] == "cpu"
    assert "deepspeed" in yaml.safe_load(task.path.read_text())["commands"][1].split()


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ({"num_gpus": 8, "tp": 2}, "plan with --tp 2 is not built yet; add --tp 1"),
        ({"num_gpus": 8, "cp": 4, "max_length": 4096}, "add --attn-implementation flash_attention_2 and write axolotl"),
        ({"num_gpus": 8, "cp": 4, "max_length": 4096, "cp_kind": "ulysses"}, "--cp 4 is not built yet; add --cp 1"),
        ({"num_gpus": 16, "sharding": "hsdp"}, "--sharding hsdp .* use --sharding fsdp"),
        ({"num_gpus": 8, "sharding": "fsdp-grad-op"}, "--sharding fsdp-grad-op .* use --sharding fsdp"),
    ],
)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_layout_that_no_training_file_says_is_refused(kind: str, asked: dict[str, Any], instead: str) -> None:
    architecture = load_architecture(MODEL)
    run = resolve_run(architecture, {"method": "full", **asked}).run
    with pytest.raises(NotSupportedError, match=instead):
        config_for(kind, architecture, run, 1)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_weights_in_16_bits_are_not_raised_by_the_launchers_preset(sharding: str) -> None:
    """All of TRL's own accelerate files say bf16, which the Trainer takes where ``bf16`` of its file is false."""
    architecture = load_architecture(MODEL)
    run = resolve_run(
        architecture, {"method": "full", "precision": "bf16", "num_gpus": 8, "sharding": sharding, "max_length": 2048}
    ).run
    written = config_for("trl", architecture, run, 10)
    assert {"precision", "master_dtype"} & set(differences("trl", written, architecture, run)) == set()
    del written["mixed_precision"]
    assert differences("trl", written, architecture, run)["precision"] == "bf16-autocast"


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_named_so_that_peft_finds_them(model_type: str) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=2)
    name = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[model_type]
    architecture = architecture_from_config(config.to_dict() | {"architectures": [name]}, model_type)
    run = resolve_run(architecture, {"method": "lora", "lora_target_modules": "all-linear", "lora_r": 8}).run
    named = config_for("axolotl", architecture, run, 10)["lora_target_modules"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        real = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=named))
    assert trainable_params(architecture, run) == sum(p.numel() for p in real.parameters() if p.requires_grad)
    with pytest.raises(NotSupportedError, match="llama-factory file cannot ask for adapters on stacked experts"):
        config_for("llama-factory", architecture, run, 10)


@pytest.mark.parametrize("kind", ["skypilot", "dstack"])
def test_a_task_of_several_machines_is_refused_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    plan = recommend(
        "meta-llama/Llama-3.1-70B", method="full", max_length=4096, tokens="20M", gpu="h100-sxm5-80gb", num_gpus=16
    )
    asked = read_asked_files([f"trl={tmp_path / 't.yaml'}", f"{kind}={tmp_path / 'task.yaml'}"], "fastest")
    with pytest.raises(NotSupportedError, match=r"2 machines is not built yet.*--max-gpus 8"):
        write_plan(plan, asked, "fastest")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def found() -> Recommendation:
    cards = ["l40s-48gb", "a100-sxm4-80gb"]
    asked: dict[str, Any] = {"method": "lora", "max_length": 512, "tokens": "20M", "sharding": "ddp"}
    return recommend("Qwen/Qwen2.5-0.5B", gpu=cards, max_gpus=2, **asked)


def test_tasks_pass_the_tools_schemas_and_measure_before_they_train(found: Recommendation, tmp_path: Path) -> None:
    asked = read_asked_files([f"{kind}={tmp_path / kind}.yaml" for kind in SCHEMA_OF], "fastest")
    written = write_plan(found, asked, "fastest")
    assert [each.kind for each in written] == list(SCHEMA_OF)
    for each in written:
        loaded = yaml.safe_load(each.path.read_text())
        assert list(problems(loaded, schema(each.kind))) == [], each.kind
    assert found.fastest is not None
    sky, dstack = (yaml.safe_load((tmp_path / f"{kind}.yaml").read_text()) for kind in ("skypilot", "dstack"))
    for lines in (sky["run"].splitlines(), dstack["commands"]):
        order = [
            next(i for i, line in enumerate(lines) if word in line) for word in ("calibrate", "estimate", "trl sft")
        ]
        assert order == sorted(order)
    assert sky["resources"]["accelerators"].endswith(f":{found.fastest.candidate.num_gpus}")
    assert dstack["resources"]["gpu"]["count"] == found.fastest.candidate.num_gpus
    told = with_written(found, written)
    assert sum("wrote " in note for note in told.notes) == len(SCHEMA_OF)


def test_a_written_training_file_is_read_by_estimate_as_the_plan(found: Recommendation, tmp_path: Path) -> None:
    (written,) = write_plan(found, read_asked_files([f"axolotl={tmp_path / 'train.yml'}"], "cheapest"), "cheapest")
    assert found.cheapest is not None
    run = found.cheapest.forecast.run
    options = read_config(written.path).options
    for name in ("method", "max_length", "per_device_train_batch_size", "gradient_accumulation_steps", "lora_r"):
        assert options[name] == getattr(run, name), name
    assert found.steps.startswith(f"{options['max_steps']:,} steps")
    assert written.path.read_text().startswith("# Qwen/Qwen2.5-0.5B on ")


@pytest.mark.parametrize("kind", WRITERS)
def test_a_written_file_makes_rows_as_the_plan_counts_them(kind: str, tmp_path: Path) -> None:
    """4,000 samples of 100 tokens, in rows of their own or filling rows of 512: the file's reader counts as many."""
    data: dict[str, Any] = {"num_samples": 4000, "mean_tokens": 100}
    for name, packing in (("alone", None), ("packed", True)):
        plan = recommend(
            "Qwen/Qwen2.5-0.5B", method="lora", max_length=512, gpu="l40s-48gb", max_gpus=1, packing=packing, **data
        )
        (written,) = write_plan(plan, read_asked_files([f"{kind}={tmp_path / name}.yaml"], "cheapest"), "cheapest")
        options = read_config(written.path).options
        assert packing_of({**options, **data}) is bool(packing)
        assert plan.steps.startswith(f"{options['max_steps']:,} steps")


AS_ASKED: dict[str, dict[str, Any]] = {
    "sorted by length": {"method": "lora", "group_by_length": True},
    "end to end": {
        "method": "lora",
        "padding_free": True,
        "packing": False,
        "attn_implementation": "flash_attention_2",
    },
    "sorted and end to end": {
        "method": "lora",
        "padding_free": True,
        "packing": False,
        "attn_implementation": "flash_attention_2",
        "group_by_length": True,
    },
    "over 8 bits": {"method": "qlora", "quant_method": "bnb-8bit"},
    "compiled": {"method": "lora", "torch_compile": True},
    "with checkpoints": {"method": "full", "save_steps": 20},
}


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        pytest.param(kind, what, marks=pytest.mark.thorough if what == "compiled" and kind != "trl" else [])
        for kind in WRITERS
        for what in AS_ASKED
    ],
)
def test_a_written_file_takes_the_time_of_its_plan(kind: str, what: str, tmp_path: Path) -> None:
    """The file, with the amount of data, is forecast as the plan was."""
    if kind == "llama-factory" and "end to end" in what:
        pytest.skip("has no field for it, and is refused")
    data: dict[str, Any] = {"num_samples": 2000, "mean_tokens": 200}
    on = {"gpu": "a100-sxm4-80gb", "max_length": 1024, "stack": kind, "gradient_checkpointing": True}
    plan = recommend("Qwen/Qwen2.5-0.5B", max_gpus=1, global_batch=16, **data, **on, **AS_ASKED[what])
    (written,) = write_plan(plan, read_asked_files([f"{kind}={tmp_path / 'run.yaml'}"], "cheapest"), "cheapest")
    assert plan.cheapest is not None
    picked = plan.cheapest.forecast
    assert picked.step_time_s is not None
    (back,) = estimate(str(written.path), gpu="a100-sxm4-80gb", stack=kind, **data)
    assert back.step_time_s is not None
    assert back.step_time_s.value == pytest.approx(picked.step_time_s.value, rel=0.01)
    assert back.memory.allocated_bytes.value == pytest.approx(picked.memory.allocated_bytes.value, rel=0.01)
    assert back.total_time_h is not None
    assert picked.total_time_h is not None
    assert back.total_time_h.value == pytest.approx(picked.total_time_h.value, rel=0.01)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_plan_on_an_interruptible_machine_saves_as_often_as_it_is_priced(kind: str, tmp_path: Path) -> None:
    asked = {"gpu": "a100-sxm4-80gb", "max_gpus": 1, "spot": True, "interruption_rate_per_month": 0.9}
    plan = recommend("Qwen/Qwen2.5-7B", method="lora", tokens="2B", max_length=1024, stack=kind, **asked)
    (written,) = write_plan(plan, read_asked_files([f"{kind}={tmp_path / 'run.yaml'}"], "cheapest"), "cheapest")
    assert plan.cheapest is not None
    picked = plan.cheapest.forecast
    assert picked.whole_run is not None
    assert picked.whole_run.interruptions is not None
    assert picked.step_time_s is not None
    found = yaml.safe_load(written.path.read_text())
    minutes = found["save_steps"] * picked.step_time_s.value / 60
    assert minutes == pytest.approx(picked.whole_run.interruptions.interval_min, rel=0.01)
    resumes = found.get("auto_resume_from_checkpoints") or any("resume_from_checkpoint" in n for n in written.notes)
    assert resumes or kind == "llama-factory", "or the price is that of another run"  # which resumes by itself


def test_a_written_file_cuts_the_samples_that_the_plan_cuts(tmp_path: Path) -> None:
    """200 samples of 5,000 tokens and 200 of 500 in rows of 2,048: TRL's ``bfd`` alone makes as few rows of them."""
    data = tmp_path / "long.jsonl"
    lines = [json.dumps({"input_ids": [1] * length}) + "\n" for length in (5000, 500)]
    data.write_text("".join(lines * 200), encoding="utf-8")
    plan = recommend(
        "Qwen/Qwen2.5-0.5B",
        method="lora",
        max_length=2048,
        gpu="l40s-48gb",
        max_gpus=1,
        packing=True,
        dataset=str(data),
    )
    asked = [f"{kind}={tmp_path / kind}.yaml" for kind in WRITERS]
    written = {each.kind: each for each in write_plan(plan, read_asked_files(asked, "cheapest"), "cheapest")}
    trl = read_config(written["trl"].path)
    assert "long_samples" not in trl.options
    assert (trl.options["max_steps"], plan.steps.partition(" ")[0]) == (249, "249")
    assert "samples are cut at 2048 tokens, as the forecast counts them" in written["trl"].path.read_text()
    assert "excess_length_strategy: truncate" in written["axolotl"].path.read_text()
    assert any("type completion makes pieces" in note for note in written["axolotl"].notes)
    data.write_text(lines[1] * 200, encoding="utf-8")
    plan = recommend(
        "Qwen/Qwen2.5-0.5B", method="lora", max_length=2048, gpu="l40s-48gb", packing=True, dataset=str(data)
    )
    (short,) = write_plan(plan, read_asked_files([f"trl={tmp_path}/short.yaml"], "cheapest"), "cheapest")
    assert "packing_strategy: wrapped" in short.path.read_text(), "nothing is cut: rows are full"


def test_a_task_alone_gets_a_training_file_beside_it(found: Recommendation, tmp_path: Path) -> None:
    written = write_plan(found, read_asked_files([f"dstack={tmp_path / 'rent.dstack.yml'}"], "balance"), "balance")
    assert [each.path.name for each in written] == ["rent-train.yaml", "rent.dstack.yml"]
    assert "rent-train.yaml" in (tmp_path / "rent.dstack.yml").read_text()


@pytest.mark.parametrize(
    ("texts", "pick", "words"),
    [(["trll=a.yaml"], "cheapest", "trll"), (["trl=a.txt"], "cheapest", "YAML"), ([], "best", "best")],
)
def test_what_cannot_be_written_is_refused_before_any_work(texts: list[str], pick: str, words: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=words):
        read_asked_files(texts, pick)


@pytest.mark.parametrize("as_json", [False, True])
def test_an_answer_stands_though_a_file_of_it_cannot_be_written(as_json: bool, tmp_path: Path) -> None:
    file, folder = tmp_path / "t.yaml", tmp_path / "taken.yaml"
    folder.mkdir()
    asked = ["recommend", "Qwen/Qwen2.5-0.5B", "--method", "lora", "--max-length", "512", "--tokens", "20M"]
    asked += ["--gpu", "l40s", "--max-gpus", "1", "--write", f"trl={file}", "--write", f"axolotl={folder}"]
    done = CliRunner().invoke(program, [*asked, *(["--json"] if as_json else [])])
    assert done.exit_code == 2
    assert "taken.yaml cannot be written" in done.stderr
    assert not file.exists()
    if as_json:
        answer = json.loads(done.stdout)
        assert answer["cheapest"] is not None
        assert "written" not in answer
    else:
        assert "cheapest" in done.stdout


def test_names_of_cards_and_providers_are_the_tools_own() -> None:
    gpus = load_gpus()
    assert set(SKYPILOT_GPUS) <= set(gpus)
    clouds = schema("skypilot")["properties"]["resources"]["properties"]["infra"]
    assert all(list(problems(cloud, clouds)) == [] for cloud in SKYPILOT_CLOUDS.values())
    assert set(DSTACK_BACKENDS.values()) <= set(schema("dstack")["properties"]["backends"]["items"]["enum"])
    expected = {
        "h100-sxm5-80gb": "H100", "rtx-4090-24gb": "RTX4090", "rtx-6000-ada-48gb": "RTX6000Ada", "l40s-48gb": "L40S",
        "rtx-a6000-48gb": "A6000", "rtx-4070-ti-super-16gb": "RTX4070TiSUPER", "mi300x-192gb": "MI300X",
        "rtx-pro-6000-blackwell-server-96gb": "RTXPRO6000", "h100-nvl-94gb": "H100NVL", "v100-sxm2-16gb": "V100",
    }  # fmt: skip
    assert {gpu: dstack_gpu(gpu) for gpu in expected} == expected
    assert set(RUNPOD_GPUS) <= set(SKYPILOT_GPUS)


@pytest.mark.parametrize(("provider", "name"), [("lambda", "H100"), ("runpod", "H100-SXM")])
def test_skypilot_asks_a_cloud_by_its_own_name_of_a_card(provider: str, name: str, tmp_path: Path) -> None:
    plan = recommend(
        "Qwen/Qwen2.5-0.5B", method="lora", tokens="1M", gpu="h100-sxm5-80gb", max_gpus=1, provider=provider
    )
    *_, task = write_plan(plan, read_asked_files([f"skypilot={tmp_path}/s.yaml"], "cheapest"), "cheapest")
    assert yaml.safe_load(task.path.read_text())["resources"]["accelerators"] == f"{name}:1"


def test_dstack_finds_the_cards_that_are_offered_under_these_names() -> None:
    constraints = pytest.importorskip("gpuhunt._internal.constraints")
    known = {gpu.name for gpu in (*constraints.KNOWN_NVIDIA_GPUS, *constraints.KNOWN_AMD_GPUS)}
    sold = (
        "a10-24gb",
        "a40-48gb",
        "a100-sxm4-80gb",
        "rtx-a5000-24gb",
        "rtx-a4000-16gb",
        "h200-sxm5-141gb",
        "b200-sxm-180gb",
    )
    assert {dstack_gpu(gpu) for gpu in sold} <= known


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize("steps", [1, 4])
def test_what_a_preset_of_trl_states_is_what_its_file_says(sharding: str, steps: int) -> None:
    """accelerate hands a preset's accumulation on to DeepSpeed, and the Trainer refuses another than its own."""
    presets = pytest.importorskip("trl").__path__[0]
    asked = {"method": "lora", "num_gpus": 4, "sharding": sharding, "gradient_accumulation_steps": steps}
    run = resolve_run(load_architecture(MODEL), asked).run
    written = config_for("trl", load_architecture(MODEL), run, 10)
    preset = yaml.safe_load((Path(presets) / "accelerate_configs" / f"{written['accelerate_config']}.yaml").read_text())
    stated = preset.get("deepspeed_config", {}).get("gradient_accumulation_steps", steps)
    assert stated in (steps, "auto")
    stage = preset.get("deepspeed_config", written.get("deepspeed", {}).get("zero_optimization", {}))
    assert stage.get("zero_stage", stage.get("stage")) == (int(sharding[-1]) if "zero" in sharding else None)


@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_a_base_in_four_bits_is_stored_in_numbers_that_can_be_shared(sharding: str, tmp_path: Path) -> None:
    run = resolve_run(load_architecture(MODEL), {"method": "qlora", "num_gpus": 4, "sharding": sharding}).run
    written = config_for("trl", load_architecture(MODEL), run, 10)
    assert written.pop("bnb_4bit_quant_storage") == "bfloat16"
    file = tmp_path / "bytes.yaml"
    file.write_text(yaml.safe_dump(written), encoding="utf-8")
    if sharding == "fsdp":
        with pytest.raises(InputError, match="stores it in bytes, which FSDP does not shard"):
            read_config(file)


def test_a_task_on_an_interruptible_machine_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    asked = {"gpu": "a100-sxm4-80gb", "max_gpus": 1, "spot": True, "interruption_rate_per_month": 0.9}
    plan = recommend("Qwen/Qwen2.5-7B", method="lora", tokens="2B", max_length=1024, **asked)
    names = [f"{kind}={tmp_path / kind}.yaml" for kind in ("trl", "skypilot")]
    write_plan(plan, read_asked_files(names, "cheapest"), "cheapest")
    task = yaml.safe_load((tmp_path / "skypilot.yaml").read_text())
    assert list(problems(task, schema("skypilot"))) == []
    ((mounted, bucket),) = task["file_mounts"].items()
    output = yaml.safe_load((tmp_path / "trl.yaml").read_text())["output_dir"]
    assert f"ln -sfn {mounted} {output}" in task["run"]
    assert bucket["name"].startswith("tunecast-qwen2-5-7b-")
    resumed = 'trl() { echo "$@"; }\n' + "\n".join(task["run"].splitlines()[-2:])
    for made, told in (([], ""), ([9, 10, 100], f" --resume_from_checkpoint {output}/checkpoint-100")):
        for number in made:
            (tmp_path / output / f"checkpoint-{number}").mkdir(parents=True)
        done = subprocess.run(["bash", "-c", resumed], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == f"sft --config trl.yaml{told}\n"
    with pytest.raises(NotSupportedError, match="a volume of yours that outlives it"):
        write_plan(plan, read_asked_files([f"dstack={tmp_path}/d.yaml"], "cheapest"), "cheapest")


def test_the_disk_of_a_task_holds_what_the_training_saves(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"method": "full", "gpu": "h200-sxm5-141gb", "max_gpus": 1, "max_length": 2048}
    disks = {}
    for name, more in (
        ("none", {}),
        ("all", {"save_steps": 100}),
        ("last", {"save_steps": 100, "save_total_limit": 1}),
    ):
        plan = recommend(MODEL, tokens="2M", global_batch=2, **asked, **more)
        *_, task = write_plan(plan, read_asked_files([f"skypilot={tmp_path}/{name}.yaml"], "cheapest"), "cheapest")
        disks[name] = yaml.safe_load(task.path.read_text())["resources"]["disk_size"]
        saves = yaml.safe_load((tmp_path / f"{name}-train.yaml").read_text())["save_strategy"]
        assert saves == ("steps" if more else "no")
    assert plan.cheapest is not None
    assert plan.cheapest.forecast.whole_run is not None
    checkpoint_gb = 3 * 16.06  # weights and two moments in bf16
    made = -(-int(plan.steps.split()[0].replace(",", "")) // 100)
    assert disks["all"] - disks["none"] == pytest.approx(made * checkpoint_gb, abs=2.0)
    assert disks["last"] - disks["none"] == pytest.approx(2 * checkpoint_gb, abs=2.0)


def test_a_task_installs_what_its_training_file_switches_on(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"method": "lora", "tokens": "2M", "gpu": "h200-sxm5-141gb", "max_gpus": 1}
    for kind, package, more in (
        ("trl", "liger-kernel", {"stack": "liger"}),
        ("trl", "torchao", {"optim": "adamw_torch_8bit"}),
        ("axolotl", "ml-cross-entropy.git", {"stack": "axolotl", "loss_type": "cut_cross_entropy"}),
    ):
        plan = recommend("Qwen/Qwen2.5-0.5B", max_length=1024, **asked, **more)
        names = [f"{each}={tmp_path / each}.yaml" for each in (kind, "skypilot")]
        write_plan(plan, read_asked_files(names, "cheapest"), "cheapest")
        assert package in yaml.safe_load((tmp_path / "skypilot.yaml").read_text())["setup"]


@pytest.mark.parametrize("kind", WRITERS)
def test_adapters_of_a_model_that_sees_are_those_of_its_decoder(kind: str) -> None:
    """PEFT on a tiny Gemma 3 as transformers loads it, whose vision tower has maps of the same names."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    seeing = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**text, **heads}, vision_config={**seeing, "image_size": 28, "patch_size": 14}
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    architecture = load_architecture("google/gemma-3-4b-pt")
    run = resolve_run(architecture, {"method": "lora", "max_length": 512}).run
    written = config_for(kind, architecture, run, 10, sees=True)
    assert differences(kind, written, architecture, run) == (TILED if kind == "trl" else {})
    if kind == "llama-factory":
        assert written["lora_target"] == "all"
        return
    asked = written["lora_target_modules"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=asked[0] if kind == "trl" else asked))
    found = {name.rpartition(".lora_A")[0] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert len(found) == 2 * 7
    assert all(".language_model.layers." in name for name in found)
