"""Who drives the steps: transformers' Trainer, or a loop without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunecast.catalogs.errors import InputError
from tunecast.model.resolve_parallel import Fields
from tunecast.model.seen_logits import TOKEN_METRICS
from tunecast.model.stacks import one_of

METRICS_SAID = {"accuracy": "the accuracy", "entropy": "accuracy and entropy"}
"""What is logged, by `Run.token_metrics`."""


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
    take_metrics(fields, str(defaults.get("token_metrics", "none")), has_trainer=has_trainer)


def take_metrics(fields: Fields, default: str, *, has_trainer: bool) -> None:
    """What the trainer logs of every token: of full logits only, and where there is a trainer."""
    values = fields.values
    apply = values["trainer_loop"] and values["loss_type"] == "nll"
    asked = fields.take("token_metrics", default if apply else "none", "stack-default")
    values["token_metrics"] = one_of("token-metrics", asked, TOKEN_METRICS)
    if asked != "none" and not apply:
        missing = "--loss-type nll" if values["trainer_loop"] else "--trainer-loop"
        add = f"add {missing}, or " if has_trainer else ""
        raise InputError(
            f"--token-metrics {asked} is what TRL's trainer makes of full logits, which this run has not; "
            f"{add}leave it out."
        )
    if asked != "none":
        fields.notes.append(
            f"TRL's trainer logs {METRICS_SAID[str(asked)]} of every token, which is counted; --token-metrics none "
            "leaves it out."
        )
