"""Compiled blocks of LitGPT against what torch's own partitioner keeps of the real ones (scripts/litgpt_partitions.py),
and its FSDP that shards gradients and optimizer states alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind, Phase
from tunecast.model.resolve import resolve_run
from tunecast.model.resolve_litgpt import of_stack
from tunecast.model.run import Run
from tunecast.model.step import tape_run, write_step

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "litgpt_partitions.json").read_text(encoding="utf-8")
)
SHAPE, BLOCKS = RECORDED["shape"], {block["name"]: block for block in RECORDED["blocks"]}
GATED = {"intermediate_size": 768, "head_dim": 32}
NEOX = {"model_type": "gpt_neox", "rotary_pct": 0.25, "intermediate_size": 1024}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 8, **GATED},
    "llama-gqa": {"model_type": "llama", "num_key_value_heads": 2, **GATED},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, **GATED},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, **GATED},
    "pythia": {**NEOX, "use_parallel_residual": True},
    "stablelm": {**NEOX, "use_parallel_residual": False},
}
SHARED_STATISTICS = {"pythia": 2}
"""Norms of one input: torch makes their mean and root once, our formulas each."""
SEVEN_B = "meta-llama/Llama-2-7b-hf"
EIGHT = {"method": "full", "max_length": 4096, "num_gpus": 8, "gradient_checkpointing": False}


def litgpt(architecture: Architecture, **options: Any) -> tuple[Architecture, Run]:
    """The model as LitGPT builds it, and a run of it."""
    given = {"stack": "litgpt", **options}
    built = of_stack(architecture, given)
    return built, resolve_run(built, given).run


@pytest.mark.parametrize("name", BLOCKS)
def test_a_compiled_block_keeps_what_torchs_partitioner_keeps(name: str) -> None:
    config = {
        "hidden_size": SHAPE["n_embd"], "num_attention_heads": SHAPE["n_head"], "num_hidden_layers": SHAPE["n_layer"],
        "vocab_size": SHAPE["padded_vocab_size"], "max_position_embeddings": SHAPE["block_size"], **CONFIGS[name],
    }  # fmt: skip
    architecture, run = litgpt(
        architecture_from_config(config, name=name),
        method="full", max_length=SHAPE["length"], per_device_train_batch_size=SHAPE["batch"], torch_compile=True,
    )  # fmt: skip
    events = [e for e in write_step(architecture, tape_run(run), "cuda").events if e.layer == 1 and e.kind]
    forward = {s for e in events if e.phase is Phase.FORWARD for s in (*e.reads, *e.writes)}
    backward = {s for e in events if e.phase is Phase.BACKWARD for s in e.reads}
    kept = sum(storage.bytes for storage in forward & backward if storage.part == "activations")
    again = SHARED_STATISTICS.get(name, 0) * SHAPE["batch"] * SHAPE["length"] * 2
    assert kept - again == BLOCKS[name]["kept_bytes"] + BLOCKS[name]["attention_in_place_bytes"]


def test_the_loss_stays_outside_the_graph_as_its_own_scripts_leave_it() -> None:
    """``torch.compile(model)``: the scripts take the loss of what it returns."""
    llama = load_architecture(SEVEN_B)
    plain, compiled = (litgpt(llama, torch_compile=c, **EIGHT, sharding="fsdp") for c in (False, True))

    def losses(case: tuple[Architecture, Run]) -> list[tuple[str, float, float]]:
        return [(o.name, o.total_bytes, o.count) for o in step_operations(*case) if o.kind is Kind.LOSS]

    assert not compiled[1].compile_loss
    assert losses(plain) == losses(compiled)


def test_gradients_sharded_alone_are_gathered_once() -> None:
    """LitGPT's ``SHARD_GRAD_OP``: what the forward gathered is there in the backward, whole."""
    llama = load_architecture(SEVEN_B)
    whole, kept = (litgpt(llama, sharding=sharding, **EIGHT) for sharding in ("fsdp", "fsdp-grad-op"))

    def gathered(case: tuple[Architecture, Run]) -> float:
        return sum(o.total_bytes for o in step_operations(*case) if o.name == "all_gather")

    model, root = 2 * llama.total_params, 2 * 2 * llama.embedding_params  # the embedding and the head
    assert gathered(kept) == pytest.approx(model, rel=1e-3)
    assert gathered(whole) == pytest.approx(2 * model - root, rel=1e-3)
    held = [memory_timeline(*case).allocated_bytes for case in (whole, kept)]
    assert 0.85 * model < held[1] - held[0] < model


def test_adapters_in_graphs_are_not_built() -> None:
    with pytest.raises(NotSupportedError, match="--torch-compile"):
        litgpt(load_architecture(SEVEN_B), method="lora", torch_compile=True)
