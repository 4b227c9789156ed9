"""What of communication beside work a step waits for all the same, and how that is told from the rest.

A collective runs on a stream of its own while its pass works, yet costs time: its kernels take processors and bandwidth
from those beside them, and the first gather and the last sum have no work beside them. A step is longer by this share
of it; and where it takes so long that the work beside it is done before, by what is left.

Torch's and Megatron's collectives are asked for a layer ahead, or summed as layers end. ZeRO-3 asks for a layer's
parameters as it needs them: what it fetches ahead is a small part of a layer (transformers writes
``stage3_prefetch_bucket_size`` as 0.9 hidden size squared, a thirteenth of a Llama layer). So its share is its own.

Two others ask as late. Where the host waits for the device again and again inside every layer (transformers 4 looks up
which tokens each expert has; bitsandbytes' 8 bits look for outliers in every map), it comes to the next layer, and asks
for it, when the work of the one before is nearly done; once a layer (a padded row's lengths for FlashAttention) leaves
most of the layer to hide behind. And where adapters are units of FSDP 1 (`hooks`), it comes to a layer's backward no
earlier than two units before the end of the layer after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunecast.model.curves import Array
from tunecast.model.hooks import waits_for_units
from tunecast.model.host import enters_layer
from tunecast.model.operation import SYNCHRONISATION, Operation, Phase
from tunecast.model.run import Run
from tunecast.model.segments import BACKWARD, FORWARD, SEGMENTS

EXPOSED = "exposed_frac"
EXPOSED_LATE = "exposed_late_frac"
SHARES = (EXPOSED, EXPOSED_LATE)
"""Of collectives asked for ahead, and of those asked for as they are needed."""


SEVERAL = 2
"""Reads in a layer from which its last is taken to come late in it: experts and maps, no fewer than two of either."""


def asks_late(run: Run, waits: bool) -> Array:
    """(segments,) 1 where this run's collectives are asked for as they are needed, else 0; `waits`: whether the host
    waits for the device several times in every layer of the forward."""
    late = np.zeros(len(SEGMENTS))
    if run.num_gpus > 1:
        late[:] = run.sharding == "zero3"
        late[FORWARD] = max(late[FORWARD], float(waits))
        late[BACKWARD] = max(late[BACKWARD], float(waits_for_units(run)))
    return late


def waits_in_layers(operations: Sequence[Operation], counts: Array) -> bool:
    """Whether the host reads values of the device several times in every layer of the forward; `counts` is
    (operations, variants)."""
    forward = [row for row, operation in enumerate(operations) if operation.phase is Phase.FORWARD]
    layers = sum(counts[row].sum() for row in forward if enters_layer(operations[row]))
    reads = sum(counts[row].sum() for row in forward if operations[row].name == SYNCHRONISATION)
    return bool(reads >= SEVERAL * layers > 0.0)
