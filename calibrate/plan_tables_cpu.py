"""The tables behind `plan` for processors, which are measured with fewer and smaller shapes."""

from __future__ import annotations

from tunecast.calibrate.plan_tables import ADAPTED, W576, W896, W1024, W1536, W2048, PlanTable, StepShape
from tunecast.model.units import GIB, MIB

CPU_QUICK = PlanTable(
    repeats=5,
    warmup=1,
    step_repeats=4,
    step_warmup=2,
    slow_repeats=2,
    linears=(
        (64, 1024, 1024),
        (256, 1024, 1024),
        (512, 1024, 1024),
        (128, 192, 576),
        (512, 512, 1024),
        (256, 128, 896),
        (128, 4864, 896),
        (512, 896, 4864),
        (256, 2816, 1024),
        (512, 1024, 2816),
        (256, 1536, 576),
        (128, 8192, 2048),
        (256, 2048, 8192),
        (384, 2048, 2048),
        (256, 1536, 1536),
        (1024, 1024, 1024),
        (256, 32000, 1024),
        (128, 128256, 2048),
    ),
    adapters=((256, 1024, 1024, 16), (512, 2816, 1024, 16), (128, 2048, 8192, 16), (512, 576, 576, 8)),
    trained=((256, 1024, 1024), (512, 2816, 1024)),
    squares=(2048,),
    fp32_squares=(1024,),
    memory=(
        ("copy", (16, 64, 256, 1024, 4096, 16384, 65536, 262144)),
        ("add", (64, 1024, 16384, 131072)),
        ("read", (1024, 131072)),
        ("write", (1024, 131072)),
    ),
    dequant=((576, 576), (1024, 1024), (2816, 1024), (8192, 2048)),
    matmul_4bit=((256, 1024, 1024), (256, 2816, 1024)),
    attention=(
        (1, 16, 8, 128, 64),
        (1, 16, 8, 256, 64),
        (1, 16, 8, 512, 64),
        (4, 16, 8, 128, 64),
        (1, 32, 8, 512, 64),
        (1, 12, 2, 256, 128),
    ),
    masked=((4, 16, 128, 64), (2, 16, 256, 64)),
    loss=((256, 32000), (512, 32000), (256, 128256)),
    optimizer=((300_000, 28), (3_000_000, 112), (10_000_000, 20)),
    steps=(
        StepShape(width=W1024, depth=1, method="lora", length=256, checkpointing=True),
        StepShape(width=W1024, depth=2, method="lora", length=256, checkpointing=True),
        StepShape(width=W1024, depth=4, method="lora", length=256, checkpointing=True),
        StepShape(width=W1024, depth=2, method="lora", length=256, checkpointing=False),
        StepShape(width=W1024, depth=2, method="lora", length=512, checkpointing=True),
        StepShape(width=W1024, depth=2, method="lora", length=128, checkpointing=False, batch=4),
        StepShape(width=W1024, depth=1, method="qlora", length=256, checkpointing=True),
        StepShape(width=W1024, depth=4, method="qlora", length=256, checkpointing=False),
        StepShape(width=W1024, depth=2, method="qlora", length=64, checkpointing=True, accumulation=2),
        StepShape(width=W576, depth=4, method="lora", length=128, checkpointing=False),
        StepShape(width=W576, depth=2, method="qlora", length=512, checkpointing=True),
        StepShape(width=W896, depth=2, method="lora", length=256, checkpointing=True, batch=2),
        StepShape(width=W896, depth=4, method="qlora", length=128, checkpointing=True, vocab=128256),
        StepShape(width=W1536, depth=1, method="lora", length=384, checkpointing=False),
        StepShape(width=W1536, depth=2, method="qlora", length=256, checkpointing=True),
        StepShape(width=W2048, depth=1, method="lora", length=256, checkpointing=True, vocab=128256),
        StepShape(width=W2048, depth=2, method="qlora", length=128, checkpointing=False),
        StepShape(width=W576, depth=2, method="full", length=256, checkpointing=True),
        StepShape(width=W576, depth=1, method="lora", length=512, checkpointing=False, batch=2),
        StepShape(width=W1024, depth=2, method="lora", length=64, checkpointing=False),
        StepShape(
            width=W1024, depth=2, method="lora", length=256, checkpointing=True, rank=8, targets=("q_proj", "v_proj")
        ),
        StepShape(width=W1536, depth=2, method="lora", length=128, checkpointing=True, batch=2),
        StepShape(width=W2048, depth=1, method="qlora", length=512, checkpointing=True),
        StepShape(width=W2048, depth=2, method="lora", length=128, checkpointing=True),
    ),
    modules=(ADAPTED,),
    slow=(
        ("launch", {"kernels": 500}),
        ("disk", {"bytes": 256 * MIB, "cold": True, "direction": "read"}),
        ("disk", {"bytes": 256 * MIB, "cold": False, "direction": "read"}),
        ("disk", {"bytes": 256 * MIB, "cold": True, "direction": "write"}),
        ("load", {"bytes": 128 * MIB, "quantize": False}),
        ("load", {"bytes": 64 * MIB, "quantize": True}),
        ("checkpoint", {"bytes": 32 * MIB}),
    ),
)

CPU_FULL = PlanTable(
    repeats=9,
    warmup=2,
    step_repeats=7,
    step_warmup=2,
    linears=tuple(
        (tokens, out, into)
        for tokens in (96, 192, 384, 768)
        for out, into in ((1024, 1024), (2816, 1024), (1024, 2816), (2048, 2048), (8192, 2048), (2048, 8192))
    ),
    adapters=((384, 1536, 1536, 32), (768, 1024, 1024, 8)),
    squares=(512, 1024, 3072),
    attention=((2, 16, 8, 256, 64), (1, 16, 8, 1024, 64), (1, 32, 8, 256, 64)),
    loss=((512, 128256), (1024, 32000)),
    steps=tuple(
        StepShape(width=width, depth=depth, method=method, length=length, checkpointing=checkpointing)
        for width, depth in ((W576, 3), (W1024, 3), (W2048, 2))
        for method in ("lora", "qlora")
        for length in (192, 512)
        for checkpointing in (True, False)
    ),
    slow=(
        ("disk", {"bytes": 4 * GIB, "cold": True, "direction": "read"}),
        ("disk", {"bytes": 4 * GIB, "cold": True, "direction": "write"}),
        ("load", {"bytes": GIB, "quantize": True}),
    ),
)
