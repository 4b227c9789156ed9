"""Who sets checkpoints, how many layers have them, and what two of them at once would be.

Sources: transformers 5.23 ``trainer.py`` and ``modeling_utils.py``, LLaMA-Factory 0.9.5
``model/model_utils/checkpointing.py``, trl 1.16 ``models/selective_activation_checkpointing.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architectures import load_architecture
from tunecast.model.configs import RunFile
from tunecast.model.resolve import resolve_run

Read = Callable[..., RunFile]
OFF = {"trl": "gradient_checkpointing: false", "llama-factory": "disable_gradient_checkpointing: true", "axolotl": ""}


def fsdp(version: int = 2, **config: Any) -> dict[str, Any]:
    """An accelerate file of FSDP on four GPUs."""
    return {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": version, **config}}


@pytest.mark.parametrize(
    ("form", "lines"), [("trl", ""), ("llama-factory", ""), ("axolotl", "gradient_checkpointing: true")]
)
def test_fsdps_own_checkpoints_beside_the_trainers_are_refused(read: Read, form: str, lines: str) -> None:
    off = OFF[form] or "gradient_checkpointing: false"
    with pytest.raises(InputError, match=f"layers cannot have both; write {off} in it"):
        read(form, lines, accelerate=fsdp(fsdp_activation_checkpointing=True))


@pytest.mark.parametrize("form", OFF)
def test_fsdps_own_checkpoints_alone_are_read_and_never_reentrant(read: Read, form: str) -> None:
    found = read(form, OFF[form], accelerate=fsdp(fsdp_activation_checkpointing=True)).options
    assert (found["gradient_checkpointing"], found["reentrant"]) == (True, False)


def test_transformers_refuses_both_too(tmp_path: Any) -> None:
    """The truth beside our refusal: the sentence of the installed Trainer."""
    import inspect

    from transformers import Trainer

    source = inspect.getsource(Trainer.create_accelerator_and_postprocess)
    assert "fsdp_plugin.activation_checkpointing and self.args.activation_checkpointing" in source


@pytest.mark.parametrize(
    ("version", "stated", "reentrant"), [(2, "", False), (2, "use_reentrant_gc: true", False), (1, "", True)]
)
def test_llama_factory_is_not_reentrant_under_fsdp_2(read: Read, version: int, stated: str, reentrant: bool) -> None:
    found = read("llama-factory", stated, accelerate=fsdp(version))
    assert found.options["reentrant"] is reentrant
    assert any("under FSDP 2" in note for note in found.notes) is (version == 2)


@pytest.mark.parametrize(
    ("form", "lines", "every"),
    [
        ("trl", "gradient_checkpointing_kwargs: {every_n_layers: 3}", 3),
        ("trl", "activation_checkpointing_kwargs: {every_n_layers: 3}", 3),
        ("trl", "gradient_checkpointing_kwargs: {every_n_layers: 1}", None),
        ("trl", "gradient_checkpointing: false\ngradient_checkpointing_kwargs: {every_n_layers: 3}", None),
        ("axolotl", "gradient_checkpointing: true\ngradient_checkpointing_kwargs: {every_n_layers: 2}", 2),
    ],
)
def test_every_nth_layer(read: Read, form: str, lines: str, every: int | None) -> None:
    assert read(form, lines).options.get("checkpoint_every") == every


@pytest.mark.parametrize("every", [2, 3])
def test_the_nth_layers_are_those_of_the_installed_transformers(every: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(small)
    model.activation_checkpointing_enable(every_n_layers=every)
    theirs = [layer.gradient_checkpointing for layer in model.model.layers]
    asked = {"method": "full", "gradient_checkpointing": True, "checkpoint_every": every}
    run = resolve_run(load_architecture("meta-llama/Llama-3.1-8B"), asked).run
    assert [run.checkpoints_layer(index) for index in range(7)] == theirs


@pytest.mark.parametrize(
    ("form", "lines", "told"),
    [
        ("trl", "gradient_checkpointing_kwargs: {selective: true}", "selective: True asks for checkpoints that keep"),
        ("trl", "activation_checkpointing_kwargs: {offload: true}", "or write activation_offloading: true"),
        ("axolotl", "gradient_checkpointing_kwargs: {offload: true}", "or write gradient_checkpointing: offload"),
    ],
)
def test_other_checkpoints_are_refused_by_name(read: Read, form: str, lines: str, told: str) -> None:
    with pytest.raises(NotSupportedError, match=told):
        read(form, lines)


@pytest.mark.parametrize("key", ["fsdp_activation_checkpointing_offload", "activation_checkpointing_offload"])
def test_fsdps_checkpoints_in_host_memory_are_refused(read: Read, key: str) -> None:
    with pytest.raises(NotSupportedError, match=f"{key}: True asks for checkpoints in host memory by FSDP's own code"):
        read("trl", OFF["trl"], accelerate=fsdp(fsdp_activation_checkpointing=True, **{key: True}))
    assert read("trl", OFF["trl"], accelerate=fsdp(**{key: False}))
