"""What loading a quantized base takes before GPUs share it, beside transformers' own loader."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import tunecast
from tunecast.model.architectures import load_architecture
from tunecast.model.loading import loading_parts, loads_whole
from tunecast.model.memory import memory_timeline
from tunecast.model.resolve import resolve_run
from tunecast.model.units import GIB

MODEL = "meta-llama/Llama-3.1-70B"


def run_of(**options: Any) -> Any:
    return resolve_run(load_architecture(MODEL), {"method": "qlora", "max_length": 512, **options}).run


@pytest.mark.parametrize("name", ["quantizer_bnb_4bit.Bnb4BitHfQuantizer", "quantizer_bnb_8bit.Bnb8BitHfQuantizer"])
def test_transformers_puts_a_quantized_base_on_the_card_of_its_process(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When this fails, transformers has learnt to load in shares, and `loading` is wrong."""
    torch = pytest.importorskip("torch")
    module, _, kind = name.partition(".")
    quantizers = pytest.importorskip(f"transformers.quantizers.{module}")
    loader = pytest.importorskip("transformers.core_model_loading")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert getattr(quantizers, kind).update_device_map(object(), None) == {"": 3}
    assert "is_fsdp_enabled" not in inspect.getsource(loader)
    assert "is_fsdp_enabled" not in inspect.getsource(quantizers)


@pytest.mark.parametrize("sharding", ["fsdp", "zero3", "hsdp"])
def test_the_peak_is_no_less_than_the_whole_base(sharding: str) -> None:
    architecture = load_architecture(MODEL)
    run = run_of(num_gpus=16, sharding=sharding)
    found = memory_timeline(architecture, run)
    alone = memory_timeline(architecture, run_of())
    whole = sum(alone.parts_bytes[part] for part in ("weights", "quantized"))
    assert whole > 35 * GIB
    assert found.allocated_bytes > whole
    assert found.peak_moment == "load"
    assert found.parts_bytes["optimizer_state"] == 0
    assert sum(found.parts_bytes.values()) == found.allocated_bytes
    assert found.at_rest_bytes < whole / 2


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 4, "sharding": "zero2"},
        {"num_gpus": 1},
        {"num_gpus": 4, "sharding": "fsdp", "stack": "axolotl"},
        {"num_gpus": 4, "sharding": "fsdp", "hf_code": "4.49"},
        {"num_gpus": 4, "sharding": "fsdp", "method": "lora"},
        {"num_gpus": 4, "sharding": "zero3", "method": "full"},
    ],
)
def test_other_loaders_hold_no_more_than_their_share(options: dict[str, Any]) -> None:
    run = run_of(**options)
    assert not loads_whole(run)
    assert loading_parts(load_architecture(MODEL), run) == {}


def test_a_loader_of_ones_own_keeps_the_base_in_host_memory_or_does_not() -> None:
    asked: dict[str, Any] = {"num_gpus": 4, "sharding": "fsdp"}
    assert not loads_whole(run_of(**asked, loads_on_gpu=False))
    assert loads_whole(run_of(**asked, stack="axolotl", loads_on_gpu=True))
    assert not loads_whole(run_of(num_gpus=4, sharding="zero2", loads_on_gpu=True))
    lora = run_of(**asked, method="lora", loads_on_gpu=True)
    found = memory_timeline(load_architecture(MODEL), lora)
    assert found.peak_moment == "load"
    assert found.allocated_bytes > 2 * 70e9


QLORA_FILE = """\
base_model: meta-llama/Llama-3.1-70B
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_target_linear: true
sequence_len: 512
micro_batch_size: 1
bf16: true
gradient_checkpointing: true
datasets: [{path: mine, type: alpaca}]
sample_packing: true
pad_to_sequence_len: true
fsdp_version: 2
fsdp_config: {reshard_after_forward: true%s}
"""
FACTORY_FILE = """\
model_name_or_path: meta-llama/Llama-3.1-70B
stage: sft
finetuning_type: lora
dataset: mine
cutoff_len: 512
packing: true
bf16: true
"""


@pytest.mark.parametrize(
    ("text", "accelerate", "whole"),
    [
        (QLORA_FILE % "", None, True),
        (QLORA_FILE % ", cpu_ram_efficient_loading: true", None, False),
        (FACTORY_FILE + "fsdp: full_shard auto_wrap\n", None, True),
        (FACTORY_FILE, "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\n", False),
    ],
)
def test_a_training_file_says_where_the_base_is_while_it_loads(
    text: str, accelerate: str | None, whole: bool, tmp_path: Path
) -> None:
    """axolotl 0.19 loaders/model.py; LLaMA-Factory 0.9.5 hparams/parser.py and model/patcher.py."""
    path, beside = tmp_path / "run.yaml", tmp_path / "accelerate.yaml"
    path.write_text(text, encoding="utf-8")
    beside.write_text(accelerate or "", encoding="utf-8")
    launched: dict[str, Any] = {} if accelerate is None else {"accelerate": beside}
    (found,) = tunecast.estimate(path, gpu="h200-sxm5-141gb", num_gpus=4, **launched)
    assert (found.memory.peak_moment == "load") is whole
    assert any("--no-loads-on-gpu" in note for note in found.notes) is whole
    (zero,) = tunecast.estimate(path, gpu="h200-sxm5-141gb", num_gpus=4, sharding="zero3")
    assert zero.run.loads_on_gpu is None


def test_a_card_that_cannot_load_the_model_does_not_fit_and_a_note_says_why() -> None:
    asked: dict[str, Any] = {"method": "qlora", "num_gpus": 8, "sharding": "fsdp", "max_length": 512}
    (small,) = tunecast.estimate(MODEL, gpu="rtx-4090-24gb", **asked)
    assert small.verdict == "no"
    assert any("puts the whole quantized base" in note for note in small.notes)
    assert any(note.startswith("--no-loads-on-gpu would make it fit") for note in small.notes)
    (kept,) = tunecast.estimate(MODEL, gpu="rtx-4090-24gb", loads_on_gpu=False, **asked)
    assert kept.verdict == "fits"
    (large,) = tunecast.estimate(MODEL, gpu="rtx-6000-ada-48gb", **asked)
    assert large.verdict == "fits"
    assert large.memory.reserved_bytes.value >= large.memory.allocated_bytes.value > 35 * GIB
    (axolotl,) = tunecast.estimate(MODEL, gpu="rtx-4090-24gb", stack="axolotl", **asked)
    assert axolotl.verdict != "no"
