"""How many GPUs a row names and on how many machines, by its column, the card's text and the clouds' machines."""

from __future__ import annotations

import pytest

from tunecast.calibrate.cell_cards import cards_of, instances
from tunecast.calibrate.named_things import gpu_called
from tunecast.calibrate.published import read_runs
from tunecast.calibrate.run_table import SkipRowError
from tunecast.catalogs.errors import TunecastError

H100, A100_40, A100_80, A10G = "h100-sxm5-80gb", "a100-sxm4-40gb", "a100-sxm4-80gb", "a10g-24gb"
ROW = {
    "id": "x-1", "model": "Llama 3.1 8B", "method": "lora", "seq_len": "2048", "micro_batch": "1", "gpu": "H100 80GB",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count", "per_node", "gpu"),
    [
        ("1 DGX H100", 8, 8, H100), ("2x DGX H100", 16, 8, H100), ("1x DGX A100 80GB", 8, 8, A100_80),
        ("2 DGX H100 (16 GPUs)", 16, 8, H100), ("DGX H100 (8 GPUs)", 8, None, H100), ("8x H100 DGX", 8, None, H100),
        ("DGX H100 x8", 8, None, H100), ("DGX H100, 2 nodes", 16, 8, H100),
        ("HGX H100 8-GPU", 8, None, H100), ("DGX Spark", 1, None, "gb10-128gb"), ("2x DGX Spark", 2, 1, "gb10-128gb"),
        ("8x H100 x2", 16, None, H100), ("2x8 H100", 16, 8, H100), ("2 x 8x H100 SXM5", 16, 8, H100),
        ("2x (8x A100 40GB)", 16, 8, A100_40), ("2 nodes of 8x H100 SXM5", 16, 8, H100),
        ("1 node 8xH100", 8, 8, H100), ("8x A100 80GB (2 nodes of 4)", 8, 4, A100_80),
        ("2 nodes x 4 RTX 4090", 8, 4, "rtx-4090-24gb"), ("8xH100 (Lambda)", 8, None, H100),
        ("Lambda 1x A10 (24 GB PCIe)", 1, None, "a10-24gb"), ("8 H100s", 8, None, H100), ("H100x8", 8, None, H100),
        ("8x H100 NVLink", 8, None, H100), ("4090 x2", 2, None, "rtx-4090-24gb"), ("2x 4090", 2, None, "rtx-4090-24gb"),
        ("2x 3090 Ti", 2, None, "rtx-3090-ti-24gb"), ("4090x2", 2, None, "rtx-4090-24gb"),
        ("p4d.24xlarge (8x A100 40GB)", 8, None, A100_40), ("2x p5.48xlarge", 16, 8, H100),
        ("ml.g5.2xlarge (A10G)", 1, None, A10G), ("ml.g5.2xlarge", 1, None, A10G),
        ("A10G (g5.4xlarge x16)", 16, 1, A10G), ("p4d.24xlarge (1x A100)", 1, None, A100_40),
        ("80GB A100", 1, None, A100_80), ("8x 80GB A100", 8, None, A100_80),
        ("80 GB A100 PCIe", 1, None, "a100-pcie-80gb"),
        ("B200 192GB", 1, None, "b200-sxm-180gb"), ("T4 PCIe", 1, None, "t4-16gb"), ("L40s", 1, None, "l40s-48gb"),
        ("RTX Pro 6000 Workstation", 1, None, "rtx-pro-6000-blackwell-ws-96gb"),
        ("RTX PRO 6000 Server Edition", 1, None, "rtx-pro-6000-blackwell-server-96gb"),
        ("4x V100S", 4, None, "v100s-pcie-32gb"), ("1024 H100", 1024, None, H100),
        ("4 nodes, 32 H100", 32, 8, H100), ("2 nodes, 16x H100", 16, 8, H100), ("2 nodes with 16 H100", 16, 8, H100),
        ("64xH100 (8 nodes)", 64, 8, H100), ("16x A100 80GB (2 nodes)", 16, 8, A100_80),
        ("H100, 4 nodes, 32 GPUs", 32, 8, H100), ("2 nodes with 8 H100 each", 16, 8, H100),
        ("2 nodes, 8x H100 per node", 16, 8, H100), ("4 nodes (8 H100 per node)", 32, 8, H100),
        ("2 nodes, 8 GPUs each, H100", 16, 8, H100), ("3 nodes with 8 H100", 24, 8, H100),
        ("single H100", 1, None, H100), ("one H100", 1, None, H100), ("H100 (single GPU)", 1, None, H100),
        ("8x H100 (single node)", 8, 8, H100), ("8xH100 node", 8, None, H100),
        ("RTX PRO 6000 Blackwell Server", 1, None, "rtx-pro-6000-blackwell-server-96gb"),
        ("A100-80", 1, None, A100_80), ("8x A100-40", 8, None, A100_40), ("8x H100 x 4 nodes", 32, 8, H100),
        ("H100 SXM5 80GB 8-GPU node", 8, 8, H100), ("8-GPU H100 node", 8, 8, H100), ("2x ND96asr_v4", 16, 8, A100_40),
        ("8x H100 server", 8, None, H100), ("single 8xH100 node", 8, None, H100),
    ],
)  # fmt: skip
def test_cards_and_machines_in_one_text(text: str, count: int, per_node: int | None, gpu: str) -> None:
    assert cards_of({"gpu": text}) == (count, per_node)
    assert gpu_called(text)[0] == gpu


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ND96asr_v4", "machine of several GPUs: write how many ran"),
        ("DGX H100", "machine of several GPUs: write how many ran"), ("p5.48xlarge", "machine of several GPUs"),
        ("GB200 NVL72", "machine of several GPUs"), ("2x HGX H100", "may be 8 or 16 GPUs"),
        ("8xH100 (2 nodes)", "may be 8 or 16 GPUs"), ("16x GB200 NVL72", "may be 16 or 1152 GPUs"),
        ("2 DGX H100 (4 GPUs)", "2 machines and 4 GPUs"), ("DGX H100 x2", "may be 2 or 16 GPUs"),
        ("2x H100 DGX", "may be 2 or 16 GPUs"), ("2x DGX GB200", "machine of several GPUs"),
        ("DGX GB200", "machine of several GPUs"), ("H100 (2 nodes)", "machine of several GPUs"),
        ("2 nodes with 8 H100", "may be 8 or 16 GPUs"), ("2 nodes 8xH100", "may be 8 or 16 GPUs"),
        ("4 nodes of 32 H100", "may be 32 or 128 GPUs"), ("2x16 H100", "may be 16 or 32 GPUs"),
        ("2 nodes, 16x A100 40GB", "may be 16 or 32 GPUs"), ("2 nodes, 10x RTX 4090", "may be 10 or 20 GPUs"),
        ("72x GB200 (2 nodes)", "may be 72 or 144 GPUs"), ("single H100 node", "machine of several GPUs"),
        ("2 H100 nodes", "machine of several GPUs"), ("4x A100 servers", "machine of several GPUs"),
        ("H100 node", "machine of several GPUs"), ("1x H100 node", "machine of several GPUs"),
    ],
)  # fmt: skip
def test_a_number_of_cards_that_may_be_two_is_refused(text: str, told: str) -> None:
    with pytest.raises(SkipRowError, match=told):
        cards_of({"gpu": text})


@pytest.mark.parametrize(
    "text",
    [
        "DGX Station A100",
        "8 V100s",
        "4 L40s",
        "p4d.24xlarge (A100 80GB)",
        "H200 PCIe",
        "p9.48xlarge",
        "8x H100 per node",
    ],
)
def test_a_card_that_may_be_another_is_not_chosen(text: str) -> None:
    with pytest.raises((SkipRowError, TunecastError), match=r"Unknown GPU|may be several|contradicts itself"):
        gpu_called(text)


@pytest.mark.parametrize(
    ("gpus", "count", "per_node"),
    [
        ("2x8", 16, 8), ("2 x 8", 16, 8), ("2×8", 16, 8), ("16 (2x8)", 16, 8), ("16 (2 nodes)", 16, 8),
        ("2 nodes x 8", 16, 8), ("2 nodes of 8 GPUs", 16, 8), ("8 (1 node)", 8, 8), ("16 GPUs on 2 nodes", 16, 8),
        ("1x8", 8, 8), ("4x4", 16, 4), ("16 (1 node)", 16, 16), ("16", 16, None), ("16 GPUs", 16, None),
        ("4 nodes, 32 GPUs", 32, 8), ("2 nodes, 16 GPUs", 16, 8), ("2 nodes with 8 GPUs each", 16, 8),
        ("2 nodes, 8 per node", 16, 8), ("2 nodes, 8 GPUs total", 8, 4), ("8 cards", 8, None), ("8 devices", 8, None),
    ],
)  # fmt: skip
def test_a_column_of_gpus_may_say_their_machines(gpus: str, count: int, per_node: int | None) -> None:
    assert cards_of({"gpu": "H100 80GB", "gpus": gpus}) == (count, per_node)


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"gpus": "8x2"}, "may be 8 machines of 2 or 2 of 8: write 16"),
        ({"gpus": "16 (3 nodes)"}, "contradicts itself"),
        ({"gpus": "15 (2x8)"}, "contradicts itself"), ({"gpus": "2 nodes"}, "holds 'nodes' beside 2"),
        ({"gpus": "2 nodes, 8 GPUs"}, r"may be 8 or 16 GPUs: write 8 \(2 nodes\), or 16"),
        ({"gpus": "2 nodes of 16"}, "no machine has 16 of these cards"), ({"gpus": "2x16"}, "no machine has 16"),
        ({"gpus": "8", "gpu": "single H100"}, "contradict each other"),
        ({"gpus": "8", "gpu": "one H100"}, "contradict each other"),
        ({"gpus": "8", "gpu": "8x H100 x2"}, "contradict each other"),
        ({"gpus": "1", "gpu": "1 DGX H100"}, "contradict"),
        ({"gpus": "24", "gpu": "8xH100 (2 nodes)"}, "contradict"), ({"gpus": "4x4", "gpu": "2x8 H100"}, "contradict"),
        ({"gpus": "", "parallelism": "none"}, "gpus is not stated"),
    ],
)  # fmt: skip
def test_machines_that_contradict_each_other_are_refused(cells: dict[str, str], told: str) -> None:
    with pytest.raises(SkipRowError, match=told):
        cards_of({"gpu": "H100 80GB", **cells})


@pytest.mark.parametrize(
    ("cells", "count", "per_node"),
    [
        ({"gpu": "8x H100 x2", "gpus": "16"}, 16, None), ({"gpu": "2x HGX H100", "gpus": "16"}, 16, 8),
        ({"gpu": "8xH100 (2 nodes)", "gpus": "16"}, 16, 8), ({"gpu": "8xH100", "gpus": "16 (2 nodes)"}, 16, 8),
        ({"gpu": "DGX H100", "gpus": "1"}, 1, None), ({"gpu": "p5.48xlarge", "gpus": "4"}, 4, None),
        ({"gpu": "GB200 NVL72", "gpus": "64"}, 64, 72), ({"gpu": "H100", "gpus": "", "parallelism": "single"}, 1, None),
        ({"gpu": "H100", "gpus": "", "parallelism": "single GPU"}, 1, None),
        ({"gpu": "2x A10G", "gpus": "", "parallelism": "DDP"}, 2, None),
        ({"gpu": "2 H100 nodes", "gpus": "16"}, 16, 8), ({"gpu": "2 H100 nodes", "gpus": "8"}, 8, 4),
        ({"gpu": "H100 server", "gpus": "8"}, 8, None), ({"gpu": "2 nodes with 8 H100", "gpus": "16"}, 16, 8),
    ],
)  # fmt: skip
def test_what_two_cells_say_together(cells: dict[str, str], count: int, per_node: int | None) -> None:
    assert cards_of(cells) == (count, per_node)


def test_a_dgx_has_boards() -> None:
    assert gpu_called("2x DGX H100") == (H100, "")
    assert "does not state its form factor" in gpu_called("2x H100")[1]


def test_the_catalog_of_prices_knows_the_clouds_machines() -> None:
    assert instances()["p4d.24xlarge"] == (A100_40, 8)
    assert instances()["standard_nd96isr_h100_v5"] == (H100, 8)
    assert "h100" not in instances()


def test_machines_are_passed_on_to_the_run_as_those_of_the_layout_are() -> None:
    cells = {**ROW, "gpus": "8 (2 nodes)", "parallelism": "ZeRO-3"}
    (found,), _ = read_runs([cells])
    (said,), _ = read_runs([{**cells, "gpus": "8", "parallelism": "ZeRO-3, 2 nodes x 4 GPUs"}])
    assert found.run == said.run
    assert found.run.gpus_per_node == 4
    assert "gpus_per_node" in found.stated
    _, (odd,) = read_runs([{**cells, "parallelism": "ZeRO-3, 4 nodes x 2 GPUs"}])
    assert "contradict" in odd.reason


def test_a_machine_is_its_card_beside_the_cards_id() -> None:
    cells = {**ROW, "gpu": "p5.48xlarge", "gpu_canonical_id": H100, "gpus": "1"}
    (found,), skipped = read_runs([cells])
    assert found.gpu == H100, skipped
    _, (odd,) = read_runs([{**cells, "gpu_canonical_id": "b200-sxm-180gb"}])
    assert "contradict" in odd.reason


@pytest.mark.parametrize(
    ("text", "count", "gpu"),
    [
        ("H100 80GB HBM2e", 1, "h100-pcie-80gb"), ("8x H100 PCIe HBM2e", 8, "h100-pcie-80gb"),
        ("H100 96GB HBM2e", 1, "h100-hbm2e-96gb"), ("H100 80GB HBM3", 1, H100), ("A100 80GB HBM2e", 1, A100_80),
        ("NVIDIA DGX Spark (GB10)", 1, "gb10-128gb"), ("2x DGX Spark (GB10)", 2, "gb10-128gb"),
        ("DGX Spark 128GB unified", 1, "gb10-128gb"), ("Tesla T4 15GB", 1, "t4-16gb"),
        ("Tesla T4 (free Colab)", 1, "t4-16gb"), ("RTX 3090 (no NVLink)", 1, "rtx-3090-24gb"),
        ("2x RTX 3090 without NVLink", 2, "rtx-3090-24gb"), ("A100 80GB PCIe, no NVLink", 1, "a100-pcie-80gb"),
        ("4 x RTX 3090, PCIe 4.0 x16", 4, "rtx-3090-24gb"), ("H100 PCIe Gen5", 1, "h100-pcie-80gb"),
        ("NVIDIA A100-SXM4-80GB (400W)", 1, A100_80), ("8x RTX 5090 (575 W)", 8, "rtx-5090-32gb"),
        ("RTX PRO 6000 Max-Q", 1, "rtx-pro-6000-blackwell-maxq-96gb"), ("A100 PCIe 40GB", 1, "a100-pcie-40gb"),
    ],
)  # fmt: skip
def test_what_stands_beside_a_cards_name_is_its_own(text: str, count: int, gpu: str) -> None:
    assert cards_of({"gpu": text})[0] == count
    assert gpu_called(text)[0] == gpu


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("H100 HBM2e", "does not say which of h100-pcie-80gb, h100-hbm2e-96gb it is"),
        ("H100 SXM5 80GB HBM2e", "contradicts itself: H100s with HBM2e are h100-pcie-80gb and h100-hbm2e-96gb"),
        ("4 x RTX 3090, PCIe 4.0 x8", "'PCIe 4.0 x8' is not the PCIe 4.0 x16 of rtx-3090-24gb"),
        ("RTX 5090 (400 W)", "400 W is not the power limit of 575 W of rtx-5090-32gb"),
        ("A100 80GB SXM, no NVLink", "contradicts itself: a100-sxm4-80gb is joined by nvlink"),
        ("A100 80GB (p4d)", "contradicts itself: that machine has a100-sxm4-40gb"),
        ("RTX 3090 (no fan)", "Unknown GPU"), ("RTX 5090 (575 W, purple)", "Unknown GPU"),
        ("DGX Spark 64GB", "Unknown GPU"), ("DGX Spark (purple)", "Unknown GPU"), ("Tesla T4 13GB", "Unknown GPU"),
        ("A100 40GB (p9d)", "Unknown GPU"), ("RTX PRO 6000 Max-P", "Unknown GPU"),
    ],
)  # fmt: skip
def test_what_is_not_a_cards_own_is_refused(text: str, told: str) -> None:
    with pytest.raises((SkipRowError, TunecastError), match=told):
        gpu_called(text)


@pytest.mark.parametrize(
    ("cells", "count"),
    [
        ({"gpu": "MI250X, 1 GCD"}, 1), ({"gpu": "4x MI250X (8 GCDs)"}, 8), ({"gpu": "8 MI250X GCDs"}, 8),
        ({"gpu": "8 GCDs of MI250X"}, 8), ({"gpu": "AMD Instinct MI250X (2 GCDs)"}, 2), ({"gpu": "MI250X GCD"}, 1),
        ({"gpu": "4x MI250X (8 GCDs)", "gpus": "8"}, 8), ({"gpu": "MI250X", "gpus": "8 GCDs"}, 8),
        ({"gpu": "mi250x-128gb", "gpus": "8"}, 8),
        ({"gpu": "MI250X", "gpus": "8", "gpu_canonical_id": "mi250x-128gb"}, 8),
    ],
)  # fmt: skip
def test_a_number_of_mi250x_is_one_of_dies(cells: dict[str, str], count: int) -> None:
    assert cards_of(cells)[0] == count
    assert gpu_called(cells["gpu"])[0] == "mi250x-128gb"


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"gpu": "4x MI250X"}, "may count boards.*write the number of GCDs, as 8 GCDs of MI250X"),
        ({"gpu": "MI250X", "gpus": "8"}, "may count boards"), ({"gpu": "MI250X"}, "may count boards"),
        ({"gpu": "4x MI250X", "gpu_canonical_id": "mi250x-128gb"}, "may count boards"),
        ({"gpu": "4x MI250X (4 GCDs)"}, "contradicts itself: 4 boards of MI250X are 8 GCDs"),
        ({"gpu": "4x MI250X (8 GCDs)", "gpus": "4"}, "contradict each other"),
        ({"gpu": "H100", "gpus": "8 GCDs"}, "counts dies"),
    ],
)  # fmt: skip
def test_a_number_of_mi250x_that_may_count_boards_is_refused(cells: dict[str, str], told: str) -> None:
    with pytest.raises(SkipRowError, match=told):
        cards_of(cells)


def test_a_family_of_one_machine_is_that_machine() -> None:
    assert cards_of({"gpu": "A100 40GB (p4d)", "gpus": "8"}) == (8, None)
    assert gpu_called("A100 40GB (p4d)")[0] == A100_40


@pytest.mark.parametrize(
    ("gpu", "gpus", "count", "per_node"),
    [
        ("DGX A100 80GB", "2 nodes", 16, 8), ("8x A100 80GB SXM", "1 node", 8, 8), ("p4d.24xlarge", "2 nodes", 16, 8),
        ("2x DGX H100", "2 nodes", 16, 8), ("A100 80GB", "16 (4 nodes, 4 GPUs each)", 16, 4),
        ("A100 80GB SXM", "16 (2x p4de.24xlarge)", 16, 8), ("B200", "8 x B200", 8, None),
        ("NVIDIA B200 SXM", "8x B200", 8, None), ("RTX 4090", "4x RTX 4090", 4, None),
    ],
)  # fmt: skip
def test_a_column_of_gpus_may_name_machines_or_the_card(gpu: str, gpus: str, count: int, per_node: int | None) -> None:
    assert cards_of({"gpu": gpu, "gpus": gpus}) == (count, per_node)


@pytest.mark.parametrize(
    ("gpu", "gpus", "told"),
    [
        ("8x A100 80GB SXM", "2 nodes", "may be 8 or 16 GPUs"), ("2x DGX H100", "3 nodes", "contradict each other"),
        ("A100 80GB", "2 nodes", "holds 'nodes' beside 2"), ("H100", "8 x B200", "contradict each other"),
        ("A100 40GB", "16 (2x p4de.24xlarge)", "contradict each other"),
        ("A100 80GB", "16 (3x p4de.24xlarge)", "contradicts itself"),
        ("A100 80GB", "15 (4 nodes, 4 GPUs each)", "contradicts itself"),
        ("A100 80GB", "16 (4 nodes, 4 zebras each)", "holds 3 numbers"), ("B200", "8 x zebra", "holds 'x zebra'"),
        ("A100 80GB", "16 (2x zebra.24xlarge)", "holds 3 numbers"),
    ],
)  # fmt: skip
def test_a_column_of_gpus_that_names_others_is_refused(gpu: str, gpus: str, told: str) -> None:
    with pytest.raises(SkipRowError, match=told):
        cards_of({"gpu": gpu, "gpus": gpus})
