"""Options that several commands share, defined once.

A command asks for a whole group by naming one parameter after it::

    @with_groups(run_options=RUN)
    def measure(model: Model, run_options: dict[str, Any]) -> None: ...

typer then sees every option of the group, and the function gets a dict of what the user gave, under
the option's name with underscores. What was not given is absent, so that resolving (`model.resolve`)
can tell the user's choice from a default.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tunecast.cli.completion import NAMES, Completion, choices

Group = dict[str, Any]
"""Parameter name to annotated type."""

THE_RUN = "The run"
THE_AMOUNT = "The amount of data"
THE_MACHINE = "The machine"


def option(
    kind: Any,
    help_text: str,
    *names: str,
    panel: str | None,
    metavar: str | None = None,
    completion: Completion | None = None,
) -> Any:
    """An optional option; None means the user did not give it. A shell completes the choices that `metavar` lists."""
    how = typer.Option(
        *names,
        help=help_text,
        metavar=metavar,
        rich_help_panel=panel,
        show_default=False,
        autocompletion=completion or choices(metavar),
    )
    return Annotated[kind | None, how]


def num_gpus(text: str) -> int | str:
    """The option's parser; the model layer is imported when it is used."""
    from tunecast.catalogs.errors import InputError
    from tunecast.model.num_gpus import parse_num_gpus

    try:
        return parse_num_gpus(text)
    except InputError as error:
        raise typer.BadParameter(f"{text!r} is neither a whole number above 0 nor auto") from error


_run = functools.partial(option, panel=THE_RUN)
_amount = functools.partial(option, panel=THE_AMOUNT)
_machine = functools.partial(option, panel=THE_MACHINE)

RUN: Group = {
    "method": _run(str, "What is trained.", metavar="lora|qlora|full"),
    "lora_r": _run(int, "Adapter rank.", metavar="N"),
    "lora_target_modules": _run(str, "Where the adapters sit.", metavar="all-linear|a,b,c|REGEX"),
    "lora_dropout": _run(float, "Adapter dropout.", metavar="X"),
    "use_dora": _run(bool, "DoRA: a trained magnitude per output.", "--use-dora/--no-use-dora"),
    "use_rslora": _run(bool, "Rank-stabilised scaling; costs nothing.", "--use-rslora/--no-use-rslora"),
    "lora_bias": _run(bool, "A trained bias on each lora_B.", "--lora-bias/--no-lora-bias"),
    "modules_to_save": _run(str, "Trained whole beside the adapters.", metavar="embed_tokens,lm_head"),
    "modules_to_save_dtype": _run(str, "Storage of those; else the base's.", metavar="fp32|bf16|fp16"),
    "adapter_dtype": _run(str, "Storage of the adapters.", metavar="fp32|bf16|fp16"),
    "max_length": _run(int, "Tokens per sample after padding or packing.", metavar="N"),
    "attention_length": _run(
        int, "Tokens that attention spans in a packed row whose documents it keeps apart.", metavar="N"
    ),
    "padding_mask": _run(
        bool, "Samples of unlike lengths are padded under a mask.", "--padding-mask/--no-padding-mask"
    ),
    "pad_to_multiple_of": _run(int, "Rows of one sample are filled to a multiple of so many tokens.", metavar="N"),
    "per_device_train_batch_size": _run(int, "Samples per GPU and forward pass.", metavar="N"),
    "gradient_accumulation_steps": _run(int, "Forward passes per optimizer step.", metavar="N"),
    "gradient_checkpointing": _run(
        bool, "Recompute activations in the backward pass.", "--gradient-checkpointing/--no-gradient-checkpointing"
    ),
    "checkpoint_every": _run(int, "Checkpoint one layer of each so many.", metavar="N"),
    "checkpoint_first": _run(int, "Checkpoint the first layers alone (Megatron's block recomputation).", metavar="N"),
    "checkpoint_keeps_ops": _run(
        bool,
        "Checkpoints keep attention's and every other product's results (torchtitan's selective op).",
        "--checkpoint-keeps-ops/--no-checkpoint-keeps-ops",
    ),
    "recompute_attention": _run(
        bool,
        "Recompute attention alone in the backward pass (Megatron-LM's selective recomputation).",
        "--recompute-attention/--no-recompute-attention",
    ),
    "activation_offloading": _run(
        bool, "Keep checkpoints in host memory.", "--activation-offloading/--no-activation-offloading"
    ),
    "reentrant": _run(bool, "The reentrant kind of checkpointing.", "--reentrant/--no-reentrant"),
    "optim": _run(str, "Optimizer, by its Transformers name.", metavar="NAME", completion=NAMES["optim"]),
    "optimizer_in_backward": _run(
        bool, "Update each tensor as its gradient comes.", "--optimizer-in-backward/--no-optimizer-in-backward"
    ),
    "attn_implementation": _run(
        str, "Attention, by its Transformers name.", metavar="NAME", completion=NAMES["attn_implementation"]
    ),
    "loss_type": _run(str, "Loss path; nll holds the full logits.", metavar="NAME", completion=NAMES["loss_type"]),
    "hf_code": _run(str, "Age of transformers and PEFT.", metavar="5|4.49|4.46|4.45"),
    "fused_kernels": _run(str, "Parts that run as one kernel each.", metavar="none|rms_norm,rope,..."),
    "fp8_weights": _run(
        bool, "Weights that are multiplied in 8 bits are stored so, too.", "--fp8-weights/--no-fp8-weights"
    ),
    "fp8": _run(str, "Layers multiply in 8-bit floats.", metavar="none|te|torchao|megatron|..."),
    "keeps_outputs": _run(
        bool, "The loop holds the model's output, logits too, in the backward.", "--keeps-outputs/--no-keeps-outputs"
    ),
    "token_metrics": _run(
        str, "What TRL's trainer logs of every token (--loss-type nll).", metavar="none|accuracy|entropy"
    ),
    "trainer_loop": _run(bool, "transformers' Trainer drives the steps.", "--trainer-loop/--no-trainer-loop"),
    "dtype": _run(str, "Storage of the unquantized base weights.", metavar="bf16|fp16|fp32"),
    "reduce_dtype": _run(str, "What FSDP reduces 16-bit gradients in (torchtitan: fp32).", metavar="none|fp32"),
    "master_dtype": _run(str, "What FSDP keeps of a fully trained model.", metavar="none|fp32"),
    "precision": _run(str, "Arithmetic.", metavar="bf16-autocast|fp16-autocast|bf16|fp16|fp32"),
    "quant_method": _run(str, "Storage of a quantized base (qlora).", metavar="bnb-4bit|bnb-8bit|gptq-4bit|gptq-8bit"),
    "gptq_kernel": _run(str, "What multiplies with a GPTQ base.", metavar="triton|torch"),
    "gptq_group_size": _run(int, "Weights that share a scale; -1 for all of an output.", metavar="N"),
    "bnb_4bit_quant_type": _run(str, "4-bit storage of the base (qlora).", metavar="nf4|fp4"),
    "bnb_4bit_compute_dtype": _run(str, "What 4-bit weights become to be multiplied.", metavar="bf16|fp16|fp32"),
    "double_quant": _run(bool, "Quantize the quantization constants too.", "--double-quant/--no-double-quant"),
    "quantize_moe_experts": _run(
        bool,
        "Stacked experts in 4 bits too (axolotl's quantize_moe_experts).",
        "--quantize-moe-experts/--no-quantize-moe-experts",
    ),
    "upcast_non_quantized": _run(
        bool,
        "Everything but the 4-bit weights in fp32, as PEFT prepares it (qlora).",
        "--upcast-non-quantized/--no-upcast-non-quantized",
    ),
    "torch_compile": _run(bool, "Layers and loss are compiled.", "--torch-compile/--no-torch-compile"),
    "compile_loss": _run(bool, "With --torch-compile: the loss too.", "--compile-loss/--no-compile-loss"),
    "stack": _run(str, "Software stack whose defaults apply.", metavar="NAME", completion=NAMES["stack"]),
    "stack_version": _run(
        str, "Version of the stack, or of its packages, whose defaults apply.", metavar="VERSION|PACKAGE=VERSION,..."
    ),
    "allow_long_context": Annotated[
        bool,
        typer.Option("--allow-long-context", help="Allow a length beyond the model's.", rich_help_panel=THE_RUN),
    ],
}

PARALLEL: Group = {
    "num_gpus": Annotated[
        str | None,
        typer.Option(
            parser=num_gpus,
            help="GPUs of the whole job.",
            metavar="N|auto",
            rich_help_panel=THE_MACHINE,
            autocompletion=choices("N|auto"),
        ),
    ],
    "sharding": _machine(str, "How the job is spread.", metavar="none|ddp|zero1|zero2|zero3|fsdp|fsdp-grad-op|hsdp"),
    "dp_shard_size": _machine(int, "FSDP shards over N GPUs and copies that (hsdp).", metavar="N"),
    "fsdp_version": _machine(
        int, "FSDP's: 1 has flat parameters (FullyShardedDataParallel), 2 is fully_shard.", metavar="1|2"
    ),
    "tp": _machine(int, "Tensor parallel: GPUs that split every matrix.", metavar="N"),
    "pp": _machine(int, "Pipeline parallel: stages.", metavar="N"),
    "pp_interleave": _machine(int, "Chunks of layers per pipeline stage.", metavar="N"),
    "cp": _machine(int, "Context parallel: GPUs that split every sequence.", metavar="N"),
    "cp_kind": _machine(str, "How they exchange it.", metavar="ring|ulysses"),
    "sequence_parallel": _machine(
        bool,
        "With --tp, tokens of norms and residuals are split too (default with --tp).",
        "--sequence-parallel/--no-sequence-parallel",
    ),
    "async_tp": _machine(bool, "Tensor-parallel exchanges beside the products.", "--async-tp/--no-async-tp"),
    "offload": _machine(str, "What lives in host memory.", metavar="none|optimizer|all"),
    "gpus_per_node": _machine(int, "GPUs of one machine.", metavar="N"),
    "internode_gbps": _machine(float, "Network of one machine, Gbit/s.", metavar="X"),
    "host_update_gb_per_s": _machine(
        float, "Host memory that the offloaded update moves, GB/s of one machine.", metavar="X"
    ),
    "nvlink": _machine(bool, "Cards are joined by NVLink bridges (default: not, over PCIe).", "--nvlink/--no-nvlink"),
    "p2p": _machine(bool, "Cards read each other's memory over PCIe (default: not GeForce).", "--p2p/--no-p2p"),
    "serial_fraction": _machine(float, "Adds Amdahl's classic estimate for this serial fraction.", metavar="X"),
    "overlap_comm": _machine(
        bool,
        "ZeRO-1 and -2 reduce gradients beside the backward (DeepSpeed's default: not).",
        "--overlap-comm/--no-overlap-comm",
    ),
    "reduce_bucket_size": _machine(
        str, "Elements of ZeRO's bucket (DeepSpeed's default: 500000000); auto: hidden size squared.", metavar="N|auto"
    ),
    "loads_on_gpu": _machine(
        bool,
        "Each GPU holds the whole base while it loads, before GPUs share it (default: as the stack does).",
        "--loads-on-gpu/--no-loads-on-gpu",
    ),
    "sync_each_micro_batch": _machine(
        bool,
        "Gradients are reduced after every micro-batch, without no_sync.",
        "--sync-each-micro-batch/--no-sync-each-micro-batch",
    ),
}

MEASURED: Group = {
    "num_gpus": _machine(int, "1: of a file's job on several GPUs, what one GPU alone would do.", metavar="1"),
}

AMOUNT: Group = {
    "tokens": _amount(str, "Tokens of one epoch, for example 10M or 1.5B.", metavar="N"),
    "num_samples": _amount(str, "Samples of one epoch.", metavar="N"),
    "dataset": _amount(
        str,
        "Training data (.jsonl, .json, .csv, .txt, .parquet, .arrow, .feather, or a folder of shards): its samples are "
        "counted.",
        metavar="FILE",
    ),
    "mean_tokens": _amount(float, "Mean tokens per sample.", metavar="N"),
    "packing": _amount(
        bool, "Samples fill rows of --max-length, or are padded rows of their own.", "--packing/--no-packing"
    ),
    "group_by_length": _amount(
        bool, "Samples of like length make a micro-batch.", "--group-by-length/--no-group-by-length"
    ),
    "padding_free": _amount(
        bool,
        "Attention keeps the documents of a packed row apart (sample_packing, neat_packing); with --no-packing, "
        "samples lie end to end without padding (padding_free, batch_flattening).",
        "--padding-free/--no-padding-free",
    ),
    "tokenizer": _amount(str, "A tokenizer.json that counts --dataset.", metavar="FILE"),
    "streaming": _amount(bool, "Rows are tokenized while training.", "--streaming/--no-streaming"),
    "dataloader_num_workers": _amount(int, "Processes that do so beside training.", metavar="N"),
    "num_train_epochs": _amount(float, "Epochs.", metavar="N"),
    "max_steps": _amount(int, "Optimizer steps, instead of an amount of data.", metavar="N"),
}

FILE: Group = {
    "config_format": option(
        str,
        "Format of a training file, where its fields do not say.",
        panel=THE_RUN,
        metavar="NAME",
        completion=NAMES["config_format"],
    ),
    "accelerate": option(str, "accelerate's file beside a training file.", panel=THE_RUN, metavar="FILE"),
    "deepspeed": option(str, "DeepSpeed's file beside a training file.", panel=THE_RUN, metavar="FILE"),
}

Model = Annotated[
    str,
    typer.Argument(
        help="Hub id of a catalog model, a local config.json, or a training file (.yaml of axolotl, TRL, ...).",
        metavar="MODEL",
        show_default=False,
        autocompletion=NAMES["model"],
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="What to measure. Default: cuda:0 if there is a GPU, else cpu.",
        metavar="cuda:N|cpu|mock:ID",
        show_default=False,
    ),
]
Prices = Annotated[
    list[Path] | None,
    typer.Option(
        help="Your own prices, which count first; repeatable. Columns as in catalog prices --json.",
        metavar="FILE.csv",
        rich_help_panel=THE_MACHINE,
    ),
]


def cards(help_text: str, metavar: str) -> Group:
    """Which cards, their records and their prices."""
    return {
        "gpu": _machine(list[str], help_text, metavar=metavar, completion=NAMES["gpu"]),
        "record": _machine(
            list[Path],
            "Calibration record of a device, or a folder: the newest of each device. Repeatable.",
            metavar="PATH",
        ),
        "usd_per_gpu_hour": _machine(float, "Price to use instead of the catalog's.", metavar="X"),
        "prices": Prices,
    }


def of_cards(given: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The options of `cards` as the Python functions name them."""
    named = {"records" if name == "record" else name: value for name, value in given.items()}
    return {**defaults, **named}


Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    is_flag = annotation.__origin__ is bool
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=False if is_flag else None, annotation=annotation
    )


def _was_given(annotation: Any, value: Any) -> bool:
    is_flag = annotation.__origin__ is bool
    return value is not None and not (is_flag and value is False)


def _given(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """Take a group's values out of `values`, keeping what the user gave."""
    taken = {name: values.pop(name) for name in group}
    return {name: value for name, value in taken.items() if _was_given(group[name], value)}


def with_groups(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each named parameter of a command by the options of its group."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kept = [p.replace(kind=p.KEYWORD_ONLY) for name, p in own.parameters.items() if name not in groups]
        added = [_parameter(name, annotation) for group in groups.values() for name, annotation in group.items()]
        positional = [p for p in kept if p.default is p.empty]
        optional = [p for p in kept if p.default is not p.empty]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            chosen = {parameter: _given(group, values) for parameter, group in groups.items()}
            command(**values, **chosen)

        parameters = [*positional, *added, *optional]
        wrapper.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate
