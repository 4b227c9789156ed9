"""The tables behind `plan`: which shapes. Numbers are widths of real models, token counts of real runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunecast.model.stacks import METHODS
from tunecast.model.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """The cross-section of a model: everything but its depth and vocabulary."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """One whole optimizer step to measure."""

    width: Width
    depth: int
    method: str
    length: int
    checkpointing: bool
    batch: int = 1
    accumulation: int = 1
    rank: int = 16
    vocab: int = 32000
    targets: tuple[str, ...] = ()
    """Adapter targets; all linear layers when empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """What to measure, bench by bench. Sizes of `memory` are in KiB, all tuples in the order of their comment."""

    repeats: int = 5
    warmup: int = 1
    step_repeats: int = 4
    step_warmup: int = 2
    slow_repeats: int = 3
    linears: tuple[tuple[int, int, int], ...] = ()
    """(tokens, out, in) of frozen layers and heads."""
    adapters: tuple[tuple[int, int, int, int], ...] = ()
    """(tokens, out, in, rank)."""
    trained: tuple[tuple[int, int, int], ...] = ()
    """(tokens, out, in) of fully trained layers: their weight gradients."""
    experts: tuple[tuple[int, int, int], ...] = ()
    """(rows, out, rank) of adapters on stacked experts: rows of all experts together, very thin."""
    grouped: tuple[tuple[int, int, int, int], ...] = ()
    """(experts, rows of each, out, in) of products of stacked experts, on cards with one kernel for them."""
    squares: tuple[int, ...] = ()
    fp32_squares: tuple[int, ...] = ()
    lasting: tuple[int, ...] = ()
    """Sizes of square products that are kept up for seconds."""
    memory: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(operation, KiB moved)."""
    softmax: tuple[tuple[int, int], ...] = ()
    """(rows, width) of scores of attention as plain products."""
    joined: tuple[tuple[int, int, int], ...] = ()
    """(rows, width, columns beside them): a sink's score beside those of the keys, half a head beside the other."""
    moved: tuple[tuple[int, int, int], ...] = ()
    """(tokens, heads, head size) of heads that come before positions."""
    cast_up: tuple[tuple[int, int], ...] = ()
    """(tokens, width) of activations cast from 16 bits to 32, as adapters' inputs are."""
    dequant: tuple[tuple[int, int], ...] = ()
    """(out, in) of quantized weights."""
    matmul_4bit: tuple[tuple[int, int, int], ...] = ()
    """(tokens, out, in)."""
    attention: tuple[tuple[int, int, int, int, int], ...] = ()
    """(batch, heads, kv_heads, length, head_dim)."""
    flash: tuple[tuple[int, int, int, int, int], ...] = ()
    """The same for FlashAttention-2, on cards where ``sdpa`` runs other kernels."""
    masked: tuple[tuple[int, int, int, int], ...] = ()
    """(batch, heads, length, head_dim) under an explicit mask, which repeats key heads."""
    wide: tuple[tuple[int, int, int, int], ...] = ()
    """The same without a mask: as wide as latent attention's heads, and heads that flash kernels do not take."""
    loss: tuple[tuple[int, int], ...] = ()
    """(tokens, vocabulary)."""
    optimizer: tuple[tuple[int, int], ...] = ()
    """(elements, tensors)."""
    steps: tuple[StepShape, ...] = ()
    modules: tuple[StepShape, ...] = ()
    """Models whose modules the host goes over, as a training loop does around its steps."""
    slow: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Host, links and storage: (bench, params)."""


NARROW = Width(hidden=256, intermediate=512, heads=4, kv_heads=2, head_dim=64)
"""So narrow that a card waits for its host all along: the step's time is what issuing it costs."""
W576 = Width(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64)
"""SmolLM-135M."""
W896 = Width(hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64)
"""Qwen2.5-0.5B."""
W1024 = Width(hidden=1024, intermediate=2816, heads=16, kv_heads=8, head_dim=64)
"""The width of Qwen3-0.6B with Llama's proportions."""
W1536 = Width(hidden=1536, intermediate=8960, heads=12, kv_heads=2, head_dim=128)
"""Qwen2.5-1.5B."""
W960 = Width(hidden=960, intermediate=2560, heads=15, kv_heads=5, head_dim=64)
"""SmolLM2-360M."""
W2048 = Width(hidden=2048, intermediate=8192, heads=32, kv_heads=8, head_dim=64)
"""Llama-3.2-1B."""
W4096 = Width(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128)
"""Llama-3.1-8B."""
W8192 = Width(hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128)
"""Llama-3.1-70B."""


ADAPTED = StepShape(width=NARROW, depth=24, method="lora", length=128, checkpointing=False)
"""As many modules as 0.5B parameters with adapters on all maps: 2,001."""


def host_steps(depth: int) -> tuple[StepShape, ...]:
    """Whole steps of every method, with and without checkpointing, that the host alone bounds."""
    return tuple(
        StepShape(width=NARROW, depth=depth, method=method, length=128, checkpointing=checkpointing)
        for method in METHODS
        for checkpointing in (True, False)
    )


GPU_QUICK = PlanTable(
    linears=(
        (512, 4096, 4096),
        (1024, 4096, 4096),
        (2048, 4096, 4096),
        (4096, 4096, 4096),
        (8192, 4096, 4096),
        (1024, 1024, 4096),
        (4096, 1024, 4096),
        (16384, 1024, 4096),
        (512, 14336, 4096),
        (2048, 14336, 4096),
        (8192, 14336, 4096),
        (512, 4096, 14336),
        (2048, 4096, 14336),
        (8192, 4096, 14336),
        (512, 8192, 8192),
        (2048, 8192, 8192),
        (8192, 8192, 8192),
        (1024, 1024, 8192),
        (4096, 1024, 8192),
        (1024, 28672, 8192),
        (4096, 28672, 8192),
        (1024, 8192, 28672),
        (4096, 8192, 28672),
        (1024, 128256, 4096),
        (4096, 32000, 4096),
        (1024, 128256, 8192),
        (1536, 3584, 3584),
        (3000, 18944, 3584),
        (5120, 6144, 5120),
        (300, 4864, 896),
        (640, 8192, 2048),
        (2048, 960, 960),
        (2048, 2560, 960),
        (1024, 1024, 1024),
        (1024, 2816, 1024),
        (4096, 2048, 2048),
        (2048, 8192, 2048),
        (512, 3072, 3072),
        (1024, 8192, 3072),
        (768, 5120, 5120),
        (2048, 17408, 5120),
        (8192, 1024, 2048),
        (384, 11008, 4096),
    ),
    adapters=(
        (512, 4096, 4096, 16),
        (2048, 14336, 4096, 16),
        (8192, 1024, 4096, 16),
        (2048, 8192, 8192, 16),
        (1024, 8192, 28672, 16),
        (4096, 28672, 8192, 16),
        (4096, 4096, 4096, 64),
        (256, 896, 896, 16),
        (2048, 2560, 960, 16),
    ),
    experts=((131072, 2048, 16), (65536, 2048, 32), (65536, 1024, 16)),
    grouped=(
        (128, 16, 1536, 2048),
        (128, 64, 1536, 2048),
        (128, 64, 2048, 768),
        (128, 512, 1536, 2048),
        (64, 192, 2816, 2048),
        (32, 256, 5760, 2880),
        (8, 512, 14336, 4096),
        (8, 2048, 4096, 7168),
    ),
    trained=((2048, 4096, 4096), (2048, 14336, 4096), (8192, 4096, 14336), (1024, 2816, 1024), (4096, 1536, 1536)),
    squares=(1024, 2048, 4096, 8192),
    lasting=(8192,),
    fp32_squares=(2048,),
    memory=(
        ("copy", (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576)),
        ("add", (1024, 16384, 65536, 262144, 1048576)),
        ("read", (16384, 262144, 1048576)),
        ("write", (16384, 262144, 1048576)),
    ),
    softmax=((16384, 512), (32768, 1024), (49152, 2048), (65536, 4096), (16384, 8192)),
    joined=((32768, 2048, 1), (65536, 4096, 1), (65536, 64, 64), (262144, 32, 32)),
    moved=((2048, 16, 256), (4096, 32, 128), (8192, 32, 128), (8192, 64, 64)),
    cast_up=((512, 4096), (2048, 4096), (8192, 4096), (4096, 14336), (8192, 14336)),
    dequant=((1024, 4096), (4096, 4096), (14336, 4096), (1024, 8192), (8192, 8192), (28672, 8192)),
    matmul_4bit=((512, 4096, 4096), (2048, 14336, 4096), (2048, 8192, 8192)),
    attention=(
        (1, 32, 8, 512, 128),
        (1, 32, 8, 1024, 128),
        (1, 32, 8, 2048, 128),
        (1, 32, 8, 4096, 128),
        (1, 32, 8, 8192, 128),
        (4, 32, 8, 512, 128),
        (4, 32, 8, 2048, 128),
        (1, 64, 8, 1024, 128),
        (1, 64, 8, 4096, 128),
        (1, 32, 8, 2048, 64),
        (1, 15, 5, 512, 64),
        (1, 15, 5, 2048, 64),
        (1, 12, 2, 1024, 128),
        (1, 16, 8, 4096, 128),
        (2, 24, 8, 768, 128),
        (1, 16, 16, 2048, 192),
        (1, 8, 4, 1024, 256),
    ),
    flash=(
        (1, 32, 8, 512, 128),
        (1, 32, 8, 2048, 128),
        (4, 32, 8, 2048, 128),
        (1, 32, 8, 8192, 128),
        (1, 16, 8, 4096, 128),
        (1, 32, 8, 2048, 64),
    ),
    masked=(
        (8, 14, 512, 64),
        (2, 32, 1024, 64),
        (4, 32, 512, 128),
        (4, 32, 1024, 128),
        (2, 32, 2048, 128),
        (1, 32, 4096, 128),
        (1, 16, 2048, 256),
        (1, 8, 4096, 256),
    ),
    wide=((1, 16, 1024, 192), (2, 16, 2048, 192), (1, 128, 2048, 192), (1, 16, 2048, 512)),
    loss=((512, 128256), (2048, 128256), (4096, 32000), (2048, 151936)),
    optimizer=((1_000_000, 64), (10_000_000, 448), (40_000_000, 448), (200_000_000, 100)),
    steps=(
        StepShape(width=W4096, depth=1, method="lora", length=1024, checkpointing=True),
        StepShape(width=W4096, depth=2, method="lora", length=1024, checkpointing=True),
        StepShape(width=W4096, depth=4, method="lora", length=1024, checkpointing=True),
        StepShape(width=W4096, depth=2, method="lora", length=2048, checkpointing=False),
        StepShape(width=W4096, depth=2, method="lora", length=2048, checkpointing=True, batch=2),
        StepShape(width=W4096, depth=2, method="lora", length=4096, checkpointing=True),
        StepShape(width=W4096, depth=2, method="lora", length=512, checkpointing=True, accumulation=2, vocab=128256),
        StepShape(
            width=W4096, depth=2, method="lora", length=1024, checkpointing=True, rank=64, targets=("q_proj", "v_proj")
        ),
        StepShape(width=W4096, depth=1, method="qlora", length=1024, checkpointing=True),
        StepShape(width=W4096, depth=2, method="qlora", length=2048, checkpointing=True),
        StepShape(width=W4096, depth=4, method="qlora", length=512, checkpointing=True, batch=4),
        StepShape(width=W4096, depth=2, method="qlora", length=1024, checkpointing=False, vocab=128256),
        StepShape(width=W4096, depth=1, method="full", length=1024, checkpointing=True),
        StepShape(width=W8192, depth=1, method="lora", length=2048, checkpointing=True),
        StepShape(width=W8192, depth=1, method="qlora", length=2048, checkpointing=True),
        StepShape(width=W8192, depth=2, method="qlora", length=1024, checkpointing=True, batch=2),
        StepShape(width=W896, depth=4, method="lora", length=256, checkpointing=False),
        StepShape(width=W896, depth=4, method="qlora", length=256, checkpointing=True),
        StepShape(width=W960, depth=4, method="lora", length=2048, checkpointing=False),
        StepShape(width=W960, depth=2, method="lora", length=512, checkpointing=True),
        StepShape(width=W1024, depth=4, method="full", length=1024, checkpointing=True),
        StepShape(width=W1536, depth=2, method="full", length=512, checkpointing=False, batch=4),
        StepShape(width=W2048, depth=2, method="qlora", length=1024, checkpointing=False, batch=2),
        *host_steps(depth=4),
    ),
    modules=(ADAPTED,),
    slow=(
        ("launch", {"kernels": 500}),
        ("sync", {}),
        ("transfer", {"bytes": 256 * MIB, "pinned": True, "direction": "h2d"}),
        ("transfer", {"bytes": 256 * MIB, "pinned": True, "direction": "d2h"}),
        ("transfer", {"bytes": 256 * MIB, "pinned": False, "direction": "h2d"}),
        ("transfer", {"bytes": 1 * MIB, "pinned": True, "direction": "h2d"}),
        ("disk", {"bytes": GIB, "cold": True, "direction": "read"}),
        ("disk", {"bytes": GIB, "cold": False, "direction": "read"}),
        ("disk", {"bytes": GIB, "cold": True, "direction": "write"}),
        ("load", {"bytes": GIB, "quantize": False}),
        ("load", {"bytes": GIB, "quantize": True}),
        ("checkpoint", {"bytes": 160 * MIB}),
    ),
)

DEEP = tuple(
    StepShape(width=width, depth=depth, method=method, length=length, checkpointing=True)
    for width, depth, length in ((W4096, 8, 2048), (W8192, 4, 2048))
    for method in ("lora", "qlora")
)
"""Steps that work the card for tenths of a second without a break, as those of whole models do: its clock under the
power limit, and products beside everything else, are theirs."""

GPU_FULL = PlanTable(
    repeats=10,
    warmup=2,
    step_repeats=8,
    step_warmup=3,
    linears=tuple(
        (tokens, out, into)
        for tokens in (256, 768, 1536, 3072, 6144, 12288)
        for out, into in ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672))
    ),
    adapters=((1024, 4096, 4096, 8), (1024, 14336, 4096, 32), (4096, 8192, 28672, 64), (512, 8192, 8192, 128)),
    trained=((1024, 4096, 4096), (4096, 4096, 4096), (4096, 8192, 8192)),
    squares=(512, 1536, 3072, 6144, 12288),
    fp32_squares=(1024, 4096),
    attention=((8, 32, 8, 1024, 128), (2, 32, 8, 4096, 128), (1, 32, 8, 16384, 128), (4, 64, 8, 2048, 128)),
    masked=((8, 32, 2048, 128), (1, 40, 8192, 128), (1, 32, 4096, 96)),
    loss=((1024, 128256), (8192, 32000), (512, 256000)),
    steps=tuple(
        StepShape(width=width, depth=depth, method=method, length=length, checkpointing=checkpointing)
        for width, depth in ((W4096, 1), (W4096, 3), (W8192, 1), (W2048, 4))
        for method in ("lora", "qlora")
        for length in (768, 3072)
        for checkpointing in (True, False)
    )
    + DEEP
    + host_steps(depth=8),
    slow=(
        ("disk", {"bytes": 4 * GIB, "cold": True, "direction": "read"}),
        ("disk", {"bytes": 4 * GIB, "cold": True, "direction": "write"}),
        ("load", {"bytes": 4 * GIB, "quantize": True}),
    ),
)
