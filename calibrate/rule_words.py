"""Cells in the words that the rules of ``data/vocabulary.json`` look for.

Rules name software, models and layouts as the tables do that they were made for. Another table means the same by
``TP=4, PP=4`` as by ``tp4/pp4``, by ``NeMo Megatron-Bridge`` as by ``Megatron-Bridge``, by ``4k`` as by ``4096``: a
rule speaks of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tunecast.calibrate.run_table import SkipRowError, whole

NVIDIA = r"^(nvidia[ /]*)?"
FRAMEWORKS = tuple(
    (re.compile(pattern, re.I), name)
    for pattern, name in (
        (NVIDIA + r"(nemo[ /-]*)?megatron[-_ ]?bridge\b", "Megatron-Bridge"),
        (NVIDIA + r"(nemo[-_ ]?)?auto[-_ ]?model\b", "NeMo AutoModel"),
        (NVIDIA + r"nemo([-_ ](framework|megatron))*[ :=(@v-]*(?=\d)", "NeMo "),
        (r"^(mosaic ?ml[ /'\u2019s-]*)?llm[-_ ]?foundry\b", "LLM Foundry"),
        (r"^(pytorch[ /])?torch[-_ ]?titan", "torchtitan"),
        (r"^(pytorch[ /])?torch[-_ ]?tune", "torchtune"),
    )
)
"""How a cell begins, and the name that the rules know."""
DEGREES = {
    "tp": r"tp|tensor[- _]?parallel(?:ism)?(?:[- _]?size)?",
    "pp": r"pp|pipeline[- _]?parallel(?:ism)?(?:[- _]?size)?",
    "cp": r"cp|context[- _]?parallel(?:ism)?(?:[- _]?size)?",
    "dp": r"dp|data[- _]?parallel(?:ism)?(?:[- _]?size)?",
}
"""Ways to split a model, by what the rules call them."""
ONE_GPU = re.compile(r"(single|one|1|no|none|[-\u2013\u2014])( |-)?(gpu|device|card|process)?", re.I)
YES = re.compile(r"(yes|ja|y|true|packed|packing)", re.I)


def in_rule_words(column: str, row: Mapping[str, str]) -> tuple[str, ...]:
    """The spellings of a cell of which one has to be what a rule looks for."""
    text = row.get(column, "")
    return SPELLINGS[column](text, row) if column in SPELLINGS else (text,)


def _framework(text: str, row: Mapping[str, str]) -> tuple[str, ...]:
    for begins, name in FRAMEWORKS:
        if begins.search(text):
            return (begins.sub(name, text),)
    return (text,)


def _parallelism(text: str, row: Mapping[str, str]) -> tuple[str, ...]:
    if row.get("gpus", "") == "1" and ONE_GPU.fullmatch(text.strip()):
        return ("single",)
    for short, words in DEGREES.items():
        text = re.sub(rf"\b(?:{words})\s*[=: ]\s*(\d+)", rf"{short}\1", text, flags=re.I)
    return (text,)


def _seq_len(text: str, row: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return (str(whole(dict(row), "seq_len")),)
    except SkipRowError:
        return (text,)


def _packed(text: str, row: Mapping[str, str]) -> tuple[str, ...]:
    return ("yes",) if YES.fullmatch(text.strip()) else (text,)


def _model(text: str, row: Mapping[str, str]) -> tuple[str, ...]:
    """With hyphens, as hubs have them: ``llama3 70b`` is ``llama-3-70b``."""
    return (text, re.sub(r"(llama|qwen|gpt)-?(?=\d)", r"\1-", re.sub(r"[\s_]+", "-", text.strip()), flags=re.I))


def _gpu(text: str, row: Mapping[str, str]) -> tuple[str, ...]:
    return (text, re.sub(r"^(\d+ ?[x\u00d7] ?)?(nvidia[ -])?", "", text.strip(), flags=re.I))


SPELLINGS: dict[str, Callable[[str, Mapping[str, str]], tuple[str, ...]]] = {
    "framework": _framework,
    "parallelism": _parallelism,
    "seq_len": _seq_len,
    "packed": _packed,
    "model": _model,
    "gpu": _gpu,
}
"""Columns of which a rule asks for more than one of a few words."""
