"""A word for no denies the term it stands before or behind, and no other; what has no opposite is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tunecast.calibrate.row_cells import samples_that_fill
from tunecast.calibrate.run_table import SkipRowError
from tunecast.calibrate.vocabulary import in_pieces

GPUS = 8
ON, OFF = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}
ONCE = {**ON, "reentrant": False}
NO_OFFLOAD = {**ON, "activation_offloading": False}
FILLED = {"filled": True}
PADDED = {**FILLED, "padded": True}
COMPILED, PLAIN = {"torch_compile": True}, {"torch_compile": False}
BF16 = {"dtype": "bf16", "precision": "bf16"}
NF4_ONCE = {"bnb_4bit_quant_type": "nf4", "double_quant": False}
BNB_4, BNB_8 = {"quant_method": "bnb-4bit"}, {"quant_method": "bnb-8bit"}
ADAM_8 = {"optim": "adamw_bnb_8bit"}
TP = {"sharding": "none", "tp": 8, "sequence_parallel": False}

MEANINGS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "packed": [
        ("no, padded to max length", PADDED), ("no - padded to max length", PADDED),
        ("no \u2014 padded to max length", PADDED), ("no: padded to max length", PADDED),
        ("no (padded to max length)", PADDED), ("no but padded to max length", PADDED),
        ("packing=False, padded to max length", PADDED), ("packing: false (samples fill seq_len)", FILLED),
        ("without packing, full length", FILLED), ("yes, pad_to_max_length=False", FILLED),
        ("sample_packing: false, full-length sequences", FILLED), ("not packed, fixed length", FILLED),
        ("no, random tokens, full length", FILLED), ("random tokens padded to max length", FILLED),
    ],
    "compile": [
        ("torch.compile(dynamic=False)", COMPILED), ("torch.compile (dynamic=None)", COMPILED),
        ("torch.compile, no dynamic shapes", COMPILED), ("torch.compile, mode=none", COMPILED),
        ("torch.compile(fullgraph=False)", COMPILED), ("torch.compile=False", PLAIN), ("torch.compile: no", PLAIN),
        ("mode=default, compile=False", PLAIN), ("no torch.compile", PLAIN), ("without compilation", PLAIN),
        ("no (torch.compile off)", PLAIN),
    ],
    "grad_checkpointing": [
        ("gradient checkpointing (reentrant=False)", ONCE), ("use_reentrant: no", ONCE), ("no reentrant", ONCE),
        ("checkpointing, reentrant: 0", ONCE), ("without reentrant", ONCE), ("yes, no offload", NO_OFFLOAD),
        ("full, without offload", NO_OFFLOAD), ("yes (offload: none)", NO_OFFLOAD), ("recompute off", OFF),
        ("gradient checkpointing (no)", OFF), ("gradient checkpointing was not enabled", OFF),
        ("no activation checkpointing", OFF), ("use_gradient_checkpointing=False", OFF), ("no: default", OFF),
        ("reentrant=no, checkpointing=yes", ONCE), ("yes, use_cache=False", ON),
    ],
    "parallelism": [
        ("FSDP offload: no", {"sharding": "fsdp"}), ("ZeRO-2, CPU offload: none", {"sharding": "zero2"}),
        ("ZeRO-3 optimizer offload: none", {"sharding": "zero3"}), ("ZeRO-3 without offloading", {"sharding": "zero3"}),
        ("TP=8, SP=no", TP), ("TP=8, sequence parallelism: none", TP), ("TP8 w/o sequence parallelism", TP),
        ("DDP, no TP", {"sharding": "ddp"}), ("TP=8, PP: none", {"sharding": "none", "tp": 8}),
    ],
    "quant": [
        ("load_in_4bit: True, load_in_8bit: False", BNB_4), ("load_in_4bit: False, load_in_8bit: True", BNB_8),
        ("load_in_4bit=False, load_in_8bit=False", {}), ("nf4 no dq", NF4_ONCE), ("nf4, dq: off", NF4_ONCE),
        ("nf4, bnb_4bit_use_double_quant=False", NF4_ONCE), ("quantization: none", {}),
    ],
    "compute_dtype": [
        ("bf16=True, fp16=False", {"mixed": "bf16"}), ("fp16: true, bf16: false", {"mixed": "fp16"}),
        ("bf16, amp: no", BF16), ("bf16 (autocast off)", BF16), ("bf16 without mixed precision", BF16),
    ],
    "optimizer": [
        ("AdamW, fused: no", {"optim": "adamw_torch"}), ("AdamW8bit (paged=False)", ADAM_8),
        ("8-bit AdamW, no offload", ADAM_8), ("AdamW not fused", {"optim": "adamw_torch"}),
    ],
    "method": [
        ("LoRA, no DoRA", {"method": "lora"}), ("LoRA, use_rslora=False", {"method": "lora"}),
        ("QLoRA, double quant: no", {"method": "qlora", "base_bits": 4, "double_quant": False}),
    ],
}  # fmt: skip
CASES = [(column, text, means) for column, entries in MEANINGS.items() for text, means in entries]


@pytest.mark.parametrize(("column", "text", "means"), CASES)
def test_a_word_for_no_denies_its_neighbour_alone(column: str, text: str, means: dict[str, Any]) -> None:
    assert in_pieces(column, text, GPUS) == means


@pytest.mark.parametrize(
    "text",
    ["pad_to_max_length=False", "pad to max: no", "padded to max length: no", "no full length", "full length: no",
     "packing=False", "packing: false", "sample_packing: false", "neat_packing=False", "multipack off", "packed: no",
     "non-packed", "samples fill seq_len: no", "no padded to max length"],
)  # fmt: skip
def test_samples_that_are_denied_to_fill_their_length_do_not(text: str) -> None:
    with pytest.raises(SkipRowError, match="the tokens processed are not known"):
        in_pieces("packed", text, GPUS)
    assert not samples_that_fill({"packed": text})


@pytest.mark.parametrize(
    ("column", "text", "piece"),
    [
        ("compile", "mode=none", "says nothing"),
        ("compile", "torch.compile (dynamic): no", "'dynamic) no' denies is not known"),
        ("parallelism", "device map (naive): no", "'naive) no' denies is not known"),
        ("lora_targets", "attention (qkv): no", "'qkv) no' denies is not known"),
        ("compile", "inductor: no", "'inductor no' does not say what was done instead"),
        ("compile", "no torch.compile: no", "'no torch.compile no' denies one thing twice"),
        ("grad_checkpointing", "unsloth: off", "'unsloth off' does not say what was done instead"),
        ("grad_checkpointing", "selective: off", "'selective off' does not say"),
        ("grad_checkpointing", "non-reentrant: no", "'non reentrant no' does not say"),
        ("grad_checkpointing", "no offload", "does not say whether it checkpoints"),
        ("grad_checkpointing", "unsloth, no offload", "'unsloth' and 'no offload'"),
        ("grad_checkpointing", "no, full", "'no' and 'full'"),
        ("parallelism", "FSDP: no", "'fsdp no' does not say"),
        ("parallelism", "ZeRO-3, optimizer offload: no, param offload: yes", "not in the vocabulary"),
        ("parallelism", "ZeRO-3, no offload, CPU offload", "'no offload' and 'cpu offload'"),
        ("quant", "4-bit: no", "'4 bit no' does not say"),
        ("quant", "no GPTQ", "'no gptq' does not say"),
        ("compute_dtype", "bf16=False, fp16=False", "says nothing"),
        ("attention_impl", "flash attention: off", "'flash attention off' does not say"),
        ("optimizer", "no AdamW", "'no adamw' does not say"),
        ("optimizer", "AdamW, no", "'no' is not in the vocabulary"),
        ("method", "full, no LoRA", "'no lora' does not say"),
        ("packed", "yes, no full length", "packed samples fill their length"),
        ("packed", "packed to 2048: no", "'packed to 2048 no' does not say"),
    ],
)  # fmt: skip
def test_a_denial_that_leaves_a_choice_is_refused_by_name(column: str, text: str, piece: str) -> None:
    with pytest.raises(SkipRowError) as refusal:
        in_pieces(column, text, GPUS)
    assert str(refusal.value).startswith(column)
    assert piece in str(refusal.value)
