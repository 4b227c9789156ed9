"""Training loops that are not the Trainer's, against the traced real code: no autocast, outputs kept by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tunecast.calibrate.trace.tracer import trace_step
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Kind
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.units import MIB

RunOf = Callable[..., Run]
Make = Callable[..., Architecture]
SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
PLAIN, TIED = {"model_type": "llama", **SMALL}, {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True}
WIDE = {"precision": "fp32", "upcast_non_quantized": True, "method": "qlora", "lora_target_modules": "q_proj,down_proj"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PLAIN, {**WIDE, "bnb_4bit_compute_dtype": "fp16", "double_quant": False, "keeps_outputs": True}),
    (TIED, {**WIDE, "bnb_4bit_compute_dtype": "bf16", "attn_implementation": "eager"}),
    (TIED, {**WIDE, "bnb_4bit_compute_dtype": "fp16", "attn_implementation": "eager", "keeps_outputs": True}),
    (PLAIN, {"method": "qlora", "precision": "bf16", "bnb_4bit_compute_dtype": "fp32", "adapter_dtype": "bf16"}),
    (PLAIN, {"keeps_outputs": True, "attn_implementation": "eager", "lora_target_modules": "q_proj"}),
    (PLAIN, {"keeps_outputs": True, "precision": "fp16", "dtype": "fp16", "attn_implementation": "eager"}),
]


@pytest.fixture(scope="module")
def llama(make: Make) -> Architecture:
    return make("llama-3.1-8b")


@pytest.mark.parametrize(("config", "options"), CASES, ids=lambda value: "-".join(map(str, value.values()))[-60:])
def test_the_step_is_the_traced_step(config: dict[str, Any], options: dict[str, Any], run_of: RunOf) -> None:
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)
    architecture = architecture_from_config(config, "small")
    run = run_of(architecture, **{"max_length": 512, "per_device_train_batch_size": 2, **options})
    trace, forecast = trace_step(architecture, run), memory_timeline(architecture, run)
    operations = step_operations(architecture, run)
    for quantity in ("total_launches", "total_flops", "total_bytes"):
        found, expected = (
            sum(getattr(op, quantity) for op in stream if op.kind is not Kind.ATTENTION)
            for stream in (operations, trace.stream)
        )
        assert found == pytest.approx(expected, rel=1e-3), quantity
    assert forecast.at_rest_bytes == trace.memory.at_rest_bytes
    assert forecast.allocated_bytes == pytest.approx(trace.memory.peak_bytes, rel=2e-3)
    for moment, peak_bytes in trace.memory.moments.items():
        assert forecast.moments[moment] == pytest.approx(peak_bytes, rel=1e-2), moment


MEASURED_MIB = [
    ("tinyllama-1.1b", 2, 1024, "eager", 2876.0),
    ("tinyllama-1.1b", 2, 2048, "sdpa", 3897.0),
    ("tinyllama-1.1b", 2, 2048, "eager", 6655.0),
    ("smollm2-1.7b", 4, 1024, "eager", 5297.0),
    ("qwen2.5-1.5b", 2, 1024, "sdpa", 6823.0),
]
"""``torch.cuda.max_memory_allocated`` on a T4, fitcheck ``data/measurements/t4-qlora-2026-09-01.json``: rank 32 on the
four attention maps, nf4 prepared by PEFT, fp16 products without autocast, ``out`` kept (``scripts/measure.py``)."""
SHAPES = {
    "tinyllama-1.1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    "smollm2-1.7b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(("model", "batch", "length", "attention", "measured_mib"), MEASURED_MIB)
def test_allocated_as_measured_on_a_t4(
    model: str, batch: int, length: int, attention: str, measured_mib: float
) -> None:
    """Within 2.5%: cuBLAS's workspace and what the allocator does not split are not tensors of the step."""
    architecture = architecture_from_config(SHAPES[model], model)
    options = {
        "method": "qlora", "lora_r": 32, "lora_target_modules": "q_proj,k_proj,v_proj,o_proj", "precision": "fp32",
        "bnb_4bit_compute_dtype": "fp16", "double_quant": False, "upcast_non_quantized": True, "keeps_outputs": True,
        "max_length": length, "per_device_train_batch_size": batch, "attn_implementation": attention,
    }  # fmt: skip
    run = resolve_run(architecture, options, gpu_has_bf16=False).run
    assert memory_timeline(architecture, run).allocated_bytes / MIB == pytest.approx(measured_mib, rel=0.025)


def test_kept_outputs_are_the_logits(llama: Architecture) -> None:
    run = resolve_run(llama, {"max_length": 2048}).run
    more = memory_timeline(llama, replace(run, keeps_outputs=True)).allocated_bytes
    assert more - memory_timeline(llama, run).allocated_bytes == 2 * 2048 * llama.vocab_size


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"method": "qlora", "bnb_4bit_compute_dtype": "fp32"}, NotSupportedError, "--precision bf16-autocast"),
        ({"method": "qlora", "bnb_4bit_compute_dtype": "int8"}, InputError, "bf16, fp16, fp32"),
        ({"method": "lora", "bnb_4bit_compute_dtype": "bf16"}, InputError, "--method qlora"),
        ({"method": "qlora", "quant_method": "bnb-8bit", "bnb_4bit_compute_dtype": "bf16"}, InputError, "bnb-4bit"),
        (
            {"method": "qlora", "upcast_non_quantized": True, "precision": "fp32"},
            InputError,
            "--bnb-4bit-compute-dtype",
        ),
    ],
)
def test_contradictions_name_both_options(
    llama: Architecture, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        resolve_run(llama, options)


def test_a_card_without_bf16_multiplies_4_bits_in_fp16(llama: Architecture) -> None:
    options = {"method": "qlora", "precision": "fp32", "bnb_4bit_compute_dtype": "bf16"}
    resolved = resolve_run(llama, options, gpu_has_bf16=False)
    assert resolved.run.bnb_4bit_compute_dtype == "fp16"
    assert any("4-bit products in fp16" in note for note in resolved.notes)
