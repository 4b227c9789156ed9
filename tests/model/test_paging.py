"""Paged optimizer state that does not fit: what crosses PCIe, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tunecast.catalogs.gpus import load_gpus
from tunecast.model.architectures import load_architecture
from tunecast.model.engine import screen
from tunecast.model.estimate import forecast
from tunecast.model.forecast import Forecast
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Kind
from tunecast.model.optimizer import optimizer_state_bytes
from tunecast.model.paging import paged_state_bytes
from tunecast.model.question import Question
from tunecast.model.resolve import resolve_run
from tunecast.model.target import resolve_targets

LLAMA_8B, QWEN_3B = "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-3B"
PARAMS_8B = 8.03e9
GEN4_X16_BYTES_PER_S = 31.5e9
"""PCI-SIG: 16 GT/s, 128b/130b, 16 lanes, one direction."""


def asked(model: str, gpu: str, optim: str, **options: object) -> Forecast:
    (target,) = resolve_targets([gpu], {})
    given = {"method": "full", "max_length": 1024, "optim": optim, **options}
    return forecast(Question(architecture=load_architecture(model), options=given), target)


def test_state_without_room_crosses_pcie_twice() -> None:
    found = asked(LLAMA_8B, "a100-sxm4-40gb", "paged_adamw_32bit")
    moved = [o for o in step_operations(load_architecture(LLAMA_8B), found.run) if o.kind is Kind.COMMUNICATION]
    usable, held = load_gpus()["a100-sxm4-40gb"].usable_bytes, found.memory.allocated_bytes
    assert usable is not None
    without_room = 8 * PARAMS_8B - (usable - held.value)  # two fp32 moments
    assert sum(o.total_bytes for o in moved) == pytest.approx(2 * without_room, rel=1e-3)
    assert found.time_parts_s["host"] > 2 * without_room / GEN4_X16_BYTES_PER_S
    assert any("paged optimizer state" in note and "PCIe" in note for note in found.notes)
    assert any("pcie_bytes_per_s" in note for note in found.notes)


@pytest.mark.parametrize(
    ("model", "gpu", "optim", "unpaged"),
    [
        (LLAMA_8B, "h200-sxm5-141gb", "paged_adamw_32bit", "adamw_torch"),  # 64 GB beside 32
        (QWEN_3B, "rtx-4090-24gb", "paged_adamw_8bit", "adamw_8bit"),  # 6 GB beside 13
    ],
)
def test_state_with_room_stays(model: str, gpu: str, optim: str, unpaged: str) -> None:
    found, plain = asked(model, gpu, optim), asked(model, gpu, unpaged)
    assert found.run.paged_bytes == 0
    assert found.time_parts_s["host"] == pytest.approx(plain.time_parts_s["host"], abs=0.01 * found.step_time_s.value)


def test_adapters_page_nothing_on_a_card_that_holds_them() -> None:
    assert asked(LLAMA_8B, "rtx-4090-24gb", "paged_adamw_32bit", method="qlora").run.paged_bytes == 0


def test_sharded_state_is_shared_out() -> None:
    llama = load_architecture(LLAMA_8B)
    runs = [
        resolve_run(llama, {"method": "full", "max_length": 1024, "optim": "paged_adamw_32bit", **more}).run
        for more in ({}, {"num_gpus": 4, "sharding": "zero2"}, {"num_gpus": 4, "sharding": "ddp"})
    ]
    whole, sharded, copied = (paged_state_bytes(llama, run) for run in runs)
    assert (whole, copied) == (copied, pytest.approx(8 * PARAMS_8B, rel=1e-3))
    assert sharded == pytest.approx(whole / 4, rel=1e-6)


@pytest.mark.parametrize("more", [{}, {"num_gpus": 4, "sharding": "zero2"}, {"num_gpus": 16, "sharding": "ddp"}])
def test_a_sweep_counts_it_as_one_forecast_does(more: dict[str, object]) -> None:
    llama = load_architecture(LLAMA_8B)
    given = {"method": "full", "max_length": 1024, "optim": "paged_adamw_32bit", **more}
    run, joined = resolve_run(llama, given).run, {"internode_gbps": 400}
    names = ["a100-sxm4-40gb", "a100-sxm4-80gb", "h200-sxm5-141gb"]
    swept = screen(llama, [run], resolve_targets(names, {}), joined).step_s[:, 0]
    alone = [asked(LLAMA_8B, name, "paged_adamw_32bit", **joined, **more) for name in names]
    assert swept == pytest.approx(np.array([found.step_time_s.value for found in alone]), rel=1e-6)
    assert alone[0].run.paged_bytes > 0
    assert alone[2].run.paged_bytes == 0


def test_a_split_model_says_that_paging_is_not_counted() -> None:
    found = asked(LLAMA_8B, "a100-sxm4-40gb", "paged_adamw_32bit", num_gpus=4, tp=4)
    assert found.run.paged_bytes == 0
    assert any("not counted with --tp" in note for note in found.notes)


def test_without_the_trainer_no_table_keeps_wide_states() -> None:
    """transformers asks bitsandbytes for 32 bits of every ``nn.Embedding``; torchtune's recipe asks for nothing."""
    llama = load_architecture(LLAMA_8B)
    own, trainer = (
        optimizer_state_bytes(llama, resolve_run(llama, {"method": "full", "optim": "adamw_8bit", "stack": stack}).run)
        for stack in ("torchtune", "hf-peft")
    )
    table = 128_256 * 4096
    assert trainer - own == pytest.approx(2 * table * (4 - 1 - 4 / 256), rel=1e-3)  # two moments, a maximum per 256


def test_a_job_scales_against_one_gpu_that_pages_all_by_itself() -> None:
    options = {"num_gpus": 4, "sharding": "zero2"}
    one, four = (asked(LLAMA_8B, "a100-pcie-40gb", "paged_adamw_32bit", **more) for more in ({}, options))
    assert 0 < four.run.paged_bytes < one.run.paged_bytes
    assert four.scaling is not None
    assert four.scaling.speedup == pytest.approx(four.tokens_per_s.value / one.tokens_per_s.value, rel=1e-6)
    assert four.scaling.exposed_communication_s == pytest.approx(four.time_parts_s["communication"])
    assert one.bound_by == "host"


def test_the_interval_reaches_from_both_ways_at_once_to_all_of_the_state() -> None:
    found = asked(QWEN_3B, "rtx-4090-24gb", "paged_adamw_32bit")
    state = paged_state_bytes(load_architecture(QWEN_3B), found.run)
    paging_s = found.time_parts_s["host"]
    assert 0 < found.run.paged_bytes < state
    rest_s = found.step_time_s.value - paging_s
    assert found.step_time_s.low < rest_s + paging_s / 2 * 1.3
    assert found.step_time_s.high > rest_s + 0.8 * paging_s * state / found.run.paged_bytes
