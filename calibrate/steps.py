"""Real optimizer steps on a real device: the transformers + PEFT + bitsandbytes code on random weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

from tunecast.calibrate.allocations import peak_allocated_bytes
from tunecast.calibrate.bench.host_ops import launch_pace_s
from tunecast.calibrate.bitsandbytes_setup import quiet_bitsandbytes
from tunecast.calibrate.devices.backend import Backend
from tunecast.calibrate.devices.protocol import MemoryReading, TrialResult, TrialSpec
from tunecast.calibrate.linear_kernels import check_installed_kernels
from tunecast.calibrate.stats import median
from tunecast.calibrate.trace.hf import (
    build_model,
    embedding_parameters,
    make_optimizer,
    make_scaler,
    train_step,
    trainable_parameters,
)
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.calibrate.weights import held_bytes, materialise
from tunecast.model.architecture import Architecture
from tunecast.model.run import Run

WARM_S = 0.5
"""Short steps are repeated for so long before those that count. A card holds its power limit by its clock, which takes
hundredths of a second: of an H200 products of 40 ms in all ran a fifth faster than lasting ones
(results/validation/gpu/profiles)."""
SCATTERED_FRAC = 0.02
"""Standard deviation of a card's steps over their mean beyond which more of them are timed: steps that the card bounds
show below 1%, those that wait for the host of a virtual machine 5 to 20%, at a pace that changes within a second. The
plain one, since of five steps the two of a second pace are no outliers."""
MOST_STEPS_S = 1.0
"""...until they fill so long, where the trial does not ask for another time (``most_s``)."""
MOST_STEPS = 200
"""Neither is done more often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model ready to train on a device, with its optimizer and one batch."""

    model: Any
    optimizer: Any
    batch: dict[str, Any]
    run: Run
    platform: str
    scaler: Any | None = None
    """Of fp16 autocast alone."""

    def step(self) -> None:
        """One optimizer step, all micro-batches."""
        train_step(self.model, self.batch, self.optimizer, self.run, platform=self.platform, scaler=self.scaler)


def prepare_training(architecture: Architecture, run: Run, device: str) -> Training:
    """Build on the meta device, then put random weights in place, layer by layer."""
    import torch

    check_installed_kernels(architecture, run)
    quiet_bitsandbytes()
    platform = torch.device(device).type
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers tells its own callers what to rename.
        model = build_model(architecture, run, device="meta")
    materialise(model, run, device)
    shape = (run.per_device_train_batch_size, run.max_length)
    tokens = torch.randint(0, architecture.vocab_size, shape, device=device)
    embeddings = embedding_parameters(model)
    optimizer = make_optimizer(trainable_parameters(model), run, platform=platform, embeddings=embeddings)
    return Training(
        model=model,
        optimizer=optimizer,
        batch={"input_ids": tokens, "labels": tokens, **_padding(run, tokens)},
        run=run,
        platform=platform,
        scaler=make_scaler(run, platform),
    )


def _padding(run: Run, tokens: Any) -> dict[str, Any]:
    """The mask of a micro-batch whose first sample ends in one token of padding, which is all that attention asks."""
    if not run.has_padding:
        return {}
    mask = tokens.new_ones(tokens.shape)
    mask[0, -1] = 0
    return {"attention_mask": mask}


def run_step(spec: TrialSpec, backend: Backend) -> TrialResult:
    """The ``step`` bench: seconds of every optimizer step, warm-up apart, and the memory views of them all.

    On a card, where the warm-up asked for ends before `WARM_S`, more steps are taken before those that count; where
    these scatter, up to `MOST_STEPS` more are timed, until they fill ``most_s`` seconds (`MOST_STEPS_S` where that is
    not told); and the
    host's pace is told before and after them (``launch_s``): that of a shared machine changes from minute to minute.
    Steps follow each other without the loss being read. The Trainer reads it after every micro-step, to leave NaN out
    of its log, unless ``logging_nan_inf_filter`` is off; what its host waits for then is not measured here.
    """
    architecture = architecture_from_dict(spec.params["architecture"])
    run = run_from_dict(spec.params["run"])
    backend.empty_cache()
    training = prepare_training(architecture, run, backend.torch_device)
    backend.empty_cache()
    backend.reset_peak_memory()
    at_rest = _allocated_now(backend, training)
    warmup, _ = backend.timed(training.step, repeats=0, warmup=spec.warmup)
    on_card = training.platform != "cpu"
    more = steps_to_warm(warmup) if on_card else 0
    paces = [launch_pace_s(backend)] if on_card else []
    further, samples = backend.timed(training.step, repeats=spec.repeats, warmup=more)
    if on_card:
        missing = steps_to_settle(samples, spec.params.get("most_s", MOST_STEPS_S))
        samples += backend.timed(training.step, repeats=missing, warmup=0)[1] if missing else ()
    reading = _with_allocated(backend.memory(), training)
    paces += [launch_pace_s(backend)] if on_card else []
    return TrialResult(
        outcome="ok",
        samples_s=samples,
        warmup_s=(*warmup, *further),
        memory=replace(reading, at_rest_bytes=at_rest),
        extra=_counts(training) | ({"launch_s": paces} if paces else {}),
    )


def steps_to_warm(taken_s: Sequence[float]) -> int:
    """Steps that are missing to `WARM_S` after these; none where no warm-up was asked for.

    The last of those taken tells how long one is: the first loads kernels.
    """
    return _steps_in(WARM_S - sum(taken_s[1:]), taken_s[-1]) if taken_s else 0


def steps_to_settle(samples_s: Sequence[float], most_s: float) -> int:
    """Steps that are missing to `most_s` after these, at most `MOST_STEPS`, where these scatter; none where they do
    not."""
    scattered = len(samples_s) > 1 and stdev(samples_s) > SCATTERED_FRAC * mean(samples_s)
    return _steps_in(most_s - sum(samples_s), median(samples_s)) if scattered else 0


def _steps_in(missing_s: float, step_s: float) -> int:
    """Steps of so long that fill what is missing, at most `MOST_STEPS`."""
    return 0 if missing_s <= 0.0 else min(MOST_STEPS, math.ceil(missing_s / max(step_s, missing_s / MOST_STEPS)))


def _allocated_now(backend: Backend, training: Training) -> int:
    """Allocated before the first step: as the device tells, else the storages that the model holds."""
    told = backend.memory().allocated_bytes
    return held_bytes(training.model) if told is None else told


def _with_allocated(reading: MemoryReading, training: Training) -> MemoryReading:
    """Where the device keeps no peak of allocated memory, one more step, untimed and profiled, gives it."""
    if reading.allocated_bytes is not None:
        return reading
    before = held_bytes(training.model, training.optimizer)
    return replace(reading, allocated_bytes=before + peak_allocated_bytes(training.step))


def _counts(training: Training) -> dict[str, Any]:
    trained = sum(parameter.numel() for parameter in trainable_parameters(training.model))
    return {"trainable_params": trained, "tokens_per_step": training.run.tokens_per_step}
