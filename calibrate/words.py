"""Words of which a sentence names several."""

from __future__ import annotations

from collections.abc import Sequence


def listed(words: Sequence[str]) -> str:
    """``transformers``, ``transformers and peft``, ``transformers, peft and torch``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
