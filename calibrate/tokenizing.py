"""Bytes per token of a data file, counted with a real tokenizer (needs the package tokenizers, not torch)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tunecast.catalogs.errors import InputError
from tunecast.model.dataset import sample_texts

COUNTED_SAMPLES = 1000
"""Samples, from the beginning of the file, that are tokenized; their bytes per token stand for the rest."""


def bytes_per_token(dataset: str | Path, tokenizer: str | Path) -> float:
    """UTF-8 bytes over tokens of the first samples; no chat template and no special tokens."""
    file = Path(tokenizer)
    if not file.is_file():
        raise InputError(f"--tokenizer {tokenizer} is no file; give the tokenizer.json of the model, or leave it out.")
    if find_spec("tokenizers") is None:
        raise InputError(
            '--tokenizer needs the package tokenizers; type: pip install "tunecast[calibrate]", or leave it out.'
        )
    from tokenizers import Tokenizer

    try:
        counter = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust package raises nothing narrower than Exception
        raise InputError(f"--tokenizer {file.name} cannot be read ({error}); give a tokenizer.json.") from error
    samples = sample_texts(dataset, COUNTED_SAMPLES)
    tokens = sum(len(found.ids) for found in counter.encode_batch_fast(samples, add_special_tokens=False))
    if tokens == 0:
        raise InputError(f"--tokenizer {file.name} makes no token of {Path(dataset).name}; give the model's own.")
    return sum(len(sample.encode()) for sample in samples) / tokens
