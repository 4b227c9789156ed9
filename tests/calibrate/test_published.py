"""Published rows are read by the vocabulary or skipped with the reason; nothing is guessed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tunecast.calibrate.published import read_runs, vocabulary
from tunecast.calibrate.row_cells import VOCABULARY_COLUMNS
from tunecast.calibrate.run_table import NEEDED_COLUMNS, read_table
from tunecast.catalogs.errors import InputError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.memory import memory_timeline
from tunecast.model.units import MIB

FLASH = "flash_attention_2"

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in read_table(TABLE)}


def test_a_plain_lora_row_becomes_the_run_it_describes(rows: dict[str, dict[str, str]]) -> None:
    (found,), _ = read_runs([rows["FM-025"]])
    run = found.run
    assert (found.gpu, found.source, found.stack) == ("a100-sxm4-80gb", "FM", "hf-peft")
    assert (run.method, run.lora_r, run.max_length, run.per_device_train_batch_size) == ("lora", 16, 4096, 4)
    assert run.lora_target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert run.gradient_checkpointing
    assert run.precision == "bf16"
    assert run.adapter_dtype == "fp32"  # PEFT 0.13.2 casts adapters of 16-bit models up unless told not to
    assert run.attn_implementation == "flash_attention_2"
    assert found.tokens_per_s == pytest.approx(3324.16)


def test_layers_that_the_source_states_are_in_fp32_are(rows: dict[str, dict[str, str]]) -> None:
    assert "Non-quantized layers are held in fp32" in rows["FT-001"]["notes"]
    (found,), _ = read_runs([rows["FT-001"]])
    assert (found.run.dtype, found.run.precision, found.run.attn_implementation) == ("fp32", "fp32", "eager")
    assert (found.run.bnb_4bit_compute_dtype, found.run.double_quant, found.run.keeps_outputs) == ("fp16", False, True)


def test_allocated_of_every_run_on_a_t4(rows: dict[str, dict[str, str]]) -> None:
    """The source's own loop, tensors against tensors: what is scored is what its allocator reserved."""
    runs, skipped = read_runs(row for name, row in rows.items() if name.startswith("FT-"))
    assert not skipped
    errors = []
    for found in runs:
        stated = re.search(r"peak allocated ([\d.]+)", found.notes)
        assert stated is not None
        forecast = memory_timeline(found.architecture, found.run).allocated_bytes / MIB
        errors.append(forecast / float(stated[1]) - 1)
    assert len(errors) == 22
    assert max(abs(error) for error in errors) < 0.025
    assert abs(sorted(errors)[11]) < 0.01


@pytest.mark.parametrize(
    ("row_id", "reason"),
    [
        ("TT-002", "low confidence"),
        ("TT-009", "packed 'unknown'"),
        ("TT-016", "packed 'no'"),
        ("UN-001", "print neither the length"),
        ("TM-001", "name no GPU"),
        ("SW-069", "low confidence"),
        ("NB-013", "nvfp4"),
    ],
)
def test_rows_that_would_need_a_guess_are_skipped_by_name(
    rows: dict[str, dict[str, str]], row_id: str, reason: str
) -> None:
    _, (skipped,) = read_runs([rows[row_id]])
    assert reason in skipped.reason


def test_an_unmapped_value_names_its_column(rows: dict[str, dict[str, str]]) -> None:
    _, (skipped,) = read_runs([{**rows["FM-025"], "optimizer": "Zorro"}])
    assert skipped.reason == "optimizer 'Zorro' is not in the vocabulary"


def test_every_row_is_used_or_has_a_reason(rows: dict[str, dict[str, str]]) -> None:
    runs, skipped = read_runs(rows.values())
    assert len(runs) + len(skipped) == len(rows)
    assert all(skip.reason for skip in skipped)
    assert {run.id for run in runs}.isdisjoint(row_id for row_id, row in rows.items() if row["confidence"] == "low")


def test_the_vocabulary_covers_its_columns() -> None:
    assert set(VOCABULARY_COLUMNS) <= set(vocabulary())


def test_a_table_without_a_needed_column_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("id,model\nA-1,x\n")
    with pytest.raises(InputError, match=r"lacks the column 'method'"):
        read_table(table)
    with pytest.raises(InputError, match="Cannot read"):
        read_table(tmp_path / "absent.csv")
    assert "confidence" not in NEEDED_COLUMNS


def test_a_users_own_table_may_have_fewer_columns(tmp_path: Path) -> None:
    """An absent column is the stack's default; ids are then the rows' numbers."""
    table = tmp_path / "runs.csv"
    table.write_text(
        "model,gpu,method,seq_len,micro_batch,tokens_per_s\n"
        "meta-llama/Llama-3.1-8B,L40S,lora,1024,2,1900\n"
        "meta-llama/Llama-3.1-8B,L40S,prefix,1024,2,1900\n"
        "meta-llama/Llama-3.1-8B,,lora,1024,2\n"
    )
    (found,), skipped = read_runs(read_table(table))
    assert (found.id, found.gpu, found.stack, found.tokens_per_s) == ("row-1", "l40s-48gb", "hf-peft", 1900)
    assert (found.run.num_gpus, found.run.lora_r, found.run.gradient_checkpointing) == (1, 16, True)
    assert [skip.reason for skip in skipped] == ["method 'prefix' is not in the vocabulary", "gpu is not stated"]


def test_several_gpus_need_their_parallelism(rows: dict[str, dict[str, str]]) -> None:
    row = {name: value for name, value in rows["FM-025"].items() if name != "parallelism"}
    _, (skipped,) = read_runs([{**row, "gpus": "2"}])
    assert skipped.reason == "parallelism is not stated: write DDP, FSDP, a ZeRO stage or degrees"


@pytest.mark.parametrize(
    ("row_id", "expected"),
    [
        ("TT-020", {"torch_compile": True, "reentrant": True, "gradient_checkpointing": True}),
        ("TT-023", {"optim": "adamw_bnb_8bit", "optimizer_in_backward": True, "activation_offloading": True}),
        ("TI-002", {"checkpoint_keeps_ops": True, "compile_loss": False, "master_dtype": "fp32", "fp8": None}),
        ("TI-017", {"checkpoint_keeps_ops": True, "compile_loss": True, "fp8": "torchao"}),
        ("NB-010", {"lora_r": 16, "pp_interleave": 20, "tp": 2, "fp8": "megatron-current", "gpus_per_node": 8}),
        (
            "NB-002",
            {"pp_interleave": 20, "gradient_checkpointing": False, "fp8": "megatron-mxfp8", "gpus_per_node": 72},
        ),
        ("XT-003", {"cp": 8, "cp_kind": "ulysses", "sharding": "zero3", "dtype": "fp16", "precision": "fp16"}),
        ("FF-001", {"sharding": "hsdp", "fsdp_version": 1, "master_dtype": "fp32", "torch_compile": False}),
        ("SW-070", {"sharding": "zero2", "reentrant": True, "max_length": 8192, "attn_implementation": FLASH}),
        ("NV-013", {"lora_r": 32, "lora_target_modules": ("qkv_proj",), "fp8": "megatron"}),
    ],
)
def test_what_the_code_of_a_source_states_is_read(
    rows: dict[str, dict[str, str]], row_id: str, expected: dict[str, object]
) -> None:
    (found,), _ = read_runs([rows[row_id]])
    assert {name: getattr(found.run, name) for name in expected} == expected


def test_a_cell_that_the_source_fills_is_not_filled_by_a_rule(rows: dict[str, dict[str, str]]) -> None:
    (found,), _ = read_runs([{**rows["NB-010"], "rank": "64"}])
    assert found.run.lora_r == 64


def test_a_card_in_the_notes_of_a_source_is_one_of_the_catalog(rows: dict[str, dict[str, str]]) -> None:
    (found,), _ = read_runs([rows["TI-004"]])
    assert load_gpus()[found.gpu].bandwidth_bytes_per_s == 2.4e12
    assert found.network == {"internode_gbps": 8 * 400}


def test_a_sentence_on_the_network_between_machines_is_read(rows: dict[str, dict[str, str]]) -> None:
    """MosaicML's tables name it in their notes; two that differ are no figure, and a column's own goes first."""
    (found,), _ = read_runs([rows["MF-023"]])
    assert "1600 Gbps node-node" in rows["MF-023"]["notes"]
    assert found.network == {"internode_gbps": 1600}
    (found,), _ = read_runs([{**rows["MF-023"], "internode_gbps": "800"}])
    assert found.network == {"internode_gbps": 800}
    (found,), _ = read_runs([{**rows["MF-023"], "gpu_variant_notes": "3,200 Gbit/s inter-node"}])
    assert found.network == {}


def test_memory_left_by_batches_of_changing_length_is_no_steps(rows: dict[str, dict[str, str]]) -> None:
    """The card of ms-swift's news runs holds blocks of every length met: listed and a test of fit, never scored."""
    (found,), _ = read_runs([{name: value for name, value in rows["SW-004"].items() if name != "packed"}])
    assert rows["SW-004"]["reserved_or_allocated"] == "reserved"
    assert not found.counter.startswith(("reserved", "allocated"))
    assert (found.run.bnb_4bit_quant_type, found.run.double_quant, found.run.hf_code) == ("nf4", True, "4.46")
    (gptq,), _ = read_runs([{name: value for name, value in rows["SW-003"].items() if name != "packed"}])
    assert (gptq.run.quant_method, gptq.run.precision, gptq.run.gptq_kernel) == ("gptq-8bit", "fp16-autocast", "torch")


def test_megatron_bridge_adapts_the_joined_projection_alone_since_2026(rows: dict[str, dict[str, str]]) -> None:
    """Pull request 2181 of NVIDIA-NeMo/Megatron-Bridge, merged on 2026-02-10; before, every linear map."""
    row = rows["NB-006"]
    (now,), _ = read_runs([row])
    (before,), _ = read_runs([{**row, "source_date": "2025-12"}])
    assert now.run.lora_target_modules == ("qkv_proj",)
    assert before.run.lora_target_modules == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def test_automodel_patches_models_of_transformers_with_liger_kernels_on_one_gpu(
    rows: dict[str, dict[str, str]],
) -> None:
    (single, split), _ = read_runs([rows["NA-004"], rows["NA-006"]])
    assert {"rms_norm", "rope", "swiglu"} <= set(single.run.fused_kernels)
    assert (single.run.lora_dropout, split.run.lora_dropout) == (0.1, 0.0)
    assert not {"rms_norm", "rope", "swiglu"} & set(split.run.fused_kernels)
