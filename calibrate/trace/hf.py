"""The real transformers + PEFT + bitsandbytes stack: config, model, adapters, optimizer, one step.

The oracle runs this code on fake tensors and the devices run it on real ones, so that the traced
step is the measured step. It is the ``hf-peft`` stack: what Hugging Face's Trainer does, without
its data loading and logging.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from tunecast.calibrate.trace import experts_4bit, int8, losses, offload
from tunecast.calibrate.trace.optimizers import make_optimizer as make_optimizer
from tunecast.calibrate.trace.refusals import reason_of, refuse_family, refuse_unreal
from tunecast.calibrate.trace.seeing import language_model
from tunecast.catalogs.errors import InputError, NotSupportedError
from tunecast.model.architecture import Architecture, Layer
from tunecast.model.families import FAMILIES
from tunecast.model.loss_chunks import KEPT_CHUNKS
from tunecast.model.resolve_experts import on_parameters
from tunecast.model.run import Run
from tunecast.model.shapes import FUSED_MAPS, FUSED_PARAMETER

if TYPE_CHECKING:
    import torch

MAX_GRAD_NORM = 1.0
"""``TrainingArguments.max_grad_norm`` default (transformers 5)."""
LORA_ALPHA = 16
"""Any value: the scaling is one multiplication whatever it is."""
FIRST_SCALE = 1024.0
"""Of losses in fp16. PyTorch's 65,536 overflows on random weights, so that the first steps are skipped until it has
halved; a scale costs the same whatever it is."""
UNBOUNDED_POSITION = 1 << 17
"""Positions declared to transformers when a config gives no limit; it sizes nothing."""

LISTS_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers")
"""Config fields with an entry per layer (transformers 5 configuration classes)."""

NOT_BY_LAYER = ("hidden_size_per_layer_input", "num_kv_shared_layers")
"""Config fields of models of which a few layers do not tell the rest (Gemma 3n, Gemma 4 E2B and E4B)."""

Observer = Callable[[str], None]


def torch_dtype(name: str) -> torch.dtype:
    """Our dtype names as torch's."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def hf_config(architecture: Architecture, num_layers: int | None = None) -> Any:
    """The transformers config of an architecture, optionally at another depth."""
    import transformers

    if architecture.settings or architecture.config:
        return config_of_settings(architecture.settings or architecture.config, num_layers)
    family = FAMILIES.get(architecture.model_type)
    if family is None or not family.in_transformers:
        raise NotSupportedError(
            f"Running the real code of {architecture.name} ({architecture.model_type}) was asked for, but transformers "
            "does not have it; leave --exact out, or name another model."
        )
    layers = _layers(architecture)[: num_layers or architecture.num_layers]
    layer = layers[0]
    attention = layer.attention
    common: dict[str, Any] = {
        "hidden_size": architecture.hidden_size,
        "intermediate_size": layer.mlp.intermediate_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "vocab_size": architecture.vocab_size,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "max_position_embeddings": architecture.max_position or UNBOUNDED_POSITION,
        "attention_dropout": architecture.attention_dropout,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    windows = [layer.attention.window for layer in layers]
    special = {
        "head_dim": attention.head_dim,
        "attention_bias": attention.linears[0].bias,
        "mlp_bias": layer.mlp.linears[0].bias,
        "use_sliding_window": any(windows),
        "sliding_window": max((window for window in windows if window), default=None),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "no_rope_layers": [int(layer.attention.rotary) for layer in layers],
    }
    fields = {name: special[name] for name in family.config_fields}
    return transformers.AutoConfig.for_model(architecture.model_type, **common, **fields)


def config_of_settings(settings: str, num_layers: int | None = None) -> Any:
    """The transformers config of a ``config.json`` given as text, optionally cut to its first layers."""
    import transformers

    fields = {**json.loads(settings), "use_cache": False, "bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **{**fields, "pad_token_id": None})
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        for name, kinds in _kinds_of_layers(config).items():
            with contextlib.suppress(AttributeError):  # worked out by the config itself (RecurrentGemma)
                setattr(config, name, kinds[:num_layers])
    return config


def kinds_of_layers(architecture: Architecture, run: Run) -> list[Hashable]:
    """What tells each layer from others: its shape, its entry in every list that the config has, its checkpoint; its
    place where tensors outside the layers are as wide as there are layers, or the last ones reuse what others made."""
    kinds: list[tuple[Hashable, ...]] = [(layer,) for layer in _layers(architecture)]
    if architecture.settings or architecture.layer_inputs is not None:
        config = config_of_settings(architecture.settings or architecture.config)
        lists = _kinds_of_layers(config).values()
        kinds = [(*kind, *(entries[index] for entries in lists)) for index, kind in enumerate(kinds)]
        if any(getattr(config.get_text_config(), field, 0) for field in NOT_BY_LAYER):
            kinds = [(*kind, index) for index, kind in enumerate(kinds)]
    return [(*kind, run.checkpoints_layer(index)) for index, kind in enumerate(kinds)]


def _kinds_of_layers(config: Any) -> dict[str, list[Any]]:
    """The lists of a config that say something about each layer."""
    found = {name: getattr(config, name, None) for name in LISTS_PER_LAYER}
    return {name: kinds for name, kinds in found.items() if isinstance(kinds, list) and kinds}


def decoder_layers(model: Any) -> Any:
    """The list of decoder layers, whatever the family calls it; NotSupportedError where there is none so long."""
    import torch

    decoder, config = model.get_decoder(), model.config.get_text_config()
    lists = (module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList))
    layers = next((found for found in lists if len(found) == config.num_hidden_layers), None)
    if layers is None:
        raise NotSupportedError(
            f"The real code of {config.model_type} has no list of its {config.num_hidden_layers} num_hidden_layers: "
            "its layers are no ordinary ones, which is not traced yet."
        )
    return layers


def _layers(architecture: Architecture) -> list[Layer]:
    """Every layer, in order."""
    return [group.layer for group in architecture.groups for _ in range(group.count)]


def build_model(
    architecture: Architecture,
    run: Run,
    *,
    device: str,
    num_layers: int | None = None,
    recompute_context: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> Any:
    """The model as the Trainer would train it: base, quantization, adapters, checkpointing, train mode.

    On ``meta`` nothing is allocated and 4-bit layers stay unpacked; elsewhere weights are random.
    """
    import torch

    refuse_unreal(run, device=device)
    refuse_family(architecture.model_type, run)
    config = hf_config(architecture, num_layers)
    with torch.device(device):
        choices = {"attn_implementation": attention_choice(architecture, run), "dtype": torch_dtype(loaded_dtype(run))}
        try:
            model = language_model(config, tied=architecture.tie_word_embeddings, **choices)
        except ImportError as error:
            raise InputError(
                f"--attn-implementation {run.attn_implementation} was asked for, but transformers cannot run it here: "
                f"{reason_of(error)} Install what it names, or leave the option out."
            ) from error
    if run.base_quantization == "bnb-8bit":
        int8.quantize_linears(model)
    elif run.bnb_4bit_quant_type is not None:
        quantize_linears(model, run)
    if run.quantize_moe_experts:
        experts_4bit.quantize_experts(model, run)
    if run.upcast_non_quantized:
        upcast_non_quantized(model)
    if run.has_adapters:
        model = attach_adapters(model, run)
    if run.gradient_checkpointing:
        enable_checkpointing(model, run, recompute_context)
    model.recompute_context = recompute_context
    model.train()
    return model


def attention_choice(architecture: Architecture, run: Run) -> str | None:
    """The attention to ask transformers for; None lets it choose eager for a family that has no sdpa."""
    told = architecture.settings or architecture.config
    return None if told and run.attn_implementation == "sdpa" else run.attn_implementation


def loaded_dtype(run: Run) -> str:
    """The dtype a checkpoint is read in: that of the computation if PEFT turns it into fp32 later."""
    return run.four_bit_dtype if run.upcast_non_quantized else run.dtype


def upcast_non_quantized(model: Any) -> None:
    """PEFT's preparation of a 4-bit model, its checkpointing left to `enable_checkpointing`."""
    import peft

    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def quantize_linears(model: Any, run: Run) -> None:
    """Replace every linear map but the head by bitsandbytes' 4-bit one, as transformers does (GPT-2's transposed)."""
    import bitsandbytes as bnb
    from transformers.pytorch_utils import Conv1D

    for name in int8.replaced_maps(model):
        old = model.get_submodule(name)
        weight = old.weight.data.t() if type(old) is Conv1D else old.weight.data
        device = weight.device
        options: dict[str, Any] = {"compress_statistics": run.double_quant, "quant_type": run.bnb_4bit_quant_type}
        if run.sharding == "zero3":  # DeepSpeed parts numbers of one kind alone (transformers' docs on bitsandbytes)
            options["quant_storage"] = torch_dtype(run.dtype)
        new = bnb.nn.Linear4bit(
            weight.shape[1],
            weight.shape[0],
            bias=False,
            compute_dtype=torch_dtype(run.four_bit_dtype),
            **options,
            device="meta",
        )
        new.bias = old.bias
        new.weight = bnb.nn.Params4bit(weight, requires_grad=False, **options, module=new)
        if device.type != "meta":
            new.weight = new.weight.to(device)
        model.set_submodule(name, new)
    model.is_loaded_in_4bit = True


def attach_adapters(model: Any, run: Run) -> Any:
    """PEFT's LoRA on the target modules, the base frozen, adapters and modules trained whole in the run's dtypes."""
    import peft

    refuse_routers(model, run)
    config = peft.LoraConfig(
        r=run.lora_r,
        lora_alpha=LORA_ALPHA,
        lora_dropout=run.lora_dropout,
        **_targets(run),
        use_dora=run.use_dora,
        use_rslora=run.use_rslora,
        lora_bias=run.lora_bias,
        modules_to_save=list(run.modules_to_save) or None,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=run.adapter_dtype == "fp32")
    adapter, saved = torch_dtype(run.adapter_dtype), torch_dtype(run.saved_dtype)
    for name, parameter in model.named_parameters():
        wanted = saved if ".modules_to_save." in name else adapter
        if parameter.requires_grad and parameter.dtype != wanted:
            parameter.data = parameter.data.to(wanted)
    return model


def refuse_routers(model: Any, run: Run) -> None:
    """Llama 4's router is a linear map whose forward returns two tensors, on which PEFT's adapters fail."""
    import torch

    for name, module in model.named_modules():
        own = name.rsplit(".", 1)[-1]
        special = isinstance(module, torch.nn.Linear) and type(module).__module__.startswith("transformers.models.")
        if special and own == "router" and own in run.lora_target_modules:
            raise NotSupportedError(
                f"PEFT's adapters fail on {type(module).__name__} (module {own}), which all-linear includes; use "
                "--lora-target-modules q_proj,k_proj,v_proj,o_proj."
            )


def _targets(run: Run) -> dict[str, Any]:
    """Linear maps by name, stacked parameters by their dotted ones: what PEFT makes of names on transformers 5."""
    stacked = on_parameters(run.lora_target_modules)
    targets: dict[str, Any] = {"target_modules": [name for name in run.lora_target_modules if name not in stacked]}
    if stacked:
        fused = {rf".*\.{FUSED_PARAMETER}": FUSED_MAPS * run.lora_r}
        # As large as the rank: PEFT folds such adapters into the weight, and skips a factor of one.
        alphas = fused | {r".*\.down_proj": run.lora_r, r".*\.gate": run.lora_r}
        targets |= {"target_parameters": stacked, "rank_pattern": fused, "alpha_pattern": alphas}
    return targets


def enable_checkpointing(
    model: Any, run: Run, recompute_context: Callable[[], contextlib.AbstractContextManager[None]] | None = None
) -> None:
    """Checkpoint every layer as the Trainer does; frozen embeddings get outputs that need gradients.

    `recompute_context`, if given, is entered around every recomputation.
    """
    options: dict[str, Any] = {"use_reentrant": run.reentrant}
    if recompute_context is not None and not run.reentrant:
        options["context_fn"] = lambda: (contextlib.nullcontext(), recompute_context())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = run.checkpoints_layer(index)
    if run.activation_offloading:
        offload.offload_checkpoints(model, layers, reentrant=run.reentrant)
    if recompute_context is not None and run.reentrant:
        for layer in layers:
            layer._gradient_checkpointing_func = _entering(layer._gradient_checkpointing_func, recompute_context)
    if run.has_adapters:
        model.enable_input_require_grads()


def _entering(checkpoint: Any, context: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    """A reentrant checkpoint that enters the context when it runs its function again, which its backward does without
    asking for a ``context_fn``."""

    def checkpointed(function: Any, *args: Any) -> Any:
        ran = False

        def again(*given: Any) -> Any:
            nonlocal ran
            with context() if ran else contextlib.nullcontext():
                ran = True
                return function(*given)

        return checkpoint(again, *args)

    return checkpointed


def autocast_context(run: Run, device_type: str) -> contextlib.AbstractContextManager[Any]:
    """torch.autocast in the run's compute dtype, or nothing for pure precisions."""
    import torch

    if not run.autocast:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.autocast(device_type, dtype=torch_dtype(run.compute_dtype))
    return context


def trainable_parameters(model: Any) -> list[Any]:
    """Parameters that take gradients, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def embedding_parameters(model: Any) -> list[Any]:
    """Trained tables of ``nn.Embedding`` modules."""
    import torch

    tables = (module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding))
    return [table for table in tables if table.requires_grad]


def make_scaler(run: Run, device_type: str) -> Any | None:
    """The gradient scaler that fp16 autocast trains with, as the Trainer but for `FIRST_SCALE`; None for other
    precisions."""
    import torch

    return torch.amp.GradScaler(device_type, init_scale=FIRST_SCALE) if run.precision == "fp16-autocast" else None


def train_step(
    model: Any,
    batch: dict[str, Any],
    optimizer: Any,
    run: Run,
    *,
    platform: str = "cuda",
    observer: Observer | None = None,
    scaler: Any | None = None,
) -> None:
    """One optimizer step: micro-batches, clipping, update, gradients set to None.

    `observer` is told ``forward``, ``backward`` and ``optimizer`` as each begins. `scaler` comes from
    `make_scaler` and lives as long as the optimizer.
    """
    tell = observer or _ignore
    device_type = batch["input_ids"].device.type
    for _ in range(run.gradient_accumulation_steps):
        tell("forward")
        kept: list[Any] = []
        with autocast_context(run, device_type):
            loss = loss_of(model, batch, run, kept)
        loss = loss / run.gradient_accumulation_steps
        tell("backward")
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward()
        del loss, kept
    tell("optimizer")
    update(trainable_parameters(model), optimizer, platform=platform, scaler=scaler)


def loss_of(model: Any, batch: dict[str, Any], run: Run, kept: list[Any] | None = None) -> Any:
    """The forward pass through the run's loss path; `kept` takes the model's output where the run keeps it."""
    with getattr(model, "saved_in_host_memory", contextlib.nullcontext)():
        return _loss_of(model, batch, run, [] if kept is None else kept)


def _loss_of(model: Any, batch: dict[str, Any], run: Run, kept: list[Any]) -> Any:
    if run.loss_type == "nll":
        output = model(**batch, use_cache=False)
        if run.keeps_outputs:
            kept.append(output)
        losses.see_logits(output, batch["labels"], run)
        return output.loss
    read = {name: value for name, value in batch.items() if name != "labels"}
    hidden = model.get_decoder()(**read, use_cache=False).last_hidden_state
    if run.loss_type in KEPT_CHUNKS:
        return losses.kept_chunks(hidden, batch["labels"], model.get_output_embeddings().weight, run.loss_type)
    context = getattr(model, "recompute_context", None) or contextlib.nullcontext
    return losses.chunked_nll(hidden, batch["labels"], model.get_output_embeddings().weight, context)


def update(params: list[Any], optimizer: Any, *, platform: str = "cuda", scaler: Any | None = None) -> None:
    """Clip by global norm, step, drop the gradients: the optimizer phase of `train_step`."""
    import torch

    if scaler is not None:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(params, MAX_GRAD_NORM, foreach=True if platform == "cuda" else None)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _ignore(_: str) -> None:
    """The observer of a step nobody watches."""
