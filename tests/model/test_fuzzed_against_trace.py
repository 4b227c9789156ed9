"""Combinations that random testing found apart from the traced real code, each by the smallest run that showed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tunecast.calibrate.trace.tracer import trace_step
from tunecast.catalogs.errors import UnbuiltFamilyError
from tunecast.model.architectures import architecture_from_config
from tunecast.model.inventory import step_operations
from tunecast.model.memory import memory_timeline
from tunecast.model.operation import Operation
from tunecast.model.resolve import resolve_run

SMALL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SMALL}
EXPERTS = {"model_type": "qwen3_moe", **SMALL, "head_dim": 64, "num_experts": 16, "moe_intermediate_size": 256}
BLOOM = {"model_type": "bloom", "hidden_size": 512, "n_layer": 2, "n_head": 8, "vocab_size": 4096}
FALCON = {
    "model_type": "falcon", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 4096,
    "multi_query": True, "parallel_attn": True, "bias": False, "new_decoder_architecture": False, "alibi": False,
    "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
VOCAB = {"vocab_size": 4096}
OF_OPT = {"num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 4096, "max_position_embeddings": 2048}
BOTH_SIXTEEN = {"lora_target_modules": "q_proj,down_proj", "max_length": 512, "per_device_train_batch_size": 2}
TOLD = {"attn_implementation": "flash_attention_2", "padding_mask": True}
EAGER = {"attn_implementation": "eager", "gradient_checkpointing": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # PyTorch promotes bf16 beside fp16 to fp32
    "bf16 weights under fp16 autocast": (LLAMA, {**BOTH_SIXTEEN, "precision": "fp16-autocast"}),
    "without checkpoints": (LLAMA, {**BOTH_SIXTEEN, "precision": "fp16-autocast", "gradient_checkpointing": False}),
    # what an autograd Function saves is packed after its forward, so that the recomputation goes on until then
    # a result in 16 bits less a bias in 32 is one in 32
    "DoRA beside biases in fp32": (
        {"model_type": "qwen2", **SMALL, "tie_word_embeddings": False},
        {"method": "lora", "use_dora": True, "precision": "bf16-autocast", "dtype": "fp32", "max_length": 512},
    ),
    # gradients of heads by plain products come laid out by head, those of keys turned
    **{
        f"eager {kind}, {batch} of {targets or 'everything'}": (
            {"model_type": kind, **shape},
            {"attn_implementation": "eager", "max_length": 256, "per_device_train_batch_size": batch}
            | ({"method": "lora", "lora_target_modules": targets} if targets else {"method": "full"}),
        )
        for kind, shape, targets in (
            ("gpt2", {"n_embd": 512, "n_layer": 2, "n_head": 8, "n_positions": 1024, **VOCAB}, ""),
            ("opt", {"hidden_size": 512, "ffn_dim": 2048, **OF_OPT}, "out_proj"),
            ("opt", {"hidden_size": 512, "ffn_dim": 2048, **OF_OPT}, ""),
            ("gpt_neox", SMALL, ""),
        )
        for batch in (1, 2)
    },
    # what a reentrant checkpoint detaches is a leaf: autocast casts it once where maps take it without a norm before
    **{
        f"{kind} in fp32 under reentrant checkpoints, {method}": (
            {"model_type": kind, **SMALL},
            {"method": method, "dtype": "fp32", "precision": "bf16-autocast", "reentrant": True, "max_length": 512},
        )
        for kind, method in (("olmo2", "lora"), ("olmo2", "full"), ("exaone4", "lora"), ("llama", "lora"))
    },
    # layer norms are wide under autocast: magnitudes in 16 bits over norms of weights in 32 are ratios in 32
    **{
        f"DoRA in 16 bits behind a layer norm, {dropped} dropped": (
            {"model_type": "gpt_neox", **SMALL},
            {"method": "qlora", "use_dora": True, "adapter_dtype": "bf16", "lora_dropout": dropped, "max_length": 512},
        )
        for dropped in (0.0, 0.1)
    },
    "a key-value head for each of Falcon's queries": (
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 8},
        {"max_length": 256, "per_device_train_batch_size": 2},
    ),
    # the mask is looked at, and spares the look for packed samples; that padding is taken out is in no forecast
    "FlashAttention-2 told of padding": (LLAMA, {**BOTH_SIXTEEN, **TOLD}),
    "FlashAttention-2 told of padding in single samples": (
        LLAMA,
        {**BOTH_SIXTEEN, **TOLD, "per_device_train_batch_size": 1, "pad_to_multiple_of": 64},
    ),
    "FlashAttention-2 told of padding, two kinds of layers": (
        {"model_type": "gemma2", **SMALL, "head_dim": 64},
        {**BOTH_SIXTEEN, **TOLD, "gradient_accumulation_steps": 2},
    ),
    # the classes of configs without experts have some by default
    "experts in no layer": ({**EXPERTS, "mlp_only_layers": [0, 1]}, {"method": "full", "max_length": 256}),
    "experts in every fourth layer of two": (
        {**EXPERTS, "model_type": "qwen2_moe", "decoder_sparse_step": 4},
        {**BOTH_SIXTEEN, "lora_target_modules": "q_proj,v_proj"},
    ),
    # a field of every plain family's config, which training obeys
    "dropped attention weights": ({**LLAMA, "attention_dropout": 0.1}, {**BOTH_SIXTEEN, **EAGER}),
    "dropped attention weights beside experts": ({**EXPERTS, "attention_dropout": 0.1}, {"max_length": 256, **EAGER}),
    "attention weights dropped inside the kernel": ({**LLAMA, "attention_dropout": 0.1}, BOTH_SIXTEEN),
    "BLOOM's slopes of heads that are no power of two": (
        {**BLOOM, "n_head": 12, "hidden_size": 768},
        {"method": "qlora", "lora_target_modules": "query_key_value"},
    ),
    "BLOOM's own GELU over 4 bits": (BLOOM, {"method": "qlora", "lora_target_modules": "query_key_value"}),
}


@pytest.mark.parametrize("what", CASES)
def test_what_random_testing_found_is_the_traced_step(what: str, same_as_traced: Callable[..., None]) -> None:
    config, options = CASES[what]
    same_as_traced(architecture_from_config(config, what), **options)


def test_one_head_of_falcons_newer_code_is_refused() -> None:
    """Every query sees it in the same memory, rotated or not, and fused kernels take it: no formula has that."""
    newer = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 1}
    with pytest.raises(UnbuiltFamilyError, match=r"num_kv_heads=1, which has no formulas; trace its real code"):
        architecture_from_config(newer, "falcon")


@pytest.mark.parametrize("field", ["resid_pdrop", "layerdrop"])
def test_what_else_training_drops_is_refused(field: str) -> None:
    """Of blocks' outputs (Phi-3), whole layers at random (OPT)."""
    plain = {
        "phi3": LLAMA,
        "opt": {
            "hidden_size": 512,
            "ffn_dim": 2048,
            "num_attention_heads": 8,
            "max_position_embeddings": 2048,
            "vocab_size": 4096,
        },
    }
    kind = "phi3" if field == "resid_pdrop" else "opt"
    config = {**plain[kind], "model_type": kind, "num_hidden_layers": 2}
    assert architecture_from_config({**config, field: 0.0}, kind).total_params
    with pytest.raises(UnbuiltFamilyError, match=rf"{field}=0.1, which has no formulas; trace its real code"):
        architecture_from_config({**config, field: 0.1}, kind)


def bytes_of(operations: Iterable[Operation]) -> dict[tuple[str, str], float]:
    """By phase and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for op in operations:
        found[op.phase.value, op.kind.value] += op.total_bytes
    return dict(found)


def test_a_cast_to_the_dtype_that_a_tensor_has_is_none() -> None:
    """Falcon's products in fp32; at this width its peak is not exact (0.3%), its kernels are."""
    architecture = architecture_from_config(FALCON, "falcon")
    run = resolve_run(architecture, {"method": "full", "precision": "fp32", "dtype": "fp32"}).run
    found, expected = bytes_of(step_operations(architecture, run)), bytes_of(trace_step(architecture, run).stream)
    assert found == pytest.approx(expected, rel=1e-4)


def test_8_bits_under_reentrant_checkpoints() -> None:
    """bitsandbytes' node holds its input to the end of the recomputed layer, as no saved tensor."""
    architecture = architecture_from_config(LLAMA, "llama")
    asked = {"method": "qlora", "quant_method": "bnb-8bit", "reentrant": True, "max_length": 2048}
    run = resolve_run(architecture, {**asked, "loss_type": "chunked_nll"}).run
    forecast, memory = memory_timeline(architecture, run), trace_step(architecture, run).memory
    assert forecast.allocated_bytes == pytest.approx(memory.peak_bytes, rel=1e-3)
    for moment, peak_bytes in memory.moments.items():
        assert forecast.moments[moment] == pytest.approx(peak_bytes, rel=0.01), moment


def test_what_every_query_attends_to_is_repeated_when_it_is_multiplied() -> None:
    """Falcon's one head of values is laid out for all queries after the softmax: before it, no copy of it is there."""
    architecture = architecture_from_config(FALCON, "falcon")
    asked = {"method": "lora", "max_length": 512, "lora_target_modules": "query_key_value"}
    run = resolve_run(architecture, {**asked, "per_device_train_batch_size": 2}).run
    forecast, memory = memory_timeline(architecture, run), trace_step(architecture, run).memory
    assert forecast.allocated_bytes == pytest.approx(memory.peak_bytes, rel=1e-3)
