"""Stages that do not divide the layers: Llama 3.1 405B's published layout, and the whole model in every split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture
from tunecast.model.flops import executed_flops_per_step
from tunecast.model.inventory import busiest_stage, part_operations, total_flops
from tunecast.model.memory import memory_timeline
from tunecast.model.parallel import local_architecture
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.stages import stage_layers, stage_range, stages_counted

Make = Callable[..., Architecture]
RunOf = Callable[..., Run]
FULL: dict[str, Any] = {"method": "full", "max_length": 2048}
META: dict[str, Any] = {"method": "full", "max_length": 8192, "num_gpus": 16384, "tp": 8, "pp": 16,
                        "sharding": "fsdp-grad-op", "gradient_accumulation_steps": 16}  # fmt: skip


def test_llama_405b_as_meta_dealt_it_out() -> None:
    """126 layers over 16 stages, one fewer in the first and in the last (arXiv 2407.21783, section 3.3.2)."""
    assert stage_layers(126, 16) == (7, 8, 7)
    llama = load_architecture("meta-llama/Llama-3.1-405B")
    resolved = resolve_run(llama, META)
    assert any("7 in the first, 8 in each between, 7 in the last" in note for note in resolved.notes)
    held = [local_architecture(llama, resolved.run, stage).num_layers for stage in range(16)]
    assert held == [7, *[8] * 14, 7]
    assert 0 < busiest_stage(llama, resolved.run) < 15, "a layer has 3.2 billion weights, the head 2.1 billion"


@given(layers=st.integers(1, 130), stages=st.integers(1, 20))
def test_every_layer_is_on_one_stage(layers: int, stages: int) -> None:
    if min(stage_layers(layers, stages)) < 1:
        return
    ranges = [stage_range(layers, stages, stage) for stage in range(stages)]
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(layers))
    assert len({stop - start for start, stop in ranges[1:-1]}) <= 1


@pytest.mark.parametrize(("layers", "pp"), [(14, 4), (13, 4), (7, 2)])
def test_uneven_stages_do_the_work_of_the_whole_model(make: Make, run_of: RunOf, layers: int, pp: int) -> None:
    llama = make("llama-3.1-8b", layers)
    alone, split = run_of(llama, **FULL), run_of(llama, num_gpus=pp, pp=pp, gradient_accumulation_steps=8, **FULL)
    assert executed_flops_per_step(llama, split) == pytest.approx(8 * executed_flops_per_step(llama, alone), rel=1e-6)
    held = sum(local_architecture(llama, split, stage).total_params for stage in range(pp))
    assert held == llama.total_params


def test_the_busiest_stage_and_the_fullest_decide(make: Make, run_of: RunOf) -> None:
    """A layer has 218 million weights and the head 525 million: the last stage, one layer short, is the busiest."""
    llama = make("llama-3.1-8b", 14)
    run = run_of(llama, num_gpus=4, pp=4, gradient_accumulation_steps=8, **FULL)
    work = [total_flops(part_operations(llama, run, stage)) for stage in range(4)]
    assert busiest_stage(llama, run) == work.index(max(work)) == 3
    fewer = run_of(make("llama-3.1-8b", 13), num_gpus=4, pp=4, gradient_accumulation_steps=8, **FULL)
    assert memory_timeline(make("llama-3.1-8b", 13), fewer).allocated_bytes > 0
    first, middle, last = stage_layers(13, 4)
    assert (first, middle, last) == (3, 4, 2)


def test_ends_that_would_have_no_layer_are_refused(make: Make, run_of: RunOf) -> None:
    llama = make("llama-3.1-8b", 9)
    with pytest.raises(InputError, match="cannot deal out the 9 layers"):
        run_of(llama, num_gpus=8, pp=8, **FULL)
    with pytest.raises(InputError, match=r"--pp-interleave 3 .* --pp-interleave can be 1 or 2 or 4\."):
        run_of(make("llama-3.1-8b", 14), num_gpus=4, pp=4, pp_interleave=3, **FULL)


@pytest.mark.parametrize(("pp", "length"), [(4, 131072), (8, 32768)])
def test_stages_in_the_middle_have_the_layers_that_they_have(pp: int, length: int) -> None:
    """Gemma 3 4B: every sixth of 34 layers attends to the whole row, which middle stages have 0, 1 or 2 of."""
    gemma = load_architecture("google/gemma-3-4b-pt")
    options = {**FULL, "max_length": length, "attn_implementation": "flash_attention_2", "num_gpus": pp, "pp": pp}
    run = resolve_run(gemma, {**options, "gradient_accumulation_steps": 2 * pp, "sharding": "none"}).run
    work = [total_flops(part_operations(gemma, run, stage)) for stage in range(pp)]
    assert executed_flops_per_step(gemma, run) == pytest.approx(sum(work), rel=1e-9)
    assert len({round(each / 1e12) for each in work[1:-1]}) > 1
    assert work[busiest_stage(gemma, run)] == max(work)
    assert {stage for stage, _ in stages_counted(gemma, run)} <= set(range(pp))
    assert sum(count for _, count in stages_counted(gemma, run)) == pp
