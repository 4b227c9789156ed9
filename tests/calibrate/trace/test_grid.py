"""The grid of traced cases: what it holds, and a representative part of it against the trace."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from ci_share import some_for_ci

from tunecast.calibrate.trace.grid import Case, at_depth, comparison, draw_options, model_cases, off_by
from tunecast.catalogs.errors import NotSupportedError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.families import FAMILIES
from tunecast.model.stacks import BUILT

CHEAP = "HuggingFaceTB/SmolLM2-135M"
BARS = {"allocated": 1e-3, "at_rest": 1e-9, "flops": 1e-6, "phase_flops": 1e-6, "phase_launches": 1e-3,
        "phase_bytes": 1e-3}  # fmt: skip
"""Largest relative errors."""


@pytest.fixture(scope="module", autouse=True)
def _real_code() -> None:
    for module in ("torch", "transformers", "peft", "bitsandbytes"):
        pytest.importorskip(module)


def test_the_grid_is_as_large_and_as_wide_as_promised() -> None:
    from tunecast.calibrate.trace.grid import grid_models

    models = grid_models()
    cases = [case for architecture in models.values() for case in model_cases(architecture)]
    assert len({case.name for case in cases}) >= 250
    assert {architecture.model_type for architecture in models.values()} >= {"llama", "mistral", "qwen2", "qwen3"}
    for option, least in (("max_length", 7), ("method", 3), ("lora_r", 5), ("per_device_train_batch_size", 5)):
        assert len({case.options.get(option) for case in cases} - {None}) >= least, option
    assert {case.options["optim"] for case in cases} == set(BUILT["optimizer"])
    assert sum(case.layers > 2 for case in cases) >= 25


def test_cases_are_the_same_whenever_they_are_drawn() -> None:
    architecture = load_architecture(CHEAP)
    assert list(model_cases(architecture)) == list(model_cases(architecture))
    assert draw_options(architecture, "lora", 0) != draw_options(architecture, "lora", 3)


def test_cutting_keeps_the_first_layers() -> None:
    (group,) = load_architecture(CHEAP).groups
    windowed = replace(group.layer, attention=replace(group.layer.attention, window=128))
    other = replace(group, layer=windowed, count=3)
    mixed: Architecture = replace(load_architecture(CHEAP), groups=(replace(group, count=2), other))
    assert [g.count for g in at_depth(mixed, 4).groups] == [2, 2]
    assert [g.count for g in at_depth(mixed, 1).groups] == [1]


def test_relative_error() -> None:
    assert off_by(103, 100) == pytest.approx(0.03)
    assert off_by(0, 0) == 0
    assert off_by(5, 0) == 1


OPTIONS = (
    {"method": "lora", "max_length": 512, "lora_dropout": 0.05, "gradient_checkpointing": False},
    {"method": "lora", "max_length": 2048, "lora_dropout": 0.05, "reentrant": True},
    {"method": "qlora", "max_length": 1024, "dtype": "fp32", "gradient_checkpointing": False},
    {"method": "qlora", "max_length": 1024, "reentrant": True, "per_device_train_batch_size": 8},
    {"method": "full", "max_length": 4096, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
)
WINDOWED = "mistralai/Mistral-7B-v0.1"
"""What the whole grid once found wrong, and one plain case."""


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options.values())))
def test_a_part_of_the_grid(options: dict[str, object]) -> None:
    architecture = load_architecture(CHEAP)
    row = comparison(Case(model=CHEAP, layers=2, options=options), architecture)
    for error, bar in BARS.items():
        assert abs(row["errors"][error]) <= bar, error
    assert row["traced_peak_moment"] == row["computed_peak_moment"]


REENTRANT = {
    "bloom": {"num_attention_heads": 8},
    "gpt2": {"num_attention_heads": 8},
    "gptj": {"num_attention_heads": 8, "rotary_dim": 32},
    "mpt": {"num_attention_heads": 8, "max_seq_len": 1024},
}


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("model_type", REENTRANT)
def test_reentrant_checkpoints_hold_what_layers_return_and_the_gradients_they_start_from(
    model_type: str, method: str
) -> None:
    """BLOOM, GPT-J and MPT return attention weights, whose gradient is zeros of their size. A vocabulary so small that
    the backward is the peak."""
    shape = {"hidden_size": 512, "num_hidden_layers": 3, "vocab_size": 300, "max_position_embeddings": 1024}
    architecture = architecture_from_config({"model_type": model_type, **shape, **REENTRANT[model_type]}, model_type)
    options = {"method": method, "max_length": 512, "per_device_train_batch_size": 2, "reentrant": True}
    row = comparison(Case(model=model_type, layers=3, options=options), architecture)
    assert row["traced_peak_moment"] == row["computed_peak_moment"] == "backward"
    assert abs(row["errors"]["allocated"]) <= (1e-3 if method == "lora" else 0.02)
    assert abs(row["errors"]["flops"]) <= 1e-6
    assert abs(row["errors"]["phase_launches"]) <= 1e-3


def test_a_window_that_the_sequence_reaches_costs_numbers_per_sample() -> None:
    architecture = load_architecture(WINDOWED)
    options = {"method": "lora", "max_length": 8192, "per_device_train_batch_size": 3, "gradient_checkpointing": False}
    row = comparison(Case(model=WINDOWED, layers=2, options=options), architecture)
    assert abs(row["errors"]["allocated"]) <= 1e-3
    assert abs(row["errors"]["phase_bytes"]) <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("model_type", some_for_ci(sorted(FAMILIES), 7, first=1))
def test_every_family_in_the_grid_meets_the_bars(model_type: str) -> None:
    """One case of the smallest model of each family that is traced."""
    from tunecast.calibrate.trace.grid import grid_models

    models = [a for a in grid_models().values() if a.model_type == model_type]
    if not models:
        pytest.skip(f"no catalog model of {model_type} is traced")
    architecture = min(models, key=lambda found: found.total_params)
    row = None
    for case in model_cases(architecture):
        with contextlib.suppress(NotSupportedError):
            row = comparison(case, architecture)
            break
    assert row is not None, "every case is refused"
    assert abs(row["errors"]["allocated"]) <= 0.05
    assert abs(row["errors"]["flops"]) <= 0.005
