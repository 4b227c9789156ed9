"""GPUs and models as people write them in a table, in the catalog's names.

GPU: the catalog's own names first; then without what does not name a card ("8x", "GPU", "DGX", brackets); of several
that share the name the one SXM card, with a note, because rented machines of these cards are SXM boards (assumed).
Model: the catalog's names first; then without brackets that change no shape, and without the words of tunes and copies.
"""

from __future__ import annotations

import re

from tunecast.calibrate.run_table import SkipRowError
from tunecast.catalogs.errors import UnknownNameError
from tunecast.catalogs.gpus import find_gpu, ids_called
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import load_architecture

COUNT = re.compile(
    r"^\s*(\d+\s*[x*]\s*|\d{1,3}\s+(?=[a-z])|\d{4,}\s+(?=[a-z]+\d))|\s+[x*]\s*\d+\s*$"
    r"|\s*\(\s*x?\s*\d+\s*(x|gpus?)?\s*\)\s*$",
    re.IGNORECASE,
)
NO_CARD = re.compile(
    r"\b(nvidia|gpus?|cards?|nodes?|dgx|hgx|server|cluster|cloud|ampere|hopper|single|one|a|graphics"
    r"|colab|kaggle|aws|ec2|gcp|azure|runpod|vast\.ai|modal|instance|[pg]\d\w*\.\d*xlarge|a[23]-\w+gpu-\w+"
    r"|hbm2e?|hbm3e?|gddr6x?|gddr7|vram|memory|ram)\b",
    re.IGNORECASE,
)
MEMORY = re.compile(r"[\s_-]+(\d+) ?g(i?b)?\b", re.IGNORECASE)
SHAPELESS = re.compile(
    r"\s*\((architecture|base|instruct|chat|(pre-?)?trained|random (weights|init(iali[sz]ation)?)|hf|hugging ?face"
    r"|dense|text[ -]only)\)\s*$",
    re.IGNORECASE,
)
TUNED = re.compile(
    r"[ _-](instruct|chat|base|it|pt|hf|sft|dpo|model|(unsloth[ _-])?bnb[ _-]4bit|gptq([ _-]int[48])?|[48]bit"
    r"|bf16|fp16)$",
    re.IGNORECASE,
)
STORED = re.compile(
    r"[ _-](?P<by>bnb|gptq)?[ _-]?(int)?(?P<bits>[48])[ _-]?bit\b|[ _-](?P<gptq>gptq)([ _-]int(?P<of>[48]))?\b",
    re.IGNORECASE,
)
"""Of a model's name: how its published weights are stored (``-bnb-4bit``, ``-GPTQ-Int4``)."""
SXM = "sxm"


def count_of(name: str) -> int | None:
    """How many cards a text names: ``8xH100``, ``H100 x 8``, ``(8 GPUs)``; None where it gives no number."""
    found = COUNT.search(name.replace("\u00d7", "x"))
    digits = re.search(r"\d+", found[0]) if found else None
    return int(digits[0]) if digits else None


def gpu_called(name: str) -> tuple[str, str]:
    """Id of the card that a text names, and a note where the text leaves a choice; raises SkipRowError."""
    bare = COUNT.sub("", name.replace("\u00d7", "x"))
    plain = _plain(bare)
    for text in dict.fromkeys((name, bare, plain)):
        found = _one_of(name, ids_called(text))
        if found is not None:
            return found
    memory = MEMORY.search(plain)
    if memory is not None:
        rest = plain[: memory.start()] + plain[memory.end() :]
        ids = [gpu_id for gpu_id in ids_called(rest) if gpu_id.endswith(f"-{memory[1]}gb")]
        found = _one_of(name, tuple(ids))
        if found is not None:
            return found
    return find_gpu(name).id, ""


def _one_of(name: str, ids: tuple[str, ...]) -> tuple[str, str] | None:
    """The only card of a name, or its only SXM board."""
    boards = [gpu_id for gpu_id in ids if SXM in gpu_id]
    if len(ids) == 1:
        return ids[0], ""
    if len(boards) == 1:
        return boards[0], f"gpu {name!r} does not state its form factor: {boards[0]} is taken."
    if ids:
        raise SkipRowError(f"gpu {name!r} does not say which of {', '.join(ids)} it is")
    return None


def _plain(name: str) -> str:
    """The words of a name that name a card."""
    text = NO_CARD.sub(" ", re.sub(r"[()\[\],]", " ", name))
    return re.sub(r"\s+", " ", text).strip(" -_/")


def stored_as(name: str) -> tuple[str, int]:
    """Who quantized the weights of a model of this name (``bnb``, ``gptq``, empty where it does not say) and to how
    many bits; 0 where nobody did. GPTQ without a number has 4."""
    found = STORED.search(name)
    if found is None:
        return "", 0
    return (found["gptq"] or found["by"] or "").lower(), int(found["bits"] or found["of"] or 4)


def model_called(name: str) -> Architecture:
    """The architecture that a text names; raises as `load_architecture` does, with the text as it stands."""
    tried = [name, SHAPELESS.sub("", name).strip()]
    while TUNED.search(tried[-1]):
        tried.append(TUNED.sub("", tried[-1]).strip())
    for text in dict.fromkeys(tried):
        try:
            return load_architecture(text)
        except UnknownNameError:
            continue
    return load_architecture(tried[1])
