"""accelerate's YAML: number of GPUs, kind of spreading, and what it switches on."""

from __future__ import annotations

from tunecast.catalogs.errors import InputError
from tunecast.model.configs.deepspeed import agree, put_offload, zero_sharding
from tunecast.model.configs.frameworks import refuse, refuse_unsupported
from tunecast.model.configs.run_file import Draft
from tunecast.model.configs.source import Source
from tunecast.model.configs.spread import UNWRAPPED, put_sharding, read_fsdp_config
from tunecast.model.file_spread import Mesh
from tunecast.model.sharding import FSDP
from tunecast.model.units import SIXTEEN_BITS


def read_accelerate(source: Source, draft: Draft) -> None:
    """accelerate YAML: number of GPUs, kind of spreading, and what it switches on."""
    refuse_unsupported("accelerate", source)
    kind = str(source.get("distributed_type") or "NO").upper()
    readers = {"NO": _one_gpu, "MULTI_GPU": _data_parallel, "FSDP": _fsdp, "DEEPSPEED": _deepspeed}
    if kind not in readers:
        refuse(source, "distributed_type", kind, "a kind of spreading", "use NO, MULTI_GPU, FSDP or DEEPSPEED")
    processes = source.count("num_processes")
    draft.put("num_gpus", 1 if kind == "NO" else processes, "num_processes" if processes else "distributed_type")
    _put_machines(source, draft, processes)
    readers[kind](source, draft)
    _refuse_other_degrees(source, draft)


def put_launcher_precision(source: Source, draft: Draft) -> None:
    """What the launcher exports (``ACCELERATE_MIXED_PRECISION``) and the Trainer takes where its own file switches
    neither ``bf16`` nor ``fp16`` on (transformers ``training_args.py``)."""
    stated, own = str(source.get("mixed_precision") or "no"), str(draft.options.get("precision"))
    if stated not in SIXTEEN_BITS:
        return
    if own.endswith("-autocast"):
        if own != f"{stated}-autocast":
            draft.note(
                f"mixed_precision of the accelerate file is {stated}, but the training file's own "
                f"{own.removesuffix('-autocast')} is what the Trainer takes."
            )
    elif draft.their_fields.get("precision") != "pure_bf16":
        draft.put("precision", f"{stated}-autocast", "mixed_precision")


def _refuse_other_degrees(source: Source, draft: Draft) -> None:
    for theirs, ours in (("tp_size", "tp"), ("cp_size", "cp"), ("sp_size", "cp")):
        field = f"parallelism_config.parallelism_config_{theirs}"
        degree = source.whole(field)
        if degree is not None and degree > 1:
            draft.put(ours, degree, field)
            if theirs == "sp_size":  # DeepSpeed's ALST, the one backend (accelerate ``parallelism_config.py``)
                draft.put("cp_kind", "ulysses", field)
    replicas = source.whole("parallelism_config.parallelism_config_dp_replicate_size")
    shards = source.whole("parallelism_config.parallelism_config_dp_shard_size")
    if draft.options.get("sharding") in FSDP and max(replicas or 1, shards or 1) > 1:  # `_validate_accelerator`
        field = "parallelism_config_dp_replicate_size x parallelism_config_dp_shard_size"
        draft.mesh = Mesh(shards=max(shards or 1, 1), replicas=max(replicas or 1, 1), field=field)


def _put_machines(source: Source, draft: Draft, processes: int | None) -> None:
    """GPUs of one machine where several share the job: accelerate starts so many processes on each
    (``commands/launch.py``: ``num_processes / num_machines``)."""
    machines = source.count("num_machines")
    if machines is None or machines == 1 or processes is None:
        return
    if processes % machines:
        raise InputError(
            f"{source.name}: num_processes is {processes}, which num_machines {machines} does not divide; accelerate "
            "starts as many on each."
        )
    draft.put("gpus_per_node", processes // machines, "num_machines")


def _one_gpu(source: Source, draft: Draft) -> None:
    del source, draft


def _data_parallel(source: Source, draft: Draft) -> None:
    if draft.options.get("sharding") is None and draft.options.get("num_gpus") != 1:
        draft.put("sharding", "ddp", "distributed_type")


def _fsdp(source: Source, draft: Draft) -> None:
    """accelerate takes version 1 where its file names none (``commands/launch.py``, ``--fsdp_version``), and the whole
    model as one unit where none names a rule (``utils/dataclasses.py``, ``FullyShardedDataParallelPlugin``). A training
    file with FSDP of its own has layers as units (transformers 5 ``training_args.py``, ``_process_fsdp_args``), and so
    have adapters under FSDP 1 (``trainer.py``, ``update_fsdp_plugin_peft``)."""
    by_trainer = draft.options.get("sharding") in FSDP
    read_fsdp_config(source, draft, "fsdp_config", sharded=True, version_if_silent=1)
    by_peft = draft.options.get("method") != "full" and draft.options.get("fsdp_version") == 1
    policy, _ = source.first(("fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.auto_wrap_policy"))
    if policy is None and draft.options.get("sharding") in FSDP and not by_trainer and not by_peft:
        draft.note(UNWRAPPED)


def _deepspeed(source: Source, draft: Draft) -> None:
    if source.has("deepspeed_config.zero_stage"):
        field = "deepspeed_config.zero_stage"
        put_sharding(source, draft, zero_sharding(source, field), field)
    elif draft.options.get("sharding") is None:
        file = source.get("deepspeed_config.deepspeed_config_file") or "its JSON"
        raise InputError(f"{source.name}: distributed_type is DEEPSPEED without a stage; add {file} with --deepspeed.")
    put_offload(source, draft, "deepspeed_config.offload_optimizer_device", "deepspeed_config.offload_param_device")
    agree(source, draft, "deepspeed_config.gradient_accumulation_steps", "gradient_accumulation_steps")
