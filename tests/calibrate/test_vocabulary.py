"""Cells as documentation, model cards and benchmarks word them, and what they mean; what is unknown is refused by name.

The meanings are written by hand from the frameworks' documentation. Pieces alone are asked (`in_pieces`): the entries
for whole cells of the committed table are compared with them at the end.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tunecast.calibrate.cell_grammar import grammar, software, wordings
from tunecast.calibrate.run_table import SkipRowError
from tunecast.calibrate.vocabulary import in_pieces, lookup, vocabulary

TABLE = Path(__file__).parents[2] / "results" / "published" / "published-runs.csv"
GPUS = 8

ON = {"gradient_checkpointing": True}
OFF = {"gradient_checkpointing": False}
OPS = {"gradient_checkpointing": True, "checkpoint_keeps_ops": True}
ATTENTION = {"recompute_attention": True, "gradient_checkpointing": False}
UNSLOTH = {"gradient_checkpointing": True, "activation_offloading": True, "reentrant": True}
HOST = {"gradient_checkpointing": True, "activation_offloading": True}
FLASH = {"attn_implementation": "flash_attention_2"}
SDPA = {"attn_implementation": "sdpa"}
SDPA_OR_FLEX = {"attn_implementation": "sdpa", "only_in": "torchtune"}
FUSED = {"attn_implementation": "sdpa", "fused_kernels": "attention"}
FLASH_3 = {"attn_implementation": "flash_attention_3"}
COMPILED: dict[str, Any] = {"torch_compile": True}
PLAIN: dict[str, Any] = {"torch_compile": False}
NF4 = {"bnb_4bit_quant_type": "nf4"}
NF4_TWICE = {"bnb_4bit_quant_type": "nf4", "double_quant": True}
TORCHAO = {"bnb_4bit_quant_type": "nf4", "only_in": "torchtune"}
BNB_4, BNB_8 = {"quant_method": "bnb-4bit"}, {"quant_method": "bnb-8bit"}
FULL, LORA, QLORA = {"method": "full"}, {"method": "lora"}, {"method": "qlora"}
BF16 = {"dtype": "bf16", "precision": "bf16"}
FP16 = {"dtype": "fp16", "precision": "fp16"}
MIXED = {"mixed": "bf16"}
FILLED: dict[str, Any] = {"filled": True}
PADDED = {**FILLED, "padded": True}
FOREACH, ONE_KERNEL = {"optim": "adamw_torch"}, {"optim": "adamw_torch_fused"}
IN_BACKWARD, LION = {"optimizer_in_backward": True}, {"optim": "lion_32bit"}
BNB_ADAM, PAGED_8, PAGED_32 = {"optim": "adamw_bnb_8bit"}, {"optim": "paged_adamw_8bit"}, {"optim": "paged_adamw_32bit"}
ALL = {"lora_target_modules": "all-linear"}


def targets(names: str) -> dict[str, str]:
    return {"lora_target_modules": names}


def layout(sharding: str, **degrees: object) -> dict[str, object]:
    return {"sharding": sharding, **degrees}


MEANINGS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "method": [
        ("Full fine-tune", FULL), ("full finetuning", FULL), ("Full-parameter SFT", FULL), ("SFT", FULL),
        ("Pretraining", FULL), ("continued pre-training", FULL), ("FFT", FULL), ("LoRA", LORA), ("LoRA+", LORA),
        ("LoRA (PEFT)", LORA), ("SFT (LoRA)", LORA), ("SFT with LoRA", LORA), ("QLoRA", QLORA), ("Q-LoRA", QLORA),
        ("4-bit LoRA", {"method": "lora", "base_bits": 4}), ("QLoRA (NF4)", {"method": "qlora", "base_bits": 4}),
        ("LoRA r=16", {"method": "lora", "lora_r": 16}), ("DoRA", {"method": "lora", "use_dora": True}),
        ("LoRA (use_dora=True)", {"method": "lora", "use_dora": True}), ("LoRA, use_rslora=False", LORA),
        ("LoRA 16bit", {"method": "lora", "base_bits": 16}), ("bf16 LoRA", {"method": "lora", "half": "bf16"}),
        ("full (bf16)", {"method": "full", "half": "bf16"}),
        ("LoRA fp16", {"method": "lora", "half": "fp16"}), ("full 16-bit", {"method": "full", "base_bits": 16}),
        ("LoRA α=32", LORA), ("LoRA, alpha=2r", LORA), ("LoRA r16 a32", {"method": "lora", "lora_r": 16}),
        ("LoRA r16a32", {"method": "lora", "lora_r": 16}), ("FPFT", FULL), ("full, dropout 0", FULL),
        ("LoRA, dropout=0", {"method": "lora", "lora_dropout": 0.0}),
        ("LoRA r=8, dropout 0.05", {"method": "lora", "lora_r": 8, "lora_dropout": 0.05}),
        ("full param", FULL), ("full FT", FULL), ("SFT (full)", FULL), ("pretrain", FULL), ("LoRA SFT", LORA),
        ("LoRA continued pre-training", LORA), ("LoRA finetuning", LORA), ("LoRA-16", {"method": "lora", "lora_r": 16}),
        ("LoRA 16-bit r=8", {"method": "lora", "base_bits": 16, "lora_r": 8}),
        ("LoRA (all linear)", {"method": "lora", **ALL}), ("LoRA single device", {"method": "lora", "several": False}),
        ("full finetune distributed", {"method": "full", "several": True}),
        ("lora_finetune_distributed", {"method": "lora", "several": True}),
        ("full_finetune_single_device", {"method": "full", "several": False}),
        ("QLoRA + unsloth", {"method": "qlora", "software": "unsloth"}),
        ("QLoRA w/ double quant", {"method": "qlora", "base_bits": 4, "double_quant": True}),
        ("LoRA + DoRA", {"method": "lora", "use_dora": True}), ("QDoRA", {"method": "qlora", "use_dora": True}),
        ("rsLoRA", {"method": "lora", "use_rslora": True}), ("full fine-tuning (all parameters)", FULL),
    ],
    "quant": [
        ("none (fp8 base parameters, transformer engine)", {"fp8_weights": True}),
        ("No", {}), ("none (bf16)", {}), ("16-bit", {}), ("NF4", NF4), ("nf4 (bitsandbytes)", NF4),
        ("4-bit (NF4)", NF4),
        ("NF4, double quantization", NF4_TWICE), ("nf4 + nested quantization", NF4_TWICE),
        ("nf4, no double quant", {"bnb_4bit_quant_type": "nf4", "double_quant": False}),
        ("FP4", {"bnb_4bit_quant_type": "fp4"}), ("4bit", BNB_4), ("4-bit", BNB_4), ("bnb 4-bit", BNB_4),
        ("bitsandbytes 4-bit NF4", NF4), ("load_in_4bit=True", BNB_4), ("nf4 or fp4", BNB_4),
        ("int4 (bitsandbytes)", BNB_4), ("load_in_4bit", BNB_4), ("QLoRA 4-bit", BNB_4), ("8-bit", BNB_8),
        ("int8", BNB_8), ("LLM.int8()", BNB_8), ("8bit (bitsandbytes 0.43)", BNB_8),
        ("GPTQ 4-bit", {"quant_method": "gptq-4bit"}), ("4-bit (AutoGPTQ)", {"quant_method": "gptq-4bit"}),
        ("gptq-int8", {"quant_method": "gptq-8bit"}), ("0", {}), ("NA", {}), ("\u2717", {}), ("not used", {}),
        ("load_in_4bit=False", {}), ("NF4 w/o double quantization", {**NF4, "double_quant": False}),
        ("nf4, double quant: no", {**NF4, "double_quant": False}), ("yes", {"quantized": True}),
        ("yes (bitsandbytes)", {"quantized": True}), ("yes, nf4", NF4),
        ("4bit nf4 bf16 compute", {**NF4, "bnb_4bit_compute_dtype": "bf16"}),
        ("4", BNB_4), ("8", BNB_8), ("16", {}), ("GPTQ-Int4 g128", {"quant_method": "gptq-4bit"}),
        ("nf4 (torchao)", TORCHAO), ("torchao NF4", TORCHAO), ("NF4Tensor", TORCHAO),
    ],
    "compute_dtype": [
        ("bf16 weights, no fp32 copy", {"dtype": "bf16", "precision": "bf16"}),
        ("bf16 under autocast, fp32 weights", {"dtype": "fp32", "precision": "bf16-autocast"}),
        ("BF16", BF16), ("bfloat16", BF16), ("bf16-true", BF16), ("pure bf16", BF16), ("bf16 compute", BF16),
        ("bf16 weights", BF16), ("bf16 (weights and optimizer too)", BF16), ("bf16, no mixed precision", BF16),
        ("float16", FP16), ("half precision", FP16), ("fp32", {"dtype": "fp32", "precision": "fp32"}),
        ("bf16-mixed", MIXED), ("bf16 mixed", MIXED), ("BF16 AMP", MIXED), ("bf16 autocast", MIXED),
        ("mixed precision (bf16)", MIXED), ("bf16/fp32 mixed precision", MIXED), ("bf16 (fp32 master weights)", MIXED),
        ("bf16 with fp32 master weights", MIXED), ("bf16=True", MIXED),
        ("bf16 params, fp32 optimizer states", MIXED), ("bf16 weights, fp32 AdamW states", MIXED),
        ("16-mixed", {"mixed": "fp16"}),
        ("32-true", {"dtype": "fp32", "precision": "fp32"}),
        ("bf16 (4-bit base)", {**BF16, "base_bits": 4}), ("bf16, int8 base", {**BF16, "base_bits": 8}),
        ("bf16 (nf4 base)", {**BF16, "base_bits": 4}), ("bf16, quantized base", {**BF16, "quantized_base": True}),
        ("fp16 AMP", {"mixed": "fp16"}),
        ("FP16 mixed precision", {"mixed": "fp16"}),
        ("fp16 autocast over fp32 weights", {"dtype": "fp32", "precision": "fp16-autocast"}),
        ("bf16 autocast, fp32 weights", {"dtype": "fp32", "precision": "bf16-autocast"}),
        ("bf16 weights, bf16 autocast", {"dtype": "bf16", "precision": "bf16-autocast"}),
        ("fp8 (tensorwise linear layers)", {**BF16, "fp8": "torchao"}), ("float8, torchao", {**BF16, "fp8": "torchao"}),
        ("MXFP8", {**BF16, "fp8": "megatron-mxfp8"}), ("FP8 (TE)", {**BF16, "fp8": "te"}),
        ("fp8 (current scaling), bf16 elsewhere", {**BF16, "fp8": "megatron-current"}),
        ("fp8 current scaling (Transformer Engine)", {**BF16, "fp8": "megatron-current"}),
        ("TE FP8, per-tensor current scaling", {**BF16, "fp8": "megatron-current"}),
        ("MXFP8 (Transformer Engine)", {**BF16, "fp8": "megatron-mxfp8"}),
        ("FP8-CS", {**BF16, "fp8": "megatron-current"}), ("FP8-MX", {**BF16, "fp8": "megatron-mxfp8"}),
        ("FP8 (TE), fp8_params: true", {**BF16, "fp8": "te", "fp8_weights": True}),
        ("fp8 hybrid (FP8_PARAMS=1)", {**BF16, "fp8": "te", "fp8_weights": True}),
        ("FP8-DS", {**BF16, "fp8": "te"}), ("bf16: auto", BF16), ("bf16 + tf32", BF16), ("bf16 (TF32 on)", BF16),
        ("bf16 autocast over fp32 weights (TF32 matmul high)", {"dtype": "fp32", "precision": "bf16-autocast"}),
        ("bf16/tf32", BF16), ("bf16-mixed, tf32=True", MIXED), ("bf16=True, tf32=True", MIXED),
    ],
    "grad_checkpointing": [
        ("yes (every LlamaDecoderLayer, checkpoint_wrapper)", ON), ("activations_checkpoint_granularity: null", OFF),
        ("no (preset; page does not say)", OFF), ("activations_checkpoint_granularity: selective", ATTENTION),
        ("True", ON), ("enabled", ON), ("On", ON), ("yes (recipe default)", ON), ("Full", ON), ("full recompute", ON),
        ("full activation recomputation", ON), ("activation checkpointing", ON), ("per layer", ON),
        ("grad ckpt on", ON), ("torch.utils.checkpoint", ON), ("recompute: none", OFF),
        ("not enabled", OFF),  ("every layer", ON),
        ("granularity=full uniform 1", ON), ("granularity: selective", ATTENTION), ("full (uniform)", ON),
        ("yes (per decoder layer)", ON), ("enabled (from the config)", ON), ("False", OFF),
        ("off", OFF), ("disabled", OFF), ("none", OFF), ("no (default)", OFF), ("gradient checkpointing: off", OFF),
        ("no recompute", OFF), ("selective (op)", OPS), ("selective AC", OPS), ("unsloth", UNSLOTH),
        ("selective (attention)", ATTENTION), ("selective (core_attn)", ATTENTION),
        ("recompute_granularity=selective", ATTENTION),
        ("yes (unsloth default)", UNSLOTH), ('"unsloth"', UNSLOTH), ("yes, with activation offloading", HOST),
        ("activation offload", HOST), ("offload", HOST), ("yes (reentrant)", {**ON, "reentrant": True}),
        ("w/o", OFF), ("not used", OFF), ('use_gradient_checkpointing="unsloth"', UNSLOTH),
        ("no (recompute_granularity None in the recipe)", OFF),
        ("full (uniform, 1 layer)", ON), ("uniform", ON), ("every second layer", {**ON, "checkpoint_every": 2}),
        ("selective, every second layer (selective layer)", {**ON, "checkpoint_every": 2}),
        ("every other layer", {**ON, "checkpoint_every": 2}), ("every 4th block", {**ON, "checkpoint_every": 4}),
        ("first 5 layers", {**ON, "checkpoint_first": 5}), ("block, 1 layer", {**ON, "checkpoint_first": 1}),
        ("partial: full recompute of 21 of 80 layers (ACG=full, ACM=block, ACL=21)", {**ON, "checkpoint_first": 21}),
        ("non-reentrant", {**ON, "reentrant": False}), ("yes, use_reentrant=False", {**ON, "reentrant": False}),
    ],
    "attention_impl": [
        ("flash attention 2 (ATorch module replace)", FLASH), ("sdpa (Llama)", SDPA),
        ("flash2", FLASH), ("FlashAttention-2", FLASH), ("Flash Attention 2", FLASH), ("flash_attention_2", FLASH),
        ("FA2", FLASH), ("flash-attn 2.5.8", FLASH), ("flash attention", FLASH), ("FlashAttention-2 (varlen)", FLASH),
        ("Flash Attention v2", FLASH), ("flash3", FLASH_3), ("FA3", FLASH_3), ("FA 3.0", FLASH_3), ("FA-3.0", FLASH_3),
        ("flash v3.0", FLASH_3), ("FA 2.7", FLASH), ("FA2 (2.5.8)", FLASH), ("FA3 (3.0.0b1)", FLASH_3),
        ("FlashAttention-3", FLASH_3),
        ("SDPA", SDPA), ("sdpa (torchtitan default)", SDPA), ("sdpa (litgpt model)", SDPA),
        ("PyTorch SDPA", SDPA), ("torch SDPA (flash backend)", SDPA), ("library default (sdpa)", SDPA),
        ("F.scaled_dot_product_attention", SDPA), ("xformers", SDPA), ("memory-efficient attention", SDPA),
        ("flash2 or xformers", SDPA), ("xformers/sdpa", SDPA), ("eager", {"attn_implementation": "eager"}),
        ("eager (default)", {"attn_implementation": "eager"}), ("Transformer Engine", FUSED),
        ("cuDNN fused attention", FUSED), ("FlashAttention-2 (TE)", {**FUSED, **FLASH}),
        ("TE FA2", {**FUSED, **FLASH}), ("TE FA3", {**FUSED, **FLASH_3}), ("TE flash attention", FUSED), ("sdp", SDPA),
        ("flash sdp", SDPA),
        ("sdpa or flex", SDPA_OR_FLEX), ("sdpa / flex", SDPA_OR_FLEX), ("kernels-community/flash-attn3", FLASH_3),
        ("kernels-community/flash-attn2", FLASH), ("ROCm flash", {**FLASH, "of_amd": True}),
        ("CK flash attention", {**FLASH, "of_amd": True}), ("kernels-community/vllm-flash-attn3", FLASH_3),
        ("SDPA (ROCm flash)", {**SDPA, "of_amd": True}), ("BetterTransformer", SDPA),
        ("flash-attn 2 + Liger", {**FLASH, "adds": "liger"}),
        ("fused (TE/cuDNN)", FUSED), ("--use-flash-attn", FLASH), ("flash-attn (monkey patch)", FLASH),
        ("ring attention (flash)", {**FLASH, "cp_kind": "ring"}),
    ],
    "compile": [
        ("torch.compile(model)", COMPILED), ("torch.compile(model): no", {"torch_compile": False}),
        ("transformer blocks and loss", {"torch_compile": True}),
        ("True", COMPILED), ("torch.compile", COMPILED), ("max-autotune-no-cudagraphs", COMPILED),
        ("per block", COMPILED),
        ("torch.compile, inductor", COMPILED), ("False", PLAIN), ("off", PLAIN), ("not compiled", PLAIN),
        ("1", COMPILED), ("0", PLAIN), ("not used", PLAIN), ("n", PLAIN),
        ("no (graph breaks)", PLAIN), ("tried, off", PLAIN), ("tried but off", PLAIN),
        ("yes (max-autotune, no CUDA graphs)", COMPILED), ("no (torch.compile off)", PLAIN),
        ("partly (unsloth)", PLAIN),
        ("yes, without loss", {"torch_compile": True, "compile_loss": False}),
    ],
    "optimizer": [
        ("mcore distributed optimizer, Adam", {"optim": "adamw_torch_fused", "distributed_optimizer": True}),
        ("distributed fused Adam", {"optim": "adamw_torch_fused", "distributed_optimizer": True}),
        ("adamw", FOREACH), ("Adam", FOREACH), ("torch AdamW", FOREACH), ("AdamW (PyTorch)", FOREACH),
        ("torch.optim.AdamW", FOREACH), ("adamw_hf", FOREACH), ("AdamW (foreach)", FOREACH),
        ("AdamW fused", ONE_KERNEL), ("AdamW fused (fp32)", ONE_KERNEL),
        ("AdamW(lr=1e-4, betas=(0.9,0.95), fused=True)", ONE_KERNEL), ("AdamW 8-bit, torch 2.4", BNB_ADAM),
        ("AdamW (fused=True)", ONE_KERNEL), ("DeepSpeed FusedAdam", ONE_KERNEL), ("apex FusedAdam", ONE_KERNEL),
        ("AdamW (β=0.9,0.95)", FOREACH), ("fp32 AdamW", FOREACH), ("AdamW (β1=0.9, β2=0.95)", FOREACH),
        ("AdamW, lr 2e-4", FOREACH),
        ("DeepSpeedCPUAdam", {**FOREACH, "on_host": True}),
        ("adamw_torch_fused", ONE_KERNEL), ("8-bit AdamW", BNB_ADAM), ("AdamW8bit", BNB_ADAM),
        ("bitsandbytes 8-bit AdamW", BNB_ADAM), ("AdamW (8-bit, bitsandbytes)", BNB_ADAM),
        ("paged AdamW 8-bit", PAGED_8),
        ("PagedAdamW8bit", PAGED_8), ("paged_adamw_32bit", PAGED_32), ("Paged AdamW (32-bit)", PAGED_32),
        ("PagedAdamW (bitsandbytes)", PAGED_32), ("Adafactor", {"optim": "adafactor"}), ("SGD", {"optim": "sgd"}),
        ("Lion", {"optim": "lion_32bit"}), ("8-bit Lion", {"optim": "lion_8bit"}),
        ("AdamW, optimizer_in_bwd", {**FOREACH, **IN_BACKWARD}),
        ("AdamW, optimizer step in backward", {**FOREACH, **IN_BACKWARD}),
        ("PagedAdamW8bit, optimizer_in_bwd=True", {**PAGED_8, **IN_BACKWARD}),
        ("AdamW fused, optimizer step fused in backward", {**ONE_KERNEL, **IN_BACKWARD}),
        ("LionW", LION), ("DecoupledLionW", LION), ("dist. Adam", {**ONE_KERNEL, "distributed_optimizer": True}),
        ("Distributed Adam (fp32 states)", {**ONE_KERNEL, "distributed_optimizer": True}),
        ("AdamW fused=True", ONE_KERNEL), ("AdamW, fused=False", FOREACH),
        ("AdamW, fp32 master", {**FOREACH, "fp32_master": True}), ("AdamW, cosine", FOREACH),
        ("AdamW, wd 0.1, eps 1e-8, scheduler: cosine", FOREACH),
        ("AdamW, linear warmup, cosine decay", FOREACH), ("AdamW, lr 2e-5, constant schedule, warmup 3%", FOREACH),
        ("distributed optimizer/AdamW", {**ONE_KERNEL, "distributed_optimizer": True}),
    ],
    "parallelism": [
        ("TP 4, PP 2, virtual 4, data 1", {"tp": 4, "pp": 2, "pp_interleave": 4, "sharding": "none"}),
        ("FSDP2 4 x TP 2", {"tp": 2, "sharding": "fsdp"}),
        ("FSDP (wrap LlamaDecoderLayer, limit_all_gathers, forward_prefetch)", {"sharding": "fsdp"}),
        ("FSDP, CPU offload of parameters, gradients and optimizer", {"sharding": "fsdp", "offload": "all"}),
        ("DDP", layout("ddp")), ("data parallel", layout("ddp")), ("DDP (8 GPUs)", layout("ddp")),
        ("ZeRO-1", layout("zero1")), ("DeepSpeed ZeRO stage 2", layout("zero2")), ("ZeRO-3", layout("zero3")),
        ("zero stage-3 (DeepSpeed)", layout("zero3")),
        ("ZeRO-2 with optimizer offload", layout("zero2", offload="optimizer")),
        ("ZeRO-2 + CPU offload", layout("zero2", offload="optimizer")),
        ("deepspeed zero3 + cpu offload", layout("zero3", offload="all")), ("FSDP", layout("fsdp")),
        ("FSDP (FULL_SHARD)", layout("fsdp")), ("full_shard", layout("fsdp")),
        ("fsdp full_shard auto_wrap offload", layout("fsdp", offload="all")), ("DDP x8", layout("ddp")),
        ("ZeRO-3 (offload optimizer + params)", layout("zero3", offload="all")),
        ("FSDP1", layout("fsdp", fsdp_version=1)),
        ("FSDP2", layout("fsdp", fsdp_version=2)), ("FSDP (SHARD_GRAD_OP)", layout("fsdp-grad-op")),
        ("FSDP, CPU offload", layout("fsdp", offload="all")), ("HYBRID_SHARD", layout("hsdp")),
        ("HSDP (2 nodes)", layout("hsdp", gpus_per_node=4)), ("TP=4, PP=2", layout("none", tp=4, pp=2)),
        ("tp4/pp2", layout("none", tp=4, pp=2)), ("TP4PP2", layout("none", tp=4, pp=2)),
        ("TP4×PP2", layout("none", tp=4, pp=2)),
        ("TP4xPP2", layout("none", tp=4, pp=2)), ("TP=4 x PP=2", layout("none", tp=4, pp=2)),
        ("TP8, sp=true", layout("none", tp=8, sequence_parallel=True)), ("data parallel (8)", layout("ddp")),
        ("2D (FSDP, TP 2)", layout("fsdp", tp=2)), ("ZeRO stage 0", layout("ddp")),
        ("DDP (no sharding)", layout("ddp")),
        ("FSDP (no sharding)", layout("ddp")), ("ddp_find_unused_parameters_false", layout("ddp")),
        ("ZeroRedundancyOptimizer", layout("zero1", of_torch=True)),
        ("DDP + ZeroRedundancyOptimizer", layout("zero1", of_torch=True)),
        ("PP 2, TP 2, DP 2", layout("ddp", tp=2, pp=2)), ("TP2 x PP2 x CP2", layout("ddp", tp=2, pp=2, cp=2)),
        ("8-way tensor parallelism", layout("none", tp=8)), ("model parallel 8", layout("none", tp=8)),
        ("tensor parallel", layout("none", tp=8)),
        ("TP8 + sequence parallel", layout("none", tp=8, sequence_parallel=True)),
        ("tp2, distributed optimizer", layout("zero1", tp=2)), ("ddp with sharded optimizer", layout("zero1")),
        ("FSDP2 + TP 2", layout("fsdp", fsdp_version=2, tp=2)),
        ("ring attention 4, FSDP", layout("fsdp", cp=4, cp_kind="ring")),
        ("FSDP, ring attention (sequence parallel 4)", layout("fsdp", cp=4, cp_kind="ring")),
        ("ZeRO-3, sequence parallel 4", layout("zero3", cp=4, cp_kind="ulysses")),
        ("DeepSpeed ZeRO-3 (recipes/accelerate_configs/deepspeed_zero3.yaml)", layout("zero3")),
        ("zero_stage 3 + adam_offload", layout("zero3", offload="optimizer")),
        ("tp2, --use-distributed-optimizer", layout("zero1", tp=2)),
        ("ZeRO-3 + Ulysses 8", layout("zero3", cp=8, cp_kind="ulysses")),
        ("device_map pipeline (naive)", layout("none", pp=8)),
        ("2 nodes x 4 GPUs, ZeRO-3", layout("zero3", gpus_per_node=4)),
        ("FSDP (ZeRO-2)", layout("fsdp-grad-op")), ("FSDP ZeRO-3", layout("fsdp")),
        ("FSDP2 (ZeRO-3)", layout("fsdp", fsdp_version=2)), ("FSDP FULL_SHARD (ZeRO-3)", layout("fsdp")),
        ("FSDP SHARD_GRAD_OP (ZeRO-2)", layout("fsdp-grad-op")), ("FSDP full sharding", layout("fsdp")),
        ("FSDP + QLoRA", layout("fsdp", of_method="qlora")), ("FSDP-QLoRA", layout("fsdp", of_method="qlora")),
        ("fsdp_qlora", layout("fsdp", of_method="qlora")), ("FSDP NO_SHARD", layout("ddp")),
        ("ZeRO-3 + CPU offload (optimizer)", layout("zero3", offload="optimizer")),
        ("ZeRO-3 + CPU offload (optimizer + params)", layout("zero3", offload="all")),
        ("ZeRO-3, CPU offload of params & optimizer", layout("zero3", offload="all")),
        ("FSDP2 (reshard_after_forward=True)", layout("fsdp", fsdp_version=2)),
        ("FSDP2 (reshard_after_forward=False)", layout("fsdp-grad-op", fsdp_version=2)),
        ("dp_shard=8", layout("fsdp")), ("FSDP8", layout("fsdp")), ("FSDP 8 GPUs", layout("fsdp")),
        ("dp_replicate=8", layout("ddp")), ("FSDP across 2 nodes", layout("fsdp", gpus_per_node=4)),
        ("deepspeed zero3_bf16.json", layout("zero3")), ("deepspeed_configs/zero2.json", layout("zero2")),
        ("zero1.json", layout("zero1")), ("ds_z3_offload_config.json", layout("zero3", offload="all")),
        ("FSDP 4 x TP 2", layout("fsdp", tp=2)), ("TP/PP/CP/DP = 4/2/1/1", layout("none", tp=4, pp=2)),
        ("TP, PP = 2, 4", layout("none", tp=2, pp=4)), ("tensor=2 pipeline=2", layout("ddp", tp=2, pp=2)),
        ("DDP, single node", layout("ddp")), ("pipeline 8 stages", layout("none", pp=8)),
        ("HSDP (shard 4, replicate 2), 2 nodes", layout("hsdp", gpus_per_node=4)),
        ("dp_replicate=2, dp_shard=4", layout("hsdp", dp_shard_size=4)),
        ("HSDP dp_replicate=2", layout("hsdp", dp_shard_size=4)),
        ("HSDP dp_shard=2, dp_replicate=2, TP 2", layout("hsdp", dp_shard_size=2, tp=2)),
        ("dp_shard=-1", layout("fsdp")), ("data_parallel_shard_degree = -1", layout("fsdp")),
        ("dp_shard=-1, TP 2", layout("fsdp", tp=2)), ("FSDP2, dp_replicate=8", layout("ddp")),
        ("FSDP2, dp_replicate=1", layout("fsdp", fsdp_version=2)),
        ("dp_shard=-1, dp_replicate=2, 2 nodes", layout("hsdp", gpus_per_node=4)),
        ("HSDP dp_replicate=2, 2 nodes", layout("hsdp", gpus_per_node=4)), ("FSDP (data parallel)", layout("fsdp")),
        ("FSDP (single node, intra-node)", layout("fsdp")), ("HSDP (FSDP + DDP)", layout("hsdp")),
        ("ZeRO-1 data parallel", layout("zero1")), ("data parallel (ZeRO-3)", layout("zero3")),
        ("ZeRO-2 data parallelism", layout("zero2")), ("FSDP data parallel", layout("fsdp")),
        ("ZeRO-1 data parallel 8", layout("zero1")),
        ("FSDP FULL_SHARD, TRANSFORMER_BASED_WRAP, SHARDED_STATE_DICT", layout("fsdp")),
        ("ZeRO-Offload (ZeRO-2, optimizer on CPU)", layout("zero2", offload="optimizer")),
        ("TP=8 per node", layout("none", tp=8)), ("ZeRO, stage 2", layout("zero2")),
    ],
    "packed": [
        ("texts concatenated, blocks of 1024", {"filled": True, "filled_length": 1024}),
        ("packed to 4096 (pretraining)", {"filled": True, "filled_length": 4096}),
        ("token stream (DCLM)", {"filled": True}),
        ("True", FILLED), ("yes (packing)", FILLED), ("sample packing", FILLED), ("constant length", FILLED),
        ("packing=True", FILLED), ("padded to 2048", {**PADDED, "filled_length": 2048}),
        ("full 4096-token sequences", {**FILLED, "filled_length": 4096}), ("no packing, padded to max length", PADDED),
        ("fixed length", FILLED), ("neat_packing", FILLED), ("yes (neat_packing)", FILLED), ("packed sequence", FILLED),
        ("concat", FILLED), ("concatenate and chunk", FILLED), ("Axolotl multipack", FILLED), ("TRL packing", FILLED),
        ("PackedDataset", FILLED), ("sequence packing (THD)", FILLED),
        ("yes, concatenated with EOS", FILLED), ("packed, no attention masking across documents", FILLED),
        ("yes, no cross-attention between documents", FILLED), ("yes (no document masking)", FILLED),
        ("greedy", FILLED), ("concat + chunk", FILLED), ("packed 95%", FILLED), ("sample packing + flash", FILLED),
        ("packed (99.5% full)", FILLED), ("packed 100%", FILLED), ("concatenated", FILLED),
        ("yes (variable-length attention)", FILLED),
        ("mock tokens", FILLED), ("random token ids", FILLED), ("random full-length sequences", FILLED),
        ("packed to 4096", {**FILLED, "filled_length": 4096}),
        (
            "no (mean 700 tokens a sample; micro-batch 1, no padding; cap 8192)",
            {**FILLED, "alone": True, "filled_length": 700},
        ),
        ("n/a: samples fill 8192", {**FILLED, "filled_length": 8192}), ("padded to max length", PADDED),
        ("padding=max_length", PADDED),
    ],
    "lora_targets": [
        ("auto (left to PEFT)", {"lora_target_modules": "<peft>"}), ("attention (qkv, proj)", targets("<attention>")),
        ("qkv + output projection", targets("<attention>")), ("all-linear (20,971,520 trainable)", ALL),
        ("attention (fused qkv and output projection)", targets("<attention>")),
        (
            "all-linear; embed_tokens and lm_head trained in full (modules_to_save)",
            {**ALL, "modules_to_save": "embed_tokens,lm_head"},
        ),
        ("all_linear", ALL), ("lora_target_linear: true", ALL), ("all linear except lm_head", ALL),
        ("all linear (7)", ALL), ("all-linear w/o lm_head", ALL), ("all linear (excl. lm_head)", ALL),
        ("all-linear (without the output layer)", ALL),
        ("lora_query, lora_value", targets("query,value")), ("lora_query: true, lora_mlp=True", targets("query,mlp")),
        ("lora_query: true, lora_key: false", targets("query")), ("lora_query: true, lora_mlp: no", targets("query")),
        ("q_proj,v_proj (no MLP)", targets("q_proj,v_proj")), ("attention, no MLP", targets("<attention>")),
        ("qkv, no o", targets("<qkv>")), ("q,v - no k", targets("q,v")), ("q,v, mlp: no", targets("q,v")),
        ("all-linear, no lm_head", ALL), ("all linear, lm_head: no", ALL),
        ("attention, no lm_head", targets("<attention>")),
        ("attention (q, v)", targets("q,v")), ("attention: q,v", targets("q,v")), ("Attention Q,V", targets("q,v")),
        ("attention only (q,v)", targets("q,v")), ("attn q/v", targets("q,v")), ("attention (qkv)", targets("<qkv>")),
        ("mlp (gate, up)", targets("gate,up")), ("q,v + mlp", targets("q,v,<mlp>")),
        ("attention (q and v)", targets("q,v")), ("qkv + mlp", targets("<qkv>,<mlp>")),
        ("all nn.Linear", ALL), ("7 modules", targets("<7>")), ("(q|v)_proj", targets("q_proj,v_proj")),
        ("qproj,vproj", targets("qproj,vproj")), ("all linear layers", ALL), ("All-Linear", ALL),
        ("all 7 modules", ALL),
        ("q_proj, v_proj", targets("q_proj,v_proj")),
        ("q_proj/k_proj/v_proj/o_proj", targets("q_proj,k_proj,v_proj,o_proj")),
        ("[q_proj, v_proj]", targets("q_proj,v_proj")),
        ("q,k,v,o", targets("q,k,v,o")), ("wq, wv", targets("wq,wv")), ("attention only", targets("<attention>")),
        ("attention + MLP", targets("<attention>,<mlp>")), ("qkv", targets("<qkv>")),
        ("all-linear (7 modules)", ALL), ("all (attention + MLP)", ALL),
        ("q_proj, v_proj (PEFT default)", targets("q_proj,v_proj")), ("PEFT default", targets("<peft>")),
        ("self_attn.q_proj, self_attn.v_proj", targets("q_proj,v_proj")),
    ],
}  # fmt: skip
CASES = [(column, text, means) for column, entries in MEANINGS.items() for text, means in entries]


def test_the_corpus_is_broad() -> None:
    assert len(CASES) >= 150
    assert MEANINGS.keys() <= grammar()["columns"].keys()


@pytest.mark.parametrize(("column", "text", "means"), CASES)
def test_a_cell_means_what_its_authors_mean(column: str, text: str, means: dict[str, Any]) -> None:
    assert in_pieces(column, text, GPUS) == means
    assert in_pieces(column, f"  {text.upper()} ", GPUS) is not None or column == "lora_targets"


@pytest.mark.parametrize(("column", "text", "means"), CASES)
def test_one_unknown_word_refuses_the_cell(column: str, text: str, means: dict[str, Any]) -> None:
    with pytest.raises(SkipRowError, match=rf"^{column} .*'zorblax' is not in the vocabulary"):
        in_pieces(column, f"{text} (zorblax)", GPUS)


@pytest.mark.parametrize(
    ("column", "text", "piece"),
    [
        ("method", "LoRA, all layers", "or on all linear maps of them: write all linear"),
        ("method", "full, dropout 0.1", "dropout in a model that is trained whole"),
        ("compile", "max-autotune", "CUDA graphs"), ("compile", "yes (max-autotune)", "CUDA graphs"),
        ("packed", "packed 50%", "'%' is not"),
        ("parallelism", "FSDP (2D)", "does not say which two"), ("parallelism", "2D", "does not say which two"),
        ("parallelism", "ZeRO-3 (no sharding)", "ddp and zero3"),
        ("lora_targets", "7 modules, no MLP", "leaves out 'MLP'"),
        ("method", "LoRA 8", "a rank or a number of bits: write r=8, or 8-bit"),
        ("method", "LoRA 16-bit, 4-bit", "'16 bit' and '4 bit'"),
        ("method", "LoRA from scratch", "'lora' and 'from scratch'"),
        ("quant", "torchao", "write nf4 (torchao)"),
        ("quant", "int4 (torchao)", "no meaning of"),
        ("quant", "torchao int4", "not built"),
        ("quant", "yes (no)", "'yes' and 'no'"),
        ("quant", "yes (bf16)", "contradicts itself"),
        ("quant", "bf16 compute", "can only stand beside a name"),
        ("optimizer", "optimizer_in_bwd", "can only stand beside a name"),
        ("optimizer", "DecoupledLionW_8bit", "llm-foundry's own 8-bit Lion"),
        ("optimizer", "AdamW, schedule-free", "this optimizer is not built"),
        ("optimizer", "AdamW, amsgrad", "'amsgrad' is not"),
        ("attention_impl", "standard", "write sdpa or eager"),
        ("attention_impl", "ROCm triton flash", "no meaning of"),
        ("attention_impl", "sdpa or eager", "'or eager' is not"),
        ("attention_impl", "Liger", "can only stand beside a name"),
        ("grad_checkpointing", "full, 1 layer blocks", "write every layer, or block"),
        ("compile", "w/o loss only", "'only' is not"),
        ("packed", "none", "write padded to max length, or samples fill seq_len"),
        ("lora_targets", "all linear except down_proj", "'except' is not"),
        ("lora_targets", "all linear except output projection", "'except output"),
        ("lora_targets", "all linear, no MLP", "leaves out 'MLP': write the names of all modules"),
        ("lora_targets", "attention w/o o", "leaves out 'o'"),
        ("lora_targets", "q, v, no k, o", "leaves out 'k'"),
        ("lora_targets", "no MLP, q_proj", "leaves out 'MLP'"),
        ("lora_targets", "q_proj, v_proj: no", "leaves out 'v_proj'"),
        ("lora_targets", "self_attn.q_proj, self_attn.v_proj: no", "leaves out 'self_attn.v_proj'"),
        ("lora_targets", "attention + MLP: no", "leaves out 'MLP'"),
        ("lora_targets", "all-linear (7 modules): no", "what 'no' denies is not known"),
        ("lora_targets", "q_proj,v_proj (none)", "'none' denies is not known"),
        ("lora_targets", "PEFT default (no MLP)", "leaves out 'MLP'"),
        ("lora_targets", "q, v (no bias)", "'bias' is not"),
        ("lora_targets", "attention + q", "names 'q' and all of attention"),
        ("lora_targets", "all attention (q, v)", "names 'q' and all of attention"),
        ("method", "prefix", "'prefix' is not in the vocabulary"),
        ("method", "LoRA (full)", "'lora' and 'full'"),
        ("method", "LoRA, then DPO", "'then dpo' is not"),
        ("method", "DPO", "next token"),
        ("method", "GaLore", "not a method"),
        ("quant", "int4", "whose 4-bit integers"),
        ("quant", "AWQ", "not built"),
        ("quant", "nf4 (8-bit)", "'nf4' and '8 bit'"),
        ("quant", "nf5", "'nf5' is not"),
        ("compute_dtype", "bf17", "'bf17' is not"),
        ("compute_dtype", "fp8 (torchao float8, fp8 all-gather)", "weights gathered in FP8 are not built"),
        ("compute_dtype", "bf16 (gradients accumulated in fp32)", "gradients kept in fp32 beside"),
        ("compute_dtype", "bf16 (fp16)", "'bf16' and 'fp16'"),
        ("compute_dtype", "bf16 or fp16", "'or fp16' is not"),
        ("compute_dtype", "TF32", "TF32 are not built"),
        ("compute_dtype", "fp8", "write fp8 (Transformer Engine), fp8 (current scaling), MXFP8 or fp8 (torchao)"),
        ("compute_dtype", "bf16 + fp8", "the FP8 recipe is not stated: write fp8 (Transformer Engine)"),
        ("compute_dtype", "fp8 (rowwise)", "'rowwise': this FP8 recipe is not built"),
        ("compute_dtype", "not bf16", "says nothing"),
        ("compute_dtype", "FP8-SC", "this FP8 recipe is not built"),
        ("compute_dtype", "FP8-XS", "'xs' is not"),
        ("compute_dtype", "16-bit", "bf16 or fp16: write which"),
        ("compute_dtype", "16-bit mixed precision", "bf16 or fp16: write which"),
        ("compute_dtype", "PURE", "does not say bf16 or fp16"),
        ("compute_dtype", "mixed_precision PURE", "write bf16 autocast, fp32 master weights"),
        ("compute_dtype", "param bf16 / reduce fp32", "not what the weights are kept in"),
        ("compute_dtype", "fp32 + tf32", "TF32 are not built"),
        ("compute_dtype", "fp32 weights, tf32 on", "TF32 are not built"),
        ("grad_checkpointing", "yes (no)", "'yes' and 'no'"),
        ("grad_checkpointing", "maybe", "'maybe' is not"),
        ("grad_checkpointing", "yes (assumed)", "'assumed': the source does not state it"),
        ("grad_checkpointing", "selective (every 3 layers)", "'every 3 layers': checkpoints of some layers"),
        ("grad_checkpointing", "yes, except embeddings", "'except embeddings' is not"),
        ("attention_impl", "flash9", "'flash9' is not"),
        ("attention_impl", "FA 1.0.9", "this version of FlashAttention"),
        ("attention_impl", "FA v1.0.4", "this version of FlashAttention"),
        ("attention_impl", "flash (1.0.9)", "this version of FlashAttention"),
        ("attention_impl", "FA 4.0", "this version of FlashAttention"),
        ("attention_impl", "flash (v4.0)", "this version of FlashAttention"),
        ("attention_impl", "FA2 (3.0)", "'fa2' and '3.0'"),
        ("optimizer", "4-bit AdamW", "bitsandbytes has no 4-bit AdamW"),
        ("optimizer", "AdamW 4bit (bitsandbytes)", "bitsandbytes has no 4-bit AdamW"),
        ("packed", "no (random samples)", "write padded to max length"),
        ("packed", "no, generated data", "write padded to max length"),
        ("packed", "no, synthetic data", "write padded to max length"),
        ("packed", "no, random tokens", "write padded to max length"),
        ("packed", "generated", "write padded to max length"),
        ("packed", "mock data", "write padded to max length"),
        ("attention_impl", "sdpa (eager)", "'sdpa' and 'eager'"),
        ("attention_impl", "flash2, flash3", "'flash2' and 'flash3'"),
        ("attention_impl", "not flash", "'not flash' does not say what was done instead"),
        ("attention_impl", "flex attention", "not built"),
        ("compile", "partly", "not stated or not built"),
        ("compile", "yes (reduce-overhead)", "CUDA graphs"),
        ("compile", "yes, off", "'yes' and 'off'"),
        ("optimizer", "Muon + AdamW", "'muon': this optimizer is not built"),
        ("optimizer", "AdamW or Lion", "'or lion' is not"),
        ("optimizer", "SGD + AdamW", "'sgd' and 'adamw'"),
        ("optimizer", "8-bit", "no meaning of '8 bit' alone"),
        ("packed", "no", "not known"),
        ("packed", "dynamic padding", "not known"),
        ("packed", "grouped by length", "not known"),
        ("packed", "yes (no)", "'yes' and 'no'"),
        ("packed", "no padding", "packed, or laid end to end"),
        ("attention_impl", "yes", "says nothing"),
        ("parallelism", "DeepSpeed", "says nothing"),
        ("lora_targets", "adapters, stated", "says nothing"),
        ("compute_dtype", "mixed precision", "no meaning of 'mixed precision' alone"),
        ("packed", "packed to 2048, samples fill 4096", "2048 and 4096"),
        ("packed", "concatenated with EOS", "says nothing that is in the vocabulary"),
        ("packed", "yes, no zebra between documents", "'zebra between documents' is not"),
        ("packed", "yes, no attention across documents, no document masking", "contradicts itself"),
        ("packed", "no cross-attention between documents", "padded samples of unknown length"),
        ("compile", "torch.compile(zebra)", "'zebra' is not"),
        ("parallelism", "ZeRO-1 data parallel zebra", "'zebra' is not"),
        ("parallelism", "ZeRO-1, data parallel 4", "states 4 copies, but gpus 8 leaves 8"),
        ("parallelism", "ZeRO-1 DDP", "'zero 1' and 'ddp'"),
        ("parallelism", "zero7", "'zero7' is not"),
        ("parallelism", "ZeRO-2 and ZeRO-3", "'zero 2' and 'zero 3'"),
        ("parallelism", "FSDP + ZeRO-3", "fsdp and zero3"),
        ("parallelism", "FSDP or ZeRO-3", "'or zero 3' is not"),
        ("parallelism", "FSDP (ZeRO-1)", "fsdp and zero1"),
        ("parallelism", "FSDP3", "'FSDP3' is not"),
        ("parallelism", "FSDP16", "states 16 copies, but gpus 8 leaves 8"),
        ("parallelism", "dp_shard=4", "states 1 x 4 copies, but 8 are left"),
        ("parallelism", "zero1_torch_compile.json", "'compile.json' is not"),
        ("parallelism", "zero3_bf16_cpuoffload_params.json", "params.json' is not"),
        ("parallelism", "ZeRO-3 + CPU offload (params)", "'params' is not"),
        ("parallelism", "TP/PP = 4/2/1", "2 names and 3 values"),
        ("parallelism", "TP/EP = 4/2", "'TP/EP = 4/2'"),
        ("parallelism", "8 GPUs", "does not say how 8 copies"),
        ("parallelism", "ZeRO", "does not say which stage of ZeRO: write ZeRO-1, ZeRO-2 or ZeRO-3"),
        ("parallelism", "DDP + ZeRO", "does not say which stage of ZeRO"),
        ("parallelism", "DP + ZeRO", "does not say which stage of ZeRO"),
        ("parallelism", "TP=2, DP=4, ZeRO", "does not say which stage of ZeRO"),
        ("parallelism", "DDP/FSDP", "fsdp and ddp"), ("parallelism", "FSDP and DDP", "fsdp and ddp"),
        ("parallelism", "ZeRO-3 per node", "does not say what is sharded inside machines alone"),
        ("parallelism", "TP=4 intra-node, FSDP", "does not say what is sharded inside machines alone"),
        ("parallelism", "tp=-1", "-1 is no degree"), ("parallelism", "dp_replicate=2", "states 2 x 1 copies"),
        ("parallelism", "single node", "does not say how 8 copies"),
        ("parallelism", "2 nodes", "does not say how 8 copies"),
        ("parallelism", "sequence parallel", "does not say how 8 copies"),
        ("parallelism", "ring attention", "does not say how 8 copies"),
        ("parallelism", "TP3", "takes 3 GPUs"),
        ("parallelism", "TP2, DP2", "states 2 copies, but gpus 8 leaves 4"),
        ("parallelism", "tp2 (tensor parallel 4)", "tp 2 and 4"),
        ("parallelism", "single", "does not say how 8 copies"),
        ("parallelism", "FSDP on 16 GPUs", "names 16 GPUs, but gpus is 8"),
        ("parallelism", "EP=8", "expert parallelism"),
        ("parallelism", "cpu offload", "does not say how 8 copies"),
        ("parallelism", "DDP, cpu offload", "does not say what is offloaded"),
        ("lora_targets", "all linear, attention", "all and"),
        ("lora_targets", "everything", "'everything' is not"),
        ("lora_targets", "vision tower", "outside the language model"),
    ],
)  # fmt: skip
def test_what_nobody_can_know_is_refused_by_name(column: str, text: str, piece: str) -> None:
    with pytest.raises(SkipRowError) as refusal:
        in_pieces(column, text, GPUS)
    assert str(refusal.value).startswith(column)
    assert piece in str(refusal.value)


def test_a_default_value_is_no_module() -> None:
    assert in_pieces("lora_targets", "default value") is None
    assert in_pieces("lora_targets", "value") == targets("value")


@pytest.mark.parametrize("text", ["not stated", "unknown", "?", "library default", "default", "n/a", "N/A (default)"])
@pytest.mark.parametrize("column", ["grad_checkpointing", "attention_impl", "optimizer", "parallelism", "method"])
def test_words_for_nothing_state_nothing(column: str, text: str) -> None:
    assert in_pieces(column, text, GPUS) is None


def committed_cells(column: str) -> set[str]:
    with TABLE.open(encoding="utf-8", newline="") as handle:
        return {row[column] for row in csv.DictReader(handle) if row["set"] == "training" and row[column]}


EXACT_ALONE = {
    ("attention_impl", "flash (triton)"): "a rule names its kernel",
    ("compute_dtype", "fp16 AMP (per config)"): "of DeepSpeed, whose weights are in 16 bits",
    ("compute_dtype", "bf16 autocast, fp32 master weights"): "shards in fp32, which pieces leave to the layout",
    ("compute_dtype", "fp8 compute (TE), fp32 master weights"): "the same",
    ("compute_dtype", "fp8 (Transformer Engine)"): "in Megatron, which casts weights once a step",
    ("optimizer", "AdamW fused (on CPU)"): "the layout says that it is offloaded",
}
"""Whole cells whose meaning is more than that of their pieces."""


@pytest.mark.parametrize("column", sorted(MEANINGS.keys() - {"parallelism", "lora_targets"}))
def test_pieces_mean_what_the_committed_tables_cells_mean(column: str) -> None:
    """Wherever the pieces of a training row's cell are known, they mean what the entry for the whole cell means."""
    compared = 0
    for text in sorted(committed_cells(column) & vocabulary()[column].keys()):
        exact = vocabulary()[column][text]
        try:
            found = in_pieces(column, text, GPUS)
        except SkipRowError:
            continue
        if "skip" in exact or (column, text) in EXACT_ALONE or not found:
            continue
        told = {name: value for name, value in found.items() if not name.startswith(("filled", "only_in"))}
        off = {"torch_compile": False}
        assert told | off == exact | off, (column, text)
        compared += 1
    assert compared > 0 or column == "packed"


def test_whole_cells_go_before_pieces() -> None:
    assert lookup("compute_dtype", "fp16 AMP (per config)") == FP16
    assert in_pieces("compute_dtype", "fp16 AMP (per config)") == {"mixed": "fp16"}
    assert lookup("parallelism", "tp2/pp2/cp1/dp2", GPUS) == {"tp": 2, "pp": 2, "cp": 1, "sharding": "zero1"}
    assert in_pieces("parallelism", "tp2/pp2/cp1/dp2", GPUS) == {"tp": 2, "pp": 2, "sharding": "ddp"}


def test_alternatives_in_brackets_stay_together() -> None:
    assert wordings("a|b (c|d)|e") == ["a", "b (c|d)", "e"]
    assert wordings(r"x\(|y") == [r"x\(", "y"]


def test_every_column_of_terms_names_its_source() -> None:
    assert all(column["source"] for column in grammar()["columns"].values())
    assert all("label" in family or "skip" in family or "adds" in family for family in software()["families"])
