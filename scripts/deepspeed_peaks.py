"""Train with DeepSpeed's ZeRO in a few processes on the CPU and record what each holds; for test_real_zero.py.

DeepSpeed is no dependency of tunecast. Install it beside (``pip install --target DIR --no-deps deepspeed hjson
py-cpuinfo ninja msgpack einops``) and run ``PYTHONPATH=DIR python scripts/deepspeed_peaks.py [CASE ...]``. Figures go
to tests/fixtures/deepspeed_peaks.json: by case, the bytes that the first process and the one that holds most have at
rest, and what an optimizer step adds at its peak, in bytes that torch's CPU allocator hands out.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "deepspeed_peaks.json"
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 4096,
}  # fmt: skip
COMMON = {"num_gpus": 2, "max_length": 64, "precision": "bf16", "optim": "adamw_torch_fused"}
SMALL = {"reduce_bucket_size": 5_000_000}
"""A bucket that a quarter of this model fills."""
FEW_LIVE = {
    "reduce_bucket_size": 5_000_000, "stage3_max_live_parameters": 6_000_000, "stage3_max_reuse_distance": 6_000_000,
    "stage3_prefetch_bucket_size": 300_000, "stage3_param_persistence_threshold": 600,
}  # fmt: skip
"""DeepSpeed's own sizes over those of a model of 3.5 billion parameters."""
WARM_UP, WATCHED = 2, 6
"""Steps. gloo's threads let go of a buffer when they come to it: the smallest peak is what the code asks for."""
TIMEOUT_S = 300


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name: a run's options, and DeepSpeed's where they are not its own."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for sharding in ("zero1", "zero2", "zero3"):
        for method in ("full", "lora"):
            own = {**COMMON, "method": method, "sharding": sharding, "gradient_checkpointing": True}
            found[f"{sharding} {method}"] = (own, {})
            found[f"{sharding} {method} summed"] = ({**own, "gradient_accumulation_steps": 2}, {})
            found[f"{sharding} {method} long"] = ({**own, "max_length": 1024, "gradient_checkpointing": False}, {})
        full = {**COMMON, "method": "full", "sharding": sharding, "gradient_checkpointing": True}
        for gpus in (2, 4):
            found[f"{sharding} small buckets, {gpus} GPUs"] = ({**full, "num_gpus": gpus}, SMALL)
        summed = {**full, "num_gpus": 4, "gradient_accumulation_steps": 2}
        found[f"{sharding} small buckets, summed"] = (summed, SMALL)
    for method in ("full", "lora", "qlora"):
        own = {**COMMON, "method": method, "sharding": "zero3", "gradient_checkpointing": True}
        found[f"zero3 {method}, few live"] = (own, FEW_LIVE)
    packed = {**COMMON, "method": "qlora", "sharding": "zero3", "gradient_checkpointing": True}
    found["zero3 qlora"] = (packed, {})
    found["zero3 qlora summed"] = ({**packed, "gradient_accumulation_steps": 2}, {})
    found["zero3 qlora long"] = ({**packed, "max_length": 1024, "gradient_checkpointing": False}, {})
    return found


def as_nccl_does() -> None:
    """Collectives into the output and nothing else; gloo's own fill further buffers."""
    import torch.distributed as dist

    class Done:
        def wait(self, *_: Any) -> bool:
            return True

    def gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        chunks = output_tensor.chunk(dist.get_world_size(group))
        own = chunks[dist.get_rank(group)]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        for source, chunk in enumerate(chunks):
            dist.broadcast(chunk, src=source, group=group)
        return Done() if async_op else None

    def scatter(output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        dist.all_reduce(input, op=dist.ReduceOp.SUM, group=group)
        output.copy_(input.chunk(dist.get_world_size(group))[dist.get_rank(group)])
        if op == dist.ReduceOp.AVG:
            output.div_(dist.get_world_size(group))
        return Done() if async_op else None

    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = gather, scatter


def held_bytes() -> int:
    """Bytes of all tensors alive; parts of one buffer count once."""
    import torch

    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    alive = [each for each in tensors if each.device.type == "cpu"]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}.values())


def train(options: dict[str, Any], zero: dict[str, Any]) -> dict[str, int]:
    """What this process holds between steps, and the least of what the watched steps add at their peaks."""
    import deepspeed
    import torch

    from tunecast.calibrate.allocations import peak_allocated_bytes
    from tunecast.calibrate.trace import hf
    from tunecast.model.architectures import architecture_from_config
    from tunecast.model.resolve import resolve_run

    architecture = architecture_from_config(CONFIG, "zero")
    run = resolve_run(architecture, options).run
    torch.manual_seed(0)
    model = hf.build_model(architecture, run, device="cpu")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": run.gradient_accumulation_steps,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(run.sharding[-1]), **zero},
    }
    optimizer = torch.optim.AdamW(hf.trainable_parameters(model), lr=1e-4, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    ids = torch.randint(0, architecture.vocab_size, (1, run.max_length))
    del model, optimizer

    def step() -> None:
        for _ in range(run.gradient_accumulation_steps):
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()

    for _ in range(WARM_UP):
        step()
    at_rest = held_bytes()
    return {"at_rest_bytes": at_rest, "step_bytes": min(peak_allocated_bytes(step) for _ in range(WATCHED))}


def work(folder: Path, rank: int, name: str) -> None:
    """One of the processes."""
    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    options, zero = cases()[name]
    as_nccl_does()
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=options["num_gpus"])
    (folder / f"{rank}.json").write_text(json.dumps(train(options, zero)), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def recorded(name: str) -> list[dict[str, int]]:
    """What each process of a case held; ZeRO-3 leaves tensors behind, so that no two share processes."""
    count = cases()[name][0]["num_gpus"]
    with tempfile.TemporaryDirectory() as held:
        folder, started = Path(held), []
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "DS_ACCELERATOR": "cpu"}
            env = {**os.environ, **own, "LOCAL_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29573"}
            command = [sys.executable, __file__, "--work", str(folder), str(rank), name]
            started.append(subprocess.Popen(command, env=env))
        if any(process.wait(timeout=TIMEOUT_S) for process in started):
            sys.exit(f"A process of {name!r} failed; see above.")
        return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(count)]


def main() -> None:
    """Record the cases that are named, or all of them."""
    before = json.loads(OUT.read_text("utf-8"))["cases"] if OUT.exists() else {}
    found = {}
    for name, (options, zero) in cases().items():
        if not sys.argv[1:] or name in sys.argv[1:] or name not in before:
            found[name] = {"options": options, "zero": zero, "by_process": recorded(name)}
            print(name, found[name]["by_process"], flush=True)
        else:
            found[name] = before[name]
    content = {
        "script": "scripts/deepspeed_peaks.py",
        "versions": {package: version(package) for package in ("deepspeed", "torch", "transformers", "peft")},
        "config": CONFIG,
        "cases": found,
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"wrote {OUT}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
