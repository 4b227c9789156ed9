"""Allocations of a few layers unrolled to the model's depth: those of every layer written out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_configs import small_qwen2

from tunecast.model import unrolled
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.run import Run
from tunecast.model.short_stack import whole_stack
from tunecast.model.step import write_step
from tunecast.model.unrolled import Changes, sections, step_changes

RunOf = Callable[..., Run]
DEPTH = 11
SMALL = small_qwen2(DEPTH)
PATTERN = {
    "model_type": "gemma3_text", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 18, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192, "max_position_embeddings": 8192,
    "sliding_window": 128, "tie_word_embeddings": True,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 6,
}  # fmt: skip
OPTIONS = st.fixed_dictionaries(
    {
        "method": st.sampled_from(("full", "lora", "qlora")),
        "gradient_accumulation_steps": st.integers(1, 3),
        "gradient_checkpointing": st.booleans(),
        "reentrant": st.booleans(),
        "max_length": st.sampled_from((64, 256, 700)),
        "loss_type": st.sampled_from(("nll", "chunked_nll", "liger")),
    }
)


def in_order(changes: Changes) -> list[Any]:
    """Tensors numbered as they appear; frees in a row are one set, for they leave the same blocks in any order."""
    numbers: dict[int, int] = {}
    pairs = [(numbers.setdefault(s, len(numbers)), size) for s, size in zip(changes.slots, changes.sizes, strict=True)]
    return [sorted(same) if freeing else list(same) for freeing, same in groupby(pairs, key=lambda pair: not pair[1])]


def written(architecture: Architecture, run: Run) -> Changes:
    return unrolled._as_written(sections(write_step(architecture, run, "cuda"), whole_stack(architecture)))


@settings(max_examples=25, deadline=None)
@given(options=OPTIONS, config=st.sampled_from((SMALL, PATTERN)))
def test_unrolled_changes_are_those_of_every_layer(
    run_of: RunOf, options: dict[str, Any], config: dict[str, Any]
) -> None:
    architecture = architecture_from_config(config, "small")
    run = run_of(architecture, **options)
    found = step_changes(architecture, run, "cuda")
    assert found is not None
    assert in_order(found) == in_order(written(architecture, run))
    assert len(found.kept()) == len(written(architecture, run).kept())


def test_layers_that_repeat_are_not_written_out(run_of: RunOf, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, depths = architecture_from_config({**SMALL, "num_hidden_layers": 60}, "small"), []

    def write(here: Architecture, run: Run, platform: str) -> Any:
        depths.append(here.num_layers)
        return write_step(here, run, platform)

    monkeypatch.setattr(unrolled, "write_step", write)
    found = step_changes(architecture, run_of(architecture), "cuda")
    assert depths == [5]
    assert found is not None
    shorter = step_changes(
        architecture_from_config({**SMALL, "num_hidden_layers": 59}, "small"), run_of(architecture), "cuda"
    )
    shortest = step_changes(
        architecture_from_config({**SMALL, "num_hidden_layers": 58}, "small"), run_of(architecture), "cuda"
    )
    assert shorter is not None
    assert shortest is not None
    assert len(found.slots) - len(shorter.slots) == len(shorter.slots) - len(shortest.slots) > 0


def test_gradients_are_what_stays(run_of: RunOf) -> None:
    """Seven maps with two adapters each in every layer."""
    architecture = architecture_from_config(SMALL, "small")
    found = step_changes(architecture, run_of(architecture, method="lora"), "cuda")
    assert found is not None
    assert len(found.kept()) == 14 * DEPTH


def test_loops_written_for_several_turns_are_not_replayed(run_of: RunOf) -> None:
    """Gated delta rules go through their chunks in a loop of which a few turns are written."""
    config = {
        **SMALL, "model_type": "qwen3_next", "head_dim": 64, "layer_types": ["linear_attention"] * DEPTH,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    }  # fmt: skip
    architecture = architecture_from_config(config, "small")
    assert step_changes(architecture, run_of(architecture, max_length=4096), "cuda") is None
