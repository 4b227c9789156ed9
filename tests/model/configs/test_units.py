"""What accelerate's files say of FSDP's units and of the compiler, in the older spelling too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.configs import RunFile, merge_options
from tunecast.model.configs.spread import UNWRAPPED

Read = Callable[..., RunFile]


def fsdp(**config: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2, **config}}


@pytest.mark.parametrize("backend", ["NO", "no"])
@pytest.mark.parametrize("older", [True, False])
def test_no_compiler_is_none_in_both_spellings(read: Read, backend: str, older: bool) -> None:
    """accelerate 1.15 ``commands/config/config_args.py`` turns the older into ``dynamo_config``."""
    said: dict[str, Any] = {"dynamo_backend": backend} if older else {"dynamo_config": {"dynamo_backend": backend}}
    found = read("llama-factory", accelerate={"distributed_type": "MULTI_GPU", "num_processes": 8, **said})
    assert found.options["num_gpus"] == 8
    assert not [field for field in found.ignored if "dynamo" in field]


@pytest.mark.parametrize("policy", ["TRANSFORMER_BASED_WRAP", "transformer_based_wrap"])
def test_layers_as_units_are_read_and_need_no_word(read: Read, policy: str) -> None:
    found = read("trl", "use_peft: false", accelerate=fsdp(fsdp_auto_wrap_policy=policy))
    assert found.options["sharding"] == "fsdp"
    assert UNWRAPPED not in found.notes
    assert not [field for field in found.ignored if "auto_wrap" in field]


@pytest.mark.parametrize(
    ("lines", "config", "told"),
    [
        ("use_peft: false", {}, True),
        ("use_peft: true", {}, True),
        ("use_peft: true", {"fsdp_version": 1}, False),
        ("use_peft: false", {"fsdp_version": 1}, True),
        ("use_peft: false\nfsdp: full_shard", {}, False),
        ("use_peft: false\naccelerate_config: fsdp2", None, False),
    ],
)
def test_units_that_nobody_names_are_told(read: Read, lines: str, config: dict[str, Any] | None, told: bool) -> None:
    """accelerate then takes the whole model as one; but the Trainer's own FSDP has layers, and so has PEFT's policy,
    which the Trainer puts in under FSDP 1."""
    found = read("trl", lines, accelerate=None if config is None else fsdp(**config))
    assert found.options["sharding"] == "fsdp"
    assert (UNWRAPPED in found.notes) == told


def test_a_command_line_without_fsdp_has_no_units(read: Read) -> None:
    found = read("trl", "use_peft: false", accelerate=fsdp())
    assert UNWRAPPED in merge_options(found, {}).notes
    assert UNWRAPPED not in merge_options(found, {"sharding": "ddp"}).notes
    assert UNWRAPPED not in merge_options(found, {"num_gpus": 1}).notes


@pytest.mark.parametrize("form", ["trl", "llama-factory", "axolotl"])
def test_units_of_a_training_files_own_fsdp(read: Read, form: str) -> None:
    lines = "fsdp: full_shard\nfsdp_config: {{auto_wrap_policy: {}}}"
    if form == "axolotl":
        lines = "lora_mlp_kernel:\nfsdp_version: 2\nfsdp_config: {{auto_wrap_policy: {}}}"
    assert read(form, lines.format("TRANSFORMER_BASED_WRAP")).options["sharding"] == "fsdp"
    with pytest.raises(NotSupportedError, match=r"auto_wrap_policy: NO_WRAP .*write TRANSFORMER_BASED_WRAP"):
        read(form, lines.format("NO_WRAP"))


def test_an_unknown_rule_is_told(read: Read) -> None:
    with pytest.raises(InputError, match="is 'LAYERS', but a rule for FSDP's units is TRANSFORMER_BASED_WRAP"):
        read("trl", accelerate=fsdp(fsdp_auto_wrap_policy="LAYERS"))
