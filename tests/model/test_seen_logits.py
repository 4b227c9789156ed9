"""What trainers make of the logits beside the loss: against the traced code, TRL's own function, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from small_configs import small_qwen2

from tunecast.catalogs.errors import InputError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config, load_architecture
from tunecast.model.inventory import step_operations
from tunecast.model.operation import Operation
from tunecast.model.resolve import resolve_run
from tunecast.model.run import Run
from tunecast.model.seen_logits import ENTROPY_TOKENS, PREFIX

ACCURACY = ("argmax", "label", "same", "right", "sum", "some", "share")
"""Kernels of the accuracy of one sample."""
RUNS: dict[str, dict[str, Any]] = {
    "one sample": {"max_length": 300},
    "several": {"max_length": 200, "per_device_train_batch_size": 3},
    "no autocast": {"max_length": 300, "precision": "bf16"},
    "full": {"max_length": 256, "method": "full"},
    "several micro-batches": {"max_length": 100, "gradient_accumulation_steps": 2},
}


def small() -> Architecture:
    return architecture_from_config(small_qwen2(2), "small qwen2")


@pytest.mark.parametrize("metrics", ["none", "accuracy", "entropy"])
@pytest.mark.parametrize("asked", RUNS)
def test_the_step_is_the_traced_step(same_as_traced: Callable[..., None], asked: str, metrics: str) -> None:
    same_as_traced(small(), token_metrics=metrics, **RUNS[asked])


def seen(run: Run) -> list[Operation]:
    """These kernels alone, of Qwen 2.5 0.5B."""
    model = load_architecture("Qwen/Qwen2.5-0.5B")
    return [op for op in step_operations(model, run) if op.name.startswith(PREFIX)]


def test_bytes_by_hand() -> None:
    """Of 4 x 1,024 tokens and 151,936 words in fp32: a cast, then per number 8 bytes for the log-softmax, 8 for its
    exponent, 12 for the product and 4 for its sum; a copy without the last tokens, and its largest."""
    options = {"max_length": 1024, "per_device_train_batch_size": 4}
    run = resolve_run(load_architecture("Qwen/Qwen2.5-0.5B"), {**options, "token_metrics": "entropy"}).run
    numbers, cut = 4 * 1024 * 151936, 4 * 1023 * 151936
    found = sum(op.total_bytes for op in seen(run))
    assert found == pytest.approx(numbers * (6 + 8 + 8 + 12 + 4) + cut * (8 + 4), rel=1e-3)
    chunks = [op for op in seen(run) if op.name == f"{PREFIX}exp"]
    assert sum(op.count for op in chunks) == 4 * 1024 / ENTROPY_TOKENS
    fewer = sum(op.total_bytes for op in seen(replace(run, token_metrics="accuracy")))
    assert fewer == pytest.approx(numbers * 6 + cut * 12, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {f"{PREFIX}cast"}),
        ({"precision": "bf16"}, set()),  # nothing is cast without autocast
        ({"num_gpus": 2, "sharding": "zero2", "precision": "bf16"}, set()),
        ({"num_gpus": 2, "sharding": "fsdp", "token_metrics": "accuracy"}, {f"{PREFIX}{name}" for name in ACCURACY}),
        ({"num_gpus": 2, "sharding": "fsdp", "fsdp_version": 2}, set()),  # ``_prepare_fsdp2`` wraps no forward
        ({"num_gpus": 2, "sharding": "fsdp", "fsdp_version": 1}, {f"{PREFIX}cast"}),
        ({"num_gpus": 2, "sharding": "ddp"}, {f"{PREFIX}cast"}),
        ({"hf_code": "4.45"}, set()),  # its logits are in fp32 already
        ({"trainer_loop": False}, set()),
        ({"stack": "torchtune"}, set()),
        ({"stack": "trl"}, set()),  # in chunks, whose entropy is counted with them
    ],
)
def test_who_casts_what_the_model_returns(options: dict[str, Any], names: set[str]) -> None:
    run = resolve_run(load_architecture("Qwen/Qwen2.5-0.5B"), {"max_length": 256, **options}).run
    assert {op.name for op in seen(run)} == names


@pytest.mark.parametrize(
    ("version", "options", "metrics"),
    [
        ("0.17", {"precision": "bf16-autocast"}, "accuracy"),
        ("0.21", {}, "accuracy"),
        ("0.24", {}, "entropy"),
        ("1.2", {}, "entropy"),
        ("1.10", {}, "none"),
        ("1.10", {"loss_type": "nll"}, "entropy"),
        ("1.16", {"loss_type": "nll"}, "none"),
        ("0.24", {"loss_type": "liger"}, "none"),
        ("0.24", {"trainer_loop": False}, "none"),
    ],
)
def test_trls_metrics_are_those_of_its_version(version: str, options: dict[str, Any], metrics: str) -> None:
    """trl 0.16.1 to 1.16.0 ``trainer/sft_trainer.py``: accuracy before 0.22, entropy of full logits until 1.14."""
    model = load_architecture("Qwen/Qwen2.5-0.5B")
    assert resolve_run(model, {"stack": "trl", "stack_version": version, **options}).run.token_metrics == metrics


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_type": "liger"}, "add --loss-type nll, or leave it out"),
        ({"trainer_loop": False}, "add --trainer-loop, or leave it out"),
    ],
)
def test_metrics_of_logits_that_are_not_there_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        resolve_run(load_architecture("Qwen/Qwen2.5-0.5B"), {"token_metrics": "entropy", **options})


def test_the_traced_entropy_is_that_of_the_distribution() -> None:
    torch = pytest.importorskip("torch")
    from tunecast.calibrate.trace.losses import _accuracy, _entropy

    logits = torch.randn(2, 150, 40)
    assert _entropy(logits) == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().mean().item())
    labels = torch.randint(0, 40, (2, 150))
    labels[:, 1:] = torch.where(torch.rand(2, 149) < 0.5, logits[:, :-1].argmax(-1), labels[:, 1:])
    right = (logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean().item()
    assert _accuracy(logits, labels) == pytest.approx(right)
