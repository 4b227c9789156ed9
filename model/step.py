"""One training step written on a tape, and how its events stand for those of a deeper model with more micro-batches.

Layers are equal or repeat a pattern, so the tape of a few (`short_stack`) has the kernels of any depth, those in the
middle counted more often. Micro-batches after the first are equal too: the first makes the gradients, all later ones
add to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tunecast.catalogs.errors import NotSupportedError
from tunecast.model import litgpt_blocks, litgpt_head
from tunecast.model import primitives as ops
from tunecast.model import primitives_gpt as gpt
from tunecast.model import primitives_heavy as heavy
from tunecast.model.adapters_root import embedded_adapter
from tunecast.model.alibi import alibi_table, counted_tokens
from tunecast.model.architecture import Architecture, Attention, Layer, rotary_blocks
from tunecast.model.blocks import checkpointed_layer
from tunecast.model.compiled import compile_tape
from tunecast.model.context import Step, Tables
from tunecast.model.head import head_and_loss, head_name
from tunecast.model.inputs_of_layers import input_of_layer, inputs_of_layers, scaled_rows
from tunecast.model.joined import STACKS
from tunecast.model.litgpt import is_litgpt
from tunecast.model.loss_chunks import head_uses
from tunecast.model.masks import attention_masks, masked_blocks
from tunecast.model.norms import norm
from tunecast.model.operation import SYNCHRONISATION, Kind, Phase
from tunecast.model.parallel_blocks import (
    enter_block,
    gather_again,
    hand_over,
    leave_block,
    own_tokens,
    received_input,
    splits_tokens,
    whole_sum,
)
from tunecast.model.primitives_latent import complex_waves
from tunecast.model.resolve_parallel import FSDP
from tunecast.model.rotary_grid import grid_waves
from tunecast.model.run import BUCKET_ELEMENTS, Run
from tunecast.model.scaler import scaled_loss, scales
from tunecast.model.seen_logits import is_widened
from tunecast.model.selective import keep_operations
from tunecast.model.shapes import STORED
from tunecast.model.short_stack import ShortStack, layers_of
from tunecast.model.tape import Event, Tape, Tensor

EMBEDDED_LEAF = "embedded input"
"""Name of the embedded tokens when PEFT makes them need a gradient."""
MICRO_BATCHES = 2
"""Micro-batches written: the first, and one that stands for all later ones."""


def find_packing(step: Step, positions: Tensor) -> None:
    """Whether positions restart (packed samples): a few small kernels and one value that the host waits for.

    Source: transformers ``masking_utils.find_packed_sequence_indices``; skipped sizes are single numbers.
    """
    tape, batch, length = step.tape, step.run.per_device_train_batch_size, positions.elements
    rows = Tensor(batch * length, "int64", positions.storage)
    first = ops.elementwise(tape, "packing.sub", (Tensor(batch, "int64", None),), batch, "int64")
    joined = ops.elementwise(tape, "packing.cat", (first, rows), batch * (length + 1), "int64")
    steps = ops.elementwise(tape, "packing.sub", (joined, rows), batch * length, "int64")
    breaks = ops.elementwise(tape, "packing.ne", (steps,), batch * length, "bool")
    ids = ops.elementwise(tape, "packing.cumsum", (breaks,), batch * length, "int64")
    same = ops.elementwise(tape, "packing.eq", (Tensor(batch, "int64", ids.storage),), batch, "bool")
    every = ops.elementwise(tape, "packing.all", (same,), 1, "bool")
    if step.platform == "cuda":
        tape.kernel(SYNCHRONISATION, Kind.MEMORY, (every,), (), n_bytes=2)


def shared_tables(step: Step, entry: Tensor) -> Tables:
    """Positions, a sliding-window mask if a layer needs one, cos and sin: once per forward pass."""
    tape = step.tape
    if is_litgpt(step.architecture):
        return litgpt_blocks.rotary_tables(step)
    alibi = alibi_table(step, entry.dtype)
    if alibi is not None:
        return Tables(waves=(), mask=attention_masks(step)[1], alibi=alibi)
    positions = counted_positions(step)
    kinds = {block.window for block in masked_blocks(step.architecture)}
    for _ in kinds if step.architecture.finds_packing and not step.run.has_padding else ():
        find_packing(step, positions)
    full_mask, mask = attention_masks(step)
    waves = tuple(rotary_waves(step, positions, block) for block in rotary_blocks(step.architecture))
    tape.hold(positions)
    return Tables(waves=waves, mask=mask, full_mask=full_mask)


def counted_positions(step: Step) -> Tensor:
    """Index of every token: a range, or (OPT) counted from a mask for every sample: of ones in fp32, or
    the one that says what is padding."""
    tape, length = step.tape, step.run.max_length
    if step.architecture.finds_packing or not step.architecture.position_rows:
        positions = ops.elementwise(tape, "positions.arange", (), length, "int64")
        return ops.elementwise(tape, "positions.shift", (positions,), length, "int64")
    tokens = step.run.per_device_train_batch_size * length
    if step.run.has_padding:
        positions = counted_tokens(step, Tensor(tokens, "int64", None))
    else:
        ones = ops.elementwise(tape, "positions.ones", (), tokens, "fp32")
        positions = ops.cast(tape, counted_tokens(step, ones), "int64", name="positions.cast")
    return ops.elementwise(tape, "positions.shift", (positions,), tokens, "int64")


def rotary_waves(step: Step, positions: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
    """cos and sin of every position for heads of this attention, in the activations' dtype (OLMo 2: in fp32)."""
    if attention.sections:
        return grid_waves(step, positions, attention)
    tape, length = step.tape, step.run.max_length
    head_dim = attention.rotary_dim or attention.head_dim
    floats = ops.elementwise(tape, "positions.cast", (positions,), length, "fp32")
    inverse = Tensor(head_dim // 2, "fp32", None)
    angles = ops.elementwise(tape, "positions.outer", (floats, inverse), length * head_dim // 2, "fp32")
    if attention.latent is not None and attention.latent.rotary == "complex":
        return (complex_waves(tape, angles),) * 2
    if not attention.rotary_halves:
        halves = (angles,) if step.architecture.rotary_early else (angles, angles)
        angles = ops.elementwise(tape, "positions.cat", halves, length * head_dim, "fp32")
    waves = []
    for name in ("cos", "sin"):
        wave = ops.elementwise(tape, f"positions.{name}", (angles,), angles.elements, "fp32")
        waves.append(ops.elementwise(tape, f"positions.{name}", (wave,), angles.elements, "fp32"))
    if step.architecture.rotary_wide:
        return waves[0], waves[1]
    cos, sin = (ops.cast(tape, wave, step.stream_dtype, name="positions.cast") for wave in waves)
    return cos, sin


def embedded_input(step: Step, ids: Tensor) -> Tensor:
    """Embedded tokens; with adapters and checkpointing they are made to need a gradient, as PEFT does."""
    architecture = step.architecture
    if not architecture.has_entry:
        return received_input(step, EMBEDDED_LEAF)
    if is_litgpt(architecture):
        return litgpt_blocks.embedded(step, ids)
    table = step.weight(architecture.embedding_module, architecture.embedding_params)
    x = heavy.embedding(step.tape, table, ids, architecture.hidden_size)
    if architecture.embedding_scale == "table":
        x = scaled_rows(step, x)
    x = embedded_adapter(step, ids, x)
    x = whole_sum(step, x) if architecture.position_rows else leave_block(step, x)
    if step.run.has_adapters and step.run.gradient_checkpointing and x.node is None:
        x.leaf = EMBEDDED_LEAF
    return x


def entered(step: Step, x: Tensor, kept: list[Tensor]) -> Tensor:
    """Learned positions added to embedded tokens, and their norm, where there are.

    `kept` takes what the real code has by name until the last layer.
    """
    architecture, tape = step.architecture, step.tape
    if not architecture.has_entry:
        return x
    if architecture.position_rows:
        table = step.weight("positions", architecture.position_rows * architecture.hidden_size)
        counted = not architecture.finds_packing
        places = Tensor(step.tokens if counted else step.run.max_length, "int64", None)
        placed = heavy.embedding(tape, table, places, architecture.hidden_size)
        kept += (x, placed)
        x = own_tokens(step, gpt.add_to_each(tape, x, placed, name="positions.add"))
    x = ops.dropout(tape, x, architecture.embedding_dropout)
    if architecture.embedding_norm:
        x = norm(step, architecture.norm, "embedding_norm", x, architecture.hidden_size)
    return x


def write_micro_batch(step: Step, layers: Sequence[Layer], ids: Tensor, labels: Tensor) -> None:
    """Forward, loss and backward of one micro-batch."""
    tape = step.tape
    step.cache = {}
    step.returned.clear()
    tape.moment = "forward"
    x = embedded = embedded_input(step, ids)
    kept: list[Tensor] = []
    inputs = None
    if step.architecture.layer_inputs is not None:
        inputs = inputs_of_layers(step, step.architecture.layer_inputs, ids, x)
        kept.append(inputs)
    if step.architecture.alibi:
        x = entered(step, x, kept)
        tables = shared_tables(step, x)
    else:
        tables = shared_tables(step, x)
        x = entered(step, x, kept)
    if step.architecture.embedding_scale == "stream":
        x = ops.scale(tape, x, name="embedding_scale")
    scaled = x
    x = tape.lives_until(x) if any(layer.attention.keys == STORED for layer in layers) else x
    for index, layer in enumerate(layers):
        tape.layer = index
        x = checkpointed_layer(step, f"layers.{index}", layer, x, tables, input_of_layer(step, inputs))
    tape.layer = None
    if not step.architecture.has_exit:
        hand_over(step, x)
        tape.grads.pop(EMBEDDED_LEAF, None)
        return
    x = norm(step, step.architecture.norm, "norm", x, step.architecture.hidden_size)
    tape.hold(*(() if is_litgpt(step.architecture) else (scaled,)), *kept, *tables.masks, *step.returned)
    tape.hold(*(each for pair in step.stored_keys.values() for each in pair))
    step.returned.clear()
    write_loss = litgpt_head.head_and_loss if is_litgpt(step.architecture) else head_and_loss
    loss = write_loss(step, enter_block(step, x), labels)
    tape.hold(*step.cache.values())
    loss = ops.scale(tape, loss, name="loss_scale")  # by any number of micro-batches, 1 too (accelerate's ``backward``)
    step.cache = {}
    if loss.node is None:
        return  # nothing trains
    with tape.in_phase(Phase.BACKWARD):
        loss = scaled_loss(tape, loss) if scales(step.architecture, step.run) else loss
        seed = tape.empty(1, "fp32")
        tape.kernel("loss_gradient", Kind.MEMORY, (), (seed,))
        tape.backward(loss, seed)
        if embedded.leaf == EMBEDDED_LEAF:
            tape.hold(embedded)  # the node that takes its gradient keeps it
    tape.grads.pop(EMBEDDED_LEAF, None)


def tape_run(run: Run) -> Run:
    """The run as the tape sees it, so that runs which differ only in what it leaves out share one.

    It is one GPU's step without collectives, and all micro-batches after the first are equal. FSDP's version
    stays 1 only where it holds checkpoints, and who shards only where tokens are split, which PyTorch and DeepSpeed
    gather otherwise than Megatron. Of the Trainer it is left whether the model's output is cast.
    """
    micro_batches = min(run.gradient_accumulation_steps, MICRO_BATCHES)
    version = 1 if run.holds_checkpoints else 2
    alone: dict[str, Any] = {"num_gpus": 1, "sharding": "none", "offload": "none", "gpus_per_node": 1}
    alone |= {"stack_version": "", "paged_bytes": 0, "overlap_comm": False, "reduce_dtype": None, "weights_stay": False}
    alone |= {"reduce_bucket_size": BUCKET_ELEMENTS, "trainer_loop": is_widened(run), "loads_on_gpu": None}
    if splits_tokens(run):
        deepspeed = run.sharding in ("zero2", "zero3")
        alone["sharding"] = "fsdp" if run.sharding in FSDP else "zero2" if deepspeed else "none"
    return replace(run, gradient_accumulation_steps=micro_batches, fsdp_version=version, **alone)


def write_step(architecture: Architecture, run: Run, platform: str) -> Tape:
    """The tape of one optimizer step without its update, with every layer of the model."""
    return _written(architecture, tape_run(run), platform)


def of_several(architecture: Architecture, run: Run) -> Run | None:
    """The run of several micro-batches whose first one is this run's single one; None where there is none.

    Not with Liger's loss, which leaves a multiplication by one out, nor where gradients are updated and freed at once,
    nor with LitGPT, where tensors of a micro-batch live into the next.
    """
    alone = run.loss_type == "liger" or run.optimizer_in_backward or is_litgpt(architecture)
    if alone or run.gradient_accumulation_steps >= MICRO_BATCHES:
        return None
    return replace(run, gradient_accumulation_steps=MICRO_BATCHES)


@lru_cache(maxsize=256)
def _written(architecture: Architecture, run: Run, platform: str) -> Tape:
    several = of_several(architecture, run)
    if several is not None:
        return _written(architecture, several, platform).first_micro_batch()
    if architecture.settings:
        raise NotSupportedError(
            f"A forecast by formula of {architecture.name} was asked for, but {architecture.model_type} has none yet; "
            "trace its real code with tunecast.calibrate.exact."
        )
    tape = Tape(platform)
    step = Step(tape=tape, architecture=architecture, run=run, platform=platform)
    uses = head_uses(run) + (architecture.tie_word_embeddings and not run.has_adapters)
    if uses > 1:
        tape.shared_leaves[head_name(step)] = uses
    ids, labels = Tensor(step.tokens, "int64", None), Tensor(step.tokens, "int64", None)
    layers = layers_of(architecture)
    for micro_batch in range(min(run.gradient_accumulation_steps, MICRO_BATCHES)):
        tape.micro_batch = micro_batch
        write_micro_batch(step, layers, ids, labels)
    if run.checkpoint_keeps_ops:
        keep_operations(tape)
    if run.torch_compile:
        compile_tape(tape, loss=run.compile_loss)
    if splits_tokens(run) and run.sharding == "none" and (run.stack in STACKS or not run.async_tp):
        gather_again(tape)
    if run.optimizer_in_backward:
        tape.grads.clear()
    return tape


def repetitions(event: Event, stack: ShortStack, run: Run) -> int:
    """How often an event of the tape of a short stack happens in the whole step."""
    later = run.gradient_accumulation_steps - 1
    return stack.copies(event.layer) * event.times * (max(later, 1) if event.micro_batch else 1)
