"""torchao's optimizers against torchao itself, against inductor's kernels for them and against a published peak."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.memory import memory_timeline
from tunecast.model.optimizer import optimizer_state_bytes, update_scratch_bytes
from tunecast.model.optimizer_torchao import TORCHAO, TorchaoOptimizer, kernels, scratch_blocks
from tunecast.model.run import Run
from tunecast.model.sharded_update import own_update
from tunecast.model.tape import allocated_bytes
from tunecast.model.trained import trained_dtype, trained_tensors
from tunecast.model.units import GIB

RunOf = Callable[..., Run]
UPDATES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "torchao_updates.json").read_text("utf-8")
)["updates"]
"""What inductor makes of an update, by scripts/torchao_updates.py."""
KINDS = {"8bit": (8, 256), "4bit": (4, 16), "fp8": (8, 0), "plain": (8, 256)}


@pytest.mark.parametrize("update", UPDATES, ids=lambda one: f"{one['kind']}-{one['elements']}-{one['dtype']}")
def test_kernels_and_temporaries_are_inductors(update: dict[str, Any]) -> None:
    bits, maps = KINDS[update["kind"]]
    kind = TorchaoOptimizer(code_bits=bits, block=update["block"], maps=maps)
    found = [n_bytes for _, n_bytes in kernels(kind, update["elements"], update["dtype"])]
    assert sorted(found) == sorted(update["kernels_bytes"])
    assert sorted(scratch_blocks(kind, update["elements"])) == sorted(update["allocated_bytes"])


@pytest.mark.parametrize("name", TORCHAO)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_state_is_torchaos_own(run_of: RunOf, name: str, method: str) -> None:
    """What ``_new_buffer`` makes of every tensor that trains, each rounded up as the GPU's allocator does."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchao")
    from torchao import optim

    model = load_architecture("HuggingFaceTB/SmolLM2-135M")
    rank = {"lora_r": 3} if method == "lora" else {}
    run = run_of(model, method=method, optim=name, **rank)
    kind = TORCHAO[name]
    assert kind.block == (128 if name == "ao_adamw_4bit" else 256)
    made = optim.AdamW4bit if kind.packs else optim.AdamW8bit if kind.maps else optim.AdamWFp8
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[trained_dtype(run)]
    by_size: dict[int, int] = {}
    total = 0
    for tensor in trained_tensors(model, run):
        if tensor.elements not in by_size:
            param = torch.nn.Parameter(torch.zeros(tensor.elements, dtype=dtype))
            optimizer = made([param], block_size=kind.block)
            states = [optimizer._new_buffer(param, signed) for signed in (True, False)]
            parts = [getattr(s, part) for s in states for part in getattr(s, "tensor_attrs", ["data"])]
            by_size[tensor.elements] = sum(allocated_bytes(part.numel() * part.itemsize) for part in parts)
        total += by_size[tensor.elements]
    assert optimizer_state_bytes(model, run) == total


def test_published_peaks_of_bitsandbytes_and_torchao(run_of: RunOf) -> None:
    """Full fine-tuning of Llama 2 7B in torchtune, its batch not told: 39.3 with bitsandbytes' 8 bits, 39.1 with
    torchao's (torchao/optim/README.md, 2024). Its 4 bits (33.2, where 34.7 are forecast) are left out: that is less
    than what today's inductor takes to pack the table's codes."""
    llama = load_architecture("meta-llama/Llama-2-7b-hf")
    plain: dict[str, Any] = {"stack": "torchtune", "method": "full", "max_length": 512}
    peaks = {
        name: memory_timeline(llama, run_of(llama, optim=name, **plain)).allocated_bytes / GIB
        for name in ("adamw_bnb_8bit", "ao_adamw_8bit")
    }
    assert peaks["ao_adamw_8bit"] == pytest.approx(39.1, rel=0.03)
    assert peaks["adamw_bnb_8bit"] == pytest.approx(39.3, rel=0.04)


def test_the_largest_table_is_unpacked_in_64_bits(run_of: RunOf) -> None:
    """With a large vocabulary 4 bits save nothing at the peak: what they save of the state the update takes."""
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    runs = {bits: run_of(llama, method="full", optim=f"adamw_torch_{bits}bit") for bits in (4, 8)}
    table = llama.vocab_size * llama.hidden_size
    scratch = {bits: update_scratch_bytes(llama, run) / table for bits, run in runs.items()}
    assert scratch[4] == pytest.approx(24, rel=0.01)
    assert scratch[8] == pytest.approx(8, rel=0.01)
    state = {bits: optimizer_state_bytes(llama, run) for bits, run in runs.items()}
    assert state[4] == pytest.approx(state[8] / 2, rel=0.02)
    peaks = {bits: memory_timeline(llama, run).allocated_bytes for bits, run in runs.items()}
    assert peaks[4] == pytest.approx(peaks[8], rel=0.02)


def test_a_share_of_every_tensor_is_updated_under_fsdp2(run_of: RunOf) -> None:
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    alone, sharded = (
        own_update(llama, run_of(llama, method="full", optim="adamw_torch_8bit", **spread))
        for spread in ({}, {"num_gpus": 8, "sharding": "fsdp"})
    )
    moved = [sum(op.bytes * op.count for op in ops if op.name.startswith("torchao.")) for ops in (alone, sharded)]
    assert moved[1] == pytest.approx(moved[0] / 8, rel=0.001)
    calls = [sum(op.count for op in ops if op.name == "torchao.found") for ops in (alone, sharded)]
    assert calls[0] == calls[1] == 291


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_gpus": 2, "sharding": "zero2"}, "use --sharding fsdp"),
        ({"num_gpus": 2, "sharding": "fsdp", "fsdp_version": 1}, "--fsdp-version 2"),
        ({"optimizer_in_backward": True}, "bitsandbytes' 8-bit"),
    ],
)
def test_what_is_not_built_is_refused(run_of: RunOf, options: dict[str, Any], said: str) -> None:
    llama = load_architecture("meta-llama/Llama-3.1-8B")
    with pytest.raises(NotSupportedError, match=said):
        run_of(llama, method="full", optim="adamw_torch_8bit", **options)
