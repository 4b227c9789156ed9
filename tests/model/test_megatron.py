"""``--stack megatron`` and ``nemo``: memory against NVIDIA's own formulas, traffic by hand, and what is refused."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunecast.asked import read_asked
from tunecast.calibrate.published import read_runs
from tunecast.catalogs.errors import InputError, NotSupportedError, TunecastError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.joined import joined
from tunecast.model.memory import moment_parts
from tunecast.model.operation import Kind, Phase
from tunecast.model.parallel_memory import kept_bytes
from tunecast.model.resolve import resolve_run
from tunecast.model.resolve_stacks import of_stack
from tunecast.model.run import Run
from tunecast.run_validation import options_of_run

LLAMA = joined(load_architecture("meta-llama/Llama-3.1-8B"))
LARGE = joined(load_architecture("meta-llama/Llama-3.1-70B"))
STATIC = ("weights", "gradients", "optimizer_state")
ROWS = Path(__file__).parents[2] / "results" / "published" / "unseen-runs.csv"


def resolved(architecture: Architecture = LLAMA, **options: Any) -> Run:
    return resolve_run(architecture, {"stack": "megatron", "method": "full", "max_length": 4096, **options}).run


def theirs(architecture: Architecture, run: Run) -> float:
    """Bytes of weights and optimizer of the fullest GPU.

    Megatron-LM megatron/training/theoretical_memory_usage.py, ``compute_weight_and_optimizer_memory``, for models whose
    head is a map of its own.
    """
    table = architecture.embedding_params
    block = architecture.total_params - 2 * table
    fullest = (block / run.pp + table * (2 if run.pp == 1 else 1)) / run.tp
    copies = run.num_gpus / (run.tp * run.pp)
    return fullest * (6 + 12 / copies if run.sharding == "zero1" else 18)


LAYOUTS = [
    (LLAMA, {}),
    (LLAMA, {"num_gpus": 8}),
    (LLAMA, {"num_gpus": 8, "sharding": "ddp"}),
    (LLAMA, {"num_gpus": 8, "tp": 4}),
    (LLAMA, {"num_gpus": 4, "tp": 2, "pp": 2}),
    (LARGE, {"num_gpus": 64, "tp": 8, "pp": 4}),
    (LARGE, {"num_gpus": 512, "tp": 8, "pp": 4}),
    (LARGE, {"num_gpus": 64, "tp": 4, "pp": 8, "sharding": "ddp"}),
]


@pytest.mark.parametrize(("architecture", "layout"), LAYOUTS, ids=lambda value: str(value)[:40])
def test_bytes_of_a_parameter_are_those_of_megatrons_own_formula(
    architecture: Architecture, layout: dict[str, Any]
) -> None:
    run = resolved(architecture, **layout)
    moment, at_rest = moment_parts(architecture, run)[0]
    assert moment == "load"
    assert sum(at_rest[part] for part in STATIC) == pytest.approx(theirs(architecture, run), rel=0.005)


def test_gradients_reduced_in_their_own_dtype_take_half_and_are_widened_for_the_update() -> None:
    wide, narrow = (resolved(num_gpus=8, reduce_dtype=dtype) for dtype in (None, "none"))
    (_, at_rest), (_, halved) = (moment_parts(LLAMA, run)[0] for run in (wide, narrow))
    assert at_rest["gradients"] == 2 * halved["gradients"] == 4 * LLAMA.total_params
    scratch = {
        name: max(parts["scratch"] for moment, parts in moment_parts(LLAMA, run) if moment == "optimizer")
        for name, run in (("wide", wide), ("narrow", narrow))
    }
    assert scratch == {"wide": 0, "narrow": pytest.approx(4 * LLAMA.total_params / 8, rel=1e-6)}


def test_the_buffer_is_there_at_every_moment_and_nothing_else_is_sent_from() -> None:
    for moment, parts in moment_parts(LLAMA, resolved(num_gpus=8)):
        assert parts["gradients"] == 4 * LLAMA.total_params, moment
        assert parts["communication"] == 0, moment


def test_adapters_alone_have_a_buffer_and_copies() -> None:
    run = resolved(method="lora", num_gpus=8)
    _, at_rest = moment_parts(LLAMA, run)[0]
    adapters = 32 * 32 * ((4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096))
    assert run.lora_target_modules == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    assert at_rest["adapters"] == pytest.approx(2 * adapters, rel=1e-3)
    assert at_rest["gradients"] == pytest.approx(4 * adapters, rel=1e-3)
    assert at_rest["optimizer_state"] == pytest.approx(12 * adapters / 8, rel=1e-3)


def test_what_a_layer_keeps_is_korthikantis_count_without_dropout() -> None:
    """arXiv 2205.05198, section 4.1 and table 2: 34 s b h per layer once attention is not kept, 2 of them the masks of
    two dropouts, which today's recipes have none of; flash attention's one number a head and token comes on top."""
    gpt = of_stack(load_architecture("nvidia/nemo-gpt3-5b"), {"stack": "megatron"})
    run = resolve_run(gpt, {"stack": "megatron", "method": "full", "max_length": 2048}).run
    (group,) = gpt.groups
    deep, deeper = (replace(gpt, groups=(replace(group, count=count),)) for count in (20, 21))
    kept = kept_bytes(deeper, run, "cuda") - kept_bytes(deep, run, "cuda")
    assert kept / (2048 * gpt.hidden_size) == pytest.approx(32, rel=0.03)


def test_own_tokens_are_kept_whether_exchanges_hide_or_not() -> None:
    """``tp_comm_overlap`` hides exchanges; Transformer Engine keeps its own tokens all the same and gathers anew."""
    shown, hidden = (resolved(num_gpus=16, tp=8, async_tp=beside) for beside in (False, True))
    assert moment_parts(LLAMA, shown) == moment_parts(LLAMA, hidden)


def test_sums_cross_the_links_in_fp32_unless_told_otherwise() -> None:
    def sent(name: str, **options: Any) -> float:
        found = step_operations(LLAMA, resolved(num_gpus=8, **options))
        return sum(o.bytes * o.count for o in found if o.kind is Kind.COMMUNICATION and o.name == name)

    size = 2 * LLAMA.total_params
    assert sent("reduce_scatter") == pytest.approx(2 * size)
    assert sent("reduce_scatter", reduce_dtype="none") == pytest.approx(size)
    assert sent("all_gather") == pytest.approx(size)
    assert sent("all_reduce", sharding="ddp") == pytest.approx(2 * size)


def test_copies_of_all_that_trains_are_updated_where_nothing_is_shared() -> None:
    """Of every parameter: two fp32 moments and a copy read and written, a gradient read (28 bytes); norm and scaling of
    the gradient (12); the copy read and the weight written (6)."""
    for layout, share in (({"num_gpus": 8, "sharding": "ddp"}, 1), ({}, 1), ({"num_gpus": 8}, 8)):
        operations = [o for o in step_operations(LLAMA, resolved(**layout)) if o.phase is Phase.OPTIMIZER]
        moved = sum(o.bytes * o.count for o in operations if o.kind is Kind.OPTIMIZER)
        assert moved == pytest.approx((28 + 12 + 6) * LLAMA.total_params / share, rel=0.01), layout


def test_every_run_of_megatron_that_was_published_can_be_typed() -> None:
    """What `validate` reads of a table of other people's runs, as options of ``--stack megatron``."""
    with ROWS.open(encoding="utf-8") as table:
        runs, _ = read_runs(csv.DictReader(table))
    read = [run for run in runs if run.run.stack == "megatron"]
    assert len(read) >= 30
    for each in read:
        options = options_of_run(each.architecture, each.run)
        assert resolve_run(each.architecture, options).run == replace(each.run, stack_version=resolved().stack_version)


@pytest.mark.parametrize("named", ["linear_qkv,linear_fc2", "q_proj,k_proj,v_proj,down_proj", "qkv_proj,down_proj"])
def test_targets_have_both_names(named: str) -> None:
    assert resolved(method="lora", lora_target_modules=named).lora_target_modules == ("qkv_proj", "down_proj")


def test_its_distributed_optimizer_is_not_deepspeeds() -> None:
    found = resolve_run(LLAMA, {"stack": "megatron", "method": "full", "num_gpus": 8, "sharding": "zero1"})
    assert not any("DeepSpeed" in note for note in found.notes)
    assert (found.run.dtype, found.run.precision, found.run.reduce_dtype) == ("bf16", "bf16", "fp32")


def test_nemo_is_the_same_code() -> None:
    assert replace(resolved(stack="nemo"), stack="megatron") == resolved()


REFUSED = [
    ({"sharding": "fsdp", "num_gpus": 8}, "--sharding fsdp is not built for --stack megatron, which takes none or ddp"),
    ({"optim": "adamw_8bit"}, "--optim adamw_8bit is not built for --stack megatron"),
    ({"torch_compile": True}, "--torch-compile on is not built for --stack megatron, which takes off"),
    ({"method": "qlora"}, "--method qlora with --stack megatron .* use --method lora or full"),
    ({"method": "lora", "lora_target_modules": "q_proj"}, "q_proj, k_proj, v_proj are one map"),
    ({"method": "lora", "use_dora": True}, "--use-dora on is not built for --stack megatron"),
    ({"dtype": "fp32"}, "--dtype fp32 is not built for --stack megatron, which takes bf16"),
    ({"num_gpus": 8, "async_tp": True}, "--tp is 1; add --tp 2 or more"),
    ({"stack": "hf-peft"}, "layers as Megatron joins them"),
]


@pytest.mark.parametrize(("options", "told"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_megatron_does_not_have_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TunecastError, match=told):
        resolved(**options)


def test_a_card_without_bf16_trains_in_fp16_and_adds_in_it() -> None:
    """Megatron-LM arguments.py: ``accumulate_allreduce_grads_in_fp32`` is switched on by ``--bf16`` alone."""
    found = resolve_run(LLAMA, {"stack": "megatron", "method": "full"}, gpu_has_bf16=False)
    assert (found.run.dtype, found.run.precision, found.run.reduce_dtype) == ("fp16", "fp16", None)
    assert any("Megatron's --fp16" in note for note in found.notes)
    _, at_rest = moment_parts(LLAMA, found.run)[0]
    assert sum(at_rest[part] for part in STATIC) == pytest.approx(16 * LLAMA.total_params, rel=0.005)


def test_layers_that_are_not_joined_are_refused() -> None:
    with pytest.raises(InputError, match="--stack megatron has formulas only"):
        resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), {"stack": "megatron"})


SPLIT = {"num_gpus": 8, "method": "full"}
IMPLIED = [
    ({"tp": 2}, "megatron"),
    ({"pp": 2}, "megatron"),
    ({"tp": 2, "sharding": "zero1"}, "megatron"),
    ({"tp": 2, "sharding": "fsdp"}, None),
    ({"tp": 2, "sharding": "zero3"}, None),
    ({"tp": 2, "stack": "hf-peft"}, "hf-peft"),
    ({"tp": 2, "optim": "adamw_8bit"}, None),
    ({"pp": 2, "method": "qlora"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("options", "stack"), IMPLIED, ids=lambda value: str(value)[:50])
def test_who_splits_layers_and_names_no_stack_gets_megatrons(options: dict[str, Any], stack: str | None) -> None:
    asked = read_asked("meta-llama/Llama-3.1-8B", {**SPLIT, **options})
    assert asked.options.get("stack") == stack
    assert (asked.origins.get("stack") == "assumed") == (stack == "megatron")
    assert any("--stack not given" in note for note in asked.notes) == (stack == "megatron")
    found = resolve_run(asked.architecture, asked.options, option_origins=asked.origins)
    assert found.run.stack == (stack or "hf-peft")


def test_a_model_that_megatron_is_not_built_for_keeps_the_plain_code() -> None:
    asked = read_asked("mistralai/Mixtral-8x7B-v0.1", {**SPLIT, "pp": 2})
    assert "stack" not in asked.options
    with pytest.raises(NotSupportedError, match=r"built for dense layers .* has experts; use --stack hf-peft"):
        read_asked("mistralai/Mixtral-8x7B-v0.1", {**SPLIT, "pp": 2, "stack": "megatron"})
