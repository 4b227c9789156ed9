"""What a trainer makes of the logits that the model returns, beside the loss; no gradient flows through it.

Under autocast accelerate casts what the model returns to fp32 (accelerate 1.15 ``accelerator.py``, ``prepare_model``:
``convert_outputs_to_fp32``). TRL's ``SFTTrainer`` logs how many tokens were guessed right (in all versions kept here,
from 0.16 on) and, in chunks of 128 tokens, the entropy of every token's distribution (since 0.22), where the loss is
over full logits (``sft_trainer.py``, ``compute_loss``; ``utils.py``, ``entropy_from_logits``).
Left out: counting the tokens that are no padding, and gathering these numbers from all GPUs.
"""

from __future__ import annotations

from tunecast.model import primitives as ops
from tunecast.model import primitives_logits as on_logits
from tunecast.model.context import Step
from tunecast.model.operation import SYNCHRONISATION, Kind
from tunecast.model.resolve_parallel import FSDP, FSDP_BY_VERSION
from tunecast.model.run import Run
from tunecast.model.tape import Tensor

ENTROPY_TOKENS = 128
"""``entropy_from_logits``: chunk_size."""
ACCURACY, ENTROPY = "accuracy", "entropy"
TOKEN_METRICS = ("none", ACCURACY, ENTROPY)
"""What is logged of every token; the entropy with the accuracy."""
PREFIX = "seen."
"""How the names of these kernels begin: none is in a compiled graph."""


def is_widened(run: Run) -> bool:
    """Whether accelerate casts what the model returns: it does under its own autocast, which it leaves out under
    DeepSpeed and FSDP2 (``_prepare_fsdp2``)."""
    apart = run.sharding.startswith("zero") or (run.sharding in FSDP and run.fsdp_version == FSDP_BY_VERSION["fsdp2"])
    return run.trainer_loop and run.autocast and not apart


def sees_logits(step: Step, logits: Tensor, labels: Tensor) -> None:
    """What happens to the logits (tokens x vocabulary, 16 or 32 bits) between the model's forward and the backward."""
    if not step.run.trainer_loop and step.run.token_metrics == "none":
        return
    tape, vocab = step.tape, step.architecture.vocab_size
    tokens = logits.elements // vocab
    seen = logits
    if step.run.trainer_loop and logits.dtype != "fp32":  # by `step.tape_run`
        seen = on_logits.loss_kernel(tape, f"{PREFIX}cast", (logits,), "fp32", (tokens, vocab))
    tape.hold(logits)
    if step.run.token_metrics == ENTROPY:
        entropy(step, seen, tokens)
    if step.run.token_metrics != "none":
        accuracy(step, seen, labels, tokens)
    tape.hold(seen)


def entropy(step: Step, logits: Tensor, tokens: int) -> None:
    """The entropy of every token's distribution, some tokens at a time, and their mean, which the host reads."""
    tape, vocab = step.tape, step.architecture.vocab_size
    found: list[Tensor] = []
    for start in range(0, tokens, ENTROPY_TOKENS):
        rows = min(ENTROPY_TOKENS, tokens - start)
        shape = (rows, vocab)
        chunk = Tensor(rows * vocab, logits.dtype, logits.storage)
        log_probs = on_logits.loss_kernel(tape, f"{PREFIX}log_softmax", (chunk,), logits.dtype, shape)
        probs = on_logits.loss_kernel(tape, f"{PREFIX}exp", (log_probs,), logits.dtype, shape)
        weighed = on_logits.loss_kernel(tape, f"{PREFIX}weigh", (probs, log_probs), logits.dtype, shape)
        total = on_logits.loss_kernel(tape, f"{PREFIX}sum", (weighed,), logits.dtype, shape, elements=rows)
        found.append(ops.elementwise(tape, f"{PREFIX}negative", (total,), rows, logits.dtype))
        tape.hold(log_probs, weighed)
    joined = ops.elementwise(tape, f"{PREFIX}join", tuple(found), tokens, logits.dtype)
    mean = ops.elementwise(tape, f"{PREFIX}mean", (joined,), 1, logits.dtype)
    tape.kernel(SYNCHRONISATION, Kind.MEMORY, (mean,), (), n_bytes=2 * mean.bytes)


def accuracy(step: Step, logits: Tensor, labels: Tensor, tokens: int) -> None:
    """Tokens guessed right over those with a label, which the host reads; logits are copied to cut the last token of
    each of several samples off."""
    tape, vocab, batch = step.tape, step.architecture.vocab_size, step.run.per_device_train_batch_size
    rows = tokens - batch
    shape = (rows, vocab)
    cut, target = Tensor(rows * vocab, logits.dtype, logits.storage), Tensor(rows, "int64", labels.storage)
    if batch > 1:
        cut = on_logits.loss_kernel(tape, f"{PREFIX}shift", (cut,), logits.dtype, shape)
        target = ops.elementwise(tape, f"{PREFIX}shift", (target,), rows, "int64")
    guess = on_logits.loss_kernel(tape, f"{PREFIX}argmax", (cut,), "int64", shape, elements=rows)
    has_label = ops.elementwise(tape, f"{PREFIX}label", (target,), rows, "bool")
    same = ops.elementwise(tape, f"{PREFIX}same", (guess, target), rows, "bool")
    right = ops.elementwise(tape, f"{PREFIX}right", (same, has_label), rows, "bool")
    of_all = ops.elementwise(tape, f"{PREFIX}sum", (has_label,), 1, "int64")
    of_right = ops.elementwise(tape, f"{PREFIX}sum", (right,), 1, "int64")
    of_all = ops.elementwise(tape, f"{PREFIX}sum", (of_all,), 1, "int64")
    some = ops.elementwise(tape, f"{PREFIX}some", (of_all,), 1, "bool")
    tape.kernel(SYNCHRONISATION, Kind.MEMORY, (some,), (), n_bytes=2)
    of_right = ops.elementwise(tape, f"{PREFIX}sum", (of_right,), 1, "int64")
    share = ops.elementwise(tape, f"{PREFIX}share", (of_right, of_all), 1, "fp32")
    tape.kernel(SYNCHRONISATION, Kind.MEMORY, (share,), (), n_bytes=8)
    tape.hold(cut, target, guess)
