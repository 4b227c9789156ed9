"""What a calibration measures, as data: shapes that occur in real layers, and whole steps.

Three tables (GPU, CPU, and what ``--full`` adds) and the order in which they run. Related trials are
spread over the whole calibration, so that a drift of the machine shows as scatter, not as a slope.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tunecast.calibrate.devices.protocol import Hardware, TrialSpec
from tunecast.calibrate.plan_tables import GPU_FULL, GPU_QUICK, PlanTable, StepShape, Width
from tunecast.calibrate.plan_tables_cpu import CPU_FULL, CPU_QUICK
from tunecast.calibrate.trace.spec import architecture_to_dict, run_to_dict
from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.grouped import has_grouped_kernel
from tunecast.model.operation import CHOSEN, EFFICIENT, FLASH, UPCAST
from tunecast.model.resolve import resolve_run
from tunecast.model.sdpa import WIDEST
from tunecast.model.target import emulates_bf16
from tunecast.model.units import KIB, MIB

MODES = ("quick", "full")
ORDER_SEED = 1
"""Seed of the order of trials; part of the protocol."""
FIRST_BF16_CAPABILITY = 8
"""Major compute capability with bf16 in hardware (Ampere; CUDA programming guide, tensor core data types)."""
GFX = "gfx"
FIRST_BF16_GFX = 0x908
"""AMD's targets are hexadecimal; gfx908 (MI100) is the first with bf16 matrix instructions (CDNA whitepaper)."""
LASTING_WINDOWS = 15
"""Tenths of a second of lasting products before those that count, and of these: an H200's clock settles in one and a
half seconds (results/validation/gpu/profiles)."""
COLLECTIVE_BYTES = {"gpu": (256 * KIB, 16 * MIB, 512 * MIB), "cpu": (64 * KIB, 4 * MIB, 32 * MIB)}
"""Payloads: one of latency, a layer's adapters, and beyond a layer's weights (8B: 437 MB)."""
DEVICE_BENCHES = ("gemm", "memory", "dequant", "matmul_4bit", "attention", "loss", "optimizer", "step")
"""Benches that keep the device busy; the others let it cool and come after them."""
HOST_BENCHES = ("launch", "sync", "transfer", "modules")
"""What every forecast asks of the host and its link, in a second or two: before what a slow card has no time for."""
LATER = ("grouped", "masked", "walk")
"""Device work of some models only, after all other."""
LASTING = ("lasting",)
"""What heats the card, and tells no forecast: after all its work that does."""
STORAGE_BENCHES = ("disk", "load", "checkpoint")
"""A gigabyte at a time, from a disk that may be slow: cut where time runs out, since forecasts assume rates for it."""
ORDER = (DEVICE_BENCHES, HOST_BENCHES, LATER, LASTING, STORAGE_BENCHES)
"""What comes first is what a forecast is poorest without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long a mode may take on a kind of device."""

    settle_s: float
    trials_s: float | None
    """Trials start only within this time; None for a mock, whose every answer must be deterministic."""


BUDGETS = {
    ("gpu", "quick"): Budget(settle_s=20.0, trials_s=160.0),
    ("gpu", "full"): Budget(settle_s=60.0, trials_s=1500.0),
    ("cpu", "quick"): Budget(settle_s=2.0, trials_s=115.0),
    ("cpu", "full"): Budget(settle_s=5.0, trials_s=900.0),
}
"""Quick ends within 3 minutes on a GPU and 2 on a CPU (the design's limits), settling included."""


def is_cpu(hardware: Hardware) -> bool:
    """Whether host and device are one."""
    return hardware.device == "cpu"


def budget(hardware: Hardware, mode: str) -> Budget:
    """Limits of a calibration; a mock has none on its trials."""
    found = BUDGETS["cpu" if is_cpu(hardware) else "gpu", _known(mode)]
    mock = hardware.device.startswith("mock:")
    return Budget(settle_s=found.settle_s, trials_s=None) if mock else found


def _known(mode: str) -> str:
    if mode not in MODES:
        raise InputError(f"Calibration mode {mode!r} was asked for, but only quick and full exist; use one of these.")
    return mode


def calibration_plan(hardware: Hardware, mode: str = "quick", num_gpus: int = 1) -> tuple[TrialSpec, ...]:
    """The trials of a calibration, each once, in the order to run them; collectives between `num_gpus` come last."""
    tables = {True: (CPU_QUICK, CPU_FULL), False: (GPU_QUICK, GPU_FULL)}[is_cpu(hardware)]
    chosen = tables[:1] if _known(mode) == "quick" else tables
    unique: dict[str, TrialSpec] = {}
    for table in chosen:
        own = (spec for of_some in OF_SOME for spec in of_some(table, hardware))
        for spec in (*_specs(table, training_dtype(hardware)), *own):
            unique.setdefault(spec.key, spec)
    return _ordered(unique.values()) + collectives(hardware, num_gpus)


def collectives(hardware: Hardware, num_gpus: int) -> tuple[TrialSpec, ...]:
    """Every collective of sharded training at three sizes; none for a single device.

    The trials come last, because their processes hold the other GPUs' memory and some of this one's.
    """
    if num_gpus < 2:
        return ()
    sizes = COLLECTIVE_BYTES["cpu" if is_cpu(hardware) else "gpu"]
    return tuple(
        TrialSpec(bench="collective", params={"op": op, "bytes": n_bytes, "world_size": num_gpus}, repeats=5, warmup=2)
        for n_bytes in sizes
        for op in ("all_reduce", "all_gather", "reduce_scatter")
    )


def training_dtype(hardware: Hardware) -> str:
    """bf16, fp16 on a card without bf16, fp32 on a CPU that emulates it."""
    if emulates_bf16(hardware.host):
        return "fp32"
    return "bf16" if capability_has_bf16(hardware.compute_capability) else "fp16"


def capability_has_bf16(compute_capability: str | None) -> bool:
    """Whether bf16 runs in hardware; a device without a compute capability (a CPU) computes it."""
    if compute_capability is None:
        return True
    if compute_capability.startswith(GFX):
        return int(compute_capability.removeprefix(GFX), 16) >= FIRST_BF16_GFX
    return int(compute_capability.split(".")[0]) >= FIRST_BF16_CAPABILITY


def _ordered(specs: Iterable[TrialSpec]) -> tuple[TrialSpec, ...]:
    """By `ORDER`, related trials spread evenly.

    Every trial gets a place between 0 and 1 among those of its bench; sorting by place interleaves the
    benches, so any prefix is a smaller calibration of everything.
    """
    groups: dict[str, list[TrialSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.bench, []).append(spec)
    shuffle = random.Random(ORDER_SEED).shuffle
    turns = {bench: turn for turn, benches in enumerate(ORDER) for bench in benches}
    placed: list[tuple[int, float, str, TrialSpec]] = []
    for bench, group in groups.items():
        shuffle(group)
        placed += [(turns[bench], (place + 0.5) / len(group), spec.key, spec) for place, spec in enumerate(group)]
    return tuple(spec for *_, spec in sorted(placed, key=lambda item: item[:3]))


def _specs(table: PlanTable, dtype: str) -> Iterator[TrialSpec]:
    quick = {"repeats": table.repeats, "warmup": table.warmup}
    for params in _microbenchmarks(table, dtype):
        bench = params.pop("bench")
        yield TrialSpec(bench=bench, params=params, **quick)
    for shape in table.steps:
        yield _step(shape, dtype, table.step_repeats, table.step_warmup)
    for bench, params in table.slow:
        yield TrialSpec(bench=bench, params=dict(params), repeats=table.slow_repeats, warmup=1)


def _flash(table: PlanTable, hardware: Hardware) -> Iterator[TrialSpec]:
    """FlashAttention-2 by itself, where PyTorch's ``sdpa`` may run cuDNN's attention instead."""
    if hardware.compute_capability not in WIDEST:
        return
    for params in _attentions(table.flash, training_dtype(hardware)):
        bench = params.pop("bench")
        yield TrialSpec(bench=bench, params={**params, "kernel": FLASH}, repeats=table.repeats, warmup=table.warmup)


def _masked(table: PlanTable, hardware: Hardware) -> Iterator[TrialSpec]:
    """Attention that flash kernels do not take, by memory-efficient ones; under a mask also by what ``sdpa`` chooses,
    where that may be cuDNN's."""
    own = (EFFICIENT, CHOSEN) if hardware.compute_capability in WIDEST else (EFFICIENT,)
    shapes = [(shape, True, kernel) for shape in table.masked for kernel in own]
    shapes += [(shape, False, EFFICIENT) for shape in table.wide]
    for (batch, heads, length, head_dim), masked, kernel in shapes:
        for params in _attentions([(batch, heads, heads, length, head_dim)], training_dtype(hardware)):
            params.pop("bench")
            params |= {"masked": masked, "kernel": kernel}
            yield TrialSpec(bench="masked", params=params, repeats=table.repeats, warmup=table.warmup)


def _grouped(table: PlanTable, hardware: Hardware) -> Iterator[TrialSpec]:
    """Products of stacked experts forward, and the gradients of rows and weights, where one kernel does them all."""
    dtype = training_dtype(hardware)
    if dtype != "bf16" or not has_grouped_kernel(hardware.compute_capability):
        return
    for experts, rows, out, into in table.grouped:
        for layout in ("nt", "nn", "tn"):
            params = {"experts": experts, "rows": rows, "n": out, "k": into, "layout": layout, "dtype": dtype}
            yield TrialSpec(bench="grouped", params=params, repeats=table.repeats, warmup=table.warmup)


def _walks(table: PlanTable, hardware: Hardware) -> Iterator[TrialSpec]:
    """Softmaxes of rows in the dtype of training and in fp32, each forward and backward; rows joined, cut and moved;
    activations cast to 32 bits."""
    dtype = training_dtype(hardware)
    found: list[dict[str, Any]] = [
        {"op": op, "rows": rows, "width": width, "dtype": kind}
        for rows, width in table.softmax
        for kind in dict.fromkeys((dtype, "fp32"))
        for op in ("softmax", "softmax_backward")
    ]
    for rows, width, more in table.joined:
        found += [{"op": op, "rows": rows, "width": width, "more": more, "dtype": dtype} for op in ("join", "cut")]
    for tokens, heads, width in table.moved:
        found.append({"op": "heads", "rows": tokens, "heads": heads, "width": width, "dtype": dtype})
    found += [{"op": UPCAST, "rows": rows, "width": width, "dtype": dtype} for rows, width in table.cast_up]
    for params in found:
        yield TrialSpec(bench="walk", params=params, repeats=table.repeats, warmup=table.warmup)


def _modules(table: PlanTable, hardware: Hardware) -> Iterator[TrialSpec]:
    """Walks over the modules of real models that nothing is computed with."""
    for shape in table.modules:
        params = _training(shape, training_dtype(hardware))
        yield TrialSpec(bench="modules", params=params, repeats=table.repeats, warmup=table.warmup)


def _lasting(table: PlanTable, hardware: Hardware) -> Iterator[TrialSpec]:
    """Large products for seconds."""
    for size in table.lasting:
        params = {"m": size, "n": size, "k": size, "layout": "nt", "dtype": training_dtype(hardware)}
        yield TrialSpec(bench="lasting", params=params, repeats=LASTING_WINDOWS, warmup=LASTING_WINDOWS)


OF_SOME = (_flash, _grouped, _masked, _walks, _modules, _lasting)
"""Trials of some cards or models only, and what came after the others were in order."""


def _attentions(shapes: Iterable[tuple[int, int, int, int, int]], dtype: str) -> Iterator[dict[str, Any]]:
    for batch, heads, kv_heads, length, head_dim in shapes:
        shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length, "head_dim": head_dim}
        for direction in ("forward", "backward"):
            yield {"bench": "attention", **shape, "dtype": dtype, "pass": direction}


def _microbenchmarks(table: PlanTable, dtype: str) -> Iterator[dict[str, Any]]:
    yield from _gemms(table, dtype)
    for operation, sizes in table.memory:
        for kib in sizes:
            memory_dtype = "fp32" if operation == "read" else dtype
            yield {"bench": "memory", "op": operation, "bytes": kib * KIB, "dtype": memory_dtype}
    nf4 = {"quant_type": "nf4", "double_quant": True, "dtype": dtype}
    for rows, cols in table.dequant:
        yield {"bench": "dequant", "elements": rows * cols, "rows": rows, "cols": cols, **nf4}
    for m, n, k in table.matmul_4bit:
        for direction in ("forward", "backward"):
            yield {"bench": "matmul_4bit", "m": m, "n": n, "k": k, "pass": direction, **nf4}
    yield from _attentions(table.attention, dtype)
    for tokens, vocab in table.loss:
        yield {"bench": "loss", "tokens": tokens, "vocab": vocab, "dtype": dtype}
    for elements, tensors in table.optimizer:
        yield {"bench": "optimizer", "elements": elements, "tensors": tensors, "optim": "adamw_torch"}


def _gemms(table: PlanTable, dtype: str) -> Iterator[dict[str, Any]]:
    """Frozen layers forward (nt) and their input gradient (nn); adapters also their weight gradients (tn)."""

    def gemm(m: int, n: int, k: int, layout: str, kind: str = dtype) -> dict[str, Any]:
        return {"bench": "gemm", "m": m, "n": n, "k": k, "layout": layout, "dtype": kind}

    for tokens, out, into in table.linears:
        yield gemm(tokens, out, into, "nt")
        yield gemm(tokens, into, out, "nn")
    for tokens, out, into, rank in table.adapters:
        yield gemm(tokens, rank, into, "nt")
        yield gemm(tokens, out, rank, "nt")
        yield gemm(tokens, rank, out, "nn")
        yield gemm(tokens, into, rank, "nn")
        yield gemm(rank, into, tokens, "tn")
        yield gemm(out, rank, tokens, "tn")
    for tokens, out, into in table.trained:
        yield gemm(out, into, tokens, "tn")
    for rows, out, rank in table.experts:
        yield gemm(rows, rank, out, "nt")
        yield gemm(rows, out, rank, "nn")
    for size in table.squares:
        yield gemm(size, size, size, "nt")
    for size in table.fp32_squares:
        yield gemm(size, size, size, "nt", "fp32")


def step_architecture(width: Width, depth: int, vocab: int) -> Architecture:
    """A Llama of real width and chosen depth, with an untied head."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width.hidden,
        "intermediate_size": width.intermediate,
        "num_hidden_layers": depth,
        "num_attention_heads": width.heads,
        "num_key_value_heads": width.kv_heads,
        "head_dim": width.head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    }
    return architecture_from_config(config, f"calibration-llama-{width.hidden}x{depth}")


def _step(shape: StepShape, dtype: str, repeats: int, warmup: int) -> TrialSpec:
    return TrialSpec(bench="step", params=_training(shape, dtype) | {"steps": repeats}, repeats=repeats, warmup=warmup)


def _training(shape: StepShape, dtype: str) -> dict[str, Any]:
    """The model and the run of a step, as a record holds them."""
    architecture = step_architecture(shape.width, shape.depth, shape.vocab)
    options: dict[str, Any] = {
        "method": shape.method,
        "max_length": shape.length,
        "per_device_train_batch_size": shape.batch,
        "gradient_accumulation_steps": shape.accumulation,
        "gradient_checkpointing": shape.checkpointing,
    }
    if shape.method != "full":
        options["lora_r"] = shape.rank
        options["lora_target_modules"] = list(shape.targets) if shape.targets else "all-linear"
    run = resolve_run(architecture, options, gpu_has_bf16=dtype == "bf16", emulates_bf16=dtype == "fp32").run
    return {"architecture": architecture_to_dict(architecture), "run": run_to_dict(run)}
