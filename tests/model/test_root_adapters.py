"""Adapters on the table of tokens and on the output head, against PEFT's own code traced on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunecast.catalogs.errors import InputError, NotSupportedError, UnknownNameError
from tunecast.model.architecture import Architecture
from tunecast.model.architectures import architecture_from_config
from tunecast.model.flops import model_flops_per_step
from tunecast.model.inventory import step_operations
from tunecast.model.resolve import resolve_run
from tunecast.model.trained import trainable_params

VOCAB, HIDDEN = 8192, 512
SMALL = {
    "hidden_size": HIDDEN, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 8192,
}  # fmt: skip
PLAIN = {"model_type": "llama", **SMALL}
TIED = {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True}
SCALED = {"model_type": "gemma", **SMALL, "head_dim": 64}
CAPPED = {"model_type": "gemma2", **SMALL, "head_dim": 64, "num_hidden_layers": 2}
DEEP = {**PLAIN, "num_hidden_layers": 6}
LENGTH = {"max_length": 512, "per_device_train_batch_size": 2}
BOTH = "embed_tokens,lm_head,q_proj"

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PLAIN, {"lora_target_modules": "q_proj,lm_head"}),
    (PLAIN, {"lora_target_modules": "embed_tokens"}),
    (PLAIN, {"lora_target_modules": BOTH, "adapter_dtype": "bf16", "gradient_checkpointing": False}),
    (PLAIN, {"lora_target_modules": BOTH, "precision": "bf16", "gradient_accumulation_steps": 2}),
    (PLAIN, {"lora_target_modules": "all-linear,lm_head", "lora_bias": True, "lora_dropout": 0.1}),
    (PLAIN, {"lora_target_modules": BOTH, "optim": "adafactor", "dtype": "fp32"}),
    (PLAIN, {"lora_target_modules": "embed_tokens,v_proj", "loss_type": "chunked_nll"}),
    (TIED, {"lora_target_modules": "lm_head", "method": "qlora"}),
    (TIED, {"lora_target_modules": BOTH, "method": "qlora", "double_quant": False, "lora_r": 64}),
    (SCALED, {"lora_target_modules": BOTH}),
    (CAPPED, {"lora_target_modules": BOTH, "attn_implementation": "eager"}),
    (DEEP, {"lora_target_modules": BOTH, "optim": "adamw_8bit"}),
    (DEEP, {"lora_target_modules": "all-linear,embed_tokens", "method": "qlora", "upcast_non_quantized": True}),
]


def small(config: dict[str, Any]) -> Architecture:
    return architecture_from_config(config, "small")


@pytest.mark.parametrize(("config", "options"), CASES)
def test_as_traced(same_as_traced: Callable[..., None], config: dict[str, Any], options: dict[str, Any]) -> None:
    same_as_traced(small(config), **LENGTH, **options)


@pytest.mark.parametrize("config", [PLAIN, TIED])
def test_trained_parameters_by_hand(config: dict[str, Any]) -> None:
    """r x (vocabulary + hidden) each, tied or not: PEFT's adapters of a tied pair are apart."""
    arch = small(config)
    counts = [
        trainable_params(arch, resolve_run(arch, {"lora_r": 16, "lora_target_modules": names}).run)
        for names in ("q_proj", "q_proj,lm_head", "q_proj,embed_tokens", BOTH)
    ]
    assert [count - counts[0] for count in counts[1:]] == [16 * (VOCAB + HIDDEN) * n for n in (1, 1, 2)]


def test_required_flops_by_hand() -> None:
    """Three products of two factors for the head; one factor of the table of tokens, whose other one is looked up."""
    arch = small(PLAIN)
    plain, head, table = (
        model_flops_per_step(arch, resolve_run(arch, {**LENGTH, "lora_r": 16, "lora_target_modules": names}).run)
        for names in ("q_proj", "q_proj,lm_head", "q_proj,embed_tokens")
    )
    assert head - plain == 1024 * 3 * 2 * 16 * (VOCAB + HIDDEN)
    assert table - plain == 1024 * 3 * 2 * 16 * HIDDEN


def test_all_linear_leaves_both_out_unless_they_are_named() -> None:
    arch = small(PLAIN)
    plain, more = (
        resolve_run(arch, {"lora_target_modules": names}).run.lora_target_modules
        for names in ("all-linear", "lm_head,all-linear")
    )
    assert more == (*plain, "lm_head")
    assert not {"lm_head", "embed_tokens"} & set(plain)


REFUSED = [
    ({"lora_target_modules": BOTH, "use_dora": True}, NotSupportedError, "--use-dora"),
    ({"lora_target_modules": BOTH, "lora_bias": True}, InputError, "PEFT has none on embed_tokens"),
    ({"use_dora": True, "lora_bias": True}, InputError, "PEFT refuses the two together"),
    ({"lora_target_modules": "lm_head", "loss_type": "chunked_nll"}, NotSupportedError, "passes an adapter on lm_head"),
    ({"lora_target_modules": "lm_head", "stack": "liger"}, NotSupportedError, "use --loss-type nll"),
    ({"lora_target_modules": "lm_head", "modules_to_save": "lm_head"}, InputError, "both name lm_head"),
    ({"lora_target_modules": "embed_tokens", "num_gpus": 2, "tp": 2}, NotSupportedError, "--tp or --pp"),
    ({"lora_target_modules": "lm_head", "num_gpus": 2, "sharding": "zero3"}, NotSupportedError, "--sharding zero3"),
    ({"lora_target_modules": "wte"}, UnknownNameError, "embed_tokens, q_proj"),
    ({"lora_target_modules": "all-linear,q_proj"}, InputError, "takes all-linear alone"),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve_run(small(PLAIN), options)


def test_dora_with_a_bias_is_what_peft_refuses() -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="not supported for DoRA"):
        peft.LoraConfig(use_dora=True, lora_bias=True)


def test_collectives_carry_their_gradients() -> None:
    """DDP reduces what trains: 4 bytes for each of r x (vocabulary + hidden) more."""
    arch = small(PLAIN)
    plain, more = (
        sum(
            op.total_bytes
            for op in step_operations(
                arch, resolve_run(arch, {"lora_r": 16, "num_gpus": 2, "lora_target_modules": names}).run
            )
            if op.name == "all_reduce"
        )
        for names in ("q_proj", "q_proj,lm_head")
    )
    assert more - plain == 4 * 16 * (VOCAB + HIDDEN)
