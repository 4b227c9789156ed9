"""How a job is spread over GPUs: which layouts exist, which exclude each other, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture, Attention
from tunecast.model.joined import JOINED, STACKS
from tunecast.model.litgpt import STACK as LITGPT
from tunecast.model.litgpt import is_litgpt
from tunecast.model.primitives_heavy import WIDEST_FLASH
from tunecast.model.read_numbers import whole_number
from tunecast.model.resolve_shards import take_shards
from tunecast.model.run import BUCKET_ELEMENTS
from tunecast.model.stacks import built_choice, one_of, shardings_of
from tunecast.model.stages import stage_layers
from tunecast.model.step_count import TRAINERS
from tunecast.model.trained import OWN_LOOPS

CP_KINDS = ("ring", "ulysses")
FSDP_BY_VERSION = {"fsdp1": 1, "fsdp2": 2}
"""FSDP with its version, as people call it."""
OFFLOADS = ("none", "optimizer", "all")
FSDP = ("fsdp", "fsdp-grad-op", "hsdp")
"""Shardings that PyTorch's FSDP does."""
ZERO = ("zero1", "zero2", "zero3")
"""Shardings that DeepSpeed does."""
MEGATRON_GPT = "megatron_gpt"
"""Family whose learned positions Megatron adds before it splits tokens."""
MEGATRONS = ("none", "ddp", "zero1")
"""Shardings beside which Megatron splits the layers; beside the others PyTorch or DeepSpeed does."""
FP32_GRADIENTS = (
    "Gradients are counted in the weights' dtype: Megatron-LM's --bf16 keeps them in fp32 "
    "(accumulate_allreduce_grads_in_fp32), 2 more bytes for every weight that a GPU trains; --stack megatron counts "
    "them."
)
"""What is not known of Megatron's memory."""
SEPARATE = 4
"""Maps of an attention block with projections apart."""
GPUS_PER_NODE = 8
"""Of HGX and DGX boards, and of the largest instance of every cloud in the catalog; assumed when nothing is said."""
OFFLOADED_BY = {"optimizer": ZERO, "all": ("zero3", *FSDP)}
"""Shardings whose frameworks can keep that part in host memory (DeepSpeed ``offload_optimizer`` and
``offload_param``, FSDP ``CPUOffloadPolicy``)."""


class Fields(Protocol):
    """Values and origins under construction (see `resolve.py`)."""

    given: dict[str, Any]
    values: dict[str, Any]
    origins: dict[str, str]
    notes: list[str]

    def take(self, name: str, default: Any, default_origin: str) -> Any:
        """Record the user's value of a field, or its default."""

    def put(self, name: str, value: Any, origin: str) -> None:
        """Record a value that follows from others."""


def take_parallel(fields: Fields, architecture: Architecture, defaults: Mapping[str, Any]) -> None:
    """Every field of the layout, checked against the others."""
    for name in ("tp", "pp", "cp", "pp_interleave"):
        fields.values[name] = whole_number(name, fields.take(name, 1, "stack-default"))
    split_tokens = fields.take("sequence_parallel", fields.values["tp"] > 1, "stack-default")
    fields.values["sequence_parallel"] = bool(split_tokens) and fields.values["tp"] > 1
    fields.values["async_tp"] = bool(fields.take("async_tp", False, "stack-default"))
    beside = fields.values["torch_compile"] or fields.values["stack"] in STACKS
    if fields.values["async_tp"] and fields.values["tp"] == 1:
        raise InputError("--async-tp hides the exchanges of split layers, but --tp is 1; add --tp 2 or more.")
    if fields.values["async_tp"] and not (fields.values["sequence_parallel"] and beside):
        raise InputError(
            "--async-tp is what the compiler makes of --tp 2 or more with split tokens, or Megatron's tp_comm_overlap; "
            "add --torch-compile or --stack megatron, and leave --no-sequence-parallel out."
        )
    per_node = whole_number("gpus_per_node", fields.take("gpus_per_node", GPUS_PER_NODE, "assumed"))
    fields.values["gpus_per_node"] = per_node
    if "gpus_per_node" not in fields.given and fields.values["num_gpus"] <= per_node:
        fields.origins["gpus_per_node"] = "stack-default"
    one_of("cp-kind", fields.take("cp_kind", "ring", "stack-default"), CP_KINDS)
    take_offload(fields)
    take_bucket(fields, architecture)
    every = bool(defaults.get("sync_each_micro_batch", False)) and fields.values["pp"] == 1
    fields.values["sync_each_micro_batch"] = bool(fields.take("sync_each_micro_batch", every, "stack-default"))
    fields.values["fsdp_version"] = whole_number("fsdp_version", fields.take("fsdp_version", 2, "stack-default"))
    check_product(fields.values)
    take_sharding(fields)
    check_tensor_parallel(architecture, fields.values, dora=bool(fields.given.get("use_dora")))
    if is_megatrons_in_16_bits(fields.values):
        fields.notes.append(FP32_GRADIENTS)
    check_pipeline(architecture, fields.values)
    note_stages(fields, architecture)
    note_software(fields)
    check_context_parallel(architecture, fields.values)
    check_offload(fields.values)


def take_bucket(fields: Fields, architecture: Architecture) -> None:
    """Elements of ZeRO's bucket; ``auto`` is the square of the hidden size, as transformers fills it in
    (``integrations/deepspeed.py``, ``trainer_config_finalize``)."""
    name = "reduce_bucket_size"
    given = fields.take(name, BUCKET_ELEMENTS, "stack-default")
    if str(given).strip().lower() == "auto":
        fields.values[name] = architecture.hidden_size**2
        return
    try:
        elements = float(given)
    except (TypeError, ValueError):
        elements = 0.0
    if elements < 1 or not elements.is_integer():
        raise InputError(
            f"--reduce-bucket-size is {given!r}, but it counts elements; type a whole number (500000000) or auto."
        )
    fields.values[name] = int(elements)


def data_gpus(values: Mapping[str, Any]) -> int:
    """GPUs over which data parallelism and its sharding run: replicas times those that split a sequence."""
    return int(values["num_gpus"]) // int(values["tp"] * values["pp"])


def check_product(values: Mapping[str, Any]) -> None:
    """num_gpus is a multiple of tp x pp x cp."""
    inner = values["tp"] * values["pp"] * values["cp"]
    if values["num_gpus"] % inner:
        raise InputError(
            f"--tp {values['tp']} x --pp {values['pp']} x --cp {values['cp']} takes {inner} GPUs per copy, "
            f"but --num-gpus is {values['num_gpus']}; use a multiple of {inner}."
        )


def take_sharding(fields: Fields) -> None:
    """How data parallelism spreads the model; one GPU is never sharded, several copies are never left alone."""
    values = fields.values
    copies, own = data_gpus(values), shardings_of(values["stack"], staged=values["pp"] > 1)
    spread = ("fsdp",) if fields.given.get("dp_shard_size") else own or ("ddp",)
    sharding = fields.take("sharding", "none" if copies == 1 else spread[0], "assumed")
    if sharding in FSDP_BY_VERSION:
        sharding, values["fsdp_version"] = "fsdp", FSDP_BY_VERSION[sharding]
        fields.put("sharding", sharding, fields.origins["sharding"])
    built_choice("sharding", "sharding", sharding)
    if copies == 1 and sharding != "none" and fields.origins["sharding"] == "file" and values["num_gpus"] == 1:
        offloads = fields.given.get("offload") not in (None, "none")
        raise InputError(
            f"The training file asks for {sharding} (deepspeed, fsdp or accelerate), which needs more than one GPU, "
            "and nothing says how many there are; add for example --num-gpus 8, or --num-gpus 1 for "
            f"{'its offload alone' if offloads else 'none of it'}."
        )
    if copies == 1 and sharding != "none":
        more = "add --num-gpus 2" if values["num_gpus"] == 1 else "lower --tp or --pp, or leave --sharding out"
        raise InputError(
            f"--sharding {sharding} needs more than one GPU for data parallelism, but there is 1 "
            f"(--num-gpus is {values['num_gpus']}); {more}."
        )
    if copies > 1 and sharding == "none":
        raise InputError(
            f"--num-gpus {values['num_gpus']} needs a sharding; use --sharding ddp, zero1, zero2, zero3 or fsdp."
        )
    if sharding == "zero3" and values.get("quant_method") not in (None, "bnb-4bit"):
        raise NotSupportedError(
            f"DeepSpeed ZeRO-3 of a {values['quant_method']} base is not built; use --sharding zero2 or ddp, or "
            "--quant-method bnb-4bit."
        )
    if values["fsdp_version"] not in (1, 2):
        raise InputError(f"--fsdp-version is {values['fsdp_version']}, but FSDP has versions 1 and 2; type 1 or 2.")
    if is_typed(fields, "fsdp_version") and copies > 1 and sharding not in FSDP:
        fields.notes.append(f"--fsdp-version changes nothing: --sharding is {sharding}.")
    take_shards(fields, copies)
    sharding = values["sharding"]
    beside = bool(fields.take("overlap_comm", False, "stack-default"))
    values["overlap_comm"] = beside and sharding in ("zero1", "zero2")
    if beside and not values["overlap_comm"] and is_typed(fields, "overlap_comm"):
        fields.notes.append("--overlap-comm says what ZeRO-1 and ZeRO-2 do; without them it changes nothing.")
    fields.take("loads_on_gpu", None, "stack-default")
    if sharding not in FSDP and fields.origins.get("loads_on_gpu") == "file":
        values["loads_on_gpu"] = None  # a training file's FSDP, which another sharding replaced
    if copies == 1 and is_typed(fields, "loads_on_gpu"):
        fields.notes.append("--loads-on-gpu is of a base that GPUs share; with one copy it changes nothing.")
    if sharding not in ZERO and is_typed(fields, "reduce_bucket_size"):
        fields.notes.append("--reduce-bucket-size says what DeepSpeed's ZeRO does; without it it changes nothing.")


def is_typed(fields: Fields, name: str) -> bool:
    """Whether the user typed a field, which no training file says."""
    return fields.given.get(name) is not None and fields.origins.get(name) != "file"


def is_megatrons_in_16_bits(values: Mapping[str, Any]) -> bool:
    """Whether Megatron trains whole weights in 16 bits; torchtune and LitGPT split layers by PyTorch's own means."""
    split = values["tp"] > 1 and values["sharding"] in MEGATRONS and values["stack"] not in (*OWN_LOOPS, *STACKS)
    return split and values["method"] == "full" and values["dtype"] != "fp32"


def length_step(options: Mapping[str, Any]) -> int:
    """Tokens that the lengths of a run with these options are multiples of, so that their splits deal them out evenly:
    what `check_tensor_parallel` and `check_context_parallel` ask for."""
    tp, cp = (whole_number(name, options.get(name) or 1) for name in ("tp", "cp"))
    split = options.get("sequence_parallel") in (None, True)
    return math.lcm(tp * cp if tp > 1 and split else 1, 2 * cp if cp > 1 else 1)


def check_tensor_parallel(architecture: Architecture, values: Mapping[str, Any], *, dora: bool) -> None:
    """Heads and widths divide by tp, and a tensor-parallel group stays inside one machine."""
    tp = values["tp"]
    if tp == 1:
        return
    if tp > values["gpus_per_node"] or values["gpus_per_node"] % tp:
        raise InputError(
            f"--tp {tp} must divide the {values['gpus_per_node']} GPUs of a machine (--gpus-per-node), since it "
            "exchanges every layer's activations; use for example --tp 2 and more --pp or --sharding fsdp."
        )
    if values["bnb_4bit_quant_type"] is not None or values.get("quant_method") is not None:
        raise NotSupportedError(
            "Tensor parallelism of a quantized base is not built; use --tp 1 with --sharding fsdp, or --method lora."
        )
    if dora:
        raise NotSupportedError("Tensor parallelism of DoRA, with norms over whole weights, is not built; use --tp 1.")
    if values["sequence_parallel"] and values["max_length"] % (tp * values["cp"]):
        raise InputError(
            f"--tp {tp} splits the tokens of norms, but --max-length {values['max_length']} does not divide by it; "
            "round it, or add --no-sequence-parallel."
        )
    if values["loss_type"] != "nll":
        raise NotSupportedError(
            f"--loss-type {values['loss_type']} over a vocabulary split by --tp is not built; use --loss-type nll."
        )
    check_no_experts(architecture)
    megatron = architecture.model_type == MEGATRON_GPT
    for group in architecture.groups:
        attention, mlp = group.layer.attention, group.layer.mlp
        split = len(attention.linears) == SEPARATE or attention.qkv_split in ("by-head", JOINED)
        plain = attention.kind == "heads" and split and mlp.kind == "dense"
        if not plain or group.layer.parallel != "none" or (architecture.position_rows and not megatron):
            raise NotSupportedError(
                "Tensor parallelism is built for plain heads with projections apart or joined head by head; "
                f"{architecture.name} has others: use --tp 1 with --sharding fsdp."
            )
        if attention.qk_norm and not attention.qk_norm_by_head:
            raise NotSupportedError(
                f"Tensor parallelism of norms over all queries and keys, which {architecture.name} has, is not built; "
                "use --tp 1 with --sharding fsdp."
            )
        if mlp.gated and len(mlp.linears) < SEPARATE - 1 and attention.qkv_split != JOINED:
            raise NotSupportedError(
                f"Tensor parallelism of gate and up in one map, which {architecture.name} has, is not built; use "
                "--tp 1 with --sharding fsdp."
            )
        kv_heads = attention.num_kv_heads
        uneven = kv_heads % tp and tp % kv_heads
        if attention.num_heads % tp or mlp.intermediate_size % tp or uneven:
            raise InputError(
                f"--tp {tp} does not divide the {attention.num_heads} heads, {attention.num_kv_heads} key-value heads "
                f"and {mlp.intermediate_size} wide feed-forward of {architecture.name}; use a common divisor."
            )


def check_no_experts(architecture: Architecture) -> None:
    """Refuse by name to split experts over tensor-parallel GPUs, and the maps that LitGPT joins."""
    if is_litgpt(architecture):
        raise NotSupportedError(
            f"Tensor parallelism of --stack {LITGPT} is not built; use --tp 1 with --sharding fsdp."
        )
    if any(group.layer.mlp.experts is not None for group in architecture.groups):
        raise NotSupportedError(
            f"Tensor parallelism of experts, as {architecture.name} has, is not built; use --tp 1 with --sharding fsdp."
        )


def check_pipeline(architecture: Architecture, values: Mapping[str, Any]) -> None:
    """Every stage has whole layers, equally many but for the first and the last (`stages.py`)."""
    pp, chunks = values["pp"], values["pp_interleave"]
    if chunks > 1 and pp == 1:
        raise InputError(f"--pp-interleave {chunks} needs --pp above 1; add --pp 4 or leave it out.")
    if pp == 1:
        return
    if pp > architecture.num_layers:
        raise InputError(
            f"--pp {pp} is more stages than the {architecture.num_layers} layers of {architecture.name}; use at most "
            f"--pp {architecture.num_layers}."
        )
    first, middle, last = stage_layers(architecture.num_layers, pp)
    if min(first, last) < 1 or middle % chunks:
        fitting = [n for n in range(1, middle + 1) if middle % n == 0]
        told = (
            "use fewer stages" if min(first, last) < 1 else f"--pp-interleave can be {' or '.join(map(str, fitting))}"
        )
        raise InputError(
            f"--pp {pp} x --pp-interleave {chunks} cannot deal out the {architecture.num_layers} layers of "
            f"{architecture.name}: stages between the first and the last would have {middle}; {told}."
        )
    if chunks > 1 and values["gradient_accumulation_steps"] < pp:
        raise InputError(
            f"--pp-interleave {chunks} deals micro-batches out to the {pp} stages in turns, but "
            f"--gradient-accumulation-steps is {values['gradient_accumulation_steps']}; use at least {pp}, or leave "
            "--pp-interleave out."
        )
    left_over = values["gradient_accumulation_steps"] % pp
    if chunks > 1 and left_over and values["sharding"] not in FSDP:
        raise InputError(
            f"--pp-interleave {chunks} deals micro-batches out to the {pp} stages in turns, but "
            f"--gradient-accumulation-steps {values['gradient_accumulation_steps']} leaves {left_over} of them over, "
            f"which Megatron refuses; use a multiple of {pp}, or leave --pp-interleave out."
        )
    if values["sharding"] in ("zero2", "zero3"):
        raise InputError(
            f"--sharding {values['sharding']} reduces gradients at every micro-batch, which DeepSpeed refuses with "
            "--pp; use --sharding zero1, ddp or fsdp."
        )


def note_software(fields: Fields) -> None:
    """Say which layouts are no part of the software that runs them here.

    Source: deepspeed.ai/tutorials/autotp-training (ZeRO stages 0 to 2 beside its tensor parallelism).
    """
    if fields.values["tp"] > 1 and fields.values["sharding"] == "zero3":
        fields.notes.append(
            "DeepSpeed's own tensor parallelism (AutoTP) goes with ZeRO-1 and ZeRO-2, not with ZeRO-3: --sharding "
            "zero2, or fsdp."
        )
    if fields.values["pp"] > 1 and fields.values["sharding"] in FSDP and fields.values["stack"] in TRAINERS:
        fields.notes.append(
            f"Stages beside FSDP are torchtitan's, and no part of the Trainer of --stack {fields.values['stack']}, "
            "whose layers are counted in them: --stack torchtitan counts its own."
        )


def note_stages(fields: Fields, architecture: Architecture) -> None:
    """Say how layers are dealt out where stages differ, and of which stage the figures are."""
    pp = fields.values["pp"]
    if architecture.num_layers % pp:
        first, middle, last = stage_layers(architecture.num_layers, pp)
        between = f", {middle} in each between" if pp > 2 else ""
        fields.notes.append(
            f"{architecture.num_layers} layers over {pp} stages: {first} in the first{between}, {last} in the last. "
            "Time is that of the stage with most work, memory that of the stage that needs most."
        )


def check_context_parallel(architecture: Architecture, values: Mapping[str, Any]) -> None:
    """Sequences divide evenly, and ulysses has a head for every GPU."""
    cp, length = values["cp"], values["max_length"]
    if cp == 1:
        return
    if length % (2 * cp):
        gpus = values["num_gpus"] // (values["tp"] * values["pp"])
        fitting = [degree for degree in range(cp - 1, 1, -1) if length % (2 * degree) == 0 and gpus % degree == 0]
        lengths = max(length // (2 * cp), 1) * 2 * cp
        raise InputError(
            f"--cp {cp} deals out 2 x {cp} equal parts of a sequence, but --max-length is {length}; type --max-length "
            f"{lengths}{f', or --cp {fitting[0]}' if fitting else ''}."
        )
    if values["attn_implementation"] == "eager":
        raise NotSupportedError(why_not_split(architecture))
    widest = max(group.layer.attention.head_dim for group in architecture.groups)
    if widest > WIDEST_FLASH:
        raise NotSupportedError(
            f"Context parallelism of heads of {widest} values ({architecture.name}) is not built: flash kernels take "
            f"up to {WIDEST_FLASH}; use --cp 1."
        )
    masked = values["attn_implementation"] == "sdpa" and "attention" not in values.get("fused_kernels", ())
    windows = [group.layer.attention.window for group in architecture.groups]
    if masked and any(window is not None and window < length for window in windows):
        raise NotSupportedError(
            f"Context parallelism of the sliding windows of {architecture.name} under sdpa is not built: it takes no "
            "mask, without which they are not kept; use --attn-implementation flash_attention_2, or --cp 1."
        )
    if values["cp_kind"] == "ulysses":
        for group in architecture.groups:
            check_ulysses(architecture, group.layer.attention, values)


def why_not_split(architecture: Architecture) -> str:
    """Why sequences of eager attention are not split, and which fused kernel the family has (`attention_defaults`)."""
    blocks = [group.layer.attention for group in architecture.groups]
    if any(block.sinks for block in blocks):
        return (
            f"Context parallelism of {architecture.model_type} is not built: no fused kernel of attention with sinks "
            "has formulas; use --cp 1."
        )
    kernel = "flash_attention_2" if any(block.softcap for block in blocks) else "sdpa"
    return f"Context parallelism needs a fused attention kernel; use --attn-implementation {kernel}."


def check_ulysses(architecture: Architecture, block: Attention, values: Mapping[str, Any]) -> None:
    """Every GPU gets whole heads of queries, and whole ones of keys and values or a repeated one."""
    tp, cp, heads = values["tp"], values["cp"], f"{block.num_heads} heads and {block.num_kv_heads} key-value heads"
    own = max(1, block.num_kv_heads // tp)
    if block.num_heads % (tp * cp) or (own % cp and cp % own):
        raise InputError(
            f"--cp-kind ulysses deals out heads, but {architecture.name} has {heads} for --tp {tp} x --cp {cp}; use "
            "--cp-kind ring."
        )
    if own % cp and not values["gradient_checkpointing"]:
        raise NotSupportedError(
            f"--cp-kind ulysses repeats the {own} key-value heads for --cp {cp}, which is not built without "
            "checkpoints; use --gradient-checkpointing or --cp-kind ring."
        )


def take_offload(fields: Fields) -> None:
    """A word, or a switch of FSDP, which moves everything."""
    given = fields.take("offload", "none", "stack-default")
    if given == "nvme":
        raise NotSupportedError("--offload nvme is not built; use --offload optimizer or all, which go to host memory.")
    word = "all" if given is True else "none" if given is False else str(given)
    fields.values["offload"] = one_of("offload", word, OFFLOADS)


def check_offload(values: Mapping[str, Any]) -> None:
    """Only what a framework does: optimizer state with ZeRO, everything with ZeRO-3 or FSDP."""
    offload, sharding = values["offload"], values["sharding"]
    if offload == "none":
        return
    alone = values["num_gpus"] == 1
    if sharding not in OFFLOADED_BY[offload] and not alone:
        raise InputError(
            f"--offload {offload} was asked for with --sharding {sharding}, which no framework does; use --sharding "
            f"{' or '.join(OFFLOADED_BY[offload])}."
        )
    if values["pp"] > 1:
        raise NotSupportedError("Offloading together with pipeline stages is not built; use --pp 1.")
