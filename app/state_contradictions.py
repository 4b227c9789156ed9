"""What a Trainer's state says of its run beside its time: enough to tell a config that is not its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tunecast.model.configs import RunFile
from tunecast.model.configs.merge import REPEATING
from tunecast.model.forecast import Forecast

LEAST_SHARE_OF_FLOS = 0.01
"""Of the FLOPs of full rows: samples shorter than this share of ``max_length`` on the whole are no such data."""
SLACK_OF_FLOS = 1.5
"""transformers counts packed 4-bit weights anew, and adapters beside the base."""
SLACK = 1.05
"""What roundings and a last, smaller batch may make of a count."""


def contradictions(state: Mapping[str, Any], told: Forecast, file: RunFile | None = None) -> list[str]:
    """Clauses on what the state counted and the run of the config cannot have; `file` where the config is one."""
    clauses = (_batch(state, told), _work(state, told), _tokens(state, told))
    own = () if file is None else _ends(state, file)
    return [clause for found in (*clauses, own) for clause in found]


def _batch(state: Mapping[str, Any], told: Forecast) -> Iterator[str]:
    """``TrainerState.train_batch_size``: samples of a process, of all its GPUs under ``DataParallel``."""
    run, found = told.run, state.get("train_batch_size")
    mine = run.per_device_train_batch_size
    if isinstance(found, int) and found not in (mine, mine * run.num_gpus):
        yield f"train_batch_size is {found}, but per_device_train_batch_size of the config is {mine}"


def _ends(state: Mapping[str, Any], file: RunFile) -> Iterator[str]:
    """Steps and epochs that the file states: the Trainer does just so many steps, the others that many at most."""
    stated, steps = file.options.get("max_steps"), state.get("max_steps")
    epochs, done = file.options.get("num_train_epochs"), state.get("num_train_epochs")
    if stated is not None:
        if isinstance(steps, int) and (steps > stated or (file.format in REPEATING and steps != stated)):
            yield f"max_steps is {steps:,}, but {stated:,} in the config"
    elif "num_train_epochs" in file.their_fields and isinstance(done, int) and done != math.ceil(epochs or 0):
        yield f"num_train_epochs is {done}, but {epochs:g} in the config"


def _work(state: Mapping[str, Any], told: Forecast) -> Iterator[str]:
    """``total_flos``: 6 x tokens x parameters (``PreTrainedModel.floating_point_ops``), padding included."""
    found, done = state.get("total_flos"), state.get("global_step")
    if not found or not done:
        return
    most = 6.0 * told.total_params * told.run.tokens_per_step * done
    if not LEAST_SHARE_OF_FLOS * most <= found <= SLACK_OF_FLOS * most:
        yield f"total_flos is {found:.3g}, but the model and rows of the config make {most:.3g} at most"


LEAST_SHARE_OF_TOKENS = 0.75
"""Of the tokens of a step: with fewer the forecast is of more work than was done."""


def shorter_rows(state: Mapping[str, Any], told: Forecast) -> tuple[str, ...]:
    """That steps had fewer tokens than the forecast's, by ``total_flos``: 6 x tokens x parameters without those of
    embeddings (``floating_point_ops``), so that the tokens said here are no fewer than they were."""
    found, done = state.get("total_flos"), state.get("global_step")
    counted = told.total_params - told.architecture.vocab_size * told.architecture.hidden_size
    if not found or not done or counted <= 0:
        return ()
    tokens, asked = found / (6.0 * counted * done), told.run.tokens_per_step
    if tokens >= LEAST_SHARE_OF_TOKENS * asked:
        return ()
    unlike = "rows were shorter, or it was another run, and the two are not of the same work"
    return (f"total_flos makes {tokens:,.0f} tokens a step at most, the forecast is of {asked:,}: {unlike}",)


def _tokens(state: Mapping[str, Any], told: Forecast) -> Iterator[str]:
    """``num_tokens`` that TRL logs: those of every GPU, without padding."""
    logged = [entry for entry in state["log_history"] if entry.get("num_tokens") and entry.get("step")]
    if logged and logged[-1]["num_tokens"] > SLACK * told.run.tokens_per_step * logged[-1]["step"]:
        each = logged[-1]["num_tokens"] / logged[-1]["step"]
        yield f"a step had {each:,.0f} tokens, but the config's have {told.run.tokens_per_step:,} at most"
