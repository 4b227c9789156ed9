"""The amounts that the phases around training move: computed once per run, whatever the machine."""

from __future__ import annotations

from functools import lru_cache

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.models import find_model
from tunecast.model.amount import Amount
from tunecast.model.architecture import Architecture
from tunecast.model.operation import Phase
from tunecast.model.optimizer import ADAM_STATES, bnb_state_bytes, optimizer_state_bytes
from tunecast.model.optimizer_bnb import BITSANDBYTES
from tunecast.model.phases import Work
from tunecast.model.run import Run
from tunecast.model.stacks import load_stacks
from tunecast.model.step_source import StepSource, operations_of
from tunecast.model.time import StepTime
from tunecast.model.trained import Trained, trained_dtype, trained_tensors, whole_bytes
from tunecast.model.units import DTYPE_BYTES
from tunecast.model.whole_run_options import WholeRunOptions

PUBLISHED_BYTES_PER_PARAM = 2
"""Checkpoints are published in 16 bits unless their catalog row says otherwise."""


@lru_cache(maxsize=256)
def published_bytes(name: str, total_params: int) -> float:
    """Bytes of the published weights: the catalog's figure, else 16 bits per parameter."""
    try:
        stored = find_model(name).download_bytes
    except InputError:
        stored = None
    return float(stored or PUBLISHED_BYTES_PER_PARAM * total_params)


@lru_cache(maxsize=1024)
def trained_and_state(architecture: Architecture, run: Run) -> tuple[float, float]:
    """Bytes of what trains, and of the optimizer's state as a checkpoint holds it, paged or not, by formula."""
    saved = whole_bytes(trained_tensors(architecture, run), trained_dtype(run))
    return float(saved), float(optimizer_state_bytes(architecture, run, platform="cpu"))


def traced_state_bytes(run: Run, trained: int) -> float:
    """The optimizer's state of a traced run, of which only the number of parameters is known: as if in one tensor."""
    if run.optim == "sgd":
        return 0.0
    if run.optim in BITSANDBYTES:
        one = [Trained(elements=trained, is_matrix=True)]
        return float(bnb_state_bytes(one, BITSANDBYTES[run.optim], can_page=False))
    return float(ADAM_STATES * trained * DTYPE_BYTES[trained_dtype(run)])


def forward_share(
    architecture: Architecture,
    run: Run,
    timing: StepTime | None,
    options: WholeRunOptions,
    source: StepSource | None = None,
) -> float:
    """Forward pass over the whole step in time; by FLOPs where only a speed was given; 0 where nothing asks for it."""
    if options.eval_samples is None:
        return 0.0
    if timing is not None and "forward" in timing.phases_s:
        return timing.phases_s["forward"] / timing.step_time_s.value
    operations = operations_of(architecture, run, source=source)
    forward = sum(o.total_flops for o in operations if o.phase is Phase.FORWARD)
    return forward / sum(o.total_flops for o in operations)


def work_of(
    architecture: Architecture,
    run: Run,
    amount: Amount,
    *,
    forward_frac: float,
    platform: str = "cuda",
    source: StepSource | None = None,
) -> Work:
    """The amounts of one run; `forward_frac` is the forward pass over the whole step, in time."""
    if source is None:
        saved, state_bytes = trained_and_state(architecture, run)
    else:
        trained = source(architecture, run, platform).trainable_params
        saved, state_bytes = float(trained * DTYPE_BYTES[trained_dtype(run)]), traced_state_bytes(run, trained)
    tokens = float(amount.steps * run.tokens_per_step)
    return Work(
        steps=amount.steps,
        least=amount.least,
        most=amount.most,
        tokens=tokens,
        dataset_tokens=tokens / amount.epochs,
        tokens_per_step=run.tokens_per_step,
        max_length=run.max_length,
        num_gpus=run.num_gpus,
        download_bytes=published_bytes(architecture.name, architecture.total_params),
        total_params=architecture.total_params,
        quantized=run.bnb_4bit_quant_type is not None,
        on_cpu=platform == "cpu",
        adapters=run.has_adapters,
        model_bytes=saved,
        checkpoint_bytes=saved + state_bytes,
        forward_frac=forward_frac,
        compiles=run.torch_compile or bool(load_stacks()[run.stack].get("compiles", False)),
    )
