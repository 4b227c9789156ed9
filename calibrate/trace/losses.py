"""Loss paths of other stacks, written after their published code where their package is not a dependency."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tunecast.model.loss_chunks import CHUNK_TOKENS, CHUNKED_CE, OUTPUT_CHUNKS
from tunecast.model.run import Run
from tunecast.model.seen_logits import ENTROPY, ENTROPY_TOKENS, is_widened

Context = Callable[[], contextlib.AbstractContextManager[None]]


def chunked_nll(hidden: Any, labels: Any, weight: Any, recompute_context: Context) -> Any:
    """TRL's ``chunked_nll`` since 1.13 for samples whose every token has a label.

    After ``_chunked_cross_entropy_loss_main`` (trl ``sft_trainer.py``, pull request 6314). It picks labelled
    tokens by a mask; here all are, so they are picked by number, which fake tensors can follow too.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    kept = hidden[..., :-1, :].reshape(-1, hidden.shape[-1])
    targets = labels[..., 1:].reshape(-1)
    int((targets != -100).sum())
    rows = torch.arange(targets.shape[0], device=targets.device)
    kept, targets = kept[rows], targets[rows]
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, targets.shape[0], CHUNK_TOKENS):
        end = start + CHUNK_TOKENS
        made = checkpoint(
            _chunk,
            kept[start:end],
            weight,
            targets[start:end],
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), recompute_context()),
        )
        total = total + made[0]
        del made
    return total / targets.shape[0]


def _chunk(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any, Any]:
    """Loss, tokens guessed right and entropy of one chunk, summed."""
    from torch.nn import functional

    logits = functional.linear(hidden, weight).float()
    log_probs = functional.log_softmax(logits, dim=-1)
    loss = functional.nll_loss(log_probs, targets, reduction="sum")
    correct = (logits.argmax(dim=-1) == targets).sum().float()
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1).sum()
    return loss, correct, entropy


def see_logits(output: Any, labels: Any, run: Run) -> None:
    """What accelerate and TRL's trainer do with the logits that the model returned.

    After ``convert_outputs_to_fp32`` (accelerate 1.15) and ``SFTTrainer.compute_loss`` (trl 0.24.0), for samples whose
    every token has a label, on one GPU.
    """
    import torch

    if is_widened(run):
        output.logits = output.logits.float()
    with torch.no_grad():
        if run.token_metrics == ENTROPY:
            _entropy(output.logits)
        if run.token_metrics != "none":
            _accuracy(output.logits, labels)


def _entropy(logits: Any) -> float:
    """Mean entropy of all tokens (trl 0.24.0 ``trainer/utils.py``, ``entropy_from_logits``)."""
    import torch
    from torch.nn import functional

    found = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(ENTROPY_TOKENS, dim=0):
        log_probs = functional.log_softmax(chunk, dim=-1)
        found.append(-(torch.exp(log_probs) * log_probs).sum(-1))
    return float(torch.cat(found, dim=0).reshape(logits.shape[:-1]).mean())


def _accuracy(logits: Any, labels: Any) -> float:
    """Tokens guessed right over those with a label."""
    cut, targets = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    guess = cut.argmax(dim=-1)
    mask = targets != -100
    right = (guess == targets) & mask
    of_all, of_right = mask.sum(), right.sum()
    whole = of_all.sum()
    return float(of_right.sum() / whole) if whole > 0 else 0.0


def kept_chunks(hidden: Any, labels: Any, weight: Any, loss_type: str) -> Any:
    """torchtune's ``CEWithChunkedOutputLoss`` (``chunked_ce``) and ``LinearCrossEntropyLoss`` (``linear_ce``), with the
    shift of labels that its recipes do, for samples whose every token has a label.

    After torchtune 0.6.1 ``modules/loss/ce_chunked_output_loss.py`` and the later ``cross_entropy_loss.py``. The
    recipes end the shifted labels with a column of ignored ones that they made once; here one of labels stands for it.
    """
    import torch
    from torch.nn import functional

    labels = torch.hstack((labels[..., 1:], labels[..., :1]))
    count = (labels != -100).sum()
    total: Any = 0.0
    if loss_type == CHUNKED_CE:
        made = [functional.linear(chunk, weight) for chunk in hidden.chunk(OUTPUT_CHUNKS, dim=1)]
        targets = [chunk.reshape(-1) for chunk in labels.chunk(OUTPUT_CHUNKS, dim=1)]
        for logits, target in zip([chunk.reshape(-1, chunk.size(-1)) for chunk in made], targets, strict=True):
            total += functional.cross_entropy(logits.float(), target, reduction="sum")
        return total / count
    hidden_chunks, targets = hidden.tensor_split(OUTPUT_CHUNKS, dim=1), labels.tensor_split(OUTPUT_CHUNKS, dim=1)
    for place, (part, target) in enumerate(zip(hidden_chunks, targets, strict=True)):
        total += _labelled_loss(part, target, weight, last=place == OUTPUT_CHUNKS - 1)
    return total / count


def _labelled_loss(hidden: Any, targets: Any, weight: Any, *, last: bool) -> Any:
    """Of one chunk; its labelled rows are picked by number, which fake tensors can follow: all but the last of each
    sample in the last chunk."""
    import torch
    from torch.nn import functional

    batch, length = targets.shape
    mask = targets != -100
    bool(mask.sum() == 0)

    def picked() -> tuple[Any, Any]:
        int(mask.sum())
        rows = torch.arange(max(batch * length - (batch if last else 0), 1), device=targets.device)
        return rows // length, rows % length

    target = targets[picked()]
    logits = functional.linear(hidden[picked()], weight)
    return functional.cross_entropy(logits.float(), target, reduction="sum")
