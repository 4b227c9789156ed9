"""Into how many chunks of tokens losses are cut that multiply with the head chunk by chunk.

TRL's take 256 tokens each; torchtune's take an eighth of every sample. Sources are in `losses` and `kept_chunks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tunecast.model.run import Run

CHUNKED_NLL = "chunked_nll"
"""TRL's loss path."""
CHUNK_TOKENS = 256
"""Tokens per chunk of TRL's (``_CHUNKED_LM_HEAD_CHUNK_SIZE``)."""
TORCHTUNE = "torchtune"
"""The stack of the losses that follow."""
CHUNKED_CE, LINEAR_CE = "chunked_ce", "linear_ce"
KEPT_CHUNKS = (CHUNKED_CE, LINEAR_CE)
"""Loss paths of torchtune, of which every chunk keeps its probabilities."""
BETWEEN_CHUNKS = "loss.chunks"
"""Kernel that adds a chunk's loss to those before, or takes the mean: outside the graphs that torchtune compiles."""
EAGER_UPCAST = "logits_float"
"""Kernel that makes torchtune's logits fp32 where they are not in chunks: in the model, whose layers alone are
compiled (``unembed``), so that a compiled loss finds them made."""
SUMMED_IN_LOOP = "loss.accumulate"
"""Kernel that adds a chunk's gradient of the head to those before, within the loop over chunks: the next chunk's comes
after it, and no two are alive."""
OUTPUT_CHUNKS = 8
"""``num_output_chunks`` of torchtune's."""


def chunk_lengths(run: Run) -> list[int]:
    """Tokens of one sample in every chunk of torchtune's losses: ``torch.chunk`` makes equal ones and a last one of
    what is left, ``tensor_split`` ones that differ by a token at most."""
    length = run.max_length
    if run.loss_type == CHUNKED_CE:
        size = -(-length // OUTPUT_CHUNKS)
        return [min(size, length - start) for start in range(0, length, size)]
    least, more = divmod(length, OUTPUT_CHUNKS)
    return [least + (place < more) for place in range(OUTPUT_CHUNKS) if least + (place < more)]


def head_uses(run: Run) -> int:
    """How often one forward pass multiplies with the head."""
    if run.loss_type in KEPT_CHUNKS:
        return len(chunk_lengths(run))
    labelled = run.tokens_per_micro_batch - run.per_device_train_batch_size
    return -(-labelled // CHUNK_TOKENS) if run.loss_type == CHUNKED_NLL else 1
