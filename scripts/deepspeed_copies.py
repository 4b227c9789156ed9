"""Run DeepSpeed's ZeRO in two processes on the CPU and record what it copies; for tests/calibrate/test_real_copies.py.

DeepSpeed is no dependency of tunecast. Install it beside (``pip install --target DIR deepspeed``) and run
``PYTHONPATH=DIR python scripts/deepspeed_copies.py``. Figures go to tests/fixtures/deepspeed_copies.json: bytes read
and written, and kernels, of one optimizer step of two micro-batches, by what the copy is for.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "deepspeed_copies.json"
PROCESSES, MICRO_BATCHES = 2, 2
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL_BUCKET = 1_500_000
"""Elements of a bucket that holds a few tensors of this model, where DeepSpeed's own holds all of them."""
CASES: dict[str, dict[str, int]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1 in small buckets": {"stage": 1, "reduce_bucket_size": SMALL_BUCKET},
    "zero2 in small buckets": {"stage": 2, "reduce_bucket_size": SMALL_BUCKET},
}
WIDTHS = {2: "16", 4: "32", 8: "64"}
TIMEOUT_S = 600
WATCHING = [""]
"""The phase that is watched now, or nothing."""


def settings(case: str) -> dict[str, Any]:
    """The DeepSpeed configuration."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": CASES[case],
    }


def purpose(name: str, phase: str, tensors: list[Any], out: Any, sizes: set[int]) -> tuple[str, int]:
    """What an operator is for, and the bytes it moves; ("", 0) for one of the model's own."""
    widths = sorted({WIDTHS[tensor.element_size()] for tensor in tensors if tensor.is_floating_point()})
    read = sum(tensor.nbytes for tensor in tensors)
    if phase == "step":
        return in_step(name, widths, read, out)
    if name == "aten.copy_.default":
        to_itself = tensors[0].data_ptr() == tensors[1].data_ptr()  # ``copy_`` returns at once
        return ("", 0) if to_itself else ("copy", read)
    if name == "aten.div_.Tensor":
        return "divide", 2 * out.nbytes
    if name == "aten.cat.default" and out.dim() == 1:
        return "flatten", read + out.nbytes
    if name == "aten.add_.Tensor" and out.numel() in sizes:
        return "sum", read + out.nbytes
    return "", 0


def in_step(name: str, widths: list[str], read: int, out: Any) -> tuple[str, int]:
    """`purpose` in the update."""
    if name == "aten._to_copy.default":
        return ("fp64", read + out.nbytes) if out.element_size() == max(WIDTHS) else ("widen", read + out.nbytes)
    if name == "aten.linalg_vector_norm.default":
        return "norm", read
    if name == "aten.cat.default":
        return "flatten", read + out.nbytes
    if name == "aten.copy_.default":
        return "narrow", read
    if name == "aten.mul_.Tensor" and widths == ["32", "64"]:
        return "clip", 2 * out.nbytes
    return "", 0


def train(case: str) -> dict[str, dict[str, int]]:
    """Three optimizer steps, the last one watched: by phase, bytes and kernels of each purpose."""
    import deepspeed
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    sizes = {param.numel() // part for param in model.parameters() for part in (1, PROCESSES)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(case), dist_init_required=False)
    found: dict[str, Counter[str]] = {phase: Counter() for phase in ("backward", "step")}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if WATCHING[0] and tensors and isinstance(out, torch.Tensor):
                what, moved = purpose(str(func), WATCHING[0], tensors, out, sizes)
                if what:
                    found[WATCHING[0]][f"{what} bytes"] += moved
                    found[WATCHING[0]][f"{what} launches"] += 1
            return out

    ids = torch.randint(0, CONFIG["vocab_size"], (1, 64))
    with Watch():
        for step in range(3):
            for _ in range(MICRO_BATCHES):
                last = step == 2
                loss = engine(input_ids=ids, labels=ids).loss
                WATCHING[0] = "backward" * last
                engine.backward(loss)
                WATCHING[0] = "step" * last
                engine.step()
                WATCHING[0] = ""
    return {phase: dict(sorted(counts.items())) for phase, counts in found.items()}


def work(folder: Path, rank: int) -> None:
    """One of the processes."""
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    reduce_scatter = dist.reduce_scatter_tensor

    def unwatched(*args: Any, **kwargs: Any) -> Any:
        """The reduction, whose result gloo copies and NCCL does not."""
        before, WATCHING[0] = WATCHING[0], ""
        done = reduce_scatter(*args, **kwargs)
        WATCHING[0] = before
        return done

    dist.reduce_scatter_tensor = unwatched
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES)
    found = {case: train(case) for case in CASES}
    (folder / f"{rank}.json").write_text(json.dumps(found), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def found_by_processes(script: str) -> list[dict[str, Any]]:
    """What each process of this script wrote, started together."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = []
        for rank in range(PROCESSES):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "DS_ACCELERATOR": "cpu"}
            env = {**os.environ, **own, "LOCAL_SIZE": str(PROCESSES), "GLOO_SOCKET_IFNAME": "lo"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
            started.append(subprocess.Popen([sys.executable, script, str(folder), str(rank)], env=env))
        if any(process.wait(timeout=TIMEOUT_S) for process in started):
            sys.exit("A process failed; see above.")
        return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(PROCESSES)]


def write_record(script: str, out: Path, **figures: Any) -> None:
    """What was found, with what it was found with."""
    content = {
        "script": f"scripts/{Path(script).name}",
        "versions": {package: version(package) for package in ("deepspeed", "torch", "transformers")},
        "config": CONFIG,
        "processes": PROCESSES,
        **figures,
    }
    out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(f"wrote {out}")


def main() -> None:
    """Start the processes and write what they saw."""
    write_record(__file__, OUT, micro_batches=MICRO_BATCHES, by_process=found_by_processes(__file__))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
