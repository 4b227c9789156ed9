"""Why a row is skipped: in its own columns, and all of its cells at once."""

from __future__ import annotations

from dataclasses import fields

import pytest
from table_rows import reason

from tunecast.calibrate.published import read_runs
from tunecast.calibrate.row_faults import COLUMN_OF, in_columns
from tunecast.calibrate.run_columns import READ
from tunecast.calibrate.validate import judge, read_entries
from tunecast.calibrate.validate_folds import shipped
from tunecast.model.run import Run

ROW = {
    "id": "a", "model": "Llama 3.1 8B", "gpu": "H100 80GB SXM", "gpus": "1", "method": "lora", "quant": "none",
    "compute_dtype": "bf16", "seq_len": "2048", "packed": "yes", "micro_batch": "1", "grad_accum": "1",
    "parallelism": "single", "grad_checkpointing": "yes", "attention_impl": "sdpa", "framework": "TRL",
    "optimizer": "AdamW", "lora_targets": "all linear", "rank": "16", "tokens_per_s": "9000",
}  # fmt: skip


def test_the_row_itself_is_read() -> None:
    runs, skipped = read_runs([ROW])
    assert (len(runs), skipped) == (1, [])


def test_every_cell_that_other_words_would_mend_is_named_at_once() -> None:
    told = reason(
        {
            **ROW,
            "gpu": "H101",
            "method": "lorra",
            "packed": "perhaps",
            "framework": "TRLX",
            "seq_len": "long",
            "model": "Lama 9",
        }
    )
    for named in ("gpu: Unknown GPU 'H101'", "model: Unknown model 'Lama 9'", "method 'lorra'", "packed 'perhaps'"):
        assert told.count(named) == 1, told
    assert "framework 'TRLX'" in told
    assert "seq_len 'long'" in told


@pytest.mark.parametrize("framework", ["TRL", "LitGPT"])
def test_a_module_that_the_model_lacks_is_told_with_its_column_beside_the_other_cells(framework: str) -> None:
    told = reason({**ROW, "framework": framework, "lora_targets": "nothing"})
    assert told.startswith("lora_targets: Unknown target module 'nothing'")
    told = reason({**ROW, "framework": framework, "lora_targets": "q_proj, foo_proj", "tokens_per_s": "fast"})
    assert told.startswith("lora_targets: Unknown target module 'foo_proj'")
    assert "tokens_per_s 'fast'" in told


def test_what_is_not_built_is_told_alone() -> None:
    """No other words would have it read, so that nothing else of the row matters."""
    told = reason({**ROW, "method": "DPO", "packed": "perhaps"})
    assert told.startswith("method 'DPO'")
    assert "packed" not in told


@pytest.mark.parametrize(
    ("cells", "columns"),
    [
        ({"gpus": "8", "parallelism": "HSDP"}, "parallelism, gpus: "),
        ({"quant": "gptq 4bit", "method": "qlora"}, "compute_dtype 'bf16': "),
    ],
)
def test_a_refusal_in_words_of_options_names_the_columns(cells: dict[str, str], columns: str) -> None:
    assert reason({**ROW, **cells}).startswith(columns)


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (
            {"model": "deepseek-ai/DeepSeek-V3", "source_date": "2025-08"},
            "framework 'TRL' of source_date '2025-08': transformers before 5, as which the experts of deepseek-ai/Deep",
        ),
        (
            {"framework": "TRL 0.18", "attention_impl": "FlashAttention-2", "compute_dtype": None},
            "compute_dtype is not stated, and the default of framework 'TRL 0.18' is fp32, which flash kernels do not",
        ),
        (
            {"attention_impl": "FlashAttention-2", "compute_dtype": "fp32"},
            "compute_dtype 'fp32' is fp32, which flash kernels do not take",
        ),
        (
            {"quant": "gptq 4bit", "method": "qlora"},
            "compute_dtype 'bf16': the kernels that train a GPTQ base multiply in fp16; write fp16 mixed if they did",
        ),
    ],
)
def test_a_refusal_that_no_option_mends_is_told_in_cells(cells: dict[str, str | None], told: str) -> None:
    row = {column: text for column, text in {**ROW, **cells}.items() if text is not None}
    assert reason(row).startswith(told)
    assert "--" not in reason(row)


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (
            {"model": "pythia-6.9b", "gpus": "8", "parallelism": "TP=2, ZeRO-1", "framework": None},
            "parallelism: Tensor parallelism is built for plain heads",
        ),
        (
            {"grad_checkpointing": "core attention", "attention_impl": "eager"},
            "grad_checkpointing: recomputing attention alone of eager attention is not built yet.",
        ),
    ],
)
def test_a_refusal_advises_no_other_run(cells: dict[str, str | None], told: str) -> None:
    found = reason({column: text for column, text in {**ROW, **cells}.items() if text is not None})
    assert found.startswith(told)
    assert "--" not in found


def test_a_network_that_no_catalog_knows_is_asked_for_by_its_column() -> None:
    """No instance with this card says how its machines are joined; the row may."""
    cells = {**ROW, "gpus": "64", "gpu": "A800 80GB", "parallelism": "FSDP, 8 nodes", "global_batch": ""}
    without = judge(read_entries([cells])[0], shipped)
    assert (without.reason or "").startswith("internode_gbps: ")
    assert judge(read_entries([{**cells, "internode_gbps": "800"}])[0], shipped).speed is not None


def test_every_option_is_a_field_of_a_run_and_every_column_is_read() -> None:
    assert set(COLUMN_OF.values()) <= set(READ)
    assert {name.replace("-", "_") for name in COLUMN_OF} <= {field.name for field in fields(Run)} | {"internode_gbps"}


@pytest.mark.parametrize(
    ("cells", "first"),
    [
        ({"global_batch": "0.5M tokens", "compile": "perhaps"}, "compile 'perhaps'"),
        ({"global_batch": "0.5M tokens", "attention_impl": "flish"}, "attention_impl 'flish'"),
        ({"global_batch": "64 (2x4x8)", "compile": "perhaps"}, "compile 'perhaps'"),
        ({"micro_batch": "16 (2 per GPU)", "compile": "perhaps", "gpus": "8"}, "compile 'perhaps'"),
        ({"tokens_per_s": "40k (8 GPUs)", "compile": "perhaps", "gpus": "8"}, "compile 'perhaps'"),
        ({"tokens_per_s": "", "step_time_s": "OOM", "compile": "perhaps"}, "ran out of memory"),
    ],
)
def test_a_cell_that_the_row_reads_is_no_second_reason(cells: dict[str, str], first: str) -> None:
    told = reason({**ROW, "parallelism": "DDP" if "gpus" in cells else "single", **cells})
    assert told.startswith(first)
    assert "beside" not in told
    assert "holds" not in told
    assert ";" not in told


def test_a_batch_that_nobody_understands_is_still_a_second_reason() -> None:
    told = reason({**ROW, "global_batch": "0.5M zebras", "compile": "perhaps"})
    assert "compile 'perhaps'" in told
    assert "global_batch '0.5M zebras' holds 'M zebras' beside 0.5" in told


def test_a_refusal_without_options_stays_as_it_is() -> None:
    assert in_columns("no speed is stated") == "no speed is stated"
