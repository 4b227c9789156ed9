"""What sharding keeps on each GPU, against two processes that really train under FSDP2 and DDP (gloo, CPU).

accelerate's own ``fsdp2_prepare_model`` wraps the model; ``fsdp-one-group`` is wrapped as torchtune does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from ci_share import run_here, some_for_ci
from gloo_processes import Held, held_by_each, started_and_ended

from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.collectives import communication_operations
from tunecast.model.memory import MemoryForecast, memory_timeline
from tunecast.model.parallel import local_architecture, local_run
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.sharding import layer_bytes, root_group_bytes
from tunecast.model.sharding_root import gathered_root, splits_root
from tunecast.model.trained import trained_dtype, trained_tensors
from tunecast.model.units import DTYPE_BYTES

PROCESSES = 2
BLOCK_BYTES = 512
"""The allocator's block: our figures round every tensor up to it, the processes count plain bytes."""
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096,
}  # fmt: skip
ROOTS = "embed_tokens,lm_head"
COMMON = {"num_gpus": PROCESSES, "max_length": 16, "precision": "bf16"}
RUNS: dict[str, dict[str, Any]] = {
    "ddp-lora": {**COMMON, "method": "lora", "sharding": "ddp", "adapter_dtype": "bf16"},
    "fsdp-lora": {**COMMON, "method": "lora", "sharding": "fsdp"},
    "fsdp-full": {**COMMON, "method": "full", "sharding": "fsdp"},
    "fsdp-wide": {**COMMON, "method": "full", "sharding": "fsdp", "reduce_dtype": "fp32"},
    "fsdp-summed": {**COMMON, "method": "full", "sharding": "fsdp", "gradient_accumulation_steps": 3},
    "fsdp-wide-summed": {
        **COMMON,
        "method": "full",
        "sharding": "fsdp",
        "reduce_dtype": "fp32",
        "gradient_accumulation_steps": 3,
    },
    "fsdp-raised": {**COMMON, "method": "full", "sharding": "fsdp", "precision": "bf16-autocast"},
    "fsdp-raised-lora": {**COMMON, "method": "lora", "sharding": "fsdp", "precision": "bf16-autocast", "lora_r": 64},
    "fsdp-one-group": {
        **COMMON,
        "method": "full",
        "sharding": "fsdp",
        "stack": "torchtune",
        "optim": "adamw_torch",
        "loss_type": "nll",
    },
    "grad-op-full": {**COMMON, "method": "full", "sharding": "fsdp-grad-op"},
    "grad-op-lora": {**COMMON, "method": "lora", "sharding": "fsdp-grad-op"},
    "ddp-full": {**COMMON, "method": "full", "sharding": "ddp"},
    "fsdp-saved": {**COMMON, "sharding": "fsdp", "lora_target_modules": "q_proj", "modules_to_save": ROOTS},
    "fsdp-root": {**COMMON, "sharding": "fsdp", "lora_target_modules": f"q_proj,{ROOTS}", "lora_r": 64},
}

MORE_WORDS = {**CONFIG, "vocab_size": 8192}
TIED = {**CONFIG, "tie_word_embeddings": True}
WORDY: dict[str, dict[str, Any]] = {
    **{f"wordy-{name}": RUNS[name] for name in ("fsdp-full", "fsdp-wide", "fsdp-one-group")},
    "wordy-fsdp-lora": {**RUNS["fsdp-lora"], "max_length": 64},
    "wordy-fsdp-longer": {**RUNS["fsdp-full"], "max_length": 128},
}
TIES: dict[str, dict[str, Any]] = {
    **{f"tied-{name}": RUNS[name] for name in ("fsdp-full", "fsdp-lora")},
    "tied-wordy-fsdp-full": RUNS["fsdp-full"],
}
CONFIGS = {
    **dict.fromkeys(WORDY, MORE_WORDS),
    **dict.fromkeys(TIES, TIED),
    "tied-wordy-fsdp-full": {**MORE_WORDS, "tie_word_embeddings": True},
}
WATCHED = {**RUNS, **WORDY, **TIES}
NAMES = [*some_for_ci(RUNS, 3), *some_for_ci(WORDY, 3, first=1), *some_for_ci(TIES)]
"""CI trains a third of them; every kind of sharding, of training and of summing is among those."""


def named(names: Iterable[str]) -> list[Any]:
    """These of the runs as parameters."""
    wanted = set(names)
    return [case for case in NAMES if case.values[0] in wanted]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """What each process held, by run."""
    folder = tmp_path_factory.mktemp("spread")
    runs = {name: WATCHED[name] for name in run_here(NAMES)}
    return held_by_each("sharded_worker.py", folder, PROCESSES, CONFIG, runs, CONFIGS)


def check_peak(held: Held, name: str, within: float) -> None:
    """Assert that what is allocated at rest and in the step is the forecast."""
    _, _, forecast = case(name)
    expected = forecast.allocated_bytes - forecast.at_rest_bytes
    for rank in held:
        assert rank[name]["transient_bytes"] == pytest.approx(expected, abs=within * forecast.allocated_bytes)


@pytest.mark.parametrize("name", named(WORDY))
def test_units_outside_the_layers_that_are_larger_than_a_layer(held: Held, name: str) -> None:
    """A vocabulary whose table and head are 2.7 layers each, as of Llama 3.1 8B: reduced in the end, gathered at the
    loss, and summed in fp32."""
    check_peak(held, name, 5e-3)


@pytest.mark.parametrize("name", named(TIES))
def test_a_table_that_is_the_head_is_one_unit(held: Held, name: str) -> None:
    check_peak(held, name, 0.01)


STAGED = {"fsdp-2": (2, True), "fsdp-8": (8, True), "fsdp-grad-op-2": (2, False), "fsdp-grad-op-8": (8, False)}


def test_pipeline_schedules_keep_weights_gathered(tmp_path: Path) -> None:
    """Gathers of three layers in a step of 1F1B over two stages of two GPUs, 2 and 8 micro-batches."""
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps(STAGED))
    started_and_ended("staged_worker.py", jobs, 4)
    counted = json.loads((tmp_path / "gathered0.json").read_text())
    architecture = architecture_from_config(CONFIG, "sharded")
    for name, (micro_batches, _) in STAGED.items():
        options = {"sharding": name.rpartition("-")[0], "pp": 2, "num_gpus": 4, "method": "full", "max_length": 16}
        run = resolve_run(architecture, {**options, "gradient_accumulation_steps": micro_batches}).run
        operations = communication_operations(local_architecture(architecture, run, 0), local_run(run))
        layer = layer_bytes(architecture, local_run(run))
        gathers = sum(op.count for op in operations if op.name == "all_gather" and op.bytes == layer)
        assert gathers == counted[name], name


def test_units_of_stages_are_what_they_have() -> None:
    """The first stage has the table of tokens, the last the norm and the head, those between neither."""
    for config in (CONFIG, TIED):
        architecture = architecture_from_config(config, "sharded")
        run = resolve_run(architecture, {**RUNS["fsdp-full"], "pp": 3, "num_gpus": 6}).run
        table, norm = 2 * CONFIG["vocab_size"] * CONFIG["hidden_size"], 2 * CONFIG["hidden_size"]
        stages = [gathered_root(local_architecture(architecture, run, stage), local_run(run)) for stage in range(3)]
        assert stages == [(table, 0), (0, 0), (0, table + norm)]


def case(name: str) -> tuple[Architecture, Run, MemoryForecast]:
    architecture = architecture_from_config(CONFIGS.get(name, CONFIG), "sharded")
    run = resolve_run(architecture, WATCHED[name]).run
    return architecture, run, memory_timeline(architecture, run, platform="cpu")


EVERY = pytest.mark.parametrize("name", named(RUNS))


@EVERY
def test_parameters_of_each_process(held: Held, name: str) -> None:
    architecture, _, forecast = case(name)
    tensors = 40 * architecture.num_layers
    expected = forecast.parts_bytes["weights"] + forecast.parts_bytes["adapters"]
    for rank in held:
        assert 0 <= expected - rank[name]["parameter_bytes"] < tensors * BLOCK_BYTES
        assert rank[name]["parameter_bytes"] == pytest.approx(expected, rel=1e-3)


@EVERY
def test_optimizer_state_of_each_process(held: Held, name: str) -> None:
    """Two moments per trained parameter; a CPU also keeps a counter per tensor, which is not compared."""
    architecture, run, forecast = case(name)
    counters = len(trained_tensors(architecture, run)) * BLOCK_BYTES
    shards = 1 if run.sharding == "ddp" else PROCESSES
    for rank in held:
        assert rank[name]["state_bytes"] == pytest.approx(
            forecast.parts_bytes["optimizer_state"] - counters / shards, rel=1e-3
        )


@EVERY
def test_gradients_of_each_process(held: Held, name: str) -> None:
    architecture, run, _ = case(name)
    whole = DTYPE_BYTES[trained_dtype(run)] * sum(tensor.elements for tensor in trained_tensors(architecture, run))
    for rank in held:
        assert rank[name]["gradient_bytes"] == whole // (1 if run.sharding == "ddp" else PROCESSES)


@pytest.mark.parametrize("name", named(["fsdp-lora", "fsdp-full", "fsdp-saved", "fsdp-root", "fsdp-one-group"]))
def test_whole_parameters_while_a_layer_runs(held: Held, name: str) -> None:
    """One layer, and the root where it is one group; the second whole layer of the model is a communication buffer."""
    architecture, run, _ = case(name)
    whole = 0 if splits_root(architecture, run) else root_group_bytes(architecture, run)
    for rank in held:
        expected = whole + layer_bytes(architecture, run)
        assert rank[name]["gathered_bytes"] == pytest.approx(expected, rel=1e-3)


WITHIN = {
    "fsdp-full": 2e-3,
    "fsdp-raised": 2e-3,
    "fsdp-raised-lora": 2e-3,
    "fsdp-one-group": 2e-3,
    "fsdp-wide": 2e-3,
    "fsdp-summed": 5e-3,
    "fsdp-wide-summed": 0.02,
    "fsdp-lora": 0.01,
    "fsdp-saved": 0.01,
    "fsdp-root": 0.01,
    "grad-op-full": 5e-3,
    "grad-op-lora": 0.01,
    "ddp-lora": 2e-3,
    "ddp-full": 0.01,
}


@EVERY
def test_peak_of_the_step(held: Held, name: str) -> None:
    """Allocated at rest and in the step.

    LoRA: temporaries inside a layer are taken to coincide with the copy of the next one. DDP, full: a CPU's update
    keeps the temporary of the tensor before.
    """
    check_peak(held, name, WITHIN[name])
