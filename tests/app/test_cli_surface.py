"""The command line's surface: exact options, exit codes, and what starting it imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from tunecast.cli.program import program

HELP = {"--help", "-h"}
RUN = {
    "--method",
    "--lora-r",
    "--lora-target-modules",
    "--lora-dropout",
    "--adapter-dtype",
    "--max-length",
    "--attention-length",
    "--padding-mask",
    "--pad-to-multiple-of",
    "--no-padding-mask",
    "--per-device-train-batch-size",
    "--gradient-accumulation-steps",
    "--gradient-checkpointing",
    "--no-gradient-checkpointing",
    "--checkpoint-every",
    "--checkpoint-keeps-ops",
    "--no-checkpoint-keeps-ops",
    "--recompute-attention",
    "--no-recompute-attention",
    "--torch-compile",
    "--no-torch-compile",
    "--optimizer-in-backward",
    "--no-optimizer-in-backward",
    "--compile-loss",
    "--no-compile-loss",
    "--activation-offloading",
    "--no-activation-offloading",
    "--use-dora",
    "--no-use-dora",
    "--use-rslora",
    "--no-use-rslora",
    "--lora-bias",
    "--no-lora-bias",
    "--modules-to-save",
    "--modules-to-save-dtype",
    "--reentrant",
    "--no-reentrant",
    "--optim",
    "--attn-implementation",
    "--loss-type",
    "--dtype",
    "--precision",
    "--bnb-4bit-compute-dtype",
    "--keeps-outputs",
    "--no-keeps-outputs",
    "--token-metrics",
    "--trainer-loop",
    "--no-trainer-loop",
    "--bnb-4bit-quant-type",
    "--double-quant",
    "--no-double-quant",
    "--upcast-non-quantized",
    "--no-upcast-non-quantized",
    "--quant-method",
    "--gptq-kernel",
    "--gptq-group-size",
    "--fused-kernels",
    "--fp8",
    "--fp8-weights",
    "--quantize-moe-experts",
    "--no-quantize-moe-experts",
    "--no-fp8-weights",
    "--checkpoint-first",
    "--hf-code",
    "--master-dtype",
    "--reduce-dtype",
    "--stack",
    "--stack-version",
    "--allow-long-context",
    "--config-format",
    "--accelerate",
    "--deepspeed",
}
AMOUNT = {"--dataset", "--tokens", "--num-samples", "--mean-tokens", "--num-train-epochs", "--max-steps"}
AMOUNT |= {"--padding-free", "--no-padding-free", "--group-by-length", "--no-group-by-length"}
AMOUNT |= {"--packing", "--no-packing", "--tokenizer", "--streaming", "--no-streaming", "--dataloader-num-workers"}
REFUSED_BY_NAME = {"--tp", "--pp", "--cp", "--offload"}
SPLIT = {"--pp-interleave", "--cp-kind", "--async-tp", "--no-async-tp", "--sequence-parallel", "--no-sequence-parallel"}
NODES = SPLIT | {
    "--overlap-comm",
    "--no-overlap-comm",
    "--loads-on-gpu",
    "--no-loads-on-gpu",
    "--reduce-bucket-size",
    "--fsdp-version",
    "--dp-shard-size",
    "--nvlink",
    "--no-nvlink",
    "--p2p",
    "--no-p2p",
    "--serial-fraction",
    "--gpus-per-node",
    "--host-update-gb-per-s",
    "--internode-gbps",
}
NODES |= {"--sync-each-micro-batch", "--no-sync-each-micro-batch"}
MACHINE = {"--gpu", "--num-gpus", "--sharding", "--record", "--achieved-tflops", "--usd-per-gpu-hour", "--prices"}
WHOLE_RUN = {
    "--train-only",
    "--from-scratch",
    "--prepare",
    "--dataset-gb",
    "--data-location",
    "--eval-samples",
    "--eval-steps",
    "--save-steps",
    "--save-total-limit",
    "--merge",
    "--export",
    "--upload",
    "--trials",
    "--early-stopping-fraction",
    "--repeats",
    "--phase-min",
    "--phase-rate",
    "--phase-machine",
    "--billing-granularity-s",
    "--billing-minimum-s",
    "--storage-usd-per-gb-month",
    "--keep-days",
    "--egress-usd-per-gb",
    "--owned",
    "--electricity-usd-per-kwh",
    "--gpu-power-w",
    "--pue",
    "--spot",
    "--interruption-rate-per-month",
    "--checkpoint-interval-min",
    "--restart-min",
    "--seed",
    "--deadline",
}
SEARCH = {
    "--methods",
    "--max-gpus",
    "--global-batch",
    "--budget",
    "--min-fit-confidence",
    "--provider",
    "--region",
    "--purchase",
    "--no-spot",
    "--write",
    "--pick",
    "--plot",
}
OPTIONS = {
    "env": {"--json"},
    "calibrate": {"--device", "--quick", "--full", "--out", "--fresh", "--no-fit", "--num-gpus", "--json"},
    "fit": {"--json"},
    "measure": RUN | {"--device", "--steps", "--num-gpus", "--ignore-memory", "--json"},
    "estimate": RUN
    | AMOUNT
    | MACHINE
    | WHOLE_RUN
    | NODES
    | REFUSED_BY_NAME
    | {"--max-batch", "--max-length-that-fits", "--exact", "--share-host", "--explain", "--json"},
    "recommend": RUN
    | AMOUNT
    | (MACHINE - {"--achieved-tflops"})
    | (WHOLE_RUN - {"--owned", "--electricity-usd-per-kwh", "--gpu-power-w", "--pue"})
    | NODES
    | REFUSED_BY_NAME
    | SEARCH
    | {"--json"},
    "sweep": RUN
    | AMOUNT
    | (MACHINE - {"--achieved-tflops"})
    | (WHOLE_RUN - {"--deadline"})
    | NODES
    | REFUSED_BY_NAME
    | {"--analysis", "--over", "--metric", "--csv", "--plot", "--json"},
    "report": RUN
    | AMOUNT
    | (MACHINE - {"--achieved-tflops"})
    | (WHOLE_RUN - {"--deadline"})
    | NODES
    | REFUSED_BY_NAME
    | {"--out", "--markdown"},
    "compare": {"--plot", "--json"},
    "validate": {"--explain", "--max-median-error", "--config", "--gpu", "--record", "--json"},
    "web": {"--host", "--port"},
    "catalog": {"--gpu", "--prices", "--refresh", "--provider", "--trend", "--plot", "--json"},
}
ARGUMENTS = {
    "env": [],
    "calibrate": [],
    "fit": ["record"],
    "measure": ["model"],
    "estimate": ["model"],
    "recommend": ["model"],
    "sweep": ["model"],
    "report": ["model"],
    "compare": ["records"],
    "validate": ["runs"],
    "catalog": ["what"],
    "web": [],
}
HEAVY = {"torch", "scipy", "matplotlib", "pandas", "transformers", "peft", "bitsandbytes", "pynvml"}
runner = CliRunner()


def commands() -> dict[str, typer.core.TyperCommand]:
    group = typer.main.get_command(program)
    return {name: command for name, command in group.commands.items() if not command.hidden}  # type: ignore[attr-defined]


def parameters(name: str, kind: str) -> list[typer.core.TyperOption]:
    return [p for p in commands()[name].params if p.param_type_name == kind]  # type: ignore[misc]


def test_the_commands_are_exactly_these() -> None:
    assert set(commands()) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_command_has_exactly_these_options(name: str) -> None:
    spelled = {flag for p in parameters(name, "option") for flag in (*p.opts, *p.secondary_opts)}
    assert spelled - HELP == OPTIONS[name]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_command_has_exactly_these_arguments(name: str) -> None:
    assert [p.name for p in parameters(name, "argument")] == ARGUMENTS[name]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_explains_itself_and_help_cuts_none_short(name: str) -> None:
    shown = runner.invoke(program, [name, "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    for flag in OPTIONS[name] - REFUSED_BY_NAME:
        assert flag in shown.output
    assert "…" not in shown.output
    for option in parameters(name, "option"):
        assert option.help or option.hidden


def test_help_names_every_command_and_the_exit_codes() -> None:
    shown = runner.invoke(program, ["--help"], env={"COLUMNS": "80"}).output
    assert all(f"  {name} " in shown for name in OPTIONS)
    assert "..." not in shown.split("Commands:")[1]
    assert all(code in shown for code in ("0 fine", "1 run-time failure", "2 bad input", "3 the answer is no", "130"))


def imported_by(*arguments: str) -> set[str]:
    """Top-level modules imported by one run of the command line in a process of its own."""
    code = (
        "import json, sys\n"
        "from tunecast.cli import main\n"
        f"sys.argv = {['tunecast', *arguments]!r}\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stderr.strip().splitlines()[-1]))


@pytest.mark.parametrize("name", OPTIONS)
def test_help_is_light(name: str) -> None:
    assert not imported_by(name, "--help") & (HEAVY | {"numpy"})


def test_estimate_imports_no_heavy_library() -> None:
    arguments = ("estimate", "meta-llama/Llama-3.1-8B", "--method", "qlora", "--gpu", "all")
    assert not imported_by(*arguments) & HEAVY


def test_env_imports_no_torch() -> None:
    assert not imported_by("env") & (HEAVY - {"pynvml"})


def test_estimate_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    for name in ("torch", "transformers", "peft", "bitsandbytes", "pynvml", "scipy", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    start = "sys.argv = sys.argv[1:]; from tunecast.cli import main; main()"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {start}"
    command = [sys.executable, "-c", code, "tunecast", "estimate", "meta-llama/Llama-3.1-8B", "--gpu", "l4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["gpu"] == "l4-24gb"
