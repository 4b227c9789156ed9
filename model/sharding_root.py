"""What is outside the layers under FSDP 2, and in which units it is gathered and reduced.

accelerate
    the table of tokens is a unit of its own, gathered again for its gradient; the last norm and the head are another,
    which stays whole between forward and backward and goes when its gradients are reduced, before the layers'. Where
    head and table are one tensor, all three are one unit, whole from the first forward to the end of the backward.
torchtune, LitGPT
    everything outside the layers is the root's, whole from the first forward to the end of the backward; it is let go
    after the forward and fetched again at once, and the head's gradient waits for the table's.

Sources: accelerate 1.15 ``utils/fsdp_utils.py`` (``fsdp2_prepare_model``), torchtitan ``models/llama3`` (the same, with
the norm beside the head), torchtune 0.6.1 ``training/_distributed.py`` (``shard_model``), litgpt 0.5.13
``finetune/lora.py``; both ways run by the tests in two processes. Left out: accelerate before it split the root, and
torchtune's ``custom_sharded_layers``.
"""

from __future__ import annotations

from typing import NamedTuple

from tunecast.model.architecture import Architecture
from tunecast.model.memory_static import root_weight_bytes
from tunecast.model.resolve_parallel import FSDP
from tunecast.model.run import Run
from tunecast.model.trained import OWN_LOOPS, gradient_dtype, root_tensors, whole_bytes
from tunecast.model.units import DTYPE_BYTES


class Root(NamedTuple):
    """Bytes of the unit that a forward begins with, and of that it ends with; the latter 0 where they are one."""

    entry: int
    exit: int

    @property
    def whole(self) -> int:
        """Of both."""
        return self.entry + self.exit


def by_accelerate(run: Run) -> bool:
    """Whether accelerate wraps the model under FSDP 2; stacks with loops of their own wrap it by themselves."""
    return run.sharding in FSDP and run.fsdp_version == 2 and run.stack not in OWN_LOOPS


def splits_root(architecture: Architecture, run: Run) -> bool:
    """Whether table and head are units of their own."""
    return by_accelerate(run) and not architecture.tie_word_embeddings


def gathers_root_again(run: Run) -> bool:
    """Whether the root is let go after the loss and fetched again at once: by frameworks that give all of it
    ``reshard_after_forward``; FSDP1 and accelerate keep the last unit."""
    return run.sharding in ("fsdp", "hsdp") and run.fsdp_version == 2 and not by_accelerate(run)


def gathered_root(architecture: Architecture, run: Run) -> Root:
    """As it is gathered: weights, and what trains beside them."""
    trained = trained_root(architecture, run)
    beside = trained if run.has_adapters else Root(0, 0)
    whole, table = root_weight_bytes(architecture, run), table_bytes(architecture, run)
    if not splits_root(architecture, run):
        return Root(whole + beside.whole, 0)
    return Root(table + beside.entry, whole - table + beside.exit)


def trained_root(architecture: Architecture, run: Run) -> Root:
    """Gradients: of all of it, or of copies and adapters."""
    if run.has_adapters:
        before, after = (whole_bytes(part, gradient_dtype(run)) for part in root_tensors(architecture, run))
    else:
        before = table_bytes(architecture, run)
        after = root_weight_bytes(architecture, run) - before
    return Root(before, after) if splits_root(architecture, run) else Root(before + after, 0)


def table_bytes(architecture: Architecture, run: Run) -> int:
    """The table of tokens, which the first stage of a pipeline alone has."""
    return DTYPE_BYTES[run.dtype] * architecture.embedding_params if architecture.has_entry else 0


def left_to_root(architecture: Architecture, run: Run) -> int:
    """Of what is in the last unit here, the norm that accelerate does not find inside PEFT's model: the root gathers it
    by itself (``_find_final_norm`` looks at the children of ``base_model``)."""
    if not (run.has_adapters and architecture.has_exit and splits_root(architecture, run)):
        return 0
    head = DTYPE_BYTES[run.dtype] * architecture.embedding_params
    return max(root_weight_bytes(architecture, run) - table_bytes(architecture, run) - head, 0)
