"""Checkpoints in host memory give the gradients of ordinary ones, on real tensors."""

from __future__ import annotations

from typing import Any

import pytest

for module in ("torch", "transformers", "peft", "bitsandbytes"):
    pytest.importorskip(module)

import torch  # noqa: E402

from tunecast.calibrate.trace import hf, offload  # noqa: E402
from tunecast.model.architectures import architecture_from_config  # noqa: E402
from tunecast.model.resolve import resolve_run  # noqa: E402

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
FULL = {"method": "full", "dtype": "fp32", "precision": "fp32"}


def gradients(**options: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of one step from equal weights and tokens, and how many tensors went to host memory."""
    architecture = architecture_from_config(TINY, "tiny")
    run = resolve_run(architecture, {"max_length": 16, "per_device_train_batch_size": 2, **options}).run
    torch.manual_seed(7)
    model = hf.build_model(architecture, run, device="cpu")
    ids = torch.arange(32).reshape(2, 16)
    copies = 0

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal copies
        copies += 1
        return tensor.clone()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(offload, "to_host", counted)
        with hf.autocast_context(run, "cpu"):
            loss = hf.loss_of(model, {"input_ids": ids, "labels": ids}, run)
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, copies


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("options", [FULL, {"method": "lora"}])
def test_gradients_are_those_of_ordinary_checkpoints(options: dict[str, Any], reentrant: bool) -> None:
    plain, none = gradients(**options, reentrant=reentrant)
    offloaded, copies = gradients(**options, reentrant=reentrant, activation_offloading=True)
    assert (none, copies) == (0, TINY["num_hidden_layers"])
    assert plain.keys() == offloaded.keys() != set()
    for name, gradient in plain.items():
        torch.testing.assert_close(offloaded[name], gradient, msg=name)


def test_only_checkpointed_layers_are_offloaded() -> None:
    _, copies = gradients(**FULL, activation_offloading=True, checkpoint_every=2)
    assert copies == 2
