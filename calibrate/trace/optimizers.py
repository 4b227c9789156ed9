"""The optimizer that Hugging Face's Trainer builds for a run, over real or fake parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.optimizer_bnb import BITSANDBYTES
from tunecast.model.optimizer_torchao import TORCHAO
from tunecast.model.run import Run

LEARNING_RATE = 1e-4
"""Any value: speed and memory do not depend on it."""


def make_optimizer(params: Iterable[Any], run: Run, *, platform: str = "cuda", embeddings: Iterable[Any] = ()) -> Any:
    """The optimizer that the Trainer builds for ``run.optim``, weight decay 0 as its default.

    Vectors (norms, biases) form the second, undecayed group. `platform` decides what torch would
    choose by itself: foreach on ``cuda``, one tensor at a time on ``cpu``. bitsandbytes keeps 32-bit
    state for `embeddings`, as the Trainer tells it to.
    """
    groups = _parameter_groups(params)
    if run.optim in ("adamw_torch", "adamw_torch_fused"):
        return _torch_adamw(groups, run, platform)
    if run.optim in BITSANDBYTES:
        return _bnb_optimizer(groups, run, embeddings)
    if run.optim in TORCHAO:
        return _torchao_optimizer(groups, run)
    if run.optim == "sgd":
        import torch

        return torch.optim.SGD(groups, lr=LEARNING_RATE, foreach=True if platform == "cuda" else None)
    if run.optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=LEARNING_RATE, scale_parameter=False, relative_step=False)
    raise NotSupportedError(
        f"Optimizer {run.optim!r} was asked for, but adamw_torch, adamw_torch_fused, sgd, adafactor, "
        f"{', '.join((*BITSANDBYTES, *TORCHAO))} are built; choose one of these with --optim."
    )


def _parameter_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    listed = list(params)
    decayed = [p for p in listed if p.ndim > 1]
    rest = [p for p in listed if p.ndim <= 1]
    return [{"params": group, "weight_decay": 0.0} for group in (decayed, rest) if group]


def _torch_adamw(groups: list[dict[str, Any]], run: Run, platform: str) -> Any:
    import torch

    if run.optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, foreach=True if platform == "cuda" else None)


def _torchao_optimizer(groups: list[dict[str, Any]], run: Run) -> Any:
    """torchao's AdamW with the blocks that the name stands for."""
    try:
        from torchao import optim
    except ImportError as error:
        raise InputError(
            f"--optim {run.optim} is torchao's, which is not installed; type: pip install torchao"
        ) from error

    kind = TORCHAO[run.optim]
    made = optim.AdamW4bit if kind.packs else optim.AdamW8bit if kind.maps else optim.AdamWFp8
    return made(groups, lr=LEARNING_RATE, block_size=kind.block)


def _bnb_optimizer(groups: list[dict[str, Any]], run: Run, embeddings: Iterable[Any]) -> Any:
    """bitsandbytes' AdamW or Lion, with a manager of its own: the shared one remembers parameters by their id."""
    import bitsandbytes as bnb

    kind = BITSANDBYTES[run.optim]
    made = bnb.optim.Lion if kind.moments == 1 else bnb.optim.AdamW
    optimizer = made(groups, lr=LEARNING_RATE, optim_bits=kind.bits, is_paged=kind.paged)
    optimizer.mng = bnb.optim.GlobalOptimManager.__new__(bnb.optim.GlobalOptimManager)
    optimizer.mng.initialize()
    if kind.bits == 8:
        for table in embeddings:
            optimizer.mng.override_config(table, "optim_bits", 32)
    return optimizer
