"""What tensor and pipeline parallelism add to the tape of one GPU: collectives around blocks, ends of a stage.

Each block's first maps are split by columns and its last map by rows, so that every GPU gets a part of the sum.
Without sequence parallelism the sum is an all-reduce in place, in the forward after the block and in the backward
before it. With it, norms and residuals work on each GPU's own tokens: an all-gather enters the block and a
reduce-scatter leaves it, and the other way round in the backward.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053, section 3), Korthikanti et al. 2022 (arXiv 2205.05198, section 4.2),
PyTorch's ``torch.distributed.tensor.parallel``. PyTorch exchanges whole rows, one GPU's tokens of every sample behind
another's: it copies tokens into that order to scatter them, and out of it once gathered, unless there is one sample
(``_chunk_or_narrow_cat`` and ``_maybe_view_chunk_cat`` of ``torch/distributed/_functional_collectives.py``). Megatron's
tokens come before its samples, and asynchronous tensor parallelism takes strides into its products.

PyTorch keeps a block's gathered input for the gradients of weights; Megatron keeps each GPU's own tokens and gathers
them once more (Korthikanti et al., section 4.2.2; Megatron-Core ``tensor_parallel/layers.py``,
``LinearWithGradAccumulationAndAsyncCommunication``). That gather runs beside the product for the input's gradient and
is taken to hide behind it.
"""

from __future__ import annotations

from tunecast.model.compiled import copied
from tunecast.model.context import Step
from tunecast.model.operation import Kind, Phase
from tunecast.model.resolve_parallel import FSDP
from tunecast.model.run import Run
from tunecast.model.tape import Event, Grads, Storage, Tape, Tensor

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "tp.all_reduce", "tp.all_gather", "tp.reduce_scatter"


def splits_tokens(run: Run) -> bool:
    """Whether each GPU of a tensor-parallel group has its own tokens of norms and residuals."""
    return run.tp > 1 and run.sequence_parallel


def reorders(run: Run) -> bool:
    """Whether exchanged tokens are copied into the order of the samples: PyTorch's own tensor parallelism, which is
    that beside FSDP."""
    return splits_tokens(run) and not run.async_tp and run.sharding in FSDP


def reordered(tape: Tape, x: Tensor) -> Tensor:
    """All tokens in the order that comes next, in new memory."""
    out = tape.empty(x.elements, x.dtype)
    tape.kernel("reorder_tokens", Kind.MEMORY, (x,), (out,), n_bytes=x.bytes + out.bytes)
    return out


def gathered(tape: Tape, x: Tensor, run: Run) -> Tensor:
    """Every GPU's tokens, in new memory."""
    out = tape.empty(x.elements * run.tp, x.dtype)
    tape.kernel(ALL_GATHER, Kind.COMMUNICATION, (x,), (out,), n_bytes=out.bytes)
    return reordered(tape, out) if reorders(run) and run.per_device_train_batch_size > 1 else out


def scattered(tape: Tape, x: Tensor, run: Run) -> Tensor:
    """The sum of this GPU's tokens, in new memory."""
    out = tape.empty(x.elements // run.tp, x.dtype)
    x = reordered(tape, x) if reorders(run) else x
    tape.kernel(REDUCE_SCATTER, Kind.COMMUNICATION, (x,), (out,), n_bytes=x.bytes)
    return out


def summed(tape: Tape, x: Tensor) -> Tensor:
    """The sum over GPUs, in place."""
    tape.kernel(ALL_REDUCE, Kind.COMMUNICATION, (x,), (x,), n_bytes=x.bytes)
    return x


def enter_block(step: Step, x: Tensor) -> Tensor:
    """The input that all GPUs of the group share; its gradient is a sum of what each of them computes."""
    run, tape = step.run, step.tape
    if run.tp == 1:
        return x
    if run.sequence_parallel:
        return tape.record(gathered(tape, x, run), (x,), lambda grad: (scattered(tape, grad, run),))
    out = Tensor(x.elements, x.dtype, x.storage, is_view=True)

    def backward(grad: Tensor) -> Grads:
        return (summed(tape, grad),)

    return tape.record(out, (x,), backward)


def leave_block(step: Step, x: Tensor) -> Tensor:
    """The sum of what the GPUs of the group computed."""
    run, tape = step.run, step.tape
    if run.tp == 1:
        return x
    if run.sequence_parallel:
        return tape.record(scattered(tape, x, run), (x,), lambda grad: (gathered(tape, grad, run),))
    summed(tape, x)
    return x


def whole_sum(step: Step, x: Tensor) -> Tensor:
    """The sum for every GPU's tokens, where learned positions are still to be added (Megatron-LM
    ``language_model_embedding.py``: ``reduce_scatter_embeddings`` is off then)."""
    return summed(step.tape, x) if step.run.tp > 1 else x


def gather_again(tape: Tape) -> None:
    """Let the gathered input of a block go after the forward, and come again where the backward first reads it."""
    sources = {
        event.writes[0]: event.reads
        for event in tape.events
        if event.name == ALL_GATHER and event.phase is not Phase.BACKWARD
    }
    again: dict[Storage, Storage] = {}
    events: list[Event] = []
    for event in tape.events:
        if event.phase is not Phase.BACKWARD or not any(storage in sources for storage in event.reads):
            events.append(event)
            continue
        for storage in event.reads:
            if storage in sources and storage not in again:
                again[storage] = Storage(storage.bytes, storage.part)
                came = Event(
                    "tp.gather_again", None, sources[storage], (again[storage],), phase=event.phase,
                    moment=event.moment, layer=event.layer, micro_batch=event.micro_batch,
                )  # fmt: skip
                events.append(came)
        events.append(copied(event, lambda storage: again.get(storage, storage)))
    tape.events = events


def own_tokens(step: Step, x: Tensor) -> Tensor:
    """With sequence parallelism this GPU's tokens of a tensor that all have; their gradients are gathered."""
    run, tape = step.run, step.tape
    if run.tp == 1 or not run.sequence_parallel:
        return x
    own = tape.empty(x.elements // run.tp, x.dtype)
    tape.kernel("own_tokens", Kind.MEMORY, (x,), (own,), n_bytes=2 * own.bytes)
    return tape.record(own, (x,), lambda grad: (gathered(tape, grad, run),))


def received_input(step: Step, leaf: str) -> Tensor:
    """What the stage before sends; a gradient goes back for it."""
    run, tape = step.run, step.tape
    tokens = step.tokens // run.tp if run.sequence_parallel else step.tokens
    x = tape.empty(tokens * step.architecture.hidden_size, step.activation_dtype)
    tape.kernel("pp.receive", Kind.MEMORY, (), (x,), n_bytes=0, launches=0)
    x.leaf = leaf
    return x


def hand_over(step: Step, x: Tensor) -> None:
    """The stage's output leaves, and its gradient comes back."""
    tape = step.tape
    tape.hold(*step.cache.values())
    step.cache = {}
    with tape.in_phase(Phase.BACKWARD):
        grad = tape.empty(x.elements, x.dtype)
        tape.kernel("pp.receive", Kind.MEMORY, (), (grad,), n_bytes=0, launches=0)
        tape.backward(x, grad)
