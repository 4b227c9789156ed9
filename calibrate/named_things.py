"""GPUs and models as people write them in a table, in the catalog's names.

GPU: the catalog's own names first; then without what does not name a card ("8x", "GPU", "DGX", brackets); of several
that share the name the one SXM card, with a note, because rented machines of these cards are SXM boards (assumed).
Model: the catalog's names first; then without brackets that change no shape, and without the words of tunes and copies.
"""

from __future__ import annotations

import contextlib
import re

from tunecast.calibrate.card_words import by_memory_kind, check_said
from tunecast.calibrate.cell_cards import cards_in
from tunecast.calibrate.cell_shapes import of_shape
from tunecast.calibrate.run_table import NOTHING, Row, SkipRowError
from tunecast.catalogs.errors import TunecastError, UnknownNameError
from tunecast.catalogs.gpus import find_gpu, ids_called, load_gpus
from tunecast.catalogs.models import find_model
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_row, load_architecture
from tunecast.model.units import GIB, GIGA

NO_CARD = re.compile(
    r"\b(nvidia|gpus?|cards?|nodes?|dgx|hgx|server|cluster|cloud|ampere|hopper|single|one|a|graphics|tensor[ -]core"
    r"|on|(free( tier)? )?colab( pro\+?| free( tier)?)?|kaggle|aws"
    r"|ec2|sagemaker|gcp|azure|runpod|vast\.ai|modal|lambda( ?labs)?|coreweave|crusoe|nebius|oci"
    r"|paperspace|hyperstack|together|instance|(ml\.)?[pg]\d\w*\.\d*xlarge|a[234]-\w+gpu-\w+"
    r"|(with )?nv-?link(ed)?( bridges?)?|nvswitch"
    r"|hbm2e?|hbm3e?|gddr6x?|gddr7|vram|memory|ram)\b",
    re.IGNORECASE,
)
MEMORY = re.compile(r"[\s_-]+(\d+) ?g(i?b)?\b|(?<=\d)[_-](\d{2,3})$", re.IGNORECASE)
"""The memory of a card behind its name: ``80GB``, or as in ``A100-80``."""
SHAPELESS = re.compile(
    r"\s*\((architecture|base|instruct|chat|(pre-?)?trained|random (weights|init(iali[sz]ation)?)|hf|hugging ?face"
    r"|dense|text[ -]only|mlperf( lora)?)\)\s*$",
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
SIZED = re.compile(r"[ _-]+\(?(\d+(?:\.\d+)?) ?([BM])\)?$", re.IGNORECASE)
"""A size behind a model's name, in billions or millions of parameters: ``8.03B``, ``(124M)``."""
SIZE_SHARE = 0.05
"""Share by which a size behind a name may be off the model's: names round."""
SXM = "sxm"
FORMS = re.compile(r"(?<![a-z])(sxm|pcie|nvl)(?!ink|72)", re.IGNORECASE)
GIGABYTES = re.compile(r"(?<![\w.])(\d+) ?gi?b\b|(?<=[-_])(\d+)gb\b", re.IGNORECASE)


def gpu_called(name: str) -> tuple[str, str]:
    """Id of the card that a text names, and a note where the text leaves a choice; raises SkipRowError."""
    gpu_id, note = _called(name)
    check_said(name, gpu_id)
    return gpu_id, note


def _called(name: str) -> tuple[str, str]:
    found = cards_in(name)
    if not found.instance:
        return _card(name)
    ids = (found.instance,) if not _plain(found.card) else _ids(found.card)
    if ids and found.instance not in ids:
        raise SkipRowError(f"gpu {name!r} contradicts itself: that machine has {found.instance}")
    return (found.instance, "") if ids else _card(name)


def _card(name: str) -> tuple[str, str]:
    if re.search(r"\b\d+\s+(V100s|L40s)\b", name):
        raise SkipRowError(f"gpu {name!r} may be several cards, or a card whose name ends in S: write the name alone")
    one = _one_of(name, by_memory_kind(name, _ids_in))
    return one or (find_gpu(name).id, "")


def _ids_in(name: str) -> tuple[str, ...]:
    """Ids that a text may mean: as it stands, or without the numbers of cards and machines in it."""
    return ids_called(name) or _ids(cards_in(name).card)


def _ids(card: str) -> tuple[str, ...]:
    """Ids that the words of a card may mean: without what names none, then by their memory, a plural or their slot."""
    plain = _plain(card)
    single = re.sub(r"(?<=\d)s\b", "", plain)
    slotless = re.sub(r"[\s-]*\bpcie\b", "", plain, flags=re.IGNORECASE)
    for text in dict.fromkeys((card, plain, single)):
        found = ids_called(text) or _ids_by_memory(text)
        if found:
            return found
    if slotless != plain:
        return tuple(gpu_id for gpu_id in ids_called(slotless) or _ids_by_memory(slotless) if in_a_slot(gpu_id))
    return ()


def _ids_by_memory(text: str) -> tuple[str, ...]:
    memory = MEMORY.search(text)
    rest = text if memory is None else text[: memory.start()] + text[memory.end() :]
    said = "" if memory is None else memory[1] or memory[3]
    ids = ids_called(rest) if said else ()
    found = tuple(gpu_id for gpu_id in ids if gpu_id.endswith(f"-{said}gb"))
    return found or (ids if len(ids) == 1 and _is_usable(ids[0], said) else ())


def _is_usable(gpu_id: str, said: str) -> bool:
    """Whether a memory is what drivers leave of a card's: a T4 of 16 GB has 15 that can be used."""
    usable = load_gpus()[gpu_id].usable_bytes
    return usable is not None and round(usable / GIB) == int(said)


def in_a_slot(gpu_id: str) -> bool:
    """Whether a card is one for a PCIe slot, none of whose boards are otherwise: no NVLink but by a bridge."""
    return load_gpus()[gpu_id].link_kind in ("none", "nvlink-bridge") and SXM not in gpu_id


def _one_of(name: str, ids: tuple[str, ...]) -> tuple[str, str] | None:
    """The only card of a name, or its only SXM board."""
    boards = [gpu_id for gpu_id in ids if SXM in gpu_id]
    if len(ids) == 1:
        return ids[0], ""
    if len(boards) == 1:
        told = re.search(r"\b(dgx|hgx)\b", name, re.IGNORECASE)
        return boards[0], "" if told else f"gpu {name!r} does not state its form factor: {boards[0]} is taken."
    if ids:
        raise SkipRowError(f"gpu {name!r} does not say which of {', '.join(ids)} it is")
    return None


def _plain(name: str) -> str:
    """The words of a name that name a card."""
    text = NO_CARD.sub(" ", re.sub(r"[()\[\],]", " ", name))
    return re.sub(r"\s+", " ", text).strip(" -_/")


def check_card(row: Row) -> None:
    """The card in words and its id are one card: where the words name cards of the catalog, the id's is among them,
    else they hold its name, and no other memory or form factor."""
    text, own = row.get("gpu", ""), row.get("gpu_canonical_id", "").lower()
    if not own or text.lower() in NOTHING:
        return
    named = cards_in(text)
    words = (named.instance,) if named.instance else by_memory_kind(text, _ids_in)
    ids = (own,) if own in load_gpus() else ids_called(own)
    agree = bool({*words} & {*ids}) if words and ids else _in_words(text, own)
    if agree and named.instance and _plain(named.card):
        agree = bool({*(_ids(named.card) or ids)} & {*ids})
    if not agree:
        raise SkipRowError(f"gpu {text!r} and gpu_canonical_id {row['gpu_canonical_id']!r} contradict each other")


def _in_words(text: str, own: str) -> bool:
    """Whether a text that names no card of the catalog may be about the card of an id."""
    plain = text.lower()
    name = next((part for part in own.split("-") if re.search(r"\d", part)), "")
    forms, memories = FORMS.findall(plain), [one or other for one, other in GIGABYTES.findall(plain)]
    form, memory = FORMS.search(own), GIGABYTES.search(own)
    behind = r"(?:s\b|(?=sxm|pcie|nvl|ti\b|tisuper|super|ada)|(?=x\s*\d)|(?![a-z0-9]))"
    return (
        (not name or re.search(rf"(?<![a-z0-9])(?:\d+x)?(?:rtx|gtx)?{name}{behind}", plain) is not None)
        and (not forms or form is None or form[1] in forms)
        and (not memories or memory is None or (memory[1] or memory[2]) in memories)
    )


def stored_as(name: str) -> tuple[str, int]:
    """Who quantized the weights of a model of this name (``bnb``, ``gptq``, empty where it does not say) and to how
    many bits; 0 where nobody did. GPTQ without a number has 4."""
    found = STORED.search(name)
    if found is None:
        return "", 0
    return (found["gptq"] or found["by"] or "").lower(), int(found["bits"] or found["of"] or 4)


def model_called(name: str, *, local: bool = True) -> Architecture:
    """The architecture that a text names, or the file or folder of exactly this name (`local`); raises as
    `load_architecture` does, with the text as it stands."""
    name = re.sub(r"^(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", "", name)
    tried = [name, SHAPELESS.sub("", name).strip()]
    while TUNED.search(tried[-1]):
        tried.append(TUNED.sub("", tried[-1]).strip())
    with contextlib.suppress(UnknownNameError):
        return load_architecture(name) if local else _listed(name)
    for text in dict.fromkeys(tried):
        with contextlib.suppress(UnknownNameError):
            return _listed(text)
    return of_shape(name, _listed_model) or _of_size(tried[-1]) or _listed(tried[1])


def _listed_model(name: str) -> Architecture:
    """The architecture of a part of a text, which names no file of its own."""
    return model_called(name, local=False)


def _listed(name: str) -> Architecture:
    """The architecture of a catalog model: a folder that is called as a part of a cell is not what the cell names."""
    return architecture_from_row(find_model(name))


def _of_size(name: str) -> Architecture | None:
    """The model that a name means which has its size behind it, where it is of that size."""
    size = SIZED.search(name)
    if size is None:
        return None
    try:
        found = _listed(name[: size.start()])
    except TunecastError:
        return None
    stated = float(size[1]) * (GIGA if size[2].upper() == "B" else GIGA / 1e3)
    return found if abs(stated / found.total_params - 1.0) <= SIZE_SHARE else None
