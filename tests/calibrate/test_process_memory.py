"""Rows whose memory is what nvidia-smi shows: compared with the forecast process."""

from __future__ import annotations

import pytest

from tunecast.calibrate.validate import judge, read_entries
from tunecast.calibrate.validate_folds import shipped
from tunecast.calibrate.vocabulary import vocabulary

ROW = {
    "id": "a-1", "model": "meta-llama/Llama-3.1-8B", "method": "lora", "rank": "16", "lora_targets": "all linear",
    "seq_len": "2048", "micro_batch": "1", "grad_accum": "4", "gpus": "1", "gpu_canonical_id": "a100-sxm4-80gb",
    "packed": "yes", "grad_checkpointing": "yes", "quant": "none", "compute_dtype": "bf16", "tokens_per_s": "3000",
    "framework": "TRL 0.20", "source_date": "2025-08",
}  # fmt: skip
COLUMN = "reserved_or_allocated"
WRITE = "write allocated, reserved, or nvidia-smi for the process"


@pytest.mark.parametrize("counter", ["nvidia-smi", "nvidia-smi (MiB, converted)", "process", "Process memory"])
def test_what_nvidia_smi_shows_is_the_process(counter: str) -> None:
    judged = judge(read_entries([{**ROW, "peak_mem_gib": "22", "reserved_or_allocated": counter}])[0], shipped)
    assert judged.prediction is not None, judged.reason
    assert judged.memory is not None, judged.why_no_memory
    assert judged.prediction.memory.process_bytes is not None
    assert judged.memory.predicted == judged.prediction.memory.process_bytes
    assert judged.memory.predicted.value > judged.prediction.memory.allocated_bytes.value


@pytest.mark.parametrize("counter", ["nvidia-smi reserved", "nvidia-smi percent", "rocm-smi"])
def test_other_counters_are_listed(counter: str) -> None:
    judged = judge(read_entries([{**ROW, "peak_mem_gib": "22", "reserved_or_allocated": counter}])[0], shipped)
    assert judged.memory is None
    assert judged.why_no_memory == f"the counter is {counter!r}, neither allocated nor reserved: {WRITE}, into {COLUMN}"


@pytest.mark.parametrize("counter", [None, "", "not stated", "Unknown", "-"])
def test_a_peak_without_a_counter_says_which_to_write(counter: str | None) -> None:
    cells = {} if counter is None else {COLUMN: counter}
    judged = judge(read_entries([{**ROW, "peak_mem_gib": "22", **cells}])[0], shipped)
    assert judged.why_no_memory == f"{COLUMN} is not stated: {WRITE}"


def test_a_counter_that_a_rule_knows_is_not_to_be_written_anew() -> None:
    """ms-swift's page: no word in its table would be another counter's."""
    counter = next(rule["counter"] for rule in vocabulary()["rules"] if "counter" in rule)
    judged = judge(read_entries([{**ROW, "peak_mem_gib": "22", COLUMN: counter}])[0], shipped)
    assert judged.why_no_memory == f"the counter is {counter!r}, neither allocated nor reserved"
