"""Linear attention by flash-linear-attention and causal-conv1d, against steps of their own code.

Recorded by scripts/fla_traces.py: the packages' Python on fake tensors, with every kernel's name and tensors.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tunecast
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.curve_names import find_curve
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Phase
from tunecast.model.priors import datasheet_factors, load_priors
from tunecast.model.resolve import resolve_run
from tunecast.model.value import Z80

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "fla_traces.json").read_text(encoding="utf-8")
)


def told(case: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in {**case["config"], **case["options"]}.items())


@pytest.mark.parametrize("case", RECORDED["cases"], ids=told)
def test_the_step_is_the_recorded_step(case: dict[str, Any]) -> None:
    architecture = architecture_from_config({**RECORDED["config"], **case["config"]}, "qwen-3.5")
    run = resolve_run(architecture, {**case["options"], "trainer_loop": False}).run  # recorded without one
    found: Counter[str] = Counter()
    for op in step_operations(architecture, run):
        place = f"{op.phase.value} {op.kind.value}"
        for what, value in (("count", op.count), ("launches", op.total_launches), ("bytes", op.total_bytes)):
            found[f"{place} {what}"] += value
    assert found.keys() == case["totals"].keys()
    for place, value in case["totals"].items():
        assert found[place] == pytest.approx(value, rel=1e-4), place
    forecast = memory_timeline(architecture, run)
    assert forecast.at_rest_bytes == case["at_rest_bytes"]
    assert forecast.allocated_bytes == pytest.approx(case["peak_bytes"], rel=1e-3)
    assert forecast.peak_moment == case["peak_moment"]
    for moment, peak_bytes in case["moments"].items():
        assert forecast.moments[moment] == pytest.approx(peak_bytes, rel=0.01), moment


def forward_flops(kernels: str) -> float:
    """Of one layer's linear attention with 32 heads of 128 by 128, projections apart."""
    architecture = load_architecture("Qwen/Qwen3.5-9B")
    options = {"method": "full", "max_length": 1024, "gradient_checkpointing": False, "fused_kernels": kernels}
    whole = step_operations(architecture, resolve_run(architecture, options).run)
    layers = sum(group.count for group in architecture.groups if group.layer.attention.delta is not None)
    return sum(op.total_flops for op in whole if op.phase is Phase.FORWARD) / layers


def test_kernels_run_the_products_of_the_code_in_pytorch_and_the_triangular_systems() -> None:
    """PyTorch solves each system by itself, uncounted; the kernels multiply keys and values by its inverse: 2 x 64 x
    (128 + 128) for every token and head."""
    more = forward_flops("fla") - forward_flops("none")
    assert more == pytest.approx(1024 * 32 * 2 * 64 * (128 + 128))


PUBLISHED: dict[tuple[str, int, int, int], float] = {
    ("h200-sxm5-141gb", 16, 32, 4096): 0.247e-3,
    ("h200-sxm5-141gb", 16, 48, 8192): 0.665e-3,
    ("gb200-186gb", 16, 64, 8192): 0.755e-3,
    ("a800-sxm4-80gb", 32, 32, 32768): 4.189e-3,
    ("rtx-5090-32gb", 16, 32, 8192): 0.731e-3,
    ("rtx-pro-6000-blackwell-ws-96gb", 16, 48, 8192): 1.090e-3,
}
"""Forward of ``chunk_gated_delta_rule`` without norms, heads of 128, by card, heads of keys, of values, and tokens:
seconds (QwenLM/FlashQLA, benchmark/; Leslie360/GDN-QSA-sm80, docs/GDN_CHUNK.md)."""


@pytest.mark.parametrize(("place", "measured_s"), PUBLISHED.items())
def test_published_times_are_inside_the_stated_doubt(place: tuple[str, int, int, int], measured_s: float) -> None:
    gpu, keys, values, length = place
    heads = {"linear_num_key_heads": keys, "linear_num_value_heads": values, "linear_key_head_dim": 128}
    config = {**RECORDED["config"], **heads, "linear_value_head_dim": 128, "max_position_embeddings": length}
    architecture = architecture_from_config(config, "one shape")
    run = resolve_run(architecture, {"method": "full", "max_length": length, "fused_kernels": "fla"}).run
    forward = [op for op in step_operations(architecture, run) if op.phase is Phase.FORWARD]
    curve = find_curve("memory-chunked.forward", datasheet_factors(load_gpus()[gpu], load_priors()["beliefs"]))
    moved = sum(op.total_bytes for op in forward if op.name.startswith("delta.")) / 3  # linear layers
    expected_s = moved / curve.params["bytes_per_s"]
    assert abs(math.log(measured_s / expected_s)) < Z80 * curve.log_sd


def test_a_card_of_unknown_processors_is_known_less_well() -> None:
    beliefs = load_priors()["beliefs"]
    known, unknown = (
        find_curve("memory-chunked.forward", datasheet_factors(load_gpus()[gpu], beliefs))
        for gpu in ("a100-sxm4-80gb", "mi300x-192gb")
    )
    assert unknown.log_sd > known.log_sd


def test_only_linear_attention_has_these_kernels() -> None:
    with pytest.raises(NotSupportedError, match="has no linear attention"):
        resolve_run(load_architecture("Qwen/Qwen3-8B"), {"method": "lora", "fused_kernels": "causal_conv1d"})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kernels_of_16_bits_are_refused_in_32(precision: str) -> None:
    options = {"method": "lora", "precision": precision, "fused_kernels": "causal-conv1d,FLA"}
    architecture = load_architecture("Qwen/Qwen3.5-9B")
    if precision == "bf16":
        assert resolve_run(architecture, options).run.fused_kernels == ("fla", "causal-conv1d")
        return
    with pytest.raises(InputError, match="take 16-bit numbers"):
        resolve_run(architecture, options)


def test_cards_that_triton_does_not_support_have_none_of_its_kernels() -> None:
    options: dict[str, Any] = {"method": "lora", "fused_kernels": "fla,causal-conv1d"}
    with pytest.raises(InputError, match=r"compute capability 7\.5 .* type --fused-kernels causal-conv1d"):
        tunecast.estimate("Qwen/Qwen3.5-0.8B", gpu="t4-16gb", **options)
    tunecast.estimate("Qwen/Qwen3.5-0.8B", gpu="t4-16gb", **{**options, "fused_kernels": "causal-conv1d"})
    found = tunecast.recommend(
        "Qwen/Qwen3.5-0.8B", gpu=["t4-16gb", "l4-24gb"], tokens="1M", max_gpus=1, usd_per_gpu_hour=1.0, **options
    )
    assert {rejected.gpu: rejected.reason for rejected in found.rejected} == {"t4-16gb": "not run"}


@pytest.mark.parametrize("origin", ["cli", "file"])
def test_kernels_that_cannot_be_are_named_together_and_by_who_asked(origin: str) -> None:
    options = {"method": "lora", "fused_kernels": "rms_norm,rope,swiglu"}
    said = {
        "cli": "--fused-kernels rms_norm,rope was asked for",
        "file": "training file asks for fused kernels of rms_norm,rope, .*; --fused-kernels swiglu leaves",
    }
    with pytest.raises(NotSupportedError, match=said[origin]):
        resolve_run(load_architecture("Qwen/Qwen3.5-9B"), options, option_origins={"fused_kernels": origin})


def test_a_note_says_which_code_is_forecast() -> None:
    architecture = load_architecture("Qwen/Qwen3.5-9B")
    plain, fused = (resolve_run(architecture, {"method": "lora", "fused_kernels": each}) for each in ("none", "fla"))
    assert any("--fused-kernels fla,causal-conv1d" in note for note in plain.notes)
    assert not any("PyTorch code" in note for note in fused.notes)
    assert resolve_run(architecture, {"method": "lora", "fused_kernels": "flash-linear-attention"}).run == fused.run
