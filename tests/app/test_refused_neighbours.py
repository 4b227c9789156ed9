"""Neighbouring uses that the known cases mention in passing are refused by name, in one sentence."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from tunecast.catalogs.errors import NotSupportedError, UnknownNameError
from tunecast.catalogs.gpus import find_gpu, load_gpus
from tunecast.catalogs.models import find_model, load_models, model_aliases
from tunecast.catalogs.refused import refuse_hardware, refuse_network
from tunecast.cli.program import program

MODEL = "meta-llama/Llama-3.2-1B"


def says(*arguments: str) -> str:
    done = CliRunner().invoke(program, arguments, env={"HF_HUB_OFFLINE": "1"})
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    (line,) = done.output.strip().splitlines()
    return line


@pytest.mark.parametrize("command", ["estimate", "recommend", "sweep"])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["stabilityai/stable-diffusion-xl-base-1.0", "--gpu", "l40s"], "Stable Diffusion"),
        (["runwayml/stable-diffusion-v1-5", "--gpu", "l40s"], "Stable Diffusion"),
        ([MODEL, "--gpu", "tpu-v5e"], "TPUs are not built"),
        ([MODEL, "--gpu", "l40s", "--method", "inference"], "Inference is not built"),
        ([MODEL, "--gpu", "l40s", "--method", "generate"], "Inference is not built"),
        ([MODEL, "--gpu", "l40s", "--method", "pretrain"], "--method full"),
        ([MODEL, "--gpu", "l40s", "--method", "dpo"], "Preference and reinforcement training are not built"),
    ],
)
def test_each_command_names_what_it_refuses(command: str, arguments: list[str], named: str) -> None:
    amount = ["--tokens", "1M"] if command == "recommend" else []
    assert named in says(command, *arguments, *amount)


@pytest.mark.parametrize("name", ["tpu-v5e", "TPU v4", "tpu", "v5p-128", "v6e", "trillium", "cloud-tpu-v3"])
def test_a_tpu_by_any_name(name: str) -> None:
    with pytest.raises(NotSupportedError, match="TPUs"):
        find_gpu(name)


@pytest.mark.parametrize("name", ["trn1.32xlarge", "inferentia2", "gaudi2", "Habana Gaudi"])
def test_other_accelerators(name: str) -> None:
    with pytest.raises(NotSupportedError, match="not built"):
        find_gpu(name)


@pytest.mark.parametrize(
    "name", ["stable-diffusion", "sdxl", "SDXL-turbo", "sd1.5", "sd3-medium", "black-forest-labs/FLUX.1-dev"]
)
def test_image_models_by_any_name(name: str) -> None:
    with pytest.raises(NotSupportedError, match="image models"):
        find_model(name)


@pytest.mark.parametrize("name", ["sdlm-7b", "stablelm-3b-nowhere", "fluxion"])
def test_unknown_language_models_stay_unknown(name: str) -> None:
    with pytest.raises(UnknownNameError):
        find_model(name)


@pytest.mark.parametrize("name", ["v100x", "inf", "voodoo2"])
def test_unknown_gpus_stay_unknown(name: str) -> None:
    with pytest.raises(UnknownNameError):
        find_gpu(name)


def test_nothing_of_the_catalogs_is_refused() -> None:
    for gpu in load_gpus().values():
        for name in (gpu.id, *gpu.nvml_names, *gpu.aliases):
            refuse_hardware(name)
    for model in (*load_models(), *model_aliases()):
        refuse_network(model)


def test_recommend_refuses_methods_by_the_same_words() -> None:
    assert "Inference" in says("recommend", MODEL, "--methods", "lora,inference", "--tokens", "1M")
