"""Which samples of a data file are trained, and as what: options that nobody types, since a training file says them.

What frameworks make of samples that are longer than a row: LLaMA-Factory, TRL's ``bfd`` packing, torchtune and LitGPT
cut them; TRL's ``bfd_split`` and ``wrapped`` (``pack_dataset`` of trl/data_utils.py), torchtune's ``split_across_pack``
(torchtune/datasets/_packed.py) and LLaMA-Factory's packed pre-training (``processor/pretrain.py``) go on with them in
the next row; axolotl leaves them out (``drop_long_seq``) or, of its type ``completion``, makes pieces of them
(``prompt_strategies/completion.py``). Left out: the gaps that best-fit packing leaves at the ends of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError

LONG_SAMPLES = "long_samples"
"""Option: what becomes of samples that are longer than a row; they are cut where no file says it."""
CUT, DROPPED, SPLIT, WRAPPED = "cut", "dropped", "split", "wrapped"
"""Split: pieces, whether rows are packed or not. Wrapped: pieces where rows are packed, else cut."""
MOST_SAMPLES = "most_samples"
"""Option: at most so many samples, the first of the data."""
HELD_OUT = "held_out"
"""Option: what is kept for evaluation and not trained on, a share up to 1 or a number above."""
HELD_ROWS = "held_rows"
"""Option: packed rows are so kept, not samples."""
JOINING_STACKS = ("torchtitan", "megatron")
"""Sources: torchtitan ``datasets/hf_datasets.py`` (one buffer of tokens, of which every row takes ``seq_len``);
Megatron-Core ``datasets/gpt_dataset.py`` (a sample begins where the one before it ended, within a document or not)."""
OF_DATA = (LONG_SAMPLES, MOST_SAMPLES, HELD_OUT, HELD_ROWS)


def long_samples(options: Mapping[str, Any], *, packed: bool) -> str:
    """`CUT`, `DROPPED` or `SPLIT`, where rows are packed or not."""
    said = str(options.get(LONG_SAMPLES) or (WRAPPED if joins_samples(options) else CUT))
    return said if said != WRAPPED else SPLIT if packed else CUT


def joins_samples(options: Mapping[str, Any]) -> bool:
    """Whether the stack's own data loader joins samples and cuts rows out of them, wherever they end, unless told
    otherwise."""
    return str(options.get("stack")) in JOINING_STACKS


def held_out(asked: float, of: int) -> int:
    """How many of so many samples are kept for evaluation: a share is rounded up (``Dataset.train_test_split``)."""
    held = math.ceil(asked * of) if asked <= 1.0 else int(asked)
    if held and held >= of:
        raise InputError(
            f"The file keeps {asked:g} of the data for evaluation, which leaves none of {of:,} to train on; lower it."
        )
    return held


def pieces(tokens: int, most: int, long: str) -> tuple[int, ...]:
    """Tokens of what is trained of one sample, none of them longer than `most`."""
    if tokens <= most:
        return (tokens,)
    if long == SPLIT:
        whole, rest = divmod(tokens, most)
        return (most,) * whole + ((rest,) if rest else ())
    return () if long == DROPPED else (most,)


def long_words(count: int, most: int, long: str) -> str:
    """What became of so many long samples: ``200 samples cut at 2048``; nothing without any."""
    if not count:
        return ""
    samples = f"{count:,} sample{'' if count == 1 else 's'}"
    if long == DROPPED:
        return f", {samples} longer than {most} left out"
    return f", {samples} {'split' if long == SPLIT else 'cut'} at {most}"
