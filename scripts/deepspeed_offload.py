"""Run DeepSpeed's ZeRO with states in host memory, in two processes on the CPU, and record what gradients go through.

Needs what scripts/deepspeed_copies.py needs. Figures go to tests/fixtures/deepspeed_offload.json, for
tests/calibrate/test_real_copies.py: bytes and kernels of an optimizer step of one micro-batch and of two, by what they
are for. On a CPU both sides of the bus are one memory: what DeepSpeed keeps in the host is known by its storage, and a
``to`` that would move such a tensor copies it here.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from deepspeed_copies import CONFIG, found_by_processes, write_record

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "deepspeed_offload.json"
CASES = {f"zero{stage}, {micro}": (stage, micro) for stage in (1, 2, 3) for micro in (1, 2)}
VIEWS = ("view", "narrow", "slice", "detach", "alias", "reshape", "split", "empty", "expand", "select", "as_strided")
WRITTEN = {"add_": 1, "mul_": 1, "_fused_adamw_": 3}
"""How many of its tensors an operator in place writes beside reading all; ``copy_`` reads but one of two."""
READ = "_local_scalar_dense"
WATCHING = [""]
"""The part of the step that is watched now, or nothing."""


def purpose(name: str, tensors: list[Any], out: Any, in_host: list[bool]) -> tuple[str, int]:
    """What an operator is for, and the bytes it moves: over the bus, or in the memory that it works in."""
    whole = sum(tensor.nbytes for tensor in tensors)
    whole += out.nbytes if not name.endswith("_") and hasattr(out, "nbytes") else 0
    whole += WRITTEN.get(name, 0) * tensors[0].nbytes
    if name == "copy_" and any(in_host) and not all(in_host):
        return ("to host" if in_host[0] else "to gpu"), tensors[0].nbytes
    if any(in_host):
        return "in host", whole
    if name == READ:
        return "read", 0
    if max(tensor.numel() for tensor in tensors) == 1:
        return "scalar", 0
    known = {"linalg_vector_norm": "norm", "amax": "check", "amin": "check", "add_": "sum"}
    if name == "_to_copy":
        return ("fp64" if out.element_size() == 8 else "widen"), whole
    return known.get(name, ""), whole


def host_storages(optimizer: Any, stage: int) -> set[int]:
    """Where the tensors lie that DeepSpeed keeps in the host."""
    if stage == 3:
        masters, others = optimizer.fp32_partitioned_groups_flat, [optimizer.grad_partitions_flat_buffer]
    else:
        masters = optimizer.single_partition_of_fp32_groups
        others = [*optimizer.accumulated_grads_in_cpu.values(), *optimizer.param_buffer_of_bit16_for_cpu_offload_groups]
    kept = [*masters, *(master.grad for master in masters if master.grad is not None), *others]
    return {tensor.untyped_storage().data_ptr() for tensor in kept}


def watched(owner: Any, name: str, part: str, last: list[bool]) -> None:
    """Let calls of a method be watched in the last step."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before, WATCHING[0] = WATCHING[0], part * last[0]
        try:
            return method(*args, **kwargs)
        finally:
            WATCHING[0] = before

    setattr(owner, name, call)


def train(stage: int, micro: int) -> dict[str, dict[str, int]]:
    """Three optimizer steps, the last one watched: where gradients are kept, and in the update."""
    import deepspeed
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16)
    model.train()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    found: dict[str, Counter[str]] = {part: Counter() for part in ("gradients", "step")}
    host: set[int] = set()
    last = [False]

    def note(what: str, moved: int) -> None:
        if what:
            found[WATCHING[0]][f"{what} bytes"] += moved
            found[WATCHING[0]][f"{what} launches"] += 1

    class Moved(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            to_device = func is torch.Tensor.to and any(isinstance(each, torch.device) for each in args[1:])
            if WATCHING[0] and to_device and args[0].untyped_storage().data_ptr() in host:
                note("to gpu", args[0].nbytes)
                before, WATCHING[0] = WATCHING[0], ""
                copy = args[0].clone()
                WATCHING[0] = before
                return copy
            return func(*args, **(kwargs or {}))

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = str(func).split(".")[1]
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if WATCHING[0] and tensors and "c10d" not in str(func) and not any(view in name for view in VIEWS):
                in_host = [each.untyped_storage().data_ptr() in host for each in tensors]
                note(*purpose(name, tensors, out, in_host))
            return out

    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.on_accelerator = lambda tensor: tensor.untyped_storage().data_ptr() not in host
    watched(engine.optimizer, "partition_grads" if stage == 3 else "copy_grads_in_partition", "gradients", last)
    ids = torch.randint(0, CONFIG["vocab_size"], (1, 64))
    with Watch(), Moved():
        for step in range(3):
            last[0] = step == 2
            host |= host_storages(engine.optimizer, stage) if last[0] else set()
            for _ in range(micro):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                WATCHING[0] = "step" * last[0]
                engine.step()
                WATCHING[0] = ""
    return {part: dict(sorted(counts.items())) for part, counts in found.items()}


def work(folder: Path, rank: int) -> None:
    """One of the processes."""
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    found = {case: train(*CASES[case]) for case in CASES}
    (folder / f"{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        write_record(__file__, OUT, by_process=found_by_processes(__file__))
