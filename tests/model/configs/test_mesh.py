"""How training files lay FSDP's shards and their copies out over the GPUs, and which jobs their frameworks refuse.

The frameworks' sources are those of axolotl 0.19.0 (``_get_parallel_config_kwargs`` of utils/distributed.py), torchtune
after 0.6.1 and accelerate 1.15, whose own check is run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile, merge_options
from tunecast.model.question import RUN_OPTIONS_ELSEWHERE
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run

Read = Callable[..., RunFile]
FSDP_2 = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
TUNE = "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\n"


def resolved(run_file: RunFile, **typed: Any) -> Run:
    options = merge_options(run_file, typed).options
    own = {field: value for field, value in options.items() if field not in RUN_OPTIONS_ELSEWHERE}
    return resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), own).run


def group(run: Run) -> int:
    """GPUs that one copy is sharded over, beside its splits."""
    machine = run.gpus_per_node // run.tp
    return run.num_gpus // run.tp if run.sharding == "fsdp" else run.dp_shard_size or machine


@pytest.mark.parametrize(
    ("gpus", "per_node", "sharding", "size"),
    [(4, 8, "fsdp", 0), (8, 4, "hsdp", 0), (16, 4, "hsdp", 0), (8, 8, "hsdp", 4), (16, 2, "hsdp", 4)],
)
def test_what_shards_leave_over_is_copies(read: Read, gpus: int, per_node: int, sharding: str, size: int) -> None:
    """The rest becomes ``dp_replicate_size``."""
    run_file = read("axolotl", FSDP_2 + "dp_shard_size: 4")
    found = resolved(run_file, num_gpus=gpus, gpus_per_node=per_node)
    assert (found.sharding, found.dp_shard_size) == (sharding, size)


@pytest.mark.parametrize(
    ("lines", "gpus", "sharding", "size"),
    [
        ("dp_replicate_size: 4", 16, "hsdp", 4),
        ("dp_replicate_size: 2", 16, "hsdp", 8),
        ("dp_replicate_size: 2\ndp_shard_size: 4", 8, "hsdp", 4),
        ("dp_replicate_size: 2\ntensor_parallel_size: 2", 16, "hsdp", 4),
        ("dp_replicate_size: 2\ndp_shard_size: 1", 8, "hsdp", 4),
        ("dp_shard_size: 1", 8, "fsdp", 8),
        ("dp_shard_size: 8\ndp_replicate_size: 1", 8, "fsdp", 8),
    ],
)
def test_what_axolotls_replicas_leave_over_is_shards(
    read: Read, lines: str, gpus: int, sharding: str, size: int
) -> None:
    found = resolved(read("axolotl", FSDP_2 + lines), num_gpus=gpus)
    assert (found.sharding, group(found)) == (sharding, size)


@pytest.mark.parametrize(
    ("lines", "gpus", "said"),
    [
        (FSDP_2 + "dp_shard_size: 4", 6, r"dp_shard_size of the file takes 4 GPUs .* there are 6; .* --num-gpus 4"),
        (FSDP_2 + "dp_replicate_size: 3", 8, r"dp_replicate_size of the file takes 3 GPUs .* --num-gpus 6"),
        (FSDP_2 + "dp_replicate_size: 2\ndp_shard_size: 4", 16, r"takes 8 GPUs .* there are 16; use --num-gpus 8"),
        (FSDP_2 + "dp_replicate_size: 8", 8, "nothing left to shard; take it out, or use --sharding ddp"),
        ("dp_replicate_size: 4", 8, r"takes 4 GPUs .* there are 8; use --num-gpus 4"),
    ],
)
def test_a_job_that_shards_and_copies_do_not_fill_is_refused(read: Read, lines: str, gpus: int, said: str) -> None:
    run_file = read("axolotl", lines)
    with pytest.raises(InputError, match=said):
        merge_options(run_file, {"num_gpus": gpus})
    assert merge_options(run_file, {"num_gpus": 8, "sharding": "fsdp"}).options["sharding"] == "fsdp"


def test_axolotls_shards_need_its_fsdp(read: Read) -> None:
    with pytest.raises(InputError, match="dp_shard_size is 4, which axolotl refuses without fsdp_config"):
        read("axolotl", "dp_shard_size: 4")
    assert resolved(read("axolotl", "dp_replicate_size: 4"), num_gpus=4).sharding == "ddp"


def test_axolotls_copies_keep_what_its_fsdp_moves(read: Read) -> None:
    lines = "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true, offload_params: true}\ndp_replicate_size: 2"
    found = resolved(read("axolotl", lines), num_gpus=8)
    assert (found.sharding, found.dp_shard_size, found.offload) == ("hsdp", 4, "all")


def test_copies_whose_weights_stay_whole_are_refused(read: Read) -> None:
    """HYBRID_SHARD_ZERO2 holds more than hybrid sharding that gathers twice, whatever the size of a group."""
    whole = FSDP_2.replace("true", "false")
    run_file = read("axolotl", whole + "dp_shard_size: 4")
    assert resolved(run_file, num_gpus=4).sharding == "fsdp-grad-op"
    for per_node in (4, 8):
        with pytest.raises(NotSupportedError, match=r"dp_shard_size .* set reshard_after_forward: true"):
            merge_options(run_file, {"num_gpus": 8, "gpus_per_node": per_node})
    assert resolved(run_file, num_gpus=8, sharding="fsdp-grad-op").sharding == "fsdp-grad-op"
    with pytest.raises(NotSupportedError, match="dp_replicate_size of the file shards over 4 of 8 GPUs"):
        merge_options(read("axolotl", whole + "dp_replicate_size: 2"), {"num_gpus": 8})
    tune = read("torchtune", TUNE + "data_parallel_replicate_dim: 2\nfsdp_reshard_after_forward: false", num_gpus=8)
    with pytest.raises(NotSupportedError, match="data_parallel_replicate_dim of the file shards over 4 of 8 GPUs"):
        merge_options(tune, {"num_gpus": 8})


def test_accelerates_own_shards_are_groups(read: Read) -> None:
    """4 copies of 4 GPUs are no 2 copies of machines of 8 (``ParallelismConfig.fsdp_dim_names``)."""
    run_file = read("trl", "use_peft: false", accelerate=accelerate(4, 4, 16))
    shards = {per_node: resolved(run_file, gpus_per_node=per_node) for per_node in (4, 8)}
    assert {per_node: (run.sharding, run.dp_shard_size) for per_node, run in shards.items()} == {
        4: ("hsdp", 0),
        8: ("hsdp", 4),
    }


def accelerate(replicas: int, shards: int, processes: int) -> dict[str, Any]:
    """accelerate's file of FSDP 2 with both sizes."""
    config = {"parallelism_config_dp_shard_size": shards, "parallelism_config_dp_replicate_size": replicas}
    spread = {"distributed_type": "FSDP", "num_processes": processes, "parallelism_config": config}
    return spread | {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}


@pytest.mark.parametrize(
    ("replicas", "shards", "processes"),
    [(2, 4, 8), (2, 4, 16), (1, 8, 8), (1, 8, 16), (4, 1, 4), (4, 1, 8), (4, 2, 12), (2, 2, 4)],
)
def test_what_accelerate_refuses_is_refused(read: Read, replicas: int, shards: int, processes: int) -> None:
    """``ParallelismConfig._validate_accelerator`` decides."""
    theirs = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
    accelerator = SimpleNamespace(multi_device=True, num_processes=processes, is_fsdp2=True, is_main_process=False)
    run_file = read("trl", "use_peft: false", accelerate=accelerate(replicas, shards, processes))
    try:
        theirs._validate_accelerator(accelerator)
    except ValueError:
        with pytest.raises(InputError, match="parallelism_config_dp_replicate_size x"):
            merge_options(run_file, {})
        return
    found = resolved(run_file)
    assert (found.sharding, group(found)) == ("hsdp" if replicas > 1 else "fsdp", shards)


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        ("data_parallel_replicate_dim: 2", 8),
        ("data_parallel_replicate_dim: 4", 4),
        ("data_parallel_replicate_dim: 4\ndata_parallel_shard_dim: -1", 4),
        ("data_parallel_replicate_dim: 8\ndata_parallel_shard_dim: 2", 2),
        ("data_parallel_replicate_dim: 2\ntensor_parallel_dim: 2", 4),
    ],
)
def test_torchtunes_replicas_leave_the_shards(read: Read, lines: str, size: int) -> None:
    """The shards of ``ParallelDims`` are what replicas and splits leave of the job (torchtune
    ``training/_distributed.py``)."""
    found = resolved(read("torchtune", TUNE + lines, num_gpus=16), num_gpus=16, gpus_per_node=4)
    assert (found.sharding, group(found)) == ("hsdp", size)


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ("data_parallel_replicate_dim: 2\ndata_parallel_shard_dim: 4", "replicate_dim x data_parallel_shard_dim"),
        ("data_parallel_shard_dim: 8", "data_parallel_shard_dim"),
        ("data_parallel_replicate_dim: 1\ndata_parallel_shard_dim: 8", "replicate_dim x data_parallel_shard_dim"),
    ],
)
def test_torchtunes_shards_and_replicas_fill_the_job(read: Read, lines: str, field: str) -> None:
    """``ParallelDims._validate`` asserts their product."""
    with pytest.raises(InputError, match=f"{field} of the file takes 8 GPUs .* are 16"):
        merge_options(read("torchtune", TUNE + lines, num_gpus=16), {"num_gpus": 16})
    assert group(resolved(read("torchtune", TUNE + lines, num_gpus=8), num_gpus=8)) == (4 if "2" in lines else 8)


def test_torchtunes_replicas_without_gpus_name_the_file(read: Read) -> None:
    found = merge_options(read("torchtune", TUNE + "data_parallel_replicate_dim: 2"), {})
    own = {field: value for field, value in found.options.items() if field not in RUN_OPTIONS_ELSEWHERE}
    with pytest.raises(InputError, match=r"training file asks for fsdp .* add for example --num-gpus 8"):
        resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), own, option_origins=found.origins)
