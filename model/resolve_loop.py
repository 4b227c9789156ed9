"""Who drives the steps: transformers' Trainer, or a loop without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.resolve_parallel import Fields


def take_loop(fields: Fields, defaults: Mapping[str, Any]) -> None:
    """What the loop holds on to, and whether it is the Trainer's; that is refused where another one was named."""
    keeps = bool(fields.take("keeps_outputs", False, "stack-default"))
    has_trainer = bool(defaults.get("trainer_loop", True))
    driven = bool(fields.take("trainer_loop", has_trainer and not keeps, "stack-default"))
    if driven and (keeps or not has_trainer):
        own = (
            f"--stack {fields.values['stack']} has none"
            if not has_trainer
            else ("--keeps-outputs is of a loop of one's own")
        )
        raise InputError(f"--trainer-loop is transformers' Trainer, and {own}; leave one of them out.")
    fields.values |= {"keeps_outputs": keeps, "trainer_loop": driven}
