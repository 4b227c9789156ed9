"""What of communication beside work a step waits for all the same, and how that is told from the rest.

A collective runs on a stream of its own while its pass works, yet costs time: its kernels take processors and bandwidth
from those beside them, and the first gather and the last sum have no work beside them. A step is longer by this share
of it; and where it takes so long that the work beside it is done before, by what is left.

Torch's and Megatron's collectives are asked for a layer ahead, or summed as layers end. ZeRO-3 asks for a layer's
parameters as it needs them: what it fetches ahead is a small part of a layer (transformers writes
``stage3_prefetch_bucket_size`` as 0.9 hidden size squared, a thirteenth of a Llama layer). So its share is its own.
"""

from __future__ import annotations

from tunecast.model.run import Run

EXPOSED = "exposed_frac"
EXPOSED_LATE = "exposed_late_frac"
SHARES = (EXPOSED, EXPOSED_LATE)
"""Of collectives asked for ahead, and of those asked for as they are needed."""


def asks_late(run: Run) -> bool:
    """Whether this run's collectives are asked for as they are needed (DeepSpeed's ZeRO-3)."""
    return run.num_gpus > 1 and run.sharding == "zero3"
