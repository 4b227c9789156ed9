#!/usr/bin/env python3
"""Host seconds of one decoder layer, forward and backward, on this CPU: how much the C++ engine costs.

    python scripts/host_phases.py

A Llama of 64 features is all dispatch and hardly any arithmetic, so its time on a CPU is about what the
host of a GPU spends, less the driver's launches. Two depths are timed and their difference divided, so that
what surrounds the layers drops out. The ratio is one of the figures in calibrate/data/mock_physics.json.
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tunecast.model.units import MICROSECOND_S

DEPTHS = (2, 10)
REPEATS = 30
LAUNCH_US = 3.5
"""A driver call, which a CPU does not make: 3.0 to 5 us are published (culaunch, l20x)."""
KERNELS = {"forward": 38, "backward": 69}
"""Operators of a layer that would be kernels, counted in the traced stream without adapters."""


def seconds_of(depth: int) -> dict[str, float]:
    """Fast forward and backward seconds of a model of this depth: the lowest decile."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model, tokens = LlamaForCausalLM(config), torch.randint(0, 64, (1, 8))
    found: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(REPEATS):
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        middle = time.perf_counter()
        loss.backward()
        found["forward"].append(middle - start)
        found["backward"].append(time.perf_counter() - middle)
        model.zero_grad()
    return {phase: sorted(values)[REPEATS // 10] for phase, values in found.items()}


def main() -> None:
    """Print the seconds of a layer by phase, and the ratio with launches added to both."""
    torch.set_num_threads(1)
    shallow, deep = (seconds_of(depth) for depth in DEPTHS)
    layer_us = {p: (deep[p] - shallow[p]) / (DEPTHS[1] - DEPTHS[0]) / MICROSECOND_S for p in deep}
    launched_us = {p: us + KERNELS[p] * LAUNCH_US for p, us in layer_us.items()}
    print(f"a layer on this CPU: forward {layer_us['forward']:.0f} us, backward {layer_us['backward']:.0f} us")
    print(f"backward over forward: {layer_us['backward'] / layer_us['forward']:.2f}")
    print(f"with a launch of {LAUNCH_US} us for each: {launched_us['backward'] / launched_us['forward']:.2f}")


if __name__ == "__main__":
    main()
