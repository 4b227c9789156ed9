"""A run beside the same run with one technique changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunecast.model.exposed import EXPOSED
from tunecast.sweep_result import Sweep, Told, chosen_metric, reported
from tunecast.sweeping import Ask, Point, forecast_of, point
from tunecast.unlike_lengths import padding_note

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast
    from tunecast.model.run import Run

ADAPTERS_ONLY = (
    "lora_r", "lora_target_modules", "lora_dropout", "adapter_dtype", "bnb_4bit_quant_type", "double_quant",
    "bnb_4bit_compute_dtype",
    "upcast_non_quantized", "use_dora", "use_rslora", "modules_to_save", "quant_method",
    "modules_to_save_dtype", "quantize_moe_experts",
)  # fmt: skip


def what_if(ask: Ask, metric: str | None, told: Told | None = None) -> Sweep:
    """The run beside the same run with one technique changed."""
    from tunecast.asking import asked_question

    base = forecast_of(ask, {})
    changes = _techniques(ask, base)
    points = tuple(reported(told, len(changes), (_labelled(ask, base.run, *change) for change in changes)))
    question, _, _ = asked_question(ask.model, gpu=ask.gpu, **ask.options)
    refused = (f"{at.settings['what if']}: {at.why_not}" for at in points if at.forecast is None)
    notes = (*refused, *padding_note(question, base.run))
    return Sweep(kind="what-if", metric_name=chosen_metric(metric, base), base=base, points=points, notes=notes)


def _labelled(ask: Ask, base: Run, label: str, settings: Mapping[str, Any], scales: Mapping[str, float]) -> Point:
    """A technique by its name, with the sharding that it takes where that is another than the run's."""
    found = point(ask, settings, scales)
    own = None if found.forecast is None or "sharding" in settings else found.forecast.run.sharding
    name = label if own in (None, base.sharding) else f"{label}, {own}"
    return Point(settings={"what if": name}, forecast=found.forecast, why_not=found.why_not)


def _techniques(ask: Ask, base: Forecast) -> list[tuple[str, Mapping[str, Any], Mapping[str, float]]]:
    """(label, inputs, factor multiples) of each technique that this run does not use already."""
    run = base.run
    plain: Mapping[str, Any] = {}
    out: list[tuple[str, Mapping[str, Any], Mapping[str, float]]] = [("as asked", plain, plain)]
    if not run.precision.startswith("fp32"):
        out.append(("fp32 instead of 16 bits", {"precision": "fp32", "dtype": "fp32"}, plain))
    out += [
        _other_checkpointing(run),
        *((f"{method} instead of {run.method}", _method(ask, method), plain)
          for method in ("lora", "qlora", "full") if method != run.method),
        ("8-bit AdamW", {"optim": "adamw_8bit"}, plain),
        ("chunked loss", {"loss_type": "chunked_nll"}, plain),
        ("twice the micro-batch", {"per_device_train_batch_size": run.per_device_train_batch_size * 2}, plain),
        ("4 x accumulation", {"gradient_accumulation_steps": run.gradient_accumulation_steps * 4}, plain),
    ]  # fmt: skip
    gpus = max(run.num_gpus, 8)
    for sharding in ("ddp", "zero1", "zero2", "zero3", "fsdp"):
        out.append((f"{gpus} GPUs, {sharding}", {"num_gpus": gpus, "sharding": sharding}, plain))
    out.append((f"{gpus} GPUs, fsdp, communication hidden (YaFSDP's aim)",
                {"num_gpus": gpus, "sharding": "fsdp"}, {EXPOSED: 0.0}))  # fmt: skip
    return out


def _other_checkpointing(run: Run) -> tuple[str, Mapping[str, Any], Mapping[str, float]]:
    """Checkpoints taken away, or added: in place of attention that is recomputed alone, where that is asked for."""
    from tunecast.model.fitting import checkpoints

    if run.gradient_checkpointing:
        return "no activation checkpointing", {"gradient_checkpointing": False}, {}
    instead = " instead of attention's" if run.recompute_attention else ""
    return f"activation checkpointing{instead}", checkpoints(run), {}


def _method(ask: Ask, method: str) -> dict[str, Any]:
    """Another method, without the options that only the old one takes."""
    dropped = {name: None for name in ADAPTERS_ONLY if ask.options.get(name) is not None} if method != "qlora" else {}
    return {**dropped, "method": method}
