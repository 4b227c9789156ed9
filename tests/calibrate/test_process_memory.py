"""Rows whose memory is what nvidia-smi shows: compared with the forecast process."""

from __future__ import annotations

import pytest

from tunecast.calibrate.validate import judge, read_entries
from tunecast.calibrate.validate_folds import shipped

ROW = {
    "id": "a-1", "model": "meta-llama/Llama-3.1-8B", "method": "lora", "rank": "16", "lora_targets": "all linear",
    "seq_len": "2048", "micro_batch": "1", "grad_accum": "4", "gpus": "1", "gpu_canonical_id": "a100-sxm4-80gb",
    "packed": "yes", "grad_checkpointing": "yes", "quant": "none", "compute_dtype": "bf16", "tokens_per_s": "3000",
    "framework": "TRL 0.20", "source_date": "2025-08",
}  # fmt: skip


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
    assert judged.why_no_memory == f"the counter is {counter!r}, neither allocated nor reserved"
