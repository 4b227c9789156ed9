"""What a row of a table of runs was read as: every part of the run in words, and which parts no cell states."""

from __future__ import annotations

from collections.abc import Iterator

from tunecast.calibrate.published import PublishedRun
from tunecast.calibrate.vocabulary import FIELDS
from tunecast.model.resolve_loop import METRICS_SAID
from tunecast.model.run import Run
from tunecast.model.stacks import ours

ASSUMED = ("packed", "sequence_parallel", "keeps_outputs", "upcast_non_quantized")
"""Fields that no software decides where no cell does: the last two of a loop that its authors wrote."""
Part = tuple[str, tuple[str, ...]]
"""Words, and the run fields that they are about."""


def read_as(run: PublishedRun) -> str:
    """One paragraph: what the row was read as, then what of it no cell states: by its software's defaults, and what
    tunecast assumes where the software leaves it to its user.

    Fields are those of `Run`; a part counts as stated too where the cell of its column says something.
    """
    parts = list(_parts(run))
    silent = [(words, fields) for words, fields in parts if not run.stated.intersection(fields)]
    own = {*ours(run.run.stack), *ASSUMED}
    chosen = {words for words, fields in silent if own.intersection(FIELDS.get(name, name) for name in fields)}
    theirs = "; ".join(words for words, _ in silent if words not in chosen)
    assumed = "; ".join(words for words, _ in silent if words in chosen)
    told = f" Stated by no cell, by the software's defaults: {theirs}." if theirs else ""
    told += f" Stated by no cell nor by the software, assumed: {assumed}." if assumed else ""
    return f"Read as: {'; '.join(words for words, _ in parts)}.{told}"


def _parts(run: PublishedRun) -> Iterator[Part]:
    r = run.run
    yield from _weights(r, run.stated)
    yield from _kernels(r, run.attention_kernel)
    yield from _checkpointing(r)
    driver = "transformers' Trainer" if r.trainer_loop else "no Trainer"
    yield f"driven by {driver}", ("framework", "trainer_loop")
    if run.mean_tokens is None:
        yield f"every sample taken as {r.max_length:,} tokens", ("packed",)
    else:
        yield f"samples of {run.mean_tokens:g} tokens in the mean, not packed", ("mean_tokens",)
    if r.num_gpus > 1:
        yield from _layout(r)
    if run.internode_gbps is not None and r.num_gpus > r.gpus_per_node:
        yield f"{run.internode_gbps:g} Gbit/s between machines", ("internode_gbps",)


def _weights(r: Run, stated: frozenset[str]) -> Iterator[Part]:
    """The method, and in which numbers weights lie and products run."""
    kinds = [name for name, is_so in (("DoRA", r.use_dora), ("rank-stabilized", r.use_rslora)) if is_so]
    yield "method " + " ".join([r.method, *kinds]), ("method",)
    if r.has_adapters:
        yield f"rank {r.lora_r}", ("lora_r",)
        yield f"adapters on {', '.join(r.lora_target_modules)}", ("lora_targets",)
        yield f"adapters in {r.adapter_dtype}", ("adapter_dtype",)
    if r.base_quantization:
        kind = f" {r.bnb_4bit_quant_type}" if r.bnb_4bit_quant_type else ""
        yield f"base in {r.base_quantization}{kind}", ("quant", "quant_method", "bnb_4bit_quant_type", "base_bits")
        if r.bnb_4bit_quant_type:
            yield f"{'with' if r.double_quant else 'no'} double quantization", ("double_quant",)
        if r.quantize_moe_experts:
            yield "stacked experts in 4 bits too", ("quantize_moe_experts",)
    if r.upcast_non_quantized:
        yield "all else in fp32, as PEFT prepares the base", ("upcast_non_quantized",)
    else:
        yield f"{'other ' if r.base_quantization else ''}weights in {r.dtype}", ("dtype",)
    if r.master_dtype or "master_dtype" in stated:
        yield f"trained shards in {r.master_dtype or r.dtype}", ("master_dtype",)
    yield f"precision {r.precision}", ("precision",)
    if r.fp8:
        stored = ", weights stored in FP8" if r.fp8_weights else ""
        yield f"products in FP8 by {r.fp8}{stored}", ("fp8",)


def _kernels(r: Run, attention_kernel: str) -> Iterator[Part]:
    """What runs as which kernel, the loss and the optimizer."""
    kernel = f" ({attention_kernel})" if attention_kernel else ""
    yield f"attention {r.attn_implementation}{kernel}", ("attention_impl",)
    yield "compiled" if r.torch_compile else "not compiled", ("compile", "torch_compile")
    yield f"fused kernels {', '.join(r.fused_kernels) or 'none'}", ("fused_kernels",)
    yield f"loss {r.loss_type}", ("loss_type",)
    if r.keeps_outputs:
        yield "the model's output held through the backward", ("keeps_outputs",)
    if r.token_metrics != "none":
        yield f"{METRICS_SAID[r.token_metrics]} of every token logged", ("token_metrics",)
    yield f"optimizer {r.optim}{' in the backward' if r.optimizer_in_backward else ''}", ("optimizer",)


def _checkpointing(r: Run) -> Iterator[Part]:
    if not r.gradient_checkpointing:
        yield "attention recomputed" if r.recompute_attention else "no checkpointing", ("grad_checkpointing",)
        return
    kinds = [f"one of {r.checkpoint_every} layers"] if r.checkpoint_every > 1 else []
    kinds += [] if r.checkpoint_first is None else [f"the first {r.checkpoint_first} layers"]
    kinds += ["results of products kept"] if r.checkpoint_keeps_ops else []
    told = f" ({', '.join(kinds)})" if kinds else ""
    yield f"checkpointing{told}", ("grad_checkpointing",)
    yield "reentrant" if r.reentrant else "not reentrant", ("reentrant",)
    if r.activation_offloading:
        yield "checkpoints in host memory", ("activation_offloading",)


def _layout(r: Run) -> Iterator[Part]:
    """How several GPUs share the work."""
    version = f" {r.fsdp_version}" if r.sharding in ("fsdp", "fsdp-grad-op", "hsdp") else ""
    groups = f" in groups of {r.dp_shard_size} GPUs" if r.dp_shard_size else ""
    yield f"sharding {r.sharding}{version}{groups}", ("parallelism",)
    chunks = f" in {r.pp_interleave} chunks" if r.pp_interleave > 1 else ""
    named = (
        (r.tp, f"tensor parallel {r.tp}", "tp"),
        (1 + r.sequence_parallel, "sequence parallel", "sequence_parallel"),
        (r.pp, f"pipeline parallel {r.pp}{chunks}", "pp"),
        (r.cp, f"context parallel {r.cp} ({r.cp_kind})", "cp"),
    )
    yield from ((words, (field,)) for degree, words, field in named if degree > 1)
    if r.offload != "none":
        yield f"{'optimizer' if r.offload == 'optimizer' else 'parameters and optimizer'} in host memory", ("offload",)
    yield f"{min(r.gpus_per_node, r.num_gpus)} GPUs a machine", ("gpus_per_node",)
