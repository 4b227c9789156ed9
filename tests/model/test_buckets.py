"""DDP's buckets: against those that PyTorch's own reducer assigns to real models, and what of them is waited for."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.buckets import ddp_buckets, element_buckets
from tunecast.model.estimate import forecast
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind, Operation
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.target import resolve_targets

MIB = 2**20
SMALL = "meta-llama/Llama-3.2-1B"
TABLE = 128_256 * 2048 * 2
"""Bytes of the gradient of Llama 3.2 1B's table of tokens in bf16."""


def reductions(name: str, **options: Any) -> list[Operation]:
    architecture = load_architecture(name)
    run = resolve_run(architecture, {"num_gpus": 2, "sharding": "ddp", "max_length": 512, **options}).run
    return [op for op in step_operations(architecture, run) if op.kind is Kind.COMMUNICATION]


def waited_for(operations: list[Operation]) -> float:
    return sum(op.total_bytes for op in operations if op.blocking)


def reducers_buckets(tensors: list[Any]) -> list[int]:
    """Bytes of the buckets that torch makes of trained tensors whose gradients come in the reverse of their order."""
    dist = pytest.importorskip("torch").distributed
    ready = tensors[::-1]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB]
    indices, _ = dist._compute_bucket_assignment_by_size(ready, limits, [False] * len(ready))
    return [sum(ready[i].numel() * ready[i].element_size() for i in bucket) for bucket in indices]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_buckets_are_those_of_torchs_reducer(method: str, tied: bool) -> None:
    """Llama 3.2 1B as transformers and PEFT build it, with the head tied as it ships or with one of its own."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    shape = {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256,
        "tie_word_embeddings": tied, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    architecture = architecture_from_config(shape, "x")
    adapters = {"lora_r": 64, "adapter_dtype": "bf16"} if method == "lora" else {}
    run = resolve_run(architecture, {"method": method, "num_gpus": 2, "sharding": "ddp", **adapters}).run
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(torch.bfloat16)
        if method == "lora":
            targets = list(run.lora_target_modules)
            model = peft.get_peft_model(model, peft.LoraConfig(r=64, target_modules=targets))
    trained = [p.to(torch.bfloat16) for p in model.parameters() if p.requires_grad]
    beside, last = ddp_buckets(architecture, run)
    assert [*beside, *last] == reducers_buckets(trained)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_full_run_waits_for_the_tables_gradient(accumulation: int) -> None:
    """What waits in the table's bucket is less than 25 MiB of the first layer's; all is reduced, once a step."""
    found = reductions(SMALL, method="full", gradient_accumulation_steps=accumulation)
    assert TABLE <= waited_for(found) < TABLE + 25 * MIB
    assert sum(op.total_bytes for op in found) == pytest.approx(2 * 1_235_814_400)


@pytest.mark.parametrize(("rank", "whole"), [(8, 5_636_096 * 4), (64, 8 * 5_636_096 * 4)])
def test_adapters_wait_for_one_bucket_at_most(rank: int, whole: int) -> None:
    """5,636,096 parameters of rank 8 on every linear map of Llama 3.2 1B (PEFT's own count), in fp32."""
    found = reductions(SMALL, method="lora", lora_r=rank)
    assert sum(op.total_bytes for op in found) == pytest.approx(whole)
    assert 0 < waited_for(found) < 25 * MIB + rank * 8192 * 4


def test_a_table_trained_beside_adapters_is_waited_for() -> None:
    """PEFT's copy of the table stays in bf16 like the base, the adapters are fp32: a last bucket each."""
    found = reductions("meta-llama/Llama-3.1-8B", method="lora", modules_to_save="embed_tokens")
    table = 128_256 * 4096 * 2
    assert table <= waited_for(found) < table + 2 * 25 * MIB
    assert sum(op.count for op in found if op.blocking) == 2


def test_cards_on_pcie_lose_what_the_table_takes() -> None:
    """Two cards send a buffer of an all-reduce once each way: PCIe 4.0 x16 moves 31.5 GB/s at most."""
    question = Question(
        architecture=load_architecture(SMALL),
        options={"method": "full", "max_length": 2048, "per_device_train_batch_size": 2, "num_gpus": 2}
        | {"sharding": "ddp"},
    )
    scaling = forecast(question, resolve_targets(["rtx-4090-24gb"], {})[0]).scaling
    assert scaling is not None
    assert scaling.exposed_communication_s > TABLE / 31.5e9
    assert scaling.efficiency < 1 - TABLE / 31.5e9, "of a step below one second"
    assert scaling.bound_by == "all_reduce inside a machine"


def test_later_stages_of_a_pipeline_reduce_while_earlier_ones_work() -> None:
    """1F1B: the backward of the last micro-batch ends at the first stage, one stage's time after the next one's."""
    options = {"method": "full", "num_gpus": 4, "pp": 2, "gradient_accumulation_steps": 4}
    sums = [op for op in reductions("meta-llama/Llama-3.1-8B", **options) if op.name == "all_reduce"]
    assert sums
    assert not any(op.blocking for op in sums)


@pytest.mark.parametrize("most", [10_000_000, 40_000_000, 10**9])
def test_buckets_of_elements_close_before_their_limit_or_with_what_passes_it(most: int) -> None:
    """Llama 3.2 1B in bf16: its table alone has more than 40 million elements, a layer 60.8 million in nine tensors."""
    architecture = load_architecture(SMALL)
    run = resolve_run(architecture, {"method": "full", "num_gpus": 2, "sharding": "zero1"}).run
    for past in (False, True):
        beside, last = element_buckets(architecture, run, most, past=past)
        assert sum(beside) + sum(last) == 2 * 1_235_814_400
        assert last[0] >= TABLE
        sizes = [size // 2 for size in beside]
        if past:
            assert all(size >= most for size in sizes)
        else:
            largest = 2048 * 8192
            assert all(size <= max(most, largest) for size in sizes)
