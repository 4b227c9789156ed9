"""The amounts that the phases around training move: computed once per run, whatever the machine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from tunecast.model.amount import Amount
from tunecast.model.architecture import Architecture
from tunecast.model.gguf import BASES, gguf_bytes
from tunecast.model.operation import Phase
from tunecast.model.optimizer import ADAM_STATES, bnb_state_bytes, optimizer_state_bytes
from tunecast.model.optimizer_bnb import BITSANDBYTES
from tunecast.model.optimizer_torchao import TORCHAO, state_bytes
from tunecast.model.phase import Work
from tunecast.model.published_weights import published_bytes
from tunecast.model.resolve_parallel import ZERO
from tunecast.model.run import Run
from tunecast.model.sharding import shard_gpus, shards_of
from tunecast.model.stacks import load_stacks
from tunecast.model.step_source import StepSource, operations_of
from tunecast.model.time import StepTime
from tunecast.model.trained import Trained, trained_dtype, trained_tensors, whole_bytes
from tunecast.model.units import DTYPE_BYTES
from tunecast.model.whole_run_options import WholeRunOptions
from tunecast.model.zero_memory import is_deepspeeds, zero_master_bytes

WRITTEN_TWICE = ("zero1", "zero2")
"""Under which DeepSpeed writes the weights into its own part of a checkpoint too (``_save_checkpoint`` of its
runtime/engine.py), beside those that the Trainer saves; ZeRO-3's are in shards, of fp32 copies alone."""


@lru_cache(maxsize=1024)
def trained_and_state(architecture: Architecture, run: Run) -> tuple[float, float]:
    """Bytes of what trains, and of the optimizer's state as a checkpoint holds it, paged or not, by formula: with the
    fp32 copies of DeepSpeed and Megatron, from which training goes on."""
    saved = whole_bytes(trained_tensors(architecture, run), trained_dtype(run))
    state = optimizer_state_bytes(architecture, run, platform="cpu") + zero_master_bytes(architecture, run)
    again = saved if is_deepspeeds(architecture, run) and run.sharding in WRITTEN_TWICE else 0
    return float(saved), float(state + again)


def traced_state_bytes(run: Run, trained: int) -> float:
    """The optimizer's state of a traced run, of which only the number of parameters is known: as if in one tensor."""
    if run.optim == "sgd":
        return 0.0
    if run.optim in BITSANDBYTES:
        one = [Trained(elements=trained, is_matrix=True)]
        return float(bnb_state_bytes(one, BITSANDBYTES[run.optim], can_page=False))
    if run.optim in TORCHAO:
        return float(state_bytes(TORCHAO[run.optim], trained, trained_dtype(run)))
    own, wide = DTYPE_BYTES[trained_dtype(run)], DTYPE_BYTES["fp32"]
    copies = run.sharding in ZERO and own < wide  # fp32 ones, and fp32 moments
    return float(trained * (wide + ADAM_STATES * wide if copies else ADAM_STATES * own))


@lru_cache(maxsize=256)
def export_sizes(architecture: Architecture) -> Mapping[str, float]:
    """Bytes of the whole model in every quantized format."""
    return {export: gguf_bytes(architecture, export) for export in BASES}


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
    stored_as: str | None = None,
) -> Work:
    """The amounts of one run; `forward_frac` is the forward pass over the whole step, in time, `stored_as` how the
    weights that are loaded were published, if in few bits."""
    if source is None:
        saved, state_bytes = trained_and_state(architecture, run)
    else:
        trained = source(architecture, run, platform).trainable_params
        saved, state_bytes = float(trained * DTYPE_BYTES[trained_dtype(run)]), traced_state_bytes(run, trained)
    full = amount.full_frac(run)
    writers = shard_gpus(run) if shards_of(run).optimizer_state else run.tp * run.pp
    tokens = amount.steps * run.tokens_per_step * full
    return Work(
        steps=amount.steps,
        full_frac=full,
        samples_per_row=amount.samples_per_row,
        least=amount.least,
        most=amount.most,
        tokens=tokens,
        dataset_tokens=tokens / amount.epochs,
        tokens_per_step=run.tokens_per_step,
        max_length=run.max_length,
        num_gpus=run.num_gpus,
        download_bytes=published_bytes(architecture, stored_as),
        total_params=architecture.total_params,
        quantized=run.bnb_4bit_quant_type is not None and stored_as is None,
        on_cpu=platform == "cpu",
        adapters=run.has_adapters,
        model_bytes=saved,
        checkpoint_bytes=saved + state_bytes,
        exports=export_sizes(architecture),
        writers=writers,
        machines=-(-writers // run.gpus_per_node),
        forward_frac=forward_frac,
        compiles=run.torch_compile or bool(load_stacks()[run.stack].get("compiles", False)),
    )
