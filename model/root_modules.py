"""The table of tokens and the output head: which of them a run adapts or trains whole, and the sizes of that.

PEFT's ``lora.Embedding`` holds one factor of rank x vocabulary and one of hidden x rank; ``lora.Linear`` over the head
one of rank x hidden and one of vocabulary x rank. A tied head has an adapter of its own, apart from the table's.
Source: peft ``tuners/lora/layer.py``.
"""

from __future__ import annotations

from tunecast.model.architecture import Architecture
from tunecast.model.run import Run

Sizes = tuple[tuple[int, int], ...]
"""Rows and columns of each trained tensor; no columns of a vector."""


def root_modules(architecture: Architecture) -> tuple[str, str]:
    """What the real model calls its table of tokens and its head."""
    return architecture.embedding_module, architecture.head_module


def adapts_embedding(architecture: Architecture, run: Run) -> bool:
    """Whether an adapter sits on the table of tokens."""
    return architecture.embedding_module in run.lora_target_modules


def adapts_head(architecture: Architecture, run: Run) -> bool:
    """Whether an adapter sits on the output head."""
    return architecture.head_module in run.lora_target_modules


def embedding_adapter_sizes(architecture: Architecture, run: Run) -> Sizes:
    """Factors of the adapter on the table of tokens, if there is one here."""
    if not (architecture.has_entry and adapts_embedding(architecture, run)):
        return ()
    return (run.lora_r, architecture.vocab_size), (architecture.hidden_size, run.lora_r)


def head_adapter_sizes(architecture: Architecture, run: Run) -> Sizes:
    """Factors of the adapter on the head, if there is one here, and the bias of the second."""
    if not (architecture.has_exit and adapts_head(architecture, run)):
        return ()
    bias = ((architecture.vocab_size, 0),) if run.lora_bias else ()
    return (run.lora_r, architecture.hidden_size), (architecture.vocab_size, run.lora_r), *bias


def saved_sizes(architecture: Architecture, run: Run) -> tuple[Sizes, Sizes]:
    """The table before the layers and the head after them with its bias, where they are trained whole."""
    table = ((architecture.vocab_size, architecture.hidden_size),)
    head = (*table, (architecture.vocab_size, 0)) if architecture.head_bias else table
    before = table if architecture.has_entry and architecture.embedding_module in run.modules_to_save else ()
    after = head if architecture.has_exit and architecture.head_module in run.modules_to_save else ()
    return before, after
