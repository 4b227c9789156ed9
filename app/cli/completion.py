"""Values that a shell completes: choices that an option's help lists, and names from the catalogs.

Everything is looked up when a key is pressed, so nothing is imported here that ``--help`` does not import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

Completion = Callable[[str], list[str]]
"""What was typed so far to what it may become."""

CHOICE = re.compile(r"[a-z][a-z0-9_+.-]*|\d+(\.\d+)?")
"""A word that is typed as it stands: no placeholder (``N``, ``NAME=X``), no example (``24h``), no list of several."""


def beginning(values: Callable[[], Iterable[str]]) -> Completion:
    """Those of `values` that begin with what was typed."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return complete


def choices(metavar: str | None) -> Completion | None:
    """The choices of a metavar such as ``lora|qlora|full``; None where it lists none."""
    words = (metavar or "").split("|")
    found = [word for word in words if CHOICE.fullmatch(word)] if len(words) > 1 else []
    return beginning(lambda: found) if found else None


def gpu_names() -> list[str]:
    """Every card of the catalog, this processor, and the cards again as simulated ones."""
    from tunecast.catalogs.gpus import load_gpus

    ids = list(load_gpus())
    return ["all", "cpu", *ids, *(f"mock:{name}" for name in ids)]


def model_names() -> list[str]:
    """Every model of the catalog; where none begins so, the shell looks for files."""
    from tunecast.catalogs.models import load_models

    return list(load_models())


def stack_names() -> list[str]:
    """Software stacks."""
    from tunecast.model.stacks import load_stacks

    return list(load_stacks())


def built(what: str) -> Callable[[], Iterable[str]]:
    """What the formulas cover of a kind of choice: optimizers, attention, losses."""

    def values() -> Iterable[str]:
        from tunecast.model.stacks import BUILT

        return BUILT[what]

    return values


def format_names() -> Iterable[str]:
    """Formats of training files."""
    from tunecast.model.configs.detect import FORMATS

    return FORMATS


def provider_names() -> list[str]:
    """Providers of the shipped prices."""
    from tunecast.catalogs.prices import load_prices

    return sorted({offer.provider for offer in load_prices()})


NAMES: dict[str, Completion] = {
    "gpu": beginning(gpu_names),
    "model": beginning(model_names),
    "stack": beginning(stack_names),
    "optim": beginning(built("optimizer")),
    "attn_implementation": beginning(built("attention")),
    "loss_type": beginning(built("loss")),
    "config_format": beginning(format_names),
    "provider": beginning(provider_names),
}
"""By option."""
