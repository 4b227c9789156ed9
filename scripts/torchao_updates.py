#!/usr/bin/env python3
"""What inductor makes of one tensor's update by torchao's optimizers, for a GPU that need not be there.

    pip install torchao triton && python scripts/torchao_updates.py

Figures go to tests/fixtures/torchao_updates.json, for tests/model/test_torchao.py: per kernel the bytes of every buffer
that it reads and writes, each once, and the bytes of what is allocated while the update runs. torchao compiles
``single_param_adam`` for each tensor; here its operations are traced on fake tensors, lowered for a card of compute
capability 9.0 and scheduled, and no kernel is run. `--host` instead measures on this CPU what Python takes for a call.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

OUT = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "torchao_updates.json"
CASES = (
    ("8bit", (4096, 4096), 256, "bf16"), ("8bit", (32000, 4096), 256, "bf16"), ("8bit", (16, 4096), 256, "fp32"),
    ("4bit", (4096, 4096), 256, "bf16"), ("4bit", (32000, 4096), 128, "bf16"), ("4bit", (1024, 4096), 256, "fp32"),
    ("fp8", (4096, 4096), 256, "bf16"), ("fp8", (16, 4096), 256, "fp32"),
    ("plain", (1000,), 256, "bf16"), ("plain", (4000,), 256, "fp32"),
)  # fmt: skip
ALLOCATED = r"(buf\d+) = empty_strided_cuda"
REUSED = r"(buf\d+) = (buf\d+); del buf\d+  # reuse"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def pretend_card() -> None:
    """Let inductor ask for a card of compute capability 9.0 and be told of one."""
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    card = SimpleNamespace(
        type="cuda", index=0, cc=90, major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, warp_size=32, total_memory=80 * 2**30, name="H100", gcnArchName="",
        L2_cache_size=50 * 2**20, shared_memory_per_block_optin=227 * 1024, shared_memory_per_block=48 * 1024,
    )  # fmt: skip
    target = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        get_current_stream=lambda *_: 0,
    )
    driver.set_active(target)
    interface: Any = device_interface.CudaInterface
    for owner in (torch.cuda, interface, interface.Worker):
        owner.is_available = staticmethod(lambda: True)
        owner.current_device = staticmethod(lambda: 0)
        owner.get_device_properties = staticmethod(lambda *_, **__: card)
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)  # type: ignore[assignment]
    torch.cuda._lazy_init = lambda: None
    interface.get_compute_capability = staticmethod(lambda *_: 90)


def update_of(kind: str, shape: tuple[int, ...], block: int) -> Callable[..., tuple[()]]:
    """torchao's ``single_param_adam`` with its states taken apart into codes, scales and maps."""
    from torchao.optim.quant_utils import (
        dequant_with_qmap,
        quantize_4bit_with_qmap,
        quantize_8bit_with_qmap,
        scale_tensor,
    )
    from torchao.optim.subclass_fp8 import quantize_fp8

    copy = torch.ops.aten.copy_

    def read(state: tuple[Any, ...]) -> Any:
        if kind == "8bit":
            return dequant_with_qmap(state[0], state[2], state[1])
        if kind == "4bit":
            codes = torch.stack([state[0] >> 4, state[0] & 0b1111], dim=-1)
            return dequant_with_qmap(codes, state[2], state[1]).view(shape)
        if kind == "fp8":
            return (state[0].float().view(-1, block) * state[1].view(-1, 1)).view(shape)
        return state[0].float()

    def write(values: Any, state: tuple[Any, ...]) -> None:
        if kind == "8bit":
            values, scale = scale_tensor(values, block)
            made = (quantize_8bit_with_qmap(values, state[2]), scale)
        elif kind == "4bit":
            values, scale = scale_tensor(values.view(-1), block)
            codes = quantize_4bit_with_qmap(values, state[2])
            made = ((codes[::2] << 4) | codes[1::2], scale)
        else:
            made = quantize_fp8(values, block) if kind == "fp8" else (values,)
        for new, old in zip(made, state, strict=False):
            copy(old, new)

    def update(p: Any, grad: Any, step: Any, lr: Any, *states: Any) -> tuple[()]:
        half = len(states) // 2
        wide, gradient = p.float(), grad.float()
        wide = wide - lr * 0.0 * wide
        first, second = 1 - 0.9**step, 1 - 0.999**step
        mean = read(states[:half]).float().lerp(gradient, 1 - 0.9)
        square = read(states[half:]).float().lerp(gradient.square(), 1 - 0.999)
        write(mean, states[:half])
        write(square, states[half:])
        copy(p, wide - lr * (mean / first) / ((square.sqrt() / second.sqrt()) + 1e-8))
        return ()

    return update


def inputs(kind: str, shape: tuple[int, ...], block: int, dtype: str, device: str) -> list[Any]:
    """Parameter, gradient, step, learning rate and both moments."""
    elements = torch.Size(shape).numel()
    own = torch.empty(shape, dtype=DTYPES[dtype], device=device)

    def state() -> list[Any]:
        scale = torch.empty(elements // block, device=device)
        if kind == "8bit":
            return [torch.empty(shape, dtype=torch.uint8, device=device), scale, torch.empty(256, device=device)]
        if kind == "4bit":
            return [torch.empty(elements // 2, dtype=torch.uint8, device=device), scale, torch.empty(16, device=device)]
        if kind == "fp8":
            return [torch.empty(shape, dtype=torch.float8_e4m3fn, device=device), scale]
        return [torch.empty_like(own)]

    return [own, torch.empty_like(own), torch.empty(()), torch.empty(()), *state(), *state()]


def lowered(kind: str, shape: tuple[int, ...], block: int, dtype: str) -> dict[str, Any]:
    """Kernels and allocations of one tensor's update."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    traced = make_fx(update_of(kind, shape, block), decomposition_table=select_decomp_table(), tracing_mode="fake")
    graph = traced(*inputs(kind, shape, block, dtype, "cpu"))
    for node in graph.graph.nodes:
        node.meta = {}
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda")}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        given = inputs(kind, shape, block, dtype, "cuda")
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)
    lowering = GraphLowering(graph, example_inputs=given, is_inference=True)
    with V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering), V.set_fake_mode(mode):
        lowering.run(*given)
        code = lowering.codegen()[0].value
        sizes = {name: buffer_bytes(lowering, name) for name in [*lowering.name_to_buffer, *lowering.graph_inputs]}
        kernels = [node_bytes(node, lowering, storages(code), sizes) for node in lowering.scheduler.nodes]
    return {
        "kind": kind, "elements": torch.Size(shape).numel(), "block": block, "dtype": dtype,
        "kernels_bytes": kernels, "allocated_bytes": [sizes[name] for name in re.findall(ALLOCATED, code)],
    }  # fmt: skip


def storages(code: str) -> dict[str, str]:
    """The first name of each buffer that lives on in an earlier one's memory, by its own."""
    found: dict[str, str] = {}
    for own, before in re.findall(REUSED, code):
        found[own] = found.get(before, before)
    return found


def node_bytes(node: Any, lowering: Any, first: dict[str, str], sizes: dict[str, int]) -> int:
    """Bytes that a kernel reads of others and writes for others, each buffer once."""
    from torch._inductor.dependencies import MemoryDep

    def named(deps: Any) -> set[str]:
        real = lowering.scheduler.mutation_real_name
        names = (real.get(dep.name, dep.name) for dep in deps if isinstance(dep, MemoryDep))
        return {first.get(name, name) for name in names if name not in lowering.removed_buffers}

    outside = [dep for dep in node.read_writes.reads if dep.name not in node.get_buffer_names()]
    return sum(sizes[name] for names in (named(outside), named(node.read_writes.writes)) for name in names)


def buffer_bytes(lowering: Any, name: str) -> int:
    """Bytes of a buffer of the graph; 0 of numbers on the host."""
    buffer = lowering.get_buffer(name)
    if buffer.get_device() is None or buffer.get_device().type != "cuda":
        return 0
    elements = 1
    for size in buffer.get_size():
        elements *= int(size)
    return elements * buffer.get_dtype().itemsize


def host() -> dict[str, float]:
    """Seconds of one tensor's call, and of every further shape that was compiled, without their kernels."""
    from torchao.optim import AdamW8bit

    torch.set_num_threads(1)

    def per_tensor_s(shapes: list[tuple[int, ...]], steps: int = 30) -> float:
        torch._dynamo.reset()
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer = AdamW8bit(params, weight_decay=0.0)
        for _ in range(3):
            optimizer.step()
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - begin)
        return min(times) / len(shapes)

    once, twice = per_tensor_s([(16, 256)] * 60), per_tensor_s([(16, 512)] * 60)
    call_s = once - (twice - once)
    found = {"call_s": call_s}
    for many in (2, 4, 8):
        shapes = [(16, 256 * (1 + place % many)) for place in range(8 * many)]
        kernel_s = (twice - once) * (many + 1) / 2
        found[f"further_shape_s_of_{many}"] = (per_tensor_s(shapes) - kernel_s - call_s) / (many - 1)
    return found


def main() -> None:
    """The fixture, or the host's times in words."""
    if "--host" in sys.argv:
        print(json.dumps({name: round(value * 1e6, 1) for name, value in host().items()}), "microseconds")
        return
    pretend_card()
    import torchao

    record = {
        "script": "scripts/torchao_updates.py",
        "torch": torch.__version__.partition("+")[0],
        "torchao": torchao.__version__.partition("+")[0],
        "python": platform.python_version(),
        "updates": [lowered(*case) for case in CASES],
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
