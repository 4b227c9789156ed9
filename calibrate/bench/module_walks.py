"""How long the host goes over the modules of a model, as transformers' Trainer does around every optimizer step."""

from __future__ import annotations

import time
from typing import Any

from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.protocol import TrialResult, TrialSpec
from tunecast.calibrate.trace.hf import build_model
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict


def run_modules(spec: TrialSpec, backend: Backend) -> TrialResult:
    """Host seconds of the walks of a step (`walk_over`) over the modules of the real model of ``architecture`` and
    ``run``, on the meta device: nothing is computed. ``modules`` in `extra` is how many there are."""
    model = build_model(
        architecture_from_dict(spec.params["architecture"]), run_from_dict(spec.params["run"]), device="meta"
    )
    walk_over(model)
    taken = [_timed(model) for _ in range(spec.warmup + spec.repeats)]
    return TrialResult(
        outcome="ok",
        samples_s=tuple(taken[spec.warmup :]),
        warmup_s=tuple(taken[: spec.warmup]),
        extra={"modules": sum(1 for _ in model.modules())},
    )


def walk_over(model: Any) -> None:
    """What the Trainer calls in each micro-step (the training mode, the parameters counted) and in each step (the
    gradients that are clipped, and set to none): ``training_step``, ``floating_point_ops``, ``_clip_grad_norm`` and
    ``_run_epoch`` of transformers 5."""
    model.train()
    model.num_parameters(exclude_embeddings=True)
    list(model.parameters())
    model.zero_grad()


def _timed(model: Any) -> float:
    begun_s = time.perf_counter()
    walk_over(model)
    return time.perf_counter() - begun_s
