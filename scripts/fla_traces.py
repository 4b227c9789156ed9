"""Trace steps of Qwen3.5 with flash-linear-attention's kernels on fake tensors, for the tests of the formulas.

    python -m pip install --no-deps --target DIR fla-core==0.6.0 einops triton==3.9.0
    python -m pip download --no-deps --no-binary :all: causal-conv1d==1.7.0    (and unpack it into DIR)
    PYTHONPATH=DIR python scripts/fla_traces.py

The Python of fla, causal_conv1d, transformers, PEFT and bitsandbytes is the real one; where it launches a Triton or a
CUDA kernel, the kernel's name and tensors are entered instead: it is taken to read or write each of them once. Figures
go to tests/fixtures/fla_traces.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "fla_traces.json"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8000,
    "max_position_embeddings": 8192, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64,
}  # fmt: skip
PER_KEY = {"linear_num_value_heads": 4, "linear_key_head_dim": 64}
WIDE = {
    "intermediate_size": 96, "vocab_size": 1000, "linear_num_value_heads": 16, "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}  # fmt: skip
"""Linear attention decides the peak."""
BOTH, ALONE = "fla,causal-conv1d", "fla"
CASES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"fused_kernels": BOTH, "max_length": 512}),
    ({}, {"fused_kernels": ALONE, "max_length": 512}),
    ({}, {"fused_kernels": "causal-conv1d", "max_length": 128}),
    ({}, {"fused_kernels": BOTH, "max_length": 200, "per_device_train_batch_size": 2}),
    (PER_KEY, {"fused_kernels": BOTH, "max_length": 256}),
    (PER_KEY, {"fused_kernels": ALONE, "max_length": 40}),
    ({}, {"fused_kernels": BOTH, "max_length": 700, "gradient_checkpointing": False}),
    ({}, {"fused_kernels": BOTH, "method": "full", "max_length": 512}),
    ({}, {"fused_kernels": BOTH, "method": "full", "max_length": 200, "per_device_train_batch_size": 2,
          "gradient_checkpointing": False}),
    ({}, {"fused_kernels": ALONE, "method": "full", "max_length": 200, "per_device_train_batch_size": 2}),
    (PER_KEY, {"fused_kernels": BOTH, "method": "full", "max_length": 300, "gradient_checkpointing": False}),
    ({}, {"fused_kernels": BOTH, "method": "qlora", "max_length": 300}),
    ({}, {"fused_kernels": BOTH, "method": "qlora", "max_length": 130, "per_device_train_batch_size": 2}),
    ({}, {"fused_kernels": BOTH, "lora_target_modules": "q_proj,v_proj", "max_length": 320}),
    ({}, {"fused_kernels": BOTH, "lora_target_modules": "in_proj_qkv,in_proj_b,out_proj", "max_length": 256}),
    ({}, {"fused_kernels": BOTH, "max_length": 200, "per_device_train_batch_size": 2, "padding_mask": True}),
    ({}, {"fused_kernels": BOTH, "max_length": 256, "dtype": "fp16", "precision": "fp16-autocast"}),
    ({}, {"fused_kernels": BOTH, "max_length": 200, "gradient_accumulation_steps": 2}),
    (WIDE, {"fused_kernels": BOTH, "max_length": 1024}),
    (WIDE, {"fused_kernels": BOTH, "max_length": 1024, "method": "full"}),
    ({**WIDE, "linear_num_key_heads": 16},
     {"fused_kernels": BOTH, "max_length": 1024, "gradient_checkpointing": False}),
    ({"num_hidden_layers": 12}, {"fused_kernels": BOTH, "max_length": 256}),
)  # fmt: skip
"""Changes of `CONFIG`, and options of a run."""


_LIBRARIES: list[Any] = []
"""A library of operators ends with its object."""


def enter_kernels() -> None:
    """Let Triton's launches call an operator of their name that does nothing, which the recorder of a trace sees."""
    import torch
    from triton.runtime.jit import KernelInterface

    library = torch.library.Library("fla", "FRAGMENT")
    known: set[str] = set()

    def entered(kernel: Any) -> Any:
        while hasattr(kernel, "fn") and not isinstance(kernel.fn, types.FunctionType):
            kernel = kernel.fn
        name = kernel.fn.__name__
        if name not in known:
            library.define(f"{name}(Tensor[] moved) -> ()")
            library.impl(name, lambda moved: None, "CompositeExplicitAutograd")
            known.add(name)

        def launch(*args: Any, **kwargs: Any) -> None:
            assert not args, "a kernel without names"
            tensors = [value for value in kwargs.values() if isinstance(value, torch.Tensor)]
            getattr(torch.ops.fla, name)(tensors)

        return launch

    KernelInterface.__getitem__ = lambda self, grid: entered(self)
    _LIBRARIES.append(library)
    import fla.ops.common.chunk_o as blocks

    blocks.check_shared_mem = lambda *args: True  # as on an A100 or H100: one block takes a whole key


def enter_packages(kernels: tuple[str, ...]) -> None:
    """Let transformers find these packages and no others, before it is imported."""
    if "causal-conv1d" in kernels:
        compiled: Any = types.ModuleType("causal_conv1d_cuda")
        for name in ("fwd", "bwd", "update"):
            setattr(compiled, f"causal_conv1d_{name}", lambda *args: None)
        sys.modules["causal_conv1d_cuda"] = compiled
    else:
        sys.modules["causal_conv1d"] = None  # type: ignore[assignment]
    if "fla" in kernels:
        enter_kernels()
    else:
        sys.modules["fla"] = None  # type: ignore[assignment]


def traced(changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What a step holds."""
    from tunecast.calibrate.trace.depth import trace_extended
    from tunecast.model.architectures import architecture_from_config
    from tunecast.model.resolve import resolve_run

    architecture = architecture_from_config({**CONFIG, **changes}, "qwen-3.5")
    run = resolve_run(architecture, options).run
    trace = trace_extended(architecture, replace(run, fused_kernels=()))
    totals: Counter[str] = Counter()
    for op in trace.stream:
        place = f"{op.phase.value} {op.kind.value}"
        for what, value in (("count", op.count), ("launches", op.total_launches), ("bytes", op.total_bytes)):
            totals[f"{place} {what}"] += value
    names = Counter(op.name for op in trace.stream if op.name.startswith(("fla.", "DaoAILab.")))
    return {
        "config": changes,
        "options": options,
        "kernels": dict(sorted(names.items())),
        "totals": dict(sorted(totals.items())),
        "at_rest_bytes": trace.memory.at_rest_bytes,
        "peak_bytes": trace.memory.peak_bytes,
        "peak_moment": trace.memory.peak_moment,
        "moments": trace.memory.moments,
    }


def traced_with(kernels: str) -> None:
    """Trace the cases with these packages, which a process finds or does not find, and print them."""
    enter_packages(tuple(kernels.split(",")))
    from tunecast.calibrate.trace import direct
    from tunecast.calibrate.trace import kernels as described

    direct.refuse_traced_kernels = lambda architecture, run: None
    described.WRITE_ONLY = described.WRITE_ONLY | {"_causal_conv1d_fwd_cpp", "_causal_conv1d_bwd_cpp"}
    print(json.dumps([traced(*case) for case in CASES if case[1]["fused_kernels"] == kernels]))


def main() -> None:
    """Trace every case and write the figures."""
    if sys.argv[1:]:
        traced_with(sys.argv[1])
        return
    cases = []
    for kernels in dict.fromkeys(options["fused_kernels"] for _, options in CASES):
        command = [sys.executable, "-W", "ignore", __file__, kernels]
        cases += json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "fla-core", "triton")}
    found = {"made_by": "scripts/fla_traces.py", "versions": versions, "config": CONFIG, "cases": cases}
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases in {OUT}")


if __name__ == "__main__":
    main()
