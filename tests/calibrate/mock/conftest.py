"""A hand-made stream with every kind of kernel, so that the physics can be tested without the oracle."""

from __future__ import annotations

import pytest

from tunecast.calibrate.mock.device import MockDevice, open_mock
from tunecast.model.operation import UPCAST, Kind, Operation, Phase

F, R, B, U = Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.OPTIMIZER


def gemm(phase: Phase, m: int, n: int, k: int, layout: str = "nt") -> Operation:
    return Operation(
        name="aten.mm", kind=Kind.GEMM, phase=phase, flops=2.0 * m * n * k, shape=(m, n, k), layout=layout, layer=0
    )


def moves(
    phase: Phase, n_bytes: float, name: str = "aten.mul", kind: Kind = Kind.MEMORY, layout: str = ""
) -> Operation:
    return Operation(name=name, kind=kind, phase=phase, bytes=n_bytes, layout=layout, layer=0)


def attention(phase: Phase, length: int) -> Operation:
    backward = phase is B
    flops = (10.0 if backward else 4.0) * 32 * length * length * 128 / 2
    name = "aten.flash_attention_backward" if backward else "aten.flash_attention"
    return Operation(
        name=name, kind=Kind.ATTENTION, phase=phase, flops=flops, shape=(1, 32, 8, length, length, 128), layer=0
    )


def layer(phase: Phase, tokens: int, width: int) -> list[Operation]:
    return [
        moves(phase, 4.0 * tokens * width),
        moves(phase, 2.0 * tokens * width, "aten.mean"),
        moves(phase, 6.0 * tokens * width, "aten._to_copy", layout=UPCAST),
        Operation(name="bnb.dequantize_4bit", kind=Kind.DEQUANT, phase=phase, shape=(width * width,), layer=0),
        gemm(phase, tokens, width, width),
        gemm(phase, tokens, 16, width),
        gemm(phase, tokens, width, 16),
        attention(phase, tokens),
        gemm(phase, 16, width, tokens, "tn"),
        moves(phase, 3.0e4),
    ]


def step(tokens: int = 1500, width: int = 3000, layers: int = 4) -> tuple[Operation, ...]:
    """Forward, recompute and backward of a few layers, and an update; sizes on no tile boundary."""
    passes = [op for phase in (F, R, B) for _ in range(layers) for op in layer(phase, tokens, width)]
    loss = [moves(B, 4.0 * tokens * 32000, "aten._log_softmax", Kind.LOSS)]
    update = [moves(U, 8.0e6, "aten._foreach_mul_", Kind.OPTIMIZER)] * 8
    return (*passes, *loss, *update)


@pytest.fixture
def device_bound_step() -> tuple[Operation, ...]:
    return step()


@pytest.fixture
def host_bound_step() -> tuple[Operation, ...]:
    return step(tokens=40, width=256, layers=8)


@pytest.fixture
def a100() -> MockDevice:
    return open_mock("mock:a100-sxm4-80gb#1")
