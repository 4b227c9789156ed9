"""GPU names as people and drivers spell them, and devices as they report themselves."""

from __future__ import annotations

import re

import pytest

from tunecast.catalogs.errors import InputError, UnknownNameError
from tunecast.catalogs.gpus import find_gpu, load_gpus, match_device, training_dtype

GIB = 1024**3
MIB = 1024**2


@pytest.mark.parametrize(
    ("name", "gpu_id"),
    [
        ("a100-sxm4-80gb", "a100-sxm4-80gb"),
        ("A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("4090", "rtx-4090-24gb"),
        ("RTX 4090", "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("rtx4090", "rtx-4090-24gb"),
        ("3060", "rtx-3060-12gb"),
        ("3090 Ti", "rtx-3090-ti-24gb"),
        ("A10G", "a10g-24gb"),
        ("A10", "a10-24gb"),
        ("A40", "a40-48gb"),
        ("A6000", "rtx-a6000-48gb"),
        ("6000 Ada", "rtx-6000-ada-48gb"),
        ("T4", "t4-16gb"),
        ("Tesla T4", "t4-16gb"),
        ("L40", "l40-48gb"),
        ("L40S", "l40s-48gb"),
        ("H100 SXM", "h100-sxm5-80gb"),
        ("H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("GH200", "gh200-96gb"),
        ("B200", "b200-sxm-180gb"),
        ("MI300X", "mi300x-192gb"),
        ("AMD Instinct MI300X VF", "mi300x-192gb"),
        ("DGX Spark", "gb10-128gb"),
    ],
)
def test_a_name_finds_its_gpu(name: str, gpu_id: str) -> None:
    assert find_gpu(name).id == gpu_id


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("A100", {"a100-pcie-40gb", "a100-sxm4-40gb", "a100-pcie-80gb", "a100-sxm4-80gb"}),
        ("A100 80GB", {"a100-pcie-80gb", "a100-sxm4-80gb"}),
        ("H100", {"h100-pcie-80gb", "h100-sxm5-80gb", "h100-nvl-94gb"}),
        ("V100", {"v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm2-16gb", "v100-sxm2-32gb"}),
        ("RTX 3080", {"rtx-3080-10gb", "rtx-3080-12gb"}),
        ("NVIDIA GeForce RTX 3080", {"rtx-3080-10gb", "rtx-3080-12gb"}),
        ("RTX 6000", {"quadro-rtx-6000-24gb", "rtx-6000-ada-48gb"}),
    ],
)
def test_a_name_that_several_cards_share_is_refused_with_the_choices(name: str, choices: set[str]) -> None:
    with pytest.raises(InputError) as caught:
        find_gpu(name)
    listed = str(caught.value).split("say which of ")[1].rstrip(".").split(", ")
    assert set(listed) == choices
    assert not isinstance(caught.value, UnknownNameError)


@pytest.mark.parametrize(
    ("typo", "meant"), [("RTX 4900", "4090"), ("h1000", "h100"), ("a100-sxm5-80gb", "a100-sxm4-80gb")]
)
def test_an_unknown_name_offers_the_closest(typo: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean") as caught:
        find_gpu(typo)
    assert meant in str(caught.value).lower()


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("8xL40S", "type L40S for it and --num-gpus 8"),
        ("l40s:4", "type l40s for it and --num-gpus 4"),
        ("2 x 4090", "type 4090 for it and --num-gpus 2"),
        ("h200-nvl-141gb, l40s", "type --gpu h200-nvl-141gb --gpu l40s"),
    ],
)
def test_several_cards_in_one_name_are_told_how_to_be_typed(name: str, typed: str) -> None:
    with pytest.raises(InputError, match=re.escape(typed)):
        find_gpu(name)


def test_a_name_like_nothing_offers_nothing() -> None:
    for name in ("###", "foo9000"):
        with pytest.raises(UnknownNameError) as caught:
            find_gpu(name)
        assert "Did you mean" not in str(caught.value)


def test_every_id_and_every_unshared_driver_name_finds_its_own_row() -> None:
    gpus = load_gpus()
    holders: dict[str, set[str]] = {}
    for gpu in gpus.values():
        assert find_gpu(gpu.id) is gpu
        for name in gpu.nvml_names:
            holders.setdefault(name, set()).add(gpu.id)
    unshared = {name: ids for name, ids in holders.items() if len(ids) == 1}
    assert {name: {find_gpu(name).id} for name in unshared} == unshared
    assert holders.keys() - unshared.keys() == {"NVIDIA GeForce RTX 3080"}


@pytest.mark.parametrize(
    ("name", "memory_bytes", "sm_count", "gpu_id"),
    [
        ("NVIDIA GeForce RTX 3080", 10240 * MIB, 68, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12288 * MIB, 70, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 3080", int(9.77 * GIB), None, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", None, 70, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380 * MIB, 34, "rtx-4060-ti-16gb"),
        ("NVIDIA GH200 480GB", int(94.5 * GIB), 132, "gh200-96gb"),
        ("Tesla T4", 15360 * MIB, 40, "t4-16gb"),
        ("Tesla T4", int(14.74 * GIB), 40, "t4-16gb"),
        ("NVIDIA A10", 24576 * MIB, 72, "a10-24gb"),
        ("NVIDIA H200", int(139.8 * GIB), 132, "h200-sxm5-141gb"),
        ("Quadro RTX 6000", 24576 * MIB, 72, "quadro-rtx-6000-24gb"),
        ("AMD Instinct MI250X", int(63.98 * GIB), 110, "mi250x-128gb"),
        ("NVIDIA GB10", 128 * 1000**3, 48, "gb10-128gb"),
        ("Tesla V100-SXM2-16GB", 16160 * MIB, 80, "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-32GB", 32510 * MIB, 80, "v100-sxm2-32gb"),
    ],
)
def test_a_device_is_matched_by_name_memory_and_sms(
    name: str, memory_bytes: int | None, sm_count: int | None, gpu_id: str
) -> None:
    gpu = match_device(name, memory_bytes, sm_count)
    assert gpu is not None
    assert gpu.id == gpu_id


@pytest.mark.parametrize(
    ("name", "memory_bytes", "sm_count"),
    [
        ("NVIDIA GeForce RTX 3080", None, None),
        ("NVIDIA GeForce RTX 4060 Ti", 8188 * MIB, 34),
        ("NVIDIA GeForce RTX 5060 Ti", 8151 * MIB, 36),
        ("NVIDIA GeForce RTX 3060", 8192 * MIB, 28),
        ("NVIDIA GH200 480GB", 144 * GIB, 132),
        ("AMD Instinct MI250X/MI250", int(63.98 * GIB), 104),
        ("AMD Instinct MI250X", 128 * GIB, 220),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * GIB, 14),
        ("NVIDIA A100-SXM4-40GB", 5 * GIB, 14),
        ("A100", 80 * GIB, 108),
        ("Some Card", 80 * GIB, 108),
    ],
)
def test_a_device_that_no_row_describes_matches_nothing(
    name: str, memory_bytes: int | None, sm_count: int | None
) -> None:
    assert match_device(name, memory_bytes, sm_count) is None


def test_the_mi250x_is_one_die_as_torch_sees_it() -> None:
    die = load_gpus()["mi250x-128gb"]
    card_cus, card_fp16_flops, card_bandwidth = 220, 383e12, 3277e9
    assert die.sm_count == card_cus // 2
    assert die.peaks["fp16"] == pytest.approx(card_fp16_flops / 2)
    assert die.bandwidth_bytes_per_s == pytest.approx(card_bandwidth / 2)
    assert die.usable_bytes is not None
    assert die.usable_bytes / GIB == pytest.approx(64, rel=0.01)


@pytest.mark.parametrize("name", ["v100-sxm2-16gb", "T4", "2080 Ti", "Titan RTX", "Quadro RTX 8000"])
def test_cards_older_than_ampere_train_in_fp16(name: str) -> None:
    gpu = find_gpu(name)
    assert training_dtype(gpu) == "fp16"
    assert {"bf16", "tf32", "fp8"}.isdisjoint(gpu.peaks)


def test_every_later_card_trains_in_bf16() -> None:
    older = {"Volta", "Turing"}
    assert {training_dtype(g) for g in load_gpus().values() if g.architecture not in older} == {"bf16"}


def test_units_are_bytes_and_flops_per_second() -> None:
    """Against the A100 datasheet: 312 TFLOP/s dense bf16, 2.039 TB/s, 40 MB of L2, 600 GB/s NVLink."""
    gpu = load_gpus()["a100-sxm4-80gb"]
    assert gpu.peaks["bf16"] == pytest.approx(312e12)
    assert gpu.bandwidth_bytes_per_s == pytest.approx(2.039e12)
    assert gpu.l2_bytes == 40 * MIB
    assert gpu.nvlink_bytes_per_s == pytest.approx(600e9)
    assert (gpu.usable_basis, gpu.usable_from) == ("estimated", "a100-pcie-80gb")


@pytest.mark.parametrize(
    ("gpu_id", "torch_gib"),
    [("rtx-4090-24gb", 23.64), ("rtx-2080-ti-11gb", 10.76), ("l4-24gb", 22.03), ("rtx-5090-32gb", 31.36)],
)
def test_estimated_memory_is_near_what_torch_prints_in_out_of_memory_messages(gpu_id: str, torch_gib: float) -> None:
    """The truth here is the "total capacity" of PyTorch's own messages, widely posted and not in the catalog."""
    gpu = load_gpus()[gpu_id]
    assert gpu.usable_basis == "estimated"
    assert gpu.usable_bytes is not None
    assert gpu.usable_bytes / GIB == pytest.approx(torch_gib, rel=0.01)


def test_gpus_can_be_keys() -> None:
    gpus = load_gpus().values()
    assert len(set(gpus)) == len(gpus)
