"""What the code that published runs ran did beyond the columns of the table, read by the vocabulary's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunecast.calibrate.priors_problem import believed_effect, effect_names, has_work, timed_rows
from tunecast.calibrate.published import PublishedRun, read_runs
from tunecast.calibrate.run_table import read_table
from tunecast.model.host import HOST_COLUMNS
from tunecast.model.inventory import step_operations

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"


@pytest.fixture(scope="module")
def runs() -> dict[str, PublishedRun]:
    return {run.id: run for run in read_runs(read_table(TABLE))[0]}


def test_attention_in_triton_is_slower_as_its_authors_measured(runs: dict[str, PublishedRun]) -> None:
    assert runs["MF-028"].attention_kernel == "flash-1-triton"
    assert runs["MF-001"].attention_kernel == runs["FM-025"].attention_kernel == ""
    assert ("attention_kernel", "flash-1-triton") in effect_names(runs["MF-028"])
    slower = believed_effect("attention_kernel", "flash-1-triton")
    assert 1.3 < 2.718281828**slower < 2.5


def test_recomputation_stops_early_since_pytorch_2_1(runs: dict[str, PublishedRun]) -> None:
    """MosaicML's runs with mixed precision PURE and in FP8 are of PyTorch 2.0.1, the others of 2.1."""
    assert runs["MF-044"].run.reentrant
    assert runs["MF-020"].run.reentrant
    assert not runs["MF-001"].run.reentrant
    executed = {name: step_operations(runs[name].architecture, runs[name].run) for name in ("MF-039", "MF-001")}
    products = {name: sum(one.total_flops for one in operations) for name, operations in executed.items()}
    per_sequence = {"MF-039": products["MF-039"] / 4, "MF-001": products["MF-001"] / 8}
    assert per_sequence["MF-039"] / per_sequence["MF-001"] == pytest.approx(24 / 22, rel=0.01)


def test_megatron_joins_maps_and_overlaps_tensor_parallel_exchanges(runs: dict[str, PublishedRun]) -> None:
    layer = runs["NB-010"].architecture.groups[0].layer
    assert [linear.name for linear in (*layer.attention.linears, *layer.mlp.linears)] == [
        "qkv_proj", "o_proj", "gate_up_proj", "down_proj",
    ]  # fmt: skip
    assert runs["NB-010"].run.lora_target_modules == ("qkv_proj",)
    assert runs["NV-013"].run.lora_target_modules == ("qkv_proj",)
    assert runs["NB-010"].run.async_tp
    assert not runs["NV-013"].run.async_tp
    assert len(runs["NA-006"].architecture.groups[0].layer.attention.linears) == 4


def test_qwens_full_training_on_one_card_runs_zero3s_hooks(runs: dict[str, PublishedRun]) -> None:
    """finetune_ds.sh: a world of one has nothing to gather, and Python around every module all the same."""
    alone, adapters = timed_rows([runs["QW-019"], runs["QW-001"]])
    hooks = alone.table.launches[:, HOST_COLUMNS.index("hooks")]
    layers, maps = 24, 5
    assert hooks[0] == layers * maps + 1
    assert alone.table.communication_s.sum() == 0.0
    assert adapters.table.launches[:, HOST_COLUMNS.index("hooks")].sum() == 0.0
    assert runs["QW-019"].run.precision == "bf16"


def test_effects_are_of_work_that_a_row_has(runs: dict[str, PublishedRun]) -> None:
    plain, four_bit, sharded, offloaded = timed_rows([runs[i] for i in ("FM-025", "FM-049", "FM-026", "TT-006")])
    assert [has_work(row, "dequant_kernel") for row in (plain, four_bit)] == [False, True]
    assert [has_work(row, "source.link") for row in (plain, sharded, offloaded)] == [False, True, False]
    assert has_work(plain, "device")
    assert has_work(plain, "source.memory")
